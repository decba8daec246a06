//! Opening of a pool's file or device: checks of its type and length, and its lock.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{major, minor};
use zerocopy::{FromZeros, IntoBytes};

use super::signature;
use crate::CHUNK_BYTES;
use crate::media::{
    FileMedia, Media, MediaKind, MediaKindError, coalesce, forget_clean_pages, sysfs_of,
};
use crate::pool::findings::Finding;
use crate::pool::format::layout::{
    FEATURES_READ_ONLY, FORMAT_VERSION, SUPERBLOCK_BYTES, SUPERBLOCK_MAGIC, SUPERBLOCK_OFFSETS,
    SuperblockBytes, VOLUME_MAGIC, VOLUME_TABLE_OFFSETS,
};
use crate::pool::format::mirrored::{self, Copies};
use crate::pool::format::superblock::Superblock;
use crate::pool::lock::{self, Holder, LockKind, try_lock};
use crate::pool::{OpenMode, PoolError};

/// Maximum time to wait for udev. After each close by a writer, udev reads a block device under a
/// shared lock (systemd.io/BLOCK_DEVICE_LOCKING).
pub(in crate::pool) const UDEV_TIMEOUT: Duration = Duration::from_secs(3);

/// Maximum time to wait for forked children. Until execve(), a child has copies of all descriptors
/// of its parent. It therefore still holds locks and exclusive devices that the parent has
/// released.
pub(in crate::pool) const FORK_TIMEOUT: Duration = Duration::from_millis(200);

/// Defined as _IO(0x12, 94) in linux/fs.h.
const BLKROGET: libc::Ioctl = 0x125e;

/// Length of a pool's file or device.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Length {
    /// Length of a file, which must equal the length of its pool.
    File(u64),
    /// Length of a device, which may be longer than its pool.
    Device(u64),
}

/// Open file or device of a pool, with the lock for its mode.
pub(in crate::pool) struct Opened {
    pub(in crate::pool) file: File,
    pub(in crate::pool) media_kind: MediaKind,
    pub(in crate::pool) length: Length,
}

impl Opened {
    /// Opens the file or device at `path` and takes the lock for `mode`.
    ///
    /// For writing, a block device is opened with O_EXCL. The kernel then refuses a device that is
    /// mounted or otherwise in use, and refuses to mount the device while it is open.
    pub(in crate::pool) fn new(path: &Path, mode: OpenMode) -> Result<Self, PoolError> {
        let file_error =
            |action| move |source| PoolError::File { path: path.to_owned(), action, source };
        let (file, media_kind) = open(path, mode)?;
        let kind = match mode {
            OpenMode::ReadWrite => Some(LockKind::Exclusive),
            OpenMode::ReadOnly => Some(LockKind::Shared),
            OpenMode::Peek => None,
        };
        if let Some(kind) = kind {
            let timeout = match (media_kind, kind) {
                (MediaKind::BlockDevice { .. }, LockKind::Exclusive) => UDEV_TIMEOUT,
                _ => FORK_TIMEOUT,
            };
            lock_with_timeout(&file, kind, timeout)
                .map_err(file_error("lock"))?
                .map_err(|holder| PoolError::InUse { path: path.to_owned(), holder })?;
        }
        let bytes = media_kind.len_bytes(&file).map_err(file_error("find the length of"))?;
        let length =
            if media_kind.is_device() { Length::Device(bytes) } else { Length::File(bytes) };
        let opened = Self { file, media_kind, length };
        if mode == OpenMode::ReadWrite {
            opened.forget_clean_pages(&SUPERBLOCK_OFFSETS.map(|at| at..at + SUPERBLOCK_BYTES));
        }
        Ok(opened)
    }

    /// Drops clean pages of the pool's metadata from the page cache before a writer reads them, so
    /// that it reads the content of the disk. Drops whole chunks, because the kernel caches pages
    /// in large folios.
    pub(in crate::pool) fn forget_clean_pages(&self, ranges: &[Range<u64>]) {
        let whole = |range: &Range<u64>| {
            range.start / CHUNK_BYTES * CHUNK_BYTES..range.end.next_multiple_of(CHUNK_BYTES)
        };
        if matches!(self.media_kind, MediaKind::Disk | MediaKind::BlockDevice { .. }) {
            forget_clean_pages(
                &self.file,
                &coalesce(&ranges.iter().map(whole).collect::<Vec<_>>()),
            );
        }
    }

