//! Sources of the engine, over a CPU that does whatever the memory model allows: loom's.

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

    pub(super) use loom::hint::spin_loop;
    use loom::sync::atomic;
    pub(super) use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
    pub(super) use loom::sync::{Mutex, MutexGuard};
    pub(super) use loom::thread::yield_now;

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
    }

    thread_local! {
        // All threads of a model are one.
        pub(super) static LEFT_OUT: Cell<LeftOut> = const { Cell::new(LeftOut::Nothing) };
    }

    pub(super) fn last_slot() -> usize {
        0
    }

    pub(super) fn set_last_slot(_: usize) {}

    /// A model has no locked instructions: its atomics order less than the CPU's do, whatever they are told.
    pub(super) fn fence_behind_locked() {
        if LEFT_OUT.get() != LeftOut::ReadersFence {
            atomic::fence(Ordering::SeqCst);
        }
    }

    pub(super) fn fence(ordering: Ordering) {
        if LEFT_OUT.get() != LeftOut::WritersFence {
            atomic::fence(ordering);
        }
    }
}
