//! Rule 5: guests that do not follow requests, and hosts without memory.

use super::*;

/// State of a driver that is either ready or absent.
fn driver_state(is_ready: bool) -> DriverState {
    if is_ready { DriverState::Ready } else { DriverState::Absent }
}

#[test]
fn rule_5_request_without_driver_is_halved_then_withdrawn() {
    let mut rig = Rig::fixed(64);
    rig.tick(0);
    let mut steps = Vec::new();
    for _ in 0..60 {
        let plan = rig.tick(1_000);
        if plan.reason == Reason::NoProgress {
            steps.push(rig.requested_mib());
        }
    }
    // DRAM is halved. The withdrawn part is requested from PM, which also has no driver.
    assert!(steps.len() > 10, "{steps:?}");
    assert!(
        steps.iter().any(|(dram, _)| *dram == 32) && steps.iter().any(|(dram, _)| *dram == 0),
        "{steps:?}"
    );
    assert!(steps.iter().any(|(_, pm)| *pm > 0), "{steps:?}");
    assert!(rig.host.requested_bytes() <= 64 * MIB + 4 * MIB);
}

#[test]
fn rule_5_driver_that_loads_late_gets_request_at_once() {
    let mut rig = Rig::fixed(64);
    rig.host.zones.truncate(1);
    rig.host.zones[0].driver = DriverState::Absent;
    let mut alone_s = 0;
    // Runs until nothing has been requested for 12 s.
    for _ in 0..300 {
        rig.tick(1_000);
        alone_s = if rig.host.requested_bytes() == 0 { alone_s + 1 } else { 0 };
        if alone_s == 12 {
            break;
        }
    }
    assert_eq!(alone_s, 12, "the requests never pause");
    rig.tick(10);
    assert_eq!(rig.host.requested_bytes(), 0, "the zone is still not requested");
    rig.host.zones[0].driver = DriverState::Ready;
    assert_eq!(rig.tick(10).direction, Direction::Grow);
    assert_eq!(rig.host.requested_bytes(), 64 * MIB);
    // The driver has the full time to follow the request.
    assert_ne!(rig.tick(4_900).reason, Reason::NoProgress);
    assert_eq!(rig.tick(100).reason, Reason::NoProgress);
}

/// The guest is short of memory but plugs nothing, and its driver loads and unloads every second.
#[test]
fn rule_5_requests_to_driver_that_flaps_decline() {
    let mut rig = Rig::new(Policy::default());
    let much = (0..240).filter(|second| {
        let driver = driver_state(second % 2 == 0);
        rig.host.zones.iter_mut().for_each(|zone| zone.driver = driver);
        rig.report(999, 20);
        rig.tick(1);
        rig.host.requested_bytes() >= 32 * MIB
    });
    let much_s = much.count();
    assert!(much_s < 120, "much of the pool is reserved for it for {much_s} s of 240");
}

#[test]
fn rule_5_progress_restores_full_request() {
    let mut rig = Rig::fixed(64);
    rig.host.zones.truncate(1);
    rig.tick(0);
    assert_eq!(rig.tick(5_000).reason, Reason::NoProgress);
    assert_eq!(rig.host.requested_bytes(), 32 * MIB);
    rig.host.zones[DRAM].plugged_bytes = 32 * MIB;
    rig.tick(100);
    assert_eq!(
        rig.host.requested_bytes(),
        32 * MIB,
        "memory that was plugged late remains requested"
    );
    rig.tick(1_000);
    assert_eq!(rig.host.requested_bytes(), 64 * MIB);
}

