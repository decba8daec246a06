//! Tests with a simulated driver. The tests check which pages remain allocated on the host.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use balloon::statistics::Tag;
use balloon::{DriverState, ZoneSizes};
use foreshore_confinement::thread::ThreadKind;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use super::device::{F_DEFLATE_ON_OOM, F_REPORTING, F_STATS_VQ};
use super::*;
use crate::event_loop::EventLoop;
use crate::memory::holes::UserfaultDevice;
use crate::memory::slots::SlotTable;
use crate::memory::slots::fake::FakeSlots;
use crate::memory::zone::{Tier, ZoneSpec};
use crate::memory::{BLOCK_BYTES, HotplugPart, Memory, MemoryOptions, PmSource, build};
use crate::pool::PmPool;
use crate::pool::fake::FakePool;
use crate::virtio::testing::{BUFFERS, Buffer, TestDriver};
use crate::virtio::zone_device::ZoneDevice;
use crate::virtio::{ActivateError, VirtioDevice};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;
const BOOT: u64 = 32 * MIB;
const MAX: u64 = 16 * MIB;
const INFLATE: usize = 0;
const DEFLATE: usize = 1;
const STATS: usize = 2;
const ALL: u64 = F_STATS_VQ | F_DEFLATE_ON_OOM | F_REPORTING;

/// Memory of a VM with a balloon: 32 MiB of boot memory, and DRAM and PM with four plugged blocks
/// each.
struct Rig {
    driver: TestDriver,
    device: Balloon,
    handle: BalloonHandle,
    parts: Vec<HotplugPart>,
    notifications: Arc<AtomicUsize>,
    memory: Memory,
    _loop: EventLoop,
}

impl Rig {
    fn new(features: u64) -> Self {
        let mut rig = Self::off();
        rig.start(features, &[0, 1, 2, 3, 4]);
        rig
    }

    /// Creates a device that no driver has activated yet.
    fn off() -> Self {
        Self::of_pages(None)
    }

    /// Creates a device whose memory is backed by huge pages of this size, or by normal pages.
    fn of_pages(huge_page_bytes: Option<u64>) -> Self {
        let zone = |id: &str, tier, guest_node, boot_bytes| ZoneSpec {
            id: id.to_owned(),
            tier,
            guest_node,
            boot_bytes,
            hotplug_bytes: 128 * MIB,
            ..ZoneSpec::default()
        };
        let zones = vec![zone("dram", Tier::Dram, 0, BOOT), zone("pm", Tier::Pm, 1, 0)];
        let pool: Arc<dyn PmPool> = Arc::new(FakePool::new(64));
        let options = MemoryOptions { address_bits: 40, slot_limit: 64, host_bytes: 64 << 30 };
        let table = Arc::new(FakeSlots::default()) as Arc<dyn SlotTable>;
        let userfaults = &UserfaultDevice::missing();
        let pm = PmSource { pool: &pool, userfaults };
        let mut memory = build(zones, Some(pm), table, options).unwrap();
        let mut parts = memory.take_hotplug();
        for part in &mut parts {
            part.backing.plug(0, 4 * BLOCK_BYTES).unwrap();
            memory.view().exclusive().set_plugged(
                GuestAddress(part.range.start),
                4 * BLOCK_BYTES,
                true,
            );
        }
        for (_, _, reservation) in memory.placed_parts() {
            huge_page_bytes.iter().for_each(|page_bytes| reservation.has_huge_pages(*page_bytes));
        }
        let event_loop = EventLoop::spawn(ThreadKind::Device, "test").unwrap();
        let notifications = Arc::new(AtomicUsize::new(0));
        let observer = {
            let notifications = Arc::clone(&notifications);
            Arc::new(move || {
                notifications.fetch_add(1, Ordering::Relaxed);
            })
        };
        let options = BalloonOptions {
            max_bytes: MAX,
            target_bytes: 4 * MIB,
            deflate_on_oom: true,
            free_page_reporting: true,
            statistics: true,
        };
        let (device, handle) =
            Balloon::new("balloon", options, &memory, event_loop.handle(), observer).unwrap();
        let driver = TestDriver::with_memory(5, memory.boot().clone(), memory.view().clone());
        Self { driver, device, handle, parts, notifications, memory, _loop: event_loop }
    }

