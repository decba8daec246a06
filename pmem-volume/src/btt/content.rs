//! Content and usable size of a BTT.

use super::arena_walk::arenas;
use super::flog::{MapKind, decode_map, recover};
use super::layout::MAP_ENTRY_BYTES;
use crate::media::{Media, MediaError};

/// Number of bytes of the map that are read at a time.
const PIECE_BYTES: u64 = 256 << 10;

/// Returns true if a sector may contain nonzero bytes. Sectors that were never written or were
/// discarded contain none. A damaged arena may contain data.
pub fn holds_data(space: &impl Media) -> Result<bool, MediaError> {
    for arena in arenas(space) {
        let Ok((info, _)) = arena else { return Ok(true) };
        let recovery = recover(space, &info);
        if !recovery.findings.is_empty() || !recovery.redo.is_empty() {
            return Ok(true);
        }
        let end = info.map_at + u64::from(info.sectors) * MAP_ENTRY_BYTES;
        let mut bytes = vec![0; PIECE_BYTES.min(end - info.map_at) as usize];
        let mut next = info.map_at;
        // Map entries in a hole were never written.
        while let Some(data) = space.next_data(next..end)? {
            let at = data.start / MAP_ENTRY_BYTES * MAP_ENTRY_BYTES;
            let piece = &mut bytes[..(end - at).min(PIECE_BYTES) as usize];
            next = at + piece.len() as u64;
            space.read(at, piece)?;
            let (entries, _) = piece.as_chunks::<4>();
            let is_written = |entry: &[u8; 4]| {
                let entry = u32::from_le_bytes(*entry);
                entry != 0 && decode_map(0, entry).kind != MapKind::Zeros
            };
            if entries.iter().any(is_written) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Returns the total size of all sectors. Returns `None` if the number of sectors is unknown
/// because an arena is damaged.
pub fn usable_bytes(space: &impl Media) -> Option<u64> {
    let arenas = arenas(space);
    let sector_bytes = arenas.first()?.as_ref().ok()?.0.sector_bytes;
    let sectors = arenas.iter().map(|arena| match arena {
        Ok((info, _)) => Some(u64::from(info.sectors)),
        Err(missing) => missing.sectors(sector_bytes),
    });
    Some(sectors.sum::<Option<u64>>()? * u64::from(sector_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::btt::{Engine, Layout};
    use crate::media::MemoryMedia;

    #[test]
    fn discarded_sectors_have_no_data() {
        const SIZE: u64 = 18 << 20;
        let media = MemoryMedia::new(SIZE);
        assert!(holds_data(&media).unwrap(), "the content is unknown");
        Layout::new(SIZE, 4096, uuid::Uuid::from_u128(3)).unwrap().format(&media).unwrap();
        assert!(!holds_data(&media).unwrap());
        let engine = Engine::open(&media).unwrap();
        let last = engine.sectors() - 1;
        engine.write(last, &[7; 4096]).unwrap();
        assert!(holds_data(&media).unwrap());
        engine.discard(last..last + 1).unwrap();
        assert!(!holds_data(&media).unwrap());
    }
}
