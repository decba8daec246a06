//! Engine sources compiled with the memory model of loom instead of the real CPU.

#[path = "../live_blocks.rs"]
#[allow(clippy::duplicate_mod, dead_code, reason = "see below")]
mod live_blocks;
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

    /// Releases a lock with an exchange. Loom does not order a store with concurrent exchanges of
    /// other threads, and might never make it visible to them.
    pub(super) fn release(lock: &AtomicU32, free: u32, ordering: Ordering) {
        lock.swap(
            free,
            if OMITTED_STEP.get() == OmittedStep::Release { Ordering::Relaxed } else { ordering },
        );
    }

    pub(super) fn acquire_ordering(ordering: Ordering) -> Ordering {
        if OMITTED_STEP.get() == OmittedStep::Acquire { Ordering::Relaxed } else { ordering }
    }

    /// A sleeping thread may wake up at any time, and then checks again.
    pub(super) fn sleep_while(_: &AtomicU32, _: u32, _: Duration) {
        yield_now();
    }

    pub(super) fn wake_all(_: &AtomicU32) {}

    /// Cell that detects concurrent access by two threads to its content.
    pub(super) struct UnsafeCell<T>(loom::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(super) fn new(value: T) -> Self {
            Self(loom::cell::UnsafeCell::new(value))
        }

        pub(super) fn get(&self) -> *mut T {
            self.0.with_mut(|value| value)
        }
    }

    /// Step that the model omits.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) enum OmittedStep {
        Nothing,
        /// Barrier of a reader between its announcement and its check of the map.
        ReadersFence,
        /// Barrier of a writer between its change of the map and its check of the readers.
        WritersFence,
        /// Second check of the map by a reader.
        SecondMapRead,
        /// Barrier of a release between its change of the media and its check of the readers.
        ReleaseFence,
        /// Check of the readers by a writer.
        AnnouncementCheck,
        /// Count of a writer's block before its space is looked up.
        BlockCount,
        /// Lock of a map line.
        LineLock,
        /// Release ordering of the lock. Without it, the next holder need not see accesses made
        /// under the lock.
        Release,
        /// Acquire ordering of the lock.
        Acquire,
    }

    thread_local! {
        // Thread-local, because all threads of a model run on a single thread.
        pub(super) static OMITTED_STEP: Cell<OmittedStep> = const { Cell::new(OmittedStep::Nothing) };
    }

    pub(super) fn last_slot() -> usize {
        0
    }

    pub(super) fn set_last_slot(_: usize) {}

    /// Loom does not model locked instructions. Whatever their ordering, its atomics give weaker
    /// guarantees than those of the CPU.
    pub(super) fn fence_after_locked() {
        if OMITTED_STEP.get() != OmittedStep::ReadersFence {
            atomic::fence(Ordering::SeqCst);
        }
    }

    pub(super) fn release_fence() {
        if OMITTED_STEP.get() != OmittedStep::ReleaseFence {
            atomic::fence(Ordering::SeqCst);
        }
    }

    pub(super) fn writer_fence_after_locked() {
        if OMITTED_STEP.get() != OmittedStep::WritersFence {
            atomic::fence(Ordering::SeqCst);
        }
    }
}
