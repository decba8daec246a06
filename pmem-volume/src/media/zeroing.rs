//! Erasure of ranges of a file, so that they read as zeros.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use rustix::fs::FallocateFlags;

use super::page_cache;

const PIECE_BYTES: u64 = 1 << 20;

pub(super) fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL))
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
}

/// Checks that the file system supports holes. ramfs does not, and NFS and FUSE depend on their
/// server. The check punches a hole past the end of the file, which changes nothing. `file` must
/// be open for writing.
pub(super) fn makes_holes(file: &File) -> bool {
    let hole = |at| page_cache::fallocate(file, PUNCH_HOLE, &(at..at + PIECE_BYTES));
    // Other errors here are unrelated to holes.
    file.metadata()
        .and_then(|metadata| hole(metadata.len().next_multiple_of(PIECE_BYTES)))
        .map_or_else(|error| !is_unsupported(&error), |()| true)
}

const PUNCH_HOLE: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);

/// Frees the blocks or pages, or writes zeros if the file system does not support holes.
pub(super) fn punch(file: &File, range: &Range<u64>) -> io::Result<()> {
    or_write_zeros(file, range, page_cache::fallocate(file, PUNCH_HOLE, range))
}

/// Zeroes a range in place. Uses unwritten extents if the file system has them, or a command of the
/// device if it has one, and otherwise writes zeros. The page cache and all mappings remain
/// coherent, because the kernel first drops the cached pages of a device (Linux block/fops.c,
/// blkdev_fallocate).
pub(super) fn zero(file: &File, range: &Range<u64>) -> io::Result<()> {
    let mode = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
    match page_cache::fallocate(file, mode, range) {
        Err(error) if is_full(&error) => for_each_piece(range, |piece| {
            zero_on_full(
                piece,
                |at, to| file.read_exact_at(to, at),
                |at, zeros| file.write_all_at(zeros, at),
            )
        }),
        result => or_write_zeros(file, range, result),
    }
}

fn or_write_zeros(file: &File, range: &Range<u64>, result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if is_unsupported(&error) => write_zeros(file, range),
        result => result,
    }
}

pub(super) fn write_zeros(file: &File, range: &Range<u64>) -> io::Result<()> {
    let zeros = vec![0; PIECE_BYTES as usize];
    for_each_piece(range, |piece| {
        file.write_all_at(&zeros[..(piece.end - piece.start) as usize], piece.start)
    })
}

/// Zeroes a piece on a full file system. XFS zeroes a range by punching a hole and then allocating
/// blocks for it. It may find no blocks, because other files have taken them or its own records
/// need them (xfs_file_fallocate). It does not report which part was zeroed.
///
/// Therefore, zeros are written. This allocates blocks for holes if any are free by now, and needs
/// no blocks elsewhere. A piece that still gets no blocks is a hole, which reads as zeros. The
/// content is verified, because erasing guarantees zeros. It does not guarantee blocks. On the full
/// file system, a guest's store to the hole raises SIGBUS, as in a thin pool. The next erasure
/// tries again.
fn zero_on_full(
    piece: Range<u64>,
    read: impl FnOnce(u64, &mut [u8]) -> io::Result<()>,
    write: impl FnOnce(u64, &[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut bytes = vec![0; (piece.end - piece.start) as usize];
    let error = match write(piece.start, &bytes) {
        Err(error) if is_full(&error) => error,
        result => return result,
    };
    read(piece.start, &mut bytes)?;
    if bytes.iter().all(|byte| *byte == 0) { Ok(()) } else { Err(error) }
}

fn for_each_piece(
    range: &Range<u64>,
    mut piece: impl FnMut(Range<u64>) -> io::Result<()>,
) -> io::Result<()> {
    let mut at = range.start;
    while at < range.end {
        let end = range.end.min(at + PIECE_BYTES);
        piece(at..end)?;
        at = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;
    use std::path::{Path, PathBuf};
    use std::ptr;

    use super::*;
    use crate::CHUNK_BYTES;
    use crate::media::{FileMedia, Media, allocate};
    use crate::progress::ignore_progress;

    /// A ramfs, if the process may mount one. It is mounted by system calls, because a child
    /// process would briefly hold the file locks of other tests.
    struct Ramfs(tempfile::TempDir);

    impl Ramfs {
        fn new() -> Option<Self> {
            let folder = tempfile::TempDir::new_in("/dev/shm").unwrap();
            let target = CString::new(folder.path().as_os_str().as_bytes()).unwrap();
            let name = c"ramfs".as_ptr();
            // SAFETY: C strings that outlive the call.
            if unsafe { libc::mount(name, target.as_ptr(), name, 0, ptr::null()) } == 0 {
                return Some(Self(folder));
            }
            eprintln!("skipped: ramfs cannot be mounted: {}", io::Error::last_os_error());
            None
        }
    }

    impl Drop for Ramfs {
        fn drop(&mut self) {
            let target = CString::new(self.0.path().as_os_str().as_bytes()).unwrap();
            // SAFETY: a C string that outlives the call.
            unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) };
        }
    }

    fn media_in(folder: &Path) -> FileMedia {
        let file = tempfile::tempfile_in(folder).unwrap();
        allocate(&file, 0..2 * CHUNK_BYTES, false, &mut ignore_progress).unwrap();
        FileMedia::new(file, 2 * CHUNK_BYTES, true).unwrap()
    }

    fn erased_reads_as_zeros(media: &FileMedia) {
        media.store(CHUNK_BYTES, &[0xaa; 8192]).unwrap();
        let range = CHUNK_BYTES..2 * CHUNK_BYTES;
        media.erase(std::slice::from_ref(&range)).unwrap();
        let mut back = vec![1; CHUNK_BYTES as usize];
        media.read(CHUNK_BYTES, &mut back).unwrap();
        assert!(back.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn ramfs_makes_no_holes_and_is_zeroed() {
        let Some(ramfs) = Ramfs::new() else { return };
        let media = media_in(ramfs.0.path());
        assert!(!media.makes_holes());
        erased_reads_as_zeros(&media);
    }

    #[test]
    fn disk_makes_holes_only_if_thin_and_tmpfs_always() {
        let media = media_in(&PathBuf::from("/dev/shm"));
        assert!(media.makes_holes());
        erased_reads_as_zeros(&media);
        let media = media_in(&std::env::current_dir().unwrap());
        assert!(!media.makes_holes());
        erased_reads_as_zeros(&media);
        assert!(media.thin(true).makes_holes());
    }

    fn full() -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::ENOSPC))
    }

    #[test]
    fn only_a_hole_on_a_full_file_system_counts_as_erased() {
        let read = |byte| {
            move |_, into: &mut [u8]| {
                into.fill(byte);
                Ok(())
            }
        };
        zero_on_full(0..4096, read(0), |_, _| full()).unwrap();
        let error = zero_on_full(0..4096, read(7), |_, _| full()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
        zero_on_full(0..4096, |_, _| panic!("the content is not verified"), |_, _| Ok(())).unwrap();
        let broken = |_: u64, _: &[u8]| Err(io::Error::from_raw_os_error(libc::EIO));
        zero_on_full(0..4096, read(0), broken).unwrap_err();
    }
}
