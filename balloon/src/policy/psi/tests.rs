//! The rules of docs/policy.md, one by one.

use foreshore_proto::{Counters, Memory, RawReport, Stall, Zone, ZoneKind};

use super::*;
use crate::{MIB, Tier, ZoneId, ZoneSizes};

/// A guest of 384 MiB with 128 MiB of DRAM and 1 GiB of PM to come, and a loop around `psi`.
struct Rig {
    params: Params,
    state: State,
    host: HostView,
    raw: RawReport,
}

impl Rig {
    fn new() -> Self {
        let zone = |id, tier, max_mib| ZoneSizes {
            id: ZoneId(id),
            tier,
            guest_numa_node: id,
            block_bytes: 2 * MIB,
            floor_bytes: 0,
            max_bytes: max_mib * MIB,
            requested_bytes: 0,
            plugged_bytes: 0,
        };
        let total_bytes = 352 * MIB;
        Rig {
            params: Params::default(),
            state: State::default(),
            host: HostView {
                zones: vec![zone(0, Tier::Dram, 128), zone(1, Tier::Pm, 1024)],
                boot_bytes: 384 * MIB,
                pool_free_bytes: 1024 * MIB,
                ..HostView::default()
            },
            raw: RawReport {
                version: foreshore_proto::PROTOCOL_VERSION,
                seq: 0,
                monotonic_ms: 10_000,
                memory: Memory { total_bytes, available_bytes: 280 * MIB, ..Memory::default() },
                zones: vec![Zone {
                    kind: ZoneKind::Dma32,
                    free_pages: 50_000,
                    min_pages: 500,
                    low_pages: 625,
                    high_pages: 750,
                    managed_pages: total_bytes / PAGE_BYTES,
                    ..Zone::default()
                }],
                ..RawReport::default()
            },
        }
    }

    /// Sets what is available, and reports `ms` after the report before.
    fn report(&mut self, ms: u64, available_mib: u64) -> Decision {
        self.raw.seq += 1;
        self.raw.monotonic_ms += ms;
        self.raw.memory.available_bytes = available_mib * MIB;
        let report = Report::try_from(self.raw.clone()).expect("sound");
        let input = Input { report: &report, host: &self.host };
        let now = TimeMs(self.raw.monotonic_ms);
        let (state, decision) = decide(&self.params, self.state.clone(), input, now);
        self.state = state;
        decision
    }

    /// The guest has `mib` of PM, online and available.
    fn plug(&mut self, mib: u64) {
        self.host.zones[1].requested_bytes = mib * MIB;
        self.host.zones[1].plugged_bytes = mib * MIB;
        self.raw.memory.total_bytes = (352 + mib) * MIB;
    }

    fn counters(&mut self) -> &mut Counters {
        &mut self.raw.counters
    }

    fn stall(&mut self) -> &mut Stall {
        &mut self.raw.stall
    }
}

fn want_mib(decision: Decision) -> Option<u64> {
    decision.want_bytes.map(|bytes| bytes / MIB)
}

#[test]
fn rule_1_a_guest_with_headroom_is_left_alone() {
    let mut rig = Rig::new();
    for _ in 0..20 {
        let decision = rig.report(1000, 280);
        assert_eq!((decision.want_bytes, decision.reason), (None, Reason::Enough));
    }
}

#[test]
fn rule_1_less_than_the_headroom_grows_to_twice_the_headroom() {
    let mut rig = Rig::new();
    rig.report(1000, 46);
    // An eighth of 352 MiB is 44 MiB.
    let decision = rig.report(3000, 43);
    assert_eq!(decision.reason, Reason::LowAvailable);
    assert!(decision.pressure);
    assert_eq!(want_mib(decision), Some(2 * 44 - 43));
}

#[test]
fn rule_1_high_watermarks_raise_the_headroom() {
    let mut rig = Rig::new();
    rig.raw.zones[0].high_pages = 20 * MIB / PAGE_BYTES;
    rig.report(1000, 170);
    let decision = rig.report(3000, 159);
    assert_eq!(decision.reason, Reason::LowAvailable, "8 x 20 MiB");
}

#[test]
fn rule_2_a_guest_that_fills_fast_is_given_more_before_it_is_short() {
    let mut rig = Rig::new();
    rig.report(1000, 200);
    assert_eq!(rig.report(100, 199).reason, Reason::Enough, "a megabyte is noise");
    // 100 MiB/s for 1.5 s is 150 MiB, with 44 MiB at rest.
    let decision = rig.report(100, 189);
    assert_eq!(decision.reason, Reason::Filling);
    let want = want_mib(decision).expect("grows");
    assert!((180..=205).contains(&want), "2 x (44 + 150) - 189, not {want}");
}

