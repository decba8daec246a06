//! A governor of a guest that has a balloon, and an agent only now and then.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use balloon::params::Setting;
use balloon::proto::{Counters, Stall};
use balloon::sim::{GuestConfig, replay};
use balloon::trace::Entry;
use balloon::{Tier, ZoneSizes};
use parking_lot::Mutex;
use serde_json::{Value, json};

use balloon::governor::Onlining;
use balloon::statistics::{BalloonState, Sample, Statistics, Tag};

use super::*;
use crate::config::BALLOON_ZONE;
use crate::config::PressureConfig;
use crate::governor::core::Core;
use crate::governor::fake::{FakeDevice, Shown};
use crate::governor::record::Target;
use crate::governor::{BalloonSource, Beside, GovernedZone, ZoneDevice};

const MIB: u64 = 1 << 20;
const BOOT: u64 = 4096 * MIB;
const REGION: u64 = 3072 * MIB;
/// What the kernel keeps to itself.
const KERNEL: u64 = 100 * MIB;

/// A guest whose balloon follows at once, and whose use of memory a test sets.
struct FakeGuest {
    state: Mutex<State>,
    counted: bool,
    /// PM beside the balloon.
    pm: Option<Arc<FakeDevice>>,
}

#[derive(Clone, Copy)]
struct State {
    target: u64,
    ballooned: u64,
    used: u64,
    cached: u64,
    statistics: Option<Statistics>,
    number: u64,
    driver_life: u64,
    asked: u64,
}

impl FakeGuest {
    fn new(counted: bool, pm: Option<Arc<FakeDevice>>) -> Arc<Self> {
        let state = State {
            target: 0,
            ballooned: 0,
            used: 200 * MIB,
            cached: 0,
            statistics: None,
            number: 0,
            driver_life: 1,
            asked: 0,
        };
        Arc::new(Self { state: Mutex::new(state), counted, pm })
    }

    fn total(&self, state: &State) -> u64 {
        BOOT - KERNEL + self.pm_bytes() - if self.counted { 0 } else { state.ballooned }
    }

    fn available(&self, state: &State) -> u64 {
        (BOOT - KERNEL + self.pm_bytes()).saturating_sub(state.ballooned + state.used)
    }

    fn pm_bytes(&self) -> u64 {
        self.pm.as_ref().map_or(0, |pm| pm.sizes().plugged_bytes)
    }

    fn ballooned(&self) -> u64 {
        self.state.lock().ballooned
    }

    fn say(&self, statistics: Statistics) {
        let mut state = self.state.lock();
        state.statistics = Some(statistics);
        state.number += 1;
    }

    fn truth(&self) -> Statistics {
        let state = *self.state.lock();
        let available = self.available(&state);
        Statistics::default()
            .with(Tag::Total, self.total(&state))
            .with(Tag::Free, available.saturating_sub(state.cached))
            .with(Tag::Available, available)
            .with(Tag::SwapIn, 0)
            .with(Tag::AllocStalls, 0)
    }
}

impl ZoneDevice for FakeGuest {
    fn sizes(&self) -> ZoneSizes {
        let state = self.state.lock();
        ZoneSizes {
            requested_bytes: REGION - state.target,
            plugged_bytes: REGION - state.ballooned,
            ..ZoneSizes::empty(0, Tier::Dram, REGION)
        }
    }
    fn request(&self, size_bytes: u64) {
        let mut state = self.state.lock();
        state.target = REGION - size_bytes;
        state.ballooned = state.target;
    }
    fn remind(&self) {}
}

impl BalloonSource for FakeGuest {
    fn ask(&self) {
        self.state.lock().asked += 1;
        let truth = self.truth();
        self.say(truth);
    }
    fn state(&self) -> BalloonState {
        let state = self.state.lock();
        let (number, driver_life) = (state.number, state.driver_life);
        let sample = state.statistics.map(|statistics| Sample { statistics, number, driver_life });
        BalloonState { sample, ballooned_bytes: state.ballooned, is_counted: self.counted }
    }
}

struct Rig {
    core: Core,
    guest: Arc<FakeGuest>,
    now: TimeMs,
    seq: u64,
}

