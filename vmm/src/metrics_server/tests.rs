//! Tests of the metrics that a scraper receives if every kind of source is registered.

mod golden;
mod governor;
mod http;
mod queries;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, UNIX_EPOCH};

use balloon::DriverState;
use balloon::proto::{RawReport, Report};
use balloon::statistics::Tag;
use foreshore_confinement::thread::ThreadKind;
use foreshore_devices::bus::{AddressSpaceMetrics, BusMetrics};
use foreshore_devices::device::AttachedDevice;
use foreshore_devices::device::testing::FakeMachine;
use foreshore_devices::disk::range::{DiskRange, Unmap};
use foreshore_devices::disk::{BlockDevice, Geometry, ResizeError};
use foreshore_devices::event_loop::EventLoop;
use foreshore_devices::events::{Event, EventCounters, Events};
use foreshore_devices::host_console::{ConsoleFileMetrics, ConsoleFileSource};
use foreshore_devices::memory::backing::{MappingBudget, Reservation};
use foreshore_devices::memory::holes::HoleMetrics;
use foreshore_devices::memory::lost_memory::{LossFlag, LostMemory, RangeSource};
use foreshore_devices::memory::view::GuestView;
use foreshore_devices::metrics::Registration;
use foreshore_devices::nvdimm::FlushHintMetrics;
use foreshore_devices::pool::btt_loss::BttLoss;
use foreshore_devices::pool::fake::FakePool;
use foreshore_devices::pool::{CHUNK_BYTES, PmPool, PoolMetrics, UsageMonitor};
use foreshore_devices::serial::SerialMetrics;
use foreshore_devices::virtio::balloon::BalloonMetrics;
use foreshore_devices::virtio::block::{BlockMetrics, DiskMetrics, Kind};
use foreshore_devices::virtio::console::ConsoleMetrics;
use foreshore_devices::virtio::mem::{FailureReason, MemMetrics, PlugMetrics};
use foreshore_devices::virtio::net::NetDeviceMetrics;
use foreshore_devices::virtio::pmem::metrics::{PmemFileMetrics, PmemMetrics};
use foreshore_devices::virtio::rng::RngMetrics;
use foreshore_devices::virtio::vsock::VsockMetrics;
use foreshore_devices::volume::build::Sizes;
use foreshore_devices::volume::guest_btt::{GuestBtt, VolumeKey};
use foreshore_devices::volume::interface::Chosen;
use foreshore_devices::volume::metrics::{VolumeCounters, VolumeMetrics};
use pmem_volume::media::OnPageLost;
use rustix::thread::gettid;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use vm_memory::GuestMemoryMmap;

use super::vm::VmMetrics;
use super::*;
use crate::api::{CallMetrics, Limits, Server, ServerMetrics, Socket};
use crate::config::{MetricsAddress, SWITCHES};
use crate::cpu::metrics::VcpuMetrics;
use crate::governor::info::{GovernedZoneInfo, RecordingInfo, RecordingState};
use crate::governor::metrics::{
    GuestSoftware, PressureMetrics, PressureSample, PressureSource, PressureZone,
};
use crate::vm::landlock::LandlockMetrics;
use crate::vm::machine::hotplug_metrics::HotplugMetrics;
use crate::vm::machine::zone_metrics::ZoneMetrics;
use crate::vm::request::{ResizeStatus, VmHandle, VmRequest, VmState, VmStatus, ZoneInfo};
use crate::vm::vm_task::RestartMetrics;
use balloon::governor::AgentState;

const DOC: &str = include_str!("../../../docs/reference/metrics.md");

#[derive(Debug)]
struct FakeGovernor;

impl PressureSource for FakeGovernor {
    fn sample(&self) -> Option<PressureSample> {
        Some(PressureSample {
            plans_total: BTreeMap::from([(("psi", "grow", "low_available"), 3)]),
            policies: BTreeSet::from(["psi"]),
            reports_total: 7,
            refused_total: BTreeMap::from([("not_json", 2)]),
            agent_connected: true,
            agent: Some(AgentState::Silent),
            zones: vec![PressureZone {
                tier: "pm",
                zone: GovernedZoneInfo { id: "pm".to_owned(), driver_ready: true, pinned: false },
            }],
            paused: true,
            recording: Some(RecordingInfo {
                file: "/t".into(),
                written_bytes: 99,
                lost_lines: 3,
                status: RecordingState::Full,
            }),
            decisions_total: 12,
            guest: Some(GuestSoftware {
                kernel: "6.12.117+deb12-cloud-amd64".to_owned(),
                agent: "0.1.0".to_owned(),
            }),
            report: Some((Duration::from_millis(1500), report())),
            ..PressureSample::default()
        })
    }
}

