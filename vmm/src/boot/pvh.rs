//! PVH handover: start info, module list, memory map, and the initial state of the boot vCPU.
//!
//! The ABI is defined in Xen's docs/misc/pvh.pandoc ("x86/HVM direct boot ABI") and
//! xen/include/public/arch-x86/hvm/start_info.h. Linux reads it in
//! arch/x86/platform/pvh/enlighten.c.

use foreshore_devices::memory::layout::{
    BootMemory, EBDA_START, ECAM_LEN, ECAM_START, HIGH_RAM_START, HIMEM_START, RSDP_START,
};
use linux_loader::loader::elf::start_info::{
    hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend};

use super::{BootError, Initramfs};

const START_INFO: GuestAddress = GuestAddress(0x6000);
const MODULE_LIST: GuestAddress = GuestAddress(0x6040);
const MEMORY_MAP: GuestAddress = GuestAddress(0x7000);
const COMMAND_LINE: GuestAddress = GuestAddress(0x2_0000);

/// "xEn3" with bit 7 of the "E" set.
const START_INFO_MAGIC: u32 = 0x336e_c578;
/// Version 1 includes the memory map. Without a memory map, Linux requests one from Xen.
const START_INFO_VERSION: u32 = 1;

/// Type of a range in the memory map (ACPI 6.5, 15, table 15.9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum RangeKind {
    Usable = 1,
    Reserved = 2,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MemoryRange {
    pub start: u64,
    pub len: u64,
    pub kind: RangeKind,
}

impl MemoryRange {
    /// First address after the range.
    pub(super) fn end(&self) -> u64 {
        self.start + self.len
    }
}

/// Memory map of the guest at boot, in ascending order. Hotplug parts of zones are not in the map,
/// because their memory appears only when it is plugged.
pub(super) fn memory_map(boot_memory: BootMemory) -> Vec<MemoryRange> {
    let range =
        |start: u64, end: u64, kind| MemoryRange { start, len: end.saturating_sub(start), kind };
    let (low_end, high_end) = (boot_memory.low_end(), boot_memory.high_end());
    let mut map = vec![
        range(0, EBDA_START.min(low_end), RangeKind::Usable),
        range(EBDA_START, HIMEM_START.raw_value(), RangeKind::Reserved),
        range(HIMEM_START.raw_value(), low_end, RangeKind::Usable),
        // Linux uses the configuration space only if its range is reserved. PNP0C02 in the DSDT
        // reserves it as well.
        range(ECAM_START, ECAM_START + ECAM_LEN, RangeKind::Reserved),
        range(HIGH_RAM_START, high_end, RangeKind::Usable),
    ];
    map.retain(|range| range.len != 0);
    map
}

/// Segment register with its hidden part (Intel SDM 3A, 3.4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub selector: u16,
    pub base: u64,
    pub limit: u32,
    /// Type field of the segment descriptor.
    pub kind: u8,
    /// True for a code or data segment, false for a system segment.
    pub code_or_data: bool,
    /// True if operands have 32 bits by default.
    pub default_32: bool,
    /// True if the limit is in units of pages.
    pub page_granular: bool,
}

/// State of the boot vCPU at the kernel's first instruction. All other registers are 0, interrupts
/// are off, and the vCPU has no GDT or IDT, because the kernel sets up its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PvhEntry {
    pub rip: u64,
    /// Address of the start info, as PVH requires.
    pub rbx: u64,
    /// Only bit 1 is set, which always reads as 1.
    pub rflags: u64,
    /// Protected mode without paging.
    pub cr0: u64,
    pub cr4: u64,
    /// Long mode is off.
    pub efer: u64,
    /// CS: flat, 32-bit.
    pub code: Segment,
    /// DS, ES, FS, GS and SS: flat.
    pub data: Segment,
    /// TR: a busy 32-bit TSS, which the processor requires.
    pub task: Segment,
}

