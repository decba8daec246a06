//! Flushes of single ranges of a file.
//!
//! fdatasync() would also write back guest memory that is lent from the same file. Writing back
//! lent memory is unnecessary, and can take any length of time. An msync() of a range ends in an
//! fsync of that range: it writes the range's dirty pages, commits the metadata of the inode once,
//! and issues one barrier to the device. For several ranges, sync_file_range() therefore writes the
//! data in parallel without a barrier. A single msync() at the end covers all of them.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;

use rustix::fs::FallocateFlags;
use rustix::io::retry_on_intr;

/// Writes the dirty pages of all `ranges` and waits for them. Issues no barrier and writes no
/// metadata.
pub(super) fn write_pages(file: &File, ranges: &[Range<u64>]) -> io::Result<()> {
    let wait = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    for flags in [libc::SYNC_FILE_RANGE_WRITE, wait] {
        for range in ranges {
            sync_file_range(file, range, flags)?;
        }
    }
    Ok(())
}

fn sync_file_range(file: &File, range: &Range<u64>, flags: libc::c_uint) -> io::Result<()> {
    let (offset, length) = (range.start.cast_signed(), (range.end - range.start).cast_signed());
    // SAFETY: sync_file_range() takes only numbers, and the descriptor lives as long as `file`.
    let result = unsafe { libc::sync_file_range(file.as_raw_fd(), offset, length, flags) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Calls fallocate() on a range, with `mode`.
pub(super) fn fallocate(file: &File, mode: FallocateFlags, range: &Range<u64>) -> io::Result<()> {
    let length = range.end - range.start;
    Ok(retry_on_intr(|| rustix::fs::fallocate(file, mode, range.start, length))?)
}

/// Drops clean pages of `ranges` from the page cache, so that the next read returns the content of
/// the disk.
///
/// If the write-back of a page fails, the kernel marks the page as clean but keeps it in the cache
/// (Linux Documentation/filesystems/vfs.rst, "Handling errors during writeback"). Reads then return
/// data that never reached the disk. Dirty pages are not dropped, so no store is lost. Dirty pages
/// are written first, so that few of them remain. Errors of this write are ignored, and so are
/// pages that cannot be dropped because another process has mapped them. The caller makes the
/// content durable after reading it, which reports such errors.
pub(crate) fn forget_clean_pages(file: &File, ranges: &[Range<u64>]) {
    let _ = write_pages(file, ranges);
    drop_clean_pages(file, ranges);
}

/// Drops clean pages without waiting for dirty ones. Use it for files that may have many dirty
/// pages.
pub(crate) fn drop_clean_pages(file: &File, ranges: &[Range<u64>]) {
    for range in ranges {
        let (offset, length) = (range.start.cast_signed(), (range.end - range.start).cast_signed());
        // SAFETY: posix_fadvise() takes only numbers, and the descriptor lives as long as `file`.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), offset, length, libc::POSIX_FADV_DONTNEED) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::ptr;

    use super::*;

    const PAGE_BYTES: usize = 4096;

    /// Returns the number of cached pages of a file. Maps the pages without reading any.
    fn resident_pages(file: &File, pages: usize) -> usize {
        let mut resident = vec![0u8; pages];
        let length = pages * PAGE_BYTES;
        // SAFETY: the new mapping is never accessed, and is removed at the end. `resident` has one
        // byte per page.
        unsafe {
            let map = libc::mmap(
                ptr::null_mut(),
                length,
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            );
            assert_ne!(map, libc::MAP_FAILED);
            assert_eq!(libc::mincore(map, length, resident.as_mut_ptr()), 0);
            assert_eq!(libc::munmap(map, length), 0);
        }
        resident.iter().filter(|page| **page & 1 == 1).count()
    }

    #[test]
    fn dropped_pages_are_read_from_the_disk_without_loss() {
        let folder = std::env::current_dir().unwrap();
        let file = tempfile::tempfile_in(&folder).unwrap();
        if super::super::MediaKind::of(&file).unwrap() != super::super::MediaKind::Disk {
            eprintln!("skipped: {} is not on a disk", folder.display());
            return;
        }
        let pages = 64;
        file.write_all_at(&vec![0x5a; pages * PAGE_BYTES], 0).unwrap();
        assert_eq!(resident_pages(&file, pages), pages);
        forget_clean_pages(&file, std::slice::from_ref(&(0..(pages * PAGE_BYTES) as u64)));
        assert_eq!(resident_pages(&file, pages), 0);
        let mut back = vec![0; pages * PAGE_BYTES];
        file.read_exact_at(&mut back, 0).unwrap();
        assert!(back.iter().all(|byte| *byte == 0x5a));
    }
}
