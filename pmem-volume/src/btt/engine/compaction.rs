//! Compaction of a thin volume: empties sparse units, so that their space can be released.
//!
//! Random overwrites and deletions leave a few live blocks in each unit. A write does not empty a
//! unit, because its lane inherits the old block and stores to it next. Therefore, two exchanges
//! move a sector:
//!
//! 1. The sector gets the block of a lane, in a unit that keeps its space, with a copy of its data.
//! 2. The lane gives the old block away to a *spare* sector, and gets that sector's block, which is
//!    in a unit that is filled. A spare sector reads as zeros, and its map entry keeps the flag.
//!
//! Recovery redoes the second exchange without the flag, also in Linux (drivers/nvdimm/btt.c,
//! btt_freelist_init). Therefore, the old block is zeroed durably before that exchange is committed
//! ([`Exchange::run_zeros`]). It is zeroed only if no read of it is announced.
//!
//! Other lanes also give away their blocks in units without live blocks. Otherwise, their next
//! writes would allocate that space again.
//!
//! All steps are exchanges, so writers and readers need no further rules. The sectors are listed
//! without a lock, and each entry is checked again under the lock of its map line. Volumes with a
//! mapped interface are never compacted, because the guest's driver owns their lanes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;

use super::arena::Arena;
use super::compaction_plan::{Account, Limits, Plan, UsedUnit};
use super::exchange::Exchange;
use super::lanes::LaneGuard;
use super::live_blocks::LiveBlocks;
use super::map;
use super::{BttError, Common};
use crate::btt::flog::decode_map;
use crate::btt::layout::{MAP_BLOCK, PAGE_BYTES};
use crate::btt::map_reader::MapReader;
use crate::media::{Media, is_zero, wait_for_reads};

/// Maximum number of units that a pass empties: 256 MiB in a pool. Each pass reads the whole map
/// once, up to 512 MiB in an arena.
const MAX_UNITS: u64 = 128;

/// State of an arena's compactions.
#[derive(Debug, Default)]
pub(super) struct Compaction {
    account: Account,
    /// Units that cannot be emptied or released because of their content.
    stuck: BTreeSet<u32>,
}

/// Sector that reads as zeros, with its map entry.
struct Spare {
    sector: u32,
    entry: u32,
}

/// Sectors of an arena that are relevant for a plan.
#[derive(Default)]
struct Survey {
    /// Sectors by the unit of their live block, which is to be emptied.
    moved: BTreeMap<u32, Vec<u32>>,
    spares: Vec<Spare>,
}

/// Pass over an arena.
struct Pass<'a, S> {
    common: &'a Common<S>,
    arena: &'a Arena,
    live: &'a LiveBlocks,
    plan: Plan,
    spares: Vec<Spare>,
}

/// Function that is called with a number of moved bytes, and returns false to end the pass.
pub(super) type OnMoved<'a> = &'a mut dyn FnMut(u64) -> bool;

