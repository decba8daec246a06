//! Helpers for the tests of several policies: a guest whose values can be set, and checks for the
//! rows and borders of tables.

use foreshore_proto::{
    Blocks, Memory, OnlinePolicy, PROTOCOL_VERSION, RawReport, Report, Zone, ZoneKind,
};

use super::numa_view::NodeView;
use super::threshold_table::{self, Factor, Row};
use super::{Decision, Input, Policy, PolicyState};
use crate::plan::Reason;
use crate::units::PAGE_BYTES;
use crate::{HostView, MIB, Tier, TimeMs, ZoneSizes};

pub(super) const GIB: u64 = 1024 * MIB;

/// Watermarks of the machine on which AMF was measured, in pages (16, 20 and 24 MiB).
pub(super) const MIN: u64 = 4097;
pub(super) const LOW: u64 = 5121;
pub(super) const HIGH: u64 = 6145;

/// A policy, and a guest with nodes of DRAM and nodes of PM.
pub(super) struct Rig {
    pub policy: Policy,
    pub state: PolicyState,
    pub host: HostView,
    pub raw: RawReport,
    pub now: TimeMs,
    /// True if decisions are not carried out.
    pub dry_run: bool,
}

impl Rig {
    /// Creates nodes of DRAM with these sizes, and the same number of nodes of PM with these
    /// maximum sizes and nothing plugged. Each node of PM is near the node of DRAM with the same
    /// index.
    pub(super) fn new(policy: Policy, dram_bytes: &[u64], pm_bytes: &[u64]) -> Self {
        let mut host = HostView {
            boot_bytes: dram_bytes.iter().sum(),
            pool_free_bytes: 1 << 44,
            ..HostView::default()
        };
        let mut raw = RawReport {
            version: PROTOCOL_VERSION,
            monotonic_ms: 10_000,
            blocks: Blocks { online_policy: OnlinePolicy::OnlineMovable, ..Blocks::default() },
            ..RawReport::default()
        };
        for (node, bytes) in (0..).zip(dram_bytes) {
            raw.zones.push(Zone {
                node,
                kind: ZoneKind::Normal,
                free_pages: bytes / PAGE_BYTES,
                min_pages: MIN,
                low_pages: LOW,
                high_pages: HIGH,
                managed_pages: bytes / PAGE_BYTES,
                ..Zone::default()
            });
        }
        let first_pm = dram_bytes.len() as u32;
        for (index, bytes) in (0..).zip(pm_bytes) {
            let node = first_pm + index;
            host.zones.push(ZoneSizes {
                guest_numa_node: node,
                ..ZoneSizes::empty(index, Tier::Pm, *bytes)
            });
            raw.zones.push(Zone { node, kind: ZoneKind::Movable, ..Zone::default() });
            for from in 0..first_pm {
                host.distances.set(from, node, if from == index { 17 } else { 28 });
            }
        }
        let state = policy.initial_state();
        let mut rig = Rig { policy, state, host, raw, now: TimeMs(10_000), dry_run: false };
        rig.sum_up();
        rig
    }

    /// Computes the guest's totals from the sizes of its zones.
    pub(super) fn sum_up(&mut self) {
        let zones = &self.raw.zones;
        let free_bytes = zones.iter().map(|zone| zone.free_pages).sum::<u64>() * PAGE_BYTES;
        let total_bytes = zones.iter().map(|zone| zone.managed_pages).sum::<u64>() * PAGE_BYTES;
        self.raw.memory =
            Memory { total_bytes, free_bytes, available_bytes: free_bytes, ..self.raw.memory };
    }

    /// Sets the number of free pages in a zone of the report.
    pub(super) fn free(&mut self, zone: usize, pages: u64) {
        self.raw.zones[zone].free_pages = pages;
        self.sum_up();
    }

    /// Plugs `bytes` of a zone of PM. All of them are online and free, and no other memory is on
    /// its way.
    pub(super) fn plug(&mut self, pm: usize, bytes: u64) {
        let zone = &mut self.host.zones[pm];
        (zone.requested_bytes, zone.plugged_bytes) = (bytes, bytes);
        let node = zone.guest_numa_node;
        let zone = self.raw.zones.iter_mut().find(|zone| zone.node == node).expect("has one");
        (zone.managed_pages, zone.free_pages) = (bytes / PAGE_BYTES, bytes / PAGE_BYTES);
        self.sum_up();
    }

