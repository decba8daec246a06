//! Content and usable size of a BTT.

use super::arena::ArenaInfo;
use super::arena_walk::arenas;
use super::flog::{MapKind, decode_map, recover};
use super::layout::MAP_ERROR;
use super::map_reader::MapReader;
use crate::media::{Media, MediaError};

/// Returns true if a sector may contain nonzero bytes. Sectors that were never written or were
/// discarded contain none. A damaged arena may contain data.
pub fn holds_data(space: &impl Media) -> Result<bool, MediaError> {
    for arena in arenas(space) {
        let Ok((info, _)) = arena else { return Ok(true) };
        if arena_holds_data(space, &info)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns true if a sector of an arena may contain nonzero bytes.
pub(super) fn arena_holds_data(space: &impl Media, info: &ArenaInfo) -> Result<bool, MediaError> {
    let recovery = recover(space, info);
    if !recovery.findings.is_empty() || !recovery.redo.is_empty() {
        return Ok(true);
    }
    let is_written =
        |(_, entry): (u32, u32)| entry != 0 && decode_map(0, entry).kind != MapKind::Zeros;
    let mut reader = MapReader::new(space, info, 0..info.sectors);
    while let Some(piece) = reader.read_next() {
        let piece = piece?;
        // Map entries in a hole were never written.
        if !piece.is_hole() && piece.iter().any(is_written) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the bytes of all sectors that were written and not discarded since. Another process may
/// change the map meanwhile, which alone is read. `None` if an arena or its map is damaged.
pub fn live_bytes(space: &impl Media) -> Option<u64> {
    let mut bytes = 0;
    for arena in arenas(space) {
        let (info, _) = arena.ok()?;
        let mut reader = MapReader::new(space, &info, 0..info.sectors);
        while let Some(piece) = reader.read_next() {
            let piece = piece.ok()?;
            // Map entries in a hole were never written.
            if !piece.is_hole() {
                let live = piece.iter().filter(|(_, entry)| entry & MAP_ERROR != 0).count();
                bytes += live as u64 * u64::from(info.sector_bytes);
            }
        }
    }
    Some(bytes)
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
