//! Locks of byte ranges. They prevent a read-modify-write cycle from overwriting a concurrent
//! change of the same blocks.
//!
//! Transfers of whole blocks hold a shared lock, because the guest must order its own overlapping
//! writes. A read-modify-write cycle holds an exclusive lock. A ring never blocks on a lock,
//! because its thread must serve other requests. An event notifies the ring instead. A blocking
//! call may wait for an exclusive lock until transfers in flight are complete, including those of
//! rings.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use vmm_sys_util::eventfd::EventFd;

/// Kind of lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// Compatible with other shared locks of overlapping ranges.
    Shared,
    /// Incompatible with every other lock of an overlapping range.
    Exclusive,
}

/// Locked ranges of one image.
#[derive(Debug, Default)]
pub(super) struct RangeLocks {
    state: Mutex<State>,
    released: Condvar,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    shared: BTreeMap<u64, Range<u64>>,
    exclusive: BTreeMap<u64, Range<u64>>,
    /// Number of waiting calls of [`RangeLocks::lock`].
    waiters: usize,
    /// Events to raise at the next release.
    waiting: Vec<Arc<EventFd>>,
}

/// Locked range. Dropping it unlocks the range.
pub(super) struct RangeGuard {
    locks: Arc<RangeLocks>,
    id: u64,
}

impl State {
    fn is_free(&self, range: &Range<u64>, access: Access) -> bool {
        let overlaps = |other: &Range<u64>| range.start < other.end && other.start < range.end;
        let shared_is_free = access == Access::Shared || !self.shared.values().any(overlaps);
        shared_is_free && !self.exclusive.values().any(overlaps)
    }

    fn insert(&mut self, range: Range<u64>, access: Access) -> u64 {
        let id = self.next;
        self.next += 1;
        match access {
            Access::Shared => self.shared.insert(id, range),
            Access::Exclusive => self.exclusive.insert(id, range),
        };
        id
    }
}

impl RangeLocks {
    /// Locks `range`. Waits until all conflicting locks are released.
    pub(super) fn lock(self: &Arc<Self>, range: Range<u64>, access: Access) -> RangeGuard {
        let mut state = self.state.lock();
        state.waiters += 1;
        self.released.wait_while(&mut state, |state| !state.is_free(&range, access));
        state.waiters -= 1;
        RangeGuard { locks: Arc::clone(self), id: state.insert(range, access) }
    }

    #[cfg(test)]
    pub(super) fn has_waiter(&self) -> bool {
        self.state.lock().waiters > 0
    }

    /// Locks `range` unless another lock conflicts. Otherwise returns `None`, and raises `event`
    /// when any range is released.
    pub(super) fn try_lock(
        self: &Arc<Self>,
        range: Range<u64>,
        access: Access,
        event: &Arc<EventFd>,
    ) -> Option<RangeGuard> {
        let mut state = self.state.lock();
        if state.is_free(&range, access) {
            return Some(RangeGuard { locks: Arc::clone(self), id: state.insert(range, access) });
        }
        if !state.waiting.iter().any(|other| Arc::ptr_eq(other, event)) {
            state.waiting.push(Arc::clone(event));
        }
        None
    }
}

impl Drop for RangeGuard {
    fn drop(&mut self) {
        let mut state = self.locks.state.lock();
        if state.shared.remove(&self.id).is_none() {
            state.exclusive.remove(&self.id);
        }
        self.locks.released.notify_all();
        for event in state.waiting.drain(..) {
            // The write fails only if the counter is full, and the event is then already raised.
            let _: io::Result<()> = event.write(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;

    #[test]
    fn exclusive_lock_excludes_overlapping_ranges_only() {
        let (locks, event) =
            (Arc::new(RangeLocks::default()), Arc::new(EventFd::new(EFD_NONBLOCK).unwrap()));
        let try_lock = |range, access| locks.try_lock(range, access, &event);
        let shared = try_lock(0..4096, Access::Shared).unwrap();
        let second = try_lock(512..1024, Access::Shared).unwrap();
        assert!(try_lock(4095..4096, Access::Exclusive).is_none());
        let adjacent = try_lock(4096..8192, Access::Exclusive).unwrap();
        for access in [Access::Shared, Access::Exclusive] {
            for range in [8191..9000, 4000..4097] {
                assert!(try_lock(range, access).is_none(), "{access:?}");
            }
        }
        drop((shared, second));
        assert!(event.read().is_ok(), "the waiting ring was not woken");
        let alone = try_lock(0..4096, Access::Exclusive).unwrap();
        drop((adjacent, alone));
        assert!(try_lock(0..u64::MAX, Access::Exclusive).is_some());
    }

    #[test]
    fn blocking_lock_is_granted_after_release() {
        let locks = Arc::new(RangeLocks::default());
        let held = locks.lock(0..512, Access::Shared);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| drop(locks.lock(0..4096, Access::Exclusive)));
            while !locks.has_waiter() {
                assert!(!waiter.is_finished(), "the lock was granted beside another one");
                std::thread::yield_now();
            }
            drop(held);
            waiter.join().unwrap();
        });
    }
}
