//! Tests of the rules in docs/reference/policies.md, one by one.

mod growing;
mod missing;
mod shrinking;

use foreshore_proto::{Counters, KernelUse, Memory, NodeIdle, RawReport, Stall, Zone, ZoneKind};

use super::*;
use crate::HostView;
use crate::units::PAGE_BYTES;
use crate::{MIB, Tier, ZoneSizes};

/// Guest of 384 MiB under `psi`, with 128 MiB of DRAM and 1 GiB of PM that can be plugged.
#[derive(Clone)]
struct Rig {
    params: Params,
    state: State,
    host: HostView,
    raw: RawReport,
}

impl Rig {
    fn new() -> Self {
        let zone = |id, tier, max_mib| ZoneSizes::empty(id, tier, max_mib * MIB);
        let total_bytes = 352 * MIB;
        Rig {
            // Rules 8 and 9 use multiples of this time, so the tests use a short one.
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

    /// Guest of 340 MiB with a ZONE_MOVABLE of 40 MiB, and `dram_mib` of plugged DRAM. Its reserve
    /// for the kernel is at least 39 to 43 MiB. It may be larger, because ratios of the reserve are
    /// whole numbers.
    fn with_dram(dram_mib: u64) -> Self {
        let mut rig = Self::new();
        let pages = |mib: u64| mib * MIB / PAGE_BYTES;
        rig.host.zones[0].requested_bytes = dram_mib * MIB;
        rig.host.zones[0].plugged_bytes = dram_mib * MIB;
        rig.raw.memory.total_bytes = (340 + dram_mib) * MIB;
        rig.raw.zones[0].managed_pages = pages(300);
        rig.raw.zones[0].protected_pages =
            Some(pages(if dram_mib < 44 { 40 + dram_mib } else { (40 + dram_mib) / 2 }));
        let (kind, managed_pages) = (ZoneKind::Movable, pages(40 + dram_mib));
        rig.raw.zones.push(Zone { kind, managed_pages, ..Zone::default() });
        rig
    }

    /// Sets the available memory, and sends a report `ms` after the previous one.
    fn report(&mut self, ms: u64, available_mib: u64) -> Decision {
        self.raw.seq += 1;
        self.raw.monotonic_ms += ms;
        self.raw.memory.available_bytes = available_mib * MIB;
        let report = Report::try_from(self.raw.clone()).expect("sound");
        let input = Input { report: &report, host: &self.host, is_carried_out: true };
        let now = TimeMs(self.raw.monotonic_ms);
        let (state, decision) = decide(&self.params, self.state.clone(), input, now);
        self.state = state;
        decision
    }

    /// Plugs `mib` of PM. All of it is online and available.
    fn plug(&mut self, mib: u64) {
        self.host.zones[1].requested_bytes = mib * MIB;
        self.host.zones[1].plugged_bytes = mib * MIB;
        self.raw.memory.total_bytes = (352 + mib) * MIB;
    }

    fn counters(&mut self) -> &mut Counters {
        &mut self.raw.counters
    }

    /// Counts 40 MiB as swapped out by kswapd, which scans pages before it swaps them.
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
fn rule_11_result_of_a_decision_does_not_lead_to_the_opposite_one() {
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
                assert!(
                    marks.low_bytes < marks.watch_bytes
                        && marks.watch_bytes < marks.shrink_target_bytes
                );
                let grown = Marks::new(&params, Needs { is_at_rest: false, ..needs });
                let least_step_bytes = marks.low_bytes + params.min_step_bytes;
                for grown_bytes in [grown.grow_target_bytes, least_step_bytes] {
                    assert!(
                        marks.low_bytes < grown_bytes && grown_bytes < marks.surplus_limit_bytes
                    );
                }
                assert!(
                    marks.low_bytes < marks.shrink_target_bytes
                        && marks.shrink_target_bytes < marks.surplus_limit_bytes
                );
                assert!(marks.surplus_limit_bytes < grown.surplus_limit_bytes);
            }
        }
    }
}

