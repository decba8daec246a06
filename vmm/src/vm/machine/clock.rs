//! Clock of the guest (kvm-clock), which stops while the VM is paused.
//!
//! Otherwise, a guest that was paused for a minute would see its clock jump by a minute. All its
//! timers would be late, and its watchdogs would report a hang. Therefore the clock is read when
//! all vCPUs have left the guest, and set to the same value when they resume. Each vCPU is also
//! informed that it was stopped (`KVM_KVMCLOCK_CTRL`).

use std::sync::Arc;

use kvm_ioctls::VmFd;
use parking_lot::Mutex;
use tracing::debug;

/// Access to the guest's clock, in nanoseconds.
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
    /// Number of pauses and resumes so far, which identifies the current pause.
    era: u64,
    /// Value of the clock when all vCPUs had left the guest.
    ns: Option<u64>,
}

pub(in crate::vm) struct GuestClock {
    source: Box<dyn Source>,
    held: Mutex<Held>,
}

/// Number that identifies a requested pause.
#[derive(Clone, Copy, Debug)]
pub(in crate::vm) struct Pause(u64);

impl GuestClock {
    pub(in crate::vm) fn new(source: impl Source + 'static) -> Self {
        Self { source: Box::new(source), held: Mutex::default() }
    }

    /// Starts a pause. Called when the vCPUs are requested to leave the guest.
    pub(in crate::vm) fn pause(&self) -> Pause {
        let mut held = self.held.lock();
        held.era += 1;
        Pause(held.era)
    }

    /// Reads the clock at a pause. Called once all vCPUs have left the guest for `pause`. Has no
    /// effect if the VM was resumed or paused again in the meantime.
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

    /// Sets the clock to its value at the pause. Called just before the vCPUs resume.
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

    /// Fake clock, which the test advances.
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
        // Advances the fake clock, and returns its value.
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
