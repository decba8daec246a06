//! Volumes: named and persistent ranges of storage, made of chunks.

pub(super) mod damaged_volume;
pub(super) mod resize;
pub(super) mod split;
mod volume_media;

use std::fmt::{self, Debug};
use std::ops::Range;
use std::sync::Arc;

use foreshore_types::VolumeFormat;
use serde::Serialize;
use uuid::Uuid;

use crate::CHUNK_BYTES;
use crate::btt;
use crate::media::{Durability, FileMedia, Media, MediaError, debug_assert_word, drop_clean_pages};
use crate::pool::alloc::memory::chunk_count;
use crate::pool::format::chunk::{Run, runs};
use crate::pool::format::mirrored;
use crate::pool::format::table::{Owner, Slot};
use crate::pool::format::volume_record::{Part, VolumeName, VolumeRecord, empty_record};
use crate::pool::scan::VolumeEntry;
use crate::pool::{OpenMode, Pool, PoolError, State, unix_now_s};
use crate::progress::OnProgress;

/// Size of a new volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeSize {
    /// A multiple of 2 MiB.
    Bytes(u64),
    /// All bytes that are free or waiting to be erased.
    Remaining,
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
    /// Bytes of the pool that the volume occupies. The number is less than the size only if the
    /// volume is thin or damaged.
    pub allocated_bytes: u64,
    /// Number of contiguous pieces in the pool.
    pub extents: u32,
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
}

/// Validated plan for a new volume.
struct NewVolume {
    slot: Slot,
    chunks: u32,
    layout: Option<btt::Layout>,
}

/// Open volume. In a pool that is open for writing, it cannot be opened a second time, changed or
/// deleted.
pub struct Volume<M: Media = FileMedia> {
    pool: Arc<Pool<M>>,
    slot: Slot,
    info: VolumeInfo,
    extents: Vec<VolumeExtent>,
}

impl<M: Media> Pool<M> {
    /// All volumes, sorted by name.
    pub fn volumes(&self) -> Vec<VolumeInfo> {
        let mut volumes: Vec<_> = self.lock_state().volumes.values().map(volume_info).collect();
        volumes.sort_by(|a, b| a.name.cmp(&b.name));
        volumes
    }

