//! Loader for ELF files with a PVH entry point.
//!
//! Headers are verified before segments are copied. If an image is already in guest memory,
//! [`inplace`](super::inplace) moves its segments instead.
//!
//! linux-loader is not used. It cannot distinguish a short file from insufficient guest memory, nor
//! Linux from another kernel. It would also read the headers a second time, from a file that may
//! have changed.

use std::io::{self, Read, Seek, SeekFrom};

use foreshore_devices::memory::layout::{BootMemory, HIMEM_START};
use thiserror::Error;
use vm_memory::guest_memory::Error as AccessError;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend, ReadVolatile};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use super::pvh::{self, RangeKind};

const MAGIC: [u8; 4] = *b"\x7fELF";
const CLASS_64: u8 = 2;
const LITTLE_ENDIAN: u8 = 1;
const MACHINE_X86_64: u16 = 62;
const ET_REL: u16 = 1;
const ET_CORE: u16 = 4;
const PT_LOAD: u32 = 1;
const PT_INTERP: u32 = 3;
const PT_NOTE: u32 = 4;
/// Linux has five program headers. A file with thousands is not a kernel.
const MAX_PROGRAM_HEADERS: u16 = 64;
/// Linux has 512 bytes of notes.
const MAX_NOTE_BYTES: u64 = 64 << 10;

/// PVH enters the kernel in 32-bit mode, so the entry point must be a 32-bit address.
const LAST_ENTRY: u64 = u32::MAX as u64;

#[derive(Debug, Error)]
pub(crate) enum ElfError {
    #[error("it is {}", other_machine(*class, *byte_order, *machine))]
    WrongMachine {
        /// EI_CLASS; 2 is 64 bits.
        class: u8,
        /// EI_DATA; 1 is little-endian.
        byte_order: u8,
        /// e_machine; 62 is x86-64.
        machine: u16,
    },
    #[error("it is a program for Linux (dynamically linked), not a kernel")]
    Program,
    #[error("it is {kind}, not a kernel; the kernel is vmlinuz in /boot")]
    NotExecutable {
        /// Type of the ELF file.
        kind: &'static str,
    },
    #[error("it has no PVH note: it is a kernel built without CONFIG_PVH=y, or not a kernel")]
    NoPvhNote,
    #[error("the ELF file has {count} program headers of {size} bytes")]
    BadProgramHeaders { count: u16, size: u16 },
    #[error("the program headers, at {0:#x}, overlap the file header")]
    HeadersOverlap(u64),
    #[error("the ELF file has {actual_bytes} bytes, its program headers announce {expected_bytes}")]
    Truncated {
        /// File offset at which the last segment ends.
        expected_bytes: u64,
        actual_bytes: u64,
    },
    /// A segment is outside guest memory.
    #[error(
        "a segment at {start:#x}+{len:#x} does not fit into the guest's memory, which ends at {memory_end:#x}"
    )]
    DoesNotFit {
        start: u64,
        /// Length of the segment in guest memory, in bytes.
        len: u64,
        /// Address at which low memory ends.
        memory_end: u64,
    },
    /// Two segments overlap, so that the result would depend on the order of loading.
    #[error("the segments at {first:#x} and {second:#x} overlap")]
    SegmentsOverlap {
        /// Start of the segment with the lower address.
        first: u64,
        second: u64,
    },
    #[error("the PVH entry point {0:#x} is in no segment")]
    EntryOutside(u64),
    #[error("cannot read the ELF file")]
    Read(#[from] io::Error),
    #[error("cannot load the ELF file")]
    Load(#[source] AccessError),
}

impl From<AccessError> for ElfError {
    /// Segments are read from the file directly into guest memory, so an I/O error is always an
    /// error of the file.
    fn from(error: AccessError) -> Self {
        match error {
            AccessError::IOError(error) => Self::Read(error),
            error => Self::Load(error),
        }
    }
}

/// Describes the target machine of an ELF file that is not for x86-64.
fn other_machine(class: u8, byte_order: u8, machine: u16) -> String {
    let name = match machine {
        3 => "x86",
        8 => "MIPS",
        20 | 21 => "PowerPC",
        22 => "s390",
        40 => "ARM",
        62 => "x86-64",
        183 => "AArch64",
        243 => "RISC-V",
        258 => "LoongArch",
        _ => {
            return format!(
                "for a machine that is not x86-64: class {class}, byte order {byte_order}, machine {machine}"
            );
        }
    };
    match machine {
        3 | 62 if class == 1 => format!(
            "a 32-bit program for {name}; foreshore starts 64-bit kernels, not boot loaders such as GRUB: \
             pass the kernel that the boot loader would start"
        ),
        _ => format!("a program for {name}, and the guest's processor is x86-64"),
    }
}

/// ELF-64 file header (System V ABI, "ELF Header").
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct FileHeader {
    ident: [u8; 16],
    kind: u16,
    machine: u16,
    version: u32,
    entry: u64,
    program_headers_offset: u64,
    section_headers_offset: u64,
    flags: u32,
    size: u16,
    program_header_size: u16,
    program_header_count: u16,
    section_header_size: u16,
    section_header_count: u16,
    section_names_index: u16,
}

/// ELF-64 program header (System V ABI, "Program Header").
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct ProgramHeader {
    kind: u32,
    flags: u32,
    offset: u64,
    virtual_address: u64,
    physical_address: u64,
    file_size: u64,
    memory_size: u64,
    align: u64,
}

impl ProgramHeader {
    fn is_segment(&self) -> bool {
        self.kind == PT_LOAD && (self.memory_size != 0 || self.file_size != 0)
    }

    fn segment(&self) -> Segment {
        let Self { offset, physical_address: address, file_size: file_bytes, memory_size, .. } =
            *self;
        Segment { offset, address, file_bytes, memory_bytes: memory_size }
    }
}

/// Loadable segment of a verified image. The loadable segment is inside the file, and inside usable
/// memory above the boot data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    /// Offset in the file.
    pub offset: u64,
    /// Guest-physical address.
    pub address: u64,
    /// Length in the file, in bytes.
    pub file_bytes: u64,
    /// Length in memory in bytes, at least `file_bytes`. The bytes after `file_bytes` are zero.
    pub memory_bytes: u64,
}

