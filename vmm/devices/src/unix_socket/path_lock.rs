//! Exclusive ownership of a path on which a process listens.
//!
//! The socket of a killed owner remains in the file system, and looks like a socket on which a
//! process is about to listen. A lock distinguishes the two, because the kernel releases it when
//! its holder ends. It is a lock of the open file description (fcntl(2), F_OFD_SETLK) on
//! `PATH.lock`, as in Cloud Hypervisor.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use pmem_volume::file_mode::PRIVATE_MODE;

/// Lock of a path. Dropping it removes the lock file.
#[derive(Debug)]
pub(super) struct PathLock {
    path: PathBuf,
    file: File,
}

impl PathLock {
    /// Acquires the lock. Returns `None` if another process holds it.
    pub(super) fn take(path: &Path) -> io::Result<Option<Self>> {
        let path = lock_path(path);
        loop {
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(false).mode(PRIVATE_MODE);
            let file = options.custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW).open(&path)?;
            // Lock files are empty. A file with content belongs to another program and must be
            // kept, but dropping a lock would remove it.
            if file.metadata()?.len() > 0 {
                return Err(io::Error::other(format!("lock file {path:?} is not empty")));
            }
            if !try_lock(&file)? {
                return Ok(None);
            }
            // The previous holder may have removed the file after it was opened here. A lock on a
            // removed file has no effect.
            if is_at(&file, &path)? {
                return Ok(Some(Self { path, file }));
            }
        }
    }
}

impl PathLock {
    pub(super) fn file(&self) -> &File {
        &self.file
    }
}

impl Drop for PathLock {
    /// Removes the file before the lock is released, so that a waiting process opens a new file.
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::debug!(path = ?self.path, %error, "Cannot remove the lock file");
        }
    }
}

fn lock_path(path: &Path) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(".lock");
    name.into()
}

fn try_lock(file: &File) -> io::Result<bool> {
    // SAFETY: a structure of integers, which may be zero. A length of 0 means the whole file.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    // SAFETY: the kernel reads one `flock`; the descriptor is open.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Ok(false),
        _ => Err(error),
    }
}

fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let open_lock = file.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(current_lock) => {
            Ok((current_lock.dev(), current_lock.ino()) == (open_lock.dev(), open_lock.ino()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_is_exclusive_until_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let first = PathLock::take(&path).unwrap().unwrap();
        assert!(dir.path().join("api.lock").exists());
        assert!(PathLock::take(&path).unwrap().is_none());
        drop(first);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        // A lock file without a lock does not matter.
        fs::write(lock_path(&path), "").unwrap();
        assert!(PathLock::take(&path).unwrap().is_some());
        fs::write(lock_path(&path), "somebody's").unwrap();
        assert!(PathLock::take(&path).unwrap_err().to_string().contains("is not empty"));
        assert_eq!(fs::read_to_string(lock_path(&path)).unwrap(), "somebody's");
    }

    #[test]
    fn concurrent_threads_never_share_the_lock() {
        use std::sync::atomic::{AtomicU32, Ordering};
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let inside = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        if let Some(lock) = PathLock::take(&path).unwrap() {
                            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                            std::thread::yield_now();
                            inside.fetch_sub(1, Ordering::SeqCst);
                            drop(lock);
                        }
                    }
                });
            }
        });
    }
}
