//! The governor against devices that do as they are told, or do not.

use std::sync::Arc;

use balloon::controller::ResizeStatus;
use balloon::{DriverState, ZoneSizes};
use parking_lot::Mutex;
use serde_json::json;

use super::*;
use crate::governor::ZoneDevice;
use crate::governor::fake::{BLOCK, FakeDevice, Fixture, MIB, fixture, hello, report};
use crate::governor::info::{PressureChange, PressureInfo};
use crate::vm::decision::{DECISIONS_KEPT, DECISIONS_SHOWN, Outcome};

#[test]
fn a_guest_that_fills_gets_dram_first_and_then_pm() {
    let mut f = fixture("psi", false, true);
    f.greet();
    for available in [200, 150, 100, 60] {
        f.report(available);
    }
    assert_eq!(f.core.counters().refused.len(), 0, "{:?}", f.core.counters().refused);
    assert_eq!(f.dram.sizes().plugged_bytes, 128 * MIB);
    for available in [60, 40, 30] {
        f.report(available);
    }
    assert!(f.pm.sizes().plugged_bytes > 0);
    let grows: u64 = f
        .core
        .governor
        .counters()
        .plans
        .iter()
        .filter(|(key, _)| key.1 == "grow")
        .map(|(_, n)| n)
        .sum();
    assert!(grows > 0);
    assert_eq!(f.core.online_bytes("dram"), Some(128 * MIB));
}

#[test]
fn sizes_of_a_zone_are_read_once_per_report() {
    let mut f = fixture("psi", false, true);
    f.greet();
    for available in [200, 20] {
        let line = report(f.seq + 1, available, [0, 0]);
        f.seq += 1;
        let before = [&f.dram, &f.pm].map(|device| *device.reads.lock());
        f.line(&line);
        assert_eq!(
            [&f.dram, &f.pm].map(|device| *device.reads.lock()),
            before.map(|reads| reads + 1)
        );
    }
    assert!(f.core.counters().plans.keys().any(|key| key.1 == "grow"));
}

#[test]
fn dry_run_decides_and_asks_nobody() {
    let mut f = fixture("psi", true, true);
    f.greet();
    for available in [100, 50, 20, 20] {
        f.report(available);
    }
    assert!(f.core.counters().plans.keys().any(|key| key.1 == "grow"));
    assert_eq!(f.dram.sizes().requested_bytes, 0);
    assert!(f.core.info(DECISIONS_SHOWN, TimeMs(0)).dry_run);
}

#[test]
fn off_takes_reports_and_does_nothing() {
    let mut f = fixture("off", false, true);
    f.greet();
    for available in [100, 50, 20, 5] {
        f.report(available);
    }
    assert_eq!(f.core.counters().reports, 4);
    assert_eq!(f.dram.sizes().requested_bytes, 0);
}

#[test]
fn a_resize_by_hand_pins_its_zone_until_the_governor_is_resumed() {
    let mut f = fixture("psi", false, true);
    f.greet();
    f.core.resize_zone("dram", 64 * MIB, TimeMs(0)).unwrap();
    assert_eq!(f.core.info(DECISIONS_SHOWN, TimeMs(0)).pinned_zones, ["dram"]);
    for available in [60, 30, 20] {
        f.report(available);
    }
    assert_eq!(f.dram.sizes().requested_bytes, 64 * MIB);
    assert!(f.pm.sizes().requested_bytes > 0);
    f.core.change(&PressureChange { resume: Some(true), ..Default::default() }, TimeMs(0)).unwrap();
    for available in [20, 20, 20] {
        f.report(available);
    }
    assert_eq!(f.dram.sizes().requested_bytes, 128 * MIB);
}

