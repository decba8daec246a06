//! Volumes: named and persistent ranges of storage, made of chunks.

mod chunk_map;
mod convert;
pub(super) mod damaged_volume;
mod provision;
mod release;
pub(super) mod resize;
pub(super) mod space;
pub(super) mod split;
mod volume_media;

use std::fmt::{self, Debug};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use foreshore_types::VolumeFormat;
use foreshore_types::size::Size;
use serde::Serialize;
use uuid::Uuid;

use crate::CHUNK_BYTES;
use crate::btt;
use crate::media::{Durability, FileMedia, Media, drop_clean_pages};
use crate::pool::alloc::memory::chunk_count;
use crate::pool::format::chunk::{ChunkId, Run, runs};
use crate::pool::format::format_plan::stored_indexes;
use crate::pool::format::mirrored;
use crate::pool::format::table::{Owner, Slot};
use crate::pool::format::volume_record::{Part, VolumeName, VolumeRecord, empty_record};
use crate::pool::scan::VolumeEntry;
use crate::pool::{OpenMode, Pool, PoolError, State, bytes, unix_now_s};
use crate::progress::OnProgress;
use chunk_map::ChunkMap;
pub(in crate::pool) use space::{Space, extents_of};

/// Size of a new volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeSize {
    /// A multiple of 2 MiB.
    Bytes(u64),
    /// All bytes that are free or waiting to be erased, except those promised to thin volumes.
    Remaining,
}

/// Properties of a new volume.
#[derive(Clone, Copy, Debug)]
pub struct VolumeOptions {
    /// Size of the volume, including the metadata of a BTT.
    pub size: VolumeSize,
    /// Format of the volume.
    pub format: VolumeFormat,
    /// Creates a thin volume. A chunk is allocated only when something is stored there.
    pub thin: bool,
    /// Bytes that are promised to a thin volume, up to its size. `None` means the whole size.
    pub reserve_bytes: Option<u64>,
}

impl VolumeOptions {
    /// Returns the options of a thick volume, which has all of its chunks.
    pub fn thick(size_bytes: u64, format: VolumeFormat) -> Self {
        Self { size: VolumeSize::Bytes(size_bytes), format, thin: false, reserve_bytes: None }
    }
}

/// Search for free chunks of a volume. Chunks after the volume's previous one are preferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Search {
    /// Finds the shortest sufficient run, which takes time in proportion to the size of the pool.
    Best,
    /// Finds few extents quickly, for a volume in use.
    Quick,
}

/// Properties of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct VolumeInfo {
    /// Name of the volume.
    pub name: String,
    /// UUID of the volume.
    pub uuid: Uuid,
    /// Format of the volume.
    pub format: VolumeFormat,
    /// Size of the volume, including the metadata of a BTT.
    pub size_bytes: u64,
    /// Guaranteed bytes. The number is less than the size only if the volume is thin.
    pub reserve_bytes: u64,
    /// Bytes of the pool that the volume occupies. The number is less than the size only if the
    /// volume is thin or damaged.
    pub allocated_bytes: u64,
    /// Number of contiguous pieces in the pool.
    pub extents: u32,
    /// True if the volume may have holes, which read as zeros.
    pub thin: bool,
}

/// Piece of a volume that is contiguous in the pool's file. The piece may have any number of
/// chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeExtent {
    /// Index of the piece's first chunk, counted from the start of the volume.
    pub index: u32,
    /// Chunks of the piece, by their position in the pool.
    pub run: Run,
}

impl VolumeExtent {
    /// Returns the offset of the piece in the volume.
    #[inline]
    pub fn volume_offset_bytes(self) -> u64 {
        u64::from(self.index) * CHUNK_BYTES
    }

    /// Returns the offset of the piece in the pool's file.
    #[inline]
    pub fn offset_bytes(self) -> u64 {
        self.run.offset_bytes()
    }

    /// Length in bytes.
    #[inline]
    pub fn len_bytes(self) -> u64 {
        self.run.len_bytes()
    }

    /// Returns the end of the piece in the volume.
    #[inline]
    pub(in crate::pool) fn volume_end_bytes(self) -> u64 {
        self.volume_offset_bytes() + self.len_bytes()
    }

