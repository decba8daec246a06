//! Outcomes of decisions, tested with plans that the tests construct.

use crate::plan::ZoneTarget;
use crate::{Shortfall, Tier, ZoneId, ZoneSizes};
use foreshore_proto::Measure;

use super::*;

/// Sizes of two zones, each with its requested and its plugged size.
fn sizes(zones: [(u64, u64); 2]) -> Vec<ZoneSizes> {
    let sizes = |((requested_bytes, plugged_bytes), id)| ZoneSizes {
        block_bytes: 1,
        requested_bytes,
        plugged_bytes,
        ..ZoneSizes::empty(id, Tier::Dram, 1000)
    };
    zones.into_iter().zip(0..).map(sizes).collect()
}

fn host(zones: [(u64, u64); 2]) -> HostView {
    HostView { zones: sizes(zones), ..HostView::default() }
}

fn plan(direction: Direction, reason: Reason, targets: [u64; 2]) -> Plan {
    let target = |(requested_bytes, id)| ZoneTarget { zone: ZoneId(id), requested_bytes };
    Plan {
        direction,
        reason,
        limited_by: None,
        wanted_bytes: targets.iter().sum(),
        targets: targets.into_iter().zip(0..).map(target).collect(),
        dry_run: false,
        watermark_bytes: 0,
        watermark_of: Measure::Available,
    }
}

fn grow(targets: [u64; 2]) -> Plan {
    plan(Direction::Grow, Reason::LowAvailable, targets)
}

fn hold(reason: Reason) -> Plan {
    plan(Direction::Hold, reason, [0, 0])
}

struct Fixture(Audit);

impl Fixture {
    fn record(&mut self, plan: &Plan, zones: [(u64, u64); 2], now: u64) -> bool {
        self.record_of("psi", plan, zones, now)
    }

    fn record_of(
        &mut self,
        policy: &'static str,
        plan: &Plan,
        zones: [(u64, u64); 2],
        now: u64,
    ) -> bool {
        let host = host(zones);
        let context = DecisionContext { policy, report: None, near: None, host: &host };
        self.0.record(plan, context, TimeMs(now))
    }

    fn observe(&mut self, zones: [(u64, u64); 2], now: u64) {
        self.0.observe(&sizes(zones), TimeMs(now));
    }

    /// Returns the outcomes of all decisions, oldest first, if the zones have these plugged sizes.
    fn outcomes(&self, plugged: [u64; 2], late: bool) -> Vec<Outcome> {
        let zone = |(id, plugged_bytes)| AuditedZone { id, plugged_bytes, late };
        let zones = [("dram", plugged[0]), ("pm", plugged[1])].map(zone);
        self.0
            .newest(usize::MAX)
            .into_iter()
            .rev()
            .map(|entry| entry.info(&zones, TimeMs(0)).outcome)
            .collect()
    }
}

fn fixture() -> Fixture {
    Fixture(Audit::default())
}

#[test]
fn decision_is_reached_when_all_zones_have_followed() {
    let mut f = fixture();
    assert!(f.record(&grow([10, 20]), [(0, 0), (0, 0)], 100));
    f.observe([(10, 10), (20, 5)], 150);
    assert_eq!(f.outcomes([10, 5], false), [Outcome::Pending { moved_bytes: 15 }]);
    assert_eq!(f.outcomes([10, 5], true), [Outcome::Stuck { moved_bytes: 15 }]);
    f.observe([(10, 10), (20, 20)], 180);
    assert_eq!(f.outcomes([10, 20], false), [Outcome::Reached { after_ms: 80 }]);
    // The outcome is final after one second.
    f.observe([(10, 10), (20, 20)], 1_180);
    f.observe([(10, 0), (20, 0)], 1_180);
    assert_eq!(f.outcomes([0, 0], true), [Outcome::Reached { after_ms: 80 }]);
}

