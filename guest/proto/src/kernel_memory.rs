//! Memory that the guest's kernel can use for itself.
//!
//! Slabs, page tables, stacks, sockets and page descriptors come from zones that are not movable (mm/page_alloc.c,
//! gfp_zone). The agent, the governor and its policies all ask what is left of these, so the sums stand here once.

use crate::{KernelUse, Zone, ZoneKind};

/// Zones count pages of this size: all guests are x86-64.
const PAGE_BYTES: u64 = 4096;

/// A rate of growth is forgotten in this time, unless it goes on.
const FORGOTTEN_MS: u64 = 1_000;

/// Sums over a guest's zones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelMemory {
    /// Memory that the kernel can use for itself. ZONE_DMA does not count, because drivers alone ask for it.
    pub managed_bytes: u64,
    /// What is free of it above the high watermark.
    pub room_bytes: u64,
    /// Memory of the nodes that have such zones, movable zones included.
    pub dram_bytes: u64,
    /// Memory in movable zones.
    pub movable_bytes: u64,
    /// What is free of it.
    pub movable_free_bytes: u64,
}

impl KernelMemory {
    /// Takes the sums. Values of a guest do not overflow them.
    pub fn of<'a>(zones: impl Iterator<Item = &'a Zone> + Clone) -> Self {
        let kernel = || zones.clone().filter(|zone| zone.serves_kernel());
        let in_dram = |zone: &&Zone| kernel().any(|kernel| kernel.node == zone.node);
        let movable = || zones.clone().filter(|zone| zone.kind == ZoneKind::Movable);
        KernelMemory {
            managed_bytes: bytes(kernel(), |zone| zone.managed_pages),
            room_bytes: bytes(kernel(), |zone| zone.free_pages.saturating_sub(zone.high_pages)),
            dram_bytes: bytes(zones.clone().filter(in_dram), |zone| zone.managed_pages),
            movable_bytes: bytes(movable(), |zone| zone.managed_pages),
            movable_free_bytes: bytes(movable(), |zone| zone.free_pages),
        }
    }
}

/// How fast the memory grows that the kernel holds for itself.
///
/// Files that are created by thousands take kernel memory at hundreds of MiB in a second. A threshold of what is left
/// comes too late for these, so both the governor and the agent add what will be gone until there is more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelGrowth {
    seen: Option<(u64, u64)>,
    bytes_per_s: u64,
}

impl KernelGrowth {
    /// Takes in what the kernel holds at `now_ms`. `None` (not known) is no growth.
    pub fn saw(&mut self, kernel: Option<&KernelUse>, now_ms: u64) {
        let Some(kernel) = kernel else {
            *self = KernelGrowth::default();
            return;
        };
        let bytes = kernel.total_bytes();
        let (before_ms, before_bytes) = self.seen.replace((now_ms, bytes)).unwrap_or((now_ms, bytes));
        let elapsed_ms = now_ms.saturating_sub(before_ms);
        if elapsed_ms == 0 {
            return;
        }
        let rate = part(bytes.saturating_sub(before_bytes), 1_000, elapsed_ms);
        let remembered = part(self.bytes_per_s, FORGOTTEN_MS.saturating_sub(elapsed_ms), FORGOTTEN_MS);
        self.bytes_per_s = rate.max(remembered);
    }

    /// What it takes in so long, if it goes on.
    pub fn bytes_within(&self, ms: u64) -> u64 {
        part(self.bytes_per_s, ms, 1_000)
    }
}

fn part(of: u64, numerator: u64, denominator: u64) -> u64 {
    let scaled = u128::from(of) * u128::from(numerator) / u128::from(denominator);
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

impl Zone {
    /// Whether the kernel can use pages of this zone for itself.
    pub fn serves_kernel(&self) -> bool {
        matches!(self.kind, ZoneKind::Dma32 | ZoneKind::Normal)
    }
}

fn bytes<'a>(zones: impl Iterator<Item = &'a Zone>, pages: impl Fn(&Zone) -> u64) -> u64 {
    zones.fold(0u64, |sum, zone| sum.saturating_add(pages(zone))).saturating_mul(PAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_memory_is_what_is_not_movable() {
        let zone = |node, kind, managed_pages, free_pages| Zone {
            node,
            kind,
            managed_pages,
            free_pages,
            high_pages: 10,
            ..Zone::default()
        };
        let zones = [
            zone(0, ZoneKind::Dma, 1, 1),
            zone(0, ZoneKind::Dma32, 100, 40),
            zone(0, ZoneKind::Normal, 200, 5),
            zone(0, ZoneKind::Movable, 300, 20),
            zone(1, ZoneKind::Movable, 1000, 700),
        ];
        let memory = KernelMemory::of(zones.iter());
        let expected = KernelMemory {
            managed_bytes: 300 * PAGE_BYTES,
            room_bytes: 30 * PAGE_BYTES,
            dram_bytes: 601 * PAGE_BYTES,
            movable_bytes: 1300 * PAGE_BYTES,
            movable_free_bytes: 720 * PAGE_BYTES,
        };
        assert_eq!(memory, expected);
        let huge = [zone(0, ZoneKind::Normal, u64::MAX, u64::MAX), zone(0, ZoneKind::Normal, u64::MAX, 0)];
        assert_eq!(KernelMemory::of(huge.iter()).managed_bytes, u64::MAX);
        assert_eq!(KernelMemory::of([].iter()), KernelMemory::default());
    }

    #[test]
    fn growth_is_seen_and_forgotten() {
        let holds = |bytes| KernelUse { slab_reclaimable_bytes: bytes, ..KernelUse::default() };
        let mut growth = KernelGrowth::default();
        growth.saw(Some(&holds(500)), 1_000);
        assert_eq!(growth.bytes_within(1_000), 0, "what was there before is no growth");
        growth.saw(Some(&holds(600)), 1_100);
        assert_eq!((growth.bytes_within(1_000), growth.bytes_within(500)), (1_000, 500));
        growth.saw(Some(&holds(600)), 1_350);
        assert_eq!(growth.bytes_within(1_000), 750);
        growth.saw(Some(&holds(400)), 2_350);
        assert_eq!(growth.bytes_within(1_000), 0);
        growth.saw(Some(&holds(u64::MAX)), 2_350);
        assert_eq!(growth.bytes_within(1_000), 0, "no time has passed");
        growth.saw(Some(&holds(0)), 2_360);
        growth.saw(Some(&holds(u64::MAX)), 2_361);
        assert_eq!(growth.bytes_within(u64::MAX), u64::MAX);
        growth.saw(None, 2_400);
        assert_eq!(growth, KernelGrowth::default());
    }
}
