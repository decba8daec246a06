//! Chunks, extents and runs.

use std::fmt;
use std::ops::Range;

use crate::CHUNK_BYTES;

/// Maximum order of an extent: 2^10 chunks (2 GiB).
pub const MAX_ORDER: u8 = 10;

/// Number of a chunk. Multiplied by 2 MiB, it is the offset of the chunk in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkId(pub u32);

impl ChunkId {
    /// Returns the offset of the chunk in the file.
    #[inline]
    pub fn offset_bytes(self) -> u64 {
        u64::from(self.0) * CHUNK_BYTES
    }

    /// Returns the chunk that follows after `chunks` chunks.
    pub(crate) fn plus(self, chunks: u32) -> Self {
        Self(self.0.checked_add(chunks).expect("chunk numbers are bounded by the pool's size"))
    }
}

impl fmt::Display for ChunkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "C{}", self.0)
    }
}

/// Extent of 2^order chunks. Its first chunk is a multiple of 2^order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Extent {
    /// First chunk of the extent.
    pub start: ChunkId,
    /// Binary logarithm of the number of chunks, from 0 (2 MiB) to 10 (2 GiB).
    pub order: u8,
}

impl Extent {
    /// Returns the extent that consists of a single chunk.
    pub fn chunk(start: ChunkId) -> Self {
        Self { start, order: 0 }
    }

    /// Returns the number of chunks.
    pub fn chunks(self) -> u32 {
        1 << self.order
    }

    /// Returns the offset of the extent in the pool's file.
    #[inline]
    pub fn offset_bytes(self) -> u64 {
        self.start.offset_bytes()
    }

    /// Returns the length of the extent in bytes.
    #[inline]
    pub fn len_bytes(self) -> u64 {
        u64::from(self.chunks()) * CHUNK_BYTES
    }

    /// Returns the range of bytes in the pool's file.
    pub fn byte_range(self) -> Range<u64> {
        self.run().byte_range()
    }

    pub(crate) fn run(self) -> Run {
        Run { start: self.start, chunks: self.chunks() }
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+2^{}", self.start, self.order)
    }
}

/// Any number of contiguous chunks with any alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Run {
    /// First chunk of the run.
    pub start: ChunkId,
    /// Number of chunks.
    pub chunks: u32,
}

impl Run {
    /// Returns the offset of the run in the pool's file.
    #[inline]
    pub fn offset_bytes(self) -> u64 {
        self.start.offset_bytes()
    }

    /// Returns the length of the run in bytes.
    #[inline]
    pub fn len_bytes(self) -> u64 {
        u64::from(self.chunks) * CHUNK_BYTES
    }

    /// Returns the first chunk after the run.
    pub(crate) fn end(self) -> ChunkId {
        self.start.plus(self.chunks)
    }

    /// Returns the range of bytes in the pool's file.
    pub fn byte_range(self) -> Range<u64> {
        self.offset_bytes()..self.offset_bytes() + self.len_bytes()
    }

    /// Returns all chunks of the run.
    pub fn ids(self) -> impl Iterator<Item = ChunkId> {
        (self.start.0..self.start.0 + self.chunks).map(ChunkId)
    }

    /// Divides the run into the fewest aligned extents, in order.
    pub fn extents(self) -> impl Iterator<Item = Extent> {
        let mut rest = self;
        std::iter::from_fn(move || {
            if rest.chunks == 0 {
                return None;
            }
            let by_alignment = rest.start.0.trailing_zeros();
            let by_length = rest.chunks.ilog2();
            let order = by_alignment.min(by_length).min(u32::from(MAX_ORDER)) as u8;
            let extent = Extent { start: rest.start, order };
            rest = Run {
                start: rest.start.plus(extent.chunks()),
                chunks: rest.chunks - extent.chunks(),
            };
            Some(extent)
        })
    }
}

/// Groups chunks into runs. Chunks that are contiguous in the given order form one run.
pub(crate) fn runs(chunks: impl IntoIterator<Item = ChunkId>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    chunks.into_iter().for_each(|chunk| push_chunk(&mut runs, chunk));
    runs
}

/// Sorts runs and merges adjacent ones. They must not overlap.
pub(crate) fn merge_runs(mut runs: Vec<Run>) -> Vec<Run> {
    runs.sort_unstable();
    runs.dedup_by(|next, run| {
        assert!(run.end() <= next.start, "a chunk is in two runs");
        let touch = run.end() == next.start;
        if touch {
            run.chunks += next.chunks;
        }
        touch
    });
    runs
}

/// Extends the last run by a chunk, or adds a new run if the chunk does not follow it.
pub(crate) fn push_chunk(runs: &mut Vec<Run>, chunk: ChunkId) {
    match runs.last_mut() {
        Some(run) if run.start.0 + run.chunks == chunk.0 => run.chunks += 1,
        _ => runs.push(Run { start: chunk, chunks: 1 }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_is_divided_into_the_fewest_aligned_extents() {
        let orders = |start, chunks| -> Vec<(u32, u8)> {
            Run { start: ChunkId(start), chunks }.extents().map(|e| (e.start.0, e.order)).collect()
        };
        assert_eq!(orders(0, 8), [(0, 3)]);
        assert_eq!(orders(3, 6), [(3, 0), (4, 2), (8, 0)]);
        assert_eq!(orders(0, 4096), [(0, 10), (1024, 10), (2048, 10), (3072, 10)]);
        assert_eq!(orders(5, 0), []);
    }

    #[test]
    fn adjacent_runs_are_joined() {
        let run = |start, chunks| Run { start: ChunkId(start), chunks };
        assert_eq!(
            merge_runs(vec![run(8, 2), run(0, 3), run(3, 1), run(10, 1)]),
            [run(0, 4), run(8, 3)]
        );
    }

    #[test]
    fn only_contiguous_chunks_are_joined() {
        let ids = [4, 5, 6, 9, 8, 10].map(ChunkId);
        let joined: Vec<_> = runs(ids).iter().map(|r| (r.start.0, r.chunks)).collect();
        assert_eq!(joined, [(4, 3), (9, 1), (8, 1), (10, 1)]);
    }
}
