//! Creation of a pool.

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;

use uuid::Uuid;
use zerocopy::IntoBytes;

use super::file::free_space::{FileSystem, check_device, check_free_space, file_too_large};
use super::file::open_steps::{Opened, select_superblock};
use super::findings::Severity;
use super::format::chunk::{ChunkId, Run};
use super::format::layout::SUPERBLOCK_OFFSETS;
use super::format::mirrored;
use super::format::superblock::Superblock;
use super::format::table::{ChunkTable, Owner};
use super::format::volume_record;
use super::lock::{LockKind, try_lock};
use super::redo_log;
use super::{MAX_POOL_BYTES, MIN_POOL_BYTES, OpenMode, Pool, PoolError, unix_now_s};
use crate::CHUNK_BYTES;
use crate::file_mode::PRIVATE_MODE;
use crate::media::{self, FileMedia, Media, MediaError};
use crate::progress::{OnProgress, ignore_progress};
use crate::unnamed_file::{IfExists, NamingError, UnnamedFile, folder_of};
use foreshore_types::size::Size;

/// Options for a new pool.
#[derive(Default)]
pub struct CreateOptions<'a> {
    /// Size of the pool. `None` means the whole device. For a file, a size is required.
    pub size_bytes: Option<u64>,
    /// Bytes reserved for volumes.
    pub reserve_bytes: u64,
    /// Creates a thin file, in which free chunks are holes.
    pub thin: bool,
    /// Creates the pool even if the device contains data. A pool with volumes is refused even then.
    pub force: bool,
    /// Callback for the progress of allocating a file or erasing a device.
    pub progress: Option<OnProgress<'a>>,
}

impl Pool {
    /// Creates a pool of `size_bytes` in a new file, reserves `reserve_bytes` for volumes, and
    /// opens the pool. On a disk, all blocks of the file are allocated. After an error, no file
    /// remains.
    pub fn create(
        path: &Path,
        size_bytes: u64,
        reserve_bytes: u64,
    ) -> Result<Arc<Pool>, PoolError> {
        let size_bytes = Some(size_bytes);
        Self::create_with(
            path,
            CreateOptions { size_bytes, reserve_bytes, ..CreateOptions::default() },
        )
    }

    /// Creates a pool in a new file or on an existing device, and opens it.
    pub fn create_with(path: &Path, options: CreateOptions<'_>) -> Result<Arc<Pool>, PoolError> {
        let kind = fs::metadata(path).map(|metadata| metadata.file_type());
        match kind {
            Ok(kind) if kind.is_block_device() || kind.is_char_device() => {
                Self::create_on(path, options)
            }
            _ => Self::create_file(path, options),
        }
    }

