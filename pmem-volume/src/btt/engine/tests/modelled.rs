//! Sources of the engine, over a CPU that does whatever the memory model allows: loom's.

#[path = "../lock.rs"]
#[allow(clippy::duplicate_mod, dead_code, reason = "as below")]
mod lock;
#[path = "../map.rs"]
#[allow(
    clippy::duplicate_mod,
    dead_code,
    reason = "the same code with other atomics, and not all of it modelled"
)]
mod map;
#[path = "order.rs"]
mod order;
#[path = "../readers.rs"]
#[allow(clippy::duplicate_mod, dead_code, reason = "as above")]
mod readers;

mod cpu {
    use std::cell::Cell;
    use std::time::Duration;

    pub(super) use loom::hint::spin_loop;
    use loom::sync::atomic;
    pub(super) use loom::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
    pub(super) use loom::thread::yield_now;

    pub(super) const SPINS: u32 = 1;

    /// By an exchange: loom knows of no order between a store and what others exchange at the same
    /// time, and may have them see theirs for ever.
    pub(super) fn give_back(lock: &AtomicU32, free: u32, ordering: Ordering) {
        lock.swap(
            free,
            if LEFT_OUT.get() == LeftOut::Release { Ordering::Relaxed } else { ordering },
        );
    }

    pub(super) fn taking(ordering: Ordering) -> Ordering {
        if LEFT_OUT.get() == LeftOut::Acquire { Ordering::Relaxed } else { ordering }
    }

    /// Who sleeps may wake at any time, and looks again.
    pub(super) fn sleep_while(_: &AtomicU32, _: u32, _: Duration) {
        yield_now();
    }

    pub(super) fn wake_all(_: &AtomicU32) {}

    /// A cell that finds out when two have what is in it at once.
    pub(super) struct UnsafeCell<T>(loom::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(super) fn new(value: T) -> Self {
            Self(loom::cell::UnsafeCell::new(value))
        }

        pub(super) fn get(&self) -> *mut T {
            self.0.with_mut(|value| value)
        }
    }

    /// What is not done.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) enum LeftOut {
        Nothing,
        /// The reader's barrier between its hold and its look at the map.
        ReadersFence,
        /// The writer's barrier between its change of the map and its look at the readers.
        WritersFence,
        /// The reader's second look at the map.
        SecondLook,
        /// The writer's look at the readers.
        LookAtReaders,
        /// The lock of the map's line.
        LineLock,
        /// What was done under a lock need not be seen by the next one who has it: on the side of
        /// who gives it back.
        Release,
        /// The same on the side of who takes it.
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

    /// A model has no locked instructions: its atomics order less than the CPU's do, whatever they
    /// are told.
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
