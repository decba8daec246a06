//! Survey of a damaged arena, which determines the owners of all blocks.

use std::collections::BTreeMap;

use zerocopy::{FromBytes, IntoBytes};

use super::super::arena::ArenaInfo;
use super::super::check::{BlockSet, Finding};
use super::super::flog::{MapKind, decode_map, newest, read_map, recover, second_slot};
use super::super::layout::{FLOG_GROUP_BYTES, FlogGroupBytes, MAP_BLOCK};
use super::super::map_reader::MapReader;
use crate::media::{Media, MediaError};

/// Maximum number of defects in an arena that are repaired. If there are more, a part of the map is
/// lost or the volume is crafted. The limit also bounds the memory use of the repair.
const MAX_FIXES: usize = 1 << 16;

/// Owners of a block with more than one owner.
#[derive(Debug, Default)]
pub(super) struct Owners {
    pub(super) sectors: Vec<u32>,
    pub(super) lanes: Vec<u32>,
}

#[derive(Debug, Default)]
pub(super) struct Lane {
    /// Free block of the lane, or `None` if its entries are impossible.
    pub(super) free: Option<u32>,
    /// Sector whose map entry a crash prevented from being written, with its new block.
    pub(super) redo: Option<(u32, u32)>,
    /// Blocks that the entries of the lane name.
    pub(super) hints: Vec<u32>,
}

/// State of an arena as it would be after recovery.
#[derive(Debug)]
pub(super) struct Survey {
    pub(super) lanes: Vec<Lane>,
    /// Sectors that are mapped to a block out of range, with their map entries.
    pub(super) out_of_range: Vec<(u32, u32)>,
    /// Blocks that have more than one owner.
    pub(super) shared: BTreeMap<u32, Owners>,
    /// Blocks without an owner, up to a maximum number.
    pub(super) unreferenced: Vec<u32>,
    /// Number of sectors that are already marked as lost.
    pub(super) error_sectors: u32,
}

/// Surveys an arena. Returns `None` if it has too much damage for a repair, or if recovery could
/// not read the flog or the map. In the latter case, a block without a known owner may belong to a
/// sector.
pub(super) fn survey(space: &impl Media, info: &ArenaInfo) -> Result<Option<Survey>, MediaError> {
    let recovery = recover(space, info);
    if recovery.findings.iter().any(Finding::is_unreadable) {
        return Ok(None);
    }
    let lanes = survey_flog(space, info, &recovery.redo)?;
    let redo: BTreeMap<_, _> = lanes.iter().filter_map(|lane| lane.redo).collect();
    let mut survey = Survey {
        lanes,
        out_of_range: vec![],
        shared: BTreeMap::new(),
        unreferenced: vec![],
        error_sectors: 0,
    };
    let mut referenced = BlockSet::new(info.blocks);
    for_each_entry(space, info, |sector, entry| {
        let decoded = decode_map(sector, entry);
        let redone = redo.get(&sector).copied();
        survey.error_sectors += u32::from(redone.is_none() && decoded.kind == MapKind::Error);
        match redone.unwrap_or(decoded.block) {
            block if block >= info.blocks => survey.out_of_range.push((sector, entry)),
            block if referenced.insert(block) => {}
            block => drop(survey.shared.entry(block).or_default()),
        }
        survey.out_of_range.len() + survey.shared.len() <= MAX_FIXES
    })?;
    for block in survey.lanes.iter().filter_map(|lane| lane.free) {
        if !referenced.insert(block) {
            survey.shared.entry(block).or_default();
        }
    }
    survey.unreferenced = referenced.iter_missing().take(MAX_FIXES + 1).collect();
    if survey.out_of_range.len() + survey.shared.len() > MAX_FIXES
        || survey.unreferenced.len() > MAX_FIXES
    {
        return Ok(None);
    }
    survey.find_owners(space, info, &redo)?;
    Ok(Some(survey))
}