/// Runs a guest that should have 512 MiB of PM. It plugs nothing for `outage_ms`, and then follows
/// each request within 10 ms. Returns the time from the end of the outage until the first memory is
/// plugged, its size in MiB, and the time until all memory is plugged.
fn after_an_outage_of(outage_ms: u64) -> (u64, u64, u64) {
    let mut rig = Rig::fixed(512);
    rig.host.zones[DRAM].max_bytes = 0;
    let mut first = None;
    for ms in (0..).step_by(10) {
        rig.tick(10);
        let pm = &mut rig.host.zones[PM];
        let Some(after_ms) = u64::checked_sub(ms, outage_ms) else { continue };
        pm.plugged_bytes = pm.requested_bytes;
        let mib = pm.plugged_bytes / MIB;
        if mib > 0 && first.is_none() {
            first = Some((after_ms, mib));
        }
        if let Some((first_ms, first_mib)) = first.filter(|_| mib == 512) {
            return (first_ms, first_mib, after_ms);
        }
    }
    unreachable!("it is requested forever");
}

#[test]
fn rule_5_failures_delay_rest_of_grow_by_one_second() {
    // The cases are no failure, one failure, two failures, and enough failures to leave a single
    // block.
    assert_eq!(after_an_outage_of(4_000), (0, 512, 0));
    assert_eq!(after_an_outage_of(7_500), (0, 256, 1_010));
    assert_eq!(after_an_outage_of(12_500), (0, 128, 1_010));
    assert_eq!(after_an_outage_of(42_500), (0, 2, 1_010));
}

/// Requests and their times for the PM of a guest that should have 256 MiB. For each new request,
/// the driver plugs the result of `takes` and unplugs it again, because it has no memory for page
/// descriptors.
fn requests_to_guest_that_unplugs(takes: impl Fn(u64) -> u64) -> Vec<(TimeMs, u64)> {
    let mut rig = Rig::fixed(256);
    rig.host.zones[DRAM].max_bytes = 0;
    let mut asked = Vec::new();
    let mut last = 0;
    while rig.now < TimeMs(400_000) {
        rig.tick(10);
        let requested = rig.host.zones[PM].requested_bytes;
        rig.host.zones[PM].plugged_bytes = if requested == last { 0 } else { takes(requested) };
        if requested != last {
            asked.push((rig.now, requested));
        }
        last = requested;
    }
    asked
}

#[test]
fn rule_5_memory_unplugged_again_at_once_is_no_progress() {
    let nothing = requests_to_guest_that_unplugs(|_| 0);
    assert!(nothing.len() < 40, "{nothing:?}");
    assert_eq!(requests_to_guest_that_unplugs(|requested| requested), nothing);
    assert_eq!(requests_to_guest_that_unplugs(|requested| requested.min(128 * MIB)), nothing);
}

/// Requests 256 MiB of PM. The guest plugs the first half immediately and the second half 10 ms
/// later. It unplugs the second half after ticks at the intervals `ms`.
#[track_caller]
fn second_half_that_does_not_stay(ms: &[u64], rest_ms: u64) {
    let mut rig = Rig::fixed(256);
    rig.host.zones[DRAM].max_bytes = 0;
    rig.tick(0);
    rig.host.zones[PM].plugged_bytes = 128 * MIB;
    rig.tick(10);
    rig.host.zones[PM].plugged_bytes = 256 * MIB;
    ms.iter().for_each(|ms| drop(rig.tick(*ms)));
    rig.host.zones[PM].plugged_bytes = 128 * MIB;
    rig.tick(10);
    assert_eq!(rig.tick(rest_ms).reason, Reason::InProgress);
    assert_eq!(rig.tick(10).reason, Reason::NoProgress, "5 s since the first plug");
}

#[test]
fn rule_5_stable_block_does_not_confirm_later_one() {
    // The first half has been plugged for more than 1 s, without a step in between.
    second_half_that_does_not_stay(&[1_500], 3_480);
}

#[test]
fn rule_5_each_block_has_to_stay_for_itself() {
    // After the second step, the first half has been plugged for 1 s and the second half for 5 ms.
    second_half_that_does_not_stay(&[995, 5], 3_980);
}

