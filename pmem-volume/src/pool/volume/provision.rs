//! Allocation of chunks for the holes of an open thin volume.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::chunk_map::ChunkMap;
use super::{Search, Volume};
use crate::CHUNK_BYTES;
use crate::media::{Media, MediaError, is_zero};
use crate::pool::format::chunk::ChunkId;
use crate::pool::format::table::Slot;
use crate::pool::{Pool, PoolError, State, bytes};

impl<M: Media> Volume<M> {
    /// Allocates chunks for the holes of a range, durably.
    #[inline(never)]
    pub(super) fn fill_holes(&self, map: &ChunkMap, range: Range<u64>) -> Result<(), MediaError> {
        assert!(range.start <= range.end && range.end <= map.len_bytes(), "outside the volume");
        self.fill(map, map.holes(indexes(&range)).collect())
    }

    /// Allocates chunks for holes. If the pool is full, records how many bytes it lacks.
    fn fill(&self, map: &ChunkMap, holes: Vec<u32>) -> Result<(), MediaError> {
        let filled = self.pool.fill_holes(self.slot, map, holes).map_err(media_error);
        if let Err(MediaError::Full { needed_bytes, .. }) = &filled {
            self.lacking_bytes.store(*needed_bytes, Ordering::Relaxed);
        }
        filled
    }

    /// Allocates the chunk at an index of a thin volume if it is a hole, durably. Returns the
    /// chunk's offset in the file. Takes no lock if the chunk is present.
    ///
    /// # Panics
    /// Panics if the volume is not thin, or if the index is not inside it.
    pub fn provision_chunk(&self, index: u32) -> Result<u64, MediaError> {
        let map = self.map.as_ref().expect("only a thin volume has holes");
        loop {
            match map.get(index) {
                Some(chunk) => return Ok(chunk.offset_bytes()),
                // The caller may release the chunk on another thread.
                None => self.fill(map, vec![index])?,
            }
        }
    }

    /// Returns the offset in the file of the chunk at an index of a thin volume. `None` for a hole.
    pub fn chunk_offset(&self, index: u32) -> Option<u64> {
        self.map.as_ref()?.get(index).map(ChunkId::offset_bytes)
    }

    /// Returns true if the pool may have the space that the last failed allocation lacked. Also
    /// returns true if the pool has failed, because another attempt then returns the failure.
    pub fn has_space(&self) -> bool {
        let state = self.pool.lock_state();
        let chunks = (self.lacking_bytes.load(Ordering::Relaxed) / CHUNK_BYTES) as u32;
        let entry = &state.volumes[&self.slot];
        !self.pool.is_writable()
            || state.may_allocate(chunks)
                && state.allows_promise(entry.promised(), entry.promised_with(chunks))
    }

    /// Allocates chunks for those holes into which `bytes` will be stored. Zeros need none, because
    /// a hole reads as zeros.
    pub(super) fn provision_store(
        &self,
        offset_bytes: u64,
        bytes: &[u8],
    ) -> Result<(), MediaError> {
        let Some(map) = &self.map else { return Ok(()) };
        let range = offset_bytes..offset_bytes + bytes.len() as u64;
        assert!(range.end <= map.len_bytes(), "outside the volume");
        let has_data = |index: &u32| {
            let start = (u64::from(*index) * CHUNK_BYTES).max(range.start);
            let end = ((u64::from(*index) + 1) * CHUNK_BYTES).min(range.end);
            !is_zero(&bytes[(start - offset_bytes) as usize..(end - offset_bytes) as usize])
        };
        self.fill(map, map.holes(indexes(&range)).filter(has_data).collect())
    }
}

/// Returns the indexes of the chunks that a range of a volume touches.
pub(super) fn indexes(range: &Range<u64>) -> Range<u32> {
    let end = if range.is_empty() { range.start } else { range.end.next_multiple_of(CHUNK_BYTES) };
    (range.start / CHUNK_BYTES) as u32..(end / CHUNK_BYTES) as u32
}

impl<M: Media> Pool<M> {
    /// Allocates chunks for the `holes` of an open volume, all of them or none. Beyond the reserve
    /// of the volume, chunks that were promised to other volumes are not used.
    ///
    /// 1. Take clean chunks. If too few are clean, erase waiting ones first. If too few wait, wait
    ///    until lent ones are returned ([`Pool::next_recall`]).
    /// 2. Store their owner words and persist them. After a crash, they belong to the volume and
    ///    read as zeros, like the holes.
    /// 3. Publish the chunks in the map. From here on, other threads may store to them.
    fn fill_holes(&self, slot: Slot, map: &ChunkMap, mut holes: Vec<u32>) -> Result<(), PoolError> {
        if holes.is_empty() {
            return Ok(());
        }
        let mut state = self.lock_for_change()?;
        loop {
            // Checked again after each unlock, because another thread may have filled some of them.
            holes.retain(|index| map.get(*index).is_none());
            let entry = &state.volumes[&slot];
            let chunks = holes.len() as u32;
            if !state.allows_promise(entry.promised(), entry.promised_with(chunks)) {
                return Err(state.pool_full(bytes(chunks)));
            }
            match state.missing_clean(chunks) {
                0 => break,
                missing if missing > state.scrub.pending() => {
                    state = self.wait_for_recall(state, chunks)?;
                }
                missing => state = self.erase_some(state, missing)?,
            }
        }
        let added = self.add_chunks(&mut state, slot, &holes, Search::Quick)?;
        added.into_iter().for_each(|(index, chunk)| map.publish(index, chunk));
        self.notify_shortage(&mut state);
        Ok(())
    }

    /// Adds clean chunks at `holes`, which are sorted, to a volume.
    pub(super) fn add_chunks(
        &self,
        state: &mut State,
        slot: Slot,
        holes: &[u32],
        search: Search,
    ) -> Result<Vec<(u32, ChunkId)>, PoolError> {
        let before = state.volumes[&slot].last_chunk_before(holes.first().copied().unwrap_or(0));
        let added = self.take_chunks(state, slot, holes, before, search)?;
        let chunks = added.len() as u32;
        state.counts.scrubbing -= chunks;
        state.counts.volume += chunks;
        state.change_volume(slot, |entry| entry.insert_chunks(&added));
        Ok(added)
    }
}

/// Converts an error of the pool to one of the volume's media.
pub(super) fn media_error(error: PoolError) -> MediaError {
    match error {
        PoolError::Media(error) => error,
        PoolError::Latched { cause, .. } => MediaError::Latched { cause },
        PoolError::ReadOnly { .. } => MediaError::ReadOnly,
        PoolError::PoolFull { requested_bytes, free_bytes, .. } => {
            MediaError::Full { needed_bytes: requested_bytes, available_bytes: free_bytes }
        }
        other => unreachable!("a change of chunks does not fail with {other}"),
    }
}
