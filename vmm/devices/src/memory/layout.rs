//! The guest-physical map of an x86-64 guest.
//!
//! | range | use |
//! |---|---|
//! | 0 to 640 KiB, 1 MiB to 3 GiB | low part of boot memory; it ends earlier if a huge page would extend beyond 3 GiB |
//! | 0x9_fc00 to 1 MiB | EBDA and ACPI tables, reserved in the memory map |
//! | 0xc000_0000 to 0xe000_0000 | 32-bit BARs |
//! | 0xe800_0000, 1 MiB per bus | ECAM, one bus |
//! | 0xe900_0000, 4 KiB each | NVDIMM flush hint pages: no memory, no BAR and no other resource may overlap them |
//! | 0xe910_0000, 4 KiB | generic event device |
//! | 0xe910_1000, 4 KiB | NVDIMM health registers |
//! | 0xe910_2000, 4 KiB | hotplug registers |
//! | 0xfec0_0000, 0xfee0_0000 | I/O APIC, local APIC |
//! | 4 GiB and up | high part of boot memory; then hotplug parts and volumes, each aligned to 1 GiB or to Linux's memory block |

use foreshore_types::size::Size;
use foreshore_types::{PAGE_BYTES, UNIT_BYTES};
use thiserror::Error;
use vm_memory::GuestAddress;

use crate::memory::zone::{Growth, ZoneSpec};

pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

/// End of low boot memory. Further boot memory starts at [`HIGH_RAM_START`].
pub const LOW_RAM_END: u64 = 3 * GIB;
/// Start of boot memory above the 32-bit devices.
pub const HIGH_RAM_START: u64 = 4 * GIB;

/// Start of the 32-bit BARs.
pub const MMIO32_START: u64 = 0xc000_0000;
pub const MMIO32_LEN: u64 = 0x2000_0000;
/// PCI Express configuration space of segment 0 (PCI Firmware 3.3, 4.1.2).
pub const ECAM_START: u64 = 0xe800_0000;
/// Size of one bus: 32 devices with 8 functions of 4 KiB each.
pub const ECAM_LEN: u64 = MIB;
/// First NVDIMM flush hint page. NVDIMM n uses page n.
pub const FLUSH_HINT_START: u64 = 0xe900_0000;
pub const FLUSH_HINT_LEN: u64 = 0x1000;
/// Maximum number of NVDIMMs. The flush hint pages, health registers and tables could hold more.
pub const MAX_NVDIMMS: usize = 64;
const _: () = assert!(FLUSH_HINT_START + MAX_NVDIMMS as u64 * FLUSH_HINT_LEN <= GED_START);
/// I/O APIC registers.
pub const IOAPIC_START: u32 = 0xfec0_0000;
pub const LAPIC_START: u32 = 0xfee0_0000;
/// Intel's KVM needs three pages for a TSS and one for an identity map below 4 GiB.
pub const KVM_TSS_START: u64 = 0xfffb_d000;
pub const KVM_IDENTITY_MAP_START: u64 = 0xfffb_c000;

/// End of conventional memory that the guest may use freely.
pub const EBDA_START: u64 = 0x9_fc00;
/// Address of the RSDP. The other ACPI tables follow it.
pub const RSDP_START: GuestAddress = GuestAddress(0xa_0000);
/// End of the ACPI tables, below the page of the reset vector.
pub const ACPI_END: u64 = MIB - 0x1000;
/// Address FFFF:0000 in real mode, the entry point of a BIOS.
pub const RESET_VECTOR: u64 = 0xf_fff0;
/// Start of memory above the legacy hole.
pub const HIMEM_START: GuestAddress = GuestAddress(MIB);

