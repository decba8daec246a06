//! Tests of the transport. A simulated driver accesses it through the root bus, as a guest does,
//! and a fake device records the calls.

mod register_page;

use std::sync::Arc;

use foreshore_confinement::thread::ThreadKind;
use parking_lot::Mutex;
use proptest::prelude::*;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_queue::QueueT;
use vm_memory::{GuestAddress, GuestMemoryMmap};

use super::VirtioPciDevice;
use super::layout::{self, access};
use crate::device::testing::FakeMachine;
use crate::device::{DeviceContext, NewDevice};
use crate::event_loop::EventLoop;
use crate::interrupt::testing::Call;
use crate::memory::layout::ECAM_START;
use crate::memory::view::GuestView;
use crate::pci::msix::MsiMessage;
use crate::serial::SerialMetrics;
use crate::virtio::rng::RngMetrics;
use crate::virtio::{ActivateError, Activation, VirtioDevice, read_config_bytes};

const MEMORY_LEN: u64 = 0x10_0000;
const CONFIG_MESSAGE: MsiMessage = MsiMessage { address: 0xfee0_0000, data: 0x40 };
const QUEUE_MESSAGE: MsiMessage = MsiMessage { address: 0xfee0_1000, data: 0x41 };

#[derive(Default)]
struct Log {
    active: Option<Activation>,
    refuse: bool,
    resets: usize,
    synchronous: Vec<u16>,
    config: [u8; 8],
    has_mapped_registers: bool,
}

/// Queue 0 has a worker, queue 1 is synchronous.
struct FakeDevice(Arc<Mutex<Log>>);

impl VirtioDevice for FakeDevice {
    fn device_type(&self) -> u16 {
        4
    }
    fn name(&self) -> &str {
        "fake"
    }
    fn features(&self) -> u64 {
        1 << VIRTIO_F_VERSION_1 | 1
    }
    fn queue_sizes(&self) -> &[u16] {
        &[256, 64]
    }
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.0.lock().config, offset, data);
    }
    fn write_config(&mut self, offset: u64, data: &[u8]) {
        if let Some(config) = self.0.lock().config.get_mut(offset as usize..) {
            config.iter_mut().zip(data).for_each(|(old, new)| *old = *new);
        }
    }
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let mut log = self.0.lock();
        assert!(log.active.is_none(), "device activated twice");
        if log.refuse {
            return Err(ActivateError::QueueMissing { index: 0 });
        }
        log.active = Some(activation);
        Ok(())
    }
    fn reset(&mut self) {
        let mut log = self.0.lock();
        assert!(log.active.take().is_some(), "reset while not active");
        log.resets += 1;
    }
    fn synchronous_queues(&self) -> &[u16] {
        &[1]
    }
    fn notify_synchronous(&mut self, queue: u16) {
        let mut log = self.0.lock();
        log.synchronous.push(queue);
        log.active.as_ref().expect("an active device").interrupt.signal_queue_now(queue).unwrap();
    }
    fn has_mapped_registers(&self) -> bool {
        self.0.lock().has_mapped_registers
    }
}

struct Rig {
    fake: FakeMachine,
    context: DeviceContext,
    event_loop: EventLoop,
    log: Arc<Mutex<Log>>,
    bar: u64,
}

impl Rig {
    fn new() -> Self {
        Self::with_log(Log::default())
    }

