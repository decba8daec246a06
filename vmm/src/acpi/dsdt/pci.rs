//! PCI root bus and its slots in the DSDT, and PCI hotplug.

use acpi_tables::Aml;
use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, And, Arg, CreateDWordField, Device, EISAName, Else, Equal,
    Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, IO, If, Local, Method,
    Name, NotEqual, Notify, ONE, OpRegion, OpRegionSpace, Or, Package, ResourceTemplate, Return,
    ShiftLeft, Store, Uuid, ZERO,
};
use foreshore_devices::memory::layout::{HOTPLUG_START, MMIO32_LEN, MMIO32_START, PCI_SLOTS};

use super::{NOTIFY_DEVICE_CHECK, NOTIFY_EJECT_REQUEST, Raw, path};
use crate::acpi::hotplug::{PCI_DOWN, PCI_EJECT, PCI_UP, REGISTERS_LEN};

/// Configuration ports (PCI 3.0, 3.2.2.3.2).
const PCI_CONFIG_PORT: u16 = 0xcf8;
const PCI_CONFIG_PORTS: u8 = 8;
/// AML method that notifies the guest of slots with an added device or a requested removal.
pub(super) const CHANGED: &str = "\\_SB_.PCI0.PCNT";

/// Root bus with the ID of PCI Express, and with the ID of conventional PCI for drivers that do not
/// support PCI Express.
pub(super) fn root(sink: &mut Vec<u8>, node: Option<u32>) {
    let mut proximity = Vec::new();
    if let Some(node) = node {
        Name::new(path("_PXM"), &node).to_aml_bytes(&mut proximity);
    }
    let window_end = u32::try_from(MMIO32_START + MMIO32_LEN - 1).expect("a window below 4 GiB");
    let window = AddressSpace::new_memory(
        AddressSpaceCacheable::NotCacheable,
        true,
        MMIO32_START as u32,
        window_end,
        None,
    );
    Device::new(
        path("PCI0"),
        vec![
            &Name::new(path("_HID"), &EISAName::new("PNP0A08")),
            &Name::new(path("_CID"), &EISAName::new("PNP0A03")),
            &Name::new(path("_UID"), &ZERO),
            &Name::new(path("_SEG"), &ZERO),
            &Name::new(path("_BBN"), &ZERO),
            &Raw(proximity),
            &Name::new(
                path("_CRS"),
                &ResourceTemplate::new(vec![
                    &AddressSpace::new_bus_number(0u16, 0u16),
                    &IO::new(PCI_CONFIG_PORT, PCI_CONFIG_PORT, 1, PCI_CONFIG_PORTS),
                    &window,
                ]),
            ),
            // No INTx routing, because every function uses MSI-X.
            &Name::new(path("_PRT"), &Package::new(vec![])),
            &operating_system_capabilities(),
            &slots(),
        ],
    )
    .to_aml_bytes(sink);
}

/// `_OSC` of the host bridge (PCI Firmware 3.3, 4.5.1). Grants every requested feature, because the
/// firmware does not need to control any.
fn operating_system_capabilities() -> Raw {
    const HOST_BRIDGE: &str = "33DB4D5B-1FF7-401C-9657-7441C03DD766";
    const UNRECOGNIZED_UUID: u8 = 1 << 2;
    let mut aml = Vec::new();
    let status = path("CDW1");
    Method::new(
        path("_OSC"),
        4,
        // Serialized because the method creates a name. Two threads must not create it
        // concurrently.
        true,
        vec![
            &If::new(&Equal::new(&Arg(0), &Uuid::new(HOST_BRIDGE)), vec![&Return::new(&Arg(3))]),
            &Else::new(vec![
                &CreateDWordField::new(&status, &Arg(3), &ZERO),
                &Or::new(&status, &status, &UNRECOGNIZED_UUID),
                &Return::new(&Arg(3)),
            ]),
        ],
    )
    .to_aml_bytes(&mut aml);
    Raw(aml)
}

