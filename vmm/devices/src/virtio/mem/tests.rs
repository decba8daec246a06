//! Tests with a simulated driver. The queue is in guest memory and mappings are real, but KVM slots
//! and the pool are simulated.

mod unsupported_driver;

use std::collections::BTreeSet;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};
use std::{panic, thread};

use balloon::{DriverState, Shortfall};
use foreshore_confinement::thread::ThreadKind;
use parking_lot::Mutex;
use proptest::prelude::*;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

mod cost;
mod throttle;
mod zone_device;

use super::metrics::FailureReason;
use super::*;
use crate::event_loop::EventLoop;
use crate::interrupt::VirtioInterrupt;
use crate::memory::backing::{Backing, BackingError};
use crate::memory::holes::UserfaultDevice;
use crate::memory::layout::{GIB, MIB};
use crate::memory::slots::SlotTable;
use crate::memory::slots::fake::FakeSlots;
use crate::memory::zone::{Tier, ZoneSpec};
use crate::memory::{BLOCK_BYTES, Memory, MemoryOptions, PmSource, build};
use crate::pool::fake::FakePool;
use crate::pool::{PmPool, PoolInfo};
use crate::virtio::zone_device::ZoneDevice;
use crate::virtio::{Activation, ActiveQueue, VirtioDevice};

const DESCRIPTORS: u64 = 0x1_0000;
const AVAILABLE: u64 = 0x1_1000;
const USED: u64 = 0x1_2000;
const REQUEST: u64 = 0x1_3000;
const ANSWER: u64 = 0x1_4000;
/// Guest-physical start of the only hotplug part.
const START: u64 = 4 * GIB;

const PLUG: u16 = 0;
const UNPLUG: u16 = 1;
const UNPLUG_ALL: u16 = 2;
const STATE: u16 = 3;

const ACK: u16 = 0;
const NACK: u16 = 1;
const BUSY: u16 = 2;
const ERROR: u16 = 3;

/// Time limit of each wait, long enough even for a slow host.
const TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Debug, PartialEq, Eq)]
enum Signal {
    Queue,
    Config,
}

struct Signals(Mutex<Sender<Signal>>);

impl VirtioInterrupt for Signals {
    fn signal_queue(&self, _: u16) -> io::Result<()> {
        self.0.lock().send(Signal::Queue).map_err(io::Error::other)
    }
    fn signal_queue_now(&self, queue: u16) -> io::Result<()> {
        self.signal_queue(queue)
    }
    fn signal_config(&self) -> io::Result<()> {
        self.0.lock().send(Signal::Config).map_err(io::Error::other)
    }
}

/// A backing that fails to detach memory if `sticks` is set.
#[derive(Debug)]
struct StickyBacking {
    backing: Box<dyn Backing>,
    sticks: Arc<AtomicBool>,
}

impl Backing for StickyBacking {
    fn plug(&mut self, offset: u64, len: u64) -> Result<(), BackingError> {
        self.backing.plug(offset, len)
    }
    fn detach(&mut self, offset: u64, len: u64) -> Result<(), BackingError> {
        if self.sticks.load(Ordering::Relaxed) {
            let source = io::Error::from_raw_os_error(libc::ENOMEM);
            return Err(BackingError::Map { offset, len, source });
        }
        self.backing.detach(offset, len)
    }
    fn free_detached(&mut self) -> Result<(), BackingError> {
        self.backing.free_detached()
    }
    fn populated_blocks(&self, run: &Range<u64>, block_bytes: u64) -> Vec<bool> {
        self.backing.populated_blocks(run, block_bytes)
    }
    fn populate(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.backing.populate(offset, len)
    }
}

/// A VM with one virtio-mem device and a simulated driver.
struct Guest {
    memory: Memory,
    table: Arc<FakeSlots>,
    pool: Arc<FakePool>,
    sticks: Arc<AtomicBool>,
    handle: MemHandle,
    device: MemDevice,
    events: Receiver<MemEvent>,
    signals: Receiver<Signal>,
    kick: EventFd,
    sent: u16,
    budget: Arc<Mutex<PlugBudget>>,
    // Dropped last, because the thread must outlive the device.
    event_loop: EventLoop,
}

impl Guest {
    /// Creates a hotplug part with `blocks` blocks. It is PM from a pool with `chunks` chunks, or
    /// DRAM if `chunks` is `None`.
    fn new(blocks: u64, chunks: Option<u64>) -> Self {
        Self::with_rate(blocks, chunks, None)
    }

