//! Lanes of an arena. Each lane has a free block, and allows one write at a time.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::lock::{Lock, LockGuard};
use super::readers::Readers;
use crate::btt::arena::ArenaInfo;
use crate::btt::flog::Lane;

/// Distance between the lanes that different threads try first. The distance is the largest number
/// of lanes that a thread takes at a time.
const LANE_DISTANCE: usize = 64;

/// Maximum number of lanes that are used. An arena may claim 65536, but untrusted media must not
/// determine how much memory is allocated.
const MAX_LANES: usize = 256;

/// Lanes of an arena. A write locks the lanes that it uses.
pub(super) struct Lanes(Box<[Slot]>);

#[repr(align(64))]
struct Slot(Lock<Lane>);

/// Lanes that this thread holds until it drops them.
pub(super) type LaneGuards<'a> = Vec<LaneGuard<'a>>;

/// Lane that this thread holds.
pub(super) struct LaneGuard<'a> {
    lane: LockGuard<'a, Lane>,
    /// Old block of the sector in the current exchange, in the encoding of the flog. The lane
    /// receives this block.
    pub(super) old: u32,
    /// True if the old block is counted as live.
    pub(super) is_old_live: bool,
}

thread_local! {
    /// Lane that this thread tries first. The cache lines of this lane are probably in the cache of
    /// the thread's CPU.
    static FIRST_LANE: Cell<usize> = {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        Cell::new(THREADS.fetch_add(1, Ordering::Relaxed) * LANE_DISTANCE)
    };
}

impl Lanes {
    pub(super) fn new(lanes: Vec<Lane>) -> Self {
        Self(lanes.into_iter().take(MAX_LANES).map(|lane| Slot(Lock::new(lane))).collect())
    }

    /// Returns the sector of each lane's newest entry. Waits for exchanges in progress.
    pub(super) fn sectors(&self) -> Vec<u32> {
        self.0.iter().map(|slot| slot.0.lock().sector).collect()
    }

    /// Takes a lane whose block is not being read. Waits only if all lanes are in use or all blocks
    /// are being read. A lane with a failed block is used only if no other lane is available.
    #[inline]
    pub(super) fn take_one(&self, info: &ArenaInfo, readers: &Readers) -> LaneGuard<'_> {
        loop {
            let guard = self.free_lanes().next().unwrap_or_else(|| self.wait_for_lane());
            if !readers.announcements_after_lock().contains(info.block_at(guard.block)) {
                return guard;
            }
            drop(guard);
            self.advance_start(1);
        }
    }

    /// Takes at least one and up to `requested` lanes. A thread holds no lane while it waits here,
    /// which prevents deadlocks.
    pub(super) fn take(
        &self,
        requested: usize,
        info: &ArenaInfo,
        readers: &Readers,
    ) -> LaneGuards<'_> {
        loop {
            // Allocated before any lane is taken.
            let mut taken = LaneGuards::with_capacity(requested);
            taken.extend(self.free_lanes().take(requested));
            if taken.is_empty() {
                taken.push(self.wait_for_lane());
            }
            let announcements = readers.announcements_after_lock();
            taken.retain(|guard| !announcements.contains(info.block_at(guard.block)));
            if !taken.is_empty() {
                return taken;
            }
            self.advance_start(requested);
        }
    }

    /// Number of lanes.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Makes the next search of this thread start at other lanes, because the free blocks of the
    /// current lanes are being read or have no space.
    #[cold]
    pub(super) fn advance_start(&self, lanes: usize) {
        FIRST_LANE.set(FIRST_LANE.get().wrapping_add(lanes));
        thread::yield_now();
    }

    /// Waits for a lane with a good block, or for any lane if none has a good block.
    #[cold]
    fn wait_for_lane(&self) -> LaneGuard<'_> {
        let first = self.slots_in_order().next().expect("an arena has lanes");
        let mut all = self.slots_in_order().map(|slot| LaneGuard::new(slot.0.lock()));
        all.find(|guard| !guard.has_failed).unwrap_or_else(|| LaneGuard::new(first.0.lock()))
    }

    /// Takes free lanes with good blocks one by one.
    #[inline]
    pub(super) fn free_lanes(&self) -> impl Iterator<Item = LaneGuard<'_>> {
        self.slots_in_order()
            .filter_map(|slot| slot.0.try_lock())
            .map(LaneGuard::new)
            .filter(|guard| !guard.has_failed)
    }

    /// Returns all slots in the order in which this thread tries them.
    #[inline]
    fn slots_in_order(&self) -> impl Iterator<Item = &Slot> {
        let (before, from) = self.0.split_at(FIRST_LANE.get() % self.0.len());
        from.iter().chain(before)
    }
}

impl<'a> LaneGuard<'a> {
    #[inline]
    fn new(lane: LockGuard<'a, Lane>) -> Self {
        Self { lane, old: 0, is_old_live: false }
    }
}

impl Deref for LaneGuard<'_> {
    type Target = Lane;

    #[inline]
    fn deref(&self) -> &Lane {
        &self.lane
    }
}

impl DerefMut for LaneGuard<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Lane {
        &mut self.lane
    }
}