    fn try_start(&mut self, features: u64, enabled: &[usize]) -> Result<(), ActivateError> {
        let mut activation = self.driver.activation(features);
        for (index, queue) in activation.queues.iter_mut().enumerate() {
            if !enabled.contains(&index) {
                *queue = None;
            }
        }
        self.device.activate(activation)
    }

    fn start(&mut self, features: u64, enabled: &[usize]) {
        self.try_start(features, enabled).unwrap();
    }

    /// Sends bytes in one buffer and waits until the device has returned the buffer.
    fn send(&mut self, queue: usize, bytes: &[u8]) {
        self.driver.write(BUFFERS, bytes);
        let head = self.driver.add(queue, &[Buffer::Out(BUFFERS, bytes.len() as u32)]);
        self.driver.kick(queue);
        assert_eq!(self.driver.wait_used(queue), (head, 0));
    }

    /// Sends the page numbers of the given addresses and waits until the device has returned the
    /// buffer.
    fn list(&mut self, queue: usize, addresses: &[u64]) {
        let pages: Vec<u8> =
            addresses.iter().flat_map(|at| ((at / PAGE) as u32).to_le_bytes()).collect();
        self.send(queue, &pages);
    }

    fn report(&mut self, queue: usize, buffers: &[Buffer]) {
        let head = self.driver.add(queue, buffers);
        self.driver.kick(queue);
        assert_eq!(self.driver.wait_used(queue), (head, 0));
    }

    fn fill(&self, at: u64, len: u64) {
        self.memory
            .view()
            .memory()
            .write_slice(&vec![0xa5; len as usize], GuestAddress(at))
            .unwrap();
    }

    fn byte(&self, at: u64) -> u8 {
        self.memory.view().memory().read_obj(GuestAddress(at)).unwrap()
    }

    /// Number of resident pages in a range.
    fn resident(&self, at: u64, len: u64) -> u64 {
        let (_, range, reservation) =
            self.memory.placed_parts().find(|(_, range, _)| range.contains(at, len)).unwrap();
        let pages = reservation.pages(at - range.start, len).unwrap();
        pages.into_iter().filter(|page| page & 1 == 1).count() as u64
    }

    fn refused(&self) -> Vec<(&'static str, u64)> {
        let metrics = self.handle.metrics();
        let all = Refusal::ALL.map(|reason| (reason.as_str(), metrics.refused(reason)));
        all.into_iter().filter(|(_, count)| *count > 0).collect()
    }

    fn inflated(&self) -> u64 {
        self.handle.metrics().inflated_bytes.load(Ordering::Relaxed)
    }

    fn reported(&self) -> u64 {
        self.handle.metrics().reported_bytes.load(Ordering::Relaxed)
    }

    fn report_actual(&mut self, bytes: u64) {
        self.device.write_config(4, &((bytes / PAGE) as u32).to_le_bytes());
    }

    fn target_pages(&self) -> u32 {
        let mut pages = [0; 4];
        self.device.read_config(0, &mut pages);
        u32::from_le_bytes(pages)
    }
}

fn statistics(entries: &[(u16, u64)]) -> Vec<u8> {
    entries
        .iter()
        .flat_map(|(tag, value)| [&tag.to_le_bytes()[..], &value.to_le_bytes()].concat())
        .collect()
}