/// I/O port of COM1.
pub const SERIAL_PORT: u16 = 0x3f8;
/// Interrupt of COM1.
pub const SERIAL_GSI: u32 = 4;
/// Sleep control (1 byte), sleep status (1 byte), reset (1 byte) registers of the FADT (ACPI 6.5,
/// 4.8.3.7).
pub const ACPI_PM_PORT: u16 = 0x600;
pub const ACPI_PM_LEN: u16 = 3;
/// Register block of the generic event device (ACPI 6.5, 5.6.9).
pub const GED_START: u64 = 0xe910_0000;
pub const GED_LEN: u64 = 0x1000;
pub const GED_GSI: u32 = 5;
/// NVDIMM health registers, 4 bytes each. NVDIMM n uses the register at offset 4 n.
pub const NVDIMM_HEALTH_START: u64 = 0xe910_1000;
pub const NVDIMM_HEALTH_LEN: u64 = 0x1000;
pub const NVDIMM_HEALTH_REGISTER_LEN: u64 = 4;
const _: () = assert!(NVDIMM_HEALTH_START >= GED_START + GED_LEN);
/// Hotplug registers.
pub const HOTPLUG_START: u64 = 0xe910_2000;
pub const HOTPLUG_LEN: u64 = 0x1000;
const _: () = assert!(HOTPLUG_START >= NVDIMM_HEALTH_START + NVDIMM_HEALTH_LEN);
/// Number of slots on the PCI bus. The host bridge is in slot 0.
pub const PCI_SLOTS: u8 = 32;
const _: () = assert!(MAX_NVDIMMS as u64 * NVDIMM_HEALTH_REGISTER_LEN <= NVDIMM_HEALTH_LEN);
/// First interrupt number for PCI INTx or MSI routes. Numbers 0 to 23 are the pins of the I/O APIC.
pub const FIRST_MSI_GSI: u32 = 24;

/// Smallest size of the blocks in which Linux adds memory. All but large guests use it: see
/// [`linux_block_bytes`].
pub const LINUX_MEMORY_BLOCK_BYTES: u64 = 128 * MIB;
/// Largest size of the blocks in which Linux adds memory.
pub const LINUX_LARGEST_BLOCK_BYTES: u64 = 2 * GIB;
/// Linux uses larger blocks if boot memory ends at this address or above.
const LINUX_LARGE_BLOCKS_FROM: u64 = 64 * GIB;

/// Alignment of all ranges above boot memory: the largest page size with which host and guest may
/// map them.
pub const HOTPLUG_ALIGN: u64 = GIB;

/// Alignment of the DIMMs' range. The alignment suits every block size of the guest.
pub const DIMM_ALIGN: u64 = LINUX_LARGEST_BLOCK_BYTES;

/// Smallest boot memory. A kernel does not fit into less.
pub const MIN_BOOT_BYTES: u64 = 16 * MIB;

#[derive(Debug, Error, PartialEq, Eq)]
pub enum LayoutError {
    #[error("size {size_bytes} of zone {zone:?} is not a multiple of {}", Size(*unit_bytes))]
    Unaligned {
        zone: String,
        /// Configured size.
        size_bytes: u64,
        unit_bytes: u64,
    },
    #[error("boot memory of {size_bytes} bytes is below the minimum of {MIN_BOOT_BYTES} bytes")]
    BootTooSmall {
        /// Total boot memory of all zones.
        size_bytes: u64,
    },
    /// An additional range is empty or not page-aligned, or its alignment is not a power of two.
    #[error("range of {len:#x} bytes aligned to {align:#x} is not a multiple of 4 KiB")]
    BadRange {
        /// Length in bytes.
        len: u64,
        align: u64,
    },
    #[error(
        "{what} of {size_bytes} bytes does not fit into the guest's {address_bits}-bit physical address space"
    )]
    AddressSpace {
        what: String,
        size_bytes: u64,
        /// Width of guest-physical addresses.
        address_bits: u8,
    },
}

/// Range of guest-physical addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestRange {
    pub start: u64,
    /// Length in bytes, never 0.
    pub len: u64,
}

impl GuestRange {
    /// First address after the range.
    pub fn end(&self) -> u64 {
        self.start + self.len
    }

    pub fn contains(&self, start: u64, len: u64) -> bool {
        start >= self.start && start.checked_add(len).is_some_and(|end| end <= self.end())
    }
}

/// Boot memory of all zones: a part below the hole for 32-bit devices, and a part above it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BootMemory {
    low_bytes: u64,
    high_bytes: u64,
}

impl BootMemory {
    pub fn of(zones: &[ZoneSpec]) -> Self {
        let mut memory = Self::default();
        for zone in zones {
            memory.add(zone.boot_bytes, zone.boot_page_bytes());
        }
        memory
    }

    #[cfg(any(test, feature = "testing"))]
    pub fn of_small_pages(boot_bytes: u64) -> Self {
        let mut memory = Self::default();
        memory.add(boot_bytes, PAGE_BYTES);
        memory
    }