    fn with_rate(blocks: u64, chunks: Option<u64>, plug_bytes_per_s: Option<NonZeroU64>) -> Self {
        let table = Arc::new(FakeSlots::default());
        let pool = Arc::new(FakePool::new(chunks.unwrap_or(0)));
        let dyn_pool: Arc<dyn PmPool> = pool.clone();
        let zone = |id: &str, tier, boot_bytes, hotplug_bytes| ZoneSpec {
            id: id.into(),
            tier,
            guest_node: 1,
            boot_bytes,
            hotplug_bytes,
            plug_bytes_per_s,
            ..ZoneSpec::default()
        };
        let hotplug_bytes = blocks * BLOCK_BYTES;
        let zones = match chunks {
            Some(_) => {
                vec![zone("dram", Tier::Dram, 16 * MIB, 0), zone("pm", Tier::Pm, 0, hotplug_bytes)]
            }
            None => vec![zone("dram", Tier::Dram, 16 * MIB, hotplug_bytes)],
        };
        let options = MemoryOptions { address_bits: 40, slot_limit: 64, host_bytes: 64 << 30 };
        let slots: Arc<dyn SlotTable> = table.clone();
        let userfaults = &UserfaultDevice::missing();
        let pm = PmSource { pool: &dyn_pool, userfaults };
        let mut memory = build(zones, Some(pm), slots, options).unwrap();
        let event_loop = EventLoop::spawn(ThreadKind::Device, "test_mem").unwrap();
        let (report, events) = mpsc::channel();
        let report = Mutex::new(report);
        let observer: MemObserver = Arc::new(move |_, event| {
            // The receiver may have been dropped before the device.
            let _ = report.lock().send(event);
        });
        let mut part = memory.take_hotplug().pop().unwrap();
        let sticks = Arc::new(AtomicBool::new(false));
        part.backing =
            Box::new(StickyBacking { backing: part.backing, sticks: Arc::clone(&sticks) });
        assert_eq!(part.range.start, START);
        let view = memory.view().clone();
        let budget = Arc::new(Mutex::new(PlugBudget::new(&part.spec, Instant::now())));
        let (device, handle) =
            MemDevice::new(part, view, event_loop.handle(), observer, Arc::clone(&budget));
        let (_, signals) = mpsc::channel();
        let kick = EventFd::new(EFD_NONBLOCK).unwrap();
        let mut guest = Self {
            memory,
            table,
            pool,
            sticks,
            handle,
            device,
            events,
            signals,
            kick,
            sent: 0,
            budget,
            event_loop,
        };
        guest.load_driver();
        guest
    }

    fn load_driver(&mut self) {
        let mut queue = Queue::new(16).unwrap();
        queue.set_size(16);
        queue.set_desc_table_address(Some(DESCRIPTORS as u32), Some(0));
        queue.set_avail_ring_address(Some(AVAILABLE as u32), Some(0));
        queue.set_used_ring_address(Some(USED as u32), Some(0));
        queue.set_ready(true);
        for ring in [AVAILABLE, USED] {
            self.memory.boot().write_obj(0u32, GuestAddress(ring)).unwrap();
        }
        self.sent = 0;
        let (sender, signals) = mpsc::channel();
        self.signals = signals;
        let active = ActiveQueue::new("mem", queue, self.kick.try_clone().unwrap());
        let features = self.device.features();
        assert!(self.device.accepts_features(features));
        let activation = Activation {
            view: self.memory.view().clone(),
            interrupt: Arc::new(Signals(Mutex::new(sender))),
            queues: vec![Some(active)],
            features,
        };
        self.device.activate(activation).unwrap();
    }

    fn write_descriptor(&self, index: u16, addr: u64, len: u32, flags: u16) {
        let at = |field: u64| GuestAddress(DESCRIPTORS + u64::from(index) * 16 + field);
        let memory = self.memory.boot();
        memory.write_obj(addr, at(0)).unwrap();
        memory.write_obj(len, at(8)).unwrap();
        memory.write_obj(flags, at(12)).unwrap();
        memory.write_obj(index + 1, at(14)).unwrap();
    }