impl PvhEntry {
    /// Initial state for a kernel with entry point `entry`. The start info must be at the address
    /// used by [`Handover::write`].
    pub(crate) fn new(entry: u64) -> Self {
        const CR0_PE: u64 = 1;
        // Hard-wired to 1 in all current processors.
        const CR0_ET: u64 = 1 << 4;
        let flat = |selector, kind| Segment {
            selector,
            base: 0,
            limit: u32::MAX,
            kind,
            code_or_data: true,
            default_32: true,
            page_granular: true,
        };
        Self {
            rip: entry,
            rbx: START_INFO.raw_value(),
            rflags: 1 << 1,
            cr0: CR0_PE | CR0_ET,
            cr4: 0,
            efer: 0,
            // Types from SDM 3A, table 3-1: execute/read accessed, read/write accessed; table 3-2:
            // busy TSS.
            code: flat(0x08, 0xb),
            data: flat(0x10, 0x3),
            task: Segment {
                selector: 0x18,
                limit: 0x67,
                kind: 0xb,
                code_or_data: false,
                default_32: false,
                page_granular: false,
                ..flat(0, 0)
            },
        }
    }
}

/// Data that the start info points to.
pub(super) struct Handover<'a> {
    /// Complete command line of the guest.
    pub cmdline: &'a str,
    pub initramfs: Option<&'a Initramfs>,
    pub boot_memory: BootMemory,
}

impl Handover<'_> {
    /// Writes all data to addresses below 640 KiB.
    pub(super) fn write<M: GuestMemoryBackend>(&self, memory: &M) -> Result<(), BootError> {
        let too_little = |address: GuestAddress| {
            let boot_memory_bytes = self.boot_memory.bytes();
            move |_| BootError::TooLittleMemory { boot_memory_bytes, address: address.raw_value() }
        };
        let map = memory_map(self.boot_memory);
        for (range, at) in
            map.iter().zip((0..).map(|i| i * size_of::<hvm_memmap_table_entry>() as u64))
        {
            let MemoryRange { start: addr, len: size, kind } = *range;
            let entry = hvm_memmap_table_entry { addr, size, type_: kind as u32, reserved: 0 };
            let at = MEMORY_MAP.unchecked_add(at);
            memory.write_obj(entry, at).map_err(too_little(at))?;
        }
        if let Some(initramfs) = self.initramfs {
            // Linux uses the first module as its initramfs.
            let entry = hvm_modlist_entry {
                paddr: initramfs.start.raw_value(),
                size: initramfs.size_bytes,
                ..Default::default()
            };
            memory.write_obj(entry, MODULE_LIST).map_err(too_little(MODULE_LIST))?;
        }
        let line = [self.cmdline.as_bytes(), &[0]].concat();
        memory.write_slice(&line, COMMAND_LINE).map_err(too_little(COMMAND_LINE))?;
        let start_info = hvm_start_info {
            magic: START_INFO_MAGIC,
            version: START_INFO_VERSION,
            flags: 0,
            nr_modules: u32::from(self.initramfs.is_some()),
            modlist_paddr: self.initramfs.map_or(0, |_| MODULE_LIST.raw_value()),
            cmdline_paddr: COMMAND_LINE.raw_value(),
            rsdp_paddr: RSDP_START.raw_value(),
            memmap_paddr: MEMORY_MAP.raw_value(),
            memmap_entries: map.len() as u32,
            reserved: 0,
        };
        memory.write_obj(start_info, START_INFO).map_err(too_little(START_INFO))
    }
}

#[cfg(test)]
mod tests {
    use foreshore_devices::memory::layout::{GIB, LOW_RAM_END, MIB};
    use foreshore_devices::memory::zone::{HostMemory, HostPages, ZoneSpec};
    use vm_memory::GuestMemoryMmap;

    use super::*;

    #[test]
    fn memory_map_ascends_and_covers_boot_memory() {
        let hole = HIMEM_START.raw_value() - EBDA_START;
        for bytes in [64 * MIB, 512 * MIB, LOW_RAM_END, LOW_RAM_END + MIB, 16 * GIB] {
            let map = memory_map(BootMemory::of_small_pages(bytes));
            assert!(map.is_sorted_by(|a, b| a.end() <= b.start), "{map:x?}");
            let usable = map.iter().filter(|range| range.kind == RangeKind::Usable);
            assert_eq!(usable.map(|range| range.len).sum::<u64>(), bytes - hole);
        }
        assert_eq!(
            memory_map(BootMemory::of_small_pages(LOW_RAM_END)).last().unwrap().start,
            ECAM_START
        );
        let high = memory_map(BootMemory::of_small_pages(5 * GIB));
        assert_eq!(high.last().unwrap().start, HIGH_RAM_START);
        assert_eq!(high.last().unwrap().len, 2 * GIB);
    }

