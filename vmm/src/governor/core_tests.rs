//! The governor against devices that do as they are told, or do not.

use std::sync::Arc;

use balloon::policy::Policy;
use parking_lot::Mutex;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::governor::ZoneDevice;
use crate::governor::agent::{LineBudget, serve};
use crate::governor::fake::{BLOCK, Fixture, MIB, fixture, hello, report};
use crate::governor::task::Clock;
use crate::vm::decision::{DECISIONS_KEPT, DECISIONS_SHOWN, Outcome};
use crate::vm::request::{PressureInfo, ResizeStatus};

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
    assert!(f.core.info(DECISIONS_SHOWN, TimeMs(0)).dry_run);
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
    assert_eq!(f.core.info(DECISIONS_SHOWN, TimeMs(0)).pinned_zones, ["dram"]);
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
    assert!(f.core.info(DECISIONS_SHOWN, TimeMs(0)).pinned_zones.is_empty());
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
fn a_driver_that_loads_late_is_asked_with_the_next_report() {
    let mut f = fixture("psi", false, false);
    for device in [&f.dram, &f.pm] {
        device.sizes.lock().driver_ready = false;
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
    f.dram.sizes.lock().driver_ready = true;
    // What the device's news lead to, and the agent's next report.
    f.core.tick(TimeMs(f.seq * 50 + 1));
    f.report(20);
    assert!(f.dram.sizes().requested_bytes > 0, "{:?}", f.core.info(1, TimeMs(f.seq * 50)).decisions);
    assert_eq!(f.pm.sizes().requested_bytes, 0, "which has no driver yet");
}

#[test]
fn a_zone_that_has_no_driver_does_not_keep_a_short_guest_waiting() {
    let mut f = fixture("psi", false, true);
    f.dram.sizes.lock().driver_ready = false;
    f.greet();
    for _ in 0..4 {
        f.report(20);
    }
    let pm = f.pm.sizes();
    assert!(pm.requested_bytes > 0, "nothing in 200 ms: {:?}", f.core.info(4, TimeMs(f.seq * 50)).decisions);
    assert_eq!(pm.requested_bytes, pm.plugged_bytes);
    assert_eq!(f.dram.sizes().requested_bytes, 0, "PM has room");
    // With a driver, it is the first again.
    f.dram.sizes.lock().driver_ready = true;
    for _ in 0..4 {
        f.report(20);
    }
    assert!(f.dram.sizes().plugged_bytes > 0);
    // One that goes with a request under way leaves that to others.
    let mut f = fixture("psi", false, false);
    f.greet();
    f.report(20);
    assert!(f.dram.sizes().requested_bytes > 0);
    f.dram.sizes.lock().driver_ready = false;
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
            device.sizes.lock().driver_ready = round % 2 == 0;
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

/// DRAM that its host does not have must not keep the guest from PM, nor its host busy.
#[test]
fn what_the_host_cannot_provide_is_asked_of_another_tier_and_not_all_the_time() {
    let mut f = fixture("psi", false, true);
    f.dram.sizes.lock().region_bytes = 8192 * MIB;
    *f.dram.can_provide.lock() = 0;
    f.greet();
    for _ in 0..200 {
        f.report(20);
    }
    assert_eq!(f.dram.sizes().plugged_bytes, 0);
    assert_eq!(f.pm.sizes().plugged_bytes, 1024 * MIB, "{:?}", f.core.counters.plans);
    let info = f.core.info(DECISIONS_KEPT, TimeMs(f.seq * 50));
    assert!(info.decisions_total < 20, "{:?}", f.core.counters.plans);
    assert!(f.core.counters.plans.keys().any(|key| key.2 == "host_short"), "{:?}", f.core.counters.plans);
    // What came from PM ends the wait: it is not waited for twice.
    assert!(f.core.sample(TimeMs(f.seq * 50)).report_to_online.count() >= 1);
    // What the host has again is asked for again.
    *f.dram.can_provide.lock() = 256 * MIB;
    for _ in 0..70 {
        f.seq += 19;
        f.report(20);
    }
    assert_eq!(f.dram.sizes().plugged_bytes, 256 * MIB, "{:?}", f.core.counters.plans);
}

#[test]
fn lines_that_are_no_reports_are_counted_by_reason_and_change_nothing() {
    let mut f = fixture("psi", false, true);
    f.greet();
    f.bytes(Ok(b"\xff"), TimeMs(0));
    f.bytes(Ok(b"{}"), TimeMs(0));
    f.bytes(Err(Refusal::TooLong { bound_bytes: 1 }), TimeMs(0));
    f.line(&json!({"type": "report", "version": 99}));
    let refused = &f.core.counters.refused;
    assert_eq!(refused.values().sum::<u64>(), 4);
    assert_eq!(refused["too_long"], 1);
    assert_eq!(refused["wrong_version"], 1);
    assert_eq!(f.core.counters.reports, 0);
}

#[test]
fn who_lied_about_the_clock_does_not_lock_the_agent_out() {
    let mut f = fixture("psi", false, true);
    let now = TimeMs(3_600_000);
    let line = |f: &mut Fixture, line: serde_json::Value| f.bytes(Ok(line.to_string().as_bytes()), now);
    f.core.agent_connected(now);
    line(&mut f, hello());
    // 50 ms after a boot that was an hour ago.
    line(&mut f, report(1, 200, [0, 0]));
    f.core.agent_connected(now);
    line(&mut f, hello());
    let mut honest = report(1, 200, [0, 0]);
    honest["monotonic_ms"] = json!(now.0 - 100);
    line(&mut f, honest);
    assert_eq!((f.core.counters.reports, f.core.counters.refused.len()), (2, 0));
    // A guest that seems older than its VM has to insist.
    let mut future = report(2, 200, [0, 0]);
    future["monotonic_ms"] = json!(2 * now.0);
    line(&mut f, future);
    assert_eq!(f.core.counters.refused["from_the_future"], 1);
}

/// Eight hours in which nobody could report or follow: only the guest's clock has gone on.
#[test]
fn a_host_that_has_slept_takes_its_guest_neither_for_a_liar_nor_for_late() {
    const SLEPT_MS: u64 = 8 * 3_600_000;
    let mut f = fixture("psi", false, false);
    f.greet();
    f.report(20);
    let asked = f.dram.sizes().requested_bytes + f.pm.sizes().requested_bytes;
    assert!(asked > 0);
    let now = TimeMs(f.seq * 50 + 50);
    f.core.tick(now);
    assert_eq!(f.core.agent_state(now), AgentState::Live);
    let mut next = report(f.seq + 1, 20, [0, 0]);
    next["monotonic_ms"] = json!(now.0 + SLEPT_MS);
    f.core.line(Ok(next.to_string().as_bytes()), now, now + SLEPT_MS, Duration::default);
    assert_eq!((f.core.counters.reports, f.core.counters.refused.len()), (2, 0));
    assert_eq!(f.core.counters.reminders, 0);
    assert!(f.dram.sizes().requested_bytes + f.pm.sizes().requested_bytes >= asked, "it is still to follow");
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
            .change(&PressureChange { policy: Some("fixed".to_owned()), size, ..Default::default() })
            .unwrap();
    };
    // The guest was asked for half of what it has, and has given nothing of it when it is asked for more again.
    *f.dram.sizes.lock() =
        DeviceSizes { requested_bytes: 64 * MIB, plugged_bytes: 128 * MIB, ..f.dram.sizes() };
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
    let error = f.core.change(&change).unwrap_err().to_string();
    assert!(error.contains("magic") && error.contains("psi"), "{error}");
    assert_eq!(f.core.info(DECISIONS_SHOWN, TimeMs(0)).policy, "psi");
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
fn the_audit_is_bounded_numbered_and_newest_first() {
    let mut f = fixture("off", true, true);
    f.greet();
    for round in 0..2 * DECISIONS_KEPT as u64 {
        let size = Some((1 + round % 2) * 64 * MIB);
        let change = PressureChange { policy: Some("fixed".to_owned()), size, ..Default::default() };
        f.core.change(&change).unwrap();
        // A dry run says once a second what it comes to.
        f.seq += 20;
        f.report(300);
    }
    let info = f.core.info(DECISIONS_KEPT, TimeMs(f.seq * 50));
    assert!(info.decisions_total > DECISIONS_KEPT as u64, "{} decisions show nothing", info.decisions_total);
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
    assert_eq!(grow.asked_bytes, grow.targets.iter().map(|target| target.requested_bytes).sum::<u64>());
}

#[test]
fn a_pause_holds_everything_until_it_is_ended_and_may_be_repeated() {
    let mut f = fixture("psi", false, true);
    f.greet();
    let pause = |pause| PressureChange { pause: Some(pause), ..Default::default() };
    for _ in 0..2 {
        f.core.change(&pause(true)).unwrap();
    }
    for available in [60, 30, 20] {
        f.report(available);
    }
    assert_eq!(f.dram.sizes().requested_bytes, 0);
    let info = f.core.info(DECISIONS_SHOWN, TimeMs(0));
    assert!(info.paused && f.core.sample(TimeMs(0)).paused);
    assert_eq!((info.decisions[0].reason.as_str(), info.decisions[0].times), ("paused", 3));
    // A zone that is resumed does not end the pause, and the end of the pause resumes no zone.
    f.core.resize("pm", 2 * MIB, TimeMs(0)).unwrap();
    let zone =
        |id: &str| PressureChange { resume: Some(true), zone: Some(id.to_owned()), ..Default::default() };
    f.core.change(&zone("dram")).unwrap();
    assert!(f.core.info(0, TimeMs(0)).paused);
    for _ in 0..2 {
        f.core.change(&pause(false)).unwrap();
    }
    assert_eq!(f.core.info(0, TimeMs(0)).pinned_zones, ["pm"]);
    f.report(20);
    assert_eq!(f.dram.sizes().requested_bytes, 128 * MIB);
    f.core.change(&zone("pm")).unwrap();
    assert!(f.core.info(0, TimeMs(0)).pinned_zones.is_empty());
    let error = f.core.change(&PressureChange { pause: Some(true), ..zone("nvram") }).unwrap_err();
    assert!(error.to_string().contains("nvram"), "{error}");
    assert!(!f.core.info(0, TimeMs(0)).paused, "what is refused changes nothing");
}

#[test]
fn a_machine_that_is_built_paused_is_paused() {
    let config = PressureConfig { paused: true, ..Default::default() };
    let mut core = Core::new(&config, Vec::new(), 384 * MIB, Arc::new(|| 0), TimeMs(0)).unwrap();
    assert!(core.info(0, TimeMs(0)).paused);
    core.change(&PressureChange { resume: Some(true), ..Default::default() }).unwrap();
    assert!(!core.info(0, TimeMs(0)).paused);
}

#[test]
fn an_agent_is_never_there_then_live_then_silent_then_live_then_gone() {
    let mut f = fixture("psi", false, true);
    let state = |f: &Fixture, now| f.core.info(0, TimeMs(now)).agent;
    assert_eq!(state(&f, 0), AgentState::Never);
    f.greet();
    f.report(200);
    let at = f.seq * 50;
    assert_eq!(state(&f, at + 2_999), AgentState::Live);
    assert_eq!(state(&f, at + 3_000), AgentState::Silent);
    // What cannot be believed does not count.
    f.bytes(Ok(b"{}"), TimeMs(at + 3_000));
    assert_eq!(state(&f, at + 3_000), AgentState::Silent);
    f.core.tick(TimeMs(at + 3_000));
    f.seq = 100;
    f.report(200);
    assert_eq!(state(&f, 5_000), AgentState::Live);
    f.core.agent_gone();
    assert_eq!(state(&f, 5_000), AgentState::Gone);
    f.core.agent_connected(TimeMs(60_000));
    assert_eq!((state(&f, 60_000), state(&f, 63_000)), (AgentState::Live, AgentState::Silent));
}

/// Rule 6 of docs/policy.md, through the whole governor.
#[test]
fn an_agent_that_falls_silent_while_the_guest_is_short_fails_open_and_no_further() {
    let mut f = fixture("psi", false, true);
    f.greet();
    f.report(20);
    let requested = |f: &Fixture| f.dram.sizes().requested_bytes + f.pm.sizes().requested_bytes;
    let (before, from) = (requested(&f), f.seq * 50);
    for now in (from..from + 60_000).step_by(500) {
        f.core.tick(TimeMs(now));
    }
    assert_eq!(requested(&f) - before, (64 + 128 + 256 + 512) * MIB);
    let at_rest = requested(&f);
    f.core.tick(TimeMs(from + 600_000));
    assert_eq!(requested(&f), at_rest);
    let reasons = f.core.info(DECISIONS_SHOWN, TimeMs(0)).decisions;
    assert!(reasons.iter().any(|decision| {
        (decision.direction.as_str(), decision.reason.as_str()) == ("grow", "reports_lost")
    }));
}

#[test]
fn a_driver_that_is_not_up_is_shown() {
    let f = fixture("psi", false, true);
    f.pm.sizes.lock().driver_ready = false;
    let zones = f.core.info(0, TimeMs(0)).zones;
    let ready: Vec<_> = zones.iter().map(|zone| (zone.id.as_str(), zone.driver_ready)).collect();
    assert_eq!(ready, [("dram", true), ("pm", false)]);
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
        serve(stream, &core, &Clock::start(), &mut LineBudget::new()).await.unwrap();
    });
    assert_eq!(core.lock().counters.refused.values().sum::<u64>(), 2);
}