#[test]
fn inflating_returns_the_listed_pages_only() {
    let mut rig = Rig::new(ALL);
    let at = 8 * MIB;
    rig.fill(at, MIB);
    assert_eq!(rig.resident(at, MIB), 256);
    // Descending page numbers as in Linux. One page is listed twice, and one is not adjacent to the
    // others.
    let mut pages: Vec<u64> = (64..128).rev().map(|page| at + page * PAGE).collect();
    pages.extend([at + 64 * PAGE, at + 200 * PAGE]);
    rig.list(INFLATE, &pages);
    assert_eq!(rig.resident(at, MIB), 256 - 65);
    assert_eq!(rig.resident(at + 64 * PAGE, 64 * PAGE), 0);
    assert_eq!(rig.inflated(), 65 * PAGE);
    assert_eq!((rig.byte(at + 64 * PAGE - 1), rig.byte(at + 128 * PAGE)), (0xa5, 0xa5));
    assert_eq!((rig.byte(at + 64 * PAGE), rig.byte(at + 200 * PAGE)), (0, 0));
    // Data that the guest writes after deflating is retained.
    rig.fill(at, MIB);
    rig.list(DEFLATE, &pages);
    assert_eq!((rig.byte(at + 64 * PAGE), rig.resident(at, MIB)), (0xa5, 256));
    assert_eq!(rig.handle.metrics().deflated_bytes.load(Ordering::Relaxed), 65 * PAGE);
    assert_eq!(rig.refused(), []);
}

#[test]
fn only_plugged_blocks_of_hotplugged_dram_are_returned() {
    let mut rig = Rig::new(ALL);
    let dram = rig.parts[0].range.start;
    rig.fill(dram, 8 * MIB);
    rig.list(INFLATE, &[dram + 8 * MIB - PAGE, dram + 8 * MIB, dram + 127 * MIB]);
    assert_eq!(rig.resident(dram, 8 * MIB), 2047);
    assert_eq!(rig.refused(), [("unplugged", 2)]);
    // The range extends beyond the end of the plugged blocks.
    rig.report(4, &[Buffer::In(dram + 6 * MIB, 4 << 20)]);
    assert_eq!(rig.resident(dram, 8 * MIB), 1536);
    assert_eq!((rig.reported(), rig.refused()), (2 * MIB, vec![("unplugged", 2 + 512)]));
}

#[test]
fn pages_of_pm_and_outside_of_memory_are_refused_and_counted() {
    let mut rig = Rig::new(ALL);
    let pm = rig.parts[1].range.start;
    rig.fill(pm, 2 * MIB);
    let nowhere = 3 << 30;
    rig.list(INFLATE, &[pm, pm + PAGE, BOOT, nowhere, u64::from(u32::MAX) * PAGE]);
    assert_eq!(rig.refused(), [("pm", 2), ("no-memory", 3)]);
    assert_eq!((rig.inflated(), rig.byte(pm)), (0, 0xa5));
    rig.report(4, &[Buffer::In(pm, 2 << 20)]);
    assert_eq!((rig.reported(), rig.byte(pm)), (0, 0xa5));
    assert_eq!(rig.resident(pm, 2 * MIB), 512);
}

#[test]
fn reported_ranges_are_reduced_to_whole_pages_and_returned() {
    let mut rig = Rig::new(ALL);
    let at = 8 * MIB;
    rig.fill(at, 8 * MIB);
    let buffers =
        [Buffer::In(at, 2 << 20), Buffer::In(at + 4 * MIB + 1, 2 * 4096), Buffer::In(at + 7, 100)];
    rig.report(4, &buffers);
    assert_eq!(rig.reported(), 2 * MIB + PAGE);
    assert_eq!(rig.resident(at, 8 * MIB), 2048 - 513);
    assert_eq!((rig.byte(at + 4 * MIB), rig.byte(at + 4 * MIB + 2 * PAGE)), (0xa5, 0xa5));
    assert_eq!(rig.byte(at + 4 * MIB + PAGE), 0);
    // The guest may use the pages again at any time.
    rig.fill(at, 2 * MIB);
    assert_eq!((rig.byte(at), rig.refused()), (0xa5, vec![]));
}

