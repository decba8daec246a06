//! Growth and shrinking of volumes.

use super::{Search, Space, Volume, VolumeInfo, VolumeSize, extents_of, volume_info};
use crate::btt::{self, BttError, Engine};
use crate::media::Media;
use crate::pool::alloc::memory::chunk_count;
use crate::pool::format::chunk::runs;
use crate::pool::format::format_plan::stored_indexes;
use crate::pool::format::mirrored;
use crate::pool::format::table::Slot;
use crate::pool::format::volume_record::VolumeRecord;
use crate::pool::redo_log;
use crate::pool::{Pool, PoolError, State, bytes};
use foreshore_types::VolumeFormat;
use foreshore_types::size::Size;

/// Permission for a resize to shrink a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shrink {
    /// Returns an error if the new size is smaller.
    Refuse,
    /// Allows shrinking. The data of a raw volume after its new end is erased.
    Allow,
}

/// Validated plan for a resize.
enum Resize {
    Shrink {
        chunks: u32,
        /// Words that unlink the removed arenas of a BTT, with their offsets in the volume.
        unlink: Vec<(u64, u64)>,
    },
    Grow(Box<Growth>),
}

/// Validated plan for a growth.
struct Growth {
    /// Indexes that get a chunk.
    indexes: Vec<u32>,
    record: VolumeRecord,
    extension: Option<btt::Extension>,
}

impl<M: Media> Pool<M> {
    /// Resizes a volume that is not open in this process. A BTT volume grows by additional arenas
    /// of at least 16 MiB, and shrinks only by arenas without data at its end.
    ///
    /// [`VolumeSize::Remaining`] adds all bytes that are free or waiting to be erased, except those
    /// promised to thin volumes.
    pub fn resize_volume(
        &self,
        name: &str,
        size: VolumeSize,
        shrink: Shrink,
    ) -> Result<VolumeInfo, PoolError> {
        self.resize(|state| state.require_closed_volume(name), size, shrink)
    }

    /// Resizes the volume that `find` returns.
    fn resize(
        &self,
        find: impl Fn(&State) -> Result<Slot, PoolError>,
        size: VolumeSize,
        shrink: Shrink,
    ) -> Result<VolumeInfo, PoolError> {
        let mut state = self.lock_for_change()?;
        // Plan again after each unlock, because the state may have changed in the meantime.
        loop {
            let slot = find(&state)?;
            match self.plan_resize(&state, slot, size, shrink)? {
                Resize::Shrink { chunks, unlink } => {
                    return self.shrink(&mut state, slot, chunks, &unlink);
                }
                Resize::Grow(growth) => match state.missing_clean(growth.indexes.len() as u32) {
                    0 => return self.grow_volume(&mut state, slot, *growth),
                    // Memory has borrowed the chunks that were promised to the volume.
                    missing if missing > state.scrub.pending() => {
                        return Err(state.pool_full(bytes(growth.indexes.len() as u32)));
                    }
                    missing => state = self.erase_some(state, missing)?,
                },
            }
        }
    }

    /// Plans a resize, or returns the reason for a refusal.
    fn plan_resize(
        &self,
        state: &State,
        slot: Slot,
        size: VolumeSize,
        shrink: Shrink,
    ) -> Result<Resize, PoolError> {
        let entry = &state.volumes[&slot];
        entry.check_usable()?;
        let (current_chunks, format) = (entry.record.chunks, entry.record.format);
        let current_bytes = entry.record.size_bytes();
        let size_bytes = match size {
            VolumeSize::Bytes(bytes) => bytes,
            VolumeSize::Remaining if state.unpromised_chunks() == 0 => {
                return Err(state.pool_full(0));
            }
            VolumeSize::Remaining => current_bytes + bytes(state.unpromised_chunks()),
        };
        let chunks = chunk_count("volume size", size_bytes)?
            .ok_or_else(|| state.pool_full(size_bytes - current_bytes))?;
        let refuse =
            |rule| Err(PoolError::Size { quantity: "volume size", value: size_bytes, rule });
        match (chunks.cmp(&current_chunks), format) {
            (std::cmp::Ordering::Equal, _) => {
                refuse("is already the size of the volume".to_owned())
            }
            (std::cmp::Ordering::Less, VolumeFormat::Btt) if shrink == Shrink::Refuse => {
                refuse(format!(
                    "is less than the current {}, and a BTT cannot shrink, except by arenas without data at its end while no VM uses it",
                    Size(current_bytes).rounded()
                ))
            }
            (std::cmp::Ordering::Less, VolumeFormat::Btt) => {
                redo_log::check_capacity(&self.superblock(), MAX_GROWTH_WORDS)?;
                let extents = entry.extents();
                let space = Space::with_holes(self.media(), &extents, current_bytes);
                let unlink = self.plan_btt(&entry.record, btt::reduce(&space, size_bytes))?;
                Ok(Resize::Shrink { chunks, unlink })
            }
            (std::cmp::Ordering::Less, VolumeFormat::Raw) if shrink == Shrink::Refuse => {
                Err(PoolError::ShrinkRefused { size_bytes, current_bytes })
            }
            (std::cmp::Ordering::Less, VolumeFormat::Raw) => {
                Ok(Resize::Shrink { chunks, unlink: vec![] })
            }
            (std::cmp::Ordering::Greater, _) => {
                Ok(Resize::Grow(Box::new(self.plan_growth(state, slot, chunks)?)))
            }
        }
    }

