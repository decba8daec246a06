//! Rules 1 to 5: grows of a guest that is short of memory.

use super::*;

#[test]
fn rule_1_guest_with_headroom_is_left_alone() {
    let mut rig = Rig::new();
    for _ in 0..20 {
        let decision = rig.report(1000, 280);
        assert_eq!((decision.want_bytes, decision.reason), (None, Reason::Enough));
    }
}

#[test]
fn rule_1_available_memory_below_headroom_grows() {
    let mut rig = Rig::new();
    // The headroom is an eighth of 352 MiB, which is 44 MiB, because 256 MiB/s for 0.3 s would be
    // more.
    assert_eq!(rig.report(1000, 44).want_bytes, None);
    let decision = rig.report(3000, 43);
    assert_eq!(decision.reason, Reason::LowAvailable);
    assert!(decision.pressure);
    assert_eq!(
        want_mib(decision),
        Some(17),
        "with a margin above the headroom, it would be 60 MiB"
    );
}

#[test]
fn rule_1_headroom_absorbs_burst_until_more_memory_is_online() {
    let params = Params::default();
    let headroom_mib = |needs| Marks::new(&params, needs).headroom_bytes / MIB;
    let needs = Needs { total_bytes: 4096 * MIB, reaction_ms: 300, ..Needs::default() };
    assert_eq!(headroom_mib(needs), 76, "256 MiB/s for 0.3 s");
    assert_eq!(headroom_mib(Needs { reaction_ms: 700, ..needs }), 179, "plugging is slow");
    assert_eq!(
        headroom_mib(Needs { total_bytes: 608 * MIB, ..needs }),
        76,
        "an eighth of total memory"
    );
    assert_eq!(
        headroom_mib(Needs { total_bytes: 512 * MIB, ..needs }),
        64,
        "at most an eighth of total memory"
    );
    assert_eq!(
        headroom_mib(Needs { total_bytes: 128 * MIB, ..needs }),
        32,
        "at least the minimum headroom"
    );
    assert_eq!(
        headroom_mib(Needs { kswapd_bytes: 77 * MIB, ..needs }),
        77,
        "at least kswapd's watermarks"
    );
}

#[test]
fn rule_1_plug_time_is_learned() {
    let mut rig = Rig::new();
    assert_eq!(rig.state.plug_time.ms(), 250, "default until a plug was measured");
    rig.report(1000, 43);
    for _ in 0..12 {
        rig.host.zones[1].requested_bytes = 16 * MIB;
        rig.report(50, 43);
    }
    rig.plug(16);
    rig.report(50, 59);
    assert_eq!(rig.state.plug_time.ms(), 650, "a slower plug counts immediately");
    // Another grow is requested. The grow is online when the next report arrives one second
    // later.
    rig.report(3000, 40);
    rig.host.zones[1].requested_bytes = 32 * MIB;
    rig.plug(32);
    rig.report(1000, 56);
    assert_eq!(rig.state.plug_time.ms(), 500, "a faster one by a quarter: 650 - (650 - 50) / 4");
    // This grow is not carried out. Later changes by a client do not affect the plug time.
    rig.report(3000, 40);
    rig.report(5000, 40);
    assert_eq!(rig.state.plug_time.ms(), 500);
}

#[test]
fn rule_2_fast_filling_guest_grows_before_it_is_short() {
    let mut rig = Rig::new();
    rig.report(1000, 200);
    assert_eq!(rig.report(100, 199).reason, Reason::Enough, "a megabyte is noise");
    // At 100 MiB/s, 1.5 s of fill are 150 MiB. The headroom is 44 MiB.
    let decision = rig.report(100, 189);
    assert_eq!(decision.reason, Reason::Filling);
    let want = want_mib(decision).expect("grows");
    assert!((130..=180).contains(&want), "slightly more than 44 + 2 x 150 - 189, not {want}");
}

