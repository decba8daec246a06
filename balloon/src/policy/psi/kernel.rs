//! Rule 13: memory of the kernel.
//!
//! MemAvailable includes slabs that cannot be reclaimed (the inodes of a tmpfs) and free PM, which the kernel cannot
//! use. So only the free pages of the kernel's own zones show how much memory the kernel has left. The agent turns
//! blocks of plugged DRAM into kernel memory. For that it needs movable memory with room for the pages of a block.

use foreshore_proto::{KernelGrowth, KernelMemory, Report, kernel_reserve_bytes};

use crate::HostView;
use crate::units::scale;

/// Part of the usual reserve below which the kernel is short, in thousandths. The agent acts at a half.
const SHORT_PERMILLE: u64 = 750;
/// Free movable memory that a block needs, in thousandths of its size: watermarks take some of it.
const ROOM_PERMILLE: u64 = 1250;

/// Time from a report until the kernel has another block: the agent's report, plugging, and the move of its pages.
const LEAD_MS: u64 = 1_000;
/// Upper limit of the growth in that time, as a part of DRAM.
const MAX_GROWTH_PART: u64 = 4;

/// Memory to add for the kernel. `None` if the kernel has enough, or if the report has no memory blocks.
pub(super) fn missing_bytes(report: &Report, host: &HostView, growth: &KernelGrowth) -> Option<u64> {
    let block_bytes = report.blocks().block_bytes;
    let kernel = KernelMemory::of(report.zones().iter());
    let least_bytes = scale(kernel_reserve_bytes(kernel.dram_bytes, 0), SHORT_PERMILLE, 1000);
    let growth_bytes = growth.bytes_within(LEAD_MS).min(kernel.dram_bytes / MAX_GROWTH_PART);
    let short_bytes = least_bytes.saturating_add(growth_bytes);
    if block_bytes == 0 || kernel.room_bytes >= short_bytes {
        return None;
    }
    let coming_bytes = kernel.movable_free_bytes.saturating_add(host.outstanding_grow_bytes());
    let blocks = (short_bytes - kernel.room_bytes).div_ceil(block_bytes);
    Some(scale(block_bytes.saturating_mul(blocks), ROOM_PERMILLE, 1000).saturating_sub(coming_bytes))
}

#[cfg(test)]
mod tests {
    use foreshore_proto::{Blocks, KernelUse, Memory, PROTOCOL_VERSION, RawReport, Zone, ZoneKind};

    use super::*;
    use crate::units::PAGE_BYTES;
    use crate::{MIB, Tier, ZoneSizes};

    /// Report of a guest with 400 MiB of DRAM, all of it for the kernel, and 512 MiB of PM.
    fn report(kernel_free_mib: u64, pm_free_mib: u64, block_mib: u64) -> Report {
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
            blocks: Blocks { block_bytes: block_mib * MIB, ..Blocks::default() },
            ..RawReport::default()
        };
        Report::try_from(raw).expect("sound")
    }

    #[test]
    fn a_short_kernel_gets_movable_memory_for_a_block() {
        let host = HostView::default();
        let missing_mib = |kernel_free, pm_free, block| {
            let report = report(kernel_free, pm_free, block);
            missing_bytes(&report, &host, &KernelGrowth::default()).map(|bytes| bytes / MIB)
        };
        // Three quarters of a sixteenth of 400 MiB are 18.75 MiB.
        assert_eq!(missing_mib(19, 0, 128), None);
        assert_eq!(missing_mib(18, 0, 128), Some(160));
        assert_eq!(missing_mib(18, 100, 128), Some(60));
        assert_eq!(missing_mib(0, 500, 128), Some(0), "the agent has all that it needs");
        assert_eq!(missing_mib(0, 0, 0), None, "balloon statistics");
    }

    #[test]
    fn memory_on_its_way_counts() {
        let mut host =
            HostView { zones: vec![ZoneSizes::empty(0, Tier::Dram, 256 * MIB)], ..HostView::default() };
        host.zones[0].requested_bytes = 128 * MIB;
        let missing = missing_bytes(&report(0, 0, 128), &host, &KernelGrowth::default());
        assert_eq!(missing, Some(32 * MIB));
    }

    #[test]
    fn a_kernel_that_grows_fast_gets_memory_sooner_and_more() {
        let mut growth = KernelGrowth::default();
        let holds = |mib: u64| KernelUse { slab_reclaimable_bytes: mib * MIB, ..KernelUse::default() };
        let missing_mib = |growth: &KernelGrowth, kernel_free| {
            let report = report(kernel_free, 0, 16);
            missing_bytes(&report, &HostView::default(), growth).map(|bytes| bytes / MIB)
        };
        growth.update(Some(&holds(0)), 0);
        growth.update(Some(&holds(50)), 1_000);
        // 18.75 MiB and the growth of a second: two blocks of 16 MiB, and a quarter.
        assert_eq!(missing_mib(&growth, 69), None);
        assert_eq!(missing_mib(&growth, 68), Some(20));
        assert_eq!(missing_mib(&growth, 48), Some(40));
        growth.update(Some(&holds(10_000)), 2_000);
        assert_eq!(missing_mib(&growth, 119), None, "a quarter of DRAM at most");
    }
}
