//! The lanes of an arena: as many writes at once, each with a free block of its own.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::lock::{Lock, LockGuard};
use super::readers::Readers;
use crate::btt::arena::ArenaInfo;
use crate::btt::flog::Lane;

/// Threads start to look this many lanes apart: what one takes at most, another does not find
/// taken.
const DISTANCE: usize = 64;

/// Lanes beyond these are never used: an arena may have 65536, and memory for all of them is not
/// the media's to ask for.
const MAX_LANES: usize = 256;

/// A lane is locked by who writes with it.
pub(super) struct Lanes(Box<[Slot]>);

#[repr(align(64))]
struct Slot(Lock<Lane>);

/// Lanes that are this thread's until it drops them.
pub(super) type Taken<'a> = Vec<Held<'a>>;

/// A lane that is this thread's.
pub(super) struct Held<'a> {
    lane: LockGuard<'a, Lane>,
    /// For the exchange that it is taken for: the block that the sector has, to which the lane's
    /// is given, as the flog names it.
    pub(super) old: u32,
}

thread_local! {
    /// Where this thread starts to look: at lanes whose lines are likely to be in its own cache.
    static START: Cell<usize> = {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        Cell::new(THREADS.fetch_add(1, Ordering::Relaxed) * DISTANCE)
    };
}

impl Lanes {
    pub(super) fn new(lanes: Vec<Lane>) -> Self {
        Self(lanes.into_iter().take(MAX_LANES).map(|lane| Slot(Lock::new(lane))).collect())
    }

    /// The sector of each lane's newest entry, of all exchanges that are done. Waits for each that
    /// is under way.
    pub(super) fn sectors(&self) -> Vec<u32> {
        self.0.iter().map(|slot| slot.0.lock().sector).collect()
    }

    /// Takes a lane whose block nobody reads. Waits only if all lanes are taken, or all blocks
    /// read. A lane whose block has failed rests, as long as there is another one.
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

    /// The same with several, up to as many as are wanted, and one at least. Whoever waits here
    /// holds none: who holds lanes waits for no other.
    pub(super) fn take(&self, wanted: usize, info: &ArenaInfo, readers: &Readers) -> Taken<'_> {
        loop {
            // Nobody is to wait for memory while he holds some.
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

    /// All blocks that were found are being read; the next look starts at others.
    #[cold]
    fn look_further(&self, lanes: usize) {
        START.set(START.get().wrapping_add(lanes));
        thread::yield_now();
    }

    /// Waits for a lane whose block is whole; if there is none, for any.
    #[cold]
    fn wait(&self) -> Held<'_> {
        let first = self.in_turn().next().expect("an arena has lanes");
        let mut all = self.in_turn().map(|slot| Held::new(slot.0.lock()));
        all.find(|held| !held.has_failed).unwrap_or_else(|| Held::new(first.0.lock()))
    }

    /// Takes lanes that nobody has, and whose blocks are whole, one after another.
    #[inline]
    fn free(&self) -> impl Iterator<Item = Held<'_>> {
        self.in_turn()
            .filter_map(|slot| slot.0.try_lock())
            .map(Held::new)
            .filter(|held| !held.has_failed)
    }

    /// All slots, from where this thread starts to look.
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
