//! Tests of `dapper`: each row and each border of Tables 3 and 4, and the rules for adding and
//! removing memory.

use super::{TABLE_3, TABLE_4, removed_bytes};
use crate::plan::Reason;
use crate::policy::Policy;
use crate::policy::testing::{GIB, HIGH, LOW, MIN, Rig};
use crate::units::PAGE_BYTES;

fn dapper(watermark_scale: u64) -> Policy {
    Policy::Dapper(super::Params { watermark_scale, ..super::Params::default() })
}

mod table_3 {
    use super::*;
    use crate::policy::testing::{TableRig, cases};

    const D: u64 = 64 * GIB;

    const PAPERS: TableRig =
        TableRig { policy: dapper, table: TABLE_3, scale: 1024, marks: [MIN, LOW, HIGH] };

    cases! { |free, times| PAPERS.check(free, times);
        dapper_table_3_row_high_x2048_to_all: HIGH * 2048 + 1_000_000 => 0;
        dapper_table_3_edge_all_is_free: D / PAGE_BYTES => 0;
        dapper_table_3_edge_one_page_above_high_x2048: HIGH * 2048 + 1 => 0;
        dapper_table_3_edge_at_high_x2048: HIGH * 2048 => 1;
        dapper_table_3_row_high_x1024_to_high_x2048: HIGH * 1500 => 1;
        dapper_table_3_edge_one_page_above_high_x1024: HIGH * 1024 + 1 => 1;
        dapper_table_3_edge_at_high_x1024: HIGH * 1024 => 2;
        dapper_table_3_row_low_x1024_to_high_x1024: (LOW + HIGH) / 2 * 1024 => 2;
        dapper_table_3_edge_one_page_above_low_x1024: LOW * 1024 + 1 => 2;
        dapper_table_3_edge_at_low_x1024: LOW * 1024 => 4;
        dapper_table_3_row_min_x1024_to_low_x1024: (MIN + LOW) / 2 * 1024 => 4;
        dapper_table_3_edge_one_page_above_min_x1024: MIN * 1024 + 1 => 4;
        dapper_table_3_edge_at_min_x1024: MIN * 1024 => 8;
        dapper_table_3_row_high_to_min_x1024: MIN * 100 => 8;
        dapper_table_3_edge_one_page_above_high: HIGH + 1 => 8;
        dapper_table_3_edge_at_high: HIGH => 16;
        dapper_table_3_row_low_to_high: (LOW + HIGH) / 2 => 16;
        dapper_table_3_edge_one_page_above_low: LOW + 1 => 16;
        dapper_table_3_hole_at_low: LOW => 16;
        dapper_table_3_hole_at_min: MIN => 16;
        dapper_table_3_hole_nothing_is_free: 0 => 16;
    }

    #[test]
    fn each_broken_table_3_is_detected() {
        PAPERS.check_cases(CASES);
    }

    /// If min x scale is below high, the row in between is empty, and rows overlap with those of
    /// the kernel's own watermarks. In an overlap, the largest amount is used.
    mod overlap {
        use super::*;

        const MARKS: [u64; 3] = [1000, 2000, 3000];
        const TWICE: TableRig = TableRig { scale: 2, marks: MARKS, ..PAPERS };

        cases! { |free, times| TWICE.check(free, times);
            dapper_table_3_x2_row_above_high_x4: 13_000 => 0;
            dapper_table_3_x2_edge_one_page_above_high_x4: 12_001 => 0;
            dapper_table_3_x2_edge_at_high_x4: 12_000 => 1;
            dapper_table_3_x2_edge_one_page_above_high_x2: 6001 => 1;
            dapper_table_3_x2_edge_at_high_x2: 6000 => 2;
            dapper_table_3_x2_edge_one_page_above_low_x2: 4001 => 2;
            dapper_table_3_x2_edge_at_low_x2: 4000 => 4;
            dapper_table_3_x2_edge_one_page_above_high: 3001 => 4;
            dapper_table_3_x2_edge_at_high_above_min_x2: 3000 => 16;
            dapper_table_3_x2_edge_one_page_above_min_x2_and_low: 2001 => 16;
            dapper_table_3_x2_hole_at_min_x2_and_low: 2000 => 16;
            dapper_table_3_x2_hole_nothing_is_free: 0 => 16;
        }