    fn with_log(log: Log) -> Self {
        let (fake, event_loop) =
            (FakeMachine::default(), EventLoop::spawn(ThreadKind::Device, "test").unwrap());
        let ram = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY_LEN as usize)]).unwrap();
        let context = fake.context(GuestView::new(ram), event_loop.handle());
        let log = Arc::new(Mutex::new(log));
        let mut rig = Self { fake, context, event_loop, log, bar: 0 };
        rig.add_device();
        rig.bar = rig.config_u32(0x10).into();
        rig.write_config(4, &6u16.to_le_bytes());
        rig
    }

    fn add_device(&self) {
        let device = Box::new(FakeDevice(self.log.clone()));
        let device = VirtioPciDevice::new("fake", device, &self.context).unwrap();
        self.context.pci.add(Some(1), device).unwrap();
    }

    fn read_config(&self, register: u16, data: &mut [u8]) {
        assert!(self.context.mmio.read(ECAM_START + (1 << 15) + u64::from(register), data));
    }
    fn config_u32(&self, register: u16) -> u32 {
        let mut data = [0; 4];
        self.read_config(register, &mut data);
        u32::from_le_bytes(data)
    }
    fn write_config(&self, register: u16, data: &[u8]) {
        assert!(self.context.mmio.write(ECAM_START + (1 << 15) + u64::from(register), data));
    }
    fn read(&self, offset: u32, len: usize) -> u64 {
        let mut data = [0; 8];
        assert!(self.context.mmio.read(self.bar + u64::from(offset), &mut data[..len]));
        u64::from_le_bytes(data)
    }
    fn write(&self, offset: u32, len: usize, value: u64) {
        assert!(self.context.mmio.write(self.bar + u64::from(offset), &value.to_le_bytes()[..len]));
    }

    /// Returns the offset of the first capability whose first dword satisfies `matches`.
    fn capability(&self, matches: impl Fn(u32) -> bool) -> u16 {
        let mut at = self.config_u32(0x34) as u8;
        while at != 0 {
            let head = self.config_u32(at.into());
            if matches(head) {
                return at.into();
            }
            at = (head >> 8) as u8;
        }
        panic!("no such capability");
    }
    fn virtio_capability(&self, cfg_type: u32) -> u16 {
        self.capability(|head| head & 0xff == 9 && head >> 24 == cfg_type)
    }

    fn enable_msix(&self) {
        let messages = [(0, CONFIG_MESSAGE), (1, QUEUE_MESSAGE), (2, QUEUE_MESSAGE)];
        for (vector, message) in messages {
            let entry = layout::MSIX_TABLE_OFFSET + vector * 16;
            self.write(entry, 8, message.address);
            self.write(entry + 8, 4, message.data.into());
            self.write(entry + 12, 4, 0);
        }
        let capability = self.capability(|head| head & 0xff == 0x11);
        self.write_config(capability + 2, &0x8000u16.to_le_bytes());
        self.write(0x10, 2, 0);
        for queue in 0..2 {
            self.write(0x16, 2, queue);
            self.write(0x1a, 2, queue + 1);
        }
    }

    /// Brings the device up to DRIVER_OK with both queues.
    fn start(&self) {
        self.write(0x14, 1, 0);
        self.write(0x14, 1, 1);
        self.write(0x14, 1, 3);
        self.write(0x08, 4, 1);
        self.write(0x0c, 4, 1);
        self.write(0x14, 1, 11);
        self.enable_msix();
        for queue in 0..2 {
            self.write(0x16, 2, queue);
            self.write(0x18, 2, 16);
            self.write(0x20, 8, 0x1000 + queue * 0x4000);
            self.write(0x28, 8, 0x2000 + queue * 0x4000);
            self.write(0x30, 8, 0x3000 + queue * 0x4000);
            self.write(0x1c, 2, 1);
        }
        self.write(0x14, 1, 15);
    }
}

#[test]
fn function_is_a_modern_virtio_device_with_all_structures() {
    let rig = Rig::new();
    assert_eq!(rig.config_u32(0), 0x1044_1af4);
    assert!(rig.config_u32(8) & 0xff >= 1);
    let places = [1, 3, 4, 2].map(|cfg_type| {
        let at = rig.virtio_capability(cfg_type);
        assert_eq!(rig.config_u32(at + 4) & 0xff, 0, "in BAR 0");
        (rig.config_u32(at + 8), rig.config_u32(at + 12))
    });
    assert_eq!(places, [(0, 0x40), (0x1000, 1), (0x2000, 0x1000), (0x3000, 8)]);
    assert_eq!(rig.config_u32(rig.virtio_capability(2) + 16), 4);
    let msix = rig.capability(|head| head & 0xff == 0x11);
    assert_eq!(rig.config_u32(msix) >> 16, 2, "three vectors");
}

