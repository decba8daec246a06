//! A virtio device as a PCI function.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use thiserror::Error;
use tracing::debug;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestAddressSpace};

use super::interrupt::{PciInterrupt, VectorMap};
use super::layout::{self, Capabilities};
use super::notify::Notifications;
use super::register_page::{PageSlot, RegisterPage};
use super::registers::{self, CommonRegisters, QueueRegisters};
use crate::device::{DeviceContext, EventEmitter};
use crate::events::Event;
use crate::interrupt::VirtioInterrupt;
use crate::log::rate_limited;
use crate::memory::view::GuestView;
use crate::pci::{BarRange, ConfigSpace, PciDevice, msix};
use crate::virtio::{ActivateError, Activation, ActiveQueue, VirtioDevice};

/// Number of bytes of device configuration that are compared to detect a change. No device has a
/// longer configuration.
const CONFIG_LEN_MAX: usize = 256;

/// Error that occurred while creating a PCI function for a device.
#[derive(Debug, Error)]
pub enum TransportError {
    /// The device has more queues than the transport supports.
    #[error("device {name} has {queues} queues, more than the maximum {}", layout::QUEUES_MAX)]
    TooManyQueues { name: String, queues: usize },
    /// A queue's size is not a power of two.
    #[error(
        "queue {index} of device {name} has size {size}, which must be a power of two up to 32768"
    )]
    QueueSize { name: String, index: usize, size: u16 },
    #[error("cannot create the notifications of device {name}")]
    Notifications {
        name: String,
        #[source]
        source: io::Error,
    },
    #[error("cannot allocate the page with the registers of device {name}")]
    RegisterPage {
        name: String,
        #[source]
        source: io::Error,
    },
}

/// The device and its connections to the VM, behind the registers.
struct Backend {
    id: String,
    device: Box<dyn VirtioDevice>,
    view: GuestView,
    emitter: EventEmitter,
    interrupt: Arc<PciInterrupt>,
    notifications: Notifications,
    /// Slot of the page with the registers.
    page_slot: Option<PageSlot>,
    active: bool,
    /// Configuration at the time when the driver last read the generation.
    config_seen: [u8; CONFIG_LEN_MAX],
    config_generation: u8,
}

struct Inner {
    config: ConfigSpace,
    capabilities: Capabilities,
    registers: CommonRegisters,
    /// Page from which the guest reads the registers, if the device has one.
    page: Option<Arc<RegisterPage>>,
    backend: Backend,
}

/// A virtio device in a PCI slot.
///
/// vCPUs access the device under a lock, which is also held while the device starts and stops.
/// Workers never take this lock. They signal the guest through [`PciInterrupt`], which has a
/// separate lock.
pub struct VirtioPciDevice {
    interrupt: Arc<PciInterrupt>,
    inner: Mutex<Inner>,
}

impl VirtioPciDevice {
    /// Creates the PCI function for `device`. Events about the device contain `id`. The caller must
    /// add the function to the root bus.
    pub fn new(
        id: &str,
        device: Box<dyn VirtioDevice>,
        context: &DeviceContext,
    ) -> Result<Arc<Self>, TransportError> {
        let name = || device.name().to_owned();
        let sizes = device.queue_sizes();
        let queues = match u16::try_from(sizes.len()) {
            Ok(queues) if queues <= layout::QUEUES_MAX => queues,
            _ => return Err(TransportError::TooManyQueues { name: name(), queues: sizes.len() }),
        };
        for (index, &size) in sizes.iter().enumerate() {
            if !size.is_power_of_two() {
                return Err(TransportError::QueueSize { name: name(), index, size });
            }
        }
        let vectors = Arc::new(VectorMap::new(queues));
        let slots = &context.machine.slots;
        let page_slot =
            device.has_mapped_registers().then(|| PageSlot::new(name(), Arc::clone(slots)));
        let page_slot = page_slot
            .transpose()
            .map_err(|source| TransportError::RegisterPage { name: name(), source })?;
        let page = page_slot.as_ref().map(PageSlot::page);
        let interrupt = Arc::new(PciInterrupt::new(
            name(),
            Arc::clone(&vectors),
            Arc::clone(&context.router),
            page.clone(),
        ));
        let registers = CommonRegisters::new(device.features(), sizes, vectors);
        let io_events = Arc::clone(&context.machine.io_events);
        let synchronous = device.synchronous_queues();
        let notifications = Notifications::new(name(), io_events, queues, synchronous)
            .map_err(|source| TransportError::Notifications { name: name(), source })?;
        let (config, capabilities) = layout::config_space(device.device_type(), queues);
        let backend = Backend {
            id: id.to_owned(),
            device,
            view: context.machine.view.clone(),
            emitter: context.emitter.clone(),
            interrupt: Arc::clone(&interrupt),
            notifications,
            page_slot,
            active: false,
            config_seen: [0; CONFIG_LEN_MAX],
            config_generation: 0,
        };
        let inner = Mutex::new(Inner { config, capabilities, registers, page, backend });
        Ok(Arc::new(Self { interrupt, inner }))
    }
}

