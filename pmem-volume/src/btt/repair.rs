//! Repair of a damaged BTT, based on its own metadata.
//!
//! The map is authoritative, because only the map assigns blocks to sectors. All other blocks
//! belong to the free list. Therefore, a damaged lane of the flog receives a block without an
//! owner, provided that no sector can own the block. If only one sector has lost its block, and
//! only one block has no owner, they belong together. After a crash, the map entry of a lane's last
//! write may not be durable yet. If such a lane is damaged, that write is lost.
//!
//! A repair changes no sector that reads correctly, and writes to no block that may contain a
//! sector's data. If two owners claim the same block and the right one is unknown, neither is
//! changed unless the caller gives them up.

mod overlay;
mod survey;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;

use zerocopy::{FromZeros, IntoBytes};

use self::overlay::Overlay;
use self::survey::{Lane, Survey, survey};
use super::arena::{ArenaInfo, InfoSource};
use super::arena_walk::{ArenaResult, arenas};
use super::check::{ArenaReport, Finding, Report, check_with};
use super::layout::{
    FLAG_ERROR, FLOG_GROUP_BYTES, FlogEntryBytes, FlogGroupBytes, INFO_BYTES, InfoBytes, MAP_BLOCK,
    MAP_ENTRY_BYTES, MAP_ERROR, MAP_ZERO, checksum,
};
use super::map_reader::stored_parts;
use crate::media::{Media, MediaError};

/// Data that a repair may discard to make the arena writable again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GiveUp {
    /// Discard no readable data.
    Nothing,
    /// Discard sectors that share a block. Only one of them has the right content, and it is
    /// unknown which one.
    Sectors,
}

/// Repair of one defect.
#[derive(Debug)]
pub struct Fix {
    /// Number of the arena, counted from 0.
    pub arena: usize,
    /// Description of the repair, with the reason.
    pub description: String,
    /// Stores of the repair. Each phase is made durable before the next one begins.
    phases: Vec<Vec<Store>>,
}

/// Store of whole words: their offset and bytes.
type Store = (u64, Vec<u8>);

/// Planned repair of a BTT.
#[derive(Debug)]
pub struct Repair {
    /// Repairs in the order in which they are carried out.
    pub fixes: Vec<Fix>,
    /// Result of a check after the repair.
    pub report_after: Report,
    /// Metadata on which the plan is based: info blocks, maps and flogs.
    metadata_ranges: Vec<Range<u64>>,
}

/// Plans a repair without changing anything. `on_checked` receives the number of bytes examined so
/// far.
pub fn plan_repair(
    space: &impl Media,
    give_up: GiveUp,
    on_checked: &mut dyn FnMut(u64),
) -> Result<Repair, MediaError> {
    let mut overlay = Overlay::new(space);
    let mut fixes = fix_info_blocks(space)?;
    fixes.iter().for_each(|fix| overlay.apply(fix));
    let mut report_after = check_with(&overlay, on_checked);
    let arenas = arenas(&overlay);
    let mut more = Vec::new();
    for (number, info) in existing_arenas(&arenas) {
        if is_inconsistent(&report_after.arenas[number]) {
            // An arena with unreadable metadata is not repaired. The report contains the finding.
            more.extend(fix_arena(&overlay, number, info, give_up).unwrap_or_default());
        }
    }
    if !more.is_empty() {
        more.iter().for_each(|fix| overlay.apply(fix));
        fixes.append(&mut more);
        report_after = check_with(&overlay, on_checked);
    }
    for (number, info) in existing_arenas(&arenas) {
        if report_after.arenas[number].findings == [Finding::ErrorFlag] {
            let fix = clear_error_flag(&overlay, number, info)?;
            overlay.apply(&fix);
            fixes.push(fix);
            let arena = &mut report_after.arenas[number];
            (arena.findings, arena.findings_total) = (vec![], 0);
            arena.info = Some(ArenaInfo { has_error: false, ..info.clone() });
        }
    }
    let metadata_ranges =
        existing_arenas(&arenas).flat_map(|(_, info)| metadata_of(info)).collect();
    Ok(Repair { fixes, report_after, metadata_ranges })
}