        #[test]
        fn lookup_without_upper_limits_of_rows_is_detected() {
            TWICE.check_overlap(CASES);
        }

        mod at_scale_1 {
            use super::*;

            const ONCE: TableRig = TableRig { scale: 1, marks: MARKS, ..PAPERS };

            cases! { |free, times| ONCE.check(free, times);
                dapper_table_3_x1_row_above_high_x2: 7000 => 0;
                dapper_table_3_x1_edge_one_page_above_high_x2: 6001 => 0;
                dapper_table_3_x1_edge_at_high_x2: 6000 => 1;
                dapper_table_3_x1_row_high_to_high_x2: 4500 => 1;
                dapper_table_3_x1_edge_one_page_above_high: 3001 => 1;
                dapper_table_3_x1_edge_at_high: 3000 => 16;
                dapper_table_3_x1_row_low_to_high: 2500 => 16;
                dapper_table_3_x1_edge_one_page_above_low: 2001 => 16;
                dapper_table_3_x1_hole_at_low: 2000 => 16;
                dapper_table_3_x1_hole_at_min: 1000 => 16;
            }

            #[test]
            fn lookup_without_upper_limits_of_rows_is_detected() {
                ONCE.check_overlap(CASES);
            }
        }
    }

    #[test]
    fn scale_moves_borders() {
        for (pages, times) in
            [(8 * HIGH + 1, 0), (8 * HIGH, 1), (4 * HIGH, 2), (4 * LOW, 4), (4 * MIN, 8)]
        {
            let mut rig = Rig::new(dapper(4), &[D], &[4096 * GIB]);
            rig.free(0, pages);
            let decision = rig.report(1_000);
            assert_eq!(rig.added(decision), times * D, "{pages} pages at scale 4");
        }
    }

    #[test]
    fn watermark_share_makes_the_second_border_a_share_of_dram() {
        let policy = dapper(1).with([("watermark-share", &"250".into())]).expect("in bounds");
        let quarter = D / PAGE_BYTES / 4;
        let at_low = quarter * LOW / HIGH;
        for (pages, times) in
            [(2 * quarter + 1, 0), (2 * quarter, 1), (quarter, 2), (at_low, 4), (HIGH, 16)]
        {
            let mut rig = Rig::new(policy.clone(), &[D], &[4096 * GIB]);
            rig.free(0, pages);
            let decision = rig.report(1_000);
            assert_eq!(rig.added(decision), times * D, "{pages} pages");
        }
    }

    #[test]
    fn nodes_are_served_in_turn_after_the_last_one() {
        let mut rig = Rig::new(dapper(1024), &[D, D, D], &[4096 * GIB; 3]);
        for zone in [0, 2] {
            rig.free(zone, 0);
        }
        let mut served = Vec::new();
        for _ in 0..5 {
            let decision = rig.report(50);
            assert_eq!(rig.added(decision), 16 * D);
            served.push(decision.near.expect("for a node"));
        }
        assert_eq!(served, [0, 2, 0, 2, 0], "the node in between needs no memory");
        rig.free(1, 0);
        assert_eq!(rig.report(50).near, Some(1));
    }

    #[test]
    fn shortage_is_answered_once_and_does_not_hide_the_next() {
        let mut rig = Rig::new(dapper(1024), &[D, D], &[4096 * GIB; 2]);
        rig.free(0, HIGH * 1024);
        let decision = rig.report(50);
        assert_eq!((decision.near, rig.added(decision)), (Some(0), 2 * D));
        rig.host.zones[0].requested_bytes = 2 * D;
        for _ in 0..20 {
            assert_eq!(rig.report(50).reason, Reason::InProgress);
        }
        rig.free(1, HIGH * 1024);
        let decision = rig.report(50);
        assert_eq!((decision.near, rig.added(decision)), (Some(1), 2 * D), "its own shortage");
        rig.host.zones[1].requested_bytes = 2 * D;
        assert_eq!(rig.report(50).reason, Reason::InProgress);
    }