impl Drop for VirtioPciDevice {
    fn drop(&mut self) {
        self.stop();
    }
}

impl PciDevice for VirtioPciDevice {
    fn read_config(&self, offset: u16, data: &mut [u8]) {
        let inner = &mut *self.inner.lock();
        if let Some(access) = inner.windowed_access(offset, data.len()) {
            let len = data.len().min(access.len);
            let mut value = [0; 4];
            self.read_structure(inner, access.offset, &mut value[..access.len]);
            data.fill(0);
            data[..len].copy_from_slice(&value[..len]);
            return;
        }
        inner.config.read(offset, data);
    }

    fn write_config(&self, offset: u16, data: &[u8]) {
        let inner = &mut *self.inner.lock();
        let was_bus_master = inner.config.is_bus_master();
        inner.config.write(offset, data);
        let bus_master = inner.config.is_bus_master();
        if bus_master != was_bus_master {
            self.bus_master_changed(inner, bus_master);
        }
        let control = inner.capabilities.msix + msix::CONTROL_OFFSET;
        if offset < control + 2 && usize::from(offset) + data.len() > usize::from(control) {
            self.interrupt.set_control(u16::from_le_bytes(inner.config.get(control.into())));
        }
        if let Some(access) = inner.windowed_access(offset, data.len()) {
            let mut value = [0; 4];
            value[..data.len()].copy_from_slice(data);
            self.write_structure(inner, access.offset, &value[..access.len]);
        }
    }

    fn decoded_bars(&self) -> Vec<BarRange> {
        self.inner.lock().config.decoded_bars()
    }

    fn read_bar(&self, _bar: u8, offset: u64, data: &mut [u8]) {
        self.read_structure(&mut self.inner.lock(), offset, data);
    }

    fn write_bar(&self, _bar: u8, offset: u64, data: &[u8]) {
        self.write_structure(&mut self.inner.lock(), offset, data);
    }

    fn bar_moved(&self, _bar: u8, base: Option<u64>) {
        let inner = &mut *self.inner.lock();
        inner.backend.notifications.set_bar_base(base);
        inner.update_page();
        inner.backend.map_page();
    }

    /// Stops the device in the same way as a reset by its driver.
    fn stop(&self) {
        let inner = &mut *self.inner.lock();
        inner.registers.reset(&mut inner.backend);
    }
}

impl VirtioPciDevice {
    /// Handles a change of the Bus Master bit in the Command register.
    ///
    /// Before a kexec, Linux clears the bit of every function (`pci_device_shutdown`), and many
    /// kernels do nothing else. A device that kept writing would then write to the next kernel's
    /// memory. In normal operation, a driver sets the bit before DRIVER_OK and clears it only after
    /// a reset.
    ///
    /// If a driver never sets the bit, the device works but sends no interrupts. One such driver is
    /// rust-hypervisor-firmware.
    fn bus_master_changed(&self, inner: &mut Inner, bus_master: bool) {
        if !bus_master {
            // The device is stopped first, so that none of its interrupts remains pending.
            inner.registers.handle_bus_master_loss(&mut inner.backend);
        }
        self.interrupt.set_bus_master(bus_master);
    }

