//! SRAT, SLIT and HMAT: nodes, their distances, and what their memory is worth.
//!
//! Linux makes nodes of what the SRAT lists at boot. A node whose memory comes later must be there from the start,
//! hot-pluggable, or that memory lands in another one.
//!
//! acpi_tables has no affinity structure for x86 processors, and its HMAT is of revision 1, in which Linux reads
//! latencies in other units: the bodies are written here.

use super::{AcpiError, table};

const SRAT_REVISION: u8 = 3;
const SLIT_REVISION: u8 = 1;
const HMAT_REVISION: u8 = 2;
/// A node's distance to itself, by definition (ACPI 6.5, 5.2.17).
const LOCAL_DISTANCE: u8 = 10;
/// Between nodes: what Linux assumes for another socket.
const REMOTE_DISTANCE: u8 = 20;

/// A range of memory that belongs to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeMemory {
    /// Guest-physical start.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// Whether it is plugged later.
    pub hotpluggable: bool,
}

/// What a node's memory is worth to the vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Performance {
    /// Time until a load has its data.
    pub read_latency_ns: u16,
    /// Sustained transfer.
    pub bandwidth_mb_per_s: u32,
}

/// A NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaNode {
    /// Proximity domain.
    pub id: u32,
    /// Indices of its vCPUs.
    pub vcpus: Vec<u8>,
    /// Its memory.
    pub memory: Vec<NodeMemory>,
    /// For the HMAT, which is there if every node has it.
    pub performance: Option<Performance>,
}

/// The tables for `nodes`, of which there is more than one.
pub fn tables(nodes: &[NumaNode]) -> Result<Vec<Vec<u8>>, AcpiError> {
    for (index, node) in nodes.iter().enumerate() {
        if nodes[..index].iter().any(|other| other.id == node.id) {
            return Err(AcpiError::DuplicateNode(node.id));
        }
    }
    let mut tables = vec![srat(nodes), slit(nodes)];
    tables.extend(hmat(nodes));
    Ok(tables)
}