    #[test]
    fn each_node_is_measured_by_its_own_dram() {
        let mut rig = Rig::new(dapper(1024), &[D, D / 4], &[4096 * GIB; 2]);
        rig.free(1, 0);
        let decision = rig.report(50);
        assert_eq!((decision.near, rig.added(decision)), (Some(1), 16 * D / 4));
    }
}

mod table_4 {
    use super::super::Removal;
    use super::*;
    use crate::policy::testing::cases;

    /// Size of PM. Each sixteenth of it is a multiple of the block size.
    const P: u64 = 16 * GIB;
    const D: u64 = 8 * GIB;

    /// Checks that `sixteenths` of P are removed if `free_bytes` are free in a guest that has one
    /// node of DRAM and one of PM.
    fn check_removal(free_bytes: u64, sixteenths: u64) {
        let mut rig = Rig::new(dapper(1), &[64 * GIB], &[P]);
        rig.plug(0, P);
        let in_pm = free_bytes.min(P);
        rig.free(1, in_pm / PAGE_BYTES);
        rig.free(0, (free_bytes - in_pm) / PAGE_BYTES);
        // These values isolate Table 4. Table 3 neither adds memory nor prevents its removal, and
        // no DRAM is used.
        rig.raw.zones[0].high_pages = 0;
        (rig.raw.zones[0].min_pages, rig.raw.zones[0].low_pages) = (0, 0);
        rig.raw.zones[0].managed_pages = rig.raw.zones[0].free_pages.max(1);
        rig.sum_up();
        let spare =
            in_pm.min(free_bytes.saturating_sub(rig.raw.zones[0].managed_pages * PAGE_BYTES));
        let removed = removed_bytes(TABLE_4, free_bytes, P);
        assert_eq!(removed, P / 16 * sixteenths, "{free_bytes} bytes free");
        let decision = rig.report(1_000);
        assert_eq!(rig.taken(decision), removed.min(spare), "{free_bytes} bytes free");
        let reason = if sixteenths > 0 { Reason::FreeShare } else { Reason::Enough };
        assert_eq!((decision.reason, decision.pressure), (reason, false));
    }

    const PAGE: u64 = PAGE_BYTES;

    cases! { check_removal;
        dapper_table_4_row_p_to_all: P + P / 2 => 16;
        dapper_table_4_edge_one_page_above_p: P + PAGE => 16;
        dapper_table_4_edge_at_p: P => 8;
        dapper_table_4_row_three_quarters_to_p: P / 8 * 7 => 8;
        dapper_table_4_edge_one_page_above_three_quarters: P / 4 * 3 + PAGE => 8;
        dapper_table_4_edge_at_three_quarters: P / 4 * 3 => 4;
        dapper_table_4_row_half_to_three_quarters: P / 8 * 5 => 4;
        dapper_table_4_edge_one_page_above_half: P / 2 + PAGE => 4;
        dapper_table_4_edge_at_half: P / 2 => 2;
        dapper_table_4_row_quarter_to_half: P / 8 * 3 => 2;
        dapper_table_4_edge_one_page_above_quarter: P / 4 + PAGE => 2;
        dapper_table_4_edge_at_quarter: P / 4 => 1;
        dapper_table_4_row_eighth_to_quarter: P / 16 * 3 => 1;
        dapper_table_4_edge_one_page_above_eighth: P / 8 + PAGE => 1;
        dapper_table_4_edge_at_eighth: P / 8 => 0;
        dapper_table_4_row_sixteenth_to_eighth: P / 32 * 3 => 0;
        dapper_table_4_edge_one_page_above_sixteenth: P / 16 + PAGE => 0;
        dapper_table_4_hole_at_sixteenth: P / 16 => 0;
        dapper_table_4_hole_little_is_free: 16 * PAGE => 0;
    }

