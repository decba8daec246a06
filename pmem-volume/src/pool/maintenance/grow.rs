//! Growth of a pool, by extending its file or using more of its device. The chunk table grows too.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::CHUNK_BYTES;
use crate::media::{FileMedia, Media, MediaError};
use crate::pool::file::free_space::{FileSystem, check_device, check_free_space, file_too_large};
use crate::pool::format::chunk::{ChunkId, Run, runs};
use crate::pool::format::layout::CHUNK_ENTRY_BYTES;
use crate::pool::format::superblock::{Superblock, rewrite};
use crate::pool::format::table::{ChunkTable, Owner};
use crate::pool::open::cancel_growth;
use crate::pool::{MAX_POOL_BYTES, OpenMode, Pool, PoolError, State};
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
        pool.grow_in_use(size_bytes, force, progress)?;
        Ok(pool)
    }

    /// Enlarges an open pool as [`Pool::grow_with`] does, while other threads use it. They wait
    /// only while the growth is checked and the chunk table is written.
    pub fn grow_in_use(
        &self,
        size_bytes: Option<u64>,
        force: bool,
        progress: OnProgress<'_>,
    ) -> Result<(), PoolError> {
        let (path, media) = (&*self.path, self.media());
        let size_bytes = self.target_bytes(&self.superblock(), size_bytes)?;
        let extend =
            |growth: &Growth| media.grow(growth.added(), growth.new_table().as_ref(), progress);
        self.grow_on(size_bytes, |growth| self.check_growth(growth, force), extend).map_err(
            |failure| match failure {
                Failure::NoSpace { source, .. } if media.media_kind().is_device() => {
                    let action = "erase the added part of";
                    PoolError::File { path: path.to_owned(), action, source }
                }
                Failure::NoSpace { source, .. } if source.raw_os_error() == Some(libc::EFBIG) => {
                    file_too_large(size_bytes)
                }
                Failure::NoSpace { needed_bytes, source } => {
                    no_space(path, media.file(), needed_bytes, source)
                }
                Failure::Pool(error) => error,
            },
        )
    }

    /// Checks that the added part fits on the device and is empty there, or that the file system
    /// has space for it.
    fn check_growth(&self, growth: &Growth, force: bool) -> Result<(), PoolError> {
        let (path, media, size_bytes) = (&*self.path, self.media(), growth.new.size_bytes());
        if media.media_kind().is_device() {
            check_device(path, size_bytes, self.device_bytes()?)?;
            if !force {
                self.check_range_empty(growth.added())?;
            }
            return Ok(());
        }
        let (needed_bytes, own_bytes) = (growth.needed_bytes(), growth.table_bytes());
        check_free_space(path, media.file(), size_bytes, needed_bytes, own_bytes)
    }

    /// Returns the requested size, or the size of the device.
    fn target_bytes(
        &self,
        current: &Superblock,
        size_bytes: Option<u64>,
    ) -> Result<u64, PoolError> {
        match size_bytes {
            Some(bytes) => Ok(bytes),
            None if self.media().media_kind().is_device() => {
                let device_bytes = self.device_bytes()? / CHUNK_BYTES * CHUNK_BYTES;
                match device_bytes > current.size_bytes() {
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

/// Superblocks before and after a growth.
pub(in crate::pool) struct Growth {
    old: Superblock,
    new: Superblock,
}

impl Growth {
    /// Returns the added part of the pool.
    pub(in crate::pool) fn added(&self) -> Range<u64> {
        self.old.size_bytes()..self.new.size_bytes()
    }

    /// Returns the range of a new chunk table in the added part of the pool, if the table moves
    /// there.
    fn new_table(&self) -> Option<Range<u64>> {
        let start = self.new.chunk_table_offset;
        (start != self.old.chunk_table_offset)
            .then(|| start..self.new.chunk_table_end_chunk() * CHUNK_BYTES)
    }

    fn table_bytes(&self) -> u64 {
        self.new_table().map_or(0, |range| range.end - range.start)
    }

    /// Returns the number of bytes that the growth allocates in a file.
    fn needed_bytes(&self) -> u64 {
        let added = self.added();
        if self.new.is_thin { self.table_bytes() } else { added.end - added.start }
    }
}

/// Reason why a growth failed.
#[derive(Debug)]
pub(in crate::pool) enum Failure {
    /// The file could not be extended, or the device could not be erased. The pool is unchanged.
    NoSpace { needed_bytes: u64, source: io::Error },
    /// The growth was refused, or the media failed. In the latter case, the next open finds the old
    /// or the new size.
    Pool(PoolError),
}

impl From<PoolError> for Failure {
    fn from(error: PoolError) -> Self {
        Failure::Pool(error)
    }
}

impl<M: Media> Pool<M> {
    /// Grows a pool, whose media `extend` lengthens. `check` may refuse the growth. The state is
    /// locked meanwhile, so that no other growth changes the range that `extend` erases.
    ///
    /// 1. Announce the future file size in the superblock. From here on, a longer file is not
    ///    damage.
    /// 2. Extend the file, or erase the part of the device for the new chunks. Make the change
    ///    durable. This takes long, so the state is not locked.
    /// 3. Store the table entries of the new chunks after the old ones or in a new table, and
    ///    persist them. The state is locked, because a change of the old table would be lost.
    /// 4. Write the superblock with the new size and table. From here on, the pool is larger.
    ///
    /// If the table moved, the chunks of the old one are marked for erasing in the new one.
    pub(in crate::pool) fn grow_on(
        &self,
        size_bytes: u64,
        check: impl FnOnce(&Growth) -> Result<(), PoolError>,
        extend: impl FnOnce(&Growth) -> io::Result<()>,
    ) -> Result<(), Failure> {
        let growth = self.announce(size_bytes, check)?;
        let extended = extend(&growth);
        let mut state = self.lock_for_change()?;
        let old = self.superblock();
        if let Err(source) = extended {
            // If this fails too, the next open withdraws the announcement.
            self.set_superblock(self.latch(cancel_growth(self.media(), &old))?);
            return Err(Failure::NoSpace { needed_bytes: growth.needed_bytes(), source });
        }
        // The first thin volume may have been created in the meantime.
        let new = Superblock { has_thin_volumes: old.has_thin_volumes, ..growth.new };
        self.latch(write_table(self.media(), &old, &new))?;
        self.latch(rewrite(self.media(), &new))?;
        self.add_grown_part(&mut state, &Growth { old, new });
        Ok(())
    }

    /// Performs step 1, and returns the superblocks before it and after step 4.
    fn announce(
        &self,
        size_bytes: u64,
        check: impl FnOnce(&Growth) -> Result<(), PoolError>,
    ) -> Result<Growth, PoolError> {
        let _state = self.lock_for_change()?;
        let old = self.superblock();
        if old.growing_to_bytes > 0 {
            return Err(PoolError::Growing { path: self.path.clone() });
        }
        let growth = Growth { new: plan(&old, size_bytes)?, old };
        check(&growth)?;
        let announced = announce_growth(self.media(), &growth.old, &growth.new);
        self.set_superblock(self.latch(announced)?);
        Ok(growth)
    }

    /// Makes the new chunks available.
    fn add_grown_part(&self, state: &mut State, growth: &Growth) {
        let Growth { old, new } = growth;
        self.set_superblock(new.clone());
        let is_left = |chunk: &ChunkId| old.is_metadata(*chunk) && !new.is_metadata(*chunk);
        let left = runs((0..old.chunks).map(ChunkId).filter(is_left));
        let first = growth.new_table().map_or(old.chunks, |_| new.chunk_table_end_chunk() as u32);
        state.buddy.free_run(Run { start: ChunkId(first), chunks: new.chunks - first });
        state.counts.total = new.chunks;
        state.counts.metadata = new.metadata_chunks();
        state.counts.scrubbing += left.iter().map(|run| run.chunks).sum::<u32>();
        // Also notifies threads that wait for clean chunks.
        self.queue_scrub(state, &left);
    }
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

/// Performs step 1 of a growth, and returns the superblock after it.
pub(in crate::pool) fn announce_growth(
    media: &dyn Media,
    old: &Superblock,
    new: &Superblock,
) -> Result<Superblock, MediaError> {
    let sequence = old.sequence.wrapping_add(1);
    let announced = Superblock { sequence, growing_to_bytes: new.size_bytes(), ..old.clone() };
    rewrite(media, &announced)?;
    Ok(announced)
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
        to.set_entry(media, chunk, owner, 0)?;
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
