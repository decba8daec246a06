//! Rule 1: a grow requests the whole target immediately, DRAM first.

use super::*;

#[test]
fn rule_1_grow_requests_full_target_at_once_dram_first() {
    let mut rig = Rig::fixed(600);
    let plan = rig.tick(0);
    assert_eq!(
        (plan.direction, plan.reason, plan.limited_by),
        (Direction::Grow, Reason::FixedSize, None)
    );
    assert_eq!(rig.requested_mib(), (128, 472));
    let mut rig = Rig::fixed(100);
    rig.tick(0);
    assert_eq!(rig.requested_mib(), (100, 0));
}

#[test]
fn pressure_undoes_shrink_that_guest_has_not_followed() {
    let mut rig = Rig::fixed(512);
    rig.tick(0);
    rig.follow();
    rig.want(0);
    rig.tick(6_000);
    assert_eq!(rig.requested_mib(), (128, 256));
    // Blocks that are still plugged are used before additional DRAM.
    rig.host.zones[DRAM].max_bytes = 256 * MIB;
    rig.want(500);
    rig.tick(100);
    assert_eq!(rig.requested_mib(), (128, 372));
}

#[test]
fn rule_1_request_is_in_progress_until_plugged() {
    let mut rig = Rig::fixed(64);
    assert_eq!(rig.tick(0).reason, Reason::FixedSize);
    assert_eq!(rig.tick(100).reason, Reason::InProgress);
    rig.host.zones[DRAM].plugged_bytes = 62 * MIB;
    assert_eq!(rig.tick(100).reason, Reason::InProgress);
    rig.follow();
    assert_eq!(rig.tick(100).reason, Reason::Enough);
    // Memory that a client requested does not count as a request in progress.
    rig.pin(ZoneId(1));
    rig.host.zones[PM].requested_bytes = 64 * MIB;
    rig.want(128);
    assert_eq!(rig.tick(100).reason, Reason::Enough);
    let mut rig = Rig::new(Policy::default());
    assert_eq!(rig.report(1_000, 40).reason, Reason::LowAvailable);
    assert_eq!(rig.report(50, 40).reason, Reason::InProgress);
}

/// For 5 s, sends reports of a guest that is short of memory, while no plan is carried out. Returns
/// the size that the first plan after that requests.
fn requested_after(mut rig: Rig, act: impl Fn(&mut Rig)) -> u64 {
    for _ in 0..100 {
        rig.report(50, 30);
        assert_eq!(rig.requested_mib(), (0, 0));
    }
    act(&mut rig);
    rig.report(50, 30);
    rig.host.requested_bytes()
}

#[test]
fn psi_doubles_only_steps_that_were_requested_from_guest() {
    let fresh = requested_without_change();
    let mut paused = Rig::new(Policy::default());
    paused.controller.pause();
    assert_eq!(requested_after(paused, |rig| rig.controller.unpause()), fresh);
    let mut dry = Rig::new(Policy::default());
    dry.controller.set_dry_run(true);
    assert_eq!(requested_after(dry, |rig| rig.controller.set_dry_run(false)), fresh);
    let mut nobody_has_any = Rig::new(Policy::default());
    nobody_has_any.host.pool_free_bytes = 0;
    nobody_has_any.host.zones[DRAM].max_bytes = 0;
    let has_some = |rig: &mut Rig| rig.host.pool_free_bytes = 4096 * MIB;
    assert_eq!(requested_after(nobody_has_any, has_some), fresh);
    let mut bounded = Rig::new(Policy::default());
    let rules = Rules { ceiling_bytes: 0, ..Rules::default() };
    bounded.controller.set_rules(rules).expect("in range");
    let no_bound = |rig: &mut Rig| rig.controller.set_rules(Rules::default()).expect("in range");
    assert_eq!(requested_after(bounded, no_bound), fresh);
}

/// Size that the first plan requests if it is carried out immediately.
fn requested_without_change() -> u64 {
    let mut rig = Rig::new(Policy::default());
    rig.report(50, 30);
    rig.host.requested_bytes()
}