#[test]
fn parts_of_huge_pages_are_not_returned() {
    let mut rig = Rig::of_pages(Some(2 * MIB));
    rig.start(ALL, &[0, 1, 2, 3, 4]);
    let at = 8 * MIB;
    rig.fill(at, 8 * MIB);
    // Linux inflates by 1 MiB per chain.
    let pages: Vec<u64> = (0..256).map(|page| at + page * PAGE).collect();
    rig.list(INFLATE, &pages);
    assert_eq!((rig.inflated(), rig.resident(at, 8 * MIB)), (0, 2048));
    assert_eq!((rig.byte(at), rig.refused()), (0xa5, vec![("huge-page", 256)]));
    rig.report(4, &[Buffer::In(at + MIB, 5 << 20)]);
    assert_eq!((rig.reported(), rig.resident(at, 8 * MIB)), (4 * MIB, 1024));
    assert_eq!([0, 1, 2, 5, 6].map(|mib| rig.byte(at + mib * MIB)), [0xa5, 0xa5, 0, 0, 0xa5]);
    assert_eq!(rig.refused(), [("huge-page", 512)]);
}

#[test]
fn queues_are_found_with_and_without_gaps() {
    let at = 8 * MIB;
    // Features, enabled queues, and index of the reporting queue.
    let drivers: [(u64, &[usize], usize); 6] = [
        (F_STATS_VQ | F_REPORTING, &[0, 1, 2, 4], 4),
        (F_STATS_VQ | F_REPORTING, &[0, 1, 2, 3], 3),
        (F_REPORTING, &[0, 1, 4], 4),
        (F_REPORTING, &[0, 1, 3], 3),
        (F_REPORTING, &[0, 1, 2], 2),
        (ALL, &[0, 1, 2, 3], 3),
    ];
    for (features, enabled, reporting) in drivers {
        let mut rig = Rig::off();
        rig.start(features, enabled);
        rig.fill(at, MIB);
        rig.report(reporting, &[Buffer::In(at, 1 << 20)]);
        assert_eq!(rig.resident(at, MIB), 0, "{features:#x} {enabled:?}");
        rig.list(INFLATE, &[at]);
        assert_eq!(rig.refused(), []);
    }
}

#[test]
fn driver_without_the_queues_of_its_features_is_refused() {
    let missing: [(u64, &[usize], u16); 4] = [
        (0, &[1], 0),
        (0, &[0], 1),
        (F_STATS_VQ, &[0, 1], 2),
        (F_REPORTING | F_STATS_VQ, &[0, 1, 2], 4),
    ];
    for (features, enabled, expected) in missing {
        let mut rig = Rig::off();
        let result = rig.try_start(features, enabled);
        assert!(matches!(result, Err(ActivateError::QueueMissing { index }) if index == expected));
        assert!(!rig.handle.driver_present());
    }
    // The driver need not enable queues of features that it has not negotiated.
    Rig::off().start(0, &[0, 1]);
}

#[test]
fn only_configured_features_are_offered() {
    let rig = Rig::off();
    assert_eq!(rig.device.features() & 0xff, ALL);
    let options = BalloonOptions {
        max_bytes: MAX,
        target_bytes: 0,
        deflate_on_oom: false,
        free_page_reporting: false,
        statistics: false,
    };
    let (device, _) =
        Balloon::new("balloon", options, &rig.memory, rig._loop.handle(), Arc::new(|| ())).unwrap();
    assert_eq!(device.features() & 0xff, 0);
}

#[test]
fn invalid_chains_are_returned_and_counted() {
    let mut rig = Rig::new(ALL);
    for invalid_len in [1, 3, 4097] {
        rig.send(INFLATE, &vec![0; invalid_len]);
        rig.send(DEFLATE, &vec![0; invalid_len]);
    }
    // The buffers are unreadable or unsuitable for the queue.
    let unplugged = rig.parts[0].range.start + 64 * MIB;
    rig.report(INFLATE, &[Buffer::In(BUFFERS, 1024)]);
    rig.report(INFLATE, &[Buffer::Out(unplugged, 1024)]);
    rig.report(INFLATE, &[Buffer::Out(u64::MAX - 4, 1024)]);
    rig.report(4, &[Buffer::Out(8 * MIB, 2 << 20)]);
    rig.report(4, &[Buffer::In(u64::MAX - 4, u32::MAX)]);
    rig.report(4, &[Buffer::In(8 * MIB + 1, 4096)]);
    assert_eq!(rig.refused(), [("malformed", 12)]);
    assert_eq!((rig.inflated(), rig.reported()), (0, 0));
    rig.list(INFLATE, &[8 * MIB]);
    assert_eq!(rig.inflated(), PAGE, "the next request was not served");
}

