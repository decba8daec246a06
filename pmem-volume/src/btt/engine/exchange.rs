//! Exchange: a write of sectors after which a crash leaves each sector old or new.
//!
//! An exchange uses a separate lane for each sector. Up to [`MAX_SECTORS`] contiguous sectors are
//! exchanged together and share the barriers:
//!
//! 1. Take lanes whose free blocks are not being read.
//! 2. Lock the lines of the map. In a thin volume, count the free blocks as live, so that their
//!    space is not released ([`live_blocks`](super::live_blocks)). Allocate space for the free
//!    blocks and for the map words of the sectors, because a thin volume may lack it. (The flog has
//!    space.) Store the first halves of the flog entries (the sector and its current block), and
//!    store the data to the free blocks. **Persist** both. Also persist the map words of the
//!    sectors, and the map words that the lanes changed last. (The data is stored after the lock is
//!    taken, because a locked instruction waits until earlier stores have left the CPU. The
//!    following fence waits for them anyway.)
//! 3. Store the second halves (the new block and the sequence number). Each of them commits the
//!    exchange of its sector. **Persist** them.
//! 4. Store the words of the map. From here on, other threads read the new sectors, and the old
//!    blocks are not live any more. Unlock the lines.
//!
//! Reasons for this order:
//!
//! - Space before everything else: if the pool is full, the exchange fails and has no effect.
//! - Data before second half: a committed exchange has all of its data.
//! - First half before second half: a committed entry is whole. Until then, the store only
//!   overwrites the older of the lane's two entries, which is not in use.
//! - Second half before map: if the map named a new block without an exchange in the flog, that
//!   block would also belong to a lane, and the old block would have no owner.
//! - Map before the next entry of the same lane: the map need not be durable when a write returns,
//!   because recovery redoes it from the lane's newest entry. It must be durable before another
//!   entry becomes the newest. Therefore, step 2 persists the word that the lane changed last.
//! - Map before the next entry for the same sector, which may be in another lane: recovery expects
//!   the map to name the old or the new block of an exchange. If the earlier exchange were not in
//!   the map, the map would name neither block of the later one. Therefore, step 2 persists the
//!   words of its sectors.
//!
//! The lane's next data may overwrite the old block before the map is durable, which is harmless.
//! Until the lane's next entry is committed, recovery redoes the map, which then no longer names
//! the old block.
//!
//! The Linux driver has the same steps, and persists each of them (drivers/nvdimm/btt.c,
//! btt_write_pg). It therefore assumes that the map is durable (btt_freelist_init), and would
//! overwrite lanes whose map word is not durable. It may open the media only after
//! [`Engine::quiesce`](super::Engine::quiesce) or a recovery by this code.

use std::iter;
use std::ops::Range;

use super::arena::Arena;
use super::lanes::{LaneGuard, LaneGuards};
use super::live_blocks::LiveBlocks;
use super::map::{self, LockedLines};
use super::{BttError, Common};
use crate::btt::check::Finding;
use crate::btt::flog::decode_map;
use crate::btt::layout::{MAP_BLOCK, MAP_ERROR, PAGE_BYTES};
use crate::media::{Media, MediaError, Pending};

/// Maximum number of sectors in an exchange: a quarter of the lanes, so that four threads can write
/// at the same time.
pub(super) const MAX_SECTORS: usize = 64;

/// Exchange in progress. An exchange that is dropped before it is logged has no effect.
///
/// `L` is the type of its lanes: usually a single lane, which needs no loops.
pub(super) struct Exchange<'a, S, L> {
    common: &'a Common<S>,
    arena: &'a Arena,
    first: u32,
    lanes: L,
    /// Locked map lines of the sectors, once the exchange has been logged.
    locked: Option<LockedLines<'a>>,
}

/// Exchanges sectors starting at `first`, as many as there are free lanes. `bytes` must contain
/// whole sectors. Returns the number of sectors.
#[inline]
pub(super) fn exchange(
    common: &Common<impl Media>,
    arena: &Arena,
    first: u32,
    bytes: &[u8],
) -> Result<usize, BttError> {
    // A damaged arena may have no lanes.
    arena.check_writable()?;
    if bytes.len() == arena.info.sector_bytes as usize {
        Exchange::begin_one(common, arena, first).run(bytes)
    } else {
        let requested = bytes.len() / arena.info.sector_bytes as usize;
        Exchange::begin(common, arena, first, requested).run(bytes)
    }
}