#[test]
fn rule_5_block_plugged_and_unplugged_forever_is_no_progress() {
    let mut rig = Rig::fixed(256);
    rig.host.zones[DRAM].max_bytes = 0;
    let mut asked = vec![(0, 256)];
    for ms in (0..20_000).step_by(100) {
        // The memory is plugged for more than a second each time.
        rig.host.zones[PM].plugged_bytes = if ms % 1_200 == 0 { 0 } else { 2 * MIB };
        rig.tick(100);
        let (_, requested_mib) = rig.requested_mib();
        if asked.last().is_none_or(|(_, last)| *last != requested_mib) {
            asked.push((ms, requested_mib));
        }
    }
    // Times are relative to the moment at which the block was first plugged.
    assert_eq!(asked, [(0, 256), (5_100, 128), (10_100, 64), (15_100, 32)]);
}

#[test]
fn rule_5_memory_plugged_before_a_failure_does_not_undo_it() {
    let mut rig = Rig::fixed(256);
    rig.host.zones[DRAM].max_bytes = 0;
    let rules = Rules { progress_ms: 900, ..Rules::default() };
    rig.controller.set_rules(rules).expect("in range");
    rig.tick(0);
    rig.host.zones[PM].plugged_bytes = 128 * MIB;
    rig.tick(10);
    assert_eq!(rig.tick(900).reason, Reason::NoProgress);
    rig.tick(100);
    assert_eq!(
        rig.requested_mib(),
        (0, 192),
        "the first has stayed for a second, which does not count as progress"
    );
    rig.follow();
    rig.tick(10);
    rig.tick(1_000);
    assert_eq!(rig.requested_mib(), (0, 256), "the later memory has stayed");
}

#[test]
fn rule_5_part_that_stays_is_progress() {
    let mut rig = Rig::fixed(256);
    rig.host.zones[DRAM].max_bytes = 0;
    rig.tick(0);
    // The guest finds memory for the page descriptors of only one section of two.
    for plugged_mib in [128, 256, 128] {
        rig.host.zones[PM].plugged_bytes = plugged_mib * MIB;
        rig.tick(10);
    }
    // The 5 s start when the first section is plugged. The second section was unplugged again and
    // does not count.
    assert_eq!(rig.tick(4_970).reason, Reason::InProgress);
    assert_eq!(rig.tick(10).reason, Reason::NoProgress);
    assert_eq!(rig.requested_mib(), (0, 192), "half of the missing memory");
    // The guest plugs this memory and keeps it, so the whole size is requested again.
    rig.host.zones[PM].plugged_bytes = 192 * MIB;
    rig.tick(10);
    rig.tick(1_000);
    assert_eq!(rig.requested_mib(), (0, 256));
    assert_ne!(rig.tick(4_990).reason, Reason::NoProgress);
}

#[test]
fn rule_5_zone_without_driver_is_used_last() {
    let asked = |mib, ready: [bool; 2]| {
        let mut rig = Rig::fixed(mib);
        for (zone, ready) in rig.host.zones.iter_mut().zip(ready) {
            zone.driver = driver_state(ready);
        }
        rig.tick(0);
        rig.requested_mib()
    };
    assert_eq!(asked(64, [false, true]), (0, 64));
    assert_eq!(asked(1100, [false, true]), (76, 1024), "the part that exceeds PM");
    // Neither zone has a driver, so the usual order applies.
    assert_eq!(asked(64, [false, false]), (64, 0));
    assert_eq!(asked(64, [true, false]), (64, 0));
    // PM is removed before DRAM even if DRAM has no driver.
    let mut rig = Rig::fixed(64);
    for zone in &mut rig.host.zones {
        (zone.requested_bytes, zone.plugged_bytes) = (64 * MIB, 64 * MIB);
    }
    rig.host.zones[DRAM].driver = DriverState::Absent;
    rig.tick(0);
    assert_eq!(rig.requested_mib(), (64, 0));
}

