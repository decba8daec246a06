//! Flog, which records the free block and the last write of each lane.

use std::collections::{BTreeMap, BTreeSet};

use zerocopy::{FromBytes, IntoBytes};

use super::arena::ArenaInfo;
use super::check::Finding;
use super::layout::{
    FLOG_GROUP_BYTES, FlogEntryBytes, FlogGroupBytes, MAP_BLOCK, MAP_ENTRY_BYTES, MAP_ERROR,
    MAP_ZERO,
};
use super::torn_entry::{self, Suspect, looks_torn};
use crate::media::{Media, MediaError};

/// Decoded map entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MapEntry {
    pub(super) block: u32,
    pub(super) kind: MapKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MapKind {
    Data,
    Zeros,
    Error,
}

/// Decodes a map entry. An entry without flags was never written, and refers to the block with the
/// number of the sector.
#[inline]
pub(super) fn decode_map(sector: u32, entry: u32) -> MapEntry {
    let block = entry & MAP_BLOCK;
    match entry & (MAP_ERROR | MAP_ZERO) {
        0 => MapEntry { block: sector, kind: MapKind::Data },
        MAP_ERROR => MapEntry { block, kind: MapKind::Error },
        MAP_ZERO => MapEntry { block, kind: MapKind::Zeros },
        _ => MapEntry { block, kind: MapKind::Data },
    }
}

pub(super) fn read_map(
    space: &impl Media,
    arena: &ArenaInfo,
    sector: u32,
) -> Result<MapEntry, MediaError> {
    Ok(decode_map(sector, read_entry(space, arena, sector)?))
}

fn read_entry(space: &impl Media, arena: &ArenaInfo, sector: u32) -> Result<u32, MediaError> {
    let mut entry = [0; 4];
    space.read(arena.map_at + u64::from(sector) * MAP_ENTRY_BYTES, &mut entry)?;
    Ok(u32::from_le_bytes(entry))
}

/// State of a lane, from which its next write follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Lane {
    /// Number of the lane in the arena.
    pub(super) number: u32,
    /// Free block of the lane.
    pub(super) block: u32,
    /// True if the media of the free block failed while a sector used the block. Data that is
    /// written to it may be lost.
    pub(super) has_failed: bool,
    /// Slot for the lane's next entry, from 0 to 3.
    slot: usize,
    /// Sequence number for the lane's next entry.
    sequence: u32,
    /// Sector of the lane's newest entry. The map entry of this sector may not be durable yet.
    pub(super) sector: u32,
}

impl Lane {
    /// Returns the offset of the lane's next entry. Each half of the entry is a word.
    #[inline]
    pub(super) fn entry_at(&self, arena: &ArenaInfo) -> u64 {
        self.group_at(arena) + (self.slot * size_of::<FlogEntryBytes>()) as u64
    }

    /// Returns the offset of the lane's part of the flog.
    #[inline]
    pub(super) fn group_at(&self, arena: &ArenaInfo) -> u64 {
        arena.flog_at + u64::from(self.number) * FLOG_GROUP_BYTES
    }

    /// Returns both halves of the entry that exchanges the lane's block for `old`, the block of a
    /// sector. `old` has the error flag if its media failed. Storing the second half makes the
    /// entry the lane's newest.
    #[inline]
    pub(super) fn halves(&self, sector: u32, old: u32) -> [u64; 2] {
        let word = |low, high| u64::from(high) << 32 | u64::from(low);
        [word(sector, old), word(self.block, self.sequence)]
    }

    /// Completes the exchange. The lane now owns the old block, in the encoding of
    /// [`Lane::halves`].
    #[inline]
    pub(super) fn advance(&mut self, second_slot: usize, sector: u32, old: u32) {
        self.block = old & MAP_BLOCK;
        self.has_failed = old & MAP_ERROR != 0;
        self.sector = sector;
        self.slot = if self.slot == 0 { second_slot } else { 0 };
        self.sequence = self.sequence % 3 + 1;
    }
}

/// Result of a recovery that is performed in memory.
#[derive(Debug, Default)]
pub(super) struct Recovery {
    /// Free block and number of each lane.
    pub(super) free: Vec<(u32, u32)>,
    /// Second slot that the flog uses in addition to slot 0.
    pub(super) second_slot: usize,
    /// Lanes whose entries are valid.
    pub(super) lanes: Vec<Lane>,
    /// Sectors whose map entries a crash prevented from being completely written, with their new
    /// blocks.
    pub(super) redo: BTreeMap<u32, u32>,
    /// Sectors whose last write is unknown because a part of the map cannot be read. Their entries
    /// in the map and in `redo` are ignored.
    pub(super) unresolved: BTreeSet<u32>,
    /// Sectors of the lanes' newest entries, with their blocks in the map.
    mapped: Vec<(u32, u32)>,
    /// Defects of the flog and the map.
    pub(super) findings: Vec<Finding>,
}