#[test]
fn resizes_out_of_bounds_change_nothing() {
    let mut f = fixture("psi", false, true);
    for (zone, bytes) in [("dram", 129 * MIB), ("dram", 130 * MIB), ("dram", MIB), ("nvram", BLOCK)]
    {
        let refused = f.core.resize_zone(zone, bytes, TimeMs(0)).unwrap_err();
        let is_of_request = !matches!(
            refused,
            GovernorError::NotResizable { reason: ResizeTargetError::UnsupportedDriver, .. }
        );
        assert!(is_of_request, "{zone} {bytes}: {refused}");
    }
    let text = |core: &mut Core, bytes| {
        core.resize_zone("dram", bytes, TimeMs(0)).unwrap_err().to_string()
    };
    assert_eq!(
        text(&mut f.core, 130 * MIB),
        "Zone \"dram\" cannot be resized: 130 MiB is above the maximum of 128 MiB"
    );
    let not_multiple =
        "Zone \"dram\" cannot be resized: 1 MiB is not a multiple of its block size, 2 MiB";
    assert_eq!(text(&mut f.core, MIB), not_multiple);
    assert!(f.core.info(DECISIONS_SHOWN, TimeMs(0)).pinned_zones.is_empty());
    assert_eq!(f.dram.sizes().requested_bytes, 0);
}

#[test]
fn a_guest_that_does_not_follow_is_reminded_and_the_status_says_why() {
    let mut f = fixture("off", false, false);
    f.core.resize_zone("dram", 64 * MIB, TimeMs(0)).unwrap();
    f.core.tick(TimeMs(1000));
    assert_eq!(f.core.resize_status("dram", TimeMs(1000)), Some(ResizeStatus::Pending));
    f.core.tick(TimeMs(6000));
    assert!(matches!(f.core.resize_status("dram", TimeMs(6000)), Some(ResizeStatus::Stuck(_))));
    assert_eq!(*f.dram.reminders.lock(), 1);
    f.dram.sizes.lock().driver = DriverState::Absent;
    f.core.tick(TimeMs(12_000));
    assert_eq!(f.core.resize_status("dram", TimeMs(20_000)), Some(ResizeStatus::NoDriver));
    assert_eq!(f.core.resize_status("nvram", TimeMs(0)), None);
}

#[test]
fn a_dry_run_reminds_the_guest_of_nothing_but_what_a_hand_has_asked_for() {
    let mut f = fixture("psi", false, false);
    f.greet();
    f.report(20);
    let reminders = |f: &Fixture| (*f.dram.reminders.lock(), *f.pm.reminders.lock());
    f.core
        .change(&PressureChange { dry_run: Some(true), ..Default::default() }, TimeMs(0))
        .unwrap();
    assert!(f.dram.sizes().requested_bytes > 0);
    f.core.resize_zone("pm", 64 * MIB, TimeMs(1_000)).unwrap();
    f.core.tick(TimeMs(60_000));
    assert_eq!(reminders(&f), (0, 1));
}

#[test]
fn a_driver_that_loads_late_is_asked_with_the_next_report() {
    let mut f = fixture("psi", false, false);
    for device in [&f.dram, &f.pm] {
        device.sizes.lock().driver = DriverState::Absent;
    }
    f.greet();
    let asked = |f: &Fixture| f.dram.sizes().requested_bytes + f.pm.sizes().requested_bytes;
    // Short all the time; the governor has tried, and tries ever more rarely.
    let mut quiet_s = 0;
    for _ in 0..200 {
        f.seq += 19;
        f.report(20);
        quiet_s = if asked(&f) == 0 { quiet_s + 1 } else { 0 };
        if quiet_s == 3 {
            break;
        }
    }
    assert_eq!(quiet_s, 3, "it is asked all the time");
    f.dram.sizes.lock().driver = DriverState::Ready;
    // What the device's news lead to, and the agent's next report.
    f.core.tick(TimeMs(f.seq * 50 + 1));
    f.report(20);
    assert!(
        f.dram.sizes().requested_bytes > 0,
        "{:?}",
        f.core.info(1, TimeMs(f.seq * 50)).decisions
    );
    assert_eq!(f.pm.sizes().requested_bytes, 0, "which has no driver yet");
}

