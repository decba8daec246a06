//! The governor against devices that do as they are told, or do not.

use std::sync::Arc;

use balloon::Tier;
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::*;
use crate::governor::{DeviceSizes, Shortfall, ZoneDevice};

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 2 * MIB;

/// A device whose guest follows at once, or not at all.
struct FakeDevice {
    sizes: Mutex<DeviceSizes>,
    follows: bool,
    /// What its host has for it.
    can_provide: Mutex<u64>,
    reminders: Mutex<u32>,
}

impl FakeDevice {
    fn new(region_bytes: u64, follows: bool) -> Arc<Self> {
        let sizes =
            DeviceSizes { block_bytes: BLOCK, region_bytes, driver_ready: true, ..Default::default() };
        Arc::new(Self {
            sizes: Mutex::new(sizes),
            follows,
            can_provide: Mutex::new(u64::MAX),
            reminders: Mutex::new(0),
        })
    }
}

impl ZoneDevice for FakeDevice {
    fn sizes(&self) -> DeviceSizes {
        *self.sizes.lock()
    }
    fn request(&self, size_bytes: u64) {
        let mut sizes = self.sizes.lock();
        assert!(size_bytes <= sizes.region_bytes && size_bytes.is_multiple_of(BLOCK));
        let can_provide = *self.can_provide.lock();
        sizes.requested_bytes = size_bytes.min(can_provide);
        let shortfall = Shortfall { reason: "pool-full", wanted_bytes: size_bytes };
        sizes.shortfall = (size_bytes > can_provide).then_some(shortfall);
        if self.follows {
            sizes.plugged_bytes = sizes.requested_bytes;
        }
    }
    fn remind(&self) {
        *self.reminders.lock() += 1;
    }
}

struct Fixture {
    core: Core,
    dram: Arc<FakeDevice>,
    pm: Arc<FakeDevice>,
    seq: u64,
}

fn fixture(policy: &str, dry_run: bool, follows: bool) -> Fixture {
    let (dram, pm) = (FakeDevice::new(128 * MIB, follows), FakeDevice::new(1024 * MIB, follows));
    let zone = |id: &str, tier, node, device: &Arc<FakeDevice>| GovernedZone {
        id: id.to_owned(),
        tier,
        guest_numa_node: node,
        boot_bytes: if node == 0 { 384 * MIB } else { 0 },
        device: Arc::clone(device) as _,
    };
    let zones = vec![zone("dram", Tier::Dram, 0, &dram), zone("pm", Tier::Pm, 1, &pm)];
    let config = PressureConfig { policy: policy.to_owned(), size: None, dry_run };
    let core = Core::new(&config, zones, 384 * MIB, Arc::new(|| 1024 * MIB), TimeMs(0)).unwrap();
    Fixture { core, dram, pm, seq: 0 }
}

impl Fixture {
    fn greet(&mut self) {
        self.core.agent_connected();
        self.line(&json!({
            "type": "hello", "version": 1, "agent_version": "0.1.0", "kernel_release": "6.12.117",
            "preemption": "voluntary", "page_size_bytes": 4096,
        }));
    }

    fn line(&mut self, line: &Value) {
        self.core.line(Ok(line.to_string().as_bytes()), TimeMs(self.seq * 50));
    }

    /// A report of a guest that has `available` of what it has in all.
    fn report(&mut self, available_mib: u64) {
        self.seq += 1;
        let plugged = self.dram.sizes().plugged_bytes + self.pm.sizes().plugged_bytes;
        let total = 360 * MIB + plugged;
        let zone = |kind, managed: u64| {
            json!({"node": 0, "kind": kind, "free_pages": available_mib * 256, "min_pages": 500,
                   "low_pages": 700, "high_pages": 900, "managed_pages": managed / 4096})
        };
        let line = json!({
            "type": "report", "version": 1, "seq": self.seq, "monotonic_ms": self.seq * 50,
            "memory": {"total_bytes": total, "free_bytes": available_mib * MIB,
                       "available_bytes": available_mib * MIB},
            "zones": [zone("dma32", total)],
            "blocks": {"online_policy": "online_movable", "block_bytes": 128 * MIB, "nodes": [
                {"node": 0, "online_bytes": 384 * MIB + self.dram.sizes().plugged_bytes,
                 "offline_bytes": 0, "movable_online_bytes": self.dram.sizes().plugged_bytes},
                {"node": 1, "online_bytes": self.pm.sizes().plugged_bytes, "offline_bytes": 0,
                 "movable_online_bytes": self.pm.sizes().plugged_bytes},
            ]},
        });
        self.line(&line);
    }
}