/// Kernel that was loaded or verified.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LoadedElf {
    /// PVH entry point.
    pub entry: u64,
    /// First address after the kernel's segments.
    pub end: u64,
    /// True if the ELF notes identify Linux.
    pub is_linux: bool,
}

/// Loads the file `image` of `image_bytes` into boot memory.
pub(super) fn load<M, F>(
    memory: &M,
    image: &mut F,
    image_bytes: u64,
    boot_memory: BootMemory,
) -> Result<LoadedElf, ElfError>
where
    M: GuestMemoryBackend,
    F: Read + ReadVolatile + Seek,
{
    let (segments, loaded) = verify(image, image_bytes, boot_memory)?;
    for Segment { offset, address, file_bytes, .. } in segments {
        image.seek(SeekFrom::Start(offset))?;
        memory.read_exact_volatile_from(GuestAddress(address), image, file_bytes as usize)?;
    }
    Ok(loaded)
}

/// Verifies the headers, notes and segments. Returns the segments to load, and a description of the
/// kernel.
pub(super) fn verify<F: Read + Seek>(
    image: &mut F,
    image_bytes: u64,
    boot_memory: BootMemory,
) -> Result<(Vec<Segment>, LoadedElf), ElfError> {
    let headers = read_program_headers(image, image_bytes)?;
    // The type of the file is checked before the addresses of its segments. The segments of
    // programs are at addresses that no kernel uses.
    if headers.iter().any(|header| header.kind == PT_INTERP) {
        return Err(ElfError::Program);
    }
    check_lengths(&headers, image_bytes)?;
    let Facts { entry, is_linux } = read_notes(image, &headers)?;
    let entry = entry.ok_or(ElfError::NoPvhNote)?;
    check_segments(&headers, boot_memory)?;
    let segments: Vec<_> =
        headers.iter().filter(|header| header.is_segment()).map(ProgramHeader::segment).collect();
    let inside = |segment: &&Segment| {
        entry.checked_sub(segment.address).is_some_and(|at| at < segment.memory_bytes)
    };
    segments
        .iter()
        .find(inside)
        .filter(|_| entry <= LAST_ENTRY)
        .ok_or(ElfError::EntryOutside(entry))?;
    let ends = segments.iter().map(|segment| segment.address + segment.memory_bytes);
    let end = ends.max().expect("the entry point's segment");
    Ok((segments, LoadedElf { entry, end, is_linux }))
}

