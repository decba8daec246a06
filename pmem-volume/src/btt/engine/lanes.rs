//! The lanes of an arena: as many writes at once, each with a free block of its own.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::thread;

use smallvec::SmallVec;

use super::readers::Readers;
use crate::btt::arena::ArenaInfo;
use crate::btt::flog::Lane;

/// Threads start to look this many lanes apart: what one takes at most, another does not find taken.
const DISTANCE: usize = 64;

/// Lanes beyond these are never used: an arena may have 65536, and memory for all of them is not the media's to ask for.
const MAX_LANES: usize = 256;

/// A lane is locked by who writes with it.
pub(super) struct Lanes(Box<[Slot]>);

#[repr(align(64))]
struct Slot(Mutex<Lane>);

/// Lanes that are this thread's until it drops them. Inline as long as there is one.
pub(super) type Taken<'a> = SmallVec<[MutexGuard<'a, Lane>; 1]>;

thread_local! {
    /// Where this thread starts to look: at lanes whose lines are likely to be in its own cache.
    static START: Cell<usize> = {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        Cell::new(THREADS.fetch_add(1, Ordering::Relaxed) * DISTANCE)
    };
}

impl Lanes {
    pub(super) fn new(lanes: Vec<Lane>) -> Self {
        Self(lanes.into_iter().take(MAX_LANES).map(|lane| Slot(Mutex::new(lane))).collect())
    }

    /// The sector of each lane's newest entry, of all exchanges that are done. Waits for each that is under way.
    pub(super) fn sectors(&self) -> Vec<u32> {
        self.0.iter().map(|slot| locked(slot.0.lock()).sector).collect()
    }

    /// Takes lanes whose blocks nobody reads, up to as many as are wanted, and one at least. Waits only if all lanes
    /// are taken, or all blocks read, and then holds none: who holds lanes waits for no other. A lane whose block has
    /// failed rests, as long as there is another one.
    #[inline]
    pub(super) fn take(&self, wanted: usize, info: &ArenaInfo, readers: &Readers) -> Taken<'_> {
        loop {
            let mut taken = self.take_any(wanted);
            if taken.is_empty() {
                taken.push(self.wait());
            }
            // The map ceased to name these blocks before their lanes were unlocked.
            let look = readers.look();
            taken.retain(|lane| !look.holds(info.block_at(lane.block)));
            if !taken.is_empty() {
                return taken;
            }
            // All of them are being read; the next look starts at others.
            START.set(START.get().wrapping_add(wanted));
            thread::yield_now();
        }
    }

    /// Waits for a lane whose block is whole; if there is none, for any.
    fn wait(&self) -> MutexGuard<'_, Lane> {
        let start = START.get();
        let lane = |offset| locked(self.0[start.wrapping_add(offset) % self.0.len()].0.lock());
        (0..self.0.len()).map(lane).find(|lane| !lane.has_failed).unwrap_or_else(|| lane(0))
    }

    #[inline]
    fn take_any(&self, wanted: usize) -> Taken<'_> {
        let mut taken = Taken::with_capacity(wanted);
        let start = START.get();
        for offset in 0..self.0.len() {
            if taken.len() == wanted {
                break;
            }
            match self.0[start.wrapping_add(offset) % self.0.len()].0.try_lock() {
                Ok(lane) if lane.has_failed => {}
                Ok(lane) => taken.push(lane),
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Poisoned(_)) => panic!("{NO_PANIC}"),
            }
        }
        taken
    }
}

fn locked<T>(result: std::sync::LockResult<T>) -> T {
    result.expect(NO_PANIC)
}

const NO_PANIC: &str = "no code panics while it holds a lane";
