//! What the protocol between readers and writers is made of. The model that tests it (`tests/order.rs`) has the same from
//! loom, which tries every order that the memory may show.

use std::cell::Cell;
pub(super) use std::hint::spin_loop;
pub(super) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
pub(super) use std::sync::{Mutex, MutexGuard};
pub(super) use std::thread::yield_now;

use std::sync::atomic::compiler_fence;

thread_local! {
    /// The slot that this thread had last, which is likely to be free.
    static LAST: Cell<usize> = const { Cell::new(0) };
}

#[inline]
pub(super) fn last_slot() -> usize {
    LAST.get()
}

#[inline]
pub(super) fn set_last_slot(number: usize) {
    LAST.set(number);
}

/// A full barrier, directly behind a locked instruction, which is one: nothing later is done before others see it (Intel
/// SDM, volume 3, 9.2.3.9). So only the compiler has to be told.
#[inline]
pub(super) fn fence_behind_locked() {
    compiler_fence(Ordering::SeqCst);
}