#[test]
fn rule_2_the_bridge_is_bounded_by_the_guests_own_size() {
    let mut rig = Rig::new();
    rig.report(1000, 350);
    let want = want_mib(rig.report(100, 1)).expect("grows");
    assert!(want <= 2 * (44 + 352), "{want}");
}

#[test]
fn rule_2_what_the_guest_keeps_of_plugged_memory_is_no_fill() {
    let mut rig = Rig::new();
    rig.report(1000, 280);
    rig.plug(128);
    // 26 of 128 MiB went to page descriptors and reserves.
    assert_eq!(rig.report(100, 382).reason, Reason::Enough);
}

#[test]
fn rule_3_what_is_on_its_way_counts_as_available() {
    let mut rig = Rig::new();
    rig.report(1000, 60);
    let want = rig.report(3000, 40).want_bytes.expect("grows");
    rig.host.zones[1].requested_bytes = want;
    for _ in 0..5 {
        assert_eq!(rig.report(50, 40).want_bytes, None, "asked for already");
    }
    // Half of it is online: the sum is the same.
    rig.host.zones[1].plugged_bytes = want;
    rig.raw.memory.total_bytes += want / 2;
    assert_eq!(rig.report(50, 40 + want / 2 / MIB).want_bytes, None);
}

#[test]
fn rule_3_what_is_on_its_way_back_does_not() {
    let mut rig = Rig::new();
    rig.plug(512);
    for _ in 0..5 {
        rig.report(1000, 200);
    }
    rig.host.zones[1].requested_bytes = 256 * MIB;
    // 200 MiB are available, of which 256 are to go.
    let decision = rig.report(50, 200);
    assert_eq!(decision.reason, Reason::LowAvailable);
    assert!(decision.want_bytes > Some(256 * MIB));
}

#[test]
fn rule_3_memory_that_is_about_to_leave_is_neither_fill_nor_missing_twice() {
    let mut rig = Rig::new();
    rig.report(1000, 280);
    rig.plug(512);
    for _ in 0..3 {
        rig.report(1000, 400);
    }
    // 128 MiB are asked back; Linux takes them out of the free pages, then out of the total.
    rig.host.zones[1].requested_bytes = 384 * MIB;
    for available in [400, 350, 272, 272] {
        let decision = rig.report(50, available);
        assert_eq!((decision.want_bytes, decision.reason), (None, Reason::Enough), "at {available}");
    }
    rig.plug(384);
    assert_eq!(rig.report(50, 272).want_bytes, None);
    assert_eq!(rig.report(1000, 272).want_bytes, None);
}