#[test]
fn rule_5_request_to_zone_without_driver_is_not_awaited_if_another_has_room() {
    let mut rig = Rig::new(Policy::default());
    rig.report(0, 20);
    let (dram, pm) = rig.requested_mib();
    assert!(dram > 0 && pm == 0);
    rig.host.zones[DRAM].driver = DriverState::Absent;
    rig.report(50, 20);
    let (left, pm) = rig.requested_mib();
    assert!(pm > 0 && left == dram, "{left} and {pm} MiB");
    // PM is requested only once.
    assert_eq!(rig.report(50, 20).reason, Reason::InProgress);
    assert_eq!(rig.requested_mib(), (dram, pm));
}

#[test]
fn rule_5_zone_without_driver_is_used_normally_if_no_other_has_room() {
    let asked = |ready, without_room: fn(&mut Rig)| {
        let mut rig = Rig::new(Policy::default());
        rig.host.zones[DRAM].driver = driver_state(ready);
        without_room(&mut rig);
        let mut asked = Vec::new();
        for _ in 0..300 {
            rig.report(50, 20);
            asked.push(rig.requested_mib());
        }
        asked
    };
    let cases: [fn(&mut Rig); 3] = [
        |rig| rig.host.pool_free_bytes = 0,
        |rig| rig.host.zones[PM].max_bytes = 0,
        |rig| rig.host.zones[PM].driver = DriverState::Absent,
    ];
    for without_room in cases {
        assert_eq!(asked(false, without_room), asked(true, without_room));
    }
    // If another zone has little room, requests do not accumulate either.
    let little: fn(&mut Rig) = |rig| rig.host.pool_free_bytes = 4 * MIB;
    let (most, as_ever) = (asked(false, little), asked(true, little));
    let sum = |asked: &[(u64, u64)]| asked.iter().map(|(dram, pm)| dram + pm).max();
    assert!(sum(&most) <= sum(&as_ever), "{most:?}");
}

/// Controller with a floor of 64 MiB. The controller has requested the floor, and the guest does
/// not follow.
fn floor_without_progress(zones: usize, pool_mib: u64) -> Rig {
    let mut rig = Rig::new(Policy::default());
    rig.host.zones.truncate(zones);
    rig.host.pool_free_bytes = pool_mib * MIB;
    let rules = Rules { floor_bytes: 64 * MIB, ..Rules::default() };
    rig.controller.set_rules(rules).expect("in range");
    assert_eq!(rig.tick(0).reason, Reason::BelowFloor);
    assert_eq!(rig.tick(4_900).reason, Reason::NoReport);
    rig
}

#[test]
fn rule_5_floor_stays_requested_if_no_other_zone_has_room() {
    let mut rig = floor_without_progress(1, 0);
    let reported_count = (0..600).filter(|_| rig.tick(100).reason == Reason::NoProgress).count();
    assert_eq!(rig.host.requested_bytes(), 64 * MIB);
    assert_eq!(reported_count, 1, "one request until the sizes change");
    // A guest that is short of memory does not wait for the floor.
    let mut rig = floor_without_progress(2, 0);
    assert_eq!(rig.tick(100).reason, Reason::NoProgress);
    assert_eq!(rig.requested_mib(), (64, 0));
    rig.host.pool_free_bytes = 4096 * MIB;
    let plan = rig.report(1_000, 10);
    assert_eq!((plan.direction, plan.reason), (Direction::Grow, Reason::LowAvailable));
    assert!(rig.requested_mib().1 > 0);
}

#[test]
fn rule_5_floor_is_requested_from_another_zone() {
    let mut rig = floor_without_progress(2, 4096);
    let mut steps = Vec::new();
    for _ in 0..40 {
        if rig.tick(1_000).reason == Reason::NoProgress {
            steps.push(rig.requested_mib());
        }
        rig.host.zones[PM].plugged_bytes = rig.host.zones[PM].requested_bytes;
    }
    assert_eq!(steps, [(32, 32), (16, 48), (8, 56), (4, 60), (2, 62), (0, 64)]);
}

#[test]
fn rule_5_slow_progress_is_progress() {
    let mut rig = Rig::fixed(64);
    rig.tick(0);
    for step in 1..=32 {
        rig.host.zones[DRAM].plugged_bytes = step * 2 * MIB;
        assert_ne!(rig.tick(4_900).reason, Reason::NoProgress);
    }
}

