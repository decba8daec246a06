//! Enumerated crashes of the engine. The tests crash at every persist of interleaved exchanges and
//! discards, and of the recovery that follows. They open the possible images and compare them with
//! the oracle.

use std::sync::atomic::Ordering;

use super::script::{
    Driver, InjectedBug, LANES, Oracle, Recorded, SECTORS, Script, new_media, new_media_with_holes,
    thin,
};
use super::*;
use crate::media::simulator::{CrashPoint, Random, Simulator};
use crate::pool::tests::campaign::{Replay, replay_as, replayed, seeds, verify_each};

/// Maximum number of images per crash point.
const BOUND: usize = 48;

/// Number of crash points per case, for seeds that have several cases.
const POINTS: usize = 256;

/// Opens every image of every point. `first_step` is the number of the first point. Returns the
/// number of images that are distinct within their crash point.
pub(super) fn verify(
    points: &[(CrashPoint, Oracle)],
    bound: usize,
    seed: u64,
    first_step: usize,
) -> Result<usize, String> {
    assert!(points.len() <= POINTS, "{} points", points.len());
    let mut images = 0;
    for (step, (point, oracle)) in (first_step..).zip(points) {
        if Replay::from_environment().has_step(step) {
            let verify = |image: &Simulator| oracle.verify(image).map(drop);
            let mut random = Random::new(seed ^ (step as u64) << 32);
            images += verify_each(std::slice::from_ref(point), bound, &mut random, &verify)
                .map_err(|error| replay_as(&seed.to_string(), step, &error))?;
        }
    }
    Ok(images)
}

/// Interleaves random exchanges and discards, and crashes at every persist.
pub(super) fn crash_at_random(seed: u64, bug: InjectedBug) -> Result<usize, String> {
    let recorded = Recorded::new(new_media(), bug, Oracle::default());
    crash_on(&recorded, &recorded, seed)
}

/// Crashes like [`crash_at_random`], on media with holes.
pub(super) fn crash_with_holes(seed: u64, bug: InjectedBug) -> Result<usize, String> {
    let recorded = Recorded::new(new_media_with_holes(), bug, Oracle::default());
    crash_on(&recorded, thin(&recorded), seed)
}

fn crash_on(recorded: &Recorded, space: impl Media, seed: u64) -> Result<usize, String> {
    let engine = Engine::open(space).unwrap();
    recorded.is_open.store(true, Ordering::Relaxed);
    recorded.record();
    let mut random = Random::new(seed);
    let writers = 1 + random.below(3) as usize;
    let mut script = Script::new(&engine, recorded, writers, 0);
    script.run(&mut random, 120);
    drop(script);
    verify(&recorded.take_points(), BOUND, seed, 0)
}

/// Crashes like [`crash_with_holes`], while sectors are moved out of sparse units.
pub(super) fn crash_while_compacting(seed: u64, bug: InjectedBug) -> Result<usize, String> {
    let recorded = Recorded::new(new_media_with_holes(), bug, Oracle::default());
    let engine = Engine::open(thin(&recorded)).unwrap();
    recorded.is_open.store(true, Ordering::Relaxed);
    recorded.record();
    let mut script = Script::new(&engine, &recorded, 2, 0).with_compactions();
    script.run(&mut Random::new(seed), 120);
    assert_eq!(script.compacted_bytes, Some(engine.compacted_bytes()));
    drop(script);
    verify(&recorded.take_points(), BOUND, seed, 0)
}

/// Runs a random script and kills the process at each of its steps. The next process opens the
/// visible state, durable or not, and continues. A power failure follows while that process opens
/// the media, or later.
pub(super) fn kill_at_random(seed: u64, bug: InjectedBug) -> Result<usize, String> {
    let recorded = Recorded::new(new_media(), InjectedBug::Nothing, Oracle::default());
    let mut images = 0;
    for (step, (kill, oracle)) in run_until_kill(&recorded, &recorded, seed, false) {
        let next = Recorded::new(kill.killed(), bug, oracle.clone());
        next.record();
        images += continue_after_kill(&next, &next, &oracle, seed, step)?;
    }
    Ok(images)
}

