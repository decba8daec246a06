//! Stores of a VM's vCPUs that wait for space in a pool.
//!
//! They do not wait in KVM, which ignores signals in some waits, even those that kill the process,
//! and holds locks there that changes of memory slots need. Instead, a hole without space can only
//! be read. KVM_RUN then fails with EFAULT, and the thread of the vCPU repeats it until the hole
//! has a chunk. Between two attempts, the vCPU can be paused and handles interrupts.

use std::sync::atomic::{AtomicU64, Ordering};

use rustix::thread::{Timespec, nanosleep};

#[cfg(test)]
use self::tests::step;

/// Interval between two attempts of a vCPU to store. It limits the delay of interrupts.
const REPEAT_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

/// Holes of all volumes of a VM into which no vCPU can store.
#[derive(Debug, Default)]
pub struct StoreWaits {
    holes: AtomicU64,
    /// Number of holes whose waits have ended.
    ended: AtomicU64,
    /// Number of times at which the vCPUs were resumed.
    resumes: AtomicU64,
    #[cfg(test)]
    broken: Option<Broken>,
}

/// Broken variant, in which a failure for lack of space can remain unexplained.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    /// Stores fail before the hole is recorded.
    FailsFirst,
    /// The hole is removed before the end of its wait is counted.
    RemovesFirst,
    /// The number of ended waits is read after the attempt.
    ReadsLate,
}

/// Point at which a test may let the other thread run.
#[cfg(not(test))]
const fn step() {}

impl StoreWaits {
    /// Records a hole, and then lets stores there fail by `forbid`.
    pub(super) fn begin<T>(&self, forbid: impl FnOnce() -> T) -> T {
        #[cfg(test)]
        if self.broken == Some(Broken::FailsFirst) {
            let result = forbid();
            step();
            self.holes.fetch_add(1, Ordering::SeqCst);
            return result;
        }
        step();
        self.holes.fetch_add(1, Ordering::SeqCst);
        forbid()
    }

    /// Records that stores into a hole succeed again. Call this after the hole is mapped.
    pub(super) fn end(&self) {
        #[cfg(test)]
        if self.broken == Some(Broken::RemovesFirst) {
            self.holes.fetch_sub(1, Ordering::SeqCst);
            step();
            self.ended.fetch_add(1, Ordering::SeqCst);
            return;
        }
        // In this order, see `attempt`.
        step();
        self.ended.fetch_add(1, Ordering::SeqCst);
        step();
        self.holes.fetch_sub(1, Ordering::SeqCst);
    }

    /// Attempts to store. Returns the result of `store`, and true if a failure may be due to a lack
    /// of space.
    pub fn attempt<T>(&self, store: impl FnOnce() -> T) -> (T, bool) {
        let ended_before = self.ended();
        let result = store();
        #[cfg(test)]
        let ended_before = match self.broken {
            Some(Broken::ReadsLate) => self.ended(),
            _ => ended_before,
        };
        step();
        // If the wait has ended between the store and the first check, the second detects this.
        let lacked_space = self.holes.load(Ordering::SeqCst) > 0 || self.ended() != ended_before;
        (result, lacked_space)
    }

    fn ended(&self) -> u64 {
        step();
        self.ended.load(Ordering::SeqCst)
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
    use std::cell::RefCell;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc;

    use super::*;

    /// Turns of a thread that runs step by step.
    struct Turns {
        arrived: mpsc::Sender<()>,
        go: mpsc::Receiver<()>,
    }

    thread_local! {
        static TURNS: RefCell<Option<Turns>> = const { RefCell::new(None) };
    }

    /// Waits for the next turn, if this thread runs step by step.
    pub(super) fn step() {
        TURNS.with_borrow(|turns| {
            if let Some(Turns { arrived, go }) = turns {
                arrived.send(()).unwrap();
                go.recv().unwrap();
            }
        });
    }

    /// Runs two threads step by step. Bit n of `schedule` selects the thread of step n. When it has
    /// ended, the other thread runs.
    fn interleave(schedule: u32, threads: [&(dyn Fn() + Sync); 2]) {
        std::thread::scope(|scope| {
            let threads = threads.map(|run| {
                let (arrived, at_step) = mpsc::channel();
                let (next, go) = mpsc::channel();
                scope.spawn(move || {
                    TURNS.set(Some(Turns { arrived, go }));
                    run();
                    TURNS.set(None);
                });
                (next, at_step)
            });
            let mut is_at_step = threads.each_ref().map(|(_, at_step)| at_step.recv().is_ok());
            for nth in 0.. {
                let chosen =
                    usize::from(schedule.checked_shr(nth).is_some_and(|bits| bits & 1 == 1));
                let Some(thread) = [chosen, 1 - chosen].into_iter().find(|at| is_at_step[*at])
                else {
                    break;
                };
                let (next, at_step) = &threads[thread];
                next.send(()).unwrap();
                is_at_step[thread] = at_step.recv().is_ok();
            }
        });
    }

    /// Lets a store meet a wait in all interleavings. Returns true if each failure of the store is
    /// explained.
    fn are_failures_explained(broken: Option<Broken>, ends_early: bool) -> bool {
        // Both threads together have at most 10 steps.
        (0..1 << 10).all(|schedule| {
            let waits = StoreWaits { broken, ..StoreWaits::default() };
            let (succeeds, is_explained) = (AtomicBool::new(true), AtomicBool::new(true));
            let set = |value| {
                step();
                succeeds.store(value, Ordering::SeqCst);
            };
            let filler = || {
                waits.begin(|| set(false));
                if ends_early {
                    waits.end();
                    set(true);
                } else {
                    set(true);
                    waits.end();
                }
            };
            let vcpu = || {
                let (succeeded, lacked_space) = waits.attempt(|| {
                    step();
                    succeeds.load(Ordering::SeqCst)
                });
                is_explained.store(succeeded || lacked_space, Ordering::SeqCst);
            };
            interleave(schedule, [&filler, &vcpu]);
            assert!(!waits.attempt(|| ()).1, "the wait has ended");
            is_explained.into_inner()
        })
    }

    #[test]
    fn failure_is_explained_in_each_interleaving_with_a_wait() {
        assert!(are_failures_explained(None, false));
        for broken in [Broken::FailsFirst, Broken::RemovesFirst, Broken::ReadsLate] {
            assert!(!are_failures_explained(Some(broken), false), "{broken:?}");
        }
        assert!(!are_failures_explained(None, true), "the wait ends before stores succeed");
    }

    #[test]
    fn failure_is_explained_until_the_last_wait_ends() {
        let waits = StoreWaits::default();
        let lacks_space = || waits.attempt(|| ()).1;
        assert!(!lacks_space());
        waits.begin(|| ());
        waits.begin(|| ());
        waits.end();
        assert!(lacks_space(), "one hole is left");
        waits.end();
        assert!(!lacks_space());
    }
}
