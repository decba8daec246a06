//! Primitives for locks, and for the protocol between readers and writers. The model that tests the
//! protocol (`tests/order.rs`) replaces them with those of loom, which tries every order that the
//! memory model allows.

use std::cell::Cell;
pub(super) use std::cell::UnsafeCell;
pub(super) use std::hint::spin_loop;
pub(super) use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::atomic::{compiler_fence, fence};
pub(super) use std::thread::yield_now;
use std::time::Duration;

use rustix::fs::Timespec;
use rustix::thread::futex;

thread_local! {
    /// Slot that this thread used last, which is probably free.
    static LAST_SLOT: Cell<usize> = const { Cell::new(0) };
}

/// Number of times that a lock is read before a thread sleeps. Locks are usually held for less than
/// a microsecond.
pub(super) const SPINS: u32 = 100;

/// Releases a lock with a store.
#[inline]
pub(super) fn release(lock: &AtomicU32, free: u32, ordering: Ordering) {
    lock.store(free, ordering);
}

/// Returns the memory ordering for acquiring a lock. The model can weaken it, to prove that the
/// tests detect this.
#[inline]
pub(super) fn acquire_ordering(ordering: Ordering) -> Ordering {
    ordering
}

#[inline]
pub(super) fn last_slot() -> usize {
    LAST_SLOT.get()
}

#[inline]
pub(super) fn set_last_slot(number: usize) {
    LAST_SLOT.set(number);
}

/// Full barrier after a locked instruction. The instruction is itself a barrier, because later
/// accesses wait until it is globally visible (Intel SDM, volume 3, 9.2.3.9). Therefore, only the
/// compiler needs a fence.
#[inline]
pub(super) fn fence_after_locked() {
    compiler_fence(Ordering::SeqCst);
}

/// Full barrier after a locked instruction of a writer. The barrier has its own function, so that
/// tests can omit it and keep the other barriers.
#[inline]
pub(super) fn writer_fence_after_locked() {
    fence_after_locked();
}

/// Full barrier of a release, between its change of the media and its check of the readers.
pub(super) fn release_fence() {
    fence(Ordering::SeqCst);
}

/// Sleeps while a word has the given value, until the thread is woken or `at_most` has passed. May
/// return early (futex(2)).
pub(super) fn sleep_while(word: &AtomicU32, value: u32, at_most: Duration) {
    let timeout = Timespec::try_from(at_most).ok();
    // The caller checks the word again in any case.
    let _ = futex::wait(word, futex::Flags::PRIVATE, value, timeout.as_ref());
}

/// Wakes all threads that sleep on a word.
#[cold]
pub(super) fn wake_all(word: &AtomicU32) {
    let _ = futex::wake(word, futex::Flags::PRIVATE, i32::MAX.unsigned_abs());
}