fn read_program_headers<F: Read + Seek>(
    image: &mut F,
    image_bytes: u64,
) -> Result<Vec<ProgramHeader>, ElfError> {
    let truncated =
        |expected_bytes| ElfError::Truncated { expected_bytes, actual_bytes: image_bytes };
    let header_bytes = size_of::<FileHeader>() as u64;
    if image_bytes < header_bytes {
        return Err(truncated(header_bytes));
    }
    let mut header = FileHeader::new_zeroed();
    image.rewind()?;
    image.read_exact(header.as_mut_bytes())?;
    let [class, byte_order] = [header.ident[4], header.ident[5]];
    let machine = header.machine;
    if !header.ident.starts_with(&MAGIC)
        || (class, byte_order, machine) != (CLASS_64, LITTLE_ENDIAN, MACHINE_X86_64)
    {
        return Err(ElfError::WrongMachine { class, byte_order, machine });
    }
    match header.kind {
        ET_REL => {
            return Err(ElfError::NotExecutable { kind: "a kernel module or an object file" });
        }
        ET_CORE => return Err(ElfError::NotExecutable { kind: "a core dump" }),
        _ => {}
    }
    let (count, size) = (header.program_header_count, header.program_header_size);
    if count > MAX_PROGRAM_HEADERS || usize::from(size) != size_of::<ProgramHeader>() {
        return Err(ElfError::BadProgramHeaders { count, size });
    }
    if header.program_headers_offset < header_bytes {
        return Err(ElfError::HeadersOverlap(header.program_headers_offset));
    }
    let len = u64::from(count) * u64::from(size);
    let end = header.program_headers_offset.saturating_add(len);
    if end > image_bytes {
        return Err(truncated(end));
    }
    let mut headers = vec![ProgramHeader::new_zeroed(); usize::from(count)];
    image.seek(SeekFrom::Start(header.program_headers_offset))?;
    image.read_exact(headers.as_mut_bytes())?;
    Ok(headers)
}

/// Checks that every segment is within the file.
fn check_lengths(headers: &[ProgramHeader], image_bytes: u64) -> Result<(), ElfError> {
    for header in headers.iter().filter(|header| header.is_segment() || header.kind == PT_NOTE) {
        let expected_bytes = header.offset.saturating_add(header.file_size);
        if expected_bytes > image_bytes {
            return Err(ElfError::Truncated { expected_bytes, actual_bytes: image_bytes });
        }
    }
    Ok(())
}

