//! Rule 1: grows go to their full target at once, DRAM first.

use super::*;

#[test]
fn rule_1_a_grow_goes_to_its_full_target_at_once_dram_first() {
    let mut rig = Rig::fixed(600);
    let plan = rig.tick(0);
    assert_eq!((plan.direction, plan.reason, plan.limited_by), (Direction::Grow, Reason::FixedSize, None));
    assert_eq!(rig.requested_mib(), (128, 472));
    let mut rig = Rig::fixed(100);
    rig.tick(0);
    assert_eq!(rig.requested_mib(), (100, 0));
}

#[test]
fn rule_1_sizes_are_rounded_up_to_blocks() {
    let mut rig = Rig::new(Policy::default());
    rig.report(1000, 43);
    assert!(rig.host.zones.iter().all(|zone| zone.requested_bytes % zone.block_bytes == 0));
    assert!(rig.host.requested_bytes() > 0);
}

#[test]
fn pressure_takes_back_a_shrink_that_the_guest_has_not_followed() {
    let mut rig = Rig::fixed(512);
    rig.tick(0);
    rig.follow();
    rig.want(0);
    rig.tick(6_000);
    assert_eq!(rig.requested_mib(), (128, 256));
    // What is still plugged is there at once, before more DRAM could be.
    rig.host.zones[DRAM].max_bytes = 256 * MIB;
    rig.want(500);
    rig.tick(100);
    assert_eq!(rig.requested_mib(), (128, 372));
}

#[test]
fn rule_1_what_is_asked_for_is_in_progress_until_it_is_there() {
    let mut rig = Rig::fixed(64);
    assert_eq!(rig.tick(0).reason, Reason::FixedSize);
    assert_eq!(rig.tick(100).reason, Reason::InProgress);
    rig.host.zones[DRAM].plugged_bytes = 62 * MIB;
    assert_eq!(rig.tick(100).reason, Reason::InProgress);
    rig.follow();
    assert_eq!(rig.tick(100).reason, Reason::Enough);
    // A hand's request is not the loop's, and nobody waits for what is kept of a zone that does not follow.
    rig.controller.pin(ZoneId(1), &rig.host, rig.now);
    rig.host.zones[PM].requested_bytes = 64 * MIB;
    rig.want(128);
    assert_eq!(rig.tick(100).reason, Reason::Enough);
    let mut rig = Rig::new(Policy::default());
    assert_eq!(rig.report(1_000, 40).reason, Reason::LowAvailable);
    assert_eq!(rig.report(50, 40).reason, Reason::InProgress);
}