/// Returns the ranges of an arena's metadata.
fn metadata_of(info: &ArenaInfo) -> [Range<u64>; 4] {
    let map_bytes = (u64::from(info.sectors) * MAP_ENTRY_BYTES).next_multiple_of(8);
    let flog_bytes = u64::from(info.lanes) * FLOG_GROUP_BYTES;
    [
        info.start_bytes..info.start_bytes + INFO_BYTES,
        info.map_at..info.map_at + map_bytes,
        info.flog_at..info.flog_at + flog_bytes,
        info.copy_at..info.copy_at + INFO_BYTES,
    ]
}

/// Returns the existing arenas with their numbers.
fn existing_arenas(arenas: &[ArenaResult]) -> impl Iterator<Item = (usize, &ArenaInfo)> {
    arenas.iter().enumerate().filter_map(|(number, arena)| Some((number, &arena.as_ref().ok()?.0)))
}

fn fix_arena(
    space: &impl Media,
    number: usize,
    info: &ArenaInfo,
    give_up: GiveUp,
) -> Result<Vec<Fix>, MediaError> {
    match survey(space, info)? {
        Some(survey) => survey.plan_fixes(space, number, info, give_up),
        None => Ok(vec![]),
    }
}

impl Repair {
    /// Carries out the repair, durably. After a crash, there is less to repair, and correct data is
    /// never damaged. If the pool has no space for a hole, nothing is stored.
    ///
    /// The examined metadata is made durable first, because the process that stored it may have
    /// been killed before it was durable. Otherwise, a lane could receive a block that a sector has
    /// released in the map. If a power loss then undid only the change of the map, both would own
    /// the block.
    pub fn apply(&self, space: &impl Media) -> Result<(), MediaError> {
        if self.fixes.is_empty() {
            return Ok(());
        }
        let stores = self.fixes.iter().flat_map(|fix| fix.phases.iter().flatten());
        for (at, bytes) in stores {
            space.provision(*at..at + bytes.len() as u64)?;
        }
        let examined = self.metadata_ranges.iter().flat_map(|range| stored_parts(space, range));
        space.persist(&examined.collect::<Vec<_>>())?;
        self.fixes.iter().try_for_each(|fix| fix.apply(space))
    }
}

impl Fix {
    fn new(arena: usize, description: String, phases: Vec<Vec<Store>>) -> Self {
        Self { arena, description, phases }
    }

    fn apply(&self, space: &impl Media) -> Result<(), MediaError> {
        for phase in &self.phases {
            for (at, bytes) in phase {
                space.store(*at, bytes)?;
            }
            let ranges: Vec<_> =
                phase.iter().map(|(at, bytes)| *at..at + bytes.len() as u64).collect();
            space.persist(&ranges)?;
        }
        Ok(())
    }
}

/// Returns true if the map or the flog has a defect.
fn is_inconsistent(arena: &ArenaReport) -> bool {
    arena.findings.iter().any(|finding| !matches!(finding, Finding::ErrorFlag | Finding::NoInfo(_)))
}

/// Plans to rewrite info blocks that are damaged or that differ from the first one, which Linux
/// uses.
fn fix_info_blocks(space: &impl Media) -> Result<Vec<Fix>, MediaError> {
    let mut fixes = Vec::new();
    for (number, arena) in arenas(space).into_iter().enumerate() {
        let Ok((info, source)) = arena else { continue };
        let (first, second) = (info.start_bytes, info.copy_at);
        let (finding, from, at) = match source {
            InfoSource::Both => continue,
            InfoSource::Differ => (Finding::InfoDiffers, first, second),
            InfoSource::First => (Finding::SecondInfo, first, second),
            InfoSource::Second => (Finding::FirstInfo, second, first),
        };
        let mut whole = InfoBytes::new_zeroed();
        space.read(from, whole.as_mut_bytes())?;
        let which = if at == first { "second" } else { "first" };
        let description = format!("{finding}; the {which} is copied over the other");
        fixes.push(Fix::new(number, description, vec![vec![(at, whole.as_bytes().to_vec())]]));
    }
    Ok(fixes)
}

/// Clears the error flag and updates the checksum in one info block and then in the other, so that
/// one of them is always whole.
fn clear_error_flag(
    space: &impl Media,
    number: usize,
    info: &ArenaInfo,
) -> Result<Fix, MediaError> {
    let mut block = InfoBytes::new_zeroed();
    space.read(info.start_bytes, block.as_mut_bytes())?;
    block.flags.set(block.flags.get() & !FLAG_ERROR);
    let sum = checksum(&block);
    block.checksum.set(sum);
    let words = |start: u64| {
        let word = |at: usize| (start + at as u64, block.as_bytes()[at..at + 8].to_vec());
        vec![word(std::mem::offset_of!(InfoBytes, flags)), word(INFO_BYTES as usize - 8)]
    };
    let description =
        "the error flag is cleared, because map and flog reference every block once".to_owned();
    Ok(Fix::new(number, description, vec![words(info.start_bytes), words(info.copy_at)]))
}