#[test]
fn a_zone_that_has_no_driver_does_not_keep_a_short_guest_waiting() {
    let mut f = fixture("psi", false, true);
    f.dram.sizes.lock().driver = DriverState::Absent;
    f.greet();
    for _ in 0..4 {
        f.report(20);
    }
    let pm = f.pm.sizes();
    assert!(
        pm.requested_bytes > 0,
        "nothing in 200 ms: {:?}",
        f.core.info(4, TimeMs(f.seq * 50)).decisions
    );
    assert_eq!(pm.requested_bytes, pm.plugged_bytes);
    assert_eq!(f.dram.sizes().requested_bytes, 0, "PM has room");
    // With a driver, it is the first again.
    f.dram.sizes.lock().driver = DriverState::Ready;
    for _ in 0..4 {
        f.report(20);
    }
    assert!(f.dram.sizes().plugged_bytes > 0);
    // One that goes with a request under way leaves that to others.
    let mut f = fixture("psi", false, false);
    f.greet();
    f.report(20);
    assert!(f.dram.sizes().requested_bytes > 0);
    f.dram.sizes.lock().driver = DriverState::Absent;
    f.report(20);
    assert!(f.pm.sizes().requested_bytes > 0);
}

#[test]
fn a_driver_that_comes_and_goes_all_the_time_is_given_up() {
    let mut f = fixture("psi", false, false);
    f.greet();
    // It is short all the time, takes nothing, and resets its devices every second.
    let (mut owed, mut given_up) = (0, 0);
    for round in 0..240 {
        for device in [&f.dram, &f.pm] {
            device.sizes.lock().driver =
                if round % 2 == 0 { DriverState::Ready } else { DriverState::Absent };
        }
        f.seq += 19;
        f.report(20);
        f.core.tick(TimeMs(f.seq * 50 + 1));
        let asked = f.dram.sizes().requested_bytes + f.pm.sizes().requested_bytes;
        if asked >= 32 * MIB {
            owed += 1;
        } else {
            given_up += 1;
        }
    }
    assert!(given_up > owed, "{owed} s of 240 much of the pool is owed to it");
}

#[test]
fn a_resize_that_the_host_cannot_provide_is_stuck_until_it_is_asked_for_again() {
    let mut f = fixture("off", false, true);
    *f.pm.can_provide.lock() = 24 * MIB;
    f.core.resize_zone("pm", 64 * MIB, TimeMs(0)).unwrap();
    f.core.tick(TimeMs(500));
    let status = |f: &Fixture| f.core.resize_status("pm", TimeMs(500)).unwrap();
    let ResizeStatus::Stuck(reason) = status(&f) else { panic!("{:?}", status(&f)) };
    assert!(
        reason.starts_with("pool-full: ") && reason.contains(&(64 * MIB).to_string()),
        "{reason}"
    );
    assert_eq!(f.pm.sizes().plugged_bytes, 24 * MIB);
    // What there is, asked for by hand, is a resize that is reached.
    f.core.resize_zone("pm", 24 * MIB, TimeMs(500)).unwrap();
    assert_eq!(status(&f), ResizeStatus::Reached);
    f.core.resize_zone("pm", 64 * MIB, TimeMs(500)).unwrap();
    assert!(matches!(status(&f), ResizeStatus::Stuck(_)));
    *f.pm.can_provide.lock() = u64::MAX;
    f.core.resize_zone("pm", 64 * MIB, TimeMs(500)).unwrap();
    assert_eq!(status(&f), ResizeStatus::Reached);
    assert_eq!(f.pm.sizes().plugged_bytes, 64 * MIB);
}

/// Without reports, the page descriptors of eight times the boot memory have room.
#[test]
fn request_without_room_for_its_descriptors_is_reported_once() {
    let mut f = fixture("off", false, true);
    f.dram.sizes.lock().max_bytes = 8192 * MIB;
    let mut now_ms = 0;
    for round in 1..=2 {
        f.core.resize_zone("dram", 4096 * MIB, TimeMs(now_ms)).unwrap();
        for _ in 0..20 {
            now_ms += 1_000;
            f.core.tick(TimeMs(now_ms));
        }
        assert_eq!(f.dram.sizes().plugged_bytes, 8 * 384 * MIB);
        assert_eq!(f.dram.sizes().held_bytes, (4096 - 8 * 384) * MIB);
        assert_eq!(*f.dram.reported_held.lock(), round);
        f.core.resize_zone("dram", 0, TimeMs(now_ms)).unwrap();
    }
}

