//! DIMM devices in the DSDT, for memory that is plugged while the guest runs.

use acpi_tables::Aml;
use acpi_tables::aml::{
    Acquire, Add, AddressSpace, AddressSpaceCacheable, And, Arg, CreateQWordField, Device,
    EISAName, Equal, Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, If,
    LessThan, Local, Method, MethodCall, Mutex, Name, Notify, ONE, OpRegion, OpRegionSpace, Or,
    Release, ResourceTemplate, Return, ShiftLeft, Store, Subtract, While, ZERO,
};
use foreshore_devices::memory::dimms::MAX_DIMMS;
use foreshore_devices::memory::layout::HOTPLUG_START;

use super::{PRESENT, Raw, path};
use crate::acpi::dimms::{DIMMS_LEN, DIMMS_OFFSET};

/// "Device check": a device may have been added (ACPI 6.5, table 5.162).
const NOTIFY_DEVICE_CHECK: u8 = 1;
/// AML method that notifies the guest of added DIMMs.
pub(super) const CHANGED: &str = "\\_SB_.MHPC.MSCN";
const LOCK: &str = "MLCK";
const FOR_EVER: u16 = 0xffff;
/// Offsets of bounds and length in an address space descriptor with 64-bit addresses (ACPI 6.5,
/// 6.4.3.5.1).
const MIN_AT: u8 = 14;
const MAX_AT: u8 = 22;
const LEN_AT: u8 = 38;

/// AML container with one device for each possible DIMM. DIMMs with memory report that they are
/// present (Linux drivers/acpi/acpi_memhotplug.c).
pub(super) fn controller(sink: &mut Vec<u8>) {
    let mut body = Vec::new();
    registers(&mut body);
    Mutex::new(path(LOCK), 0).to_aml_bytes(&mut body);
    status(&mut body);
    resources(&mut body);
    proximity(&mut body);
    changed(&mut body);
    (0..MAX_DIMMS).for_each(|index| dimm(&mut body, index));
    Device::new(
        path("MHPC"),
        vec![
            &Name::new(path("_HID"), &EISAName::new("PNP0A06")),
            &Name::new(path("_UID"), &"Memory that comes"),
            &Raw(body),
        ],
    )
    .to_aml_bytes(sink);
}

fn registers(sink: &mut Vec<u8>) {
    let start =
        u32::try_from(HOTPLUG_START + DIMMS_OFFSET).expect("a device of the layout below 4 GiB");
    let len = u32::try_from(DIMMS_LEN).expect("a few registers");
    OpRegion::new(path("MREG"), OpRegionSpace::SystemMemory, &start, &len).to_aml_bytes(sink);
    let names = [*b"MSEL", *b"MBSL", *b"MBSH", *b"MLNL", *b"MLNH", *b"MPRX", *b"MSTS", *b"MNXT"];
    Field::new(
        path("MREG"),
        FieldAccessType::DWord,
        FieldLockRule::NoLock,
        FieldUpdateRule::WriteAsZeroes,
        names.map(|name| FieldEntry::Named(name, 32)).to_vec(),
    )
    .to_aml_bytes(sink);
}

/// AML method that takes the index of a DIMM as its argument. `body` leaves the result in Local0.
fn of_a_dimm(sink: &mut Vec<u8>, name: &str, body: &[u8]) {
    Method::new(
        path(name),
        1,
        // Serialized because the method may create names. Two threads must not create them
        // concurrently.
        true,
        vec![
            &Acquire::new(path(LOCK), FOR_EVER),
            &Store::new(&path("MSEL"), &Arg(0)),
            &Raw(body.to_vec()),
            &Release::new(path(LOCK)),
            &Return::new(&Local(0)),
        ],
    )
    .to_aml_bytes(sink);
}

fn status(sink: &mut Vec<u8>) {
    let mut body = Vec::new();
    Store::new(&Local(0), &ZERO).to_aml_bytes(&mut body);
    And::new(&Local(1), &path("MSTS"), &ONE).to_aml_bytes(&mut body);
    If::new(&Equal::new(&Local(1), &ONE), vec![&Store::new(&Local(0), &PRESENT)])
        .to_aml_bytes(&mut body);
    of_a_dimm(sink, "MSTA", &body);
}

