//! Loading of kernel and firmware files.

use std::fs::File;
use std::io::{self, Cursor, Read, Seek, SeekFrom};
use std::path::Path;

use foreshore_decompress::{Compression, DecompressError, MAX_KERNEL_BYTES, Packed};
use foreshore_devices::memory::PrivateRanges;
use foreshore_devices::memory::layout::BootMemory;
use vm_memory::GuestMemoryBackend;

use super::inplace::{self, Outcome};
use super::scratch::Scratch;
use super::unpack::{self, UnpackError};
use super::{BootError, elf};

/// Number of bytes that suffices to identify a file. The setup header ends before it (boot.rst,
/// "The Real-Mode Kernel Header").
const HEAD_BYTES: usize = 0x280;
/// Boot protocol 2.08 added payload_offset and payload_length.
const FIRST_PROTOCOL: u16 = 0x0208;
const SECTOR_BYTES: u64 = 512;
const ELF_MAGIC: &[u8] = b"\x7fELF";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LoadedKernel {
    /// PVH entry point.
    pub entry: u64,
    /// First address after the kernel's segments.
    pub end: u64,
    /// True for a bzImage, and for an ELF file with the notes of Linux.
    pub is_linux: bool,
    /// Compression of the bzImage; `None` for an ELF file.
    pub bzimage: Option<Compression>,
}

/// Fields of a bzImage's setup header that locate its payload (boot.rst).
#[derive(Debug, PartialEq, Eq)]
struct SetupHeader {
    protocol: u16,
    payload_start: u64,
    payload_bytes: u64,
}

impl SetupHeader {
    /// Parses the first bytes of a file. Returns `None` if it is not a bzImage.
    fn parse(head: &[u8]) -> Option<Self> {
        let u16_at = |offset| Some(u16::from_le_bytes(*head.get(offset..)?.first_chunk()?));
        let u32_at = |offset| Some(u32::from_le_bytes(*head.get(offset..)?.first_chunk()?));
        if u16_at(0x1fe)? != 0xaa55 || head.get(0x202..0x206)? != b"HdrS" {
            return None;
        }
        // 0 means 4 "for backwards compatibility".
        let setup_sectors = match head[0x1f1] {
            0 => 4,
            sectors => u64::from(sectors),
        };
        Some(Self {
            protocol: u16_at(0x206)?,
            payload_start: (setup_sectors + 1) * SECTOR_BYTES + u64::from(u32_at(0x248)?),
            payload_bytes: u64::from(u32_at(0x24c)?),
        })
    }
}

/// Loads the kernel in `path`.
///
/// # Safety
/// Same as for [`boot::load`](super::load).
pub(super) unsafe fn load<M: GuestMemoryBackend>(
    memory: &M,
    path: &Path,
    boot_memory: BootMemory,
    private: &PrivateRanges,
) -> Result<LoadedKernel, BootError> {
    let read_error =
        |source| BootError::Read { flag: "--kernel", path: path.to_path_buf(), source };
    let elf_error = |source| BootError::Elf { flag: "--kernel", path: path.to_path_buf(), source };
    let (mut file, file_bytes) = super::open_file("--kernel", path)?;
    let head = read_head(&mut file).map_err(read_error)?;

    if head.starts_with(ELF_MAGIC) {
        let loaded = elf::load(memory, &mut file, file_bytes, boot_memory).map_err(elf_error)?;
        let elf::LoadedElf { entry, end, is_linux } = loaded;
        return Ok(LoadedKernel { entry, end, is_linux, bzimage: None });
    }
    let Some(header) = SetupHeader::parse(&head) else {
        return Err(BootError::NotAKernel { path: path.to_path_buf(), found: describe(&head) });
    };
    let payload = read_payload(path, &mut file, file_bytes, &header)?;
    let unpack_error = |source| BootError::Decompress { path: path.to_path_buf(), source };
    let compression =
        detect_compression(payload.bytes()).map_err(|error| unpack_error(error.into()))?;
    // SAFETY: this function has the same contract.
    let unpacked = unsafe { unpack(memory, payload, compression, boot_memory, private) };
    let loaded = match unpacked.map_err(unpack_error)? {
        Unpacked::InPlace(loaded) => loaded,
        Unpacked::Image(image) => load_image(memory, &image, boot_memory).map_err(elf_error)?,
    };
    let elf::LoadedElf { entry, end, .. } = loaded;
    Ok(LoadedKernel { entry, end, is_linux: true, bzimage: Some(compression) })
}

