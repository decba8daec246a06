//! Space that a guest reports as free while its own driver uses the BTT.
//!
//! A unit can be released only if each of its blocks belongs to a reported sector. The driver keeps
//! free blocks and map entries in its memory and may store to all other blocks at any time, also to
//! those of discarded and never-written sectors. It stores to a block of a reported sector only
//! when that sector is written, which contradicts the report.

use std::collections::BTreeMap;
use std::ops::Range;

use super::arena::ArenaInfo;
use super::arena_walk::arenas;
use super::flog::{decode_map, recover};
use super::map_reader::{MapReader, stored_parts};
use crate::media::{Media, MediaError};

/// Access of the guest to a mapped volume.
pub trait GuestAccess {
    /// Takes access to units from the guest. Its stores there wait, and its loads return zeros.
    fn withdraw(&mut self, units: &[Range<u64>]) -> Result<(), MediaError>;

    /// Gives access back. Units that were released are holes.
    fn give_back(&mut self, units: &[Range<u64>]) -> Result<(), MediaError>;

    /// Returns false if the guest may use the reported space again, or if the call should end soon.
    /// It is called often, so it must be quick. Once false, it stays false.
    fn may_continue(&self) -> bool;

    /// Returns true after the guest has confirmed, in response to this call, that it has not used
    /// the reported space. A check alone could miss that the space was given up just before.
    fn confirm(&mut self) -> bool;
}

/// Minimum number of units that are released together.
const MIN_GROUP: usize = 256;
/// Maximum number of groups, because each of them reads the map once more.
const MAX_GROUPS: usize = 64;

/// Releases units that contain nothing except `free` bytes of the disk. The guest must not use them
/// while [`GuestAccess::may_continue`] is true. Returns the number of released bytes.
///
/// 1. Find the units.
/// 2. Take access to a group of them from the guest.
/// 3. Make the volume durable. Otherwise, a power failure could restore a map entry that names a
///    block in a unit.
/// 4. Keep units in which a block has another owner now. The guest's report was wrong then.
/// 5. Release the others, durably, if the guest confirms its report. A report that is confirmed now
///    was true when access was taken, and no store has reached the units since.
/// 6. Give access back.
pub fn release_reported(
    space: &impl Media,
    free: &[Range<u64>],
    access: &mut dyn GuestAccess,
) -> Result<u64, MediaError> {
    let Some(unit_bytes) = space.release_unit_bytes() else { return Ok(0) };
    let report = Report { free: merged(free), unit_bytes };
    let mut units = report.units(space, &|_| true, access)?;
    units.retain(|unit| !matches!(space.is_hole(unit.clone()), Ok(true)));
    let mut released_bytes = 0;
    for group in units.chunks(MIN_GROUP.max(units.len().div_ceil(MAX_GROUPS))) {
        if !access.may_continue() {
            break;
        }
        let withdrawn = access.withdraw(group);
        let released = withdrawn.and_then(|()| release_group(space, group, &report, access));
        access.give_back(group)?;
        let Some(units) = released? else { break };
        released_bytes += units * unit_bytes;
    }
    Ok(released_bytes)
}

/// Performs steps 3 to 5 for units to which the guest has no access. Returns the number of released
/// units, or `None` if the guest has not confirmed its report.
fn release_group(
    space: &impl Media,
    group: &[Range<u64>],
    report: &Report,
    access: &mut dyn GuestAccess,
) -> Result<Option<u64>, MediaError> {
    space.persist(&stored_parts(space, &(0..space.len_bytes())))?;
    let is_in_group = |unit: &Range<u64>| group.binary_search_by_key(&unit.start, |of| of.start);
    let still = report.units(space, &|unit| is_in_group(unit).is_ok(), access)?;
    if still.is_empty() {
        return Ok(Some(0));
    }
    if !access.confirm() {
        return Ok(None);
    }
    let kept = space.release(&still, &|_| false)?;
    Ok(Some((still.len() - kept.len()) as u64))
}

/// Blocks of a unit, with one bit per block.
struct UnitBlocks {
    first: u64,
    reported: Vec<u64>,
    missing: u64,
}

impl UnitBlocks {
    fn of(info: &ArenaInfo, unit: &Range<u64>) -> Self {
        let block_bytes = u64::from(info.block_bytes);
        let first = (unit.start - info.data_at) / block_bytes;
        let blocks = (unit.end - info.data_at).div_ceil(block_bytes) - first;
        Self { first, reported: vec![0; blocks.div_ceil(64) as usize], missing: blocks }
    }

