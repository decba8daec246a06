//! Property tests of the governor with random events and random hosts. Each invariant is also
//! broken by a faulty caller, and the same checks must then fail.

mod broken;
mod cases;
#[path = "../rig/properties.rs"]
mod properties;
mod world;

use balloon::DriverState;
use balloon::proto::OnlinePolicy::{Online, OnlineMovable};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::TestCaseResult;

use self::broken::Broken;
use self::properties::{POLICIES, fails, policy};
use self::world::{Happening, World, ZONES};

fn happening() -> impl Strategy<Value = Happening> {
    let permille = || prop_oneof![1 => Just(0u64), 1 => Just(1000u64), 2 => 0u64..=1000];
    prop_oneof![
        8 => (permille(), select(&[OnlineMovable, Online][..]))
            .prop_map(|(free, policy)| Happening::Report(free, policy)),
        2 => prop::array::uniform4(0u64..1 << 40).prop_map(Happening::Lie),
        1 => Just(Happening::StaleReport),
        1 => Just(Happening::RefusedLine),
        1 => any::<bool>().prop_map(Happening::Agent),
        4 => Just(Happening::Tick),
        4 => (0..ZONES, permille()).prop_map(|(zone, share)| Happening::Follow(zone, share)),
        1 => (0..ZONES, select(&DriverState::ALL[..]))
            .prop_map(|(zone, driver)| Happening::Driver(zone, driver)),
        1 => (0..ZONES, permille()).prop_map(|(zone, share)| Happening::Host(zone, share)),
        1 => (0u64..2048).prop_map(Happening::Pool),
        1 => permille().prop_map(Happening::Statistics),
        1 => (0..ZONES, 0u64..520).prop_map(|(zone, blocks)| Happening::Resize(zone, blocks)),
        1 => (0..ZONES, 0u64..520).prop_map(|(zone, blocks)| Happening::Boot(zone, blocks)),
        1 => prop::option::of(0..ZONES).prop_map(Happening::Resume),
        1 => prop::bool::weighted(0.3).prop_map(Happening::Pause),
        1 => prop::bool::weighted(0.3).prop_map(Happening::DryRun),
        1 => (0..POLICIES.len()).prop_map(Happening::Policy),
        1 => (0u64..200, 0u64..500)
            .prop_map(|(floor, more)| Happening::Bounds(floor, floor + more)),
        1 => Just(Happening::Dimm),
    ]
}

/// Events of a guest that follows each request immediately, on a host that has enough memory.
fn ready() -> impl Strategy<Value = Happening> {
    prop_oneof![
        4 => (0u64..=1000).prop_map(|free| Happening::Report(free, OnlineMovable)),
        1 => Just(Happening::Tick),
    ]
}

type Life = (usize, Vec<(Happening, u64)>);

fn life(happening: impl Strategy<Value = Happening>) -> impl Strategy<Value = Life> {
    let ms = prop_oneof![3 => 1u64..200, 2 => 200u64..7000];
    (0..POLICIES.len(), prop::collection::vec((happening, ms), 1..80))
}

/// Runs a sequence of events. With a faulty caller, only the expected violation counts as a
/// failure.
fn live((index, life): &Life, follows: bool, broken: Option<(Broken, &str)>) -> TestCaseResult {
    let mut world = World::new(policy(*index), follows, broken.map(|(broken, _)| broken));
    for (happening, ms) in life {
        world.happen(happening, *ms);
        let wrong = world.wrong(broken.map_or("", |(_, text)| text));
        prop_assert!(wrong.is_none(), "{happening:?}: {wrong:?}");
    }
    Ok(())
}

proptest! {
    #[test]
    fn requests_satisfy_invariants_in_any_sequence_of_events(life in life(happening())) {
        live(&life, false, None)?;
    }

    #[test]
    fn dram_grows_first_and_pm_shrinks_first_if_guest_follows(life in life(ready())) {
        live(&life, true, None)?;
    }
}

fn is_caught(broken: Broken, text: &str) -> bool {
    // The order of zones is visible only if the guest follows requests.
    let follows = broken == Broken::SwapsTiers;
    let happening = if follows { ready().boxed() } else { happening().boxed() };
    fails(2000, &life(happening), |life| live(&life, follows, Some((broken, text))))
}

#[test]
fn each_broken_caller_is_detected() {
    for (broken, text) in Broken::ALL {
        assert!(is_caught(broken, text), "{broken:?}: no check notices: {text}");
    }
}