/// DRAM that its host does not have must not keep the guest from PM, nor its host busy.
#[test]
fn what_the_host_cannot_provide_is_asked_of_another_tier_and_not_all_the_time() {
    let mut f = fixture("psi", false, true);
    f.dram.sizes.lock().max_bytes = 8192 * MIB;
    *f.dram.can_provide.lock() = 0;
    f.greet();
    for _ in 0..200 {
        f.report(20);
    }
    assert_eq!(f.dram.sizes().plugged_bytes, 0);
    assert_eq!(f.pm.sizes().plugged_bytes, 1024 * MIB, "{:?}", f.core.counters().plans);
    let info = f.core.info(DECISIONS_KEPT, TimeMs(f.seq * 50));
    assert!(info.decisions_total < 20, "{:?}", f.core.counters().plans);
    assert!(
        f.core.counters().plans.keys().any(|key| key.2 == "host_short"),
        "{:?}",
        f.core.counters().plans
    );
    // What came from PM ends the wait: it is not waited for twice.
    assert!(f.core.sample(TimeMs(f.seq * 50)).report_to_online.count() >= 1);
    // What the host has again is asked for again.
    *f.dram.can_provide.lock() = 256 * MIB;
    for _ in 0..70 {
        f.seq += 19;
        f.report(20);
    }
    assert_eq!(f.dram.sizes().plugged_bytes, 256 * MIB, "{:?}", f.core.counters().plans);
}

#[test]
fn the_time_from_the_first_report_to_the_memory_being_online_is_measured() {
    let mut f = fixture("psi", false, true);
    f.greet();
    for available in [100, 60, 60, 200] {
        f.report(available);
    }
    assert_eq!(f.core.sample(TimeMs(0)).report_to_online.count(), 1);
    assert!(f.core.info(DECISIONS_SHOWN, TimeMs(0)).details.contains_key("report_to_online_ms"));
}

#[test]
fn what_has_not_left_yet_is_not_waited_for() {
    let mut f = fixture("off", false, false);
    f.greet();
    let fixed = |f: &mut Fixture, size| {
        let size = Some(size);
        f.core
            .change(
                &PressureChange { policy: Some("fixed".to_owned()), size, ..Default::default() },
                TimeMs(0),
            )
            .unwrap();
    };
    // The guest was asked for half of what it has, and has given nothing of it when it is asked for
    // more again.
    *f.dram.sizes.lock() =
        ZoneSizes { requested_bytes: 64 * MIB, plugged_bytes: 128 * MIB, ..f.dram.sizes() };
    fixed(&mut f, 96 * MIB);
    f.report(200);
    assert_eq!(f.dram.sizes().requested_bytes, 96 * MIB);
    f.report(200);
    assert_eq!(f.core.sample(TimeMs(0)).report_to_online.count(), 0);
    // Of the next 64 MiB a half is there.
    fixed(&mut f, 160 * MIB);
    f.report(200);
    assert_eq!(f.pm.sizes().requested_bytes, 32 * MIB);
    f.pm.sizes.lock().plugged_bytes = 32 * MIB;
    f.report(200);
    assert_eq!(f.core.sample(TimeMs(0)).report_to_online.count(), 1);
}

#[test]
fn an_unknown_policy_is_refused_and_the_old_one_stays() {
    let mut f = fixture("psi", false, true);
    let change = PressureChange { policy: Some("magic".to_owned()), ..Default::default() };
    let error = f.core.change(&change, TimeMs(0)).unwrap_err().to_string();
    assert!(error.contains("magic") && error.contains("psi"), "{error}");
    assert_eq!(f.core.info(DECISIONS_SHOWN, TimeMs(0)).policy, "psi");
}

