//! Decides whether a block of plugged DRAM should be converted to kernel memory.
//!
//! The agent carries out the conversion (docs/reference/agent.md, "Memory for the kernel"), and the
//! simulator models it.

use crate::{
    Blocks, KernelGrowth, KernelMemory, RawReport, Zone, ZoneGrowth, kernel_reserve_bytes,
};

/// The kernel is short of memory if less than the usual reserve divided by this number is free. The
/// whole reserve would be too high a threshold, because programs that fill DRAM before any memory
/// is plugged leave the kernel about that much.
const SHORT_PART: u64 = 2;
/// Duration of a conversion. The threshold includes the expected growth of kernel memory in this
/// time.
pub const CONVERSION_MS: u64 = 500;
/// Time limit for migrating a block's pages. Linux itself would retry forever.
pub const OFFLINE_LIMIT_MS: u64 = 10_000;
/// The threshold includes the expected growth, up to the size of DRAM divided by this number.
const MAX_GROWTH_PART: u64 = 8;
/// Pause after a successful conversion, so that reports can show its effect.
const PAUSE_MS: u64 = 500;
/// Pause after the first failure. Each further failure doubles it, up to [`MAX_BACK_OFF_MS`].
const FIRST_BACK_OFF_MS: u64 = 5_000;
const MAX_BACK_OFF_MS: u64 = 300_000;

/// Growth of kernel memory, measured in two ways: by Linux' counters and by the pages in kernel
/// zones.
#[derive(Clone, Debug, Default)]
pub struct KernelBlockGrowth {
    counted: KernelGrowth,
    of_zones: ZoneGrowth,
}

impl KernelBlockGrowth {
    /// Updates the rates from a report. `other_user_pages` is the number of locked and compressed
    /// pages in kernel zones, as in [`ZoneGrowth::update`].
    pub fn update(&mut self, report: &RawReport, other_user_pages: u64, now_ms: u64) {
        let kernel = report.kernel.as_ref();
        self.counted.update(kernel, report.counters.allocstall_kernel, now_ms);
        self.of_zones.update(&report.zones, other_user_pages, kernel, now_ms);
    }

    /// Expected growth within `ms` at the higher of the two current rates.
    pub fn bytes_within(&self, ms: u64) -> u64 {
        self.counted.bytes_within(ms).max(self.of_zones.bytes_within(ms))
    }
}

/// Returns the node from which a block should be converted. Returns `None` if the kernel has enough
/// free or reclaimable memory, or if no node has a suitable block.
///
/// The block's pages must fit into other movable memory. The node must also retain movable memory
/// of at least half the reserve, because `vm.lowmem_reserve_ratio` reserves nothing in a node
/// without movable memory. Programs would then fill the kernel's new memory.
///
/// `excluded_node` is a node without convertible blocks.
pub fn short_node(
    zones: &[Zone],
    blocks: &Blocks,
    growth: &KernelBlockGrowth,
    excluded_node: Option<u32>,
) -> Option<u32> {
    let kernel = KernelMemory::of(zones.iter());
    let least_bytes = kernel_reserve_bytes(kernel.dram_bytes, 0) / SHORT_PART;
    let growth_bytes = growth.bytes_within(CONVERSION_MS).min(kernel.dram_bytes / MAX_GROWTH_PART);
    let short_bytes = least_bytes.saturating_add(growth_bytes);
    // Caches count as free, because Linux drops them when it needs the memory. A converted block
    // would be lost to programs permanently.
    let room_bytes = kernel.room_bytes.saturating_add(growth.counted.caches_bytes());
    if blocks.block_bytes == 0
        || room_bytes >= short_bytes
        || kernel.movable_free_bytes < blocks.block_bytes
    {
        return None;
    }
    let of_node = |node: u32| KernelMemory::of(zones.iter().filter(move |zone| zone.node == node));
    let has_enough_left = |node: u32| {
        let memory = of_node(node);
        memory.managed_bytes > 0
            && memory.movable_bytes >= blocks.block_bytes.saturating_add(least_bytes)
    };
    let nodes = blocks.nodes.iter().filter(|node| node.movable_online_bytes >= blocks.block_bytes);
    nodes
        .map(|node| node.node)
        .filter(|node| Some(*node) != excluded_node && has_enough_left(*node))
        .min_by_key(|node| of_node(*node).room_bytes)
}

/// Earliest time of the next conversion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelBlockPace {
    not_before_ms: u64,
    back_off_ms: u64,
}

impl KernelBlockPace {
    /// Returns true if the next conversion may start.
    pub fn is_due(&self, now_ms: u64) -> bool {
        now_ms >= self.not_before_ms
    }

    /// Records a successful conversion.
    pub fn succeeded(&mut self, now_ms: u64) {
        *self = KernelBlockPace { not_before_ms: now_ms.saturating_add(PAUSE_MS), back_off_ms: 0 };
    }

