//! NUMA nodes for the firmware tables, and names of zones for errors, without I/O.

use foreshore_devices::memory::layout::{GuestRange, MIB, MemoryMap};
use foreshore_devices::memory::lost_memory::RangeSource;
use foreshore_devices::memory::zone::{Tier, ZoneSpec};

use crate::acpi::{NodeMemory, NumaNode, Performance};
use crate::config::{PmMemoryConfig, Topology, VmConfig};

/// Typical performance of DRAM for the firmware tables. The performance of PM is configurable. Only
/// the order of the values matters, because Linux puts slower PM into a lower memory tier. All DRAM
/// must have the same values. Otherwise Linux ignores the values of all DRAM.
const DRAM_PERFORMANCE: Performance =
    Performance { read_latency_ns: 90, write_latency_ns: 86, bandwidth_mb_per_s: 40_000 };
/// SLIT distance for which the DRAM latencies are valid.
const LOCAL_DISTANCE: u32 = 10;

/// Node of volumes: the node of the first PM zone, or node 0 in a VM without PM.
pub(crate) fn volume_node(zones: &[ZoneSpec]) -> u32 {
    zones.iter().find(|zone| zone.tier == Tier::Pm).map_or(0, |zone| zone.guest_node)
}

/// Source of a zone in errors and metrics, which is the flag that defines it.
pub(crate) fn source(zone: &ZoneSpec, config: &VmConfig) -> RangeSource {
    let (flag, key) = match zone.tier {
        Tier::Dram if config.memory.zones.is_empty() => ("--memory", String::new()),
        Tier::Dram => ("--memory-zone", format!("id={}", zone.id)),
        Tier::Pm => {
            let pool = config
                .pm_memory
                .first()
                .map(|pm| pm.pool.display().to_string())
                .unwrap_or_default();
            let id =
                if config.pm_memory.len() > 1 { format!(",id={}", zone.id) } else { String::new() };
            ("--pm-memory", format!("pool={pool}{id}"))
        }
    };
    RangeSource { flag, key }
}

/// Returns the NUMA nodes for the firmware tables. Hotplug ranges are included from the start,
/// because Linux creates nodes only at boot.
pub(crate) fn numa_nodes(config: &VmConfig, topology: &Topology, map: &MemoryMap) -> Vec<NumaNode> {
    let range = |range: &GuestRange, hotpluggable| NodeMemory {
        start: range.start,
        len: range.len,
        hotpluggable,
    };
    let node = |(id, node): (u32, &crate::config::Node)| {
        let zones =
            topology.zones().iter().zip(map.zones()).filter(|(zone, _)| zone.guest_node == id);
        let memory = zones.flat_map(|(_, placement)| {
            let boot = placement.boot.iter().map(|at| range(at, false));
            boot.chain(placement.hotplug.iter().map(|at| range(at, true)))
        });
        NumaNode {
            vcpus: node
                .cpus
                .iter()
                .map(|cpu| topology.places()[usize::from(*cpu)].apic_id)
                .collect(),
            memory: memory.collect(),
            distances: (0..topology.nodes().len() as u32)
                .map(|to| topology.distance(id, to))
                .collect(),
            near: node.near,
            performance: (0..)
                .zip(topology.nodes())
                .filter(|(_, from)| !from.cpus.is_empty())
                .map(|(from, _)| performance(config, topology, from, id))
                .collect(),
        }
    };
    (0..).zip(topology.nodes()).map(node).collect()
}

/// Performance of memory on node `to` for vCPUs on node `from`. The configured performance of PM is
/// valid for the node that it is near to. For other nodes, latency increases and bandwidth
/// decreases with the distance.
fn performance(config: &VmConfig, topology: &Topology, from: u32, to: u32) -> Performance {
    let pm_zones = topology.zones().iter().filter(|zone| zone.tier == Tier::Pm);
    let pm =
        pm_zones.zip(&config.pm_memory).find(|(zone, _)| zone.guest_node == to).map(|(_, pm)| pm);
    let local = pm.map_or(DRAM_PERFORMANCE, pm_performance);
    let distance = |from| u32::from(topology.distance(from, to));
    let near = match pm {
        Some(_) => distance(topology.nodes()[to as usize].near),
        None => LOCAL_DISTANCE,
    };
    let away = distance(from).saturating_sub(near);
    let latency = |local_ns: u32, dram_ns: u32| local_ns + dram_ns * away / LOCAL_DISTANCE;
    Performance {
        read_latency_ns: latency(local.read_latency_ns, DRAM_PERFORMANCE.read_latency_ns),
        write_latency_ns: latency(local.write_latency_ns, DRAM_PERFORMANCE.write_latency_ns),
        bandwidth_mb_per_s: local.bandwidth_mb_per_s * u64::from(near) / u64::from(near + away),
    }
}

fn pm_performance(pm: &PmMemoryConfig) -> Performance {
    Performance {
        read_latency_ns: pm.read_latency,
        write_latency_ns: pm.write_latency,
        // The unit in the guest's table is MB/s. `6600M` is written as 6600, because the value is
        // only used to compare zones.
        bandwidth_mb_per_s: pm.bandwidth / MIB,
    }
}