/// Retries the first sector through the other lanes if an exchange has failed with `error` because
/// the pool is full. A lane that has replaced the original block of a sector may now have a block
/// without space, although the blocks of other lanes have space.
#[cold]
pub(super) fn exchange_after(
    error: BttError,
    common: &Common<impl Media>,
    arena: &Arena,
    first: u32,
    bytes: &[u8],
) -> Result<usize, BttError> {
    let mut result = Err(error);
    for _ in 0..arena.lanes.len() {
        if !matches!(result, Err(BttError::Full(_))) {
            break;
        }
        // If the map needs space, the exchange fails with every lane.
        arena.provision(&common.space, arena.map.word_range(&(first..first + 1)))?;
        arena.lanes.advance_start(1);
        result = exchange(common, arena, first, &bytes[..arena.info.sector_bytes as usize]);
    }
    result
}

impl<'a, S: Media> Exchange<'a, S, [LaneGuard<'a>; 1]> {
    /// Performs step 1 for a single sector.
    #[inline]
    pub(super) fn begin_one(common: &'a Common<S>, arena: &'a Arena, first: u32) -> Self {
        let lane = arena.lanes.take_one(&arena.info, &common.readers);
        Self::with_lane(common, arena, first, lane)
    }

    /// Starts an exchange of a single sector with a lane whose block is not being read.
    #[inline]
    pub(super) fn with_lane(
        common: &'a Common<S>,
        arena: &'a Arena,
        first: u32,
        lane: LaneGuard<'a>,
    ) -> Self {
        Self { common, arena, first, lanes: [lane], locked: None }
    }

    /// Abandons an exchange that was not logged.
    pub(super) fn into_lane(self) -> LaneGuard<'a> {
        let [lane] = self.lanes;
        lane
    }

    /// Performs steps 2 to 4 for a sector that reads as zeros and must stay so. The map entry keeps
    /// the flag for zeros, which the redo of this exchange would not set. Therefore, zeros are
    /// stored and durable before the exchange is committed. A block in a hole needs no zeros.
    /// Returns the lane, which then has the block of the sector.
    pub(super) fn run_zeros(mut self, locked: LockedLines<'a>) -> Result<LaneGuard<'a>, BttError> {
        let Self { common: Common { space, .. }, arena, .. } = self;
        let block = self.lanes[0].block;
        self.prepare(&locked, false)?;
        // The block is counted, so a hole stays one until the exchange ends, or gets zeroed space.
        let is_hole = matches!(space.next_data(arena.info.data_range(block)), Ok(None));
        let zeros = [0; PAGE_BYTES as usize];
        self.store(locked, if is_hole { &[] } else { &zeros })?;
        self.commit()?;
        let [lane] = self.publish_as(map::zeros_entry)?;
        if let Some(live) = &arena.live {
            live.remove(block);
        }
        Ok(lane)
    }

    /// Performs steps 2 to 4 for a sector whose map line is already locked. Returns the lane, which
    /// then has the old block of the sector.
    pub(super) fn run_locked(
        mut self,
        locked: LockedLines<'a>,
        bytes: &[u8],
    ) -> Result<LaneGuard<'a>, BttError> {
        self.prepare(&locked, true)?;
        self.store(locked, bytes)?;
        self.commit()?;
        let [lane] = self.publish_as(map::written_entry)?;
        Ok(lane)
    }
}

impl<'a, S: Media> Exchange<'a, S, LaneGuards<'a>> {
    /// Performs step 1 for as many of the requested sectors as there are free lanes.
    pub(super) fn begin(
        common: &'a Common<S>,
        arena: &'a Arena,
        first: u32,
        requested: usize,
    ) -> Self {
        let lanes = arena.lanes.take(requested.min(MAX_SECTORS), &arena.info, &common.readers);
        Self { common, arena, first, lanes, locked: None }
    }
}

