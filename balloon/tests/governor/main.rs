//! Property tests of the governor with random events and random hosts. Each invariant is also
//! broken by a faulty caller, and the same checks should then fail.

mod cases;
mod fault;
#[path = "../rig/properties.rs"]
mod properties;
mod world;

use balloon::DriverState;
use balloon::proto::OnlinePolicy::{Online, OnlineMovable};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::TestCaseResult;

use self::fault::Fault;
use self::properties::{POLICIES, fails, policy};
use self::world::{VmEvent, World, ZONES};

fn vm_event() -> impl Strategy<Value = VmEvent> {
    let permille = || prop_oneof![1 => Just(0u64), 1 => Just(1000u64), 2 => 0u64..=1000];
    prop_oneof![
        8 => (permille(), select(&[OnlineMovable, Online][..]))
            .prop_map(|(free, policy)| VmEvent::Report(free, policy)),
        2 => prop::array::uniform4(0u64..1 << 40).prop_map(VmEvent::FalseReport),
        1 => Just(VmEvent::StaleReport),
        1 => Just(VmEvent::RefusedLine),
        1 => any::<bool>().prop_map(VmEvent::Agent),
        4 => Just(VmEvent::Tick),
        4 => (0..ZONES, permille()).prop_map(|(zone, share)| VmEvent::Follow(zone, share)),
        1 => (0..ZONES, select(&DriverState::ALL[..]))
            .prop_map(|(zone, driver)| VmEvent::Driver(zone, driver)),
        1 => (0..ZONES, permille()).prop_map(|(zone, share)| VmEvent::Host(zone, share)),
        1 => (0u64..2048).prop_map(VmEvent::Pool),
        1 => permille().prop_map(VmEvent::Statistics),
        1 => (0..ZONES, 0u64..520).prop_map(|(zone, blocks)| VmEvent::Resize(zone, blocks)),
        1 => (0..ZONES, 0u64..520).prop_map(|(zone, blocks)| VmEvent::Boot(zone, blocks)),
        1 => prop::option::of(0..ZONES).prop_map(VmEvent::Resume),
        1 => prop::bool::weighted(0.3).prop_map(VmEvent::Pause),
        1 => prop::bool::weighted(0.3).prop_map(VmEvent::DryRun),
        1 => (0..POLICIES.len()).prop_map(VmEvent::Policy),
        1 => (0u64..200, 0u64..500)
            .prop_map(|(floor, more)| VmEvent::Bounds(floor, floor + more)),
        1 => Just(VmEvent::Dimm),
    ]
}

/// Events of a guest that follows each request immediately, on a host that has enough memory.
fn ready() -> impl Strategy<Value = VmEvent> {
    prop_oneof![
        4 => (0u64..=1000).prop_map(|free| VmEvent::Report(free, OnlineMovable)),
        1 => Just(VmEvent::Tick),
    ]
}

type EventSequence = (usize, Vec<(VmEvent, u64)>);

fn event_sequence(event: impl Strategy<Value = VmEvent>) -> impl Strategy<Value = EventSequence> {
    let ms = prop_oneof![3 => 1u64..200, 2 => 200u64..7000];
    (0..POLICIES.len(), prop::collection::vec((event, ms), 1..80))
}

/// Runs a sequence of events. With a faulty caller, only the expected violation counts as a
/// failure.
fn run_events(
    (index, events): &EventSequence,
    follows: bool,
    fault: Option<(Fault, &str)>,
) -> TestCaseResult {
    let mut world = World::new(policy(*index), follows, fault.map(|(fault, _)| fault));
    for (event, ms) in events {
        world.apply(event, *ms);
        let violation = world.first_violation(fault.map_or("", |(_, text)| text));
        prop_assert!(violation.is_none(), "{event:?}: {violation:?}");
    }
    Ok(())
}

proptest! {
    #[test]
    fn requests_satisfy_invariants_in_any_sequence_of_events(events in event_sequence(vm_event())) {
        run_events(&events, false, None)?;
    }

    #[test]
    fn dram_grows_first_and_pm_shrinks_first_if_guest_follows(events in event_sequence(ready())) {
        run_events(&events, true, None)?;
    }
}

fn is_detected(fault: Fault, text: &str) -> bool {
    // The order of zones is visible only if the guest follows requests.
    let follows = fault == Fault::SwapsTiers;
    let event = if follows { ready().boxed() } else { vm_event().boxed() };
    fails(2000, &event_sequence(event), |events| run_events(&events, follows, Some((fault, text))))
}

#[test]
fn each_faulty_caller_is_detected() {
    for (fault, text) in Fault::ALL {
        assert!(is_detected(fault, text), "{fault:?}: no check notices: {text}");
    }
}