#[test]
fn fixed_keeps_its_size_without_an_agent_and_takes_another_one() {
    let mut f = fixture("off", false, true);
    let change =
        |size| PressureChange { policy: Some("fixed".to_owned()), size, ..Default::default() };
    f.core.change(&change(Some(128 * MIB + 64 * MIB)), TimeMs(0)).unwrap();
    f.core.tick(TimeMs(1000));
    assert_eq!(f.dram.sizes().requested_bytes, 128 * MIB);
    assert_eq!(f.pm.sizes().requested_bytes, 64 * MIB);
    for bad in [Some(1), None] {
        f.core.change(&change(bad), TimeMs(0)).expect_err(&format!("{bad:?}"));
    }
    f.core.change(&change(Some(0)), TimeMs(0)).unwrap();
    f.core.tick(TimeMs(60_000));
    assert!(f.pm.sizes().requested_bytes < 64 * MIB);
}

#[test]
fn the_audit_is_bounded_numbered_and_newest_first() {
    let mut f = fixture("off", true, true);
    f.greet();
    for round in 0..2 * DECISIONS_KEPT as u64 {
        let size = Some((1 + round % 2) * 64 * MIB);
        let change =
            PressureChange { policy: Some("fixed".to_owned()), size, ..Default::default() };
        f.core.change(&change, TimeMs(0)).unwrap();
        // A dry run says once a second what it comes to.
        f.seq += 20;
        f.report(300);
    }
    let info = f.core.info(DECISIONS_KEPT, TimeMs(f.seq * 50));
    assert!(
        info.decisions_total > DECISIONS_KEPT as u64,
        "{} decisions show nothing",
        info.decisions_total
    );
    assert_eq!(info.decisions.len(), DECISIONS_KEPT);
    assert_eq!(info.decisions[0].seq, info.decisions_total);
    assert!(info.decisions.iter().map(|decision| decision.age_ms).is_sorted());
    assert!(info.decisions.windows(2).all(|pair| pair[0].seq == pair[1].seq + 1));
    assert_eq!(f.core.info(3, TimeMs(f.seq * 50)).decisions.len(), 3);
}

#[test]
fn a_decision_is_shown_with_what_it_was_made_upon_and_what_came_of_it() {
    let mut f = fixture("psi", false, true);
    f.greet();
    f.report(20);
    f.core.tick(TimeMs(f.seq * 50 + 7));
    let info = f.core.info(DECISIONS_SHOWN, TimeMs(f.seq * 50 + 7));
    let grow = info.decisions.iter().find(|decision| decision.direction == "grow").unwrap();
    assert_eq!(grow.outcome, Outcome::Reached { after_ms: 7 });
    assert_eq!(grow.policy, "psi");
    let report = grow.input.report.as_ref().unwrap();
    assert_eq!((report.seq, report.age_ms, report.available_bytes), (1, 0, 20 * MIB));
    assert_eq!(grow.input.zones[0].plugged_bytes, 0);
    let dram = f.dram.sizes().requested_bytes;
    assert_eq!((grow.targets[0].zone.as_str(), grow.targets[0].requested_bytes), ("dram", dram));
    assert_eq!(
        grow.asked_bytes,
        grow.targets.iter().map(|target| target.requested_bytes).sum::<u64>()
    );
}

