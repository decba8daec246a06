//! Context for tests of devices, without KVM.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

use super::{DeviceContext, MachineParts};
use crate::bus::IoEvents;
use crate::event_loop::EventLoopHandle;
use crate::events::Events;
use crate::interrupt::testing::FakeController;
use crate::memory::slots::Slots;
use crate::memory::slots::fake::FakeSlots;
use crate::memory::view::GuestView;
use crate::metrics::Metrics;

/// Registered ioeventfds, by address.
#[derive(Default)]
pub struct FakeIoEvents {
    pub registered: Mutex<BTreeMap<u64, EventFd>>,
}

impl IoEvents for FakeIoEvents {
    fn register(&self, event: &EventFd, address: u64) -> io::Result<()> {
        let event = event.try_clone()?;
        assert!(self.registered.lock().insert(address, event).is_none(), "registered twice");
        Ok(())
    }

    fn unregister(&self, _: &EventFd, address: u64) -> io::Result<()> {
        assert!(self.registered.lock().remove(&address).is_some(), "was not registered");
        Ok(())
    }
}

/// Fake machine that records ioeventfds and interrupts.
pub struct FakeMachine {
    pub io_events: Arc<FakeIoEvents>,
    pub interrupts: Arc<FakeController>,
    pub events: Events,
    pub metrics: Arc<Metrics>,
    pub slots: Arc<FakeSlots>,
}

impl Default for FakeMachine {
    fn default() -> Self {
        Self {
            io_events: Arc::default(),
            interrupts: FakeController::new(),
            events: Events::start(),
            metrics: Arc::new(Metrics::new("vm")),
            slots: Arc::default(),
        }
    }
}

impl FakeMachine {
    /// Creates a context. Its devices work on `event_loop` and access the memory of `view`.
    pub fn context(&self, view: GuestView, event_loop: EventLoopHandle) -> DeviceContext {
        let machine = MachineParts {
            io_events: self.io_events.clone(),
            interrupts: self.interrupts.clone(),
            max_vcpus: 0,
            view,
            slots: Arc::new(Slots::new(self.slots.clone(), 64)),
            userfaults: Arc::default(),
            event_loop,
            events: self.events.clone(),
            metrics: Arc::clone(&self.metrics),
            reset_guest: Arc::new(|| ()),
            pause_guest: Arc::new(|_| ()),
            wait_for_space: Arc::new(|_| ()),
        };
        DeviceContext::new(machine).unwrap()
    }
}