    /// Records a failed conversion. Each further failure doubles the pause.
    pub fn failed(&mut self, now_ms: u64) {
        self.back_off_ms = (self.back_off_ms * 2).clamp(FIRST_BACK_OFF_MS, MAX_BACK_OFF_MS);
        self.not_before_ms = now_ms.saturating_add(self.back_off_ms);
    }
}

#[cfg(test)]
mod tests {
    use crate::{KernelUse, NodeBlocks, PAGE_BYTES, ZoneKind};

    use super::*;

    const MIB: u64 = 1 << 20;
    const BLOCK: u64 = 128 * MIB;

    fn zone(node: u32, kind: ZoneKind, managed_mib: u64, free_mib: u64) -> Zone {
        let pages = |mib: u64| mib * MIB / PAGE_BYTES;
        Zone {
            node,
            kind,
            managed_pages: pages(managed_mib),
            free_pages: pages(free_mib),
            ..Zone::default()
        }
    }

    /// Zones of a guest with 384 MiB of boot memory (36 MiB of it movable), two plugged blocks of
    /// DRAM, and 512 MiB of PM.
    fn zones(kernel_free_mib: u64, pm_free_mib: u64) -> [Zone; 3] {
        [
            zone(0, ZoneKind::Dma32, 300, kernel_free_mib),
            zone(0, ZoneKind::Movable, 36 + 256, 0),
            zone(1, ZoneKind::Movable, 512, pm_free_mib),
        ]
    }

    fn blocks(movable_dram_blocks: u64) -> Blocks {
        let node = |node, online, movable| NodeBlocks {
            node,
            online_bytes: online * BLOCK,
            offline_bytes: 0,
            movable_online_bytes: movable * BLOCK,
        };
        let nodes = vec![node(0, 5, movable_dram_blocks), node(1, 4, 4)];
        Blocks { block_bytes: BLOCK, nodes, ..Blocks::default() }
    }

    /// Returns the node to convert a block from, for a kernel whose memory does not grow.
    fn short(zones: &[Zone], blocks: &Blocks) -> Option<u32> {
        short_node(zones, blocks, &KernelBlockGrowth::default(), None)
    }

    #[test]
    fn fast_growth_makes_the_kernel_short_sooner() {
        let mut growth = KernelBlockGrowth::default();
        let holds = |mib: u64| KernelUse { page_table_bytes: mib * MIB, ..KernelUse::default() };
        growth.counted.update(Some(&holds(0)), 0, 0);
        growth.counted.update(Some(&holds(100)), 0, 1_000);
        // Threshold: half of the usual reserve (a sixteenth of 592 MiB), plus expected growth of 50
        // MiB.
        assert_eq!(short_node(&zones(68, 300), &blocks(2), &growth, None), Some(0));
        assert_eq!(short_node(&zones(69, 300), &blocks(2), &growth, None), None);
        growth.counted.update(Some(&holds(10_000)), 0, 2_000);
        assert_eq!(
            short_node(&zones(93, 300), &blocks(2), &growth, None),
            None,
            "an eighth of DRAM at most"
        );
    }

    /// Sockets grow by 60 MiB/s. No kernel counter includes their data.
    #[test]
    fn uncounted_kernel_memory_makes_the_kernel_short_sooner() {
        let mut growth = KernelBlockGrowth::default();
        for tenth in 0..=20 {
            let mut zones = zones(200 - 6 * tenth, 300);
            zones.iter_mut().for_each(|zone| zone.user_pages = Some(0));
            growth.of_zones.update(&zones, 0, Some(&KernelUse::default()), tenth * 100);
        }
        // Threshold: half of the usual reserve, plus expected growth of 30 MiB.
        assert_eq!(short_node(&zones(48, 300), &blocks(2), &growth, None), Some(0));
        assert_eq!(short_node(&zones(49, 300), &blocks(2), &growth, None), None);
        assert_eq!(
            short_node(&zones(48, 300), &blocks(2), &KernelBlockGrowth::default(), None),
            None
        );
    }

    /// Load that fills the kernel's zones with slabs.
    #[derive(Clone, Copy, Default)]
    struct Slabs {
        reclaimable_mib: u64,
        unreclaimable_mib: u64,
        unused_dentries: u64,
        allocstalls: u64,
    }

