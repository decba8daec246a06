//! Tables of AMF and Dapper, which map a number of free pages to the amount of memory to add, and
//! code to evaluate them.

use super::numa_view::{self, NodeView, OutstandingMemory};
use super::{Decision, Input};
use crate::TimeMs;
use crate::plan::Reason;
use crate::units::{PAGE_BYTES, scale};

/// One of a node's watermarks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    Min,
    Low,
    High,
}

/// Factor by which watermarks in a table are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Factor {
    /// A single factor for all nodes, as in the papers.
    Times(u64),
    /// A separate factor for each node, with which the node's scaled high watermark is this share
    /// of its DRAM, in thousandths.
    ShareOfDram(u64),
}

impl Factor {
    /// Returns the factor for the parameters `watermark-scale` and `watermark-share`. The share
    /// takes precedence unless it is 0.
    pub(super) fn new(watermark_scale: u64, share_permille: u64) -> Self {
        if share_permille == 0 {
            Factor::Times(watermark_scale)
        } else {
            Factor::ShareOfDram(share_permille)
        }
    }

    fn scale_pages(self, pages: u64, node: &NodeView) -> u64 {
        match self {
            Factor::Times(times) => pages.saturating_mul(times),
            Factor::ShareOfDram(permille) => {
                scale(pages, scale(node.dram_bytes / PAGE_BYTES, permille, 1000), node.high_pages)
            }
        }
    }
}

/// Border between two rows: the watermark times `scales`, multiplied by the table's factor. If
/// `scales` is 0, the border is the watermark itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Border {
    pub mark: Mark,
    pub scales: u64,
}

impl Border {
    pub(super) fn pages(self, node: &NodeView, factor: Factor) -> u64 {
        let pages = match self.mark {
            Mark::Min => node.min_pages,
            Mark::Low => node.low_pages,
            Mark::High => node.high_pages,
        };
        if self.scales == 0 {
            return pages;
        }
        factor.scale_pages(pages.saturating_mul(self.scales), node)
    }
}

/// Row that applies above its border, up to the border of the previous row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Row {
    /// Lower border. `None` if the row applies to all lower numbers.
    pub above: Option<Border>,
    /// True if the border itself belongs to the row.
    pub is_inclusive: bool,
    /// Amount of memory to add, as a multiple of the node's DRAM.
    pub times: u64,
    pub reason: Reason,
}

/// Creates a row that applies above a border.
pub(super) const fn above(mark: Mark, scales: u64, times: u64, reason: Reason) -> Row {
    Row { above: Some(Border { mark, scales }), is_inclusive: false, times, reason }
}

/// Creates a row that applies at a border and above it.
pub(super) const fn from(mark: Mark, scales: u64, times: u64, reason: Reason) -> Row {
    Row { is_inclusive: true, ..above(mark, scales, times, reason) }
}

/// Creates a row that applies below all previous rows.
pub(super) const fn otherwise(times: u64, reason: Reason) -> Row {
    Row { above: None, is_inclusive: false, times, reason }
}

/// Returns the row that applies to a node. With a small factor, min x factor is below high, and
/// rows overlap. In that case, the matching row with the largest amount is used.
pub(super) fn row<'a>(table: &'a [Row], node: &NodeView, factor: Factor) -> &'a Row {
    let is_above = |row: &Row| match row.above.map(|border| border.pages(node, factor)) {
        None => true,
        Some(border) => node.free_pages > border || (row.is_inclusive && node.free_pages == border),
    };
    let is_up_to =
        |index: usize| index.checked_sub(1).is_none_or(|before| !is_above(&table[before]));
    let rows = table.iter().enumerate().filter(|(index, row)| is_above(row) && is_up_to(*index));
    // The last row has no border, so at least one row matches.
    rows.map(|(_, row)| row).max_by_key(|row| row.times).unwrap_or(&table[table.len() - 1])
}