/// A flood costs the host so many lines a second, and waits in the guest.
#[test]
fn a_flood_is_taken_a_bounded_number_of_lines_at_a_time() {
    use std::io::Write;
    let Fixture { core, .. } = fixture("psi", false, true);
    let core = Mutex::new(core);
    let (mut agent, vmm) = std::os::unix::net::UnixStream::pair().unwrap();
    agent.write_all("no report\n".repeat(1_000).as_bytes()).unwrap();
    drop(agent);
    vmm.set_nonblocking(true).unwrap();
    // A clock that jumps as soon as everybody waits: it shows what was waited for, and not how long this takes.
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let stream = tokio::net::UnixStream::from_std(vmm).unwrap();
        let begin = tokio::time::Instant::now();
        serve(stream, &core, &Clock::start(), &mut LineBudget::new()).await.unwrap();
        assert!(begin.elapsed() >= Duration::from_secs(4), "{:?}", begin.elapsed());
    });
    assert_eq!(core.lock().counters.refused.values().sum::<u64>(), 1_000);
}

/// A line that never ends is no line that could be counted, and costs the host no more than lines do.
#[test]
fn an_endless_line_is_taken_a_bounded_number_of_bytes_at_a_time() {
    use std::io::Write;
    /// Four seconds' worth, of which the first is there at once.
    const FLOOD_BYTES: usize = 4 * 200 * 64 * 1024;
    let core = Mutex::new(fixture("psi", false, true).core);
    let (mut agent, vmm) = std::os::unix::net::UnixStream::pair().unwrap();
    vmm.set_nonblocking(true).unwrap();
    let flood = std::thread::spawn(move || {
        let piece = [b'x'; 64 * 1024];
        (0..FLOOD_BYTES / piece.len()).for_each(|_| agent.write_all(&piece).unwrap());
        agent.shutdown(std::net::Shutdown::Write).unwrap();
        agent
    });
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let stream = tokio::net::UnixStream::from_std(vmm).unwrap();
        let begin = tokio::time::Instant::now();
        serve(stream, &core, &Clock::start(), &mut LineBudget::new()).await.unwrap();
        assert!(begin.elapsed() >= Duration::from_secs(3), "{:?}", begin.elapsed());
    });
    flood.join().unwrap();
    assert_eq!(core.lock().counters.refused, BTreeMap::from([("too_long", 1)]));
}

