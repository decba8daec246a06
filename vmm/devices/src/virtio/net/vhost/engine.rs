//! State of a queue pair that vhost-net serves. The pair is attached while the driver uses it and
//! the VM is not paused. Its memory table follows the VM's memory.

use std::fs::File;
use std::sync::Arc;

use parking_lot::Mutex;
use tracing::debug;
use virtio_queue::Queue;
use vmm_sys_util::eventfd::EventFd;

use super::VhostError;
use crate::event_loop::Helper;
use crate::log::rate_limited;
use crate::memory::view::{RegionWatcher, Regions};
use crate::virtio::net::state::PairBackend;

/// A queue pair that vhost-net serves. Dropping it stops the service.
pub(in super::super) trait Rings: Send {
    /// Starts or resumes the pair.
    fn attach(&mut self) -> Result<(), VhostError>;
    /// Stops the pair. When this returns, vhost-net no longer accesses guest memory for it.
    fn detach(&mut self) -> Result<(), VhostError>;
    /// Replaces the regions that the pair may access.
    fn set_regions(&mut self, regions: &Regions) -> Result<(), VhostError>;
}

/// Parts from which a pair is created. In arrays, the receive queue precedes the transmit queue.
pub(in super::super) struct Setup<'a> {
    pub(in super::super) regions: &'a Regions,
    pub(in super::super) features: u64,
    /// Queues as the driver has configured them.
    pub(in super::super) queues: [&'a Queue; 2],
    /// Events that the driver signals to notify the device.
    pub(in super::super) kicks: [&'a EventFd; 2],
    /// Events that vhost-net signals to interrupt the driver.
    pub(in super::super) calls: [&'a EventFd; 2],
    pub(in super::super) errors: [&'a EventFd; 2],
    /// Queue of the host's interface.
    pub(in super::super) tap: File,
}

pub(in super::super) type Connect =
    Arc<dyn Fn(Setup<'_>) -> Result<Box<dyn Rings>, VhostError> + Send + Sync>;

struct State {
    /// `None` after the pair has failed or was given up.
    rings: Option<Box<dyn Rings>>,
    /// True if the driver uses the pair.
    is_wanted: bool,
    /// True while the VM is paused.
    is_quiesced: bool,
    is_attached: bool,
}

/// A queue pair and its state. A failure disables the pair and signals its worker.
pub(super) struct Engine {
    /// Id of the interface, for log lines.
    net: String,
    state: Mutex<State>,
    kicks: [EventFd; 2],
    /// Signaled after a failure.
    failure: EventFd,
}

impl Engine {
    pub(super) fn new(
        net: String,
        rings: Box<dyn Rings>,
        kicks: [EventFd; 2],
        failure: EventFd,
    ) -> Arc<Self> {
        let state =
            State { rings: Some(rings), is_wanted: false, is_quiesced: false, is_attached: false };
        Arc::new(Self { net, state: Mutex::new(state), kicks, failure })
    }

    pub(super) fn give_up(&self) {
        // The lock is held until the pair is detached. A region can therefore be removed only after
        // the pair has stopped accessing it.
        let mut state = self.state.lock();
        if let Some(mut rings) = state.rings.take()
            && let Err(err) = rings.detach()
        {
            // The error is not fatal, because closing the file detaches the pair as well.
            debug!(net = self.net, %err, "Cannot stop vhost-net");
        }
    }

    /// Returns true if the pair has failed or was given up.
    pub(super) fn is_given_up(&self) -> bool {
        self.state.lock().rings.is_none()
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state.lock();
        change(&mut state);
        let should = state.is_wanted && !state.is_quiesced;
        let was = std::mem::replace(&mut state.is_attached, should);
        let Some(rings) = &mut state.rings else { return };
        let result = match (was, should) {
            (false, true) => rings.attach(),
            (true, false) => rings.detach(),
            _ => return,
        };
        self.check(&mut state, result);
        if should && state.rings.is_some() {
            // Notifications may have been lost while the pair was detached, so they are repeated.
            for kick in &self.kicks {
                // The write fails only if the event's counter is full. In that case a notification
                // is already pending.
                let _ = kick.write(1);
            }
        }
    }

    /// Disables the pair if `result` is an error. Closing its file stops all accesses, whatever
    /// state it is in.
    fn check(&self, state: &mut State, result: Result<(), VhostError>) {
        if let Err(err) = result {
            let error = &err as &dyn std::error::Error;
            rate_limited!(
                warn,
                net = self.net,
                error,
                "vhost-net failed; a queue pair is disabled"
            );
            state.rings = None;
            // The write fails only if the event's counter is full. In that case the failure is
            // already signaled.
            let _ = self.failure.write(1);
        }
    }
}

impl PairBackend for Engine {
    fn use_pair(&self, is_active: bool) {
        self.change(|state| state.is_wanted = is_active);
    }
}

impl Helper for Engine {
    fn quiesce(&self) {
        self.change(|state| state.is_quiesced = true);
    }

    fn resume(&self) {
        self.change(|state| state.is_quiesced = false);
    }
}

impl RegionWatcher for Engine {
    fn regions_changed(&self, regions: &Regions) {
        let mut state = self.state.lock();
        let Some(rings) = &mut state.rings else { return };
        let result = rings.set_regions(regions);
        self.check(&mut state, result);
    }
}

#[cfg(test)]
pub(in super::super) mod fake {
    use super::*;

    /// Records the calls for a pair.
    #[derive(Default)]
    pub(in super::super::super) struct Record {
        pub(in super::super::super) calls: Vec<String>,
        pub(in super::super::super) refuse: bool,
    }

    /// A simulated pair that only records calls.
    pub(in super::super::super) struct FakeRings(pub(in super::super::super) Arc<Mutex<Record>>);

    impl FakeRings {
        fn record(&self, call: String) -> Result<(), VhostError> {
            let mut record = self.0.lock();
            record.calls.push(call);
            match record.refuse {
                true => Err(VhostError::Io(std::io::ErrorKind::Other.into())),
                false => Ok(()),
            }
        }
    }

    impl Rings for FakeRings {
        fn attach(&mut self) -> Result<(), VhostError> {
            self.record("attach".to_owned())
        }
        fn detach(&mut self) -> Result<(), VhostError> {
            self.record("detach".to_owned())
        }
        fn set_regions(&mut self, regions: &Regions) -> Result<(), VhostError> {
            use vm_memory::GuestMemoryBackend;
            self.record(format!("{} regions", regions.memory.num_regions()))
        }
    }

    impl Drop for FakeRings {
        fn drop(&mut self) {
            self.0.lock().calls.push("closed".to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{GuestAddress, GuestMemoryMmap};
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::fake::{FakeRings, Record};
    use super::*;

    struct Rig {
        engine: Arc<Engine>,
        record: Arc<Mutex<Record>>,
        kicks: [EventFd; 2],
        failure: EventFd,
    }

    impl Rig {
        fn new() -> Self {
            let event = || EventFd::new(EFD_NONBLOCK).unwrap();
            let (kicks, failure, record) =
                ([event(), event()], event(), Arc::<Mutex<Record>>::default());
            let copies = kicks.each_ref().map(|kick| kick.try_clone().unwrap());
            let rings = Box::new(FakeRings(Arc::clone(&record)));
            let engine =
                Engine::new("test".to_owned(), rings, copies, failure.try_clone().unwrap());
            Self { engine, record, kicks, failure }
        }

        fn calls(&self) -> Vec<String> {
            std::mem::take(&mut self.record.lock().calls)
        }

        fn is_kicked(&self) -> bool {
            self.kicks.iter().all(|kick| kick.read().is_ok())
        }
    }

    #[test]
    fn pair_is_attached_while_active_and_the_vm_runs() {
        let rig = Rig::new();
        rig.engine.use_pair(false);
        rig.engine.quiesce();
        rig.engine.use_pair(true);
        assert_eq!(rig.calls(), Vec::<String>::new());
        rig.engine.resume();
        assert_eq!(rig.calls(), ["attach"]);
        assert!(rig.is_kicked(), "a notification during the pause was not handled");
        rig.engine.use_pair(true);
        assert_eq!(rig.calls(), Vec::<String>::new());
        rig.engine.quiesce();
        assert_eq!(rig.calls(), ["detach"]);
        assert!(!rig.is_kicked());
        rig.engine.use_pair(false);
        rig.engine.resume();
        assert_eq!(rig.calls(), Vec::<String>::new());
        rig.engine.use_pair(true);
        rig.engine.give_up();
        assert_eq!(rig.calls(), ["attach", "detach", "closed"]);
        rig.engine.use_pair(false);
        assert!(rig.engine.is_given_up() && rig.calls().is_empty() && rig.failure.read().is_err());
    }

    #[test]
    fn regions_are_updated_also_while_paused() {
        let rig = Rig::new();
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 4096)]).unwrap();
        let regions = Regions { memory, reservations: Vec::new() };
        rig.engine.regions_changed(&regions);
        rig.engine.quiesce();
        rig.engine.regions_changed(&regions);
        assert_eq!(rig.calls(), ["1 regions", "1 regions"]);
    }

    #[test]
    fn failed_pair_is_closed_and_signaled() {
        let fails: [fn(&Rig); 3] = [
            |rig| rig.engine.use_pair(true),
            |rig| {
                rig.record.lock().refuse = false;
                rig.engine.use_pair(true);
                rig.record.lock().refuse = true;
                rig.engine.quiesce();
            },
            |rig| {
                let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 4096)]).unwrap();
                rig.engine.regions_changed(&Regions { memory, reservations: Vec::new() });
            },
        ];
        for fail in fails {
            let rig = Rig::new();
            rig.record.lock().refuse = true;
            fail(&rig);
            assert_eq!(rig.calls().last().unwrap(), "closed");
            assert!(rig.failure.read().is_ok() && rig.engine.is_given_up());
            rig.engine.resume();
            rig.engine.use_pair(true);
            assert_eq!(rig.calls(), Vec::<String>::new());
        }
    }
}
