//! The rules of docs/policy.md, one by one.

use foreshore_proto::{Counters, Memory, NodeIdle, RawReport, Stall, Zone, ZoneKind};

use super::*;
use crate::HostView;
use crate::units::PAGE_BYTES;
use crate::{MIB, Tier, ZoneId, ZoneSizes};

/// A guest of 384 MiB with 128 MiB of DRAM and 1 GiB of PM to come, and a loop around `psi`.
#[derive(Clone)]
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
            // Short: rules 8 and 9 count in these.
            params: Params { idle_ms: 3_000, ..Params::default() },
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

    /// 40 MiB, by kswapd, which looks at pages before it swaps them.
    fn swapped_out(&mut self) {
        let counters = self.counters();
        (counters.pswpout, counters.pgscan_kswapd) = (10_240, 10_240);
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
fn rule_1_less_than_the_bridge_grows() {
    let mut rig = Rig::new();
    // 256 MiB/s for 0.3 s would be more than an eighth of 352 MiB, which is 44.
    assert_eq!(rig.report(1000, 44).want_bytes, None);
    let decision = rig.report(3000, 43);
    assert_eq!(decision.reason, Reason::LowAvailable);
    assert!(decision.pressure);
    assert_eq!(want_mib(decision), Some(17), "a slack beyond the bridge would be 60");
}

#[test]
fn rule_1_the_bridge_is_what_a_burst_takes_until_more_is_there() {
    let params = Params::default();
    let bridge_mib = |needs| Marks::new(&params, needs).rest_bytes / MIB;
    let needs = Needs { total_bytes: 4096 * MIB, reaction_ms: 300, ..Needs::default() };
    assert_eq!(bridge_mib(needs), 76, "256 MiB/s for 0.3 s");
    assert_eq!(bridge_mib(Needs { reaction_ms: 700, ..needs }), 179, "plugging is slow");
    assert_eq!(bridge_mib(Needs { total_bytes: 608 * MIB, ..needs }), 76, "an eighth of it");
    assert_eq!(bridge_mib(Needs { total_bytes: 512 * MIB, ..needs }), 64, "no more than an eighth");
    assert_eq!(bridge_mib(Needs { total_bytes: 128 * MIB, ..needs }), 32, "but no less than that");
    assert_eq!(bridge_mib(Needs { kswapd_bytes: 77 * MIB, ..needs }), 77, "nor than kswapd's watermarks");
}

#[test]
fn rule_1_how_long_plugging_takes_is_learned() {
    let mut rig = Rig::new();
    assert_eq!(rig.state.plug_time.ms(), 250, "until it is known");
    rig.report(1000, 43);
    for _ in 0..12 {
        rig.host.zones[1].requested_bytes = 16 * MIB;
        rig.report(50, 43);
    }
    rig.plug(16);
    rig.report(50, 59);
    assert_eq!(rig.state.plug_time.ms(), 650, "a slower one counts at once");
    // Grown again, and there before the next report, which comes a second later.
    rig.report(3000, 40);
    rig.host.zones[1].requested_bytes = 32 * MIB;
    rig.plug(32);
    rig.report(1000, 56);
    assert_eq!(rig.state.plug_time.ms(), 500, "a faster one by a quarter: 650 - (650 - 50) / 4");
    // Not carried out: nothing is learned from what comes by hand later.
    rig.report(3000, 40);
    rig.report(5000, 40);
    assert_eq!(rig.state.plug_time.ms(), 500);
}

#[test]
fn rule_2_a_guest_that_fills_fast_is_given_more_before_it_is_short() {
    let mut rig = Rig::new();
    rig.report(1000, 200);
    assert_eq!(rig.report(100, 199).reason, Reason::Enough, "a megabyte is noise");
    // 100 MiB/s for 1.5 s is 150 MiB, with 44 MiB of a bridge.
    let decision = rig.report(100, 189);
    assert_eq!(decision.reason, Reason::Filling);
    let want = want_mib(decision).expect("grows");
    assert!((130..=180).contains(&want), "44 + 2 x 150 - 189 and a little, not {want}");
}

#[test]
fn rule_2_a_rate_that_cannot_last_asks_for_no_more_than_there_is() {
    let marks = |fill_bytes_per_s| {
        let needs = Needs { total_bytes: 400 * MIB, fill_bytes_per_s, reaction_ms: 50, ..Needs::default() };
        let marks = Marks::new(&Params::default(), needs);
        (marks.low_bytes - marks.rest_bytes) / MIB
    };
    assert_eq!(marks(100 * MIB), 150);
    assert_eq!((marks(134 * MIB), marks(2048 * MIB)), (200, 200), "a grow provides for twice as much");
}

#[test]
fn rule_2_slow_plugging_looks_further_ahead() {
    let params = Params::default();
    let low_mib = |reaction_ms| {
        let needs =
            Needs { total_bytes: 8192 * MIB, reaction_ms, fill_bytes_per_s: 100 * MIB, ..Needs::default() };
        let marks = Marks::new(&params, needs);
        (marks.low_bytes - marks.rest_bytes) / MIB
    };
    assert_eq!((low_mib(300), low_mib(750), low_mib(1_000)), (150, 150, 200));
}

#[test]
fn rule_2_the_fill_is_bounded_by_the_guests_own_size() {
    let mut rig = Rig::new();
    rig.report(1000, 350);
    let want = want_mib(rig.report(100, 1)).expect("grows");
    assert!(want <= 44 + 2 * 352 + 25, "{want}");
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
    let want = rig.report(3000, 30).want_bytes.expect("grows");
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
fn rule_4_a_grow_after_a_pause_starts_small_again() {
    let mut rig = Rig::new();
    rig.params.horizon_ms = 0;
    rig.report(1000, 46);
    for _ in 0..4 {
        rig.report(900, 43);
    }
    rig.report(500, 44);
    assert_eq!(want_mib(rig.report(501, 43)), Some(17), "1,001 ms after the last: up to 60");
    assert_eq!(want_mib(rig.report(1000, 43)), Some(32), "1,000 ms after the last");
}

#[test]
fn rule_5_swapping_grows_where_little_is_available() {
    let mut rig = Rig::new();
    rig.params.horizon_ms = 0;
    rig.report(1000, 131);
    rig.swapped_out();
    // The bridge and a quarter of 352 MiB are 132.
    let decision = rig.report(1000, 131);
    assert_eq!(decision.reason, Reason::Swapping);
    assert_eq!(want_mib(decision), Some(80), "twice what was swapped");
}

#[test]
fn rule_5_swapping_beside_plenty_is_a_cgroups_own_limit() {
    let mut rig = Rig::new();
    rig.params.horizon_ms = 0;
    rig.report(1000, 132);
    rig.swapped_out();
    assert_eq!(rig.report(1000, 132).want_bytes, None);
}

#[test]
fn rule_5_what_a_cgroups_own_limit_swaps_out_is_no_fill_and_no_want() {
    let mut rig = Rig::new();
    rig.report(1000, 120);
    // A MiB and more in every stretch of time, and nobody looks at pages.
    for _ in 0..4 {
        rig.counters().pswpout += 10_240;
        assert_eq!(rig.report(1000, 120).want_bytes, None);
    }
    // Of what goes out while a page is looked at, no more than that page is the guest's.
    let grows_by_mib = |looked_at| {
        let mut rig = Rig::new();
        rig.report(1000, 120);
        rig.counters().pswpout += 10_240;
        rig.counters().pgscan_kswapd += looked_at;
        want_mib(rig.report(1000, 120))
    };
    assert_eq!(grows_by_mib(1), Some(16), "the least step");
    assert!(grows_by_mib(10_240) >= Some(80), "{:?}", grows_by_mib(10_240));
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
    assert_eq!(want_mib(rig.report(1000, 100)), Some(16));
    rig.host.zones[1].requested_bytes = 16 * MIB;
    assert_eq!(rig.report(50, 100).want_bytes, None, "on its way");
    rig.plug(16);
    for _ in 0..10 {
        // Still tight: the bridge and a quarter of 368 MiB are 138.
        assert_eq!(rig.report(100, 116).want_bytes, None, "has come");
    }
    rig.stall().some_us += 500_000;
    assert_eq!(rig.report(100, 116).reason, Reason::Stalled, "new ones are");
}

#[test]
fn rule_6_page_cache_that_comes_back_grows_only_while_tasks_wait() {
    let mut rig = Rig::new();
    rig.raw.memory.cached_bytes = 150 * MIB;
    rig.report(1000, 250);
    rig.counters().workingset_refault_file += 100_000;
    assert_eq!(rig.report(1000, 250).want_bytes, None, "nobody waits for it");
    rig.counters().workingset_refault_file += 100_000;
    rig.stall().some_us += 500_000;
    assert_eq!(rig.report(1000, 250).reason, Reason::Thrashing);
}

#[test]
fn rule_6_a_guest_is_given_what_comes_back_while_more_is_plugged() {
    let want_after = |pages, cached_mib| {
        let mut rig = Rig::new();
        rig.raw.memory.cached_bytes = cached_mib * MIB;
        rig.report(1000, 250);
        rig.counters().workingset_refault_file += pages;
        rig.stall().some_us += 500_000;
        want_mib(rig.report(1000, 250))
    };
    assert_eq!(want_after(2_047, 130), None, "under 8 MiB/s");
    // 120 are left, which is enough, and under the bridge and a quarter, which are 132.
    assert_eq!(want_after(2_048, 130), Some(32), "12 MiB in 1.5 s");
    assert_eq!(want_after(12_800, 130), Some(75));
    assert_eq!(want_after(25_600, 130), Some(130), "at most as much again as is cached");
    assert_eq!(want_after(25_600, 118), None, "132 are left: it is not the guest that evicts");
}

/// A guest in which `cached` of what is available is page cache that tasks have waited for.
fn missed(rig: &mut Rig, cached_mib: u64) -> Decision {
    rig.raw.memory.cached_bytes = cached_mib * MIB;
    rig.counters().workingset_refault_file += 100_000;
    rig.stall().some_us += 500_000;
    rig.report(1000, 250)
}

#[test]
fn rule_6_page_cache_that_was_missed_counts_as_used_until_it_is_forgotten() {
    let mut rig = Rig::new();
    rig.report(1000, 250);
    let decision = missed(&mut rig, 220);
    assert_eq!(decision.reason, Reason::LowAvailable, "250 less 220 are left");
    for _ in 0..299 {
        assert_eq!(rig.report(1000, 250).reason, Reason::LowAvailable);
    }
    assert_eq!(rig.report(1000, 250).reason, Reason::Enough, "after five minutes");
    // Missed again, so it is remembered for twice as long.
    missed(&mut rig, 220);
    assert_eq!(rig.report(599_000, 250).reason, Reason::LowAvailable);
    assert_eq!(rig.report(1_000, 250).reason, Reason::Enough);
}

#[test]
fn rule_6_anonymous_memory_that_is_missed_makes_no_page_cache_needed() {
    let mut rig = Rig::new();
    rig.raw.memory.cached_bytes = 100 * MIB;
    rig.report(1000, 131);
    rig.counters().workingset_refault_anon += 100_000;
    rig.stall().some_us += 500_000;
    assert_eq!(rig.report(1000, 131).reason, Reason::Thrashing);
    rig.report(1000, 131);
    assert_eq!(rig.report(1000, 131).reason, Reason::Enough, "100 of 131 would be too little");
}

/// A guest with 10 GiB of PM to come, in which a cgroup of a few hundred MiB wants more than its limit.
fn beside_plenty(pages: impl Fn(&mut Counters)) {
    let mut rig = Rig::new();
    rig.host.zones[1].max_bytes = 20 << 30;
    rig.plug(10 << 10);
    (rig.raw.memory.free_bytes, rig.raw.memory.cached_bytes) = (9 << 30, 300 * MIB);
    let mut shrunk = 0;
    for _ in 0..60 {
        pages(rig.counters());
        rig.stall().some_us += 500_000;
        let decision = rig.report(1000, 10 << 10);
        assert!(!decision.pressure, "{decision:?}");
        shrunk += u32::from(decision.reason == Reason::Surplus);
    }
    assert!(shrunk > 50, "it goes on shrinking: {shrunk}");
    // Not so far that the cgroup's want is taken for the guest's.
    let mut total_mib = 10 << 10;
    for _ in 0..60 {
        pages(rig.counters());
        rig.stall().some_us += 500_000;
        let decision = rig.report(1000, total_mib);
        assert!(!decision.pressure, "{decision:?} at {total_mib}");
        if let Some(want) = want_mib(decision) {
            rig.plug(want);
            total_mib = want;
            rig.raw.memory.free_bytes =
                rig.raw.memory.free_bytes.min((total_mib - 1).saturating_sub(300) * MIB);
        }
    }
    assert!(total_mib < 1024, "{total_mib}");
}

#[test]
fn rule_5_a_cgroup_that_swaps_beside_plenty_neither_grows_a_guest_nor_keeps_it() {
    beside_plenty(|counters| counters.pswpout += 900);
}

#[test]
fn rule_6_a_cgroup_that_misses_anonymous_memory_beside_plenty_neither_grows_a_guest_nor_keeps_it() {
    beside_plenty(|counters| counters.workingset_refault_anon += 20_000);
}

#[test]
fn rule_6_a_cgroup_that_misses_page_cache_beside_plenty_neither_grows_a_guest_nor_keeps_it() {
    beside_plenty(|counters| counters.workingset_refault_file += 20_000);
}

/// Grows of a guest that is full of page cache, of which so many pages come back a second after each of them.
fn grows(pages: impl Fn(usize) -> u64) -> (Rig, usize) {
    let mut rig = Rig::new();
    rig.host.zones[1].max_bytes = 1 << 40;
    rig.raw.memory.cached_bytes = 200 * MIB;
    rig.report(1000, 250);
    let (mut grows, mut plugged_mib) = (0, 0);
    for _ in 0..60 {
        let refaults = pages(grows);
        rig.counters().workingset_refault_file += refaults;
        rig.stall().some_us += if refaults < 2_048 { 0 } else { 500_000 };
        if let Some(want) = want_mib(rig.report(1000, 250 + plugged_mib)).filter(|want| *want > plugged_mib) {
            grows += 1;
            rig.plug(want);
            plugged_mib = want;
            rig.raw.memory.cached_bytes = (200 + want) * MIB;
            // Reports from after it has come.
            rig.report(3000, 250 + plugged_mib);
        }
    }
    (rig, grows)
}

#[test]
fn rule_6_page_cache_that_comes_back_as_fast_after_every_grow_gets_no_more() {
    let (mut rig, vain) = grows(|_| 20_000);
    assert_eq!(vain, 3);
    assert_eq!(
        rig.state.cache.needed_bytes(&Report::try_from(rig.raw.clone()).expect("sound"), TimeMs(0)),
        0
    );
    let available_mib = rig.raw.memory.available_bytes / MIB;
    rig.report(300_000, available_mib);
    rig.counters().workingset_refault_file += 20_000;
    rig.stall().some_us += 500_000;
    assert!(rig.report(1000, available_mib).pressure, "five minutes later it is tried again");
    let (_, helped) = grows(|grows| 20_000 * 6u64.pow(grows as u32) / 10u64.pow(grows as u32));
    assert_eq!(helped, 5, "each has helped, until less than 8 MiB/s came back");
}

#[test]
fn rule_6_page_cache_that_nobody_misses_counts_as_available() {
    let mut rig = Rig::new();
    rig.raw.memory.cached_bytes = 250 * MIB;
    rig.raw.memory.free_bytes = 2 * MIB;
    for _ in 0..20 {
        assert_eq!(rig.report(1000, 250).want_bytes, None);
    }
}

#[test]
fn rule_7_what_is_swapped_counts_as_need_until_it_is_cold() {
    let mut rig = Rig::new();
    rig.raw.memory.swap_total_bytes = 1024 * MIB;
    rig.raw.memory.swap_free_bytes = 904 * MIB;
    // The first report of a guest whose swap has filled before anybody looked.
    assert_eq!(want_mib(rig.report(1000, 43)), Some(60 + 120 - 43));
    rig.plug(512);
    rig.raw.memory.swap_free_bytes = 904 * MIB;
    let mut warm = rig.clone();
    // With 60 MiB of it back there is surplus beyond what is still to come, and a minute later beyond that as well.
    let left_after =
        |rig: &mut Rig, ms| rig.report(ms, 430).want_bytes.map(|want| (want + 430 * MIB) / MIB - 512);
    warm.counters().pswpin += 1;
    warm.report(1000, 430);
    let before = left_after(&mut warm, 59_000).expect("shrinks");
    let after = left_after(&mut warm, 1_000).expect("shrinks");
    assert_eq!(before - after, 120);
}

#[test]
fn rule_8_a_surplus_goes_back_after_it_has_been_idle() {
    let mut rig = Rig::new();
    rig.plug(512);
    let mut shrunk_after = None;
    for second in 0..10 {
        let decision = rig.report(1000, 500);
        if let Some(want) = decision.want_bytes {
            assert_eq!(decision.reason, Reason::Surplus);
            assert!(!decision.pressure);
            // The bridge is 76.8 MiB, and 16 of slack are kept.
            assert_eq!(want.div_ceil(MIB), 512 - 500 + 93);
            shrunk_after = Some(second);
            break;
        }
    }
    assert_eq!(shrunk_after, Some(3));
}

#[test]
fn rule_8_the_least_surplus_of_the_time_counts() {
    let mut rig = Rig::new();
    rig.plug(512);
    rig.report(1000, 500);
    rig.report(1000, 403);
    rig.report(9000, 400);
    rig.report(1000, 700);
    let want = rig.report(1000, 700).want_bytes.expect("shrinks");
    assert_eq!(want.div_ceil(MIB), 512 - 400 + 93);
    rig.report(1000, 700);
    assert_eq!(rig.report(1, 700).want_bytes, Some(0), "3,001 ms after it");
}

#[test]
fn rule_8_nothing_goes_back_while_the_guest_fills_or_waits() {
    let mut rig = Rig::new();
    rig.plug(512);
    rig.report(1000, 250);
    // The bridge and a quarter of 864 MiB are 292.
    for _ in 0..10 {
        rig.stall().some_us += 200_000;
        assert_eq!(rig.report(1000, 250).reason, Reason::Stalled);
    }
    let mut rig = Rig::new();
    rig.plug(512);
    rig.report(1000, 700);
    for available in (600..700).rev().step_by(10) {
        // 40 MiB/s are 60 MiB in 1.5 s, more than a quarter of the bridge.
        assert_eq!(rig.report(250, available).want_bytes, None);
    }
}

#[test]
fn rule_8_a_surplus_begins_half_a_slack_above_what_it_leaves() {
    let surplus = |available| {
        let mut rig = Rig::new();
        rig.plug(512);
        (0..5).find_map(|_| rig.report(1000, available).want_bytes)
    };
    // The bridge is 76.8 MiB; a slack is 31 thousandths of it and of 864 - 103 used: 26.
    assert_eq!(surplus(115), None);
    assert_eq!(surplus(117).map(|want| (512 * MIB - want) / MIB), Some(14));
}

#[test]
fn rule_8_a_guest_that_grows_keeps_four_slacks() {
    let params = Params::default();
    let kept_mib = |is_at_rest| {
        let needs = Needs { used_bytes: 968 * MIB, is_at_rest, ..Needs::default() };
        let marks = Marks::new(&params, needs);
        ((marks.keep_bytes - marks.low_bytes) / MIB, (marks.high_bytes - marks.low_bytes) / MIB)
    };
    assert_eq!((kept_mib(false), kept_mib(true)), ((124, 139), (31, 46)));
}

#[test]
fn rule_8_a_guest_that_has_filled_fast_of_late_keeps_what_it_would_fill_again() {
    let params = Params::default();
    let keep_bytes = |filled_mib| {
        let filled_bytes_per_s = filled_mib * MIB;
        let needs =
            Needs { total_bytes: 1024 * MIB, reaction_ms: 300, filled_bytes_per_s, ..Needs::default() };
        Marks::new(&params, needs).keep_bytes
    };
    assert_eq!(keep_bytes(100) - keep_bytes(0), 150 * MIB);
}

#[test]
fn rule_8_page_cache_that_is_touched_is_no_surplus() {
    let surplus_mib = |idle: &[(u64, u64)]| {
        let mut rig = Rig::new();
        rig.plug(512);
        (rig.raw.memory.free_bytes, rig.raw.memory.cached_bytes) = (100 * MIB, 400 * MIB);
        let idle = idle.iter().map(|&(mib, span_ms)| NodeIdle { node: 0, idle_bytes: mib * MIB, span_ms });
        rig.raw.idle = idle.collect();
        let want = (0..5).find_map(|_| rig.report(1000, 500).want_bytes);
        want.map_or(0, |want| (512 * MIB - want) / MIB)
    };
    let all = surplus_mib(&[]);
    assert_eq!(all, 407, "500 less the bridge and a slack");
    assert_eq!(surplus_mib(&[(500, 9_000)]), all, "idle, all of it");
    assert_eq!(surplus_mib(&[(300, 9_000)]), all - 200);
    assert_eq!(surplus_mib(&[(300, 2_999)]), all, "not known for long enough");
    assert_eq!(surplus_mib(&[(50, 9_000)]), 0, "what is free is 100, and all else is touched");
}

#[test]
fn rule_9_what_was_taken_too_early_is_left_for_longer() {
    let mut rig = Rig::new();
    let ms = |rig: &Rig| rig.state.patience.ms(&rig.params);
    rig.plug(512);
    rig.report(1000, 200);
    rig.plug(400);
    rig.report(1000, 100);
    assert_eq!(ms(&rig), 3_000);
    rig.report(58_999, 60);
    assert_eq!(ms(&rig), 30_000, "undone inside a minute, and as long after the last grow as counts");
    for _ in 0..2 {
        rig.report(299_999, 300);
        rig.report(1, 300);
    }
    assert_eq!(ms(&rig), 7_500, "halved every five minutes without a regret");
}

#[test]
fn rule_9_a_grow_long_after_a_shrink_is_no_regret() {
    let mut rig = Rig::new();
    rig.plug(512);
    rig.report(1000, 200);
    rig.plug(400);
    rig.report(1000, 100);
    rig.report(60_000, 60);
    assert_eq!(rig.state.patience.ms(&rig.params), 3_000);
}

#[test]
fn rule_9_patience_doubles_at_least() {
    let mut patience = Patience::default();
    let (params, mut rig) = (Params::default(), Rig::new());
    let mut steps = Vec::new();
    for round in 1..6u64 {
        // Taken and asked for again within a second.
        let now = TimeMs(100_000 + round * 1_000);
        rig.plug(64);
        patience.learn(&rig.host, now);
        rig.plug(32);
        patience.learn(&rig.host, now);
        patience.grown(&params, now);
        steps.push(patience.ms(&params));
    }
    // The first is longer after the last grow than anything that counts.
    assert_eq!(steps, [30_000; 5]);
    let mut patience = Patience::default();
    patience.grown(&params, TimeMs(1_000));
    rig.plug(64);
    patience.learn(&rig.host, TimeMs(1_500));
    rig.plug(32);
    patience.learn(&rig.host, TimeMs(2_000));
    patience.grown(&params, TimeMs(2_500));
    assert_eq!(patience.ms(&params), 20_000);
}

/// The guest has been asked for `mib` of PM, gives nothing more back, and the request is withdrawn.
fn refuse(rig: &mut Rig, mib: u64, available_mib: u64) {
    rig.host.zones[1].requested_bytes = mib * MIB;
    rig.report(1000, available_mib);
    rig.host.zones[1].requested_bytes = rig.host.zones[1].plugged_bytes;
    rig.report(1000, available_mib);
}

#[test]
fn rule_10_what_was_refused_is_not_asked_for_again_for_a_while() {
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
    // Given after all.
    rig.host.zones[1].requested_bytes = 384 * MIB;
    rig.report(1000, 500);
    rig.plug(384);
    assert!(rig.report(1000, 372).want_bytes.is_some());
    refuse(&mut rig, 256, 372);
    assert_eq!(rig.report(9_999, 372).want_bytes, None);
    assert!(rig.report(1, 372).want_bytes.is_some(), "the pauses begin anew");
}

#[test]
fn rule_10_of_what_was_refused_in_part_only_that_part_stays() {
    let mut rig = Rig::new();
    rig.plug(512);
    for _ in 0..5 {
        rig.report(1000, 500);
    }
    rig.host.zones[1].requested_bytes = 384 * MIB;
    rig.report(1000, 500);
    rig.plug(400);
    refuse(&mut rig, 384, 388);
    // It has 64 MiB more for a while: those go, and no more.
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
fn rule_10_a_grow_in_place_of_a_shrink_is_no_refusal() {
    let mut rig = Rig::new();
    rig.plug(512);
    for _ in 0..5 {
        rig.report(1000, 500);
    }
    rig.host.zones[1].requested_bytes = 384 * MIB;
    // The guest needs it itself.
    assert!(rig.report(1000, 150).pressure);
    rig.host.zones[1].requested_bytes = 512 * MIB;
    rig.report(1000, 150);
    for _ in 0..30 {
        rig.report(1000, 500);
    }
    assert!(rig.report(1000, 500).want_bytes.is_some());
}

#[test]
fn rule_11_what_one_decision_leaves_does_not_lead_to_the_opposite_one() {
    let params = Params::default();
    for total in [100, 352, 600, 1500, 9000, 1 << 20] {
        for used in [0, total / 2, total] {
            for swapped in [0, 100, total] {
                let needs = Needs {
                    total_bytes: total * MIB,
                    used_bytes: used * MIB,
                    swapped_bytes: swapped * MIB,
                    reaction_ms: 300,
                    is_at_rest: true,
                    ..Needs::default()
                };
                let marks = Marks::new(&params, needs);
                assert!(marks.low_bytes < marks.watch_bytes && marks.watch_bytes < marks.keep_bytes);
                let grown = Marks::new(&params, Needs { is_at_rest: false, ..needs });
                let least_step_bytes = marks.low_bytes + params.min_step_bytes;
                for grown_bytes in [grown.aim_bytes, least_step_bytes] {
                    assert!(marks.low_bytes < grown_bytes && grown_bytes < marks.high_bytes);
                }
                assert!(marks.low_bytes < marks.keep_bytes && marks.keep_bytes < marks.high_bytes);
                assert!(marks.high_bytes < grown.high_bytes);
            }
        }
    }
}

#[test]
fn rule_11_at_rest_a_guest_holds_less_than_a_tenth_over_need() {
    let params = Params::default();
    for need_mib in [352, 700, 1024, 65_536] {
        let needs = Needs {
            total_bytes: need_mib * MIB * 11 / 10,
            reaction_ms: 300,
            is_at_rest: true,
            ..Needs::default()
        };
        let bridge_bytes = Marks::new(&params, needs).rest_bytes;
        let marks = Marks::new(&params, Needs { used_bytes: need_mib * MIB - bridge_bytes, ..needs });
        assert!(marks.high_bytes - marks.rest_bytes <= need_mib * MIB / 10, "{need_mib} MiB");
    }
}

#[test]
fn rule_12_the_agent_reports_fast_before_the_guest_is_short() {
    let mut rig = Rig::new();
    // The bridge of 44 MiB and a quarter of the least slack.
    assert_eq!(rig.report(1000, 280).watermark_bytes, (44 + 4) * MIB);
}

#[test]
fn rule_13_what_is_near_the_node_that_is_short_comes_first() {
    let zone = |node, kind, free_pages| Zone {
        node,
        kind,
        free_pages,
        high_pages: 1_000,
        managed_pages: 100_000,
        ..Zone::default()
    };
    let near = |zones: &[Zone]| {
        let mut rig = Rig::new();
        rig.raw.zones = zones.to_vec();
        rig.report(1000, 280).near
    };
    let (first, second) = (zone(0, ZoneKind::Normal, 11_000), zone(1, ZoneKind::Normal, 5_999));
    assert_eq!(near(&[first]), None, "one node alone");
    assert_eq!(near(&[first, second]), Some(1), "4,999 and 10,000 above the watermark");
    assert_eq!(near(&[first, zone(1, ZoneKind::Normal, 6_000)]), None, "half as much is not short");
    assert_eq!(near(&[first, zone(2, ZoneKind::Movable, 1_000)]), None, "a node of PM is none to be near to");
    let hotplugged = zone(1, ZoneKind::Movable, 9_000);
    assert_eq!(near(&[first, second, hotplugged]), None, "it has movable memory as well");
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
fn an_agent_that_comes_after_balloon_statistics_does_not_make_its_totals_news() {
    let mut rig = Rig::new();
    (rig.raw.memory.cached_bytes, rig.raw.zones[0].kind) = (150 * MIB, ZoneKind::Normal);
    rig.raw.monotonic_ms = 4_000_000_000;
    for _ in 0..3 {
        rig.stall().some_us += 150_000;
        rig.report(1000, 250);
    }
    // Since the guest has booted, days ago.
    rig.raw.zones[0].kind = ZoneKind::Dma32;
    rig.stall().some_us = 3_600_000_000;
    rig.counters().workingset_refault_file = 1 << 30;
    rig.counters().workingset_refault_anon = 1 << 30;
    for _ in 0..3 {
        assert_eq!(rig.report(1000, 250).reason, Reason::Enough);
    }
    // And back: what is less than before is not compared with it either.
    rig.raw.zones[0].kind = ZoneKind::Normal;
    (rig.counters().workingset_refault_file, rig.counters().workingset_refault_anon) = (0, 0);
    assert_eq!(rig.report(1000, 250).reason, Reason::Enough);
    rig.raw.zones[0].kind = ZoneKind::Dma32;
    rig.counters().workingset_refault_file = 1 << 30;
    rig.stall().some_us += 500_000;
    assert_eq!(rig.report(1000, 250).reason, Reason::Enough, "waiting alone says nothing beside plenty");
    // What happens from then on counts.
    rig.counters().workingset_refault_file += 20_000;
    rig.stall().some_us += 500_000;
    assert_eq!(rig.report(1000, 250).reason, Reason::Thrashing);
}

#[test]
fn parameters_out_of_range_are_named_with_their_bounds() {
    let wrong = Params { headroom_permille: 501, ..Params::default() };
    assert_eq!(wrong.validate().expect_err("too much").to_string(), "headroom is 501, must be 10 to 500");
    let wrong = Params { watermark_scale: 0, ..Params::default() };
    assert!(wrong.validate().expect_err("none").to_string().starts_with("watermark-scale is 0,"));
}