#[test]
fn grow_unplugged_again_at_once_is_not_reached() {
    let mut f = fixture();
    f.record(&grow([10, 20]), [(0, 0), (0, 0)], 100);
    f.observe([(10, 10), (20, 20)], 150);
    assert_eq!(f.outcomes([10, 20], false), [Outcome::Reached { after_ms: 50 }]);
    f.observe([(10, 10), (20, 0)], 160);
    assert_eq!(f.outcomes([10, 0], false), [Outcome::Pending { moved_bytes: 10 }]);
    assert_eq!(f.outcomes([10, 0], true), [Outcome::Stuck { moved_bytes: 10 }]);
    // The first zone is unplugged too, while the second zone has not followed yet.
    f.observe([(10, 4), (20, 0)], 170);
    assert_eq!(f.outcomes([4, 0], false), [Outcome::Pending { moved_bytes: 4 }]);
    f.observe([(10, 10), (20, 20)], 500);
    assert_eq!(f.outcomes([10, 20], false), [Outcome::Reached { after_ms: 400 }]);
    f.observe([(10, 10), (20, 0)], 510);
    let withdrawn = plan(Direction::Hold, Reason::NoProgress, [10, 0]);
    assert!(f.record(&withdrawn, [(10, 10), (20, 0)], 5_100));
    let partly = Outcome::Partly { moved_bytes: 10, after_ms: 5_000, by: Some(2), lack: None };
    assert_eq!(f.outcomes([10, 0], false), [partly, Outcome::Reached { after_ms: 0 }]);
}

#[test]
fn shrink_after_reached_grow_leaves_it_reached() {
    let mut f = fixture();
    f.record(&grow([10, 0]), [(0, 0), (0, 0)], 100);
    f.observe([(10, 10), (0, 0)], 150);
    f.record(&plan(Direction::Shrink, Reason::Surplus, [4, 0]), [(10, 10), (0, 0)], 200);
    f.observe([(4, 6), (0, 0)], 210);
    assert_eq!(f.outcomes([6, 0], false)[0], Outcome::Reached { after_ms: 50 });
}

#[test]
fn reached_and_reversed_decision_is_not_reopened_by_later_requests() {
    let reached = |after_ms| Outcome::Reached { after_ms };
    let mut f = fixture();
    f.record(&grow([10, 0]), [(0, 0), (0, 0)], 100);
    f.observe([(10, 10), (0, 0)], 150);
    f.record(&plan(Direction::Shrink, Reason::Surplus, [4, 0]), [(10, 10), (0, 0)], 200);
    f.observe([(4, 4), (0, 0)], 250);
    f.record(&grow([10, 0]), [(4, 4), (0, 0)], 300);
    f.observe([(10, 4), (0, 0)], 310);
    let pending = Outcome::Pending { moved_bytes: 0 };
    assert_eq!(f.outcomes([4, 0], false), [reached(50), reached(50), pending.clone()]);
    // A client's request does not reopen the decision either.
    let mut f = fixture();
    f.record(&grow([10, 0]), [(0, 0), (0, 0)], 100);
    f.observe([(10, 10), (0, 0)], 150);
    f.0.resized_by_client(0, &sizes([(12, 10), (0, 0)]), TimeMs(200));
    f.observe([(12, 8), (0, 0)], 210);
    assert_eq!(f.outcomes([8, 0], false), [reached(50)]);
    // Nor is the first part of a decision reopened while its second part is still open.
    let mut f = fixture();
    f.record(&grow([10, 20]), [(0, 0), (0, 0)], 100);
    f.observe([(10, 10), (20, 0)], 150);
    f.record(&plan(Direction::Shrink, Reason::Surplus, [4, 20]), [(10, 10), (20, 0)], 200);
    f.observe([(4, 4), (20, 0)], 250);
    f.record(&grow([10, 20]), [(4, 4), (20, 0)], 300);
    f.observe([(10, 4), (20, 20)], 310);
    assert_eq!(f.outcomes([4, 20], false), [reached(210), reached(50), pending]);
}