/// Kills the process like [`kill_at_random`], on media with holes.
pub(super) fn kill_with_holes(seed: u64, bug: InjectedBug) -> Result<usize, String> {
    kill_on_holes(seed, bug, false)
}

/// Kills the process like [`kill_with_holes`], during compactions.
fn kill_while_compacting(seed: u64, bug: InjectedBug) -> Result<usize, String> {
    kill_on_holes(seed, bug, true)
}

fn kill_on_holes(seed: u64, bug: InjectedBug, compacts: bool) -> Result<usize, String> {
    let recorded = Recorded::new(new_media_with_holes(), InjectedBug::Nothing, Oracle::default());
    let mut images = 0;
    for (step, (kill, oracle)) in run_until_kill(&recorded, thin(&recorded), seed, compacts) {
        let next = Recorded::new(kill.killed(), bug, oracle.clone());
        next.record();
        images += continue_after_kill(&next, thin(&next), &oracle, seed, step)?;
    }
    Ok(images)
}

/// Runs a random script. Returns the points at which the process may be killed.
fn run_until_kill(
    recorded: &Recorded,
    space: impl Media,
    seed: u64,
    compacts: bool,
) -> impl Iterator<Item = (usize, (CrashPoint, Oracle))> {
    let engine = Engine::open(space).unwrap();
    recorded.record();
    let mut random = Random::new(seed);
    let writers = 1 + random.below(3) as usize;
    let script = Script::new(&engine, recorded, writers, 0);
    let mut script = if compacts { script.with_compactions() } else { script };
    script.run(&mut random, 40);
    drop(script);
    recorded.take_points().into_iter().enumerate()
}

/// Opens the state after a kill, which is already being recorded. Continues, and crashes at every
/// persist.
fn continue_after_kill(
    next: &Recorded,
    space: impl Media,
    oracle: &Oracle,
    seed: u64,
    step: usize,
) -> Result<usize, String> {
    let killed = |error| format!("killed at {step}: {error}");
    let engine = Engine::open(space).unwrap();
    next.is_open.store(true, Ordering::Relaxed);
    // From here on, the oracle is the state that this process has read.
    let found = oracle.read(&engine).map_err(killed)?;
    *next.oracle.lock().unwrap() = found;
    let mut script = Script::new(&engine, next, 2, 1000);
    script.run(&mut Random::new(seed + step as u64), 16);
    drop(script);
    verify(&next.take_points(), BOUND / 4, seed, step * POINTS).map_err(killed)
}

/// Runs a random script, ends the engine, and hands the media over to a driver that persists only
/// its own stores. A power failure follows.
pub(super) fn hand_over_at_random(seed: u64, bug: InjectedBug) -> Result<usize, String> {
    let recorded = Recorded::new(new_media(), bug, Oracle::default());
    let engine = Engine::open(&recorded).unwrap();
    recorded.is_open.store(true, Ordering::Relaxed);
    let mut random = Random::new(seed);
    let mut script = Script::new(&engine, &recorded, 2, 0);
    script.run(&mut random, 60);
    script.finish();
    drop(script);
    match bug {
        InjectedBug::NotQuiesced => engine.flush().unwrap(),
        _ => engine.quiesce().unwrap(),
    }
    drop(engine);
    recorded.record();
    let mut driver = Driver::open(&recorded);
    for version in 1000..1012 {
        let (lane, sector) = (random.below(u64::from(LANES)), random.below(u64::from(SECTORS)));
        driver.write(lane as usize, sector as u32, version);
    }
    verify(&recorded.take_points(), BOUND / 4, seed, 0)
}

#[test]
fn driver_that_assumes_a_durable_map_continues_after_a_quiesced_engine() {
    let images: usize =
        seeds(12).map(|seed| hand_over_at_random(seed, InjectedBug::Nothing).unwrap()).sum();
    Replay::from_environment().count(images, 1800);
}

