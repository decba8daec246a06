//! What CPUID tells the guest: what KVM can do, less what the guest is not to see, with each vCPU's
//! place in the topology filled in. Pure.
//!
//! KVM_GET_SUPPORTED_CPUID returns the host CPU's own topology, which is that of whichever CPU the
//! call ran on: every field that holds an APIC id or a count of cores must be replaced, or Linux
//! sees CPUs in the wrong packages.
//!
//! An APIC id is, from its lowest bits on, the number of a thread in its core, of the core in its
//! die, of the die in its package, and of the package.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

use super::packages::{Shape, VcpuPlace};

/// Leaf 1, ECX: VMX.
const VMX: u32 = 1 << 5;
/// Leaf 1, ECX: what performance counters can do is in an MSR.
const PDCM: u32 = 1 << 15;
/// Leaf 1, ECX: the local APIC timer takes deadlines in TSC ticks.
const TSC_DEADLINE: u32 = 1 << 24;
/// Leaf 1, ECX: there is a hypervisor.
const HYPERVISOR: u32 = 1 << 31;
/// Leaf 1, EDX: the count of logical processors in EBX is valid.
const HTT: u32 = 1 << 28;
/// Leaf 7, subleaf 0, EDX: AMX with its two kinds of numbers.
const AMX: u32 = 1 << 22 | 1 << 24 | 1 << 25;
/// Subleaf 1, EAX and EDX: two more.
const AMX_FP16: u32 = 1 << 21;
const AMX_COMPLEX: u32 = 1 << 8;
/// Leaf 0x8000_0001, ECX: SVM.
const SVM: u32 = 1 << 2;
/// Leaf 0x8000_0001, ECX: performance counters of the core, the north bridge and the last cache.
const PERFORMANCE_COUNTERS: u32 = 1 << 23 | 1 << 24 | 1 << 28;

/// The leaves of the extended topology (Intel SDM 2A, CPUID). The second has dies, the first has
/// not.
const TOPOLOGY: u32 = 0xb;
const TOPOLOGY_WITH_DIES: u32 = 0x1f;
/// Where hypervisors' leaves begin: EAX is the last of them.
const HYPERVISOR_LEAVES: u32 = 0x4000_0000;
/// EAX: kHz of the TSC, EBX: kHz of the APIC's timer. VMware's, and others' since.
const FREQUENCIES: u32 = 0x4000_0010;
/// KVM's APIC timers count nanoseconds.
const APIC_TIMER_KHZ: u32 = 1_000_000;

/// Levels of the extended topology: their numbers in ECX.
const THREADS: u32 = 1;
const CORES: u32 = 2;
const DIES: u32 = 5;

/// What is the same for every vCPU of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Traits {
    /// Whether KVM emulates the APIC timer's deadline mode (KVM_CAP_TSC_DEADLINE_TIMER); the
    /// supported leaves never say so.
    pub tsc_deadline: bool,
    /// How fast the TSC runs, if KVM says so.
    pub tsc_khz: Option<u32>,
    /// Whether the guest may run guests.
    pub nested: bool,
    /// The most bits that a physical address has.
    pub max_phys_bits: u8,
    /// Whether the guest may use AMX: KVM offers it also where its state is not permitted.
    pub amx: bool,
}

/// The leaves that KVM supports, with what depends on the VM and the vCPU filled in.
///
/// Of the extended topology, newer hosts return subleaf 0 alone, and that zeroed: its subleaves are
/// written here. The leaf with dies stays out where neither the host has it nor the guest any dies.
pub(crate) fn place(supported: &CpuId, place: VcpuPlace, traits: Traits) -> CpuId {
    let has = |function| supported.as_slice().iter().any(|entry| entry.function == function);
    let with_dies = has(TOPOLOGY_WITH_DIES) || (has(TOPOLOGY) && place.shape.dies.count > 1);
    let is_written_here = |entry: &kvm_cpuid_entry2| {
        [TOPOLOGY, TOPOLOGY_WITH_DIES, FREQUENCIES].contains(&entry.function)
    };
    let mut entries: Vec<_> =
        supported.as_slice().iter().copied().filter(|entry| !is_written_here(entry)).collect();
    for entry in &mut entries {
        place_entry(entry, place);
        restrict_entry(entry, traits);
        if entry.function == 0 && with_dies {
            entry.eax = entry.eax.max(TOPOLOGY_WITH_DIES);
        }
    }
    if has(TOPOLOGY) {
        entries.extend(extended_topology(TOPOLOGY, place, false));
    }
    if with_dies {
        entries.extend(extended_topology(TOPOLOGY_WITH_DIES, place, true));
    }
    if let Some(khz) = traits.tsc_khz {
        add_frequencies(&mut entries, khz);
    }
    CpuId::from_entries(&entries).expect("KVM takes more leaves than it supports")
}

/// For guests that would measure how fast their TSC runs.
fn add_frequencies(entries: &mut Vec<kvm_cpuid_entry2>, tsc_khz: u32) {
    let Some(first) = entries.iter_mut().find(|entry| entry.function == HYPERVISOR_LEAVES) else {
        return;
    };
    first.eax = first.eax.max(FREQUENCIES);
    entries.push(kvm_cpuid_entry2 {
        function: FREQUENCIES,
        eax: tsc_khz,
        ebx: APIC_TIMER_KHZ,
        ..Default::default()
    });
}