/// Fake device that only reports its state.
struct Damaged;

impl BlockDevice for Damaged {
    fn geometry(&self) -> Geometry {
        unreachable!("{NO_IO}")
    }
    fn size_bytes(&self) -> u64 {
        8 << 30
    }
    fn read(&self, _: u64, _: &mut [u8]) -> io::Result<()> {
        unreachable!("{NO_IO}")
    }
    fn write(&self, _: u64, _: &[u8]) -> io::Result<()> {
        unreachable!("{NO_IO}")
    }
    fn flush(&self) -> io::Result<()> {
        unreachable!("{NO_IO}")
    }
    fn discard(&self, _: DiskRange) -> io::Result<()> {
        unreachable!("{NO_IO}")
    }
    fn write_zeroes(&self, _: DiskRange, _: Unmap) -> io::Result<()> {
        unreachable!("{NO_IO}")
    }
    fn resize(&self, _: u64) -> Result<(), ResizeError> {
        unreachable!("{NO_IO}")
    }
    fn live_bytes(&self) -> Option<u64> {
        Some(3 << 20)
    }
    fn released_bytes(&self) -> Option<u64> {
        Some(4 << 20)
    }
    fn compacted_bytes(&self) -> Option<u64> {
        Some(1 << 20)
    }
    fn read_only_arenas(&self) -> usize {
        2
    }
    fn reserve_bytes(&self) -> Option<u64> {
        Some(8 << 30)
    }
    fn allocated_bytes(&self) -> Option<u64> {
        Some(8 << 30)
    }
}

const NO_IO: &str = "metrics are no I/O";

fn report() -> Report {
    let raw = serde_json::json!({
        "version": 1, "seq": 1, "monotonic_ms": 60_000, "type": "report", "cause": "rest",
        "memory": {"total_bytes": 512 << 20, "free_bytes": 100 << 20, "available_bytes": 200 << 20},
        "kernel": {"slab_unreclaimable_bytes": 1, "slab_reclaimable_bytes": 2, "page_table_bytes": 3,
                   "stack_bytes": 4, "unused_dentries": 5, "unused_inodes": 6},
        "stall": {"some_us": 2_500_000, "full_us": 1_000_000, "some_avg10_basis_points": 0,
                  "full_avg10_basis_points": 0},
        "zones": [
            {"node": 0, "kind": "dma32", "free_pages": 9, "min_pages": 1, "low_pages": 2, "high_pages": 3,
             "managed_pages": 100, "user_pages": 5},
            {"node": 0, "kind": "normal", "free_pages": 9, "min_pages": 10, "low_pages": 20, "high_pages": 30,
             "managed_pages": 100}
        ],
        "counters": {"pswpin": 1, "pswpout": 4, "pgmajfault": 0, "workingset_refault_anon": 0,
                     "workingset_refault_file": 0, "pgscan_kswapd": 0, "pgscan_direct": 0, "pgsteal_kswapd": 0,
                     "pgsteal_direct": 0, "allocstall": 9, "allocstall_kernel": 8, "numa_miss": 6,
                     "numa_other": 7, "oom_kill": 1},
        "blocks": {"block_bytes": 128 << 20, "nodes": [
            {"node": 0, "online_bytes": 384 << 20, "offline_bytes": 0, "movable_online_bytes": 128 << 20}
        ]}
    });
    let raw: RawReport = serde_json::from_value(raw).unwrap();
    Report::try_from(raw).unwrap()
}

fn zone(id: &str, online_bytes: Option<u64>) -> ZoneInfo {
    ZoneInfo {
        id: id.to_owned(),
        tier: id.to_owned(),
        boot_bytes: 384 << 20,
        hotplug_bytes: 128 << 20,
        requested_bytes: 64 << 20,
        plugged_bytes: 32 << 20,
        descriptor_bytes: 512 << 10,
        saved_descriptor_bytes: 1536 << 10,
        recallable_bytes: 16 << 20,
        online_bytes,
        resident_bytes: 100 << 20,
        driver: Some(DriverState::Unsupported),
        status: ResizeStatus::Pending,
        ..ZoneInfo::default()
    }
}