    /// Reads the superblocks before the pool is mapped. A file that is too short then causes an
    /// error instead of a SIGBUS.
    pub(in crate::pool) fn read_copies(
        &self,
        path: &Path,
    ) -> Result<[SuperblockBytes; 2], PoolError> {
        let file_error = |source| PoolError::File { path: path.to_owned(), action: "read", source };
        let mut copies = [SuperblockBytes::new_zeroed(), SuperblockBytes::new_zeroed()];
        // devdax does not support read(). Its length is known and is a multiple of the chunk size.
        let first_chunk = match self.media_kind {
            MediaKind::DevDax { .. } if self.length.bytes() >= CHUNK_BYTES => {
                let file = self.file.try_clone().map_err(file_error)?;
                Some(FileMedia::new(file, CHUNK_BYTES, false)?)
            }
            MediaKind::DevDax { .. } => return Ok(copies),
            _ => None,
        };
        for (copy, offset) in copies.iter_mut().zip(SUPERBLOCK_OFFSETS) {
            let bytes = copy.as_mut_bytes();
            match &first_chunk {
                Some(media) => media.read(offset, bytes)?,
                // A copy past the end of the file remains zeroed, which is not a valid
                // superblock.
                None if offset + SUPERBLOCK_BYTES > self.length.bytes() => {}
                None => self.file.read_exact_at(bytes, offset).map_err(file_error)?,
            }
        }
        Ok(copies)
    }
}

impl Opened {
    /// Replaces the error `NotAPool` if the file contains a volume table. The file may have been a
    /// pool, so the error must not suggest creating a pool there.
    pub(in crate::pool) fn detect_lost_superblocks(&self, error: PoolError) -> PoolError {
        match error {
            PoolError::NotAPool { path, .. } if self.has_volume_table() => {
                PoolError::SuperblocksLost { path }
            }
            error => error,
        }
    }

    /// Checks for a volume table at the offset that new pools use.
    fn has_volume_table(&self) -> bool {
        // devdax does not support read(), so the error for it is less specific.
        !matches!(self.media_kind, MediaKind::DevDax { .. })
            && VOLUME_TABLE_OFFSETS.iter().any(|offset| {
                let mut magic = [0; VOLUME_MAGIC.len()];
                self.file.read_exact_at(&mut magic, *offset).is_ok() && magic == VOLUME_MAGIC
            })
    }
}

impl Length {
    pub(crate) fn bytes(self) -> u64 {
        match self {
            Length::File(bytes) | Length::Device(bytes) => bytes,
        }
    }
}

/// Opens the file or device at `path`. Its type is checked first, because opening another device
/// may have side effects.
fn open(path: &Path, mode: OpenMode) -> Result<(File, MediaKind), PoolError> {
    let file_error = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => PoolError::Missing { path: path.to_owned() },
        io::ErrorKind::ReadOnlyFilesystem if is_block_device(path) => {
            PoolError::DeviceReadOnly { path: path.to_owned() }
        }
        _ => PoolError::File { path: path.to_owned(), action: "open", source },
    };
    let writable = mode == OpenMode::ReadWrite;
    let metadata = fs::metadata(path).map_err(file_error)?;
    let kind = metadata.file_type();
    let not_a_file = |kind| Err(PoolError::NotAFile { path: path.to_owned(), kind });
    // Prevents hanging if a named pipe without a reader has replaced the file in the meantime.
    let mut flags = libc::O_NONBLOCK;
    if kind.is_dir() {
        return not_a_file("a directory");
    } else if kind.is_char_device() {
        let entry = sysfs_of("char", metadata.rdev());
        MediaKind::of_character_device(&entry).map_err(|e| media_kind_error(path, e))?;
    } else if kind.is_block_device() {
        flags |= if writable { libc::O_EXCL } else { 0 };
    } else if !kind.is_file() {
        return not_a_file("a pipe or socket");
    }
    let mut options = OpenOptions::new();
    options.read(true).write(writable).custom_flags(flags);
    let opened = retry_while_in_use(FORK_TIMEOUT, || match options.open(path) {
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(Err(error)),
        result => result.map(Ok),
    });
    let file = opened.map_err(file_error)?.map_err(|error| match kind.is_block_device() {
        true => device_in_use(path, metadata.rdev()),
        false => file_error(error),
    })?;
    // Some drivers refuse to open a read-only device for writing. Others open it, and later refuse
    // to map it or to write to it.
    if writable && kind.is_block_device() && is_read_only(&file).map_err(file_error)? {
        return Err(PoolError::DeviceReadOnly { path: path.to_owned() });
    }
    let media_kind = MediaKind::of(&file).map_err(|e| media_kind_error(path, e))?;
    Ok((file, media_kind))
}

