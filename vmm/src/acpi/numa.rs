//! SRAT, SLIT and HMAT: NUMA nodes, their distances, and the performance of their memory.
//!
//! Linux creates nodes from the SRAT at boot. A node whose memory is plugged later must have a
//! hot-pluggable range in the SRAT from the start. Otherwise its memory is added to another node.
//!
//! The table bodies are built here, because acpi_tables has no affinity structure for x86
//! processors. The HMAT of acpi_tables has revision 1, in which Linux reads latencies in other
//! units.

use super::table;

const SRAT_REVISION: u8 = 3;
const SLIT_REVISION: u8 = 1;
const HMAT_REVISION: u8 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeMemory {
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// True if memory is plugged into the range later.
    pub hotpluggable: bool,
}

/// Performance of a node's memory for the vCPUs of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Performance {
    /// Time until a load receives its data.
    pub read_latency_ns: u32,
    /// Duration of a store.
    pub write_latency_ns: u32,
    pub bandwidth_mb_per_s: u64,
}

/// NUMA node. Its index is its proximity domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NumaNode {
    /// APIC IDs of the node's vCPUs.
    pub vcpus: Vec<u8>,
    pub memory: Vec<NodeMemory>,
    /// Distance to each node, in order of index.
    pub distances: Vec<u8>,
    /// Node whose vCPUs are closest to the memory: the attached initiator in the HMAT.
    pub near: u32,
    /// Performance for each node with vCPUs, in order of index. The HMAT is omitted unless every
    /// node with memory has it.
    pub performance: Vec<Performance>,
}

/// Tables for at least two `nodes`.
///
/// # Panics
/// Panics if a node does not have exactly one distance for each node.
pub(super) fn tables(nodes: &[NumaNode]) -> Vec<Vec<u8>> {
    assert!(
        nodes.iter().all(|node| node.distances.len() == nodes.len()),
        "a distance to each node"
    );
    let mut tables = vec![srat(nodes), slit(nodes)];
    tables.extend(hmat(nodes));
    tables
}

fn with_ids(nodes: &[NumaNode]) -> impl Iterator<Item = (u32, &NumaNode)> {
    (0..).zip(nodes)
}