    /// Creates and formats a volume.
    ///
    /// 1. Store the owner words of its chunks and persist them. Until the record is written, a
    ///    crash leaves these chunks as leftovers.
    /// 2. Write the BTT metadata and persist it.
    /// 3. Write the volume record. From here on, the volume exists.
    pub fn create_volume(
        &self,
        name: &str,
        size: VolumeSize,
        format: VolumeFormat,
    ) -> Result<VolumeInfo, PoolError> {
        let name: VolumeName = name.parse()?;
        let uuid = Uuid::new_v4();
        let mut state = self.lock_for_change()?;
        // Plan again after each unlock, because the state may have changed in the meantime.
        let NewVolume { slot, chunks, layout } = loop {
            let new = self.plan_volume(&state, &name, size, format, uuid)?;
            match state.missing_clean(new.chunks) {
                0 => break new,
                missing => state = self.erase_some(state, missing)?,
            }
        };
        self.check_format_space(chunks)?;
        let taken = state.buddy.allocate_long_term(chunks).expect("checked to be free");
        // Count the chunks as waiting to be erased until the volume exists. If the creation fails,
        // they are erased.
        state.counts.scrubbing += chunks;
        self.latch(self.mark(&taken, |index| Owner::Volume { slot, index }))?;
        if let Some(layout) = layout {
            let space = Space { media: self.media(), extents: &volume_extents(&taken) };
            self.latch(layout.format(&space))?;
        }
        let record = VolumeRecord {
            sequence: self.next_sequence(slot)?,
            slot,
            name,
            uuid,
            format,
            thin: false,
            part: None,
            chunks,
            created_unix_s: unix_now_s(),
        };
        let offsets = self.superblock.volume_record_offsets(slot);
        self.latch(mirrored::write(self.media(), offsets, &record.to_bytes()))?;
        let entry = VolumeEntry {
            record,
            chunks: (0..).zip(taken.iter().flat_map(|run| run.ids())).collect(),
        };
        let info = volume_info(&entry);
        state.counts.scrubbing -= chunks;
        state.counts.volume += chunks;
        state.promised_chunks += u64::from(chunks);
        state.volumes.insert(slot, entry);
        Ok(info)
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
        size: VolumeSize,
        format: VolumeFormat,
        uuid: Uuid,
    ) -> Result<NewVolume, PoolError> {
        if state.find_volume(name.as_str()).is_some() {
            return Err(PoolError::VolumeExists { name: name.to_string() });
        }
        let slot = self
            .superblock
            .slots()
            .find(|slot| !state.volumes.contains_key(slot))
            .ok_or(PoolError::NoVolumeSlot { limit: self.superblock.volume_slots })?;
        let size_bytes = match size {
            VolumeSize::Bytes(bytes) => bytes,
            VolumeSize::Remaining => state.available_bytes(),
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
        if chunks > state.available_chunks() {
            return Err(state.pool_full(size_bytes));
        }
        Ok(NewVolume { slot, chunks, layout })
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
        let offsets = self.superblock.volume_record_offsets(slot);
        self.latch(mirrored::write(self.media(), offsets, &empty))?;
        let entry = state.volumes.remove(&slot).expect("found above");
        state.promised_chunks -= u64::from(entry.record.chunks);
        let runs = runs(entry.chunk_ids());
        self.release_chunks(&mut state, &runs)
    }

    /// Marks chunks that no record covers any more as *scrub*, and queues them for erasing. The
    /// mark is necessary because the slot and the indexes may be reused before all of these chunks
    /// are free.
    pub(in crate::pool) fn release_chunks(
        &self,
        state: &mut State,
        runs: &[Run],
    ) -> Result<(), PoolError> {
        let chunks: u32 = runs.iter().map(|run| run.chunks).sum();
        state.counts.volume -= chunks;
        state.counts.scrubbing += chunks;
        for chunk in runs.iter().flat_map(|run| run.ids()) {
            self.latch(self.table.set_owner(self.media(), chunk, Owner::Scrub))?;
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
        let offsets = self.superblock.volume_record_offsets(slot);
        self.latch(mirrored::write(self.media(), offsets, &record.to_bytes()))?;
        let entry = state.volumes.get_mut(&slot).expect("found above");
        entry.record = record;
        Ok(volume_info(entry))
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
        let info = volume_info(entry);
        let extents = volume_extents(&runs(entry.chunk_ids()));
        if self.mode == OpenMode::ReadWrite {
            if state.open_volumes.contains(&slot) {
                return Err(PoolError::VolumeInUse { name: name.to_owned() });
            }
            state.open_volumes.push(slot);
        }
        drop(state);
        // Only files have a page cache.
        if let (OpenMode::ReadWrite, Some(media)) = (self.mode, self.media().as_file())
            && media.durability() == Durability::PageCache
        {
            let ranges: Vec<_> = extents
                .iter()
                .map(|e| e.offset_bytes()..e.offset_bytes() + e.len_bytes())
                .collect();
            drop_clean_pages(media.file(), &ranges);
        }
        Ok(Volume { pool: Arc::clone(self), slot, info, extents })
    }

    /// Returns the sequence number for the next record in a slot: the last one on the media plus
    /// one, even if the slot is empty.
    pub(in crate::pool) fn next_sequence(&self, slot: Slot) -> Result<u64, PoolError> {
        let offset = self.superblock.volume_record_offsets(slot)[0];
        let at = offset
            + std::mem::offset_of!(crate::pool::format::layout::VolumeRecordBytes, sequence) as u64;
        Ok(self.latch(self.media().load_word(at))?.wrapping_add(1))
    }
}

impl VolumeEntry {
    /// Checks that the volume has all of its chunks.
    pub(in crate::pool) fn check_usable(&self) -> Result<(), PoolError> {
        let unusable =
            |reason| Err(PoolError::VolumeUnusable { name: self.record.name.to_string(), reason });
        if self.record.thin {
            return unusable("thin volumes are not supported".to_owned());
        }
        match self.record.chunks - self.allocated() {
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
            withheld_bytes: 0,
        }
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
    /// the file are merged.
    #[inline]
    pub fn extents(&self) -> &[VolumeExtent] {
        &self.extents
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
                let space = Space { media: self.pool.media(), extents: &self.extents };
                let ranges = space.file_ranges(range);
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

/// Storage of a volume on the media.
pub(in crate::pool) struct Space<'a> {
    pub(in crate::pool) media: &'a dyn Media,
    pub(in crate::pool) extents: &'a [VolumeExtent],
}

impl Space<'_> {
    /// Converts an offset in the volume to an offset in the file.
    pub(in crate::pool) fn file_offset(&self, offset_bytes: u64) -> u64 {
        self.file_ranges(offset_bytes..offset_bytes + 1)[0].start
    }

    /// Converts a range of the volume to ranges of the file, in order.
    ///
    /// # Panics
    /// Panics if the range is not inside the volume.
    pub(in crate::pool) fn file_ranges(&self, range: Range<u64>) -> Vec<Range<u64>> {
        assert!(
            range.start <= range.end && range.end <= self.len_bytes(),
            "{range:?} is not inside the volume"
        );
        let mut ranges = Vec::new();
        let first = self
            .extents
            .partition_point(|e| e.volume_offset_bytes() + e.len_bytes() <= range.start);
        for extent in &self.extents[first..] {
            let volume_start = extent.volume_offset_bytes();
            if volume_start >= range.end {
                break;
            }
            let start = range.start.max(volume_start) - volume_start;
            let end = range.end.min(volume_start + extent.len_bytes()) - volume_start;
            if start < end {
                ranges.push(extent.offset_bytes() + start..extent.offset_bytes() + end);
            }
        }
        ranges
    }
}

impl Media for Space<'_> {
    #[inline]
    fn len_bytes(&self) -> u64 {
        self.extents.last().map_or(0, |last| last.volume_offset_bytes() + last.len_bytes())
    }

    fn durability(&self) -> Durability {
        self.media.durability()
    }

    fn read(&self, offset_bytes: u64, mut into: &mut [u8]) -> Result<(), MediaError> {
        for range in self.file_ranges(offset_bytes..offset_bytes + into.len() as u64) {
            let (now, later) = into.split_at_mut((range.end - range.start) as usize);
            self.media.read(range.start, now)?;
            into = later;
        }
        Ok(())
    }

    fn next_data(&self, range: Range<u64>) -> Result<Option<Range<u64>>, MediaError> {
        let mut at = range.start;
        for part in self.file_ranges(range) {
            if let Some(data) = self.media.next_data(part.clone())? {
                let offset = at + (data.start - part.start);
                return Ok(Some(offset..offset + (data.end - data.start)));
            }
            at += part.end - part.start;
        }
        Ok(None)
    }

    fn store(&self, offset_bytes: u64, mut bytes: &[u8]) -> Result<(), MediaError> {
        for range in self.file_ranges(offset_bytes..offset_bytes + bytes.len() as u64) {
            let (now, later) = bytes.split_at((range.end - range.start) as usize);
            self.media.store(range.start, now)?;
            bytes = later;
        }
        Ok(())
    }

    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
        debug_assert_word(offset_bytes);
        self.media.load_word(self.file_offset(offset_bytes))
    }

    fn store_word(&self, offset_bytes: u64, word: u64) -> Result<(), MediaError> {
        debug_assert_word(offset_bytes);
        self.media.store_word(self.file_offset(offset_bytes), word)
    }

    fn persist(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        let ranges: Vec<_> =
            ranges.iter().flat_map(|range| self.file_ranges(range.clone())).collect();
        self.media.persist(&ranges)
    }
}

pub(in crate::pool) fn volume_info(entry: &VolumeEntry) -> VolumeInfo {
    VolumeInfo {
        name: entry.record.name.to_string(),
        uuid: entry.record.uuid,
        format: entry.record.format,
        size_bytes: entry.record.size_bytes(),
        allocated_bytes: u64::from(entry.allocated()) * CHUNK_BYTES,
        extents: runs(entry.chunk_ids()).len() as u32,
    }
}

pub(in crate::pool) fn volume_extents(runs: &[Run]) -> Vec<VolumeExtent> {
    let mut index = 0;
    runs.iter()
        .map(|run| {
            let extent = VolumeExtent { index, run: *run };
            index += run.chunks;
            extent
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::ChunkId;

    /// Media that supports only loads of words. Each word contains its own offset.
    struct Words;

    impl Media for Words {
        fn len_bytes(&self) -> u64 {
            8 * CHUNK_BYTES
        }

        fn durability(&self) -> Durability {
            Durability::Volatile
        }

        fn read(&self, _: u64, _: &mut [u8]) -> Result<(), MediaError> {
            panic!("a word is not read byte by byte")
        }

        fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
            Ok(offset_bytes)
        }
    }

    #[test]
    fn volume_loads_a_word_as_a_word_of_the_media() {
        let run = |start| Run { start: ChunkId(start), chunks: 1 };
        let space = Space { media: &Words, extents: &volume_extents(&[run(3), run(1)]) };
        assert_eq!(space.load_word(8).unwrap(), 3 * CHUNK_BYTES + 8);
        assert_eq!(space.load_word(CHUNK_BYTES).unwrap(), CHUNK_BYTES);
    }
}