fn vcpus() -> Arc<VcpuMetrics> {
    let vcpus = VcpuMetrics::default();
    vcpus.present.store(3, Ordering::Relaxed);
    vcpus.leaving.store(1, Ordering::Relaxed);
    vcpus.threads.lock().insert(7, gettid().as_raw_nonzero().get());
    Arc::new(vcpus)
}

/// Counters after a disk was added and its removal was requested.
fn hotplug() -> Arc<HotplugMetrics> {
    let hotplug = HotplugMetrics::default();
    hotplug.devices.store(4, Ordering::Relaxed);
    hotplug.pending.store(1, Ordering::Relaxed);
    hotplug.count("disk", "add", "ok");
    hotplug.count("disk", "remove", "requested");
    Arc::new(hotplug)
}

/// Lost memory with two ranges of boot memory, one of them lost, and a range of a file.
fn lost_memory() -> LostMemory {
    let lost = LostMemory::new(Arc::default(), LossFlag::default()).unwrap();
    for (flag, key) in [("--memory", ""), ("--memory", ""), ("--pmem", "file=/img")] {
        let reservation = Reservation::new(4096, 4096).unwrap();
        lost.watch(RangeSource { flag, key: key.to_owned() }, &reservation).unwrap();
    }
    lost.ranges()[1].page_lost();
    lost
}

/// Sources to which the metrics hold only weak references.
type Others = (Arc<dyn PressureSource>, Arc<dyn BlockDevice>);

/// Metrics with a source of every kind, and the objects that must stay alive for them.
struct Everything {
    metrics: Arc<Metrics>,
    registrations: Vec<Registration>,
    switches: (EventLoop, Vec<AttachedDevice>),
    pool: Arc<dyn PmPool>,
    others: Others,
}

/// Counters after a call, and after a call that does not exist.
fn calls() -> Arc<CallMetrics> {
    let calls = Arc::<CallMetrics>::default();
    calls.count("vm.info", 200);
    calls.count("unknown", 404);
    calls
}

/// Monitor of a pool whose volume has grown from 1 to 2 of 8 chunks in 30 s.
fn pool_usage() -> UsageMonitor {
    let fake = Arc::new(FakePool::new(8));
    let pool: Arc<dyn PmPool> = fake.clone();
    let monitor = UsageMonitor::new("/pm/pool".to_owned(), &pool, Events::start());
    for (chunks, second) in [(1, 0), (2, 30)] {
        fake.volume_bytes.store(chunks * CHUNK_BYTES, Ordering::Relaxed);
        monitor.step(Duration::from_secs(second));
    }
    monitor
}