    /// Makes the chain at descriptor 0 available and waits until the device returns it. Returns the
    /// length in the used ring.
    fn submit(&mut self) -> u32 {
        let slot = u64::from(self.sent % 16);
        self.post(0);
        while self.signals.recv_timeout(TIMEOUT).unwrap() != Signal::Queue {}
        let memory = self.memory.boot();
        assert_eq!(memory.read_obj::<u16>(GuestAddress(USED + 2)).unwrap(), self.sent);
        memory.read_obj(GuestAddress(USED + 4 + 8 * slot + 4)).unwrap()
    }

    /// Makes the chain at descriptor `head` available.
    fn post(&mut self, head: u16) {
        let memory = self.memory.boot();
        let slot = u64::from(self.sent % 16);
        memory.write_obj(head, GuestAddress(AVAILABLE + 4 + 2 * slot)).unwrap();
        self.sent = self.sent.wrapping_add(1);
        memory.write_obj(self.sent, GuestAddress(AVAILABLE + 2)).unwrap();
        self.kick.write(1).unwrap();
    }

    fn write_request(&self, code: u16, block: u64, count: u16) {
        self.write_request_at(REQUEST, code, block, count);
    }

    fn write_request_at(&self, addr: u64, code: u16, block: u64, count: u16) {
        let mut request = [0u8; 24];
        request[0..2].copy_from_slice(&code.to_le_bytes());
        request[8..16].copy_from_slice(&(START + block * BLOCK_BYTES).to_le_bytes());
        request[16..18].copy_from_slice(&count.to_le_bytes());
        self.memory.boot().write_slice(&request, GuestAddress(addr)).unwrap();
    }

    /// Sends a request. Returns the code and the state of the answer.
    fn send(&mut self, code: u16, block: u64, count: u16) -> (u16, u16) {
        self.write_request(code, block, count);
        self.write_descriptor(0, REQUEST, 24, 1);
        self.write_descriptor(1, ANSWER, 10, 2);
        assert_eq!(self.submit(), 10);
        let field = |at| self.memory.boot().read_obj(GuestAddress(ANSWER + at)).unwrap();
        (field(0), field(8))
    }

    fn plug(&mut self, block: u64, count: u16) -> u16 {
        self.send(PLUG, block, count).0
    }

    fn unplug(&mut self, block: u64, count: u16) -> u16 {
        self.send(UNPLUG, block, count).0
    }

    fn reachable(&self, block: u64) -> bool {
        self.memory
            .view()
            .memory()
            .read_obj::<u8>(GuestAddress(START + block * BLOCK_BYTES))
            .is_ok()
    }

    fn write(&self, block: u64, value: u64) {
        self.memory
            .view()
            .memory()
            .write_obj(value, GuestAddress(START + block * BLOCK_BYTES))
            .unwrap();
    }

    fn read(&self, block: u64) -> u64 {
        self.memory.view().memory().read_obj(GuestAddress(START + block * BLOCK_BYTES)).unwrap()
    }

    fn pool_info(&self) -> PoolInfo {
        self.pool.info()
    }

    fn config_field(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        self.device.read_config(at, &mut bytes);
        u64::from_le_bytes(bytes)
    }

    /// Waits until the device has prepared for the next request. Returns the number of bytes that
    /// are populated on the host.
    fn prepared_bytes(&self) -> u64 {
        let started = Instant::now();
        while self.device.is_preparing() {
            assert!(started.elapsed() < TIMEOUT, "the device did not become idle");
            thread::yield_now();
        }
        self.memory.resident_bytes().unwrap()[0]
    }

    fn drain_events(&self) -> Vec<MemEvent> {
        self.events.try_iter().collect()
    }
}