fn rig(counted: bool) -> Rig {
    let config = PressureConfig { policy: "psi".to_owned(), ..PressureConfig::default() };
    rig_by(&config, counted)
}

fn rig_by(config: &PressureConfig, counted: bool) -> Rig {
    rig_with(config, counted, None, Onlining::CommandLine)
}

fn rig_with(
    config: &PressureConfig,
    counted: bool,
    pm: Option<Arc<FakeDevice>>,
    onlining: Onlining,
) -> Rig {
    let guest = FakeGuest::new(counted, pm.clone());
    let zone = GovernedZone {
        id: BALLOON_ZONE.to_owned(),
        tier: Tier::Dram,
        guest_numa_node: 0,
        boot_bytes: 0,
        device: Arc::clone(&guest) as _,
    };
    let pm = pm.map(|device| GovernedZone {
        id: "pm".to_owned(),
        tier: Tier::Pm,
        guest_numa_node: 1,
        boot_bytes: 0,
        device,
    });
    let zones = [zone].into_iter().chain(pm).collect();
    let core = Core::new(config, zones, BOOT - REGION, Arc::new(|| 1 << 40), TimeMs(0)).unwrap();
    let core = core.with_statistics(Arc::clone(&guest) as _, onlining);
    Rig { core, guest, now: TimeMs(0), seq: 0 }
}

impl Rig {
    fn wait(&mut self, seconds: u64) {
        for _ in 0..seconds * 4 {
            self.now = self.now + 250;
            self.core.tick(self.now);
        }
    }

    fn details(&self) -> Value {
        serde_json::to_value(self.core.info(100, self.now)).unwrap()["details"].clone()
    }

    fn reports(&self) -> u64 {
        self.details()["reports"].as_u64().unwrap()
    }

    fn line(&mut self, line: &Value) {
        self.core.line(Ok(line.to_string().as_bytes()), self.now, self.now, Duration::default);
    }

    fn agent_comes(&mut self) {
        self.core.agent_connected(self.now);
        self.line(&json!({
            "type": "hello", "version": 1, "agent_version": "0.1.0", "kernel_release": "6.12.117",
            "preemption": "voluntary", "page_size_bytes": 4096,
        }));
    }

    fn agent_reports(&mut self) {
        self.agent_reports_with(self.now.0, |_| ());
    }

    fn agent_reports_with(&mut self, uptime_ms: u64, change: impl FnOnce(&mut Value)) {
        self.seq += 1;
        let state = *self.guest.state.lock();
        let (total, available) = (self.guest.total(&state), self.guest.available(&state));
        let mut line = json!({
            "type": "report", "version": 1, "seq": self.seq, "monotonic_ms": uptime_ms,
            "memory": {"total_bytes": total, "free_bytes": available, "available_bytes": available},
            "zones": [{"node": 0, "kind": "normal", "free_pages": available / 4096, "min_pages": 500,
                       "low_pages": 700, "high_pages": 900, "managed_pages": total / 4096}],
            "blocks": {"online_policy": "offline", "block_bytes": 128 * MIB, "nodes": []},
        });
        change(&mut line);
        self.line(&line);
    }
}

#[test]
fn an_idle_guest_without_an_agent_gives_memory_and_gets_it_back_when_it_needs_it() {
    for counted in [false, true] {
        let mut rig = rig(counted);
        rig.wait(60);
        let idle = rig.guest.ballooned();
        assert!(idle > 1024 * MIB, "{} MiB, counted: {counted}", idle / MIB);
        assert_eq!(rig.details()["refused"], json!({}));
        // It needs more than is left of it.
        rig.guest.state.lock().used = BOOT - KERNEL - idle - 50 * MIB;
        rig.wait(5);
        let busy = rig.guest.ballooned();
        assert!(
            busy + 500 * MIB < idle,
            "{} of {} MiB, counted: {counted}",
            busy / MIB,
            idle / MIB
        );
        let state = *rig.guest.state.lock();
        assert!(rig.guest.available(&state) > 256 * MIB);
        // And gives it again when the need is over.
        rig.guest.state.lock().used = 200 * MIB;
        rig.wait(120);
        assert!(rig.guest.ballooned() > busy);
    }
}