    /// Simulates one report per second while a load grows to `end`. Returns the node to convert a
    /// block from.
    fn node_after_load(end: Slabs) -> Option<u32> {
        const SECONDS: u64 = 20;
        let mut growth = KernelBlockGrowth::default();
        let mut given = None;
        for second in 0..=SECONDS {
            let so_far = |all: u64| all * second / SECONDS;
            let kernel = KernelUse {
                slab_reclaimable_bytes: so_far(end.reclaimable_mib * MIB),
                slab_unreclaimable_bytes: 20 * MIB + so_far(end.unreclaimable_mib * MIB),
                unused_dentries: Some(so_far(end.unused_dentries)),
                unused_inodes: Some(0),
                ..KernelUse::default()
            };
            growth.counted.update(Some(&kernel), so_far(end.allocstalls), second * 1_000);
            // kswapd keeps the high watermark free.
            let free_mib =
                280u64.saturating_sub(so_far(end.reclaimable_mib + end.unreclaimable_mib));
            let mut zones = zones(free_mib, 300);
            zones.iter_mut().for_each(|zone| zone.user_pages = Some(0));
            growth.of_zones.update(&zones, 0, Some(&kernel), second * 1_000);
            given = given.or(short_node(&zones, &blocks(2), &growth, None));
        }
        given
    }

    /// A walk through all files caches 2 million dentries. Linux drops those that do not fit.
    #[test]
    fn caches_of_a_walk_through_all_files_get_no_block() {
        const DENTRIES: u64 = 2_000_000;
        let walk = Slabs {
            reclaimable_mib: DENTRIES * 192 / MIB,
            unused_dentries: DENTRIES,
            ..Slabs::default()
        };
        assert_eq!(node_after_load(walk), None);
        let kept = Slabs { reclaimable_mib: 280, unused_dentries: 280 * MIB / 192, ..walk };
        assert_eq!(node_after_load(kept), None);
        let stalled = Slabs { allocstalls: 20, ..walk };
        assert_eq!(node_after_load(stalled), Some(0), "reclaim does not keep up");
    }

    /// Inodes and dentries of 400,000 files on a tmpfs cannot be reclaimed. In addition, page cache
    /// pins the inodes of 200,000 files on an ext4.
    #[test]
    fn slabs_that_cannot_be_reclaimed_get_a_block() {
        let [reclaimable_mib, unreclaimable_mib] = [192, 720].map(|bytes| 400_000 * bytes / MIB);
        let tmpfs = Slabs { reclaimable_mib, unreclaimable_mib, ..Slabs::default() };
        assert_eq!(node_after_load(tmpfs), Some(0));
        assert_eq!(node_after_load(Slabs { unreclaimable_mib: 270, ..Slabs::default() }), Some(0));
        let ext4 = Slabs { reclaimable_mib: 330, unreclaimable_mib: 30, ..Slabs::default() };
        assert_eq!(node_after_load(ext4), Some(0));
    }

    #[test]
    fn a_kernel_that_is_short_gets_a_block_of_its_node() {
        // Threshold: half of the usual reserve (a sixteenth of 592 MiB).
        assert_eq!(short(&zones(18, 300), &blocks(2)), Some(0));
        assert_eq!(short(&zones(19, 300), &blocks(2)), None);
        assert_eq!(short(&zones(0, 127), &blocks(2)), None, "no room for the pages of the block");
        assert_eq!(short(&zones(0, 300), &blocks(0)), None, "PM stays movable");
        assert_eq!(short(&zones(0, 300), &Blocks::default()), None, "a kernel without hotplug");
        assert_eq!(short(&[], &blocks(2)), None);
    }

    #[test]
    fn node_keeps_movable_memory_of_at_least_half_the_reserve() {
        let mut zones = zones(0, 300);
        zones[1].managed_pages = (128 + 18) * MIB / PAGE_BYTES;
        assert_eq!(short(&zones, &blocks(1)), Some(0));
        zones[1].managed_pages = 128 * MIB / PAGE_BYTES;
        assert_eq!(short(&zones, &blocks(1)), None);
    }

    #[test]
    fn the_node_with_the_least_kernel_memory_gives_the_block() {
        let zones = [
            zone(0, ZoneKind::Dma32, 1000, 20),
            zone(0, ZoneKind::Movable, 1000, 500),
            zone(1, ZoneKind::Normal, 1000, 5),
            zone(1, ZoneKind::Movable, 1000, 500),
        ];
        let mut blocks = blocks(4);
        assert_eq!(short(&zones, &blocks), Some(1));
        blocks.nodes[1].movable_online_bytes = 0;
        assert_eq!(short(&zones, &blocks), Some(0));
    }

    #[test]
    fn pause_doubles_with_each_failure() {
        let mut pace = KernelBlockPace::default();
        let mut pauses = Vec::new();
        for _ in 0..9 {
            pace.failed(0);
            pauses.push(pace.not_before_ms / 1000);
        }
        assert_eq!(pauses, [5, 10, 20, 40, 80, 160, 300, 300, 300]);
        pace.succeeded(1_000);
        assert_eq!(pace.not_before_ms, 1_500);
        pace.failed(0);
        assert_eq!(pace.not_before_ms, 5_000);
    }
}