#[test]
fn a_pause_holds_everything_until_it_is_ended_and_may_be_repeated() {
    let mut f = fixture("psi", false, true);
    f.greet();
    let pause = |pause| PressureChange { pause: Some(pause), ..Default::default() };
    for _ in 0..2 {
        f.core.change(&pause(true), TimeMs(0)).unwrap();
    }
    for available in [60, 30, 20] {
        f.report(available);
    }
    assert_eq!(f.dram.sizes().requested_bytes, 0);
    let info = f.core.info(DECISIONS_SHOWN, TimeMs(0));
    assert!(info.paused && f.core.sample(TimeMs(0)).paused);
    assert_eq!((info.decisions[0].reason.as_str(), info.decisions[0].times), ("paused", 3));
    // A zone that is resumed does not end the pause, and the end of the pause resumes no zone.
    f.core.resize_zone("pm", 2 * MIB, TimeMs(0)).unwrap();
    let zone = |id: &str| PressureChange {
        resume: Some(true),
        zone: Some(id.to_owned()),
        ..Default::default()
    };
    f.core.change(&zone("dram"), TimeMs(0)).unwrap();
    assert!(f.core.info(0, TimeMs(0)).paused);
    for _ in 0..2 {
        f.core.change(&pause(false), TimeMs(0)).unwrap();
    }
    assert_eq!(f.core.info(0, TimeMs(0)).pinned_zones, ["pm"]);
    f.report(20);
    assert_eq!(f.dram.sizes().requested_bytes, 128 * MIB);
    f.core.change(&zone("pm"), TimeMs(0)).unwrap();
    assert!(f.core.info(0, TimeMs(0)).pinned_zones.is_empty());
    let error = f
        .core
        .change(&PressureChange { pause: Some(true), ..zone("nvram") }, TimeMs(0))
        .unwrap_err();
    assert!(error.to_string().contains("nvram"), "{error}");
    assert!(!f.core.info(0, TimeMs(0)).paused, "what is refused changes nothing");
}

#[test]
fn a_machine_that_is_built_paused_is_paused() {
    let config = PressureConfig { paused: true, ..Default::default() };
    let mut core = Core::new(&config, Vec::new(), 384 * MIB, Arc::new(|| 0), TimeMs(0)).unwrap();
    assert!(core.info(0, TimeMs(0)).paused);
    core.change(&PressureChange { resume: Some(true), ..Default::default() }, TimeMs(0)).unwrap();
    assert!(!core.info(0, TimeMs(0)).paused);
}

#[test]
fn a_driver_that_is_not_up_is_shown() {
    let f = fixture("psi", false, true);
    f.pm.sizes.lock().driver = DriverState::Absent;
    let zones = f.core.info(0, TimeMs(0)).zones;
    let ready: Vec<_> = zones.iter().map(|zone| (zone.id.as_str(), zone.driver_ready)).collect();
    assert_eq!(ready, [("dram", true), ("pm", false)]);
}

/// A change with these parameters, as a client writes it.
fn change(json: serde_json::Value) -> PressureChange {
    serde_json::from_value(json).unwrap()
}

#[test]
fn parameters_are_changed_by_name_all_or_none() {
    let mut f = fixture("psi", false, true);
    let set =
        json!({"params": {"idle": "9s", "min_headroom": 67_108_864}, "rules": {"cool_down": "2s"}});
    f.core.change(&change(set), TimeMs(0)).unwrap();
    let details = f.core.info(DECISIONS_SHOWN, TimeMs(0)).details;
    assert_eq!(
        (&details["params"]["idle"], &details["rules"]["cool_down"]),
        (&json!(9_000), &json!(2_000))
    );
    assert_eq!(
        (&details["params"]["min_headroom"], &details["params"]["stall"]),
        (&json!(64 * MIB), &json!(100))
    );
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
            json!({"params": {"unit": "4M"}}),
            r#"parameter "unit" is unknown; those of psi are burst, "#,
        ),
        (json!({"rules": {"max_cool_down": "1s"}}), "must be at least cool_down, which is 2s"),
        (
            json!({"policy": "amf", "params": {"idle": "1s"}}),
            r#"those of amf are watermark-scale, watermark-share, reclaim"#,
        ),
        (
            json!({"policy": "amf", "rules": {"moon": 1}}),
            r#"parameter "moon" is unknown; those of the rules are floor"#,
        ),
    ] {
        let error = f.core.change(&change(wrong), TimeMs(0)).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
        let info = f.core.info(DECISIONS_SHOWN, TimeMs(0));
        assert_eq!((info.policy.as_str(), info.details), ("psi", details.clone()));
    }
    // Another policy begins with its own defaults, and the rules stay.
    f.core.change(&change(json!({"policy": "amf", "params": {"reclaim": 50}})), TimeMs(0)).unwrap();
    let details = f.core.info(DECISIONS_SHOWN, TimeMs(0)).details;
    assert_eq!(
        details["params"],
        json!({"watermark-scale": 1024, "watermark-share": 0, "reclaim": 50})
    );
    assert_eq!(details["rules"]["cool_down"], json!(2_000));
    f.core
        .change(&change(json!({"policy": "fixed", "params": {"size": "64M"}})), TimeMs(0))
        .unwrap();
    f.core.tick(TimeMs(1_000));
    assert_eq!(f.dram.sizes().requested_bytes, 64 * MIB);
}

