//! Where each vCPU stands in the guest's processors: every node with vCPUs is a package. Pure.
//!
//! Linux takes vCPUs of one package, or of one last-level cache, for neighbours, and warns if they are in two nodes.

/// The largest APIC id of 8 bits that is no broadcast.
const MAX_APIC_ID: u32 = 254;
/// Linux takes AMD's first Zen to have a last-level cache for every 8 APIC ids, whatever CPUID says
/// (arch/x86/kernel/cpu/cacheinfo.c): packages of fewer would share one.
const LEAST_CORE_BITS: u32 = 3;

/// Where a vCPU stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VcpuPlace {
    /// Its APIC id: the package above `core_bits`, the core below.
    pub apic_id: u8,
    /// Which package. That of vCPU 0, which boots, is 0.
    pub package: u8,
    /// The vCPUs that its package has at boot.
    pub cores: u8,
    /// Bits of an APIC id that tell the cores of a package apart.
    pub core_bits: u32,
}

/// The places of all vCPUs, by their indices; `nodes` are the vCPUs of each node that has some, ascending. `None` if APIC ids
/// do not suffice.
pub(super) fn places(nodes: &[&[u8]], boot_vcpus: u8) -> Option<Vec<VcpuPlace>> {
    let mut packages = nodes.to_vec();
    packages.sort_by_key(|cpus| cpus.first().copied());
    let most = packages.iter().map(|cpus| cpus.len() as u32).max()?;
    let needed_bits = most.next_power_of_two().trailing_zeros();
    let last_id = |bits: u32| ((packages.len() as u32 - 1) << bits) + most - 1;
    let wanted_bits = if packages.len() > 1 { needed_bits.max(LEAST_CORE_BITS) } else { needed_bits };
    let core_bits = [wanted_bits, needed_bits].into_iter().find(|bits| last_id(*bits) <= MAX_APIC_ID)?;
    let mut places: Vec<(u8, VcpuPlace)> = Vec::new();
    for (package, cpus) in (0..).zip(&packages) {
        let cores = cpus.iter().filter(|cpu| **cpu < boot_vcpus).count() as u8;
        for (core, &cpu) in (0..).zip(*cpus) {
            let apic_id = u8::try_from((u32::from(package) << core_bits) + core).ok()?;
            places.push((cpu, VcpuPlace { apic_id, package, cores, core_bits }));
        }
    }
    places.sort_by_key(|(cpu, _)| *cpu);
    Some(places.into_iter().map(|(_, place)| place).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(nodes: &[&[u8]]) -> Vec<u8> {
        let vcpus = nodes.iter().map(|cpus| cpus.len()).sum::<usize>() as u8;
        places(nodes, vcpus).unwrap().iter().map(|place| place.apic_id).collect()
    }

    #[test]
    fn without_nodes_an_apic_id_is_an_index() {
        assert_eq!(ids(&[&[0, 1, 2]]), [0, 1, 2]);
        let all: Vec<u8> = (0..=253).collect();
        assert_eq!(ids(&[&all]), all);
        let place = |cores, core_bits| VcpuPlace { apic_id: 0, package: 0, cores, core_bits };
        assert_eq!(places(&[&[0]], 1).unwrap(), [place(1, 0)]);
        assert_eq!(places(&[&[0, 1, 2]], 2).unwrap()[0], place(2, 2));
    }

    #[test]
    fn each_node_is_a_package_with_a_cache_of_its_own() {
        assert_eq!(ids(&[&[0, 1], &[2, 3]]), [0, 1, 8, 9]);
        assert_eq!(ids(&[&[0, 2], &[1, 3]]), [0, 8, 1, 9]);
        let place = places(&[&[0, 1], &[2, 3]], 3).unwrap()[3];
        assert_eq!(place, VcpuPlace { apic_id: 9, package: 1, cores: 1, core_bits: 3 });
        let (low, high): (Vec<u8>, Vec<u8>) = ((0..9).collect(), (9..18).collect());
        assert_eq!(ids(&[&low, &high])[9..11], [16, 17]);
    }

    #[test]
    fn the_first_vcpu_has_the_first_id_wherever_it_is() {
        assert_eq!(ids(&[&[2, 3], &[0, 1]]), [0, 1, 8, 9]);
    }

    #[test]
    fn ids_suffice_or_there_are_no_places() {
        let single: Vec<Vec<u8>> = (0..64).map(|cpu| vec![cpu]).collect();
        let single: Vec<&[u8]> = single.iter().map(Vec::as_slice).collect();
        assert_eq!(ids(&single), (0..64).collect::<Vec<u8>>(), "with fewer bits where 3 are too many");
        let halves: [Vec<u8>; 2] = [(0..127).collect(), (127..254).collect()];
        assert_eq!(ids(&[&halves[0], &halves[1]])[253], 254);
        let uneven: [Vec<u8>; 3] = [(0..80).collect(), (80..160).collect(), (160..240).collect()];
        assert_eq!(places(&[&uneven[0], &uneven[1], &uneven[2]], 240), None);
    }
}