/// Checks that every segment is in one range of usable memory above the boot data, and that no two
/// segments overlap.
fn check_segments(headers: &[ProgramHeader], boot_memory: BootMemory) -> Result<(), ElfError> {
    let map = pvh::memory_map(boot_memory);
    for header in headers.iter().filter(|header| header.is_segment()) {
        let (start, len) = (header.physical_address, header.memory_size);
        let fits = |end: u64| {
            start >= HIMEM_START.raw_value()
                && header.file_size <= len
                && map.iter().any(|range| {
                    range.kind == RangeKind::Usable && range.start <= start && end <= range.end()
                })
        };
        if !start.checked_add(len).is_some_and(fits) {
            let memory_end = boot_memory.low_end();
            return Err(ElfError::DoesNotFit { start, len, memory_end });
        }
    }
    let ranges = headers.iter().filter(|header| header.is_segment());
    let mut ranges: Vec<_> =
        ranges.map(|header| (header.physical_address, header.memory_size)).collect();
    ranges.sort_unstable();
    for (&(first, len), &(second, _)) in ranges.iter().zip(ranges.iter().skip(1)) {
        // The sum cannot overflow, because the range is inside guest memory.
        if second < first + len {
            return Err(ElfError::SegmentsOverlap { first, second });
        }
    }
    Ok(())
}

#[derive(Default)]
struct Facts {
    entry: Option<u64>,
    is_linux: bool,
}

fn read_notes<F: Read + Seek>(image: &mut F, headers: &[ProgramHeader]) -> Result<Facts, ElfError> {
    let mut facts = Facts::default();
    for header in headers.iter().filter(|header| header.kind == PT_NOTE) {
        let mut notes = vec![0; header.file_size.min(MAX_NOTE_BYTES) as usize];
        image.seek(SeekFrom::Start(header.offset))?;
        image.read_exact(&mut notes)?;
        facts.read(&notes, header.align);
    }
    Ok(facts)
}

impl Facts {
    /// Reads the notes in a segment.
    ///
    /// In a segment with an alignment of 8, notes are aligned to 8 as well, according to binutils
    /// and glibc. Linux aligns its notes to 4 in every segment. Compilers add a property note,
    /// which changes the alignment of its segment to 8. For such a segment, the entry point is
    /// therefore searched for with both alignments.
    fn read(&mut self, notes: &[u8], segment_align: u64) {
        let ways: &[usize] = if segment_align == 8 { &[8, 4] } else { &[4] };
        for &align in ways {
            let mut entry = None;
            for note in (Notes { bytes: notes, at: 0, align }) {
                self.is_linux |= note.is_linux();
                entry = entry.or(note.pvh_entry());
            }
            self.entry = self.entry.or(entry);
            if entry.is_some() {
                break;
            }
        }
    }
}

struct Note<'a> {
    name: &'a [u8],
    kind: u32,
    description: &'a [u8],
}

impl Note<'_> {
    /// Entry point with 4 or 8 bytes (Xen's elfnote.h: XEN_ELFNOTE_PHYS32_ENTRY).
    fn pvh_entry(&self) -> Option<u64> {
        const XEN_ELFNOTE_PHYS32_ENTRY: u32 = 18;
        if self.name != b"Xen\0" || self.kind != XEN_ELFNOTE_PHYS32_ENTRY {
            return None;
        }
        match self.description.len() {
            4 => Some(u64::from(u32::from_le_bytes(*self.description.first_chunk()?))),
            8 => Some(u64::from_le_bytes(*self.description.first_chunk()?)),
            _ => None,
        }
    }

    /// Returns true if a note identifies Linux. Such a note has the name "Linux"
    /// (include/linux/build-salt.h and elfnote-lto.h), or is a note for Xen with "linux" as the
    /// guest OS (arch/x86/xen/xen-head.S). Every kernel since 4.19 has at least one such note.
    fn is_linux(&self) -> bool {
        const XEN_ELFNOTE_GUEST_OS: u32 = 6;
        self.name == b"Linux\0"
            || (self.name == b"Xen\0"
                && self.kind == XEN_ELFNOTE_GUEST_OS
                && self.description == b"linux\0")
    }
}

/// Notes of a note segment, up to the first incomplete note.
struct Notes<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Alignment of note descriptors and of notes, relative to the start of the segment. Note names
    /// directly follow the lengths.
    align: usize,
}

