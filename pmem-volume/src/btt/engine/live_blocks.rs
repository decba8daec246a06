//! Number of live blocks in each unit of space of a thin volume. A unit without live blocks can be
//! released.
//!
//! A block is live if a written map entry names it, or if an exchange in progress may store to it.
//! An entry in error counts as written. The content of all other blocks does not matter, except
//! that of unwritten sectors, which must read as zeros ([`super::release`]).
//!
//! - A writer counts its blocks before it allocates their space. The blocks that it replaces are
//!   live until the map no longer names them.
//! - A release changes the count of a unit from zero to [`RELEASING`]. A writer that meets this
//!   value waits for the end of the release, and then finds a hole. Therefore, no writer stores to
//!   a unit that is being released.
//!
//! A unit whose count falls to zero is queued, and the next discard or compaction releases it. The
//! writer does not, because its lane will probably write to the unit soon.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::cpu::{self, AtomicU32, Ordering};
use super::lock::MAX_SLEEP;
use super::map;
use crate::btt::arena::ArenaInfo;
use crate::btt::layout::MAP_BLOCK;
use crate::btt::map_reader::MapReader;
use crate::media::{Media, MediaError};
use crate::sparse_table::SparseTable;

/// Flag of a count: the unit is being released, and has no live blocks.
const RELEASING: u32 = 1 << 31;
/// Flag of a count: the unit is queued.
const QUEUED: u32 = 1 << 30;
/// Mask of the number of blocks. Map entries and lanes together name fewer blocks.
const BLOCKS: u32 = QUEUED - 1;

/// Live blocks of an arena.
pub(super) struct LiveBlocks {
    unit_shift: u32,
    /// Number of the first unit. Each unit consists only of blocks of the arena.
    first_unit: u64,
    data_at: u64,
    block_bytes: u64,
    counts: SparseTable<AtomicU32>,
    /// Number of sectors whose map entry is live. Overwriting a sector does not change it, so most
    /// writes do not share this word.
    sectors: AtomicU64,
    queue: Mutex<Vec<u32>>,
    /// Locked for reading by discards, and for writing by a release.
    discards: RwLock<()>,
    /// False if the media has changed the map by itself, so that the counts may be too low.
    is_consistent: AtomicBool,
}

impl LiveBlocks {
    /// Counts the live blocks of an arena, whose map must be recovered. `failed` are free blocks on
    /// failed media. Their units are never released, because erasing them would fail. Returns
    /// `None` if the media does not support a release.
    pub(super) fn count(
        space: &impl Media,
        info: &ArenaInfo,
        failed: impl IntoIterator<Item = u32>,
    ) -> Result<Option<Self>, MediaError> {
        let Some(unit_bytes) = space.release_unit_bytes() else { return Ok(None) };
        let live = Self::new(info, unit_bytes);
        let mut reader = MapReader::new(space, info, 0..info.sectors);
        while let Some(piece) = reader.read_next() {
            let piece = piece?;
            if piece.is_hole() {
                continue;
            }
            for (_, entry) in piece.iter().filter(|(_, entry)| map::is_live(*entry)) {
                live.add_sector();
                live.add_at_open(info, entry & MAP_BLOCK);
            }
        }
        failed.into_iter().for_each(|block| live.add_at_open(info, block));
        live.queue_present(space)?;
        Ok(Some(live))
    }

    pub(super) fn new(info: &ArenaInfo, unit_bytes: u64) -> Self {
        assert!(unit_bytes.is_power_of_two());
        let block_bytes = u64::from(info.block_bytes);
        let end = info.data_at + u64::from(info.blocks) * block_bytes;
        let units = info.data_at.div_ceil(unit_bytes)..end / unit_bytes;
        let len = u32::try_from(units.end.saturating_sub(units.start)).unwrap_or(0);
        Self {
            unit_shift: unit_bytes.trailing_zeros(),
            first_unit: units.start,
            data_at: info.data_at,
            block_bytes,
            counts: SparseTable::new(len, || AtomicU32::new(0)),
            sectors: AtomicU64::new(0),
            queue: Mutex::default(),
            discards: RwLock::default(),
            is_consistent: AtomicBool::new(true),
        }
    }

    /// Number of units that can be released.
    pub(super) fn units(&self) -> u32 {
        self.counts.len()
    }

    /// Number of whole blocks in a unit.
    pub(super) fn unit_blocks(&self) -> u32 {
        ((1 << self.unit_shift) / self.block_bytes) as u32
    }

    /// Returns the number of live blocks in a unit.
    pub(super) fn live_in(&self, unit: u32) -> u32 {
        self.counts.get(unit).map_or(0, |count| count.load(Ordering::SeqCst) & BLOCKS)
    }

    /// Returns the units with live blocks, and the number of these.
    pub(super) fn used_units(&self) -> impl Iterator<Item = (u32, u32)> {
        let units = self.counts.used_indexes().map(|unit| (unit, self.live_in(unit)));
        units.filter(|(_, live)| *live > 0)
    }

    /// Returns the range of a unit in the volume.
    pub(super) fn range_of(&self, unit: u32) -> Range<u64> {
        let start = (self.first_unit + u64::from(unit)) << self.unit_shift;
        start..start + (1 << self.unit_shift)
    }

    /// Returns the units that contain a part of a block. Units with other parts of the volume are
    /// omitted.
    #[inline]
    pub(super) fn units_of(&self, block: u32) -> Range<u32> {
        let at = self.data_at + u64::from(block) * self.block_bytes;
        let first = at >> self.unit_shift;
        let end = ((at + self.block_bytes - 1) >> self.unit_shift) + 1;
        let [first, end] = [first, end].map(|unit| {
            unit.saturating_sub(self.first_unit).min(u64::from(self.counts.len())) as u32
        });
        first..end
    }

