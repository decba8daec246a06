//! DSDT: devices that a guest cannot enumerate by itself.

mod cpus;
mod memory;
mod pci;

use acpi_tables::aml::{
    And, Device, EISAName, Equal, Field, FieldAccessType, FieldEntry, FieldLockRule,
    FieldUpdateRule, IO, If, Interrupt, Local, Memory32Fixed, Method, MethodCall, Name, Notify,
    ONE, OpRegion, OpRegionSpace, Package, Path, ResourceTemplate, Scope, Store, ZERO,
};
use acpi_tables::{Aml, AmlSink};
use foreshore_devices::memory::layout::{
    ACPI_PM_LEN, ACPI_PM_PORT, ECAM_LEN, ECAM_START, GED_GSI, GED_LEN, GED_START, HOTPLUG_LEN,
    HOTPLUG_START, NVDIMM_HEALTH_LEN, NVDIMM_HEALTH_START, SERIAL_GSI, SERIAL_PORT,
};

use super::ged::Event;
use super::pm::S5_SLEEP_TYPE;
use super::{AcpiInput, nfit, table};

/// Revision 2 has integers of 64 bits (ACPI 6.5, 20.3.5).
const REVISION: u8 = 2;
/// The device is present, enabled, shown in the user interface and functioning (ACPI 6.5, 6.3.7).
const PRESENT: u8 = 0xf;
/// "Device check": a device may have been added (ACPI 6.5, table 5.162).
const NOTIFY_DEVICE_CHECK: u8 = 1;
const NOTIFY_EJECT_REQUEST: u8 = 3;
/// "Status changed": the power button was pressed.
const NOTIFY_STATUS_CHANGED: u8 = 0x80;
const SERIAL_PORTS: u8 = 8;

pub(super) struct Raw(pub Vec<u8>);

impl Aml for Raw {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        sink.vec(&self.0);
    }
}

/// Differentiated System Description Table (ACPI 6.5, 5.2.11.1).
pub(super) fn dsdt(input: &AcpiInput) -> Vec<u8> {
    let mut system_bus = Vec::new();
    pci::root(&mut system_bus, home_node(input));
    motherboard(&mut system_bus);
    if input.serial {
        serial_port(&mut system_bus);
    }
    power_button(&mut system_bus);
    event_device(&mut system_bus, input.dimms);
    if input.dimms {
        memory::controller(&mut system_bus);
    }
    cpus::processors(&mut system_bus, input);
    if !input.nvdimms.is_empty() {
        nfit::root_device(&mut system_bus, &input.nvdimms);
    }
    let mut body = Scope::raw(path("\\_SB_"), system_bus);
    // S5 is the only sleep state. The first element is SLP_TYPx for the sleep control register
    // (ACPI 6.5, 7.4.2.6).
    Name::new(path("\\_S5_"), &Package::new(vec![&S5_SLEEP_TYPE, &ZERO, &ZERO, &ZERO]))
        .to_aml_bytes(&mut body);
    table(*b"DSDT", REVISION, &body)
}

/// NUMA node of the devices if there are several nodes: the first node with vCPUs.
fn home_node(input: &AcpiInput) -> Option<u32> {
    let home = input.nodes.iter().position(|node| !node.vcpus.is_empty())?;
    (input.nodes.len() > 1).then_some(home as u32)
}

pub(super) fn path(name: &str) -> Path {
    Path::new(name)
}

fn addresses(start: u64, len: u64) -> Memory32Fixed {
    let below_4_gib =
        |value: u64| u32::try_from(value).expect("a device of the layout below 4 GiB");
    Memory32Fixed::new(true, below_4_gib(start), below_4_gib(len))
}