#[test]
fn reached_decision_is_reopened_although_more_is_requested_meanwhile() {
    let mut f = fixture();
    f.record(&grow([10, 0]), [(0, 0), (0, 0)], 100);
    f.observe([(10, 10), (0, 0)], 150);
    f.record(&grow([30, 0]), [(10, 10), (0, 0)], 200);
    f.observe([(30, 4), (0, 0)], 210);
    assert_eq!(f.0.open, [1, 2], "oldest first");
    f.observe([(30, 30), (0, 0)], 300);
    assert_eq!(
        f.outcomes([30, 0], false),
        [Outcome::Reached { after_ms: 200 }, Outcome::Reached { after_ms: 100 }]
    );
}

#[test]
fn shrink_is_reached() {
    let mut f = fixture();
    f.record(&plan(Direction::Shrink, Reason::Surplus, [10, 4]), [(10, 10), (20, 20)], 0);
    assert_eq!(f.outcomes([10, 11], false), [Outcome::Pending { moved_bytes: 9 }]);
    f.observe([(10, 10), (4, 4)], 30);
    assert_eq!(f.outcomes([10, 4], false), [Outcome::Reached { after_ms: 30 }]);
}

#[test]
fn larger_grow_leaves_decision_open_and_opposite_supersedes_it() {
    let mut f = fixture();
    f.record(&grow([10, 0]), [(0, 0), (0, 0)], 0);
    f.record(&grow([30, 0]), [(10, 4), (0, 0)], 50);
    f.observe([(30, 12), (0, 0)], 60);
    assert_eq!(
        f.outcomes([12, 0], false),
        [Outcome::Reached { after_ms: 60 }, Outcome::Pending { moved_bytes: 8 }]
    );
    f.record(&plan(Direction::Shrink, Reason::Surplus, [12, 0]), [(30, 12), (0, 0)], 90);
    f.observe([(12, 12), (0, 0)], 95);
    assert_eq!(
        f.outcomes([12, 0], false)[1..],
        [
            Outcome::Superseded { moved_bytes: 8, after_ms: 40, by: 3 },
            Outcome::Reached { after_ms: 0 }
        ]
    );
}

#[test]
fn request_that_guest_does_not_follow_is_withdrawn_in_part_or_whole() {
    let mut f = fixture();
    f.record(&grow([10, 0]), [(0, 0), (0, 0)], 0);
    let less = |to| plan(Direction::Hold, Reason::NoProgress, to);
    assert!(f.record(&less([5, 0]), [(10, 0), (0, 0)], 5000));
    // Although the reason is the same, this is another decision, because it makes a request.
    assert!(f.record(&less([3, 0]), [(5, 3), (0, 0)], 10_000));
    f.observe([(3, 3), (0, 0)], 10_001);
    assert_eq!(
        f.outcomes([3, 0], false),
        [
            Outcome::Withdrawn { after_ms: 5000, by: 2 },
            // The guest already had this size or less.
            Outcome::Reached { after_ms: 0 },
            Outcome::Reached { after_ms: 0 },
        ]
    );
}

#[test]
fn withdrawal_of_rest_reports_part_that_guest_has_followed() {
    let mut f = fixture();
    f.record(&grow([10, 0]), [(0, 0), (0, 0)], 0);
    f.record(&plan(Direction::Hold, Reason::NoProgress, [3, 0]), [(10, 3), (0, 0)], 5000);
    let part = Outcome::Partly { moved_bytes: 3, after_ms: 5000, by: Some(2), lack: None };
    assert_eq!(f.outcomes([3, 0], false), [part, Outcome::Reached { after_ms: 0 }]);
}

#[test]
fn grow_during_shrink_counts_as_grow() {
    let mut f = fixture();
    let shrink = plan(Direction::Shrink, Reason::Surplus, [100, 0]);
    f.record(&shrink, [(200, 200), (0, 0)], 0);
    // The requested memory is still plugged, so there is nothing to wait for.
    f.record(&grow([150, 0]), [(100, 200), (0, 0)], 10);
    let superseded = Outcome::Superseded { moved_bytes: 0, after_ms: 10, by: 2 };
    assert_eq!(f.outcomes([200, 0], false), [superseded, Outcome::Reached { after_ms: 0 }]);
    assert_eq!(f.0.newest(1)[0].info(&[], TimeMs(10)).change_bytes, 0);
    // If the request exceeds the plugged size, only the excess has to be plugged.
    f.record(&grow([230, 0]), [(150, 200), (0, 0)], 20);
    f.observe([(230, 190), (0, 0)], 25);
    assert_eq!(f.outcomes([190, 0], false)[2], Outcome::Pending { moved_bytes: 0 });
    f.observe([(230, 230), (0, 0)], 30);
    assert_eq!(f.outcomes([230, 0], false)[2], Outcome::Reached { after_ms: 10 });
    assert_eq!(f.0.newest(1)[0].info(&[], TimeMs(30)).change_bytes, 30);
}