#[test]
fn blocks_are_plugged_and_unplugged_up_to_the_requested_size() {
    for chunks in [None, Some(64)] {
        let mut guest = Guest::new(64, chunks);
        assert_eq!(guest.handle.sizes().driver, DriverState::Ready);
        assert_eq!(guest.drain_events(), [MemEvent::DriverPresent]);
        guest.handle.request_size(8 * BLOCK_BYTES).unwrap();
        assert_eq!(guest.signals.recv_timeout(TIMEOUT).unwrap(), Signal::Config);
        assert_eq!(guest.config_field(48), 8 * BLOCK_BYTES);

        assert_eq!(guest.plug(4, 8), ACK);
        assert!(
            !guest.reachable(3)
                && guest.reachable(4)
                && guest.reachable(11)
                && !guest.reachable(12)
        );
        assert_eq!(guest.config_field(40), 8 * BLOCK_BYTES);
        assert_eq!(guest.plug(3, 1), NACK);
        let requested_bytes = 8 * BLOCK_BYTES;
        let plugged = MemEvent::SizeChanged { plugged_bytes: requested_bytes, requested_bytes };
        assert_eq!(guest.drain_events(), [plugged, MemEvent::TargetReached { requested_bytes }]);
        assert_eq!(guest.pool_info().memory_bytes, chunks.map_or(0, |_| 8 * BLOCK_BYTES));

        guest.write(5, 0x55);
        assert_eq!(guest.unplug(5, 2), ACK);
        assert!(
            guest.reachable(4) && !guest.reachable(5) && !guest.reachable(6) && guest.reachable(7)
        );
        assert_eq!(guest.pool_info().memory_bytes, chunks.map_or(0, |_| 6 * BLOCK_BYTES));
        assert_eq!(guest.pool.dirty_free_bytes(), 0);
        assert_eq!(guest.send(STATE, 4, 1), (ACK, 0));
        assert_eq!(guest.send(STATE, 5, 2), (ACK, 1));
        assert_eq!(guest.send(STATE, 4, 8), (ACK, 2));
        assert_eq!(guest.plug(5, 2), ACK);
        assert_eq!(guest.read(5), 0);

        assert_eq!(guest.send(UNPLUG_ALL, 0, 0), (ACK, 0));
        assert_eq!(guest.handle.sizes().plugged_bytes, 0);
        assert!((0..64).all(|block| !guest.reachable(block)));
        let metrics = guest.handle.metrics();
        assert_eq!(metrics.plug.bytes(), 10 * BLOCK_BYTES);
        assert_eq!(metrics.unplug.bytes(), 10 * BLOCK_BYTES);
        assert_eq!((metrics.plug.latency().count(), metrics.unplug.latency().count()), (2, 2));
        assert_eq!((metrics.nacks(), metrics.errors()), (1, 0));
    }
}

#[test]
fn invalid_request_is_an_error_without_effect() {
    let mut guest = Guest::new(64, None);
    guest.handle.request_size(64 * BLOCK_BYTES).unwrap();
    assert_eq!(guest.plug(8, 4), ACK);
    // Only the last block of each run is invalid.
    assert_eq!(guest.plug(4, 5), ERROR);
    assert_eq!(guest.unplug(10, 3), ERROR);
    assert_eq!(guest.plug(60, 5), ERROR);
    assert_eq!(guest.send(STATE, 64, 1).0, ERROR);
    assert_eq!(guest.send(4, 0, 1).0, ERROR);
    assert_eq!(guest.send(u16::MAX, 0, 1).0, ERROR);
    assert_eq!(guest.plug(0, 0), ERROR);
    assert_eq!(guest.handle.sizes().plugged_bytes, 4 * BLOCK_BYTES);
    assert!(!guest.reachable(7) && guest.reachable(11));
    assert_eq!(guest.handle.metrics().errors(), 7);
}

#[test]
fn full_pool_is_busy_and_lowers_the_requested_size() {
    let mut guest = Guest::new(64, Some(12));
    guest.handle.request_size(64 * BLOCK_BYTES).unwrap();
    assert_eq!(guest.plug(0, 8), ACK);
    guest.drain_events();
    while guest.signals.try_recv().is_ok() {}
    assert_eq!(guest.plug(8, 8), BUSY);
    assert!(!guest.reachable(8));
    assert_eq!(guest.pool_info().memory_bytes, 8 * BLOCK_BYTES);
    let (plugged_bytes, requested_bytes) = (8 * BLOCK_BYTES, 12 * BLOCK_BYTES);
    let reason = FailureReason::PoolFull;
    let failure = MemEvent::HostFailure { reason, plugged_bytes, requested_bytes };
    assert_eq!(guest.drain_events(), [failure]);
    let shortfall = Some(Shortfall { reason: "pool-full", wanted_bytes: 64 * BLOCK_BYTES });
    assert_eq!(guest.handle.sizes().shortfall, shortfall);
    assert_eq!(guest.config_field(48), 12 * BLOCK_BYTES);
    // Linux would send this request next.
    assert_eq!(guest.plug(8, 4), ACK);
    let plugged_bytes = requested_bytes;
    assert_eq!(guest.drain_events(), [MemEvent::SizeChanged { plugged_bytes, requested_bytes }]);
    assert_eq!(guest.handle.sizes().shortfall, shortfall);
    // A request for the available size succeeds.
    guest.handle.request_size(requested_bytes).unwrap();
    assert_eq!(guest.handle.sizes().shortfall, None);
    assert_eq!(guest.drain_events(), [MemEvent::TargetReached { requested_bytes }]);
    assert_eq!(guest.handle.metrics().busy(FailureReason::PoolFull), 1);
    assert_eq!(guest.handle.metrics().errors(), 0);
}

