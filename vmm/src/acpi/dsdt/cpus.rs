//! Processor devices in the DSDT, and vCPU hotplug.

use acpi_tables::Aml;
use acpi_tables::aml::{
    Acquire, Arg, BufferData, Device, EISAName, Equal, Field, FieldAccessType, FieldEntry,
    FieldLockRule, FieldUpdateRule, If, LessThan, Local, Method, MethodCall, Multiply, Mutex, Name,
    Notify, ONE, OpRegion, OpRegionSpace, Release, Return, Store, While,
};
use foreshore_devices::memory::layout::HOTPLUG_START;

use super::{NOTIFY_DEVICE_CHECK, NOTIFY_EJECT_REQUEST, PRESENT, Raw, path};
use crate::acpi::AcpiInput;
use crate::acpi::hotplug_cpus::{
    CPU_ADDED, CPU_REGISTERS_LEN, CPU_REMOVAL, CPU_SELECT, CPU_STATUS, CPUS_OFFSET,
};

const NO_TIMEOUT: u16 = 0xffff;
/// AML method that notifies the guest of added vCPUs and of requested removals.
pub(super) const CHANGED: &str = "\\_SB_.CPUS.CSCN";

/// AML container with one device for each possible vCPU (ACPI 6.5, 8.4). Registers report which
/// vCPUs are present.
pub(super) fn processors(sink: &mut Vec<u8>, input: &AcpiInput) {
    let mut aml = Vec::new();
    registers(&mut aml);
    methods(&mut aml, input.max_vcpus);
    for index in 0..input.max_vcpus {
        processor(&mut aml, input, index);
    }
    Device::new(
        path("CPUS"),
        vec![
            &Name::new(path("_HID"), &"ACPI0010"),
            &Name::new(path("_CID"), &EISAName::new("PNP0A05")),
            &Raw(aml),
        ],
    )
    .to_aml_bytes(sink);
}

fn registers(sink: &mut Vec<u8>) {
    let start =
        u32::try_from(HOTPLUG_START + CPUS_OFFSET).expect("a device of the layout below 4 GiB");
    let len = u32::try_from(CPU_REGISTERS_LEN).expect("a few registers");
    OpRegion::new(path("CREG"), OpRegionSpace::SystemMemory, &start, &len).to_aml_bytes(sink);
    let fields = [
        (b"CSEL", CPU_SELECT),
        (b"CSTS", CPU_STATUS),
        (b"CADD", CPU_ADDED),
        (b"CREM", CPU_REMOVAL),
    ];
    let fields = (0..).zip(fields).map(|(nth, (name, offset))| {
        assert_eq!(offset, 4 * nth, "fields follow each other");
        FieldEntry::Named(*name, 32)
    });
    Field::new(
        path("CREG"),
        FieldAccessType::DWord,
        FieldLockRule::NoLock,
        FieldUpdateRule::WriteAsZeroes,
        fields.collect(),
    )
    .to_aml_bytes(sink);
    // A vCPU must be selected and its status accessed in one atomic step.
    Mutex::new(path("CLCK"), 0).to_aml_bytes(sink);
}

fn methods(sink: &mut Vec<u8>, max_vcpus: u8) {
    let (lock, select, status) = (|| path("CLCK"), path("CSEL"), path("CSTS"));
    // Returns the status of vCPU Arg0.
    Method::new(
        path("CSTA"),
        1,
        true,
        vec![
            &Acquire::new(lock(), NO_TIMEOUT),
            &Store::new(&select, &Arg(0)),
            &Store::new(&Local(0), &status),
            &Release::new(lock()),
            &Multiply::new(&Local(0), &Local(0), &PRESENT),
            &Return::new(&Local(0)),
        ],
    )
    .to_aml_bytes(sink);
    // Ejects vCPU Arg0.
    Method::new(
        path("CEJ0"),
        1,
        true,
        vec![
            &Acquire::new(lock(), NO_TIMEOUT),
            &Store::new(&select, &Arg(0)),
            &Store::new(&status, &ONE),
            &Release::new(lock()),
        ],
    )
    .to_aml_bytes(sink);
    // Sends notification Arg1 to vCPU Arg0.
    let mut notify = Vec::new();
    for index in 0..max_vcpus {
        If::new(&Equal::new(&Arg(0), &index), vec![&Notify::new(&path(&name(index)), &Arg(1))])
            .to_aml_bytes(&mut notify);
    }
    Method::new(path("CTFY"), 2, true, vec![&Raw(notify)]).to_aml_bytes(sink);
    // Takes vCPUs from each list until the end marker, which is not a valid vCPU number.
    let mut changed = Vec::new();
    for (list, notification) in [("CADD", NOTIFY_DEVICE_CHECK), ("CREM", NOTIFY_EJECT_REQUEST)] {
        Store::new(&Local(0), &path(list)).to_aml_bytes(&mut changed);
        While::new(
            &LessThan::new(&Local(0), &max_vcpus),
            vec![
                &MethodCall::new(path("CTFY"), vec![&Local(0), &notification]),
                &Store::new(&Local(0), &path(list)),
            ],
        )
        .to_aml_bytes(&mut changed);
    }
    Method::new(path("CSCN"), 0, true, vec![&Raw(changed)]).to_aml_bytes(sink);
}