    #[test]
    fn memory_map_ends_where_huge_pages_end_below_the_hole() {
        let hole = HIMEM_START.raw_value() - EBDA_START;
        for (first, second, page, low_end) in [
            (512 * MIB, 3 * GIB, GIB, 5 * GIB / 2),
            (512 * MIB, 3 * GIB, 2 * MIB, 3 * GIB),
            (3 * GIB - MIB, GIB, GIB, 3 * GIB - MIB),
            (GIB, 2 * GIB, GIB, 3 * GIB),
        ] {
            let zone = |boot_bytes, pages| ZoneSpec {
                id: "zone".to_owned(),
                host: HostMemory { pages, ..HostMemory::default() },
                boot_bytes,
                ..ZoneSpec::default()
            };
            let zones = [zone(first, HostPages::Transparent), zone(second, HostPages::Huge(page))];
            let map = memory_map(BootMemory::of(&zones));
            let usable = map.iter().filter(|range| range.kind == RangeKind::Usable);
            assert_eq!(usable.map(|range| range.len).sum::<u64>(), first + second - hole);
            assert!(map.iter().any(|range| range.end() == low_end), "{map:x?}");
        }
    }

    #[test]
    fn start_info_has_the_offsets_of_its_abi() {
        let memory: GuestMemoryMmap =
            GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let initramfs = Initramfs { start: GuestAddress(0x123_4000), size_bytes: 0x5678 };
        let handover = Handover {
            cmdline: "quiet",
            initramfs: Some(&initramfs),
            boot_memory: BootMemory::of_small_pages(512 * MIB),
        };
        handover.write(&memory).unwrap();
        let u32_at = |offset| memory.read_obj::<u32>(START_INFO.unchecked_add(offset)).unwrap();
        let u64_at = |offset| memory.read_obj::<u64>(START_INFO.unchecked_add(offset)).unwrap();
        assert_eq!((u32_at(0), u32_at(4), u32_at(8), u32_at(12)), (0x336e_c578, 1, 0, 1));
        assert_eq!(u64_at(32), 0xa_0000);
        let module = u64_at(16);
        assert_eq!(memory.read_obj::<u64>(GuestAddress(module)).unwrap(), 0x123_4000);
        assert_eq!(memory.read_obj::<u64>(GuestAddress(module + 8)).unwrap(), 0x5678);
        let mut line = [0; 6];
        memory.read_slice(&mut line, GuestAddress(u64_at(24))).unwrap();
        assert_eq!(&line, b"quiet\0");
        // Memory map entries of 24 bytes: address, size, type.
        let map = u64_at(40);
        assert_eq!(u32_at(48), memory_map(BootMemory::of_small_pages(512 * MIB)).len() as u32);
        assert_eq!(memory.read_obj::<u64>(GuestAddress(map + 24)).unwrap(), EBDA_START);
        assert_eq!(memory.read_obj::<u32>(GuestAddress(map + 24 + 16)).unwrap(), 2);
    }

    #[test]
    fn without_modules_the_list_is_absent() {
        let memory: GuestMemoryMmap =
            GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let handover =
            Handover { cmdline: "", initramfs: None, boot_memory: BootMemory::of_small_pages(MIB) };
        handover.write(&memory).unwrap();
        assert_eq!(memory.read_obj::<u32>(START_INFO.unchecked_add(12)).unwrap(), 0);
        assert_eq!(memory.read_obj::<u64>(START_INFO.unchecked_add(16)).unwrap(), 0);
        let tiny: GuestMemoryMmap =
            GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x8000)]).unwrap();
        assert!(matches!(handover.write(&tiny), Err(BootError::TooLittleMemory { .. })));
    }

    #[test]
    fn vcpu_enters_flat_32_bit_protected_mode() {
        let entry = PvhEntry::new(0x100_0ab0);
        assert_eq!((entry.rip, entry.rbx, entry.rflags), (0x100_0ab0, 0x6000, 2));
        assert_eq!((entry.cr0, entry.cr4, entry.efer), (0x11, 0, 0));
        for segment in [entry.code, entry.data] {
            assert!(segment.default_32 && segment.page_granular && segment.code_or_data);
            assert_eq!((segment.base, segment.limit), (0, u32::MAX));
        }
        assert_eq!(
            (entry.task.limit, entry.task.kind, entry.task.code_or_data),
            (0x67, 0xb, false)
        );
    }
}
