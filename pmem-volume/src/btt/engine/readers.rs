//! Which blocks are being read, of all arenas; a block is known by where it lies. A block that a write has replaced is its lane's for the next write; a reader that found
//! it in the map before may still be at it (UEFI 2.10, 6.4: the read tracking table).
//!
//! A reader says which block it is about to read, and only then looks whether the map still names it. A writer looks who
//! reads a block after the map has ceased to name it. Both are full barriers in between, so one of them sees the other:
//! the reader that the map has changed, or the writer that the block is being read. The writer then takes another lane;
//! neither waits.

use std::cell::Cell;
use std::hint;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
use std::thread;

/// So many threads can read at once; further ones wait for one of them to finish.
const SLOTS: usize = 128;
/// What is in a slot that nobody has; no block lies at the start of a volume.
const FREE: u64 = 0;

/// The slots, each in a cache line of its own.
pub(super) struct Readers {
    slots: Box<[Slot]>,
    /// Slots from here on were never used.
    used: AtomicUsize,
}

/// Where the block lies that is being read.
#[repr(align(64))]
struct Slot(AtomicU64);

/// A reader's claim. Dropped, the reader is done.
pub(super) struct Hold<'a>(&'a Slot);

thread_local! {
    /// The slot that this thread had last, which is likely to be free.
    static LAST: Cell<usize> = const { Cell::new(0) };
}

impl Readers {
    pub(super) fn new() -> Self {
        Self { slots: (0..SLOTS).map(|_| Slot(AtomicU64::new(FREE))).collect(), used: AtomicUsize::new(0) }
    }

    /// Says that this thread is about to read a block. The map is to be looked at afterwards.
    #[inline]
    pub(super) fn hold(&self, block_at: u64) -> Hold<'_> {
        assert_ne!(block_at, FREE);
        let mut number = LAST.get();
        for attempt in 1.. {
            // Before it is used, so that who sees no use of it comes before this reader looks at the map.
            if self.used.load(Ordering::Relaxed) <= number {
                self.used.fetch_max(number + 1, Ordering::SeqCst);
            }
            let slot = &self.slots[number];
            // A locked instruction: nothing later is done before others see it (Intel SDM, volume 3, 9.2.3.9).
            let claim = slot.0.compare_exchange(FREE, block_at, Ordering::SeqCst, Ordering::Relaxed);
            if claim.is_ok() {
                LAST.set(number);
                return Hold(slot);
            }
            number = (number + 1) % SLOTS;
            if attempt % SLOTS == 0 {
                thread::yield_now();
            }
            hint::spin_loop();
        }
        unreachable!("attempts have no end")
    }

    /// What is being read of all that the map has ceased to name before the call.
    #[inline]
    pub(super) fn look(&self) -> Look<'_> {
        // The stores to the map before, and the looks at the slots after.
        fence(Ordering::SeqCst);
        Look(&self.slots[..self.used.load(Ordering::SeqCst)])
    }
}

/// The slots, behind a barrier.
pub(super) struct Look<'a>(&'a [Slot]);

impl Look<'_> {
    /// Is a block being read? If not, nobody begins to before the map names it again.
    #[inline]
    pub(super) fn holds(&self, block_at: u64) -> bool {
        self.0.iter().any(|slot| slot.0.load(Ordering::Acquire) == block_at)
    }
}

impl Hold<'_> {
    /// The same for another block, instead.
    #[inline]
    pub(super) fn move_to(&mut self, block_at: u64) {
        assert_ne!(block_at, FREE);
        self.0.0.swap(block_at, Ordering::SeqCst);
    }
}

impl Drop for Hold<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.0.store(FREE, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_held_by_as_many_as_read_it() {
        let readers = Readers::new();
        assert!(!readers.look().holds(7));
        let mut first = readers.hold(7);
        let second = readers.hold(7);
        assert!(readers.look().holds(7) && !readers.look().holds(8));
        first.move_to(8);
        assert!(readers.look().holds(7) && readers.look().holds(8));
        drop(second);
        assert!(!readers.look().holds(7) && readers.look().holds(8));
        drop(first);
        assert!(!readers.look().holds(8));
    }

    #[test]
    fn more_readers_than_slots_wait_for_one_that_is_done() {
        let readers = Readers::new();
        let mut holds: Vec<_> = (1..=SLOTS as u64).map(|block| readers.hold(block)).collect();
        thread::scope(|scope| {
            let late = scope.spawn(|| drop(readers.hold(1000)));
            assert!((1..=SLOTS as u64).all(|block| readers.look().holds(block)));
            holds.pop();
            late.join().unwrap();
        });
    }
}