    /// Counts a block while no other thread uses the counts. A block outside the arena is damage,
    /// which reads and writes detect.
    fn add_at_open(&self, info: &ArenaInfo, block: u32) {
        if block < info.blocks {
            for unit in self.units_of(block) {
                let count = self.counts.get_or_create(unit);
                count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            }
        }
    }

    /// Queues the units that have space but no live blocks. A killed process may have left them,
    /// even without data.
    fn queue_present(&self, space: &impl Media) -> Result<(), MediaError> {
        for unit in 0..self.units() {
            if !space.is_hole(self.range_of(unit))? {
                self.queue_unused(unit);
            }
        }
        Ok(())
    }

    /// Counts a block. Waits until none of its units is being released.
    #[inline]
    pub(super) fn add(&self, block: u32) {
        for unit in self.units_of(block) {
            let count = self.counts.get_or_create(unit);
            while count.fetch_add(1, Ordering::SeqCst) & RELEASING != 0 {
                count.fetch_sub(1, Ordering::SeqCst);
                wait_for_release(count);
            }
        }
    }

    /// Removes a block that was counted.
    #[inline]
    pub(super) fn remove(&self, block: u32) {
        for unit in self.units_of(block) {
            let count = self.counts.get_or_create(unit);
            let before = count.fetch_sub(1, Ordering::SeqCst);
            match before & BLOCKS {
                0 => {
                    count.fetch_add(1, Ordering::SeqCst);
                    self.is_consistent.store(false, Ordering::SeqCst);
                }
                1 if before & QUEUED == 0 => self.queue(unit, count),
                _ => {}
            }
        }
    }

    /// Number of sectors that were written and not discarded since.
    pub(super) fn sectors(&self) -> u64 {
        self.sectors.load(Ordering::Relaxed)
    }

    /// Counts a sector whose map entry becomes live. The line of the entry is locked, so changes of
    /// the same sector are counted in their order.
    #[inline]
    pub(super) fn add_sector(&self) {
        self.sectors.fetch_add(1, Ordering::Relaxed);
    }

    /// Accounts for a discard, which has replaced the map entry of a sector. If the sector was
    /// unwritten, its content may have prevented a release.
    pub(super) fn discard(&self, sector: u32, entry: u32) {
        if map::is_live(entry) {
            self.sectors.fetch_sub(1, Ordering::Relaxed);
            self.remove(entry & MAP_BLOCK);
        } else if map::is_unwritten(entry) {
            self.units_of(sector).for_each(|unit| self.queue_unused(unit));
        }
    }

    fn queue_unused(&self, unit: u32) {
        let count = self.counts.get_or_create(unit);
        if count.load(Ordering::SeqCst) == 0 {
            self.queue(unit, count);
        }
    }

    #[cold]
    fn queue(&self, unit: u32, count: &AtomicU32) {
        if count.fetch_or(QUEUED, Ordering::SeqCst) & QUEUED == 0 {
            self.locked_queue().push(unit);
        }
    }

    /// Prevents releases, so that no unit becomes a hole.
    pub(super) fn prevent_release(&self) -> RwLockReadGuard<'_, ()> {
        self.discards.read().expect(NO_PANIC)
    }

    /// Waits until no other thread prevents or performs a release.
    pub(super) fn lock_for_release(&self) -> RwLockWriteGuard<'_, ()> {
        self.discards.write().expect(NO_PANIC)
    }

    /// Returns the number of queued units.
    pub(super) fn queued(&self) -> usize {
        self.locked_queue().len()
    }

    /// Takes up to `max` units from the queue. Each of them is queued again when its count falls to
    /// zero.
    pub(super) fn take_queued(&self, max: usize) -> Vec<u32> {
        let units = {
            let mut queue = self.locked_queue();
            let left = queue.len().saturating_sub(max);
            queue.split_off(left)
        };
        for unit in &units {
            self.counts.get_or_create(*unit).fetch_and(!QUEUED, Ordering::SeqCst);
        }
        units
    }

    /// Begins the release of a unit. Returns false if it has live blocks.
    pub(super) fn claim(&self, unit: u32) -> bool {
        let count = self.counts.get_or_create(unit);
        self.is_consistent.load(Ordering::SeqCst)
            && count.compare_exchange(0, RELEASING, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// Ends the release of a unit. If it kept its space, it is queued again.
    pub(super) fn end_release(&self, unit: u32, is_released: bool) {
        let count = self.counts.get_or_create(unit);
        count.fetch_and(!RELEASING, Ordering::SeqCst);
        cpu::wake_all(count);
        if !is_released {
            self.queue_unused(unit);
        }
    }

    fn locked_queue(&self) -> MutexGuard<'_, Vec<u32>> {
        self.queue.lock().expect(NO_PANIC)
    }
}

const NO_PANIC: &str = "no code panics while holding a lock of the counts";

#[cold]
fn wait_for_release(count: &AtomicU32) {
    for _ in 0..cpu::SPINS {
        if count.load(Ordering::SeqCst) & RELEASING == 0 {
            return;
        }
        cpu::spin_loop();
    }
    loop {
        let value = count.load(Ordering::SeqCst);
        if value & RELEASING == 0 {
            return;
        }
        cpu::sleep_while(count, value, MAX_SLEEP);
    }
}

#[cfg(test)]
impl LiveBlocks {
    /// Returns the number of live blocks in each unit.
    pub(super) fn counts(&self) -> Vec<u32> {
        (0..self.units()).map(|unit| self.live_in(unit)).collect()
    }
}
