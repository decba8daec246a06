//! File system blocks of a pool file (Linux Documentation/filesystems/fiemap.rst).
//!
//! If the file system is full, a store through a mapping cannot return an error. Instead, the
//! kernel raises SIGBUS, and a guest's vCPU cannot continue. Unless a file is sparse by request,
//! all its blocks are therefore allocated before the first store. A file can lose blocks later. A
//! sparse copy and `fallocate --dig-holes` leave holes, and a clone (`cp --reflink`) shares blocks
//! with the original.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{FallocateFlags, FsWord, IFlags, fstatfs, ioctl_getflags};

use super::page_cache;
use super::zeroing::is_unsupported;

/// Defined as _IOWR('f', 11, struct fiemap) in linux/fs.h.
const FS_IOC_FIEMAP: libc::Ioctl = 0xc020_660bu32 as libc::Ioctl;
const EXTENT_LAST: u32 = 0x1;
const EXTENT_SHARED: u32 = 0x2000;
/// Number of extents that are requested from the kernel per call.
const EXTENTS: usize = 256;

/// `struct fiemap` with room for [`EXTENTS`] extents.
#[repr(C)]
struct Request {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
    extents: [Extent; EXTENTS],
}

/// `struct fiemap_extent`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Extent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

/// Missing blocks of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MissingBlocks {
    /// Bytes in holes.
    pub(crate) hole_bytes: u64,
    /// Bytes in blocks that are shared with other files. The first store to such a block needs a
    /// new block.
    pub(crate) shared_bytes: u64,
}

impl MissingBlocks {
    /// Counts the missing blocks in the first `len_bytes` of `file`. For a file system that does
    /// not list extents, such as NFS, the count is computed from the number of allocated blocks.
    pub(crate) fn of(file: &File, len_bytes: u64) -> io::Result<Self> {
        match Self::from_extents(
            |start, extents| list_extents(file, start..len_bytes, extents),
            len_bytes,
        ) {
            Err(error) if is_unsupported(&error) || error.raw_os_error() == Some(libc::ENOTTY) => {
                // st_blocks counts units of 512 bytes, independent of the file system's block size
                // (stat(2)).
                let hole_bytes =
                    len_bytes.saturating_sub(file.metadata()?.blocks().saturating_mul(512));
                Ok(Self { hole_bytes, shared_bytes: 0 })
            }
            result => result,
        }
    }

    pub(crate) fn is_empty(self) -> bool {
        self == Self::default()
    }

    /// Returns the number of bytes that the file system must allocate.
    pub(crate) fn bytes(self) -> u64 {
        self.hole_bytes + self.shared_bytes
    }

    /// Counts the missing blocks in a list of extents. `list` fills its buffer with the extents
    /// after an offset, and returns their number. A buffer that is not full contains the last
    /// extents.
    fn from_extents(
        mut list: impl FnMut(u64, &mut [Extent]) -> io::Result<usize>,
        len_bytes: u64,
    ) -> io::Result<Self> {
        let (mut at, mut missing) = (0, Self::default());
        let mut extents = [Extent::default(); EXTENTS];
        while at < len_bytes {
            let count = list(at, &mut extents)?;
            let before = at;
            for extent in &extents[..count] {
                let end = extent.logical.saturating_add(extent.length).min(len_bytes);
                missing.hole_bytes += extent.logical.min(len_bytes).saturating_sub(at);
                if extent.flags & EXTENT_SHARED != 0 {
                    missing.shared_bytes += end.saturating_sub(extent.logical.max(at));
                }
                at = at.max(end);
            }
            let is_last = extents[..count].last().is_none_or(|last| last.flags & EXTENT_LAST != 0);
            if is_last || count < EXTENTS || at == before {
                missing.hole_bytes += len_bytes - at;
                break;
            }
        }
        Ok(missing)
    }
}

fn list_extents(
    file: &File,
    range: std::ops::Range<u64>,
    into: &mut [Extent],
) -> io::Result<usize> {
    let mut request = Request {
        start: range.start,
        length: range.end - range.start,
        flags: 0,
        mapped_extents: 0,
        extent_count: EXTENTS as u32,
        reserved: 0,
        extents: [Extent::default(); EXTENTS],
    };
    // SAFETY: the ioctl reads and fills this structure, which has room for as many extents as it
    // states.
    if unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FIEMAP, &raw mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let count = (request.mapped_extents as usize).min(into.len());
    into[..count].copy_from_slice(&request.extents[..count]);
    Ok(count)
}

/// Allocates the missing blocks in the first `len_bytes` of `file`. The content does not change.
pub(crate) fn allocate_missing(
    file: &File,
    len_bytes: u64,
    missing: MissingBlocks,
) -> io::Result<()> {
    if missing.hole_bytes > 0 {
        page_cache::fallocate(file, FallocateFlags::empty(), &(0..len_bytes))?;
    }
    if missing.shared_bytes > 0 {
        // The file gets its own copies of blocks that it shares with a clone (XFS).
        page_cache::fallocate(file, FallocateFlags::UNSHARE_RANGE, &(0..len_bytes))?;
    }
    Ok(())
}

