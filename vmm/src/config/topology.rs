//! Zones and NUMA nodes of a VM, derived from `--memory`, `--memory-zone`, `--numa` and
//! `--pm-memory`.

use std::collections::BTreeMap;

use foreshore_config::ConfigError;
use foreshore_devices::memory::zone::{Growth, HostMemory, HostPages, Tier, ZoneSpec};

use super::memory::plug_bandwidth;
use super::numa::{FLAG, LOCAL_DISTANCE, MAX_DISTANCE, MAX_NODE, NumaConfig, check_node};
use super::{MemoryZoneConfig, PmMemoryConfig, VmConfig};
use crate::cpu::cpu_topology::{self, VcpuPlace};

/// Name of the DRAM zone if there is no `--memory-zone`.
pub const DRAM_ZONE: &str = "dram";
/// Name of the balloon zone.
pub const BALLOON_ZONE: &str = "balloon";
const PM_FLAG: &str = "--pm-memory";
/// Default distance between nodes. Linux assumes the same distance for another socket.
const REMOTE_DISTANCE: u8 = 20;
/// Default distance added for PM to the distance of the nearest DRAM. PM is then at distance 17
/// from its near node and at 27 from the other; servers with PM on two sockets report 17 and 28.
const PM_DETOUR: u8 = 7;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    pub cpus: Vec<u8>,
    /// Node with vCPUs to which this node's memory is local. A node with vCPUs is its own near
    /// node.
    pub near: u32,
}

/// Memory zones and NUMA nodes of a VM. Node IDs are indices and have no gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    zones: Vec<ZoneSpec>,
    nodes: Vec<Node>,
    distances: Vec<u8>,
    /// Place of each vCPU, by its index.
    places: Vec<VcpuPlace>,
}

impl Topology {
    /// Derives the topology from `config`. Its sections must be valid.
    pub fn of(config: &VmConfig) -> Result<Self, ConfigError> {
        check_ids(config)?;
        let mut zones = dram_zones(config)?;
        let mut cpus = node_cpus(config)?;
        // A VM without --numa has one node that contains everything except PM.
        let first =
            zones.iter().map(|zone| zone.guest_node).chain(cpus.keys().copied()).min().unwrap_or(0);
        if cpus.is_empty() {
            cpus.insert(first, (0..config.cpus.max_vcpus).collect());
        }
        zones.extend(pm_zones(config, &zones, &cpus)?);
        let count = count(config, &zones, &cpus)?;
        let places = places(config, &cpus)?;
        let nodes = (0..count)
            .map(|id| Node { cpus: cpus.remove(&id).unwrap_or_default(), near: id })
            .collect();
        let mut topology =
            Self { places, zones, nodes, distances: vec![0; (count * count) as usize] };
        topology.set_distances(config)?;
        Ok(topology)
    }

    /// All zones: DRAM in the order of the flags, then PM.
    pub fn zones(&self) -> &[ZoneSpec] {
        &self.zones
    }

    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Place of each vCPU, by its index.
    pub fn places(&self) -> &[VcpuPlace] {
        &self.places
    }

    /// Distance from `from` to `to`, as in the SLIT.
    pub fn distance(&self, from: u32, to: u32) -> u8 {
        self.distances[self.index(from, to)]
    }

    fn index(&self, from: u32, to: u32) -> usize {
        from as usize * self.nodes.len() + to as usize
    }

    /// IDs of the nodes with vCPUs.
    fn initiators(&self) -> impl Iterator<Item = u32> {
        (0..).zip(&self.nodes).filter(|(_, node)| !node.cpus.is_empty()).map(|(id, _)| id)
    }