#[test]
fn a_guest_is_believed_to_have_what_is_not_in_its_balloon() {
    let mut rig = rig(true);
    rig.guest.request(REGION - 1024 * MIB);
    rig.agent_comes();
    rig.agent_reports();
    // Linux says more: it counts what is in the balloon as used.
    assert_eq!(rig.details()["memory"]["total_bytes"], json!(BOOT - KERNEL - 1024 * MIB));
}

#[test]
fn what_an_agents_guest_onlines_is_no_matter_for_a_balloon() {
    let mut rig = rig(false);
    rig.guest.request(0);
    rig.agent_comes();
    for _ in 0..40 {
        rig.now = rig.now + 250;
        let left = BOOT - KERNEL - rig.guest.ballooned();
        rig.guest.state.lock().used = left - 60 * MIB;
        rig.agent_reports();
    }
    // Of hotplugged memory a quarter would be lent, as its online policy is.
    assert!(
        rig.guest.sizes().plugged_bytes > REGION / 4,
        "{}",
        rig.guest.sizes().plugged_bytes / MIB
    );
}

#[test]
fn statistics_are_used_until_an_agent_reports_and_after_it_is_gone() {
    let mut rig = rig(false);
    // The guest may run short of memory before its agent starts.
    rig.wait(2);
    assert!(rig.reports() >= 2);
    assert_eq!(rig.details()["source"], json!("statistics"));
    rig.agent_comes();
    let before = rig.reports();
    for _ in 0..12 {
        rig.agent_reports();
        rig.wait(1);
    }
    assert_eq!(rig.reports(), before + 12, "nobody but the agent is heard");
    assert_eq!(rig.details()["source"], json!("agent"));
    // Connected, and silent.
    rig.wait(8);
    assert_eq!(rig.reports(), before + 12);
    rig.wait(4);
    assert!(rig.reports() > before + 12);
    assert_eq!(rig.details()["source"], json!("statistics"));
    // It comes back, and what it says is taken at once.
    rig.agent_reports();
    assert_eq!(rig.details()["source"], json!("agent"));
}

#[test]
fn statistics_wait_for_an_agent_that_onlines_memory() {
    let config = PressureConfig { policy: "psi".to_owned(), ..PressureConfig::default() };
    let mut rig = rig_with(&config, false, None, Onlining::Agent);
    rig.wait(9);
    assert_eq!(rig.reports(), 0);
    assert!(rig.guest.state.lock().asked >= 8, "the metrics show them meanwhile");
    rig.wait(4);
    assert!(rig.reports() >= 2);
    assert_eq!(rig.details()["source"], json!("statistics"));
}

#[test]
fn statistics_count_at_once_in_a_kernel_that_kexec_has_started() {
    let mut rig = rig(false);
    rig.agent_comes();
    rig.wait(1);
    rig.agent_reports();
    rig.core.agent_gone(rig.now);
    let before = rig.reports();
    rig.wait(2);
    assert_eq!(rig.reports(), before, "the agent may be restarting");
    rig.guest.state.lock().driver_life += 1;
    rig.wait(2);
    assert!(rig.reports() > before);
}

/// The agent's clock and counters began with the guest's kernel, after the VMM's clock.
#[test]
fn agent_that_takes_over_from_statistics_changes_no_request() {
    for uptime_ms in [3_000, 50_000] {
        let mut rig = rig(false);
        rig.guest.state.lock().used = 600 * MIB;
        rig.wait(60);
        let before = rig.guest.sizes().requested_bytes;
        assert!(before < REGION, "the guest has given nothing back");
        rig.agent_comes();
        for second in 0..8 {
            rig.agent_reports_with(uptime_ms + second * 1000, |line| {
                let pages = 100_000;
                let counters = Counters {
                    pswpin: pages,
                    pgmajfault: pages,
                    workingset_refault_file: pages,
                    pgscan_direct: pages,
                    allocstall: pages,
                    ..Counters::default()
                };
                let stall = Stall { some_us: 1_000_000, full_us: 1_000_000, ..Stall::default() };
                line["counters"] = serde_json::to_value(counters).unwrap();
                line["stall"] = serde_json::to_value(stall).unwrap();
            });
            rig.wait(1);
            assert_eq!(rig.guest.sizes().requested_bytes, before, "{uptime_ms}, second {second}");
        }
        assert_eq!(rig.details()["refused"], json!({}));
    }
}

