//! Rule 13: memory for the guest's kernel.
//!
//! MemAvailable includes memory that the kernel cannot use: free PM, and slabs that cannot be
//! reclaimed (the dentries of a tmpfs, inodes with page cache). The kernel's remaining memory is
//! therefore computed from the free pages in the kernel's own zones, and from the dentries and
//! inodes on LRU lists. The agent can convert blocks of plugged DRAM to kernel memory, which needs
//! free movable memory for the pages of each block.

use foreshore_proto::{
    Blocks, KernelGrowth, KernelMemory, NodeBlocks, Report, kernel_reserve_bytes,
};

use crate::units::scale;
use crate::{HostView, Tier};

/// Part of the usual reserve below which the kernel is short of memory, in thousandths. The agent
/// converts a block to kernel memory below one half.
const SHORT_PERMILLE: u64 = 750;
/// Free movable memory that a block needs, in thousandths of the block's size. The part above 1000
/// is for watermarks.
const ROOM_PERMILLE: u64 = 1250;

/// Time from a report until the kernel has another block. The time includes the agent's report,
/// plugging, and moving the block's pages.
const LEAD_MS: u64 = 1_000;
/// Upper limit of the kernel's growth in that time, as a fraction of DRAM: a quarter.
const MAX_GROWTH_PART: u64 = 4;

/// Movable memory that the agent needs before it can convert blocks to kernel memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Need {
    /// Free movable memory that the agent needs in total.
    pub need_bytes: u64,
    /// Part of `need_bytes` that is neither free nor requested yet.
    pub missing_bytes: u64,
}

/// Returns the memory that is needed for the kernel. Returns `None` if the kernel has enough
/// memory, if no block of DRAM can be converted, or if the report does not separate zones.
pub(super) fn need(report: &Report, host: &HostView, growth: &KernelGrowth) -> Option<Need> {
    let block_bytes = report.blocks().block_bytes;
    let kernel = KernelMemory::of(report.zones().iter());
    let least_bytes = scale(kernel_reserve_bytes(kernel.dram_bytes, 0), SHORT_PERMILLE, 1000);
    let growth_bytes = growth.bytes_within(LEAD_MS).min(kernel.dram_bytes / MAX_GROWTH_PART);
    let short_bytes = least_bytes.saturating_add(growth_bytes);
    let room_bytes = kernel.room_bytes.saturating_add(growth.caches_bytes());
    if block_bytes == 0 || room_bytes >= short_bytes || !has_block(report, host) {
        return None;
    }
    let expected_free_bytes =
        kernel.movable_free_bytes.saturating_add(host.outstanding_grow_bytes());
    let blocks = (short_bytes - room_bytes).div_ceil(block_bytes);
    let need_bytes = scale(block_bytes.saturating_mul(blocks), ROOM_PERMILLE, 1000);
    Some(Need { need_bytes, missing_bytes: need_bytes.saturating_sub(expected_free_bytes) })
}

/// Returns true if DRAM that can be converted to kernel memory is plugged or can be plugged. Boot
/// memory and PM cannot be converted.
///
/// On the same node, reports do not separate movable blocks of boot memory from plugged blocks. For
/// a node with both, the result may be true although the kernel already has all plugged blocks.
fn has_block(report: &Report, host: &HostView) -> bool {
    let Blocks { block_bytes, nodes, .. } = report.blocks();
    let mut dram =
        host.zones.iter().filter(|zone| zone.tier == Tier::Dram && host.balloon != Some(zone.id));
    dram.any(|zone| {
        let room_bytes = zone.requestable_bytes().saturating_sub(zone.plugged_bytes);
        let is_movable = |node: &NodeBlocks| {
            node.node == zone.guest_numa_node && node.movable_online_bytes >= *block_bytes
        };
        room_bytes >= *block_bytes
            || (zone.plugged_bytes >= *block_bytes && nodes.iter().any(is_movable))
    })
}

#[cfg(test)]
mod tests {
    use foreshore_proto::{Blocks, KernelUse, Memory, PROTOCOL_VERSION, RawReport, Zone, ZoneKind};

    use super::*;
    use crate::units::PAGE_BYTES;
    use crate::{MIB, Tier, ZoneSizes};

    /// Report of a guest that has 400 MiB of DRAM, all of it for the kernel, and 512 MiB of PM.
    fn report(kernel_free_mib: u64, pm_free_mib: u64, block_mib: u64) -> Report {
        report_with(kernel_free_mib, pm_free_mib, block_mib, 1)
    }

    fn report_with(
        kernel_free_mib: u64,
        pm_free_mib: u64,
        block_mib: u64,
        movable_blocks: u64,
    ) -> Report {
        let pages = |mib: u64| mib * MIB / PAGE_BYTES;
        let zone = |node, kind, managed_mib, free_mib| Zone {
            node,
            kind,
            managed_pages: pages(managed_mib),
            free_pages: pages(free_mib),
            ..Zone::default()
        };
        let raw = RawReport {
            version: PROTOCOL_VERSION,
            seq: 1,
            memory: Memory { total_bytes: 912 * MIB, ..Memory::default() },
            zones: vec![
                zone(0, ZoneKind::Dma32, 400, kernel_free_mib),
                zone(1, ZoneKind::Movable, 512, pm_free_mib),
            ],
            blocks: Blocks {
                block_bytes: block_mib * MIB,
                nodes: vec![dram_blocks(movable_blocks, block_mib)],
                ..Blocks::default()
            },
            ..RawReport::default()
        };
        Report::try_from(raw).expect("sound")
    }

