use super::*;
use crate::config::Level;

const TRAITS: Traits =
    Traits { tsc_deadline: false, tsc_khz: None, nested: true, max_phys_bits: 52, amx: false };

fn leaf(function: u32, index: u32) -> kvm_cpuid_entry2 {
    kvm_cpuid_entry2 { function, index, eax: !0, ebx: !0, ecx: !0, edx: !0, ..Default::default() }
}

fn one_package(apic_id: u8, cores: u8) -> VcpuPlace {
    VcpuPlace { apic_id, package: 0, shape: Shape { cores: Level::of(cores), ..Shape::default() } }
}

/// Place of vCPU `index` if the numbers of all levels are powers of two, so that IDs have no gaps.
fn dense(index: u8, threads: u8, cores: u8, dies: u8) -> VcpuPlace {
    let shape =
        Shape { threads: Level::of(threads), cores: Level::of(cores), dies: Level::of(dies) };
    VcpuPlace { apic_id: index, package: index / (threads * cores * dies), shape }
}

fn leaves(
    supported: &[kvm_cpuid_entry2],
    place: VcpuPlace,
    traits: Traits,
) -> Vec<kvm_cpuid_entry2> {
    super::place(&CpuId::from_entries(supported).unwrap(), place, traits).as_slice().to_vec()
}

fn rows(entries: &[kvm_cpuid_entry2]) -> Vec<[u32; 6]> {
    entries.iter().map(|e| [e.function, e.index, e.eax, e.ebx, e.ecx, e.edx]).collect()
}

fn entry(function: u32, index: u32, registers: [u32; 4]) -> kvm_cpuid_entry2 {
    let [eax, ebx, ecx, edx] = registers;
    kvm_cpuid_entry2 { function, index, eax, ebx, ecx, edx, ..Default::default() }
}

#[test]
fn package_fields_count_apic_ids() {
    // Second core in the second package. Each package has two cores and 8 IDs.
    let shape = Shape { cores: Level { count: 2, bits: 3 }, ..Shape::default() };
    let second = VcpuPlace { apic_id: 9, package: 1, shape };
    let placed = |mut entry: kvm_cpuid_entry2| {
        place_entry(&mut entry, second);
        entry
    };
    assert_eq!(placed(leaf(0x1, 0)).ebx, 0x0908_ffff);
    let cores = extended_topology(0xb, second, false)[1];
    assert_eq!((cores.eax, cores.ebx, cores.edx), (3, 2, 9));
    assert_eq!(placed(leaf(0x8000_0008, 0)).ecx & 0xf0ff, 0x3001);
    let amd = placed(leaf(0x8000_001e, 0));
    assert_eq!((amd.eax, amd.ebx, amd.ecx), (9, 1, 1));
    // The threads in a die share the caches of level 3, and the threads in a core share those of
    // level 1. Bits 25 to 14 contain the number of IDs.
    for function in [0x4, 0x8000_001d] {
        for (level, sharing) in [(1, 0), (3, 7)] {
            let cache = kvm_cpuid_entry2 { eax: 0xfff << 14 | level << 5, ..leaf(function, 0) };
            let eax = placed(cache).eax;
            assert_eq!((eax >> 14 & 0xfff, eax >> 5 & 7), (sharing, level), "{function:#x}");
        }
    }
}

fn placed(function: u32, subleaf: u32, index: u8, count: u8) -> kvm_cpuid_entry2 {
    // Newer hosts return only subleaf 0 of the extended topology.
    let supported = [leaf(function, if function == 0xb { 0 } else { subleaf })];
    let placed = leaves(&supported, one_package(index, count), TRAITS);
    *placed.iter().find(|entry| entry.index == subleaf).unwrap()
}

#[test]
fn apic_ids_and_counts_replace_those_of_the_host() {
    assert_eq!(placed(0x1, 0, 3, 4).ebx, 0x0304_ffff);
    assert_eq!(placed(0x1, 0, 2, 3).ebx, 0x0204_ffff);
    assert_eq!(
        placed(0x1, 0, 252, 254).ebx,
        0xfcff_ffff,
        "256 siblings must not carry into the id"
    );
    assert_eq!(placed(0xb, 1, 3, 4).edx, 3);
    assert_eq!(placed(0x8000_001e, 0, 3, 4).eax, 3);
    assert_eq!(placed(0x8000_0008, 0, 3, 4).ecx & 0xf0ff, 0x2003);
}

#[test]
fn single_vcpu_has_no_siblings() {
    assert_eq!(placed(0x1, 0, 0, 1).edx & HTT, 0);
    assert_eq!(placed(0x1, 0, 0, 2).edx & HTT, HTT);
    assert_eq!(placed(0xb, 1, 0, 1).eax, 0);
    assert_eq!(placed(0x4, 0, 0, 1).eax >> 26, 0);
}