fn everything() -> Everything {
    let metrics = Arc::new(Metrics::new("vm \"1\""));
    metrics.add(event_counters());
    register_process(&metrics, SeccompMode::Off);
    metrics.add(Arc::new(RefusedHosts::default()));
    let restarts = Arc::<RestartMetrics>::default();
    restarts.count(Duration::from_millis(2500));
    metrics.add(restarts);
    metrics.add(Arc::new(ServerMetrics::new("api", Arc::default())));
    metrics.add(calls());
    metrics.add(Arc::<LandlockMetrics>::default());
    let pool: Arc<dyn PmPool> = Arc::new(FakePool::new(8));
    pool.alloc_memory(2 * CHUNK_BYTES).unwrap();
    let again = pool.alloc_memory(CHUNK_BYTES).unwrap();
    pool.free_memory(&again).unwrap();
    let usage = pool_usage();
    let plugs = MemMetrics::default();
    plugs.plug.done(2 << 20, Duration::from_millis(3));
    plugs.failed(FailureReason::PoolFull);
    plugs.throttled.begin();
    plugs.throttled.end(Duration::from_millis(2500));
    let serial = SerialMetrics::default();
    serial.lost_bytes.store(79, Ordering::Relaxed);
    let console = ConsoleMetrics::default();
    console.output_bytes.store(80, Ordering::Relaxed);
    let console_file = ConsoleFileMetrics::default();
    console_file.throttled.end(Duration::from_millis(1500));
    let ports = BusMetrics::default();
    ports.unanswered_reads.store(6, Ordering::Relaxed);
    let vsock = VsockMetrics::default();
    vsock.bytes_to_guest_total.add(9);
    let balloon = BalloonMetrics::default();
    balloon.actual_bytes.store(64 << 20, Ordering::Relaxed);
    for tag in Tag::ALL {
        balloon.set_statistic(tag, 11);
    }
    let governor: Arc<dyn PressureSource> = Arc::new(FakeGovernor);
    let pmem = PmemMetrics::default();
    pmem.flushes.store(5, Ordering::Relaxed);
    pmem.persists.observe(Duration::from_micros(30));
    let translated = VolumeKey { pool: "/pm/pool".into(), name: "b".to_owned() };
    let disk = Arc::new(BlockMetrics::default());
    let device: Arc<dyn BlockDevice> = Arc::new(Damaged);
    let holes = HoleMetrics::default();
    holes.fills.observe(Duration::from_micros(40));
    holes.unstocked.store(1, Ordering::Relaxed);
    holes.stocked.store(4, Ordering::Relaxed);
    let holes = Arc::new(holes);
    let volume = |name: &str, counters| VolumeMetrics {
        pool: "/pm/pool".to_owned(),
        volume: name.to_owned(),
        sizes: Sizes::OfDevice(Arc::downgrade(&device)),
        failure: foreshore_devices::persist::FirstFailure::default(),
        holes: matches!(counters, VolumeCounters::Nvdimm(_)).then(|| Arc::clone(&holes)),
        counters,
    };
    disk.finished(Kind::Discard, true, Duration::from_millis(2));
    disk.transferred(Kind::Write, 4096);
    disk.finished(Kind::Write, true, Duration::from_micros(1500));
    let on_disk = |loss| VolumeCounters::VirtioBlk {
        disk: Arc::clone(&disk),
        device: Arc::downgrade(&device),
        btt_loss: Some(loss),
    };
    let ports = AddressSpaceMetrics { space: "port", counters: Arc::new(ports) };
    let pmem_file = PmemFileMetrics {
        name: "_pmem0".to_owned(),
        file: "/img".to_owned(),
        size_bytes: 1 << 30,
        durability: None,
        failed: Arc::new(true.into()),
        counters: Arc::default(),
    };
    let sources: Vec<Arc<dyn Expose>> = vec![
        Arc::new(PressureMetrics(Arc::downgrade(&governor))),
        Arc::new(PoolMetrics::new("/pm/pool".to_owned(), &pool)),
        Arc::new(usage),
        Arc::new(volume("a", VolumeCounters::VirtioPmem(Arc::new(pmem)))),
        Arc::new(volume("c", on_disk(BttLoss::Replaced { reason: String::new() }))),
        Arc::new(volume("d", on_disk(BttLoss::Damaged { reason: String::new() }))),
        Arc::new(volume("b", VolumeCounters::Nvdimm(Arc::new(FlushHintMetrics::default())))),
        Arc::new(NetDeviceMetrics { net: "_net0".to_owned(), counters: Arc::default() }),
        Arc::new(DiskMetrics { disk: "_disk0".to_owned(), counters: Arc::clone(&disk) }),
        Arc::new(pmem_file),
        Arc::new(lost_memory()),
        Arc::new(GuestBtt::new(vec![(translated, Chosen::Nvdimm)], 1)),
        Arc::new(PlugMetrics {
            zone: "pm".to_owned(),
            tier: "pm".to_owned(),
            counters: Arc::new(plugs),
        }),
        Arc::new(MappingBudget::new(57_339)),
        hotplug(),
        Arc::new(ConsoleFileSource { device: "serial", counters: Arc::new(console_file) }),
        vcpus(),
        Arc::new(ports),
        Arc::new(AddressSpaceMetrics { space: "mmio", counters: Arc::default() }),
        Arc::new(vsock),
        Arc::<RngMetrics>::default(),
        Arc::new(balloon),
        Arc::new(serial),
        Arc::new(console),
    ];
    let registrations = sources.into_iter().map(|source| metrics.register(source)).collect();
    let switches = switches(&metrics);
    Everything { metrics, registrations, switches, pool, others: (governor, device) }
}

fn switches(metrics: &Arc<Metrics>) -> (EventLoop, Vec<AttachedDevice>) {
    let event_loop = EventLoop::spawn(ThreadKind::Device, "test").unwrap();
    let fake = FakeMachine { metrics: Arc::clone(metrics), ..FakeMachine::default() };
    let view = GuestView::new(GuestMemoryMmap::new());
    let context = fake.context(view, event_loop.handle());
    let devices = SWITCHES.iter().map(|switch| (switch.build)(&context).unwrap()).collect();
    (event_loop, devices)
}

fn text() -> String {
    let everything = everything();
    let zones = vec![zone("dram", Some(32 << 20)), zone("pm", None)];
    let started = Some(UNIX_EPOCH + Duration::from_millis(1_800_000_000_500));
    let status = VmStatus { state: VmState::Paused, started };
    everything.metrics.encode(&(VmMetrics::Known(status), ZoneMetrics(zones))).unwrap()
}

