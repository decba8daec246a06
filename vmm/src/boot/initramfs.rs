//! Loading of the initramfs.

use std::path::Path;

use foreshore_devices::memory::layout::BootMemory;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::BootError;

const PAGE_BYTES: u64 = 4096;

/// Initramfs in guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Initramfs {
    pub start: GuestAddress,
    pub size_bytes: u64,
}

/// Reads `path` directly into guest memory, at the highest possible address in low memory.
///
/// Linux's PVH entry expects a 32-bit address (arch/x86/platform/pvh/enlighten.c). Directly after
/// the kernel, the initramfs might overlap the kernel's early heap.
pub(super) fn load<M: GuestMemoryBackend>(
    memory: &M,
    path: &Path,
    kernel_end: u64,
    boot_memory: BootMemory,
) -> Result<Initramfs, BootError> {
    let read_error =
        |source| BootError::Read { flag: "--initramfs", path: path.to_path_buf(), source };
    let (mut file, size_bytes) = super::open_file("--initramfs", path)?;
    if size_bytes == 0 {
        return Err(BootError::EmptyInitramfs { path: path.to_path_buf() });
    }
    let low_end = boot_memory.low_end();
    let start = place(size_bytes, kernel_end, low_end).ok_or_else(|| {
        BootError::InitramfsDoesNotFit { path: path.to_path_buf(), size_bytes, kernel_end, low_end }
    })?;
    let start = GuestAddress(start);
    memory
        .read_exact_volatile_from(start, &mut file, size_bytes as usize)
        .map_err(|error| read_error(std::io::Error::other(error)))?;
    Ok(Initramfs { start, size_bytes })
}

/// Highest page-aligned address below `low_end` that has room for `size_bytes` after the kernel.
fn place(size_bytes: u64, kernel_end: u64, low_end: u64) -> Option<u64> {
    let start = low_end.checked_sub(size_bytes)? / PAGE_BYTES * PAGE_BYTES;
    (start >= kernel_end).then_some(start)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use rustix::fs::{CWD, Mode, mkfifoat};
    use vm_memory::GuestMemoryMmap;

    use super::*;

    const MEMORY_BYTES: u64 = 4 << 20;

    #[test]
    fn initramfs_ends_in_the_last_page_of_low_memory() {
        assert_eq!(place(4096, 0x20_0000, 0x40_0000), Some(0x3f_f000));
        assert_eq!(place(4097, 0x20_0000, 0x40_0000), Some(0x3f_e000));
        assert_eq!(place(0x20_0000, 0x20_0000, 0x40_0000), Some(0x20_0000));
        assert_eq!(place(0x20_0001, 0x20_0000, 0x40_0000), None);
        assert_eq!(place(u64::MAX, 0x20_0000, 0x40_0000), None);
    }

    #[test]
    fn initramfs_is_read_to_its_place_or_refused() {
        let memory: GuestMemoryMmap =
            GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY_BYTES as usize)]).unwrap();
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&[0xab; 5000]).unwrap();
        let loaded =
            load(&memory, file.path(), 0x10_0000, BootMemory::of_small_pages(MEMORY_BYTES))
                .unwrap();
        assert_eq!(
            loaded,
            Initramfs { start: GuestAddress(MEMORY_BYTES - 8192), size_bytes: 5000 }
        );
        let mut bytes = vec![0; 5001];
        memory.read_slice(&mut bytes, loaded.start).unwrap();
        assert_eq!(bytes, [vec![0xab; 5000], vec![0]].concat());
        let refused = load(
            &memory,
            file.path(),
            MEMORY_BYTES - 8191,
            BootMemory::of_small_pages(MEMORY_BYTES),
        );
        assert!(matches!(refused, Err(BootError::InitramfsDoesNotFit { size_bytes: 5000, .. })));
        let missing = load(
            &memory,
            Path::new("/nonexistent/initramfs"),
            0,
            BootMemory::of_small_pages(MEMORY_BYTES),
        );
        assert!(matches!(missing, Err(BootError::Read { .. })));
    }

    #[test]
    fn initramfs_without_content_is_refused() {
        let memory: GuestMemoryMmap =
            GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY_BYTES as usize)]).unwrap();
        let boot_memory = BootMemory::of_small_pages(MEMORY_BYTES);
        let error =
            |path: &Path| load(&memory, path, 0x10_0000, boot_memory).unwrap_err().to_string();
        let expected = "--initramfs /dev/null is a character device, and must be a file";
        assert_eq!(error(Path::new("/dev/null")), expected);
        let folder = tempfile::TempDir::new().unwrap();
        assert!(error(folder.path()).ends_with("is a directory, and must be a file"));
        let pipe = folder.path().join("pipe");
        mkfifoat(CWD, &pipe, Mode::RUSR | Mode::WUSR).unwrap();
        assert!(error(&pipe).ends_with("is a pipe, and must be a file"));
        let empty = tempfile::NamedTempFile::new().unwrap();
        assert!(error(empty.path()).contains("is empty"), "{}", error(empty.path()));
    }
}
