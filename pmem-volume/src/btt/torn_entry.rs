//! Torn map entries, which can occur when a VMM is killed.
//!
//! Linux 6.1 stores the map entry of an odd sector with a memcpy() of four bytes, because its
//! address is not a multiple of eight (arch/x86/lib/usercopy_64.c, __memcpy_flushcache). On many
//! CPUs, memcpy() is `rep movsb` (arch/x86/lib/memcpy_64.S). An interrupt may occur between any two
//! of the bytes. If the VMM is killed during that interrupt, the first bytes belong to the new
//! entry, and the rest belong to the old one. One of 390 kills of emulated guests left such an
//! entry.
//!
//! Recovery in Linux checks if the map contains the old entry (drivers/nvdimm/btt.c,
//! btt_freelist_init). A torn entry is neither the old nor the new one, so Linux does not correct
//! it. The sector then shares a block with another sector, and data written to one of them appears
//! in the other. The flog still contains the intended entry, because the second half of its own
//! entry was stored earlier. Therefore, a torn entry is redone like an old one.
//!
//! An entry that only looks torn must not be changed. The lane's newest write may be old, and
//! another lane may have given the sector a different block since. Such a block has only this
//! owner. In contrast, the block that a torn entry names has a second owner or does not exist,
//! because each block is named exactly once.

use super::arena::ArenaInfo;
use super::check::Finding;
use super::flog::{Recovery, decode_map};
use super::layout::{MAP_BLOCK, MAP_ERROR, MAP_ZERO};
use super::map_reader::MapReader;
use crate::media::Media;

/// Map entry that may be torn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Suspect {
    /// Sector of the entry.
    pub(super) sector: u32,
    /// Block that the entry names. If the entry is torn, this block is arbitrary.
    pub(super) mapped_block: u32,
    /// Block that the entry was meant to name.
    pub(super) new: u32,
}

/// Returns true if `entry` can result from an interrupted store. The store replaces block `old`
/// with block `new` in the map entry of a sector. A complete old or new entry is not torn.
pub(super) fn looks_torn(entry: u32, old: u32, new: u32) -> bool {
    let after = new | MAP_ERROR | MAP_ZERO;
    let before = [MAP_ERROR | MAP_ZERO, MAP_ERROR, MAP_ZERO].map(|kind| old | kind);
    // Entries are little-endian, so their low bytes are stored first.
    let is_torn = |before: u32| {
        [0xff, 0xffff, 0xff_ffff].iter().any(|stored| entry == after & stored | before & !stored)
    };
    ![old, new].contains(&(entry & MAP_BLOCK)) && before.into_iter().any(is_torn)
}

/// Adds a suspect to the redo of a recovery if another sector or lane also names its block, or if
/// the block is out of range. If this cannot be determined because the map is unreadable, the
/// suspect is doubtful.
pub(super) fn redo_torn(
    space: &impl Media,
    arena: &ArenaInfo,
    suspects: Vec<Suspect>,
    recovery: &mut Recovery,
) {
    let Recovery { redo, free, unresolved, findings, .. } = recovery;
    let (mut torn, mut undecided): (Vec<Suspect>, Vec<Suspect>) =
        suspects.into_iter().partition(|suspect| {
            suspect.mapped_block >= arena.blocks
                || free.iter().any(|(block, _)| *block == suspect.mapped_block)
        });
    let mut reader = MapReader::new(space, arena, 0..arena.sectors);
    // An unreadable entry may name the block of any suspect.
    let mut is_map_readable = unresolved.is_empty();
    while is_map_readable
        && !undecided.is_empty()
        && let Some(piece) = reader.read_next()
    {
        let piece = match piece {
            Ok(piece) => piece,
            Err(error) => {
                findings.push(Finding::MapUnreadable(foreshore_types::chain(&error)));
                is_map_readable = false;
                break;
            }
        };
        for (sector, entry) in piece.iter() {
            let entry = decode_map(sector, entry);
            let block = redo.get(&sector).copied().unwrap_or(entry.block);
            if let Some(at) = undecided
                .iter()
                .position(|entry| entry.mapped_block == block && entry.sector != sector)
            {
                torn.push(undecided.swap_remove(at));
            }
        }
    }
    redo.extend(torn.into_iter().map(|torn| (torn.sector, torn.new)));
    if !is_map_readable {
        unresolved.extend(undecided.into_iter().map(|entry| entry.sector));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WRITTEN: u32 = MAP_ERROR | MAP_ZERO;

    #[test]
    fn torn_entry_has_new_first_bytes_and_old_last_ones() {
        // Observed case: block 319 replaced block 1150, and the store was interrupted after one
        // byte.
        assert!(looks_torn(WRITTEN | 0x43f, 0x47e, 0x13f));
        assert!(!looks_torn(WRITTEN | 0x17e, 0x47e, 0x13f), "the last bytes first");
        assert!(!looks_torn(WRITTEN | 0x43e, 0x47e, 0x13f));
        // The sector had been discarded or marked as failed before.
        assert!(looks_torn(MAP_ZERO | 0x1_0203, 0x1_aabb, 0x2_0203));
        assert!(looks_torn(MAP_ERROR | 0x1_0203, 0x1_aabb, 0x2_0203));
    }

    proptest! {
        #[test]
        fn entry_torn_after_any_byte_is_detected(
            old in 0..MAP_BLOCK, new in 0..MAP_BLOCK, stored in 1usize..4, kind in 0usize..3
        ) {
            let kind = [WRITTEN, MAP_ZERO, MAP_ERROR][kind];
            let mut torn = (old | kind).to_le_bytes();
            torn[..stored].copy_from_slice(&(new | WRITTEN).to_le_bytes()[..stored]);
            let entry = u32::from_le_bytes(torn);
            let is_whole = [old, new].contains(&(entry & MAP_BLOCK));
            prop_assert_eq!(looks_torn(entry, old, new), !is_whole);
        }

        #[test]
        fn entry_without_the_first_new_byte_is_not_torn(entry: u32, old in 0..MAP_BLOCK, new in 0..MAP_BLOCK) {
            prop_assume!(entry & 0xff != new & 0xff);
            prop_assert!(!looks_torn(entry, old, new));
        }
    }

    #[test]
    fn old_or_new_entry_is_not_torn() {
        for kind in [WRITTEN, MAP_ZERO, MAP_ERROR] {
            for block in [0x47e, 0x13f] {
                assert!(!looks_torn(kind | block, 0x47e, 0x13f));
            }
        }
        // The blocks have the same first bytes, so the first stored bytes change nothing.
        assert!(!looks_torn(WRITTEN | 0x0100, 0x0100, 0x0200));
    }
}