#[test]
fn long_lists_and_looping_chains_are_cut() {
    let mut rig = Rig::new(ALL);
    // More page numbers than a driver needs, in 16 descriptors of the same 64 KiB.
    let pages: Vec<u8> =
        (0..16_384u32).flat_map(|page| (2048 + page % 256).to_le_bytes()).collect();
    rig.fill(8 * MIB, MIB);
    rig.driver.write(BUFFERS, &pages);
    let head = rig.driver.add(INFLATE, &[Buffer::Out(BUFFERS, 65_536); 16]);
    rig.driver.kick(INFLATE);
    assert_eq!(rig.driver.wait_used(INFLATE), (head, 0));
    assert_eq!((rig.inflated(), rig.resident(8 * MIB, MIB)), (MIB, 0));
    assert_eq!(rig.refused(), [("too-long", 1)]);
    // The chain contains a loop.
    let looping = rig.driver.add(4, &[Buffer::In(8 * MIB, 4096), Buffer::In(8 * MIB + PAGE, 4096)]);
    rig.driver.set_descriptor(4, looping, (8 * MIB, 4096, 3, looping + 1));
    rig.driver.set_descriptor(4, looping + 1, (8 * MIB + PAGE, 4096, 3, looping));
    rig.driver.kick(4);
    assert_eq!(rig.driver.wait_used(4), (looping, 0));
    assert_eq!(rig.reported(), 2 * PAGE);
    rig.list(INFLATE, &[8 * MIB]);
}

#[test]
fn pages_beyond_the_limit_of_a_chain_are_ignored() {
    let mut rig = Rig::new(ALL);
    let pages: Vec<u64> = (0..1_025).map(|page| 8 * MIB + page * PAGE).collect();
    rig.list(INFLATE, &pages[..1_024]);
    assert_eq!((rig.inflated(), rig.refused()), (4 * MIB, vec![]));
    rig.list(INFLATE, &pages);
    assert_eq!((rig.inflated(), rig.refused()), (8 * MIB, vec![("too-long", 1)]));
}

#[test]
fn unrequested_statistics_are_ignored() {
    let mut rig = Rig::new(F_STATS_VQ);
    let notifications = rig.notifications.load(Ordering::Relaxed);
    let mut last = None;
    for round in 0..100 {
        rig.driver.write(BUFFERS, &statistics(&[(5, (100 + round) * MIB)]));
        let head = rig.driver.add(STATS, &[Buffer::Out(BUFFERS, 10)]);
        rig.driver.kick(STATS);
        while rig.handle.statistics().is_none() {
            std::thread::yield_now();
        }
        if let Some(last) = last.replace(head) {
            // When the device returns this buffer, it has already read or ignored the next one.
            assert_eq!(rig.driver.wait_used(STATS), (last, 0));
        }
    }
    assert_eq!(rig.handle.statistics().unwrap().statistics.get(Tag::Total), Some(100 * MIB));
    assert_eq!(rig.notifications.load(Ordering::Relaxed), notifications + 1);
    // The device accepts the next statistics that it requests.
    rig.handle.request_statistics();
    let head = rig.driver.wait_used(STATS).0;
    assert_eq!(Some(head), last);
    rig.driver.add(STATS, &[Buffer::Out(BUFFERS, 10)]);
    rig.driver.kick(STATS);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while rig.handle.statistics().unwrap().number < 2 {
        assert!(std::time::Instant::now() < deadline, "no statistics");
        std::thread::yield_now();
    }
    assert_eq!(rig.handle.statistics().unwrap().statistics.get(Tag::Total), Some(199 * MIB));
}

#[test]
fn repeated_size_is_not_reported() {
    let mut rig = Rig::new(ALL);
    rig.report_actual(MIB);
    let notifications = rig.notifications.load(Ordering::Relaxed);
    for _ in 0..100 {
        rig.report_actual(MIB);
    }
    assert_eq!(rig.notifications.load(Ordering::Relaxed), notifications);
    rig.report_actual(2 * MIB);
    assert_eq!(rig.notifications.load(Ordering::Relaxed), notifications + 1);
}

