//! NVDIMM Firmware Interface Table, and the devices of NVDIMMs in the DSDT.
//!
//! Linux (drivers/acpi/nfit/core.c) accepts a DIMM only if its range, mapping, control region and
//! child of the root device match. A structure of an unexpected length fails the whole table.
//!
//! Each DIMM has a `_DSM` of the family for virtual NVDIMMs. Its only function reports health.
//! DIMMs have no labels: the `_DSM` has no label functions, and `_LSI` and `_LSR` are absent. Linux
//! then creates a namespace of the whole range and finds the BTT in it. With uninitialized labels,
//! the namespace would be empty.

use acpi_tables::Aml;
use acpi_tables::aml::{
    Arg, BufferData, CreateDWordField, Device, Equal, Field, FieldAccessType, FieldEntry,
    FieldLockRule, FieldUpdateRule, If, Local, Method, Name, OpRegion, OpRegionSpace, Return,
    Store, Uuid,
};
use foreshore_devices::memory::layout::NVDIMM_HEALTH_REGISTER_LEN;
use foreshore_devices::nvdimm::Nvdimm;
use zerocopy::{Immutable, IntoBytes};

use super::dsdt::{Raw, path};
use super::{AcpiError, bytes_of, table};

/// "Byte addressable persistent memory" (ACPI 6.5, 5.2.25.2).
const PERSISTENT_MEMORY: &str = "66F0D379-B4F3-4074-AC43-0D3318B78CDB";
/// Command set "_DSM for Virtual NVDIMMs" (UEFI's list of region format interface codes, 0x1901).
/// Linux calls it NVDIMM_FAMILY_HYPERV.
const VIRTUAL_NVDIMM: &str = "5746C5F2-A9A2-4264-AD0E-E4DDC9E09E80";
const REVISION: u8 = 1;
const PAGE_BYTES: u64 = 4096;

/// System Physical Address Range Structure (ACPI 6.5, table 5.144) without the location cookie.
#[derive(IntoBytes, Immutable)]
#[repr(C, packed)]
struct AddressRange {
    kind: u16,
    length: u16,
    range_index: u16,
    flags: u16,
    reserved: u32,
    proximity_domain: u32,
    guid: [u8; 16],
    start: u64,
    size_bytes: u64,
    memory_attributes: u64,
}

/// NVDIMM Region Mapping Structure (ACPI 6.5, table 5.145).
#[derive(IntoBytes, Immutable)]
#[repr(C, packed)]
struct RegionMapping {
    kind: u16,
    length: u16,
    device_handle: u32,
    physical_id: u16,
    region_id: u16,
    range_index: u16,
    control_region_index: u16,
    region_size_bytes: u64,
    region_offset: u64,
    physical_address_base: u64,
    interleave_index: u16,
    interleave_ways: u16,
    state_flags: u16,
    reserved: u16,
}

/// NVDIMM Control Region Structure (ACPI 6.5, table 5.149), short form: no block control windows.
#[derive(IntoBytes, Immutable)]
#[repr(C, packed)]
struct ControlRegion {
    kind: u16,
    length: u16,
    index: u16,
    vendor_id: u16,
    device_id: u16,
    revision_id: u16,
    subsystem_vendor_id: u16,
    subsystem_device_id: u16,
    subsystem_revision_id: u16,
    valid_fields: u8,
    manufacturing_location: u8,
    manufacturing_date: u16,
    reserved: u16,
    serial_number: u32,
    interface_code: u16,
    windows: u16,
}

/// Flush Hint Address Structure (ACPI 6.5, table 5.152) with one address.
#[derive(IntoBytes, Immutable)]
#[repr(C, packed)]
struct FlushHint {
    kind: u16,
    length: u16,
    device_handle: u32,
    count: u16,
    reserved: [u8; 6],
    address: u64,
}

const _: () = assert!(size_of::<AddressRange>() == 56);
const _: () = assert!(size_of::<RegionMapping>() == 48);
const _: () = assert!(size_of::<ControlRegion>() == 32);
const _: () = assert!(size_of::<FlushHint>() == 16 + 8);

/// NVDIMM Firmware Interface Table (ACPI 6.5, 5.2.25).
pub(super) fn nfit(nvdimms: &[Nvdimm]) -> Result<Vec<u8>, AcpiError> {
    // Four reserved bytes extend the header to 40 bytes.
    let mut body = vec![0; 4];
    for (index, nvdimm) in nvdimms.iter().enumerate() {
        let Nvdimm { start, size_bytes, .. } = *nvdimm;
        if size_bytes == 0
            || !size_bytes.is_multiple_of(PAGE_BYTES)
            || !start.is_multiple_of(PAGE_BYTES)
        {
            return Err(AcpiError::BadNvdimm { start, size_bytes });
        }
        append(&mut body, index, nvdimm);
    }
    Ok(table(*b"NFIT", REVISION, &body))
}

