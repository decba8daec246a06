//! Divides the boot memory of a guest with PM between its kernel and its programs.
//!
//! PM is online movable and serves only programs. Programs fill DRAM first. Without a limit, they
//! would leave the kernel no DRAM for page tables, slabs and the page descriptors of PM. Linux can
//! keep a reserve in a zone free from allocations that a higher zone of the same node could serve
//! (mm/page_alloc.c, setup_per_zone_lowmem_reserve). Therefore, the division gives boot memory a
//! ZONE_MOVABLE of the reserve's size (docs/design/decisions/0022).
//!
//! The VMM passes the division on the kernel's command line, and the simulator models it.

use crate::reserve::NodeMemory;
use crate::{LINUX_RESERVE_RATIOS, descriptor_bytes, kernel_reserve_bytes};

const MIB: u64 = 1 << 20;
/// Boot memory below the hole for devices. Its part that serves the kernel is ZONE_DMA32.
pub const LOW_BOOT_BYTES: u64 = 3 << 30;
/// Linux rounds ZONE_MOVABLE to blocks of the page allocator (mm/mm_init.c,
/// find_zone_movable_pfns_for_nodes).
const MOVABLE_UNIT_BYTES: u64 = 4 * MIB;
/// Estimate of the kernel's text, data and boot allocations: a fixed part, and a share of boot
/// memory.
const KERNEL_BYTES: u64 = 64 * MIB;
const KERNEL_PART: u64 = 32;
/// Boot memory divided by this number is the smallest ZONE_MOVABLE that is worthwhile.
const LEAST_MOVABLE_PART: u64 = 16;

/// Boot memory of a guest, and the memory that virtio-mem can add to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BootMemory {
    /// Boot memory.
    pub boot_bytes: u64,
    /// DRAM that can be added.
    pub dram_bytes: u64,
    /// PM that can be added.
    pub pm_bytes: u64,
}

impl BootMemory {
    /// Memory that can be added.
    pub fn hotplug_bytes(&self) -> u64 {
        self.pm_bytes.saturating_add(self.dram_bytes)
    }

    /// Size of the boot memory that becomes ZONE_MOVABLE, or 0 if no PM can be added.
    ///
    /// ZONE_MOVABLE is a part of the highest zone of boot memory, and the rest of that zone must
    /// hold the reserve. At boot, Linux allocates the page descriptors of boot memory from the top
    /// of ZONE_MOVABLE (mm/memblock.c searches from the top), so their size is added.
    pub fn movable_bytes(&self) -> u64 {
        if self.pm_bytes == 0 {
            return 0;
        }
        let boot_bytes = self.boot_bytes;
        let reserve_bytes = kernel_reserve_bytes(boot_bytes, self.hotplug_bytes());
        let movable_bytes =
            reserve_bytes.min(most_reserve_bytes(boot_bytes)).max(boot_bytes / LEAST_MOVABLE_PART);
        let descriptor_bytes = descriptor_bytes(boot_bytes);
        let movable_bytes = movable_bytes + descriptor_bytes;
        let movable_bytes = match self.normal_bytes() {
            0 => movable_bytes,
            normal_bytes => movable_bytes.min((normal_bytes + descriptor_bytes) / 2),
        };
        movable_bytes.next_multiple_of(MOVABLE_UNIT_BYTES)
    }

    /// Size of the part of ZONE_MOVABLE that remains after boot.
    pub fn managed_movable_bytes(&self) -> u64 {
        self.movable_bytes().saturating_sub(descriptor_bytes(self.boot_bytes))
    }

    /// Ratios for `vm.lowmem_reserve_ratio`. Without an agent, they stay in effect. An agent adapts
    /// them. They take into account DRAM that can be added, because it is also movable and is
    /// filled before PM.
    pub fn reserve_ratios(&self) -> [u64; 5] {
        let mut ratios = LINUX_RESERVE_RATIOS;
        self.node().lower_ratios(&mut ratios, self.boot_bytes, self.hotplug_bytes());
        ratios
    }

    /// Largest amount of hotpluggable memory whose page descriptors fit into boot memory. In a
    /// guest with an agent, added DRAM holds its own descriptors, because the agent converts blocks
    /// of it to kernel memory.
    pub fn most_hotplug_bytes(&self) -> u64 {
        let boot_bytes = self.boot_bytes;
        let room_bytes = most_reserve_bytes(boot_bytes);
        let room_bytes = match self.normal_bytes() {
            0 => room_bytes,
            normal_bytes => {
                // At most half of the memory above the hole is movable. Each kernel zone then keeps
                // up to that amount free from user pages.
                let descriptor_bytes = descriptor_bytes(boot_bytes);
                let half_bytes = normal_bytes.saturating_sub(descriptor_bytes) / 2;
                let ratio = (2 * half_bytes).div_ceil(LOW_BOOT_BYTES).max(1);
                // The agent's reserve is at most half of the kernel zones. A ratio of 1 always
                // keeps as much memory as is movable.
                let bound_bytes = half_bytes.max((LOW_BOOT_BYTES + half_bytes) / 2);
                room_bytes.min(half_bytes + half_bytes / ratio).min(bound_bytes)
            }
        };
        room_bytes.saturating_sub(kernel_reserve_bytes(boot_bytes, 0)).saturating_mul(64)
    }