#[test]
fn zones_of_one_node_share_what_the_guest_says_of_it() {
    let mut fixture = fixture("off", false, true);
    let pm = &mut Arc::get_mut(&mut fixture.core.devices.zones.0).unwrap()[1];
    (pm.guest_numa_node, pm.boot_bytes) = (0, 384 * MIB);
    fixture.dram.request(64 * MIB);
    fixture.pm.request(32 * MIB);
    fixture.greet();
    let online = |fixture: &Fixture| ["dram", "pm"].map(|id| fixture.core.online_bytes(id));
    assert_eq!(online(&fixture), [None, None]);
    // The fixture's guest tells of 64 MiB beside its boot memory in node 0.
    fixture.report(200);
    assert_eq!(online(&fixture), [Some(64 * MIB), Some(0)]);
    fixture.dram.request(48 * MIB);
    assert_eq!(online(&fixture), [Some(48 * MIB), Some(16 * MIB)]);
}

#[test]
fn memory_that_nobody_governs_is_online_as_the_guest_says() {
    let mut fixture = fixture("off", false, true);
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
    let mut f = fixture("off", false, true);
    f.dram.request(128 * MIB);
    f.greet();
    f.report(200);
    let query = |id: &str, has_dimms| ZoneQuery {
        id: id.to_owned(),
        guest_node: 0,
        boot_bytes: 384 * MIB,
        has_dimms,
    };
    let queries = [query("memory", true), query("pm", false), query("dram", false)];
    let reached = Some(ResizeStatus::Reached);
    let expected =
        [(128, None), (0, reached.clone()), (128, reached)].map(|(online_mib, resize_status)| {
            ZoneState { online_bytes: Some(online_mib * MIB), resize_status }
        });
    assert_eq!(f.core.zone_states(&queries, TimeMs(50)), expected);
}