#[test]
fn refused_slot_is_busy_and_the_plug_is_undone() {
    let mut guest = Guest::new(64, Some(64));
    guest.handle.request_size(64 * BLOCK_BYTES).unwrap();
    *guest.table.calls_left.lock() = Some(0);
    assert_eq!(guest.plug(0, 8), BUSY);
    assert_eq!(guest.pool_info().memory_bytes, 0);
    assert_eq!(guest.handle.sizes().requested_bytes, 0);
    assert_eq!(guest.handle.metrics().busy(FailureReason::Slot), 1);
    *guest.table.calls_left.lock() = None;
    guest.handle.request_size(8 * BLOCK_BYTES).unwrap();
    assert_eq!(guest.plug(0, 8), ACK);
    assert!(guest.table.covers(START));
}

#[test]
fn memory_of_a_failed_plug_that_cannot_be_unmapped_is_not_lent_again() {
    let mut guest = Guest::new(64, Some(64));
    guest.handle.request_size(8 * BLOCK_BYTES).unwrap();
    *guest.table.calls_left.lock() = Some(0);
    guest.sticks.store(true, Ordering::Relaxed);
    assert_eq!(guest.plug(0, 8), BUSY);
    assert!(!guest.reachable(0));
    assert_eq!(guest.pool_info().memory_bytes, 8 * BLOCK_BYTES);
    assert_eq!(guest.handle.metrics().scrub_failures(), 1);
    *guest.table.calls_left.lock() = None;
    guest.sticks.store(false, Ordering::Relaxed);
    // Only a part of the range is plugged. The memory of the rest remains set aside.
    guest.handle.request_size(8 * BLOCK_BYTES).unwrap();
    assert_eq!(guest.plug(2, 4), ACK);
    assert_eq!(guest.pool_info().memory_bytes, 8 * BLOCK_BYTES);
    assert_eq!(guest.unplug(2, 4), ACK);
    assert_eq!(guest.pool_info().memory_bytes, 4 * BLOCK_BYTES);
    let Guest { device, pool, .. } = guest;
    drop(device);
    assert_eq!((pool.info().memory_bytes, pool.dirty_free_bytes()), (0, 0));
}

#[test]
fn failed_unplug_leaves_its_blocks_plugged() {
    let mut guest = Guest::new(64, Some(64));
    guest.handle.request_size(8 * BLOCK_BYTES).unwrap();
    assert_eq!(guest.plug(0, 8), ACK);
    guest.write(3, 0x33);
    guest.sticks.store(true, Ordering::Relaxed);
    assert_eq!(guest.unplug(3, 1), BUSY);
    assert_eq!(guest.read(3), 0x33);
    assert_eq!(guest.handle.sizes().plugged_bytes, 8 * BLOCK_BYTES);
    guest.sticks.store(false, Ordering::Relaxed);
    assert_eq!(guest.unplug(3, 1), ACK);
    assert!(!guest.reachable(3));
}

#[test]
fn unscrubbed_memory_is_set_aside_until_it_can_be_scrubbed() {
    let mut guest = Guest::new(64, Some(8));
    guest.handle.request_size(8 * BLOCK_BYTES).unwrap();
    assert_eq!(guest.plug(0, 8), ACK);
    guest.write(3, 0x33);
    guest.pool.fail_free.store(true, Ordering::Relaxed);
    assert_eq!(guest.unplug(3, 1), ACK);
    assert!(!guest.reachable(3));
    assert_eq!(guest.handle.metrics().scrub_failures(), 1);
    // The pool does not lend this memory again, although it has no other free memory.
    assert_eq!(guest.plug(3, 1), BUSY);
    guest.pool.fail_free.store(false, Ordering::Relaxed);
    assert_eq!(guest.unplug(0, 1), ACK);
    assert_eq!(guest.pool_info().free_migrate_bytes(), 2 * BLOCK_BYTES);
    assert_eq!(guest.pool.dirty_free_bytes(), 0);
}