/// Address ranges that belong to no device, but must not be assigned to one.
///
/// Linux uses configuration space through ECAM only if it is reserved here or in the memory map.
/// The flush hint pages are not listed, because the guest's NVDIMM driver reserves them itself.
fn motherboard(sink: &mut Vec<u8>) {
    let pm_ports = u8::try_from(ACPI_PM_LEN).expect("a few ports");
    Device::new(
        path("MBRD"),
        vec![
            &Name::new(path("_HID"), &EISAName::new("PNP0C02")),
            &Name::new(path("_UID"), &ZERO),
            &Name::new(
                path("_CRS"),
                &ResourceTemplate::new(vec![
                    &addresses(ECAM_START, ECAM_LEN),
                    &addresses(GED_START, GED_LEN),
                    &addresses(NVDIMM_HEALTH_START, NVDIMM_HEALTH_LEN),
                    &addresses(HOTPLUG_START, HOTPLUG_LEN),
                    &IO::new(ACPI_PM_PORT, ACPI_PM_PORT, 1, pm_ports),
                ]),
            ),
        ],
    )
    .to_aml_bytes(sink);
}

fn serial_port(sink: &mut Vec<u8>) {
    Device::new(
        path("COM1"),
        vec![
            &Name::new(path("_HID"), &EISAName::new("PNP0501")),
            &Name::new(path("_UID"), &ONE),
            &Name::new(path("_DDN"), &"COM1"),
            &Name::new(
                path("_CRS"),
                &ResourceTemplate::new(vec![
                    &IO::new(SERIAL_PORT, SERIAL_PORT, 1, SERIAL_PORTS),
                    &Interrupt::new(true, true, false, false, SERIAL_GSI),
                ]),
            ),
        ],
    )
    .to_aml_bytes(sink);
}

fn power_button(sink: &mut Vec<u8>) {
    Device::new(
        path("PWRB"),
        vec![&Name::new(path("_HID"), &EISAName::new("PNP0C0C")), &Name::new(path("_UID"), &ZERO)],
    )
    .to_aml_bytes(sink);
}

/// Generic event device. Its method reads the pending events once and dispatches them.
fn event_device(sink: &mut Vec<u8>, has_dimms: bool) {
    const REGISTER_BYTES: u32 = 4;
    let events = path("ESEL");
    let mut passed_on = Vec::new();
    Store::new(&Local(0), &events).to_aml_bytes(&mut passed_on);
    let button = path("\\_SB_.PWRB");
    on_event(&mut passed_on, Event::PowerButton, &Notify::new(&button, &NOTIFY_STATUS_CHANGED));
    on_event(&mut passed_on, Event::Pci, &MethodCall::new(path(pci::CHANGED), vec![]));
    on_event(&mut passed_on, Event::Cpus, &MethodCall::new(path(cpus::CHANGED), vec![]));
    if has_dimms {
        on_event(&mut passed_on, Event::Memory, &MethodCall::new(path(memory::CHANGED), vec![]));
    }
    Device::new(
        path("GED_"),
        vec![
            &Name::new(path("_HID"), &"ACPI0013"),
            &Name::new(path("_UID"), &ZERO),
            &Name::new(
                path("_CRS"),
                // Level-triggered and active-high, so that an event stays pending until the guest
                // loads its driver.
                &ResourceTemplate::new(vec![&Interrupt::new(true, false, false, false, GED_GSI)]),
            ),
            &OpRegion::new(path("EREG"), OpRegionSpace::SystemMemory, &GED_START, &REGISTER_BYTES),
            &Field::new(
                path("EREG"),
                FieldAccessType::DWord,
                FieldLockRule::NoLock,
                FieldUpdateRule::WriteAsZeroes,
                vec![FieldEntry::Named(*b"ESEL", 8 * REGISTER_BYTES as usize)],
            ),
            &Method::new(path("_EVT"), 1, true, vec![&Raw(passed_on)]),
        ],
    )
    .to_aml_bytes(sink);
}