    /// Sends a report `ms` after the previous one.
    pub(super) fn report(&mut self, ms: u64) -> Decision {
        self.now = self.now + ms;
        self.raw.seq += 1;
        self.raw.monotonic_ms = self.now.0;
        let report = Report::try_from(self.raw.clone()).expect("sound");
        let input = Input { report: &report, host: &self.host, is_carried_out: !self.dry_run };
        let (state, decision) = self.policy.decide(self.state.clone(), input, self.now);
        self.state = state;
        decision
    }

    /// Amount of memory that a decision adds.
    pub(super) fn added(&self, decision: Decision) -> u64 {
        decision.want_bytes.map_or(0, |want| want.saturating_sub(self.host.requested_bytes()))
    }

    /// Amount of memory that a decision removes.
    pub(super) fn taken(&self, decision: Decision) -> u64 {
        decision.want_bytes.map_or(0, |want| self.host.requested_bytes().saturating_sub(want))
    }
}

/// A table with a factor, and a node with watermarks.
pub(super) struct TableRig {
    pub policy: fn(u64) -> Policy,
    pub table: &'static [Row],
    pub scale: u64,
    /// Watermarks min, low and high, in pages.
    pub marks: [u64; 3],
}

impl TableRig {
    /// Size of the node's DRAM.
    const D: u64 = 64 * GIB;

    /// Checks that the policy adds `times` D if `free_pages` are free, and checks the reason.
    pub(super) fn check(&self, free_pages: u64, times: u64) {
        let mut rig = Rig::new((self.policy)(self.scale), &[Self::D], &[4096 * GIB]);
        let zone = &mut rig.raw.zones[0];
        [zone.min_pages, zone.low_pages, zone.high_pages] = self.marks;
        rig.free(0, free_pages);
        let decision = rig.report(1_000);
        assert_eq!(rig.added(decision), times * Self::D, "{free_pages} pages free");
        assert_eq!(rig.taken(decision), 0);
        assert_eq!(decision.pressure, times > 0);
        assert_eq!(decision.near, (times > 0).then_some(0));
        let reason = match free_pages {
            _ if times == 0 => Reason::Enough,
            pages if pages > self.marks[2] => Reason::LowFree,
            _ => Reason::AtWatermarks,
        };
        assert_eq!(decision.reason, reason);
    }

    fn node(&self, free_pages: u64) -> NodeView {
        let [min_pages, low_pages, high_pages] = self.marks;
        NodeView { free_pages, min_pages, low_pages, high_pages, ..NodeView::default() }
    }

    /// Returns true if some case has a different result with `table` than with the correct table.
    fn detects(&self, cases: &[(u64, u64)], table: &[Row]) -> bool {
        cases.iter().any(|(free, times)| {
            threshold_table::row(table, &self.node(*free), Factor::Times(self.scale)).times
                != *times
        })
    }

    /// Checks that each faulty table fails at least one case.
    pub(super) fn check_cases(&self, cases: &[(u64, u64)]) {
        assert!(!self.detects(cases, self.table));
        for index in 0..self.table.len() {
            let mut broken = self.table.to_vec();
            broken[index].times += 1;
            assert!(self.detects(cases, &broken), "amount of row {index}");
        }
        // The last border in the paper has no effect, because the rows on both sides add the same
        // amount.
        for index in 0..self.table.len() - 2 {
            let mut broken = self.table.to_vec();
            broken[index].is_inclusive = true;
            assert!(self.detects(cases, &broken), "edge of row {index}");
            let mut broken = self.table.to_vec();
            broken.remove(index);
            assert!(self.detects(cases, &broken), "without row {index}");
        }
    }

    /// Checks that the cases detect a faulty lookup, which takes the first row whose border is
    /// below the free pages and ignores the row's upper limit.
    pub(super) fn check_overlap(&self, cases: &[(u64, u64)]) {
        assert!(!self.detects(cases, self.table));
        let first = |free: u64| {
            let node = self.node(free);
            self.table.iter().find(|row| {
                row.above.is_none_or(|border| free > border.pages(&node, Factor::Times(self.scale)))
            })
        };
        let is_wrong =
            |(free, times): &(u64, u64)| first(*free).is_some_and(|row| row.times != *times);
        assert!(cases.iter().any(is_wrong));
    }
}

/// Defines one test for each case. Also lists the cases in `CASES`, so that other tests can check
/// that a faulty table fails them.
macro_rules! cases {
    ($check:expr; $($name:ident: $at:expr => $amount:expr;)*) => {
        $(
            #[test]
            fn $name() {
                let check: fn(u64, u64) = $check;
                check($at, $amount);
            }
        )*

        const CASES: &[(u64, u64)] = &[$(($at, $amount),)*];
    };
}
pub(super) use cases;
