//! Division of the boot memory of a guest with PM between its kernel and its programs.
//!
//! PM is online movable and serves programs only. Programs fill DRAM first, so without a bound they leave the kernel no
//! DRAM for page tables, slabs and the page descriptors of PM. Linux can keep a reserve free in a zone from allocations
//! that a higher zone of the same node could serve (mm/page_alloc.c, setup_per_zone_lowmem_reserve). So boot memory
//! gets a ZONE_MOVABLE as large as the reserve (docs/decisions/0022).

use balloon::proto::{LINUX_RESERVE_RATIOS, descriptor_bytes, kernel_reserve_bytes, lower_reserve_ratios};

use crate::memory::layout::LOW_RAM_END;
use crate::memory::zone::{Growth, Tier, ZoneSpec};

const MIB: u64 = 1 << 20;
/// Linux rounds ZONE_MOVABLE to blocks of the page allocator (mm/mm_init.c, find_zone_movable_pfns_for_nodes).
const MOVABLE_UNIT_BYTES: u64 = 4 * MIB;
/// Text, data and boot allocations of the kernel: a fixed part, and a part of boot memory.
const KERNEL_BYTES: u64 = 64 * MIB;
const KERNEL_PART: u64 = 32;
/// Smallest part of boot memory that is worth a ZONE_MOVABLE.
const LEAST_MOVABLE_PART: u64 = 16;

/// Division of boot memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelShare {
    boot_bytes: u64,
    /// DRAM that virtio-mem can add.
    dram_bytes: u64,
    reserve_bytes: u64,
    movable_bytes: u64,
}

/// More memory can be added than boot memory has room to describe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} MiB can be added to {} MiB of boot memory; their page descriptors take {} MiB of DRAM, and boot memory has room \
     for those of about {} MiB: the guest will get no more unless DRAM is added first",
    .hotplug_bytes / MIB, .boot_bytes / MIB, descriptor_bytes(*.hotplug_bytes) / MIB, .most_bytes / MIB
)]
pub struct RatioTooHigh {
    /// Memory that can be added.
    pub hotplug_bytes: u64,
    /// Boot memory.
    pub boot_bytes: u64,
    /// Memory that boot memory has room to describe.
    pub most_bytes: u64,
}

impl KernelShare {
    /// Division of the boot memory of a VM with these zones. `None` if it has no PM to plug.
    pub fn of(zones: &[ZoneSpec]) -> Option<Self> {
        let sum = |is_counted: &dyn Fn(&ZoneSpec) -> bool, bytes: fn(&ZoneSpec) -> u64| {
            zones
                .iter()
                .filter(|zone| is_counted(zone))
                .fold(0u64, |sum, zone| sum.saturating_add(bytes(zone)))
        };
        let is_plugged = |zone: &ZoneSpec| zone.growth == Growth::VirtioMem;
        let pm_bytes = sum(&|zone| is_plugged(zone) && zone.tier == Tier::Pm, |zone| zone.hotplug_bytes);
        if pm_bytes == 0 {
            return None;
        }
        let dram_bytes = sum(&|zone| is_plugged(zone) && zone.tier == Tier::Dram, |zone| zone.hotplug_bytes);
        let boot_bytes = sum(&|zone| zone.tier == Tier::Dram, |zone| zone.boot_bytes);
        let reserve_bytes = kernel_reserve_bytes(boot_bytes, pm_bytes.saturating_add(dram_bytes));
        // The memory that the kernel has left in its zones after boot must hold the reserve.
        let room_bytes = boot_bytes.saturating_sub(kernel_bytes(boot_bytes).saturating_add(reserve_bytes));
        let movable_bytes = reserve_bytes.min(room_bytes).max(boot_bytes / LEAST_MOVABLE_PART);
        // ZONE_MOVABLE is a part of the highest zone of boot memory, and that has to keep the reserve. At boot, Linux takes the page
        // descriptors of boot memory from the top of ZONE_MOVABLE (mm/memblock.c searches from the top).
        let movable_bytes = match normal_bytes(boot_bytes) {
            0 => movable_bytes,
            normal_bytes => {
                let descriptor_bytes = descriptor_bytes(boot_bytes);
                (movable_bytes + descriptor_bytes).min((normal_bytes + descriptor_bytes) / 2)
            }
        };
        let movable_bytes = movable_bytes.next_multiple_of(MOVABLE_UNIT_BYTES);
        Some(Self { boot_bytes, dram_bytes, reserve_bytes, movable_bytes })
    }