/// A device for each slot, whether or not the slot is occupied.
///
/// Linux (drivers/pci/hotplug/acpiphp_glue.c, `acpiphp_add_context`) creates a slot for each device
/// with `_EJ0`. It treats the slot as occupied if configuration space returns a vendor ID.
fn slots() -> Raw {
    let mut aml = Vec::new();
    let [up, down, eject] = ["PCIU", "PCID", "PCIE"];
    let len = u32::try_from(REGISTERS_LEN).expect("a few registers");
    let start = u32::try_from(HOTPLUG_START).expect("a device of the layout below 4 GiB");
    OpRegion::new(path("PREG"), OpRegionSpace::SystemMemory, &start, &len).to_aml_bytes(&mut aml);
    let register = |name: &str, offset: u64, expected: u64| {
        assert_eq!(offset, expected, "fields follow each other");
        FieldEntry::Named(*name.as_bytes().first_chunk().expect("4 letters"), 32)
    };
    Field::new(
        path("PREG"),
        FieldAccessType::DWord,
        FieldLockRule::NoLock,
        FieldUpdateRule::WriteAsZeroes,
        vec![register(up, PCI_UP, 0), register(down, PCI_DOWN, 4), register(eject, PCI_EJECT, 8)],
    )
    .to_aml_bytes(&mut aml);
    for slot in 1..PCI_SLOTS {
        Device::new(
            path(&slot_name(slot)),
            vec![
                // Device number in the high word, function 0 in the low word (ACPI 6.5, table 6.2).
                &Name::new(path("_ADR"), &(u32::from(slot) << 16)),
                &Name::new(path("_SUN"), &slot),
                &Method::new(
                    path("_EJ0"),
                    1,
                    true,
                    vec![
                        &ShiftLeft::new(&Local(0), &ONE, &path("_SUN")),
                        &Store::new(&path(eject), &Local(0)),
                    ],
                ),
            ],
        )
        .to_aml_bytes(&mut aml);
    }
    // Each register is read only once, because reading clears it.
    let mut changed = Vec::new();
    for (register, notification) in [(up, NOTIFY_DEVICE_CHECK), (down, NOTIFY_EJECT_REQUEST)] {
        Store::new(&Local(0), &path(register)).to_aml_bytes(&mut changed);
        for slot in 1..PCI_SLOTS {
            And::new(&Local(1), &Local(0), &(1u32 << slot)).to_aml_bytes(&mut changed);
            If::new(
                &NotEqual::new(&Local(1), &ZERO),
                vec![&Notify::new(&path(&slot_name(slot)), &notification)],
            )
            .to_aml_bytes(&mut changed);
        }
    }
    Method::new(path("PCNT"), 0, true, vec![&Raw(changed)]).to_aml_bytes(&mut aml);
    Raw(aml)
}

fn slot_name(slot: u8) -> String {
    format!("S{slot:03}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(aml: &[u8], needle: &[u8]) -> usize {
        aml.windows(needle.len()).filter(|window| *window == needle).count()
    }

    #[test]
    fn every_slot_except_the_bridge_supports_hotplug() {
        let Raw(aml) = slots();
        assert_eq!((count(&aml, b"_EJ0"), count(&aml, b"_ADR")), (31, 31));
        // AML of both notifications: Notify (S031, 1), Notify (S031, 3).
        assert_eq!((count(&aml, b"S000"), count(&aml, b"S001"), count(&aml, b"S031")), (0, 3, 3));
        assert_eq!((count(&aml, b"\x86S031\x01"), count(&aml, b"\x86S031\x0a\x03")), (1, 1));
        // _ADR 0x001f0000 and _SUN 31.
        assert_eq!(count(&aml, b"_ADR\x0c\x00\x00\x1f\x00\x08_SUN\x0a\x1f"), 1);
        // Exactly one Store reads each register.
        assert_eq!((count(&aml, b"\x70PCIU\x60"), count(&aml, b"\x70PCID\x60")), (1, 1));
    }
}
