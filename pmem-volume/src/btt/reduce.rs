//! Removal of arenas without data from the end of a BTT.
//!
//! The remaining arenas do not change, except for `nextoff` and the checksum in both info blocks of
//! the last one. Their sectors keep their numbers.

use zerocopy::{FromZeros, IntoBytes};

use super::arena::{ArenaInfo, InfoSource};
use super::arena_walk::arenas;
use super::content::arena_holds_data;
use super::error::BttError;
use super::extend::next_words;
use super::layout::{INFO_BYTES, InfoBytes};
use crate::CHUNK_BYTES;
use crate::media::Media;

/// Plans to remove the arenas of the volume `space` that do not fit into `size_bytes`. They must
/// not have data, and all info blocks must be intact and without holes. Returns the words that
/// unlink them, with their offsets in the volume. They must become durable together with the new
/// size.
pub fn reduce(space: &impl Media, size_bytes: u64) -> Result<Vec<(u64, u64)>, BttError> {
    let mut infos = Vec::new();
    for (arena, result) in arenas(space).into_iter().enumerate() {
        let damaged = |reason| Err(BttError::Damaged { arena, reason });
        match result {
            Err(missing) => return damaged(missing.reason.to_string()),
            Ok((_, source)) if source != InfoSource::Both => {
                return damaged("one info block is not intact".to_owned());
            }
            Ok((info, _)) if info.has_error => return damaged("its error flag is set".to_owned()),
            Ok((info, _)) => infos.push(info),
        }
    }
    let mut kept = infos.len();
    while kept > 1 && !arena_holds_data(space, &infos[kept - 1]).map_err(BttError::Media)? {
        kept -= 1;
    }
    let least_bytes = end_of(&infos[kept - 1]).next_multiple_of(CHUNK_BYTES);
    if size_bytes < least_bytes {
        return Err(BttError::TooMuchShrink { size_bytes, least_bytes });
    }
    let fitting = infos.iter().take_while(|info| end_of(info) <= size_bytes).count();
    let last = &infos[fitting - 1];
    let mut block = InfoBytes::new_zeroed();
    space.read(last.start_bytes, block.as_mut_bytes()).map_err(BttError::Media)?;
    let words = next_words(&block, last.start_bytes, 0);
    for (at, _) in &words {
        // An info block of another program may span two chunks, and the second may be a hole if the
        // checksum is zero.
        if space.next_data(*at..at + 8).map_err(BttError::Media)?.is_none() {
            let reason = "its checksum is in a hole".to_owned();
            return Err(BttError::Damaged { arena: fitting - 1, reason });
        }
    }
    Ok(words)
}

/// Returns the end of an arena itself, without the space up to the next one.
fn end_of(info: &ArenaInfo) -> u64 {
    info.copy_at + INFO_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::btt::{Engine, Layout, MIN_VOLUME_BYTES, extend};
    use crate::media::MemoryMedia;

    const OLD: u64 = 20 << 20;
    const NEW: u64 = 60 << 20;

    /// Creates a BTT with three arenas, and returns it with the number of sectors of each prefix.
    fn grown() -> (MemoryMedia, Vec<u64>) {
        let media = MemoryMedia::new(NEW);
        Layout::new(OLD, 4096, uuid::Uuid::from_u128(3)).unwrap().format(&media).unwrap();
        let mut sectors = vec![Engine::open(&media).unwrap().sectors()];
        for (from, to) in [(OLD, 2 * OLD), (2 * OLD, NEW)] {
            let extension = extend(&Prefix(&media, from), to).unwrap();
            extension.format(&media).unwrap();
            for (at, word) in extension.link_words() {
                media.store_word(at, word).unwrap();
            }
            sectors.push(Engine::open(&media).unwrap().sectors());
        }
        (media, sectors)
    }

    /// First part of media.
    struct Prefix<'a>(&'a MemoryMedia, u64);

    impl Media for Prefix<'_> {
        fn len_bytes(&self) -> u64 {
            self.1
        }

        fn durability(&self) -> crate::media::Durability {
            self.0.durability()
        }

        fn read(&self, at: u64, into: &mut [u8]) -> Result<(), crate::media::MediaError> {
            self.0.read(at, into)
        }

        fn load_word(&self, at: u64) -> Result<u64, crate::media::MediaError> {
            self.0.load_word(at)
        }
    }

    #[test]
    fn arenas_without_data_are_removed_and_sectors_keep_their_numbers() {
        for (size_bytes, kept) in [(OLD, 1), (2 * OLD, 2), (NEW - CHUNK_BYTES, 2)] {
            let (media, sectors) = grown();
            Engine::open(&media).unwrap().write(sectors[0] - 1, &[7; 4096]).unwrap();
            for (at, word) in reduce(&media, size_bytes).unwrap() {
                media.store_word(at, word).unwrap();
            }
            let reduced = Prefix(&media, size_bytes);
            assert!(crate::btt::check(&reduced).is_clean());
            let reader = crate::btt::Reader::open(&reduced).unwrap();
            assert_eq!(reader.sectors(), sectors[kept - 1]);
            let mut data = [0; 4096];
            reader.read(sectors[0] - 1, &mut data).unwrap();
            assert_eq!(data, [7; 4096]);
        }
    }

    #[test]
    fn arena_with_data_and_those_before_it_stay() {
        let (media, sectors) = grown();
        let least = |size_bytes| match reduce(&media, size_bytes) {
            Err(BttError::TooMuchShrink { least_bytes, .. }) => least_bytes,
            other => panic!("{other:?}"),
        };
        assert_eq!(least(MIN_VOLUME_BYTES - CHUNK_BYTES), OLD);
        let engine = Engine::open(&media).unwrap();
        engine.write(sectors[0], &[7; 4096]).unwrap();
        assert_eq!((least(OLD), least(2 * OLD - CHUNK_BYTES)), (2 * OLD, 2 * OLD));
        engine.write(sectors[2] - 1, &[7; 4096]).unwrap();
        assert_eq!(least(2 * OLD), NEW);
        engine.discard(sectors[0]..sectors[2]).unwrap();
        reduce(&media, OLD).unwrap();
    }
}
