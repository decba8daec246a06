//! Tables that say how much to integrate at which number of free pages, as AMF and Dapper have them.

use super::view::NodeView;
use crate::plan::Reason;

/// One of the node's watermarks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    Min,
    Low,
    High,
}

/// A border between rows: a watermark, times `watermark-scale` so many times; 0 leaves it as the kernel has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Border {
    pub mark: Mark,
    pub scales: u64,
}

impl Border {
    pub fn pages(self, node: &NodeView, scale: u64) -> u64 {
        let pages = match self.mark {
            Mark::Min => node.min_pages,
            Mark::Low => node.low_pages,
            Mark::High => node.high_pages,
        };
        if self.scales == 0 { pages } else { pages.saturating_mul(self.scales).saturating_mul(scale) }
    }
}

/// A row: it is for numbers of free pages above its border, up to the border of the row before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Row {
    /// `None`: all that is left.
    pub above: Option<Border>,
    /// The border itself belongs to the row.
    pub at: bool,
    /// So many times the node's DRAM are integrated.
    pub times: u64,
    pub reason: Reason,
}

/// Short for a row of a table.
pub(super) const fn above(mark: Mark, scales: u64, times: u64, reason: Reason) -> Row {
    Row { above: Some(Border { mark, scales }), at: false, times, reason }
}

/// A row with its border.
pub(super) const fn from(mark: Mark, scales: u64, times: u64, reason: Reason) -> Row {
    Row { at: true, ..above(mark, scales, times, reason) }
}

/// The row for everything that the rows before it have left.
pub(super) const fn rest(times: u64, reason: Reason) -> Row {
    Row { above: None, at: false, times, reason }
}

/// The row that a node is in. With a small scale rows overlap, because min x scale lies below high: of those that a
/// node is in, the one that integrates most counts.
pub(super) fn row<'a>(table: &'a [Row], node: &NodeView, scale: u64) -> &'a Row {
    let is_above = |row: &Row| match row.above.map(|border| border.pages(node, scale)) {
        None => true,
        Some(border) => node.free_pages > border || (row.at && node.free_pages == border),
    };
    let is_up_to = |index: usize| index.checked_sub(1).is_none_or(|before| !is_above(&table[before]));
    let rows = table.iter().enumerate().filter(|(index, row)| is_above(row) && is_up_to(*index));
    // The last row has no border of its own, so there is always one.
    rows.map(|(_, row)| row).max_by_key(|row| row.times).unwrap_or(&table[table.len() - 1])
}

/// Whether a node is content only because there is free PM of others: then none of it can go.
pub(super) fn leans_on_others(table: &[Row], node: &NodeView, scale: u64) -> bool {
    let alone = NodeView { free_pages: node.own_free_pages, ..*node };
    row(table, &alone, scale).times > 0
}

/// The border above which a table integrates nothing, in pages.
pub(super) fn first_border(table: &[Row], node: &NodeView, scale: u64) -> u64 {
    table[0].above.map_or(0, |border| border.pages(node, scale))
}
