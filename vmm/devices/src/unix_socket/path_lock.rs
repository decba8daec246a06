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
    /// File that this process has created.
    file: File,
}

impl PathLock {
    /// Acquires the lock. Returns `None` if another process holds it.
    ///
    /// A file that a killed VMM has left may belong to another user, or may be a hard link to a
    /// file that the owner of the folder cannot open. Therefore, a new file replaces it.
    pub(super) fn take(path: &Path) -> io::Result<Option<Self>> {
        let path = lock_path(path);
        loop {
            let Some((file, is_own)) = open(&path)? else { continue };
            check(&file, &path)?;
            if !try_lock(&file)? {
                return Ok(None);
            }
            // The previous holder may have removed the file after it was opened here. A lock on a
            // removed file has no effect.
            if !is_at(&file, &path)? {
                continue;
            }
            if is_own {
                return Ok(Some(Self { path, file }));
            }
            // Only the holder of its lock removes a file. A process that has already opened this
            // one acquires its lock too late, and opens the new file.
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
    }
}

impl PathLock {
    /// Gives the file to another user and group.
    pub(super) fn give_to(&self, user: Option<u32>, group: Option<u32>) -> io::Result<()> {
        std::os::unix::fs::fchown(&self.file, user, group)
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

/// Creates the file or opens the existing one. The result is true if the file was created. Returns
/// `None` if the file was removed meanwhile. Does not wait for the reader of a FIFO.
fn open(path: &Path) -> io::Result<Option<(File, bool)>> {
    let mut options = OpenOptions::new();
    options.write(true).mode(PRIVATE_MODE).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    match options.clone().create_new(true).open(path) {
        Ok(file) => return Ok(Some((file, true))),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error),
    }
    match options.open(path) {
        Ok(file) => Ok(Some((file, false))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        // A socket, or a FIFO without a reader (open(2)).
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Err(not_regular(path)),
        Err(error) => Err(error),
    }
}

/// Checks that `file` can be a lock. Lock files are empty. A file with content belongs to another
/// program and must be kept, but dropping a lock would remove it.
fn check(file: &File, path: &Path) -> io::Result<()> {
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(not_regular(path));
    }
    if metadata.len() > 0 {
        return Err(io::Error::other(format!("lock file {path:?} is not empty")));
    }
    Ok(())
}

fn not_regular(path: &Path) -> io::Error {
    io::Error::other(format!("lock file {path:?} is not a regular file"))
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
    use rustix::fs::{CWD, Mode, mkfifoat};

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
    fn planted_file_is_neither_given_away_nor_followed() {
        const OTHER_USER: u32 = 65534;
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: only root can give files to others");
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let private = dir.path().join("private");
        let owner_of = |path: &Path| fs::metadata(path).unwrap().uid();
        let private_file = File::create(&private).unwrap();
        // 1. A hard link, also one whose other name is removed before the lock is given away. The
        // lock is a new file, which can be given away.
        for is_last in [false, true] {
            fs::hard_link(&private, lock_path(&path)).unwrap();
            let lock = PathLock::take(&path).unwrap().unwrap();
            if is_last {
                fs::remove_file(&private).unwrap();
            }
            lock.give_to(Some(OTHER_USER), None).unwrap();
            let owners = [private_file.metadata().unwrap().uid(), owner_of(&lock_path(&path))];
            assert_eq!(owners, [0, OTHER_USER]);
        }
        // 2. A symbolic link.
        File::create(&private).unwrap();
        std::os::unix::fs::symlink(&private, lock_path(&path)).unwrap();
        let error = PathLock::take(&path).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ELOOP));
        fs::remove_file(lock_path(&path)).unwrap();
        // 3. A link that replaces the file while the lock is held.
        let lock = PathLock::take(&path).unwrap().unwrap();
        fs::remove_file(lock_path(&path)).unwrap();
        fs::hard_link(&private, lock_path(&path)).unwrap();
        lock.give_to(Some(OTHER_USER), None).unwrap();
        assert_eq!([owner_of(&private), lock.file.metadata().unwrap().uid()], [0, OTHER_USER]);
    }

    #[test]
    fn planted_fifo_does_not_block() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let lock = lock_path(&path);
        mkfifoat(CWD, &lock, Mode::RUSR | Mode::WUSR).unwrap();
        let expected = not_regular(&lock).to_string();
        let error = || PathLock::take(&path).unwrap_err().to_string();
        assert_eq!(error(), expected);
        let _reader = File::options().read(true).write(true).open(&lock).unwrap();
        assert_eq!(error(), expected);
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
                        // A killed process may have left a file.
                        File::create(lock_path(&path)).unwrap();
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