impl Survey {
    /// Plans the repair of the map and the flog. Sectors are repaired before lanes. Once all
    /// sectors have blocks, the remaining blocks belong to the lanes. This also holds for a repair
    /// that starts again after a crash.
    fn plan_fixes(
        &self,
        space: &impl Media,
        number: usize,
        info: &ArenaInfo,
        give_up: GiveUp,
    ) -> Result<Vec<Fix>, MediaError> {
        let shared: Vec<_> =
            self.shared.iter().filter(|(_, owners)| !owners.sectors.is_empty()).collect();
        if give_up == GiveUp::Nothing && !shared.is_empty() {
            return Ok(vec![]);
        }
        let mut lanes = self.lanes_without_block();
        lanes.extend(shared.iter().flat_map(|(_, owners)| &owners.lanes));
        let out_of_range = self.out_of_range.iter().map(|(sector, _)| (*sector, None));
        // If sectors share a block, the first of them keeps it.
        let block_of_first =
            |block: u32| std::iter::once(Some(block)).chain(std::iter::repeat(None));
        let given_up = shared.iter().flat_map(|(block, owners)| {
            owners.sectors.iter().copied().zip(block_of_first(**block))
        });
        let lost: Vec<(u32, Option<u32>)> = out_of_range.chain(given_up).collect();
        let needed = lanes.len() + lost.iter().filter(|(_, block)| block.is_none()).count();
        if self.unreferenced.len() < needed {
            return Ok(vec![]);
        }
        if let ([(sector, entry)], [block], true, [], 0) = (
            &self.out_of_range[..],
            &self.unreferenced[..],
            shared.is_empty(),
            &lanes[..],
            self.error_sectors,
        ) {
            return Ok(vec![remap_sector(space, number, info, *sector, *entry, *block)?]);
        }
        let mut unreferenced = self.unreferenced.clone();
        let lanes: Vec<_> = lanes
            .into_iter()
            .map(|lane| (lane, self.take_hinted_block(lane, &mut unreferenced)))
            .collect();
        let mut rest = unreferenced.into_iter();
        let mut next = |block: Option<u32>| block.or_else(|| rest.next()).expect("counted above");
        let lost: Vec<_> = lost.into_iter().map(|(sector, block)| (sector, next(block))).collect();
        let lanes: Vec<_> = lanes.into_iter().map(|(lane, block)| (lane, next(block))).collect();
        let mut map = map_words(space, info, &self.entries(&lanes, &lost))?;
        let mut fixes = Vec::new();
        if !lost.is_empty() {
            fixes.push(mark_lost(number, &lost, std::mem::take(&mut map)));
        }
        if !lanes.is_empty() {
            fixes.push(assign_blocks(number, info, map, &lanes));
        }
        Ok(fixes)
    }

    /// Returns the map entries of lost sectors, and pending map entries of lanes that will be
    /// replaced.
    fn entries(&self, lanes: &[(u32, u32)], lost: &[(u32, u32)]) -> BTreeMap<u32, u32> {
        let redo = lanes.iter().filter_map(|(lane, _)| self.lanes[*lane as usize].redo);
        let redone = redo.map(|(sector, block)| (sector, block | MAP_ERROR | MAP_ZERO));
        redone.chain(lost.iter().map(|(sector, block)| (*sector, block | MAP_ERROR))).collect()
    }

    /// Returns lanes without a block, and lanes whose block also belongs to an earlier lane.
    fn lanes_without_block(&self) -> Vec<u32> {
        let is_damaged =
            |(lane, found): (usize, &Lane)| found.free.is_none().then_some(lane as u32);
        let damaged = self.lanes.iter().enumerate().filter_map(is_damaged);
        let twice = self.shared.values().filter(|owners| owners.sectors.is_empty());
        damaged.chain(twice.flat_map(|owners| owners.lanes.iter().skip(1).copied())).collect()
    }

    /// Takes a block without an owner that the entries of a damaged lane name.
    fn take_hinted_block(&self, lane: u32, unreferenced: &mut Vec<u32>) -> Option<u32> {
        let hints = &self.lanes[lane as usize].hints;
        let at = unreferenced.iter().position(|block| hints.contains(block))?;
        Some(unreferenced.remove(at))
    }
}