#[test]
fn driver_activates_and_resets_the_device() {
    let rig = Rig::new();
    rig.start();
    assert_eq!(rig.read(0x14, 1), 15);
    {
        let log = rig.log.lock();
        let active = log.active.as_ref().unwrap();
        assert_eq!(active.features, 1 << VIRTIO_F_VERSION_1);
        let queue = &active.queues[1].as_ref().unwrap().queue;
        assert!(queue.ready());
        assert_eq!((queue.max_size(), queue.size()), (64, 16));
        assert_eq!(
            (queue.desc_table(), queue.avail_ring(), queue.used_ring()),
            (0x5000, 0x6000, 0x7000)
        );
    }
    rig.write(0x14, 1, 0);
    assert_eq!(rig.log.lock().resets, 1);
    assert_eq!(rig.read(0x14, 1), 0);
    rig.start();
    assert!(rig.log.lock().active.is_some());
}

#[test]
fn ioeventfds_exist_while_the_device_is_active_and_move_with_the_bar() {
    let rig = Rig::new();
    let registered = || rig.fake.io_events.registered.lock().keys().copied().collect::<Vec<_>>();
    assert!(registered().is_empty());
    rig.start();
    assert_eq!(registered(), [rig.bar + 0x3000], "queue 1 is synchronous");
    rig.write_config(0x10, &0xd000_0000u32.to_le_bytes());
    assert_eq!(registered(), [0xd000_3000]);
    rig.write_config(4, &4u16.to_le_bytes());
    assert!(registered().is_empty());
    rig.write_config(4, &6u16.to_le_bytes());
    assert_eq!(registered(), [0xd000_3000]);
    assert!(rig.context.mmio.write(0xd000_0014, &[0]));
    assert!(registered().is_empty());
}

#[test]
fn notification_by_exit_reaches_its_queue() {
    let rig = Rig::new();
    rig.start();
    rig.write(0x3000, 2, 0);
    rig.write(0x3004, 2, 1);
    rig.write(0x3008, 2, 2);
    let log = rig.log.lock();
    let queues = &log.active.as_ref().unwrap().queues;
    assert_eq!(queues[0].as_ref().unwrap().kick.read().unwrap(), 1);
    assert_eq!(log.synchronous, [1]);
    assert_eq!(rig.fake.interrupts.take_calls(), [Call::Signal(QUEUE_MESSAGE)]);
    assert!(queues[1].as_ref().unwrap().kick.read().is_err());
}

#[test]
fn synchronous_queues_are_ignored_until_the_device_is_active() {
    let rig = Rig::new();
    rig.write(0x3004, 2, 1);
    assert!(rig.log.lock().synchronous.is_empty());
    rig.write(0x3000, 2, 0);
    rig.start();
    let log = rig.log.lock();
    let kick = &log.active.as_ref().unwrap().queues[0].as_ref().unwrap().kick;
    assert!(kick.read().is_err(), "a reset forgets notifications");
}

#[test]
fn failed_activation_interrupts() {
    let rig = Rig::new();
    rig.log.lock().refuse = true;
    rig.start();
    assert_eq!(rig.read(0x14, 1), 15 | 64);
    assert_eq!(rig.fake.interrupts.count_of(24), 1);
    assert_eq!(rig.fake.interrupts.take_calls()[0], Call::Routes(vec![(24, CONFIG_MESSAGE)]));
    assert_eq!(rig.fake.io_events.registered.lock().len(), 0);
    rig.log.lock().refuse = false;
    rig.start();
    assert_eq!(rig.read(0x14, 1), 15);
}

#[test]
fn failed_device_interrupts_and_needs_a_reset() {
    let rig = Rig::new();
    rig.start();
    let interrupt = Arc::clone(&rig.log.lock().active.as_ref().unwrap().interrupt);
    interrupt.needs_reset().unwrap();
    assert_eq!(rig.read(0x14, 1), 15 | 64);
    assert_eq!(rig.fake.interrupts.take_calls()[0], Call::Routes(vec![(24, CONFIG_MESSAGE)]));
    rig.write(0x14, 1, 0);
    assert_eq!(rig.read(0x14, 1), 0);
    rig.start();
    assert_eq!(rig.read(0x14, 1), 15);
}

