//! Values of individual nodes in a report.

use std::collections::BTreeMap;

use foreshore_proto::{Report, ZoneKind};

use crate::units::PAGE_BYTES;

/// A node is short if every other node has more free memory than this multiple of the node's free
/// memory.
const SHORT_FACTOR: u64 = 2;

/// Returns the DRAM node with the least free memory above kswapd's watermarks, if every other DRAM
/// node has more than twice as much. Nodes that have only movable memory are PM. They are ignored,
/// because Linux fills PM last and PM has no CPUs.
pub(super) fn shortest(report: &Report) -> Option<u32> {
    let mut free: BTreeMap<u32, (bool, u64)> = BTreeMap::new();
    for zone in report.zones().iter().filter(|zone| zone.managed_pages > 0) {
        let (is_dram, pages) = free.entry(zone.node).or_default();
        *is_dram |= matches!(zone.kind, ZoneKind::Dma | ZoneKind::Dma32 | ZoneKind::Normal);
        *pages = pages.saturating_add(zone.free_pages.saturating_sub(zone.high_pages));
    }
    let mut dram: Vec<(u64, u32)> = free
        .into_iter()
        .filter(|(_, (is_dram, _))| *is_dram)
        .map(|(node, (_, pages))| (pages, node))
        .collect();
    dram.sort_unstable();
    match dram[..] {
        [(least, node), (next, _), ..] if least.saturating_mul(SHORT_FACTOR) < next => Some(node),
        _ => None,
    }
}

/// Returns the memory that was idle for `span_ms`. Returns `None` if any node does not report it.
pub(super) fn idle_bytes(report: &Report, span_ms: u64) -> Option<u64> {
    let mut nodes: Vec<u32> =
        report.zones().iter().filter(|zone| zone.managed_pages > 0).map(|zone| zone.node).collect();
    nodes.sort_unstable();
    nodes.dedup();
    nodes.into_iter().try_fold(0u64, |sum, node| {
        let idle =
            report.idle().iter().find(|idle| idle.node == node && idle.span_ms >= span_ms)?;
        Some(sum.saturating_add(idle.idle_bytes))
    })
}

/// Sum of kswapd's high watermarks over all zones.
pub(super) fn kswapd_bytes(report: &Report) -> u64 {
    report
        .zones()
        .iter()
        .filter(|zone| zone.managed_pages > 0)
        .fold(0u64, |sum, zone| sum.saturating_add(zone.high_pages.saturating_mul(PAGE_BYTES)))
}