pub(super) fn load_firmware<M: GuestMemoryBackend>(
    memory: &M,
    path: &Path,
    boot_memory: BootMemory,
) -> Result<LoadedKernel, BootError> {
    let (flag, path) = ("--firmware", path.to_path_buf());
    let (mut file, file_bytes) = super::open_file(flag, &path)?;
    let head = read_head(&mut file).map_err(|source| BootError::Read {
        flag,
        path: path.clone(),
        source,
    })?;
    if !head.starts_with(ELF_MAGIC) {
        return Err(BootError::NotAFirmware { path, found: describe(&head) });
    }
    let elf::LoadedElf { entry, end, is_linux } =
        elf::load(memory, &mut file, file_bytes, boot_memory).map_err(|source| BootError::Elf {
            flag,
            path,
            source,
        })?;
    Ok(LoadedKernel { entry, end, is_linux, bzimage: None })
}

fn read_head(file: &mut File) -> io::Result<Vec<u8>> {
    let mut head = Vec::with_capacity(HEAD_BYTES);
    file.take(HEAD_BYTES as u64).read_to_end(&mut head)?;
    Ok(head)
}

fn read_payload(
    path: &Path,
    file: &mut File,
    file_bytes: u64,
    header: &SetupHeader,
) -> Result<Scratch, BootError> {
    if header.protocol < FIRST_PROTOCOL {
        return Err(BootError::OldProtocol { path: path.to_path_buf(), version: header.protocol });
    }
    if header.payload_bytes == 0 {
        return Err(BootError::NoPayload { path: path.to_path_buf() });
    }
    if header.payload_bytes > MAX_KERNEL_BYTES.into() {
        let (path, payload_bytes) = (path.to_path_buf(), header.payload_bytes);
        return Err(BootError::PayloadTooLarge { path, payload_bytes });
    }
    let expected_bytes = header.payload_start + header.payload_bytes;
    if expected_bytes > file_bytes {
        return Err(BootError::Truncated {
            path: path.to_path_buf(),
            expected_bytes,
            actual_bytes: file_bytes,
        });
    }
    let mut read = || -> io::Result<Scratch> {
        let mut payload = Scratch::new(header.payload_bytes as usize)?;
        file.seek(SeekFrom::Start(header.payload_start))?;
        file.read_exact(payload.bytes_mut())?;
        Ok(payload)
    };
    read().map_err(|source| BootError::Read { flag: "--kernel", path: path.to_path_buf(), source })
}

fn detect_compression(payload: &[u8]) -> Result<Compression, DecompressError> {
    Compression::of(payload)
        .ok_or_else(|| DecompressError::Unknown(payload.iter().copied().take(8).collect()))
}

enum Unpacked {
    InPlace(elf::LoadedElf),
    /// ELF image that has yet to be loaded.
    Image(Scratch),
}

/// Unpacks a payload into guest memory if possible, and otherwise into a buffer. Drops the
/// compressed payload.
///
/// # Safety
/// Same as for [`boot::load`](super::load).
unsafe fn unpack<M: GuestMemoryBackend>(
    memory: &M,
    payload: Scratch,
    compression: Compression,
    boot_memory: BootMemory,
    private: &PrivateRanges,
) -> Result<Unpacked, UnpackError> {
    if compression == Compression::None {
        return Ok(Unpacked::Image(payload));
    }
    let packed = Packed::new(payload.bytes(), compression)?;
    // SAFETY: this function has the same contract.
    Ok(match unsafe { inplace::load(memory, &packed, boot_memory, private) }? {
        Outcome::Loaded(loaded) => Unpacked::InPlace(loaded),
        Outcome::Unpacked(image) => Unpacked::Image(image),
        Outcome::NoRoom => Unpacked::Image(unpack::unpack(&packed)?),
    })
}

fn load_image<M: GuestMemoryBackend>(
    memory: &M,
    image: &Scratch,
    boot_memory: BootMemory,
) -> Result<elf::LoadedElf, elf::ElfError> {
    let image = image.bytes();
    elf::load(memory, &mut Cursor::new(image), image.len() as u64, boot_memory)
}