/// When Linux executes a kexec, it leaves devices in this state.
#[test]
fn device_without_bus_master_stops_until_its_driver_resets_it() {
    // Writes to the whole register, to the byte that contains the bit, and across the end of the
    // register.
    for without in [&[2, 0][..], &[2], &[2, 0, 0, 0]] {
        let rig = Rig::new();
        rig.start();
        let activated = |rig: &Rig| Arc::clone(&rig.log.lock().active.as_ref().unwrap().interrupt);
        let interrupt = activated(&rig);
        interrupt.signal_queue(0).unwrap();
        rig.fake.interrupts.take_calls();
        rig.write_config(5, &[4]);
        assert_eq!(rig.read(0x14, 1), 15, "the other byte of the register");
        rig.write_config(4, without);
        let stopped = |log: &Log| (log.active.is_none(), log.resets) == (true, 1);
        assert!(stopped(&rig.log.lock()));
        assert!(rig.fake.io_events.registered.lock().is_empty());
        assert_eq!(rig.read(0x14, 1), 11 | 64);
        // Notifications do not reach the device, and its interrupts do not reach the guest.
        rig.write(0x3000, 2, 0);
        rig.write(0x3004, 2, 1);
        assert!(rig.log.lock().synchronous.is_empty());
        interrupt.signal_queue_now(0).unwrap();
        interrupt.signal_config().unwrap();
        assert_eq!(rig.fake.interrupts.take_calls(), []);
        // The device does not continue when the driver sets Bus Master again.
        rig.write_config(4, &6u16.to_le_bytes());
        rig.write(0x14, 1, 15);
        assert_eq!(rig.read(0x14, 1), 11 | 64);
        rig.write(0x14, 1, 0);
        assert_eq!(rig.read(0x14, 1), 0);
        assert!(stopped(&rig.log.lock()));
        rig.start();
        assert_eq!(rig.read(0x14, 1), 15);
        rig.fake.interrupts.take_calls();
        activated(&rig).signal_queue_now(0).unwrap();
        assert_eq!(rig.fake.interrupts.take_calls(), [Call::Signal(QUEUE_MESSAGE)]);
    }
}

#[test]
fn device_without_bus_master_works_without_interrupts() {
    let rig = Rig::new();
    rig.write_config(4, &2u16.to_le_bytes());
    rig.start();
    assert_eq!(rig.read(0x14, 1), 15);
    rig.write(0x3004, 2, 1);
    assert_eq!(
        (rig.log.lock().synchronous.clone(), rig.fake.interrupts.take_calls()),
        (vec![1], vec![])
    );
}

#[test]
fn unaligned_queues_and_queues_outside_memory_are_refused() {
    for (field, address) in [
        (0x20, MEMORY_LEN - 16),
        (0x20, 0x1008),
        (0x28, MEMORY_LEN),
        (0x28, 0x2001),
        (0x30, u64::MAX - 7),
        (0x30, 0x3002),
    ] {
        let rig = Rig::new();
        rig.write(0x14, 1, 1);
        rig.write(0x14, 1, 3);
        rig.write(0x08, 4, 1);
        rig.write(0x0c, 4, 1);
        rig.write(0x14, 1, 11);
        for (field, address) in [(0x20, 0x1000), (0x28, 0x2000), (0x30, 0x3000), (field, address)] {
            rig.write(field, 8, address);
        }
        rig.write(0x1c, 2, 1);
        assert_eq!(rig.read(0x1c, 2), 0, "{field:#x} {address:#x}");
        rig.write(field, 8, 0x8000);
        rig.write(0x1c, 2, 1);
        assert_eq!(rig.read(0x1c, 2), 1);
    }
}

#[test]
fn generation_changes_before_a_change_is_signaled() {
    let rig = Rig::new();
    rig.write(0x2000, 4, 0x0102_0304);
    let before = rig.read(0x15, 1);
    assert_eq!(rig.read(0x15, 1), before);
    assert_eq!(rig.read(0x2002, 2), 0x0102);
    rig.log.lock().config[0] = 9;
    assert_ne!(rig.read(0x15, 1), before);
    assert_eq!(rig.read(0x2ff8, 8), 0);
}

#[test]
fn access_capability_reaches_the_bar() {
    let rig = Rig::new();
    let at = rig.virtio_capability(5);
    let aim = |offset: u32, len: u32| {
        rig.write_config(at + access::OFFSET as u16, &offset.to_le_bytes());
        rig.write_config(at + access::LEN as u16, &len.to_le_bytes());
    };
    rig.write_config(4, &0u16.to_le_bytes());
    aim(0x14, 1);
    rig.write_config(at + access::DATA, &[1]);
    rig.write_config(at + access::DATA, &[3]);
    let mut status = [0];
    rig.read_config(at + access::DATA, &mut status);
    assert_eq!(status, [3]);
    aim(0x12, 2);
    assert_eq!(rig.config_u32(at + access::DATA), 2);
    rig.write_config(at + access::BAR as u16, &[1]);
    aim(0x14, 1);
    rig.write_config(at + access::DATA, &[0]);
    rig.write_config(at + access::BAR as u16, &[0]);
    rig.read_config(at + access::DATA, &mut status);
    assert_eq!(status, [3], "BAR 1 does not exist");
}

