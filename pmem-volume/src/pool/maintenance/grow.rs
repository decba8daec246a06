//! Growth of a pool, by extending its file or using more of its device. The chunk table grows too.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::CHUNK_BYTES;
use crate::media::{FileMedia, Media, MediaError};
use crate::pool::file::free_space::{FileSystem, check_device, check_free_space, file_too_large};
use crate::pool::format::chunk::{ChunkId, Run};
use crate::pool::format::layout::CHUNK_ENTRY_BYTES;
use crate::pool::format::superblock::{Superblock, rewrite};
use crate::pool::format::table::{ChunkTable, Owner};
use crate::pool::open::cancel_growth;
use crate::pool::{MAX_POOL_BYTES, OpenMode, Pool, PoolError};
use crate::progress::{OnProgress, ignore_progress};
use foreshore_types::size::Size;

impl Pool {
    /// Enlarges a pool that is not in use, and opens it. On a disk, all blocks are allocated unless
    /// the pool is thin. If there is not enough space, nothing changes.
    pub fn grow(path: &Path, size_bytes: u64) -> Result<Arc<Pool>, PoolError> {
        Self::grow_with(path, Some(size_bytes), false, &mut ignore_progress)
    }

    /// Enlarges a pool as [`Pool::grow`] does. Without a size, the pool grows to the size of its
    /// device. Data after the pool on a device is erased only with `force`. `progress` receives
    /// the progress of allocating the file or erasing the device.
    pub fn grow_with(
        path: &Path,
        size_bytes: Option<u64>,
        force: bool,
        progress: OnProgress<'_>,
    ) -> Result<Arc<Pool>, PoolError> {
        let pool = Pool::open(path, OpenMode::ReadWrite)?;
        let media = pool.media();
        let size_bytes = pool.target_bytes(size_bytes)?;
        let old = pool.current_superblock();
        let new = plan(&old, size_bytes)?;
        let old_bytes = old.size_bytes();
        let own_bytes = new_table(&old, &new).map_or(0, |range| range.end - range.start);
        let needed_bytes = if new.is_thin { own_bytes } else { size_bytes - old_bytes };
        if media.media_kind().is_device() {
            check_device(path, size_bytes, pool.device_bytes()?)?;
            if !force {
                pool.check_range_empty(old_bytes..size_bytes)?;
            }
        } else {
            check_free_space(path, media.file(), size_bytes, needed_bytes, own_bytes)?;
        }
        let extend = |media: &FileMedia| {
            let grown = media.grown(size_bytes, progress)?;
            new_table(&old, &new).map_or(Ok(()), |range| grown.reserve(&range))?;
            Ok(grown)
        };
        // The lock is kept, because both media use the same open file.
        let grown = grow_media(media, &old, &new, extend).map_err(|failure| match failure {
            Failure::NoSpace(source) if media.media_kind().is_device() => {
                PoolError::File { path: path.to_owned(), action: "erase the added part of", source }
            }
            Failure::NoSpace(source) if source.raw_os_error() == Some(libc::EFBIG) => {
                file_too_large(size_bytes)
            }
            Failure::NoSpace(source) => no_space(path, media.file(), needed_bytes, source),
            Failure::Media(error) => error.into(),
        })?;
        Self::from_media(path.to_owned(), OpenMode::ReadWrite, grown, new, vec![])
    }

    /// Returns the requested size, or the size of the device.
    fn target_bytes(&self, size_bytes: Option<u64>) -> Result<u64, PoolError> {
        match size_bytes {
            Some(bytes) => Ok(bytes),
            None if self.media().media_kind().is_device() => {
                let device_bytes = self.device_bytes()? / CHUNK_BYTES * CHUNK_BYTES;
                match device_bytes > self.superblock.size_bytes() {
                    true => Ok(device_bytes),
                    false => {
                        Err(PoolError::DeviceNotGrown { path: self.path.clone(), device_bytes })
                    }
                }
            }
            None => Err(PoolError::SizeNeeded {
                path: self.path.clone(),
                reason: "the pool is in a file",
            }),
        }
    }

    /// Refuses to use a range that contains data, for example because a partition was enlarged over
    /// another one.
    fn check_range_empty(&self, range: Range<u64>) -> Result<(), PoolError> {
        let failed = |source| PoolError::File {
            path: self.path.clone(),
            action: "read beyond the end of",
            source,
        };
        let file = self.media().file().try_clone().map_err(failed)?;
        let device = FileMedia::new(file, range.end, false)?;
        match crate::pool::file::signature::describe_range(&device, range)? {
            Some(found) => Err(PoolError::DeviceGrowthNotEmpty { path: self.path.clone(), found }),
            None => Ok(()),
        }
    }

    fn device_bytes(&self) -> Result<u64, PoolError> {
        let media = self.media();
        media.media_kind().len_bytes(media.file()).map_err(|source| PoolError::File {
            path: self.path.clone(),
            action: "find the length of",
            source,
        })
    }
}

/// Returns the range of a new chunk table in the added part of the pool, if the table moves there.
fn new_table(old: &Superblock, new: &Superblock) -> Option<Range<u64>> {
    let start = new.chunk_table_offset;
    (start != old.chunk_table_offset).then(|| start..new.chunk_table_end_chunk() * CHUNK_BYTES)
}

