//! Interrupts of a device: MSI-X vectors (virtio 1.3, 4.1.5.1) and the ISR status (4.1.4.5).

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, Ordering};

use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

use super::register_page::RegisterPage;
use super::registers::{self, Image};
use crate::interrupt::router::MsiLine;
use crate::interrupt::{MsiRouter, VirtioInterrupt};
use crate::log::rate_limited;
use crate::pci::msix::{MsiMessage, MsixTable};

/// Value of VIRTIO_MSI_NO_VECTOR.
pub(super) const NO_VECTOR: u16 = 0xffff;

const ISR_QUEUE: u8 = 1;
const ISR_CONFIG: u8 = 2;

/// Mapping from queues and configuration changes to MSI-X vectors. The device has one vector more
/// than it has queues.
pub(super) struct VectorMap {
    config: AtomicU16,
    queues: Vec<AtomicU16>,
}

impl VectorMap {
    pub(super) fn new(queues: u16) -> Self {
        let none = || AtomicU16::new(NO_VECTOR);
        Self { config: none(), queues: (0..queues).map(|_| none()).collect() }
    }

    pub(super) fn vectors(&self) -> u16 {
        self.queues.len() as u16 + 1
    }

    /// Vector for configuration changes.
    pub(super) fn config(&self) -> u16 {
        self.config.load(Ordering::Relaxed)
    }

    pub(super) fn queue(&self, queue: u16) -> u16 {
        self.queues
            .get(usize::from(queue))
            .map_or(NO_VECTOR, |vector| vector.load(Ordering::Relaxed))
    }

    /// Maps configuration changes to `vector`, or to no vector if `vector` does not exist.
    pub(super) fn set_config(&self, vector: u16) {
        self.config.store(self.existing(vector), Ordering::Relaxed);
    }

    /// Maps a queue to `vector`, or to no vector if `vector` does not exist. Ignores unknown
    /// queues.
    pub(super) fn set_queue(&self, queue: u16, vector: u16) {
        if let Some(slot) = self.queues.get(usize::from(queue)) {
            slot.store(self.existing(vector), Ordering::Relaxed);
        }
    }

    pub(super) fn reset(&self) {
        self.set_config(NO_VECTOR);
        (0..self.queues.len() as u16).for_each(|queue| self.set_queue(queue, NO_VECTOR));
    }