/// What it is told waits for it, the newest alone, and keeps nobody from hearing what it says.
#[test]
fn an_agent_that_does_not_read_is_heard_all_the_same() {
    use std::os::fd::AsRawFd;
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt};
    const LINES: u64 = 100;
    const LAST: u64 = LINES << 20;
    let core = Mutex::new(fixture("off", false, true).core);
    let [agent, vmm] = {
        let (agent, vmm) = std::os::unix::net::UnixStream::pair().unwrap();
        // The least that Linux gives: a few lines.
        let bytes: libc::c_int = 1;
        // SAFETY: the socket is open, and `bytes` is an int that outlives the call.
        let result = unsafe {
            let (at, len) = ((&raw const bytes).cast(), size_of::<libc::c_int>() as u32);
            libc::setsockopt(vmm.as_raw_fd(), libc::SOL_SOCKET, libc::SO_SNDBUF, at, len)
        };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
        [agent, vmm]
    };
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let [agent, vmm] = [agent, vmm].map(|stream| {
            stream.set_nonblocking(true).unwrap();
            tokio::net::UnixStream::from_std(stream).unwrap()
        });
        let (from, mut to) = agent.into_split();
        let talk = async {
            for line in 1..=LINES {
                core.lock().settings = Settings::with_watermark(line << 20);
                to.write_all(b"no report\n").await.unwrap();
                while core.lock().counters.refused.values().sum::<u64>() < line {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
            let mut told = tokio::io::BufReader::new(from).lines();
            let mut count = 1;
            while !told.next_line().await.unwrap().unwrap().contains(&LAST.to_string()) {
                count += 1;
            }
            assert!(count < LINES, "{count} lines waited for it");
        };
        let (clock, mut budget) = (Clock::start(), LineBudget::new());
        tokio::select! {
            result = serve(vmm, &core, &clock, &mut budget) => panic!("{result:?}"),
            heard = tokio::time::timeout(Duration::from_secs(60), talk) => heard.expect("it is heard"),
        }
    });
}

