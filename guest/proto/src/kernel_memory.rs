//! Memory that the guest's kernel can use for itself.
//!
//! Slabs, page tables, stacks, sockets and page descriptors come from zones that are not movable (mm/page_alloc.c,
//! gfp_zone). The agent, the governor and its policies all ask what is left of these, so the sums stand here once.

use crate::{Zone, ZoneKind};

/// Zones count pages of this size: all guests are x86-64.
const PAGE_BYTES: u64 = 4096;

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
}
