//! Rules 8 to 10: size and time of shrinks.

use super::*;

#[test]
fn rule_8_surplus_is_returned_after_it_was_idle() {
    let mut rig = Rig::new();
    rig.plug(512);
    let mut shrunk_after = None;
    for second in 0..10 {
        let decision = rig.report(1000, 500);
        if let Some(want) = decision.want_bytes {
            assert_eq!(decision.reason, Reason::Surplus);
            assert!(!decision.pressure);
            // The headroom is 76.8 MiB, and a margin of 16 MiB is kept.
            assert_eq!(want.div_ceil(MIB), 512 - 500 + 93);
            shrunk_after = Some(second);
            break;
        }
    }
    assert_eq!(shrunk_after, Some(3));
}

#[test]
fn rule_8_minimum_of_surplus_over_idle_time_counts() {
    let mut rig = Rig::new();
    rig.plug(512);
    rig.report(1000, 500);
    rig.report(1000, 403);
    rig.report(9000, 400);
    rig.report(1000, 700);
    let want = rig.report(1000, 700).want_bytes.expect("shrinks");
    assert_eq!(want.div_ceil(MIB), 512 - 400 + 93);
    rig.report(1000, 700);
    assert_eq!(rig.report(1, 700).want_bytes, Some(0), "3,001 ms after the minimum");
}

#[test]
fn rule_8_nothing_is_returned_while_guest_fills_or_waits() {
    let mut rig = Rig::new();
    rig.plug(512);
    rig.report(1000, 250);
    // The headroom and a quarter of 864 MiB are 292 MiB in total.
    for _ in 0..10 {
        rig.stall().some_us += 200_000;
        assert_eq!(rig.report(1000, 250).reason, Reason::Stalled);
    }
    let mut rig = Rig::new();
    rig.plug(512);
    rig.report(1000, 700);
    for available in (600..700).rev().step_by(10) {
        // At 40 MiB/s, 1.5 s of fill are 60 MiB, which is more than a quarter of the headroom.
        assert_eq!(rig.report(250, available).want_bytes, None);
    }
}

#[test]
fn rule_8_surplus_begins_half_a_margin_above_size_after_shrink() {
    let surplus = |available| {
        let mut rig = Rig::new();
        rig.plug(512);
        (0..5).find_map(|_| rig.report(1000, available).want_bytes)
    };
    // The headroom is 76.8 MiB. The margin is 31 thousandths of the headroom and the used memory
    // (864 - 103 MiB), which is 26 MiB.
    assert_eq!(surplus(115), None);
    assert_eq!(surplus(117).map(|want| (512 * MIB - want) / MIB), Some(14));
}

/// A guest with almost no available memory waits for requested memory for longer than `idle`.
#[test]
fn rule_8_memory_that_is_not_available_yet_is_no_surplus() {
    let mut rig = Rig::new();
    rig.host.zones[1].requested_bytes = 512 * MIB;
    for _ in 0..100 {
        assert_eq!(want_mib(rig.report(50, 10)), None, "it is pending");
    }
    rig.plug(512);
    assert_eq!(want_mib(rig.report(50, 10)), None, "waiting tasks may have filled the memory");
    // The memory is free, but it was not idle before it arrived.
    assert_eq!(want_mib(rig.report(50, 522)), None);
    assert_eq!(want_mib(rig.report(2_950, 522)), None);
    assert_eq!(
        rig.report(1, 522).reason,
        Reason::Surplus,
        "3,001 ms after the surplus was missing"
    );
}

#[test]
fn rule_8_growing_guest_keeps_four_margins() {
    let params = Params::default();
    let kept_mib = |is_at_rest| {
        let needs = Needs { used_bytes: 968 * MIB, is_at_rest, ..Needs::default() };
        let marks = Marks::new(&params, needs);
        (
            (marks.shrink_target_bytes - marks.low_bytes) / MIB,
            (marks.surplus_limit_bytes - marks.low_bytes) / MIB,
        )
    };
    assert_eq!((kept_mib(false), kept_mib(true)), ((124, 139), (31, 46)));
}

