//! Tests of the governor with devices that follow its requests or ignore them.

use std::sync::Arc;

use balloon::controller::ResizeStatus;
use balloon::governor::AgentState;
use balloon::statistics::{BalloonState, Sample, Statistics, Tag};
use balloon::{DriverState, StorageSpace, UNSUPPORTED_DRIVER};
use parking_lot::Mutex;
use serde_json::json;

use super::*;
use crate::governor::fake::{
    BLOCK, BOOT_BYTES, Fixture, MIB, core, fixture, hello, report, with_log,
};
use crate::governor::info::PressureInfo;
use crate::vm::decision::{DECISIONS_SHOWN, MAX_DECISIONS, Outcome};
use foreshore_devices::virtio::zone_device::ZoneDevice;

#[test]
fn sizes_of_a_zone_are_read_once_per_report() {
    let mut f = fixture("psi", true);
    f.greet();
    let reads = |f: &Fixture| [&f.dram, &f.pm].map(|device| *device.reads.lock());
    for available in [200, 20] {
        f.seq += 1;
        let before = reads(&f);
        f.line(&report(f.seq, available, [0, 0]));
        assert_eq!(reads(&f), before.map(|reads| reads + 1));
    }
    assert!(f.core.counters().plans.keys().any(|key| key.1 == "grow"));
}

#[test]
fn resize_that_a_zone_cannot_carry_out_is_an_error_with_the_reason() {
    let mut f = fixture("psi", true);
    let target = f.core.zones().target("pm", 64 * MIB).unwrap();
    for driver in [DriverState::Absent, DriverState::Unsupported] {
        f.pm.sizes.lock().driver = driver;
        let ready = f.core.info(0, TimeMs(0)).zones.into_iter().map(|zone| zone.driver_ready);
        assert!(ready.eq([true, false]), "{driver:?}");
    }
    for (zone, bytes, message) in [
        ("dram", 130 * MIB, "\"dram\" cannot be resized: 130 MiB exceeds the maximum 128 MiB"),
        (
            "dram",
            MIB,
            "\"dram\" cannot be resized: 1 MiB is not a multiple of the block size 2 MiB",
        ),
        ("pm", BLOCK, UNSUPPORTED_DRIVER),
        ("nvram", BLOCK, "nvram"),
    ] {
        let error = f.core.resize_zone(zone, bytes, TimeMs(0)).unwrap_err().to_string();
        assert!(error.ends_with(message) || zone == "nvram" && error.contains(message), "{error}");
    }
    // The device has refused the driver since the target was validated.
    let error = f.core.resize(target, TimeMs(0)).unwrap_err().to_string();
    assert!(error.contains("\"pm\"") && error.contains("5.16"), "{error}");
    assert!(f.core.info(0, TimeMs(0)).pinned_zones.is_empty());
    assert_eq!([f.dram.sizes().requested_bytes, f.pm.sizes().requested_bytes], [0, 0]);
    // Without a driver, a client can still request the plugged size.
    f.core.resize_zone("pm", 0, TimeMs(0)).unwrap();
}

#[test]
fn guest_without_progress_is_reminded_and_status_is_stuck() {
    let mut f = fixture("off", false);
    f.core.resize_zone("dram", 64 * MIB, TimeMs(0)).unwrap();
    f.core.tick(TimeMs(1000));
    let status = |f: &Fixture, at| f.core.zone_state("dram", TimeMs(at)).resize.unwrap().status;
    assert_eq!(status(&f, 1000), ResizeStatus::Pending);
    f.core.tick(TimeMs(6000));
    assert!(matches!(status(&f, 6000), ResizeStatus::Stuck(_)));
    assert_eq!(*f.dram.reminders.lock(), 1);
    assert_eq!(f.core.zone_state("nvram", TimeMs(6000)).resize, None);
}

/// The governor observes sizes only in its steps, and the sizes change between two steps.
#[test]
fn resize_status_belongs_to_the_sizes_that_it_is_shown_with() {
    let mut f = fixture("off", false);
    f.core.tick(TimeMs(0));
    let shown = |f: &Fixture| {
        let ZoneResize { sizes, status } = f.core.zone_state("dram", TimeMs(500)).resize.unwrap();
        ([sizes.requested_bytes, sizes.plugged_bytes].map(|bytes| bytes / MIB), status)
    };
    assert_eq!(shown(&f), ([0, 0], ResizeStatus::Reached));
    f.dram.request(64 * MIB);
    assert_eq!(shown(&f), ([64, 0], ResizeStatus::Pending));
    f.core.tick(TimeMs(400));
    f.dram.sizes.lock().plugged_bytes = 64 * MIB;
    assert_eq!(shown(&f), ([64, 64], ResizeStatus::Reached));
}