/// Describes the type of a file that is not a kernel, for an error message.
fn describe(head: &[u8]) -> String {
    const KNOWN: [(&[u8], &str); 8] = [
        (&[0x1f, 0x8b], "a gzip file"),
        (&[0x28, 0xb5, 0x2f, 0xfd], "a zstd file"),
        (b"\xfd7zXZ\0", "an xz file"),
        (b"070701", "a cpio archive (an initramfs?)"),
        (b"#!", "a script"),
        (b"QFI\xfb", "a qcow2 image"),
        (b"!<arch>", "an ar archive (a Debian package?)"),
        (b"MZ", "an EFI program without a Linux setup header"),
    ];
    if head.is_empty() {
        return "an empty file".into();
    }
    match KNOWN.iter().find(|(magic, _)| head.starts_with(magic)) {
        Some((_, name)) => (*name).into(),
        None => format!("a file that starts with {:02x?}", &head[..head.len().min(8)]),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::path::PathBuf;

    use foreshore_devices::memory::layout::HIMEM_START;
    use proptest::prelude::*;
    use tempfile::NamedTempFile;
    use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

    use super::super::elf::tests::{ENTRY, build, linux_note, pvh_note};
    use super::super::inplace::tests::{all_private, contents};
    use super::super::payloads::{gzip_payload, lz4_payload, xz_payload, zstd_payload};
    use super::*;

    /// Too little memory to unpack in place.
    const MEMORY_BYTES: u64 = 4 << 20;
    const MORE_MEMORY_BYTES: u64 = 20 << 20;
    const LOW_BYTES: u64 = HIMEM_START.0;

    fn bzimage(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 3 * 512 + 0x100];
        image[0x1f1] = 2;
        image[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x206..0x208].copy_from_slice(&0x020fu16.to_le_bytes());
        image[0x248..0x24c].copy_from_slice(&0x100u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        image.extend_from_slice(payload);
        // In a real image, more protected-mode code follows the payload.
        image.extend_from_slice(&[0xcc; 64]);
        image
    }

    fn kernel() -> Vec<u8> {
        build(&[0x90; 0x8000], &[linux_note(), pvh_note()].concat())
    }

    /// Loads into memory of the test.
    fn load(memory: &GuestMemoryMmap, path: &Path, bytes: u64) -> Result<LoadedKernel, BootError> {
        // SAFETY: the memory is anonymous and belongs to the test.
        unsafe { super::load(memory, path, BootMemory::of_small_pages(bytes), &all_private()) }
    }

    fn load_into(memory_bytes: u64, bytes: &[u8]) -> Result<LoadedKernel, BootError> {
        let mut file = NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        load(&memory(memory_bytes), file.path(), memory_bytes)
    }

    fn memory(bytes: u64) -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), bytes as usize)]).unwrap()
    }

    fn load_bytes(bytes: &[u8]) -> Result<LoadedKernel, BootError> {
        load_into(MEMORY_BYTES, bytes)
    }

    /// A sparse file of 4 GiB uses no space on the host, and reading it would use 4 GiB of memory.
    #[test]
    fn payload_above_the_limit_is_refused_unread() {
        let mut image = bzimage(&kernel());
        let payload_bytes = MAX_KERNEL_BYTES + 1;
        image[0x24c..0x250].copy_from_slice(&payload_bytes.to_le_bytes());
        let mut file = NamedTempFile::new().unwrap();
        file.write_all(&image).unwrap();
        file.as_file().set_len(4 << 30).unwrap();
        let error = load(&memory(MEMORY_BYTES), file.path(), MEMORY_BYTES).unwrap_err();
        assert!(matches!(error, BootError::PayloadTooLarge { .. }), "{error}");
        let end = "its payload has 1073741825 bytes, and must have at most 1073741824";
        assert!(error.to_string().ends_with(end), "{error}");
    }

    #[test]
    fn elf_file_and_bzimages_load_the_same_kernel() {
        let elf = load_bytes(&kernel()).unwrap();
        assert_eq!((elf.entry, elf.is_linux, elf.bzimage), (ENTRY, true, None));
        for (payload, compression) in [
            (zstd_payload(&kernel()), Compression::Zstd),
            (lz4_payload(&kernel(), 4096), Compression::Lz4),
            (gzip_payload(&kernel()), Compression::Gzip),
            (xz_payload(&kernel()), Compression::Xz),
            (kernel(), Compression::None),
        ] {
            for memory_bytes in [MEMORY_BYTES, MORE_MEMORY_BYTES] {
                let loaded = load_into(memory_bytes, &bzimage(&payload)).unwrap();
                assert_eq!(loaded, LoadedKernel { bzimage: Some(compression), ..elf.clone() });
            }
        }
    }

    #[test]
    fn kernel_is_the_same_in_memory_of_other_processes() {
        let mut file = NamedTempFile::new().unwrap();
        file.write_all(&bzimage(&zstd_payload(&kernel()))).unwrap();
        let [private, shared] = [all_private(), PrivateRanges::default()].map(|private| {
            let memory = memory(MORE_MEMORY_BYTES);
            let boot_memory = BootMemory::of_small_pages(MORE_MEMORY_BYTES);
            // SAFETY: the memory is anonymous and belongs to the test.
            let loaded = unsafe { super::load(&memory, file.path(), boot_memory, &private) };
            (loaded.unwrap(), contents(&memory))
        });
        assert!(private == shared);
    }

    #[test]
    fn truncated_bzimage_is_reported() {
        let image = bzimage(&zstd_payload(&kernel()));
        let end = image.len() - 64;
        for len in [HEAD_BYTES, 3 * 512, end - 1] {
            let error = load_bytes(&image[..len]).unwrap_err();
            assert!(
                matches!(error, BootError::Truncated { actual_bytes, .. } if actual_bytes == len as u64)
            );
        }
        assert!(load_bytes(&image[..end]).is_ok());
    }

    #[test]
    fn damaged_header_never_panics() {
        let image = bzimage(&lz4_payload(&kernel(), 4096));
        for at in (0x1f1..0x250).chain(0x700..0x720) {
            for value in [0, 1, 0x7f, 0xff] {
                let mut damaged = image.clone();
                damaged[at] = value;
                let _ = load_bytes(&damaged);
                let _ = load_into(MORE_MEMORY_BYTES, &damaged);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        /// Replaces words of the headers and the notes of a valid ELF file.
        #[test]
        fn any_elf_file_is_loaded_into_boot_memory_or_refused(
            changes in prop::collection::vec((any::<prop::sample::Index>(), word()), 0..6),
            tail in prop::collection::vec(any::<u8>(), 0..64),
        ) {
            let notes = [linux_note(), pvh_note()].concat();
            let mut image = build(&[0x90; 0x100], &notes);
            let code = 64 + 2 * 56..64 + 2 * 56 + 0x100;
            let places: Vec<_> =
                (4..image.len() - 8).step_by(4).filter(|at| !code.contains(at)).collect();
            for (place, word) in &changes {
                let at = *place.get(&places);
                image[at..at + 8].copy_from_slice(&word.to_le_bytes());
            }
            image.extend_from_slice(&tail);
            let mut file = NamedTempFile::new().unwrap();
            file.write_all(&image).unwrap();
            // Memory above boot memory belongs to another zone.
            let memory = memory(MEMORY_BYTES + LOW_BYTES);
            if let Ok(loaded) = load(&memory, file.path(), MEMORY_BYTES) {
                prop_assert!((LOW_BYTES..=MEMORY_BYTES).contains(&loaded.end), "{:?}", loaded);
                prop_assert!((LOW_BYTES..loaded.end).contains(&loaded.entry), "{:?}", loaded);
            }
            let zeros = vec![0; LOW_BYTES as usize];
            for start in [0, MEMORY_BYTES] {
                let mut outside = zeros.clone();
                memory.read_slice(&mut outside, GuestAddress(start)).unwrap();
                prop_assert!(outside == zeros, "written from {:#x}", start);
            }
        }
    }

    /// Any number, but often one that is valid or next to a limit.
    fn word() -> impl Strategy<Value = u64> {
        prop_oneof![
            any::<u64>(),
            0..2 * MEMORY_BYTES,
            (0u64..64, -2i64..3).prop_map(|(bit, more)| (1u64 << bit).wrapping_add_signed(more)),
        ]
    }

    #[test]
    fn errors_describe_the_file() {
        let message = |bytes: &[u8]| load_bytes(bytes).unwrap_err().to_string();
        assert!(message(b"").ends_with("found an empty file"));
        assert!(message(b"\x1f\x8b\x08rest").ends_with("found a gzip file"));
        assert!(message(b"\x00\x01\x02").ends_with("starts with [00, 01, 02]"));
        let mut old = bzimage(&kernel());
        old[0x206] = 7;
        assert!(message(&old).contains("boot protocol 2.07: a Linux before 2.6.26"));
        // memtest86+ 6.10: boot protocol 2.12 without a payload.
        assert!(message(&bzimage(&[])).contains("no Linux kernel in it, as memtest86+"));
        let device = load(&memory(4096), Path::new("/dev/null"), 4096).unwrap_err().to_string();
        assert_eq!(device, "--kernel /dev/null is a character device, and must be a file");
        let missing = load(&memory(4096), Path::new("/nonexistent/vmlinuz"), 4096);
        assert!(matches!(missing, Err(BootError::Read { .. })));
    }

    #[test]
    fn firmware_is_an_elf_file_with_an_entry_point() {
        let message = |bytes: &[u8]| {
            let mut file = NamedTempFile::new().unwrap();
            file.write_all(bytes).unwrap();
            let boot_memory = BootMemory::of_small_pages(MEMORY_BYTES);
            let error = load_firmware(&memory(MEMORY_BYTES), file.path(), boot_memory).unwrap_err();
            foreshore_types::chain(&error)
        };
        let text = message(b"no firmware at all");
        assert!(
            text.starts_with("--firmware ") && text.contains("is not a PVH firmware"),
            "{text}"
        );
        // Without its note, the entry point is unknown.
        let text = message(&build(&[0x90; 0x8000], &linux_note()));
        assert!(text.starts_with("--firmware ") && text.contains("no PVH note"), "{text}");
    }

    /// Loads kernels of distributions from the colon-separated list in `FORESHORE_TEST_KERNELS`.
    #[test]
    fn kernels_of_distributions_load() {
        let Some(kernels) = std::env::var_os("FORESHORE_TEST_KERNELS") else {
            eprintln!("skipped: FORESHORE_TEST_KERNELS names no kernels");
            return;
        };
        const BYTES: u64 = 256 << 20;
        for path in std::env::split_paths(&kernels).collect::<Vec<PathBuf>>() {
            let memory = memory(BYTES);
            let started = std::time::Instant::now();
            let loaded = load(&memory, &path, BYTES).unwrap();
            eprintln!("{}: {loaded:x?} in {:?}", path.display(), started.elapsed());
            assert!(loaded.is_linux);
            assert!(loaded.entry >= 0x100_0000 && loaded.entry < loaded.end);
            if loaded.bzimage.is_some_and(|compression| compression != Compression::None) {
                is_as_if_unpacked_beside(&memory, &loaded, &path, BYTES);
            }
        }
    }

    /// Checks that unpacking in place produces the same result as unpacking outside guest memory.
    fn is_as_if_unpacked_beside(
        memory: &GuestMemoryMmap,
        loaded: &LoadedKernel,
        path: &Path,
        memory_bytes: u64,
    ) {
        let mut file = File::open(path).unwrap();
        let mut head = vec![0; HEAD_BYTES];
        file.read_exact(&mut head).unwrap();
        let header = SetupHeader::parse(&head).unwrap();
        let file_bytes = file.metadata().unwrap().len();
        let payload = read_payload(path, &mut file, file_bytes, &header).unwrap();
        let packed = Packed::new(payload.bytes(), loaded.bzimage.unwrap()).unwrap();
        let beside = self::memory(memory_bytes);
        let expected = load_image(
            &beside,
            &unpack::unpack(&packed).unwrap(),
            BootMemory::of_small_pages(memory_bytes),
        )
        .unwrap();
        assert_eq!((loaded.entry, loaded.end), (expected.entry, expected.end));
        assert!(contents(memory) == contents(&beside), "memory differs");
        // SAFETY: the memory is anonymous and belongs to the test.
        let again = unsafe {
            inplace::load(
                &self::memory(memory_bytes),
                &packed,
                BootMemory::of_small_pages(memory_bytes),
                &all_private(),
            )
        }
        .unwrap();
        assert!(matches!(again, Outcome::Loaded(_)), "{again:?}");
    }
}