    /// Returns the index after the piece's last chunk.
    pub(in crate::pool) fn end_index(self) -> u32 {
        self.index + self.run.chunks
    }
}

/// Validated plan for a new volume.
struct NewVolume {
    slot: Slot,
    chunks: u32,
    reserve_chunks: u32,
    layout: Option<btt::Layout>,
    /// Indexes that get a chunk: those with the metadata of a BTT in a thin volume, or all.
    indexes: Vec<u32>,
}

/// Open volume. In a pool that is open for writing, it cannot be opened a second time, changed or
/// deleted.
pub struct Volume<M: Media = FileMedia> {
    pool: Arc<Pool<M>>,
    slot: Slot,
    info: VolumeInfo,
    /// Pieces of a volume without holes. Empty if the volume is thin.
    extents: Vec<VolumeExtent>,
    /// Chunks of a thin volume.
    map: Option<ChunkMap>,
    released_chunks: AtomicU64,
    /// Size of the last allocation that failed because the pool was full.
    lacking_bytes: AtomicU64,
}

impl<M: Media> Pool<M> {
    /// All volumes, sorted by name.
    pub fn volumes(&self) -> Vec<VolumeInfo> {
        let mut volumes: Vec<_> = self.lock_state().volumes.values().map(volume_info).collect();
        volumes.sort_by(|a, b| a.name.cmp(&b.name));
        volumes
    }

    /// Creates and formats a thick volume, as [`Pool::create_volume_with`] does.
    pub fn create_volume(
        &self,
        name: &str,
        size: VolumeSize,
        format: VolumeFormat,
    ) -> Result<VolumeInfo, PoolError> {
        self.create_volume_with(
            name,
            VolumeOptions { size, format, thin: false, reserve_bytes: None },
        )
    }

    /// Creates and formats a volume.
    ///
    /// 1. Store the owner words of its chunks and persist them. Until the record is written, a
    ///    crash leaves these chunks as leftovers.
    /// 2. Write the BTT metadata and persist it.
    /// 3. Set the feature bit if the volume is thin.
    /// 4. Write the volume record. From here on, the volume exists.
    pub fn create_volume_with(
        &self,
        name: &str,
        options: VolumeOptions,
    ) -> Result<VolumeInfo, PoolError> {
        let name: VolumeName = name.parse()?;
        let uuid = Uuid::new_v4();
        let mut state = self.lock_for_change()?;
        // Plan again after each unlock, because the state may have changed in the meantime.
        let NewVolume { slot, chunks, reserve_chunks, layout, indexes } = loop {
            let new = self.plan_volume(&state, &name, options, uuid)?;
            match state.missing_clean(new.indexes.len() as u32) {
                0 => break new,
                missing => state = self.erase_some(state, missing)?,
            }
        };
        self.check_format_space(chunks)?;
        let taken = self.take_chunks(&mut state, slot, &indexes, None, Search::Best)?;
        if let Some(layout) = layout {
            let extents = extents_of(taken.iter().copied());
            let space = Space::with_holes(self.media(), &extents, bytes(chunks));
            self.latch(layout.format(&space))?;
        }
        if options.thin {
            self.allow_thin_volumes(&mut state)?;
        }
        let record = VolumeRecord {
            sequence: self.next_sequence(slot)?,
            slot,
            name,
            uuid,
            format: options.format,
            thin: options.thin,
            part: None,
            chunks,
            reserve_chunks,
            created_unix_s: unix_now_s(),
        };
        let offsets = self.superblock().volume_record_offsets(slot);
        self.latch(mirrored::write(self.media(), offsets, &record.to_bytes()))?;
        let entry = VolumeEntry { record, chunks: taken };
        let info = volume_info(&entry);
        state.counts.scrubbing -= entry.allocated();
        state.counts.volume += entry.allocated();
        state.insert_volume(entry);
        Ok(info)
    }