#[test]
fn rule_2_fill_is_at_most_half_of_guest_memory() {
    let marks = |fill_rate_bytes_per_s| {
        let needs = Needs {
            total_bytes: 400 * MIB,
            fill_rate_bytes_per_s,
            reaction_ms: 50,
            ..Needs::default()
        };
        let marks = Marks::new(&Params::default(), needs);
        (marks.low_bytes - marks.headroom_bytes) / MIB
    };
    assert_eq!(marks(100 * MIB), 150);
    assert_eq!((marks(134 * MIB), marks(2048 * MIB)), (200, 200), "a grow covers twice the growth");
}

#[test]
fn rule_2_slow_plugging_extends_horizon() {
    let params = Params::default();
    let low_mib = |reaction_ms| {
        let needs = Needs {
            total_bytes: 8192 * MIB,
            reaction_ms,
            fill_rate_bytes_per_s: 100 * MIB,
            ..Needs::default()
        };
        let marks = Marks::new(&params, needs);
        (marks.low_bytes - marks.headroom_bytes) / MIB
    };
    assert_eq!((low_mib(300), low_mib(750), low_mib(1_000)), (150, 150, 200));
}

#[test]
fn rule_2_grow_for_a_fill_is_bounded_by_guest_size() {
    let mut rig = Rig::new();
    rig.report(1000, 350);
    let want = want_mib(rig.report(100, 1)).expect("grows");
    assert!(want <= 44 + 2 * 352 + 25, "{want}");
}

#[test]
fn rule_2_plugged_memory_that_guest_reserves_is_no_fill() {
    let mut rig = Rig::new();
    rig.report(1000, 280);
    rig.plug(128);
    // 26 of 128 MiB were used for page descriptors and reserves.
    assert_eq!(rig.report(100, 382).reason, Reason::Enough);
}

/// Ratios of the reserve are whole numbers, so the reserve may double when plugged DRAM is removed.
#[test]
fn rule_2_growth_of_reserve_is_no_fill() {
    let reason = |protected_mib: u64| {
        let mut rig = Rig::new();
        rig.raw.zones[0].protected_pages = Some(0);
        rig.report(1000, 280);
        rig.raw.zones[0].protected_pages = Some(protected_mib * MIB / PAGE_BYTES);
        rig.report(100, 210).reason
    };
    assert_eq!((reason(70), reason(0)), (Reason::Enough, Reason::Filling));
}

/// A block is in the total but not available, and the previous report is one second old. The block
/// may have been filled since. If it was, the guest cannot wait another second. If it was not, the
/// guest grows once too often and returns the memory later.
#[test]
fn rule_2_block_halfway_online_in_slow_report_counts_as_filled() {
    for is_filled in [false, true] {
        let mut rig = Rig::new();
        rig.report(1000, 150);
        rig.host.zones[1].requested_bytes = 128 * MIB;
        rig.report(1000, 150);
        rig.plug(128);
        let decision = rig.report(1000, 150);
        assert_eq!(decision.reason, Reason::Filling);
        // A quarter of 128 MiB is not counted as fill, which leaves a rate of 96 MiB/s. The
        // headroom is 60 MiB, and the smallest margin is 16 MiB.
        assert_eq!(want_mib(decision), Some(128 + 60 + 2 * 144 + 16 - 150));
        rig.host.zones[1].requested_bytes = decision.want_bytes.expect("grows");
        let available_mib = if is_filled { 150 } else { 150 + 102 };
        assert_eq!(rig.report(1000, available_mib).reason, Reason::Enough, "once");
        rig.plug(342);
        let available_mib = available_mib + 214;
        assert_eq!(rig.report(1000, available_mib).reason, Reason::Enough);
        assert!(
            (0..10).any(|_| rig.report(1000, available_mib).reason == Reason::Surplus),
            "{is_filled}"
        );
    }
}

