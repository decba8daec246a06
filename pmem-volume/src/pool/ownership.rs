//! Exclusive use of files and devices that are not pools. They are locked in the same way as pools,
//! so that no file is used both as a pool and for another purpose. This module also detects content
//! that a new use of a file would destroy.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use thiserror::Error;

use super::file::formats::{self, Format};
use super::file::mark::Mark;
use super::file::open_steps::{
    FORK_TIMEOUT, UDEV_TIMEOUT, device_user, lock_with_timeout, retry_while_in_use,
};
use super::lock::{Holder, LockKind};
use crate::pool::{OpenMode, Pool, PoolError};

/// Reason why a file or device is not available. A separate error type without a path, because
/// callers describe the device of the VM that uses the file.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages describe variants and fields")]
pub enum ClaimError {
    #[error("cannot be opened")]
    Open(#[source] io::Error),
    #[error("cannot be locked")]
    Lock(#[source] io::Error),
    #[error("in use by {holder}")]
    InUse { holder: Holder },
    #[error("in use: {by}")]
    DeviceInUse { by: String },
}

/// Opens the file or device at `path` with the additional open(2) `flags`. Until the file is
/// closed, there are either many readers or one writer. If a block device is opened for writing,
/// the kernel refuses it if it is mounted or otherwise in use. While it is open, the kernel refuses
/// to mount it.
pub fn claim(path: &Path, writable: bool, flags: i32) -> Result<File, ClaimError> {
    // 1. Check the type first, because opening a device locks it (O_EXCL), and opening a named pipe
    //    would wait for a writer.
    let metadata = fs::metadata(path).map_err(ClaimError::Open)?;
    let is_device = metadata.file_type().is_block_device();
    let exclusive = if writable && is_device { libc::O_EXCL } else { 0 };
    let mut options = OpenOptions::new();
    options.read(true).write(writable).custom_flags(flags | exclusive | libc::O_NONBLOCK);
    // 2. Retry, because a child process or udev may hold the device for a moment.
    let opened = retry_while_in_use(FORK_TIMEOUT, || match options.open(path) {
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(Err(error)),
        result => result.map(Ok),
    });
    let file = opened.map_err(ClaimError::Open)?.map_err(|error| match is_device {
        true => match device_user(path, metadata.rdev()) {
            Ok(holder) => ClaimError::InUse { holder },
            Err(by) => ClaimError::DeviceInUse { by },
        },
        false => ClaimError::Open(error),
    })?;
    let (kind, timeout) = match (writable, is_device) {
        (true, true) => (LockKind::Exclusive, UDEV_TIMEOUT),
        (true, false) => (LockKind::Exclusive, FORK_TIMEOUT),
        (false, _) => (LockKind::Shared, FORK_TIMEOUT),
    };
    let locked = lock_with_timeout(&file, kind, timeout).map_err(ClaimError::Lock)?;
    locked.map_err(|holder| ClaimError::InUse { holder })?;
    // 3. Make the file blocking. Otherwise, io_uring would return EAGAIN (Linux io_uring/rw.c,
    //    REQ_F_NOWAIT).
    set_blocking(&file).map_err(ClaimError::Open)?;
    Ok(file)
}

fn set_blocking(file: &File) -> io::Result<()> {
    Ok(fcntl_setfl(file, fcntl_getfl(file)? - OFlags::NONBLOCK)?)
}

/// Result of searching a file for a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolContent {
    /// The file does not contain a pool.
    NoPool,
    /// The file contains a pool, possibly a damaged one that `pmvol repair` can repair.
    Pool,
    /// The file cannot be read, for example because its device has vanished.
    Unreadable,
}

/// Searches an open file or device for a pool. `path` is the path with which it was opened.
pub fn pool_content(file: &File, path: &Path) -> PoolContent {
    match peek(file, path) {
        Ok(_) => PoolContent::Pool,
        Err(error) => content_of_error(&error),
    }
}

fn content_of_error(error: &PoolError) -> PoolContent {
    use PoolError::*;
    match error {
        NotAPool { .. } => PoolContent::NoPool,
        SuperblocksLost { .. }
        | SuperblocksDamaged { .. }
        | SuperblockInvalid { .. }
        | Version { .. }
        | Features { .. }
        | Truncated { .. }
        | Enlarged { .. }
        | Damaged { .. }
        | BlocksLost { .. } => PoolContent::Pool,
        _ => PoolContent::Unreadable,
    }
}

fn peek(file: &File, path: &Path) -> Result<Arc<Pool>, PoolError> {
    // /proc refers to the open file, even if another file has its path by now. Without /proc, the
    // path is used.
    let open = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    Pool::open(if open.exists() { &open } else { path }, OpenMode::Peek)
}

/// Describes the content that would be destroyed if the host used a file for the purpose of `mark`.
/// Returns `None` if the file already has this mark, even if a guest has written to it. A file that
/// is marked as a disk or a pool is assumed to have content, because the signatures do not cover
/// every format.
pub fn overwritten_content(
    mark: Mark,
    file: &File,
    path: &Path,
) -> io::Result<Option<&'static str>> {
    let found = Mark::of(file)?;
    if found == Some(mark) {
        return Ok(None);
    }
    if let Some(content) = detect_content(file, path)? {
        return Ok(Some(content));
    }
    let is_empty = file.metadata()?.len() == 0;
    Ok(match found {
        Some(Mark::Disk) if !is_empty => Some("the data of a guest's disk"),
        Some(Mark::Pool) if !is_empty => Some("the data of a pool"),
        Some(Mark::Unknown) => Some("data marked by another release of Foreshore"),
        _ => None,
    })
}

