//! Tests of `memorage`: the trigger and its edges, units, the return of memory, and storage's
//! floor.

use crate::plan::Reason;
use crate::policy::Policy;
use crate::policy::testing::{GIB, HIGH, Rig};
use crate::units::PAGE_BYTES;
use crate::{MIB, StorageSpace, Tier};

const UNIT: u64 = 2 * GIB;

fn rig() -> Rig {
    let policy = Policy::Memorage(super::Params { watermark_scale: 1, ..super::Params::default() });
    Rig::new(policy, &[4 * GIB], &[16 * GIB])
}

fn with(rig: Rig, name: &str, text: &str) -> Rig {
    Rig { policy: rig.policy.with([(name, &text.into())]).expect("in bounds"), ..rig }
}

#[test]
fn memorage_edge_at_pages_high_lends_nothing() {
    let mut rig = rig();
    rig.free(0, HIGH);
    let decision = rig.report(1_000);
    assert_eq!(
        (decision.want_bytes, decision.reason, decision.pressure),
        (None, Reason::Enough, false)
    );
}

#[test]
fn memorage_edge_one_page_below_pages_high_lends_a_unit() {
    let mut rig = rig();
    rig.free(0, HIGH - 1);
    let decision = rig.report(1_000);
    assert_eq!(
        (rig.added(decision), decision.reason, decision.pressure),
        (UNIT, Reason::LowFree, true)
    );
    assert_eq!(decision.near, None);
}

#[test]
fn memorage_scale_moves_trigger() {
    let mut rig = with(rig(), "watermark-scale", "32");
    rig.free(0, 32 * HIGH);
    assert_eq!(rig.report(1_000).want_bytes, None);
    rig.free(0, 32 * HIGH - 1);
    let decision = rig.report(1_000);
    assert_eq!(rig.added(decision), UNIT);
}

#[test]
fn memorage_unit_on_its_way_is_not_lent_again() {
    let mut rig = rig();
    rig.free(0, 0);
    rig.host.zones[0].requested_bytes = rig.report(50).want_bytes.expect("a unit");
    for _ in 0..20 {
        assert_eq!(rig.report(50).want_bytes, None);
    }
    rig.plug(0, UNIT);
    assert_eq!(rig.report(50).want_bytes, None, "it is plugged");
    rig.free(1, HIGH - 1);
    let decision = rig.report(50);
    assert_eq!(rig.added(decision), UNIT, "the unit is used up, so the next one is plugged");
}

#[test]
fn memorage_lends_several_units_if_one_is_too_small() {
    let mut rig = with(rig(), "unit", "8M");
    rig.free(0, 0);
    let decision = rig.report(50);
    assert_eq!(rig.added(decision), 24 * MIB + 8 * MIB, "24 MiB and a page are missing");
}

#[test]
fn memorage_lends_at_most_the_size_of_the_zones() {
    let mut rig = rig();
    rig.plug(0, 15 * GIB);
    rig.free(0, 0);
    rig.free(1, 0);
    let decision = rig.report(50);
    assert_eq!(rig.added(decision), GIB);
    rig.plug(0, 16 * GIB);
    rig.free(1, 0);
    assert_eq!(rig.report(50).want_bytes, None);
    let decision = rig.report(3_000);
    assert_eq!(
        (decision.want_bytes, decision.reason, decision.pressure),
        (None, Reason::AtCeiling, false)
    );
}

#[test]
fn memorage_without_storage_to_lend_holds_with_reason_storage_short() {
    let mut rig = with(rig(), "storage_floor", "8G");
    rig.free(0, 0);
    rig.host.pool_free_bytes = 9 * GIB;
    let decision = rig.report(50);
    assert_eq!(rig.added(decision), GIB, "the part above the floor");
    rig.host.zones[0].requested_bytes = GIB;
    rig.raw.zones[0].high_pages = GIB / PAGE_BYTES + 1;
    let decision = rig.report(50);
    let result = (decision.want_bytes, decision.reason, decision.pressure);
    assert_eq!(result, (None, Reason::StorageShort, false), "pending memory is already subtracted");
}

/// Rule 9 recalls memory below `low` until `high` is free.
#[test]
fn memorage_lends_only_space_above_the_end_of_a_recall() {
    let mut rig = rig();
    rig.free(0, 0);
    rig.host.pool_free_bytes = 9 * GIB;
    let mut added = |free_mib: u64, needed_mib: u64| {
        rig.host.storage = Some(StorageSpace {
            free_bytes: free_mib * MIB,
            needed_bytes: needed_mib * MIB,
            low_bytes: 64 * MIB,
            high_bytes: 128 * MIB,
            ..StorageSpace::default()
        });
        let decision = rig.report(50);
        decision.want_bytes.map(|_| rig.added(decision) / MIB).ok_or(decision.reason)
    };
    assert_eq!(added(9 * 1024, 1024), Ok(2048), "a whole unit");
    assert_eq!(added(1128, 1024), Ok(1000), "what is above high");
    assert_eq!(added(128, 1024), Err(Reason::StorageShort), "above low, but not above high");
    assert_eq!(added(128, 100), Ok(28), "no more than volumes need is kept");
}