#[test]
fn rule_3_memory_on_its_way_counts_as_available() {
    let mut rig = Rig::new();
    rig.report(1000, 60);
    let want = rig.report(3000, 30).want_bytes.expect("grows");
    rig.host.zones[1].requested_bytes = want;
    for _ in 0..5 {
        assert_eq!(rig.report(50, 40).want_bytes, None, "already requested");
    }
    // When half of the memory is online, the sum of available and awaited memory is the same.
    rig.host.zones[1].plugged_bytes = want;
    rig.raw.memory.total_bytes += want / 2;
    assert_eq!(rig.report(50, 40 + want / 2 / MIB).want_bytes, None);
}

/// Guest that has filled slowly and is below its headroom, and for which 128 MiB have been
/// requested. Its total includes `online_mib` of them, and none of them is available yet.
fn short_with_a_block_onlining(online_mib: u64) -> Rig {
    let mut rig = Rig::new();
    rig.report(1000, 45);
    rig.report(1000, 45);
    assert!(rig.report(1000, 43).pressure);
    rig.host.zones[1].requested_bytes = 128 * MIB;
    assert_eq!(rig.report(50, 43).want_bytes, None, "already requested");
    rig.host.zones[1].plugged_bytes = 128 * MIB;
    rig.raw.memory.total_bytes += online_mib * MIB;
    rig
}

#[test]
fn rule_3_block_that_is_not_available_yet_is_neither_fill_nor_missing() {
    for online_mib in [64, 128] {
        let mut rig = short_with_a_block_onlining(online_mib);
        for _ in 0..2 {
            let decision = rig.report(50, 43);
            assert_eq!(
                (decision.want_bytes, decision.reason),
                (None, Reason::Enough),
                "{online_mib} MiB"
            );
        }
        // 26 of 128 MiB were used for page descriptors and reserves. They do not count as fill in
        // later reports either.
        rig.plug(128);
        for _ in 0..40 {
            assert_eq!(rig.report(50, 43 + 102).want_bytes, None);
        }
    }
}

#[test]
fn rule_3_filled_block_is_missing_two_fast_reports_later() {
    let mut rig = short_with_a_block_onlining(128);
    assert_eq!(rig.report(50, 43).want_bytes, None);
    assert_eq!(rig.report(50, 43).want_bytes, None);
    let decision = rig.report(50, 43);
    assert!(decision.pressure);
    assert!(decision.want_bytes > Some(128 * MIB));
    // If a block was available and has been filled, more memory is requested immediately.
    let mut rig = short_with_a_block_onlining(128);
    assert_eq!(rig.report(50, 43 + 128).want_bytes, None);
    assert!(rig.report(50, 43).pressure);
    // If more memory than the block is missing, the guest also grows immediately.
    let mut rig = short_with_a_block_onlining(128);
    assert!(rig.report(50, 3).pressure);
    // After a late report, the missing memory is requested immediately.
    for ms in [301, 1_000] {
        assert!(short_with_a_block_onlining(128).report(ms, 43).pressure, "{ms} ms");
    }
    let mut rig = short_with_a_block_onlining(128);
    assert_eq!(rig.report(50, 43).want_bytes, None);
    assert!(rig.report(500, 43).pressure, "half a second is enough");
}

#[test]
fn rule_3_memory_to_be_removed_does_not_count_as_available() {
    let mut rig = Rig::new();
    rig.plug(512);
    for _ in 0..5 {
        rig.report(1000, 200);
    }
    rig.host.zones[1].requested_bytes = 256 * MIB;
    // 200 MiB are available, and the guest has to unplug 256 MiB.
    let decision = rig.report(50, 200);
    assert_eq!(decision.reason, Reason::LowAvailable);
    assert!(decision.want_bytes > Some(256 * MIB));
}

#[test]
fn rule_3_memory_about_to_leave_is_neither_fill_nor_missing_twice() {
    let mut rig = Rig::new();
    rig.params.idle_ms = 10_000;
    rig.report(1000, 280);
    rig.plug(512);
    for _ in 0..3 {
        rig.report(1000, 400);
    }
    // The guest has to unplug 128 MiB. Linux removes them first from free memory, then from the
    // total.
    rig.host.zones[1].requested_bytes = 384 * MIB;
    for available in [400, 350, 272, 272] {
        let decision = rig.report(50, available);
        assert_eq!(
            (decision.want_bytes, decision.reason),
            (None, Reason::Enough),
            "at {available}"
        );
    }
    rig.plug(384);
    assert_eq!(rig.report(50, 272).want_bytes, None);
    assert_eq!(rig.report(1000, 272).want_bytes, None);
}