fn is_block_device(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_block_device())
}

/// Returns true if a block device is write-protected (Linux block/ioctl.c, BLKROGET).
fn is_read_only(device: &File) -> io::Result<bool> {
    let mut flag: libc::c_int = 0;
    // SAFETY: the kernel stores one int, which outlives the call.
    match unsafe { libc::ioctl(device.as_raw_fd(), BLKROGET, &raw mut flag) } {
        0 => Ok(flag != 0),
        _ => Err(io::Error::last_os_error()),
    }
}

pub(in crate::pool) fn media_kind_error(path: &Path, error: MediaKindError) -> PoolError {
    let path = path.to_owned();
    match error {
        MediaKindError::NotDax { subsystem } => PoolError::NotDax { path, subsystem },
        MediaKindError::Align { align_bytes } => PoolError::DaxAlign { path, align_bytes },
        MediaKindError::Other => PoolError::NotAFile { path, kind: "a special file" },
        MediaKindError::Io { .. } => {
            PoolError::File { path, action: "inspect", source: io::Error::other(error) }
        }
    }
}

/// Takes the lock, and waits up to `timeout` for its current holder.
pub(in crate::pool) fn lock_with_timeout(
    file: &File,
    kind: LockKind,
    timeout: Duration,
) -> io::Result<Result<(), Holder>> {
    retry_while_in_use(timeout, || try_lock(file, kind))
}

/// Repeats `attempt` for up to `timeout` while its inner result is an error, which means that the
/// file is in use.
pub(in crate::pool) fn retry_while_in_use<T, E>(
    timeout: Duration,
    mut attempt: impl FnMut() -> io::Result<Result<T, E>>,
) -> io::Result<Result<T, E>> {
    let end = Instant::now() + timeout;
    loop {
        match attempt()? {
            Err(_) if Instant::now() < end => thread::sleep(Duration::from_millis(20)),
            result => return Ok(result),
        }
    }
}

fn device_in_use(path: &Path, device: u64) -> PoolError {
    let path = path.to_owned();
    match device_user(&path, device) {
        Ok(holder) => PoolError::InUse { path, holder },
        Err(by) => PoolError::DeviceInUse { path, by },
    }
}

/// Returns the user of a device that the kernel refuses to open: the holder of a pool's lock, a
/// mount, or another device.
pub(in crate::pool) fn device_user(path: &Path, device: u64) -> Result<Holder, String> {
    let holder = File::open(path).ok().and_then(|file| lock::holder(&file));
    if let Some(holder) = holder {
        return Ok(holder);
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    Err(match (mount_point(&mounts, device), stacked_device(&sysfs_of("block", device))) {
        (Some(mount), _) => format!("mounted on {mount}"),
        (None, Some(upper)) => format!("part of {upper}"),
        (None, None) => {
            "the kernel or another program holds it or a part of it (a mount, swap, RAID)"
                .to_owned()
        }
    })
}

/// Returns the mount point of a device. In /proc/pid/mountinfo, the third field is the device, and
/// the fifth is the mount point (proc(5)).
fn mount_point(mounts: &str, device: u64) -> Option<&str> {
    let wanted = format!("{}:{}", major(device), minor(device));
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(2);
        (fields.next() == Some(&wanted)).then(|| fields.nth(1)).flatten()
    })
}