/// Without reports, all zones together are limited to 8 times the boot memory.
#[test]
fn device_receives_a_size_without_room_for_its_descriptors() {
    let mut f = fixture("off", true);
    f.dram.sizes.lock().max_bytes = 8192 * MIB;
    f.core.resize_zone("dram", 4096 * MIB, TimeMs(0)).unwrap();
    (1..20).for_each(|second| f.core.tick(TimeMs(second * 1_000)));
    let sizes = f.dram.sizes();
    assert_eq!(
        (sizes.plugged_bytes, sizes.held_bytes),
        (8 * BOOT_BYTES, 4096 * MIB - 8 * BOOT_BYTES)
    );
    assert_eq!(*f.dram.reported_held.lock(), 1);
}

/// Balloon whose driver sends the same statistics at every request.
struct FakeBalloon(Mutex<u64>);

impl BalloonSource for FakeBalloon {
    fn request_statistics(&self) {
        *self.0.lock() += 1;
    }
    fn state(&self) -> BalloonState {
        let number = *self.0.lock();
        let statistics =
            Statistics::default().with(Tag::Total, 300 * MIB).with(Tag::Free, 90 * MIB);
        let statistics = statistics.with(Tag::SwapIn, 0);
        let sample = (number > 0).then_some(Sample { statistics, number, driver_generation: 1 });
        BalloonState { sample, ..BalloonState::default() }
    }
}

#[test]
fn balloon_sends_statistics_until_an_agent_reports() {
    let mut f = fixture("off", true);
    let balloon = Arc::new(FakeBalloon(Mutex::new(0)));
    f.core = f.core.with_statistics(Arc::clone(&balloon) as _, Onlining::CommandLine);
    (0..3).for_each(|second| f.core.tick(TimeMs(second * 1_000)));
    assert_eq!(*balloon.0.lock(), 3);
    let details = |f: &Fixture| f.core.info(0, TimeMs(3_000)).details;
    assert_eq!(
        (&details(&f)["source"], &details(&f)["reports"]),
        (&json!("statistics"), &json!(2))
    );
    f.seq = 60;
    f.greet();
    f.report(200);
    assert_eq!(details(&f)["source"], "agent");
}

#[test]
fn decision_is_shown_with_input_and_outcome() {
    let mut f = fixture("psi", true);
    f.greet();
    f.report(20);
    f.core.tick(TimeMs(f.seq * 50 + 7));
    let info = f.core.info(DECISIONS_SHOWN, TimeMs(f.seq * 50 + 7));
    assert_eq!(
        (info.agent, &info.details["watermark_of"]),
        (AgentState::Live, &json!("available"))
    );
    let grow = info.decisions.iter().find(|decision| decision.direction == "grow").unwrap();
    assert_eq!(grow.outcome, Outcome::Reached { after_ms: 7 });
    assert_eq!(grow.policy, "psi");
    let report = grow.input.report.as_ref().unwrap();
    assert_eq!((report.seq, report.age_ms, report.available_bytes), (1, 0, 20 * MIB));
    assert_eq!(grow.input.zones[0].plugged_bytes, 0);
    let dram = f.dram.sizes().requested_bytes;
    assert_eq!((grow.targets[0].zone.as_str(), grow.targets[0].requested_bytes), ("dram", dram));
    assert_eq!(
        grow.change_bytes,
        grow.targets.iter().map(|target| target.requested_bytes).sum::<u64>()
    );
    assert!(f.core.info(0, TimeMs(100)).decisions.is_empty());
}

#[test]
fn pause_is_idempotent_and_keeps_pins() {
    let mut f = fixture("psi", true);
    let is_paused = |f: &Fixture| f.core.info(0, TimeMs(0)).paused;
    let pinned = |f: &Fixture| f.core.info(0, TimeMs(0)).pinned_zones;
    (0..2).for_each(|_| f.change(json!({"pause": true})).unwrap());
    assert!(is_paused(&f) && f.core.sample(TimeMs(0)).paused);
    // Resuming a zone does not end a pause of the governor, and ending that pause does not resume a
    // zone.
    f.core.resize_zone("pm", 2 * MIB, TimeMs(0)).unwrap();
    f.change(json!({"resume": true, "zone": "dram"})).unwrap();
    assert!(is_paused(&f));
    (0..2).for_each(|_| f.change(json!({"pause": false})).unwrap());
    assert_eq!((is_paused(&f), pinned(&f)), (false, vec!["pm".to_owned()]));
    f.change(json!({"resume": true, "zone": "pm"})).unwrap();
    assert!(pinned(&f).is_empty());
    let error = f.change(json!({"pause": true, "resume": true, "zone": "nvram"})).unwrap_err();
    assert!(error.contains("nvram"), "{error}");
    assert!(!is_paused(&f), "a refused change has no effect");
}