    fn set_distances(&mut self, config: &VmConfig) -> Result<(), ConfigError> {
        let given = given_distances(&config.numa, self.nodes.len() as u32)?;
        let said = |from, to| given.get(&(from, to)).or_else(|| given.get(&(to, from))).copied();
        // 1. Near node of PM: as configured, or otherwise the nearest by the configured distances.
        let pm = |zone: &ZoneSpec| zone.tier == Tier::Pm;
        let pm_nodes: Vec<u32> =
            self.zones.iter().filter(|zone| pm(zone)).map(|zone| zone.guest_node).collect();
        for (config, &node) in config.pm_memory.iter().zip(&pm_nodes) {
            let nearest =
                self.initiators().min_by_key(|&id| (said(id, node).unwrap_or(u8::MAX), id));
            let near = config.near.or(nearest).unwrap_or(0);
            if self.nodes.get(near as usize).is_none_or(|node| node.cpus.is_empty()) {
                let reason = format!("near={near} of node {node}: node {near} has no vCPUs");
                return Err(ConfigError::Conflict { flag: PM_FLAG, reason });
            }
            self.nodes[node as usize].near = near;
        }
        // 2. Distances between all nodes.
        let anchor =
            |id: u32| if pm_nodes.contains(&id) { self.nodes[id as usize].near } else { id };
        let between_dram = |from, to| {
            if from == to { LOCAL_DISTANCE } else { said(from, to).unwrap_or(REMOTE_DISTANCE) }
        };
        let distance = |from: u32, to: u32| match said(from, to) {
            _ if from == to => LOCAL_DISTANCE,
            Some(distance) => distance,
            None if anchor(from) == from && anchor(to) == to => REMOTE_DISTANCE,
            None => {
                between_dram(anchor(from), anchor(to)).saturating_add(PM_DETOUR).min(MAX_DISTANCE)
            }
        };
        let count = self.nodes.len() as u32;
        let distances = (0..count).flat_map(|from| (0..count).map(move |to| (from, to)));
        self.distances = distances.map(|(from, to)| distance(from, to)).collect();
        // 3. Near node of DRAM nodes without vCPUs. If `near` is configured, it must be the nearest
        //    node.
        for node in 0..count {
            let nearest = self.initiators().min_by_key(|&id| (self.distance(id, node), id));
            let nearest = nearest.expect("a VM has vCPUs");
            let near = self.nodes[node as usize].near;
            if pm_nodes.contains(&node) {
                let (said, least) = (self.distance(near, node), self.distance(nearest, node));
                if said > least {
                    let reason = format!(
                        "near={near} of node {node}: node {nearest} is nearer, at a distance of {least} instead of {said}"
                    );
                    return Err(ConfigError::Conflict { flag: PM_FLAG, reason });
                }
            } else {
                self.nodes[node as usize].near = nearest;
            }
        }
        Ok(())
    }
}

fn conflict<T>(reason: String) -> Result<T, ConfigError> {
    Err(ConfigError::Conflict { flag: FLAG, reason })
}

/// Checks that zone names and node IDs are unique.
fn check_ids(config: &VmConfig) -> Result<(), ConfigError> {
    let dram = config.memory.zones.iter().map(|zone| zone.id.clone());
    let one = config.memory.zones.is_empty().then(|| DRAM_ZONE.to_owned());
    let pm = config.pm_memory.iter().enumerate().map(|(nth, pm)| pm.id_or_default(nth));
    // The governor and clients treat the balloon as a zone.
    let balloon = config.balloon.as_ref().map(|_| BALLOON_ZONE.to_owned());
    let ids: Vec<String> = balloon.into_iter().chain(dram).chain(one).chain(pm).collect();
    if let Some((_, id)) = ids.iter().enumerate().find(|(nth, id)| ids[..*nth].contains(id)) {
        let is_pm =
            config.pm_memory.iter().enumerate().any(|(nth, pm)| pm.id_or_default(nth) == *id);
        let flag = if is_pm { PM_FLAG } else { "--memory-zone" };
        return Err(ConfigError::Conflict { flag, reason: format!("two zones have the id {id}") });
    }
    for (nth, node) in config.numa.iter().enumerate() {
        let id = node.guest_numa_id;
        if config.numa[..nth].iter().any(|earlier| earlier.guest_numa_id == id) {
            return conflict(format!("node {id} is given twice"));
        }
    }
    Ok(())
}