#[test]
fn a_guest_that_fills_gets_dram_first_and_then_pm() {
    let mut f = fixture("psi", false, true);
    f.greet();
    for available in [200, 150, 100, 60] {
        f.report(available);
    }
    assert_eq!(f.core.counters.refused.len(), 0, "{:?}", f.core.counters.refused);
    assert_eq!(f.dram.sizes().plugged_bytes, 128 * MIB);
    for available in [60, 40, 30] {
        f.report(available);
    }
    assert!(f.pm.sizes().plugged_bytes > 0);
    let grows: u64 = f.core.counters.plans.iter().filter(|(key, _)| key.1 == "grow").map(|(_, n)| n).sum();
    assert!(grows > 0);
    assert_eq!(f.core.online_bytes("dram"), Some(128 * MIB));
}

#[test]
fn dry_run_decides_and_asks_nobody() {
    let mut f = fixture("psi", true, true);
    f.greet();
    for available in [100, 50, 20, 20] {
        f.report(available);
    }
    assert!(f.core.counters.plans.keys().any(|key| key.1 == "grow"));
    assert_eq!(f.dram.sizes().requested_bytes, 0);
    assert!(f.core.info(TimeMs(0)).dry_run);
}

#[test]
fn off_takes_reports_and_does_nothing() {
    let mut f = fixture("off", false, true);
    f.greet();
    for available in [100, 50, 20, 5] {
        f.report(available);
    }
    assert_eq!(f.core.counters.reports, 4);
    assert_eq!(f.dram.sizes().requested_bytes, 0);
}

#[test]
fn a_resize_by_hand_pins_its_zone_until_the_governor_is_resumed() {
    let mut f = fixture("psi", false, true);
    f.greet();
    f.core.resize("dram", 64 * MIB, TimeMs(0)).unwrap();
    assert_eq!(f.core.info(TimeMs(0)).pinned_zones, ["dram"]);
    for available in [60, 30, 20] {
        f.report(available);
    }
    assert_eq!(f.dram.sizes().requested_bytes, 64 * MIB);
    assert!(f.pm.sizes().requested_bytes > 0);
    f.core.change(&PressureChange { resume: Some(true), ..Default::default() }).unwrap();
    for available in [20, 20, 20] {
        f.report(available);
    }
    assert_eq!(f.dram.sizes().requested_bytes, 128 * MIB);
}

#[test]
fn resizes_out_of_bounds_change_nothing() {
    let mut f = fixture("psi", false, true);
    for (zone, bytes) in [("dram", 129 * MIB), ("dram", 130 * MIB), ("dram", MIB), ("nvram", BLOCK)] {
        assert!(
            matches!(f.core.resize(zone, bytes, TimeMs(0)), Err(VmError::BadRequest(_))),
            "{zone} {bytes}"
        );
    }
    assert!(f.core.info(TimeMs(0)).pinned_zones.is_empty());
    assert_eq!(f.dram.sizes().requested_bytes, 0);
}

#[test]
fn a_guest_that_does_not_follow_is_reminded_and_the_status_says_why() {
    let mut f = fixture("off", false, false);
    f.core.resize("dram", 64 * MIB, TimeMs(0)).unwrap();
    f.core.tick(TimeMs(1000));
    assert_eq!(f.core.resize_status("dram", TimeMs(1000)), Some(ResizeStatus::Pending));
    f.core.tick(TimeMs(6000));
    assert!(matches!(f.core.resize_status("dram", TimeMs(6000)), Some(ResizeStatus::Stuck(_))));
    assert_eq!(*f.dram.reminders.lock(), 1);
    f.dram.sizes.lock().driver_ready = false;
    f.core.tick(TimeMs(12_000));
    assert_eq!(f.core.resize_status("dram", TimeMs(20_000)), Some(ResizeStatus::NoDriver));
    assert_eq!(f.core.resize_status("nvram", TimeMs(0)), None);
}

