//! Tests of `pmb`: the watermark and its edges, and the return of units.

use crate::plan::Reason;
use crate::policy::Policy;
use crate::policy::testing::{GIB, HIGH, Rig};
use crate::units::PAGE_BYTES;
use crate::{MIB, Tier};

const UNIT: u64 = 4 * MIB;
const UNIT_PAGES: u64 = UNIT / PAGE_BYTES;
/// Watermark in pages at the scale that these tests use.
const W: u64 = 8 * HIGH;

fn rig() -> Rig {
    let policy = Policy::Pmb(super::Params { watermark_scale: 8, ..super::Params::default() });
    Rig::new(policy, &[4 * GIB], &[16 * GIB])
}

/// Number of units that are added if `free_pages` are free.
fn units(free_pages: u64) -> u64 {
    let mut rig = rig();
    rig.free(0, free_pages);
    let decision = rig.report(1_000);
    let added = rig.added(decision);
    assert_eq!(added % UNIT, 0);
    assert_eq!(decision.pressure, added > 0);
    assert_eq!(decision.reason, if added > 0 { Reason::LowFree } else { Reason::Enough });
    added / UNIT
}

#[test]
fn pmb_edge_at_watermark_adds_nothing() {
    assert_eq!(units(W), 0);
}

#[test]
fn pmb_edge_one_page_below_watermark_adds_one_unit() {
    assert_eq!(units(W - 1), 1);
}

#[test]
fn pmb_adds_units_until_free_memory_exceeds_watermark() {
    assert_eq!(units(W - UNIT_PAGES + 1), 1);
    assert_eq!(units(W - UNIT_PAGES), 2, "free memory has to exceed the watermark");
    assert_eq!(units(W - 10 * UNIT_PAGES + 1), 10);
    assert_eq!(units(0), W / UNIT_PAGES + 1);
}

#[test]
fn pmb_units_on_their_way_count() {
    let mut rig = rig();
    rig.free(0, W - 1);
    rig.host.zones[0].requested_bytes = rig.report(50).want_bytes.expect("one unit");
    for _ in 0..20 {
        assert_eq!(rig.report(50).want_bytes, None);
    }
    rig.free(0, W - UNIT_PAGES - 1);
    let decision = rig.report(50);
    assert_eq!(rig.added(decision), UNIT, "the next step follows below the watermark");
}

#[test]
fn pmb_unit_is_a_parameter() {
    let mut rig = rig();
    rig.policy = rig.policy.with([("unit", &"64M".into())]).expect("in bounds");
    rig.free(0, W - 1);
    let decision = rig.report(50);
    assert_eq!(rig.added(decision), 64 * MIB);
}

/// Guest with 1 GiB of online PM, and with this number of free blocks and free pages.
fn with_units(blocks: Option<u64>, free_pages: u64) -> Rig {
    let mut rig = rig();
    rig.plug(0, GIB);
    rig.raw.zones[1].largest_free_blocks = blocks;
    rig.free(1, free_pages);
    rig
}

#[test]
fn pmb_free_units_are_returned_at_once() {
    let mut rig = with_units(Some(7), 100_000);
    let decision = rig.report(1_000);
    assert_eq!((rig.taken(decision), decision.reason), (7 * UNIT, Reason::FreeUnits));
    assert!(!decision.pressure);
    assert_eq!(
        with_units(Some(0), 100_000).report(1_000).want_bytes,
        None,
        "free pages here and there"
    );
}

#[test]
fn pmb_without_block_counts_free_pages_are_an_estimate() {
    let mut rig = with_units(None, 7 * UNIT_PAGES + UNIT_PAGES - 1);
    let decision = rig.report(1_000);
    assert_eq!(rig.taken(decision), 7 * UNIT);
}

#[test]
fn pmb_larger_units_need_more_free_blocks() {
    let mut rig = with_units(Some(15), 100_000);
    rig.policy = rig.policy.with([("unit", &"16M".into())]).expect("in bounds");
    let decision = rig.report(1_000);
    assert_eq!(rig.taken(decision), 48 * MIB);
}

#[test]
fn pmb_dram_is_not_returned() {
    let mut rig = with_units(Some(7), 100_000);
    rig.host.zones[0].tier = Tier::Dram;
    assert_eq!(rig.report(1_000).want_bytes, None);
}

#[test]
fn pmb_twice_the_watermark_stays_to_prevent_oscillation() {
    let mut rig = with_units(Some(256), 262_144);
    rig.free(0, 0);
    let mut directions = Vec::new();
    for _ in 0..10 {
        let decision = rig.report(3_000);
        directions.push(rig.taken(decision) / MIB);
        assert_eq!(rig.added(decision), 0);
        let left = rig.host.requested_bytes() - rig.taken(decision);
        rig.plug(0, left);
        rig.raw.zones[1].largest_free_blocks = Some(left / UNIT);
        rig.free(0, 0);
    }
    assert!(directions[0] > 0 && directions[1..].iter().all(|taken| *taken == 0), "{directions:?}");
    assert!(rig.host.requested_bytes() >= 2 * W * PAGE_BYTES);
    assert!(rig.host.requested_bytes() < 2 * W * PAGE_BYTES + 2 * UNIT);
    // The guest can use this amount of memory before the next unit is added.
    rig.free(1, W);
    assert_eq!(rig.report(50).want_bytes, None);
    rig.free(1, W - 1);
    assert!(rig.report(50).pressure);
}

/// A large block is arriving. Some of its units are already free, but tasks that wait for the block
/// will fill the rest.
#[test]
fn pmb_memory_that_has_not_been_free_is_no_surplus() {
    let mut rig = rig();
    rig.report(1_000);
    rig.host.zones[0].requested_bytes = GIB;
    rig.free(0, 0);
    assert_eq!(rig.report(50).want_bytes, None, "enough memory is pending");
    rig.plug(0, GIB);
    rig.raw.zones[1].largest_free_blocks = Some(16);
    rig.free(1, 16 * UNIT_PAGES);
    assert_eq!(rig.report(50).want_bytes, None, "all of the PM");
}