#[test]
fn interleaved_exchanges_and_discards_survive_a_crash_at_every_persist() {
    let images: usize =
        seeds(24).map(|seed| crash_at_random(seed, InjectedBug::Nothing).unwrap()).sum();
    Replay::from_environment().count(images, 31_000);
}

#[test]
fn exchanges_on_media_with_holes_survive_a_crash_at_every_persist() {
    let images: usize =
        seeds(12).map(|seed| crash_with_holes(seed, InjectedBug::Nothing).unwrap()).sum();
    Replay::from_environment().count(images, 15_000);
}

#[test]
fn compaction_survives_a_crash_at_every_persist() {
    let images: usize =
        seeds(12).map(|seed| crash_while_compacting(seed, InjectedBug::Nothing).unwrap()).sum();
    Replay::from_environment().count(images, 15_000);
}

#[test]
fn compaction_survives_a_kill_and_then_a_loss_of_power() {
    let images: usize =
        seeds(4).map(|seed| kill_while_compacting(seed, InjectedBug::Nothing).unwrap()).sum();
    Replay::from_environment().count(images, 5000);
}

#[test]
fn sectors_on_media_with_holes_survive_a_kill_and_then_a_loss_of_power() {
    let images: usize =
        seeds(6).map(|seed| kill_with_holes(seed, InjectedBug::Nothing).unwrap()).sum();
    Replay::from_environment().count(images, 10_000);
}

#[test]
fn sectors_survive_a_kill_and_then_a_loss_of_power() {
    let images: usize =
        seeds(12).map(|seed| kill_at_random(seed, InjectedBug::Nothing).unwrap()).sum();
    Replay::from_environment().count(images, 21_000);
}

/// Executes all orders of the steps of two exchanges, with up to a thousand images per order.
fn two_exchanges(bug: InjectedBug) -> Result<usize, String> {
    const STEPS: u32 = 4;
    let mut images = 0;
    // The second exchange has another sector in the same map line, so that one of them waits, then
    // a sector in another line, and then the same sector.
    for (index, other) in [3..5, 20..21, 1..2].into_iter().enumerate() {
        for order in (0..1u32 << (2 * STEPS)).filter(|order| order.count_ones() == STEPS) {
            let recorded = Recorded::new(new_media(), bug, Oracle::default());
            let engine = Engine::open(&recorded).unwrap();
            recorded.is_open.store(true, Ordering::Relaxed);
            let mut script = Script::new(&engine, &recorded, 2, 0);
            // Leaves a write in the same lanes whose map words are not durable yet.
            script.begin(0, 1..3);
            script.finish();
            recorded.record();
            let mut has_begun = [false; 2];
            for step in 0..2 * STEPS {
                let writer = (order >> step & 1) as usize;
                match std::mem::replace(&mut has_begun[writer], true) {
                    false => script.begin(writer, [1..2, other.clone()][writer].clone()),
                    true => script.step(writer),
                }
            }
            script.finish();
            drop(script);
            let case = index << (2 * STEPS) | order as usize;
            images += verify(&recorded.take_points(), 256, 0, case * POINTS)?;
        }
    }
    Ok(images)
}

#[test]
fn two_exchanges_survive_in_every_order_of_their_steps() {
    Replay::from_environment().count(two_exchanges(InjectedBug::Nothing).unwrap(), 20_000);
}

/// A replay with the numbers in a test's error opens only the failing image.
#[test]
fn failing_image_is_replayed_by_its_numbers() {
    let of_seed = |bug: InjectedBug| {
        seeds(39).try_fold(0, |images, seed| Ok::<_, String>(images + crash_at_random(seed, bug)?))
    };
    let campaigns: [&dyn Fn(InjectedBug) -> Result<usize, String>; 2] = [&two_exchanges, &of_seed];
    for campaign in campaigns {
        let error = campaign(InjectedBug::FirstHalf).unwrap_err();
        let again = replayed(&error, || campaign(InjectedBug::FirstHalf)).unwrap_err();
        assert_eq!(error, again);
        let images = replayed(&error, || campaign(InjectedBug::Nothing)).unwrap();
        assert!((1..100).contains(&images), "{images} images");
    }
}