#[test]
fn a_resize_that_the_host_cannot_provide_is_stuck_until_it_is_asked_for_again() {
    let mut f = fixture("off", false, true);
    *f.pm.can_provide.lock() = 24 * MIB;
    f.core.resize("pm", 64 * MIB, TimeMs(0)).unwrap();
    f.core.tick(TimeMs(500));
    let status = |f: &Fixture| f.core.resize_status("pm", TimeMs(500)).unwrap();
    let ResizeStatus::Stuck(reason) = status(&f) else { panic!("{:?}", status(&f)) };
    assert!(reason.starts_with("pool-full: ") && reason.contains(&(64 * MIB).to_string()), "{reason}");
    assert_eq!(f.pm.sizes().plugged_bytes, 24 * MIB);
    // What there is, asked for by hand, is a resize that is reached.
    f.core.resize("pm", 24 * MIB, TimeMs(500)).unwrap();
    assert_eq!(status(&f), ResizeStatus::Reached);
    f.core.resize("pm", 64 * MIB, TimeMs(500)).unwrap();
    assert!(matches!(status(&f), ResizeStatus::Stuck(_)));
    *f.pm.can_provide.lock() = u64::MAX;
    f.core.resize("pm", 64 * MIB, TimeMs(500)).unwrap();
    assert_eq!(status(&f), ResizeStatus::Reached);
    assert_eq!(f.pm.sizes().plugged_bytes, 64 * MIB);
}

#[test]
fn lines_that_are_no_reports_are_counted_by_reason_and_change_nothing() {
    let mut f = fixture("psi", false, true);
    f.greet();
    f.core.line(Ok(b"\xff"), TimeMs(0));
    f.core.line(Ok(b"{}"), TimeMs(0));
    f.core.line(Err(Refusal::TooLong { bound_bytes: 1 }), TimeMs(0));
    f.line(&json!({"type": "report", "version": 99}));
    let refused = &f.core.counters.refused;
    assert_eq!(refused.values().sum::<u64>(), 4);
    assert_eq!(refused["too_long"], 1);
    assert_eq!(refused["wrong_version"], 1);
    assert_eq!(f.core.counters.reports, 0);
}

#[test]
fn the_time_from_the_first_report_to_the_memory_being_online_is_measured() {
    let mut f = fixture("psi", false, true);
    f.greet();
    for available in [100, 60, 60, 200] {
        f.report(available);
    }
    assert_eq!(f.core.sample(TimeMs(0)).report_to_online.count(), 1);
    assert!(f.core.info(TimeMs(0)).details.contains_key("report_to_online_ms"));
}

#[test]
fn an_unknown_policy_is_refused_and_the_old_one_stays() {
    let mut f = fixture("psi", false, true);
    let change = PressureChange { policy: Some("magic".to_owned()), ..Default::default() };
    let error = f.core.change(&change).unwrap_err().to_string();
    assert!(error.contains("magic") && error.contains("psi"), "{error}");
    assert_eq!(f.core.info(TimeMs(0)).policy, "psi");
}

#[test]
fn fixed_keeps_its_size_without_an_agent_and_takes_another_one() {
    let mut f = fixture("off", false, true);
    let change = |size| PressureChange { policy: Some("fixed".to_owned()), size, ..Default::default() };
    f.core.change(&change(Some(128 * MIB + 64 * MIB))).unwrap();
    f.core.tick(TimeMs(1000));
    assert_eq!(f.dram.sizes().requested_bytes, 128 * MIB);
    assert_eq!(f.pm.sizes().requested_bytes, 64 * MIB);
    for bad in [Some(1), None] {
        assert!(matches!(f.core.change(&change(bad)), Err(VmError::BadRequest(_))), "{bad:?}");
    }
    f.core.change(&change(Some(0))).unwrap();
    f.core.tick(TimeMs(60_000));
    assert!(f.pm.sizes().requested_bytes < 64 * MIB);
}

#[test]
fn the_audit_is_bounded_and_newest_first() {
    let mut f = fixture("psi", false, true);
    f.greet();
    for round in 0..AUDIT_LEN as u64 {
        f.report(if round % 2 == 0 { 20 } else { 300 });
    }
    assert!(f.core.audit.len() <= AUDIT_LEN);
    let decisions = f.core.info(TimeMs(f.seq * 50)).decisions;
    assert!(decisions.len() <= AUDIT_SHOWN);
    let ages: Vec<_> = decisions.iter().map(|decision| decision["age_ms"].as_u64().unwrap()).collect();
    assert!(ages.is_sorted());
}

#[test]
fn lines_of_an_agent_that_has_closed_its_end_count() {
    use std::io::Write;
    let Fixture { core, .. } = fixture("psi", false, true);
    let core = Mutex::new(core);
    let (mut agent, vmm) = std::os::unix::net::UnixStream::pair().unwrap();
    agent.write_all(b"this is no report\nnor is this\n").unwrap();
    drop(agent);
    vmm.set_nonblocking(true).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let stream = tokio::net::UnixStream::from_std(vmm).unwrap();
        crate::governor::agent::serve(stream, &core, crate::governor::task::Clock::start()).await.unwrap();
    });
    assert_eq!(core.lock().counters.refused.values().sum::<u64>(), 2);
}