    fn create_file(path: &Path, options: CreateOptions<'_>) -> Result<Arc<Pool>, PoolError> {
        let is_thin = options.thin;
        // The file gets its name only when the pool is complete. A crash before that leaves no
        // file.
        check_new(path)?;
        let unnamed = UnnamedFile::in_folder_of(path, PRIVATE_MODE).map_err(|source| {
            PoolError::File { path: path.to_owned(), action: "create", source }
        })?;
        let reason = "the pool will be a new file";
        let size_bytes = options
            .size_bytes
            .ok_or_else(|| PoolError::SizeNeeded { path: path.to_owned(), reason })?;
        let superblock = Superblock {
            is_thin,
            ..plan(size_bytes, options.reserve_bytes, Uuid::new_v4(), unix_now_s())?
        };
        let file_error = |action| {
            move |source: io::Error| PoolError::File { path: path.to_owned(), action, source }
        };
        let needed_bytes = if is_thin { superblock.metadata_bytes() } else { size_bytes };
        check_free_space(
            path,
            &unnamed.file,
            size_bytes,
            needed_bytes,
            superblock.metadata_bytes(),
        )?;
        let no_space = |error: io::Error| match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => PoolError::FileSystemFull {
                path: path.to_owned(),
                needed_bytes,
                free_bytes: FileSystem::of(&unnamed.file).map_or(0, |fs| fs.free_bytes),
            },
            Some(libc::EFBIG) => file_too_large(size_bytes),
            _ => file_error("allocate")(error),
        };
        let mut ignore_progress = ignore_progress;
        let progress = options.progress.unwrap_or(&mut ignore_progress);
        media::allocate(&unnamed.file, 0..size_bytes, is_thin, progress).map_err(no_space)?;
        try_lock(&unnamed.file, LockKind::Exclusive)
            .map_err(file_error("lock"))?
            .map_err(|holder| PoolError::InUse { path: path.to_owned(), holder })?;
        let file = unnamed.file.try_clone().map_err(file_error("duplicate"))?;
        let media = FileMedia::new(file, size_bytes, true)?.thin(is_thin);
        media.reserve(&(0..superblock.metadata_bytes())).map_err(no_space)?;
        write_empty_pool(&media, &superblock)?;
        unnamed.name(path, IfExists::Fail).map_err(
            |NamingError { action, source }| match source.kind() {
                io::ErrorKind::AlreadyExists => PoolError::AlreadyExists { path: path.to_owned() },
                _ => file_error(action)(source),
            },
        )?;
        Pool::from_media(path.to_owned(), OpenMode::ReadWrite, media, superblock, vec![])
    }

    /// Creates a pool on a device.
    ///
    /// 1. Check that the device is not in use, and that it is empty or may be overwritten.
    /// 2. Erase the chunk that contains both superblocks. From here on, an earlier pool on the
    ///    device is gone.
    /// 3. Erase all chunks of the pool. An interruption here leaves no pool.
    /// 4. Write the tables, and then the superblocks.
    fn create_on(path: &Path, options: CreateOptions<'_>) -> Result<Arc<Pool>, PoolError> {
        let opened = Opened::new(path, OpenMode::ReadWrite)?;
        if options.thin {
            return Err(PoolError::ThinDevice { path: path.to_owned() });
        }
        let device_bytes = opened.length.bytes();
        let size_bytes = options.size_bytes.unwrap_or(device_bytes / CHUNK_BYTES * CHUNK_BYTES);
        let superblock = plan(size_bytes, options.reserve_bytes, Uuid::new_v4(), unix_now_s())?;
        check_device(path, size_bytes, device_bytes)?;
        check_empty(path, &opened, options.force)?;
        let media = FileMedia::new(opened.file, size_bytes, true)?;
        let mut ignore_progress = ignore_progress;
        let erase = |progress| {
            media.erase(std::slice::from_ref(&(0..CHUNK_BYTES)))?;
            media.erase_in_steps(0..size_bytes, progress)
        };
        erase(options.progress.unwrap_or(&mut ignore_progress)).map_err(|error| {
            PoolError::File {
                path: path.to_owned(),
                action: "erase",
                source: io::Error::other(error),
            }
        })?;
        write_empty_pool(&media, &superblock)?;
        Pool::from_media(path.to_owned(), OpenMode::ReadWrite, media, superblock, vec![])
    }
}

