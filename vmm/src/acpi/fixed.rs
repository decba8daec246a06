//! FADT, MADT and MCFG.

use acpi_tables::fadt::{FADTBuilder, Flags, PmProfile};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{
    EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic,
};
use acpi_tables::mcfg::MCFG;
use foreshore_devices::memory::layout::{ACPI_PM_PORT, ECAM_START, IOAPIC_START, LAPIC_START};

use super::pm::{RESET_OFFSET, RESET_VALUE, SLEEP_CONTROL_OFFSET, SLEEP_STATUS_OFFSET};
use super::{AcpiInput, OEM_ID, OEM_REVISION, OEM_TABLE_ID, bytes_of};

/// IAPC_BOOT_ARCH (ACPI 6.5, table 5.11). Bits 0 and 1 are clear: the machine has no legacy devices
/// and no keyboard controller. Otherwise Linux would probe for them, which takes a long time.
const VGA_NOT_PRESENT: u16 = 1 << 2;
const NO_PCIE_ASPM: u16 = 1 << 4;
const CMOS_RTC_NOT_PRESENT: u16 = 1 << 5;

/// Fixed ACPI Description Table (ACPI 6.5, 5.2.9).
pub(super) fn fadt(dsdt: u64, rtc: bool) -> Vec<u8> {
    let port = |offset: u64| {
        let address = u64::from(ACPI_PM_PORT) + offset;
        GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, address)
    };
    // A set button flag means that the button is not a fixed-hardware button. The power button is a
    // device in the DSDT. The VM has no sleep button.
    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .dsdt_64(dsdt)
        .preferred_pm_profile(PmProfile::EnterpriseServer)
        .flag(Flags::Wbinvd)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::FixRtc)
        .flag(Flags::ResetRegSup)
        .flag(Flags::Headless)
        .flag(Flags::HwReducedAcpi);
    let without_rtc = if rtc { 0 } else { CMOS_RTC_NOT_PRESENT };
    fadt.iapc_boot_arch = (VGA_NOT_PRESENT | NO_PCIE_ASPM | without_rtc).into();
    fadt.reset_reg = port(RESET_OFFSET);
    fadt.reset_value = RESET_VALUE;
    fadt.sleep_control_reg = port(SLEEP_CONTROL_OFFSET);
    fadt.sleep_status_reg = port(SLEEP_STATUS_OFFSET);
    fadt.hypervisor_vendor_identity = u64::from_le_bytes(OEM_TABLE_ID).into();
    bytes_of(&fadt.finalize())
}

/// Multiple APIC Description Table (ACPI 6.5, 5.2.12).
///
/// It has no interrupt source overrides: a machine without a legacy PIC has no ISA interrupts to
/// override. Every device in the DSDT names its GSI.
pub(super) fn madt(input: &AcpiInput) -> Vec<u8> {
    let lapic = LocalInterruptController::Address(LAPIC_START);
    let mut madt = MADT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION, lapic);
    // With at most 255 vCPUs, APIC IDs end at 254, so no Local x2APIC structure is needed.
    for vcpu in 0..input.max_vcpus {
        let status = if vcpu < input.boot_vcpus {
            EnabledStatus::Enabled
        } else {
            EnabledStatus::DisabledOnlineCapable
        };
        madt.add_structure(ProcessorLocalApic::new(vcpu, input.apic_id(vcpu), status));
    }
    madt.add_structure(IoApic::new(0, IOAPIC_START, 0));
    bytes_of(&madt)
}

/// Configuration space of segment 0, bus 0 (PCI Firmware 3.3, 4.1.2).
pub(super) fn mcfg() -> Vec<u8> {
    let mut mcfg = MCFG::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    mcfg.add_ecam(ECAM_START, 0, 0, 0);
    bytes_of(&mcfg)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn u32_at(bytes: &[u8], offset: usize) -> u32 {
        u32::from_le_bytes(*bytes[offset..].first_chunk().unwrap())
    }

    #[test]
    fn fadt_fields_are_at_the_offsets_of_the_specification() {
        // ACPI 6.5, table 5.9.
        let with_rtc = fadt(0xa_0040, true);
        assert_eq!(u16::from_le_bytes([with_rtc[109], with_rtc[110]]), 0b01_0100);
        let fadt = fadt(0xa_0040, false);
        assert_eq!((fadt.len(), fadt[8]), (276, 6));
        let boot_arch = u16::from_le_bytes([fadt[109], fadt[110]]);
        assert_eq!(boot_arch, 0b11_0100);
        // HW_REDUCED_ACPI, HEADLESS, RESET_REG_SUP, FIX_RTC, SLP_BUTTON, PWR_BUTTON, WBINVD.
        assert_eq!(u32_at(&fadt, 112), 1 << 20 | 1 << 12 | 1 << 10 | 1 << 6 | 1 << 5 | 1 << 4 | 1);
        let port = |address: u8| [1, 8, 0, 1, address, 6, 0, 0, 0, 0, 0, 0];
        assert_eq!(fadt[116..128], port(2));
        assert_eq!(fadt[128], RESET_VALUE);
        assert_eq!(u32_at(&fadt, 140), 0xa_0040);
        assert_eq!(fadt[244..256], port(0));
        assert_eq!(fadt[256..268], port(1));
        // No fixed hardware: the addresses of the SCI, SMI and PM1 blocks are zero.
        assert!(fadt[46..109].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn madt_has_every_possible_vcpu() {
        let input = |boot_vcpus, max_vcpus, apic_ids: &[u8]| AcpiInput {
            boot_vcpus,
            max_vcpus,
            apic_ids: apic_ids.to_vec(),
            ..AcpiInput::default()
        };
        let madt = madt(&input(2, 3, &[]));
        assert_eq!(u32_at(&madt, 36), LAPIC_START);
        // PCAT_COMPAT is clear: the machine has no dual 8259 PIC.
        assert_eq!(u32_at(&madt, 40), 0);
        // ACPI 6.5, table 5.21: type 0, length 8, UID, ID, flags (1 enabled, 2 online capable).
        for (id, flags) in [(0, 1), (1, 1), (2, 2)] {
            let at = 44 + 8 * usize::from(id);
            assert_eq!(madt[at..at + 8], [0, 8, id, id, flags, 0, 0, 0]);
        }
        // ACPI 6.5, table 5.24: type 1, length 12.
        assert_eq!(madt[68..72], [1, 12, 0, 0]);
        assert_eq!((u32_at(&madt, 72), u32_at(&madt, 76), madt.len()), (IOAPIC_START, 0, 80));
        assert_eq!(super::madt(&input(255, 255, &[])).len(), 44 + 255 * 8 + 12);
        // vCPU in another package: UID 1, APIC ID 8.
        assert_eq!(super::madt(&input(2, 2, &[0, 8]))[52..56], [0, 8, 1, 8]);
    }

    #[test]
    fn mcfg_covers_one_bus() {
        let mcfg = mcfg();
        assert_eq!((mcfg.len(), u32_at(&mcfg, 44), u32_at(&mcfg, 48)), (60, ECAM_START as u32, 0));
        // PCI segment, first bus, last bus.
        assert_eq!(mcfg[52..56], [0, 0, 0, 0]);
    }
}
