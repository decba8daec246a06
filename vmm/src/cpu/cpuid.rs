//! What CPUID tells the guest: what KVM can do, with each vCPU's place in the topology filled in.
//!
//! One thread per core, a package for each node with vCPUs. KVM_GET_SUPPORTED_CPUID returns the host CPU's own topology,
//! which is that of whichever CPU the call ran on: every field that holds an APIC id or a count of cores must be
//! replaced, or Linux sees CPUs in the wrong packages.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

use crate::config::VcpuPlace;

/// Leaf 1, ECX: the local APIC timer takes deadlines in TSC ticks.
const TSC_DEADLINE: u32 = 1 << 24;
/// Leaf 1, ECX: there is a hypervisor.
const HYPERVISOR: u32 = 1 << 31;
/// Leaf 1, EDX: the count of logical processors in EBX is valid.
const HTT: u32 = 1 << 28;

/// The leaves of the extended topology (Intel SDM 2A, CPUID): the same content in both.
const EXTENDED_TOPOLOGY: [u32; 2] = [0xb, 0x1f];

/// The leaves that KVM supports, with what depends on the vCPU filled in.
///
/// Of the extended topology, newer hosts return subleaf 0 alone, and that zeroed: its subleaves are written here. The
/// second of the two leaves stays out where the host does not have it, as the highest leaf says.
///
/// `tsc_deadline`: whether KVM emulates the APIC timer's deadline mode (KVM_CAP_TSC_DEADLINE_TIMER); the supported leaves
/// never say so.
pub fn place(supported: &CpuId, place: VcpuPlace, tsc_deadline: bool) -> CpuId {
    let is_topology = |entry: &kvm_cpuid_entry2| EXTENDED_TOPOLOGY.contains(&entry.function);
    let mut entries: Vec<_> =
        supported.as_slice().iter().copied().filter(|entry| !is_topology(entry)).collect();
    for entry in &mut entries {
        place_entry(entry, place, tsc_deadline);
    }
    for function in EXTENDED_TOPOLOGY {
        if supported.as_slice().iter().any(|entry| entry.function == function) {
            entries.extend(extended_topology(function, place));
        }
    }
    CpuId::from_entries(&entries).expect("KVM takes more leaves than it supports")
}

/// Subleaf 0 threads, 1 cores, then the end.
fn extended_topology(function: u32, place: VcpuPlace) -> [kvm_cpuid_entry2; 3] {
    let levels = [(0, 1, 1), (place.core_bits, u32::from(place.cores), 2), (0, 0, 0)];
    [0, 1, 2].map(|index| {
        let (shift, logical, kind) = levels[index as usize];
        kvm_cpuid_entry2 {
            function,
            index,
            flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            eax: shift,
            ebx: logical,
            ecx: index | kind << 8,
            edx: place.apic_id.into(),
            ..Default::default()
        }
    })
}

/// Who shares a cache, less one, where CPUID describes caches: those of level 3 the package, others one core.
fn sharing(cache: u32, place: VcpuPlace) -> u32 {
    let level = cache >> 5 & 7;
    if level >= 3 { (1 << place.core_bits) - 1 } else { 0 }
}

fn place_entry(entry: &mut kvm_cpuid_entry2, place: VcpuPlace, tsc_deadline: bool) {
    let (apic_id, cores) = (u32::from(place.apic_id), u32::from(place.cores));
    let core_bits = place.core_bits;
    match entry.function {
        // Features and initial APIC id (bits 31 to 24), logical processors (23 to 16).
        0x1 => {
            // Eight bits hold the count: 256 does not fit, and would carry into the APIC id.
            let logical = (1u32 << core_bits).min(255);
            entry.ebx = (entry.ebx & 0xffff) | apic_id << 24 | logical << 16;
            entry.ecx |= HYPERVISOR | if tsc_deadline { TSC_DEADLINE } else { 0 };
            entry.edx = if cores > 1 { entry.edx | HTT } else { entry.edx & !HTT };
        }
        // Caches: cores in the package less one (31 to 26); who shares the cache (25 to 14).
        0x4 => {
            let sharing = sharing(entry.eax, place);
            entry.eax = (entry.eax & 0x3fff) | sharing << 14 | ((1 << core_bits) - 1) << 26;
        }
        // AMD: the same without the cores.
        0x8000_001d => entry.eax = (entry.eax & !(0xfff << 14)) | sharing(entry.eax, place) << 14,
        // Performance counters are not offered: KVM's emulation of them differs from host to host.
        0xa => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
        // AMD: cores less one (7 to 0), bits of the APIC id (15 to 12).
        0x8000_0008 => entry.ecx = (entry.ecx & !0xf0ff) | (cores.max(1) - 1) | core_bits << 12,
        // AMD: extended APIC id, core, node.
        0x8000_001e => {
            (entry.eax, entry.ebx, entry.ecx) =
                (apic_id, apic_id & ((1 << core_bits) - 1), place.package.into());
        }
        _ => {}
    }
}

