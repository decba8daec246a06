//! Tests of `amf`: each row and each border of Table 2, and the rules for adding and returning
//! memory.

use crate::plan::Reason;
use crate::policy::Policy;
use crate::policy::testing::{GIB, HIGH, LOW, MIN, Rig, TableRig, cases};
use crate::units::{PAGE_BYTES, SECTION_BYTES};
use crate::{MIB, Tier};

use super::TABLE_2;

const D: u64 = 64 * GIB;

fn amf(watermark_scale: u64) -> Policy {
    Policy::Amf(super::Params { watermark_scale, ..super::Params::default() })
}

const PAPERS: TableRig =
    TableRig { policy: amf, table: TABLE_2, scale: 1024, marks: [MIN, LOW, HIGH] };

cases! { |free, times| PAPERS.check(free, times);
    amf_table_2_row_above_high_x1024: HIGH * 1024 + 1_000_000 => 0;
    amf_table_2_edge_one_page_above_high_x1024: HIGH * 1024 + 1 => 0;
    amf_table_2_edge_at_high_x1024: HIGH * 1024 => 1;
    amf_table_2_row_low_x1024_to_high_x1024: (LOW + HIGH) / 2 * 1024 => 1;
    amf_table_2_edge_one_page_above_low_x1024: LOW * 1024 + 1 => 1;
    amf_table_2_edge_at_low_x1024: LOW * 1024 => 2;
    amf_table_2_row_min_x1024_to_low_x1024: (MIN + LOW) / 2 * 1024 => 2;
    amf_table_2_edge_one_page_above_min_x1024: MIN * 1024 + 1 => 2;
    amf_table_2_edge_at_min_x1024: MIN * 1024 => 3;
    amf_table_2_row_high_to_min_x1024: MIN * 100 => 3;
    amf_table_2_edge_one_page_above_high: HIGH + 1 => 3;
    amf_table_2_edge_at_high: HIGH => 5;
    amf_table_2_row_low_to_high: (LOW + HIGH) / 2 => 5;
    amf_table_2_edge_at_low: LOW => 5;
    amf_table_2_hole_one_page_below_low: LOW - 1 => 5;
    amf_table_2_hole_at_min: MIN => 5;
    amf_table_2_hole_nothing_is_free: 0 => 5;
}

#[test]
fn each_broken_table_2_is_detected() {
    PAPERS.check_cases(CASES);
}

/// If min x scale is below high, the row in between is empty, and rows overlap with those of the
/// kernel's own watermarks. In an overlap, the largest amount is used.
mod overlap {
    use super::*;

    const MARKS: [u64; 3] = [1000, 2000, 3000];
    const TWICE: TableRig = TableRig { scale: 2, marks: MARKS, ..PAPERS };

    cases! { |free, times| TWICE.check(free, times);
        amf_table_2_x2_row_above_high_x2: 7000 => 0;
        amf_table_2_x2_edge_one_page_above_high_x2: 6001 => 0;
        amf_table_2_x2_edge_at_high_x2: 6000 => 1;
        amf_table_2_x2_edge_one_page_above_low_x2: 4001 => 1;
        amf_table_2_x2_edge_at_low_x2: 4000 => 2;
        amf_table_2_x2_edge_one_page_above_high: 3001 => 2;
        amf_table_2_x2_edge_at_high_above_min_x2: 3000 => 5;
        amf_table_2_x2_edge_one_page_above_min_x2: 2001 => 5;
        amf_table_2_x2_edge_at_min_x2_and_low: 2000 => 5;
        amf_table_2_x2_hole_one_page_below_low: 1999 => 5;
        amf_table_2_x2_hole_nothing_is_free: 0 => 5;
    }

    #[test]
    fn lookup_without_upper_limits_of_rows_is_detected() {
        TWICE.check_overlap(CASES);
    }

    mod at_scale_1 {
        use super::*;

        const ONCE: TableRig = TableRig { scale: 1, marks: MARKS, ..PAPERS };

        cases! { |free, times| ONCE.check(free, times);
            amf_table_2_x1_row_above_high: 4000 => 0;
            amf_table_2_x1_edge_one_page_above_high: 3001 => 0;
            amf_table_2_x1_edge_at_high: 3000 => 5;
            amf_table_2_x1_row_low_to_high: 2500 => 5;
            amf_table_2_x1_edge_one_page_above_low: 2001 => 5;
            amf_table_2_x1_edge_at_low: 2000 => 5;
            amf_table_2_x1_hole_one_page_below_low: 1999 => 5;
            amf_table_2_x1_hole_one_page_above_min: 1001 => 5;
            amf_table_2_x1_hole_at_min: 1000 => 5;
        }

        #[test]
        fn lookup_without_upper_limits_of_rows_is_detected() {
            ONCE.check_overlap(CASES);
        }
    }
}