/// Appends AML that runs `act` if `event` is set in Local0.
fn on_event(sink: &mut Vec<u8>, event: Event, act: &dyn Aml) {
    let bit = event as u32;
    And::new(&Local(1), &Local(0), &bit).to_aml_bytes(sink);
    If::new(&Equal::new(&Local(1), &bit), vec![act]).to_aml_bytes(sink);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::acpi::NumaNode;

    fn contains(dsdt: &[u8], needle: &[u8]) -> bool {
        dsdt.windows(needle.len()).any(|window| window == needle)
    }

    fn node(vcpus: &[u8]) -> NumaNode {
        NumaNode {
            vcpus: vcpus.to_vec(),
            memory: vec![],
            distances: vec![],
            near: 0,
            performance: vec![],
        }
    }

    #[test]
    fn dsdt_has_the_devices_of_the_machine() {
        let mut input = AcpiInput { boot_vcpus: 1, max_vcpus: 2, ..AcpiInput::default() };
        let small = dsdt(&input);
        for name in [b"PCI0", b"MBRD", b"PWRB", b"GED_", b"C000", b"C001", b"_S5_"] {
            assert!(contains(&small, name));
        }
        for name in [b"COM1", b"NVDR", b"C002", b"_PXM"] {
            assert!(!contains(&small, name));
        }
        input.serial = true;
        assert!(contains(&dsdt(&input), b"COM1"));
        assert!(!contains(&small, b"MHPC"), "neither the device nor its method is called");
        input.dimms = true;
        assert!(contains(&dsdt(&input), b"MHPCMSCN") && contains(&dsdt(&input), b"M03F"));
    }

    #[test]
    fn ged_is_level_triggered_and_serial_port_edge_triggered() {
        let dsdt = dsdt(&AcpiInput { max_vcpus: 1, serial: true, ..AcpiInput::default() });
        // Extended interrupt: 0x89, length 6, flags, one number. Flag bit 0 marks a consumer, bit 1
        // an edge, bit 2 active-low.
        let flags = |gsi: u32| {
            let [low, ..] = gsi.to_le_bytes();
            let of = |window: &&[u8]| matches!(**window, [0x89, 6, 0, _, 1, number, 0, 0, 0] if number == low);
            dsdt.windows(9).find(of).map(|window| window[3])
        };
        assert_eq!((flags(GED_GSI), flags(SERIAL_GSI)), (Some(0b001), Some(0b011)));
    }

    #[test]
    fn pci_root_is_in_first_node_with_vcpus() {
        let nodes = vec![node(&[]), node(&[]), node(&[]), node(&[0])];
        let input = AcpiInput { boot_vcpus: 1, max_vcpus: 1, nodes, ..AcpiInput::default() };
        assert!(contains(&dsdt(&input), b"_PXM\x0a\x03"));
    }

    #[test]
    fn flush_hint_pages_are_in_no_resource() {
        // The guest's NVDIMM driver reserves the flush hint pages itself. Memory32Fixed: 0x86,
        // length 9, read-write, base.
        let nvdimm = foreshore_devices::nvdimm::Nvdimm {
            start: 1 << 33,
            size_bytes: 1 << 21,
            node: 0,
            flush_hint: true,
            read_only: false,
        };
        let dsdt = dsdt(&AcpiInput { max_vcpus: 1, nvdimms: vec![nvdimm], ..AcpiInput::default() });
        let fixed = [0x86, 9, 0, 1];
        let ranges: Vec<(u64, u64)> = dsdt
            .windows(12)
            .filter(|window| window.starts_with(&fixed))
            .map(|window| {
                let word = |at| u64::from(u32::from_le_bytes(*window[at..].first_chunk().unwrap()));
                (word(4), word(4) + word(8))
            })
            .collect();
        let ours = [
            (ECAM_START, ECAM_LEN),
            (GED_START, GED_LEN),
            (NVDIMM_HEALTH_START, NVDIMM_HEALTH_LEN),
            (HOTPLUG_START, HOTPLUG_LEN),
        ];
        assert_eq!(ranges, ours.map(|(start, len)| (start, start + len)));
        let hint = foreshore_devices::nvdimm::Nvdimm::flush_hint_address(0);
        assert!(ranges.iter().all(|&(start, end)| hint + 0x1000 <= start || end <= hint));
        assert!(contains(&dsdt, b"ACPI0012"));
    }
}
