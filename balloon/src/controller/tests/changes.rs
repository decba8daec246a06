//! Changes at run time: pauses, policies and parameters.

use super::*;

#[test]
fn new_rules_keep_learned_cool_down_within_bounds() {
    let mut rig = Rig::fixed(512);
    rig.tick(0);
    rig.follow();
    rig.want(256);
    rig.tick(6_000);
    rig.follow();
    rig.want(512);
    rig.tick(1_000);
    let mut cool_down_with = |rules| {
        rig.controller.set_rules(rules).expect("in bounds");
        rig.controller.status().cool_down_ms
    };
    assert_eq!(cool_down_with(Rules { shrink_interval_ms: 2_000, ..Rules::default() }), 10_000);
    assert_eq!(cool_down_with(Rules { max_cool_down_ms: 8_000, ..Rules::default() }), 8_000);
    assert_eq!(cool_down_with(Rules { cool_down_ms: 20_000, ..Rules::default() }), 20_000);
    assert_eq!(
        cool_down_with(Rules { cool_down_ms: 1_000, ..Rules::default() }),
        1_000,
        "the controller learns nothing"
    );
}

#[test]
fn resume_of_all_zones_ends_pause_but_resume_of_one_zone_does_not() {
    let mut rig = Rig::fixed(600);
    rig.controller.pause();
    rig.controller.resume(Some(ZoneId(0)));
    assert_eq!(rig.tick(0).reason, Reason::Paused);
    rig.controller.resume(None);
    assert_eq!(rig.tick(0).direction, Direction::Grow);
}

#[test]
fn off_changes_nothing_on_any_report() {
    let mut rig = Rig::new(Policy::Off);
    let plan = rig.report(1000, 0);
    assert_eq!((plan.direction, plan.reason), (Direction::Hold, Reason::Off));
    assert_eq!(plan.changes(&rig.host).count(), 0);
}

#[test]
fn parameters_out_of_range_are_rejected_without_change() {
    let mut rig = Rig::new(Policy::default());
    let wrong = Rules { cool_down_ms: 0, ..Rules::default() };
    let error = rig.controller.set_rules(wrong).expect_err("too short");
    assert_eq!(error.to_string(), "cool_down is 0ms, must be 100ms to 24h");
    assert_eq!(rig.controller.rules(), &Rules::default());
    let wrong = Policy::Psi(psi::Params { headroom_permille: 0, ..psi::Params::default() });
    assert!(rig.controller.set_policy(wrong).is_err());
    assert_eq!(rig.controller.policy(), &Policy::default());
}

#[test]
fn new_parameters_keep_state_of_policy() {
    let mut rig = Rig::new(Policy::default());
    rig.report(1000, 280);
    rig.report(1000, 280);
    let state = rig.controller.state.clone();
    assert_ne!(state, rig.controller.policy.initial_state());
    let other = rig.controller.policy().with([("idle", &"9s".into())]).expect("in bounds");
    rig.controller.set_policy(other).expect("in bounds");
    assert_eq!(rig.controller.state, state);
    rig.want(0);
    assert_ne!(rig.controller.state, state, "another policy restarts");
}