/// System Resource Affinity Table (ACPI 6.5, 5.2.16).
fn srat(nodes: &[NumaNode]) -> Vec<u8> {
    // Reserved fields: 1, and eight zeros.
    let mut body = vec![1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    // Linux numbers nodes in the order in which it finds them, and reads vCPUs before memory. This
    // order gives the nodes the same numbers in Linux as in Foreshore.
    for (id, node) in with_ids(nodes) {
        for &vcpu in &node.vcpus {
            body.extend_from_slice(&processor_affinity(id, vcpu));
        }
    }
    for (id, node) in with_ids(nodes) {
        for memory in node.memory.iter().filter(|memory| memory.len != 0) {
            body.extend_from_slice(&memory_affinity(id, memory));
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

/// System Locality Information Table (ACPI 6.5, 5.2.17): a square matrix over all nodes.
fn slit(nodes: &[NumaNode]) -> Vec<u8> {
    let mut body = (nodes.len() as u64).to_le_bytes().to_vec();
    body.extend(nodes.iter().flat_map(|node| &node.distances));
    table(*b"SLIT", SLIT_REVISION, &body)
}

/// Data type of a matrix in the HMAT (ACPI 6.5, 5.2.27.4).
#[derive(Clone, Copy)]
enum Figure {
    ReadLatency = 1,
    WriteLatency = 2,
    AccessBandwidth = 3,
}

impl Figure {
    const ALL: [Self; 3] = [Self::ReadLatency, Self::WriteLatency, Self::AccessBandwidth];

    /// Unit of an entry: picoseconds or MB/s.
    fn unit(self) -> u64 {
        match self {
            Self::ReadLatency | Self::WriteLatency => 1000,
            Self::AccessBandwidth => 10,
        }
    }

    fn entry(self, of: &Performance) -> u16 {
        /// 0 means "not given", and 0xffff "unreachable".
        const LARGEST: u64 = 0xfffe;
        let value = match self {
            Self::ReadLatency => u64::from(of.read_latency_ns),
            Self::WriteLatency => u64::from(of.write_latency_ns),
            Self::AccessBandwidth => of.bandwidth_mb_per_s / self.unit(),
        };
        value.clamp(1, LARGEST) as u16
    }
}

/// Heterogeneous Memory Attribute Table (ACPI 6.5, 5.2.27).
fn hmat(nodes: &[NumaNode]) -> Option<Vec<u8>> {
    let initiators: Vec<u32> =
        with_ids(nodes).filter(|(_, node)| !node.vcpus.is_empty()).map(|(id, _)| id).collect();
    let targets: Vec<(u32, &NumaNode)> =
        with_ids(nodes).filter(|(_, node)| !node.memory.is_empty()).collect();
    if targets.iter().any(|(_, node)| node.performance.len() != initiators.len()) {
        return None;
    }
    let mut body = vec![0; 4];
    for (id, node) in &targets {
        body.extend_from_slice(&proximity_attributes(node.near, *id));
    }
    let ids: Vec<u32> = targets.iter().map(|&(id, _)| id).collect();
    for figure in Figure::ALL {
        let row = |initiator: usize| {
            targets.iter().map(move |(_, node)| figure.entry(&node.performance[initiator]))
        };
        let entries = (0..initiators.len()).flat_map(row).collect();
        body.extend_from_slice(&locality(figure, &initiators, &ids, entries));
    }
    Some(table(*b"HMAT", HMAT_REVISION, &body))
}

/// Memory Proximity Domain Attributes Structure (ACPI 6.5, table 5.146 of 5.2.27.3).
fn proximity_attributes(initiator: u32, target: u32) -> [u8; 40] {
    const INITIATOR_VALID: u16 = 1;
    let mut structure = [0; 40];
    structure[4] = 40;
    structure[8..10].copy_from_slice(&INITIATOR_VALID.to_le_bytes());
    structure[12..16].copy_from_slice(&initiator.to_le_bytes());
    structure[16..20].copy_from_slice(&target.to_le_bytes());
    structure
}

/// System Locality Latency and Bandwidth Information Structure (ACPI 6.5, 5.2.27.4). `entries` is a
/// matrix with one row for each initiator and one column for each target.
fn locality(figure: Figure, initiators: &[u32], targets: &[u32], entries: Vec<u16>) -> Vec<u8> {
    const KIND: u16 = 1;
    const HEADER_BYTES: usize = 32;
    let len = HEADER_BYTES + 4 * (initiators.len() + targets.len()) + 2 * entries.len();
    let mut structure = Vec::with_capacity(len);
    structure.extend_from_slice(&KIND.to_le_bytes());
    structure.extend_from_slice(&[0; 2]);
    structure.extend_from_slice(&(len as u32).to_le_bytes());
    // Flags (memory), data type, minimum transfer size, reserved.
    structure.extend_from_slice(&[0, figure as u8, 0, 0]);
    structure.extend_from_slice(&(initiators.len() as u32).to_le_bytes());
    structure.extend_from_slice(&(targets.len() as u32).to_le_bytes());
    structure.extend_from_slice(&[0; 4]);
    structure.extend_from_slice(&figure.unit().to_le_bytes());
    for id in initiators.iter().chain(targets) {
        structure.extend_from_slice(&id.to_le_bytes());
    }
    for entry in entries {
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

    fn u16s(bytes: &[u8]) -> Vec<u16> {
        bytes.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect()
    }

    fn figures(
        read_latency_ns: u32,
        write_latency_ns: u32,
        bandwidth_mb_per_s: u64,
    ) -> Performance {
        Performance { read_latency_ns, write_latency_ns, bandwidth_mb_per_s }
    }

    /// Two sockets, with a PM node near the second socket.
    fn nodes() -> Vec<NumaNode> {
        let memory = |start: u64, len: u64, hotpluggable| NodeMemory { start, len, hotpluggable };
        let node = |vcpus: &[u8],
                    near,
                    distances: [u8; 3],
                    memory: &[NodeMemory],
                    performance: [Performance; 2]| {
            NumaNode {
                vcpus: vcpus.to_vec(),
                memory: memory.to_vec(),
                distances: distances.to_vec(),
                near,
                performance: performance.to_vec(),
            }
        };
        let (near, far) = (figures(90, 86, 40_000), figures(180, 172, 20_000));
        vec![
            node(
                &[0, 1],
                0,
                [10, 20, 27],
                &[memory(0, 1 << 29, false), memory(4 << 30, 1 << 30, true)],
                [near, far],
            ),
            node(&[2], 1, [20, 10, 17], &[memory(1 << 29, 1 << 29, false)], [far, near]),
            node(
                &[],
                1,
                [27, 17, 10],
                &[memory(8 << 30, 4 << 30, true)],
                [figures(395, 176, 4_400), figures(305, 90, 6_600)],
            ),
        ]
    }

    #[test]
    fn srat_lists_vcpus_and_memory_of_each_node() {
        let srat = srat(&nodes());
        assert_eq!((&srat[..4], srat[8]), (&b"SRAT"[..], 3));
        assert_eq!(srat.len(), 48 + 3 * 16 + 4 * 40);
        // Table 5.56: reserved, 1, and 8 bytes of zeros.
        assert_eq!((u32_at(&srat, 36), u64_at(&srat, 40)), (1, 0));
        // Table 5.57: type 0, length, domain (low byte), APIC id, flags from 4.
        let processors: Vec<&[u8]> = srat[48..96].chunks(16).collect();
        assert_eq!(processors[1][..5], [0, 16, 0, 1, 1]);
        assert_eq!(processors[2][..5], [0, 16, 1, 2, 1]);
        assert_eq!(
            processor_affinity(0x0403_0201, 7),
            [0, 16, 1, 7, 1, 0, 0, 0, 0, 2, 3, 4, 0, 0, 0, 0]
        );
        // Table 5.58: type 1, length, domain at 2, base at 8, length at 16, flags at 28.
        let ranges: Vec<_> = srat[96..]
            .chunks(40)
            .map(|memory| {
                assert_eq!(memory[..2], [1, 40]);
                (u32_at(memory, 2), u64_at(memory, 8), u64_at(memory, 16), u32_at(memory, 28))
            })
            .collect();
        let expected = [
            (0, 0, 1 << 29, 1),
            (0, 4 << 30, 1 << 30, 3),
            (1, 1 << 29, 1 << 29, 1),
            (2, 8 << 30, 4 << 30, 3),
        ];
        assert_eq!(ranges, expected);
    }

    #[test]
    fn slit_is_a_square_over_all_nodes() {
        let slit = slit(&nodes());
        assert_eq!((&slit[..4], slit[8], u64_at(&slit, 36)), (&b"SLIT"[..], 1, 3));
        assert_eq!(slit[44..], [10, 20, 27, 20, 10, 17, 27, 17, 10]);
    }

    #[test]
    #[should_panic(expected = "a distance to each node")]
    fn node_without_all_distances_panics() {
        let mut nodes = nodes();
        nodes[1].distances.pop();
        tables(&nodes);
    }

    #[test]
    fn hmat_has_the_nearest_initiator_of_each_target() {
        let hmat = hmat(&nodes()).unwrap();
        assert_eq!((&hmat[..4], hmat[8], u32_at(&hmat, 36)), (&b"HMAT"[..], 2, 0));
        // 5.2.27.3: type 0, length 40 at 4, flags at 8 (bit 0: the initiator is valid), initiator
        // at 12, memory at 16.
        for (structure, (initiator, memory)) in
            hmat[40..160].chunks(40).zip([(0, 0), (1, 1), (1, 2)])
        {
            assert_eq!(structure[..8], [0, 0, 0, 0, 40, 0, 0, 0]);
            assert_eq!(structure[8..12], [1, 0, 0, 0]);
            assert_eq!((u32_at(structure, 12), u32_at(structure, 16)), (initiator, memory));
            assert!(structure[20..].iter().all(|byte| *byte == 0));
        }
    }

    #[test]
    fn hmat_has_latency_and_bandwidth_of_each_pair_in_revision_2_units() {
        let hmat = hmat(&nodes()).unwrap();
        // 5.2.27.4: a header of 32 bytes, two initiators and three targets of 4 bytes, six entries
        // of 2.
        let structures: Vec<&[u8]> = hmat[160..].chunks(64).collect();
        let expected: [(u8, u64, [u16; 6]); 3] = [
            (1, 1000, [90, 180, 395, 180, 90, 305]),
            (2, 1000, [86, 172, 176, 172, 86, 90]),
            (3, 10, [4000, 2000, 440, 2000, 4000, 660]),
        ];
        assert_eq!(structures.len(), expected.len());
        for (structure, (data_type, unit, entries)) in structures.into_iter().zip(expected) {
            assert_eq!(structure[..4], [1, 0, 0, 0]);
            assert_eq!(u32_at(structure, 4), 64);
            // Flags: the structure describes memory, not a memory-side cache.
            assert_eq!(structure[8..12], [0, data_type, 0, 0]);
            assert_eq!(
                (u32_at(structure, 12), u32_at(structure, 16), u64_at(structure, 24)),
                (2, 3, unit)
            );
            let ids: Vec<u32> = (32..52).step_by(4).map(|at| u32_at(structure, at)).collect();
            assert_eq!(ids, [0, 1, 0, 1, 2]);
            assert_eq!(u16s(&structure[52..]), entries);
        }
    }

    #[test]
    fn hmat_entries_are_clamped() {
        let entries = |figures: Performance| Figure::ALL.map(|figure| figure.entry(&figures));
        assert_eq!(entries(figures(0, 0, 9)), [1, 1, 1]);
        assert_eq!(entries(figures(70_000, 65_535, 1_000_000)), [0xfffe; 3]);
    }

    #[test]
    fn hmat_skips_nodes_without_memory_and_needs_performance_of_all_others() {
        let mut nodes = nodes();
        nodes[0].memory.clear();
        // Two structures of 40 bytes, and three structures with two initiators and two targets.
        assert_eq!(super::hmat(&nodes).unwrap().len(), 40 + 2 * 40 + 3 * (32 + 4 * 4 + 4 * 2));
        nodes[2].performance.pop();
        assert!(super::hmat(&nodes).is_none());
        assert_eq!(tables(&nodes).len(), 2);
    }
}
