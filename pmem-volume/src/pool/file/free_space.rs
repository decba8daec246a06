//! Free space in the file system or on the device of a pool.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use super::open_steps::media_kind_error;
use crate::btt::ARENA_MAX_BYTES;
use crate::media::{Media, MediaKind};
use crate::pool::{Pool, PoolError, bytes};

/// Bytes in the pool's tables to which the creation of a volume may be the first to store.
const TABLES_BYTES: u64 = 128 << 10;

/// Bytes that formatting an arena of a BTT stores: two info blocks and the log of 256 lanes, in
/// whole pages.
const ARENA_FORMAT_BYTES: u64 = 32 << 10;

fn format_bytes(chunks: u32) -> u64 {
    bytes(chunks).div_ceil(ARENA_MAX_BYTES) * ARENA_FORMAT_BYTES
}

impl<M: Media> Pool<M> {
    /// Checks that the file system has space for the creation of a volume with `chunks` chunks.
    /// Without space, a store would raise SIGBUS instead of returning an error.
    pub(in crate::pool) fn check_format_space(&self, chunks: u32) -> Result<(), PoolError> {
        self.check_free_space(TABLES_BYTES + format_bytes(chunks))
    }

    /// Checks like [`Pool::check_format_space`] for several parts with the given numbers of chunks.
    pub(in crate::pool) fn check_split_space(&self, parts: &[u32]) -> Result<(), PoolError> {
        let of_parts = parts.iter().map(|chunks| format_bytes(*chunks));
        self.check_free_space(TABLES_BYTES + of_parts.sum::<u64>())
    }

    fn check_free_space(&self, needed_bytes: u64) -> Result<(), PoolError> {
        let Some(media) = self.media().as_file() else { return Ok(()) };
        if !self.is_thin() {
            return Ok(());
        }
        let file_system = FileSystem::of(media.file()).map_err(|source| PoolError::File {
            path: self.path.clone(),
            action: "inspect the file system of",
            source,
        })?;
        // A tmpfs without a limit reports no size.
        if file_system.total_bytes > 0 && file_system.free_bytes < needed_bytes {
            let free_bytes = file_system.free_bytes;
            return Err(PoolError::FileSystemFull {
                path: self.path.clone(),
                needed_bytes,
                free_bytes,
            });
        }
        Ok(())
    }
}

pub(in crate::pool) struct FileSystem {
    pub(in crate::pool) total_bytes: u64,
    pub(in crate::pool) free_bytes: u64,
}

impl FileSystem {
    pub(in crate::pool) fn of(file: &File) -> io::Result<Self> {
        // SAFETY: statvfs contains only numbers, for which zero is valid.
        let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel fills the struct, which outlives the call.
        if unsafe { libc::fstatvfs(file.as_raw_fd(), &raw mut stat) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        Ok(Self { total_bytes: bytes(stat.f_blocks), free_bytes: bytes(stat.f_bavail) })
    }
}

/// Checks that the file system has space for a file of `size_bytes`.
///
/// On a disk, there must be free space for all missing blocks of the file. On tmpfs, the file
/// remains sparse. Therefore, only the total size of tmpfs and free space for the pool's own
/// `own_bytes` are checked. A tmpfs without a limit reports no size.
pub(in crate::pool) fn check_free_space(
    path: &Path,
    file: &File,
    size_bytes: u64,
    needed_bytes: u64,
    own_bytes: u64,
) -> Result<(), PoolError> {
    let file_system = FileSystem::of(file).map_err(|source| PoolError::File {
        path: path.to_owned(),
        action: "inspect the file system of",
        source,
    })?;
    let is_in_memory =
        MediaKind::of(file).map_err(|e| media_kind_error(path, e))? == MediaKind::Memory;
    let (needed_bytes, room_bytes) = match is_in_memory {
        true if size_bytes > file_system.total_bytes => (size_bytes, file_system.total_bytes),
        true => (own_bytes, file_system.free_bytes),
        false => (needed_bytes, file_system.free_bytes),
    };
    let unlimited = is_in_memory && file_system.total_bytes == 0;
    if !unlimited && needed_bytes > room_bytes {
        return Err(PoolError::FileSystemFull {
            path: path.to_owned(),
            needed_bytes,
            free_bytes: file_system.free_bytes,
        });
    }
    Ok(())
}

/// Checks that the pool fits on its device.
pub(in crate::pool) fn check_device(
    path: &Path,
    needed_bytes: u64,
    device_bytes: u64,
) -> Result<(), PoolError> {
    if needed_bytes <= device_bytes {
        return Ok(());
    }
    Err(PoolError::DeviceTooSmall { path: path.to_owned(), needed_bytes, device_bytes })
}

pub(in crate::pool) fn file_too_large(size_bytes: u64) -> PoolError {
    let rule = "exceeds the maximum file size of the file system (ext4: 16 TiB)".to_owned();
    PoolError::Size { quantity: "pool size", value: size_bytes, rule }
}
