//! Making ranges of a file durable without writing back the rest of it.
//!
//! fdatasync() would also write back guest memory that is lent from the same file, which is neither asked for nor
//! bounded. msync() of a range ends in a ranged fsync: the range's dirty pages, one commit of the inode's metadata,
//! one barrier to the device. So for several ranges the data is written by sync_file_range(), which may go on in
//! parallel and has no barrier, and one msync() at the end closes them all.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;

/// Writes the dirty pages of all `ranges` and waits; no barrier and no metadata yet.
pub(super) fn write_pages(file: &File, ranges: &[Range<u64>]) -> io::Result<()> {
    let wait =
        libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    for flags in [libc::SYNC_FILE_RANGE_WRITE, wait] {
        for range in ranges {
            sync_file_range(file, range, flags)?;
        }
    }
    Ok(())
}

fn sync_file_range(file: &File, range: &Range<u64>, flags: libc::c_uint) -> io::Result<()> {
    let (offset, length) = (range.start.cast_signed(), (range.end - range.start).cast_signed());
    // SAFETY: takes numbers only; the descriptor lives as long as `file`.
    let result = unsafe { libc::sync_file_range(file.as_raw_fd(), offset, length, flags) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// fallocate() on a range, with `mode`.
pub(super) fn fallocate(file: &File, mode: libc::c_int, range: &Range<u64>) -> io::Result<()> {
    let (offset, length) = (range.start.cast_signed(), (range.end - range.start).cast_signed());
    loop {
        // SAFETY: takes numbers only; the descriptor lives as long as `file`.
        if unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, length) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