    /// Takes clean chunks for the volume in `slot`, one for each of `indexes`, if possible directly
    /// after the chunk `after`. When the call returns, their owner words are durable.
    ///
    /// The chunks are counted as waiting to be erased until the caller adds them to the volume. If
    /// the caller fails, the next open erases them or finds them in the volume.
    fn take_chunks(
        &self,
        state: &mut State,
        slot: Slot,
        indexes: &[u32],
        after: Option<ChunkId>,
        search: Search,
    ) -> Result<Vec<(u32, ChunkId)>, PoolError> {
        let chunks = indexes.len() as u32;
        if chunks == 0 {
            return Ok(vec![]);
        }
        let next = after.map(|after| after.plus(1));
        let taken = match (search, next) {
            (Search::Best, Some(next)) => state.buddy.allocate_long_term_at(next, chunks),
            (Search::Best, None) => state.buddy.allocate_long_term(chunks),
            (Search::Quick, next) => state.buddy.allocate_near(next, chunks),
        };
        let taken = taken.expect("checked to be free");
        state.counts.scrubbing += chunks;
        let owner = |position: u32| Owner::Volume { slot, index: indexes[position as usize] };
        self.latch(self.mark(&taken, owner))?;
        Ok(indexes.iter().copied().zip(taken.iter().flat_map(|run| run.ids())).collect())
    }

    /// Erases and frees waiting chunks until `size` bytes are clean. Call it before creating or
    /// growing a volume. Does nothing if erasing all waiting chunks would not free enough space.
    pub fn scrub_for(&self, size: VolumeSize, progress: OnProgress<'_>) -> Result<(), PoolError> {
        let VolumeSize::Bytes(bytes) = size else { return self.scrub_all_with(progress) };
        let chunks = u32::try_from(bytes.div_ceil(CHUNK_BYTES)).unwrap_or(u32::MAX);
        let to_erase = |state: &State| match state.missing_clean(chunks) {
            missing if missing <= state.scrub.pending() => missing,
            _ => 0,
        };
        self.scrub_until(to_erase, progress)
    }

    /// Checks that a volume can be created once enough chunks are clean.
    fn plan_volume(
        &self,
        state: &State,
        name: &VolumeName,
        options: VolumeOptions,
        uuid: Uuid,
    ) -> Result<NewVolume, PoolError> {
        let VolumeOptions { size, format, thin, reserve_bytes } = options;
        if state.find_volume(name.as_str()).is_some() {
            return Err(PoolError::VolumeExists { name: name.to_string() });
        }
        let slot = self
            .superblock()
            .slots()
            .find(|slot| !state.volumes.contains_key(slot))
            .ok_or(PoolError::NoVolumeSlot { limit: self.superblock().volume_slots })?;
        let size_bytes = match size {
            VolumeSize::Bytes(bytes) => bytes,
            VolumeSize::Remaining => bytes(state.unpromised_chunks()),
        };
        if size == VolumeSize::Remaining && size_bytes == 0 {
            return Err(state.pool_full(0));
        }
        let chunks =
            chunk_count("volume size", size_bytes)?.ok_or_else(|| state.pool_full(size_bytes))?;
        let layout = match format {
            VolumeFormat::Btt => Some(
                btt::Layout::new(size_bytes, btt::SECTOR_BYTES, uuid).map_err(PoolError::Btt)?,
            ),
            VolumeFormat::Raw => None,
        };
        let reserve_chunks = match reserve_bytes {
            None => chunks,
            Some(_) if !thin => return Err(PoolError::NotThin { name: name.to_string() }),
            Some(bytes) => reserve_chunk_count(bytes, size_bytes)?,
        };
        // Compared first, because a thick volume needs an index for each of its chunks.
        state.check_promise(0, reserve_chunks)?;
        let indexes: Vec<_> = match &layout {
            Some(layout) if thin => stored_indexes(size_bytes, |media| layout.format(media)),
            None if thin => vec![],
            _ => (0..chunks).collect(),
        };
        state.check_promise(0, reserve_chunks.max(indexes.len() as u32))?;
        Ok(NewVolume { slot, chunks, reserve_chunks, layout, indexes })
    }

    /// Deletes a volume that is not open in this process. When the call returns, the volume is gone
    /// and its chunks wait to be erased.
    ///
    /// 1. Write an empty volume record. From here on, the volume is gone and its chunks are
    ///    leftovers.
    /// 2. Change the owner words to *scrub* and persist them. Only then may the slot be reused.
    pub fn delete_volume(&self, name: &str) -> Result<(), PoolError> {
        let mut state = self.lock_for_change()?;
        let slot = state.require_closed_volume(name)?;
        let empty = empty_record(slot, self.next_sequence(slot)?);
        let offsets = self.superblock().volume_record_offsets(slot);
        self.latch(mirrored::write(self.media(), offsets, &empty))?;
        let entry = state.remove_volume(slot);
        let runs = runs(entry.chunk_ids());
        self.release_chunks(&mut state, &runs)
    }