/// Type and label names of each exposed metric, by its name.
fn exposed(text: &str) -> BTreeMap<String, (String, BTreeSet<String>)> {
    let mut families = BTreeMap::new();
    let mut current = None;
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            let name = if kind == "counter" { format!("{name}_total") } else { name.to_owned() };
            families.insert(name.clone(), (kind.to_owned(), BTreeSet::new()));
            current = Some(name);
        } else if !line.starts_with('#') {
            let (_, labels): &mut (String, BTreeSet<String>) =
                families.get_mut(current.as_ref().unwrap()).unwrap();
            labels.extend(label_names(line));
        }
    }
    families
}

/// Label names of a sample, without those that all samples or all histograms have.
fn label_names(sample: &str) -> Vec<String> {
    let Some((_, rest)) = sample.split_once('{') else { return Vec::new() };
    let (labels, _) = rest.rsplit_once('}').unwrap();
    labels
        .split("\",")
        .map(|label| label.split_once("=\"").unwrap_or_else(|| panic!("{sample}")).0.to_owned())
        .filter(|name| name != "vm" && name != "le")
        .collect()
}

/// Counters after one event.
fn event_counters() -> Arc<EventCounters> {
    let events = Events::start();
    events.emit(Event::VmBooted);
    events.counters()
}

/// Metrics in the tables of the document: name, type and labels.
fn documented() -> BTreeMap<String, (String, BTreeSet<String>)> {
    DOC.lines()
        .filter(|line| line.starts_with("| `foreshore_") || line.starts_with("| `process_"))
        .map(|row| {
            let mut cells = row.split('|').skip(1).map(str::trim);
            let name = cells.next().unwrap().trim_matches('`').to_owned();
            let kind = cells.next().unwrap().to_owned();
            let labels = cells.next().unwrap().split(", ").filter(|label| !label.is_empty());
            (name, (kind, labels.map(str::to_owned).collect()))
        })
        .collect()
}

/// Names of the types below `folder` that implement `Expose`.
fn types_that_expose(folder: &Path) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.ends_with("tests") {
            continue;
        }
        if path.is_dir() {
            names.extend(types_that_expose(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let source = std::fs::read_to_string(&path).unwrap();
            let name = |line: &str| {
                Some(line.strip_prefix("impl Expose for ")?.strip_suffix(" {")?.to_owned())
            };
            names.extend(source.lines().filter_map(name));
        }
    }
    names
}

#[test]
fn every_source_is_compared_with_the_document() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = ["src", "devices/src"].map(|folder| package.join(folder));
    let names: BTreeSet<_> = folders.iter().flat_map(|folder| types_that_expose(folder)).collect();
    let code: Vec<_> =
        include_str!("tests.rs").lines().filter(|line| !line.starts_with("use ")).collect();
    // The devices of the last two have no options, and `everything` creates all such devices.
    let elsewhere =
        ["EventCounters", "SeccompMetrics", "ProcessMetrics", "PvPanicMetrics", "WatchdogMetrics"];
    let is_made =
        |name: &str| elsewhere.contains(&name) || code.iter().any(|line| line.contains(name));
    let missing: Vec<_> = names.iter().filter(|name| !is_made(name)).collect();
    assert!(names.len() > 20 && missing.is_empty(), "{missing:?} of {names:?}");
}

#[test]
fn document_lists_exactly_the_exposed_metrics() {
    assert_eq!(documented(), exposed(&text()));
}

