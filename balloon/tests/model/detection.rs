//! Tests that the checks detect each faulty controller. A correct controller passes the same
//! checks.

use super::event::short;
use super::fault::RANDOM_RUN_FAULTS;
use super::*;

/// Returns true if a check fails in one of many random runs with a faulty controller.
fn is_detected(
    check: impl Fn(usize, Rules, &[(VmEvent, u64)]) -> Result<(), TestCaseError>,
) -> bool {
    fails(600, &event_sequence(), |(index, rules, events)| check(index, rules, &events))
}

#[test]
fn each_faulty_controller_is_detected() {
    for fault in RANDOM_RUN_FAULTS {
        let detected = is_detected(|index, rules, events| {
            World::under(rules, policy(index), Some(fault)).run_events(events)
        });
        assert!(detected, "{fault:?} is not detected");
    }
}

/// Returns the violation in a run in which the guest stops using most of its memory.
fn violation_amid_surplus(fault: Option<Fault>) -> Option<String> {
    let mut world = World::new(policy(0), fault);
    let result = world.check_stabilizes(1_200).and_then(|()| world.check_stabilizes(700));
    result.err().map(|error| error.to_string())
}

#[test]
fn grow_or_shrink_without_reason_amid_surplus_is_detected() {
    assert_eq!(violation_amid_surplus(None), None);
    for (fault, what) in [
        (Fault::RemovesMargin, "less than it wants"),
        (Fault::GrowsWithoutFill, "returned without pressure: Filling"),
    ] {
        let wrong = violation_amid_surplus(Some(fault));
        assert!(wrong.as_ref().is_some_and(|wrong| wrong.contains(what)), "{fault:?}: {wrong:?}");
    }
}

/// Returns the violation in a run in which the guest grows soon after a shrink and then has to
/// shrink again.
fn violation_if_shrink_is_undone(fault: Option<Fault>) -> Option<String> {
    let mut world = World::new(policy(10), fault);
    let sized = |mib| {
        let followed = (0..ZONES).map(|zone| (VmEvent::Follow { zone, permille: 1000 }, 1));
        [(VmEvent::Fix { mib }, 6_000), (VmEvent::Tick, 1)]
            .into_iter()
            .chain(followed)
            .collect::<Vec<_>>()
    };
    let result = [300, 200, 300, 200].into_iter().try_for_each(|mib| world.run_events(&sized(mib)));
    result.err().map(|error| error.to_string())
}

#[test]
fn cool_down_that_does_not_double_after_an_undone_shrink_is_detected() {
    assert_eq!(violation_if_shrink_is_undone(None), None);
    let wrong = violation_if_shrink_is_undone(Some(Fault::NeverDoubles));
    assert!(
        wrong.as_ref().is_some_and(|wrong| wrong.contains("too soon after a grow")),
        "{wrong:?}"
    );
}

/// Returns the violation in a run of a guest that is short of memory. Whenever memory is plugged in
/// its last zone of DRAM, it is unplugged again.
fn violation_if_plugged_memory_bounces(fault: Option<Fault>) -> Option<String> {
    let mut world = World::new(policy(0), fault);
    let round = [
        (short(), 300),
        (VmEvent::Follow { zone: 0, permille: 1000 }, 1),
        (VmEvent::Follow { zone: 1, permille: 1000 }, 1),
        (VmEvent::Follow { zone: BALLOON, permille: 1000 }, 1),
        (VmEvent::Flap { zone: 3, ms: 10 }, 700),
        (VmEvent::Tick, 20),
    ];
    let result = (0..30).try_for_each(|_| world.run_events(&round));
    result.err().map(|error| error.to_string())
}

#[test]
fn counting_memory_that_does_not_stay_as_progress_is_detected() {
    assert_eq!(violation_if_plugged_memory_bounces(None), None);
    let wrong = violation_if_plugged_memory_bounces(Some(Fault::FlapIsProgress));
    assert!(wrong.as_ref().is_some_and(|wrong| wrong.contains("is waited for")), "{wrong:?}");
}

/// Returns the violation in a run of a guest that is short of memory and follows no request, after
/// a dry run has started.
fn violation_in_dry_run_of_stuck_guest(fault: Option<Fault>) -> Option<String> {
    let mut world = World::new(policy(0), fault);
    let result = world.run_events(&[(short(), 300), (VmEvent::DryRun { on: true }, 1)]);
    let result =
        result.and_then(|()| (0..30).try_for_each(|_| world.run_events(&[(short(), 1_000)])));
    result.err().map(|error| error.to_string())
}

#[test]
fn repeated_report_of_a_dry_run_is_detected() {
    assert_eq!(violation_in_dry_run_of_stuck_guest(None), None);
    let wrong = violation_in_dry_run_of_stuck_guest(Some(Fault::RepeatsDryRunReport));
    assert!(wrong.as_ref().is_some_and(|wrong| wrong.contains("it keeps repeating")), "{wrong:?}");
}

#[test]
fn controller_that_never_rests_is_detected() {
    let fault = Fault::NeverStabilizes;
    let detected =
        is_detected(|index, _, _| World::new(policy(index), Some(fault)).check_stabilizes(700));
    assert!(detected, "it is not detected");
}
