//! Fake interrupt controller that records calls.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

use super::MsiController;
use crate::pci::msix::MsiMessage;

/// Recorded call.
#[derive(Debug, PartialEq, Eq)]
pub enum Call {
    Routes(Vec<(u32, MsiMessage)>),
    /// Registration of an irqfd for this GSI.
    Register(u32),
    /// Removal of the irqfd for this GSI.
    Unregister(u32),
    /// New level of this GSI's line. True means high.
    Line(u32, bool),
    Signal(MsiMessage),
}

#[derive(Default)]
struct State {
    calls: Vec<Call>,
    irqfds: HashMap<u32, EventFd>,
    refuse: bool,
    /// Called before each call is recorded.
    observer: Option<Box<dyn Fn() + Send>>,
}

#[derive(Default)]
pub struct FakeController(Mutex<State>);

impl FakeController {
    /// Creates a controller without irqfds.
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// Returns the calls that were recorded since the last call of this function.
    pub fn take_calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.0.lock().calls)
    }

    /// Number of times that the irqfd of `gsi` was raised since the last call of this function.
    pub fn count_of(&self, gsi: u32) -> u64 {
        self.0.lock().irqfds.get(&gsi).map_or(0, |irqfd| irqfd.read().unwrap_or(0))
    }

    /// Number of registered irqfds.
    pub fn irqfds(&self) -> usize {
        self.0.lock().irqfds.len()
    }

    /// Makes all later calls fail, or succeed again.
    pub fn refuse(&self, refuse: bool) {
        self.0.lock().refuse = refuse;
    }

    /// Calls `observer` before each later call is recorded.
    pub fn observe(&self, observer: impl Fn() + Send + 'static) {
        self.0.lock().observer = Some(Box::new(observer));
    }

    fn record(&self, call: Call) -> io::Result<()> {
        let mut state = self.0.lock();
        if let Some(observer) = &state.observer {
            observer();
        }
        if state.refuse {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        state.calls.push(call);
        Ok(())
    }
}

impl MsiController for FakeController {
    fn set_msi_routes(&self, messages: &BTreeMap<u32, MsiMessage>) -> io::Result<()> {
        self.record(Call::Routes(messages.iter().map(|(&gsi, &message)| (gsi, message)).collect()))
    }

    fn register_irqfd(&self, irqfd: &EventFd, gsi: u32) -> io::Result<()> {
        self.record(Call::Register(gsi))?;
        self.0.lock().irqfds.insert(gsi, irqfd.try_clone()?);
        Ok(())
    }

    fn unregister_irqfd(&self, _: &EventFd, gsi: u32) -> io::Result<()> {
        self.0.lock().irqfds.remove(&gsi);
        self.record(Call::Unregister(gsi))
    }

    fn set_line(&self, gsi: u32, high: bool) -> io::Result<()> {
        self.record(Call::Line(gsi, high))
    }

    fn signal_msi(&self, message: MsiMessage) -> io::Result<()> {
        self.record(Call::Signal(message))
    }
}