impl<'a> Notes<'a> {
    fn take(&mut self, len: u32) -> Option<&'a [u8]> {
        let end = self.at.checked_add(len as usize)?;
        let field = self.bytes.get(self.at..end)?;
        self.at = end;
        Some(field)
    }

    fn word(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(*self.take(4)?.first_chunk()?))
    }
}

impl<'a> Iterator for Notes<'a> {
    type Item = Note<'a>;

    fn next(&mut self) -> Option<Note<'a>> {
        let (name_len, description_len, kind) = (self.word()?, self.word()?, self.word()?);
        let name = self.take(name_len)?;
        self.at = self.at.next_multiple_of(self.align);
        let description = self.take(description_len)?;
        self.at = self.at.next_multiple_of(self.align);
        Some(Note { name, kind, description })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::Cursor;

    use vm_memory::bitmap::BitmapSlice;
    use vm_memory::{GuestMemoryMmap, VolatileMemoryError, VolatileSlice};

    use super::*;

    pub(crate) const LOAD_ADDRESS: u64 = 0x20_0000;
    pub(crate) const ENTRY: u64 = LOAD_ADDRESS + 0x10;
    const MEMORY_BYTES: u64 = 4 << 20;

    fn note(name: &[u8], kind: u32, description: &[u8]) -> Vec<u8> {
        note_aligned(4, name, kind, description)
    }

    fn note_aligned(align: usize, name: &[u8], kind: u32, description: &[u8]) -> Vec<u8> {
        let mut note = Vec::new();
        for word in [name.len() as u32, description.len() as u32, kind] {
            note.extend_from_slice(&word.to_le_bytes());
        }
        for field in [name, description] {
            note.extend_from_slice(field);
            note.resize(note.len().next_multiple_of(align), 0);
        }
        note
    }

    pub(crate) fn pvh_note() -> Vec<u8> {
        pvh_note_to(ENTRY)
    }

    pub(crate) fn pvh_note_to(entry: u64) -> Vec<u8> {
        note(b"Xen\0", 18, &entry.to_le_bytes())
    }

    pub(crate) fn linux_note() -> Vec<u8> {
        note(b"Linux\0", 0x100, b"6.12.0\0")
    }

    /// Segment of a test kernel. All its file bytes are `fill`.
    #[derive(Clone, Debug)]
    pub(crate) struct Part {
        pub offset: usize,
        pub address: u64,
        pub len: usize,
        pub fill: u8,
        pub bss: u64,
    }

    /// Builds a kernel from several segments, its notes, and `tail` unused bytes. The bytes between
    /// segments are not zero.
    pub(crate) fn build_parts(parts: &[Part], notes: &[u8], tail: usize) -> Vec<u8> {
        const JUNK: u8 = 0xdd;
        let mut header = FileHeader::new_zeroed();
        header.ident[..6].copy_from_slice(b"\x7fELF\x02\x01");
        header.machine = MACHINE_X86_64;
        header.entry = LOAD_ADDRESS;
        header.program_headers_offset = 64;
        header.program_header_size = 56;
        header.program_header_count = parts.len() as u16 + 1;
        let segment = |kind, offset: usize, address, size: usize, bss: u64| ProgramHeader {
            kind,
            flags: 0,
            offset: offset as u64,
            virtual_address: 0,
            physical_address: address,
            file_size: size as u64,
            memory_size: size as u64 + bss,
            align: 0,
        };
        let end = parts.iter().map(|part| part.offset + part.len).max().unwrap_or(64 + 56);
        let mut image = vec![JUNK; end + notes.len() + tail];
        for part in parts {
            image[part.offset..part.offset + part.len].fill(part.fill);
        }
        image[end..end + notes.len()].copy_from_slice(notes);
        let mut headers = header.as_bytes().to_vec();
        for part in parts {
            let header = segment(PT_LOAD, part.offset, part.address, part.len, part.bss);
            headers.extend_from_slice(header.as_bytes());
        }
        headers.extend_from_slice(segment(PT_NOTE, end, 0, notes.len(), 0).as_bytes());
        image[..headers.len()].copy_from_slice(&headers);
        image
    }

