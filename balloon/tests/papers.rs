//! Tests of the papers' policies with a simulated guest. The tests check that each policy provides
//! memory, stops changing sizes, and returns memory.

#[allow(dead_code, reason = "more than these policies need")]
mod rig;

use balloon::MIB;
use balloon::params::Setting;
use balloon::plan::Direction;
use balloon::policy::Policy;
use balloon::proto::Measure;

use crate::rig::{Rig, config};

/// A guest, and its requested sizes with one entry for each change.
struct Loop {
    rig: Rig,
    asked: Vec<(Direction, u64)>,
}

impl Loop {
    fn new(policy: &str, params: &[(&str, &str)]) -> Self {
        let settings: Vec<_> =
            params.iter().map(|(name, text)| (*name, Setting::from(*text))).collect();
        let policy = Policy::from_name(policy).expect("known");
        let policy = policy
            .with(settings.iter().map(|(name, setting)| (*name, setting)))
            .expect("in bounds");
        Loop { rig: Rig::new(policy, config()), asked: Vec::new() }
    }

    fn run(&mut self, ms: u64, mib_per_s: i64) {
        let plans = self.rig.run(ms, mib_per_s);
        assert!(
            plans.iter().all(|plan| plan.watermark_of == Measure::Free),
            "these policies use free pages"
        );
        self.asked.extend(plans.iter().map(|plan| (plan.direction, plan.requested_bytes())));
    }

    fn swapped_out_mib(&self) -> u64 {
        self.rig.totals().swapped_out_bytes / MIB
    }

    fn shrinks(&self) -> usize {
        self.asked.iter().filter(|(direction, _)| *direction == Direction::Shrink).count()
    }
}

const PAPERS: [&str; 4] = ["amf", "dapper", "pmb", "memorage"];

/// Returns a guest with scales that place the first border of the tables at 64 and 128 MiB, because
/// its watermarks are 4 MiB.
fn scaled(policy: &str) -> Loop {
    let scale = if policy == "dapper" { "16" } else { "32" };
    let others: &[(&str, &str)] = match policy {
        "memorage" => &[("unit", "256M")],
        // With so little DRAM, 3 % of it could hold the page descriptors of more PM than the guest
        // has.
        "amf" => &[("reclaim", "10")],
        _ => &[],
    };
    Loop::new(policy, &[&[("watermark-scale", scale)], others].concat())
}

#[test]
fn ramp_far_beyond_dram_does_not_swap_with_default_parameters() {
    for policy in PAPERS {
        let mut papers = Loop::new(policy, &[]);
        papers.run(3_000, 0);
        papers.run(9_000, 100);
        papers.run(5_000, 0);
        assert!(papers.rig.guest().wanted_bytes() > 900 * MIB);
        assert_eq!(papers.swapped_out_mib(), 0, "{policy}");
        assert!(papers.rig.guest().zones()[1].plugged_bytes >= 400 * MIB, "{policy}");
    }
}

#[test]
fn memorage_with_scale_of_paper_acts_after_kswapd() {
    let mut papers = Loop::new("memorage", &[("watermark-scale", "1")]);
    papers.run(3_000, 0);
    papers.run(9_000, 100);
    assert!(papers.swapped_out_mib() > 0, "so the default differs");
}

#[test]
fn guest_with_constant_need_comes_to_rest() {
    for policy in PAPERS {
        for seconds in [1, 3, 5, 8] {
            let mut papers = scaled(policy);
            papers.run(3_000, 0);
            papers.run(seconds * 1_000, 100);
            papers.run(120_000, 0);
            papers.asked.clear();
            papers.run(120_000, 0);
            assert_eq!(papers.asked, [], "{policy} after {seconds} s");
            assert_eq!(papers.swapped_out_mib(), 0, "{policy} after {seconds} s");
        }
    }
}

#[test]
fn free_memory_is_returned_as_in_the_paper_without_swapping() {
    for (policy, left_mib) in
        [("amf", 128 + 384), ("dapper", 128 + 640), ("pmb", 128 + 8), ("memorage", 0)]
    {
        let mut papers = scaled(policy);
        papers.run(3_000, 0);
        papers.run(8_000, 100);
        papers.run(5_000, 0);
        let before = papers.rig.requested_bytes();
        papers.run(1_000, -900);
        papers.run(180_000, 0);
        let left = papers.rig.requested_bytes();
        assert!(papers.shrinks() > 0, "{policy} of {}", before / MIB);
        assert!(
            left / MIB <= left_mib,
            "{policy}: {} of {} MiB are left",
            left / MIB,
            before / MIB
        );
        assert_eq!(papers.swapped_out_mib(), 0, "{policy}");
        papers.asked.clear();
        papers.run(120_000, 0);
        assert_eq!(papers.asked, [], "{policy}");
    }
}

#[test]
fn sawtooth_does_not_resize_at_each_tooth() {
    for policy in PAPERS {
        let mut papers = scaled(policy);
        papers.run(3_000, 0);
        papers.run(5_000, 100);
        for _ in 0..30 {
            papers.run(1_000, -60);
            papers.run(600, 100);
        }
        papers.asked.clear();
        for _ in 0..60 {
            papers.run(1_000, -60);
            papers.run(600, 100);
        }
        assert!(papers.asked.len() <= 12, "{policy}: {:?}", papers.asked);
    }
}