/// Returns the words of the map that contain changed entries.
fn map_words(
    space: &impl Media,
    info: &ArenaInfo,
    entries: &BTreeMap<u32, u32>,
) -> Result<Vec<Store>, MediaError> {
    let mut words = BTreeMap::new();
    for (sector, entry) in entries {
        let at = info.map_at + u64::from(*sector) * MAP_ENTRY_BYTES;
        let (start, within) = (at / 8 * 8, (at % 8) as usize);
        let mut word = [0; 8];
        match words.get(&start) {
            Some(changed) => word = *changed,
            None => space.read(start, &mut word)?,
        }
        word[within..within + 4].copy_from_slice(&entry.to_le_bytes());
        words.insert(start, word);
    }
    Ok(words.into_iter().map(|(at, word)| (at, word.to_vec())).collect())
}

fn remap_sector(
    space: &impl Media,
    number: usize,
    info: &ArenaInfo,
    sector: u32,
    entry: u32,
    block: u32,
) -> Result<Fix, MediaError> {
    let description = format!(
        "sector L{sector} is mapped outside the arena; it is remapped to B{block}, the only unreferenced block"
    );
    let words = map_words(space, info, &[(sector, entry & !MAP_BLOCK | block)].into())?;
    Ok(Fix::new(number, description, vec![words]))
}

fn mark_lost(number: usize, lost: &[(u32, u32)], words: Vec<Store>) -> Fix {
    let sectors: Vec<_> = lost.iter().map(|(sector, _)| *sector).collect();
    let description = format!(
        "{} sector(s) are marked as lost, because their blocks are unknown: {}. Reads of them fail until they are written",
        sectors.len(),
        list_ranges("L", &sectors)
    );
    Fix::new(number, description, vec![words])
}

/// Assigns blocks to lanes. Every phase except the last one leaves an impossible sequence number,
/// so that an interrupted lane remains damaged until it is complete.
fn assign_blocks(number: usize, info: &ArenaInfo, map: Vec<Store>, lanes: &[(u32, u32)]) -> Fix {
    let numbers: Vec<_> = lanes.iter().map(|(lane, _)| *lane).collect();
    let description = format!(
        "{} lane(s) of the flog get unreferenced blocks: {}",
        lanes.len(),
        list_ranges("lane ", &numbers)
    );
    let words = |sequence: u32, starts: &[usize]| -> Vec<_> {
        let of_lane = |(lane, block): &(u32, u32)| {
            let at = info.flog_at + u64::from(*lane) * FLOG_GROUP_BYTES;
            let mut group = FlogGroupBytes::new_zeroed();
            let (lba, block) = ((lane % info.sectors).into(), (*block).into());
            group.entries[0] =
                FlogEntryBytes { lba, old_map: block, new_map: block, sequence: sequence.into() };
            let word =
                |start: usize| (at + start as u64, group.as_bytes()[start..start + 8].to_vec());
            starts.iter().copied().map(word).collect::<Vec<_>>()
        };
        lanes.iter().flat_map(of_lane).collect()
    };
    const IMPOSSIBLE: u32 = u32::MAX;
    let phases = [
        map,
        words(IMPOSSIBLE, &[8]),
        words(IMPOSSIBLE, &[0, 16, 24, 32, 40, 48, 56]),
        words(1, &[8]),
    ];
    Fix::new(number, description, phases.into_iter().filter(|phase| !phase.is_empty()).collect())
}

/// Maximum number of ranges in a text that lists numbers.
const MAX_LISTED_RANGES: usize = 20;

fn list_ranges(prefix: &str, numbers: &[u32]) -> String {
    let mut numbers = numbers.to_vec();
    numbers.sort_unstable();
    let runs = numbers.chunk_by(|a, b| a + 1 == *b);
    let text = |run: &[u32]| match run {
        [one] => format!("{prefix}{one}"),
        _ => format!("{prefix}{} to {}", run[0], run[run.len() - 1]),
    };
    let count = runs.clone().count();
    let first: Vec<_> = runs.take(MAX_LISTED_RANGES).map(text).collect();
    match count.saturating_sub(MAX_LISTED_RANGES) {
        0 => first.join(", "),
        more => format!("{} and {more} more ranges", first.join(", ")),
    }
}