#[test]
fn shrink_during_grow_counts_as_shrink() {
    let mut f = fixture();
    f.record(&grow([200, 0]), [(0, 0), (0, 0)], 0);
    f.record(&plan(Direction::Shrink, Reason::Surplus, [150, 0]), [(200, 100), (0, 0)], 10);
    let superseded = Outcome::Superseded { moved_bytes: 100, after_ms: 10, by: 2 };
    assert_eq!(f.outcomes([100, 0], false), [superseded, Outcome::Reached { after_ms: 0 }]);
}

#[test]
fn alternating_holds_push_out_no_decision() {
    let mut f = fixture();
    f.record(&grow([10, 0]), [(0, 0), (0, 0)], 0);
    for at in 0..4 * MAX_DECISIONS as u64 {
        let reason = [Reason::Enough, Reason::CoolDown][at as usize % 2];
        f.record(&plan(Direction::Hold, reason, [10, 0]), [(10, 10), (0, 0)], 50 * at);
    }
    assert_eq!(f.0.total(), 3);
    let times: Vec<_> = f.0.newest(10).iter().map(|entry| entry.times).collect();
    assert_eq!(times, [2 * MAX_DECISIONS as u64, 2 * MAX_DECISIONS as u64, 1]);
    // Holds after the next decision count as new decisions.
    f.record(&grow([20, 0]), [(10, 10), (0, 0)], 300_000);
    assert!(f.record(&plan(Direction::Hold, Reason::Enough, [20, 0]), [(20, 20), (0, 0)], 300_050));
}

#[test]
fn repeats_are_counted_per_policy() {
    let dry = Plan { dry_run: true, ..grow([10, 0]) };
    for plan in [hold(Reason::CoolDown), dry] {
        let mut f = fixture();
        for (policy, is_new) in [("psi", true), ("amf", true), ("amf", false), ("psi", false)] {
            assert_eq!(f.record_of(policy, &plan, [(0, 0); 2], 0), is_new, "{policy}");
        }
        let recorded = f.0.newest(10);
        let times: Vec<_> = recorded.iter().map(|entry| (entry.policy, entry.times)).collect();
        assert_eq!(times, [("amf", 2), ("psi", 2)]);
    }
}

#[test]
fn dry_run_records_one_decision_of_a_kind_per_second() {
    let mut f = fixture();
    let recorded: Vec<bool> = (0..60u64)
        .map(|at| f.record(&Plan { dry_run: true, ..grow([at, 0]) }, [(100, 100), (0, 0)], 50 * at))
        .collect();
    assert_eq!(recorded.iter().filter(|is_new| **is_new).count(), 3);
    assert!(recorded[0] && recorded[20] && recorded[40]);
    // Holds in between do not affect the result.
    let mut f = fixture();
    let mut recorded = 0;
    for at in 0..60u64 {
        let grow = Plan { dry_run: true, ..grow([at, 0]) };
        let hold = Plan { dry_run: true, ..hold(Reason::Enough) };
        recorded += u64::from(f.record(&grow, [(100, 100), (0, 0)], 50 * at));
        recorded += u64::from(f.record(&hold, [(100, 100), (0, 0)], 50 * at));
    }
    assert_eq!(recorded, 6);
}