    #[test]
    fn each_broken_table_4_is_detected() {
        let is_detected = |table: &[Removal]| {
            CASES
                .iter()
                .any(|(free, sixteenths)| removed_bytes(table, *free, P) != P / 16 * sixteenths)
        };
        assert!(!is_detected(TABLE_4));
        for index in 0..TABLE_4.len() {
            let mut broken = TABLE_4.to_vec();
            broken[index].remove_16ths += 1;
            assert!(is_detected(&broken), "amount of row {index}");
        }
        // The last border has no effect, because nothing is removed on either side of it.
        for index in 0..TABLE_4.len() - 1 {
            let mut broken = TABLE_4.to_vec();
            broken[index].above_16ths += 1;
            assert!(is_detected(&broken), "border of row {index}");
            let mut broken = TABLE_4.to_vec();
            broken.remove(index);
            assert!(is_detected(&broken), "without row {index}");
        }
    }

    /// Guest with no used memory, in which all of P is plugged. At scale 1, the first border is 48
    /// MiB.
    fn idle() -> Rig {
        let mut rig = Rig::new(dapper(1), &[D], &[P]);
        rig.plug(0, P);
        rig
    }

    #[test]
    fn removal_in_steps_ends_at_size_of_first_evaluation() {
        let mut rig = idle();
        rig.free(0, 4 * GIB / PAGE_BYTES);
        rig.free(1, 9 * GIB / PAGE_BYTES);
        // 13 of 16 GiB are free, so Table 4 removes half of P. However, D above the first border
        // must remain.
        let spare = 13 * GIB - 2 * HIGH * PAGE_BYTES - D;
        let decision = rig.report(1_000);
        assert_eq!(rig.taken(decision), spare.min(P / 2));
        rig.free(0, D / PAGE_BYTES);
        let mut rig = Rig { state: rig.policy.initial_state(), ..rig };
        rig.free(1, 6 * GIB / PAGE_BYTES);
        // 14 GiB are free. Table 4 removes half of P, but at most 6 GiB minus the first border can
        // be removed.
        let until = rig.report(1_000).want_bytes.expect("some memory is removed");
        let total = P - until;
        for gone in [GIB, 2 * GIB, 3 * GIB] {
            rig.host.zones[0].requested_bytes = P - gone;
            rig.host.zones[0].plugged_bytes = P - gone;
            rig.raw.zones[1].managed_pages = (P - gone) / PAGE_BYTES;
            rig.free(1, (6 * GIB - gone) / PAGE_BYTES);
            let decision = rig.report(1_000);
            assert_eq!(decision.want_bytes, Some(until), "{gone} of {total} bytes are used");
        }
    }

    #[test]
    fn dry_run_leaves_no_removal_in_progress() {
        let mut rig = Rig::new(dapper(1), &[4 * GIB], &[P]);
        rig.plug(0, P);
        rig.dry_run = true;
        let decision = rig.report(1_000);
        assert!(rig.taken(decision) > P / 2, "all is free");
        rig.free(0, 0);
        rig.free(1, 7 * GIB / PAGE_BYTES);
        rig.dry_run = false;
        let decision = rig.report(3_600_000);
        assert_eq!(rig.taken(decision), P / 16 * 2, "the table's current amount");
    }

    #[test]
    fn dry_run_does_not_advance_turn_of_nodes() {
        let mut rig = Rig::new(dapper(1), &[D, D], &[P, P]);
        rig.plug(0, P);
        rig.plug(1, P);
        for dry_run in [true, true, false] {
            rig.dry_run = dry_run;
            assert_eq!(rig.report(1_000).from, Some(0));
        }
        let mut rig = Rig::new(dapper(1), &[D, D], &[P, P]);
        rig.free(0, 0);
        rig.free(1, 0);
        for dry_run in [true, true, false] {
            rig.dry_run = dry_run;
            assert_eq!(rig.report(1_000).near, Some(0));
        }
    }

