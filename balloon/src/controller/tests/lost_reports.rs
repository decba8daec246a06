//! Rule 6: reports that stop coming.

use super::*;

#[test]
fn rule_6_lost_reports_of_a_guest_that_was_well_hold() {
    let mut rig = Rig::new(Policy::default());
    rig.report(1000, 280);
    assert_eq!(rig.tick(2_000).reason, Reason::Quiet);
    for _ in 0..20 {
        let plan = rig.tick(1_000);
        assert_eq!((plan.direction, plan.reason), (Direction::Hold, Reason::ReportsLost));
    }
}

#[test]
fn rule_6_lost_reports_of_a_guest_that_was_short_grow_a_few_times_and_then_hold() {
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
fn rule_6_a_guest_that_never_reported_is_left_alone() {
    let mut rig = Rig::new(Policy::default());
    for _ in 0..20 {
        assert_eq!(rig.tick(1_000).reason, Reason::NoReport);
    }
}
