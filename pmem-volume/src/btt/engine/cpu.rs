//! What the protocol between readers and writers, and the locks, are made of. The model that tests
//! it (`tests/order.rs`) has the same from loom, which tries every order that the memory may show.

use std::cell::Cell;
pub(super) use std::cell::UnsafeCell;
pub(super) use std::hint::spin_loop;
use std::ptr;
use std::sync::atomic::compiler_fence;
pub(super) use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
pub(super) use std::thread::yield_now;
use std::time::Duration;

thread_local! {
    /// The slot that this thread had last, which is likely to be free.
    static LAST: Cell<usize> = const { Cell::new(0) };
}

/// How often a thread looks at a lock before it sleeps: what is held is mostly held for less than a
/// microsecond.
pub(super) const SPINS: u32 = 100;

/// Gives a lock back: by a store.
#[inline]
pub(super) fn give_back(lock: &AtomicU32, free: u32, ordering: Ordering) {
    lock.store(free, ordering);
}

/// How a lock is taken: as it says. The model has a weaker way, to show that it is found out.
#[inline]
pub(super) fn taking(ordering: Ordering) -> Ordering {
    ordering
}

#[inline]
pub(super) fn last_slot() -> usize {
    LAST.get()
}

#[inline]
pub(super) fn set_last_slot(number: usize) {
    LAST.set(number);
}

/// A full barrier, behind a locked instruction, which is one: nothing later is done before others
/// see it (Intel SDM, volume 3, 9.2.3.9). So only the compiler has to be told.
#[inline]
pub(super) fn fence_behind_locked() {
    compiler_fence(Ordering::SeqCst);
}

/// The same for writers: the model leaves out one or the other.
#[inline]
pub(super) fn writers_fence_behind_locked() {
    fence_behind_locked();
}

/// Sleeps as long as a word has a value, until somebody wakes it, for a time at most, and sometimes
/// for less (futex(2)).
pub(super) fn sleep_while(word: &AtomicU32, value: u32, at_most: Duration) {
    let seconds = libc::time_t::try_from(at_most.as_secs()).unwrap_or(libc::time_t::MAX);
    let timeout = libc::timespec { tv_sec: seconds, tv_nsec: at_most.subsec_nanos().into() };
    // SAFETY: a system call that reads the word and the time. Whatever it returns, the caller looks
    // again.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
            value,
            &raw const timeout,
            ptr::null::<u32>(),
            0,
        )
    };
}

/// Wakes all who sleep on a word.
#[cold]
pub(super) fn wake_all(word: &AtomicU32) {
    // SAFETY: a system call that takes the address, and touches nothing there.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
            i32::MAX,
        )
    };
}