    fn read_structure(&self, inner: &mut Inner, offset: u64, data: &mut [u8]) {
        let (structure, offset) = Structure::find(offset);
        match structure {
            Structure::Common => inner.registers.read(offset, data, &mut inner.backend),
            Structure::Isr => {
                data.fill(0);
                if let (0, [first, ..]) = (offset, data) {
                    *first = self.interrupt.take_isr();
                }
            }
            Structure::Device => inner.backend.device.read_config(offset, data),
            Structure::MsixTable => self.interrupt.read_table(offset, data),
            Structure::MsixPending => self.interrupt.read_pending(offset, data),
            Structure::Notify | Structure::Nothing => data.fill(0),
        }
    }

    fn write_structure(&self, inner: &mut Inner, offset: u64, data: &[u8]) {
        let (structure, offset) = Structure::find(offset);
        match structure {
            Structure::Common => {
                inner.registers.write(offset, data, &mut inner.backend);
                self.interrupt.vectors_changed();
                inner.update_page();
                // Mapped only now, so that no vCPU reads an older state.
                inner.backend.map_page();
            }
            Structure::Device => inner.backend.device.write_config(offset, data),
            Structure::Notify => {
                let queue = offset / u64::from(layout::NOTIFY_MULTIPLIER);
                inner.backend.notify(queue as u16);
            }
            Structure::MsixTable => self.interrupt.write_table(offset, data),
            Structure::Isr | Structure::MsixPending | Structure::Nothing => (),
        }
    }
}

#[derive(Clone, Copy)]
enum Structure {
    Common,
    Isr,
    Device,
    Notify,
    MsixTable,
    MsixPending,
    Nothing,
}

impl Structure {
    /// Returns the structure at `offset` in the BAR and the offset within that structure.
    fn find(offset: u64) -> (Self, u64) {
        const fn range(start: u32, end: u32) -> Range<u64> {
            start as u64..end as u64
        }
        use layout::*;
        let map = [
            (Self::Common, range(COMMON_OFFSET, ISR_OFFSET)),
            (Self::Isr, range(ISR_OFFSET, DEVICE_OFFSET)),
            (Self::Device, range(DEVICE_OFFSET, DEVICE_OFFSET + DEVICE_LEN)),
            (Self::Notify, range(NOTIFY_OFFSET, MSIX_TABLE_OFFSET)),
            (Self::MsixTable, range(MSIX_TABLE_OFFSET, MSIX_PBA_OFFSET)),
            (Self::MsixPending, range(MSIX_PBA_OFFSET, BAR_LEN)),
        ];
        let found = map.into_iter().find(|(_, range)| range.contains(&offset));
        found.map_or((Self::Nothing, 0), |(structure, range)| (structure, offset - range.start))
    }
}

/// An access to the BAR through configuration space (virtio 1.3, 4.1.4.9).
struct WindowedAccess {
    offset: u64,
    len: usize,
}

impl Inner {
    /// Copies the registers to the page from which the guest reads them, after the driver has
    /// written a register. [`PciInterrupt`] copies its own changes, and all other changes remove
    /// the page from the guest.
    fn update_page(&mut self) {
        if let Some(page) = &self.page {
            page.change(|image| self.registers.read(0, image, &mut self.backend));
        }
    }

    /// Parses an access to the data field of the access capability. Returns `None` for all other
    /// accesses.
    fn windowed_access(&self, offset: u16, len: usize) -> Option<WindowedAccess> {
        let at = usize::from(self.capabilities.access);
        if offset != self.capabilities.access + layout::access::DATA || len > 4 {
            return None;
        }
        let [bar] = self.config.get(at + layout::access::BAR);
        let offset = u32::from_le_bytes(self.config.get(at + layout::access::OFFSET));
        let len = u32::from_le_bytes(self.config.get(at + layout::access::LEN));
        // Drivers use lengths of 1, 2 or 4 bytes at aligned offsets (4.1.4.9.2).
        let proper = bar == layout::BAR && matches!(len, 1 | 2 | 4) && offset.is_multiple_of(len);
        proper.then_some(WindowedAccess { offset: offset.into(), len: len as usize })
    }
}

impl Backend {
    /// Maps the page with the registers while the device is active, and removes it otherwise. As
    /// with ioeventfds, each change waits for all vCPUs.
    fn map_page(&mut self) {
        if let Some(slot) = &mut self.page_slot {
            slot.follow(self.notifications.active_bar_base());
        }
    }