#[test]
fn rule_8_guest_that_has_filled_fast_keeps_memory_for_another_fill() {
    let params = Params::default();
    let shrink_target_bytes = |filled_mib| {
        let max_fill_rate_bytes_per_s = filled_mib * MIB;
        let needs = Needs {
            total_bytes: 1024 * MIB,
            reaction_ms: 300,
            max_fill_rate_bytes_per_s,
            ..Needs::default()
        };
        Marks::new(&params, needs).shrink_target_bytes
    };
    assert_eq!(shrink_target_bytes(100) - shrink_target_bytes(0), 150 * MIB);
}

/// With a ratio of 2, 50 of 100 MiB are reserved. Below 84 MiB, the ratio is 1 and all DRAM is
/// reserved. Removing the 17th MiB therefore enlarges the reserve by 42 MiB.
#[test]
fn rule_8_dram_stays_if_its_removal_enlarges_reserve_by_more() {
    let want_mib = |available_mib: u64, reports_reserve: bool| {
        let mut rig = Rig::with_dram(60);
        if !reports_reserve {
            rig.raw.zones[0].protected_pages = None;
        }
        (0..5).find_map(|_| want_mib(rig.report(1000, available_mib)))
    };
    // The headroom is 50 MiB, and a margin of 16 MiB is kept.
    assert_eq!((want_mib(85, true), want_mib(85, false)), (Some(44), Some(41)));
    assert_eq!(want_mib(140, true), Some(0), "the reserve is 40 MiB without added DRAM");
}

#[test]
fn rule_8_page_cache_in_use_is_no_surplus() {
    let surplus_mib = |idle: &[(u64, u64)]| {
        let mut rig = Rig::new();
        rig.plug(512);
        (rig.raw.memory.free_bytes, rig.raw.memory.cached_bytes) = (100 * MIB, 400 * MIB);
        let idle =
            idle.iter().map(|&(mib, span_ms)| NodeIdle { node: 0, idle_bytes: mib * MIB, span_ms });
        rig.raw.idle = idle.collect();
        let want = (0..5).find_map(|_| rig.report(1000, 500).want_bytes);
        want.map_or(0, |want| (512 * MIB - want) / MIB)
    };
    let all = surplus_mib(&[]);
    assert_eq!(all, 407, "500 less the headroom and a margin");
    assert_eq!(surplus_mib(&[(500, 9_000)]), all, "all memory is idle");
    assert_eq!(surplus_mib(&[(300, 9_000)]), all - 200);
    assert_eq!(
        surplus_mib(&[(300, 2_999)]),
        all,
        "the idle memory was not observed for long enough"
    );
    assert_eq!(surplus_mib(&[(50, 9_000)]), 0, "100 MiB is free, and the rest is in use");
}

#[test]
fn rule_9_grow_soon_after_shrink_lengthens_patience() {
    let mut rig = Rig::new();
    let ms = |rig: &Rig| rig.state.patience.ms(&rig.params);
    rig.plug(512);
    rig.report(1000, 200);
    rig.plug(400);
    rig.report(1000, 100);
    assert_eq!(ms(&rig), 3_000);
    rig.report(58_999, 60);
    rig.plug(402);
    rig.report(1, 60);
    assert_eq!(ms(&rig), 30_000, "the shrink was undone within a minute");
    for ms in [299_998, 299_999] {
        rig.report(ms, 300);
        rig.report(1, 300);
    }
    assert_eq!(ms(&rig), 7_500, "halved every five minutes without a regret");
}

#[test]
fn rule_9_grow_long_after_shrink_does_not_lengthen_patience() {
    let mut rig = Rig::new();
    rig.plug(512);
    rig.report(1000, 200);
    rig.plug(400);
    rig.report(1000, 100);
    rig.report(60_000, 60);
    assert_eq!(rig.state.patience.ms(&rig.params), 3_000);
}

/// A guest without room for page descriptors unplugs memory that it has just plugged, and plugs it
/// again later.
#[test]
fn rule_9_memory_that_growing_guest_unplugs_is_no_shrink() {
    let mut rig = Rig::new();
    assert!(rig.report(1000, 30).pressure);
    rig.host.zones[1].requested_bytes = 128 * MIB;
    for plugged_mib in [8, 0, 8, 0] {
        rig.host.zones[1].plugged_bytes = plugged_mib * MIB;
        assert_eq!(rig.report(50, 30).want_bytes, None, "pending");
    }
    rig.plug(128);
    rig.report(1000, 30);
    rig.host.zones[1].requested_bytes += 16 * MIB;
    rig.report(50, 30);
    assert_eq!(rig.state.patience.ms(&rig.params), 3_000, "nothing was requested back");
}