    /// Marks chunks that no record covers any more, or that a thin volume does not use, as *scrub*,
    /// and queues them for erasing. The mark is necessary because the slot and the indexes may be
    /// reused before all of these chunks are free.
    pub(in crate::pool) fn release_chunks(
        &self,
        state: &mut State,
        runs: &[Run],
    ) -> Result<(), PoolError> {
        let chunks: u32 = runs.iter().map(|run| run.chunks).sum();
        state.counts.volume -= chunks;
        state.counts.scrubbing += chunks;
        let table = self.table();
        for chunk in runs.iter().flat_map(|run| run.ids()) {
            self.latch(table.set_owner(self.media(), chunk, Owner::Scrub))?;
        }
        self.latch(self.persist_entries(runs))?;
        self.queue_scrub(state, runs);
        Ok(())
    }

    /// Renames a volume that is not open in this process. If the new name is already in use, even
    /// by the same volume, the request is a mistake and is refused.
    ///
    /// Only the volume record changes, because the owner words of chunks contain the slot instead
    /// of the name.
    pub fn rename_volume(&self, name: &str, new_name: &str) -> Result<VolumeInfo, PoolError> {
        let new_name: VolumeName = new_name.parse()?;
        let mut state = self.lock_for_change()?;
        let slot = state.require_closed_volume(name)?;
        if name == new_name.as_str() {
            return Err(PoolError::SameName { name: name.to_owned() });
        }
        if state.find_volume(new_name.as_str()).is_some() {
            return Err(PoolError::VolumeExists { name: new_name.to_string() });
        }
        let sequence = self.next_sequence(slot)?;
        let record =
            VolumeRecord { sequence, name: new_name, ..state.volumes[&slot].record.clone() };
        self.write_record(&mut state, record)?;
        Ok(volume_info(&state.volumes[&slot]))
    }

    /// Sets the guaranteed bytes of a thin volume that is not open in this process.
    pub fn set_volume_reserve(
        &self,
        name: &str,
        reserve_bytes: u64,
    ) -> Result<VolumeInfo, PoolError> {
        let mut state = self.lock_for_change()?;
        let slot = state.require_closed_volume(name)?;
        let entry = &state.volumes[&slot];
        entry.check_usable()?;
        if !entry.record.thin {
            return Err(PoolError::NotThin { name: name.to_owned() });
        }
        let reserve_chunks = reserve_chunk_count(reserve_bytes, entry.record.size_bytes())?;
        state.check_promise(entry.promised(), reserve_chunks)?;
        let sequence = self.next_sequence(slot)?;
        let record = VolumeRecord { sequence, reserve_chunks, ..entry.record.clone() };
        self.write_record(&mut state, record)?;
        Ok(volume_info(&state.volumes[&slot]))
    }

    /// Writes the changed record of a volume, durably.
    fn write_record(&self, state: &mut State, record: VolumeRecord) -> Result<(), PoolError> {
        let offsets = self.superblock().volume_record_offsets(record.slot);
        self.latch(mirrored::write(self.media(), offsets, &record.to_bytes()))?;
        state.change_volume(record.slot, |entry| entry.record = record);
        Ok(())
    }