/// A subleaf for each level, then the end: how far the id is shifted to be the next level's, and
/// how many threads a unit of that has.
fn extended_topology(function: u32, place: VcpuPlace, with_dies: bool) -> Vec<kvm_cpuid_entry2> {
    let Shape { threads, cores, dies } = place.shape;
    let (in_core, in_die) =
        (u32::from(threads.count), u32::from(threads.count) * u32::from(cores.count));
    let mut levels = vec![(place.shape.core_shift(), in_core, THREADS)];
    if with_dies && dies.count > 1 {
        levels.push((place.shape.die_shift(), in_die, CORES));
        levels.push((place.shape.package_shift(), place.shape.logical(), DIES));
    } else {
        levels.push((place.shape.package_shift(), place.shape.logical(), CORES));
    }
    levels.push((0, 0, 0));
    (0..)
        .zip(levels)
        .map(|(index, (shift, logical, kind))| kvm_cpuid_entry2 {
            function,
            index,
            flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            eax: shift,
            ebx: logical,
            ecx: index | kind << 8,
            edx: place.apic_id.into(),
            ..Default::default()
        })
        .collect()
}

/// Who shares a cache, less one, where CPUID describes caches: those of level 3 the die, others one
/// core. In ids, not in those that are there.
fn sharing(cache: u32, shape: Shape) -> u32 {
    let level = cache >> 5 & 7;
    let shift = if level >= 3 { shape.die_shift() } else { shape.core_shift() };
    (1 << shift) - 1
}

fn place_entry(entry: &mut kvm_cpuid_entry2, place: VcpuPlace) {
    let VcpuPlace { apic_id, package, shape } = place;
    let (apic_id, logical) = (u32::from(apic_id), shape.logical());
    let (core_shift, package_shift) = (shape.core_shift(), shape.package_shift());
    match entry.function {
        // Initial APIC id (bits 31 to 24), logical processors (23 to 16).
        0x1 => {
            // Eight bits hold the count: 256 does not fit, and would carry into the APIC id.
            let ids = (1u32 << package_shift).min(255);
            entry.ebx = (entry.ebx & 0xffff) | apic_id << 24 | ids << 16;
            entry.edx = if logical > 1 { entry.edx | HTT } else { entry.edx & !HTT };
        }
        // Caches: cores in the package less one (31 to 26); who shares the cache (25 to 14).
        0x4 => {
            let cores = (1u32 << (package_shift - core_shift)).min(64);
            entry.eax = (entry.eax & 0x3fff) | sharing(entry.eax, shape) << 14 | (cores - 1) << 26;
        }
        // AMD: the same without the cores.
        0x8000_001d => entry.eax = (entry.eax & !(0xfff << 14)) | sharing(entry.eax, shape) << 14,
        // AMD: threads of the package less one (7 to 0), bits of the APIC id that tell them apart
        // (15 to 12).
        0x8000_0008 => entry.ecx = (entry.ecx & !0xf0ff) | (logical - 1) | package_shift << 12,
        // AMD: extended APIC id; core in the package, and threads in the core less one (15 to 8);
        // node, and nodes in the package less one (10 to 8). A node of AMD's is a die.
        0x8000_001e => {
            let core = (apic_id & ((1 << package_shift) - 1)) >> core_shift;
            let dies = u32::from(shape.dies.count);
            let die = (apic_id >> shape.die_shift()) & ((1 << shape.dies.bits) - 1);
            let node = u32::from(package) * dies + die;
            (entry.eax, entry.ebx, entry.ecx) = (
                apic_id,
                core | (u32::from(shape.threads.count) - 1) << 8,
                node & 0xff | (dies.min(8) - 1) << 8,
            );
        }
        _ => {}
    }
}

fn restrict_entry(entry: &mut kvm_cpuid_entry2, traits: Traits) {
    match entry.function {
        0x1 => {
            entry.ecx |= HYPERVISOR | if traits.tsc_deadline { TSC_DEADLINE } else { 0 };
            if !traits.nested {
                entry.ecx &= !VMX;
            }
            entry.ecx &= !PDCM;
        }
        0x7 if !traits.amx && entry.index == 0 => entry.edx &= !AMX,
        0x7 if !traits.amx && entry.index == 1 => {
            entry.eax &= !AMX_FP16;
            entry.edx &= !AMX_COMPLEX;
        }
        // Performance counters are not offered: KVM's emulation of them differs from host to host.
        // Intel's leaf, and AMD's.
        0xa | 0x8000_0022 => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
        0x8000_0001 => entry.ecx &= !(PERFORMANCE_COUNTERS | if traits.nested { 0 } else { SVM }),
        // AMD: what SVM can do.
        0x8000_000a if !traits.nested => {
            (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0);
        }
        0x8000_0008 => {
            let bits = (entry.eax & 0xff).min(traits.max_phys_bits.into());
            entry.eax = (entry.eax & !0xff) | bits;
        }
        _ => {}
    }
}

/// Whether the leaves have AMX.
pub(crate) fn has_amx(cpuid: &CpuId) -> bool {
    let features = cpuid.as_slice().iter().find(|entry| (entry.function, entry.index) == (0x7, 0));
    features.is_some_and(|entry| entry.edx & AMX != 0)
}

/// The number of physical address bits that the leaves promise (leaf 0x8000_0008, EAX, bits 7 to
/// 0); 36 where they do not say, as the manuals have it.
pub(crate) fn physical_address_bits(cpuid: &CpuId) -> u8 {
    cpuid
        .as_slice()
        .iter()
        .find(|entry| entry.function == 0x8000_0008)
        .map_or(36, |entry| (entry.eax & 0xff) as u8)
}

#[cfg(test)]
#[path = "cpuid_tests.rs"]
mod tests;
