//! Files and devices that are no pool and are not to become one by mistake: opened under the lock
//! that pools have, so that neither takes what the other has.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;

use super::file::open_steps::{
    FORK_PATIENCE, UDEV_PATIENCE, lock_within, user_of_device, while_in_use,
};
use super::lock::{Holder, LockKind};
use crate::pool::{OpenMode, Pool, PoolError};

/// Why something is not to be had.
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

/// Opens what is at `path` with the additional open(2) `flags`, for as long as the file is open:
/// many may have it to read, or one to write. For writing, the kernel gives no block device away
/// that is mounted or otherwise in use, and lets nobody mount it meanwhile.
pub fn claim(path: &Path, writable: bool, flags: i32) -> Result<File, ClaimError> {
    // 1. Its kind first: the device's own lock is taken as it is opened, and a named pipe would
    //    wait for a writer.
    let metadata = fs::metadata(path).map_err(ClaimError::Open)?;
    let is_device = metadata.file_type().is_block_device();
    let exclusive = if writable && is_device { libc::O_EXCL } else { 0 };
    let mut options = OpenOptions::new();
    options.read(true).write(writable).custom_flags(flags | exclusive | libc::O_NONBLOCK);
    // 2. A child of ours, or udev, may have it for a moment.
    let opened = while_in_use(FORK_PATIENCE, || match options.open(path) {
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(Err(error)),
        result => result.map(Ok),
    });
    let file = opened.map_err(ClaimError::Open)?.map_err(|error| match is_device {
        true => match user_of_device(path, metadata.rdev()) {
            Ok(holder) => ClaimError::InUse { holder },
            Err(by) => ClaimError::DeviceInUse { by },
        },
        false => ClaimError::Open(error),
    })?;
    let (kind, patience) = match (writable, is_device) {
        (true, true) => (LockKind::Exclusive, UDEV_PATIENCE),
        (true, false) => (LockKind::Exclusive, FORK_PATIENCE),
        (false, _) => (LockKind::Shared, FORK_PATIENCE),
    };
    let locked = lock_within(&file, kind, patience).map_err(ClaimError::Lock)?;
    locked.map_err(|holder| ClaimError::InUse { holder })?;
    // 3. From now on it waits: io_uring would answer EAGAIN instead (Linux io_uring/rw.c,
    //    REQ_F_NOWAIT).
    set_waiting(&file).map_err(ClaimError::Open)?;
    Ok(file)
}

fn set_waiting(file: &File) -> io::Result<()> {
    // SAFETY: takes numbers only; the descriptor lives as long as `file`.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    let waiting = flags & !libc::O_NONBLOCK;
    // SAFETY: as above.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, waiting) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Pool in the bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolContent {
    /// No pool.
    NoPool,
    /// A pool, which may be damaged. Its user can repair a damaged one.
    Pool,
    /// The bytes cannot be read, for example because a device has vanished.
    Unreadable,
}

/// Examines the bytes of an open file or device, which `path` named when it was opened.
pub fn pool_content(file: &File, path: &Path) -> PoolContent {
    match peek(file, path) {
        Ok(_) => PoolContent::Pool,
        Err(error) => content_by(&error),
    }
}

fn content_by(error: &PoolError) -> PoolContent {
    use PoolError::*;
    match error {
        NotAPool { .. } => PoolContent::NoPool,
        SuperblocksGone { .. }
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
    // /proc names the open file even if its path names another one by now. Without /proc, the path
    // is used.
    let open = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    Pool::open(if open.exists() { &open } else { path }, OpenMode::Peek)
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::media::MediaError;

    const MIB: u64 = 1 << 20;

    fn in_use(result: Result<File, ClaimError>) -> Option<u32> {
        match result.unwrap_err() {
            ClaimError::InUse { holder } => holder.pid,
            error => panic!("{error}"),
        }
    }

    #[test]
    fn a_pool_and_a_claim_exclude_each_other() {
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
        // It is the open file that counts.
        fs::rename(&path, folder.path().join("other")).unwrap();
        File::create(&path).unwrap();
        assert_eq!(pool_content(&claimed, &path), PoolContent::Pool);
        claimed.set_len(1 << 20).unwrap();
        assert_eq!(pool_content(&claimed, &path), PoolContent::Pool, "a truncated pool");
        claimed.set_len(0).unwrap();
        assert_eq!(pool_content(&claimed, &path), PoolContent::NoPool);
        // A file that cannot be examined.
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
                assert_eq!(content_by(&error), PoolContent::Unreadable, "{error}");
            }
        }
    }

    #[test]
    fn a_claimed_file_waits_for_its_data() {
        let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        let claimed = claim(file.path(), true, 0).unwrap();
        // SAFETY: a query.
        let flags = unsafe { libc::fcntl(claimed.as_raw_fd(), libc::F_GETFL) };
        assert_eq!(flags & libc::O_NONBLOCK, 0);
        assert_eq!(pool_content(&claimed, file.path()), PoolContent::NoPool);
    }
}