    /// Opens a volume. If the pool is open for writing, each volume can be open only once.
    ///
    /// A writer must read the content of the disk. If a write-back failed, the page cache may still
    /// contain the pages, marked as clean. Therefore, clean pages are dropped.
    pub fn open_volume(self: &Arc<Self>, name: &str) -> Result<Volume<M>, PoolError> {
        let mut state = self.lock_state();
        let slot = state.require_volume(name)?;
        let entry = &state.volumes[&slot];
        entry.check_usable()?;
        state.check_holes(entry)?;
        let info = volume_info(entry);
        let extents = entry.extents();
        let map = entry.chunk_map();
        if self.mode == OpenMode::ReadWrite {
            if state.open_volumes.contains(&slot) {
                return Err(PoolError::VolumeInUse { name: name.to_owned() });
            }
            state.open_volumes.push(slot);
        }
        drop(state);
        self.forget_clean_pages(&extents.iter().map(|extent| extent.run).collect::<Vec<_>>());
        let extents = if map.is_some() { vec![] } else { extents };
        let (released_chunks, lacking_bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        let pool = Arc::clone(self);
        Ok(Volume { pool, slot, info, extents, map, released_chunks, lacking_bytes })
    }

    /// Drops clean pages of chunks from the page cache, if this process may write to the pool.
    fn forget_clean_pages(&self, runs: &[Run]) {
        // Only files have a page cache.
        if let (OpenMode::ReadWrite, Some(media)) = (self.mode, self.media().as_file())
            && media.durability() == Durability::PageCache
        {
            let ranges: Vec<_> = runs.iter().map(|run| run.byte_range()).collect();
            drop_clean_pages(media.file(), &ranges);
        }
    }

    /// Returns the sequence number for the next record in a slot: the last one on the media plus
    /// one, even if the slot is empty.
    pub(in crate::pool) fn next_sequence(&self, slot: Slot) -> Result<u64, PoolError> {
        let offset = self.superblock().volume_record_offsets(slot)[0];
        let at = offset
            + std::mem::offset_of!(crate::pool::format::layout::VolumeRecordBytes, sequence) as u64;
        Ok(self.latch(self.media().load_word(at))?.wrapping_add(1))
    }
}

impl VolumeEntry {
    /// Returns the pieces of the volume in logical order.
    pub(in crate::pool) fn extents(&self) -> Vec<VolumeExtent> {
        extents_of(self.chunks.iter().copied())
    }

    /// Returns the chunks of a thin volume by index. `None` for a thick volume.
    fn chunk_map(&self) -> Option<ChunkMap> {
        self.record.thin.then(|| ChunkMap::new(self.record.chunks, &self.chunks))
    }

    /// Returns the indexes without a chunk. Their number must be checked first, because the size of
    /// a volume is untrusted.
    fn holes(&self) -> Vec<u32> {
        let mut present = self.chunks.iter().map(|(index, _)| *index).peekable();
        let is_hole = |index: &u32| present.next_if_eq(index).is_none();
        (0..self.record.chunks).filter(is_hole).collect()
    }

    fn chunk_at(&self, index: u32) -> Option<ChunkId> {
        let number = self.chunks.binary_search_by_key(&index, |(index, _)| *index).ok()?;
        Some(self.chunks[number].1)
    }

    /// Adds chunks, which are sorted by index.
    pub(in crate::pool) fn insert_chunks(&mut self, added: &[(u32, ChunkId)]) {
        assert!(added.is_sorted());
        let mut end = self.chunks.len();
        self.chunks.extend(added);
        // From the last chunk to the first, so that each chunk is moved at most once.
        for (count, new) in added.iter().enumerate().rev() {
            let at = self.chunks[..end].partition_point(|chunk| chunk < new);
            self.chunks.copy_within(at..end, at + count + 1);
            self.chunks[at + count] = *new;
            end = at;
        }
    }

    /// Removes chunks, which are sorted by index.
    pub(in crate::pool) fn remove_chunks(&mut self, removed: &[(u32, ChunkId)]) {
        assert!(removed.is_sorted());
        let mut left = removed;
        self.chunks.retain(|chunk| match left.split_first() {
            Some((next, rest)) if next == chunk => {
                left = rest;
                false
            }
            _ => true,
        });
        assert!(left.is_empty(), "the volume has these chunks");
    }

    /// Returns the chunk with the largest index below `index`.
    fn last_chunk_before(&self, index: u32) -> Option<ChunkId> {
        let number = self.chunks.partition_point(|(other, _)| *other < index);
        Some(self.chunks[number.checked_sub(1)?].1)
    }

    /// Checks that the volume has all of its chunks, or is thin.
    pub(in crate::pool) fn check_usable(&self) -> Result<(), PoolError> {
        let unusable =
            |reason| Err(PoolError::VolumeUnusable { name: self.record.name.to_string(), reason });
        match self.record.chunks - self.allocated() {
            _ if self.record.thin => self.check_finished(),
            0 => self.check_finished(),
            missing => {
                unusable(format!("{missing} of its {} chunks are missing", self.record.chunks))
            }
        }
    }