/// A change with these parameters, as a client writes it.
fn change(json: serde_json::Value) -> PressureChange {
    serde_json::from_value(json).unwrap()
}

#[test]
fn parameters_are_changed_by_name_all_or_none() {
    let mut f = fixture("psi", false, true);
    let set = json!({"params": {"idle": "9s", "min_headroom": 67_108_864}, "rules": {"cool_down": "2s"}});
    f.core.change(&change(set)).unwrap();
    let details = f.core.info(DECISIONS_SHOWN, TimeMs(0)).details;
    assert_eq!((&details["params"]["idle"], &details["rules"]["cool_down"]), (&json!(9_000), &json!(2_000)));
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
        (json!({"params": {"unit": "4M"}}), r#"parameter "unit" is unknown; those of psi are burst, "#),
        (json!({"rules": {"max_cool_down": "1s"}}), "must be at least cool_down, which is 2s"),
        (json!({"policy": "amf", "params": {"idle": "1s"}}), r#"those of amf are watermark-scale, reclaim"#),
        (
            json!({"policy": "amf", "rules": {"moon": 1}}),
            r#"parameter "moon" is unknown; those of the rules are floor"#,
        ),
    ] {
        let error = f.core.change(&change(wrong)).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
        let info = f.core.info(DECISIONS_SHOWN, TimeMs(0));
        assert_eq!((info.policy.as_str(), info.details), ("psi", details.clone()));
    }
    // Another policy begins with its own defaults, and the rules stay.
    f.core.change(&change(json!({"policy": "amf", "params": {"reclaim": 50}}))).unwrap();
    let details = f.core.info(DECISIONS_SHOWN, TimeMs(0)).details;
    assert_eq!(details["params"], json!({"watermark-scale": 1024, "reclaim": 50}));
    assert_eq!(details["rules"]["cool_down"], json!(2_000));
    f.core.change(&change(json!({"policy": "fixed", "params": {"size": "64M"}}))).unwrap();
    f.core.tick(TimeMs(1_000));
    assert_eq!(f.dram.sizes().requested_bytes, 64 * MIB);
}

proptest! {
    /// Whatever a report says, zones are asked for whole blocks within their bounds: the fake devices insist.
    #[test]
    fn an_agent_that_lies_gets_at_most_what_the_zones_hold(
        lies in proptest::collection::vec(
            (any::<u16>(), 0u64..1 << 46, 0u64..1 << 46, 0u64..1 << 40, 0u64..1 << 40, any::<bool>()), 1..60),
        policy in prop::sample::select(Policy::NAMES.iter().filter(|name| **name != "fixed").collect::<Vec<_>>()),
    ) {
        let mut f = fixture(policy, false, true);
        f.greet();
        for (ms, total, available, pages, us, ahead) in lies {
            f.seq += u64::from(ahead || f.seq == 0);
            let total = total.max(1 << 27);
            let (available, pages, us) = (available % total, pages % (total / 4096), us % (f.seq * 50_000));
            let line = json!({
                "type": "report", "version": 1, "seq": f.seq, "monotonic_ms": f.seq * 50 + u64::from(ms) % 4000,
                "memory": {"total_bytes": total, "free_bytes": available / 2, "available_bytes": available,
                           "swap_total_bytes": total, "swap_free_bytes": available},
                "stall": {"some_us": us, "full_us": us / 2, "some_avg10_basis_points": 0,
                          "full_avg10_basis_points": 0},
                "counters": {"pswpin": pages, "pswpout": us, "workingset_refault_anon": pages},
                "zones": [{"node": 0, "kind": "dma32", "free_pages": pages, "min_pages": pages / 4,
                           "low_pages": pages / 3, "high_pages": pages / 2, "managed_pages": total / 4096}],
            });
            f.line(&line);
            f.core.tick(TimeMs(f.seq * 50 + 20));
        }
        prop_assert!(f.core.counters.reports > 0, "{:?}", f.core.counters.refused);
        prop_assert!(f.core.info(DECISIONS_KEPT, TimeMs(f.seq * 50)).decisions.len() <= DECISIONS_KEPT);
    }
}

#[test]
fn zones_of_one_node_share_what_the_guest_says_of_it() {
    let mut fixture = fixture("off", false, true);
    fixture.core.zones[1].zone.guest_numa_node = 0;
    fixture.core.zones[1].zone.boot_bytes = 384 * MIB;
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

/// A device that notes when it is asked.
struct Noting(Mutex<crate::governor::DeviceSizes>, Arc<Mutex<Vec<&'static str>>>);

impl ZoneDevice for Noting {
    fn sizes(&self) -> crate::governor::DeviceSizes {
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
    let sizes = crate::governor::DeviceSizes {
        block_bytes: BLOCK,
        region_bytes: 1024 * MIB,
        driver_ready: true,
        ..Default::default()
    };
    let device = Arc::new(Noting(Mutex::new(sizes), Arc::clone(&noted)));
    let zone = GovernedZone {
        id: "pm".to_owned(),
        tier: balloon::Tier::Pm,
        guest_numa_node: 1,
        boot_bytes: 0,
        device: Arc::clone(&device) as _,
    };
    let free: PoolFree = Arc::new(|| 1024 * MIB);
    let core = Core::new(&PressureConfig::default(), vec![zone], 384 * MIB, free, TimeMs(0)).unwrap();
    // That it has come to its end is logged as soon as it is to take a line.
    let target = Target { path: "/trace".into(), file: std::io::sink(), max_bytes: RECORD_BYTES };
    let mut core = core.record(target, "db", TimeMs(0)).unwrap();
    core.agent_connected(TimeMs(0));
    let log = NotingLog(Arc::clone(&noted));
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || log.clone()).finish();
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
