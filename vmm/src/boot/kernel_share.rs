//! Division of boot memory between the guest's kernel and its user programs.

use balloon::proto::{BootMemory, descriptor_bytes};
use foreshore_devices::memory::layout::LOW_RAM_END;
use foreshore_devices::memory::zone::{Growth, Tier, ZoneSpec};
use foreshore_types::size::Size;

const MIB: u64 = 1 << 20;
const _: () = assert!(LOW_RAM_END == balloon::proto::LOW_BOOT_BYTES);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KernelShare(BootMemory);

/// Boot memory has too little room for the page descriptors of all hotpluggable memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} can be added to {} of boot memory; their page descriptors take {} of DRAM, and boot memory has room \
     for those of about {}: when programs fill DRAM, the guest will get no more unless DRAM is added first",
    Size(*hotplug_bytes), Size(*boot_bytes), Size(descriptor_bytes(*hotplug_bytes)), Size(*most_bytes).rounded()
)]
pub(crate) struct RatioTooHigh {
    /// Hotpluggable memory in bytes.
    pub hotplug_bytes: u64,
    pub boot_bytes: u64,
    /// Amount of hotpluggable memory for which boot memory can hold page descriptors.
    pub most_bytes: u64,
}

impl KernelShare {
    /// Divides the boot memory of a VM with these zones. Returns `None` if no memory can be plugged
    /// by virtio-mem.
    pub(crate) fn of(zones: &[ZoneSpec]) -> Option<Self> {
        let memory = boot_memory(zones);
        (memory.hotplug_bytes() > 0).then_some(Self(memory))
    }

    /// Value of `movablecore=`. `None` without PM, because then plugged DRAM is the movable memory
    /// of its node.
    pub(crate) fn movablecore(&self) -> Option<String> {
        let movable_bytes = self.0.movable_bytes();
        (movable_bytes > 0).then(|| format!("{}M", movable_bytes / MIB))
    }

    /// Value of `vm.lowmem_reserve_ratio`.
    pub(crate) fn lowmem_reserve_ratio(&self) -> String {
        self.0.reserve_ratios().map(|ratio| ratio.to_string()).join(" ")
    }
}

/// Checks that boot memory has room for the page descriptors of all hotpluggable memory.
pub(crate) fn check_ratio(zones: &[ZoneSpec]) -> Result<(), RatioTooHigh> {
    let memory = boot_memory(zones);
    let dimms = zones.iter().filter(|zone| zone.growth == Growth::Dimms);
    let hotplug_bytes =
        dimms.fold(memory.hotplug_bytes(), |sum, zone| sum.saturating_add(zone.hotplug_bytes));
    let most_bytes = memory.most_hotplug_bytes();
    match hotplug_bytes > most_bytes {
        true => Err(RatioTooHigh { hotplug_bytes, boot_bytes: memory.boot_bytes, most_bytes }),
        false => Ok(()),
    }
}

fn boot_memory(zones: &[ZoneSpec]) -> BootMemory {
    let plugged_bytes = |tier: Tier| {
        let zones =
            zones.iter().filter(|zone| zone.growth == Growth::VirtioMem && zone.tier == tier);
        zones.fold(0u64, |sum, zone| sum.saturating_add(zone.hotplug_bytes))
    };
    let dram = zones.iter().filter(|zone| zone.tier == Tier::Dram);
    BootMemory {
        boot_bytes: dram.fold(0, |sum, zone| sum.saturating_add(zone.boot_bytes)),
        dram_bytes: plugged_bytes(Tier::Dram),
        pm_bytes: plugged_bytes(Tier::Pm),
    }
}

#[cfg(test)]
pub(super) mod tests {

    use super::*;

    pub(crate) fn zone(tier: Tier, boot_mib: u64, hotplug_mib: u64) -> ZoneSpec {
        ZoneSpec {
            id: String::new(),
            tier,
            boot_bytes: boot_mib * MIB,
            hotplug_bytes: hotplug_mib * MIB,
            ..ZoneSpec::default()
        }
    }

    /// Values of `movablecore` and of the ratios for these sizes of boot memory, pluggable DRAM and
    /// PM, in MiB.
    fn share(boot_mib: u64, dram_mib: u64, pm_mib: u64) -> (String, String) {
        let zones = [zone(Tier::Dram, boot_mib, dram_mib), zone(Tier::Pm, 0, pm_mib)];
        let share = KernelShare::of(&zones).expect("the VM has PM");
        (share.movablecore().expect("the VM has PM"), share.lowmem_reserve_ratio())
    }

    #[test]
    fn division_counts_the_memory_that_each_zone_can_add() {
        assert_eq!(share(512, 0, 1536), ("64M".to_owned(), "256 1 32 0 0".to_owned()));
        assert_eq!(share(384, 256, 512), ("44M".to_owned(), "256 8 32 0 0".to_owned()));
        // docs/reference/policies.md quotes the shares of the first and the last size.
        let movable = [1024, 3584, 7168].map(|pm_mib| share(512, 0, pm_mib).0);
        assert_eq!(movable, ["56M", "96M", "152M"]);
    }

    #[test]
    fn boot_memory_without_pm_is_not_divided() {
        let share =
            KernelShare::of(&[zone(Tier::Dram, 512, 1024)]).expect("DRAM is plugged movable");
        assert_eq!(share.movablecore(), None);
        // The reserve consists of 32 MiB (a sixteenth) and the page descriptors of 1 GiB. 1 GiB of
        // movable memory divided by the reserve is 21.
        assert_eq!(share.lowmem_reserve_ratio(), "256 21 32 0 0");
        let dimms = ZoneSpec { growth: Growth::Dimms, ..zone(Tier::Dram, 512, 1024) };
        assert_eq!(KernelShare::of(&[dimms]), None, "it comes online for the kernel as well");
        assert_eq!(KernelShare::of(&[zone(Tier::Dram, 512, 0), zone(Tier::Pm, 0, 0)]), None);
    }

    #[test]
    fn too_little_boot_memory_for_descriptors_is_reported() {
        let check = |boot_mib, pm_mib| {
            check_ratio(&[zone(Tier::Dram, boot_mib, 0), zone(Tier::Pm, 0, pm_mib)])
        };
        check(512, 7168).expect("14:1");
        check(256, 3584).expect("14:1");
        let error = check(512, 32_768).expect_err("64:1");
        assert_eq!(error.most_bytes / MIB, ((512 - 64 - 16) / 2 - 32) * 64);
        assert!(error.to_string().contains("take 512 MiB"), "{error}");
        // With 4 GiB of boot memory, 1 GiB is above the device hole.
        check(4096, 45_056).expect("11:1");
        let error = check(4096, 65_536).expect_err("16:1");
        assert_eq!(error.most_bytes / MIB, (1024 - 64 - 256) * 64);
        let error = check(8192, 147_456).expect_err("18:1");
        assert_eq!(error.most_bytes / MIB, ((3072 + 2496) / 2 - 512) * 64);
        check(64, 1024).expect_err("the kernel alone fills it");
        let dimms =
            |mib| check_ratio(&[ZoneSpec { growth: Growth::Dimms, ..zone(Tier::Dram, 384, mib) }]);
        dimms(1024).expect("3:1");
        assert_eq!(dimms(24_576).expect_err("64:1").hotplug_bytes, 24_576 * MIB);
    }
}