    fn notify(&mut self, queue: u16) {
        if self.notifications.notify(queue) {
            self.device.notify_synchronous(queue);
        }
    }

    fn try_activate(
        &mut self,
        features: u64,
        queues: &[QueueRegisters],
    ) -> Result<(), ActivateError> {
        let mut active = Vec::with_capacity(queues.len());
        for (index, registers) in (0..).zip(queues) {
            active.push(match build_queue(registers, features) {
                Some(queue) => Some(ActiveQueue::new(
                    self.device.name(),
                    queue,
                    self.notifications.kick(index)?,
                )),
                None => None,
            });
        }
        self.device.activate(Activation {
            view: self.view.clone(),
            interrupt: self.interrupt.clone(),
            queues: active,
            features,
        })
    }
}

/// Builds an enabled queue from its registers. Returns `None` if they are invalid.
fn build_queue(registers: &QueueRegisters, features: u64) -> Option<Queue> {
    let mut queue = Queue::new(registers.size_max).ok()?;
    queue.try_set_size(registers.size).ok()?;
    queue.try_set_desc_table_address(GuestAddress(registers.descriptors)).ok()?;
    queue.try_set_avail_ring_address(GuestAddress(registers.available)).ok()?;
    queue.try_set_used_ring_address(GuestAddress(registers.used)).ok()?;
    queue.set_event_idx(features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0);
    queue.set_ready(registers.enabled);
    registers.enabled.then_some(queue)
}

impl registers::Device for Backend {
    fn accepts_features(&mut self, features: u64) -> bool {
        let accepted = self.device.accepts_features(features);
        if !accepted {
            rate_limited!(
                info,
                device = self.device.name(),
                features,
                "Driver accepts too few features"
            );
        }
        accepted
    }

    fn accepts_queue(&mut self, index: u16, queue: &QueueRegisters) -> bool {
        let candidate = QueueRegisters { enabled: true, ..*queue };
        let valid =
            build_queue(&candidate, 0).is_some_and(|queue| queue.is_valid(&*self.view.memory()));
        if !valid {
            rate_limited!(
                info,
                device = self.device.name(),
                index,
                ?queue,
                "Driver set up an invalid queue"
            );
        }
        valid
    }

    fn activate(&mut self, features: u64, queues: &[QueueRegisters]) -> bool {
        match self.try_activate(features, queues) {
            Ok(()) => {
                self.active = true;
                self.notifications.start();
                debug!(device = self.device.name(), features, "Virtio device activated");
                self.emitter.emit(Event::DeviceActivated { id: &self.id });
                true
            }
            Err(err) => {
                rate_limited!(
                    error,
                    device = self.device.name(),
                    error = &err as &dyn std::error::Error,
                    "Virtio device not activated"
                );
                false
            }
        }
    }

    fn needs_reset(&mut self) {
        if let Err(err) = self.interrupt.signal_config() {
            rate_limited!(
                error,
                %err, device = self.device.name(),
                "Cannot notify the driver that the device needs a reset"
            );
        }
    }

    fn is_broken(&self) -> bool {
        self.interrupt.is_reset_needed()
    }

    fn reset(&mut self) {
        // 1. Stop notifications, and remove the page with the registers.
        // 2. Stop the worker.
        // 3. Discard pending notifications and interrupts, so that none reaches the next driver.
        self.notifications.stop();
        self.map_page();
        if std::mem::take(&mut self.active) {
            self.device.reset();
            debug!(device = self.device.name(), "Virtio device reset");
            self.emitter.emit(Event::DeviceReset { id: &self.id });
        }
        self.notifications.stop();
        self.interrupt.take_isr();
        self.interrupt.forget_need_of_reset();
    }

    /// A driver reads the generation before and after it reads a field of several words. A worker
    /// may change the field at any time, and it signals the change only after that. The signal may
    /// arrive too late to protect the driver's read, so the configuration itself is compared as
    /// well.
    fn config_generation(&mut self) -> u8 {
        let mut now = [0; CONFIG_LEN_MAX];
        self.device.read_config(0, &mut now);
        if now != self.config_seen {
            self.config_seen = now;
            self.config_generation = self.config_generation.wrapping_add(1);
        }
        self.config_generation.wrapping_add(self.interrupt.config_changes())
    }
}
