//! Chunks and runs of them: the words in which the pool speaks of its space.

use std::fmt;
use std::ops::Range;

use crate::CHUNK_BYTES;

/// The largest order: 2^10 chunks, 2 GiB.
pub const MAX_ORDER: u8 = 10;

/// The number of a chunk, counted from the start of the pool: the chunk lies at this many times 2
/// MiB in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkId(pub u32);

impl ChunkId {
    /// Where the chunk lies in the file.
    #[inline]
    pub fn offset_bytes(self) -> u64 {
        u64::from(self.0) * CHUNK_BYTES
    }

    /// The chunk `chunks` further on.
    pub(crate) fn plus(self, chunks: u32) -> Self {
        Self(self.0.checked_add(chunks).expect("chunk numbers are bounded by the pool's size"))
    }
}

impl fmt::Display for ChunkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "C{}", self.0)
    }
}

/// 2^order chunks, of which the first one's number is a multiple of 2^order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Extent {
    /// The first chunk.
    pub start: ChunkId,
    /// 0 (2 MiB) to 10 (2 GiB).
    pub order: u8,
}

impl Extent {
    /// A single chunk.
    pub fn chunk(start: ChunkId) -> Self {
        Self { start, order: 0 }
    }

    /// How many chunks it has.
    pub fn chunks(self) -> u32 {
        1 << self.order
    }

    /// Where it lies in the pool's file.
    #[inline]
    pub fn offset_bytes(self) -> u64 {
        self.start.offset_bytes()
    }

    /// How long it is.
    #[inline]
    pub fn len_bytes(self) -> u64 {
        u64::from(self.chunks()) * CHUNK_BYTES
    }

    /// Bytes in the pool's file.
    pub fn byte_range(self) -> Range<u64> {
        self.run().byte_range()
    }

    /// The same as a run.
    pub(crate) fn run(self) -> Run {
        Run { start: self.start, chunks: self.chunks() }
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+2^{}", self.start, self.order)
    }
}

/// Chunks side by side, of any number and alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Run {
    /// The first chunk.
    pub start: ChunkId,
    /// How many.
    pub chunks: u32,
}

impl Run {
    /// Where it lies in the pool's file.
    #[inline]
    pub fn offset_bytes(self) -> u64 {
        self.start.offset_bytes()
    }

    /// How long it is.
    #[inline]
    pub fn len_bytes(self) -> u64 {
        u64::from(self.chunks) * CHUNK_BYTES
    }

    /// The chunk behind it.
    pub(crate) fn end(self) -> ChunkId {
        self.start.plus(self.chunks)
    }

    /// Bytes in the pool's file.
    pub fn byte_range(self) -> Range<u64> {
        self.offset_bytes()..self.offset_bytes() + self.len_bytes()
    }

    /// Its chunks.
    pub fn ids(self) -> impl Iterator<Item = ChunkId> {
        (self.start.0..self.start.0 + self.chunks).map(ChunkId)
    }

    /// The fewest aligned extents that make it up, in order.
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

/// Joins chunks into runs, as far as they follow each other in the given order.
pub(crate) fn runs(chunks: impl IntoIterator<Item = ChunkId>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    chunks.into_iter().for_each(|chunk| push(&mut runs, chunk));
    runs
}

/// Sorts runs and joins those that touch. They must not overlap.
pub(crate) fn joined(mut runs: Vec<Run>) -> Vec<Run> {
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

/// Adds a chunk to the last run, if it follows it, or as a run of its own.
pub(crate) fn push(runs: &mut Vec<Run>, chunk: ChunkId) {
    match runs.last_mut() {
        Some(run) if run.start.0 + run.chunks == chunk.0 => run.chunks += 1,
        _ => runs.push(Run { start: chunk, chunks: 1 }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_cut_into_the_fewest_aligned_extents() {
        let orders = |start, chunks| -> Vec<(u32, u8)> {
            Run { start: ChunkId(start), chunks }.extents().map(|e| (e.start.0, e.order)).collect()
        };
        assert_eq!(orders(0, 8), [(0, 3)]);
        assert_eq!(orders(3, 6), [(3, 0), (4, 2), (8, 0)]);
        assert_eq!(orders(0, 4096), [(0, 10), (1024, 10), (2048, 10), (3072, 10)]);
        assert_eq!(orders(5, 0), []);
    }

    #[test]
    fn runs_that_touch_are_joined() {
        let run = |start, chunks| Run { start: ChunkId(start), chunks };
        assert_eq!(
            joined(vec![run(8, 2), run(0, 3), run(3, 1), run(10, 1)]),
            [run(0, 4), run(8, 3)]
        );
    }

    #[test]
    fn chunks_are_joined_only_where_they_follow_each_other() {
        let ids = [4, 5, 6, 9, 8, 10].map(ChunkId);
        let joined: Vec<_> = runs(ids).iter().map(|r| (r.start.0, r.chunks)).collect();
        assert_eq!(joined, [(4, 3), (9, 1), (8, 1), (10, 1)]);
    }
}
