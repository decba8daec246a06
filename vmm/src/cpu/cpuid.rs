//! What CPUID tells the guest: what KVM can do, with each vCPU's place in the topology filled in.
//!
//! One thread per core, all cores in one package. KVM_GET_SUPPORTED_CPUID returns the host CPU's own topology,
//! which is that of whichever CPU the call ran on: every field that holds an APIC id or a count of cores must be
//! replaced, or Linux sees CPUs in the wrong packages.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

/// Leaf 1, ECX: the local APIC timer takes deadlines in TSC ticks.
const TSC_DEADLINE: u32 = 1 << 24;
/// Leaf 1, ECX: there is a hypervisor.
const HYPERVISOR: u32 = 1 << 31;
/// Leaf 1, EDX: the count of logical processors in EBX is valid.
const HTT: u32 = 1 << 28;

/// Where one vCPU stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its index, which is its APIC id.
    pub index: u8,
    /// How many vCPUs there may ever be.
    pub count: u8,
    /// Whether KVM emulates the APIC timer's deadline mode (KVM_CAP_TSC_DEADLINE_TIMER): the supported leaves
    /// never say so.
    pub tsc_deadline: bool,
}

/// Bits of an APIC id that tell the cores of a package apart.
fn core_bits(count: u8) -> u32 {
    u32::from(count).next_power_of_two().trailing_zeros()
}

/// Replaces what depends on the vCPU in the leaves that KVM supports.
pub fn place(cpuid: &mut CpuId, place: Place) {
    for entry in cpuid.as_mut_slice() {
        place_entry(entry, place);
    }
}

fn place_entry(entry: &mut kvm_cpuid_entry2, place: Place) {
    let (index, count) = (u32::from(place.index), u32::from(place.count));
    match entry.function {
        // Features and initial APIC id (bits 31 to 24), logical processors (23 to 16).
        0x1 => {
            entry.ebx = (entry.ebx & 0xffff) | index << 24 | (1 << core_bits(place.count)) << 16;
            entry.ecx |= HYPERVISOR | if place.tsc_deadline { TSC_DEADLINE } else { 0 };
            entry.edx = if count > 1 { entry.edx | HTT } else { entry.edx & !HTT };
        }
        // Caches: cores in the package less one (31 to 26); who shares the cache (25 to 14): caches of level 3
        // the package, others one core.
        0x4 => {
            let level = entry.eax >> 5 & 7;
            let sharing = if level >= 3 { (1 << core_bits(place.count)) - 1 } else { 0 };
            entry.eax = (entry.eax & 0x3fff) | sharing << 14 | ((1 << core_bits(place.count)) - 1) << 26;
        }
        // Performance counters are not offered: KVM's emulation of them differs from host to host.
        0xa => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
        // Extended topology: subleaf 0 threads, 1 cores, then the end.
        0xb | 0x1f => {
            let (shift, logical, kind) = match entry.index {
                0 => (0, 1, 1),
                1 => (core_bits(place.count), count, 2),
                _ => (0, 0, 0),
            };
            entry.flags = KVM_CPUID_FLAG_SIGNIFCANT_INDEX;
            (entry.eax, entry.ebx, entry.edx) = (shift, logical, index);
            entry.ecx = entry.index & 0xff | kind << 8;
        }
        // AMD: cores less one (7 to 0), bits of the APIC id (15 to 12).
        0x8000_0008 => entry.ecx = (entry.ecx & !0xf0ff) | (count - 1) | core_bits(place.count) << 12,
        // AMD: extended APIC id, core, node.
        0x8000_001e => (entry.eax, entry.ebx, entry.ecx) = (index, index, 0),
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

    fn placed(function: u32, subleaf: u32, index: u8, count: u8) -> kvm_cpuid_entry2 {
        let mut cpuid = CpuId::from_entries(&[leaf(function, subleaf)]).unwrap();
        place(&mut cpuid, Place { index, count, tsc_deadline: true });
        cpuid.as_slice()[0]
    }

    #[test]
    fn apic_ids_and_counts_are_the_vcpus_own() {
        assert_eq!(placed(0x1, 0, 3, 4).ebx, 0x0304_ffff);
        assert_eq!(placed(0x1, 0, 2, 3).ebx, 0x0204_ffff);
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
    fn the_deadline_timer_is_offered_only_where_kvm_has_it() {
        let mut entry = kvm_cpuid_entry2 { function: 1, ..Default::default() };
        place_entry(&mut entry, Place { index: 0, count: 1, tsc_deadline: false });
        assert_eq!(entry.ecx, HYPERVISOR);
        place_entry(&mut entry, Place { index: 0, count: 1, tsc_deadline: true });
        assert_eq!(entry.ecx, HYPERVISOR | TSC_DEADLINE);
    }

    #[test]
    fn the_address_width_has_a_default() {
        assert_eq!(physical_address_bits(&CpuId::new(0).unwrap()), 36);
        let wide = kvm_cpuid_entry2 { function: 0x8000_0008, eax: 0x3028, ..Default::default() };
        assert_eq!(physical_address_bits(&CpuId::from_entries(&[wide]).unwrap()), 40);
    }
}
