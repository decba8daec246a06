//! `dapper`: adds PM to each node according to Table 3 of the paper "Dapper", and removes it
//! according to Table 4. docs/design/papers.md lists the differences from the paper.

#[cfg(test)]
mod tests;

use super::numa_view::{NodeView, OutstandingMemory};
use super::threshold_table::{self, Factor, Mark, Row, TableResult, above, otherwise};
use super::{Decision, Input};
use crate::params::params;
use crate::plan::Reason;
use crate::units::{PAGE_BYTES, scale};
use crate::{BLOCK_BYTES, TimeMs};

params! {
    /// Parameters of `dapper`.
    pub struct Params {
        /// Multiplier of each node's watermarks for the limits of free memory in Table 3 of the paper; the first limit is twice as high.
        watermark_scale: "watermark-scale", Count, 1 => 65_536, 1024;
        /// If not 0, replaces `watermark-scale`: scales each node's watermarks so that its high
        /// watermark is this share of its DRAM.
        watermark_share_permille: "watermark-share", Permille, 0 => 1000, 0;
    }
}

impl Params {
    fn factor(&self) -> Factor {
        Factor::new(self.watermark_scale, self.watermark_share_permille)
    }
}

/// Table 3. The last row applies at `low` and below, for which the paper has no row.
pub(super) const TABLE_3: &[Row] = &[
    above(Mark::High, 2, 0, Reason::Enough),
    above(Mark::High, 1, 1, Reason::LowFree),
    above(Mark::Low, 1, 2, Reason::LowFree),
    above(Mark::Min, 1, 4, Reason::LowFree),
    above(Mark::High, 0, 8, Reason::LowFree),
    above(Mark::Low, 0, 16, Reason::AtWatermarks),
    otherwise(16, Reason::AtWatermarks),
];

/// Row of Table 4. If more than `above_16ths` of the node's PM is free on the node, `remove_16ths`
/// of the PM is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Removal {
    above_16ths: u64,
    remove_16ths: u64,
}

const fn removal(above_16ths: u64, remove_16ths: u64) -> Removal {
    Removal { above_16ths, remove_16ths }
}

/// Table 4. The last row removes nothing at a sixteenth and below, for which the paper has no row.
pub(super) const TABLE_4: &[Removal] =
    &[removal(16, 16), removal(12, 8), removal(8, 4), removal(4, 2), removal(2, 1), removal(1, 0)];

/// State of `dapper` between two reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    outstanding: OutstandingMemory,
    /// Node to which memory was added last, or from which it was removed last.
    served: Option<u32>,
    /// Removal that the controller is carrying out in steps. Table 4 was evaluated only once,
    /// before the first step.
    active_removal: Option<ActiveRemoval>,
}

/// A removal in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ActiveRemoval {
    node: u32,
    target_bytes: u64,
}

/// Makes a decision after a report.
pub fn decide(
    params: &Params,
    mut state: State,
    input: Input<'_>,
    now: TimeMs,
) -> (State, Decision) {
    let result = TableResult::new(TABLE_3, params.factor(), &mut state.outstanding, input, now);
    let served_before = state.served;
    let decision = if result.short.is_empty() {
        match state.remove(params, &result.nodes, input) {
            Some((node, want_bytes)) => {
                Decision { from: Some(node), ..result.shrink(want_bytes, Reason::FreeShare) }
            }
            None => result.hold(Reason::Enough),
        }
    } else {
        state.active_removal = None;
        let mut round_robin = round_robin(&result.short, |short| short.node.node, state.served);
        let served = round_robin.find(|short| short.missing_bytes > 0);
        state.served = served.map(|short| short.node.node).or(state.served);
        result.grow(served, &mut state.outstanding)
    };
    if !input.is_carried_out {
        // No memory was removed or added. Table 4 will be evaluated again, and the order of the
        // nodes does not advance.
        (state.active_removal, state.served) = (None, served_before);
    }
    (state, decision)
}

/// Returns the items in round-robin order: first those after the node `served`, then the others.
fn round_robin<T>(
    items: &[T],
    node: impl Fn(&T) -> u32,
    served: Option<u32>,
) -> impl Iterator<Item = &T> + Clone {
    let start = served.map_or(0, |served| items.partition_point(|item| node(item) <= served));
    items[start..].iter().chain(&items[..start])
}

/// Amount that Table 4 removes from a node that has `pm_bytes` of PM and `free_bytes` of free
/// memory.
fn removed_bytes(table: &[Removal], free_bytes: u64, pm_bytes: u64) -> u64 {
    let row = table.iter().find(|row| free_bytes > scale(pm_bytes, row.above_16ths, 16));
    row.map_or(0, |row| scale(pm_bytes, row.remove_16ths, 16))
}

/// Free PM that can be removed from a node before Table 3 would add memory again. Table 3 adds at
/// least D (the node's DRAM), so D above its first border is kept.
fn spare_bytes(node: &NodeView, factor: Factor) -> u64 {
    let threshold_pages = threshold_table::first_border(TABLE_3, node, factor)
        .saturating_add(node.dram_bytes / PAGE_BYTES);
    let spare_pages = node.own_free_pages.saturating_sub(threshold_pages);
    (spare_pages * PAGE_BYTES).min(node.pm_free_bytes).min(node.pm_requested_bytes)
}

impl State {
    /// Returns the node to take PM from, and the total size that remains.
    fn remove(
        &mut self,
        params: &Params,
        nodes: &[NodeView],
        input: Input<'_>,
    ) -> Option<(u32, u64)> {
        if nodes
            .iter()
            .any(|node| threshold_table::needs_pm_of_others(TABLE_3, node, params.factor()))
        {
            self.active_removal = None;
            return None;
        }
        let requested_bytes = input.host.requested_bytes();
        // If a node of plugged DRAM has disappeared, the removal of the PM near it has ended.
        self.active_removal = self.active_removal.filter(|active_removal| {
            requested_bytes > active_removal.target_bytes
                && nodes.iter().any(|node| node.node == active_removal.node)
        });
        if self.active_removal.is_none() {
            self.active_removal =
                round_robin(nodes, |node| node.node, self.served).find_map(|node| {
                    // F is the node's own free memory (section 4.4.2: "free memory on node1").
                    let free_bytes = node.own_free_pages.saturating_mul(PAGE_BYTES);
                    let bytes = removed_bytes(TABLE_4, free_bytes, node.pm_bytes)
                        .min(spare_bytes(node, params.factor()));
                    (bytes >= BLOCK_BYTES).then(|| ActiveRemoval {
                        node: node.node,
                        target_bytes: requested_bytes.saturating_sub(bytes),
                    })
                });
        }
        let active_removal = self.active_removal?;
        let node = nodes.iter().find(|node| node.node == active_removal.node)?;
        let least_bytes = requested_bytes.saturating_sub(spare_bytes(node, params.factor()));
        let want_bytes = active_removal.target_bytes.max(least_bytes);
        if requested_bytes - want_bytes < BLOCK_BYTES {
            // The guest now uses the memory that was to be removed.
            self.active_removal = None;
            return None;
        }
        self.served = Some(node.node);
        Some((node.node, want_bytes))
    }
}
