//! Lanes of an arena. Each lane has a free block, and allows one write at a time.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::lock::{Lock, LockGuard};
use super::readers::Readers;
use crate::btt::arena::ArenaInfo;
use crate::btt::flog::Lane;

/// Distance between the lanes that different threads try first. It is the largest number of lanes
/// that a thread takes at a time.
const DISTANCE: usize = 64;

/// Maximum number of lanes that are used. An arena may claim 65536, but untrusted media must not
/// determine how much memory is allocated.
const MAX_LANES: usize = 256;

/// Lanes of an arena. A write locks the lanes that it uses.
pub(super) struct Lanes(Box<[Slot]>);

#[repr(align(64))]
struct Slot(Lock<Lane>);

/// Lanes that this thread holds until it drops them.
pub(super) type Taken<'a> = Vec<Held<'a>>;

/// Lane that this thread holds.
pub(super) struct Held<'a> {
    lane: LockGuard<'a, Lane>,
    /// Old block of the sector in the current exchange, in the encoding of the flog. The lane
    /// receives this block.
    pub(super) old: u32,
}

thread_local! {
    /// Lane that this thread tries first. The cache lines of this lane are probably in the cache of
    /// the thread's CPU.
    static START: Cell<usize> = {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        Cell::new(THREADS.fetch_add(1, Ordering::Relaxed) * DISTANCE)
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
    pub(super) fn take_one(&self, info: &ArenaInfo, readers: &Readers) -> Held<'_> {
        loop {
            let held = self.free().next().unwrap_or_else(|| self.wait());
            if !readers.look_behind_lock().holds(info.block_at(held.block)) {
                return held;
            }
            drop(held);
            self.look_further(1);
        }
    }

    /// Takes at least one and up to `wanted` lanes. A thread holds no lane while it waits here,
    /// which prevents deadlocks.
    pub(super) fn take(&self, wanted: usize, info: &ArenaInfo, readers: &Readers) -> Taken<'_> {
        loop {
            // Allocated before any lane is taken.
            let mut taken = Taken::with_capacity(wanted);
            taken.extend(self.free().take(wanted));
            if taken.is_empty() {
                taken.push(self.wait());
            }
            let look = readers.look_behind_lock();
            taken.retain(|held| !look.holds(info.block_at(held.block)));
            if !taken.is_empty() {
                return taken;
            }
            self.look_further(wanted);
        }
    }

    /// All free blocks are being read. The next search starts at other lanes.
    #[cold]
    fn look_further(&self, lanes: usize) {
        START.set(START.get().wrapping_add(lanes));
        thread::yield_now();
    }

    /// Waits for a lane with a good block, or for any lane if none has a good block.
    #[cold]
    fn wait(&self) -> Held<'_> {
        let first = self.in_turn().next().expect("an arena has lanes");
        let mut all = self.in_turn().map(|slot| Held::new(slot.0.lock()));
        all.find(|held| !held.has_failed).unwrap_or_else(|| Held::new(first.0.lock()))
    }

    /// Takes free lanes with good blocks one by one.
    #[inline]
    fn free(&self) -> impl Iterator<Item = Held<'_>> {
        self.in_turn()
            .filter_map(|slot| slot.0.try_lock())
            .map(Held::new)
            .filter(|held| !held.has_failed)
    }

    /// Returns all slots in the order in which this thread tries them.
    #[inline]
    fn in_turn(&self) -> impl Iterator<Item = &Slot> {
        let (before, from) = self.0.split_at(START.get() % self.0.len());
        from.iter().chain(before)
    }
}

impl<'a> Held<'a> {
    #[inline]
    fn new(lane: LockGuard<'a, Lane>) -> Self {
        Self { lane, old: 0 }
    }
}

impl Deref for Held<'_> {
    type Target = Lane;

    #[inline]
    fn deref(&self) -> &Lane {
        &self.lane
    }
}

impl DerefMut for Held<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Lane {
        &mut self.lane
    }
}
