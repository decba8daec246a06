//! Blocks that are being read in all arenas, identified by their offsets. When a write replaces a
//! block, its lane's next write uses that block. A reader that found the block in the map earlier
//! may still be reading it (UEFI 2.10, 6.4: the read tracking table).
//!
//! A reader first announces its block, and then checks that the map still names it. A writer checks
//! the announcements after the map no longer names the block. Both execute a full barrier between
//! these two steps. Therefore, either the reader sees the changed map, or the writer sees the
//! announcement and takes another lane. Neither waits for the other. `tests/order.rs` tries all
//! orders, and omits each of the steps in turn.

use std::ops::Range;

use super::cpu::{self, AtomicU64, AtomicUsize, Ordering};

/// Maximum number of threads that can read concurrently. Further threads wait until one of them has
/// finished.
pub(super) const SLOTS: usize = 128;
/// Content of an unused slot. No block is at offset 0 of a volume.
const FREE: u64 = 0;

/// Slots for announcements, each in its own cache line.
pub(super) struct Readers {
    slots: Box<[Slot]>,
    /// Number of leading slots that have ever been used.
    used: AtomicUsize,
}

/// Offset of the block that is being read.
#[repr(align(64))]
struct Slot(AtomicU64);

/// Announcement of a read. Dropping it ends the announcement.
pub(super) struct Announcement<'a>(&'a Slot);

impl Readers {
    pub(super) fn new(slots: usize) -> Self {
        Self {
            slots: (0..slots).map(|_| Slot(AtomicU64::new(FREE))).collect(),
            used: AtomicUsize::new(0),
        }
    }

    /// Announces that this thread will read a block. The caller must check the map afterwards.
    #[inline]
    pub(super) fn announce(&self, block_at: u64) -> Announcement<'_> {
        assert_ne!(block_at, FREE);
        let mut number = cpu::last_slot();
        for attempt in 1.. {
            // Increased before the slot is used. A writer that misses the slot has checked before
            // this reader checks the map.
            if self.used.load(Ordering::Relaxed) <= number {
                self.used.fetch_max(number + 1, Ordering::SeqCst);
            }
            let slot = &self.slots[number];
            let claim =
                slot.0.compare_exchange(FREE, block_at, Ordering::SeqCst, Ordering::Relaxed);
            if claim.is_ok() {
                cpu::set_last_slot(number);
                cpu::fence_after_locked();
                return Announcement(slot);
            }
            number = (number + 1) % self.slots.len();
            if attempt % self.slots.len() == 0 {
                cpu::yield_now();
            }
            cpu::spin_loop();
        }
        unreachable!("attempts have no end")
    }

    /// Announces a read of the block that `find` returns. `find` looks up its offset in the map,
    /// and returns `None` for a sector without a block. No writer uses the block until the
    /// announcement ends.
    #[inline]
    pub(super) fn announce_found<E>(
        &self,
        mut find: impl FnMut() -> Result<Option<u64>, E>,
    ) -> Result<Option<(u64, Announcement<'_>)>, E> {
        let Some(mut at) = find()? else { return Ok(None) };
        let mut announcement = self.announce(at);
        loop {
            // Checked after the announcement. If the map still names the block, every later writer
            // sees the announcement.
            match find()? {
                None => return Ok(None),
                Some(again) if again == at => return Ok(Some((at, announcement))),
                Some(again) => {
                    announcement.move_to(again);
                    at = again;
                }
            }
        }
    }

    /// Returns true if a block in a range of offsets is being read. If not, no read begins until
    /// the map names such a block again, or the reader finds what the caller stored before.
    pub(super) fn is_announced(&self, range: Range<u64>) -> bool {
        cpu::release_fence();
        let used = &self.slots[..self.used.load(Ordering::SeqCst)];
        used.iter().any(|slot| range.contains(&slot.0.load(Ordering::Acquire)))
    }

    /// Returns the announcements, for checking blocks that the map no longer named before the call.
    /// The caller must have just taken a lane. The store to the map precedes the release of that
    /// lane, and the slots are read after the locked instruction that took it.
    #[inline]
    pub(super) fn announcements_after_lock(&self) -> Announcements<'_> {
        cpu::writer_fence_after_locked();
        Announcements(&self.slots[..self.used.load(Ordering::SeqCst)])
    }
}

/// Announcements that are read after a barrier.
pub(super) struct Announcements<'a>(&'a [Slot]);

impl Announcements<'_> {
    /// Returns true if a block is being read. If not, no read of it begins until the map names it
    /// again.
    #[inline]
    pub(super) fn contains(&self, block_at: u64) -> bool {
        self.0.iter().any(|slot| slot.0.load(Ordering::Acquire) == block_at)
    }
}

impl Announcement<'_> {
    /// Replaces the announcement with one for another block.
    #[inline]
    pub(super) fn move_to(&mut self, block_at: u64) {
        assert_ne!(block_at, FREE);
        self.0.0.swap(block_at, Ordering::SeqCst);
        cpu::fence_after_locked();
    }
}

impl Drop for Announcement<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.0.store(FREE, Ordering::Release);
    }
}