    /// Marks a block as reported. A damaged map may name it twice.
    fn mark(&mut self, block: u32) {
        let index = u64::from(block) - self.first;
        let (word, bit) = (&mut self.reported[(index / 64) as usize], 1 << (index % 64));
        self.missing -= u64::from(*word & bit == 0);
        *word |= bit;
    }
}

/// Report of a guest.
struct Report {
    /// Free bytes of the disk. The ranges are sorted and do not touch, so that each map entry is
    /// read once even if a hostile guest names its sector often.
    free: Vec<Range<u64>>,
    unit_bytes: u64,
}

/// Sorts ranges, and merges those that overlap or touch.
fn merged(ranges: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut sorted = ranges.to_vec();
    sorted.sort_unstable_by_key(|range| range.start);
    sorted.dedup_by(|next, range| {
        let touches = next.start <= range.end;
        if touches {
            range.end = range.end.max(next.end);
        }
        touches
    });
    sorted
}

impl Report {
    /// Returns the `wanted` units that can be released if the report is true, in ascending order.
    /// Omits units with other parts of an arena, and units of damaged arenas. The result is empty
    /// if the call should end.
    fn units(
        &self,
        space: &impl Media,
        wanted: &dyn Fn(&Range<u64>) -> bool,
        access: &dyn GuestAccess,
    ) -> Result<Vec<Range<u64>>, MediaError> {
        let mut units = Vec::new();
        let mut first_sector = 0;
        for arena in arenas(space) {
            // The sectors of later arenas are unknown without the size of this one.
            let Ok((info, _)) = arena else { break };
            let sectors = sectors_of(&info, first_sector, &self.free);
            let found = units_of_arena(space, &info, self.unit_bytes, &sectors, wanted, access)?;
            let Some(found) = found else { return Ok(Vec::new()) };
            units.extend(found);
            first_sector += u64::from(info.sectors);
        }
        Ok(units)
    }
}

/// Returns the whole sectors of an arena in ranges of the disk, numbered from its first.
fn sectors_of(info: &ArenaInfo, first_sector: u64, free: &[Range<u64>]) -> Vec<Range<u32>> {
    let sector_bytes = u64::from(info.sector_bytes);
    let number = |sector: u64| sector.saturating_sub(first_sector).min(info.sectors.into()) as u32;
    let sectors = free
        .iter()
        .map(|range| number(range.start.div_ceil(sector_bytes))..number(range.end / sector_bytes));
    sectors.filter(|sectors| !sectors.is_empty()).collect()
}

/// Returns the units of an arena, or `None` if the call should end.
fn units_of_arena(
    space: &impl Media,
    info: &ArenaInfo,
    unit_bytes: u64,
    sectors: &[Range<u32>],
    wanted: &dyn Fn(&Range<u64>) -> bool,
    access: &dyn GuestAccess,
) -> Result<Option<Vec<Range<u64>>>, MediaError> {
    let recovery = recover(space, info);
    if sectors.is_empty() || !recovery.findings.is_empty() {
        return Ok(Some(Vec::new()));
    }
    let mut units = BTreeMap::new();
    for sectors in sectors {
        let mut reader = MapReader::new(space, info, sectors.clone());
        while let Some(piece) = reader.read_next() {
            if !access.may_continue() {
                return Ok(None);
            }
            for (sector, entry) in piece?.iter() {
                let block = decode_map(sector, entry).block;
                for unit in units_with(info, unit_bytes, block).filter(wanted) {
                    let blocks = units.entry(unit.start);
                    blocks.or_insert_with(|| UnitBlocks::of(info, &unit)).mark(block);
                }
            }
        }
    }
    // A lane stores to its free block before it changes the map.
    for (block, _) in &recovery.free {
        for unit in units_with(info, unit_bytes, *block) {
            units.remove(&unit.start);
        }
    }
    let whole = units.into_iter().filter(|(_, blocks)| blocks.missing == 0);
    Ok(Some(whole.map(|(start, _)| start..start + unit_bytes).collect()))
}