/// The number of physical address bits that the leaves promise (leaf 0x8000_0008, EAX, bits 7 to 0); 36 where
/// they do not say, as the manuals have it.
pub fn physical_address_bits(cpuid: &CpuId) -> u8 {
    cpuid
        .as_slice()
        .iter()
        .find(|entry| entry.function == 0x8000_0008)
        .map_or(36, |entry| (entry.eax & 0xff) as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(function: u32, index: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, index, eax: !0, ebx: !0, ecx: !0, edx: !0, ..Default::default() }
    }

    fn one_package(apic_id: u8, cores: u8) -> VcpuPlace {
        let core_bits = u32::from(cores).next_power_of_two().trailing_zeros();
        VcpuPlace { apic_id, package: 0, cores, core_bits }
    }

    #[test]
    fn a_package_ends_where_the_apic_ids_of_its_cores_do() {
        // The second core of the second package of two with 8 ids each.
        let second = VcpuPlace { apic_id: 9, package: 1, cores: 2, core_bits: 3 };
        let placed = |mut entry: kvm_cpuid_entry2| {
            place_entry(&mut entry, second, false);
            entry
        };
        assert_eq!(placed(leaf(0x1, 0)).ebx, 0x0908_ffff);
        let [_, cores, _] = extended_topology(0xb, second);
        assert_eq!((cores.eax, cores.ebx, cores.edx), (3, 2, 9));
        assert_eq!(placed(leaf(0x8000_0008, 0)).ecx & 0xf0ff, 0x3001);
        let amd = placed(leaf(0x8000_001e, 0));
        assert_eq!((amd.eax, amd.ebx, amd.ecx), (9, 1, 1));
        // Caches of level 3 are the package's, of level 1 the core's; who shares them are bits 25 to 14.
        for function in [0x4, 0x8000_001d] {
            for (level, sharing) in [(1, 0), (3, 7)] {
                let cache = kvm_cpuid_entry2 { eax: 0xfff << 14 | level << 5, ..leaf(function, 0) };
                let eax = placed(cache).eax;
                assert_eq!((eax >> 14 & 0xfff, eax >> 5 & 7), (sharing, level), "{function:#x}");
            }
        }
    }

    fn placed(function: u32, subleaf: u32, index: u8, count: u8) -> kvm_cpuid_entry2 {
        // As a newer host returns it: of the extended topology subleaf 0 alone.
        let supported =
            CpuId::from_entries(&[leaf(function, if function == 0xb { 0 } else { subleaf })]).unwrap();
        let placed = place(&supported, one_package(index, count), true);
        *placed.as_slice().iter().find(|entry| entry.index == subleaf).unwrap()
    }

    #[test]
    fn apic_ids_and_counts_are_the_vcpus_own() {
        assert_eq!(placed(0x1, 0, 3, 4).ebx, 0x0304_ffff);
        assert_eq!(placed(0x1, 0, 2, 3).ebx, 0x0204_ffff);
        assert_eq!(placed(0x1, 0, 252, 254).ebx, 0xfcff_ffff, "256 siblings must not carry into the id");
        assert_eq!(placed(0xb, 1, 3, 4).edx, 3);
        assert_eq!(placed(0x8000_001e, 0, 3, 4).eax, 3);
        assert_eq!(placed(0x8000_0008, 0, 3, 4).ecx & 0xf0ff, 0x2003);
    }

    #[test]
    fn a_single_vcpu_has_no_siblings() {
        assert_eq!(placed(0x1, 0, 0, 1).edx & HTT, 0);
        assert_eq!(placed(0x1, 0, 0, 2).edx & HTT, HTT);
        assert_eq!(placed(0xb, 1, 0, 1).eax, 0);
        assert_eq!(placed(0x4, 0, 0, 1).eax >> 26, 0);
    }

    #[test]
    fn extended_topology_ends_after_the_cores() {
        assert_eq!(
            (placed(0xb, 0, 1, 4).eax, placed(0xb, 0, 1, 4).ebx, placed(0xb, 0, 1, 4).ecx),
            (0, 1, 0x100)
        );
        assert_eq!(
            (placed(0xb, 1, 1, 4).eax, placed(0xb, 1, 1, 4).ebx, placed(0xb, 1, 1, 4).ecx),
            (2, 4, 0x201)
        );
        assert_eq!((placed(0xb, 2, 1, 4).ebx, placed(0xb, 2, 1, 4).ecx), (0, 2));
    }

    #[test]
    fn a_topology_leaf_that_the_host_lacks_is_not_made_up() {
        let supported = CpuId::from_entries(&[leaf(0xb, 0)]).unwrap();
        let placed = place(&supported, one_package(0, 2), false);
        let functions: Vec<_> = placed.as_slice().iter().map(|entry| (entry.function, entry.index)).collect();
        assert_eq!(functions, [(0xb, 0), (0xb, 1), (0xb, 2)]);
    }

    #[test]
    fn the_deadline_timer_is_offered_only_where_kvm_has_it() {
        let mut entry = kvm_cpuid_entry2 { function: 1, ..Default::default() };
        place_entry(&mut entry, one_package(0, 1), false);
        assert_eq!(entry.ecx, HYPERVISOR);
        place_entry(&mut entry, one_package(0, 1), true);
        assert_eq!(entry.ecx, HYPERVISOR | TSC_DEADLINE);
    }

    #[test]
    fn the_address_width_has_a_default() {
        assert_eq!(physical_address_bits(&CpuId::new(0).unwrap()), 36);
        let wide = kvm_cpuid_entry2 { function: 0x8000_0008, eax: 0x3028, ..Default::default() };
        assert_eq!(physical_address_bits(&CpuId::from_entries(&[wide]).unwrap()), 40);
    }
}
