//! Which zones a configuration asks for, and how the firmware tables name them: pure.

use crate::acpi::{NodeMemory, NumaNode, Performance};
use crate::config::VmConfig;
use crate::memory::layout::{GuestRange, MemoryMap};
use crate::memory::zone::{Tier, ZoneSpec};

/// The zone of DRAM.
pub const DRAM_ZONE: &str = "dram";
/// The zone of PM.
pub const PM_ZONE: &str = "pm";
/// The node of DRAM and of all vCPUs.
const DRAM_NODE: u32 = 0;

/// What the tables say of each tier, so that Linux puts PM into a lower memory tier than DRAM. The order is what
/// matters; the figures of PM are those of one Optane DIMM (Yang et al., "An Empirical Guide to the Behavior and Use of
/// Scalable Persistent Memory", FAST 2020), those of DRAM what is usual beside it.
const DRAM_PERFORMANCE: Performance = Performance { read_latency_ns: 90, bandwidth_mb_per_s: 40_000 };
const PM_PERFORMANCE: Performance = Performance { read_latency_ns: 305, bandwidth_mb_per_s: 6_600 };

/// The zones of a VM: DRAM, then PM.
pub fn specs(config: &VmConfig) -> Vec<ZoneSpec> {
    let mut zones = vec![ZoneSpec {
        id: DRAM_ZONE.to_owned(),
        tier: Tier::Dram,
        guest_node: DRAM_NODE,
        boot_bytes: config.memory.size,
        hotplug_bytes: config.memory.hotplug_size.unwrap_or(0),
    }];
    zones.extend(config.pm_memory.as_ref().map(|pm| ZoneSpec {
        id: PM_ZONE.to_owned(),
        tier: Tier::Pm,
        guest_node: pm.guest_numa_node,
        boot_bytes: 0,
        hotplug_bytes: pm.size,
    }));
    zones
}

/// The node in which volumes lie: that of the `pm` zone, or of DRAM where there is none.
pub fn volume_node(config: &VmConfig) -> u32 {
    config.pm_memory.as_ref().map_or(DRAM_NODE, |pm| pm.guest_numa_node)
}

/// The NUMA nodes of `zones`, one each. Hotplug parts are named from the start: Linux makes no node later.
pub fn numa_nodes(zones: &[ZoneSpec], map: &MemoryMap, max_vcpus: u8) -> Vec<NumaNode> {
    let memory =
        |range: &GuestRange, hotpluggable| NodeMemory { start: range.start, len: range.len, hotpluggable };
    zones
        .iter()
        .zip(map.zones())
        .map(|(zone, placement)| {
            let boot = placement.boot.iter().map(|range| memory(range, false));
            let hotplug = placement.hotplug.iter().map(|range| memory(range, true));
            NumaNode {
                id: zone.guest_node,
                vcpus: if zone.guest_node == DRAM_NODE { (0..max_vcpus).collect() } else { Vec::new() },
                memory: boot.chain(hotplug).collect(),
                performance: Some(match zone.tier {
                    Tier::Dram => DRAM_PERFORMANCE,
                    Tier::Pm => PM_PERFORMANCE,
                }),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{PmMemoryConfig, test_config};
    use crate::memory::layout::GIB;

    fn hybrid() -> VmConfig {
        let mut config = test_config();
        config.memory.hotplug_size = Some(GIB);
        config.pm_memory = Some(PmMemoryConfig {
            pool: "/pm/pool".into(),
            size: 4 * GIB,
            guest_numa_node: 1,
            scrub_bandwidth: 0,
        });
        config
    }

    #[test]
    fn a_vm_without_pm_has_one_zone() {
        assert_eq!(specs(&test_config()).len(), 1);
        assert_eq!(volume_node(&test_config()), DRAM_NODE);
    }

    #[test]
    fn pm_is_a_node_of_its_own_without_vcpus_and_all_of_it_hotpluggable() {
        let zones = specs(&hybrid());
        let map = MemoryMap::new(&zones, 40).unwrap();
        let nodes = numa_nodes(&zones, &map, 2);
        assert_eq!((nodes[0].id, nodes[1].id), (0, 1));
        assert_eq!(nodes[0].vcpus, [0, 1]);
        assert!(nodes[1].vcpus.is_empty());
        assert!(nodes[1].memory.iter().all(|memory| memory.hotpluggable && memory.len == 4 * GIB));
        assert_eq!(nodes[0].memory.iter().filter(|memory| memory.hotpluggable).count(), 1);
        assert_eq!(volume_node(&hybrid()), 1);
    }
}