/// Returns the units that contain a part of a block. Omits units with other parts of the arena. The
/// result is empty if a damaged map names a block outside the arena.
fn units_with(
    info: &ArenaInfo,
    unit_bytes: u64,
    block: u32,
) -> impl Iterator<Item = Range<u64>> + use<> {
    let blocks = info.data_at..info.data_at + u64::from(info.blocks) * u64::from(info.block_bytes);
    let bytes = if block < info.blocks { info.data_range(block) } else { 0..0 };
    let units = bytes.start / unit_bytes..bytes.end.div_ceil(unit_bytes);
    let units = units.map(move |unit| unit * unit_bytes..(unit + 1) * unit_bytes);
    units.filter(move |unit| blocks.start <= unit.start && unit.end <= blocks.end)
}

#[cfg(test)]
pub(in crate::btt) mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;
    use crate::btt::arena::read_arena;
    use crate::btt::engine::tests::format_small;
    use crate::btt::flog::read_map;
    use crate::btt::layout::{PAGE_BYTES, START_BYTES};
    use crate::btt::reader::Reader;
    use crate::btt::tests::{VOLUME_BYTES, Writer};
    use crate::media::MemoryMedia;
    use crate::media::simulator::{Random, Simulator};
    use crate::media::thin::ThinMedia;

    const SECTORS: u32 = 48;
    const LANES: u32 = 4;
    const UNIT_BYTES: u64 = 4 * PAGE_BYTES;
    const WRITE_STEPS: u32 = 5;

    fn bytes_of(sectors: Range<u64>) -> Range<u64> {
        sectors.start * PAGE_BYTES..sectors.end * PAGE_BYTES
    }

    /// Writes random sectors like Linux. The last write of each lane may be incomplete.
    fn write_some(media: &MemoryMedia, random: &mut Random) {
        let mut writer = Writer::new(media, 1);
        for number in 0..100 {
            let [lane, sector] = [LANES, SECTORS].map(|end| random.below(u64::from(end)) as u32);
            writer.write(lane as usize, sector, &[number; PAGE_BYTES as usize], WRITE_STEPS);
        }
        for lane in 0..LANES {
            let sector = random.below(u64::from(SECTORS)) as u32;
            let steps = random.below(u64::from(WRITE_STEPS)) as u32;
            writer.write(lane as usize, sector, &[0xaa; PAGE_BYTES as usize], steps);
        }
    }

    /// Blocks that the driver may read or write.
    struct UsedBlocks {
        of_sectors: Vec<u32>,
        of_lanes: Vec<u32>,
    }

    impl UsedBlocks {
        fn find(media: &MemoryMedia, info: &ArenaInfo, free: &[Range<u64>]) -> Self {
            let recovery = recover(media, info);
            let is_used = |sector: &u64| !free.iter().any(|range| range.contains(sector));
            let sectors = (0..u64::from(SECTORS)).filter(is_used).map(|sector| sector as u32);
            let mapped = sectors.map(|sector| read_map(media, info, sector).unwrap().block);
            Self {
                of_sectors: mapped.chain(recovery.redo.values().copied()).collect(),
                of_lanes: recovery.free.iter().map(|(block, _)| *block).collect(),
            }
        }

        fn any_in(&self, unit: &Range<u64>, info: &ArenaInfo) -> bool {
            holds_any(unit, info, &self.of_sectors) || holds_any(unit, info, &self.of_lanes)
        }

        /// Broken variant of [`Report::units`], which ignores the lanes.
        fn units_without_sectors(&self, info: &ArenaInfo) -> impl Iterator<Item = Range<u64>> {
            let end = info.block_at(info.blocks - 1) + PAGE_BYTES;
            let units = info.data_at.div_ceil(UNIT_BYTES)..end / UNIT_BYTES;
            let units = units.map(|unit| unit * UNIT_BYTES..(unit + 1) * UNIT_BYTES);
            units.filter(|unit| !holds_any(unit, info, &self.of_sectors))
        }
    }

    fn holds_any(unit: &Range<u64>, info: &ArenaInfo, blocks: &[u32]) -> bool {
        let mut starts = blocks.iter().map(|block| info.block_at(*block));
        starts.any(|at| at < unit.end && unit.start < at + PAGE_BYTES)
    }

    #[test]
    fn no_unit_has_blocks_that_the_driver_uses() {
        let (mut random, mut units_found, mut caught) = (Random::new(24), 0, 0);
        for _ in 0..300 {
            let media = MemoryMedia::new(VOLUME_BYTES);
            format_small(&media, SECTORS, LANES);
            let (info, _) = read_arena(&media, START_BYTES, VOLUME_BYTES - START_BYTES).unwrap();
            write_some(&media, &mut random);
            let from = random.below(u64::from(SECTORS));
            let free = [0..from.saturating_sub(3), from..u64::from(SECTORS)];
            let used = UsedBlocks::find(&media, &info, &free);
            let units = reported_units(&media, &free.clone().map(bytes_of));
            assert!(!units.iter().any(|unit| used.any_in(unit, &info)), "{units:?}");
            units_found += units.len();
            let mut broken = used.units_without_sectors(&info);
            caught += usize::from(broken.any(|unit| used.any_in(&unit, &info)));
        }
        assert!(units_found > 300, "{units_found}");
        assert!(caught > 100, "{caught}");
    }

    /// Access that the guest has all the time. The function is called in place of a withdrawal.
    pub(in crate::btt) struct Shared<F>(pub(in crate::btt) F);

    impl<F: FnMut()> GuestAccess for Shared<F> {
        fn withdraw(&mut self, _: &[Range<u64>]) -> Result<(), MediaError> {
            self.0();
            Ok(())
        }

        fn give_back(&mut self, _: &[Range<u64>]) -> Result<(), MediaError> {
            Ok(())
        }

        fn may_continue(&self) -> bool {
            true
        }

        fn confirm(&mut self) -> bool {
            true
        }
    }

    fn reported_units(space: &impl Media, free: &[Range<u64>]) -> Vec<Range<u64>> {
        let report = Report { free: merged(free), unit_bytes: UNIT_BYTES };
        report.units(space, &|_| true, &Shared(|| {})).unwrap()
    }

    fn thin<M: Media>(media: M) -> ThinMedia<M> {
        ThinMedia::new(media, VOLUME_BYTES, UNIT_BYTES).with_reuse()
    }

    fn new_simulator() -> Simulator {
        let media = Simulator::new(ThinMedia::<Simulator>::wrapped_bytes(VOLUME_BYTES, UNIT_BYTES));
        format_small(&thin(&media), SECTORS, LANES);
        media
    }

    fn fill(writer: &mut Writer<'_, impl Media>, sectors: Range<u32>, version: u8) {
        for sector in sectors {
            let lane = (sector % LANES) as usize;
            writer.write(lane, sector, &[version; PAGE_BYTES as usize], WRITE_STEPS);
        }
    }

    /// Returns the first sector whose content is not one of `versions`.
    fn wrong_sector(media: impl Media, sectors: Range<u32>, versions: &[u8]) -> Option<u32> {
        let thin = thin(media);
        let reader = Reader::open(&thin).unwrap();
        let mut bytes = [0; PAGE_BYTES as usize];
        sectors.into_iter().find(|sector| {
            reader.read(u64::from(*sector), &mut bytes).unwrap();
            !versions.iter().any(|version| bytes == [*version; PAGE_BYTES as usize])
        })
    }

    /// Releases the units of free sectors. The broken variant omits steps 3 and 4 of
    /// [`release_reported`].
    fn release(space: &impl Media, free: &[Range<u64>], mut write: impl FnMut(), is_broken: bool) {
        if is_broken {
            let units = reported_units(space, free);
            write();
            assert_eq!(space.release(&units, &|_| false).unwrap(), []);
        } else {
            let bytes = release_reported(space, free, &mut Shared(write)).unwrap();
            assert!(bytes >= 4 * UNIT_BYTES, "{bytes}");
        }
    }

    const FREE: Range<u32> = 16..48;

    #[test]
    fn power_failure_after_a_release_loses_no_other_sector() {
        for is_broken in [false, true] {
            let media = new_simulator();
            let thin = thin(&media);
            let mut writer = Writer::new(&thin, 1);
            fill(&mut writer, 0..SECTORS, 1);
            media.persist_range(0..media.len_bytes()).unwrap();
            media.record();
            // Blocks of other sectors become blocks of free sectors, but not durably.
            for _ in 0..3 {
                fill(&mut writer, 0..FREE.start, 2);
                fill(&mut writer, FREE, 2);
            }
            release(&thin, &[bytes_of(16..48)], || {}, is_broken);
            let last = media.take_points().pop().unwrap();
            // After a kill without a power failure, all stores are visible.
            assert_eq!(wrong_sector(last.killed(), 0..FREE.start, &[2]), None);
            let lost = last.images(1, &mut Random::new(1)).remove(0);
            assert_eq!(wrong_sector(lost, 0..FREE.start, &[1, 2]).is_some(), is_broken);
        }
    }

    #[test]
    fn wrong_report_loses_no_other_sector() {
        for is_broken in [false, true] {
            let media = new_simulator();
            let thin = thin(&media);
            let mut writer = Writer::new(&thin, 1);
            fill(&mut writer, 0..SECTORS, 1);
            // The blocks of the free sectors become blocks of other sectors.
            let write = || {
                fill(&mut writer, 20..24, 2);
                fill(&mut writer, 0..4, 2);
            };
            release(&thin, &[bytes_of(16..48)], write, is_broken);
            assert_eq!(wrong_sector(&media, 0..FREE.start, &[1, 2]).is_some(), is_broken);
        }
    }

    /// Guest whose command ends, or whose VM ends, at some point.
    struct Ending<F> {
        /// Number of checks after which the call may not continue.
        checks: Cell<usize>,
        /// Effect of the first withdrawal.
        then: Option<F>,
        /// The broken variant does not notice that the command has ended.
        is_broken: bool,
    }

    impl<F: FnOnce()> Ending<F> {
        fn new(checks: usize, then: F, is_broken: bool) -> Self {
            Self { checks: Cell::new(checks), then: Some(then), is_broken }
        }
    }

    impl<F: FnOnce()> GuestAccess for Ending<F> {
        fn withdraw(&mut self, _: &[Range<u64>]) -> Result<(), MediaError> {
            self.then.take().expect("no second group")();
            self.checks.set(0);
            Ok(())
        }

        fn give_back(&mut self, _: &[Range<u64>]) -> Result<(), MediaError> {
            Ok(())
        }

        fn may_continue(&self) -> bool {
            let left = self.checks.get();
            self.checks.set(left.saturating_sub(1));
            left > 0 || self.is_broken
        }

        fn confirm(&mut self) -> bool {
            self.may_continue()
        }
    }

    #[test]
    fn report_that_ends_after_the_withdrawal_releases_nothing() {
        for is_broken in [false, true] {
            let media = new_simulator();
            let thin = thin(&media);
            let mut writer = Writer::new(&thin, 1);
            fill(&mut writer, 0..SECTORS, 1);
            // The process with the file has died, and another file has its sectors.
            let write = || fill(&mut writer, FREE, 2);
            let mut access = Ending::new(usize::MAX, write, is_broken);
            let bytes = release_reported(&thin, &[bytes_of(16..48)], &mut access).unwrap();
            assert_eq!(bytes > 0, is_broken, "{bytes}");
            assert_eq!(wrong_sector(&media, FREE, &[2]).is_some(), is_broken);
        }
    }

    /// Guest whose command is killed at a check, which misses this. Other files then use its space
    /// at once. Their stores wait while the guest has no access.
    struct Killed<F> {
        checks: Cell<usize>,
        has_access: Cell<bool>,
        is_dead: Cell<bool>,
        use_space: RefCell<Option<F>>,
        /// The broken variant confirms for a command that was killed.
        is_broken: bool,
    }

    impl<F: FnOnce()> Killed<F> {
        fn pass(&self) {
            let left = self.checks.get();
            self.checks.set(left.saturating_sub(1));
            self.is_dead.set(self.is_dead.get() || left == 0);
            if self.is_dead.get() && self.has_access.get() {
                self.use_space.take().into_iter().for_each(|use_space| use_space());
            }
        }
    }

    impl<F: FnOnce()> GuestAccess for Killed<F> {
        fn withdraw(&mut self, _: &[Range<u64>]) -> Result<(), MediaError> {
            self.pass();
            self.has_access.set(false);
            Ok(())
        }

        fn give_back(&mut self, _: &[Range<u64>]) -> Result<(), MediaError> {
            self.has_access.set(true);
            self.pass();
            Ok(())
        }

        fn may_continue(&self) -> bool {
            self.pass();
            true
        }

        fn confirm(&mut self) -> bool {
            self.pass();
            self.is_broken || !self.is_dead.get()
        }
    }

    #[test]
    fn space_of_a_command_that_was_killed_unnoticed_keeps_its_new_data() {
        let [mut released, mut lost] = [[0; 2]; 2];
        for (is_broken, checks) in [false, true].into_iter().zip([0..40, 0..40]) {
            for checks in checks {
                let media = new_simulator();
                let thin = thin(&media);
                let mut writer = Writer::new(&thin, 1);
                fill(&mut writer, 0..SECTORS, 1);
                let mut access = Killed {
                    checks: Cell::new(checks),
                    has_access: Cell::new(true),
                    is_dead: Cell::new(false),
                    use_space: RefCell::new(Some(|| fill(&mut writer, FREE, 2))),
                    is_broken,
                };
                let bytes = release_reported(&thin, &[bytes_of(16..48)], &mut access).unwrap();
                let (is_dead, at) = (access.is_dead.get(), usize::from(is_broken));
                released[at] += usize::from(bytes > 0 && is_dead);
                let is_lost = wrong_sector(&media, FREE, &[2]).is_some();
                lost[at] += usize::from(is_lost && is_dead);
            }
        }
        assert_eq!(lost[0], 0);
        assert!(lost[1] > 0, "the broken variant is not caught");
        // A command that was killed after its confirmation.
        assert!(released[0] > 0);
    }

    #[test]
    fn call_ends_at_the_next_piece_of_the_map() {
        let media = new_simulator();
        let thin = thin(&media);
        fill(&mut Writer::new(&thin, 1), 0..SECTORS, 1);
        let separate: Vec<_> = (0..24).map(|at| bytes_of(2 * at..2 * at + 1)).collect();
        for checks in 0..24 {
            let withdraw = || panic!("the guest loses access after {checks} checks");
            let mut access = Ending::new(checks, withdraw, false);
            assert_eq!(release_reported(&thin, &separate, &mut access).unwrap(), 0);
            assert_eq!(access.checks.get(), 0);
        }
    }

    #[test]
    fn sector_is_read_once_however_often_it_is_reported() {
        let media = new_simulator();
        let thin = thin(&media);
        fill(&mut Writer::new(&thin, 1), 0..SECTORS, 1);
        let checks_of = |free: &[Range<u64>]| {
            let access = Ending::new(usize::MAX, || {}, false);
            let report = Report { free: merged(free), unit_bytes: UNIT_BYTES };
            let units = report.units(&thin, &|_| true, &access).unwrap();
            (usize::MAX - access.checks.get(), units)
        };
        let (checks, units) = checks_of(&[bytes_of(0..48)]);
        assert!(units.len() >= 4 && checks > 0, "{checks} {units:?}");
        let overlapping: Vec<_> = (0..1 << 20).map(|at| at % 999..48 * PAGE_BYTES).collect();
        assert_eq!(checks_of(&[&overlapping[..], &[bytes_of(0..48)]].concat()), (checks, units));
    }

    #[test]
    fn second_pass_finds_only_units_of_its_group() {
        let media = new_simulator();
        let thin = thin(&media);
        fill(&mut Writer::new(&thin, 1), 0..SECTORS, 1);
        let free = [bytes_of(0..48)];
        let all = reported_units(&thin, &free);
        let report = Report { free: merged(&free), unit_bytes: UNIT_BYTES };
        let found = report.units(&thin, &|unit| *unit == all[1], &Shared(|| {})).unwrap();
        assert_eq!(found, all[1..2]);
    }

    #[test]
    fn only_whole_sectors_of_the_disk_are_reported() {
        let media = MemoryMedia::new(VOLUME_BYTES);
        format_small(&media, SECTORS, LANES);
        let units = |free: &[Range<u64>]| reported_units(&media, free).len();
        let all = units(&[bytes_of(0..48)]);
        assert!(all >= 10, "{all}");
        assert_eq!(units(&[]), 0);
        // The ranges overlap, and one exceeds the disk.
        assert_eq!(units(&[0..40 * PAGE_BYTES, 20 * PAGE_BYTES..u64::MAX]), all);
        let halves: Vec<_> =
            (0..48).map(|sector| sector * PAGE_BYTES..sector * PAGE_BYTES + 4095).collect();
        assert_eq!(units(&halves), 0);
    }

    #[test]
    fn damaged_arena_has_no_units() {
        let media = MemoryMedia::new(VOLUME_BYTES);
        format_small(&media, SECTORS, LANES);
        let (info, _) = read_arena(&media, START_BYTES, VOLUME_BYTES - START_BYTES).unwrap();
        media.store(info.flog_at, &[0xff; 16]).unwrap();
        assert_eq!(reported_units(&media, &[bytes_of(0..48)]), []);
    }
}
