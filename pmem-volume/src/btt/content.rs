//! Check if a BTT has data.

use super::arena_walk::arenas;
use super::flog::{MapKind, decode_map, recover};
use super::layout::MAP_ENTRY_BYTES;
use crate::media::{Media, MediaError};

/// Bytes of the map that are read at once.
const PIECE_BYTES: u64 = 256 << 10;

/// Returns true if a sector may have data other than zeros. Sectors that were never written or were
/// discarded have none. Damaged arenas may have data.
pub fn holds_data(space: &impl Media) -> Result<bool, MediaError> {
    for place in arenas(space) {
        let Ok((info, _)) = place else { return Ok(true) };
        let recovery = recover(space, &info);
        if !recovery.findings.is_empty() || !recovery.redo.is_empty() {
            return Ok(true);
        }
        let end = info.map_at + u64::from(info.sectors) * MAP_ENTRY_BYTES;
        let mut bytes = vec![0; PIECE_BYTES.min(end - info.map_at) as usize];
        for at in (info.map_at..end).step_by(PIECE_BYTES as usize) {
            let piece = &mut bytes[..(end - at).min(PIECE_BYTES) as usize];
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::btt::{Engine, Layout};
    use crate::media::MemoryMedia;

    #[test]
    fn discarded_sectors_have_no_data() {
        const SIZE: u64 = 18 << 20;
        let media = MemoryMedia::new(SIZE);
        assert!(holds_data(&media).unwrap(), "nobody knows what it is");
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