    #[test]
    fn table_3_precedes_table_4_and_ends_a_removal() {
        let mut rig = idle();
        assert_eq!(rig.report(1_000).reason, Reason::FreeShare);
        rig.free(0, 0);
        rig.free(1, 2 * HIGH);
        let decision = rig.report(50);
        assert_eq!((decision.reason, rig.added(decision)), (Reason::LowFree, D));
        rig.free(1, 2 * HIGH + 1);
        assert_eq!(rig.report(50).reason, Reason::Enough, "the memory to unplug is needed");
    }

    #[test]
    fn removed_memory_is_not_brought_back_by_the_next_page() {
        let mut rig = idle();
        rig.free(0, 0);
        for _ in 0..10 {
            let decision = rig.report(3_000);
            assert_eq!(rig.added(decision), 0);
            let left = rig.host.requested_bytes() - rig.taken(decision);
            rig.plug(0, left);
            rig.free(0, 0);
        }
        let kept = 2 * HIGH * PAGE_BYTES + D;
        assert!(rig.host.requested_bytes() >= kept, "an amount D above the first border remains");
        assert!(rig.host.requested_bytes() <= kept + P / 8);
    }

    #[test]
    fn nothing_is_removed_while_a_node_depends_on_pm_of_another() {
        let mut rig = Rig::new(dapper(1), &[D, D], &[GIB, P]);
        rig.plug(0, GIB);
        rig.plug(1, P);
        rig.free(0, 0);
        rig.free(2, 0);
        assert_eq!(rig.report(1_000).want_bytes, None);
        rig.free(2, GIB / PAGE_BYTES);
        assert_eq!(rig.report(1_000).reason, Reason::FreeShare);
    }

    #[test]
    fn removal_follows_pm_size_of_its_node_and_leaves_other_nodes() {
        let mut rig = Rig::new(dapper(1), &[D, D], &[P, 4 * P]);
        rig.plug(0, P);
        rig.plug(1, P);
        rig.free(0, D / PAGE_BYTES);
        let decision = rig.report(1_000);
        // Node 0 has more free memory than PM, so all of its PM is removed. Node 1 has four times
        // as much PM, and an eighth of it is removed.
        assert_eq!(
            (decision.from, decision.want_bytes),
            (Some(0), Some(P + 2 * HIGH * PAGE_BYTES))
        );
        rig.plug(0, 2 * HIGH * PAGE_BYTES);
        let decision = rig.report(1_000);
        assert_eq!((decision.near, decision.from), (None, Some(1)), "then it is node 1's turn");
    }

    #[test]
    fn free_memory_of_another_node_does_not_count_for_table_4() {
        const PM: u64 = 128 * GIB;
        let mut rig = Rig::new(dapper(1), &[16 * GIB, 16 * GIB], &[PM, PM]);
        rig.plug(0, PM);
        rig.plug(1, PM);
        // 40 GiB are free on node 0 and 120 GiB on node 1.
        rig.free(0, 8 * GIB / PAGE_BYTES);
        rig.free(2, 32 * GIB / PAGE_BYTES);
        rig.free(1, 8 * GIB / PAGE_BYTES);
        rig.free(3, 112 * GIB / PAGE_BYTES);
        let decision = rig.report(1_000);
        assert_eq!((decision.from, rig.taken(decision)), (Some(0), PM / 8));
        // The free memory of the whole guest would select another row than that of node 0.
        assert_eq!(removed_bytes(TABLE_4, 40 * GIB, PM), PM / 8);
        assert_eq!(removed_bytes(TABLE_4, 160 * GIB, PM), PM);
    }

    #[test]
    fn removal_ends_when_its_node_disappears() {
        let mut rig = Rig::new(dapper(1), &[D, D], &[P, P]);
        rig.plug(0, P);
        rig.plug(1, P);
        rig.free(2, 0);
        assert_eq!(rig.report(1_000).from, Some(1), "node 0 has no free PM");
        // All DRAM of node 1 was hotplugged. Now it is unplugged.
        rig.raw.zones[1].managed_pages = 0;
        rig.free(1, 0);
        rig.free(2, P / PAGE_BYTES);
        let decision = rig.report(1_000);
        assert_eq!(
            (decision.from, decision.reason),
            (Some(0), Reason::FreeShare),
            "now it is node 0's turn"
        );
    }
}