#[test]
fn scrape_shows_the_values_of_all_sources() {
    let text = text();
    let vm = r#"vm="vm \"1\"""#;
    for line in [
        format!(r#"foreshore_events_total{{{vm},source="vm",event="booted"}} 1"#),
        format!(r#"foreshore_events_lost_total{{{vm}}} 0"#),
        format!(r#"foreshore_delayed_restarts_total{{{vm}}} 1"#),
        format!(r#"foreshore_restart_delay_seconds_total{{{vm}}} 2.5"#),
        format!(r#"foreshore_events_withheld_total{{{vm}}} 0"#),
        format!(r#"foreshore_memory_requested_bytes{{{vm},zone="dram",tier="dram"}} 67108864"#),
        format!(r#"foreshore_memory_plugged_bytes{{{vm},zone="pm",tier="pm"}} 33554432"#),
        format!(r#"foreshore_memory_online_bytes{{{vm},zone="dram",tier="dram"}} 33554432"#),
        format!(
            r#"foreshore_memory_resize_status{{{vm},zone="pm",tier="pm",status="pending"}} 1.0"#
        ),
        format!(
            r#"foreshore_memory_driver_state{{{vm},zone="pm",tier="pm",state="unsupported"}} 1.0"#
        ),
        format!(r#"foreshore_memory_driver_state{{{vm},zone="pm",tier="pm",state="ready"}} 0.0"#),
        format!(
            r#"foreshore_memory_refused_requests_total{{{vm},zone="pm",tier="pm",reason="pool-full"}} 1"#
        ),
        format!(r#"foreshore_memory_throttled_requests_total{{{vm},zone="pm",tier="pm"}} 1"#),
        format!(r#"foreshore_memory_throttled_seconds_total{{{vm},zone="pm",tier="pm"}} 2.5"#),
        format!(r#"foreshore_memory_lost{{{vm},source="memory",key=""}} 1.0"#),
        format!(r#"foreshore_memory_lost{{{vm},source="pmem",key="file=/img"}} 0.0"#),
        format!(r#"foreshore_memory_plug_duration_seconds_count{{{vm},zone="pm",tier="pm"}} 1"#),
        format!(r#"foreshore_pool_bytes{{{vm},pool="/pm/pool",state="memory"}} 4194304"#),
        format!(r#"foreshore_pool_info{{{vm},pool="/pm/pool",durability="volatile"}} 1.0"#),
        format!(r#"foreshore_pool_lendable_bytes{{{vm},pool="/pm/pool"}} 12582912"#),
        format!(r#"foreshore_pool_scrubbed_bytes_total{{{vm},pool="/pm/pool"}} 2097152"#),
        format!(r#"foreshore_pool_failed{{{vm},pool="/pm/pool"}} 0.0"#),
        // Half of the growth is smoothed away.
        format!(r#"foreshore_pool_time_to_full_seconds{{{vm},pool="/pm/pool"}} 360.0"#),
        format!(
            r#"foreshore_volume_flushes_total{{{vm},pool="/pm/pool",volume="a",interface="virtio-pmem",result="ok"}} 5"#
        ),
        format!(
            r#"foreshore_disk_operations_total{{{vm},disk="_disk0",operation="discard",result="ok"}} 1"#
        ),
        format!(r#"foreshore_disk_bytes_total{{{vm},disk="_disk0",operation="write"}} 4096"#),
        format!(
            r#"foreshore_disk_operation_seconds_total{{{vm},disk="_disk0",operation="write",result="ok"}} 0.0015"#
        ),
        format!(
            r#"foreshore_disk_operation_seconds_total{{{vm},disk="_disk0",operation="read",result="error"}} 0.0"#
        ),
        format!(r#"foreshore_disk_broken_queues_total{{{vm},disk="_disk0"}} 0"#),
        format!(r#"foreshore_disk_io_uring{{{vm},disk="_disk0"}} 0.0"#),
        format!(
            r#"foreshore_pmem_info{{{vm},pmem="_pmem0",file="/img",durability="discarded"}} 1.0"#
        ),
        format!(r#"foreshore_pmem_failed{{{vm},pmem="_pmem0"}} 1.0"#),
        format!(
            r#"foreshore_volume_bytes_total{{{vm},pool="/pm/pool",volume="c",interface="virtio-blk",operation="write"}} 4096"#
        ),
        format!(
            r#"foreshore_volume_read_only_arenas{{{vm},pool="/pm/pool",volume="c",interface="virtio-blk"}} 2.0"#
        ),
        format!(
            r#"foreshore_volume_btt_replaced{{{vm},pool="/pm/pool",volume="c",interface="virtio-blk"}} 1.0"#
        ),
        format!(
            r#"foreshore_volume_btt_damaged{{{vm},pool="/pm/pool",volume="c",interface="virtio-blk"}} 0.0"#
        ),
        format!(
            r#"foreshore_volume_btt_damaged{{{vm},pool="/pm/pool",volume="d",interface="virtio-blk"}} 1.0"#
        ),
        format!(r#"foreshore_pressure_stall_seconds_total{{{vm},kind="some"}} 2.5"#),
        format!(r#"foreshore_pressure_watermark_bytes{{{vm},watermark="high"}} 135168"#),
        format!(
            r#"foreshore_pressure_plans_total{{{vm},policy="psi",direction="grow",reason="low_available"}} 3"#
        ),
        format!(r#"foreshore_pressure_report_age_seconds{{{vm}}} 1.5"#),
        format!(r#"foreshore_pressure_agent_state{{{vm},state="silent"}} 1.0"#),
        format!(r#"foreshore_pressure_agent_state{{{vm},state="live"}} 0.0"#),
        format!(r#"foreshore_pressure_paused{{{vm}}} 1.0"#),
        format!(r#"foreshore_pressure_recording{{{vm}}} 0.0"#),
        format!(r#"foreshore_pressure_recorded_bytes_total{{{vm}}} 99"#),
        format!(r#"foreshore_pressure_recording_lost_lines_total{{{vm}}} 3"#),
        format!(r#"foreshore_pressure_decisions_total{{{vm}}} 12"#),
        format!(r#"foreshore_pressure_driver_ready{{{vm},zone="pm",tier="pm"}} 1.0"#),
        format!(r#"foreshore_pressure_pinned{{{vm},zone="pm",tier="pm"}} 0.0"#),
        format!(r#"foreshore_pressure_refused_reports_total{{{vm},reason="not_json"}} 2"#),
        format!(r#"foreshore_pressure_refused_reports_total{{{vm},reason="too_long"}} 0"#),
        format!("foreshore_watchdog_pings_total{{{vm}}} 0"),
        format!("foreshore_serial_lost_bytes_total{{{vm}}} 79"),
        format!(r#"foreshore_console_bytes_total{{{vm},direction="from-guest"}} 80"#),
        format!(r#"foreshore_console_file_throttled_seconds_total{{{vm},device="serial"}} 1.5"#),
        format!(r#"foreshore_balloon_actual_bytes{{{vm}}} 67108864"#),
        format!(r#"foreshore_balloon_guest_memory_bytes{{{vm},state="caches"}} 11"#),
        format!(r#"foreshore_balloon_guest_oom_kills_total{{{vm}}} 11"#),
        format!(r#"foreshore_balloon_guest_swapped_bytes_total{{{vm},direction="in"}} 11"#),
        format!(r#"foreshore_balloon_refused_pages_total{{{vm},reason="unplugged"}} 0"#),
        format!(
            r#"foreshore_vcpu_unanswered_accesses_total{{{vm},space="port",direction="read"}} 6"#
        ),
        format!(
            r#"foreshore_vcpu_unanswered_accesses_total{{{vm},space="mmio",direction="write"}} 0"#
        ),
        format!(r#"foreshore_vsock_bytes_total{{{vm},direction="to-guest"}} 9"#),
        format!(r#"foreshore_vcpus{{{vm},state="present"}} 3.0"#),
        format!(r#"foreshore_vm_state{{{vm},state="paused"}} 1.0"#),
        format!(r#"foreshore_vm_state{{{vm},state="running"}} 0.0"#),
        format!(r#"foreshore_vm_state{{{vm},state="absent"}} 0.0"#),
        format!(r#"foreshore_vm_start_time_seconds{{{vm}}} 1800000000.5"#),
        format!(
            r#"foreshore_guest_info{{{vm},kernel="6.12.117+deb12-cloud-amd64",agent="0.1.0"}} 1.0"#
        ),
        format!(r#"foreshore_api_requests_total{{{vm},call="vm.info",code="200"}} 1"#),
        format!(r#"foreshore_vcpus{{{vm},state="leaving"}} 1.0"#),
        format!(r#"foreshore_vcpus{{{vm},state="parked"}} 0.0"#),
        format!(r#"foreshore_pci_devices{{{vm}}} 4.0"#),
        format!(r#"foreshore_hotplug_pending{{{vm}}} 1.0"#),
        format!(
            r#"foreshore_hotplug_total{{{vm},kind="disk",action="remove",result="requested"}} 1"#
        ),
        format!(r#"foreshore_guest_swapped_pages_total{{{vm},direction="out"}} 4"#),
        format!(r#"foreshore_guest_kernel_memory_bytes{{{vm},kind="slab-unreclaimable"}} 1"#),
        format!(r#"foreshore_guest_kernel_memory_bytes{{{vm},kind="slab-reclaimable"}} 2"#),
        format!(r#"foreshore_guest_kernel_memory_bytes{{{vm},kind="page-tables"}} 3"#),
        format!(r#"foreshore_guest_kernel_memory_bytes{{{vm},kind="stacks"}} 4"#),
        format!(r#"foreshore_guest_kernel_caches{{{vm},kind="unused-dentries"}} 5.0"#),
        format!(r#"foreshore_guest_kernel_caches{{{vm},kind="unused-inodes"}} 6.0"#),
        format!(r#"foreshore_guest_user_memory_in_kernel_zones_bytes{{{vm}}} 20480"#),
        format!(r#"foreshore_guest_allocation_stalls_total{{{vm},memory="kernel"}} 8"#),
        format!(r#"foreshore_guest_allocation_stalls_total{{{vm},memory="user"}} 1"#),
        format!(r#"foreshore_guest_numa_miss_pages_total{{{vm}}} 6"#),
        format!(r#"foreshore_guest_numa_other_pages_total{{{vm}}} 7"#),
        format!(r#"foreshore_guest_online_memory_bytes{{{vm},node="0",user="kernel"}} 268435456"#),
        format!(r#"foreshore_guest_online_memory_bytes{{{vm},node="0",user="movable"}} 134217728"#),
        format!(r#"foreshore_guest_online_policy{{{vm},policy="unknown"}} 1.0"#),
        format!(r#"foreshore_guest_online_policy{{{vm},policy="online_movable"}} 0.0"#),
    ] {
        assert!(text.lines().any(|shown| shown == line), "{line}\nis not in\n{text}");
    }
    assert!(
        !text.contains(r#"foreshore_memory_online_bytes{vm="vm \"1\"",zone="pm""#),
        "without an agent"
    );
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn sources_of_an_ended_vm_are_not_exposed() {
    let Everything { metrics, registrations, switches, pool, others } = everything();
    let encode = || metrics.encode(&ZoneMetrics::default()).unwrap();
    let (governor, device) = others;
    drop((pool, governor));
    let text = encode();
    assert!(
        !text.contains("foreshore_pool_bytes") && !text.contains("foreshore_pressure_"),
        "{text}"
    );
    assert!(text.contains("foreshore_volume_size_bytes"));
    drop((registrations, switches, device));
    let text = encode();
    assert!(!text.contains("foreshore_volume") && text.contains("foreshore_build_info"), "{text}");
}

#[test]
fn family_of_two_sources_is_exposed_once() {
    let metrics = Metrics::new("a");
    let disk = |id: &str| {
        let source = DiskMetrics { disk: id.to_owned(), counters: Arc::default() };
        metrics.register(Arc::new(source))
    };
    let (_first, second) = (disk("first"), disk("second"));
    let count = |pattern: &str| {
        let text = metrics.encode(&ZoneMetrics::default()).unwrap();
        text.lines().filter(|line| line.starts_with(pattern)).count()
    };
    assert_eq!(count("# TYPE foreshore_disk_size_bytes "), 1);
    assert_eq!(count("foreshore_disk_size_bytes{"), 2);
    drop(second);
    assert_eq!(count("foreshore_disk_size_bytes{"), 1);
}

/// Label values in one style, except names that other interfaces define.
#[test]
fn label_values_are_lower_case_with_hyphens() {
    let text = text();
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    let mut checked = 0;
    for (name, labels) in samples.filter_map(|line| line.split_once('{')) {
        let labels = labels.rsplit_once('}').unwrap().0;
        for label in labels.split("\",") {
            let (label, value) = label.split_once("=\"").unwrap();
            let value = value.trim_end_matches('"');
            let defined_elsewhere = match label {
                // Names that the user has chosen.
                "vm" | "zone" | "pool" | "volume" | "disk" | "net" | "pmem" | "file" | "key" => {
                    true
                }
                "le" | "version" | "kernel" | "agent" | "call" => true,
                // Traces contain the reasons of plans, so these words do not change.
                "reason" => name.starts_with("foreshore_pressure_"),
                // The guest kernel's words in /sys/devices/system/memory/auto_online_blocks.
                "policy" => name == "foreshore_guest_online_policy",
                _ => false,
            };
            if defined_elsewhere {
                continue;
            }
            checked += 1;
            assert!(
                value.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-'),
                "{name}: {label}={value:?}"
            );
        }
    }
    assert!(checked > 100, "{checked} of\n{text}");
}

#[test]
fn enforced_filter_is_a_metric() {
    let encode = |mode| {
        let metrics = Metrics::new("a");
        register_process(&metrics, mode);
        metrics.encode(&ZoneMetrics::default()).unwrap()
    };
    for mode in SeccompMode::ALL {
        let flag = u8::from(matches!(mode, SeccompMode::Enforce | SeccompMode::Errno));
        let sample = format!("foreshore_seccomp_enabled{{vm=\"a\"}} {flag}.0");
        assert!(encode(mode).contains(&sample), "{mode:?}");
    }
}
