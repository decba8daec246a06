//! Queue of chunks that wait to be erased. The queue never accesses the media.

use std::collections::BTreeMap;

use crate::pool::format::chunk::{ChunkId, Run};

#[derive(Debug, Default)]
pub(crate) struct ScrubQueue {
    /// Length of each run, indexed by its first chunk. Adjacent runs are merged.
    runs: BTreeMap<u32, u32>,
    waiting: u32,
    in_flight: u32,
    /// Start of the next batch. Batches are taken in file order, and start again at the beginning
    /// after the end. Therefore, the runs are long, and no chunk waits forever behind later ones.
    sweep: u32,
}

impl ScrubQueue {
    /// Returns the number of waiting chunks.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> u32 {
        self.waiting
    }

    /// Returns the number of chunks that are being erased.
    pub(crate) fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Returns the number of chunks that are waiting or being erased.
    pub(crate) fn pending(&self) -> u32 {
        self.waiting + self.in_flight
    }

    /// Adds a run.
    ///
    /// # Panics
    /// Panics if a chunk of the run is already waiting.
    pub(crate) fn add(&mut self, run: Run) {
        if run.chunks == 0 {
            return;
        }
        let (mut start, mut end) = (run.start.0, run.end().0);
        self.waiting += run.chunks;
        if let Some((&before, &chunks)) = self.runs.range(..end).next_back() {
            assert!(before + chunks <= start, "chunks of {run:?} are already waiting");
            if before + chunks == start {
                start = before;
            }
        }
        if let Some(chunks) = self.runs.remove(&end) {
            end += chunks;
        }
        self.runs.insert(start, end - start);
    }

    /// Removes up to `chunks` chunks for erasing. The chunks count as in flight until
    /// [`ScrubQueue::finish`].
    pub(crate) fn take(&mut self, chunks: u32) -> Vec<Run> {
        let mut batch = Vec::new();
        let mut left = chunks.min(self.waiting);
        self.waiting -= left;
        self.in_flight += left;
        while left > 0 {
            let next = self.runs.range(self.sweep..).next().or_else(|| self.runs.first_key_value());
            let (&start, &has) = next.expect("the waiting count equals the queued chunks");
            let run = Run { start: ChunkId(start), chunks: has.min(left) };
            self.runs.remove(&start);
            if run.chunks < has {
                self.runs.insert(run.end().0, has - run.chunks);
            }
            self.sweep = run.end().0;
            left -= run.chunks;
            batch.push(run);
        }
        batch
    }

    /// Ends the erasure of a batch. Its chunks are now free, or unused if the erasure failed.
    pub(crate) fn finish(&mut self, batch: &[Run]) {
        let chunks: u32 = batch.iter().map(|run| run.chunks).sum();
        self.in_flight =
            self.in_flight.checked_sub(chunks).expect("only batches in flight are finished");
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn run(start: u32, chunks: u32) -> Run {
        Run { start: ChunkId(start), chunks }
    }

    #[test]
    fn adjacent_runs_are_merged_and_batches_sweep_over_the_pool() {
        let mut queue = ScrubQueue::default();
        for part in [run(8, 2), run(4, 2), run(6, 2), run(20, 4), run(3, 0)] {
            queue.add(part);
        }
        assert_eq!((queue.waiting(), queue.in_flight()), (10, 0));
        let first = queue.take(4);
        assert_eq!(first, [run(4, 4)]);
        // Chunks behind the current position wait until the queue starts again at the beginning.
        queue.add(run(2, 2));
        let second = queue.take(4);
        assert_eq!(second, [run(8, 2), run(20, 2)]);
        assert_eq!((queue.waiting(), queue.in_flight(), queue.pending()), (4, 8, 12));
        assert_eq!(queue.take(9), [run(22, 2), run(2, 2)]);
        queue.finish(&first);
        assert_eq!((queue.waiting(), queue.in_flight()), (0, 8));
        assert_eq!(queue.take(9), []);
    }

    #[test]
    #[should_panic(expected = "are already waiting")]
    fn adding_a_waiting_chunk_panics() {
        let mut queue = ScrubQueue::default();
        queue.add(run(4, 4));
        queue.add(run(2, 3));
    }

    proptest! {
        #[test]
        fn each_added_chunk_is_removed_once(operations in prop::collection::vec((0..256u32, 1..20u32, any::<bool>()), 1..200)) {
            let mut queue = ScrubQueue::default();
            let mut waiting = BTreeSet::new();
            for (start, chunks, add) in operations {
                if add {
                    let ids: Vec<_> = run(start, chunks).ids().filter(|id| waiting.insert(*id)).collect();
                    crate::pool::format::chunk::runs(ids).into_iter().for_each(|run| queue.add(run));
                } else {
                    let batch = queue.take(chunks);
                    let taken: Vec<_> = batch.iter().flat_map(|run| run.ids()).collect();
                    prop_assert_eq!(taken.len(), waiting.len().min(chunks as usize));
                    for id in taken {
                        prop_assert!(waiting.remove(&id), "{} was not waiting", id);
                    }
                    queue.finish(&batch);
                }
                prop_assert_eq!((queue.waiting() as usize, queue.in_flight()), (waiting.len(), 0));
                let ends: Vec<_> = queue.runs.iter().map(|(start, chunks)| (*start, start + chunks)).collect();
                prop_assert!(ends.windows(2).all(|pair| pair[0].1 < pair[1].0), "runs touch: {:?}", ends);
            }
        }
    }
}