#[test]
fn rule_11_guest_at_rest_holds_at_most_a_tenth_above_need() {
    let params = Params::default();
    for need_mib in [352, 700, 1024, 65_536] {
        let needs = Needs {
            total_bytes: need_mib * MIB * 11 / 10,
            reaction_ms: 300,
            is_at_rest: true,
            ..Needs::default()
        };
        let headroom_bytes = Marks::new(&params, needs).headroom_bytes;
        let marks =
            Marks::new(&params, Needs { used_bytes: need_mib * MIB - headroom_bytes, ..needs });
        assert!(
            marks.surplus_limit_bytes - marks.headroom_bytes <= need_mib * MIB / 10,
            "{need_mib} MiB"
        );
    }
}

#[test]
fn rule_12_reports_are_fast_before_guest_is_short() {
    let mut rig = Rig::new();
    // Sum of the headroom of 44 MiB and a quarter of the smallest margin.
    assert_eq!(rig.report(1000, 280).watermark_bytes, (44 + 4) * MIB);
}

#[test]
fn rule_14_memory_near_short_node_comes_first() {
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
    assert_eq!(near(&[first, zone(2, ZoneKind::Movable, 1_000)]), None, "PM nodes have no CPUs");
    let hotplugged = zone(1, ZoneKind::Movable, 9_000);
    assert_eq!(near(&[first, second, hotplugged]), None, "the node also has movable memory");
}

#[test]
fn restart_of_guest_clock_changes_nothing() {
    let mut rig = Rig::new();
    rig.report(1000, 200);
    rig.raw.monotonic_ms = 0;
    assert_eq!(rig.report(5, 200).want_bytes, None);
    assert_eq!(rig.report(1000, 200).want_bytes, None);
}

#[test]
fn first_totals_of_agent_after_balloon_statistics_are_no_signs() {
    let mut rig = Rig::new();
    (rig.raw.memory.cached_bytes, rig.raw.zones[0].kind) = (150 * MIB, ZoneKind::Normal);
    rig.raw.monotonic_ms = 4_000_000_000;
    for _ in 0..3 {
        rig.stall().some_us += 150_000;
        rig.report(1000, 250);
    }
    // These totals count from the guest's boot, which was days ago.
    rig.raw.zones[0].kind = ZoneKind::Dma32;
    rig.stall().some_us = 3_600_000_000;
    rig.counters().workingset_refault_file = 1 << 30;
    rig.counters().workingset_refault_anon = 1 << 30;
    for _ in 0..3 {
        assert_eq!(rig.report(1000, 250).reason, Reason::Enough);
    }
    // Balloon statistics arrive again. Their lower totals are not compared either.
    rig.raw.zones[0].kind = ZoneKind::Normal;
    (rig.counters().workingset_refault_file, rig.counters().workingset_refault_anon) = (0, 0);
    assert_eq!(rig.report(1000, 250).reason, Reason::Enough);
    rig.raw.zones[0].kind = ZoneKind::Dma32;
    rig.counters().workingset_refault_file = 1 << 30;
    rig.stall().some_us += 500_000;
    assert_eq!(
        rig.report(1000, 250).reason,
        Reason::Enough,
        "waiting alone is insignificant with plenty of memory"
    );
    // Changes are counted from now on.
    rig.counters().workingset_refault_file += 20_000;
    rig.stall().some_us += 500_000;
    assert_eq!(rig.report(1000, 250).reason, Reason::Thrashing);
}

#[test]
fn parameters_out_of_range_are_named_with_their_bounds() {
    let wrong = Params { headroom_permille: 501, ..Params::default() };
    assert_eq!(
        wrong.validate().expect_err("too much").to_string(),
        "headroom is 501, must be 10 to 500"
    );
    let wrong = Params { watermark_scale: 0, ..Params::default() };
    assert!(wrong.validate().expect_err("none").to_string().starts_with("watermark-scale is 0,"));
}

/// When a stall no longer counts, the memory available to the kernel changes.
#[test]
fn rule_13_stall_of_kernel_allocation_is_not_settled_until_forgotten() {
    let mut rig = Rig::new();
    rig.raw.kernel = Some(KernelUse::default());
    let quiescent_after = |rig: &mut Rig, reports: u64| {
        for _ in 0..reports {
            rig.report(1_000, 280);
        }
        rig.state.is_quiescent(&rig.params, TimeMs(rig.raw.monotonic_ms))
    };
    assert!(quiescent_after(&mut rig, 300));
    let counters = rig.counters();
    (counters.allocstall, counters.allocstall_kernel) = (1, 1);
    assert!(!quiescent_after(&mut rig, 10));
    assert!(quiescent_after(&mut rig, 1));
}
