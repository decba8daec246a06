//! The guest's clock (kvm-clock), which stops while the VM is paused.
//!
//! Otherwise, a guest that was paused for a minute would notice that a minute has passed. All its
//! timers would be late, and its watchdogs would report a hang. So the clock is read when all vCPUs
//! have left the guest, and set to that value when they resume. Each vCPU is also notified that it
//! was stopped (`KVM_KVMCLOCK_CTRL`).

use std::sync::Arc;

use kvm_ioctls::VmFd;
use parking_lot::Mutex;
use tracing::debug;

/// Clock of the guest, in nanoseconds.
pub(in crate::vm) trait Source: Send + Sync {
    fn get_ns(&self) -> Result<u64, kvm_ioctls::Error>;
    fn set_ns(&self, ns: u64) -> Result<(), kvm_ioctls::Error>;
}

impl Source for Arc<VmFd> {
    fn get_ns(&self) -> Result<u64, kvm_ioctls::Error> {
        self.get_clock().map(|data| data.clock)
    }

    fn set_ns(&self, ns: u64) -> Result<(), kvm_ioctls::Error> {
        self.set_clock(&kvm_bindings::kvm_clock_data { clock: ns, ..Default::default() })
    }
}

#[derive(Debug, Default)]
struct Held {
    /// Number of pauses and resumes, which identifies the present pause.
    era: u64,
    /// Value when all vCPUs had left the guest.
    ns: Option<u64>,
}

pub(in crate::vm) struct GuestClock {
    source: Box<dyn Source>,
    held: Mutex<Held>,
}

/// Number of a requested pause.
#[derive(Clone, Copy, Debug)]
pub(in crate::vm) struct Pause(u64);

impl GuestClock {
    pub(in crate::vm) fn new(source: impl Source + 'static) -> Self {
        Self { source: Box::new(source), held: Mutex::default() }
    }

    /// Starts a pause. The vCPUs are requested to leave the guest.
    pub(in crate::vm) fn pause(&self) -> Pause {
        let mut held = self.held.lock();
        held.era += 1;
        Pause(held.era)
    }

    /// Reads the clock. All vCPUs have left the guest for `pause`. Has no effect if they were
    /// resumed or paused again since.
    pub(in crate::vm) fn hold(&self, pause: Pause) {
        let mut held = self.held.lock();
        if held.era == pause.0 && held.ns.is_none() {
            held.ns = self
                .source
                .get_ns()
                .inspect_err(|err| debug!(%err, "Cannot read the guest's clock; it advances during the pause"))
                .ok();
        }
    }

    /// Sets the clock to the value at the pause. The vCPUs are about to resume.
    pub(in crate::vm) fn release(&self) {
        let mut held = self.held.lock();
        held.era += 1;
        if let Some(ns) = held.ns.take()
            && let Err(err) = self.source.set_ns(ns)
        {
            debug!(%err, "Cannot set the guest's clock; it has advanced during the pause");
        }
    }
}

#[cfg(test)]
pub(in crate::vm) mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// Clock that the test advances.
    impl Source for Arc<AtomicU64> {
        fn get_ns(&self) -> Result<u64, kvm_ioctls::Error> {
            Ok(self.load(Ordering::Relaxed))
        }

        fn set_ns(&self, ns: u64) -> Result<(), kvm_ioctls::Error> {
            self.store(ns, Ordering::Relaxed);
            Ok(())
        }
    }

    fn clock() -> (GuestClock, impl Fn(u64) -> u64) {
        let now = Arc::new(AtomicU64::new(0));
        // Advances the clock, and returns its value.
        let pass = {
            let now = Arc::clone(&now);
            move |ns| now.fetch_add(ns, Ordering::Relaxed) + ns
        };
        (GuestClock::new(now), pass)
    }

    #[test]
    fn clock_keeps_its_value_during_a_pause() {
        let (clock, pass) = clock();
        clock.release();
        assert_eq!(pass(10), 10);
        for _ in 0..2 {
            let before = pass(5);
            clock.hold(clock.pause());
            pass(60);
            clock.release();
            assert_eq!(pass(0), before);
        }
    }

    #[test]
    fn repeated_pause_keeps_value_of_the_first() {
        let (clock, pass) = clock();
        clock.hold(clock.pause());
        pass(60);
        clock.hold(clock.pause());
        pass(60);
        clock.release();
        assert_eq!(pass(0), 0);
    }

    #[test]
    fn pause_undone_before_hold_does_not_set_clock() {
        let (clock, pass) = clock();
        let late = clock.pause();
        clock.release();
        pass(10);
        clock.hold(late);
        pass(10);
        clock.release();
        assert_eq!(pass(0), 20);
    }
}