    /// Adds a zone. Its parts below and above the hole consist of whole pages. Returns the lengths
    /// of both parts.
    ///
    /// If a page of the zone would reach into the hole, the addresses between the last whole page
    /// and 3 GiB remain unused. Later zones do not use them either, because their memory starts
    /// directly after this zone's part above the hole.
    fn add(&mut self, boot_bytes: u64, page_bytes: u64) -> (u64, u64) {
        let room_bytes = if self.high_bytes == 0 { LOW_RAM_END - self.low_bytes } else { 0 };
        let low_bytes = if boot_bytes <= room_bytes {
            boot_bytes
        } else {
            room_bytes - room_bytes % page_bytes
        };
        self.low_bytes += low_bytes;
        self.high_bytes = self.high_bytes.saturating_add(boot_bytes - low_bytes);
        (low_bytes, boot_bytes - low_bytes)
    }

    /// First address after the part below the hole.
    pub fn low_end(&self) -> u64 {
        self.low_bytes
    }

    /// End of the part above the hole, or the end of the hole if all memory is below it.
    pub fn high_end(&self) -> u64 {
        HIGH_RAM_START.saturating_add(self.high_bytes)
    }

    /// First address after all boot memory.
    pub fn end(&self) -> u64 {
        if self.high_bytes == 0 { self.low_end() } else { self.high_end() }
    }

    pub fn bytes(&self) -> u64 {
        self.low_bytes.saturating_add(self.high_bytes)
    }
}

/// Size of the blocks in which Linux adds memory if boot memory ends at `boot_end`
/// (arch/x86/mm/init_64.c, `probe_memory_block_size`). Without the hypervisor bit in CPUID, Linux
/// would use the largest blocks, but our CPUID sets this bit.
///
/// Linux ignores a partial block at either end of a hotplug part. Hotplug parts therefore start at
/// a multiple of the block size and consist of whole blocks.
pub fn linux_block_bytes(boot_end: u64) -> u64 {
    if boot_end < LINUX_LARGE_BLOCKS_FROM {
        return LINUX_MEMORY_BLOCK_BYTES;
    }
    (1u64 << boot_end.trailing_zeros()).clamp(LINUX_MEMORY_BLOCK_BYTES, LINUX_LARGEST_BLOCK_BYTES)
}

/// Addresses of one zone's parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZonePlacement {
    /// Ranges of the boot part: none, one, or two around the hole below 4 GiB.
    pub boot: Vec<GuestRange>,
    /// Hotplug part: the pluggable memory, rounded up to [`linux_block_bytes`].
    pub hotplug: Option<GuestRange>,
}

/// Guest-physical map of one VM. The guest-physical map is computed from the VM's zones, and then
/// allocates additional ranges.
#[derive(Clone, Debug)]
pub struct MemoryMap {
    zones: Vec<ZonePlacement>,
    boot: BootMemory,
    next_free: u64,
    /// Additional ranges that were freed. They consist of whole units of [`HOTPLUG_ALIGN`], and
    /// adjacent ranges are merged.
    given_back: Vec<GuestRange>,
    address_bits: u8,
}

