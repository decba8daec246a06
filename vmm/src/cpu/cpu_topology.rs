//! Place of each vCPU in the guest's topology, according to `--cpus topology=`. By default, each
//! node with vCPUs is one package.
//!
//! Linux warns unless all vCPUs that share a package or a last-level cache are in the same node.

use super::config::CpuTopology;

/// Largest APIC ID. An APIC ID has 8 bits, and 255 addresses all vCPUs.
const MAX_APIC_ID: u32 = 254;
/// For AMD's first Zen, Linux assumes one last-level cache for every 8 APIC IDs, regardless of
/// CPUID (arch/x86/kernel/cpu/cacheinfo.c). If packages had fewer than 8 IDs, several packages
/// would seem to share a cache.
const LEAST_CORE_BITS: u32 = 3;

/// Number of units at one level inside a unit of the next level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level {
    /// Number of units, including units that can be added later.
    pub count: u8,
    /// Number of bits in an APIC ID that select a unit.
    pub bits: u32,
}

impl Level {
    /// Level with `count` units and the smallest sufficient number of bits.
    pub fn of(count: u8) -> Self {
        Self { count, bits: u32::from(count).next_power_of_two().trailing_zeros() }
    }
}

/// Shape of the packages. All packages of a VM have the same shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Threads in each core.
    pub threads: Level,
    /// Cores in each die.
    pub cores: Level,
    /// Dies in each package.
    pub dies: Level,
}

impl Default for Shape {
    fn default() -> Self {
        Self { threads: Level::of(1), cores: Level::of(1), dies: Level::of(1) }
    }
}

impl Shape {
    /// Shift that turns an APIC ID into the ID of a core.
    pub fn core_shift(&self) -> u32 {
        self.threads.bits
    }

    pub fn die_shift(&self) -> u32 {
        self.core_shift() + self.cores.bits
    }

    pub fn package_shift(&self) -> u32 {
        self.die_shift() + self.dies.bits
    }

    /// Number of threads in a package.
    pub fn logical(&self) -> u32 {
        [self.threads, self.cores, self.dies].iter().map(|level| u32::from(level.count)).product()
    }
}

/// Place of a vCPU in the topology.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VcpuPlace {
    /// APIC ID: the package in the highest bits, followed by die, core and thread.
    pub apic_id: u8,
    /// Number of the package. vCPU 0 boots the guest and is in package 0.
    pub package: u8,
    pub shape: Shape,
}

/// Places of all vCPUs, by index. `nodes` lists the vCPUs of each node that has some, in ascending
/// order. Returns `None` if there are not enough APIC IDs.
pub(crate) fn places(nodes: &[&[u8]]) -> Option<Vec<VcpuPlace>> {
    let mut packages = nodes.to_vec();
    packages.sort_by_key(|cpus| cpus.first().copied());
    let most = packages.iter().map(|cpus| cpus.len() as u32).max()?;
    let needed_bits = most.next_power_of_two().trailing_zeros();
    let last_id = |bits: u32| ((packages.len() as u32 - 1) << bits) + most - 1;
    let wanted_bits =
        if packages.len() > 1 { needed_bits.max(LEAST_CORE_BITS) } else { needed_bits };
    let bits = [wanted_bits, needed_bits].into_iter().find(|bits| last_id(*bits) <= MAX_APIC_ID)?;
    let mut places: Vec<(u8, VcpuPlace)> = Vec::new();
    for (package, cpus) in (0..).zip(&packages) {
        let shape = Shape { cores: Level { count: cpus.len() as u8, bits }, ..Shape::default() };
        for (core, &cpu) in (0..).zip(*cpus) {
            let apic_id = u8::try_from((u32::from(package) << bits) + core).ok()?;
            places.push((cpu, VcpuPlace { apic_id, package, shape }));
        }
    }
    places.sort_by_key(|(cpu, _)| *cpu);
    Some(places.into_iter().map(|(_, place)| place).collect())
}