    /// Checks that the volume is not an unfinished part of a split.
    pub(in crate::pool) fn check_finished(&self) -> Result<(), PoolError> {
        match self.record.part {
            Some(Part { is_unformatted: true, .. }) => {
                Err(PoolError::VolumeUnfinished { name: self.record.name.to_string() })
            }
            _ => Ok(()),
        }
    }
}

impl State {
    /// Returns the error for an allocation that finds too few free chunks.
    pub(in crate::pool) fn pool_full(&self, requested_bytes: u64) -> PoolError {
        PoolError::PoolFull {
            requested_bytes,
            free_bytes: self.available_bytes(),
            withheld_bytes: bytes(self.promised_holes()),
        }
    }

    /// Checks that no hole of a thin volume can be a chunk whose owner word is damaged.
    pub(super) fn check_holes(&self, entry: &VolumeEntry) -> Result<(), PoolError> {
        let damaged = self.counts.damaged;
        if !entry.record.thin || damaged == 0 || entry.allocated() == entry.record.chunks {
            return Ok(());
        }
        let reason = format!("it may own some of the {damaged} chunk(s) with an unknown owner");
        Err(PoolError::VolumeUnusable { name: entry.record.name.to_string(), reason })
    }

    pub(in crate::pool) fn find_volume(&self, name: &str) -> Option<Slot> {
        self.volumes
            .iter()
            .find(|(_, entry)| entry.record.name.as_str() == name)
            .map(|(slot, _)| *slot)
    }

    /// Finds a volume that is not open in this process. The lock of the pool excludes other
    /// processes.
    pub(in crate::pool) fn require_closed_volume(&self, name: &str) -> Result<Slot, PoolError> {
        let slot = self.require_volume(name)?;
        if self.open_volumes.contains(&slot) {
            return Err(PoolError::VolumeInUse { name: name.to_owned() });
        }
        Ok(slot)
    }

    pub(in crate::pool) fn require_volume(&self, name: &str) -> Result<Slot, PoolError> {
        self.find_volume(name).ok_or_else(|| PoolError::NoSuchVolume {
            name: name.to_owned(),
            existing: self.volumes.values().map(|entry| entry.record.name.to_string()).collect(),
        })
    }
}

impl<M: Media> Volume<M> {
    /// Properties of the volume.
    pub fn info(&self) -> &VolumeInfo {
        &self.info
    }

    /// Size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.info.size_bytes
    }

    /// Pool of the volume.
    #[inline]
    pub fn pool(&self) -> &Arc<Pool<M>> {
        &self.pool
    }

    /// Returns the pieces of the volume in logical order, without gaps. Pieces that are adjacent in
    /// the file are merged. Empty if the volume is thin, because it may have holes, which stores
    /// fill.
    #[inline]
    pub fn extents(&self) -> &[VolumeExtent] {
        &self.extents
    }

    /// Returns the pieces that a volume has now, in logical order. The gaps of a thin volume are
    /// holes.
    pub fn allocated_extents(&self) -> Vec<VolumeExtent> {
        match &self.map {
            None => self.extents.clone(),
            Some(map) => extents_of(map.chunks()),
        }
    }

    /// Returns the bytes of the pool that the volume occupies now. Takes no lock.
    pub fn allocated_bytes(&self) -> u64 {
        match &self.map {
            None => self.info.allocated_bytes,
            Some(map) => u64::from(map.allocated()) * CHUNK_BYTES,
        }
    }

    /// Makes a guest's stores to a range of the volume durable. The guest stores through a mapping
    /// of the pool's file, and writes back its caches before it requests a flush (virtio 1.3,
    /// 5.19.6.2; ACPI 6.5, 5.2.26.9). On MAP_SYNC media, only a fence remains to be done. On
    /// volatile media, nothing remains to be done.
    ///
    /// After a failure, it is unknown which stores are durable. The caller must report an I/O error
    /// to the guest, or stop the guest. Every later flush fails too, because the kernel reports a
    /// lost page only once, and the next write-back succeeds.
    pub fn flush_guest_stores(&self, range: Range<u64>) -> Result<(), PoolError> {
        self.pool.check_not_latched()?;
        match self.pool.durability() {
            Durability::Volatile => Ok(()),
            Durability::DaxSync => self.pool.latch(self.pool.media().persist(&[])),
            Durability::PageCache => {
                let ranges = self.space().file_ranges(range);
                self.pool.latch(self.pool.media().persist(&ranges))
            }
        }
    }