    /// Builds a kernel with one segment and one note segment.
    pub(crate) fn build(code: &[u8], notes: &[u8]) -> Vec<u8> {
        let offset = 64 + 2 * 56;
        let part = Part { offset, address: LOAD_ADDRESS, len: code.len(), fill: 0, bss: 0x1000 };
        let mut image = build_parts(&[part], notes, 0);
        image[offset..offset + code.len()].copy_from_slice(code);
        image
    }

    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY_BYTES as usize)]).unwrap()
    }

    fn load_bytes(image: &[u8]) -> Result<LoadedElf, ElfError> {
        load(
            &memory(),
            &mut Cursor::new(image),
            image.len() as u64,
            BootMemory::of_small_pages(MEMORY_BYTES),
        )
    }

    fn patched(offset: usize, bytes: &[u8]) -> Vec<u8> {
        let mut image = build(&[0x90; 0x100], &pvh_note());
        image[offset..offset + bytes.len()].copy_from_slice(bytes);
        image
    }

    #[test]
    fn files_other_than_kernels_are_described() {
        let message = |image: &[u8]| load_bytes(image).unwrap_err().to_string();
        // Images of GRUB, of a program for another processor, and for an unknown machine.
        let machine = |class: u8, machine: u16| {
            let mut image = patched(4, &[class]);
            image[18..20].copy_from_slice(&machine.to_le_bytes());
            message(&image)
        };
        assert!(
            machine(1, 3)
                .starts_with("it is a 32-bit program for x86; foreshore starts 64-bit kernels")
        );
        assert_eq!(
            machine(2, 183),
            "it is a program for AArch64, and the guest's processor is x86-64"
        );
        assert!(machine(2, 4711).ends_with("class 2, byte order 1, machine 4711"));
        // A program, with segments from address 0, and a kernel module.
        let mut program = patched(64 + 56, &PT_INTERP.to_le_bytes());
        program[64 + 24..64 + 32].fill(0);
        assert_eq!(
            message(&program),
            "it is a program for Linux (dynamically linked), not a kernel"
        );
        program[64 + 56] = PT_NOTE as u8 + 1;
        assert!(message(&program).starts_with("it has no PVH note"));
        assert!(
            message(&patched(16, &[1]))
                .starts_with("it is a kernel module or an object file, not a kernel")
        );
    }

    #[test]
    fn segments_are_loaded_at_their_addresses() {
        let memory = memory();
        let image = build(&[0xf4; 0x100], &[linux_note(), pvh_note()].concat());
        let loaded = load(
            &memory,
            &mut Cursor::new(&image),
            image.len() as u64,
            BootMemory::of_small_pages(MEMORY_BYTES),
        )
        .unwrap();
        assert_eq!(
            loaded,
            LoadedElf { entry: ENTRY, end: LOAD_ADDRESS + 0x100 + 0x1000, is_linux: true }
        );
        let mut code = [0; 0x101];
        memory.read_slice(&mut code, GuestAddress(LOAD_ADDRESS)).unwrap();
        assert!(code[..0x100].iter().all(|&byte| byte == 0xf4));
        assert_eq!(code[0x100], 0);
    }

    #[test]
    fn linux_is_detected_by_its_notes() {
        let linux = |notes: &[u8]| {
            load_bytes(&build(&[0; 64], &[notes, &pvh_note()].concat())).unwrap().is_linux
        };
        assert!(linux(&linux_note()));
        assert!(linux(&note(b"Xen\0", 6, b"linux\0")));
        assert!(!linux(&note(b"Xen\0", 6, b"FreeBSD\0")));
        assert!(!linux(&[]));
    }

    #[test]
    fn kernel_without_entry_point_is_refused() {
        assert!(matches!(load_bytes(&build(&[0; 64], &linux_note())), Err(ElfError::NoPvhNote)));
        let outside = note(b"Xen\0", 18, &0x30_0000u32.to_le_bytes());
        assert!(matches!(
            load_bytes(&build(&[0; 64], &outside)),
            Err(ElfError::EntryOutside(0x30_0000))
        ));
        // If the address were truncated to 32 bits, it would be inside the kernel.
        let too_high = pvh_note_to(ENTRY | 1 << 32);
        assert!(matches!(load_bytes(&build(&[0; 64], &too_high)), Err(ElfError::EntryOutside(_))));
        let odd = note(b"Xen\0", 18, &[0; 6]);
        assert!(matches!(load_bytes(&build(&[0; 64], &odd)), Err(ElfError::NoPvhNote)));
    }

    #[test]
    fn entry_point_equals_that_of_linux_loader() {
        use linux_loader::loader::{Elf, KernelLoader, PvhBootCapability};
        let short = note(b"Xen\0", 18, &(ENTRY as u32).to_le_bytes());
        for notes in [pvh_note(), short, [linux_note(), pvh_note(), pvh_note_to(0)].concat()] {
            let image = build(&[0; 64], &notes);
            let theirs =
                Elf::load(&memory(), None, &mut Cursor::new(&image), None).unwrap().pvh_boot_cap;
            assert_eq!(theirs, PvhBootCapability::PvhEntryPresent(GuestAddress(ENTRY)));
            assert_eq!(load_bytes(&image).unwrap().entry, ENTRY);
        }
    }

    /// Kernel whose note segment is aligned to `align`.
    fn build_aligned(align: u64, notes: &[u8]) -> Vec<u8> {
        let mut image = build(&[0; 64], notes);
        let field = 64 + 56 + 48;
        image[field..field + 8].copy_from_slice(&align.to_le_bytes());
        image
    }

    #[test]
    fn notes_in_segment_aligned_to_8_are_read_with_both_alignments() {
        // The alignments round these lengths differently. The first note is .note.gnu.property,
        // which changes the alignment of the segment to 8.
        let notes = |align| {
            let property = note_aligned(8, b"GNU\0", 5, &[7; 16]);
            let version = note_aligned(align, b"Linux\0", 0x100, b"6.12.0\0");
            let short = note_aligned(align, b"Xen\0", 6, b"linux\0");
            let entry = note_aligned(align, b"Xen\0", 18, &(ENTRY as u32).to_le_bytes());
            [property, version, short, entry].concat()
        };
        assert_ne!(notes(4), notes(8));
        for (segment, inside) in [(8, 8), (8, 4), (4, 4), (0, 4), (1, 4), (u64::MAX, 4)] {
            let loaded = load_bytes(&build_aligned(segment, &notes(inside)));
            let loaded = loaded.unwrap_or_else(|err| panic!("{segment}, {inside}: {err}"));
            assert!(loaded.entry == ENTRY && loaded.is_linux, "{segment}, {inside}");
        }
        assert!(matches!(load_bytes(&build_aligned(4, &notes(8))), Err(ElfError::NoPvhNote)));
        // The last note in a segment need not be padded.
        let mut ends_early = [
            note_aligned(8, b"Xen\0", 18, &ENTRY.to_le_bytes()),
            note_aligned(8, b"Linux\0", 0x100, b"6.12.0\0"),
        ]
        .concat();
        assert_eq!(ends_early.pop(), Some(0));
        assert!(load_bytes(&build_aligned(8, &ends_early)).unwrap().is_linux);
    }

    #[test]
    fn every_truncation_is_reported() {
        let image = build(&[0x90; 0x100], &pvh_note());
        for len in 0..image.len() {
            assert!(matches!(load_bytes(&image[..len]), Err(ElfError::Truncated { .. })), "{len}");
        }
    }

    #[test]
    fn segments_outside_memory_are_refused() {
        // In program header 0, the physical address is at 64 + 24, and the size in memory at 64 +
        // 40.
        for start in [0u64, 0xf_ffff, MEMORY_BYTES, MEMORY_BYTES - 0x10, u64::MAX - 8, 1 << 32] {
            let image = patched(64 + 24, &start.to_le_bytes());
            assert!(matches!(load_bytes(&image), Err(ElfError::DoesNotFit { .. })), "{start:#x}");
        }
        for len in [0, 0x20u64, MEMORY_BYTES, u64::MAX] {
            let image = patched(64 + 40, &len.to_le_bytes());
            assert!(matches!(load_bytes(&image), Err(ElfError::DoesNotFit { .. })), "{len:#x}");
        }
    }

    /// File whose segments cannot be read.
    struct Unreadable(Cursor<Vec<u8>>);

    impl Read for Unreadable {
        fn read(&mut self, data: &mut [u8]) -> io::Result<usize> {
            self.0.read(data)
        }
    }

    impl Seek for Unreadable {
        fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
            self.0.seek(to)
        }
    }

    impl ReadVolatile for Unreadable {
        fn read_volatile<B: BitmapSlice>(
            &mut self,
            _: &mut VolatileSlice<B>,
        ) -> Result<usize, VolatileMemoryError> {
            Err(VolatileMemoryError::IOError(io::Error::from_raw_os_error(libc::EIO)))
        }
    }

    #[test]
    fn read_error_of_a_segment_is_an_error_of_the_file() {
        let image = build(&[0x90; 0x100], &pvh_note());
        let (len, boot_memory) = (image.len() as u64, BootMemory::of_small_pages(MEMORY_BYTES));
        let result = load(&memory(), &mut Unreadable(Cursor::new(image)), len, boot_memory);
        let Err(ElfError::Read(error)) = result else { panic!("{result:?}") };
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
    }

    #[test]
    fn overlapping_segments_are_refused() {
        let part = |index: usize, address: u64| Part {
            offset: 0x1000 + 0x100 * index,
            address,
            len: 0x100,
            fill: index as u8,
            bss: 0x100,
        };
        let load_at = |second: u64, third: u64| {
            let parts = [part(0, LOAD_ADDRESS), part(1, second), part(2, third)];
            load_bytes(&build_parts(&parts, &pvh_note(), 0))
        };
        let after = LOAD_ADDRESS + 0x200;
        assert!(load_at(after, after + 0x200).is_ok());
        assert!(load_at(after + 0x200, after).is_ok(), "the order of the headers is free");
        for (second, third, common) in [
            (LOAD_ADDRESS, after, (LOAD_ADDRESS, LOAD_ADDRESS)),
            (after - 1, after + 0x200, (LOAD_ADDRESS, after - 1)),
            (after, after + 0x1ff, (after, after + 0x1ff)),
            (after + 0x200, after - 1, (LOAD_ADDRESS, after - 1)),
        ] {
            let error = load_at(second, third).unwrap_err();
            let ElfError::SegmentsOverlap { first, second } = error else { panic!("{error}") };
            assert_eq!((first, second), common);
        }
    }

    #[test]
    fn other_machines_and_odd_headers_are_refused() {
        for (offset, value) in [(4, 1), (5, 2), (18, 183)] {
            assert!(matches!(
                load_bytes(&patched(offset, &[value])),
                Err(ElfError::WrongMachine { .. })
            ));
        }
        assert!(matches!(
            load_bytes(&patched(54, &[32])),
            Err(ElfError::BadProgramHeaders { size: 32, .. })
        ));
        assert!(matches!(load_bytes(&patched(57, &[1])), Err(ElfError::BadProgramHeaders { .. })));
        assert!(matches!(load_bytes(&patched(32, &[63])), Err(ElfError::HeadersOverlap(63))));
        // A note whose size exceeds the segment ends the list.
        let mut notes = pvh_note();
        notes[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(load_bytes(&build(&[0; 64], &notes)).is_err());
    }
}
