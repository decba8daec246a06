//! Number of uses of each chunk, and averages over extents.

use crate::pool::format::chunk::{Extent, MAX_ORDER, Run};

/// Average number of uses per level of wear. Extents of the same level are selected by placement
/// and by size, smallest sufficient first, which keeps the free space contiguous. An extent at a
/// higher level is not used until the others have caught up. Persistent memory endures millions of
/// writes, so a difference of one level is negligible.
pub(crate) const WEAR_STEP: u64 = 16;

/// Number of chunks in the largest extent.
const MAX_EXTENT_CHUNKS: usize = 1 << MAX_ORDER;

/// Number of uses of each chunk, as in the chunk table, and sums over all aligned extents. Because
/// of the sums, splitting, merging or finding an extent takes the same time for all sizes. Chunks
/// that are not listed were never used.
#[derive(Debug, Default)]
pub(crate) struct Wear {
    /// Number of uses of each chunk. The length is a multiple of `MAX_EXTENT_CHUNKS`.
    uses: Vec<u32>,
    /// Sum of uses over each extent of orders 1 to 10, indexed by the number of the extent.
    sums: [Vec<u64>; MAX_ORDER as usize],
}

impl Wear {
    pub(crate) fn new(uses: Vec<u32>) -> Self {
        let mut wear = Self { uses, ..Self::default() };
        wear.extend_to(wear.uses.len());
        wear.update_sums(0..wear.uses.len());
        wear
    }

    /// Returns the wear level of an extent.
    pub(crate) fn level(&self, extent: Extent) -> u64 {
        self.sum(extent) / u64::from(extent.chunks()) / WEAR_STEP
    }

    /// Returns the wear level of a run.
    pub(crate) fn level_of_run(&self, run: Run) -> u64 {
        let uses: u64 = run.extents().map(|extent| self.sum(extent)).sum();
        uses / u64::from(run.chunks) / WEAR_STEP
    }

    fn sum(&self, extent: Extent) -> u64 {
        let at = extent.start.0 as usize;
        match usize::from(extent.order).checked_sub(1) {
            None => self.uses.get(at).copied().map_or(0, u64::from),
            Some(level) => self.sums[level].get(at >> extent.order).copied().unwrap_or(0),
        }
    }

    /// Increments the number of uses of each chunk. The count in the chunk table stops at
    /// [`MAX_USES`](crate::pool::format::table::MAX_USES).
    pub(crate) fn count_use(&mut self, run: Run) {
        let chunks = run.start.0 as usize..run.end().0 as usize;
        self.extend_to(chunks.end);
        for uses in &mut self.uses[chunks.clone()] {
            *uses = uses.saturating_add(1);
        }
        self.update_sums(chunks);
    }

    fn extend_to(&mut self, chunks: usize) {
        let chunks = chunks.next_multiple_of(MAX_EXTENT_CHUNKS);
        if chunks > self.uses.len() || chunks > self.sums[0].len() * 2 {
            self.uses.resize(chunks, 0);
            for (level, sums) in self.sums.iter_mut().enumerate() {
                sums.resize(chunks >> (level + 1), 0);
            }
        }
    }

    /// Recalculates all sums that include `chunks`, which must be within the list.
    fn update_sums(&mut self, chunks: std::ops::Range<usize>) {
        if chunks.is_empty() {
            return;
        }
        let (first, last) = (chunks.start, chunks.end - 1);
        for at in first >> 1..=last >> 1 {
            self.sums[0][at] = u64::from(self.uses[at * 2]) + u64::from(self.uses[at * 2 + 1]);
        }
        for level in 1..self.sums.len() {
            let (below, above) = self.sums.split_at_mut(level);
            let below = &below[level - 1];
            for at in first >> (level + 1)..=last >> (level + 1) {
                above[0][at] = below[at * 2] + below[at * 2 + 1];
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn uses(&self) -> &[u32] {
        &self.uses
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::format::chunk::ChunkId;

    #[test]
    fn levels_are_averages_of_loaded_and_counted_uses() {
        let uses: Vec<u32> = (0..2500).map(|chunk| chunk * 37 % 1009).collect();
        let loaded = Wear::new(uses.clone());
        let mut counted = Wear::default();
        for (chunk, uses) in (0..).map(ChunkId).zip(&uses) {
            (0..*uses).for_each(|_| counted.count_use(Run { start: chunk, chunks: 1 }));
        }
        let average = |run: Run| {
            let listed = run.ids().filter_map(|chunk| uses.get(chunk.0 as usize));
            listed.map(|uses| u64::from(*uses)).sum::<u64>() / u64::from(run.chunks) / WEAR_STEP
        };
        for order in 0..=MAX_ORDER {
            for start in (0..4096).step_by(1 << order) {
                let extent = Extent { start: ChunkId(start), order };
                assert_eq!(loaded.level(extent), average(extent.run()), "{extent}");
                assert_eq!(counted.level(extent), average(extent.run()), "{extent}");
            }
        }
        let run = Run { start: ChunkId(3), chunks: 1700 };
        assert_eq!(loaded.level_of_run(run), average(run));
    }

    #[test]
    fn full_wear_count_saturates() {
        let mut wear = Wear::new(vec![u32::MAX, 0]);
        wear.count_use(Run { start: ChunkId(0), chunks: 2 });
        assert_eq!(wear.uses()[..3], [u32::MAX, 1, 0]);
        assert_eq!(wear.level(Extent { start: ChunkId(0), order: 1 }), (1 << 31) / WEAR_STEP);
    }
}