#[test]
fn rule_5_refused_shrink_is_withdrawn_without_removing_dram_instead() {
    let mut rig = Rig::fixed(400);
    rig.tick(0);
    rig.follow();
    rig.want(0);
    rig.tick(6_000);
    assert_eq!(rig.requested_mib(), (128, 144));
    assert_eq!(rig.tick(5_000).reason, Reason::NoProgress);
    assert_eq!(rig.requested_mib(), (128, 272), "withdrawn");
    assert_eq!(rig.tick(2_000).reason, Reason::NoProgress, "paused");
    let plan = rig.tick(3_500);
    assert_eq!(plan.direction, Direction::Shrink);
    assert_eq!(rig.requested_mib(), (128, 208), "half as much");
}

#[test]
fn rule_5_shrink_refused_by_one_pm_zone_continues_in_another() {
    let mut rig = Rig::fixed(128 + 1024 + 64);
    rig.host.zones.push(ZoneSizes { id: ZoneId(2), max_bytes: 64 * MIB, ..rig.host.zones[PM] });
    for _ in 0..4 {
        rig.tick(1_000);
        rig.follow();
    }
    assert_eq!(rig.host.zones[2].plugged_bytes, 64 * MIB);
    // The zone that shrinks first does not release any memory.
    rig.want(1024);
    let first = rig.tick(10_000);
    assert_eq!(first.targets[2].requested_bytes, 0);
    let refused = 64 * MIB;
    rig.host.zones[PM].plugged_bytes = rig.host.zones[PM].requested_bytes;
    let plugged = rig.host.zones[PM].plugged_bytes;
    assert_eq!(rig.tick(5_000).reason, Reason::NoProgress);
    assert_eq!(rig.host.zones[2].requested_bytes, refused, "withdrawn");
    let second = rig.tick(1_000);
    assert_eq!(second.direction, Direction::Shrink);
    assert_eq!(second.targets[2].requested_bytes, refused, "paused");
    assert!(second.targets[PM].requested_bytes < plugged, "the other zone is requested");
    assert_eq!(second.targets[DRAM].requested_bytes, 128 * MIB);
}

/// A guest inflates and deflates its balloon in pages, so it can stop in the middle of a block.
#[test]
fn rule_5_withdrawn_request_is_rounded_to_whole_blocks() {
    let mut rig = Rig::fixed(128);
    rig.host.balloon = Some(ZoneId(0));
    rig.tick(0);
    rig.follow();
    rig.want(64);
    assert_eq!(rig.tick(6_000).direction, Direction::Shrink);
    rig.host.zones[DRAM].plugged_bytes = 101 * MIB + 4096;
    rig.tick(1_000);
    assert_eq!(rig.tick(5_000).reason, Reason::NoProgress);
    assert_eq!(rig.requested_mib(), (102, 0), "the plugged size stays, and the rest of the block");
    // The rest of the block does not count as an outstanding request.
    rig.want(102);
    assert_eq!(rig.tick(60_000).reason, Reason::Enough);

    rig.want(128);
    assert_eq!(rig.tick(1_000).direction, Direction::Grow);
    let mut steps = Vec::new();
    for _ in 0..5 {
        let plan = rig.tick(5_000);
        assert!(
            plan.targets.iter().all(|target| target.requested_bytes % (2 * MIB) == 0),
            "{plan:?}"
        );
        steps.push((plan.reason, rig.requested_mib().0));
    }
    let less = Reason::NoProgress;
    assert_eq!(steps[..2], [(less, 112), (less, 104)], "down for a grow: {steps:?}");
}