/// Leaves from KVM on an Intel host whose topology includes dies. Every field contains a value of
/// the host.
#[test]
fn intel_guest_with_threads_cores_and_dies() {
    let supported = [
        entry(0x0, 0, [0x1f, 0, 0, 0]),
        entry(0x1, 0, [0x606a6, 0x2a40_0800, VMX, 0]),
        entry(0x4, 0, [0xfc00_4121, 0, 0, 0]),
        entry(0x4, 3, [0xfc1f_c163, 0, 0, 0]),
        entry(0xb, 0, [0, 0, 0, 0]),
        entry(0x1f, 0, [0, 0, 0, 0]),
        entry(0x8000_0008, 0, [0x3934, 0, 0, 0]),
    ];
    // Second thread of the first core in the second die of the second package: 1_1_0_1.
    let placed = leaves(&supported, dense(13, 2, 2, 2), TRAITS);
    assert_eq!(
        rows(&placed),
        [
            [0x0, 0, 0x1f, 0, 0, 0],
            [0x1, 0, 0x606a6, 0x0d08_0800, VMX | HYPERVISOR, HTT],
            // Two IDs share a cache of level 1, and all four IDs in the die share one of level 3.
            // The package has 4 cores.
            [0x4, 0, 0x0c00_4121, 0, 0, 0],
            [0x4, 3, 0x0c00_c163, 0, 0, 0],
            [0x8000_0008, 0, 0x3934, 0, 0x3007, 0],
            [0xb, 0, 1, 2, 0x100, 13],
            [0xb, 1, 3, 8, 0x201, 13],
            [0xb, 2, 0, 0, 2, 13],
            [0x1f, 0, 1, 2, 0x100, 13],
            [0x1f, 1, 2, 4, 0x201, 13],
            [0x1f, 2, 3, 8, 0x502, 13],
            [0x1f, 3, 0, 0, 3, 13],
        ]
    );
}

/// Leaves of AMD's first generations, without the leaf that includes dies.
#[test]
fn amd_guest_with_threads_and_cores() {
    let supported = [
        entry(0x0, 0, [0xd, 0, 0, 0]),
        entry(0x1, 0, [0x80_0f12, 0x1208_0800, 0, HTT]),
        entry(0xb, 0, [0, 0, 0, 0]),
        entry(0x8000_0001, 0, [0, 0, SVM | 2, 0]),
        entry(0x8000_0008, 0, [0x3030, 0, 0x700f, 0]),
        entry(0x8000_000a, 0, [1, 0x8000, 0, 0x1bcff]),
        entry(0x8000_001d, 3, [0x1c163, 0, 0, 0]),
        entry(0x8000_001e, 0, [0x12, 0x109, 0x303, 0]),
    ];
    let placed = leaves(&supported, dense(7, 2, 2, 1), TRAITS);
    assert_eq!(
        rows(&placed),
        [
            [0x0, 0, 0xd, 0, 0, 0],
            [0x1, 0, 0x80_0f12, 0x0704_0800, HYPERVISOR, HTT],
            [0x8000_0001, 0, 0, 0, SVM | 2, 0],
            [0x8000_0008, 0, 0x3030, 0, 0x2003, 0],
            [0x8000_000a, 0, 1, 0x8000, 0, 0x1bcff],
            [0x8000_001d, 3, 0xc163, 0, 0, 0],
            // Core 1 in package 1, which is node 1. The core has two threads.
            [0x8000_001e, 0, 7, 0x101, 1, 0],
            [0xb, 0, 1, 2, 0x100, 7],
            [0xb, 1, 2, 4, 0x201, 7],
            [0xb, 2, 0, 0, 2, 7],
        ]
    );
}

#[test]
fn dies_add_their_leaf_if_the_host_has_none() {
    let supported =
        [entry(0x0, 0, [0xd, 0, 0, 0]), entry(0xb, 0, [0; 4]), entry(0x8000_001e, 0, [0; 4])];
    let placed = leaves(&supported, dense(3, 1, 2, 2), TRAITS);
    let functions: Vec<_> = placed.iter().map(|entry| (entry.function, entry.index)).collect();
    assert_eq!(
        functions,
        [
            (0x0, 0),
            (0x8000_001e, 0),
            (0xb, 0),
            (0xb, 1),
            (0xb, 2),
            (0x1f, 0),
            (0x1f, 1),
            (0x1f, 2),
            (0x1f, 3)
        ]
    );
    assert_eq!(placed[0].eax, 0x1f);
    // Node 1 of 2 nodes in the package.
    assert_eq!((placed[1].ebx, placed[1].ecx), (3, 1 | 1 << 8));
}

#[test]
fn die_leaf_is_omitted_without_dies_or_topology_leaf() {
    let supported = [entry(0x0, 0, [0xd, 0, 0, 0]), leaf(0xb, 0)];
    let placed = leaves(&supported, one_package(0, 2), TRAITS);
    let functions: Vec<_> = placed.iter().map(|entry| (entry.function, entry.index)).collect();
    assert_eq!(functions, [(0x0, 0), (0xb, 0), (0xb, 1), (0xb, 2)]);
    assert_eq!(placed[0].eax, 0xd);
    // Processors without the extended topology have neither leaf.
    assert_eq!(leaves(&[leaf(0x4, 0)], dense(0, 1, 2, 2), TRAITS).len(), 1);
}