#[test]
fn initial_pause_and_dry_run_are_shown() {
    let config = PressureConfig { paused: true, dry_run: true, ..Default::default() };
    let mut core = core(&config, Vec::new());
    let info = core.info(0, TimeMs(0));
    assert!(info.paused && info.dry_run);
    let resume = serde_json::from_value(json!({"resume": true})).unwrap();
    core.change(&resume, TimeMs(0)).unwrap();
    assert!(!core.info(0, TimeMs(0)).paused);
}

#[test]
fn change_of_parameters_is_atomic() {
    let mut f = fixture("psi", true);
    let details = |f: &Fixture| f.core.info(0, TimeMs(0)).details;
    let params = json!({"idle": "9s", "min_headroom": 64 * MIB});
    let rules = json!({"cool_down": "2s", "floor": 1152 * MIB});
    f.change(json!({"params": params, "rules": rules})).unwrap();
    let before = details(&f);
    let (params, rules) = (&before["params"], &before["rules"]);
    assert_eq!((&params["idle"], &rules["cool_down"]), (&json!(9_000), &json!(2_000)));
    assert_eq!((&params["min_headroom"], &params["stall"]), (&json!(64 * MIB), &json!(100)));
    for (wrong, message) in [
        (
            json!({"params": {"idle": "1s"}, "rules": {"cool_down": "1ms"}}),
            "cool_down is 1ms, must be 100ms to 24h",
        ),
        (
            json!({"params": {"idle": "1ms"}, "rules": {"cool_down": "1s"}}),
            "idle is 1ms, must be 100ms to 24h",
        ),
        (
            json!({"rules": {"max_cool_down": "1s"}}),
            "max_cool_down is 1s, must be at least cool_down, which is 2s",
        ),
        (
            json!({"policy": "amf", "rules": {"moon": 1}}),
            r#"parameter "moon" is unknown; parameters of the rules: floor"#,
        ),
        (
            json!({"policy": "magic"}),
            r#"vm.pressure: policy="magic" is not one of the policies psi, "#,
        ),
        (json!({"policy": "fixed", "size": 1}), "vm.pressure: size is 1, must be a multiple of 2M"),
        (json!({"policy": "fixed"}), "vm.pressure: size= is missing: policy=fixed needs it"),
        // Larger than the sum of all zones.
        (
            json!({"dry_run": true, "rules": {"floor": 1152 * MIB + BLOCK, "cool_down": "3s"}}),
            "floor is 1154M, must be at most 1152M, the maximum of all zones together",
        ),
        (
            json!({"pause": true, "policy": "fixed", "size": 2048 * MIB}),
            "size is 2G, must be at most 1152M, the maximum of all zones together",
        ),
        // The value is in the range of the parameter, but conflicts with another parameter.
        (
            json!({"rules": {"ceiling": "1G"}}),
            "ceiling is 1G, must be at least floor, which is 1152M",
        ),
        (
            json!({"params": {"idle": "31s"}}),
            "max_idle is 30s, must be at least idle, which is 31s",
        ),
    ] {
        let error = f.change(wrong).unwrap_err();
        assert!(error.starts_with(message), "{error}");
        let info = f.core.info(0, TimeMs(0));
        assert_eq!((info.policy.as_str(), info.dry_run, info.paused), ("psi", false, false));
        assert_eq!(info.details, before);
    }
    // A new policy starts with its default parameters, and the rules do not change.
    f.change(json!({"policy": "amf", "params": {"reclaim": 50}})).unwrap();
    let expected = json!({"watermark-scale": 1024, "watermark-share": 0, "reclaim": 50});
    assert_eq!((&details(&f)["params"], &details(&f)["rules"]), (&expected, rules));
}