#[test]
fn pages_are_populated_for_a_driver_that_zeroes() {
    let mut guest = Guest::new(64, None);
    guest.handle.request_size(24 * BLOCK_BYTES).unwrap();
    assert_eq!(guest.plug(0, 24), ACK);
    guest.handle.request_size(4 * BLOCK_BYTES).unwrap();
    let touch = |guest: &Guest, blocks: std::ops::Range<u64>| {
        blocks.for_each(|block| guest.write(block, 0))
    };
    // The driver did not zero this run before the unplug, so the run below is not populated.
    touch(&guest, 20..23);
    assert_eq!(guest.unplug(20, 4), ACK);
    let before = guest.prepared_bytes();
    let ready_blocks = |guest: &Guest| (guest.prepared_bytes() - before) / BLOCK_BYTES;
    // The driver zeroed this run before the unplug, so all but one block of the next run are
    // populated.
    touch(&guest, 16..20);
    assert_eq!(guest.unplug(16, 4), ACK);
    assert_eq!(ready_blocks(&guest), 3);
    // The driver did not write to the probe. The other blocks were populated in vain, and the
    // unplug returns them.
    assert_eq!(guest.unplug(12, 4), ACK);
    assert_eq!(ready_blocks(&guest), 0);
    touch(&guest, 8..12);
    assert_eq!(guest.unplug(8, 4), ACK);
    assert_eq!(ready_blocks(&guest), 3);
    // Memory that should remain plugged is not populated.
    guest.write(4, 0);
    assert_eq!(guest.unplug(4, 4), ACK);
    assert_eq!(ready_blocks(&guest), 0);
}

#[test]
fn empty_slots_leave_kvm_after_a_quiet_time() {
    let mut guest = Guest::new(128, None);
    guest.handle.request_size(128 * BLOCK_BYTES).unwrap();
    assert_eq!(guest.plug(60, 8), ACK);
    let second = START + 64 * BLOCK_BYTES;
    assert!(guest.table.covers(START) && guest.table.covers(second));
    assert_eq!(guest.unplug(60, 4), ACK);
    let deadline = std::time::Instant::now() + TIMEOUT;
    while guest.table.covers(START) {
        assert!(std::time::Instant::now() < deadline, "the empty slot was not removed");
        thread::yield_now();
    }
    assert!(guest.table.covers(second));
}

#[test]
fn device_reset_retains_plugged_memory() {
    let mut guest = Guest::new(64, Some(64));
    guest.handle.request_size(8 * BLOCK_BYTES).unwrap();
    assert_eq!(guest.plug(0, 8), ACK);
    guest.write(0, 0xabc);
    guest.device.reset();
    assert_eq!(guest.handle.sizes().driver, DriverState::Absent);
    assert_eq!(guest.drain_events().last(), Some(&MemEvent::DriverGone));
    assert_eq!(guest.read(0), 0xabc);
    guest.load_driver();
    assert_eq!(guest.config_field(40), 8 * BLOCK_BYTES);
    assert_eq!(guest.send(STATE, 0, 8), (ACK, 0));
    assert_eq!(guest.unplug(0, 2), ACK);
    assert!(guest.reachable(2));
}

#[test]
fn dropped_device_returns_its_memory_to_the_pool() {
    let mut guest = Guest::new(64, Some(64));
    guest.handle.request_size(8 * BLOCK_BYTES).unwrap();
    assert_eq!(guest.plug(0, 8), ACK);
    guest.write(7, 0x77);
    // The handle still exists, but it does not keep memory allocated.
    let Guest { device, handle: _handle, pool, .. } = guest;
    drop(device);
    assert_eq!(pool.info().memory_bytes, 0);
    assert_eq!(pool.dirty_free_bytes(), 0);
}

#[test]
fn invalid_sizes_are_refused_with_their_bound() {
    let guest = Guest::new(64, None);
    let zone = || "dram".to_owned();
    let max_bytes = 64 * BLOCK_BYTES;
    let bytes = max_bytes + BLOCK_BYTES;
    let too_large = RequestSizeError::TooLarge { zone: zone(), bytes, max_bytes };
    assert_eq!(guest.handle.request_size(bytes), Err(too_large));
    let unaligned =
        RequestSizeError::Unaligned { zone: zone(), bytes: MIB, block_bytes: BLOCK_BYTES };
    assert_eq!(guest.handle.request_size(MIB), Err(unaligned));
    assert_eq!(guest.handle.sizes().requested_bytes, 0);
}

