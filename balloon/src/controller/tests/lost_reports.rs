//! Rule 6: lost reports.

use super::*;

#[test]
fn rule_6_lost_reports_of_guest_at_rest_change_nothing() {
    let mut rig = Rig::new(Policy::default());
    rig.report(1000, 280);
    assert_eq!(rig.tick(2_000).reason, Reason::Quiet);
    for _ in 0..20 {
        let plan = rig.tick(1_000);
        assert_eq!((plan.direction, plan.reason), (Direction::Hold, Reason::ReportsLost));
    }
}

#[test]
fn rule_6_lost_reports_of_short_guest_grow_in_limited_steps() {
    let mut rig = Rig::new(Policy::default());
    rig.report(1000, 30);
    rig.follow();
    let mut grown = Vec::new();
    for _ in 0..60 {
        let before = rig.host.requested_bytes();
        let plan = rig.tick(1_000);
        rig.follow();
        assert!(matches!(plan.reason, Reason::Quiet | Reason::ReportsLost));
        if plan.direction == Direction::Grow {
            grown.push((rig.host.requested_bytes() - before) / MIB);
        }
    }
    assert_eq!(grown, [64, 128, 256, 512]);
    assert_eq!(rig.report(100, 280).direction, Direction::Hold, "a report ends it");
}

#[test]
fn rule_6_guest_that_never_reported_is_left_alone() {
    let mut rig = Rig::new(Policy::default());
    for _ in 0..20 {
        assert_eq!(rig.tick(1_000).reason, Reason::NoReport);
    }
}

/// Guest with 5 MiB available under `policy`. It has room for the page descriptors of more memory
/// than any policy requests.
fn short(policy: &str) -> Rig {
    let mut rig = Rig::new(Policy::from_name(policy).expect("listed"));
    rig.host.zones[PM].max_bytes = 16_384 * MIB;
    rig.host.pool_free_bytes = 16_384 * MIB;
    rig.host.boot_bytes = 1024 * MIB;
    let zone = &mut rig.raw.zones[0];
    (zone.min_pages, zone.low_pages, zone.high_pages) = (1_500, 2_000, 2_500);
    rig.describe(60);
    rig
}

/// MiB that are added in one minute without reports, if the guest follows each request immediately.
fn added_without_reports(rig: &mut Rig) -> u64 {
    let before = rig.host.requested_bytes();
    for _ in 0..60 {
        rig.follow();
        rig.tick(1_000);
    }
    (rig.host.requested_bytes() - before) / MIB
}

#[test]
fn rule_6_guest_that_loses_its_agent_during_grow_counts_as_short() {
    for policy in ["psi", "amf", "dapper", "pmb", "memorage"] {
        let mut rig = short(policy);
        assert_eq!(rig.report(1000, 5).direction, Direction::Grow, "{policy}");
        // The policy reports no pressure while the requested memory has not arrived yet. This
        // report may be the last one.
        assert_ne!(rig.report(50, 5).reason, Reason::ReportsLost);
        assert_ne!(added_without_reports(&mut rig), 0, "{policy}");
    }
}

#[test]
fn rule_6_guest_that_received_missing_memory_is_not_short() {
    let mut rig = Rig::new(Policy::default());
    assert_eq!(rig.report(1000, 30).direction, Direction::Grow);
    rig.follow();
    rig.raw.memory.total_bytes += rig.host.requested_bytes();
    for _ in 0..20 {
        rig.report(50, 280);
    }
    assert_eq!(added_without_reports(&mut rig), 0);
}

#[test]
fn rule_6_guest_without_progress_gets_requests_after_its_agent_has_died() {
    let mut rig = short("psi");
    rig.report(1000, 5);
    rig.report(50, 5);
    let mut asked = Vec::new();
    for _ in 0..60 {
        if rig.tick(1_000).direction == Direction::Grow {
            asked.push(rig.requested_mib());
        }
    }
    assert!(asked.last().is_some_and(|(_, pm_mib)| *pm_mib > 0), "{asked:?}");
}
