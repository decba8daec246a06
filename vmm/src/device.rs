//! New devices, each with its resources.
//!
//! A device's folder has a function that builds it from its configuration and a [`DeviceContext`].
//! vm/devices.rs lists these functions.

use std::sync::Arc;

use crate::event_loop::EventLoopHandle;
use crate::events::Events;
use crate::memory::Memory;
use crate::metrics::Expose;
use crate::pci::PciDevice;
use crate::virtio::{DeviceHandle, VirtioDevice};

/// Parts of the machine that a device may use.
pub struct DeviceContext {
    /// Event loop of devices without their own threads.
    pub event_loop: EventLoopHandle,
    pub events: Events,
    /// Restarts the guest as if it had requested that.
    pub reset_guest: Arc<dyn Fn() + Send + Sync>,
}

/// Cleans up after a device that the guest has ejected.
pub type Undo = Box<dyn FnOnce(&mut Memory) + Send>;

/// Function of a device.
pub enum Function {
    /// Virtio device, which the PCI transport shows to the guest.
    Virtio(Box<dyn VirtioDevice>),
    /// Device that is a PCI function itself.
    Pci(Arc<dyn PciDevice>),
}

/// Device that is not on the bus yet.
pub struct NewDevice {
    /// Id in the API.
    pub id: String,
    /// Its function on the PCI bus.
    pub function: Function,
    pub slot: Option<u8>,
    /// Kind in metrics, if it can be removed.
    pub removable: Option<&'static str>,
    pub source: Option<Arc<dyn Expose>>,
    /// Handle for the API.
    pub handle: Option<Box<dyn DeviceHandle>>,
    /// Cleans up after it.
    pub undo: Option<Undo>,
}

impl NewDevice {
    /// Creates a device that exists as long as the machine and has its name as id.
    pub fn fixed(device: impl VirtioDevice + 'static) -> Self {
        Self::new(device.name().to_owned(), Function::Virtio(Box::new(device)))
    }

    /// Creates a PCI function that exists as long as the machine.
    pub fn pci(id: &str, device: impl PciDevice + 'static) -> Self {
        Self::new(id.to_owned(), Function::Pci(Arc::new(device)))
    }

    fn new(id: String, function: Function) -> Self {
        Self { id, function, slot: None, removable: None, source: None, handle: None, undo: None }
    }

    /// Creates a device that can be removed. Metrics and events name its `kind`.
    pub fn removable(id: &str, kind: &'static str, device: impl VirtioDevice + 'static) -> Self {
        Self { id: id.to_owned(), removable: Some(kind), ..Self::fixed(device) }
    }

    /// Requests a slot instead of the first free one.
    pub fn at(self, slot: Option<u8>) -> Self {
        Self { slot, ..self }
    }

    /// Exposes the counters of `source` while the guest has the device.
    pub fn exposing(self, source: Arc<dyn Expose>) -> Self {
        Self { source: Some(source), ..self }
    }

    /// Lets the API use the device.
    pub fn with_handle(self, handle: impl DeviceHandle + 'static) -> Self {
        Self { handle: Some(Box::new(handle)), ..self }
    }

    /// Runs `undo` once the guest has ejected the device. If it cannot be attached, the caller
    /// cleans up, because the files of a configuration stay open for the next attempt to boot.
    pub fn undone_by(self, undo: impl FnOnce(&mut Memory) + Send + 'static) -> Self {
        Self { undo: Some(Box::new(undo)), ..self }
    }
}