impl<'a, S: Media, L: AsRef<[LaneGuard<'a>]> + AsMut<[LaneGuard<'a>]>> Exchange<'a, S, L> {
    /// Performs steps 2 to 4. Returns the number of sectors.
    #[inline]
    fn run(mut self, bytes: &[u8]) -> Result<usize, BttError> {
        let sectors = self.sectors().len();
        self.log(bytes)?;
        self.commit()?;
        self.publish()?;
        Ok(sectors)
    }

    #[inline]
    pub(super) fn sectors(&self) -> Range<u32> {
        self.first..self.first + self.lanes.as_ref().len() as u32
    }

    /// Performs step 2. `bytes` must contain at least the sectors of the exchange.
    #[inline]
    pub(super) fn log(&mut self, bytes: &[u8]) -> Result<(), BttError> {
        let locked = self.lock()?;
        self.prepare(&locked, true)?;
        self.store(locked, bytes)
    }

    /// Locks the map lines of the sectors.
    #[inline]
    pub(super) fn lock(&self) -> Result<LockedLines<'a>, BttError> {
        // Checked after the lanes are taken, because a lane that a failed exchange has released
        // still contains the entry of that exchange.
        self.arena.check_writable()?;
        Ok(self.common.locks.lock(self.arena.map.word_range(&self.sectors())))
    }

    /// Performs the part of step 2 that stores nothing. Without `needs_data`, the blocks get no
    /// space.
    #[inline]
    fn prepare(&mut self, locked: &LockedLines<'_>, needs_data: bool) -> Result<(), BttError> {
        self.count_new_blocks();
        let provisioned = self.provision(locked, needs_data);
        let prepared = provisioned.and_then(|()| self.read_old_blocks());
        if prepared.is_err() {
            self.discount_new_blocks();
        }
        prepared
    }

    /// Performs the rest of step 2. `bytes` may be empty if the blocks contain the data already.
    #[inline]
    fn store(&mut self, locked: LockedLines<'a>, bytes: &[u8]) -> Result<(), BttError> {
        let mut pending = Pending::default();
        let stored = self.store_log(bytes, &mut pending);
        self.arena.latch(stored.and_then(|()| self.common.space.end_persist(&pending)))?;
        self.locked = Some(locked);
        Ok(())
    }

    /// Counts the free blocks as live, so that their space is not released.
    #[inline]
    fn count_new_blocks(&self) {
        if let Some(live) = &self.arena.live {
            self.lanes.as_ref().iter().for_each(|guard| live.add(guard.block));
        }
    }

    #[cold]
    fn discount_new_blocks(&self) {
        if let Some(live) = &self.arena.live {
            self.lanes.as_ref().iter().for_each(|guard| live.remove(guard.block));
        }
    }

    /// Allocates space for the map words, which are locked, and for the data. Takes no instructions
    /// on media without holes.
    #[inline]
    fn provision(&self, locked: &LockedLines<'_>, needs_data: bool) -> Result<(), BttError> {
        let Self { common: Common { space, .. }, arena, .. } = *self;
        arena.provision(space, locked.words())?;
        let mut lanes = self.lanes.as_ref().iter().filter(|_| needs_data);
        lanes.try_for_each(|guard| arena.provision(space, arena.info.data_range(guard.block)))
    }

    /// Reads the blocks of the sectors, whose map lines are locked, in the encoding of the flog. A
    /// failed block gets the error flag, which informs the next program that opens the volume
    /// (Linux then clears the error). If an entry is unreadable, nothing changes, because nothing
    /// has been stored yet.
    #[inline]
    fn read_old_blocks(&mut self) -> Result<(), BttError> {
        let Self { common: Common { space, .. }, arena, .. } = *self;
        let bound = arena.info.blocks;
        for (sector, guard) in (self.first..).zip(self.lanes.as_mut()) {
            let entry = arena.map.entry(space, sector).map_err(BttError::Media)?;
            let block = decode_map(sector, entry).block;
            if block >= bound {
                return Err(arena.mark_damaged(space, Finding::MapRange { sector, block, bound }));
            }
            guard.old = if arena.has_failed(sector, entry) { block | MAP_ERROR } else { block };
            guard.is_old_live = map::is_live(entry);
        }
        Ok(())
    }

    #[inline]
    fn store_log(&self, bytes: &[u8], pending: &mut Pending) -> Result<(), MediaError> {
        let Self { common: Common { space, .. }, arena: Arena { info, map, .. }, .. } = *self;
        space.begin_persist(map.word_range(&self.sectors()), pending)?;
        for (sector, guard) in (self.first..).zip(self.lanes.as_ref()) {
            let at = guard.entry_at(info);
            let [first_half, _] = guard.halves(sector, guard.old);
            space.store_word(at, first_half)?;
            space.begin_persist(at..at + 8, pending)?;
        }
        let changed_last = self
            .lanes
            .as_ref()
            .iter()
            .map(|guard| map.word_range(&(guard.sector..guard.sector + 1)));
        merge_adjacent(changed_last).try_for_each(|words| space.begin_persist(words, pending))?;
        for (guard, data) in
            self.lanes.as_ref().iter().zip(bytes.chunks_exact(info.sector_bytes as usize))
        {
            space.store_bulk(info.block_at(guard.block), data, pending)?;
        }
        Ok(())
    }

    /// Performs step 3.
    #[inline]
    pub(super) fn commit(&mut self) -> Result<(), BttError> {
        // After a failure, nothing may be committed.
        self.arena.check_writable()?;
        self.arena.latch(self.store_commit())
    }

    #[inline]
    fn store_commit(&self) -> Result<(), MediaError> {
        let Self { common: Common { space, .. }, arena, .. } = *self;
        let mut pending = Pending::default();
        for (sector, guard) in (self.first..).zip(self.lanes.as_ref()) {
            let at = guard.entry_at(&arena.info) + 8;
            let [_, second_half] = guard.halves(sector, guard.old);
            space.store_word(at, second_half)?;
            space.begin_persist(at..at + 8, &mut pending)?;
        }
        space.end_persist(&pending)
    }

    /// Performs step 4.
    #[inline]
    pub(super) fn publish(self) -> Result<(), BttError> {
        self.publish_as(map::written_entry).map(drop)
    }

    /// Performs step 4 with map entries that `entry` returns for the new blocks. Returns the lanes.
    #[inline]
    fn publish_as(mut self, entry: fn(u32) -> u32) -> Result<L, BttError> {
        let locked = self.locked.take().expect("it was logged before");
        let (first, lanes) = (self.first, self.lanes.as_ref());
        let new = |sector: u32, _| entry(lanes[(sector - first) as usize].block);
        self.arena.latch(self.arena.map.change(
            &self.common.space,
            self.sectors(),
            &locked,
            new,
        ))?;
        if let Some(live) = &self.arena.live {
            let is_live = map::is_live(entry(0));
            self.lanes.as_ref().iter().for_each(|guard| {
                if is_live && !guard.is_old_live {
                    live.add_sector();
                }
                discount_old_block(live, guard);
            });
        }
        for (sector, guard) in (first..).zip(self.lanes.as_mut()) {
            let old = guard.old;
            guard.advance(self.arena.second_slot, sector, old);
        }
        Ok(self.lanes)
    }
}