/// Handle, range index and control region index of a DIMM. They start at 1, because 0 means "none"
/// in all three.
fn number(index: usize) -> u16 {
    u16::try_from(index + 1).expect("fewer NVDIMMs than the tables have room for")
}

fn append(body: &mut Vec<u8>, index: usize, nvdimm: &Nvdimm) {
    const PROXIMITY_DOMAIN_VALID: u16 = 1 << 1;
    const EFI_MEMORY_WB: u64 = 1 << 3;
    const EFI_MEMORY_NV: u64 = 1 << 15;
    /// Interface code of a virtual NVDIMM. This code requires the `_DSM`.
    const INTERFACE_CODE: u16 = 0x1901;
    /// "Not armed": writes would not persist, so the guest makes the range read-only (ACPI 6.5,
    /// table 5.146).
    const NOT_ARMED: u16 = 1 << 3;
    let number = number(index);
    let range = AddressRange {
        kind: 0,
        length: size_of::<AddressRange>() as u16,
        range_index: number,
        flags: PROXIMITY_DOMAIN_VALID,
        reserved: 0,
        proximity_domain: nvdimm.node,
        guid: guid(PERSISTENT_MEMORY),
        start: nvdimm.start,
        size_bytes: nvdimm.size_bytes,
        memory_attributes: EFI_MEMORY_WB | EFI_MEMORY_NV,
    };
    let mapping = RegionMapping {
        kind: 1,
        length: size_of::<RegionMapping>() as u16,
        device_handle: u32::from(number),
        physical_id: number,
        region_id: 0,
        range_index: number,
        control_region_index: number,
        region_size_bytes: nvdimm.size_bytes,
        region_offset: 0,
        physical_address_base: 0,
        interleave_index: 0,
        interleave_ways: 1,
        state_flags: if nvdimm.read_only { NOT_ARMED } else { 0 },
        reserved: 0,
    };
    let control = ControlRegion {
        kind: 4,
        length: size_of::<ControlRegion>() as u16,
        index: number,
        vendor_id: 0,
        device_id: 0,
        revision_id: 1,
        subsystem_vendor_id: 0,
        subsystem_device_id: 0,
        subsystem_revision_id: 0,
        valid_fields: 0,
        manufacturing_location: 0,
        manufacturing_date: 0,
        reserved: 0,
        serial_number: u32::from(number),
        interface_code: INTERFACE_CODE,
        windows: 0,
    };
    for structure in [range.as_bytes(), mapping.as_bytes(), control.as_bytes()] {
        body.extend_from_slice(structure);
    }
    if nvdimm.flush_hint {
        let hint = FlushHint {
            kind: 6,
            length: size_of::<FlushHint>() as u16,
            device_handle: u32::from(number),
            count: 1,
            reserved: [0; 6],
            address: Nvdimm::flush_hint_address(index),
        };
        body.extend_from_slice(hint.as_bytes());
    }
}

/// GUID in the byte order of firmware: the first three groups are little-endian.
fn guid(text: &str) -> [u8; 16] {
    let aml = bytes_of(&Uuid::new(text));
    *aml.last_chunk().expect("a buffer of 16 bytes")
}

/// NVDIMM root device with a child for each DIMM (ACPI 6.5, 9.19.2 and 9.19.3). Linux ignores a
/// DIMM without a child.
pub(super) fn root_device(sink: &mut Vec<u8>, nvdimms: &[Nvdimm]) {
    let mut children = Vec::new();
    for index in 0..nvdimms.len() {
        let handle = u32::from(number(index));
        let register_bytes = NVDIMM_HEALTH_REGISTER_LEN as u32;
        Device::new(
            path(&format!("N{handle:03X}")),
            vec![
                &Name::new(path("_ADR"), &handle),
                &OpRegion::new(
                    path("HREG"),
                    OpRegionSpace::SystemMemory,
                    &Nvdimm::health_address(index),
                    &register_bytes,
                ),
                &Field::new(
                    path("HREG"),
                    FieldAccessType::DWord,
                    FieldLockRule::NoLock,
                    FieldUpdateRule::Preserve,
                    vec![FieldEntry::Named(*b"HLTH", 8 * register_bytes as usize)],
                ),
                &health_method(),
            ],
        )
        .to_aml_bytes(&mut children);
    }
    Device::new(path("NVDR"), vec![&Name::new(path("_HID"), &"ACPI0012"), &Raw(children)])
        .to_aml_bytes(sink);
}