#[test]
fn nested_off_hides_vmx_and_svm() {
    let supported = [
        leaf(0x1, 0),
        leaf(0x8000_0001, 0),
        entry(0x8000_000a, 0, [1, 2, 3, 4]),
        entry(0x7, 0, [1, 2, 3, 4]),
    ];
    let seen = |nested| rows(&leaves(&supported, one_package(0, 1), Traits { nested, ..TRAITS }));
    let (with, without) = (seen(true), seen(false));
    assert_eq!((with[0][4] & VMX, without[0][4] & VMX), (VMX, 0));
    assert_eq!((with[0][4] & !VMX, without[0][4]), (without[0][4], !VMX & !PDCM));
    assert_eq!((with[1][4] & SVM, without[1][4] & SVM), (SVM, 0));
    assert_eq!(with[1][4] & !SVM, without[1][4]);
    assert_eq!((with[2][2..].to_vec(), without[2][2..].to_vec()), (vec![1, 2, 3, 4], vec![0; 4]));
    assert_eq!(with[3], without[3]);
}

#[test]
fn no_guest_sees_performance_counters() {
    let supported = [leaf(0x1, 0), leaf(0xa, 0), leaf(0x8000_0001, 0), leaf(0x8000_0022, 0)];
    let seen = rows(&leaves(&supported, one_package(0, 1), TRAITS));
    assert_eq!(seen[0][4], !(1 << 15));
    assert_eq!(seen[1], [0xa, 0, 0, 0, 0, 0]);
    assert_eq!(seen[2], [0x8000_0001, 0, !0, !0, !(1 << 23 | 1 << 24 | 1 << 28), !0]);
    assert_eq!(seen[3], [0x8000_0022, 0, 0, 0, 0, 0]);
}

#[test]
fn amx_is_hidden_unless_requested() {
    let supported = [leaf(0x7, 0), leaf(0x7, 1), leaf(0x7, 2)];
    let seen = |amx| rows(&leaves(&supported, one_package(0, 1), Traits { amx, ..TRAITS }));
    let (with, without) = (seen(true), seen(false));
    assert_eq!(with, rows(&supported));
    let gone: Vec<[u32; 6]> = with
        .iter()
        .zip(&without)
        .map(|(a, b)| std::array::from_fn(|nth| a[nth] ^ b[nth]))
        .collect();
    assert_eq!(gone, [[0, 0, 0, 0, 0, AMX], [0, 0, AMX_FP16, 0, 0, AMX_COMPLEX], [0; 6]]);
    let has = |entries: &[kvm_cpuid_entry2]| has_amx(&CpuId::from_entries(entries).unwrap());
    assert_eq!(
        (
            has(&supported),
            has(&[leaf(0x7, 1), leaf(0x1, 0)]),
            has(&[entry(0x7, 0, [!0, !0, !0, !AMX])])
        ),
        (true, false, false)
    );
}

#[test]
fn known_tsc_frequency_is_reported() {
    let signature = entry(0x4000_0000, 0, [0x4000_0001, 0x4b4d_564b, 0x564b_4d56, 0x4d]);
    let traits = Traits { tsc_khz: Some(2_400_000), ..TRAITS };
    let placed = rows(&leaves(&[signature], one_package(0, 1), traits));
    assert_eq!(
        placed,
        [
            [0x4000_0000, 0, 0x4000_0010, 0x4b4d_564b, 0x564b_4d56, 0x4d],
            [0x4000_0010, 0, 2_400_000, 1_000_000, 0, 0],
        ]
    );
    assert_eq!(rows(&leaves(&[signature], one_package(0, 1), TRAITS))[0][2], 0x4000_0001);
    assert!(leaves(&[], one_package(0, 1), traits).is_empty());
}

#[test]
fn tsc_deadline_follows_kvm_capability() {
    let seen = |tsc_deadline| {
        leaves(&[entry(0x1, 0, [0; 4])], one_package(0, 1), Traits { tsc_deadline, ..TRAITS })[0]
            .ecx
    };
    assert_eq!((seen(false), seen(true)), (HYPERVISOR, HYPERVISOR | TSC_DEADLINE));
}

#[test]
fn address_width_is_limited_by_host_and_configuration() {
    assert_eq!(physical_address_bits(&CpuId::new(0).unwrap()), 36);
    let host = [entry(0x8000_0008, 0, [0x3030, 0, 0, 0])];
    for (most, bits) in [(40, 40), (48, 48), (52, 48)] {
        let traits = Traits { max_phys_bits: most, ..TRAITS };
        let placed = super::place(&CpuId::from_entries(&host).unwrap(), one_package(0, 1), traits);
        assert_eq!(physical_address_bits(&placed), bits);
        assert_eq!(placed.as_slice()[0].eax >> 8, 0x30, "virtual addresses are another field");
    }
}