impl Arena {
    /// Performs a pass. Returns the number of released bytes.
    pub(super) fn compact(
        &self,
        common: &Common<impl Media>,
        on_moved: OnMoved<'_>,
    ) -> Result<u64, BttError> {
        // A second thread has nothing to do.
        let (Some(live), Ok(mut state)) = (self.live.as_deref(), self.compaction.try_lock()) else {
            return Ok(0);
        };
        // Units without live blocks need no compaction.
        self.release_unused(common)?;
        let limits = Limits {
            unit_blocks: live.unit_blocks(),
            max_units: common.releasable_units(MAX_UNITS) as usize,
            spare_blocks: self.lanes.len() as u64,
            account: state.account,
        };
        let used = live.used_units().filter(|(unit, _)| !state.stuck.contains(unit));
        let plan = Plan::new(used.map(|(unit, live)| UsedUnit { unit, live }).collect(), &limits);
        for UsedUnit { unit, .. } in plan.emptied() {
            if self.has_unwritten_data(&common.space, live.range_of(*unit)) {
                state.stuck.insert(*unit);
            }
        }
        let max_spares = plan.blocks() + limits.spare_blocks;
        let Some(survey) = self.survey(common, live, &plan, max_spares, on_moved)? else {
            return Ok(0);
        };
        let is_kept = |unit| !state.stuck.contains(&unit);
        let spare_blocks = self.lanes.len() - self.lanes_that_stay(live, &plan);
        let limits = Limits { spare_blocks: spare_blocks as u64, ..limits };
        let plan = plan.retain(&limits, survey.spares.len() as u64, is_kept);
        if plan.emptied().is_empty() {
            return Ok(0);
        }
        let mut pass = Pass { common, arena: self, live, plan, spares: survey.spares };
        pass.run(&survey.moved, &mut state, on_moved)?;
        self.release_unused(common)?;
        let units = || pass.plan.emptied().iter().map(|unit| unit.unit);
        state.account.add_pass(units().filter(|unit| live.live_in(*unit) == 0).count() as u64);
        let is_hole = |unit: &u32| matches!(common.space.is_hole(live.range_of(*unit)), Ok(true));
        let freed = units().filter(is_hole).count() as u64;
        Ok(freed * u64::from(limits.unit_blocks) * PAGE_BYTES)
    }

    /// Finds the sectors to move and up to `max_spares` spare sectors. Returns `None` if
    /// `on_moved` ends the pass.
    fn survey(
        &self,
        common: &Common<impl Media>,
        live: &LiveBlocks,
        plan: &Plan,
        max_spares: u64,
        on_moved: OnMoved<'_>,
    ) -> Result<Option<Survey>, BttError> {
        let mut survey = Survey::default();
        if plan.emptied().is_empty() {
            return Ok(Some(survey));
        }
        let mut reader = MapReader::new(&common.space, &self.info, 0..self.info.sectors);
        while let Some(piece) = reader.read_next() {
            if !on_moved(0) {
                return Ok(None);
            }
            let piece = piece.map_err(BttError::Media)?;
            if piece.is_hole() {
                // A spare sector in it would allocate space for the map.
                continue;
            }
            for (sector, entry) in piece.iter() {
                let mut units = live.units_of(decode_map(sector, entry).block);
                if map::is_live(entry) {
                    if let Some(unit) = units.find(|unit| plan.is_emptied(*unit)) {
                        survey.moved.entry(unit).or_default().push(sector);
                    }
                } else if (survey.spares.len() as u64) < max_spares
                    && units.len() == 1
                    && plan.is_filled(units.start)
                    && self.reads_as_zeros(common, sector, entry)
                {
                    survey.spares.push(Spare { sector, entry });
                }
            }
        }
        Ok(Some(survey))
    }

    /// Number of free lanes that need no other block. Their blocks are not those of spare sectors.
    fn lanes_that_stay(&self, live: &LiveBlocks, plan: &Plan) -> usize {
        self.lanes.free_lanes().filter(|lane| stays(lane.block, live, plan)).count()
    }

    /// Returns true if a sector that is not live reads as zeros. Old data may be visible in a
    /// sector that was never written.
    fn reads_as_zeros(&self, common: &Common<impl Media>, sector: u32, entry: u32) -> bool {
        let mut bytes = [0; PAGE_BYTES as usize];
        !map::is_unwritten(entry)
            || common.space.read(self.info.block_at(sector), &mut bytes).is_ok() && is_zero(&bytes)
    }
}