#[test]
fn zones_of_one_node_share_its_online_memory() {
    let mut fixture = fixture("off", true);
    let pm = &mut Arc::get_mut(&mut fixture.core.devices.zones.0).unwrap()[1];
    (pm.guest_numa_node, pm.boot_bytes) = (0, 384 * MIB);
    fixture.dram.request(64 * MIB);
    fixture.pm.request(32 * MIB);
    fixture.greet();
    let online = |fixture: &Fixture| {
        ["dram", "pm"].map(|id| fixture.core.zone_state(id, TimeMs(0)).online_bytes)
    };
    assert_eq!(online(&fixture), [None, None]);
    // The agent reports 64 MiB on node 0 in addition to the boot memory.
    fixture.report(200);
    assert_eq!(online(&fixture), [Some(64 * MIB), Some(0)]);
    fixture.dram.request(48 * MIB);
    assert_eq!(online(&fixture), [Some(48 * MIB), Some(16 * MIB)]);
}

#[test]
fn online_memory_of_ungoverned_zone_is_from_report() {
    let mut fixture = fixture("off", true);
    fixture.dram.request(128 * MIB);
    fixture.greet();
    assert_eq!(fixture.core.online_beside_boot(0, 384 * MIB), None);
    fixture.report(200);
    for (node, boot_mib, online_mib) in
        [(0, 384, 128), (0, 257, 128), (0, 385, 0), (0, 4096, 0), (7, 384, 0)]
    {
        let online = fixture.core.online_beside_boot(node, boot_mib * MIB);
        assert_eq!(online, Some(online_mib * MIB), "{boot_mib} MiB of node {node}");
    }
}

#[test]
fn states_of_zones_come_in_the_order_of_the_query() {
    let mut f = fixture("off", true);
    f.dram.request(128 * MIB);
    f.pm.request(64 * MIB);
    f.greet();
    f.report(200);
    let query = |id: &str, has_dimms| ZoneQuery {
        id: id.to_owned(),
        guest_node: 0,
        boot_bytes: 384 * MIB,
        has_dimms,
    };
    let queries = [query("memory", true), query("pm", false), query("dram", false)];
    let states = f.core.zone_states(&queries, TimeMs(50)).into_iter();
    let shown: Vec<_> = states
        .map(|ZoneState { online_bytes, recallable_bytes, resize }| {
            let resize = resize.map(|resize| (resize.sizes.plugged_bytes, resize.status));
            (online_bytes, recallable_bytes, resize)
        })
        .collect();
    let reached = |bytes| Some((bytes, ResizeStatus::Reached));
    let expected = [(128, 0, None), (64, 64, reached(64 * MIB)), (128, 0, reached(128 * MIB))];
    assert_eq!(
        shown,
        expected.map(|(online_mib, recallable_mib, resize)| {
            (Some(online_mib * MIB), recallable_mib * MIB, resize)
        })
    );
}

#[test]
fn sizes_are_requested_before_notes_are_written() {
    /// Large enough for the header and the first sizes, but not for a report.
    const RECORD_BYTES: u64 = 600;
    const LOGGED: [&str; 4] = ["is online", "has reached the requested size", "recording", "Plan"];
    let mut f = fixture("psi", false);
    // The end of the recording is logged when the next line is written to it.
    let target = Target { path: "/trace".into(), file: std::io::sink(), max_bytes: RECORD_BYTES };
    f.core = f.core.record(target, "db", TimeMs(0)).unwrap();
    // Events in order, each with the requested size at that time.
    let noted = Arc::<Mutex<Vec<_>>>::default();
    let (dram, log) = (Arc::clone(&f.dram), Arc::clone(&noted));
    let note = move |what| log.lock().push((what, dram.sizes.lock().requested_bytes));
    let took = || {
        note("took");
        Duration::from_millis(3)
    };
    let heard = note.clone();
    let heard =
        move |line: &str| LOGGED.into_iter().filter(|what| line.contains(what)).for_each(&heard);
    with_log(heard, || {
        f.core.agent_connected(TimeMs(0));
        f.core.line(&hello(), TimeMs(0), took);
        assert_eq!(noted.lock().split_off(0), [], "a hello leads to no plan");
        f.core.line(&report(1, 20, [0, 0]), TimeMs(50), took);
        let size_bytes = f.dram.sizes().requested_bytes;
        assert!(size_bytes > 0);
        let expect = |expected: &[&'static str]| {
            let expected: Vec<_> = expected.iter().map(|what| (*what, size_bytes)).collect();
            assert_eq!(noted.lock().split_off(0), expected);
        };
        expect(&["took", "recording", "Plan"]);
        f.core.tick(TimeMs(60));
        f.dram.sizes.lock().plugged_bytes = size_bytes;
        noted.lock().clear();
        f.core.line(&report(2, 20 + size_bytes / MIB, [size_bytes, 0]), TimeMs(100), took);
        expect(&["took", "is online"]);
        f.core.tick(TimeMs(1_100));
        // Progress counts only after the memory has been plugged for 1 s.
        expect(&["has reached the requested size"]);
    });
    let sample = f.core.sample(TimeMs(100));
    let quick = sample.report_to_plan;
    assert_eq!((quick.count(), quick.sum_ns), (2, 6_000_000), "reports, and nothing else");
    assert_eq!(sample.report_to_online.count(), 1);
    assert_eq!(f.core.info(0, TimeMs(100)).details["report_to_online_ms"], 50);
}

