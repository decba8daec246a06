//! Rule 3: floors, ceilings and the pool's free memory.

use super::*;

#[test]
fn rule_3_floors_and_ceilings_of_zones_limit_requests() {
    let mut rig = Rig::fixed(4096);
    assert_eq!(rig.tick(0).limited_by, Some(Reason::AtCeiling));
    assert_eq!(rig.requested_mib(), (128, 1024));
    rig.follow();
    assert_eq!(rig.tick(1_000).reason, Reason::AtCeiling);

    rig.host.zones[PM].floor_bytes = 1000 * MIB;
    rig.host.zones[DRAM].floor_bytes = 128 * MIB;
    rig.want(0);
    assert_eq!(rig.tick(6_000).limited_by, Some(Reason::AtFloor));
    assert_eq!(rig.requested_mib(), (128, 1000));
    rig.follow();
    assert_eq!(rig.tick(6_000).reason, Reason::AtFloor);
}

/// Guest with full DRAM and two nodes of PM. Its last shrink removed memory from node 1.
fn shrunk_from_node_1() -> Rig {
    let mut rig = Rig::new(Policy::default());
    rig.host.zones[DRAM].requested_bytes = 128 * MIB;
    rig.host.zones[PM].requested_bytes = 256 * MIB;
    let other = ZoneSizes { id: ZoneId(2), guest_numa_node: 2, ..rig.host.zones[PM] };
    rig.host.zones.push(other);
    rig.follow();
    rig.report(1_000, 280);
    rig.controller.last.as_mut().expect("reported").decision.from = Some(1);
    rig
}

#[test]
fn rule_3_grow_to_floor_ignores_node_of_last_shrink() {
    for ceiling_mib in [None, Some(576)] {
        let mut rig = shrunk_from_node_1();
        let bounds = match ceiling_mib {
            None => Rules { floor_bytes: 704 * MIB, ..Rules::default() },
            Some(mib) => Rules { ceiling_bytes: mib * MIB, ..Rules::default() },
        };
        rig.controller.set_rules(bounds).expect("in bounds");
        let plan = rig.tick(100);
        let pm = [PM, PM + 1].map(|zone| rig.host.zones[zone].requested_bytes / MIB);
        match ceiling_mib {
            // The order is that of the host's zones, as in every grow without a near node.
            None => assert_eq!((plan.reason, pm), (Reason::BelowFloor, [320, 256])),
            Some(_) => assert_eq!((plan.reason, pm), (Reason::AboveCeiling, [192, 256])),
        }
    }
}

#[test]
fn rule_3_empty_pool_limits_pm_and_is_reported() {
    let mut rig = Rig::fixed(1152);
    rig.host.pool_free_bytes = 101 * MIB;
    assert_eq!(rig.tick(0).limited_by, Some(Reason::PoolEmpty));
    assert_eq!(rig.requested_mib(), (128, 100));
    // Requested memory that is not plugged yet will also be allocated from the pool.
    assert_eq!(rig.tick(1_000).reason, Reason::PoolEmpty);
    assert_eq!(rig.requested_mib(), (128, 100));
}

#[test]
fn rule_3_unmovable_onlining_gets_a_quarter_of_each_zone() {
    let mut rig = Rig::new(Policy::default());
    rig.raw.blocks.online_policy = OnlinePolicy::Online;
    rig.raw.memory.total_bytes = 352 * MIB;
    let plan = rig.report(1000, 0);
    assert_eq!(rig.requested_mib(), (32, 28));
    assert_eq!(plan.reason, Reason::LowAvailable);
    rig.follow();
    rig.raw.memory.total_bytes += 60 * MIB;
    rig.raw.memory.available_bytes = 0;
    for _ in 0..9 {
        rig.report(1000, 0);
        rig.follow();
    }
    assert_eq!(rig.requested_mib(), (32, 256), "a quarter of each");
    assert_eq!(rig.report(1000, 0).reason, Reason::OnlinePolicy);
}

#[test]
fn rule_3_floor_and_ceiling_limit_sum_of_zones() {
    let mut rig = Rig::new(Policy::default());
    let rules = Rules { floor_bytes: 200 * MIB, ceiling_bytes: 300 * MIB, ..Rules::default() };
    rig.controller.set_rules(rules).expect("in bounds");
    // Growing to the floor needs neither a report nor pressure.
    let plan = rig.tick(0);
    assert_eq!((plan.direction, plan.reason), (Direction::Grow, Reason::BelowFloor));
    assert_eq!(rig.requested_mib(), (128, 72));
    rig.follow();
    rig.want(1000);
    let plan = rig.tick(1_000);
    assert_eq!((plan.direction, plan.limited_by), (Direction::Grow, Some(Reason::AtCeiling)));
    assert_eq!(rig.requested_mib(), (128, 172));
    rig.follow();
    assert_eq!(rig.tick(1_000).reason, Reason::AtCeiling);
    rig.want(0);
    let plan = rig.tick(6_000);
    assert_eq!((plan.direction, plan.limited_by), (Direction::Shrink, Some(Reason::AtFloor)));
    assert_eq!(rig.requested_mib(), (128, 72));
    rig.follow();
    assert_eq!(rig.tick(6_000).reason, Reason::AtFloor);
}

#[test]
fn rule_3_lowered_ceiling_is_reached_in_steps() {
    let mut rig = Rig::fixed(800);
    rig.tick(0);
    rig.follow();
    let rules = Rules { ceiling_bytes: 500 * MIB, ..Rules::default() };
    rig.controller.set_rules(rules).expect("in bounds");
    assert_eq!(rig.tick(1_000).reason, Reason::CoolDown);
    let mut steps = Vec::new();
    for _ in 0..4 {
        let plan = rig.tick(6_000);
        steps.push((plan.reason, rig.host.requested_bytes() / MIB));
        rig.follow();
    }
    let above = Reason::AboveCeiling;
    assert_eq!(steps, [(above, 672), (above, 544), (above, 500), (Reason::AtCeiling, 500)]);
}

#[test]
fn rule_3_grows_after_lost_reports_stay_below_ceiling() {
    let mut rig = Rig::new(Policy::default());
    let rules = Rules { ceiling_bytes: 100 * MIB, ..Rules::default() };
    rig.controller.set_rules(rules).expect("in bounds");
    rig.report(1000, 0);
    for _ in 0..60 {
        rig.follow();
        rig.tick(1_000);
    }
    assert_eq!(rig.requested_mib(), (100, 0));
}