#[test]
fn dropped_device_is_stopped() {
    let rig = Rig::new();
    rig.start();
    rig.fake.interrupts.take_calls();
    let Rig { fake, context, log, .. } = rig;
    let DeviceContext { ports, mmio, pci, .. } = context;
    assert_eq!(Arc::strong_count(&mmio), 1, "the root bus must not hold the memory bus");
    drop(mmio);
    drop((ports, pci));
    assert_eq!(log.lock().resets, 1);
    assert_eq!(fake.io_events.registered.lock().len(), 0);
}

/// Mapping that records whether the device is active when it is dropped.
struct Held(Arc<Mutex<Log>>, Arc<Mutex<Vec<bool>>>);

impl Drop for Held {
    fn drop(&mut self) {
        self.1.lock().push(self.0.lock().active.is_some());
    }
}

#[test]
fn dropped_device_is_detached_from_everything() {
    let rig = Rig::new();
    drop(rig.context.pci.remove(1));
    let text = || rig.fake.metrics.encode(&SerialMetrics::default()).unwrap();
    let (before, dropped) = (text(), Arc::<Mutex<Vec<bool>>>::default());
    let new = |slot| {
        let device = Box::new(FakeDevice(rig.log.clone()));
        let device = VirtioPciDevice::new("fake", device, &rig.context).unwrap();
        let held = Held(rig.log.clone(), dropped.clone());
        let new = NewDevice::new("fake", device, vec![rig.event_loop.handle()]).at(Some(slot));
        new.exposing(Arc::<RngMetrics>::default()).mapping(held)
    };
    let device = new(1).attach(&rig.context).unwrap();
    rig.write_config(4, &6u16.to_le_bytes());
    rig.start();
    assert!(new(1).attach(&rig.context).is_err(), "the slot is in use");
    assert_eq!(dropped.lock().len(), 1, "the refused device drops its mapping");
    let counts = || {
        let registered = rig.fake.io_events.registered.lock().len();
        (rig.context.pci.used(), rig.context.work.count(), registered)
    };
    assert!(counts() == (2, 1, 1) && text() != before, "{:?}", counts());
    drop(device);
    assert_eq!((counts(), rig.log.lock().resets), ((1, 0, 0), 1));
    assert_eq!(text(), before);
    assert_eq!(dropped.lock()[1..], [false], "the device stops before its mapping is dropped");
    // An ejected device releases its mapping immediately, but it stops only when it is dropped.
    let mut device = new(1).attach(&rig.context).unwrap();
    rig.write_config(4, &6u16.to_le_bytes());
    rig.start();
    device.eject();
    assert_eq!((counts(), dropped.lock()[2..].to_vec()), ((1, 0, 0), vec![true]));
    drop(device);
    assert_eq!((rig.log.lock().resets, dropped.lock().len()), (2, 3));
}

#[derive(Clone, Debug)]
enum Access {
    ReadConfig(u16, usize),
    WriteConfig(u16, Vec<u8>),
    ReadBar(u32, usize),
    WriteBar(u32, Vec<u8>),
    Signal(u16),
    BusMaster(bool),
    Start,
}