/// Reads the whole flog and determines the state of each lane. Media errors become findings.
pub(super) fn recover(space: &impl Media, arena: &ArenaInfo) -> Recovery {
    let mut recovery = Recovery::default();
    let mut bytes = vec![0; (u64::from(arena.lanes) * FLOG_GROUP_BYTES) as usize];
    if let Err(error) = space.read(arena.flog_at, &mut bytes) {
        recovery.findings.push(Finding::FlogUnreadable(foreshore_types::chain(&error)));
        return recovery;
    }
    let groups =
        <[FlogGroupBytes]>::ref_from_bytes(&bytes).expect("whole groups, which need no alignment");
    let Some(second) = second_slot(groups) else {
        recovery.findings.push(Finding::FlogPadding);
        return recovery;
    };
    recovery.second_slot = second;
    let mut suspects: Vec<Suspect> = Vec::new();
    for (lane, group) in groups.iter().enumerate() {
        let lane = lane as u32;
        let pair = [&group.entries[0], &group.entries[second]];
        let Some(newest) = newest(pair) else {
            let [a, b] = pair.map(|entry| entry.sequence.get());
            recovery.findings.push(Finding::FlogSequence { lane, sequences: [a, b] });
            continue;
        };
        let next_slot = if newest == 0 { second } else { 0 };
        suspects.extend(recovery.replay(space, arena, lane, pair[newest], next_slot));
    }
    // If the complete old entry of another lane's newest write is still in the map, it is not torn.
    suspects.retain(|suspect| !recovery.redo.contains_key(&suspect.sector));
    if !suspects.is_empty() {
        torn_entry::redo_torn(space, arena, suspects, &mut recovery);
    }
    recovery
}

impl Recovery {
    /// Replays the newest entry of a lane. The lane's free block is the one that its last write
    /// replaced. If the map still names that block, a crash prevented the store to the map. If the
    /// map names neither the old nor the new block, the entry may be torn and is returned as a
    /// suspect.
    fn replay(
        &mut self,
        space: &impl Media,
        arena: &ArenaInfo,
        lane: u32,
        entry: &FlogEntryBytes,
        next_slot: usize,
    ) -> Option<Suspect> {
        let (sector, old, new) =
            (entry.lba.get(), entry.old_map.get() & MAP_BLOCK, entry.new_map.get() & MAP_BLOCK);
        let bounds = [
            ("lba", sector, arena.sectors),
            ("old_map", old, arena.blocks),
            ("new_map", new, arena.blocks),
        ];
        for (field, value, bound) in bounds {
            if value >= bound {
                self.findings.push(Finding::FlogRange { lane, field, value, bound });
                return None;
            }
        }
        self.free.push((old, lane));
        let sequence = entry.sequence.get() % 3 + 1;
        let has_failed = entry.old_map.get() & MAP_ERROR != 0;
        self.lanes.push(Lane {
            number: lane,
            block: old,
            has_failed,
            slot: next_slot,
            sequence,
            sector,
        });
        let entry = match read_entry(space, arena, sector) {
            Ok(entry) => entry,
            // The lane has not written anything yet, so the last write of the sector is not in
            // doubt.
            Err(_) if old == new => return None,
            Err(error) => {
                // A single lost page of the map may contain the entries of all lanes.
                if self.unresolved.is_empty() {
                    let reason = foreshore_types::chain(&error);
                    self.findings.push(Finding::EntryUnreadable { sector, reason });
                }
                self.unresolved.insert(sector);
                return None;
            }
        };
        let mapped_block = decode_map(sector, entry).block;
        self.mapped.push((sector, mapped_block));
        if old != new && mapped_block == old {
            self.redo.insert(sector, new);
        }
        looks_torn(entry, old, new).then_some(Suspect { sector, mapped_block, new })
    }

    /// Returns the sectors whose map entries are ignored, with the blocks that recovery assigns to
    /// them. `None` means that the block is unknown.
    pub(super) fn pending(&self) -> BTreeMap<u32, Option<u32>> {
        let redone = self.redo.iter().map(|(sector, block)| (*sector, Some(*block)));
        redone.chain(self.unresolved.iter().map(|sector| (*sector, None))).collect()
    }