/// Checks that `path` does not exist, but its folder does.
fn check_new(path: &Path) -> Result<(), PoolError> {
    match path.symlink_metadata() {
        Ok(_) => return Err(PoolError::AlreadyExists { path: path.to_owned() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(source) => {
            return Err(PoolError::File { path: path.to_owned(), action: "create", source });
        }
    }
    let folder = folder_of(path);
    if folder.metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        return Err(PoolError::NoFolder { path: path.to_owned(), folder: folder.to_owned() });
    }
    // A mistyped device name would otherwise create a file in the host's memory.
    if folder.canonicalize().is_ok_and(|folder| folder == Path::new("/dev")) {
        return Err(PoolError::NoDevice { path: path.to_owned() });
    }
    Ok(())
}

/// Checks that the device contains no data that must be kept.
fn check_empty(path: &Path, opened: &Opened, force: bool) -> Result<(), PoolError> {
    let file_error =
        |source| PoolError::File { path: path.to_owned(), action: "duplicate", source };
    let file = || opened.file.try_clone().map_err(file_error);
    let unknown_volumes =
        |reason| PoolError::DeviceUnknownVolumes { path: path.to_owned(), reason };
    let copies = opened.read_copies(path)?;
    let found = match select_superblock(path, copies, opened.length, OpenMode::ReadOnly) {
        Err(PoolError::NotAPool { .. }) => {
            let device = FileMedia::new(file()?, opened.length.bytes(), false)?;
            super::file::signature::describe_device(&device)?
        }
        Ok((superblock, findings)) => {
            let media = FileMedia::new(file()?, superblock.size_bytes(), false)?;
            let mode = OpenMode::ReadOnly;
            let pool = Pool::from_media(path.to_owned(), mode, media, superblock, findings)?;
            let volumes: Vec<_> = pool.volumes().into_iter().map(|volume| volume.name).collect();
            if !volumes.is_empty() {
                return Err(PoolError::DeviceHasVolumes { path: path.to_owned(), volumes });
            }
            // Damage can hide volumes, for example if a record is lost or the owner of a chunk is
            // unknown.
            if let Some(damage) =
                pool.findings_at_open().iter().find(|f| f.severity() > Severity::Note)
            {
                return Err(unknown_volumes(damage.to_string()));
            }
            Some("it already has a pool without volumes".to_owned())
        }
        Err(unreadable) => return Err(unknown_volumes(foreshore_types::chain(&unreadable))),
    };
    match found {
        Some(found) if !force => Err(PoolError::DeviceNotEmpty { path: path.to_owned(), found }),
        _ => Ok(()),
    }
}

/// Checks the sizes of a new pool, as far as this does not depend on its file or device. `None`
/// means the whole device.
pub fn check_pool_sizes(size_bytes: Option<u64>, reserve_bytes: u64) -> Result<(), PoolError> {
    plan(size_bytes.unwrap_or(MAX_POOL_BYTES), reserve_bytes, Uuid::nil(), 0).map(|_| ())
}

/// Checks the sizes, and returns the superblock for a new pool.
pub(super) fn plan(
    size_bytes: u64,
    reserve_bytes: u64,
    uuid: Uuid,
    created_unix_s: u64,
) -> Result<Superblock, PoolError> {
    let size = |quantity, value, rule: String| Err(PoolError::Size { quantity, value, rule });
    if !size_bytes.is_multiple_of(CHUNK_BYTES) {
        return size("pool size", size_bytes, "is not a multiple of 2 MiB".to_owned());
    }
    if !(MIN_POOL_BYTES..=MAX_POOL_BYTES).contains(&size_bytes) {
        let rule = format!(
            "is not between {} and {}",
            Size(MIN_POOL_BYTES).rounded(),
            Size(MAX_POOL_BYTES).rounded()
        );
        return size("pool size", size_bytes, rule);
    }
    if !reserve_bytes.is_multiple_of(CHUNK_BYTES) {
        return size("reserve", reserve_bytes, "is not a multiple of 2 MiB".to_owned());
    }
    let superblock =
        Superblock::new(uuid, created_unix_s, (size_bytes / CHUNK_BYTES) as u32, reserve_bytes);
    let usable_bytes = size_bytes - u64::from(superblock.metadata_chunks()) * CHUNK_BYTES;
    if reserve_bytes > usable_bytes {
        let rule = format!(
            "exceeds the maximum {}, which is the pool size less its metadata",
            Size(usable_bytes).rounded()
        );
        return size("reserve", reserve_bytes, rule);
    }
    Ok(superblock)
}

/// Writes a pool without volumes to media that reads as zeros.
///
/// 1. Write the tables and the log, and persist them.
/// 2. Write the superblocks. From here on, the pool exists.
pub(super) fn write_empty_pool(
    media: &dyn Media,
    superblock: &Superblock,
) -> Result<(), MediaError> {
    let table = ChunkTable::new(superblock);
    for chunk in (0..table.entries()).map(ChunkId) {
        let owner = if superblock.is_metadata(chunk) { Owner::Metadata } else { Owner::Free };
        table.set_entry(media, chunk, owner, 0)?;
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