    /// Value of `movablecore=`.
    pub fn movablecore(&self) -> String {
        format!("{}M", self.movable_bytes / MIB)
    }

    /// Value of `vm.lowmem_reserve_ratio`. It stays in force in a guest without an agent; an agent adapts it. The ratio counts
    /// DRAM that can be added, because that is movable as well and comes before PM.
    pub fn lowmem_reserve_ratio(&self) -> String {
        let normal_bytes = normal_bytes(self.boot_bytes);
        let dma32_bytes = self.boot_bytes - normal_bytes;
        let zones_bytes = match normal_bytes {
            0 => [0, dma32_bytes.saturating_sub(self.movable_bytes), 0],
            normal_bytes => [0, dma32_bytes, normal_bytes.saturating_sub(self.movable_bytes)],
        };
        let mut ratios = LINUX_RESERVE_RATIOS;
        let movable_bytes = self.movable_bytes.saturating_add(self.dram_bytes);
        let movable_bytes = match normal_bytes {
            0 => movable_bytes,
            _ => movable_bytes.saturating_sub(descriptor_bytes(self.boot_bytes)),
        };
        lower_reserve_ratios(&mut ratios, &zones_bytes, movable_bytes, self.reserve_bytes);
        ratios.map(|ratio| ratio.to_string()).join(" ")
    }
}

/// Checks that boot memory has room for the page descriptors of all memory that can be added. In a guest with an agent,
/// added DRAM brings its own room, because the agent gives blocks of it to the kernel.
pub fn check_ratio(zones: &[ZoneSpec]) -> Result<(), RatioTooHigh> {
    let boot_bytes = zones.iter().fold(0u64, |sum, zone| sum.saturating_add(zone.boot_bytes));
    let virtio_mem = zones.iter().filter(|zone| zone.growth == Growth::VirtioMem);
    let hotplug_bytes = virtio_mem.fold(0u64, |sum, zone| sum.saturating_add(zone.hotplug_bytes));
    let room_bytes = boot_bytes.saturating_sub(kernel_bytes(boot_bytes) + boot_bytes / LEAST_MOVABLE_PART);
    let room_bytes = match normal_bytes(boot_bytes) {
        0 => room_bytes,
        normal_bytes => {
            // Half of the memory above the hole is movable, so that the kernel's zones keep as much each, and no zone more than it has.
            let half_bytes = normal_bytes.saturating_sub(descriptor_bytes(boot_bytes)) / 2;
            let kept_bytes = half_bytes + half_bytes / (2 * half_bytes).div_ceil(LOW_RAM_END).max(1);
            // The agent keeps no more than half of the kernel's zones.
            room_bytes.min(kept_bytes).min((LOW_RAM_END + half_bytes) / 2)
        }
    };
    let base_bytes = kernel_reserve_bytes(boot_bytes, 0);
    let most_bytes = room_bytes.saturating_sub(base_bytes).saturating_mul(64);
    match hotplug_bytes > most_bytes {
        true => Err(RatioTooHigh { hotplug_bytes, boot_bytes, most_bytes }),
        false => Ok(()),
    }
}

/// Boot memory in ZONE_NORMAL and its part that becomes ZONE_MOVABLE. Boot memory below the hole is ZONE_DMA32.
fn normal_bytes(boot_bytes: u64) -> u64 {
    boot_bytes.saturating_sub(LOW_RAM_END)
}