/// Removes the replaced block of a sector from the counts of live blocks. A failed block is counted
/// forever, because erasing its space would fail.
#[inline]
fn discount_old_block(live: &LiveBlocks, guard: &LaneGuard<'_>) {
    let has_failed = guard.old & MAP_ERROR != 0;
    match guard.is_old_live {
        true if !has_failed => live.remove(guard.old),
        false if has_failed => live.add(guard.old & MAP_BLOCK),
        _ => {}
    }
}

/// Merges each range with its predecessor if they are adjacent. Sectors that were written together
/// have contiguous lanes and words.
#[inline]
fn merge_adjacent(
    mut ranges: impl Iterator<Item = Range<u64>>,
) -> impl Iterator<Item = Range<u64>> {
    let mut next = ranges.next();
    iter::from_fn(move || {
        let mut run = next.take()?;
        for range in ranges.by_ref() {
            if !(run.start..=run.end).contains(&range.start) {
                next = Some(range);
                break;
            }
            run.end = run.end.max(range.end);
        }
        Some(run)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joined_ranges_cover_the_same_bytes() {
        /// Starts and ends of ranges.
        type Ranges = &'static [[u64; 2]];
        let cases: [(Ranges, Ranges); 6] = [
            (&[], &[]),
            (&[[8, 16]], &[[8, 16]]),
            (&[[8, 16], [16, 24], [24, 32]], &[[8, 32]]),
            (&[[8, 16], [8, 16], [16, 24], [8, 16]], &[[8, 24]]),
            (&[[8, 16], [24, 32], [32, 40], [16, 24]], &[[8, 16], [24, 40], [16, 24]]),
            (&[[8, 16], [0, 8]], &[[8, 16], [0, 8]]),
        ];
        for (ranges, expected) in cases {
            let found = merge_adjacent(ranges.iter().map(|[start, end]| *start..*end))
                .map(|run| [run.start, run.end]);
            assert_eq!(found.collect::<Vec<_>>(), expected, "{ranges:?}");
        }
    }
}
