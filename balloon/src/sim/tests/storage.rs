//! Pools that VMs share with a thin volume.

use super::*;
use crate::sim::guest::Pool;
use crate::sim::storage::{ThinVolume, Writes};
use crate::units::scale;

const POOL_BYTES: u64 = 1024 * MIB;

fn params() -> StorageParams {
    StorageParams {
        size_bytes: 1024 * MIB,
        spill_bytes: 1024 * MIB,
        period_ms: 500_000,
        bursts: 5,
        ..StorageParams::default()
    }
}

fn pool(params: &StorageParams) -> HostPool {
    HostPool::with_storage(POOL_BYTES, params, 1_200_000, &mut Random::new(7, 1))
}

fn run_on(params: &StorageParams, policy: &str, skip: Skip) -> (Outcome, StorageOutcome) {
    let mut pool = pool(params);
    let governed = Governed { skip, ..governed(policy) };
    let setups = vec![setup(Workload::Burst, 1_200_000, 3)];
    let vms = run_host(setups, &mut pool, &governed, &mut ()).expect("in range");
    (Outcome::of(&vms[0]), pool.outcome().expect("it has storage"))
}

/// Use of a pool at a time.
#[derive(Clone, Debug)]
enum Step {
    Pass { ms: u64 },
    Take { mib: u64 },
    Give { permille: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (1..30_000u64).prop_map(|ms| Step::Pass { ms }),
        2 => (1..300u64).prop_map(|mib| Step::Take { mib: mib * 2 }),
        1 => (0..=1000u64).prop_map(|permille| Step::Give { permille }),
    ]
}

/// Data that is written and trimmed at random.
fn writes() -> impl Strategy<Value = Vec<Writes>> {
    let part = (1..60_000u64, 0..=512u64, 0..100u64);
    prop::collection::vec(part, 1..20).prop_map(|parts| {
        let mut at = TimeMs(0);
        let mut writes = vec![Writes::default()];
        for (ms, data_mib, rate_mib) in parts {
            at = at + ms;
            let (data_bytes, bytes_per_s) = (data_mib * 2 * MIB, rate_mib * MIB);
            writes.push(Writes { at, data_bytes, bytes_per_s });
        }
        writes
    })
}

/// Bytes of each owner in a pool.
fn owned_bytes(pool: &HostPool) -> [u64; 3] {
    let space = pool.storage().expect("memory may borrow");
    [space.free_bytes, 1024 * MIB - space.needed_bytes, space.lent_bytes]
}

proptest! {
    #[test]
    fn each_byte_of_a_pool_has_one_owner_and_volumes_keep_their_minimum(
        writes in writes(),
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let params = params();
        let mut pool = HostPool::with_volume(POOL_BYTES, ThinVolume::new(&params, writes));
        let (mut now, mut plugged_bytes) = (TimeMs(0), 0);
        for step in steps {
            match step {
                Step::Pass { ms } => {
                    now = now + ms;
                    pool.advance(now);
                }
                Step::Take { mib } => {
                    let before = pool.storage().expect("memory may borrow");
                    let taken_bytes = pool.take(mib * MIB);
                    plugged_bytes += taken_bytes;
                    let left_bytes = before.free_bytes - taken_bytes;
                    let min_bytes = params.min_bytes.min(before.needed_bytes);
                    prop_assert!(taken_bytes == 0 || left_bytes >= min_bytes, "{:?}", before);
                }
                Step::Give { permille } => {
                    let bytes = scale(plugged_bytes / MIB / 2, permille, 1000) * 2 * MIB;
                    pool.give(bytes);
                    plugged_bytes -= bytes;
                }
            }
            prop_assert_eq!(owned_bytes(&pool).iter().sum::<u64>(), POOL_BYTES);
            let [_, _, lent_bytes] = owned_bytes(&pool);
            prop_assert!(lent_bytes <= plugged_bytes);
        }
        // All lent memory can be moved, so no write waits for longer than the move takes.
        pool.advance(now + 60_000);
        let waits = pool.outcome().expect("storage").write_stall_s;
        let busy_s = pool.outcome().expect("storage").spilled_gib;
        prop_assert!(waits <= busy_s + 2.0, "{} s for {} GiB", waits, busy_s);
    }
}

#[test]
fn memory_is_won_from_a_growing_volume_without_waiting_writes() {
    let (outcome, storage) = run_on(&params(), "psi", Skip::AtRest);
    assert!(storage.won_gib_h > 0.003, "{storage:?}");
    assert_eq!((storage.write_stalls, storage.write_stall_s), (0, 0.0));
    // Without borrowing, all space is the volume's.
    let static_split = StorageParams { spill_bytes: 0, ..params() };
    let (split_outcome, split) = run_on(&static_split, "psi", Skip::AtRest);
    assert_eq!((split.won_gib_h, split.transfers), (0.0, 0));
    assert!(split_outcome.stall_s > outcome.stall_s + 1.0, "{split_outcome:?} {outcome:?}");
}

#[test]
fn writes_wait_if_they_are_faster_than_moves() {
    let slow =
        StorageParams { rate_bytes_per_s: 2048 * MIB, move_bytes_per_s: 64 * MIB, ..params() };
    let (_, storage) = run_on(&slow, "fixed", Skip::AtRest);
    assert!(storage.write_stalls > 0 && storage.write_stall_s > 0.5, "{storage:?}");
    assert!(storage.spilled_gib > 0.1, "{storage:?}");
    let fast = StorageParams { move_bytes_per_s: 8192 * MIB, ..slow };
    let (_, storage_of_fast) = run_on(&fast, "fixed", Skip::AtRest);
    assert!(storage_of_fast.write_stall_s < storage.write_stall_s / 4.0, "{storage_of_fast:?}");
}

/// Skipped reports change nothing, although the volume changes while the guest is at rest.
#[test]
fn reports_are_skipped_only_while_storage_is_steady() {
    for policy in ["psi", "memorage", "pmb"] {
        let [(some, of_some), (all, of_all)] =
            [Skip::AtRest, Skip::Nothing].map(|skip| run_on(&params(), policy, skip));
        assert_eq!(of_some, of_all, "{policy}");
        assert!(some.skipped > 0, "{policy}");
        let counts = |outcome: &Outcome| (outcome.grows, outcome.shrinks, outcome.stall_s);
        assert_eq!(counts(&some), counts(&all), "{policy}");
    }
}

#[test]
fn recorded_storage_takes_the_same_space_in_replay() {
    let original = setup(Workload::Burst, 1_200_000, 3);
    let mut recorded_pool = pool(&params());
    let text = recorded_on(&original, "psi", &mut recorded_pool);
    let (again, recording) = replayed(&text, &original.guest).expect("long enough");
    let mut replayed_pool = recording.pool(None, 1);
    run_host(vec![again], &mut replayed_pool, &governed("psi"), &mut ()).expect("in range");
    let [first, second] = [&recorded_pool, &replayed_pool].map(|pool| pool.outcome().expect("it"));
    assert!(
        (0.8..1.25).contains(&(second.won_gib_h / first.won_gib_h)),
        "{first:?} and {second:?}"
    );
    let [first, second] = [&recorded_pool, &replayed_pool]
        .map(|pool| pool.storage().expect("memory may borrow").needed_bytes / MIB);
    assert_eq!(first, second);
    // Broken variant: an older trace has no storage, so all free memory can be lent.
    let older = String::from_utf8(text).expect("JSON").replace("\"storage\":", "\"other\":");
    let (_, recording) = replayed(older.as_bytes(), &original.guest).expect("long enough");
    assert!(recording.pool(None, 1).storage().is_none());
}