#[test]
fn scale_moves_borders() {
    for (scale, pages, times) in [
        (4, 4 * HIGH + 1, 0),
        (4, 4 * HIGH, 1),
        (4, 4 * MIN, 3),
        (1, HIGH + 1, 0),
        (1, HIGH, 5),
        (1, MIN, 5),
    ] {
        let mut rig = Rig::new(amf(scale), &[D], &[1024 * GIB]);
        rig.free(0, pages);
        let decision = rig.report(1_000);
        assert_eq!(rig.added(decision), times * D, "{pages} pages at scale {scale}");
    }
}

/// With `watermark-share`, the borders depend on the DRAM of each node instead of the distance
/// between its watermarks.
#[test]
fn watermark_share_makes_the_first_border_a_share_of_dram() {
    let policy = amf(1024).with([("watermark-share", &"250".into())]).expect("in bounds");
    let border = |dram: u64| dram / PAGE_BYTES / 4;
    for high in [HIGH, 10 * HIGH] {
        for (dram, pages, times) in [
            (D, border(D) + 1, 0),
            (D, border(D), 1),
            (D / 4, border(D / 4) + 1, 0),
            (D / 4, border(D / 4), 1),
            (D, border(D) * LOW / HIGH, 2),
            (D, border(D) * MIN / HIGH, 3),
            (D, LOW, 5),
        ] {
            let mut rig = Rig::new(policy.clone(), &[dram], &[1024 * GIB]);
            let zone = &mut rig.raw.zones[0];
            zone.high_pages = high;
            (zone.min_pages, zone.low_pages) = (MIN * (high / HIGH), LOW * (high / HIGH));
            rig.free(0, pages);
            let decision = rig.report(1_000);
            assert_eq!(rig.added(decision), times * dram, "{pages} pages of {dram}, high {high}");
        }
    }
}

#[test]
fn watermarks_of_a_node_are_summed_over_zones_with_memory() {
    let mut rig = Rig::new(amf(1024), &[D], &[1024 * GIB]);
    let mut dma32 = rig.raw.zones[0];
    dma32.kind = foreshore_proto::ZoneKind::Dma32;
    (dma32.managed_pages, dma32.free_pages) = (1000, 0);
    rig.raw.zones.push(dma32);
    dma32.managed_pages = 0;
    rig.raw.zones.push(dma32);
    rig.free(0, 2 * HIGH * 1024);
    let decision = rig.report(1_000);
    assert_eq!(
        rig.added(decision),
        D + 1000 * PAGE_BYTES,
        "both zones' high, and both zones' memory"
    );
    rig.free(0, 2 * HIGH * 1024 + 1);
    assert_eq!(rig.report(1_000).want_bytes, None, "an empty zone's watermarks do not count");
}

#[test]
fn shortage_is_answered_once_although_reported_again() {
    let mut rig = Rig::new(amf(1024), &[D], &[1024 * GIB]);
    rig.free(0, HIGH * 1024);
    let decision = rig.report(1_000);
    rig.host.zones[0].requested_bytes = decision.want_bytes.expect("short");
    for _ in 0..20 {
        let decision = rig.report(50);
        assert_eq!((decision.want_bytes, decision.reason), (None, Reason::InProgress));
    }
    // Half of the requested memory is online and used up. The rest is not online yet, but a lower
    // row of the table now applies.
    rig.host.zones[0].plugged_bytes = D / 2;
    rig.raw.zones[1].managed_pages = D / 2 / PAGE_BYTES;
    rig.free(0, LOW * 1024);
    let decision = rig.report(50);
    assert_eq!(rig.added(decision), D, "the memory may not be online yet");
    rig.host.zones[0].requested_bytes = decision.want_bytes.expect("short");
    assert_eq!(rig.report(50).reason, Reason::InProgress);
    let decision = rig.report(50);
    assert_eq!(rig.added(decision), D / 2, "the memory is used up");
}

#[test]
fn free_pm_answers_need_of_its_node() {
    let mut rig = Rig::new(amf(1024), &[D], &[1024 * GIB]);
    rig.plug(0, D);
    rig.free(0, 0);
    assert_eq!(rig.report(1_000).want_bytes, None, "64 GiB are free");
    rig.free(1, HIGH * 1024);
    let decision = rig.report(3_000);
    assert_eq!(rig.added(decision), D);
}

#[test]
fn node_furthest_down_is_served_first_in_multiples_of_its_own_dram() {
    let mut rig = Rig::new(amf(1024), &[D, D / 2], &[1024 * GIB, 1024 * GIB]);
    rig.free(0, HIGH * 1024);
    rig.free(1, LOW * 1024);
    let decision = rig.report(1_000);
    assert_eq!((decision.near, rig.added(decision)), (Some(1), D));
    // Memory that is about to arrive on the second node does not help the first one.
    rig.host.zones[1].requested_bytes = D;
    let decision = rig.report(50);
    assert_eq!((decision.near, rig.added(decision)), (Some(0), D));
    rig.host.zones[0].requested_bytes = D;
    assert_eq!(rig.report(50).reason, Reason::InProgress);
}

