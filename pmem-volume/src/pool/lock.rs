//! Advisory lock on the pool's file, which the kernel releases when its holder exits.
//!
//! flock() is used instead of fcntl(), because its lock belongs to the open file. Therefore, a
//! second open in the same process is refused too. Closing an unrelated descriptor of the file does
//! not release the lock.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{FlockOperation, flock, major, minor};
use rustix::io::{Errno, retry_on_intr};

/// Process that holds the lock, as far as this process can identify it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Process ID, unless the process is in another PID namespace.
    pub pid: Option<u32>,
    /// Name of the holder's program.
    pub program: Option<String>,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.pid, &self.program) {
            (Some(pid), Some(program)) => write!(f, "process {pid} ({program})"),
            (Some(pid), None) => write!(f, "process {pid}"),
            (None, _) => f.write_str("a process that is not visible in this PID namespace"),
        }
    }
}

/// Mode in which a pool, or another file in exclusive use, is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockKind {
    /// Allows several readers.
    Shared,
    /// Allows a single writer.
    Exclusive,
}

/// Takes the lock, or returns its current holder. The lock is held until the open file is closed.
pub fn try_lock(file: &File, kind: LockKind) -> io::Result<Result<(), Holder>> {
    let operation = match kind {
        LockKind::Shared => FlockOperation::NonBlockingLockShared,
        LockKind::Exclusive => FlockOperation::NonBlockingLockExclusive,
    };
    match retry_on_intr(|| flock(file, operation)) {
        Ok(()) => Ok(Ok(())),
        Err(Errno::WOULDBLOCK) => {
            Ok(Err(holder(file).unwrap_or(Holder { pid: None, program: None })))
        }
        Err(error) => Err(error.into()),
    }
}

/// Maximum number of times that /proc/locks is read to find the holder.
const MAX_LOCK_READS: u32 = 16;

/// Finds a holder of a lock on the file in /proc/locks.
pub(crate) fn holder(file: &File) -> Option<Holder> {
    let metadata = file.metadata().ok()?;
    // Device nodes are in devtmpfs, where inode numbers are small. devtmpfs reports the same device
    // as stat().
    let is_exact = !metadata.is_file();
    // The kernel writes the file in pieces, and finds the start of each piece by line number (Linux
    // fs/locks.c, locks_next). If a lock is released between two pieces, all later lines move up,
    // and one line appears in neither piece.
    let pid = (0..MAX_LOCK_READS).find_map(|_| {
        let locks = fs::read_to_string("/proc/locks").ok()?;
        pid_in_locks(&locks, metadata.dev(), metadata.ino(), is_exact)
    })?;
    let program =
        fs::read_to_string(format!("/proc/{pid}/comm")).ok().map(|name| name.trim_end().to_owned());
    Some(Holder { pid: Some(pid), program })
}

/// Finds the process in lines such as `1: FLOCK ADVISORY WRITE 708 00:1a:2053 0 EOF`. Lines with
/// `->` belong to waiting processes. Some file systems (btrfs, overlays) report a different device
/// than stat(). Therefore, a match of the inode is enough, unless `is_exact` is set.
fn pid_in_locks(locks: &str, device: u64, inode: u64, is_exact: bool) -> Option<u32> {
    let lock_id = format!("{:02x}:{:02x}:{inode}", major(device), minor(device));
    let mut by_inode = None;
    for line in locks.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, "FLOCK", _, _, pid, at, ..] = fields[..] else { continue };
        let Some(pid) = pid.parse().ok().filter(|pid| *pid > 0) else { continue };
        if at == lock_id {
            return Some(pid);
        }
        if !is_exact && at.rsplit(':').next().and_then(|i| i.parse().ok()) == Some(inode) {
            by_inode = by_inode.or(Some(pid));
        }
    }
    by_inode
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use rustix::fs::makedev;

    use super::*;

    fn unlock(file: &File) {
        flock(file, FlockOperation::Unlock).unwrap();
    }

    #[test]
    fn second_open_in_the_same_process_is_refused_with_the_holder() {
        let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        let again = File::open(file.path()).unwrap();
        assert!(try_lock(file.as_file(), LockKind::Exclusive).unwrap().is_ok());
        let holder = try_lock(&again, LockKind::Shared).unwrap().unwrap_err();
        assert_eq!(holder.pid, Some(std::process::id()));
        assert!(holder.program.is_some());
        drop(file);
        assert!(
            try_lock(&again, LockKind::Exclusive).unwrap().is_ok(),
            "the lock died with its holder"
        );
    }

    #[test]
    fn holder_is_found_during_other_locks_and_unlocks() {
        let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        // Other locks precede and follow the pool's lock in /proc/locks, so that its line is
        // sometimes at the boundary of two pieces.
        let others: Vec<_> = (0..120).map(|_| tempfile::tempfile_in("/dev/shm").unwrap()).collect();
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    for other in &others {
                        assert!(try_lock(other, LockKind::Exclusive).unwrap().is_ok());
                    }
                    others.iter().for_each(unlock);
                }
            });
            let missed = (0..500).filter(|_| {
                assert!(try_lock(file.as_file(), LockKind::Exclusive).unwrap().is_ok());
                let holder = holder(file.as_file());
                unlock(file.as_file());
                holder.and_then(|holder| holder.pid) != Some(std::process::id())
            });
            let missed = missed.count();
            is_over.store(true, Ordering::Relaxed);
            assert_eq!(missed, 0);
        });
    }

    #[test]
    fn shared_locks_do_not_exclude_each_other() {
        let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        let again = File::open(file.path()).unwrap();
        assert!(try_lock(file.as_file(), LockKind::Shared).unwrap().is_ok());
        assert!(try_lock(&again, LockKind::Shared).unwrap().is_ok());
        assert!(try_lock(&again, LockKind::Exclusive).unwrap().is_err());
    }

    #[test]
    fn holder_is_read_from_the_matching_line() {
        let locks = "1: POSIX  ADVISORY  WRITE 11 00:1a:77 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 22 00:1b:77 0 EOF\n\
                     2: -> FLOCK  ADVISORY  WRITE 33 00:1a:77 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 44 00:1a:77 0 EOF\n";
        let device = makedev(0, 0x1a);
        assert_eq!(pid_in_locks(locks, device, 77, false), Some(44));
        assert_eq!(pid_in_locks(locks, device, 77, true), Some(44));
        assert_eq!(pid_in_locks(locks, makedev(9, 9), 77, false), Some(22));
        assert_eq!(pid_in_locks(locks, makedev(9, 9), 77, true), None);
        assert_eq!(pid_in_locks(locks, device, 78, false), None);
    }
}