/// `_DSM` of a DIMM (ACPI 6.5, 9.1.1).
///
/// Function 0 returns the supported functions. Function 1 is Get Health Information. Function 1
/// returns 4 bytes of status, 0 for success, and 4 bytes of health from the DIMM's register.
fn health_method() -> Raw {
    const QUERY: u8 = 0;
    const GET_HEALTH: u8 = 1;
    /// Bit n stands for function n.
    const FUNCTIONS: u8 = 1 << QUERY | 1 << GET_HEALTH;
    const HEALTH_OFFSET: u8 = 4;
    const NOT_SUPPORTED: u8 = 1;
    let (field, answer) = (path("HINF"), Local(0));
    let mut aml = Vec::new();
    Method::new(
        path("_DSM"),
        4,
        // Serialized because the method creates a name. Two threads must not create it
        // concurrently.
        true,
        vec![
            &If::new(
                &Equal::new(&Arg(0), &Uuid::new(VIRTUAL_NVDIMM)),
                vec![
                    &If::new(
                        &Equal::new(&Arg(2), &QUERY),
                        vec![&Return::new(&BufferData::new(vec![FUNCTIONS]))],
                    ),
                    &If::new(
                        &Equal::new(&Arg(2), &GET_HEALTH),
                        vec![
                            &Store::new(&answer, &BufferData::new(vec![0; 8])),
                            &CreateDWordField::new(&field, &answer, &HEALTH_OFFSET),
                            &Store::new(&field, &path("HLTH")),
                            &Return::new(&answer),
                        ],
                    ),
                    &Return::new(&BufferData::new(vec![NOT_SUPPORTED, 0, 0, 0])),
                ],
            ),
            // An unknown command set has no functions, not even the query function.
            &Return::new(&BufferData::new(vec![0])),
        ],
    )
    .to_aml_bytes(&mut aml);
    Raw(aml)
}

#[cfg(test)]
mod tests {
    use foreshore_devices::memory::layout::{
        FLUSH_HINT_LEN, FLUSH_HINT_START, GED_START, MAX_NVDIMMS,
    };

    use super::*;

    fn u64_at(bytes: &[u8], offset: usize) -> u64 {
        u64::from_le_bytes(*bytes[offset..].first_chunk().unwrap())
    }

    fn u16_at(bytes: &[u8], offset: usize) -> u16 {
        u16::from_le_bytes([bytes[offset], bytes[offset + 1]])
    }

    fn nvdimm(flush_hint: bool) -> Nvdimm {
        Nvdimm { start: 1 << 34, size_bytes: 1 << 28, node: 1, flush_hint, read_only: false }
    }

    /// Type and bytes of each structure.
    fn structures(nfit: &[u8]) -> Vec<(u16, &[u8])> {
        let mut rest = &nfit[40..];
        let mut found = Vec::new();
        while !rest.is_empty() {
            let (structure, behind) = rest.split_at(usize::from(u16_at(rest, 2)));
            found.push((u16_at(structure, 0), structure));
            rest = behind;
        }
        found
    }

    #[test]
    fn nfit_structures_have_the_lengths_that_linux_requires() {
        let nfit = nfit(&[nvdimm(true), nvdimm(false)]).unwrap();
        let lengths: Vec<(u16, usize)> = structures(&nfit)
            .into_iter()
            .map(|(kind, structure)| (kind, structure.len()))
            .collect();
        assert_eq!(lengths, [(0, 56), (1, 48), (4, 32), (6, 24), (0, 56), (1, 48), (4, 32)]);
    }