#[test]
fn rule_5_memory_missing_on_host_is_requested_from_another_zone_at_once() {
    let mut rig = Rig::fixed(100);
    rig.tick(0);
    assert_eq!(rig.requested_mib(), (100, 0));
    rig.host_has(DRAM, 24);
    let plan = rig.tick(10);
    assert_eq!(
        (plan.direction, plan.reason, plan.limited_by),
        (Direction::Grow, Reason::HostShort, None)
    );
    assert_eq!(rig.requested_mib(), (24, 76));
    // The pause of the zone does not end when memory of the earlier request arrives.
    rig.follow();
    rig.want(110);
    assert_eq!(rig.tick(4_990).reason, Reason::FixedSize);
    assert_eq!(rig.requested_mib(), (24, 86));
    rig.follow();
    rig.want(120);
    rig.tick(10);
    assert_eq!(rig.requested_mib(), (34, 86), "requested again");
    // The memory was plugged, which shows that the host has memory again.
    rig.follow();
    rig.want(128);
    rig.tick(10);
    assert_eq!(rig.requested_mib(), (42, 86));
}

#[test]
fn rule_5_requests_to_exhausted_host_become_rarer() {
    let mut rig = Rig::fixed(64);
    rig.host.zones.truncate(1);
    let mut asked_s = Vec::new();
    for second in 0..200 {
        let plan = rig.tick(1_000);
        match rig.host.requested_bytes() {
            0 => assert_eq!(
                (plan.direction, plan.reason),
                (Direction::Hold, Reason::HostShort),
                "{second}"
            ),
            _ => {
                asked_s.push(second);
                rig.host_has(DRAM, 0);
            }
        }
    }
    assert_eq!(asked_s, [0, 6, 17, 38, 79, 140]);
}

#[test]
fn rule_5_memory_unplugged_again_at_once_does_not_end_pause_for_host() {
    // The host has no memory. The guest plugs `plugs_mib` of each request, and then unplugs it
    // again.
    let asked_s = |plugs_mib| {
        let mut rig = Rig::fixed(64);
        rig.host.zones.truncate(1);
        let mut asked_s = Vec::new();
        for second in 0..200 {
            rig.tick(980);
            let is_asked = rig.host.requested_bytes() > 0;
            for plugged_mib in [plugs_mib, 0] {
                rig.host.zones[DRAM].plugged_bytes = if is_asked { plugged_mib * MIB } else { 0 };
                rig.tick(10);
            }
            if is_asked {
                asked_s.push(second);
                rig.host_has(DRAM, 0);
            }
        }
        asked_s
    };
    let nothing = asked_s(0);
    assert!(nothing.len() < 8, "{nothing:?}");
    assert_eq!(asked_s(2), nothing);
}

/// A report may arrive before the device's notification. The demand in it counts too.
#[test]
fn rule_5_new_demand_is_requested_together_with_host_shortfall() {
    let mut rig = Rig::new(Policy::default());
    rig.report(1000, 20);
    let (asked, _) = rig.requested_mib();
    assert!((1..128).contains(&asked), "{asked}");
    rig.host_has(DRAM, 0);
    let plan = rig.report(50, 10);
    assert_eq!((plan.direction, plan.reason), (Direction::Grow, Reason::HostShort));
    assert!(rig.requested_mib().1 >= asked, "{:?}", rig.requested_mib());
}

#[test]
fn rule_5_host_shortfall_expires_after_a_second() {
    // Requests 128 MiB of DRAM from a host that has 24 MiB, and then pauses the controller for
    // `ms`.
    let paused_for = |ms| {
        let mut rig = Rig::fixed(128);
        rig.tick(0);
        rig.controller.set_policy(Policy::default()).expect("defaults");
        rig.controller.pause();
        rig.host_has(DRAM, 24);
        assert_eq!(rig.tick(10).reason, Reason::Paused);
        assert_eq!(rig.tick(ms).reason, Reason::Paused);
        rig.controller.unpause();
        (rig.tick(0).reason, rig.requested_mib())
    };
    assert_eq!(paused_for(990), (Reason::HostShort, (24, 104)));
    assert_eq!(paused_for(1_000), (Reason::NoReport, (24, 0)), "the goal has changed by then");
}

