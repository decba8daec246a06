//! Rule 8: dry runs.

use super::*;

#[test]
fn rule_8_a_dry_run_decides_and_starts_no_cool_down() {
    let mut rig = Rig::fixed(600);
    rig.controller.set_dry_run(true);
    for _ in 0..3 {
        let plan = rig.tick(100);
        assert!(plan.dry_run);
        assert_eq!((plan.direction, plan.requested_bytes()), (Direction::Grow, 600 * MIB));
    }
    assert_eq!(rig.requested_mib(), (0, 0));
    rig.controller.set_dry_run(false);
    rig.tick(100);
    assert_eq!(rig.requested_mib(), (128, 472));
}

#[test]
fn rule_8_a_dry_run_leaves_no_trace_of_what_it_did_not_do() {
    let mut rig = Rig::fixed(64);
    rig.tick(0);
    rig.controller.set_dry_run(true);
    for _ in 0..60 {
        rig.tick(1_000);
    }
    assert_eq!(rig.tick(0).reason, Reason::NoProgress, "what it would do");
    rig.controller.set_dry_run(false);
    assert_eq!(rig.tick(0).reason, Reason::NoProgress);
    assert_eq!(rig.requested_mib().0, 32, "as if it were the first time");

    let mut rig = Rig::new(Policy::default());
    rig.report(1000, 30);
    rig.follow();
    rig.controller.set_dry_run(true);
    for _ in 0..60 {
        rig.tick(1_000);
    }
    rig.controller.set_dry_run(false);
    let before = rig.host.requested_bytes();
    assert_eq!(rig.tick(0).direction, Direction::Grow);
    assert_eq!(rig.host.requested_bytes() - before, 64 * MIB, "the first of the steps");
}