#[test]
fn withdrawal_after_one_zone_has_followed_is_partly() {
    let mut f = fixture();
    f.record(&grow([10, 10]), [(0, 0), (0, 0)], 0);
    f.observe([(10, 10), (10, 0)], 10);
    f.record(&plan(Direction::Hold, Reason::NoProgress, [10, 0]), [(10, 10), (10, 0)], 5000);
    let part = Outcome::Partly { moved_bytes: 10, after_ms: 5000, by: Some(2), lack: None };
    assert_eq!(f.outcomes([10, 0], false)[0], part);
}

#[test]
fn outcome_names_reason_of_host() {
    let mut f = fixture();
    f.record(&grow([0, 50]), [(0, 0), (0, 0)], 0);
    let mut lowered = sizes([(0, 0), (24, 20)]);
    let mut refused = (f.0.clone(), sizes([(0, 0), (20, 20)]));
    lowered[1].shortfall = Some(Shortfall { reason: "pool-full", wanted_bytes: 50 });
    f.0.observe(&lowered, TimeMs(10));
    assert_eq!(f.outcomes([0, 20], false), [Outcome::Pending { moved_bytes: 20 }]);
    lowered[1].plugged_bytes = 24;
    f.0.observe(&lowered, TimeMs(20));
    let partly = |moved_bytes, lack: &str| {
        [Outcome::Partly { moved_bytes, after_ms: 20, by: None, lack: Some(lack.to_owned()) }]
    };
    assert_eq!(f.outcomes([0, 24], false), partly(24, "pool-full"));
    // The device has refused the driver.
    refused.1[1].is_withdrawn = true;
    refused.0.observe(&refused.1, TimeMs(20));
    assert_eq!(Fixture(refused.0).outcomes([0, 20], false), partly(20, "driver"));
}

#[test]
fn resize_by_client_ends_requests_to_that_zone_only() {
    let mut f = fixture();
    f.record(&grow([10, 0]), [(0, 0), (0, 0)], 0);
    f.record(&grow([10, 10]), [(10, 0), (0, 0)], 10);
    f.0.resized_by_client(1, &sizes([(10, 0), (10, 4)]), TimeMs(30));
    assert_eq!(
        f.outcomes([0, 4], false),
        [Outcome::Pending { moved_bytes: 0 }, Outcome::ByHand { moved_bytes: 4, after_ms: 20 }]
    );
}

#[test]
fn repeated_decision_without_request_is_counted_but_not_recorded() {
    let mut f = fixture();
    assert!(!f.record(&hold(Reason::Quiet), [(0, 0); 2], 0));
    assert!(f.record(&hold(Reason::Enough), [(0, 0); 2], 1));
    assert!(!f.record(&hold(Reason::Enough), [(0, 0); 2], 2));
    let dry = |targets| Plan { dry_run: true, ..grow(targets) };
    assert!(f.record(&dry([10, 0]), [(0, 0); 2], 3));
    assert!(!f.record(&dry([10, 0]), [(0, 0); 2], 4));
    assert!(f.record(&dry([20, 0]), [(0, 0); 2], 3 + DRY_RUN_MS));
    let times: Vec<_> = f.0.newest(10).iter().map(|entry| entry.times).collect();
    assert_eq!(times, [1, 2, 2]);
    assert_eq!(f.outcomes([0, 0], false), [Outcome::None, Outcome::DryRun, Outcome::DryRun]);
    assert_eq!(f.0.total(), 3);
}

#[test]
fn oldest_decisions_are_dropped_including_open_ones() {
    let mut f = fixture();
    for round in 0..MAX_DECISIONS as u64 + 10 {
        f.record(&grow([round + 1, 0]), [(round, 0), (0, 0)], round);
    }
    assert_eq!(f.0.ring.len(), MAX_DECISIONS);
    assert_eq!(f.0.open.len(), MAX_DECISIONS);
    // The number of a dropped decision would be out of bounds here.
    f.observe([(2000, 2000), (0, 0)], 9000);
    assert!(f.0.open.is_empty());
    let outcomes = f.outcomes([2000, 0], false);
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Reached { .. })));
    let kept = f.0.newest(usize::MAX).into_iter().map(|entry| entry.seq);
    assert!(kept.eq((11..=MAX_DECISIONS as u64 + 10).rev()));
    assert_eq!(f.0.newest(3).len(), 3);
}