#[test]
fn an_agent_that_connects_and_dies_is_waited_for_once() {
    let mut rig = rig(false);
    rig.agent_comes();
    rig.agent_reports();
    let before = rig.reports();
    for _ in 0..4 {
        rig.wait(3);
        rig.agent_comes();
        rig.core.agent_gone(rig.now);
    }
    assert!(rig.reports() > before, "12 s without a report");
    let before = rig.reports();
    for _ in 0..4 {
        rig.wait(3);
        rig.agent_comes();
        rig.core.agent_gone(rig.now);
    }
    assert!(rig.reports() >= before + 10, "and it goes on so");
    assert_eq!(rig.details()["source"], json!("statistics"));
}

#[test]
fn statistics_that_lie_are_refused_and_counted_and_the_loop_goes_on() {
    let mut rig = rig(false);
    rig.wait(3);
    let taken = rig.reports();
    let lies = [
        rig.guest.truth().with(Tag::Total, BOOT + 4096),
        rig.guest.truth().with(Tag::Free, u64::MAX),
        Statistics::default(),
    ];
    for lie in lies {
        rig.guest.say(lie);
        // Before it is asked for the truth again.
        rig.now = rig.now + 1;
        rig.core.tick(rig.now);
    }
    let details = rig.details();
    assert_eq!(details["refused"], json!({"out_of_range": 2, "wrong_shape": 1}));
    assert_eq!(rig.reports(), taken);
    rig.wait(3);
    assert!(rig.reports() > taken);
}

#[test]
fn what_has_come_by_acpi_is_believed_and_nothing_beyond_it() {
    let dimm_bytes = Arc::new(AtomicU64::new(0));
    let mut rig = rig(false);
    rig.core =
        rig.core.with_beside(Beside { dimm_bytes: Arc::clone(&dimm_bytes), ..Beside::default() });
    rig.wait(3);
    let taken = rig.reports();
    // A DIMM as large as the VM came with, of which the kernel keeps nothing.
    let grown = rig.guest.truth().with(Tag::Total, BOOT + 4096 * MIB);
    let say = |rig: &mut Rig, statistics| {
        rig.guest.say(statistics);
        rig.now = rig.now + 1;
        rig.core.tick(rig.now);
    };
    say(&mut rig, grown);
    assert_eq!(
        (rig.reports(), rig.details()["refused"].clone()),
        (taken, json!({"out_of_range": 1}))
    );
    dimm_bytes.store(4096 * MIB, Ordering::Relaxed);
    say(&mut rig, grown);
    assert_eq!(rig.reports(), taken + 1);
    assert_eq!(rig.details()["memory"]["total_bytes"], json!(BOOT + 4096 * MIB));
    say(&mut rig, grown.with(Tag::Total, BOOT + 4097 * MIB));
    assert_eq!(
        (rig.reports(), rig.details()["refused"].clone()),
        (taken + 1, json!({"out_of_range": 2}))
    );
}

#[test]
fn statistics_are_asked_for_faster_when_memory_runs_short() {
    let mut rig = rig(false);
    rig.wait(5);
    assert!(!rig.core.is_fast());
    let asked = |rig: &Rig| rig.guest.state.lock().asked;
    let before = asked(&rig);
    rig.wait(10);
    assert!(asked(&rig) - before <= 10);
    // More than it has with an empty balloon.
    rig.guest.state.lock().used = BOOT - KERNEL - 20 * MIB;
    rig.wait(2);
    assert!(rig.core.is_fast());
    let before = asked(&rig);
    rig.wait(5);
    assert!(asked(&rig) - before >= 19, "with every tick");
}