#[cfg(test)]
mod tests {
    use foreshore_devices::memory::layout::GIB;

    use super::*;
    use crate::config::{CpusConfig, MemoryZoneConfig, NumaConfig, test_config};

    fn nodes(config: &VmConfig) -> Vec<NumaNode> {
        let topology = Topology::of(config).unwrap();
        let map = MemoryMap::new(topology.zones(), 40).unwrap();
        numa_nodes(config, &topology, &map)
    }

    fn hybrid() -> VmConfig {
        let mut config = test_config();
        config.cpus = CpusConfig::parse("boot=2").unwrap();
        config.memory.hotplug_size = Some(GIB);
        config.pm_memory = vec![PmMemoryConfig::parse("pool=/pm/pool,size=4G").unwrap()];
        config
    }

    /// Two sockets, each with PM. The device hole below 4 GiB splits the DRAM.
    fn two_sockets() -> VmConfig {
        let mut config = hybrid();
        config.memory.size = 0;
        config.memory.hotplug_size = None;
        config.memory.zones = ["id=a,size=2G,hotplug_size=1G", "id=b,size=2G"]
            .map(|text| MemoryZoneConfig::parse(text).unwrap())
            .to_vec();
        config.numa =
            ["guest_numa_id=0,cpus=0,memory_zones=a", "guest_numa_id=1,cpus=1,memory_zones=b"]
                .map(|text| NumaConfig::parse(text).unwrap())
                .to_vec();
        config.pm_memory = ["near=0", "near=1,read_latency=400,write_latency=200,bandwidth=2000M"]
            .map(|text| PmMemoryConfig::parse(&format!("pool=/pm/pool,size=4G,{text}")).unwrap())
            .to_vec();
        config
    }

    #[test]
    fn volumes_are_on_the_node_of_the_first_pm_zone() {
        let node = |config: &VmConfig| volume_node(Topology::of(config).unwrap().zones());
        assert_eq!([test_config(), hybrid(), two_sockets()].map(|config| node(&config)), [0, 1, 2]);
    }

    #[test]
    fn zones_are_named_by_their_flags() {
        let flags = |config: &VmConfig| {
            let topology = Topology::of(config).unwrap();
            topology.zones().iter().map(|zone| source(zone, config).to_string()).collect::<Vec<_>>()
        };
        assert_eq!(flags(&hybrid()), ["--memory", "--pm-memory pool=/pm/pool"]);
        let expected = [
            "--memory-zone id=a",
            "--memory-zone id=b",
            "--pm-memory pool=/pm/pool,id=pm",
            "--pm-memory pool=/pm/pool,id=pm1",
        ];
        assert_eq!(flags(&two_sockets()), expected);
    }

    #[test]
    fn pm_is_a_hotpluggable_node_without_vcpus() {
        let nodes = nodes(&hybrid());
        assert_eq!(nodes.len(), 2);
        assert_eq!(nodes[0].vcpus, [0, 1]);
        assert!(nodes[1].vcpus.is_empty());
        assert!(nodes[1].memory.iter().all(|memory| memory.hotpluggable && memory.len == 4 * GIB));
        assert_eq!(nodes[0].memory.iter().filter(|memory| memory.hotpluggable).count(), 1);
        assert_eq!((nodes[0].performance.as_slice(), nodes[1].near), (&[DRAM_PERFORMANCE][..], 0));
        let pm =
            Performance { read_latency_ns: 305, write_latency_ns: 90, bandwidth_mb_per_s: 6600 };
        assert_eq!(nodes[1].performance, [pm]);
    }

    #[test]
    fn each_part_of_a_zone_is_in_the_table_of_its_node() {
        let memory = |start, len, hotpluggable| NodeMemory { start, len, hotpluggable };
        let parts: Vec<_> = nodes(&two_sockets()).into_iter().map(|node| node.memory).collect();
        let expected = [
            vec![memory(0, 2 * GIB, false), memory(5 * GIB, GIB, true)],
            vec![memory(2 * GIB, GIB, false), memory(4 * GIB, GIB, false)],
            vec![memory(6 * GIB, 4 * GIB, true)],
            vec![memory(10 * GIB, 4 * GIB, true)],
        ];
        assert_eq!(parts, expected);
    }

    #[test]
    fn performance_decreases_with_distance_and_is_equal_for_all_dram() {
        let nodes = nodes(&two_sockets());
        let of = |node: usize| {
            nodes[node]
                .performance
                .iter()
                .map(|of| (of.read_latency_ns, of.write_latency_ns, of.bandwidth_mb_per_s))
                .collect::<Vec<_>>()
        };
        assert_eq!(of(0), [(90, 86, 40_000), (180, 172, 20_000)]);
        assert_eq!(of(1), [(180, 172, 20_000), (90, 86, 40_000)]);
        // PM is at distance 17 from its near node and at 27 from the other. From the other node, it
        // has the latency of one more DRAM hop, and 17/27 of the bandwidth.
        assert_eq!(of(2), [(305, 90, 6600), (395, 176, 4155)]);
        assert_eq!(of(3), [(490, 286, 1259), (400, 200, 2000)]);
    }
}
