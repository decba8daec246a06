//! `amf`: adds PM if a node's free memory is below scaled watermarks, and returns it lazily, as in
//! the paper "Adaptive Memory Fusion". docs/design/papers.md lists the differences from the paper.

#[cfg(test)]
mod tests;

use super::numa_view::{NodeView, OutstandingMemory};
use super::threshold_table::{self, Factor, Mark, Row, TableResult, above, from, otherwise};
use super::{Decision, Input};
use crate::TimeMs;
use crate::params::params;
use crate::plan::Reason;
use crate::units::{PAGE_BYTES, SECTION_BYTES, SECTION_DESCRIPTOR_BYTES, scale};

params! {
    /// Parameters of `amf`.
    pub struct Params {
        /// Multiplier of each node's watermarks for the limits of free memory in Table 2 of the paper.
        watermark_scale: "watermark-scale", Count, 1 => 65_536, 1024;
        /// If not 0, replaces `watermark-scale`: scales each node's watermarks so that its high
        /// watermark is this share of its DRAM.
        watermark_share_permille: "watermark-share", Permille, 0 => 1000, 0;
        /// Share of DRAM that page descriptors of free sections may take before these sections are returned.
        reclaim_permille: "reclaim", Permille, 1 => 1000, 30;
    }
}

impl Params {
    fn factor(&self) -> Factor {
        Factor::new(self.watermark_scale, self.watermark_share_permille)
    }
}

/// Table 2. The last row applies below `low`, for which the paper has no row.
pub(super) const TABLE_2: &[Row] = &[
    above(Mark::High, 1, 0, Reason::Enough),
    above(Mark::Low, 1, 1, Reason::LowFree),
    above(Mark::Min, 1, 2, Reason::LowFree),
    above(Mark::High, 0, 3, Reason::LowFree),
    from(Mark::Low, 0, 5, Reason::AtWatermarks),
    otherwise(5, Reason::AtWatermarks),
];

/// State of `amf` between two reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    outstanding: OutstandingMemory,
    /// True while free sections are being returned. The controller returns them in steps until none
    /// is left.
    reclaiming: bool,
}

/// Makes a decision after a report.
pub fn decide(
    params: &Params,
    mut state: State,
    input: Input<'_>,
    now: TimeMs,
) -> (State, Decision) {
    let factor = params.factor();
    let result = TableResult::new(TABLE_2, factor, &mut state.outstanding, input, now);
    let decision = if result.short.is_empty() {
        match state.removable_bytes(params, &result.nodes) {
            0 => result.hold(Reason::Enough),
            bytes => {
                let least = result.nodes.iter().min_by_key(|node| spare_pages(node, factor));
                let want_bytes = input.host.requested_bytes().saturating_sub(bytes);
                let shrink = result.shrink(want_bytes, Reason::DescriptorSpace);
                Decision { near: least.map(|node| node.node), ..shrink }
            }
        }
    } else {
        state.reclaiming = false;
        // Memory is added to the node in the lowest row of the table. If several nodes are in that
        // row, the first one is chosen.
        let missing = result.short.iter().filter(|short| short.missing_bytes > 0);
        let served = missing.max_by_key(|short| (short.row.times, u32::MAX - short.node.node));
        result.grow(served, &mut state.outstanding)
    };
    // A removal does not start in a dry run or a pause.
    state.reclaiming &= input.is_carried_out;
    (state, decision)
}

/// Number of pages that can be removed from a node before Table 2 would add memory again.
fn spare_pages(node: &NodeView, factor: Factor) -> u64 {
    node.own_free_pages.saturating_sub(threshold_table::first_border(TABLE_2, node, factor) + 1)
}

impl State {
    /// Returns the amount of memory to return: all free sections of PM, once their page descriptors
    /// occupy too large a share of DRAM.
    fn removable_bytes(&mut self, params: &Params, nodes: &[NodeView]) -> u64 {
        let factor = params.factor();
        if nodes.iter().any(|node| threshold_table::needs_pm_of_others(TABLE_2, node, factor)) {
            self.reclaiming = false;
            return 0;
        }
        let sections = nodes.iter().fold(0u64, |sum, node| {
            let spare_bytes = spare_pages(node, factor) * PAGE_BYTES;
            let free_sections = node.pm_free_sections.min(node.pm_requested_bytes / SECTION_BYTES);
            sum + free_sections.min(spare_bytes / SECTION_BYTES)
        });
        let dram_bytes = nodes.iter().fold(0u64, |sum, node| sum.saturating_add(node.dram_bytes));
        let share_bytes = scale(dram_bytes, params.reclaim_permille, 1000);
        self.reclaiming =
            sections > 0 && (self.reclaiming || sections * SECTION_DESCRIPTOR_BYTES > share_bytes);
        if self.reclaiming { sections * SECTION_BYTES } else { 0 }
    }
}