/// Processor device. Linux (drivers/acpi/processor_core.c, `map_lapic_id`) reads the APIC ID of an
/// added processor from `_MAT`, and only if the entry has the enabled flag.
fn processor(sink: &mut Vec<u8>, input: &AcpiInput, index: u8) {
    let apic_id = input.apic_id(index);
    let status = MethodCall::new(path("CSTA"), vec![&index]);
    let mut optional = Vec::new();
    let node = input.nodes.iter().position(|node| node.vcpus.contains(&apic_id));
    if let Some(node) = node.filter(|_| input.nodes.len() > 1) {
        Name::new(path("_PXM"), &(node as u32)).to_aml_bytes(&mut optional);
    }
    // The boot vCPU cannot be removed.
    if index > 0 {
        let gone = MethodCall::new(path("CEJ0"), vec![&index]);
        Method::new(path("_EJ0"), 1, true, vec![&gone]).to_aml_bytes(&mut optional);
    }
    Device::new(
        path(&name(index)),
        vec![
            &Name::new(path("_HID"), &"ACPI0007"),
            &Name::new(path("_UID"), &index),
            &Method::new(path("_STA"), 0, true, vec![&Return::new(&status)]),
            // Local APIC structure (ACPI 6.5, table 5.21): type 0, length 8, UID, ID, flags.
            &Name::new(path("_MAT"), &BufferData::new(vec![0, 8, index, apic_id, 1, 0, 0, 0])),
            &Raw(optional),
        ],
    )
    .to_aml_bytes(sink);
}

fn name(index: u8) -> String {
    format!("C{index:03X}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::acpi::NumaNode;

    fn count(aml: &[u8], needle: &[u8]) -> usize {
        aml.windows(needle.len()).filter(|window| *window == needle).count()
    }

    fn aml(input: &AcpiInput) -> Vec<u8> {
        let mut aml = Vec::new();
        processors(&mut aml, input);
        aml
    }

    #[test]
    fn every_vcpu_except_the_first_can_be_removed() {
        let aml = aml(&AcpiInput { boot_vcpus: 1, max_vcpus: 3, ..AcpiInput::default() });
        assert_eq!((count(&aml, b"_STA"), count(&aml, b"_MAT"), count(&aml, b"_EJ0")), (3, 3, 2));
        // AML calls of CSTA and CEJ0 with argument 2.
        assert_eq!((count(&aml, b"CSTA\x0a\x02"), count(&aml, b"CEJ0\x0a\x02")), (1, 1));
        assert_eq!((count(&aml, b"CEJ0\x00"), count(&aml, b"_PXM")), (0, 0));
        // AML of Notify (C002, Arg1).
        assert_eq!(
            (count(&aml, b"C002"), count(&aml, b"\x86C002\x69"), count(&aml, b"C003")),
            (2, 1, 0)
        );
        // Buffer of 8 bytes: UID 2, ID 2, enabled although the vCPU is absent at boot.
        assert_eq!(count(&aml, b"_MAT\x11\x0b\x0a\x08\x00\x08\x02\x02\x01\x00\x00\x00"), 1);
        // Each list register is read once before its loop and once inside the loop.
        assert_eq!((count(&aml, b"\x70CADD\x60"), count(&aml, b"\x70CREM\x60")), (2, 2));
    }

    #[test]
    fn vcpu_device_has_node_and_apic_id() {
        let node = |vcpus: &[u8]| NumaNode {
            vcpus: vcpus.to_vec(),
            memory: vec![],
            distances: vec![],
            near: 0,
            performance: vec![],
        };
        let nodes = vec![node(&[0]), node(&[8]), node(&[])];
        let input = AcpiInput {
            boot_vcpus: 1,
            max_vcpus: 2,
            apic_ids: vec![0, 8],
            nodes,
            ..AcpiInput::default()
        };
        let aml = aml(&input);
        assert_eq!((count(&aml, b"_PXM\x00"), count(&aml, b"_PXM\x01")), (1, 1));
        assert_eq!(count(&aml, b"\x00\x08\x01\x08\x01\x00\x00\x00"), 1);
    }
}