#[test]
fn rule_3_use_that_exceeds_what_is_about_to_leave_is_seen() {
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
fn rule_4_grows_that_follow_closely_double() {
    let mut rig = Rig::new();
    rig.params.horizon_ms = 0;
    let mut steps = Vec::new();
    let mut requested = 0;
    for _ in 0..5 {
        // Available stays where it is, whatever is given: somebody eats it all.
        rig.raw.memory.total_bytes = 352 * MIB + requested;
        let want = rig.report(1000, 43).want_bytes.expect("grows");
        steps.push((want - requested) / MIB);
        requested = want;
        rig.host.zones[1].requested_bytes = want;
        rig.host.zones[1].plugged_bytes = want;
    }
    assert!(steps.windows(2).all(|pair| pair[1] >= pair[0]), "{steps:?}");
    assert!(steps[4] >= 32 << 4, "{steps:?}");
}

#[test]
fn rule_4_a_grow_after_a_pause_starts_small_again() {
    let mut rig = Rig::new();
    rig.params.horizon_ms = 0;
    for _ in 0..4 {
        rig.report(1000, 43);
    }
    rig.report(1000, 100);
    rig.report(3500, 100);
    assert_eq!(want_mib(rig.report(1000, 40)), Some(48));
}

#[test]
fn rule_5_swapping_grows_where_little_is_available() {
    let mut rig = Rig::new();
    rig.params.horizon_ms = 0;
    rig.report(1000, 100);
    rig.counters().pswpout = 10_240;
    let decision = rig.report(1000, 100);
    assert_eq!(decision.reason, Reason::Swapping);
    assert_eq!(want_mib(decision), Some(80), "twice what was swapped");
}

#[test]
fn rule_5_swapping_beside_plenty_is_a_cgroups_own_limit() {
    let mut rig = Rig::new();
    rig.report(1000, 280);
    rig.counters().pswpout = 10_240;
    assert_eq!(rig.report(1000, 280).want_bytes, None);
}

#[test]
fn rule_5_waiting_tasks_grow_where_little_is_available() {
    let mut rig = Rig::new();
    rig.report(1000, 120);
    rig.stall().some_us += 99_000;
    assert_eq!(rig.report(1000, 120).want_bytes, None, "under a tenth of the time");
    rig.report(3000, 120);
    rig.stall().some_us += 101_000;
    assert_eq!(rig.report(1000, 120).reason, Reason::Stalled);
}

#[test]
fn rule_5_signs_of_before_a_grow_are_not_counted_again() {
    let mut rig = Rig::new();
    rig.report(1000, 100);
    rig.stall().some_us += 500_000;
    assert_eq!(want_mib(rig.report(1000, 100)), Some(32));
    rig.host.zones[1].requested_bytes = 32 * MIB;
    assert_eq!(rig.report(50, 100).want_bytes, None, "on its way");
    rig.plug(32);
    for _ in 0..10 {
        // Still tight: three times the headroom is 144 MiB.
        assert_eq!(rig.report(100, 132).want_bytes, None, "has come");
    }
    rig.stall().some_us += 500_000;
    assert_eq!(rig.report(100, 132).reason, Reason::Stalled, "new ones are");
}

#[test]
fn rule_6_page_cache_that_comes_back_grows_only_while_tasks_wait() {
    let mut rig = Rig::new();
    rig.report(1000, 250);
    rig.counters().workingset_refault_file += 100_000;
    assert_eq!(rig.report(1000, 250).want_bytes, None, "nobody waits for it");
    rig.counters().workingset_refault_file += 100_000;
    rig.stall().some_us += 500_000;
    assert_eq!(rig.report(1000, 250).reason, Reason::Thrashing);
}

#[test]
fn rule_7_a_surplus_goes_back_after_it_has_been_idle() {
    let mut rig = Rig::new();
    rig.plug(512);
    let mut shrunk_after = None;
    for second in 0..10 {
        let decision = rig.report(1000, 700);
        if let Some(want) = decision.want_bytes {
            assert_eq!(decision.reason, Reason::Surplus);
            assert!(!decision.pressure);
            // An eighth of 864 MiB is 108; nine quarters of it are kept.
            assert_eq!(want, 512 * MIB - (700 - 243) * MIB);
            shrunk_after = Some(second);
            break;
        }
    }
    assert_eq!(shrunk_after, Some(3));
}

#[test]
fn rule_7_the_least_surplus_of_the_time_counts() {
    let mut rig = Rig::new();
    rig.report(1000, 280);
    rig.plug(512);
    rig.report(1000, 405);
    rig.report(1000, 400);
    rig.report(1000, 700);
    rig.report(1000, 700);
    let want = rig.report(1000, 700).want_bytes.expect("shrinks");
    assert_eq!(want, 512 * MIB - (400 - 243) * MIB);
}

#[test]
fn rule_7_nothing_goes_back_while_the_guest_fills_or_waits() {
    let mut rig = Rig::new();
    rig.plug(512);
    for _ in 0..10 {
        rig.stall().some_us += 200_000;
        assert_eq!(rig.report(1000, 700).want_bytes, None);
    }
    for available in (600..700).rev().step_by(10) {
        // 40 MiB/s are 60 MiB in 1.5 s, more than a quarter of the headroom.
        assert_eq!(rig.report(250, available).want_bytes, None);
    }
}

#[test]
fn rule_8_what_a_shrink_leaves_asks_for_no_grow() {
    for total in [352, 600, 1500, 9000] {
        let mut rig = Rig::new();
        rig.raw.memory.total_bytes = total * MIB;
        let report = Report::try_from(rig.raw.clone()).expect("sound");
        let marks = Marks::new(&rig.params, &report, &Rates::default());
        assert!(marks.keep_bytes > marks.watch_bytes && marks.watch_bytes > marks.low_bytes);
        assert!(marks.high_bytes > marks.keep_bytes && marks.high_bytes > marks.aim_bytes);
    }
}

#[test]
fn a_clock_that_starts_again_is_survived() {
    let mut rig = Rig::new();
    rig.report(1000, 200);
    rig.raw.monotonic_ms = 0;
    assert_eq!(rig.report(5, 200).want_bytes, None);
    assert_eq!(rig.report(1000, 200).want_bytes, None);
}

#[test]
fn parameters_out_of_range_are_named_with_their_bounds() {
    let wrong = Params { headroom_permille: 501, ..Params::default() };
    assert_eq!(wrong.validate().expect_err("too much").to_string(), "headroom is 501, must be 10 to 500");
    let wrong = Params { watermark_scale: 0, ..Params::default() };
    assert!(wrong.validate().expect_err("none").to_string().starts_with("watermark-scale is 0,"));
}
