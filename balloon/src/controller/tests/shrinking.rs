//! Rule 2: shrinks are delayed and done in steps.

use super::*;

#[test]
fn rule_2_shrink_waits_and_removes_pm_first_in_steps() {
    let mut rig = Rig::fixed(400);
    rig.tick(0);
    rig.follow();
    rig.want(0);
    assert_eq!(rig.tick(4_900).reason, Reason::CoolDown);
    let mut steps = Vec::new();
    for _ in 0..4 {
        let plan = rig.tick(1_000);
        assert_eq!(plan.direction, Direction::Shrink);
        rig.follow();
        steps.push(rig.requested_mib());
        let left = rig.host.requested_bytes() > 0;
        let reason = if left { Reason::CoolDown } else { Reason::Enough };
        assert_eq!(rig.tick(500).reason, reason, "half a second after a step");
    }
    assert_eq!(steps, [(128, 144), (128, 16), (128, 0), (0, 0)], "never both tiers in one step");
}

#[test]
fn rule_2_next_step_waits_for_the_last_one() {
    let mut rig = Rig::fixed(512);
    rig.tick(0);
    rig.follow();
    rig.want(0);
    rig.tick(6_000);
    let plan = rig.tick(2_000);
    assert_eq!((plan.direction, plan.reason), (Direction::Hold, Reason::InProgress));
}

/// Guest with 64 GiB plugged, for which the policy wants a size of 0.
fn large() -> Rig {
    let mut rig = Rig::fixed(64 << 10);
    rig.host.zones[PM].max_bytes = 128 << 30;
    rig.host.pool_free_bytes = 128 << 30;
    rig.host.boot_bytes = 64 << 30;
    rig.tick(0);
    rig.follow();
    rig.want(0);
    rig
}

#[test]
fn rule_2_large_guest_shrinks_in_larger_steps() {
    let mut rig = large();
    rig.tick(6_000);
    assert_eq!(rig.requested_mib().1, (56 << 10) - 128);
}

#[test]
fn rule_2_shrink_share_can_change_at_run_time() {
    let mut rig = large();
    let mut taken_mib_with = |shrink_share_permille| {
        let rules = Rules { shrink_share_permille, ..Rules::default() };
        rig.controller.set_rules(rules).expect("in range");
        let before = rig.requested_mib().1;
        rig.tick(6_000);
        rig.follow();
        before - rig.requested_mib().1
    };
    assert_eq!([taken_mib_with(0), taken_mib_with(0)], [128, 128], "`shrink_step` alone");
    assert_eq!(taken_mib_with(125), ((64 << 10) - 256) / 8);
    assert_eq!(taken_mib_with(1), 128, "less than `shrink_step`");
}

#[test]
fn rule_2_shrink_that_had_to_be_undone_doubles_cool_down() {
    let mut rig = Rig::fixed(512);
    rig.tick(0);
    rig.follow();
    rig.want(256);
    rig.tick(6_000);
    rig.follow();
    rig.want(512);
    rig.tick(1_000);
    rig.follow();
    assert_eq!(rig.controller.status().cool_down_ms, 10_000);
    rig.want(256);
    assert_eq!(rig.tick(9_000).reason, Reason::CoolDown);
    assert_eq!(rig.tick(1_500).direction, Direction::Shrink);
    rig.follow();
    rig.want(512);
    rig.tick(61_000);
    assert_eq!(rig.controller.status().cool_down_ms, 5_000, "forgotten after a minute");
}

/// Times in seconds at which the balloon is inflated. One second later, the guest deflates it, as
/// on OOM.
fn fought_at(rig: &mut Rig) -> Vec<u64> {
    let mut at = Vec::new();
    for second in 1..=200 {
        let plan = rig.tick(1_000);
        if plan.direction == Direction::Shrink {
            at.push(second);
            rig.follow();
        } else {
            let zone = &mut rig.host.zones[DRAM];
            (zone.requested_bytes, zone.plugged_bytes) = (zone.max_bytes, zone.max_bytes);
        }
    }
    at
}

#[test]
fn rule_2_deflation_on_oom_makes_inflation_rarer() {
    let ceiling = Rules { ceiling_bytes: 64 * MIB, ..Rules::default() };
    for (size_mib, rules) in [(64, Rules::default()), (128, ceiling)] {
        let mut rig = Rig::fixed(size_mib);
        rig.host.balloon = Some(ZoneId(0));
        rig.host.zones[DRAM].requested_bytes = 128 * MIB;
        rig.follow();
        rig.controller.set_rules(rules).expect("in bounds");
        // The guest deflates the balloon after 1 s, which is observed after another 1 s. The
        // cool-downs are 10, 20, 40 and 60 s.
        assert_eq!(fought_at(&mut rig), [1, 13, 35, 77, 139], "fixed at {size_mib} MiB");
        assert_eq!(rig.controller.status().cool_down_ms, 60_000);
    }
}

#[test]
fn rule_2_grow_by_a_client_starts_no_cool_down() {
    let mut rig = Rig::fixed(64);
    rig.tick(0);
    rig.follow();
    rig.tick(60_000);
    rig.pin(ZoneId(0));
    rig.host.zones[DRAM].requested_bytes = 128 * MIB;
    rig.follow();
    rig.controller.resume(None);
    assert_eq!(rig.tick(100).direction, Direction::Shrink);
}
