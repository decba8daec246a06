//! What devices are attached to, and which are.

use std::io;
use std::sync::Arc;

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::error::BuildError;
use super::told::Teller;
use super::work::DeviceWork;
use crate::bus::Bus;
use crate::cpu::brake::Brake;
use crate::event_loop::EventLoopHandle;
use crate::events::Events;
use crate::interrupt::MsiController;
use crate::interrupt::router::MsiRouter;
use crate::memory::Memory;
use crate::memory::layout::{ECAM_LEN, ECAM_START};
use crate::memory::lost::LostMemory;
use crate::metrics::{Expose, Metrics, Registration};
use crate::pci::RootBus;
use crate::virtio::VirtioDevice;
use crate::virtio::transport::pci::{IoEvents, VirtioPciDevice};

/// The legacy way into PCI configuration space: address and data, 4 ports each.
const PCI_CONFIG_PORT: u64 = 0xcf8;
const PCI_CONFIG_LEN: u64 = 8;

/// What all devices of a VM are attached to.
pub(super) struct Fabric {
    io_events: Arc<dyn IoEvents>,
    interrupts: Arc<dyn MsiController>,
    pub(super) ports: Arc<Bus>,
    pub(super) mmio: Arc<Bus>,
    pub(super) pci: Arc<RootBus>,
    router: Arc<MsiRouter>,
    /// For devices whose failure the guest cannot be told.
    pub(super) brake: Arc<Brake>,
    /// For memory that may be lost.
    pub(super) lost: Arc<LostMemory>,
    /// Everything on the PCI bus, to be stopped when the VM ends.
    pub(super) virtio: Vec<Attached>,
    /// The threads of devices.
    pub(super) work: Arc<DeviceWork>,
    pub(super) teller: Teller,
    pub(super) metrics: Arc<Metrics>,
    /// Sources of metrics that exist as long as the machine.
    exposed: Vec<Registration>,
}

/// A device on the PCI bus.
pub(super) struct Attached {
    /// What the API calls it.
    pub(super) id: String,
    pub(super) slot: u8,
    pub(super) device: Arc<VirtioPciDevice>,
    /// Threads of its own.
    pub(super) loops: Vec<EventLoopHandle>,
    /// What it is in metrics, if it can be removed.
    pub(super) removable: Option<&'static str>,
    /// The guest was asked to let it go.
    pub(super) is_leaving: bool,
    /// Its counters, in the exposition until the guest has let it go.
    pub(super) metrics: Option<Registration>,
}

impl Fabric {
    /// Nothing is attached.
    pub(super) fn new(
        io_events: Arc<dyn IoEvents>,
        interrupts: Arc<dyn MsiController>,
        vcpus: u8,
        memory: &Memory,
        events: Events,
        metrics: Arc<Metrics>,
    ) -> Result<Self, BuildError> {
        let (ports, mmio) = (Arc::new(Bus::default()), Arc::new(Bus::default()));
        let pci = RootBus::new(&mmio);
        mmio.insert(ECAM_START, ECAM_LEN, pci.ecam())?;
        ports.insert(PCI_CONFIG_PORT, PCI_CONFIG_LEN, pci.ports())?;
        let router = MsiRouter::new(Arc::clone(&interrupts));
        let brake = Arc::new(Brake::new(vcpus));
        let lost = LostMemory::new(Arc::clone(&brake), memory.view().loss())
            .map_err(BuildError::device("the event of lost memory"))?;
        Ok(Self {
            io_events,
            interrupts,
            ports,
            mmio,
            pci,
            router,
            brake,
            lost: Arc::new(lost),
            virtio: Vec::new(),
            work: DeviceWork::new(Vec::new()),
            teller: Teller::new(events),
            metrics,
            exposed: Vec::new(),
        })
    }

    /// Adds a source of metrics for as long as the machine exists.
    pub(super) fn expose(&mut self, source: Arc<dyn Expose>) {
        self.exposed.push(self.metrics.register(source));
    }

    /// Puts a virtio device on the PCI bus, for as long as the VM lives. `source` has its counters,
    /// unless something else exposes them.
    pub(super) fn attach(
        &mut self,
        device: Box<dyn VirtioDevice>,
        source: Option<Arc<dyn Expose>>,
        memory: &Memory,
    ) -> Result<(), BuildError> {
        let id = device.name().to_owned();
        self.put(None, id, None, device, source, memory).map(drop)
    }

    /// Puts one on the bus that may be removed again, called `id` by the API and `kind` in metrics. Returns its slot.
    pub(super) fn attach_removable(
        &mut self,
        id: &str,
        kind: &'static str,
        device: Box<dyn VirtioDevice>,
        source: Arc<dyn Expose>,
        memory: &Memory,
    ) -> Result<u8, BuildError> {
        self.attach_removable_at(None, id, kind, device, source, memory)
    }

    /// The same in a slot that was asked for.
    pub(super) fn attach_removable_at(
        &mut self,
        slot: Option<u8>,
        id: &str,
        kind: &'static str,
        device: Box<dyn VirtioDevice>,
        source: Arc<dyn Expose>,
        memory: &Memory,
    ) -> Result<u8, BuildError> {
        self.put(slot, id.to_owned(), Some(kind), device, Some(source), memory)
    }

    fn put(
        &mut self,
        slot: Option<u8>,
        id: String,
        removable: Option<&'static str>,
        device: Box<dyn VirtioDevice>,
        source: Option<Arc<dyn Expose>>,
        memory: &Memory,
    ) -> Result<u8, BuildError> {
        // Who removes a device would get another one. Configurations with two are refused, and so is what is added.
        assert!(self.virtio.iter().all(|attached| attached.id != id), "two devices are called {id}");
        let view = memory.view().clone();
        let events = Arc::clone(&self.io_events);
        let loops = device.loops();
        let device = self.teller.wrap(&id, device);
        let device = VirtioPciDevice::new(device, view, &self.router, events)?;
        let slot = self.pci.add(slot, Arc::clone(&device) as _)?;
        self.work.add(&loops);
        let metrics = source.map(|source| self.metrics.register(source));
        self.virtio.push(Attached { id, slot, device, loops, removable, is_leaving: false, metrics });
        Ok(slot)
    }

    /// What makes the line of the interrupt `gsi` of the I/O APIC high or low. It stays so also while the guest masks the pin.
    pub(super) fn level(&self, gsi: u32) -> impl Fn(bool) -> io::Result<()> + Send + Sync + use<> {
        let interrupts = Arc::clone(&self.interrupts);
        move |high| interrupts.set_line(gsi, high)
    }

    /// An event that raises the interrupt `gsi` of the I/O APIC.
    pub(super) fn line(&self, gsi: u32) -> Result<EventFd, BuildError> {
        let line = EventFd::new(EFD_NONBLOCK).map_err(BuildError::device("an interrupt line"))?;
        self.interrupts.register_irqfd(&line, gsi).map_err(BuildError::device("an interrupt line"))?;
        Ok(line)
    }
}