/// Reason why a growth failed.
#[derive(Debug)]
pub(in crate::pool) enum Failure {
    /// The file could not be extended, or the device could not be erased. The pool is unchanged.
    NoSpace(io::Error),
    /// The media failed. The next open finds the old or the new size.
    Media(MediaError),
}

impl From<MediaError> for Failure {
    fn from(error: MediaError) -> Self {
        Failure::Media(error)
    }
}

/// Grows a pool, and returns its media with the new length.
///
/// 1. Announce the future file size in the superblock. From here on, a longer file is not damage.
/// 2. Extend the file, or erase the part of the device for the new chunks. Make the change durable.
/// 3. Store the table entries of the new chunks after the old ones or in a new table, and persist
///    them.
/// 4. Write the superblock with the new size and table. From here on, the pool is larger.
///
/// If the table moved, the new table lists the chunks of the old one as leftovers. The next open
/// marks them for erasing.
pub(in crate::pool) fn grow_media<M: Media>(
    media: &M,
    old: &Superblock,
    new: &Superblock,
    extend: impl FnOnce(&M) -> io::Result<M>,
) -> Result<M, Failure> {
    announce_growth(media, old, new)?;
    let grown = match extend(media) {
        Ok(grown) => grown,
        Err(error) => {
            // If this fails too, the next open withdraws the announcement.
            cancel_growth(media, old)?;
            return Err(Failure::NoSpace(error));
        }
    };
    write_table(&grown, old, new)?;
    rewrite(&grown, new)?;
    Ok(grown)
}

/// Returns the superblock of the grown pool. If the chunks of the table have space for the new
/// entries, the table is not moved. Otherwise, it is moved to the first new chunks.
pub(in crate::pool) fn plan(old: &Superblock, size_bytes: u64) -> Result<Superblock, PoolError> {
    let refuse =
        |rule: String| Err(PoolError::Size { quantity: "pool size", value: size_bytes, rule });
    let old_bytes = old.size_bytes();
    if !size_bytes.is_multiple_of(CHUNK_BYTES) {
        return refuse("is not a multiple of 2 MiB".to_owned());
    }
    if size_bytes <= old_bytes {
        return refuse(format!(
            "does not exceed the current {}, and a pool cannot shrink",
            Size(old_bytes).rounded()
        ));
    }
    if size_bytes > MAX_POOL_BYTES {
        return refuse(format!("exceeds the maximum {}", Size(MAX_POOL_BYTES).rounded()));
    }
    let chunks = (size_bytes / CHUNK_BYTES) as u32;
    // Two updates follow: the announcement and the new size.
    let grown = Superblock {
        sequence: old.sequence.wrapping_add(2),
        chunks,
        growing_to_bytes: 0,
        ..old.clone()
    };
    let is_whole = |superblock: &Superblock| Superblock::parse(&superblock.to_bytes()).is_ok();
    if grown.chunk_table_end_chunk() == old.chunk_table_end_chunk() && is_whole(&grown) {
        return Ok(grown);
    }
    let table_bytes = (u64::from(chunks) * CHUNK_ENTRY_BYTES).next_multiple_of(CHUNK_BYTES);
    if old_bytes + table_bytes > size_bytes {
        return refuse(format!(
            "is too small, because the larger chunk table needs {} of the added space",
            Size(table_bytes).rounded()
        ));
    }
    let moved = Superblock { chunk_table_offset: old_bytes, ..grown };
    assert!(is_whole(&moved), "a table after the old end overlaps no region");
    Ok(moved)
}

/// Performs step 1 of a growth.
pub(in crate::pool) fn announce_growth(
    media: &dyn Media,
    old: &Superblock,
    new: &Superblock,
) -> Result<(), MediaError> {
    let sequence = old.sequence.wrapping_add(1);
    rewrite(media, &Superblock { sequence, growing_to_bytes: new.size_bytes(), ..old.clone() })
}

/// Performs step 3 of a growth. The entries have no effect until the superblock refers to them.
/// They are past the end of the old table, or in chunks that were not part of the pool.
pub(in crate::pool) fn write_table(
    media: &dyn Media,
    old: &Superblock,
    new: &Superblock,
) -> Result<(), MediaError> {
    let (from, to) = (ChunkTable::new(old), ChunkTable::new(new));
    if old.chunk_table_offset != new.chunk_table_offset {
        for chunk in (0..from.entries()).map(ChunkId) {
            from.copy_entry(media, chunk, to)?;
            if old.is_metadata(chunk) && !new.is_metadata(chunk) {
                to.set_owner(media, chunk, Owner::Scrub)?;
            }
        }
    }
    for chunk in (from.entries()..to.entries()).map(ChunkId) {
        let owner = if new.is_metadata(chunk) { Owner::Metadata } else { Owner::Free };
        to.set_owner(media, chunk, owner)?;
        to.set_wear(media, chunk, 0)?;
    }
    media.persist_range(to.byte_range(Run { start: ChunkId(0), chunks: to.entries() }))
}

fn no_space(path: &Path, file: &std::fs::File, needed_bytes: u64, source: io::Error) -> PoolError {
    match source.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => PoolError::FileSystemFull {
            path: path.to_owned(),
            needed_bytes,
            free_bytes: FileSystem::of(file).map_or(0, |fs| fs.free_bytes),
        },
        _ => PoolError::File { path: path.to_owned(), action: "enlarge", source },
    }
}
