//! Parts of a machine that are available to its devices.

use std::io;
use std::sync::Arc;

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::trim::TrimService;
use super::{DeviceWork, EventEmitter, SetupResult};
use crate::bus::{Bus, IoEvents};
use crate::entry_inhibitor::EntryInhibitor;
use crate::event_loop::EventLoopHandle;
use crate::events::Events;
use crate::interrupt::MsiController;
use crate::interrupt::router::MsiRouter;
use crate::memory::holes::{StoreWaits, UserfaultDevice};
use crate::memory::layout::{ECAM_LEN, ECAM_START};
use crate::memory::lost_memory::LostMemory;
use crate::memory::slots::Slots;
use crate::memory::view::GuestView;
use crate::metrics::Metrics;
use crate::pci::RootBus;

/// First port for legacy access to PCI configuration space. Address and data use 4 ports each.
const PCI_CONFIG_PORT: u64 = 0xcf8;
const PCI_CONFIG_LEN: u64 = 8;

/// Parts of a machine from which a [`DeviceContext`] is made.
pub struct MachineParts {
    pub io_events: Arc<dyn IoEvents>,
    pub interrupts: Arc<dyn MsiController>,
    /// Maximum number of vCPUs.
    pub max_vcpus: u8,
    pub view: GuestView,
    /// Slots of guest memory, for devices with pages that the guest reads.
    pub slots: Arc<Slots>,
    /// Source of the faults of mapped thin volumes.
    pub userfaults: Arc<UserfaultDevice>,
    /// Event loop for devices that have no threads of their own.
    pub event_loop: EventLoopHandle,
    pub events: Events,
    pub metrics: Arc<Metrics>,
    /// Restarts the guest, as if the guest had requested this.
    pub reset_guest: Arc<dyn Fn() + Send + Sync>,
    /// Requests that the VM task pauses the VM. The argument is the reason.
    pub pause_guest: Arc<dyn Fn(String) + Send + Sync>,
    /// Requests that the VM task pauses the VM until its disks have space. The argument is the
    /// reason.
    pub wait_for_space: Arc<dyn Fn(String) + Send + Sync>,
}

/// Parts of a machine that its devices use and register themselves with.
pub struct DeviceContext {
    pub ports: Arc<Bus>,
    pub mmio: Arc<Bus>,
    pub pci: Arc<RootBus>,
    pub router: Arc<MsiRouter>,
    /// Entry inhibitor for devices that cannot report a failure to the guest.
    pub inhibitor: Arc<EntryInhibitor>,
    /// Watch of memory that may be lost.
    pub lost: Arc<LostMemory>,
    /// Threads on which devices work.
    pub work: Arc<DeviceWork>,
    pub emitter: EventEmitter,
    /// Service for commands of the guest that release space of volumes.
    pub trims: TrimService,
    /// Stores of vCPUs that wait for space.
    pub store_waits: Arc<StoreWaits>,
    pub machine: MachineParts,
}

impl DeviceContext {
    pub fn new(machine: MachineParts) -> SetupResult<Self> {
        let (ports, mmio) = (Arc::new(Bus::default()), Arc::new(Bus::default()));
        let pci = RootBus::new(&mmio);
        mmio.insert(ECAM_START, ECAM_LEN, pci.ecam())?;
        ports.insert(PCI_CONFIG_PORT, PCI_CONFIG_LEN, pci.ports())?;
        let inhibitor = Arc::new(EntryInhibitor::new(machine.max_vcpus));
        Ok(Self {
            ports,
            mmio,
            pci,
            router: MsiRouter::new(Arc::clone(&machine.interrupts)),
            lost: Arc::new(LostMemory::new(Arc::clone(&inhibitor), machine.view.loss())?),
            inhibitor,
            work: DeviceWork::new(Vec::new()),
            emitter: EventEmitter::new(machine.events.clone()),
            trims: TrimService::start()?,
            store_waits: Arc::default(),
            machine,
        })
    }

    /// Returns a function that sets the level of interrupt `gsi` at the I/O APIC. The level is kept
    /// while the guest masks the pin.
    pub fn level(&self, gsi: u32) -> impl Fn(bool) -> io::Result<()> + Send + Sync + use<> {
        let interrupts = Arc::clone(&self.machine.interrupts);
        move |high| interrupts.set_line(gsi, high)
    }

    /// Creates an event that raises interrupt `gsi` at the I/O APIC. Dropping the returned line
    /// disconnects the event.
    pub fn line(&self, gsi: u32) -> io::Result<(EventFd, InterruptLine)> {
        let raised = EventFd::new(EFD_NONBLOCK)?;
        let (event, interrupts) = (raised.try_clone()?, Arc::clone(&self.machine.interrupts));
        interrupts.register_irqfd(&event, gsi)?;
        Ok((raised, InterruptLine { interrupts, event, gsi }))
    }
}

/// Registration of an event that raises an interrupt at the I/O APIC. Dropping it unregisters the
/// event.
#[must_use = "dropping this unregisters the interrupt"]
pub struct InterruptLine {
    interrupts: Arc<dyn MsiController>,
    event: EventFd,
    gsi: u32,
}

impl Drop for InterruptLine {
    fn drop(&mut self) {
        // This fails only if the VM no longer exists.
        let _ = self.interrupts.unregister_irqfd(&self.event, self.gsi);
    }
}
