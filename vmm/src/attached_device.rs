//! Devices on the PCI bus, each with everything that the machine has to do for it.

use std::sync::Arc;

use crate::event_loop::EventLoopHandle;
use crate::memory::Memory;
use crate::metrics::{Expose, Registration};
use crate::pci::PciDevice;
use crate::virtio::{DeviceHandle, VirtioDevice};

/// Undoes what was done for a device that the guest has let go of.
type Undo = Box<dyn FnOnce(&mut Memory) + Send>;

/// Function of a device.
pub(super) enum Function {
    /// Virtio device, which the PCI transport shows to the guest.
    Virtio(Box<dyn VirtioDevice>),
    /// Device that is a PCI function itself.
    Pci(Arc<dyn PciDevice>),
}

/// Device that is not on the bus yet.
pub(super) struct NewDevice {
    pub(super) id: String,
    pub(super) function: Function,
    pub(super) slot: Option<u8>,
    pub(super) removable: Option<&'static str>,
    pub(super) source: Option<Arc<dyn Expose>>,
    pub(super) handle: Option<Box<dyn DeviceHandle>>,
    pub(super) undo: Option<Undo>,
}

impl NewDevice {
    /// Device that stays as long as the machine and has its own name as id.
    pub(super) fn fixed(device: impl VirtioDevice + 'static) -> Self {
        Self::new(device.name().to_owned(), Function::Virtio(Box::new(device)))
    }

    /// PCI function that stays as long as the machine.
    pub(super) fn pci(id: &str, device: impl PciDevice + 'static) -> Self {
        Self::new(id.to_owned(), Function::Pci(Arc::new(device)))
    }

    fn new(id: String, function: Function) -> Self {
        Self { id, function, slot: None, removable: None, source: None, handle: None, undo: None }
    }

    /// Device that can be removed. Metrics and events name its `kind`.
    pub(super) fn removable(id: &str, kind: &'static str, device: impl VirtioDevice + 'static) -> Self {
        Self { id: id.to_owned(), removable: Some(kind), ..Self::fixed(device) }
    }

    /// Requests a slot instead of the first free one.
    pub(super) fn at(self, slot: Option<u8>) -> Self {
        Self { slot, ..self }
    }

    /// Exposes the counters of `source` while the guest has the device.
    pub(super) fn exposing(self, source: Arc<dyn Expose>) -> Self {
        Self { source: Some(source), ..self }
    }

    /// Lets the API use the device.
    pub(super) fn with_handle(self, handle: impl DeviceHandle + 'static) -> Self {
        Self { handle: Some(Box::new(handle)), ..self }
    }

    /// Runs `undo` once the guest has let go of the device. If it cannot be attached, the caller
    /// cleans up: the files of a configuration stay open for the next attempt to boot.
    pub(super) fn undone_by(self, undo: impl FnOnce(&mut Memory) + Send + 'static) -> Self {
        Self { undo: Some(Box::new(undo)), ..self }
    }
}

/// Device on the PCI bus.
pub(super) struct AttachedDevice {
    /// Id on the API.
    pub(super) id: String,
    pub(super) slot: u8,
    pub(super) device: Arc<dyn PciDevice>,
    /// Its own threads.
    pub(super) loops: Vec<EventLoopHandle>,
    /// Its kind in metrics, if it can be removed.
    pub(super) removable: Option<&'static str>,
    /// The guest was asked to let go of it.
    pub(super) is_leaving: bool,
    /// What the guest loses with it. `None` once the guest has let go of it.
    pub(super) belongings: Option<Belongings>,
}

/// What exists for a device as long as the guest has it.
pub(super) struct Belongings {
    pub(super) handle: Option<Box<dyn DeviceHandle>>,
    /// Removes the counters from the exposition when it is dropped.
    pub(super) _registration: Option<Registration>,
    pub(super) undo: Option<Undo>,
}

impl AttachedDevice {
    /// Handle for the API.
    pub(super) fn handle(&self) -> Option<&dyn DeviceHandle> {
        self.belongings.as_ref()?.handle.as_deref()
    }

    /// Removes everything that exists for the device beside the device itself.
    pub(super) fn detach(&mut self, memory: &mut Memory) {
        if let Some(undo) = self.belongings.take().and_then(|belongings| belongings.undo) {
            undo(memory);
        }
    }
}