#[test]
fn statistics_are_received_on_request() {
    let mut rig = Rig::new(ALL);
    assert!(rig.handle.statistics().is_none());
    // The driver sends its first buffer without a request. The device returns that buffer as its
    // first request.
    rig.driver.write(BUFFERS, &statistics(&[(5, 100 * MIB), (4, 50 * MIB), (77, 1)]));
    let head = rig.driver.add(STATS, &[Buffer::Out(BUFFERS, 30)]);
    rig.driver.kick(STATS);
    let wait = |rig: &Rig, number| {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        loop {
            if let Some(received) =
                rig.handle.statistics().filter(|received| received.number >= number)
            {
                return received;
            }
            assert!(std::time::Instant::now() < deadline, "no statistics");
            std::thread::yield_now();
        }
    };
    let first = wait(&rig, 1);
    assert_eq!(first.statistics.get(Tag::Total), Some(100 * MIB));
    assert_eq!(
        rig.driver.used(STATS),
        None,
        "the buffer stays with the device until the next request"
    );
    rig.handle.request_statistics();
    assert_eq!(rig.driver.wait_used(STATS), (head, 0));
    // A second request before the driver's answer has no effect, because the device holds no
    // buffer.
    rig.handle.request_statistics();
    rig.driver.write(BUFFERS, &statistics(&[(5, 101 * MIB)]));
    rig.driver.add(STATS, &[Buffer::Out(BUFFERS, 10)]);
    rig.driver.kick(STATS);
    let second = wait(&rig, 2);
    assert_eq!(
        (second.statistics.get(Tag::Total), second.statistics.get(Tag::Free)),
        (Some(101 * MIB), None)
    );
    let metrics = rig.handle.metrics();
    assert_eq!(
        (metrics.statistic(Tag::Total), metrics.statistic(Tag::Free)),
        (Some(101 * MIB), Some(50 * MIB))
    );
    // Statistics of the previous driver are discarded, because another driver restarts its
    // counters.
    rig.device.reset();
    assert!(rig.handle.statistics().is_none());
    rig.start(ALL, &[0, 1, 2, 4]);
    rig.driver.write(BUFFERS, &statistics(&[(5, MIB)]));
    rig.driver.add(STATS, &[Buffer::Out(BUFFERS, 10)]);
    rig.driver.kick(STATS);
    assert_eq!(wait(&rig, 3).driver_generation, second.driver_generation + 1);
}

#[test]
fn invalid_statistics_are_counted_and_requested_again() {
    let mut rig = Rig::new(ALL);
    let mut last = None;
    for len in [9, 11, 0x1_0000] {
        let head = rig.driver.add(STATS, &[Buffer::Out(BUFFERS, len)]);
        rig.driver.kick(STATS);
        if let Some(last) = last.replace(head) {
            // If the driver sends several buffers, the device holds the last one.
            assert_eq!(rig.driver.wait_used(STATS), (last, 0));
        }
    }
    rig.handle.request_statistics();
    assert_eq!(rig.driver.wait_used(STATS), (last.unwrap(), 0));
    assert!(rig.handle.statistics().is_none());
    assert_eq!(rig.refused(), [("malformed", 3)]);
}

#[test]
fn target_and_reported_size_are_exchanged_by_the_configuration() {
    let mut rig = Rig::new(0);
    assert_eq!(rig.target_pages(), 1024, "the initial size");
    let notifications = rig.notifications.load(Ordering::Relaxed);
    rig.handle.set_target(8 * MIB).unwrap();
    assert_eq!(rig.target_pages(), 2048);
    rig.report_actual(8 * MIB);
    assert!(rig.notifications.load(Ordering::Relaxed) >= notifications + 2);
    let sizes = rig.handle.sizes();
    assert_eq!((sizes.target_bytes, sizes.actual_bytes, sizes.max_bytes), (8 * MIB, 8 * MIB, MAX));
    let too_large = TargetError::TooLarge { bytes: 18 * MIB, max_bytes: MAX };
    assert_eq!(rig.handle.set_target(18 * MIB), Err(too_large));
    let unaligned = TargetError::Unaligned { bytes: MIB, block_bytes: BLOCK_BYTES };
    assert_eq!(rig.handle.set_target(MIB), Err(unaligned));
    assert_eq!(rig.target_pages(), 2048);
    let metrics = rig.handle.metrics();
    assert_eq!(metrics.target_bytes.load(Ordering::Relaxed), 8 * MIB);
    assert_eq!(metrics.actual_bytes.load(Ordering::Relaxed), 8 * MIB);
}

