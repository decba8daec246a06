//! CPUID leaves of the guest. They consist of the leaves that KVM supports, without features hidden
//! from the guest, and with the place of each vCPU in the topology.
//!
//! KVM_GET_SUPPORTED_CPUID returns the host's topology as seen by the CPU that makes the call.
//! Every field that contains an APIC ID or a number of cores must therefore be replaced. Otherwise
//! Linux assigns CPUs to the wrong packages.
//!
//! An APIC ID consists of four numbers. From the lowest bits to the highest, they are the thread in
//! its core, the core in its die, the die in its package, and the package.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

use super::cpu_topology::{Shape, VcpuPlace};

const VMX: u32 = 1 << 5;
/// Leaf 1, ECX: an MSR reports the capabilities of performance counters.
const PDCM: u32 = 1 << 15;
/// Leaf 1, ECX: the local APIC timer supports deadlines in TSC ticks.
const TSC_DEADLINE: u32 = 1 << 24;
/// Leaf 1, ECX: a hypervisor is present.
const HYPERVISOR: u32 = 1 << 31;
/// Leaf 1, EDX: the number of logical processors in EBX is valid.
const HTT: u32 = 1 << 28;
/// Leaf 7, subleaf 0, EDX: AMX and two of its data types.
const AMX: u32 = 1 << 22 | 1 << 24 | 1 << 25;
/// Leaf 7, subleaf 1, EAX and EDX: two further data types of AMX.
const AMX_FP16: u32 = 1 << 21;
const AMX_COMPLEX: u32 = 1 << 8;
const SVM: u32 = 1 << 2;
/// Leaf 0x8000_0001, ECX: performance counters of the core, the north bridge and the last-level
/// cache.
const PERFORMANCE_COUNTERS: u32 = 1 << 23 | 1 << 24 | 1 << 28;

/// Extended topology leaves (Intel SDM 2A, CPUID). Only the second leaf includes dies.
const TOPOLOGY: u32 = 0xb;
const TOPOLOGY_WITH_DIES: u32 = 0x1f;
/// First leaf reserved for hypervisors. Its EAX is the number of the last such leaf.
const HYPERVISOR_LEAVES: u32 = 0x4000_0000;
/// EAX: frequency of the TSC in kHz. EBX: frequency of the APIC timer in kHz. VMware defined the
/// leaf, and other hypervisors adopted it.
const FREQUENCIES: u32 = 0x4000_0010;
/// KVM's APIC timers count nanoseconds.
const APIC_TIMER_KHZ: u32 = 1_000_000;

/// Level types of the extended topology, in ECX.
const THREADS: u32 = 1;
const CORES: u32 = 2;
const DIES: u32 = 5;

/// Properties that all vCPUs of a VM have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Traits {
    /// True if KVM emulates the deadline mode of the APIC timer (KVM_CAP_TSC_DEADLINE_TIMER). The
    /// leaves that KVM returns as supported never include it.
    pub tsc_deadline: bool,
    /// Frequency of the TSC, if KVM reports it.
    pub tsc_khz: Option<u32>,
    /// True if the guest may run nested guests.
    pub nested: bool,
    /// Maximum number of physical address bits.
    pub max_phys_bits: u8,
    /// True if the guest may use AMX. KVM reports AMX even if the process has no permission to use
    /// its state.
    pub amx: bool,
}

/// CPUID leaves of one vCPU: the leaves that KVM supports, with the fields of the VM and of the
/// vCPU filled in.
///
/// The extended topology is built from scratch, because newer hosts return only its subleaf 0,
/// filled with zeros. The leaf that includes dies is omitted if the host does not have it and the
/// guest has one die per package.
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

/// Adds the leaf of frequencies, so that guests need not measure the TSC.
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

/// Extended topology: a subleaf for each level, followed by an empty subleaf.
///
/// Each subleaf contains the number of threads in a unit of its level. It also contains the shift
/// that turns an APIC ID into an ID of the next level.
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

/// Number of APIC IDs that share a cache, minus one, as CPUID describes caches. The threads in a
/// die share caches from level 3 on, and the threads in a core share the lower levels. Unused IDs
/// are counted as well.
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
        // Initial APIC ID (bits 31 to 24) and number of logical processors (bits 23 to 16).
        0x1 => {
            // The field has eight bits, so a value of 256 would carry into the APIC ID.
            let ids = (1u32 << package_shift).min(255);
            entry.ebx = (entry.ebx & 0xffff) | apic_id << 24 | ids << 16;
            entry.edx = if logical > 1 { entry.edx | HTT } else { entry.edx & !HTT };
        }
        // Caches: number of cores in the package minus one (bits 31 to 26), and number of IDs that
        // share the cache minus one (bits 25 to 14).
        0x4 => {
            let cores = (1u32 << (package_shift - core_shift)).min(64);
            entry.eax = (entry.eax & 0x3fff) | sharing(entry.eax, shape) << 14 | (cores - 1) << 26;
        }
        // AMD leaf: same as leaf 4, but without the number of cores.
        0x8000_001d => entry.eax = (entry.eax & !(0xfff << 14)) | sharing(entry.eax, shape) << 14,
        // AMD leaf: number of threads in the package minus one (bits 7 to 0), and number of APIC ID
        // bits that identify a thread (bits 15 to 12).
        0x8000_0008 => entry.ecx = (entry.ecx & !0xf0ff) | (logical - 1) | package_shift << 12,
        // AMD leaf: extended APIC ID; core in the package, and number of threads in the core minus
        // one (bits 15 to 8); node, and number of nodes in the package minus one (bits 10 to 8).
        // AMD's term for a die is node.
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
        // Performance counters are hidden, because KVM's emulation of them differs between hosts.
        // One leaf is Intel's, the other AMD's.
        0xa | 0x8000_0022 => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
        0x8000_0001 => entry.ecx &= !(PERFORMANCE_COUNTERS | if traits.nested { 0 } else { SVM }),
        // AMD leaf: features of SVM.
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

/// Returns true if the CPUID leaves include AMX.
pub(crate) fn has_amx(cpuid: &CpuId) -> bool {
    let features = cpuid.as_slice().iter().find(|entry| (entry.function, entry.index) == (0x7, 0));
    features.is_some_and(|entry| entry.edx & AMX != 0)
}

/// Number of physical address bits according to the leaves (0x8000_0008, EAX, bits 7 to 0). Without
/// that leaf, the number is 36, as the manuals specify.
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