    /// Finds a block that has two owners after recovery. Only the lanes' blocks and the map entries
    /// that the lanes changed last are compared, because reading the whole map would take long.
    pub(super) fn block_with_two_owners(&self) -> Option<Finding> {
        let mut free = BTreeSet::new();
        for (block, lane) in &self.free {
            if !free.insert(*block) {
                let by = format!("lane {lane} of the flog");
                return Some(Finding::BlockTwice { block: *block, by });
            }
        }
        let resolved = self.mapped.iter().filter(|(sector, _)| !self.unresolved.contains(sector));
        for (sector, block) in resolved {
            let block = *self.redo.get(sector).unwrap_or(block);
            if free.contains(&block) {
                return Some(Finding::BlockTwice { block, by: format!("sector L{sector}") });
            }
        }
        None
    }
}

/// Returns the second slot in use: 1, or 2 as in Linux before 4.15. Unused slots are zero. Returns
/// 1 if no lane has written twice, and `None` if neither layout matches.
pub(super) fn second_slot(groups: &[FlogGroupBytes]) -> Option<usize> {
    let is_used =
        |slot: usize| groups.iter().any(|g| g.entries[slot].as_bytes().iter().any(|b| *b != 0));
    match [is_used(1), is_used(2), is_used(3)] {
        [_, false, false] => Some(1),
        [false, true, false] => Some(2),
        _ => None,
    }
}

/// Returns the index of the newer of two entries. Sequence numbers cycle through 1, 2 and 3, and 0
/// marks a slot that was never written. Returns `None` for impossible numbers.
pub(super) fn newest(pair: [&FlogEntryBytes; 2]) -> Option<usize> {
    match pair.map(|entry| entry.sequence.get()) {
        [1, 0] | [2, 1] | [3, 2] | [1, 3] => Some(0),
        [1, 2] | [2, 3] | [3, 1] => Some(1),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;

    fn entry(sequence: u32) -> FlogEntryBytes {
        let mut entry = FlogEntryBytes::new_zeroed();
        entry.lba.set(7);
        entry.sequence.set(sequence);
        entry
    }

    #[test]
    fn newer_entry_follows_the_other_in_the_cycle() {
        for a in 0..5 {
            for b in 0..5 {
                let (first, second) = (entry(a), entry(b));
                let winner = newest([&first, &second]);
                let follows =
                    |x: u32, y: u32| (1..=3).contains(&x) && (1..=3).contains(&y) && y == x % 3 + 1;
                let expected = if (a, b) == (1, 0) || follows(b, a) {
                    Some(0)
                } else if follows(a, b) {
                    Some(1)
                } else {
                    None
                };
                assert_eq!(winner, expected, "sequences {a} and {b}");
            }
        }
    }

    #[test]
    fn both_paddings_are_recognized() {
        let group = |used: &[usize]| {
            let mut group = FlogGroupBytes::new_zeroed();
            used.iter().for_each(|slot| group.entries[*slot] = entry(1));
            group
        };
        assert_eq!(second_slot(&[group(&[0]), group(&[0])]), Some(1));
        assert_eq!(second_slot(&[group(&[0]), group(&[0, 1])]), Some(1));
        assert_eq!(second_slot(&[group(&[0, 2]), group(&[0])]), Some(2));
        assert_eq!(second_slot(&[group(&[0, 2]), group(&[0, 1])]), None);
        assert_eq!(second_slot(&[group(&[0, 3])]), None);
    }

    #[test]
    fn block_of_unresolved_sector_is_not_reported_as_shared() {
        let mut recovery =
            Recovery { free: vec![(1, 0), (2, 1)], mapped: vec![(7, 1)], ..Recovery::default() };
        let by = "sector L7".to_owned();
        assert_eq!(recovery.block_with_two_owners(), Some(Finding::BlockTwice { block: 1, by }));
        // Recovery could read the entry for this lane, but not for a newer write of another lane.
        recovery.unresolved.insert(7);
        assert_eq!(recovery.block_with_two_owners(), None);
    }

    #[test]
    fn map_entries_have_four_kinds() {
        assert_eq!(decode_map(5, 0), MapEntry { block: 5, kind: MapKind::Data });
        assert_eq!(
            decode_map(5, MAP_ERROR | MAP_ZERO | 9),
            MapEntry { block: 9, kind: MapKind::Data }
        );
        assert_eq!(decode_map(5, MAP_ZERO | 9), MapEntry { block: 9, kind: MapKind::Zeros });
        assert_eq!(decode_map(5, MAP_ERROR | 9), MapEntry { block: 9, kind: MapKind::Error });
    }
}
