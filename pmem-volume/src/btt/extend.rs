//! Growth of a BTT by additional arenas after the last one.
//!
//! Existing arenas remain unchanged, byte for byte, except for `nextoff` and the checksum in both
//! info blocks of the last one. Linux follows `nextoff` (drivers/nvdimm/btt.c, discover_arenas) and
//! adds up the sectors of the arenas. Existing sectors therefore keep their numbers.

use zerocopy::{FromZeros, IntoBytes};

use super::arena::{InfoError, InfoSource, read_arena};
use super::engine::MAX_ARENAS;
use super::error::BttError;
use super::layout::{
    ARENA_MAX_BYTES, ARENA_MIN_BYTES, ArenaLayout, INFO_BYTES, InfoBytes, PAGE_BYTES, START_BYTES,
    arena_ranges_from, checksum, write_arenas,
};
use crate::CHUNK_BYTES;
use crate::media::{Media, MediaError};

/// Number of zero bytes that are written at a time.
const PIECE_BYTES: u64 = 1 << 20;

/// Plan for additional arenas.
#[derive(Debug)]
pub struct Extension {
    /// Current info block of the last arena, which is the template for new ones.
    last: InfoBytes,
    last_start: u64,
    arenas: Vec<ArenaLayout>,
    /// Current size of the volume.
    old_bytes: u64,
}

/// Plans additional arenas for the volume `space`, which will have `size_bytes`.
pub fn extend(space: &impl Media, size_bytes: u64) -> Result<Extension, BttError> {
    let (mut start, mut number) = (START_BYTES, 0);
    loop {
        let damaged = |reason| Err(BttError::Damaged { arena: number, reason });
        let room = space.len_bytes().saturating_sub(start);
        if room < ARENA_MIN_BYTES {
            return damaged(InfoError::Signature.to_string());
        }
        let info = match read_arena(space, start, room.min(ARENA_MAX_BYTES)) {
            Err(error) => return damaged(error.to_string()),
            Ok((_, source)) if source != InfoSource::Both => {
                return damaged("one info block is not intact".to_owned());
            }
            Ok((info, _)) if info.has_error => return damaged("its error flag is set".to_owned()),
            Ok((info, _)) => info,
        };
        if let Some(next) = info.next_bytes {
            (start, number) = (next, number + 1);
            continue;
        }
        if number + 1 >= MAX_ARENAS {
            return Err(BttError::NoArenaLeft { limit: MAX_ARENAS });
        }
        // Another implementation may have created a small last arena. Even so, the distance to the
        // next arena must not be less than the minimum size.
        let from = info.end_bytes.max(start + ARENA_MIN_BYTES).next_multiple_of(PAGE_BYTES);
        let arenas = arena_ranges_from(from, size_bytes);
        if arenas.is_empty() {
            let least_bytes = (from + ARENA_MIN_BYTES).next_multiple_of(CHUNK_BYTES);
            return Err(BttError::TooLittleGrowth { size_bytes, least_bytes });
        }
        let mut last = InfoBytes::new_zeroed();
        space.read(start, last.as_mut_bytes()).map_err(BttError::Media)?;
        return Ok(Extension {
            arenas: ArenaLayout::all(&arenas, info.sector_bytes),
            last,
            last_start: start,
            old_bytes: space.len_bytes(),
        });
    }
}

impl Extension {
    /// Writes the new arenas durably, without linking them into the BTT. `space` already has the
    /// new size, and its added part reads as zeros.
    pub fn format(&self, space: &impl Media) -> Result<(), MediaError> {
        // The space after the last arena was unused and may contain any data.
        let unused = self.arenas[0].start..self.old_bytes;
        let zeros = vec![0; PIECE_BYTES.min(unused.end.saturating_sub(unused.start)) as usize];
        let mut rest = unused.clone();
        while !rest.is_empty()
            && let Some(data) = space.next_data(rest.clone())?
        {
            for at in data.clone().step_by(PIECE_BYTES as usize) {
                space.store(at, &zeros[..(data.end - at).min(PIECE_BYTES) as usize])?;
            }
            rest.start = data.end;
        }
        if !unused.is_empty() {
            space.persist(std::slice::from_ref(&unused))?;
        }
        write_arenas(space, &self.arenas, &self.last)
    }

    /// Returns the words that link the new arenas into the BTT, with their offsets in the volume.
    /// They must become durable together, because an info block with only some of them is damaged.
    pub fn link_words(&self) -> Vec<(u64, u64)> {
        next_words(&self.last, self.last_start, self.arenas[0].start - self.last_start)
    }
}

/// Returns the words to store in both info blocks of the arena at `start`, so that the next arena
/// begins `next` bytes after it. If `next` is 0, the arena becomes the last one.
pub(super) fn next_words(info: &InfoBytes, start: u64, next: u64) -> Vec<(u64, u64)> {
    let mut linked = info.clone();
    linked.nextoff.set(next);
    let sum = checksum(&linked);
    linked.checksum.set(sum);
    let (old, _) = info.as_bytes().as_chunks::<8>();
    let (new, _) = linked.as_bytes().as_chunks::<8>();
    let changed =
        (0..INFO_BYTES).step_by(8).zip(old.iter().zip(new)).filter(|(_, (old, new))| old != new);
    let words: Vec<_> = changed.map(|(at, (_, new))| (at, u64::from_le_bytes(*new))).collect();
    [start, start + info.info2off.get()]
        .into_iter()
        .flat_map(|block| words.iter().map(move |(at, word)| (block + at, *word)))
        .collect()
}