#[test]
fn chains_without_a_request_are_returned_empty() {
    let mut guest = Guest::new(64, None);
    guest.handle.request_size(64 * BLOCK_BYTES).unwrap();
    guest.write_request(PLUG, 0, 1);
    // Columns: address and length of the request, and address and length of the answer.
    let unplugged = START;
    for (request, answer) in [
        ((REQUEST, 23), (ANSWER, 10)),
        ((REQUEST, 24), (ANSWER, 9)),
        ((unplugged, 24), (ANSWER, 10)),
        ((REQUEST, 24), (u64::MAX - 4, 10)),
        ((u64::MAX, 24), (ANSWER, 10)),
        ((REQUEST, u32::MAX), (ANSWER, 10)),
    ] {
        guest.write_descriptor(0, request.0, request.1, 1);
        guest.write_descriptor(1, answer.0, answer.1, 2);
        assert_eq!(guest.submit(), 0, "{request:x?} {answer:x?}");
    }
    assert_eq!(guest.handle.metrics().malformed(), 6);
    // Only the request with an unreachable answer may have been executed.
    assert!(guest.handle.sizes().plugged_bytes <= BLOCK_BYTES);
    assert_eq!(guest.send(STATE, 32, 1), (ACK, 1));
}

#[test]
fn answer_in_the_block_that_its_request_unplugs_is_dropped() {
    let mut guest = Guest::new(64, None);
    guest.handle.request_size(64 * BLOCK_BYTES).unwrap();
    assert_eq!(guest.plug(0, 1), ACK);
    guest.write_request(UNPLUG, 0, 1);
    guest.write_descriptor(0, REQUEST, 24, 1);
    guest.write_descriptor(1, START, 10, 2);
    assert_eq!(guest.submit(), 0);
    assert!(!guest.reachable(0));
    assert_eq!(guest.handle.metrics().malformed(), 1);
}

#[test]
fn requests_may_be_divided_into_descriptors_at_any_byte() {
    let mut guest = Guest::new(64, None);
    guest.handle.request_size(64 * BLOCK_BYTES).unwrap();
    guest.write_request(PLUG, 2, 3);
    guest.write_descriptor(0, REQUEST, 7, 1);
    guest.write_descriptor(1, REQUEST + 7, 17, 1);
    guest.write_descriptor(2, ANSWER, 1, 3);
    guest.write_descriptor(3, ANSWER + 1, 100, 2);
    assert_eq!(guest.submit(), 10);
    assert!(guest.reachable(2) && guest.reachable(4));
}

