//! Devices on the PCI bus.

use std::sync::Arc;

use crate::device::Undo;
use crate::event_loop::EventLoopHandle;
use crate::memory::Memory;
use crate::metrics::Registration;
use crate::pci::PciDevice;
use crate::virtio::DeviceHandle;

/// Device on the PCI bus.
pub(super) struct AttachedDevice {
    /// Id in the API.
    pub(super) id: String,
    pub(super) slot: u8,
    pub(super) device: Arc<dyn PciDevice>,
    pub(super) loops: Vec<EventLoopHandle>,
    /// Its kind in metrics, if it can be removed.
    pub(super) removable: Option<&'static str>,
    /// The guest was requested to eject it.
    pub(super) is_leaving: bool,
    /// Resources of the device. `None` once the guest has ejected it.
    pub(super) belongings: Option<Belongings>,
}

/// Resources of a device, which exist while the guest has it.
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

    /// Releases the resources of the device.
    pub(super) fn detach(&mut self, memory: &mut Memory) {
        if let Some(undo) = self.belongings.take().and_then(|belongings| belongings.undo) {
            undo(memory);
        }
    }
}