    /// Plans a growth that is possible once enough chunks are clean.
    fn plan_growth(&self, state: &State, slot: Slot, chunks: u32) -> Result<Growth, PoolError> {
        let entry = &state.volumes[&slot];
        let record = entry.record.resized(self.next_sequence(slot)?, chunks);
        let extension = match record.format {
            VolumeFormat::Raw => None,
            VolumeFormat::Btt => {
                redo_log::check_capacity(&self.superblock(), MAX_GROWTH_WORDS)?;
                let extents = entry.extents();
                let size_bytes = entry.record.size_bytes();
                let space = Space::with_holes(self.media(), &extents, size_bytes);
                Some(self.plan_btt(&record, btt::extend(&space, record.size_bytes()))?)
            }
        };
        // Compared first, because a thick volume needs an index for each of its chunks.
        state.check_promise(entry.promised(), record.reserve_chunks)?;
        let indexes: Vec<_> = match &extension {
            Some(extension) if record.thin => {
                let stored = stored_indexes(record.size_bytes(), |media| {
                    extension.format(media)?;
                    // An info block of another program may span two chunks, and the second may be a
                    // hole. Growth then stores a nonzero link word into this hole.
                    let mut links = extension.link_words().into_iter();
                    links.try_for_each(|(at, word)| media.store_word(at, word))
                });
                let is_hole = |index: &u32| entry.chunk_at(*index).is_none();
                stored.into_iter().filter(is_hole).collect()
            }
            None if record.thin => vec![],
            _ => (entry.record.chunks..chunks).collect(),
        };
        let allocated = entry.allocated() + indexes.len() as u32;
        state.check_promise(entry.promised(), record.reserve_chunks.max(allocated))?;
        Ok(Growth { indexes, record, extension })
    }

    /// Converts the error of a plan for the BTT of a volume.
    fn plan_btt<T>(
        &self,
        record: &VolumeRecord,
        plan: Result<T, BttError>,
    ) -> Result<T, PoolError> {
        plan.or_else(|error| match error {
            BttError::Media(error) => self.latch(Err(error)),
            BttError::Damaged { .. } => Err(PoolError::VolumeUnusable {
                name: record.name.to_string(),
                reason: error.to_string(),
            }),
            error => Err(PoolError::Btt(error)),
        })
    }

    /// 1. Store the owner words of the new chunks and persist them. Until the record is written,
    ///    chunks after the old end are leftovers. Chunks in holes before it belong to the volume,
    ///    whose BTT does not use the bytes that step 2 writes there.
    /// 2. Write the additional arenas of a BTT and make them durable. No info block refers to them
    ///    yet.
    /// 3. Write the volume record and the words that link the arenas in one transaction.
    fn grow_volume(
        &self,
        state: &mut State,
        slot: Slot,
        growth: Growth,
    ) -> Result<VolumeInfo, PoolError> {
        let Growth { indexes, record, extension } = growth;
        let entry = &state.volumes[&slot];
        let after = indexes.first().and_then(|first| entry.last_chunk_before(*first));
        let mut chunks = entry.chunks.clone();
        chunks.extend(self.take_chunks(state, slot, &indexes, after, Search::Best)?);
        // A new arena may begin in a hole before the old end.
        chunks.sort();
        let offsets = self.superblock().volume_record_offsets(slot);
        match &extension {
            None => self.latch(mirrored::write(self.media(), offsets, &record.to_bytes()))?,
            Some(extension) => {
                let extents = extents_of(chunks.iter().copied());
                let space = Space::with_holes(self.media(), &extents, record.size_bytes());
                self.latch(extension.format(&space))?;
                let links = extension.link_words();
                let words = self.latch(self.resize_words(&space, &links, &record))?;
                self.latch(redo_log::commit(self.media(), &self.superblock(), &words))?;
            }
        }
        state.change_volume(slot, |entry| (entry.record, entry.chunks) = (record, chunks));
        state.counts.scrubbing -= indexes.len() as u32;
        state.counts.volume += indexes.len() as u32;
        Ok(volume_info(&state.volumes[&slot]))
    }

