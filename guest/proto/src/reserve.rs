//! DRAM that is kept for the guest's kernel.
//!
//! The VMM writes this size to the command line, the agent writes it to a sysctl, and the simulator models it. All
//! three compute it here.

const MIB: u64 = 1 << 20;

/// Part of DRAM that is kept for page tables, stacks, slabs and sockets.
const BASE_PART: u64 = 16;
/// Bounds of that part.
const MIN_BASE_BYTES: u64 = 8 * MIB;
const MAX_BASE_BYTES: u64 = 512 * MIB;

/// Memory that one byte of page descriptors describes: a descriptor of 64 bytes for each page of 4 KiB
/// (include/linux/mm_types.h).
const DESCRIBED_PER_BYTE: u64 = 64;

/// Size of the page descriptors of `memory_bytes`.
pub fn descriptor_bytes(memory_bytes: u64) -> u64 {
    memory_bytes / DESCRIBED_PER_BYTE
}

/// DRAM that user pages leave free in a guest with `dram_bytes` of DRAM, to which `hotplug_bytes` can be added.
///
/// The page descriptors of all that can be added have to fit, because the kernel cannot reclaim user pages for them as fast
/// as memory is plugged.
pub fn kernel_reserve_bytes(dram_bytes: u64, hotplug_bytes: u64) -> u64 {
    (dram_bytes / BASE_PART).clamp(MIN_BASE_BYTES, MAX_BASE_BYTES) + descriptor_bytes(hotplug_bytes)
}

/// Linux' ratios of `vm.lowmem_reserve_ratio`, in the order of its zones: ZONE_DMA, ZONE_DMA32, ZONE_NORMAL, ZONE_MOVABLE and
/// ZONE_DEVICE (mm/page_alloc.c, sysctl_lowmem_reserve_ratio).
pub const LINUX_RESERVE_RATIOS: [u64; 5] = [256, 256, 32, 0, 0];

/// Lowers ratios so that the kernel's zones of a node reserve up to `reserve_bytes` for the kernel.
///
/// The reserve of a zone is the memory of all higher zones, divided by its ratio (mm/page_alloc.c,
/// setup_per_zone_lowmem_reserve). The reserve of a lower zone also excludes the kernel's allocations for a higher zone, so the
/// highest zone is used first, and only movable memory counts. `zones_bytes` has the sizes in the order of `ratios`. Zones of
/// size 0 are skipped.
pub fn lower_reserve_ratios(ratios: &mut [u64], zones_bytes: &[u64], movable_bytes: u64, reserve_bytes: u64) {
    let (mut missing_bytes, mut above_bytes) = (reserve_bytes, 0u64);
    let count = ratios.len().min(zones_bytes.len());
    for (ratio, &zone_bytes) in ratios[..count].iter_mut().zip(&zones_bytes[..count]).rev() {
        // A zone below would keep far more from the kernel than for it.
        if missing_bytes == 0 || movable_bytes < above_bytes / 2 {
            break;
        }
        if zone_bytes == 0 {
            continue;
        }
        // A zone keeps no more than it has.
        let least = above_bytes.saturating_add(movable_bytes).div_ceil(zone_bytes).max(1);
        *ratio = (*ratio).min((movable_bytes / missing_bytes.min(zone_bytes)).max(least));
        missing_bytes = missing_bytes.saturating_sub(movable_bytes.checked_div(*ratio).unwrap_or(0));
        above_bytes = above_bytes.saturating_add(zone_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserve_is_kept_in_the_highest_zone_and_the_rest_below() {
        let ratios = |dma32_mib: u64, normal_mib: u64, movable_mib: u64, reserve_mib: u64| {
            let mut ratios = LINUX_RESERVE_RATIOS;
            let zones = [0, dma32_mib * MIB, normal_mib * MIB];
            lower_reserve_ratios(&mut ratios, &zones, movable_mib * MIB, reserve_mib * MIB);
            ratios
        };
        assert_eq!(ratios(400, 0, 112, 50), [256, 2, 32, 0, 0]);
        assert_eq!(ratios(3072, 1024, 1024, 512), [256, 256, 2, 0, 0]);
        assert_eq!(ratios(3072, 512, 512, 768), [256, 2, 1, 0, 0]);
        assert_eq!(ratios(3072, 32, 480, 480), [256, 1, 15, 0, 0]);
        // A zone of 3 GiB keeps no more than that.
        assert_eq!(ratios(3072, 2496, 2496, 4992), [256, 2, 1, 0, 0]);
        // ZONE_DMA32 would keep 256 MiB of ZONE_NORMAL from the kernel.
        assert_eq!(ratios(300, 256, 36, 40), [256, 256, 1, 0, 0]);
        // No ratio is raised, and too little movable memory keeps what it can.
        assert_eq!(ratios(3072, 8192, 8192, 64), LINUX_RESERVE_RATIOS);
        assert_eq!(ratios(400, 0, 10, 50), [256, 1, 32, 0, 0]);
        assert_eq!(ratios(400, 0, 0, 0), LINUX_RESERVE_RATIOS);
        assert_eq!(ratios(0, 0, 500, 500), LINUX_RESERVE_RATIOS);
        lower_reserve_ratios(&mut [], &[0, 1], 1, 1);
    }

    #[test]
    fn reserve_grows_with_the_memory_that_can_be_added() {
        assert_eq!(kernel_reserve_bytes(512 * MIB, 0), 32 * MIB);
        assert_eq!(kernel_reserve_bytes(512 * MIB, 7168 * MIB), 144 * MIB);
        assert_eq!(kernel_reserve_bytes(64 * MIB, 0), 8 * MIB);
        assert_eq!(kernel_reserve_bytes(1 << 40, 64 << 30), 1536 * MIB);
        assert_eq!(kernel_reserve_bytes(u64::MAX, u64::MAX), 512 * MIB + u64::MAX / 64);
    }
}
