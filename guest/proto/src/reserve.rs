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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserve_grows_with_the_memory_that_can_be_added() {
        assert_eq!(kernel_reserve_bytes(512 * MIB, 0), 32 * MIB);
        assert_eq!(kernel_reserve_bytes(512 * MIB, 7168 * MIB), 144 * MIB);
        assert_eq!(kernel_reserve_bytes(64 * MIB, 0), 8 * MIB);
        assert_eq!(kernel_reserve_bytes(1 << 40, 64 << 30), 1536 * MIB);
        assert_eq!(kernel_reserve_bytes(u64::MAX, u64::MAX), 512 * MIB + u64::MAX / 64);
    }
}
