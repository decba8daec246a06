//! Chunk of each index of an open thin volume.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::CHUNK_BYTES;
use crate::pool::format::chunk::ChunkId;
use crate::sparse_table::SparseTable;

/// Value of an index without a chunk. Chunk numbers have 28 bits.
const HOLE: u32 = u32::MAX;

/// Chunk of each index of an open volume. Lookups take no lock. Parts without chunks are not in
/// memory, because the size of a volume is untrusted.
///
/// A chunk may be withdrawn while the volume is in use. A thread that has looked it up earlier may
/// still access it, so its new owner must wait for such threads ([`crate::media::Media::release`]).
pub(super) struct ChunkMap {
    allocated: AtomicU32,
    chunks: SparseTable<AtomicU32>,
}

impl ChunkMap {
    /// Returns the map of a volume of `chunks` chunks. Only those in `present` are allocated.
    pub(super) fn new(chunks: u32, present: &[(u32, ChunkId)]) -> Self {
        let chunks = SparseTable::new(chunks, || AtomicU32::new(HOLE));
        let map = Self { allocated: AtomicU32::new(0), chunks };
        present.iter().for_each(|(index, chunk)| map.publish(*index, *chunk));
        map
    }

    pub(super) fn len_bytes(&self) -> u64 {
        u64::from(self.chunks.len()) * CHUNK_BYTES
    }

    /// Returns the chunk at an index.
    ///
    /// # Panics
    /// Panics if the index is not inside the volume.
    #[inline]
    pub(super) fn get(&self, index: u32) -> Option<ChunkId> {
        // Pairs with the store in publish(): stores to the chunk's owner word happened before.
        match self.chunks.get(index)?.load(Ordering::Acquire) {
            HOLE => None,
            chunk => Some(ChunkId(chunk)),
        }
    }

    /// Returns true if the range, which must not be empty, is in a single chunk. Most writes need
    /// no other check.
    ///
    /// # Panics
    /// Panics if the start of the range is not inside the volume.
    #[inline]
    pub(super) fn has_chunk_of(&self, range: &Range<u64>) -> bool {
        let index = range.start / CHUNK_BYTES;
        (range.end - 1) / CHUNK_BYTES == index && self.get(index as u32).is_some()
    }

    /// Returns the chunks by index.
    pub(super) fn chunks(&self) -> impl Iterator<Item = (u32, ChunkId)> {
        self.chunks.used_indexes().filter_map(|index| Some((index, self.get(index)?)))
    }

    /// Returns the end of a hole that contains the index, which has no chunk. The result may be
    /// smaller than the end of the whole hole.
    pub(super) fn hole_end(&self, index: u32) -> u32 {
        self.chunks.unused_end(index).unwrap_or(index + 1)
    }

    /// Returns the indexes without a chunk in a range.
    pub(super) fn holes(&self, indexes: Range<u32>) -> impl Iterator<Item = u32> {
        indexes.filter(|index| self.get(*index).is_none())
    }

    /// Adds a chunk, whose owner word must be durable.
    pub(super) fn publish(&self, index: u32, chunk: ChunkId) {
        let before = self.chunks.get_or_create(index).swap(chunk.0, Ordering::AcqRel);
        assert_eq!(before, HOLE, "index {index} already has a chunk");
        self.allocated.fetch_add(1, Ordering::Relaxed);
    }

    /// Makes an index a hole, and returns its chunk. Later lookups find the hole. This store is a
    /// full barrier, so that the caller can then check for threads with an earlier lookup.
    pub(super) fn withdraw(&self, index: u32) -> Option<ChunkId> {
        let before = self.chunks.get(index)?.swap(HOLE, Ordering::SeqCst);
        if before == HOLE {
            return None;
        }
        self.allocated.fetch_sub(1, Ordering::Relaxed);
        Some(ChunkId(before))
    }

    /// Returns the number of indexes with a chunk.
    pub(super) fn allocated(&self) -> u32 {
        self.allocated.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_found_at_their_indexes() {
        const LEN: u32 = 3000;
        let map = ChunkMap::new(LEN, &[(0, ChunkId(5)), (1024, ChunkId(2))]);
        map.publish(1023, ChunkId(9));
        let present: Vec<_> = (0..LEN).filter_map(|index| Some((index, map.get(index)?))).collect();
        assert_eq!(present, [(0, 5), (1023, 9), (1024, 2)].map(|(at, id)| (at, ChunkId(id))));
        assert!(map.chunks().eq(present));
        assert_eq!(map.allocated(), 3);
        assert_eq!((map.hole_end(1), map.hole_end(2048)), (2, LEN));
    }

    #[test]
    fn range_over_several_chunks_is_not_in_a_single_one() {
        let map = ChunkMap::new(4, &[(1, ChunkId(5)), (2, ChunkId(8))]);
        let has_chunk = |range: Range<u64>| {
            map.has_chunk_of(&(range.start * CHUNK_BYTES / 2..range.end * CHUNK_BYTES / 2))
        };
        let ranges = [2..3, 2..4, 5..6, 3..5, 2..6, 1..2, 6..8].map(has_chunk);
        assert_eq!(ranges, [true, true, true, false, false, false, false]);
    }

    #[test]
    fn withdrawn_chunk_leaves_a_hole() {
        let map = ChunkMap::new(4, &[(1, ChunkId(5)), (2, ChunkId(8))]);
        assert_eq!([1, 1, 0].map(|index| map.withdraw(index)), [Some(ChunkId(5)), None, None]);
        assert_eq!((map.get(1), map.allocated()), (None, 1));
        map.publish(1, ChunkId(6));
        assert!(map.chunks().eq([(1, ChunkId(6)), (2, ChunkId(8))]));
    }

    #[test]
    #[should_panic(expected = "already has a chunk")]
    fn second_chunk_of_an_index_panics() {
        ChunkMap::new(2, &[(1, ChunkId(5))]).publish(1, ChunkId(6));
    }
}