    #[test]
    fn nfit_fields_are_at_the_offsets_of_the_specification() {
        let nfit = nfit(&[nvdimm(false), nvdimm(true)]).unwrap();
        let structures = structures(&nfit);
        let (range, mapping, control, hint) =
            (structures[3].1, structures[4].1, structures[5].1, structures[6].1);
        // Table 5.144: index 4, flags 6, domain 12, GUID 16, base 32, length 40, attributes 48.
        assert_eq!((u16_at(range, 4), u16_at(range, 6), range[12]), (2, 2, 1));
        let guid = [
            0x79, 0xd3, 0xf0, 0x66, 0xf3, 0xb4, 0x74, 0x40, 0xac, 0x43, 0x0d, 0x33, 0x18, 0xb7,
            0x8c,
        ];
        assert_eq!(range[16..31], guid);
        assert_eq!(
            (u64_at(range, 32), u64_at(range, 40), u64_at(range, 48)),
            (1 << 34, 1 << 28, 0x8008)
        );
        // Table 5.145: handle 4, range index 12, control region index 14, size 16, ways 42, flags
        // 44.
        assert_eq!((mapping[4], u16_at(mapping, 12), u16_at(mapping, 14)), (2, 2, 2));
        assert_eq!(
            (u64_at(mapping, 16), u16_at(mapping, 40), u16_at(mapping, 42)),
            (1 << 28, 0, 1)
        );
        assert_eq!(u16_at(mapping, 44), 0);
        // Table 5.149: index 4, serial number 24, interface 28, windows 30.
        assert_eq!(
            (u16_at(control, 4), control[24], u16_at(control, 28), u16_at(control, 30)),
            (2, 2, 0x1901, 0)
        );
        // Table 5.152: handle 4, count 8, addresses from 16.
        assert_eq!(
            (hint[4], u16_at(hint, 8), u64_at(hint, 16)),
            (2, 1, FLUSH_HINT_START + FLUSH_HINT_LEN)
        );
    }

    #[test]
    fn every_nvdimm_has_its_own_range_handle_hint_and_register() {
        let nvdimms: Vec<_> = (0..MAX_NVDIMMS as u64)
            .map(|index| Nvdimm { start: (16 + index) << 30, ..nvdimm(true) })
            .collect();
        let nfit = nfit(&nvdimms).unwrap();
        let of = |kind, at: usize| {
            let structures = structures(&nfit);
            let found = structures.iter().filter(move |(found, _)| *found == kind);
            found
                .map(|(_, structure)| u64_at(&[structure, &[0; 8][..]].concat(), at))
                .collect::<Vec<_>>()
        };
        // Ranges are in the order of the flags. Linux numbers regions, and therefore devices such
        // as /dev/pmem0s, in the order of the ranges.
        assert!(of(0, 32).iter().copied().eq(nvdimms.iter().map(|nvdimm| nvdimm.start)));
        let handles = of(1, 4).into_iter().map(|word| word as u32);
        assert!(handles.eq(1..=MAX_NVDIMMS as u32));
        let hints = of(6, 16);
        assert!(hints.iter().all(|hint| (FLUSH_HINT_START..GED_START).contains(hint)));
        assert!(hints.windows(2).all(|pair| pair[0] + FLUSH_HINT_LEN == pair[1]));
        let mut aml = Vec::new();
        root_device(&mut aml, &nvdimms);
        for index in 0..nvdimms.len() {
            let register = u32::try_from(Nvdimm::health_address(index)).unwrap().to_le_bytes();
            assert_eq!(aml.windows(4).filter(|window| **window == register).count(), 1);
        }
        assert_eq!(aml.windows(4).filter(|window| *window == b"_DSM").count(), MAX_NVDIMMS);
    }

    #[test]
    fn nvdimms_have_no_label_methods() {
        let mut aml = Vec::new();
        root_device(&mut aml, &[nvdimm(true)]);
        for method in [b"_LSI", b"_LSR", b"_LSW", b"_FIT"] {
            assert!(!aml.windows(4).any(|window| window == method));
        }
        // Linux accepts label commands only from Intel's family.
        let intel = bytes_of(&Uuid::new("4309AC30-0D11-11E4-9191-0800200C9A66"));
        let ours = bytes_of(&Uuid::new(VIRTUAL_NVDIMM));
        let has = |uuid: &[u8]| aml.windows(16).any(|window| window == &uuid[uuid.len() - 16..]);
        assert!(has(&ours) && !has(&intel));
    }

    #[test]
    fn read_only_nvdimm_is_not_armed() {
        let nfit = nfit(&[Nvdimm { read_only: true, ..nvdimm(false) }]).unwrap();
        assert_eq!(u16_at(structures(&nfit)[1].1, 44), 1 << 3);
    }

    #[test]
    fn nvdimm_range_of_partial_pages_is_refused() {
        for (start, size_bytes) in [(0x1000, 0), (0x1000, 0x1001), (0x800, 0x1000)] {
            let bad = Nvdimm { start, size_bytes, ..nvdimm(true) };
            assert!(matches!(nfit(&[bad]), Err(AcpiError::BadNvdimm { .. })));
        }
    }
}