#[test]
fn memorage_dram_does_not_count_as_storage() {
    let mut rig = with(rig(), "storage_floor", "8G");
    rig.free(0, 0);
    rig.host.pool_free_bytes = 8 * GIB;
    let mut dram = rig.host.zones[0];
    (dram.tier, dram.max_bytes, dram.guest_numa_node) = (Tier::Dram, 512 * MIB, 0);
    rig.host.zones.push(dram);
    let decision = rig.report(50);
    assert_eq!(rig.added(decision), 512 * MIB);
}

#[test]
fn memorage_returns_memory_first_if_storage_is_short() {
    let mut rig = with(rig(), "storage_floor", "8G");
    rig.plug(0, 4 * GIB);
    rig.host.pool_free_bytes = 8 * GIB;
    assert_eq!(rig.report(1_000).want_bytes, None, "at the floor");
    // Memory is returned even though the guest is short of memory.
    for (zone, pages) in [(0, 0), (1, 0)] {
        rig.free(zone, pages);
    }
    rig.host.pool_free_bytes = 7 * GIB - 1;
    let decision = rig.report(1_000);
    assert_eq!((rig.taken(decision), decision.reason), (GIB + 2 * MIB, Reason::StorageShort));
    assert!(!decision.pressure);
    // Memory that the guest is still returning counts as returned to the pool.
    rig.host.zones[0].requested_bytes -= GIB + 2 * MIB;
    let decision = rig.report(1_000);
    assert_eq!(
        (decision.want_bytes, decision.reason),
        (None, Reason::StorageShort),
        "memory is not lent again immediately"
    );
    rig.host.zones[0].requested_bytes = GIB;
    rig.host.zones[0].plugged_bytes = GIB;
    rig.host.pool_free_bytes = 0;
    let decision = rig.report(1_000);
    assert_eq!(rig.taken(decision), GIB, "at most the lent memory");
}

#[test]
fn memorage_returns_memory_after_time_without_pressure() {
    let mut rig = rig();
    rig.plug(0, UNIT);
    rig.free(0, 0);
    assert_eq!(rig.report(1_000).want_bytes, None);
    assert_eq!(rig.report(9_900).want_bytes, None, "memory is not returned immediately");
    let decision = rig.report(100);
    let kept = 2 * HIGH * PAGE_BYTES;
    assert_eq!(
        (rig.taken(decision), decision.reason),
        (UNIT - kept, Reason::Calm),
        "memory is returned eventually"
    );
    rig.plug(0, kept);
    rig.free(0, 0);
    assert_eq!(rig.report(1_000).want_bytes, None, "it settles");
}

/// A guest without free memory waits for a unit. The guest fills the first part as soon as that
/// part is in its total.
#[test]
fn memorage_memory_that_has_not_been_free_is_not_returned() {
    let mut rig = with(rig(), "calm", "5s");
    rig.free(0, 0);
    rig.host.zones[0].requested_bytes = rig.report(50).want_bytes.expect("a unit");
    for _ in 0..100 {
        assert_eq!(rig.report(50).want_bytes, None);
    }
    rig.plug(0, UNIT);
    rig.free(1, 0);
    assert_eq!(rig.report(50).want_bytes, None, "it may yet become free");
    rig.free(1, UNIT / PAGE_BYTES);
    assert_eq!(rig.report(50).want_bytes, None, "it has become free");
    assert_eq!(rig.report(4_900).want_bytes, None);
    let decision = rig.report(100);
    assert_eq!(decision.reason, Reason::Calm, "and has been free for long enough");
}

#[test]
fn memorage_minimum_of_calm_time_counts_and_pressure_restarts_it() {
    let mut rig = with(rig(), "calm", "5s");
    rig.plug(0, UNIT);
    rig.free(0, 0);
    rig.report(1_000);
    rig.free(1, 4 * HIGH);
    rig.report(1_000);
    rig.free(1, UNIT / PAGE_BYTES);
    let decision = rig.report(4_000);
    assert_eq!(rig.taken(decision), 2 * HIGH * PAGE_BYTES);
    rig.free(1, 3 * HIGH);
    assert_eq!(rig.report(1_000).want_bytes, None);
    rig.free(1, UNIT / PAGE_BYTES);
    assert_eq!(rig.report(1_000).want_bytes, None);
    assert_eq!(rig.report(4_900).want_bytes, None);
    assert!(rig.report(100).want_bytes.is_some());
}