impl<'a, S: Media> Pass<'a, S> {
    /// Moves all sectors, the sparsest unit first.
    fn run(
        &mut self,
        moved: &BTreeMap<u32, Vec<u32>>,
        state: &mut Compaction,
        on_moved: OnMoved<'_>,
    ) -> Result<(), BttError> {
        self.give_away_unused()?;
        let units: Vec<u32> = self.plan.emptied().iter().map(|unit| unit.unit).collect();
        for unit in units {
            for sector in moved.get(&unit).into_iter().flatten() {
                let bytes = match self.move_sector(*sector) {
                    Ok(true) => PAGE_BYTES,
                    Ok(false) => 0,
                    // The sector stays, and with it the unit.
                    Err(BttError::Sector { .. } | BttError::Unreadable { .. }) => {
                        state.stuck.insert(unit);
                        break;
                    }
                    Err(BttError::Full(_)) => return Ok(()),
                    Err(error) => return Err(error),
                };
                state.account.moved_blocks += bytes / PAGE_BYTES;
                self.common.compacted_bytes.fetch_add(bytes, Ordering::Relaxed);
                if !on_moved(bytes) {
                    return Ok(());
                }
            }
        }
        self.give_away_unused()
    }

    /// Moves a sector out of a unit that is to be emptied. Returns false if the sector has changed
    /// since the survey, or if it cannot be moved now.
    fn move_sector(&mut self, sector: u32) -> Result<bool, BttError> {
        let Self { common, arena, .. } = *self;
        let mut lane = arena.lanes.take_one(&arena.info, &common.readers);
        if !stays(lane.block, self.live, &self.plan) {
            match self.give_away(lane)? {
                Some(other) => lane = other,
                None => return Ok(false),
            }
        }
        // The block may be that of a spare sector that was never written, and is being read.
        if lane.has_failed || self.is_read(lane.block) {
            return Ok(false);
        }
        let exchange = Exchange::with_lane(common, arena, sector, lane);
        let locked = exchange.lock()?;
        let entry = arena.map.entry(&common.space, sector).map_err(BttError::Media)?;
        let block = entry & MAP_BLOCK;
        if !map::is_live(entry) || !self.live.units_of(block).any(|unit| self.plan.is_emptied(unit))
        {
            return Ok(false);
        }
        let mut bytes = [0; PAGE_BYTES as usize];
        arena.load(common, sector, entry, &mut bytes)?;
        let lane = exchange.run_locked(locked, &bytes)?;
        self.give_away(lane)?;
        Ok(true)
    }

    /// Exchanges the block of a lane with that of a spare sector. Returns `None` if the block is
    /// being read, or if no spare sector is left.
    fn give_away(&mut self, mut lane: LaneGuard<'a>) -> Result<Option<LaneGuard<'a>>, BttError> {
        let Self { common, arena, .. } = *self;
        if !wait_for_reads(|| self.is_read(lane.block)) {
            return Ok(None);
        }
        while let Some(Spare { sector, entry }) = self.spares.pop() {
            let exchange = Exchange::with_lane(common, arena, sector, lane);
            let locked = exchange.lock()?;
            let current = arena.map.entry(&common.space, sector).map_err(BttError::Media)?;
            if current == entry && !arena.has_failed(sector, entry) {
                return exchange.run_zeros(locked).map(Some);
            }
            drop(locked);
            lane = exchange.into_lane();
        }
        Ok(None)
    }

    /// Gives away the blocks of lanes in units without live blocks, as far as the lanes are free.
    fn give_away_unused(&mut self) -> Result<(), BttError> {
        for lane in self.arena.lanes.free_lanes() {
            if !stays(lane.block, self.live, &self.plan) {
                self.give_away(lane)?;
            }
        }
        Ok(())
    }

    fn is_read(&self, block: u32) -> bool {
        let at = self.arena.info.block_at(block);
        self.common.readers.is_announced(at..at + 1)
    }
}

/// Returns true if a block is in a unit that keeps its space.
fn stays(block: u32, live: &LiveBlocks, plan: &Plan) -> bool {
    let mut units = live.units_of(block);
    !units.is_empty() && units.all(|unit| !plan.is_emptied(unit) && live.live_in(unit) > 0)
}