impl MemoryMap {
    /// Lays out `zones` in guest-physical addresses of `address_bits` bits. All boot parts precede
    /// all hotplug parts, in the order of the zones.
    pub fn new(zones: &[ZoneSpec], address_bits: u8) -> Result<Self, LayoutError> {
        for zone in zones {
            let unit_bytes = match zone.growth {
                Growth::VirtioMem => UNIT_BYTES,
                Growth::Dimms => PAGE_BYTES,
            };
            for (size_bytes, unit_bytes) in
                [(zone.boot_bytes, PAGE_BYTES), (zone.hotplug_bytes, unit_bytes)]
            {
                if !size_bytes.is_multiple_of(unit_bytes) {
                    return Err(LayoutError::Unaligned {
                        zone: zone.id.clone(),
                        size_bytes,
                        unit_bytes,
                    });
                }
            }
        }
        let boot_bytes = zones.iter().fold(0u64, |sum, zone| sum.saturating_add(zone.boot_bytes));
        if boot_bytes < MIN_BOOT_BYTES {
            return Err(LayoutError::BootTooSmall { size_bytes: boot_bytes });
        }
        let mut map = Self {
            zones: Vec::new(),
            boot: BootMemory::of(zones),
            next_free: HIGH_RAM_START,
            given_back: Vec::new(),
            address_bits,
        };
        // Boot memory fills the low part, skips the hole, and continues above it.
        let mut memory = BootMemory::default();
        for zone in zones {
            let start = memory.low_end();
            let (low, high) = memory.add(zone.boot_bytes, zone.boot_page_bytes());
            let mut boot = Vec::new();
            if low > 0 {
                boot.push(GuestRange { start, len: low });
            }
            if high > 0 {
                let len = high;
                // Adjacent, as in the kernel's memory map.
                boot.push(
                    map.take(len, PAGE_BYTES, || format!("boot memory of zone {:?}", zone.id))?,
                );
            }
            map.zones.push(ZonePlacement { boot, hotplug: None });
        }
        let block_bytes = map.linux_block_bytes();
        for (index, zone) in zones.iter().enumerate().filter(|(_, zone)| zone.hotplug_bytes > 0) {
            let what = || format!("hotplug part of zone {:?}", zone.id);
            let len = zone.hotplug_bytes.checked_next_multiple_of(block_bytes).unwrap_or(u64::MAX);
            let align = match zone.growth {
                Growth::VirtioMem => HOTPLUG_ALIGN.max(block_bytes),
                Growth::Dimms => DIMM_ALIGN,
            };
            map.zones[index].hotplug = Some(map.take(len, align, what)?);
        }
        Ok(map)
    }

    /// Addresses of the zones' parts, in the order of the specifications.
    pub fn zones(&self) -> &[ZonePlacement] {
        &self.zones
    }

    /// Allocates an additional range for a volume or a file, above the zones.
    pub fn allocate(&mut self, len: u64, align: u64) -> Result<GuestRange, LayoutError> {
        if len == 0 || !len.is_multiple_of(4096) || !align.is_power_of_two() {
            return Err(LayoutError::BadRange { len, align });
        }
        let align = align.max(HOTPLUG_ALIGN);
        let whole = len.checked_next_multiple_of(HOTPLUG_ALIGN);
        let fits = |range: &GuestRange| {
            range.start.is_multiple_of(align) && whole.is_some_and(|whole| whole <= range.len)
        };
        if let (Some(nth), Some(whole)) = (self.given_back.iter().position(fits), whole) {
            let range = &mut self.given_back[nth];
            let start = range.start;
            *range = GuestRange { start: start + whole, len: range.len - whole };
            if range.len == 0 {
                self.given_back.remove(nth);
            }
            return Ok(GuestRange { start, len });
        }
        self.take(len, align, || "an additional range".to_owned())
    }

    /// Checks that all additional ranges still fit if the zones change from `zones` to `next`.
    pub fn has_room_for(&self, zones: &[ZoneSpec], next: &[ZoneSpec]) -> Result<(), LayoutError> {
        let behind_bytes = self.next_free - Self::new(zones, self.address_bits)?.next_free;
        let mut next = Self::new(next, self.address_bits)?;
        next.take(behind_bytes, HOTPLUG_ALIGN, || "the range after the VM's memory".to_owned())?;
        Ok(())
    }

    /// Frees a range that [`Self::allocate`] returned, for reuse.
    pub fn give_back(&mut self, range: GuestRange) {
        let mut range = GuestRange { len: range.len.next_multiple_of(HOTPLUG_ALIGN), ..range };
        for next in self
            .given_back
            .extract_if(.., |other| other.end() == range.start || range.end() == other.start)
            .collect::<Vec<_>>()
        {
            range = GuestRange { start: range.start.min(next.start), len: range.len + next.len };
        }
        self.given_back.push(range);
    }

    /// First address after all boot memory. The SRAT describes memory below it as not
    /// hot-pluggable.
    pub fn boot_end(&self) -> u64 {
        self.boot.end()
    }

    pub fn boot(&self) -> BootMemory {
        self.boot
    }

    /// Size of the blocks in which the guest adds memory.
    pub fn linux_block_bytes(&self) -> u64 {
        linux_block_bytes(self.boot_end())
    }

    /// Ranges of boot memory, in the order of the zones.
    pub fn boot_ranges(&self) -> impl Iterator<Item = GuestRange> {
        self.zones.iter().flat_map(|zone| zone.boot.iter().copied())
    }