    /// Returns the words of the transaction, which change the `links` of a BTT's arenas and both
    /// copies of the record.
    pub(in crate::pool) fn resize_words(
        &self,
        space: &Space<'_>,
        links: &[(u64, u64)],
        record: &VolumeRecord,
    ) -> Result<Vec<(u64, u64)>, crate::media::MediaError> {
        let mut words: Vec<_> =
            links.iter().map(|(at, word)| (space.file_offset(*at), *word)).collect();
        for offset in self.superblock().volume_record_offsets(record.slot) {
            words.extend(mirrored::changed_words(self.media(), offset, &record.to_bytes())?);
        }
        Ok(words)
    }

    /// 1. Write the volume record. For a BTT, also unlink the removed arenas in the same
    ///    transaction. From here on, the chunks past its end are leftovers.
    /// 2. Change their owner words to *scrub* and persist them. Otherwise, a chunk that the volume
    ///    gets later could have the same index.
    ///
    /// When the call returns, the chunks wait to be erased.
    fn shrink(
        &self,
        state: &mut State,
        slot: Slot,
        chunks: u32,
        unlink: &[(u64, u64)],
    ) -> Result<VolumeInfo, PoolError> {
        let entry = &state.volumes[&slot];
        let record = entry.record.resized(self.next_sequence(slot)?, chunks);
        if unlink.is_empty() {
            self.write_record(state, record)?;
        } else {
            let extents = entry.extents();
            let space = Space::with_holes(self.media(), &extents, entry.record.size_bytes());
            let words = self.latch(self.resize_words(&space, unlink, &record))?;
            self.latch(redo_log::commit(self.media(), &self.superblock(), &words))?;
            state.change_volume(slot, |entry| entry.record = record);
        }
        let mut removed = vec![];
        state.change_volume(slot, |entry| {
            let kept = entry.chunks.partition_point(|(index, _)| *index < chunks);
            removed = entry.chunks.split_off(kept);
        });
        let removed = runs(removed.into_iter().map(|(_, chunk)| chunk));
        self.release_chunks(state, &removed)?;
        Ok(volume_info(&state.volumes[&slot]))
    }
}

impl<M: Media> Volume<M> {
    /// Grows the volume. Stores into it must not be in progress, which `&mut` ensures.
    fn grow(&mut self, size: VolumeSize) -> Result<(), PoolError> {
        let slot = self.slot;
        self.pool.resize(|_| Ok(slot), size, Shrink::Refuse)?;
        let state = self.pool.lock_state();
        let entry = &state.volumes[&slot];
        (self.info, self.map) = (volume_info(entry), entry.chunk_map());
        if self.map.is_none() {
            self.extents = entry.extents();
        }
        Ok(())
    }
}

impl<M: Media> Engine<Volume<M>> {
    /// Grows the volume in the same way as [`Pool::resize_volume`], and opens its new arenas.
    /// Existing sectors keep their numbers. After an error, the BTT is as large as before, or as
    /// large as the next open finds it. If the volume has the size already, opens arenas that an
    /// earlier call has failed to open.
    ///
    /// Erases chunks if too few are clean, so call [`Pool::scrub_for`] first.
    pub fn grow(&mut self, size: VolumeSize) -> Result<(), PoolError> {
        // An earlier growth may have failed to open its arenas.
        if size != VolumeSize::Bytes(self.space().size_bytes()) {
            self.space_mut().grow(size)?;
        }
        self.open_added_arenas().map_err(PoolError::Btt)
    }
}

/// Largest number of words that the growth of a BTT volume changes: two words in each of two info
/// blocks, and all words of both copies of the record.
const MAX_GROWTH_WORDS: u64 = 4 + 2 * crate::pool::format::layout::VOLUME_RECORD_BYTES / 8;