/// Memory descriptor with the bounds that the DIMM's registers report.
fn resources(sink: &mut Vec<u8>) {
    let memory =
        AddressSpace::new_memory(AddressSpaceCacheable::Cacheable, true, 0u64, u64::MAX - 1, None);
    let mut body = Vec::new();
    Name::new(path("MR64"), &ResourceTemplate::new(vec![&memory])).to_aml_bytes(&mut body);
    for (name, at) in [("MINA", MIN_AT), ("MAXA", MAX_AT), ("LENA", LEN_AT)] {
        CreateQWordField::new(&path(name), &path("MR64"), &at).to_aml_bytes(&mut body);
    }
    let both = |body: &mut Vec<u8>, name: &str, low: &str, high: &str| {
        ShiftLeft::new(&Local(1), &path(high), &32u8).to_aml_bytes(body);
        Or::new(&path(name), &Local(1), &path(low)).to_aml_bytes(body);
    };
    both(&mut body, "MINA", "MBSL", "MBSH");
    both(&mut body, "LENA", "MLNL", "MLNH");
    Add::new(&Local(1), &path("MINA"), &path("LENA")).to_aml_bytes(&mut body);
    Subtract::new(&path("MAXA"), &Local(1), &ONE).to_aml_bytes(&mut body);
    Store::new(&Local(0), &path("MR64")).to_aml_bytes(&mut body);
    of_a_dimm(sink, "MCRS", &body);
}

fn proximity(sink: &mut Vec<u8>) {
    let mut body = Vec::new();
    Store::new(&Local(0), &path("MPRX")).to_aml_bytes(&mut body);
    of_a_dimm(sink, "MPXM", &body);
}

/// Notifies the guest of each added DIMM. Reading the register removes one DIMM from the list.
fn changed(sink: &mut Vec<u8>) {
    let mut notify = Vec::new();
    for index in 0..MAX_DIMMS {
        If::new(
            &Equal::new(&Local(0), &(index as u32)),
            vec![&Notify::new(&path(&name(index)), &NOTIFY_DEVICE_CHECK)],
        )
        .to_aml_bytes(&mut notify);
    }
    let next = path("MNXT");
    Method::new(
        path("MSCN"),
        0,
        true,
        vec![
            &Store::new(&Local(0), &next),
            &While::new(
                &LessThan::new(&Local(0), &(MAX_DIMMS as u32)),
                vec![&Raw(notify), &Store::new(&Local(0), &next)],
            ),
        ],
    )
    .to_aml_bytes(sink);
}

fn dimm(sink: &mut Vec<u8>, index: usize) {
    let number = index as u32;
    let ask = |name: &str| {
        let mut body = Vec::new();
        Return::new(&MethodCall::new(path(name), vec![&number])).to_aml_bytes(&mut body);
        Raw(body)
    };
    Device::new(
        path(&name(index)),
        vec![
            &Name::new(path("_HID"), &EISAName::new("PNP0C80")),
            &Name::new(path("_UID"), &number),
            &Method::new(path("_STA"), 0, false, vec![&ask("MSTA")]),
            &Method::new(path("_CRS"), 0, false, vec![&ask("MCRS")]),
            &Method::new(path("_PXM"), 0, false, vec![&ask("MPXM")]),
        ],
    )
    .to_aml_bytes(sink);
}

fn name(index: usize) -> String {
    format!("M{index:03X}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(aml: &[u8], needle: &[u8]) -> usize {
        aml.windows(needle.len()).filter(|window| *window == needle).count()
    }

    #[test]
    fn every_dimm_has_a_device_and_a_notification() {
        let mut aml = Vec::new();
        controller(&mut aml);
        for method in [b"_STA", b"_CRS", b"_PXM"] {
            assert_eq!(count(&aml, method), MAX_DIMMS);
        }
        // AML of Notify (M03F, 1).
        assert_eq!(
            (count(&aml, b"M03F"), count(&aml, b"\x86M03F\x01"), count(&aml, b"M040")),
            (2, 1, 0)
        );
        // DIMMs have no `_EJ0` because they are never removed.
        assert_eq!(count(&aml, b"_EJ0"), 0);
        // Reading the register removes an entry, so the method reads it once before the loop and
        // once at the end of each pass.
        assert_eq!(count(&aml, b"\x70MNXT\x60"), 2);
    }

    #[test]
    fn descriptor_fields_have_the_offsets_that_aml_writes() {
        let memory =
            AddressSpace::new_memory(AddressSpaceCacheable::Cacheable, true, 1u64, 0x12u64, None);
        let mut bytes = Vec::new();
        memory.to_aml_bytes(&mut bytes);
        let at = |at: u8| u64::from_le_bytes(*bytes[usize::from(at)..].first_chunk().unwrap());
        assert_eq!([MIN_AT, MAX_AT, LEN_AT].map(at), [1, 0x12, 0x12]);
    }
}