    fn existing(&self, vector: u16) -> u16 {
        if vector < self.vectors() { vector } else { NO_VECTOR }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Delivery {
    Irqfd,
    Now,
}

struct Msix {
    table: MsixTable,
    /// Irqfds of vectors that have been raised at least once.
    lines: Vec<Option<MsiLine>>,
    /// Queues whose interrupts are raised by an external event, for example by vhost.
    bound: Vec<Bound>,
}

/// External event that raises a queue's vector unless the guest has masked it.
struct Bound {
    queue: u16,
    call: EventFd,
    line: Option<MsiLine>,
}

/// Interrupts of one PCI function. Workers can use this type, because it never takes the device's
/// lock.
pub(super) struct PciInterrupt {
    /// Name of the device, for log lines.
    device: String,
    vectors: Arc<VectorMap>,
    isr: AtomicU8,
    config_changes: AtomicU8,
    needs_reset: AtomicBool,
    msix: Mutex<Msix>,
    router: Arc<MsiRouter>,
    /// Page from which the guest reads registers, if the device has one.
    page: Option<Arc<RegisterPage>>,
}

impl PciInterrupt {
    pub(super) fn new(
        device: String,
        vectors: Arc<VectorMap>,
        router: Arc<MsiRouter>,
        page: Option<Arc<RegisterPage>>,
    ) -> Self {
        let lines = (0..vectors.vectors()).map(|_| None).collect();
        let msix =
            Mutex::new(Msix { table: MsixTable::new(vectors.vectors()), lines, bound: Vec::new() });
        let (isr, config_changes, needs_reset) = Default::default();
        Self { device, vectors, isr, config_changes, needs_reset, msix, router, page }
    }

    pub(super) fn is_reset_needed(&self) -> bool {
        self.needs_reset.load(Ordering::Acquire)
    }

    /// Clears the device's request for a reset.
    pub(super) fn forget_need_of_reset(&self) {
        self.needs_reset.store(false, Ordering::Release);
    }

    /// Reads and clears the ISR status.
    pub(super) fn take_isr(&self) -> u8 {
        self.isr.swap(0, Ordering::AcqRel)
    }

    /// Number of configuration changes that were signaled, modulo 256.
    pub(super) fn config_changes(&self) -> u8 {
        self.config_changes.load(Ordering::Acquire)
    }

    /// Sets the Message Control field of the MSI-X capability.
    pub(super) fn set_control(&self, control: u16) {
        self.change(|table| table.set_control(control));
    }

    pub(super) fn set_bus_master(&self, bus_master: bool) {
        self.change(|table| table.set_bus_master(bus_master));
    }

    pub(super) fn read_table(&self, offset: u64, data: &mut [u8]) {
        self.msix.lock().table.read_table(offset, data);
    }

    pub(super) fn write_table(&self, offset: u64, data: &[u8]) {
        self.change(|table| table.write_table(offset, data));
    }

    pub(super) fn read_pending(&self, offset: u64, data: &mut [u8]) {
        self.msix.lock().table.read_pending(offset, data);
    }

    /// Updates the irqfds of external events after the driver has mapped queues to other vectors.
    pub(super) fn vectors_changed(&self) {
        self.follow(&mut self.msix.lock());
    }

    /// Updates the irqfds of external events to match the MSI-X table. When an irqfd is registered,
    /// KVM delivers the event if it is already pending. While no irqfd is registered, the owner of
    /// the event handles it.
    fn follow(&self, Msix { table, bound, .. }: &mut Msix) {
        for Bound { queue, call, line } in bound {
            let Some(message) = table.deliverable(self.vectors.queue(*queue)) else {
                *line = None;
                continue;
            };
            let followed = match line {
                Some(line) => line.follow(message),
                None => self.router.connect_event(call, message).map(|new| *line = Some(new)),
            };
            if let Err(err) = followed {
                // The owner of the event then delivers the interrupt, which is only slower.
                *line = None;
                rate_limited!(warn, device = self.device, %err, queue, "Cannot connect a queue's event to an irqfd; the VMM delivers its interrupts");
            }
        }
    }

    /// Changes registers together with their copies in the page. The copies change before an
    /// interrupt is sent, so that a driver that handles the interrupt reads the new values.
    fn change_registers(&self, change: impl FnOnce(), change_copies: impl FnOnce(&mut Image)) {
        let Some(page) = &self.page else { return change() };
        page.change(|image| {
            change();
            change_copies(image);
        });
    }

    fn change(&self, change: impl FnOnce(&mut MsixTable)) {
        let mut msix = self.msix.lock();
        change(&mut msix.table);
        self.follow(&mut msix);
        for (vector, message) in msix.table.take_ready() {
            if let Err(err) = self.deliver(&mut msix.lines, vector, message, Delivery::Irqfd) {
                rate_limited!(warn, device = self.device, %err, vector, "Cannot deliver a pending interrupt");
            }
        }
    }

    fn signal(&self, vector: u16, isr: u8, delivery: Delivery) -> io::Result<()> {
        let mut msix = self.msix.lock();
        if !msix.table.is_enabled() {
            // If MSI-X is disabled, the driver can only poll the ISR status, because the device has
            // no INTx.
            self.isr.fetch_or(isr, Ordering::AcqRel);
            return Ok(());
        }
        // The lock is held during delivery. Otherwise an interrupt could arrive after the guest has
        // masked the vector.
        match msix.table.raise(vector) {
            Some(message) => self.deliver(&mut msix.lines, vector, message, delivery),
            None => Ok(()),
        }
    }

    fn deliver(
        &self,
        lines: &mut [Option<MsiLine>],
        vector: u16,
        message: MsiMessage,
        delivery: Delivery,
    ) -> io::Result<()> {
        if delivery == Delivery::Now {
            return self.router.send(message);
        }
        let slot = &mut lines[usize::from(vector)];
        let sent = match slot {
            Some(line) => line.signal(message),
            None => self.router.connect(message).and_then(|line| slot.insert(line).signal(message)),
        };
        sent.or_else(|err| {
            rate_limited!(warn, device = self.device, %err, vector, "Cannot signal an irqfd; the VMM delivers the interrupt");
            self.router.send(message)
        })
    }
}

impl VirtioInterrupt for PciInterrupt {
    fn signal_queue(&self, queue: u16) -> io::Result<()> {
        self.signal(self.vectors.queue(queue), ISR_QUEUE, Delivery::Irqfd)
    }

    fn signal_queue_now(&self, queue: u16) -> io::Result<()> {
        self.signal(self.vectors.queue(queue), ISR_QUEUE, Delivery::Now)
    }

    fn bind_queue(&self, queue: u16, call: &EventFd) -> io::Result<()> {
        let call = call.try_clone()?;
        let mut msix = self.msix.lock();
        msix.bound.retain(|bound| bound.queue != queue);
        msix.bound.push(Bound { queue, call, line: None });
        self.follow(&mut msix);
        Ok(())
    }

    fn unbind_queue(&self, queue: u16) {
        self.msix.lock().bound.retain(|bound| bound.queue != queue);
    }

    fn signal_config(&self) -> io::Result<()> {
        self.change_registers(
            || {
                self.config_changes.fetch_add(1, Ordering::AcqRel);
            },
            registers::advance_generation,
        );
        self.signal(self.vectors.config(), ISR_CONFIG, Delivery::Irqfd)
    }

    fn needs_reset(&self) -> io::Result<()> {
        self.change_registers(
            || self.needs_reset.store(true, Ordering::Release),
            registers::set_needs_reset,
        );
        self.signal_config()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interrupt::testing::{Call, FakeController};

    const MESSAGE: MsiMessage = MsiMessage { address: 0xfee0_1000, data: 0x31 };
    const ENABLE: u16 = 1 << 15;

    struct Rig {
        controller: Arc<FakeController>,
        interrupt: PciInterrupt,
    }

    impl Rig {
        /// Creates an interrupt with queue 0 mapped to vector 1, which has a message.
        fn new() -> Self {
            let controller = FakeController::new();
            let vectors = Arc::new(VectorMap::new(2));
            vectors.set_queue(0, 1);
            let interrupt = PciInterrupt::new(
                "test".to_owned(),
                vectors,
                MsiRouter::new(controller.clone()),
                None,
            );
            interrupt.set_bus_master(true);
            interrupt.write_table(16, &MESSAGE.address.to_le_bytes());
            interrupt.write_table(24, &MESSAGE.data.to_le_bytes());
            interrupt.write_table(28, &[0; 4]);
            Self { controller, interrupt }
        }
    }

    #[test]
    fn queues_are_signaled_by_irqfd_or_by_message() {
        let rig = Rig::new();
        rig.interrupt.set_control(ENABLE);
        assert_eq!(rig.controller.take_calls(), [], "an unused vector needs no route");
        rig.interrupt.signal_queue(0).unwrap();
        assert_eq!(
            rig.controller.take_calls(),
            [Call::Routes(vec![(24, MESSAGE)]), Call::Register(24)]
        );
        assert_eq!(rig.controller.count_of(24), 1);
        rig.interrupt.signal_queue_now(0).unwrap();
        assert_eq!(rig.controller.take_calls(), [Call::Signal(MESSAGE)]);
        assert_eq!(rig.interrupt.take_isr(), 0, "not with MSI-X (4.1.4.5.1)");
    }

    #[test]
    fn masked_interrupt_arrives_when_it_is_unmasked() {
        let rig = Rig::new();
        rig.interrupt.set_control(ENABLE);
        rig.interrupt.write_table(28, &[1, 0, 0, 0]);
        rig.interrupt.signal_queue(0).unwrap();
        rig.interrupt.signal_queue_now(0).unwrap();
        assert_eq!(rig.controller.take_calls(), []);
        let mut pending = [0];
        rig.interrupt.read_pending(0, &mut pending);
        assert_eq!(pending, [2]);
        rig.interrupt.write_table(28, &[0; 4]);
        assert_eq!(rig.controller.count_of(24), 1);
    }

    #[test]
    fn external_event_interrupts_unless_the_guest_masks_it() {
        let rig = Rig::new();
        let call = EventFd::new(vmm_sys_util::eventfd::EFD_NONBLOCK).unwrap();
        rig.interrupt.bind_queue(0, &call).unwrap();
        assert_eq!(
            rig.controller.take_calls(),
            [],
            "without MSI-X the event's owner delivers the interrupt"
        );
        rig.interrupt.set_control(ENABLE);
        assert_eq!(
            rig.controller.take_calls(),
            [Call::Routes(vec![(24, MESSAGE)]), Call::Register(24)]
        );
        call.write(1).unwrap();
        assert_eq!(rig.controller.count_of(24), 1, "the same event");
        // 1. Mask the vector.
        // 2. Unmask it with another message.
        // 3. Unmap the queue.
        // 4. Map the queue again.
        // 5. Unbind the event.
        rig.interrupt.write_table(28, &[1, 0, 0, 0]);
        assert_eq!(rig.controller.take_calls(), [Call::Unregister(24)]);
        rig.interrupt.write_table(24, &7u32.to_le_bytes());
        rig.interrupt.write_table(28, &[0; 4]);
        let other = MsiMessage { data: 7, ..MESSAGE };
        assert_eq!(
            rig.controller.take_calls(),
            [Call::Routes(vec![(24, other)]), Call::Register(24)]
        );
        rig.interrupt.write_table(24, &MESSAGE.data.to_le_bytes());
        assert_eq!(rig.controller.take_calls(), [Call::Routes(vec![(24, MESSAGE)])], "at once");
        rig.interrupt.vectors.set_queue(0, NO_VECTOR);
        rig.interrupt.vectors_changed();
        assert_eq!(rig.controller.take_calls(), [Call::Unregister(24)]);
        rig.interrupt.vectors.set_queue(0, 1);
        rig.interrupt.vectors_changed();
        rig.interrupt.vectors_changed();
        assert_eq!(
            rig.controller.take_calls(),
            [Call::Routes(vec![(24, MESSAGE)]), Call::Register(24)]
        );
        rig.interrupt.unbind_queue(0);
        rig.interrupt.set_control(ENABLE);
        assert_eq!(rig.controller.take_calls(), [Call::Unregister(24)]);
    }

    #[test]
    fn isr_status_is_used_without_msix() {
        let rig = Rig::new();
        rig.interrupt.signal_queue(0).unwrap();
        rig.interrupt.signal_config().unwrap();
        assert_eq!(rig.interrupt.take_isr(), 3);
        assert_eq!(rig.interrupt.take_isr(), 0);
    }

    #[test]
    fn events_without_a_vector_cause_no_interrupt() {
        let rig = Rig::new();
        rig.interrupt.set_control(ENABLE);
        rig.interrupt.signal_queue(1).unwrap();
        rig.interrupt.signal_queue(9).unwrap();
        rig.interrupt.signal_config().unwrap();
        assert_eq!(rig.controller.take_calls(), []);
        assert_eq!(rig.interrupt.config_changes(), 1);
    }

    #[test]
    fn messages_are_sent_directly_without_irqfds() {
        struct NoIrqfds(Arc<FakeController>);
        impl crate::interrupt::MsiController for NoIrqfds {
            fn set_msi_routes(
                &self,
                _: &std::collections::BTreeMap<u32, MsiMessage>,
            ) -> io::Result<()> {
                Err(io::Error::from_raw_os_error(libc::ENOSPC))
            }
            fn register_irqfd(&self, _: &vmm_sys_util::eventfd::EventFd, _: u32) -> io::Result<()> {
                unreachable!("the device has no route")
            }
            fn unregister_irqfd(
                &self,
                _: &vmm_sys_util::eventfd::EventFd,
                _: u32,
            ) -> io::Result<()> {
                unreachable!("the device has no route")
            }
            fn set_line(&self, _: u32, _: bool) -> io::Result<()> {
                unreachable!("a virtio device has no line")
            }
            fn signal_msi(&self, message: MsiMessage) -> io::Result<()> {
                self.0.signal_msi(message)
            }
        }
        let mut rig = Rig::new();
        rig.interrupt.router = MsiRouter::new(Arc::new(NoIrqfds(rig.controller.clone())));
        rig.interrupt.set_control(ENABLE);
        rig.interrupt.signal_queue(0).unwrap();
        assert_eq!(rig.controller.take_calls(), [Call::Signal(MESSAGE)]);
    }
}
