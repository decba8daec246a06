//! Which blocks are being read, of all arenas; a block is known by where it lies. A block that a
//! write has replaced is its lane's for the next write; a reader that found it in the map before
//! may still be at it (UEFI 2.10, 6.4: the read tracking table).
//!
//! A reader says which block it is about to read, and only then looks whether the map still names
//! it. A writer looks who reads a block after the map has ceased to name it. Both are full barriers
//! in between, so one of them sees the other: the reader that the map has changed, or the writer
//! that the block is being read. The writer then takes another lane; neither waits.
//! `tests/order.rs` tries all orders, and leaves out each of the steps in turn.

use super::cpu::{self, AtomicU64, AtomicUsize, Ordering};

/// So many threads can read at once; further ones wait for one of them to finish.
pub(super) const SLOTS: usize = 128;
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

impl Readers {
    pub(super) fn new(slots: usize) -> Self {
        Self {
            slots: (0..slots).map(|_| Slot(AtomicU64::new(FREE))).collect(),
            used: AtomicUsize::new(0),
        }
    }

    /// Says that this thread is about to read a block. The map is to be looked at afterwards.
    #[inline]
    pub(super) fn hold(&self, block_at: u64) -> Hold<'_> {
        assert_ne!(block_at, FREE);
        let mut number = cpu::last_slot();
        for attempt in 1.. {
            // Before it is used, so that who sees no use of it comes before this reader looks at
            // the map.
            if self.used.load(Ordering::Relaxed) <= number {
                self.used.fetch_max(number + 1, Ordering::SeqCst);
            }
            let slot = &self.slots[number];
            let claim =
                slot.0.compare_exchange(FREE, block_at, Ordering::SeqCst, Ordering::Relaxed);
            if claim.is_ok() {
                cpu::set_last_slot(number);
                cpu::fence_behind_locked();
                return Hold(slot);
            }
            number = (number + 1) % self.slots.len();
            if attempt % self.slots.len() == 0 {
                cpu::yield_now();
            }
            cpu::spin_loop();
        }
        unreachable!("attempts have no end")
    }

    /// Finds out where a block lies, and holds it: no writer takes it before the hold ends. `find`
    /// looks at the map, and says that there is none with `None`.
    #[inline]
    pub(super) fn hold_found<E>(
        &self,
        mut find: impl FnMut() -> Result<Option<u64>, E>,
    ) -> Result<Option<(u64, Hold<'_>)>, E> {
        let Some(mut at) = find()? else { return Ok(None) };
        let mut hold = self.hold(at);
        loop {
            // Behind the hold: if the map still names the block, whoever takes it later sees the
            // hold.
            match find()? {
                None => return Ok(None),
                Some(again) if again == at => return Ok(Some((at, hold))),
                Some(again) => {
                    hold.move_to(again);
                    at = again;
                }
            }
        }
    }

    /// What is being read of all that the map has ceased to name before the call. For who has just
    /// taken a lane: the store to the map before came before the lane was given back, and the
    /// looks at the slots come behind the locked instruction by which it was taken.
    #[inline]
    pub(super) fn look_behind_lock(&self) -> Look<'_> {
        cpu::writers_fence_behind_locked();
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
        cpu::fence_behind_locked();
    }
}

impl Drop for Hold<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.0.store(FREE, Ordering::Release);
    }
}