#[test]
fn concurrent_accesses_during_plugs_and_unplugs_are_safe() {
    const BLOCKS: u64 = 32;
    let mut guest = Guest::new(BLOCKS, Some(BLOCKS));
    guest.handle.request_size(BLOCKS * BLOCK_BYTES).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let (hits, misses) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let devices: Vec<_> = (0..3u64)
        .map(|seed| {
            let (view, stop) = (guest.memory.view().clone(), Arc::clone(&stop));
            let (hits, misses) = (Arc::clone(&hits), Arc::clone(&misses));
            thread::spawn(move || {
                let mut random = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(seed + 1);
                let mut buffer = vec![seed as u8; 6000];
                while !stop.load(Ordering::Relaxed) {
                    // xorshift64, for accesses at random addresses.
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    let at = GuestAddress(START + random % (BLOCKS * BLOCK_BYTES));
                    let len = 1 + (random >> 40) as usize % buffer.len();
                    // Accesses memory as a device does: take a guard, copy, and drop the guard.
                    let guard = view.memory();
                    let result = if random & (1 << 60) == 0 {
                        guard.write_slice(&buffer[..len], at)
                    } else {
                        guard.read_slice(&mut buffer[..len], at)
                    };
                    let counter = if result.is_ok() { &hits } else { &misses };
                    counter.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    // Continues until the threads have accessed both plugged and unplugged memory often enough.
    let deadline = std::time::Instant::now() + TIMEOUT;
    let mut rounds = 0;
    while rounds < 100
        || hits.load(Ordering::Relaxed) < 2000
        || misses.load(Ordering::Relaxed) < 2000
    {
        assert!(std::time::Instant::now() < deadline, "{hits:?} {misses:?} in {rounds} rounds");
        let (first, count) = (rounds * 7 % BLOCKS, 1 + (rounds * 5 % 8) as u16);
        let count = count.min((BLOCKS - first) as u16);
        assert_eq!(guest.plug(first, count), ACK);
        assert_eq!(guest.unplug(first, count), ACK);
        rounds += 1;
    }
    stop.store(true, Ordering::Relaxed);
    for device in devices {
        device.join().unwrap_or_else(|payload| panic::resume_unwind(payload));
    }
    assert_eq!(guest.pool_info().memory_bytes, 0);
    assert_eq!(guest.pool.dirty_free_bytes(), 0);
}

#[derive(Clone, Debug)]
enum Op {
    Request(u64),
    Plug(u64, u16),
    Unplug(u64, u16),
    UnplugAll,
    /// Number of calls that succeed before KVM refuses slots. `None` ends the failures.
    BreakSlots(Option<usize>),
    BreakScrubbing(bool),
    ResetDevice,
}

const MODEL_BLOCKS: u64 = 160;
const MODEL_CHUNKS: u64 = 100;

fn op() -> impl Strategy<Value = Op> {
    let run = || (0..MODEL_BLOCKS, 1..70u16);
    prop_oneof![
        2 => (0..=MODEL_BLOCKS).prop_map(Op::Request),
        6 => run().prop_map(|(at, count)| Op::Plug(at, count)),
        4 => run().prop_map(|(at, count)| Op::Unplug(at, count.min(6))),
        1 => Just(Op::UnplugAll),
        1 => prop::option::of(0..2usize).prop_map(Op::BreakSlots),
        1 => any::<bool>().prop_map(Op::BreakScrubbing),
        1 => Just(Op::ResetDevice),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// No failure of the host causes a wrong ERROR or ACK. The view, the pool and the slots always
    /// match the answers that the driver received. Chunks are erased before their next use.
    #[test]
    fn exactly_the_acknowledged_blocks_are_reachable(ops in prop::collection::vec(op(), 1..40)) {
        let mut guest = Guest::new(MODEL_BLOCKS, Some(MODEL_CHUNKS));
        let mut plugged: BTreeSet<u64> = BTreeSet::new();
        let mut broken = false;
        for op in ops {
            match op {
                Op::Request(blocks) => guest.handle.request_size(blocks * BLOCK_BYTES).unwrap(),
                Op::Plug(at, count) => {
                    let run = at..at + u64::from(count);
                    let code = guest.plug(at, count);
                    if code == ACK {
                        prop_assert!(run.clone().all(|block| !plugged.contains(&block)));
                        for block in run {
                            prop_assert_eq!(guest.read(block), 0, "block {} was not scrubbed", block);
                            guest.write(block, block + 1);
                            plugged.insert(block);
                        }
                    } else if code == ERROR {
                        let usable = guest.config_field(32) / BLOCK_BYTES;
                        prop_assert!(run.end > usable || plugged.range(run).next().is_some());
                    }
                }
                Op::Unplug(at, count) => {
                    let run = at..at + u64::from(count);
                    let all = run.clone().all(|block| plugged.contains(&block));
                    let code = guest.unplug(at, count);
                    prop_assert_eq!(code, if all { ACK } else { ERROR });
                    if all {
                        plugged.retain(|block| !run.contains(block));
                    }
                }
                Op::UnplugAll => {
                    prop_assert_eq!(guest.send(UNPLUG_ALL, 0, 0).0, ACK);
                    plugged.clear();
                }
                Op::BreakSlots(calls) => *guest.table.calls_left.lock() = calls,
                Op::BreakScrubbing(fail) => {
                    guest.pool.fail_free.store(fail, Ordering::Relaxed);
                    broken |= fail;
                }
                Op::ResetDevice => {
                    guest.device.reset();
                    guest.load_driver();
                }
            }
            for block in 0..MODEL_BLOCKS {
                let expected = plugged.contains(&block);
                prop_assert_eq!(guest.reachable(block), expected);
                if expected {
                    prop_assert!(guest.table.covers(START + block * BLOCK_BYTES));
                    prop_assert_eq!(guest.read(block), block + 1);
                }
            }
            let bytes = plugged.len() as u64 * BLOCK_BYTES;
            prop_assert_eq!(guest.handle.sizes().plugged_bytes, bytes);
            let memory_bytes = guest.pool_info().memory_bytes;
            let agrees = if broken { memory_bytes >= bytes } else { memory_bytes == bytes };
            prop_assert!(agrees, "{} bytes lent, {} plugged", memory_bytes, bytes);
        }
        let Guest { device, pool, .. } = guest;
        pool.fail_free.store(false, Ordering::Relaxed);
        drop(device);
        prop_assert_eq!(pool.info().memory_bytes, 0);
    }
}