fn accesses() -> impl Strategy<Value = Vec<Access>> {
    let interesting = prop_oneof![
        0..0x48u32,
        0x1000..0x1008u32,
        0x2000..0x2010u32,
        0x3000..0x3010u32,
        0x4000..0x4040u32,
        0..0x8000u32
    ];
    let data = || {
        let small = prop::collection::vec(0..16u8, 1..9);
        prop_oneof![small, prop::collection::vec(any::<u8>(), 1..9)]
    };
    // Registers that only move the BAR are excluded, because tests of the root bus cover them.
    let register = prop_oneof![0x30..0x100u16, 0x40..0xb0u16, 0..4096u16]
        .prop_filter("moves the BAR", |register| *register > 0x28);
    let access = prop_oneof![
        (register.clone(), 1..9usize).prop_map(|(register, len)| Access::ReadConfig(register, len)),
        (register, data()).prop_map(|(register, data)| Access::WriteConfig(register, data)),
        (interesting.clone(), 1..9usize).prop_map(|(offset, len)| Access::ReadBar(offset, len)),
        (interesting, data()).prop_map(|(offset, data)| Access::WriteBar(offset, data)),
        (0..4u16).prop_map(Access::Signal),
        any::<bool>().prop_map(Access::BusMaster),
        Just(Access::Start),
    ];
    prop::collection::vec(access, 0..100)
}

#[test]
fn activation_and_reset_emit_events_until_the_machine_ends() {
    let rig = Rig::new();
    let emitted = || {
        let counts = rig.fake.events.counters().emitted();
        ["activated", "reset"].map(|name| counts.get(&("virtio-device", name)).copied())
    };
    rig.log.lock().refuse = true;
    rig.start();
    assert_eq!(emitted(), [None, None], "the device refuses to start");
    rig.log.lock().refuse = false;
    rig.start();
    rig.write(0x14, 1, 0);
    assert_eq!(emitted(), [Some(1), Some(1)]);
    rig.start();
    rig.context.emitter.silence();
    drop(rig.context.pci.remove(1));
    assert_eq!(emitted(), [Some(2), Some(1)]);
}

/// The test also removes devices with an active driver, because a guest may remove a device itself.
#[test]
fn removed_devices_release_ioeventfds_and_gsis() {
    let rig = Rig::new();
    for round in 0..1_000 {
        drop(rig.context.pci.remove(1).unwrap());
        assert!(rig.fake.io_events.registered.lock().is_empty(), "round {round}");
        assert!(rig.log.lock().active.is_none(), "round {round}");
        let calls = rig.fake.interrupts.take_calls();
        let count = |wanted: fn(&Call) -> bool| calls.iter().filter(|call| wanted(call)).count();
        let registered = count(|call| matches!(call, Call::Register(_)));
        assert_eq!(registered, count(|call| matches!(call, Call::Unregister(_))), "round {round}");
        let gsis = calls.iter().filter_map(|call| match call {
            Call::Register(gsi) => Some(*gsi),
            _ => None,
        });
        assert!(gsis.into_iter().all(|gsi| gsi < 27), "a GSI was not released: {calls:?}");
        rig.add_device();
        rig.write_config(4, &6u16.to_le_bytes());
        rig.start();
        let active = rig.log.lock().active.as_ref().unwrap().interrupt.clone();
        active.signal_queue(0).unwrap();
    }
}

proptest! {
    #[test]
    fn any_access_in_any_order_is_survived(accesses in accesses()) {
        let rig = Rig::new();
        for access in accesses {
            match access {
                Access::ReadConfig(register, len) => {
                    rig.context.mmio.read(ECAM_START + (1 << 15) + u64::from(register), &mut vec![0; len]);
                }
                Access::WriteConfig(register, data) => {
                    rig.context.mmio.write(ECAM_START + (1 << 15) + u64::from(register), &data);
                }
                Access::ReadBar(offset, len) => {
                    rig.context.mmio.read(rig.bar + u64::from(offset), &mut vec![0; len]);
                }
                Access::WriteBar(offset, data) => {
                    rig.context.mmio.write(rig.bar + u64::from(offset), &data);
                }
                Access::Signal(queue) => {
                    let interrupt = rig.log.lock().active.as_ref().map(|active| active.interrupt.clone());
                    if let Some(interrupt) = interrupt {
                        interrupt.signal_queue(queue).unwrap();
                        interrupt.signal_config().unwrap();
                    }
                }
                Access::BusMaster(bus_master) => rig.write_config(4, &[2 | u8::from(bus_master) << 2]),
                Access::Start => rig.start(),
            }
            // The device is active if and only if the status contains DRIVER_OK, and only then has
            // an ioeventfd.
            let running = rig.log.lock().active.is_some();
            prop_assert_eq!(running, rig.read(0x14, 1) & 4 != 0);
            prop_assert_eq!(rig.fake.io_events.registered.lock().len(), usize::from(running));
        }
    }
}