/// Returns the name of the file system of `file` if it is a copy-on-write file system. On such a
/// file system, even a store to an allocated block can fail because the file system is full.
pub(crate) fn copy_on_write(file: &File) -> io::Result<Option<&'static str>> {
    Ok(copy_on_write_name(fstatfs(file)?.f_type, || overwrites_in_place(file)))
}

/// Returns the name of a copy-on-write file system by its magic number (linux/magic.h; openzfs
/// include/sys/fs/zfs.h). `in_place` returns true if blocks of the file are overwritten in place.
fn copy_on_write_name(magic: FsWord, in_place: impl FnOnce() -> bool) -> Option<&'static str> {
    let name = match magic {
        0x9123_683e => "btrfs",
        0xca45_1a4e => "bcachefs",
        0x2fc1_2fc1 => "zfs",
        _ => return None,
    };
    (!in_place()).then_some(name)
}

/// Returns true if `chattr +C` has set FS_NOCOW_FL (linux/fs.h).
fn overwrites_in_place(file: &File) -> bool {
    ioctl_getflags(file).is_ok_and(|flags| flags.contains(IFlags::NOCOW))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// Creates a file of 8 MiB on a disk, with all blocks allocated and data at its start.
    fn file() -> File {
        let file = tempfile::tempfile_in(".").unwrap();
        page_cache::fallocate(&file, FallocateFlags::empty(), &(0..8 * MIB)).unwrap();
        file.write_all_at(&[0x5a; 4096], 0).unwrap();
        file
    }

    #[test]
    fn allocated_file_has_no_missing_blocks() {
        assert_eq!(MissingBlocks::of(&file(), 8 * MIB).unwrap(), MissingBlocks::default());
    }

    #[test]
    fn holes_are_counted_and_allocated_without_changing_content() {
        let file = file();
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        page_cache::fallocate(&file, punch, &(2 * MIB..3 * MIB)).unwrap();
        page_cache::fallocate(&file, punch, &(7 * MIB..8 * MIB)).unwrap();
        let missing = MissingBlocks::of(&file, 8 * MIB).unwrap();
        assert_eq!((missing.hole_bytes, missing.shared_bytes), (2 * MIB, 0));
        assert_eq!(MissingBlocks::of(&file, 4 * MIB).unwrap().hole_bytes, MIB);
        allocate_missing(&file, 8 * MIB, missing).unwrap();
        assert!(MissingBlocks::of(&file, 8 * MIB).unwrap().is_empty());
        let mut bytes = [0; 8192];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(
            bytes[..4096].iter().all(|byte| *byte == 0x5a)
                && bytes[4096..].iter().all(|byte| *byte == 0)
        );
        let empty = tempfile::tempfile_in(".").unwrap();
        empty.set_len(8 * MIB).unwrap();
        assert_eq!(MissingBlocks::of(&empty, 8 * MIB).unwrap().hole_bytes, 8 * MIB);
    }

    #[test]
    fn extents_are_added_up_over_several_lists() {
        // 600 extents of one page each, separated by holes of one page. Every third extent is
        // shared.
        let extent = |nth: u64| Extent {
            logical: nth * 8192,
            length: 4096,
            flags: if nth.is_multiple_of(3) { EXTENT_SHARED } else { 0 } | u32::from(nth == 599),
            ..Extent::default()
        };
        let list = |at: u64, into: &mut [Extent]| {
            let rest: Vec<_> = (at.div_ceil(8192)..600).map(extent).take(into.len()).collect();
            into[..rest.len()].copy_from_slice(&rest);
            Ok(rest.len())
        };
        let missing = MissingBlocks::from_extents(list, 600 * 8192).unwrap();
        assert_eq!((missing.hole_bytes, missing.shared_bytes), (600 * 4096, 200 * 4096));
        // Counting also ends if the list makes no progress.
        let stuck = |_: u64, into: &mut [Extent]| {
            into.fill(Extent { length: 4096, ..Extent::default() });
            Ok(into.len())
        };
        assert_eq!(MissingBlocks::from_extents(stuck, 8 * MIB).unwrap().hole_bytes, 8 * MIB - 4096);
    }

    #[test]
    fn copy_on_write_file_system_is_named_unless_the_file_is_exempt() {
        for (magic, name) in
            [(0x9123_683e, "btrfs"), (0xca45_1a4e, "bcachefs"), (0x2fc1_2fc1, "zfs")]
        {
            assert_eq!(copy_on_write_name(magic, || false), Some(name));
            assert_eq!(copy_on_write_name(magic, || true), None);
        }
        assert_eq!(copy_on_write_name(libc::EXT4_SUPER_MAGIC, || panic!("not read")), None);
    }
}