#[test]
fn page_cache_makes_a_guest_short_for_who_decides_by_free_pages_alone() {
    for (policy, measure) in [("psi", "available"), ("pmb", "free")] {
        let dry_run = true;
        let mut config =
            PressureConfig { policy: policy.to_owned(), dry_run, ..PressureConfig::default() };
        if policy == "pmb" {
            config.params.insert("watermark-scale".to_owned(), Setting::from("1"));
        }
        let mut rig = rig_by(&config, false);
        rig.guest.state.lock().cached = BOOT - KERNEL - 200 * MIB - 16 * MIB;
        rig.wait(3);
        assert_eq!(rig.core.is_fast(), measure == "free", "{policy}");
        assert_eq!(rig.details()["watermark_of"], measure);
        assert_eq!(serde_json::to_value(rig.core.settings()).unwrap()["watermark_of"], measure);
        rig.guest.state.lock().cached = 0;
        rig.wait(3);
        assert!(!rig.core.is_fast(), "{policy}");
    }
}

#[test]
fn pm_that_nobody_counts_goes_back_all_the_same() {
    let mut config = PressureConfig { policy: "pmb".to_owned(), ..PressureConfig::default() };
    config.params.insert("watermark-scale".to_owned(), Setting::from("1"));
    let pm = FakeDevice::new(1024 * MIB, true);
    let mut rig = rig_with(&config, false, Some(Arc::clone(&pm)), Onlining::CommandLine);
    rig.wait(5);
    assert_eq!(pm.sizes().plugged_bytes, 0);
    rig.guest.state.lock().used = BOOT - KERNEL + 300 * MIB;
    rig.wait(30);
    assert!(pm.sizes().plugged_bytes > 300 * MIB, "{} MiB", pm.sizes().plugged_bytes / MIB);
    rig.guest.state.lock().used = 200 * MIB;
    rig.wait(60);
    assert_eq!(pm.sizes().plugged_bytes, 0);
    assert_eq!(rig.guest.ballooned(), 0, "DRAM stays");
}

#[test]
fn a_guest_that_saves_itself_is_not_asked_to_give_it_again() {
    let mut rig = rig(true);
    rig.wait(60);
    let ballooned = rig.guest.ballooned();
    {
        // The device lowers its target with what the guest takes.
        let mut state = rig.guest.state.lock();
        state.used = BOOT - KERNEL - ballooned;
        state.ballooned -= 64 * MIB;
        state.target = state.ballooned;
    }
    for _ in 0..20 {
        rig.wait(1);
        assert!(rig.guest.ballooned() <= ballooned - 64 * MIB);
    }
    assert!(rig.guest.ballooned() < ballooned - 64 * MIB, "it was short, and is given more");
}

#[test]
fn a_recording_of_a_guest_with_a_balloon_is_read_and_replayed() {
    let shown = Shown::default();
    let mut rig = rig(false);
    let target = Target { path: "/trace".into(), file: shown.clone(), max_bytes: 1 << 30 };
    rig.core = rig.core.record(target, "db", rig.now).unwrap();
    for pages in [0, 255, 1, 511] {
        rig.wait(5);
        // Linux is seen amid an inflation.
        let mut state = rig.guest.state.lock();
        state.ballooned = state.ballooned.saturating_sub(pages * 4096);
    }
    rig.wait(5);
    drop(rig);
    let trace = shown.trace();
    assert_eq!(trace.header.balloon, Some(balloon::ZoneId(0)));
    let is_odd = |entry: &Entry| {
        let Entry::Host { zones, .. } = entry else { return false };
        !zones[0].plugged_bytes.is_multiple_of(2 * MIB)
    };
    assert!(trace.entries.iter().any(is_odd));
    // Another policy begins with what the guest booted with, so it is nothing to it where a block
    // was not whole.
    let mut reader = shown.reader();
    let (setup, _) = replay(&mut reader, &GuestConfig::default(), 0, 0).unwrap();
    assert_eq!(setup.host.zones[0].plugged_bytes, 0);
}

#[test]
fn a_balloon_that_is_sized_by_hand_stays_so() {
    let mut rig = rig(false);
    rig.core.resize_zone(BALLOON_ZONE, REGION - 512 * MIB, rig.now).unwrap();
    rig.wait(60);
    assert_eq!(rig.guest.ballooned(), 512 * MIB);
}
