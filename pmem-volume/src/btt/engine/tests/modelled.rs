//! Engine sources compiled for the memory model of loom instead of the CPU.

#[path = "../lock.rs"]
#[allow(clippy::duplicate_mod, dead_code, reason = "see below")]
mod lock;
#[path = "../map.rs"]
#[allow(
    clippy::duplicate_mod,
    dead_code,
    reason = "the same code with other atomics, not all of which is modelled"
)]
mod map;
#[path = "order.rs"]
mod order;
#[path = "../readers.rs"]
#[allow(clippy::duplicate_mod, dead_code, reason = "see above")]
mod readers;

mod cpu {
    use std::cell::Cell;
    use std::time::Duration;

    pub(super) use loom::hint::spin_loop;
    use loom::sync::atomic;
    pub(super) use loom::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
    pub(super) use loom::thread::yield_now;

    pub(super) const SPINS: u32 = 1;

    /// Releases by an exchange. Loom has no order between a store and concurrent exchanges of
    /// others, and may never show them the store.
    pub(super) fn give_back(lock: &AtomicU32, free: u32, ordering: Ordering) {
        lock.swap(
            free,
            if LEFT_OUT.get() == LeftOut::Release { Ordering::Relaxed } else { ordering },
        );
    }

    pub(super) fn taking(ordering: Ordering) -> Ordering {
        if LEFT_OUT.get() == LeftOut::Acquire { Ordering::Relaxed } else { ordering }
    }

    /// A sleeping thread may wake at any time, and checks again.
    pub(super) fn sleep_while(_: &AtomicU32, _: u32, _: Duration) {
        yield_now();
    }

    pub(super) fn wake_all(_: &AtomicU32) {}

    /// Cell that detects two threads with access to its content at once.
    pub(super) struct UnsafeCell<T>(loom::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(super) fn new(value: T) -> Self {
            Self(loom::cell::UnsafeCell::new(value))
        }

        pub(super) fn get(&self) -> *mut T {
            self.0.with_mut(|value| value)
        }
    }

    /// Omitted step.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) enum LeftOut {
        Nothing,
        /// Reader's barrier between its announcement and its check of the map.
        ReadersFence,
        /// Writer's barrier between its change of the map and its check of the readers.
        WritersFence,
        /// Reader's second check of the map.
        SecondLook,
        /// Writer's check of the readers.
        LookAtReaders,
        /// Lock of the map's line.
        LineLock,
        /// Release ordering of the lock: the next holder need not see accesses under the lock.
        Release,
        /// Acquire ordering of the lock.
        Acquire,
    }

    thread_local! {
        // All threads of a model are one.
        pub(super) static LEFT_OUT: Cell<LeftOut> = const { Cell::new(LeftOut::Nothing) };
    }

    pub(super) fn last_slot() -> usize {
        0
    }

    pub(super) fn set_last_slot(_: usize) {}

    /// A model has no locked instructions. Its atomics order less than those of the CPU, whatever
    /// their ordering.
    pub(super) fn fence_behind_locked() {
        if LEFT_OUT.get() != LeftOut::ReadersFence {
            atomic::fence(Ordering::SeqCst);
        }
    }

    pub(super) fn writers_fence_behind_locked() {
        if LEFT_OUT.get() != LeftOut::WritersFence {
            atomic::fence(Ordering::SeqCst);
        }
    }
}