#[test]
fn rule_3_use_beyond_memory_about_to_leave_is_noticed() {
    let mut rig = Rig::new();
    rig.report(1000, 280);
    rig.plug(512);
    for _ in 0..3 {
        rig.report(1000, 400);
    }
    rig.host.zones[1].requested_bytes = 384 * MIB;
    rig.report(50, 400);
    assert!(rig.report(200, 180).pressure);
}

#[test]
fn rule_3_growth_of_reserve_is_not_memory_about_to_leave() {
    let is_short = |protected_mib: u64| {
        let mut rig = Rig::new();
        rig.raw.zones[0].protected_pages = Some(0);
        rig.plug(512);
        for _ in 0..5 {
            rig.report(1000, 300);
        }
        // The guest has to unplug 128 MiB. Meanwhile, the available memory falls by 100 MiB.
        rig.host.zones[1].requested_bytes = 384 * MIB;
        rig.raw.zones[0].protected_pages = Some(protected_mib * MIB / PAGE_BYTES);
        rig.report(1000, 200).pressure
    };
    assert!(is_short(100) && !is_short(0));
}

#[test]
fn rule_3_dram_that_becomes_reserve_does_not_count() {
    let reason = |requested_mib: u64, reports_reserve: bool| {
        let mut rig = Rig::with_dram(0);
        if !reports_reserve {
            rig.raw.zones[0].protected_pages = None;
        }
        rig.host.zones[0].requested_bytes = requested_mib * MIB;
        rig.report(1000, 20).reason
    };
    // The headroom is 42 MiB. With 40 MiB of DRAM, all of it is reserved. With 80 MiB, only 20 MiB
    // are reserved.
    assert_eq!((reason(40, true), reason(80, true)), (Reason::LowAvailable, Reason::Enough));
    assert_eq!(reason(40, false), Reason::Enough);
}

/// DRAM that is online but reserved for the kernel never becomes available.
#[test]
fn rule_3_dram_in_reserve_is_not_onlining() {
    let is_short = |protected_mib: u64| {
        let mut rig = Rig::with_dram(0);
        rig.report(1000, 100);
        rig.host.zones[0].requested_bytes = 40 * MIB;
        rig.host.zones[0].plugged_bytes = 40 * MIB;
        rig.raw.memory.total_bytes += 40 * MIB;
        rig.raw.zones[1].managed_pages += 40 * MIB / PAGE_BYTES;
        rig.raw.zones[0].protected_pages = Some(protected_mib * MIB / PAGE_BYTES);
        rig.report(50, 20).pressure
    };
    assert!(is_short(80) && !is_short(40));
}

#[test]
fn rule_4_grows_in_close_succession_double() {
    let mut rig = Rig::new();
    rig.params.horizon_ms = 0;
    let mut steps = Vec::new();
    let mut requested = 0;
    for _ in 0..5 {
        // The available memory does not change after a grow, because the guest fills the new
        // memory.
        rig.raw.memory.total_bytes = 352 * MIB + requested;
        let want = rig.report(1000, 30).want_bytes.expect("grows");
        steps.push((want - requested) / MIB);
        requested = want;
        rig.host.zones[1].requested_bytes = want;
        rig.host.zones[1].plugged_bytes = want;
    }
    assert!(steps.windows(2).all(|pair| pair[1] >= pair[0]), "{steps:?}");
    assert!(steps[4] >= 16 << 4, "{steps:?}");
}

#[test]
fn rule_4_grow_that_is_not_carried_out_doubles_nothing() {
    let mut rig = Rig::new();
    rig.params.horizon_ms = 0;
    rig.report(1000, 30);
    let first = want_mib(rig.report(1000, 30));
    for _ in 0..10 {
        assert_eq!(want_mib(rig.report(900, 30)), first);
    }
}

