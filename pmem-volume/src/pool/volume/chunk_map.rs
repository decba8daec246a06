//! Chunk of each index of an open thin volume.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::CHUNK_BYTES;
use crate::pool::format::chunk::ChunkId;

/// Number of indexes in a part of the map.
const PART: u32 = 1024;

/// Value of an index without a chunk. Chunk numbers have 28 bits.
const HOLE: u32 = u32::MAX;

/// Chunk of each index of an open volume. Lookups take no lock, because a chunk is only ever added.
///
/// Parts without chunks are not in memory, because the size of a volume is untrusted.
pub(super) struct ChunkMap {
    chunks: u32,
    allocated: AtomicU32,
    parts: Box<[OnceLock<Box<[AtomicU32]>>]>,
}

impl ChunkMap {
    /// Returns the map of a volume of `chunks` chunks. Only those in `present` are allocated.
    pub(super) fn new(chunks: u32, present: &[(u32, ChunkId)]) -> Self {
        let parts = (0..chunks.div_ceil(PART)).map(|_| OnceLock::new()).collect();
        let map = Self { chunks, allocated: AtomicU32::new(0), parts };
        present.iter().for_each(|(index, chunk)| map.publish(*index, *chunk));
        map
    }

    pub(super) fn len_bytes(&self) -> u64 {
        u64::from(self.chunks) * CHUNK_BYTES
    }

    /// Returns the chunk at an index.
    ///
    /// # Panics
    /// Panics if the index is not inside the volume.
    #[inline]
    pub(super) fn get(&self, index: u32) -> Option<ChunkId> {
        assert!(index < self.chunks, "index {index} is not inside the volume");
        let part = self.parts[(index / PART) as usize].get()?;
        // Pairs with the store in publish(): stores to the chunk's owner word happened before.
        match part[(index % PART) as usize].load(Ordering::Acquire) {
            HOLE => None,
            chunk => Some(ChunkId(chunk)),
        }
    }

    /// Returns the chunks by index.
    pub(super) fn chunks(&self) -> impl Iterator<Item = (u32, ChunkId)> {
        let parts = (0..).zip(&self.parts).filter_map(|(number, part)| Some((number, part.get()?)));
        let indexes =
            parts.flat_map(|(number, part)| number * PART..number * PART + part.len() as u32);
        let inside = indexes.take_while(|index| *index < self.chunks);
        inside.filter_map(|index| Some((index, self.get(index)?)))
    }

    /// Returns the end of a hole that contains the index, which has no chunk. The result may be
    /// smaller than the end of the whole hole.
    pub(super) fn hole_end(&self, index: u32) -> u32 {
        match self.parts[(index / PART) as usize].get() {
            Some(_) => index + 1,
            None => ((index / PART + 1) * PART).min(self.chunks),
        }
    }

    /// Returns the indexes without a chunk in a range.
    pub(super) fn holes(&self, indexes: Range<u32>) -> impl Iterator<Item = u32> {
        indexes.filter(|index| self.get(*index).is_none())
    }

    /// Adds a chunk, whose owner word must be durable.
    pub(super) fn publish(&self, index: u32, chunk: ChunkId) {
        let new_part = || (0..PART).map(|_| AtomicU32::new(HOLE)).collect();
        let part = self.parts[(index / PART) as usize].get_or_init(new_part);
        let before = part[(index % PART) as usize].swap(chunk.0, Ordering::AcqRel);
        assert_eq!(before, HOLE, "index {index} already has a chunk");
        self.allocated.fetch_add(1, Ordering::Relaxed);
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
        let map = ChunkMap::new(3 * PART - 1, &[(0, ChunkId(5)), (PART, ChunkId(2))]);
        map.publish(PART - 1, ChunkId(9));
        let present: Vec<_> =
            (0..3 * PART - 1).filter_map(|index| Some((index, map.get(index)?))).collect();
        assert_eq!(present, [(0, 5), (PART - 1, 9), (PART, 2)].map(|(at, id)| (at, ChunkId(id))));
        assert!(map.chunks().eq(present));
        assert_eq!(map.allocated(), 3);
        assert_eq!((map.hole_end(1), map.hole_end(2 * PART)), (2, 3 * PART - 1));
    }

    #[test]
    fn map_of_the_largest_volume_needs_little_memory() {
        let map = ChunkMap::new(1 << 28, &[((1 << 28) - 1, ChunkId(4))]);
        assert_eq!((map.get(0), map.get((1 << 28) - 1)), (None, Some(ChunkId(4))));
        assert!(size_of_val(&*map.parts) <= 8 << 20);
    }

    #[test]
    #[should_panic(expected = "already has a chunk")]
    fn second_chunk_of_an_index_panics() {
        ChunkMap::new(2, &[(1, ChunkId(5))]).publish(1, ChunkId(6));
    }
}