impl Survey {
    /// Finds the owners of shared blocks in a second pass over the map. The first pass only
    /// determines which blocks are shared.
    fn find_owners(
        &mut self,
        space: &impl Media,
        info: &ArenaInfo,
        redo: &BTreeMap<u32, u32>,
    ) -> Result<(), MediaError> {
        if self.shared.is_empty() {
            return Ok(());
        }
        for (lane, found) in (0..).zip(&self.lanes) {
            if let Some(owners) = found.free.and_then(|block| self.shared.get_mut(&block)) {
                owners.lanes.push(lane);
            }
        }
        for_each_entry(space, info, |sector, entry| {
            let block = redo.get(&sector).copied().unwrap_or(decode_map(sector, entry).block);
            if let Some(owners) = self.shared.get_mut(&block) {
                owners.sectors.push(sector);
            }
            true
        })
    }
}

/// Calls `visit` with the map entry of each sector until it returns false.
fn for_each_entry(
    space: &impl Media,
    info: &ArenaInfo,
    mut visit: impl FnMut(u32, u32) -> bool,
) -> Result<(), MediaError> {
    let mut reader = MapReader::new(space, info, 0..info.sectors);
    while let Some(piece) = reader.read_next() {
        if !piece?.iter().all(|(sector, entry)| visit(sector, entry)) {
            return Ok(());
        }
    }
    Ok(())
}

/// Surveys the lanes. A write is also pending if `redo` contains the sector because of a torn map
/// entry.
fn survey_flog(
    space: &impl Media,
    info: &ArenaInfo,
    redo: &BTreeMap<u32, u32>,
) -> Result<Vec<Lane>, MediaError> {
    let mut bytes = vec![0; (u64::from(info.lanes) * FLOG_GROUP_BYTES) as usize];
    space.read(info.flog_at, &mut bytes)?;
    let groups =
        <[FlogGroupBytes]>::ref_from_bytes(&bytes).expect("whole groups, which need no alignment");
    let second = likely_second_slot(groups);
    groups.iter().map(|group| survey_lane(space, info, group, second, redo)).collect()
}

fn survey_lane(
    space: &impl Media,
    info: &ArenaInfo,
    group: &FlogGroupBytes,
    second: Option<usize>,
    redo: &BTreeMap<u32, u32>,
) -> Result<Lane, MediaError> {
    let damaged = Lane { free: None, redo: None, hints: hints(group) };
    let Some(second) = second.filter(|second| is_padded(group, *second)) else {
        return Ok(damaged);
    };
    let pair = [&group.entries[0], &group.entries[second]];
    let Some(entry) = newest(pair).map(|newest| pair[newest]) else { return Ok(damaged) };
    let (sector, old, new) =
        (entry.lba.get(), entry.old_map.get() & MAP_BLOCK, entry.new_map.get() & MAP_BLOCK);
    if sector >= info.sectors || old >= info.blocks || new >= info.blocks {
        return Ok(damaged);
    }
    let is_pending = old != new
        && (redo.get(&sector) == Some(&new) || read_map(space, info, sector)?.block == old);
    Ok(Lane { free: Some(old), redo: is_pending.then_some((sector, new)), ..damaged })
}

fn hints(group: &FlogGroupBytes) -> Vec<u32> {
    let used = group.entries.iter().filter(|entry| entry.as_bytes().iter().any(|byte| *byte != 0));
    used.flat_map(|entry| [entry.old_map, entry.new_map])
        .map(|block| block.get() & MAP_BLOCK)
        .collect()
}

/// Returns the second slot in use. If lanes disagree, the majority decides. Without a majority,
/// returns `None`.
fn likely_second_slot(groups: &[FlogGroupBytes]) -> Option<usize> {
    if let Some(second) = second_slot(groups) {
        return Some(second);
    }
    let fitting = |second| groups.iter().filter(|group| is_padded(group, second)).count();
    let second = if fitting(2) > fitting(1) { 2 } else { 1 };
    (fitting(second) > groups.len() / 2).then_some(second)
}

/// Checks that unused slots are zero.
fn is_padded(group: &FlogGroupBytes, second: usize) -> bool {
    let unused = [1, 2, 3].into_iter().filter(|slot| *slot != second);
    unused.flat_map(|slot| group.entries[slot].as_bytes()).all(|byte| *byte == 0)
}