/// Places of all vCPUs in a valid `topology`. Returns `None` if there are not enough APIC IDs.
///
/// Consecutive vCPUs are threads of the same core, then cores of the same die, and so on.
pub(crate) fn places_of(topology: &CpuTopology) -> Option<Vec<VcpuPlace>> {
    let level = |count| Some(Level::of(u8::try_from(count).ok()?));
    let threads = level(topology.threads_per_core)?;
    let cores = level(topology.cores_per_die)?;
    let dies = level(topology.dies_per_package)?;
    let shape = Shape { threads, cores, dies };
    let vcpus = shape.logical() * u32::from(topology.packages);
    let place = |vcpu: u32| {
        let (mut rest, mut apic_id, mut shift) = (vcpu, 0, 0);
        for level in [threads, cores, dies] {
            apic_id |= (rest % u32::from(level.count)) << shift;
            rest /= u32::from(level.count);
            shift += level.bits;
        }
        apic_id |= rest.checked_shl(shift)?;
        let apic_id = u8::try_from(apic_id).ok().filter(|&id| u32::from(id) <= MAX_APIC_ID)?;
        Some(VcpuPlace { apic_id, package: rest as u8, shape })
    };
    (0..vcpus).map(place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(nodes: &[&[u8]]) -> Vec<u8> {
        places(nodes).unwrap().iter().map(|place| place.apic_id).collect()
    }

    fn place(apic_id: u8, package: u8, count: u8, bits: u32) -> VcpuPlace {
        let shape = Shape { cores: Level { count, bits }, ..Shape::default() };
        VcpuPlace { apic_id, package, shape }
    }

    #[test]
    fn without_nodes_apic_id_is_the_index() {
        assert_eq!(ids(&[&[0, 1, 2]]), [0, 1, 2]);
        let all: Vec<u8> = (0..=253).collect();
        assert_eq!(ids(&[&all]), all);
        assert_eq!(places(&[&[0]]).unwrap(), [place(0, 0, 1, 0)]);
        assert_eq!(places(&[&[0, 1, 2]]).unwrap()[0], place(0, 0, 3, 2));
    }

    #[test]
    fn each_node_is_a_package_with_its_own_cache() {
        assert_eq!(ids(&[&[0, 1], &[2, 3]]), [0, 1, 8, 9]);
        assert_eq!(ids(&[&[0, 2], &[1, 3]]), [0, 8, 1, 9]);
        assert_eq!(places(&[&[0, 1], &[2, 3]]).unwrap()[3], place(9, 1, 2, 3));
        let (low, high): (Vec<u8>, Vec<u8>) = ((0..9).collect(), (9..18).collect());
        assert_eq!(ids(&[&low, &high])[9..11], [16, 17]);
    }

    #[test]
    fn first_vcpu_has_first_id_in_any_node() {
        assert_eq!(ids(&[&[2, 3], &[0, 1]]), [0, 1, 8, 9]);
    }

    #[test]
    fn too_many_apic_ids_are_refused() {
        let single: Vec<Vec<u8>> = (0..64).map(|cpu| vec![cpu]).collect();
        let single: Vec<&[u8]> = single.iter().map(Vec::as_slice).collect();
        assert_eq!(
            ids(&single),
            (0..64).collect::<Vec<u8>>(),
            "with fewer bits where 3 are too many"
        );
        let halves: [Vec<u8>; 2] = [(0..127).collect(), (127..254).collect()];
        assert_eq!(ids(&[&halves[0], &halves[1]])[253], 254);
        let uneven: [Vec<u8>; 3] = [(0..80).collect(), (80..160).collect(), (160..240).collect()];
        assert_eq!(places(&[&uneven[0], &uneven[1], &uneven[2]]), None);
    }

    fn ids_of(numbers: [u16; 4]) -> Option<Vec<u8>> {
        let [threads_per_core, cores_per_die, dies_per_package, packages] = numbers;
        let topology = CpuTopology { threads_per_core, cores_per_die, dies_per_package, packages };
        Some(places_of(&topology)?.iter().map(|place| place.apic_id).collect())
    }

    #[test]
    fn topology_numbers_threads_first() {
        assert_eq!(ids_of([1, 4, 1, 1]).unwrap(), [0, 1, 2, 3]);
        assert_eq!(ids_of([2, 2, 2, 1]).unwrap(), (0..8).collect::<Vec<u8>>());
        // Three cores need two bits, so the IDs of every fourth core are unused.
        assert_eq!(ids_of([2, 3, 1, 2]).unwrap(), [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13]);
        assert_eq!(ids_of([1, 1, 3, 2]).unwrap(), [0, 1, 2, 4, 5, 6]);
        let topology =
            CpuTopology { threads_per_core: 2, cores_per_die: 3, dies_per_package: 1, packages: 2 };
        let last = places_of(&topology).unwrap()[11];
        assert_eq!((last.package, last.shape.package_shift(), last.shape.logical()), (1, 3, 6));
    }

    #[test]
    fn topology_beyond_apic_ids_is_refused() {
        assert_eq!(ids_of([1, 254, 1, 1]).unwrap().last(), Some(&253));
        assert_eq!(ids_of([1, 1, 1, 254]).unwrap().last(), Some(&253));
        // 3 of 4 cores and 7 of 8 dies exist. The IDs of the others are unused.
        assert_eq!(ids_of([1, 3, 7, 4]).unwrap().last(), Some(&122));
        assert_eq!(ids_of([1, 5, 5, 5]), None);
        assert_eq!(ids_of([1, 65, 1, 3]), None);
    }
}
