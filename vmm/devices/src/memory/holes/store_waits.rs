//! Stores of a VM's vCPUs that wait for space in a pool.
//!
//! They do not wait in KVM, which ignores signals in some waits, even those that kill the process,
//! and holds locks there that changes of memory slots need. Instead, a hole without space can only
//! be read. KVM_RUN then fails with EFAULT, and the thread of the vCPU repeats it until the hole
//! has a chunk. Between two attempts, the vCPU can be paused and handles interrupts.

use std::sync::atomic::{AtomicU64, Ordering};

use rustix::thread::{Timespec, nanosleep};

/// Interval between two attempts of a vCPU to store. It limits the delay of interrupts.
const REPEAT_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

/// Holes of all volumes of a VM into which no vCPU can store.
#[derive(Debug, Default)]
pub struct StoreWaits {
    holes: AtomicU64,
    /// Number of holes into which vCPUs can store again.
    ended: AtomicU64,
    /// Number of times at which the vCPUs were resumed.
    resumes: AtomicU64,
}

/// Number of waits that had ended at a point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndedWaits(u64);

impl StoreWaits {
    /// Records a hole. Call this before stores there fail.
    pub(super) fn begin(&self) {
        self.holes.fetch_add(1, Ordering::SeqCst);
    }

    /// Records that stores into a hole succeed again. Call this when they do.
    pub(super) fn end(&self) {
        // In this order, see `explain`.
        self.ended.fetch_add(1, Ordering::SeqCst);
        self.holes.fetch_sub(1, Ordering::SeqCst);
    }

    pub fn ended(&self) -> EndedWaits {
        EndedWaits(self.ended.load(Ordering::SeqCst))
    }

    /// Returns true if a store may have failed for lack of space. `before` was read before it.
    pub fn explain(&self, before: EndedWaits) -> bool {
        // If the wait has ended between the store and the first check, the second detects this.
        self.holes.load(Ordering::SeqCst) > 0 || self.ended() != before
    }

    /// Waits before the next attempt to store. A signal ends the wait.
    pub fn wait(&self) {
        let _ = nanosleep(&REPEAT_INTERVAL);
    }

    /// Records that the vCPUs will run. Call this before they do. Stores that still wait are then
    /// reported again, and others, for example of a vCPU that was reset, are forgotten.
    pub fn vcpus_will_run(&self) {
        self.resumes.fetch_add(1, Ordering::SeqCst);
    }

    pub fn resumes(&self) -> u64 {
        self.resumes.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_is_explained_during_and_after_a_wait() {
        let waits = StoreWaits::default();
        let before = waits.ended();
        assert!(!waits.explain(before));
        waits.begin();
        waits.begin();
        assert!(waits.explain(waits.ended()));
        waits.end();
        assert!(waits.explain(waits.ended()), "one hole is left");
        waits.end();
        // The store may have failed before the end.
        assert!(waits.explain(before) && !waits.explain(waits.ended()));
    }
}