/// DRAM zones, each in its node.
fn dram_zones(config: &VmConfig) -> Result<Vec<ZoneSpec>, ConfigError> {
    let memory = &config.memory;
    let whole = || MemoryZoneConfig {
        id: DRAM_ZONE.to_owned(),
        size: memory.size,
        file: None,
        host: memory.host.clone(),
        host_numa_node: None,
        hotplug_size: memory.hotplug_size,
        hotplugged_size: memory.hotplugged_size,
        plug_bandwidth: memory.plug_bandwidth,
    };
    let zones = if memory.zones.is_empty() { vec![whole()] } else { memory.zones.clone() };
    let mut places: BTreeMap<&str, u32> = BTreeMap::new();
    for node in &config.numa {
        let id = node.guest_numa_id;
        for name in node.memory_zones() {
            if !zones.iter().any(|zone| zone.id == *name) {
                let known =
                    zones.iter().map(|zone| zone.id.as_str()).collect::<Vec<_>>().join(", ");
                let is_pm = config
                    .pm_memory
                    .iter()
                    .enumerate()
                    .any(|(nth, pm)| pm.id_or_default(nth) == *name);
                let hint = if is_pm {
                    "; set the node of a PM zone with its key guest_numa_node"
                } else {
                    ""
                };
                return conflict(format!(
                    "memory_zones of node {id}: no such DRAM zone: {name:?}; existing DRAM zones: {known}{hint}"
                ));
            }
            if let Some(other) = places.insert(name, id) {
                return conflict(format!("zone {name} is in node {other} and in node {id}"));
            }
        }
    }
    let growth = if memory.resizes_by_acpi() { Growth::Dimms } else { Growth::VirtioMem };
    let in_node = |zone: MemoryZoneConfig| {
        // The zone of `--memory` is in the first node unless another node names it.
        let node = places.get(zone.id.as_str()).copied();
        let node = node.or((config.numa.is_empty() || memory.zones.is_empty()).then_some(0));
        let Some(guest_node) = node else {
            return conflict(format!(
                "zone {} is in no node: memory_zones= of one must name it",
                zone.id
            ));
        };
        let host = host_memory(&zone, memory.thp);
        Ok(ZoneSpec {
            id: zone.id,
            tier: Tier::Dram,
            host,
            growth,
            guest_node,
            host_node: zone.host_numa_node,
            boot_bytes: zone.size,
            hotplug_bytes: zone.hotplug_size.unwrap_or(0),
            hotplugged_bytes: zone.hotplugged_size.unwrap_or(0),
            plug_bytes_per_s: plug_bandwidth::bytes_per_s(zone.plug_bandwidth),
            spill_bytes: 0,
            spill_file: None,
        })
    };
    zones.into_iter().map(in_node).collect()
}

fn host_memory(zone: &MemoryZoneConfig, thp: bool) -> HostMemory {
    let host = &zone.host;
    let pages = match (host.hugepages, host.hugepage_size) {
        (true, Some(page_bytes)) => HostPages::Huge(page_bytes),
        (true, None) => HostPages::HugeAsUsual,
        (false, _) if thp => HostPages::Transparent,
        (false, _) => HostPages::Small,
    };
    HostMemory {
        pages,
        shared: host.shared,
        prefault: host.prefault,
        reserve: host.reserve,
        mergeable: host.mergeable,
        file: zone.file.clone(),
    }
}

/// vCPUs of each node with at least one. Empty if no node names any vCPUs.
fn node_cpus(config: &VmConfig) -> Result<BTreeMap<u32, Vec<u8>>, ConfigError> {
    let (boot_vcpus, max_vcpus) = (config.cpus.boot_vcpus, config.cpus.max_vcpus);
    let mut owner: BTreeMap<u8, u32> = BTreeMap::new();
    for node in &config.numa {
        let id = node.guest_numa_id;
        for &cpu in node.cpus() {
            if cpu >= max_vcpus {
                let (value, most) = (u64::from(cpu), u64::from(max_vcpus - 1));
                return Err(ConfigError::OutOfRange {
                    flag: FLAG,
                    key: "cpus",
                    value,
                    least: 0,
                    most,
                });
            }
            match owner.insert(cpu, id) {
                Some(other) if other == id => {
                    return conflict(format!("vCPU {cpu} is in node {id} twice"));
                }
                Some(other) => {
                    return conflict(format!("vCPU {cpu} is in node {other} and in node {id}"));
                }
                None => {}
            }
        }
    }
    let Some(&first) = owner.values().min() else { return Ok(BTreeMap::new()) };
    if let Some(cpu) = (0..boot_vcpus).find(|cpu| !owner.contains_key(cpu)) {
        return conflict(format!("vCPU {cpu} is in no node: cpus= of one must name it"));
    }
    // vCPUs that can be added later belong to the first node if no node names them.
    for cpu in boot_vcpus..max_vcpus {
        owner.entry(cpu).or_insert(first);
    }
    let mut nodes: BTreeMap<u32, Vec<u8>> = BTreeMap::new();
    for (cpu, node) in owner {
        nodes.entry(node).or_default().push(cpu);
    }
    Ok(nodes)
}

