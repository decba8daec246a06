//! Tests that the checks detect each faulty controller. A correct controller passes the same
//! checks.

use super::broken::LIVES;
use super::happening::short;
use super::*;

/// Returns true if a check fails in one of many random runs with a faulty controller.
fn is_caught(
    check: impl Fn(usize, Rules, &[(Happening, u64)]) -> Result<(), TestCaseError>,
) -> bool {
    fails(600, &life(), |(index, rules, life)| check(index, rules, &life))
}

#[test]
fn each_broken_controller_is_detected() {
    for broken in LIVES {
        let caught = is_caught(|index, rules, life| {
            World::under(rules, policy(index), Some(broken)).live(life)
        });
        assert!(caught, "{broken:?} is not detected");
    }
}

/// Returns the violation in a run in which the guest stops using most of its memory.
fn wrong_where_much_is_left_over(broken: Option<Broken>) -> Option<String> {
    let mut world = World::new(policy(0), broken);
    let lived = world.comes_to_rest(1_200).and_then(|()| world.comes_to_rest(700));
    lived.err().map(|error| error.to_string())
}

#[test]
fn grow_or_shrink_without_reason_amid_surplus_is_detected() {
    assert_eq!(wrong_where_much_is_left_over(None), None);
    for (broken, what) in [
        (Broken::GivesAll, "less than it wants"),
        (Broken::FillsNothing, "returned without pressure: Filling"),
    ] {
        let wrong = wrong_where_much_is_left_over(Some(broken));
        assert!(wrong.as_ref().is_some_and(|wrong| wrong.contains(what)), "{broken:?}: {wrong:?}");
    }
}

/// Returns the violation in a run in which the guest grows soon after a shrink and then has to
/// shrink again.
fn violation_if_shrink_is_undone(broken: Option<Broken>) -> Option<String> {
    let mut world = World::new(policy(10), broken);
    let sized = |mib| {
        let followed = (0..ZONES).map(|zone| (Happening::Follow { zone, permille: 1000 }, 1));
        [(Happening::Fix { mib }, 6_000), (Happening::Tick, 1)]
            .into_iter()
            .chain(followed)
            .collect::<Vec<_>>()
    };
    let lived = [300, 200, 300, 200].into_iter().try_for_each(|mib| world.live(&sized(mib)));
    lived.err().map(|error| error.to_string())
}

#[test]
fn cool_down_that_does_not_double_after_an_undone_shrink_is_detected() {
    assert_eq!(violation_if_shrink_is_undone(None), None);
    let wrong = violation_if_shrink_is_undone(Some(Broken::NeverDoubles));
    assert!(
        wrong.as_ref().is_some_and(|wrong| wrong.contains("too soon after a grow")),
        "{wrong:?}"
    );
}

/// Returns the violation in a run of a guest that is short of memory. Whenever memory is plugged in
/// its last zone of DRAM, it is unplugged again.
fn violation_if_plugged_memory_bounces(broken: Option<Broken>) -> Option<String> {
    let mut world = World::new(policy(0), broken);
    let round = [
        (short(), 300),
        (Happening::Follow { zone: 0, permille: 1000 }, 1),
        (Happening::Follow { zone: 1, permille: 1000 }, 1),
        (Happening::Follow { zone: BALLOON, permille: 1000 }, 1),
        (Happening::Flap { zone: 3, ms: 10 }, 700),
        (Happening::Tick, 20),
    ];
    let lived = (0..30).try_for_each(|_| world.live(&round));
    lived.err().map(|error| error.to_string())
}

#[test]
fn counting_memory_that_does_not_stay_as_progress_is_detected() {
    assert_eq!(violation_if_plugged_memory_bounces(None), None);
    let wrong = violation_if_plugged_memory_bounces(Some(Broken::FlapIsProgress));
    assert!(wrong.as_ref().is_some_and(|wrong| wrong.contains("is waited for")), "{wrong:?}");
}

/// Returns the violation in a run of a guest that is short of memory and follows no request, after
/// a dry run has started.
fn violation_in_dry_run_of_stuck_guest(broken: Option<Broken>) -> Option<String> {
    let mut world = World::new(policy(0), broken);
    let lived = world.live(&[(short(), 300), (Happening::DryRun { on: true }, 1)]);
    let lived = lived.and_then(|()| (0..30).try_for_each(|_| world.live(&[(short(), 1_000)])));
    lived.err().map(|error| error.to_string())
}

#[test]
fn repeated_report_of_a_dry_run_is_detected() {
    assert_eq!(violation_in_dry_run_of_stuck_guest(None), None);
    let wrong = violation_in_dry_run_of_stuck_guest(Some(Broken::SaysOneThing));
    assert!(wrong.as_ref().is_some_and(|wrong| wrong.contains("it keeps repeating")), "{wrong:?}");
}

#[test]
fn controller_that_never_rests_is_detected() {
    let broken = Broken::Restless;
    let caught =
        is_caught(|index, _, _| World::new(policy(index), Some(broken)).comes_to_rest(700));
    assert!(caught, "it is not detected");
}