    fn take(
        &mut self,
        len: u64,
        align: u64,
        what: impl Fn() -> String,
    ) -> Result<GuestRange, LayoutError> {
        let too_far = || LayoutError::AddressSpace {
            what: what(),
            size_bytes: len,
            address_bits: self.address_bits,
        };
        let limit = 1u64.checked_shl(u32::from(self.address_bits)).unwrap_or(u64::MAX);
        let start = self.next_free.checked_next_multiple_of(align).ok_or_else(too_far)?;
        let end = start.checked_add(len).filter(|end| *end <= limit).ok_or_else(too_far)?;
        self.next_free = end;
        Ok(GuestRange { start, len })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::memory::zone::{HostMemory, HostPages, Tier};

    fn zone(id: &str, tier: Tier, boot_bytes: u64, hotplug_bytes: u64) -> ZoneSpec {
        ZoneSpec { id: id.into(), tier, boot_bytes, hotplug_bytes, ..ZoneSpec::default() }
    }

    #[test]
    fn boot_memory_skips_the_hole_and_hotplug_parts_follow() {
        let zones =
            [zone("dram", Tier::Dram, 4 * GIB, 512 * MIB), zone("pm", Tier::Pm, 0, 3 * GIB)];
        let mut map = MemoryMap::new(&zones, 40).unwrap();
        let [dram, pm] = map.zones() else { panic!("two zones") };
        let low = GuestRange { start: 0, len: 3 * GIB };
        let high = GuestRange { start: 4 * GIB, len: GIB };
        assert_eq!(dram.boot, [low, high]);
        assert_eq!(dram.hotplug, Some(GuestRange { start: 5 * GIB, len: 512 * MIB }));
        assert_eq!(pm.boot, []);
        assert_eq!(pm.hotplug, Some(GuestRange { start: 6 * GIB, len: 3 * GIB }));
        assert_eq!(map.boot_end(), 5 * GIB);
        assert_eq!(map.allocate(2 * MIB, 4096).unwrap().start, 9 * GIB);
        assert_eq!(map.allocate(GIB, 4096).unwrap().start, 10 * GIB);
    }

    #[test]
    fn freed_ranges_are_reused() {
        let mut map = MemoryMap::new(&[zone("dram", Tier::Dram, GIB, 0)], 36).unwrap();
        let remaining = map.allocate(2 * MIB, 4096).unwrap();
        for _ in 0..100 {
            let [small, large] = [4 * MIB, 3 * GIB].map(|len| map.allocate(len, 4096).unwrap());
            assert_eq!(
                (small.start, large.start),
                (remaining.start + GIB, remaining.start + 2 * GIB)
            );
            map.give_back(large);
            map.give_back(small);
            // Adjacent free ranges were merged.
            let both = map.allocate(4 * GIB, 4096).unwrap();
            assert_eq!(both.start, small.start);
            map.give_back(both);
        }
    }

    proptest! {
        #[test]
        fn ranges_in_use_never_overlap(steps in prop::collection::vec((any::<bool>(), 1u64..3000, any::<prop::sample::Index>()), 0..80)) {
            let mut map = MemoryMap::new(&[zone("dram", Tier::Dram, GIB, 0)], 46).unwrap();
            let mut used: Vec<GuestRange> = Vec::new();
            for (add, mib, index) in steps {
                if add || used.is_empty() {
                    let range = map.allocate(mib * MIB, HOTPLUG_ALIGN).unwrap();
                    prop_assert!(range.start >= HIGH_RAM_START && range.start.is_multiple_of(GIB) && range.len == mib * MIB);
                    prop_assert!(used.iter().all(|other| other.end() <= range.start || range.end() <= other.start));
                    used.push(range);
                } else {
                    map.give_back(used.swap_remove(index.index(used.len())));
                }
            }
        }
    }

    #[test]
    fn hole_splits_only_the_zone_that_reaches_it() {
        let range = |start: u64, len: u64| GuestRange { start, len };
        let boot = |zones: &[ZoneSpec]| {
            let map = MemoryMap::new(zones, 40).unwrap();
            map.zones().iter().map(|zone| zone.boot.clone()).collect::<Vec<_>>()
        };
        let dram = |boot_bytes| zone("dram", Tier::Dram, boot_bytes, 0);
        // The hole splits the second zone. The third zone is completely above the hole.
        assert_eq!(
            boot(&[dram(2 * GIB), dram(2 * GIB), dram(GIB)]),
            [
                vec![range(0, 2 * GIB)],
                vec![range(2 * GIB, GIB), range(4 * GIB, GIB)],
                vec![range(5 * GIB, GIB)]
            ]
        );
        // The first zone ends where the hole begins.
        assert_eq!(boot(&[dram(3 * GIB), dram(GIB)]), [[range(0, 3 * GIB)], [range(4 * GIB, GIB)]]);
        // Boot parts of any size are adjacent, as in a kernel's memory map. Hotplug parts start at
        // multiples of 1 GiB.
        let zones = [
            zone("a", Tier::Dram, 3 * GIB + 3 * MIB, 130 * MIB),
            zone("b", Tier::Dram, 6 * MIB, GIB),
        ];
        assert_eq!(
            boot(&zones),
            [
                vec![range(0, 3 * GIB), range(4 * GIB, 3 * MIB)],
                vec![range(4 * GIB + 3 * MIB, 6 * MIB)]
            ]
        );
        let map = MemoryMap::new(&zones, 40).unwrap();
        let hotplug: Vec<_> = map.zones().iter().map(|zone| zone.hotplug.unwrap()).collect();
        assert_eq!(hotplug, [range(5 * GIB, 256 * MIB), range(6 * GIB, GIB)]);
    }

    fn huge(boot_bytes: u64, page_bytes: u64) -> ZoneSpec {
        let host = HostMemory { pages: HostPages::Huge(page_bytes), ..HostMemory::default() };
        ZoneSpec { host, ..zone("huge", Tier::Dram, boot_bytes, 0) }
    }

    #[test]
    fn huge_pages_do_not_reach_into_the_hole() {
        let range = |start: u64, len: u64| GuestRange { start, len };
        let small = |boot_bytes| zone("dram", Tier::Dram, boot_bytes, 0);
        let boot = |zones: &[ZoneSpec]| {
            MemoryMap::new(zones, 40).unwrap().boot_ranges().collect::<Vec<_>>()
        };
        let high = HIGH_RAM_START;
        // 2.5 GiB are left below the hole. Pages of 1 GiB can use 2 GiB of it, and pages of 2 MiB
        // can use all of it.
        assert_eq!(
            boot(&[small(512 * MIB), huge(3 * GIB, GIB)]),
            [range(0, 512 * MIB), range(512 * MIB, 2 * GIB), range(high, GIB)]
        );
        assert_eq!(
            boot(&[small(512 * MIB), huge(3 * GIB, 2 * MIB)]),
            [range(0, 512 * MIB), range(512 * MIB, 5 * GIB / 2), range(high, 512 * MIB)]
        );
        // Three cases: no page fits, a zone ends at the hole, and a zone ends before the hole.
        assert_eq!(
            boot(&[small(3 * GIB - MIB), huge(GIB, GIB)]),
            [range(0, 3 * GIB - MIB), range(high, GIB)]
        );
        assert_eq!(
            boot(&[huge(3 * GIB, GIB), huge(GIB, GIB)]),
            [range(0, 3 * GIB), range(high, GIB)]
        );
        assert_eq!(
            boot(&[small(512 * MIB), huge(2 * GIB, GIB)]),
            [range(0, 512 * MIB), range(512 * MIB, 2 * GIB)]
        );
        // The rest below the hole remains unused, because boot memory above the hole begins with
        // the zone that was split.
        assert_eq!(
            boot(&[small(MIB), huge(3 * GIB, GIB), small(MIB)]),
            [range(0, MIB), range(MIB, 2 * GIB), range(high, GIB), range(high + GIB, MIB)]
        );
        // The page size is unknown and may be 1 GiB or 2 MiB.
        for (bytes, low) in [(3 * GIB, 2 * GIB), (3 * GIB + 2 * MIB, 5 * GIB / 2)] {
            let host = HostMemory { pages: HostPages::HugeAsUsual, ..HostMemory::default() };
            let zones = [small(512 * MIB), ZoneSpec { host, ..small(bytes) }];
            assert_eq!(boot(&zones)[1..], [range(512 * MIB, low), range(high, bytes - low)]);
        }
    }

    proptest! {
        #[test]
        fn boot_parts_are_whole_pages_around_the_hole(
            sizes in prop::collection::vec((1u64..3000, 0usize..3), 1..6),
        ) {
            let zones: Vec<_> = sizes
                .iter()
                .map(|(units, kind)| match kind {
                    0 => zone("small", Tier::Dram, units * MIB, 0),
                    1 => huge(units * 2 * MIB, 2 * MIB),
                    _ => huge((units / 300 + 1) * GIB, GIB),
                })
                .collect();
            let Ok(map) = MemoryMap::new(&zones, 46) else { return Ok(()) };
            let boot = map.boot();
            prop_assert_eq!(boot, BootMemory::of(&zones));
            for (placement, zone) in map.zones().iter().zip(&zones) {
                prop_assert_eq!(placement.boot.iter().map(|range| range.len).sum::<u64>(), zone.boot_bytes);
                let page_bytes = zone.boot_page_bytes();
                prop_assert!(placement.boot.iter().all(|range| range.len.is_multiple_of(page_bytes)));
            }
            // Neither part has gaps. Both end at the addresses that loaders and the memory map use.
            for (start, end) in [(0, boot.low_end()), (HIGH_RAM_START, boot.high_end())] {
                let inside = map.boot_ranges().filter(|range| (start..end).contains(&range.start));
                let reached = inside.fold(start, |at, range| if range.start == at { range.end() } else { 0 });
                prop_assert_eq!(reached, end);
            }
            prop_assert_eq!(map.boot_ranges().map(|range| range.end()).max(), Some(boot.end()));
            prop_assert!(boot.low_end() <= LOW_RAM_END);
            prop_assert!(boot.end() < HIGH_RAM_START || boot.low_end() > 2 * GIB);
        }
    }

    #[test]
    fn range_of_dimms_is_aligned_to_the_largest_linux_blocks() {
        let mut dimms = zone("dram", Tier::Dram, 4 * GIB + MIB, 200 * MIB + 4096);
        dimms.growth = Growth::Dimms;
        let map = MemoryMap::new(&[dimms], 40).unwrap();
        assert_eq!(map.zones()[0].hotplug, Some(GuestRange { start: 6 * GIB, len: 256 * MIB }));
    }

    #[test]
    fn block_size_matches_linux() {
        for (boot_end, expected) in [
            (512 * MIB, 128 * MIB),
            (63 * GIB, 128 * MIB),
            (64 * GIB - MIB, 128 * MIB),
            (64 * GIB, 2 * GIB),
            (65 * GIB, GIB),
            (65 * GIB + 256 * MIB, 256 * MIB),
            (65 * GIB + MIB, 128 * MIB),
            (127 * GIB, GIB),
            (1 << 40, 2 * GIB),
        ] {
            assert_eq!(linux_block_bytes(boot_end), expected, "{boot_end:#x}");
        }
    }

    #[test]
    fn hotplug_parts_consist_of_whole_linux_blocks() {
        // Boot memory ends 1 GiB, the size of the hole, above its own size.
        for (boot_end, dram_start, dram_len, pm_start) in [
            (5 * GIB, 5 * GIB, 640 * MIB, 6 * GIB),
            (63 * GIB, 63 * GIB, 640 * MIB, 64 * GIB),
            (64 * GIB, 64 * GIB, 2 * GIB, 66 * GIB),
            (65 * GIB, 65 * GIB, GIB, 66 * GIB),
            (66 * GIB, 66 * GIB, 2 * GIB, 68 * GIB),
            (127 * GIB, 127 * GIB, GIB, 128 * GIB),
        ] {
            let zones = [
                zone("dram", Tier::Dram, boot_end - GIB, 600 * MIB),
                zone("pm", Tier::Pm, 0, 4 * GIB),
            ];
            let map = MemoryMap::new(&zones, 40).unwrap();
            assert_eq!(map.boot_end(), boot_end);
            let hotplug: Vec<_> = map.zones().iter().map(|zone| zone.hotplug.unwrap()).collect();
            let expected = [(dram_start, dram_len), (pm_start, 4 * GIB)];
            assert_eq!(
                hotplug,
                expected.map(|(start, len)| GuestRange { start, len }),
                "{boot_end:#x}"
            );
        }
    }

    #[test]
    fn new_boot_size_must_leave_room_for_additional_ranges() {
        let zones = |boot_bytes| [zone("dram", Tier::Dram, boot_bytes, 32 * GIB)];
        let mut map = MemoryMap::new(&zones(GIB), 36).unwrap();
        let next = |map: &MemoryMap, boot_bytes| map.has_room_for(&zones(GIB), &zones(boot_bytes));
        // 64 GiB, less 4 GiB (low memory and the hole) and the ranges above boot memory.
        assert_eq!(next(&map, 31 * GIB), Ok(()));
        assert!(matches!(next(&map, 32 * GIB), Err(LayoutError::AddressSpace { .. })));
        map.allocate(4 * GIB, 4096).unwrap();
        assert_eq!(next(&map, 27 * GIB), Ok(()));
        assert!(matches!(next(&map, 28 * GIB), Err(LayoutError::AddressSpace { .. })));
        assert_eq!(next(&map, MIB), Err(LayoutError::BootTooSmall { size_bytes: MIB }));
    }

    #[test]
    fn zone_that_does_not_fit_is_refused_by_name() {
        let err = MemoryMap::new(
            &[zone("dram", Tier::Dram, GIB, 0), zone("pm", Tier::Pm, 0, 1 << 36)],
            36,
        );
        let what = "hotplug part of zone \"pm\"".to_owned();
        assert_eq!(
            err.unwrap_err(),
            LayoutError::AddressSpace { what, size_bytes: 1 << 36, address_bits: 36 }
        );
        let err = MemoryMap::new(&[zone("dram", Tier::Dram, GIB, MIB)], 36).unwrap_err();
        assert_eq!(
            err,
            LayoutError::Unaligned { zone: "dram".into(), size_bytes: MIB, unit_bytes: 2 * MIB }
        );
        let err = MemoryMap::new(&[zone("dram", Tier::Dram, 0, GIB)], 36).unwrap_err();
        assert_eq!(err, LayoutError::BootTooSmall { size_bytes: 0 });
        let mut map = MemoryMap::new(&[zone("dram", Tier::Dram, GIB, 0)], 36).unwrap();
        assert!(matches!(map.allocate(0, 1), Err(LayoutError::BadRange { .. })));
        assert!(matches!(map.allocate(4096, 3), Err(LayoutError::BadRange { .. })));
        assert!(matches!(
            map.allocate(u64::MAX - 4095, 1 << 63),
            Err(LayoutError::AddressSpace { .. })
        ));
    }

    proptest! {
        #[test]
        fn ranges_are_disjoint_aligned_and_inside_the_bounds(
            sizes in prop::collection::vec((0u64..6000, 0u64..200_000), 1..5),
            volumes in prop::collection::vec((1u64..1_000_000, 12u32..40), 0..4),
            address_bits in 33u8..53,
        ) {
            let zones: Vec<_> = sizes
                .iter()
                .map(|(boot, hotplug)| zone("z", Tier::Dram, boot * 1025 * 4096, hotplug * 2 * MIB))
                .collect();
            let Ok(mut map) = MemoryMap::new(&zones, address_bits) else { return Ok(()) };
            let mut behind: Vec<_> = map.zones().iter().filter_map(|zone| zone.hotplug).collect();
            for (pages, align_bits) in volumes {
                let align = 1 << align_bits;
                if let Ok(range) = map.allocate(pages * 4096, align) {
                    prop_assert!(range.start.is_multiple_of(align));
                    prop_assert_eq!(range.len, pages * 4096);
                    behind.push(range);
                }
            }
            prop_assert!(behind.iter().all(|range| range.start.is_multiple_of(GIB)));
            for (zone, spec) in map.zones().iter().zip(&zones) {
                prop_assert_eq!(zone.boot.iter().map(|range| range.len).sum::<u64>(), spec.boot_bytes);
                let hotplug = zone.hotplug.map_or(0, |range| range.len);
                let block = map.linux_block_bytes();
                prop_assert!(hotplug >= spec.hotplug_bytes && hotplug - spec.hotplug_bytes < block);
                prop_assert!(hotplug.is_multiple_of(block));
                prop_assert!(zone.hotplug.is_none_or(|range| range.start.is_multiple_of(block)));
            }
            let mut all: Vec<_> = map.boot_ranges().chain(behind).collect();
            all.push(GuestRange { start: LOW_RAM_END, len: HIGH_RAM_START - LOW_RAM_END });
            all.sort_by_key(|range| range.start);
            prop_assert!(all.windows(2).all(|pair| pair[0].end() <= pair[1].start));
            prop_assert!(all.iter().all(|range| range.len > 0 && range.end() <= 1 << address_bits));
        }
    }
}