#[test]
fn rule_5_host_shortfall_outlasts_withdrawn_request() {
    let mut rig = Rig::fixed(128 + 512);
    rig.tick(0);
    rig.host.zones[DRAM].plugged_bytes = 64 * MIB;
    rig.tick(100);
    assert_eq!(rig.requested_mib(), (128, 512));
    rig.controller.set_policy(Policy::default()).expect("defaults");
    // PM makes no progress, and the host runs out of DRAM at the same time.
    rig.host_has(DRAM, 64);
    assert_eq!(rig.tick(4_900).reason, Reason::NoProgress);
    assert_eq!(rig.requested_mib(), (64, 256));
    let plan = rig.tick(10);
    assert_eq!((plan.reason, rig.requested_mib().0), (Reason::HostShort, 64));
    assert_eq!(rig.tick(10).reason, Reason::NoReport, "and is requested once");
}

#[test]
fn rule_5_host_shortfall_outlasts_grow_to_floor() {
    let mut rig = Rig::fixed(800);
    rig.host.zones[DRAM].max_bytes = 512 * MIB;
    rig.tick(0);
    assert_eq!(rig.requested_mib(), (512, 288));
    let rules = Rules { floor_bytes: 512 * MIB, ..Rules::default() };
    rig.controller.set_rules(rules).expect("in range");
    rig.controller.set_policy(Policy::default()).expect("defaults");
    rig.host_has(DRAM, 212);
    assert_eq!(rig.tick(10).reason, Reason::BelowFloor);
    assert_eq!(rig.requested_mib(), (212, 300), "12 of 300 requests");
    assert_eq!(rig.tick(10).reason, Reason::HostShort);
    assert_eq!(rig.requested_mib(), (212, 588), "and the others");
    assert_eq!(rig.tick(10).reason, Reason::NoReport, "once");
}

#[test]
fn rule_5_host_shortfall_expires_when_policy_changes() {
    let mut rig = Rig::fixed(100);
    rig.tick(0);
    rig.controller.pause();
    rig.host_has(DRAM, 24);
    assert_eq!(rig.tick(10).reason, Reason::Paused);
    rig.want(24);
    rig.controller.unpause();
    assert_ne!(rig.tick(10).reason, Reason::HostShort);
    assert_eq!(rig.requested_mib(), (24, 0));
}

#[test]
fn rule_8_dry_run_reports_policy_decision_instead_of_host_shortfall() {
    let mut rig = Rig::fixed(100);
    rig.tick(0);
    rig.controller.set_dry_run(true);
    rig.host_has(DRAM, 24);
    for _ in 0..3 {
        let plan = rig.tick(10);
        assert_eq!((plan.reason, plan.requested_bytes()), (Reason::FixedSize, 100 * MIB));
    }
    rig.controller.set_dry_run(false);
    assert_eq!((rig.tick(10).reason, rig.requested_mib()), (Reason::HostShort, (24, 76)));
}

#[test]
fn rule_5_host_shortfall_of_pinned_zone_is_ignored() {
    let mut rig = Rig::fixed(24);
    rig.tick(0);
    rig.follow();
    rig.pin(ZoneId(0));
    rig.host.zones[DRAM].requested_bytes = 100 * MIB;
    rig.tick(10);
    rig.host_has(DRAM, 24);
    assert_eq!(rig.tick(10).reason, Reason::Enough);
    assert_eq!(rig.requested_mib(), (24, 0));
}

#[test]
fn rule_5_host_shortfall_counts_during_steps_to_boot_size() {
    let mut rig = Rig::fixed(64);
    rig.describe(1);
    rig.report(50, 280);
    assert_eq!(rig.requested_mib(), (64, 0));
    rig.set_goal(ZoneId(1), 600 * MIB);
    rig.step();
    assert!(rig.controller.has_goals());
    rig.host_has(DRAM, 10);
    rig.step();
    assert_eq!(rig.tick(50).reason, Reason::HostShort);
}
