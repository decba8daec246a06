//! Lifecycle of devices on the PCI bus.

use std::any::Any;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::{DeviceContext, DeviceCounters, DeviceHandle, DeviceWork};
use crate::event_loop::EventLoopHandle;
use crate::metrics::{Expose, Registration};
use crate::pci::{PciDevice, PciError, RootBus};

/// Device that is not on the bus yet.
pub struct NewDevice {
    id: String,
    device: Arc<dyn PciDevice>,
    loops: Vec<EventLoopHandle>,
    slot: Option<u8>,
    removable: Option<&'static str>,
    source: Option<Arc<dyn Expose>>,
    handle: Option<Box<dyn DeviceHandle>>,
    mapping: Option<Box<dyn Any + Send>>,
}

impl NewDevice {
    /// Creates a device that users cannot remove. `loops` are the event loops of its own threads.
    pub fn new(id: &str, device: Arc<dyn PciDevice>, loops: Vec<EventLoopHandle>) -> Self {
        let (slot, removable, source, handle, mapping) = Default::default();
        Self { id: id.to_owned(), device, loops, slot, removable, source, handle, mapping }
    }

    /// Allows users to remove the device. `kind` names the device in metrics and events.
    pub fn removable(self, kind: &'static str) -> Self {
        Self { removable: Some(kind), ..self }
    }

    /// Requests the given slot instead of the first free one.
    pub fn at(self, slot: Option<u8>) -> Self {
        Self { slot, ..self }
    }

    /// Exposes the metrics of `source` while the device is attached.
    pub fn exposing(self, source: Arc<dyn Expose>) -> Self {
        Self { source: Some(source), ..self }
    }

    /// Gives the API a handle to the device.
    pub fn with_handle(self, handle: impl DeviceHandle) -> Self {
        Self { handle: Some(Box::new(handle)), ..self }
    }

    /// Stores the mapping through which the guest accesses the device's memory. The mapping is
    /// dropped when the guest ejects the device, or otherwise after the device has stopped.
    pub fn mapping(self, mapping: impl Any + Send) -> Self {
        Self { mapping: Some(Box::new(mapping)), ..self }
    }

    /// Adds the device to the bus and registers it. If the bus refuses the device, the device is
    /// stopped before its mapping is dropped.
    pub fn attach(self, context: &DeviceContext) -> Result<AttachedDevice, PciError> {
        let slot = context.pci.add(self.slot, Arc::clone(&self.device))?;
        let Self { id, device, loops, removable, source, handle, mapping, .. } = self;
        context.work.add(&loops);
        Ok(AttachedDevice {
            id,
            slot,
            removable,
            is_leaving: false,
            device,
            loops,
            handle,
            registration: source.map(|source| context.machine.metrics.register(source)),
            mapping,
            pci: Arc::clone(&context.pci),
            work: Arc::clone(&context.work),
        })
    }
}

/// Device on the PCI bus. Dropping it removes the device from the bus, stops it, and then drops its
/// mapping. The order matters, because the device's threads may use the mapping until they have
/// stopped.
pub struct AttachedDevice {
    /// Id in the API.
    pub id: String,
    pub slot: u8,
    /// Kind in metrics and events. `None` if users cannot remove the device.
    pub removable: Option<&'static str>,
    /// Set if the guest was requested to eject the device.
    pub is_leaving: bool,
    device: Arc<dyn PciDevice>,
    loops: Vec<EventLoopHandle>,
    handle: Option<Box<dyn DeviceHandle>>,
    registration: Option<Registration>,
    // Dropped after the body of `drop`, which stops the device.
    mapping: Option<Box<dyn Any + Send>>,
    pci: Arc<RootBus>,
    work: Arc<DeviceWork>,
}

impl AttachedDevice {
    /// Counters for the API call `vm.counters`.
    pub fn counters(&self) -> Option<DeviceCounters> {
        self.handle.as_ref()?.counters()
    }

    /// Handle of type `T` for the API, if the device has one.
    pub fn handle<T: DeviceHandle>(&self) -> Option<&T> {
        let handle: &dyn Any = &**self.handle.as_ref()?;
        handle.downcast_ref()
    }

    /// Returns false once the guest has ejected the device.
    pub fn is_on_bus(&self) -> bool {
        self.pci.has(self.slot, &*self.device)
    }

    /// Unregisters a device that the guest has ejected. Drops its mapping before its threads have
    /// stopped, because losing the file no longer affects the guest. The threads stop when the
    /// device is dropped. Dropping it may wait for a disk.
    pub fn eject(&mut self) {
        self.unregister();
        self.mapping = None;
    }

    /// Stops the device's threads. The call may wait for a disk.
    pub fn stop(&self) {
        self.device.stop();
    }

    fn unregister(&mut self) {
        if self.is_on_bus() {
            drop(self.pci.remove(self.slot));
        }
        self.handle = None;
        self.registration = None;
        self.work.remove(&std::mem::take(&mut self.loops));
    }
}

impl Drop for AttachedDevice {
    fn drop(&mut self) {
        self.unregister();
        self.stop();
    }
}

/// All devices of a machine on the PCI bus.
#[derive(Default)]
pub struct DeviceList(Vec<AttachedDevice>);

impl DeviceList {
    /// Adds a device.
    ///
    /// # Panics
    /// If another device has the same id, because a removal could then affect the wrong device.
    /// Callers prevent this: a configuration in which two devices share an id is refused, and so is
    /// a new device whose id is in use.
    pub fn push(&mut self, device: AttachedDevice) {
        let id = &device.id;
        assert!(self.0.iter().all(|attached| attached.id != *id), "id {id} is used by two devices");
        self.0.push(device);
    }

    /// Returns all handles of type `T`, in the order of their devices.
    pub fn handles<T: DeviceHandle>(&self) -> impl Iterator<Item = &T> {
        self.0.iter().filter_map(AttachedDevice::handle)
    }
}

impl Deref for DeviceList {
    type Target = Vec<AttachedDevice>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for DeviceList {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}
