//! Making a pool.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use uuid::Uuid;
use zerocopy::IntoBytes;

use super::chunk::{ChunkId, Run};
use super::layout::SUPERBLOCK_OFFSETS;
use super::lock::{LockKind, try_lock};
use super::superblock::Superblock;
use super::table::{ChunkTable, Owner};
use super::unnamed_file::Unnamed;
use super::{MAX_POOL_BYTES, MIN_POOL_BYTES, OpenMode, Pool, PoolError, mirrored, redo_log, volume_record};
use crate::CHUNK_BYTES;
use crate::media::{self, FileMedia, Media, MediaError};
use crate::size::display;

impl Pool {
    /// Makes a pool of `size_bytes` in a new file, of which `strg_bytes` are kept for volumes, and opens it. On a
    /// disk all of it is allocated. If anything fails there is no file.
    pub fn create(path: &Path, size_bytes: u64, strg_bytes: u64) -> Result<Arc<Pool>, PoolError> {
        let superblock = plan(size_bytes, strg_bytes, Uuid::new_v4(), unix_now_s())?;
        let file_error =
            |action| move |source: io::Error| PoolError::File { path: path.to_owned(), action, source };
        // The file gets its name only when it is a pool: a crash before leaves nothing behind.
        let unnamed = Unnamed::in_folder_of(path)?;
        check_room(path, &unnamed.file, size_bytes, 0)?;
        media::allocate(&unnamed.file, 0..size_bytes).map_err(|error| match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => PoolError::FileSystemFull {
                path: path.to_owned(),
                needed_bytes: size_bytes,
                free_bytes: FileSystem::of(&unnamed.file).map_or(0, |fs| fs.free_bytes),
            },
            Some(libc::EFBIG) => PoolError::Size {
                what: "pool size",
                value: size_bytes,
                rule: "is larger than a file may be on this file system".to_owned(),
            },
            _ => file_error("allocate")(error),
        })?;
        try_lock(&unnamed.file, LockKind::Exclusive)
            .map_err(file_error("lock"))?
            .map_err(|holder| PoolError::InUse { path: path.to_owned(), holder })?;
        let file = unnamed.file.try_clone().map_err(file_error("duplicate"))?;
        let media = FileMedia::new(file, size_bytes, true)?;
        write_empty_pool(&media, &superblock)?;
        unnamed.name(path)?;
        Pool::from_media(
            path.to_owned(),
            OpenMode::ReadWrite,
            super::Backing::File(media),
            superblock,
            vec![],
        )
    }
}

/// Checks the sizes and lays the pool out.
pub(super) fn plan(
    size_bytes: u64,
    strg_bytes: u64,
    uuid: Uuid,
    created_unix_s: u64,
) -> Result<Superblock, PoolError> {
    let size = |what, value, rule: String| Err(PoolError::Size { what, value, rule });
    if !size_bytes.is_multiple_of(CHUNK_BYTES) {
        return size("pool size", size_bytes, "is not a multiple of 2 MiB".to_owned());
    }
    if !(MIN_POOL_BYTES..=MAX_POOL_BYTES).contains(&size_bytes) {
        let rule = format!("is not between {} and {}", display(MIN_POOL_BYTES), display(MAX_POOL_BYTES));
        return size("pool size", size_bytes, rule);
    }
    if !strg_bytes.is_multiple_of(CHUNK_BYTES) {
        return size("STRG size", strg_bytes, "is not a multiple of 2 MiB".to_owned());
    }
    let superblock = Superblock::new(uuid, created_unix_s, (size_bytes / CHUNK_BYTES) as u32, strg_bytes);
    let usable_bytes = size_bytes - u64::from(superblock.metadata_chunks()) * CHUNK_BYTES;
    if strg_bytes > usable_bytes {
        let rule =
            format!("is more than the {} that the pool can hold besides its own data", display(usable_bytes));
        return size("STRG size", strg_bytes, rule);
    }
    Ok(superblock)
}

/// Writes a pool in which everything is free. The media reads as zeros.
///
/// 1. Tables and log, persist.
/// 2. Superblocks: from here on it is a pool.
pub(super) fn write_empty_pool(media: &dyn Media, superblock: &Superblock) -> Result<(), MediaError> {
    let table = ChunkTable::new(superblock);
    for chunk in (0..table.entries()).map(ChunkId) {
        let owner = if superblock.is_metadata(chunk) { Owner::Metadata } else { Owner::Free };
        table.set_owner(media, chunk, owner)?;
        table.set_wear(media, chunk, 0)?;
    }
    for slot in superblock.slots() {
        let record = volume_record::empty_record(slot, 0);
        for offset in superblock.volume_record_offsets(slot) {
            media.store(offset, record.as_bytes())?;
        }
    }
    let log = redo_log::empty_header();
    media.store(superblock.log_offset, log.as_bytes())?;
    let log_range = superblock.log_offset..superblock.log_offset + superblock.log_bytes;
    let [_, volumes_a, volumes_b] = superblock.tables();
    let chunk_table = table.byte_range(Run { start: ChunkId(0), chunks: table.entries() });
    media.persist(&[chunk_table, volumes_a, volumes_b, log_range])?;
    mirrored::write(media, SUPERBLOCK_OFFSETS, &superblock.to_bytes())
}

/// How much a file system holds.
pub(super) struct FileSystem {
    total_bytes: u64,
    pub(super) free_bytes: u64,
}

impl FileSystem {
    /// The one that a file lies on.
    pub(super) fn of(file: &File) -> io::Result<Self> {
        // SAFETY: statvfs is plain numbers, for which zero is valid.
        let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel fills the struct that outlives the call.
        if unsafe { libc::fstatvfs(file.as_raw_fd(), &raw mut stat) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        Ok(Self { total_bytes: bytes(stat.f_blocks), free_bytes: bytes(stat.f_bavail) })
    }
}

/// A disk must have room now for all that the file does not have yet. tmpfs stays sparse, but what it can never hold
/// is refused; one without a limit shows no size.
pub(super) fn check_room(path: &Path, file: &File, size_bytes: u64, has_bytes: u64) -> Result<(), PoolError> {
    let failed =
        |source| PoolError::File { path: path.to_owned(), action: "look at the file system of", source };
    let file_system = FileSystem::of(file).map_err(failed)?;
    let is_volatile = media::is_volatile(file).map_err(failed)?;
    let (needed_bytes, room_bytes) = match is_volatile {
        true => (size_bytes, file_system.total_bytes),
        false => (size_bytes - has_bytes, file_system.free_bytes),
    };
    let unlimited = is_volatile && file_system.total_bytes == 0;
    if !unlimited && needed_bytes > room_bytes {
        return Err(PoolError::FileSystemFull {
            path: path.to_owned(),
            needed_bytes,
            free_bytes: file_system.free_bytes,
        });
    }
    Ok(())
}

pub(super) fn unix_now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