#[test]
fn rule_4_grow_after_a_pause_is_small_again() {
    let mut rig = Rig::new();
    rig.params.horizon_ms = 0;
    rig.report(1000, 46);
    // Only 2 MiB of each grow arrive, which is too little to matter.
    let mut mib = 0;
    let mut more_mib = |rig: &mut Rig, ms, available_mib| {
        let more = want_mib(rig.report(ms, available_mib)).map(|want| want - mib);
        if more.is_some() {
            mib += 2;
            rig.plug(mib);
        }
        more
    };
    for _ in 0..4 {
        assert!(more_mib(&mut rig, 900, 43).is_some());
    }
    assert_eq!(more_mib(&mut rig, 500, 50), None);
    assert!(more_mib(&mut rig, 501, 43) < Some(32), "1,001 ms after the last grow");
    assert_eq!(more_mib(&mut rig, 1000, 35), Some(32), "1,000 ms after the last grow");
}

#[test]
fn rule_5_swapping_grows_if_little_memory_is_available() {
    let mut rig = Rig::new();
    rig.params.horizon_ms = 0;
    rig.report(1000, 131);
    rig.swapped_out();
    // The headroom and a quarter of 352 MiB are 132 MiB in total.
    let decision = rig.report(1000, 131);
    assert_eq!(decision.reason, Reason::Swapping);
    assert_eq!(want_mib(decision), Some(80), "twice the swapped memory");
}

#[test]
fn rule_5_swapping_with_plenty_available_is_a_cgroup_limit() {
    let mut rig = Rig::new();
    rig.params.horizon_ms = 0;
    rig.report(1000, 132);
    rig.swapped_out();
    assert_eq!(rig.report(1000, 132).want_bytes, None);
}

#[test]
fn rule_5_memory_that_a_cgroup_limit_swaps_out_is_neither_fill_nor_shortage() {
    let mut rig = Rig::new();
    rig.report(1000, 120);
    // More than 1 MiB is swapped out in every period, but no pages are scanned.
    for _ in 0..4 {
        rig.counters().pswpout += 10_240;
        assert_eq!(rig.report(1000, 120).want_bytes, None);
    }
    // Swapped pages are attributed to the guest up to the number of scanned pages.
    let grows_by_mib = |looked_at| {
        let mut rig = Rig::new();
        rig.report(1000, 120);
        rig.counters().pswpout += 10_240;
        rig.counters().pgscan_kswapd += looked_at;
        want_mib(rig.report(1000, 120))
    };
    assert_eq!(grows_by_mib(1), Some(16), "the minimum step");
    assert!(grows_by_mib(10_240) >= Some(80), "{:?}", grows_by_mib(10_240));
}

#[test]
fn rule_5_stalls_grow_if_little_memory_is_available() {
    let mut rig = Rig::new();
    rig.report(1000, 120);
    rig.stall().some_us += 99_000;
    assert_eq!(
        rig.report(1000, 120).want_bytes,
        None,
        "tasks waited less than a tenth of the time"
    );
    rig.report(3000, 120);
    rig.stall().some_us += 101_000;
    assert_eq!(rig.report(1000, 120).reason, Reason::Stalled);
}

#[test]
fn rule_5_signs_before_a_grow_do_not_count_again() {
    let mut rig = Rig::new();
    rig.report(1000, 100);
    rig.stall().some_us += 500_000;
    assert_eq!(want_mib(rig.report(1000, 100)), Some(16));
    rig.host.zones[1].requested_bytes = 16 * MIB;
    assert_eq!(rig.report(50, 100).want_bytes, None, "pending");
    rig.plug(16);
    for _ in 0..10 {
        // The guest is still below the limit. The headroom and a quarter of 368 MiB are 138 MiB.
        assert_eq!(rig.report(100, 116).want_bytes, None, "has come");
    }
    rig.stall().some_us += 500_000;
    assert_eq!(rig.report(100, 116).reason, Reason::Stalled, "new stalls count");
}