    /// Zones after boot, including the DRAM that can be added.
    pub fn node(&self) -> NodeMemory {
        let (movable_bytes, normal_bytes) = (self.movable_bytes(), self.normal_bytes());
        let low_bytes = self.boot_bytes - normal_bytes;
        let zones_bytes = match normal_bytes {
            0 => [0, low_bytes.saturating_sub(movable_bytes), 0],
            normal_bytes => [0, low_bytes, normal_bytes.saturating_sub(movable_bytes)],
        };
        NodeMemory {
            zones_bytes,
            movable_bytes: self.managed_movable_bytes().saturating_add(self.dram_bytes),
        }
    }

    /// Boot memory in ZONE_NORMAL, including the part that becomes ZONE_MOVABLE.
    fn normal_bytes(&self) -> u64 {
        self.boot_bytes.saturating_sub(LOW_BOOT_BYTES)
    }
}

/// Largest reserve for `boot_bytes`: half of the memory that the kernel does not use at boot. The
/// other half must be movable, because Linux keeps no more of the highest kernel zone than there is
/// movable memory.
fn most_reserve_bytes(boot_bytes: u64) -> u64 {
    boot_bytes.saturating_sub(KERNEL_BYTES + boot_bytes / KERNEL_PART) / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(boot_mib: u64, dram_mib: u64, pm_mib: u64) -> BootMemory {
        BootMemory {
            boot_bytes: boot_mib * MIB,
            dram_bytes: dram_mib * MIB,
            pm_bytes: pm_mib * MIB,
        }
    }

    /// Returns `movablecore` in MiB, and the ratios of ZONE_DMA32 and ZONE_NORMAL.
    fn division(boot_mib: u64, dram_mib: u64, pm_mib: u64) -> (u64, [u64; 2]) {
        let memory = memory(boot_mib, dram_mib, pm_mib);
        let [_, dma32, normal, ..] = memory.reserve_ratios();
        (memory.movable_bytes() / MIB, [dma32, normal])
    }

    #[test]
    fn kernel_keeps_dram_for_the_descriptors_of_all_pm() {
        // A sixteenth of 512 MiB, descriptors of 16 MiB per GiB of PM, and 8 MiB of descriptors for
        // boot memory.
        assert_eq!(division(512, 0, 1536), (64, [1, 32]));
        assert_eq!(division(512, 0, 7168), (152, [1, 32]));
        assert_eq!(division(256, 0, 3584), (76, [1, 32]));
        // Added DRAM is movable. With 256 MiB of it, a seventh of the movable memory is as large as
        // the reserve.
        assert_eq!(division(384, 256, 512), (44, [8, 32]));
        // ZONE_NORMAL is the highest kernel zone.
        assert_eq!(division(8192, 0, 65_536), (1664, [256, 1]));
        // If ZONE_NORMAL is small, ZONE_DMA32 keeps the rest of the reserve. The reserves are 480,
        // 768, 1280 and 1920 MiB. Only 960 MiB of the third reserve can be kept.
        assert_eq!(division(3584, 0, 16_384), (284, [1, 1]));
        assert_eq!(division(4096, 0, 32_768), (544, [1, 1]));
        assert_eq!(division(4096, 0, 65_536), (544, [1, 1]));
        assert_eq!(division(6144, 0, 98_304), (1584, [3, 1]));
        // A reserve of 288 MiB does not fit. Half of the memory that the kernel leaves is movable.
        assert_eq!(division(512, 0, 16_384), (224, [1, 32]));
        assert_eq!(division(512, 0, 0), (0, LINUX_RESERVE_RATIOS[1..3].try_into().expect("two")));
    }

    #[test]
    fn reserve_describes_the_largest_memory_that_can_be_added() {
        // Part of the reserve that remains for the kernel's allocations, and the whole reserve.
        let kept = |boot_mib: u64, pm_bytes: u64| {
            let memory = BootMemory { boot_bytes: boot_mib * MIB, dram_bytes: 0, pm_bytes };
            let (node, ratios) = (memory.node(), memory.reserve_ratios());
            (node.kernel_share_bytes(&ratios), kernel_reserve_bytes(memory.boot_bytes, pm_bytes))
        };
        for boot_mib in [192, 256, 512, 1024, 3072, 3584, 4096, 8192, 12_288, 16_384, 65_536] {
            let memory = memory(boot_mib, 0, 1);
            let (reserved_bytes, reserve_bytes) = kept(boot_mib, memory.most_hotplug_bytes());
            assert!(
                reserved_bytes >= reserve_bytes,
                "{boot_mib}: {reserved_bytes} of {reserve_bytes}"
            );
            let (reserved_bytes, reserve_bytes) =
                kept(boot_mib, memory.most_hotplug_bytes() * 17 / 16);
            assert!(
                reserved_bytes < reserve_bytes,
                "{boot_mib}: {reserved_bytes} of {reserve_bytes}"
            );
        }
    }

    /// The descriptors of boot memory are in ZONE_MOVABLE. If their size were not added, the kernel
    /// zones would keep less, by a 64th of boot memory.
    #[test]
    fn boot_memory_below_the_hole_keeps_the_whole_reserve() {
        for (boot_mib, pm_mib) in
            [(192, 384), (192, 2688), (512, 7168), (1024, 8192), (2048, 28_672)]
        {
            let memory = memory(boot_mib, 0, pm_mib);
            let reserved_bytes: u64 =
                memory.node().reserved_bytes(&memory.reserve_ratios()).iter().sum();
            let reserve_bytes = kernel_reserve_bytes(memory.boot_bytes, memory.hotplug_bytes());
            let range = reserve_bytes..reserve_bytes + MOVABLE_UNIT_BYTES;
            assert!(
                range.contains(&reserved_bytes),
                "{boot_mib}: {reserved_bytes} of {reserve_bytes}"
            );
        }
    }
}
