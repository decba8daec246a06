//! Rule 8: dry runs.

use super::*;

#[test]
fn rule_8_dry_run_decides_without_starting_cool_down() {
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
fn rule_8_dry_run_leaves_no_state_of_skipped_actions() {
    let mut rig = Rig::fixed(64);
    rig.tick(0);
    rig.controller.set_dry_run(true);
    for _ in 0..60 {
        rig.tick(1_000);
    }
    rig.controller.set_dry_run(false);
    assert_eq!(rig.tick(0).reason, Reason::NoProgress);
    assert_eq!(rig.requested_mib().0, 32, "the dry run does not learn");

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

/// If the guest does not follow, a dry run reports `no_progress` once. After that, it shows the
/// decisions of the policy.
#[test]
fn rule_8_dry_run_reports_no_progress_once_then_policy_decisions() {
    let mut rig = Rig::fixed(64);
    rig.tick(0);
    rig.controller.set_dry_run(true);
    rig.controller.set_policy(Policy::default()).expect("in range");
    for round in 0..2 {
        assert_eq!(rig.tick(5_000).reason, Reason::NoProgress, "the planned step");
        for _ in 0..10 {
            let plan = rig.report(1_000, 20);
            assert_eq!((plan.direction, plan.reason), (Direction::Grow, Reason::LowAvailable));
            assert_eq!(plan.wanted_bytes, plan.requested_bytes(), "besides the missing part");
            assert_eq!(rig.tick(10).reason, Reason::Quiet);
        }
        // Even a small change of the request is reported again.
        rig.host.zones[DRAM].requested_bytes = (round + 1) * 2 * MIB;
        rig.tick(10);
    }
    // The dry run also does not wait for a shrink that the guest does not follow.
    rig.host.zones[DRAM].plugged_bytes = 128 * MIB;
    rig.host.zones[PM].requested_bytes = 512 * MIB;
    rig.host.zones[PM].plugged_bytes = 512 * MIB;
    rig.want(100);
    assert_eq!(rig.tick(10).reason, Reason::InProgress);
    assert_eq!(rig.tick(5_000).reason, Reason::NoProgress);
    for _ in 0..3 {
        let plan = rig.tick(1_000);
        assert_eq!((plan.direction, plan.reason), (Direction::Shrink, Reason::FixedSize));
        assert_eq!((plan.targets[DRAM].requested_bytes, plan.wanted_bytes), (128 * MIB, 100 * MIB));
    }
    assert_eq!(rig.requested_mib(), (4, 512), "the guest receives no request");
}

#[test]
fn rule_8_dry_run_reports_bounds_once_then_policy_decisions() {
    let mut rig = Rig::new(Policy::default());
    let rules = Rules { floor_bytes: 1024 * MIB, dry_run: true, ..Rules::default() };
    rig.controller.set_rules(rules.clone()).expect("in range");
    let plan = rig.report(1_000, 280);
    assert_eq!((plan.reason, plan.requested_bytes()), (Reason::BelowFloor, 1024 * MIB));
    for _ in 0..3 {
        assert_eq!(rig.report(1_000, 280).reason, Reason::Enough);
        assert_eq!(rig.tick(10).reason, Reason::Quiet);
    }
    let plan = rig.report(1_000, 20);
    assert_eq!((plan.reason, plan.limited_by), (Reason::LowAvailable, Some(Reason::BelowFloor)));
    assert_eq!(plan.requested_bytes(), 1024 * MIB);
    assert!(plan.wanted_bytes < 1024 * MIB, "the policy's plan: {plan:?}");

    // After the bounds change, the plan is reported again.
    let rules = Rules { floor_bytes: 0, ceiling_bytes: 512 * MIB, ..rules };
    rig.controller.set_rules(rules).expect("in range");
    rig.host.zones[PM].requested_bytes = 1024 * MIB;
    rig.follow();
    rig.raw.memory.total_bytes += 1024 * MIB;
    assert_eq!(rig.report(10, 500).reason, Reason::Enough, "too soon for a shrink");
    assert_eq!(rig.report(10_000, 500).reason, Reason::AboveCeiling);
    for _ in 0..3 {
        assert_eq!(rig.tick(500).reason, Reason::Quiet);
    }
    rig.want(800);
    let plan = rig.tick(1_000);
    assert_eq!((plan.direction, plan.reason), (Direction::Shrink, Reason::FixedSize));
    assert_eq!((plan.wanted_bytes, plan.requested_bytes()), (800 * MIB, 896 * MIB), "a step");
    rig.controller.set_policy(Policy::default()).expect("in range");
    let plan = rig.report(1_000, 20);
    assert_eq!(
        (plan.direction, plan.reason),
        (Direction::Hold, Reason::AtCeiling),
        "the planned size"
    );
    assert!(plan.wanted_bytes > 1024 * MIB, "the policy's plan: {plan:?}");
}

/// A removal that `dapper` decides during a dry run or a pause has no effect afterwards, when the
/// table is evaluated again.
#[test]
fn rule_8_removal_during_dry_run_or_pause_does_not_continue_afterwards() {
    let begin: [fn(&mut Controller); 2] =
        [Controller::pause, |controller| controller.set_dry_run(true)];
    for begin in begin {
        let policy = Policy::from_name("dapper").expect("listed");
        let mut rig = Rig::new(policy.with([("watermark-scale", &"1".into())]).expect("in bounds"));
        rig.host.zones[PM].requested_bytes = 1024 * MIB;
        rig.follow();
        let free = |rig: &mut Rig, dram_pages: u64, pm_mib: u64| {
            let pm_pages = pm_mib * MIB / PAGE_BYTES;
            let managed_pages = 1024 * MIB / PAGE_BYTES;
            let kind = ZoneKind::Movable;
            rig.raw.zones.truncate(1);
            rig.raw.zones[0].free_pages = dram_pages;
            rig.raw.zones.push(Zone {
                node: 1,
                kind,
                free_pages: pm_pages,
                managed_pages,
                ..Zone::default()
            });
            rig.raw.memory.total_bytes = (352 + 1024) * MIB;
            rig.raw.memory.free_bytes = (dram_pages + pm_pages) * PAGE_BYTES;
        };
        begin(&mut rig.controller);
        // The table permits the removal of all PM.
        free(&mut rig, 70_000, 1024);
        rig.report(1_000, 1_200);
        assert_eq!(rig.requested_mib().1, 1024);
        rig.controller.unpause();
        rig.controller.set_dry_run(false);
        free(&mut rig, 0, 640);
        let plan = rig.report(3_600_000, 640);
        assert_eq!((plan.direction, plan.reason), (Direction::Shrink, Reason::FreeShare));
        assert_eq!(
            plan.wanted_bytes,
            (1024 - 256) * MIB,
            "a quarter, with between 8 and 12 sixteenths free"
        );
    }
}