/// System Resource Affinity Table (ACPI 6.5, 5.2.16).
fn srat(nodes: &[NumaNode]) -> Vec<u8> {
    // Reserved: 1, and eight zeros.
    let mut body = vec![1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    for node in nodes {
        for &vcpu in &node.vcpus {
            body.extend_from_slice(&processor_affinity(node.id, vcpu));
        }
    }
    for node in nodes {
        for memory in node.memory.iter().filter(|memory| memory.len != 0) {
            body.extend_from_slice(&memory_affinity(node.id, memory));
        }
    }
    table(*b"SRAT", SRAT_REVISION, &body)
}

/// Processor Local APIC/SAPIC Affinity Structure (ACPI 6.5, table 5.57).
fn processor_affinity(node: u32, apic_id: u8) -> [u8; 16] {
    const ENABLED: u8 = 1;
    let [low, high @ ..] = node.to_le_bytes();
    let mut structure = [0; 16];
    structure[..5].copy_from_slice(&[0, 16, low, apic_id, ENABLED]);
    structure[9..12].copy_from_slice(&high);
    structure
}

/// Memory Affinity Structure (ACPI 6.5, table 5.58).
fn memory_affinity(node: u32, memory: &NodeMemory) -> [u8; 40] {
    const ENABLED: u32 = 1 << 0;
    const HOT_PLUGGABLE: u32 = 1 << 1;
    let flags = ENABLED | if memory.hotpluggable { HOT_PLUGGABLE } else { 0 };
    let mut structure = [0; 40];
    structure[..2].copy_from_slice(&[1, 40]);
    structure[2..6].copy_from_slice(&node.to_le_bytes());
    structure[8..16].copy_from_slice(&memory.start.to_le_bytes());
    structure[16..24].copy_from_slice(&memory.len.to_le_bytes());
    structure[28..32].copy_from_slice(&flags.to_le_bytes());
    structure
}

/// System Locality Information Table (ACPI 6.5, 5.2.17): a square matrix over all ids up to the largest.
fn slit(nodes: &[NumaNode]) -> Vec<u8> {
    let localities = nodes.iter().map(|node| u64::from(node.id) + 1).max().unwrap_or(0);
    let mut body = localities.to_le_bytes().to_vec();
    for from in 0..localities {
        body.extend((0..localities).map(|to| if from == to { LOCAL_DISTANCE } else { REMOTE_DISTANCE }));
    }
    table(*b"SLIT", SLIT_REVISION, &body)
}

/// Heterogeneous Memory Attribute Table (ACPI 6.5, 5.2.27).
fn hmat(nodes: &[NumaNode]) -> Option<Vec<u8>> {
    const ACCESS_LATENCY: u8 = 0;
    const ACCESS_BANDWIDTH: u8 = 3;
    /// Picoseconds.
    const LATENCY_UNIT: u64 = 1000;
    /// MB/s.
    const BANDWIDTH_UNIT: u32 = 10;
    /// 0 means "not given", 0xffff "unreachable".
    const LARGEST_ENTRY: u32 = 0xfffe;

    let targets: Vec<(u32, Performance)> =
        nodes.iter().map(|node| Some((node.id, node.performance?))).collect::<Option<_>>()?;
    let initiators: Vec<u32> =
        nodes.iter().filter(|node| !node.vcpus.is_empty()).map(|node| node.id).collect();
    let mut body = vec![0; 4];
    for &(target, _) in &targets {
        body.extend_from_slice(&proximity_attributes(&initiators, target));
    }
    let entry = |value: u32| value.clamp(1, LARGEST_ENTRY) as u16;
    let latencies = targets.iter().map(|(_, p)| entry(u32::from(p.read_latency_ns))).collect();
    let bandwidths = targets.iter().map(|(_, p)| entry(p.bandwidth_mb_per_s / BANDWIDTH_UNIT)).collect();
    let ids: Vec<u32> = targets.iter().map(|&(id, _)| id).collect();
    for (data_type, unit, entries) in
        [(ACCESS_LATENCY, LATENCY_UNIT, latencies), (ACCESS_BANDWIDTH, u64::from(BANDWIDTH_UNIT), bandwidths)]
    {
        body.extend_from_slice(&locality(data_type, unit, &initiators, &ids, entries));
    }
    Some(table(*b"HMAT", HMAT_REVISION, &body))
}

/// Memory Proximity Domain Attributes Structure (ACPI 6.5, table 5.146 of 5.2.27.3).
fn proximity_attributes(initiators: &[u32], target: u32) -> [u8; 40] {
    const INITIATOR_VALID: u16 = 1;
    // Only the node itself can be said to hold the controller; memory without vCPUs has none.
    let initiator = initiators.iter().find(|&&initiator| initiator == target);
    let flags = initiator.map_or(0, |_| INITIATOR_VALID);
    let mut structure = [0; 40];
    structure[4] = 40;
    structure[8..10].copy_from_slice(&flags.to_le_bytes());
    structure[12..16].copy_from_slice(&initiator.copied().unwrap_or(0).to_le_bytes());
    structure[16..20].copy_from_slice(&target.to_le_bytes());
    structure
}

/// System Locality Latency and Bandwidth Information Structure (ACPI 6.5, 5.2.27.4): `entries` has one value for
/// each target, the same for every initiator.
fn locality(data_type: u8, unit: u64, initiators: &[u32], targets: &[u32], entries: Vec<u16>) -> Vec<u8> {
    const KIND: u16 = 1;
    const HEADER_BYTES: usize = 32;
    let matrix = initiators.len() * targets.len();
    let len = HEADER_BYTES + 4 * (initiators.len() + targets.len()) + 2 * matrix;
    let mut structure = Vec::with_capacity(len);
    structure.extend_from_slice(&KIND.to_le_bytes());
    structure.extend_from_slice(&[0; 2]);
    structure.extend_from_slice(&(len as u32).to_le_bytes());
    // Flags (memory), data type, minimum transfer size, reserved.
    structure.extend_from_slice(&[0, data_type, 0, 0]);
    structure.extend_from_slice(&(initiators.len() as u32).to_le_bytes());
    structure.extend_from_slice(&(targets.len() as u32).to_le_bytes());
    structure.extend_from_slice(&[0; 4]);
    structure.extend_from_slice(&unit.to_le_bytes());
    for id in initiators.iter().chain(targets) {
        structure.extend_from_slice(&id.to_le_bytes());
    }
    for entry in initiators.iter().flat_map(|_| &entries) {
        structure.extend_from_slice(&entry.to_le_bytes());
    }
    structure
}

#[cfg(test)]
mod tests {
    use super::*;

    fn u32_at(bytes: &[u8], offset: usize) -> u32 {
        u32::from_le_bytes(*bytes[offset..].first_chunk().unwrap())
    }

    fn u64_at(bytes: &[u8], offset: usize) -> u64 {
        u64::from_le_bytes(*bytes[offset..].first_chunk().unwrap())
    }

    fn node(id: u32, vcpus: &[u8], memory: NodeMemory) -> NumaNode {
        let performance = Some(Performance { read_latency_ns: 100 + id as u16, bandwidth_mb_per_s: 20_000 });
        NumaNode { id, vcpus: vcpus.to_vec(), memory: vec![memory], performance }
    }

    fn nodes() -> Vec<NumaNode> {
        let dram = NodeMemory { start: 0, len: 1 << 29, hotpluggable: false };
        let pm = NodeMemory { start: 8 << 30, len: 4 << 30, hotpluggable: true };
        vec![node(0, &[0, 1], dram), node(1, &[], pm)]
    }

    #[test]
    fn srat_lists_vcpus_and_memory_that_comes_later() {
        let srat = srat(&nodes());
        assert_eq!(srat.len(), 48 + 2 * 16 + 2 * 40);
        assert_eq!(u32_at(&srat, 36), 1);
        // Table 5.57: type, length, domain, APIC id, flags from 4.
        assert_eq!(srat[64..69], [0, 16, 0, 1, 1]);
        // Table 5.58: domain 2, base 8, length 16, flags 28.
        let (dram, pm) = (&srat[80..120], &srat[120..160]);
        assert_eq!((dram[0], dram[1], u32_at(dram, 2), u32_at(dram, 28)), (1, 40, 0, 1));
        assert_eq!((u32_at(pm, 2), u32_at(pm, 28)), (1, 3));
        assert_eq!((u64_at(pm, 8), u64_at(pm, 16)), (8 << 30, 4 << 30));
        assert_eq!(processor_affinity(0x0403_0201, 7)[..12], [0, 16, 1, 7, 1, 0, 0, 0, 0, 2, 3, 4]);
    }

    #[test]
    fn slit_is_a_square_over_all_ids() {
        let slit = slit(&nodes());
        assert_eq!(u64_at(&slit, 36), 2);
        assert_eq!(slit[44..], [10, 20, 20, 10]);
        let mut sparse = nodes();
        sparse[1].id = 3;
        assert_eq!(super::slit(&sparse).len(), 44 + 16);
    }

    #[test]
    fn hmat_gives_latency_and_bandwidth_in_revision_2_units() {
        let hmat = hmat(&nodes()).unwrap();
        assert_eq!(hmat[8], 2);
        // Two proximity structures of 40 bytes, then two matrices of one initiator and two targets.
        let (first, second) = (&hmat[40..80], &hmat[80..120]);
        assert_eq!((first[8], u32_at(first, 12), u32_at(first, 16)), (1, 0, 0));
        assert_eq!((second[8], u32_at(second, 16)), (0, 1));
        let latency = &hmat[120..168];
        assert_eq!((latency[0], u32_at(latency, 4), latency[9]), (1, 48, 0));
        assert_eq!((u32_at(latency, 12), u32_at(latency, 16), u64_at(latency, 24)), (1, 2, 1000));
        assert_eq!(latency[44..], [100, 0, 101, 0]);
        let bandwidth = &hmat[168..];
        assert_eq!((bandwidth.len(), bandwidth[9], u64_at(bandwidth, 24)), (48, 3, 10));
        assert_eq!(u16::from_le_bytes([bandwidth[44], bandwidth[45]]), 2000);
        let mut unknown = nodes();
        unknown[1].performance = None;
        assert!(super::hmat(&unknown).is_none());
    }

    #[test]
    fn a_node_is_described_once() {
        let mut nodes = nodes();
        nodes[1].id = 0;
        assert!(matches!(tables(&nodes), Err(AcpiError::DuplicateNode(0))));
    }
}