#[test]
fn node_without_pm_of_its_own_left_counts_pm_of_others() {
    let mut rig = Rig::new(amf(1024), &[D, D], &[GIB, 1024 * GIB]);
    rig.plug(0, GIB);
    rig.plug(1, D);
    for zone in [0, 2] {
        rig.free(zone, 0);
    }
    assert_eq!(rig.report(1_000).want_bytes, None, "the node gets the other node's memory");
    // If the first node could still add PM of its own, it would add that PM.
    rig.host.zones[0].max_bytes = 2 * GIB;
    let decision = rig.report(3_000);
    assert_eq!((decision.near, rig.added(decision)), (Some(0), 5 * D));
}

/// Guest with this number of free online sections of PM. At scale 64, Table 2 adds no memory to it.
fn with_free_sections(sections: u64) -> Rig {
    let mut rig = Rig::new(amf(64), &[8 * GIB], &[1024 * GIB]);
    rig.plug(0, sections * SECTION_BYTES);
    rig
}

#[test]
fn sections_stay_until_descriptors_take_three_percent_of_dram() {
    // 3 % of 8 GiB are 245.76 MiB. This is enough for the descriptors of 122 sections, but not of
    // 123.
    assert_eq!(with_free_sections(122).report(1_000).want_bytes, None);
    let mut rig = with_free_sections(123);
    let decision = rig.report(1_000);
    assert_eq!(
        (decision.want_bytes, decision.reason),
        (Some(0), Reason::DescriptorSpace),
        "all together"
    );
    assert!(!decision.pressure);
    // The controller removes the sections in steps. The last ones are removed too, although their
    // descriptors take less than 3 % of DRAM.
    rig.plug(0, 50 * SECTION_BYTES);
    assert_eq!(rig.report(1_000).want_bytes, Some(0));
    rig.plug(0, 0);
    assert_eq!(rig.report(1_000).want_bytes, None);
    rig.plug(0, 50 * SECTION_BYTES);
    assert_eq!(rig.report(1_000).want_bytes, None, "and then it restarts");
}

#[test]
fn dry_run_leaves_no_removal_in_progress() {
    let mut rig = with_free_sections(123);
    rig.dry_run = true;
    assert_eq!(rig.report(1_000).want_bytes, Some(0));
    rig.plug(0, 50 * SECTION_BYTES);
    rig.dry_run = false;
    assert_eq!(rig.report(1_000).want_bytes, None, "it begins at 3 %");
}

#[test]
fn sections_with_descriptors_of_exactly_three_percent_stay() {
    // 3 % of 8000 MiB are 240 MiB, the size of the descriptors of 120 sections.
    for (sections, want_bytes) in [(120, None), (121, Some(0))] {
        let mut rig = Rig::new(amf(64), &[8000 * MIB], &[1024 * GIB]);
        rig.plug(0, sections * SECTION_BYTES);
        assert_eq!(rig.report(1_000).want_bytes, want_bytes, "{sections} sections");
    }
}

#[test]
fn reclaim_share_is_a_parameter() {
    let mut rig = with_free_sections(50);
    rig.policy = rig.policy.with([("reclaim", &"10".into())]).expect("in bounds");
    assert_eq!(rig.report(1_000).want_bytes, Some(0));
}

#[test]
fn partly_used_sections_stay() {
    let mut rig = with_free_sections(200);
    rig.free(1, 130 * SECTION_BYTES / PAGE_BYTES - 1);
    let decision = rig.report(1_000);
    assert_eq!(rig.taken(decision), 129 * SECTION_BYTES);
}

#[test]
fn removal_leaves_enough_for_table_2() {
    let mut rig = with_free_sections(200);
    rig.free(0, 0);
    let border_bytes = HIGH * 64 * PAGE_BYTES;
    let decision = rig.report(1_000);
    let left = 200 * SECTION_BYTES - rig.taken(decision);
    assert!(left > border_bytes && left <= border_bytes + SECTION_BYTES, "{} MiB", left / MIB);
    rig.plug(0, left);
    rig.free(0, 0);
    let decision = rig.report(3_000);
    assert_eq!((decision.want_bytes, decision.reason), (None, Reason::Enough));
}

#[test]
fn node_that_is_short_keeps_all_sections() {
    let mut rig = with_free_sections(500);
    rig.report(1_000);
    rig.free(0, 0);
    rig.free(1, 100);
    assert!(rig.report(1_000).pressure);
}

#[test]
fn memory_outside_pm_nodes_is_not_reclaimed() {
    let mut rig = with_free_sections(200);
    rig.host.zones[0].tier = Tier::Dram;
    assert_eq!(rig.report(1_000).want_bytes, None);
}

#[test]
fn reports_are_fast_below_first_border_within_a_limit() {
    let mut rig = Rig::new(amf(1), &[D], &[D]);
    assert_eq!(rig.report(1_000).watermark_bytes, HIGH * PAGE_BYTES);
    let mut rig = Rig::new(amf(1024), &[D], &[D]);
    assert_eq!(rig.report(1_000).watermark_bytes, D / 4);
}