/// Returns true if a node has enough memory only because PM of other nodes is free. In that case,
/// no PM can be removed.
pub(super) fn needs_pm_of_others(table: &[Row], node: &NodeView, factor: Factor) -> bool {
    let alone = NodeView { free_pages: node.own_free_pages, ..*node };
    row(table, &alone, factor).times > 0
}

/// Returns the border in pages above which a table adds no memory.
pub(super) fn first_border(table: &[Row], node: &NodeView, factor: Factor) -> u64 {
    table[0].above.map_or(0, |border| border.pages(node, factor))
}

/// Node to which a table adds memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct ShortNode<'a> {
    pub node: NodeView,
    pub row: &'a Row,
    /// Part of the row's amount that has not been requested yet. It ensures that a shortage is
    /// answered only once, although several reports show it.
    pub missing_bytes: u64,
}

/// Result of evaluating a table after a report.
pub(super) struct TableResult<'a> {
    /// Guest's nodes, ordered by number.
    pub nodes: Vec<NodeView>,
    /// Nodes to which the table adds memory, in the same order.
    pub short: Vec<ShortNode<'a>>,
    requested_bytes: u64,
    watermark_bytes: u64,
}

impl<'a> TableResult<'a> {
    /// Evaluates `table`, and subtracts the memory that has been requested already.
    pub(super) fn new(
        table: &'a [Row],
        factor: Factor,
        outstanding: &mut OutstandingMemory,
        input: Input<'_>,
        now: TimeMs,
    ) -> TableResult<'a> {
        outstanding.observe(input, now);
        let nodes = numa_view::nodes(input);
        let short = nodes.iter().filter_map(|node| {
            let row = row(table, node, factor);
            let wanted_bytes = node.dram_bytes.saturating_mul(row.times);
            let missing_bytes = wanted_bytes.saturating_sub(outstanding.for_node(node));
            (row.times > 0).then_some(ShortNode { node: *node, row, missing_bytes })
        });
        let short = short.collect();
        let requested_bytes = input.host.requested_bytes();
        let watermark_bytes = watch_bytes(&nodes, table, factor, input);
        TableResult { nodes, short, requested_bytes, watermark_bytes }
    }

    /// Grows the guest by the missing memory of `served`. Leaves the size unchanged if the memory
    /// that has been requested is enough for all nodes.
    pub(super) fn grow(
        &self,
        served: Option<&ShortNode<'_>>,
        outstanding: &mut OutstandingMemory,
    ) -> Decision {
        let Some(short) = served else { return self.hold(Reason::InProgress) };
        outstanding.grant(&short.node, short.missing_bytes);
        let want_bytes = self.requested_bytes.saturating_add(short.missing_bytes);
        let grow = Decision::want(want_bytes, short.row.reason).watching_free(self.watermark_bytes);
        Decision { near: Some(short.node.node), pressure: true, ..grow }
    }

    /// Leaves the size unchanged.
    pub(super) fn hold(&self, reason: Reason) -> Decision {
        Decision::hold(reason).watching_free(self.watermark_bytes)
    }

    /// Shrinks the guest to a total of `want_bytes`.
    pub(super) fn shrink(&self, want_bytes: u64, reason: Reason) -> Decision {
        Decision::want(want_bytes, reason).watching_free(self.watermark_bytes)
    }
}

/// Free memory below which a table may soon request more memory. Above it, one report per second is
/// enough. The result is at most a quarter of the guest's memory, because with a large factor it
/// would otherwise be all memory.
fn watch_bytes(nodes: &[NodeView], table: &[Row], factor: Factor, input: Input<'_>) -> u64 {
    let pages = nodes.iter().map(|node| first_border(table, node, factor));
    let bytes = pages.fold(0u64, |sum, pages| sum.saturating_add(pages)).saturating_mul(PAGE_BYTES);
    bytes.min(scale(input.report.memory().total_bytes, 1, 4))
}
