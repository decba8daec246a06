//! Making a pool.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use uuid::Uuid;
use zerocopy::IntoBytes;

use super::chunk::{ChunkId, Run};
use super::layout::SUPERBLOCK_OFFSETS;
use super::lock::{LockKind, try_lock};
use super::superblock::Superblock;
use super::table::{ChunkTable, Owner};
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
        check_room(path, &unnamed.file, size_bytes)?;
        media::allocate(&unnamed.file, size_bytes).map_err(|error| match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => PoolError::FileSystemFull {
                path: path.to_owned(),
                needed_bytes: size_bytes,
                free_bytes: file_system(&unnamed.file).map_or(0, |fs| fs.free_bytes),
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

/// A file that has no name yet and vanishes with its last descriptor.
struct Unnamed {
    file: File,
    /// Set where the file system cannot make nameless files: a name to be renamed, or removed on failure.
    temporary: Option<PathBuf>,
}

impl Unnamed {
    fn in_folder_of(path: &Path) -> Result<Self, PoolError> {
        let file_error = |source| PoolError::File { path: path.to_owned(), action: "create", source };
        match path.symlink_metadata() {
            Ok(_) => return Err(PoolError::AlreadyExists { path: path.to_owned() }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(file_error(error)),
        }
        let folder = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(0o600);
        match options.clone().custom_flags(libc::O_TMPFILE).open(folder) {
            Ok(file) => Ok(Self { file, temporary: None }),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {
                let mut name = path.file_name().unwrap_or_default().to_owned();
                name.push(format!(".new-{}", std::process::id()));
                let temporary = folder.join(name);
                let file = options.create_new(true).open(&temporary).map_err(file_error)?;
                Ok(Self { file, temporary: Some(temporary) })
            }
            Err(error) => Err(file_error(error)),
        }
    }

    /// Gives the file its name, which must not be taken, and makes the name durable.
    fn name(mut self, path: &Path) -> Result<(), PoolError> {
        let source_path = match &self.temporary {
            Some(temporary) => temporary.clone(),
            None => PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd())),
        };
        link(&source_path, path).map_err(|source| match source.kind() {
            io::ErrorKind::AlreadyExists => PoolError::AlreadyExists { path: path.to_owned() },
            _ => PoolError::File { path: path.to_owned(), action: "name", source },
        })?;
        if let Some(temporary) = self.temporary.take() {
            // The pool is there under its name; a second name that stays would only be untidy.
            let _ = std::fs::remove_file(temporary);
        }
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let synced = File::open(folder).and_then(|folder| folder.sync_all());
        synced.map_err(|source| PoolError::File {
            path: path.to_owned(),
            action: "persist the name of",
            source,
        })
    }
}

impl Drop for Unnamed {
    fn drop(&mut self) {
        if let Some(temporary) = self.temporary.take() {
            let _ = std::fs::remove_file(temporary);
        }
    }
}

/// linkat() that follows a symbolic link at the source, as /proc/self/fd/N is one.
fn link(source: &Path, target: &Path) -> io::Result<()> {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;
    let source = CString::new(source.as_os_str().as_bytes())?;
    let target = CString::new(target.as_os_str().as_bytes())?;
    // SAFETY: both are C strings that outlive the call.
    let result = unsafe {
        libc::linkat(
            libc::AT_FDCWD,
            source.as_ptr(),
            libc::AT_FDCWD,
            target.as_ptr(),
            libc::AT_SYMLINK_FOLLOW,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

struct FileSystem {
    total_bytes: u64,
    free_bytes: u64,
}

fn file_system(file: &File) -> io::Result<FileSystem> {
    // SAFETY: statvfs is plain numbers, for which zero is valid.
    let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel fills the struct that outlives the call.
    if unsafe { libc::fstatvfs(file.as_raw_fd(), &raw mut stat) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
    Ok(FileSystem { total_bytes: bytes(stat.f_blocks), free_bytes: bytes(stat.f_bavail) })
}

/// A disk must have room for all of it now. tmpfs stays sparse, but what it can never hold is refused; one without a
/// limit shows no size.
fn check_room(path: &Path, file: &File, size_bytes: u64) -> Result<(), PoolError> {
    let failed =
        |source| PoolError::File { path: path.to_owned(), action: "look at the file system of", source };
    let file_system = file_system(file).map_err(failed)?;
    let is_volatile = media::is_volatile(file).map_err(failed)?;
    let room_bytes = if is_volatile { file_system.total_bytes } else { file_system.free_bytes };
    let unlimited = is_volatile && file_system.total_bytes == 0;
    if !unlimited && size_bytes > room_bytes {
        return Err(PoolError::FileSystemFull {
            path: path.to_owned(),
            needed_bytes: size_bytes,
            free_bytes: file_system.free_bytes,
        });
    }
    Ok(())
}

pub(super) fn unix_now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