    /// Node 0 with this number of movable blocks.
    fn dram_blocks(blocks: u64, block_mib: u64) -> NodeBlocks {
        let movable_online_bytes = blocks * block_mib * MIB;
        NodeBlocks { node: 0, online_bytes: 512 * MIB, offline_bytes: 0, movable_online_bytes }
    }

    /// VM in which this part of 256 MiB of DRAM is plugged.
    fn host(plugged_mib: u64) -> HostView {
        let dram = ZoneSizes {
            requested_bytes: plugged_mib * MIB,
            plugged_bytes: plugged_mib * MIB,
            ..ZoneSizes::empty(0, Tier::Dram, 256 * MIB)
        };
        HostView { zones: vec![dram], ..HostView::default() }
    }

    #[test]
    fn kernel_needs_nothing_if_no_block_can_become_kernel_memory() {
        let need = |report: &Report, host: &HostView| {
            need(report, host, &KernelGrowth::default()).is_some()
        };
        let (movable, none) = (report_with(0, 500, 128, 1), report_with(0, 500, 128, 0));
        assert!(need(&movable, &host(256)), "a block is plugged and movable");
        assert!(need(&none, &host(128)), "another block can be plugged");
        assert!(!need(&none, &host(256)), "the kernel has all blocks");
        assert!(!need(&movable, &HostView::default()), "movable boot memory stays as it is");
        let pm = HostView {
            zones: vec![ZoneSizes::empty(0, Tier::Pm, 512 * MIB)],
            ..HostView::default()
        };
        assert!(!need(&movable, &pm), "PM stays movable");
    }

    #[test]
    fn short_kernel_gets_movable_memory_for_a_block() {
        let missing_mib = |kernel_free, pm_free, block| {
            let report = report(kernel_free, pm_free, block);
            need(&report, &host(256), &KernelGrowth::default()).map(|need| need.missing_bytes / MIB)
        };
        // Three quarters of a sixteenth of 400 MiB are 18.75 MiB.
        assert_eq!(missing_mib(19, 0, 128), None);
        assert_eq!(missing_mib(18, 0, 128), Some(160));
        assert_eq!(missing_mib(18, 100, 128), Some(60));
        assert_eq!(missing_mib(0, 500, 128), Some(0), "the agent has enough memory");
        assert_eq!(missing_mib(0, 0, 0), None, "balloon statistics");
    }

    #[test]
    fn memory_on_its_way_counts() {
        let mut host = host(0);
        host.zones[0].requested_bytes = 128 * MIB;
        let need = need(&report(0, 0, 128), &host, &KernelGrowth::default());
        assert_eq!(need, Some(Need { need_bytes: 160 * MIB, missing_bytes: 32 * MIB }));
    }

    #[test]
    fn fast_growing_kernel_gets_memory_sooner_and_more() {
        let mut growth = KernelGrowth::default();
        let holds =
            |mib: u64| KernelUse { slab_unreclaimable_bytes: mib * MIB, ..KernelUse::default() };
        let missing_mib = |growth: &KernelGrowth, kernel_free| {
            let report = report(kernel_free, 0, 16);
            need(&report, &host(256), growth).map(|need| need.missing_bytes / MIB)
        };
        growth.update(Some(&holds(0)), 0, 0);
        growth.update(Some(&holds(50)), 0, 1_000);
        // 18.75 MiB and one second of growth take two blocks of 16 MiB. The agent needs their size
        // and a quarter more.
        assert_eq!(missing_mib(&growth, 69), None);
        assert_eq!(missing_mib(&growth, 68), Some(20));
        assert_eq!(missing_mib(&growth, 48), Some(40));
        growth.update(Some(&holds(10_000)), 0, 2_000);
        assert_eq!(missing_mib(&growth, 119), None, "a quarter of DRAM at most");
    }

    #[test]
    fn reclaimable_caches_are_no_need() {
        let need = |unused_dentries, allocstalls| {
            let kernel = KernelUse {
                slab_reclaimable_bytes: 330 * MIB,
                slab_unreclaimable_bytes: 30 * MIB,
                unused_dentries,
                ..KernelUse::default()
            };
            let mut growth = KernelGrowth::default();
            growth.update(Some(&kernel), 0, 0);
            growth.update(Some(&kernel), allocstalls, 1_000);
            need(&report(1, 0, 128), &host(256), &growth)
        };
        assert_eq!(need(Some(1_000_000), 0), None);
        assert!(need(Some(1_000_000), 1).is_some(), "a kernel allocation had to wait");
        assert!(need(Some(0), 0).is_some(), "page cache pins the inodes");
        assert!(need(None, 0).is_some(), "not reported");
    }
}
