//! The guest-physical map of an x86-64 guest.
//!
//! | range | what |
//! |---|---|
//! | 0 to 640 KiB, 1 MiB to 3 GiB | boot memory, low part |
//! | 0x9_fc00 to 1 MiB | EBDA and ACPI tables, reserved in the memory map |
//! | 0xc000_0000 to 0xe000_0000 | 32-bit BARs |
//! | 0xe800_0000, 1 MiB per bus | ECAM, one bus |
//! | 0xe900_0000, 4 KiB each | NVDIMM flush hint pages: no memory, no BAR, no other resource may lie there |
//! | 0xfec0_0000, 0xfee0_0000 | I/O APIC, local APIC |
//! | 4 GiB and up | boot memory, high part; then hotplug parts, volumes, each aligned to 1 GiB |

use vm_memory::GuestAddress;

/// Bytes in a MiB.
pub const MIB: u64 = 1 << 20;
/// Bytes in a GiB.
pub const GIB: u64 = 1 << 30;

/// Boot memory below this address; what does not fit continues at [`HIGH_RAM_START`].
pub const LOW_RAM_END: u64 = 3 * GIB;
/// The first address of boot memory above the 32-bit devices.
pub const HIGH_RAM_START: u64 = 4 * GIB;

/// Where the 32-bit BARs are.
pub const MMIO32_START: u64 = 0xc000_0000;
/// Their extent in bytes.
pub const MMIO32_LEN: u64 = 0x2000_0000;
/// PCI Express configuration space of segment 0 (PCI Firmware 3.3, 4.1.2).
pub const ECAM_START: u64 = 0xe800_0000;
/// One bus: 32 devices of 8 functions of 4 KiB.
pub const ECAM_LEN: u64 = MIB;
/// The first NVDIMM flush hint page; DIMM n has page n.
pub const FLUSH_HINT_START: u64 = 0xe900_0000;
/// A flush hint page's size in bytes.
pub const FLUSH_HINT_LEN: u64 = 0x1000;
/// I/O APIC registers.
pub const IOAPIC_START: u32 = 0xfec0_0000;
/// Local APIC registers.
pub const LAPIC_START: u32 = 0xfee0_0000;
/// Intel's KVM wants three pages for a TSS and one for an identity map below 4 GiB.
pub const KVM_TSS_START: u64 = 0xfffb_d000;
/// The page of the identity map.
pub const KVM_IDENTITY_MAP_START: u64 = 0xfffb_c000;

/// End of conventional memory that the guest may use freely.
pub const EBDA_START: u64 = 0x9_fc00;
/// Where the RSDP lies; the other ACPI tables follow it.
pub const RSDP_START: GuestAddress = GuestAddress(0xa_0000);
/// Room for ACPI tables: up to 1 MiB.
pub const ACPI_END: u64 = MIB;
/// The first address of memory above the legacy hole.
pub const HIMEM_START: GuestAddress = GuestAddress(MIB);

/// COM1.
pub const SERIAL_PORT: u16 = 0x3f8;
/// COM1's interrupt.
pub const SERIAL_GSI: u32 = 4;
/// Sleep control (1 byte), sleep status (1 byte), reset (1 byte) registers of the FADT (ACPI 6.5, 4.8.3.7).
pub const ACPI_PM_PORT: u16 = 0x600;
/// Their number.
pub const ACPI_PM_LEN: u16 = 3;
/// Generic event device's register block (ACPI 6.5, 5.6.9).
pub const GED_START: u64 = 0xe910_0000;
/// Its length in bytes.
pub const GED_LEN: u64 = 0x1000;
/// Its interrupt.
pub const GED_GSI: u32 = 5;
/// The first interrupt that may be given to PCI INTx or MSI routes: 0 to 23 are the I/O APIC's pins.
pub const FIRST_MSI_GSI: u32 = 24;

/// Alignment of everything behind the boot memory: the largest page that host and guest may map it with.
pub const HOTPLUG_ALIGN: u64 = GIB;