    /// Returns the bytes that a guest can use: the sectors of a BTT, or all bytes of a raw volume.
    /// Returns `None` if the number of sectors is unknown because the BTT is damaged or a guest has
    /// overwritten it.
    pub fn usable_bytes(&self) -> Option<u64> {
        match self.info.format {
            VolumeFormat::Raw => Some(self.size_bytes()),
            VolumeFormat::Btt => btt::usable_bytes(self),
        }
    }

    /// Returns the bytes of a thin volume that contain data ([`btt::live_bytes`]). Other volumes
    /// have no holes in their maps, so counting would read the whole maps.
    pub fn live_bytes(&self) -> Option<u64> {
        self.info.thin.then(|| btt::live_bytes(self)).flatten()
    }

    /// Checks the volume's BTT, based only on its media. Returns `None` for a raw volume.
    pub fn check_btt(&self) -> Option<btt::Report> {
        self.check_btt_with(&mut |_| {})
    }

    /// Checks the volume's BTT, and passes the number of checked bytes to `on_checked`. Returns
    /// `None` for a raw volume.
    pub(in crate::pool) fn check_btt_with(
        &self,
        on_checked: &mut dyn FnMut(u64),
    ) -> Option<btt::Report> {
        match self.info.format {
            VolumeFormat::Raw => None,
            VolumeFormat::Btt => Some(btt::check_with(self, on_checked)),
        }
    }
}

impl<M: Media> Debug for Volume<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Volume")
            .field("pool", &self.pool)
            .field("info", &self.info)
            .finish_non_exhaustive()
    }
}

impl<M: Media> Drop for Volume<M> {
    fn drop(&mut self) {
        self.pool.lock_state().open_volumes.retain(|slot| *slot != self.slot);
    }
}

/// Checks the size of a volume, as far as this does not depend on the pool. The smallest BTT is
/// larger than the smallest volume, so a known format makes the check stricter.
pub fn check_volume_size(size_bytes: u64, format: Option<VolumeFormat>) -> Result<(), PoolError> {
    chunk_count("volume size", size_bytes)?;
    if format == Some(VolumeFormat::Btt) {
        btt::Layout::new(size_bytes, btt::SECTOR_BYTES, Uuid::nil()).map_err(PoolError::Btt)?;
    }
    Ok(())
}

/// Checks the guaranteed bytes of a thin volume of `size_bytes`.
pub fn check_volume_reserve(reserve_bytes: u64, size_bytes: u64) -> Result<(), PoolError> {
    reserve_chunk_count(reserve_bytes, size_bytes).map(drop)
}

fn reserve_chunk_count(reserve_bytes: u64, size_bytes: u64) -> Result<u32, PoolError> {
    let refuse = |rule| Err(PoolError::Size { quantity: "reserve", value: reserve_bytes, rule });
    if !reserve_bytes.is_multiple_of(CHUNK_BYTES) {
        return refuse("is not a multiple of 2 MiB".to_owned());
    }
    match u32::try_from(reserve_bytes / CHUNK_BYTES) {
        Ok(chunks) if reserve_bytes <= size_bytes => Ok(chunks),
        _ => refuse(format!("exceeds the size of the volume, {}", Size(size_bytes).rounded())),
    }
}

pub(in crate::pool) fn volume_info(entry: &VolumeEntry) -> VolumeInfo {
    VolumeInfo {
        name: entry.record.name.to_string(),
        uuid: entry.record.uuid,
        format: entry.record.format,
        size_bytes: entry.record.size_bytes(),
        reserve_bytes: entry.record.reserve_bytes(),
        allocated_bytes: u64::from(entry.allocated()) * CHUNK_BYTES,
        extents: entry.extents().len() as u32,
        thin: entry.record.thin,
    }
}