/// PM zones, each in a node of its own.
fn pm_zones(
    config: &VmConfig,
    dram: &[ZoneSpec],
    cpus: &BTreeMap<u32, Vec<u8>>,
) -> Result<Vec<ZoneSpec>, ConfigError> {
    let mut taken: Vec<u32> =
        dram.iter().map(|zone| zone.guest_node).chain(cpus.keys().copied()).collect();
    let said: Vec<u32> = config.pm_memory.iter().filter_map(|pm| pm.guest_numa_node).collect();
    let mut place = |(nth, pm): (usize, &PmMemoryConfig)| {
        let id = pm.id_or_default(nth);
        let next = (0..).find(|node| !taken.contains(node) && !said.contains(node));
        let guest_node = pm.guest_numa_node.or(next).unwrap_or(MAX_NODE);
        if taken.contains(&guest_node) {
            let reason = format!(
                "guest_numa_node of zone {id} is {guest_node}, which has vCPUs or another zone: a zone of PM has a node of its own"
            );
            return Err(ConfigError::Conflict { flag: PM_FLAG, reason });
        }
        taken.push(guest_node);
        Ok(ZoneSpec {
            id,
            tier: Tier::Pm,
            host: HostMemory::default(),
            growth: Growth::VirtioMem,
            guest_node,
            host_node: None,
            boot_bytes: 0,
            hotplug_bytes: pm.size,
            hotplugged_bytes: 0,
            plug_bytes_per_s: plug_bandwidth::bytes_per_s(Some(pm.plug_bandwidth)),
            spill_bytes: pm.spill,
            spill_file: pm.spill_file.clone(),
        })
    };
    config.pm_memory.iter().enumerate().map(&mut place).collect()
}

/// Returns the number of nodes. Checks that every node is used, and that node numbers have no gaps.
fn count(
    config: &VmConfig,
    zones: &[ZoneSpec],
    cpus: &BTreeMap<u32, Vec<u8>>,
) -> Result<u32, ConfigError> {
    let in_use = |id: u32| cpus.contains_key(&id) || zones.iter().any(|zone| zone.guest_node == id);
    for node in &config.numa {
        let id = node.guest_numa_id;
        if !in_use(id) {
            return conflict(format!("node {id} has neither vCPUs nor memory"));
        }
    }
    let highest =
        zones.iter().map(|zone| zone.guest_node).chain(cpus.keys().copied()).max().unwrap_or(0);
    check_node("the highest node", highest)?;
    if let Some(gap) = (0..highest).find(|&id| !in_use(id)) {
        return conflict(format!(
            "node {highest} exists, but not node {gap}: Linux numbers nodes from 0 without gaps"
        ));
    }
    let with_cpus = cpus.len() as u32;
    if let Some(late) = cpus.keys().find(|id| **id >= with_cpus) {
        let without = (0..*late).find(|id| !cpus.contains_key(id)).unwrap_or(0);
        return conflict(format!(
            "node {without} has no vCPUs, but node {late} has some: nodes with vCPUs must have the lowest numbers"
        ));
    }
    Ok(highest + 1)
}

fn places(config: &VmConfig, cpus: &BTreeMap<u32, Vec<u8>>) -> Result<Vec<VcpuPlace>, ConfigError> {
    if let Some(topology) = &config.cpus.topology {
        return cpu_topology::places_of(topology).ok_or_else(|| {
            let reason =
                "topology leaves gaps in the APIC IDs, and exceeds their maximum of 255".to_owned();
            ConfigError::Conflict { flag: "--cpus", reason }
        });
    }
    let nodes: Vec<&[u8]> = cpus.values().map(Vec::as_slice).collect();
    cpu_topology::places(&nodes).ok_or_else(|| {
        let most = nodes.iter().map(|cpus| cpus.len()).max().unwrap_or(0);
        let reason = format!(
            "{} nodes with up to {most} vCPUs: each is a package, and they exceed the maximum of 255 APIC IDs",
            nodes.len()
        );
        ConfigError::Conflict { flag: FLAG, reason }
    })
}

/// Configured distances, which must be symmetric.
fn given_distances(
    nodes: &[NumaConfig],
    count: u32,
) -> Result<BTreeMap<(u32, u32), u8>, ConfigError> {
    let mut given = BTreeMap::new();
    for node in nodes {
        let from = node.guest_numa_id;
        for entry in node.distances() {
            let to = entry.destination;
            if to >= count {
                return conflict(format!(
                    "distances of node {from}: no such node: {to}; the last node is {}",
                    count - 1
                ));
            }
            if given.insert((from, to), entry.distance).is_some() {
                return conflict(format!(
                    "the distance from node {from} to node {to} is given twice"
                ));
            }
        }
    }
    for (&(from, to), there) in &given {
        if let Some(back) = given.get(&(to, from))
            && back != there
        {
            return conflict(format!(
                "the distance of node {from} to node {to} is {there}, and back it is {back}: it must be the same both ways"
            ));
        }
    }
    Ok(given)
}

#[cfg(test)]
#[path = "topology_tests.rs"]
mod tests;
