//! What devices are attached to, and which are.

use std::io;
use std::sync::Arc;

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::attached_device::{AttachedDevice, Belongings};
use super::error::BuildError;
use super::told::Teller;
use super::work::DeviceWork;
use crate::brake::Brake;
use crate::bus::Bus;
use crate::device::{Function, NewDevice};
use crate::events::Events;
use crate::interrupt::MsiController;
use crate::interrupt::router::MsiRouter;
use crate::memory::Memory;
use crate::memory::layout::{ECAM_LEN, ECAM_START};
use crate::memory::lost::LostMemory;
use crate::metrics::{Expose, Metrics, Registration};
use crate::pci::{PciDevice, RootBus};
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
    pub(super) devices: Vec<AttachedDevice>,
    /// The threads of devices.
    pub(super) work: Arc<DeviceWork>,
    pub(super) teller: Teller,
    pub(super) metrics: Arc<Metrics>,
    /// Sources of metrics that exist as long as the machine.
    exposed: Vec<Registration>,
}

impl Fabric {
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
            devices: Vec::new(),
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

    /// Puts a device on the PCI bus and returns its slot.
    pub(super) fn attach(&mut self, new: NewDevice, memory: &Memory) -> Result<u8, BuildError> {
        let NewDevice { id, function, slot, removable, source, handle, undo } = new;
        // Configurations with two devices of one id are refused, and so is an added device whose id
        // is taken. Otherwise a removal could reach another device.
        assert!(
            self.devices.iter().all(|attached| attached.id != id),
            "two devices have the id {id}"
        );
        let (device, loops) = match function {
            Function::Pci(device) => (device, Vec::new()),
            Function::Virtio(device) => {
                let (loops, device) = (device.loops(), self.teller.wrap(&id, device));
                let (view, events) = (memory.view().clone(), Arc::clone(&self.io_events));
                let device = VirtioPciDevice::new(device, view, &self.router, events)?;
                (device as Arc<dyn PciDevice>, loops)
            }
        };
        let slot = self.pci.add(slot, Arc::clone(&device))?;
        self.work.add(&loops);
        let _registration = source.map(|source| self.metrics.register(source));
        let belongings = Some(Belongings { handle, _registration, undo });
        self.devices.push(AttachedDevice {
            id,
            slot,
            device,
            loops,
            removable,
            is_leaving: false,
            belongings,
        });
        Ok(slot)
    }

    /// What makes the line of the interrupt `gsi` of the I/O APIC high or low. It stays so also
    /// while the guest masks the pin.
    pub(super) fn level(&self, gsi: u32) -> impl Fn(bool) -> io::Result<()> + Send + Sync + use<> {
        let interrupts = Arc::clone(&self.interrupts);
        move |high| interrupts.set_line(gsi, high)
    }

    /// An event that raises the interrupt `gsi` of the I/O APIC.
    pub(super) fn line(&self, gsi: u32) -> Result<EventFd, BuildError> {
        let line = EventFd::new(EFD_NONBLOCK).map_err(BuildError::device("an interrupt line"))?;
        self.interrupts
            .register_irqfd(&line, gsi)
            .map_err(BuildError::device("an interrupt line"))?;
        Ok(line)
    }
}