/// Returns a device that is built on this one, such as a logical volume.
fn stacked_device(entry: &Path) -> Option<String> {
    let upper: PathBuf = fs::read_dir(entry.join("holders")).ok()?.next()?.ok()?.path();
    Some(upper.file_name()?.to_string_lossy().into_owned())
}

/// Selects the valid superblock, and compares its pool size with the length of the file or device.
pub(in crate::pool) fn select_superblock(
    path: &Path,
    copies: [SuperblockBytes; 2],
    length: Length,
    mode: OpenMode,
) -> Result<(Superblock, Vec<Finding>), PoolError> {
    let path = || path.to_owned();
    let any_magic = copies.iter().any(|copy| copy.magic == SUPERBLOCK_MAGIC);
    let found = signature::describe_head(copies[0].as_bytes(), length.bytes());
    let mut findings = Vec::new();
    let bytes = match mirrored::choose(copies) {
        Copies::Agree(bytes) => bytes,
        Copies::Stale { current, stale: copy } => {
            findings.push(Finding::SuperblockStale { copy });
            current
        }
        Copies::Damaged { current, damaged: copy } => {
            findings.push(Finding::SuperblockCopy { copy });
            current
        }
        Copies::Lost if any_magic => return Err(PoolError::SuperblocksDamaged { path: path() }),
        Copies::Lost => return Err(PoolError::NotAPool { path: path(), found }),
    };
    let version = bytes.version.get();
    if version != FORMAT_VERSION {
        return Err(PoolError::Version { path: path(), version, supported: FORMAT_VERSION });
    }
    let features = bytes.features_incompatible.get();
    if features != 0 {
        return Err(PoolError::Features { path: path(), features, hint: "" });
    }
    let features = bytes.features_read_only.get() & !FEATURES_READ_ONLY;
    if features != 0 && mode == OpenMode::ReadWrite {
        return Err(PoolError::Features { path: path(), features, hint: " for writing" });
    }
    let superblock = Superblock::parse(&bytes)
        .map_err(|source| PoolError::SuperblockInvalid { path: path(), source })?;
    let pool_bytes = superblock.size_bytes();
    debug_assert!(pool_bytes.is_multiple_of(CHUNK_BYTES));
    let to_bytes = superblock.growing_to_bytes;
    if to_bytes > 0 {
        findings.push(Finding::GrowthUnfinished { to_bytes });
    }
    let file_bytes = length.bytes();
    match file_bytes.cmp(&pool_bytes) {
        // On a device, the space after the pool is not part of the pool, which may grow into it.
        std::cmp::Ordering::Greater if matches!(length, Length::Device(_)) => {
            Ok((superblock, findings))
        }
        // A crash interrupted the growth. The space past the old end is not part of the pool yet.
        std::cmp::Ordering::Greater if file_bytes <= to_bytes => Ok((superblock, findings)),
        std::cmp::Ordering::Less => {
            Err(PoolError::Truncated { path: path(), file_bytes, pool_bytes })
        }
        std::cmp::Ordering::Greater => {
            Err(PoolError::Enlarged { path: path(), file_bytes, pool_bytes })
        }
        std::cmp::Ordering::Equal => Ok((superblock, findings)),
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::makedev;

    use super::*;

    #[test]
    fn mounted_device_is_found_by_its_number() {
        let mounts = "21 1 0:20 / /proc rw - proc proc rw\n\
                      30 1 7:1 / /mnt/with\\040space rw shared:1 - ext4 /dev/loop1 rw\n";
        assert_eq!(mount_point(mounts, makedev(7, 1)), Some("/mnt/with\\040space"));
        assert_eq!(mount_point(mounts, makedev(7, 2)), None);
    }

    #[test]
    fn wait_for_a_lock_ends_after_the_timeout() {
        let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        let other = File::open(file.path()).unwrap();
        assert!(try_lock(&other, LockKind::Shared).unwrap().is_ok());
        let timeout = Duration::from_millis(50);
        assert!(lock_with_timeout(file.as_file(), LockKind::Exclusive, timeout).unwrap().is_err());
        let lock_holder = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            drop(other);
        });
        let timeout = Duration::from_secs(60);
        assert!(lock_with_timeout(file.as_file(), LockKind::Exclusive, timeout).unwrap().is_ok());
        lock_holder.join().unwrap();
    }
}