#[test]
fn memory_that_the_balloon_leaves_is_the_plugged_size_of_its_zone() {
    let mut rig = Rig::new(0);
    let zone: &dyn ZoneDevice = &rig.handle.clone();
    zone.request(MAX - 8 * MIB);
    assert_eq!(rig.target_pages(), 2048);
    rig.report_actual(6 * MIB);
    let expected = ZoneSizes {
        block_bytes: BLOCK_BYTES,
        requested_bytes: MAX - 8 * MIB,
        plugged_bytes: MAX - 6 * MIB,
        ..ZoneSizes::empty(0, Tier::Dram, MAX)
    };
    assert_eq!(zone.sizes(), expected);
    zone.request(MAX - MIB);
    assert_eq!(zone.sizes(), expected, "not a multiple of the block size");
    rig.device.reset();
    assert_eq!(zone.sizes().driver, DriverState::Absent);
}

#[test]
fn guest_that_deflates_gets_a_lower_target() {
    let mut rig = Rig::new(ALL);
    rig.handle.set_target(8 * MIB).unwrap();
    rig.report_actual(8 * MIB);
    rig.report_actual(7 * MIB);
    assert_eq!(rig.handle.sizes().target_bytes, 6 * MIB);
    assert_eq!(rig.target_pages(), 1536);
    assert_eq!(rig.handle.metrics().oom_deflated_bytes.load(Ordering::Relaxed), MIB);
    // Without the feature, a smaller reported size does not lower the target.
    let mut rig = Rig::new(F_STATS_VQ);
    rig.handle.set_target(8 * MIB).unwrap();
    rig.report_actual(8 * MIB);
    rig.report_actual(7 * MIB);
    assert_eq!(rig.handle.sizes().target_bytes, 8 * MIB);
    assert!(!rig.handle.deflates_on_oom());
}

/// Performs the same steps as Linux when it unloads its driver (virtballoon_remove).
#[test]
fn reloaded_driver_gets_the_previous_target() {
    let mut rig = Rig::new(ALL);
    rig.handle.set_target(8 * MIB).unwrap();
    rig.report_actual(8 * MIB);
    rig.report_actual(0);
    rig.device.reset();
    assert_eq!(rig.handle.sizes().target_bytes, 8 * MIB);
    assert_eq!(rig.handle.metrics().target_bytes.load(Ordering::Relaxed), 8 * MIB);
    rig.start(ALL, &[0, 1, 2, 4]);
    assert_eq!(rig.target_pages(), 2048);
}

#[test]
fn reset_stops_all_accesses_and_empties_the_balloon() {
    let mut rig = Rig::new(ALL);
    rig.report_actual(4 * MIB);
    rig.device.reset();
    assert_eq!((rig.handle.sizes().actual_bytes, rig.handle.driver_present()), (0, false));
    rig.fill(8 * MIB, MIB);
    rig.driver.write(BUFFERS, &2048u32.to_le_bytes());
    rig.driver.add(INFLATE, &[Buffer::Out(BUFFERS, 4)]);
    rig.driver.kick(INFLATE);
    rig.handle.request_statistics();
    assert_eq!((rig.driver.used(INFLATE), rig.resident(8 * MIB, MIB)), (None, 256));
    rig.device.reset();
    // The next driver reads the retained target.
    rig.start(ALL, &[0, 1, 2, 4]);
    assert_eq!(rig.target_pages(), 1024);
    rig.list(INFLATE, &[8 * MIB]);
    assert_eq!(rig.resident(8 * MIB, MIB), 255);
}
