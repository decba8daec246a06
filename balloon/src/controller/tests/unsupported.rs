//! Zones whose guest driver was refused by the device.

use super::*;

/// Controller of a guest with unsupported drivers. The guest has 384 MiB of boot memory, and 256
/// MiB of it are in the balloon.
fn guest_with_balloon(policy: Policy) -> Rig {
    let mut rig = Rig::new(policy);
    let balloon = ZoneId(2);
    let zone =
        ZoneSizes { guest_numa_node: 0, ..ZoneSizes::empty(balloon.0, Tier::Dram, 256 * MIB) };
    rig.host.zones.push(zone);
    rig.host.balloon = Some(balloon);
    rig.refuse_driver(DRAM);
    rig.refuse_driver(PM);
    rig
}

#[test]
fn zone_with_unsupported_driver_is_never_requested_and_plan_names_reason() {
    let mut rig = Rig::fixed(600);
    rig.refuse_driver(DRAM);
    rig.refuse_driver(PM);
    for _ in 0..300 {
        let plan = rig.tick(1_000);
        assert_eq!((plan.direction, plan.reason), (Direction::Hold, Reason::UnsupportedDriver));
        assert_eq!(plan.wanted_bytes, 600 * MIB);
    }
    assert_eq!(rig.requested_mib(), (0, 0));
}

#[test]
fn short_guest_with_unsupported_drivers_gets_reason_at_each_report() {
    let mut rig = Rig::new(Policy::default());
    rig.refuse_driver(DRAM);
    rig.refuse_driver(PM);
    for _ in 0..300 {
        let plan = rig.report(50, 20);
        assert_eq!((plan.direction, plan.reason), (Direction::Hold, Reason::UnsupportedDriver));
    }
    // The kernel has no room for page descriptors either, but the driver remains the reported
    // reason.
    rig.describe(0);
    assert_eq!(rig.report(50, 20).reason, Reason::UnsupportedDriver);
}

#[test]
fn refused_driver_moves_request_to_other_zones_at_once() {
    let mut rig = Rig::new(Policy::default());
    rig.report(0, 20);
    assert!(rig.requested_mib().0 > 0);
    rig.refuse_driver(DRAM);
    rig.report(50, 20);
    let (dram, pm) = rig.requested_mib();
    assert!(dram == 0 && pm > 0, "{dram} and {pm} MiB");
}

#[test]
fn driver_after_an_unsupported_one_gets_request_at_once() {
    let mut rig = Rig::new(Policy::default());
    [DRAM, PM].into_iter().for_each(|zone| rig.refuse_driver(zone));
    (0..100).for_each(|_| drop(rig.report(50, 20)));
    assert_eq!(rig.requested_mib(), (0, 0));
    rig.host.zones.iter_mut().for_each(|zone| zone.driver = DriverState::Ready);
    rig.tick(1);
    rig.report(50, 20);
    assert!(rig.requested_mib().0 > 0);
}

#[test]
fn unsupported_driver_is_not_awaited() {
    // The only other zone does not have a driver yet.
    let mut rig = Rig::fixed(64);
    rig.refuse_driver(PM);
    rig.host.zones[DRAM].driver = DriverState::Absent;
    rig.tick(0);
    assert_eq!(rig.requested_mib(), (64, 0));
}

#[test]
fn guest_with_unsupported_drivers_is_sized_by_its_balloon() {
    let mut rig = guest_with_balloon(Policy::default());
    let plan = rig.report(50, 20);
    assert_eq!((plan.direction, rig.requested_mib()), (Direction::Grow, (0, 0)));
    let deflated_bytes = rig.host.zones[2].requested_bytes;
    assert!(deflated_bytes > 0);
    // While idle, the guest returns the deflated memory to the balloon.
    rig.raw.memory.total_bytes += deflated_bytes;
    for _ in 0..100 {
        rig.follow();
        rig.report(1_000, 340);
    }
    assert!(rig.host.zones[2].requested_bytes < deflated_bytes, "{:?}", rig.host.zones);
    // A guest that is short of memory receives all memory in the balloon, but no other memory.
    for _ in 0..100 {
        rig.report(50, 2);
        rig.follow();
    }
    assert_eq!((rig.host.zones[2].requested_bytes, rig.requested_mib()), (256 * MIB, (0, 0)));
    assert_eq!(rig.report(50, 2).reason, Reason::UnsupportedDriver);
}

#[test]
fn floor_beyond_zones_with_usable_drivers_is_ignored() {
    let mut rig = guest_with_balloon(Policy::Fixed(fixed::Params { size_bytes: 64 * MIB }));
    rig.controller
        .set_rules(Rules { floor_bytes: 512 * MIB, ..Rules::default() })
        .expect("in range");
    assert_eq!(rig.tick(0).direction, Direction::Grow);
    assert_eq!((rig.host.zones[2].requested_bytes, rig.requested_mib()), (256 * MIB, (0, 0)));
    rig.follow();
    // The floor cannot be reached completely, but the reason is still that of the policy's
    // decision.
    assert_eq!(rig.tick(10_000).reason, Reason::AtFloor);
}

#[test]
fn goal_ends_when_driver_is_refused() {
    let mut rig = Rig::new(Policy::Off);
    rig.describe(1);
    rig.report(0, 200);
    rig.set_goal(ZoneId(1), 1024 * MIB);
    let [step] = rig.step()[..] else { panic!("one zone has a goal") };
    assert!((1..1024 * MIB).contains(&step.requested_bytes), "{step:?}");
    rig.refuse_driver(PM);
    assert_eq!(rig.step(), []);
    assert!(!rig.controller.has_goals());
}