#[test]
fn steps_towards_a_clients_size_are_requested_before_the_plan_is_logged() {
    let mut f = fixture("off", true);
    f.greet();
    // The guest has room for the page descriptors of only part of its PM.
    let mut line = report(1, 16, [0, 0]);
    line["zones"][0]["free_pages"] = 4_500.into();
    line["memory"]["free_bytes"] = (4_500 * 4096).into();
    f.line(&line);
    f.core.resize_zone("pm", 1024 * MIB, TimeMs(60)).unwrap();
    let before = f.pm.sizes();
    assert!(before.held_bytes > 0);
    let size_bytes = before.requested_bytes + 64 * MIB;
    f.change(json!({"policy": "fixed", "size": size_bytes})).unwrap();
    let at_plan = Arc::<Mutex<Vec<u64>>>::default();
    let (pm, sizes) = (Arc::clone(&f.pm), Arc::clone(&at_plan));
    let requested = move || pm.sizes().requested_bytes;
    let heard = move |line: &str| sizes.lock().extend(line.contains(" Plan ").then(&requested));
    f.seq = 1;
    with_log(heard, || f.report(200));
    let after = f.pm.sizes().requested_bytes;
    assert!(after > before.requested_bytes, "there is room for more");
    assert_eq!(*at_plan.lock(), [after]);
}

#[test]
fn view_shares_decisions_and_keeps_their_state() {
    let mut f = fixture("psi", false);
    f.greet();
    f.report(20);
    let view = f.core.view(MAX_DECISIONS, TimeMs(50));
    let again = f.core.view(MAX_DECISIONS, TimeMs(50));
    assert!(view.shares_decisions_with(&again));
    for device in [&f.dram, &f.pm] {
        let mut sizes = device.sizes.lock();
        sizes.plugged_bytes = sizes.requested_bytes;
    }
    f.core.tick(TimeMs(60));
    let outcome = |info: PressureInfo| info.decisions.last().unwrap().outcome.clone();
    let reached = outcome(f.core.info(MAX_DECISIONS, TimeMs(60)));
    assert!(matches!(reached, Outcome::Reached { after_ms: 10 }), "{reached:?}");
    assert_eq!(outcome(view.info()), Outcome::Pending { moved_bytes: 0 });
}

#[test]
fn tick_calls_its_listener_with_the_time() {
    let mut f = fixture("off", true);
    let times = Arc::<Mutex<Vec<TimeMs>>>::default();
    let heard = Arc::clone(&times);
    f.core = f.core.on_tick(Box::new(move |now| heard.lock().push(now)));
    f.core.tick(TimeMs(500));
    f.greet();
    f.core.tick(TimeMs(1_000));
    assert_eq!(*times.lock(), [TimeMs(500), TimeMs(1_000)]);
}

#[test]
fn low_space_for_volumes_shrinks_pm() {
    let mut f = fixture("psi", true);
    let free_bytes = Arc::new(Mutex::new(256 * MIB));
    let free = Arc::clone(&free_bytes);
    f.core = f.core.with_storage(Some(Arc::new(move || StorageSpace {
        free_bytes: *free.lock(),
        needed_bytes: 1024 * MIB,
        low_bytes: 64 * MIB,
        high_bytes: 128 * MIB,
        ..StorageSpace::default()
    })));
    {
        let mut pm = f.pm.sizes.lock();
        (pm.requested_bytes, pm.plugged_bytes) = (512 * MIB, 512 * MIB);
    }
    f.core.tick(TimeMs(500));
    assert_eq!(f.pm.sizes().plugged_bytes, 512 * MIB);
    *free_bytes.lock() = 28 * MIB;
    f.core.tick(TimeMs(1_000));
    assert_eq!(f.pm.sizes().plugged_bytes, 412 * MIB);
    let plans = f.core.counters().plans.keys();
    assert!(plans.into_iter().any(|plan| *plan == ("psi", "shrink", "storage_low")));
}