#[test]
fn rule_9_patience_doubles_at_least() {
    let mut patience = Patience::default();
    let (params, mut rig) = (Params::default(), Rig::new());
    let mut steps = Vec::new();
    for round in 1..6u64 {
        // Memory is removed, and added again within a second.
        let now = TimeMs(100_000 + round * 1_000);
        rig.plug(64);
        patience.learn(&rig.host, now);
        rig.plug(32);
        patience.learn(&rig.host, now);
        patience.record_grow(&params, now);
        steps.push(patience.ms(&params));
    }
    // The time before the first grow is longer than the upper limit.
    assert_eq!(steps, [30_000; 5]);
    let mut patience = Patience::default();
    patience.record_grow(&params, TimeMs(1_000));
    rig.plug(64);
    patience.learn(&rig.host, TimeMs(1_500));
    rig.plug(32);
    patience.learn(&rig.host, TimeMs(2_000));
    patience.record_grow(&params, TimeMs(2_500));
    assert_eq!(patience.ms(&params), 20_000);
}

/// Requests `mib` of PM. The guest returns no more memory, and the request is then withdrawn.
fn refuse(rig: &mut Rig, mib: u64, available_mib: u64) {
    rig.host.zones[1].requested_bytes = mib * MIB;
    rig.report(1000, available_mib);
    rig.host.zones[1].requested_bytes = rig.host.zones[1].plugged_bytes;
    rig.report(1000, available_mib);
}

#[test]
fn rule_10_refused_memory_is_not_requested_again_for_a_while() {
    let mut rig = Rig::new();
    rig.plug(512);
    for _ in 0..5 {
        rig.report(1000, 500);
    }
    for (pause_ms, round) in [(10_000, 1), (20_000, 2), (40_000, 3)] {
        refuse(&mut rig, 384, 500);
        assert_eq!(rig.report(pause_ms - 1, 500).want_bytes, None, "round {round}");
        assert!(rig.report(1, 500).want_bytes.is_some(), "round {round}");
    }
    // The guest finally returns the memory.
    rig.host.zones[1].requested_bytes = 384 * MIB;
    rig.report(1000, 500);
    rig.plug(384);
    assert!(rig.report(1000, 372).want_bytes.is_some());
    refuse(&mut rig, 256, 372);
    assert_eq!(rig.report(9_999, 372).want_bytes, None);
    assert!(rig.report(1, 372).want_bytes.is_some(), "the pauses restart");
}

#[test]
fn rule_10_only_refused_part_stays() {
    let mut rig = Rig::new();
    rig.plug(512);
    for _ in 0..5 {
        rig.report(1000, 500);
    }
    rig.host.zones[1].requested_bytes = 384 * MIB;
    rig.report(1000, 500);
    rig.plug(400);
    refuse(&mut rig, 384, 388);
    // The guest temporarily has 64 MiB more. Only this memory is returned.
    rig.plug(464);
    assert_eq!(rig.report(5_000, 452).want_bytes, Some(400 * MIB));
}

#[test]
fn rule_10_no_dram_in_place_of_pm_that_stays() {
    let mut rig = Rig::new();
    rig.plug(256);
    rig.host.zones[0].requested_bytes = 128 * MIB;
    rig.host.zones[0].plugged_bytes = 128 * MIB;
    rig.raw.memory.total_bytes += 128 * MIB;
    for _ in 0..5 {
        rig.report(1000, 600);
    }
    refuse(&mut rig, 128, 600);
    assert_eq!(rig.report(9_000, 600).want_bytes, None);
    assert!(rig.report(1_000, 600).want_bytes.is_some());
}

#[test]
fn rule_10_grow_instead_of_shrink_is_no_refusal() {
    let mut rig = Rig::new();
    rig.plug(512);
    for _ in 0..5 {
        rig.report(1000, 500);
    }
    rig.host.zones[1].requested_bytes = 384 * MIB;
    // The guest needs the memory now.
    assert!(rig.report(1000, 150).pressure);
    rig.host.zones[1].requested_bytes = 512 * MIB;
    rig.report(1000, 150);
    for _ in 0..30 {
        rig.report(1000, 500);
    }
    assert!(rig.report(1000, 500).want_bytes.is_some());
}