/// Returns the known content of a file: a pool, a file system, a partition table, a BTT or a disk
/// image.
fn detect_content(file: &File, path: &Path) -> io::Result<Option<&'static str>> {
    // Opens the file again through /proc. By now, its path may refer to another file, and `file`
    // may be open only for writing.
    let open = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let open = if open.exists() { &open } else { path };
    // Unreadable bytes may belong to a pool.
    if pool_content(file, path) != PoolContent::NoPool {
        return Ok(Some("a pool"));
    }
    let content = File::open(open)?;
    let read = |offset: u64, into: &mut [u8]| match content.read_exact_at(into, offset) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        result => result.map(|()| true),
    };
    let known = formats::find(formats::all_formats(), Some(content.metadata()?.len()), read)?;
    Ok(known.map(Format::name))
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::media::MediaError;
    use crate::pool::file::formats::SAMPLE_BYTES;
    use crate::pool::file::mark::set_unknown;
    use crate::pool::signature::image_format;

    const MIB: u64 = 1 << 20;

    fn in_use(result: Result<File, ClaimError>) -> Option<u32> {
        match result.unwrap_err() {
            ClaimError::InUse { holder } => holder.pid,
            error => panic!("{error}"),
        }
    }

    #[test]
    fn pool_and_claim_exclude_each_other() {
        let folder = TempDir::new_in("/dev/shm").unwrap();
        let path = folder.path().join("pool");
        let me = Some(std::process::id());
        let pool = Pool::create(&path, 16 * MIB, 4 * MIB).unwrap();
        for writable in [true, false] {
            assert_eq!(in_use(claim(&path, writable, 0)), me);
        }
        drop(pool);
        let readers = [(); 2].map(|()| claim(&path, false, 0).unwrap());
        assert_eq!(pool_content(&readers[0], &path), PoolContent::Pool);
        assert_eq!(in_use(claim(&path, true, 0)), me);
        drop(readers);
        let claimed = claim(&path, true, 0).unwrap();
        assert!(matches!(Pool::open(&path, OpenMode::ReadWrite), Err(PoolError::InUse { .. })));
        // The function examines the open file, not the file that has its path by now.
        fs::rename(&path, folder.path().join("other")).unwrap();
        File::create(&path).unwrap();
        assert_eq!(pool_content(&claimed, &path), PoolContent::Pool);
        claimed.set_len(1 << 20).unwrap();
        assert_eq!(pool_content(&claimed, &path), PoolContent::Pool, "a truncated pool");
        claimed.set_len(0).unwrap();
        assert_eq!(pool_content(&claimed, &path), PoolContent::NoPool);
        let null = File::open("/dev/null").unwrap();
        assert_eq!(pool_content(&null, Path::new("/dev/null")), PoolContent::Unreadable);
    }

    #[test]
    fn device_that_has_vanished_is_unreadable() {
        for errno in [libc::EIO, libc::ENXIO, libc::ENODEV] {
            let source = || io::Error::from_raw_os_error(errno);
            let read = MediaError::Io {
                operation: "read",
                offset_bytes: 0,
                length_bytes: 4096,
                source: source(),
            };
            let opened = PoolError::File { path: PathBuf::new(), action: "open", source: source() };
            for error in [read.into(), opened] {
                assert_eq!(content_of_error(&error), PoolContent::Unreadable, "{error}");
            }
        }
    }

    #[test]
    fn claimed_file_is_blocking() {
        let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        let claimed = claim(file.path(), true, 0).unwrap();
        assert!(!fcntl_getfl(&claimed).unwrap().contains(OFlags::NONBLOCK));
        assert_eq!(pool_content(&claimed, file.path()), PoolContent::NoPool);
    }

    #[test]
    fn content_of_files_is_detected() {
        let folder = tempfile::TempDir::new_in("/dev/shm").unwrap();
        let path = folder.path().join("file");
        let content = |len: u64, parts: &[(u64, &[u8])]| {
            let file = File::create(&path).unwrap();
            file.set_len(len).unwrap();
            for (offset, bytes) in parts {
                file.write_all_at(bytes, *offset).unwrap();
            }
            detect_content(&file, &path).unwrap()
        };
        for format in formats::all_formats() {
            // The second length is not a multiple of the sector size.
            for len in [SAMPLE_BYTES, SAMPLE_BYTES + 100] {
                for sample in format.samples(len) {
                    assert_eq!(content(len, &sample), Some(format.name()), "{sample:x?}");
                    if sample.len() > 1 {
                        let text = [(0, &[b'a'; 4096][..]), sample[0]];
                        assert_eq!(content(len, &text), None, "text is identified as {sample:x?}");
                    }
                }
            }
        }
        for text in [&b""[..], b"[    0.000000] Linux version 6.12\n", &[7; 100_000]] {
            assert_eq!(content(0, &[(0, text)]), None);
        }
        assert_eq!(image_format(b"QFI\xfb\0\0\0\x03"), Some("a qcow2 image"));
        assert_eq!(image_format(b"QFI"), None);
        std::fs::remove_file(&path).unwrap();
        drop(crate::Pool::create(&path, 16 << 20, 0).unwrap());
        let file = File::options().append(true).open(&path).unwrap();
        assert_eq!(detect_content(&file, &path).unwrap(), Some("a pool"));
        // Only the start of this device is readable.
        let null = File::open("/dev/null").unwrap();
        assert_eq!(detect_content(&null, Path::new("/dev/null")).unwrap(), Some("a pool"));
    }

    #[test]
    fn marked_files_lose_content_without_a_signature() {
        let folder = tempfile::TempDir::new().unwrap();
        let path = folder.path().join("file");
        let lost = |mark: Option<Mark>, bytes: &[u8]| {
            let _ = std::fs::remove_file(&path);
            std::fs::write(&path, bytes).unwrap();
            let file = File::options().append(true).open(&path).unwrap();
            mark.map_or(Ok(()), |mark| mark.set(&file)).unwrap();
            overwritten_content(Mark::Output, &file, &path).unwrap()
        };
        for mark in [None, Some(Mark::Output), Some(Mark::Memory)] {
            assert_eq!(lost(mark, &[7; 4096]), None);
        }
        assert_eq!(lost(Some(Mark::Output), b"XFSB"), None);
        assert_eq!(lost(Some(Mark::Memory), b"XFSB"), Some("an XFS file system"));
        assert_eq!(lost(Some(Mark::Disk), b"XFSB"), Some("an XFS file system"));
        assert_eq!(lost(Some(Mark::Disk), &[0; 4096]), Some("the data of a guest's disk"));
        assert_eq!(lost(Some(Mark::Pool), &[7; 4096]), Some("the data of a pool"));
        for mark in [Mark::Disk, Mark::Pool] {
            assert_eq!(lost(Some(mark), b""), None, "an emptied file");
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        set_unknown(file.as_file(), b"volume");
        for mark in [Mark::Output, Mark::Memory] {
            let lost = overwritten_content(mark, file.as_file(), file.path()).unwrap();
            assert_eq!(lost, Some("data marked by another release of Foreshore"));
        }
    }

    #[test]
    fn file_with_an_unreadable_mark_is_not_lost() {
        // The kernel does not read attributes through descriptors with O_PATH. The content is read
        // through the path.
        use std::os::unix::fs::OpenOptionsExt;
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [7; 4096]).unwrap();
        Mark::Disk.set(file.as_file()).unwrap();
        let path = file.path();
        let file = File::options().read(true).custom_flags(libc::O_PATH).open(path).unwrap();
        assert_eq!(detect_content(&file, path).unwrap(), None);
        let error = overwritten_content(Mark::Output, &file, path).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
    }
}