/// A device that notes when it is asked.
struct Noting(Mutex<ZoneSizes>, Arc<Mutex<Vec<&'static str>>>);

impl ZoneDevice for Noting {
    fn sizes(&self) -> ZoneSizes {
        *self.0.lock()
    }
    fn request(&self, size_bytes: u64) {
        self.0.lock().requested_bytes = size_bytes;
        self.1.lock().push("asked");
    }
    fn remind(&self) {}
}

/// A log that notes which of these lines it is given.
#[derive(Clone)]
struct NotingLog(Arc<Mutex<Vec<&'static str>>>);

const LOGGED: [&str; 4] = ["is online", "resize-reached", "recording", "Plan"];

impl std::io::Write for NotingLog {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        self.0.lock().extend(LOGGED.into_iter().find(|what| text.contains(what)));
        Ok(line.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn devices_are_asked_before_anything_is_written_down() {
    /// The header and the first sizes, and no report behind them.
    const RECORD_BYTES: u64 = 600;
    let noted = Arc::new(Mutex::new(Vec::new()));
    let sizes = ZoneSizes::empty(0, balloon::Tier::Pm, 1024 * MIB);
    let device = Arc::new(Noting(Mutex::new(sizes), Arc::clone(&noted)));
    let zone = GovernedZone {
        id: "pm".to_owned(),
        tier: balloon::Tier::Pm,
        guest_numa_node: 1,
        boot_bytes: 0,
        device: Arc::clone(&device) as _,
    };
    let free: PoolFree = Arc::new(|| 1024 * MIB);
    let core =
        Core::new(&PressureConfig::default(), vec![zone], 384 * MIB, free, TimeMs(0)).unwrap();
    // That it has come to its end is logged as soon as it is to take a line.
    let target = Target { path: "/trace".into(), file: std::io::sink(), max_bytes: RECORD_BYTES };
    let mut core = core.record(target, "db", TimeMs(0)).unwrap();
    core.agent_connected(TimeMs(0));
    let log = NotingLog(Arc::clone(&noted));
    let subscriber =
        tracing_subscriber::fmt().with_ansi(false).with_writer(move || log.clone()).finish();
    tracing::subscriber::with_default(subscriber, || {
        let line = |core: &mut Core, line: serde_json::Value, now| {
            let took = || {
                noted.lock().push("took");
                Duration::from_millis(3)
            };
            core.line(Ok(line.to_string().as_bytes()), now, now, took);
        };
        line(&mut core, hello(), TimeMs(0));
        assert_eq!(noted.lock().split_off(0), [""; 0], "a hello leads to no plan");
        line(&mut core, report(1, 20, [0, 0]), TimeMs(50));
        assert_eq!(noted.lock().split_off(0), ["asked", "took", "recording", "Plan"]);
        core.tick(TimeMs(60));
        let plugged = {
            let mut sizes = device.0.lock();
            sizes.plugged_bytes = sizes.requested_bytes;
            sizes.plugged_bytes
        };
        noted.lock().clear();
        line(&mut core, report(2, 20 + plugged / MIB, [0, plugged]), TimeMs(100));
        assert_eq!(noted.lock().split_off(0), ["took", "is online"]);
        core.tick(TimeMs(1_100));
        assert_eq!(noted.lock().split_off(0), ["resize-reached"], "once it has stayed");
    });
    let quick = core.sample(TimeMs(100)).report_to_plan;
    assert_eq!((quick.count(), quick.sum_ns), (2, 6_000_000), "reports, and nothing else");
}

/// A log that reads the requested size of a device when a plan is logged.
#[derive(Clone)]
struct SizeAtPlan(Arc<FakeDevice>, Arc<Mutex<Vec<u64>>>);

impl std::io::Write for SizeAtPlan {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        if String::from_utf8_lossy(line).contains(" Plan ") {
            self.1.lock().push(self.0.sizes().requested_bytes);
        }
        Ok(line.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn steps_towards_a_clients_size_are_requested_before_the_plan_is_logged() {
    let mut f = fixture("off", false, true);
    f.greet();
    f.report_little_free_memory();
    f.core.resize_zone("pm", 1024 * MIB, TimeMs(60)).unwrap();
    let before = f.pm.sizes();
    assert!(before.held_bytes > 0);
    let size = Some(before.requested_bytes + 64 * MIB);
    let fixed = PressureChange { policy: Some("fixed".to_owned()), size, ..Default::default() };
    f.core.change(&fixed, TimeMs(60)).unwrap();
    let at_plan = Arc::default();
    let log = SizeAtPlan(Arc::clone(&f.pm), Arc::clone(&at_plan));
    let subscriber =
        tracing_subscriber::fmt().with_ansi(false).with_writer(move || log.clone()).finish();
    f.seq = 1;
    tracing::subscriber::with_default(subscriber, || f.report(200));
    let after = f.pm.sizes().requested_bytes;
    assert!(after > before.requested_bytes, "there is room for more");
    assert_eq!(*at_plan.lock(), [after]);
}

#[test]
fn what_is_shown_of_decisions_is_not_copied_and_stays_as_it_was() {
    let mut f = fixture("psi", false, false);
    f.greet();
    f.report(20);
    let view = f.core.view(DECISIONS_KEPT, TimeMs(50));
    let again = f.core.view(DECISIONS_KEPT, TimeMs(50));
    assert!(view.shares_decisions_with(&again));
    for device in [&f.dram, &f.pm] {
        let mut sizes = device.sizes.lock();
        sizes.plugged_bytes = sizes.requested_bytes;
    }
    f.core.tick(TimeMs(60));
    let outcome = |info: PressureInfo| info.decisions.last().unwrap().outcome.clone();
    let reached = outcome(f.core.info(DECISIONS_KEPT, TimeMs(60)));
    assert!(matches!(reached, Outcome::Reached { after_ms: 10 }), "{reached:?}");
    assert_eq!(outcome(view.info()), Outcome::Pending { moved_bytes: 0 });
}