fn kernel_bytes(boot_bytes: u64) -> u64 {
    KERNEL_BYTES + boot_bytes / KERNEL_PART
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::memory::zone::HostMemory;

    pub fn zone(tier: Tier, boot_mib: u64, hotplug_mib: u64) -> ZoneSpec {
        ZoneSpec {
            id: String::new(),
            tier,
            guest_node: 0,
            host: HostMemory::default(),
            growth: Growth::VirtioMem,
            host_node: None,
            boot_bytes: boot_mib * MIB,
            hotplug_bytes: hotplug_mib * MIB,
            hotplugged_bytes: 0,
            plug_bytes_per_s: None,
        }
    }

    /// Boot memory, DRAM and PM to come, in MiB; `movablecore` and the ratios.
    fn share(boot_mib: u64, dram_mib: u64, pm_mib: u64) -> (String, String) {
        let zones = [zone(Tier::Dram, boot_mib, dram_mib), zone(Tier::Pm, 0, pm_mib)];
        let share = KernelShare::of(&zones).expect("there is PM");
        (share.movablecore(), share.lowmem_reserve_ratio())
    }

    #[test]
    fn the_kernel_keeps_dram_for_the_descriptors_of_all_pm() {
        let expect = |movable: &str, ratios: &str| (movable.to_owned(), ratios.to_owned());
        // A sixteenth of 512 MiB, and 16 MiB for each GiB.
        assert_eq!(share(512, 0, 1536), expect("56M", "256 1 32 0 0"));
        assert_eq!(share(512, 0, 7168), expect("144M", "256 1 32 0 0"));
        assert_eq!(share(256, 0, 3584), expect("72M", "256 1 32 0 0"));
        // Added DRAM is movable: with 256 MiB of it a seventh is as large as the reserve.
        assert_eq!(share(384, 256, 512), expect("36M", "256 8 32 0 0"));
        // ZONE_NORMAL is the highest zone of the kernel.
        assert_eq!(share(8192, 0, 65_536), expect("1664M", "256 256 1 0 0"));
        // If ZONE_NORMAL is small, ZONE_DMA32 keeps the rest of the reserve: 480, 768, 1280 (of which 960 can be kept) and 1920 MiB.
        assert_eq!(share(3584, 0, 16_384), expect("284M", "256 1 1 0 0"));
        assert_eq!(share(4096, 0, 32_768), expect("544M", "256 1 1 0 0"));
        assert_eq!(share(4096, 0, 65_536), expect("544M", "256 1 1 0 0"));
        assert_eq!(share(6144, 0, 98_304), expect("1584M", "256 3 1 0 0"));
        // The kernel itself has to fit.
        assert_eq!(share(512, 0, 16_384), expect("144M", "256 1 32 0 0"));
    }

    #[test]
    fn a_vm_without_pm_keeps_its_boot_memory_whole() {
        assert_eq!(KernelShare::of(&[zone(Tier::Dram, 512, 1024)]), None);
        assert_eq!(KernelShare::of(&[zone(Tier::Dram, 512, 0), zone(Tier::Pm, 0, 0)]), None);
    }

    #[test]
    fn a_ratio_that_boot_memory_cannot_describe_is_named() {
        let check =
            |boot_mib, pm_mib| check_ratio(&[zone(Tier::Dram, boot_mib, 0), zone(Tier::Pm, 0, pm_mib)]);
        check(512, 7168).expect("14:1");
        check(256, 3584).expect("14:1");
        let error = check(512, 32_768).expect_err("64:1");
        assert_eq!(error.most_bytes / MIB, (512 - 64 - 16 - 32 - 32) * 64);
        assert!(error.to_string().contains("take 512 MiB"), "{error}");
        // Boot memory of 4 GiB has 1 GiB above the hole.
        check(4096, 45_056).expect("11:1");
        let error = check(4096, 65_536).expect_err("16:1");
        assert_eq!(error.most_bytes / MIB, (1024 - 64 - 256) * 64);
        let error = check(8192, 147_456).expect_err("18:1");
        assert_eq!(error.most_bytes / MIB, ((3072 + 2496) / 2 - 512) * 64);
        check(64, 1024).expect_err("the kernel alone fills it");
    }
}
