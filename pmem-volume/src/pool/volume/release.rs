//! Release of chunks of an open thin volume.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::Volume;
use super::chunk_map::ChunkMap;
use super::provision::media_error;
use crate::CHUNK_BYTES;
use crate::media::{Media, MediaError, wait_for_reads};
use crate::pool::format::chunk::{ChunkId, runs};
use crate::pool::format::table::Slot;
use crate::pool::{Pool, PoolError};

/// Chunks by index, and units of the volume.
type Withdrawn = (Vec<(u32, ChunkId)>, Vec<Range<u64>>);

impl<M: Media> Volume<M> {
    /// Releases chunks of a thin volume, as [`Media::release`] requires.
    pub(super) fn release_chunks(
        &self,
        units: &[Range<u64>],
        is_read: &dyn Fn(&Range<u64>) -> bool,
    ) -> Result<Vec<Range<u64>>, MediaError> {
        let map = self.map.as_ref().ok_or(MediaError::ReadOnly)?;
        for unit in units {
            let is_chunk = unit.start % CHUNK_BYTES == 0 && unit.end == unit.start + CHUNK_BYTES;
            assert!(is_chunk && unit.end <= map.len_bytes(), "{unit:#x?} is not a chunk");
        }
        let released = self.pool.release_from(self.slot, map, units, is_read);
        let (chunks, kept) = released.map_err(media_error)?;
        self.released_chunks.fetch_add(chunks, Ordering::Relaxed);
        Ok(kept)
    }

    /// Returns the number of bytes that the volume has released since it was opened.
    pub fn released_bytes(&self) -> u64 {
        self.released_chunks.load(Ordering::Relaxed) * CHUNK_BYTES
    }
}

impl<M: Media> Pool<M> {
    /// Releases chunks of an open volume. Returns their number, and the units that are still being
    /// read.
    ///
    /// 1. Make the indexes holes in the map. From here on, they read as zeros.
    /// 2. Wait for reads that have found the chunks before. A chunk that is still being read
    ///    returns to the map.
    /// 3. Change the owner words to *scrub* and persist them. Only then may the indexes get other
    ///    chunks, and the chunks other owners. After a crash before that, the volume still owns
    ///    the chunks with their old content, which no sector uses.
    fn release_from(
        &self,
        slot: Slot,
        map: &ChunkMap,
        units: &[Range<u64>],
        is_read: &dyn Fn(&Range<u64>) -> bool,
    ) -> Result<(u64, Vec<Range<u64>>), PoolError> {
        // Held during all steps, so that no thread allocates chunks for the same indexes.
        let mut state = self.lock_for_change()?;
        let (mut withdrawn, kept) = withdraw(map, units, is_read);
        if withdrawn.is_empty() {
            return Ok((0, kept));
        }
        withdrawn.sort_unstable();
        state.change_volume(slot, |entry| entry.remove_chunks(&withdrawn));
        let mut chunks: Vec<_> = withdrawn.into_iter().map(|(_, chunk)| chunk).collect();
        chunks.sort_unstable();
        let count = chunks.len() as u64;
        self.release_chunks(&mut state, &runs(chunks))?;
        Ok((count, kept))
    }
}

/// Performs steps 1 and 2 of a release.
fn withdraw(
    map: &ChunkMap,
    units: &[Range<u64>],
    is_read: &dyn Fn(&Range<u64>) -> bool,
) -> Withdrawn {
    let (mut withdrawn, mut kept) = Withdrawn::default();
    for unit in units {
        let index = (unit.start / CHUNK_BYTES) as u32;
        let Some(chunk) = map.withdraw(index) else { continue };
        if wait_for_reads(|| is_read(unit)) {
            withdrawn.push((index, chunk));
        } else {
            map.publish(index, chunk);
            kept.push(unit.clone());
        }
    }
    (withdrawn, kept)
}
