//! Choice of chunks that are allocated before the guest stores into them, without side effects.
//!
//! A guest that stores into the chunk after a filled one is expected to continue, so the next holes
//! get chunks in the background. Chunks that the guest does not use become holes again.

use std::collections::VecDeque;

/// Number of holes after that of a store that are filled in advance.
const AHEAD: usize = 4;

/// Maximum number of chunks that wait for a store.
const MAX_STOCKED: usize = 16;

/// Change of a chunk in the background.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Provision(u32),
    Release(u32),
}

/// Answer to a store into a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Taken {
    Stocked,
    Missing,
    /// The chunk is being released. The caller must wait for the end of the step.
    Releasing,
}

/// Chunks of a volume that the guest has not stored to yet.
#[derive(Debug, Default)]
pub(super) struct Stock {
    /// Holes that should be filled, most urgent first.
    wanted: VecDeque<u32>,
    /// Filled indexes, oldest first.
    stocked: VecDeque<u32>,
    in_progress: Option<Step>,
}

impl Stock {
    /// Removes the chunk at `index` for a store. If the store gets a chunk,
    /// [`Stock::expect_after`] must follow.
    pub(super) fn take(&mut self, index: u32) -> Taken {
        if self.is_releasing(index) {
            return Taken::Releasing;
        }
        let is_stocked = self.stocked.contains(&index);
        // The caller waits for an allocation in progress, and owns the chunk then.
        self.forget(index);
        if is_stocked { Taken::Stocked } else { Taken::Missing }
    }

    /// Expects stores to the next holes if the store to `index` continues earlier ones. `is_mapped`
    /// has an element for each chunk of the volume.
    pub(super) fn expect_after(&mut self, index: u32, was_stocked: bool, is_mapped: &[bool]) {
        let at = index as usize;
        if was_stocked || at > 0 && is_mapped[at - 1] {
            let holes = (at + 1..is_mapped.len()).filter(|next| !is_mapped[*next]);
            let next: Vec<_> = holes.take(AHEAD).map(|next| next as u32).collect();
            self.wanted = next.into_iter().filter(|next| !self.has(*next)).collect();
        }
    }

    /// Removes the chunk at `index`. The caller must wait for the end of its release.
    pub(super) fn forget(&mut self, index: u32) {
        self.wanted.retain(|other| *other != index);
        self.stocked.retain(|other| *other != index);
        if self.in_progress == Some(Step::Provision(index)) {
            self.in_progress = None;
        }
    }

    fn has(&self, index: u32) -> bool {
        self.stocked.contains(&index) || self.in_progress == Some(Step::Provision(index))
    }

    /// Returns the next step in the background. [`Stock::finish`] must follow.
    pub(super) fn begin(&mut self) -> Option<Step> {
        let step = match self.wanted.pop_front() {
            Some(index) => Step::Provision(index),
            None if self.stocked.len() > MAX_STOCKED => Step::Release(self.stocked.pop_front()?),
            None => return None,
        };
        self.in_progress = Some(step);
        self.in_progress
    }

    /// Records the end of a step.
    pub(super) fn finish(&mut self, step: Step, succeeded: bool) {
        let is_ours = self.in_progress.take() == Some(step);
        match step {
            Step::Provision(index) if is_ours && succeeded => self.stocked.push_back(index),
            // The next store reports why the pool has no chunk.
            Step::Provision(_) if !succeeded => self.wanted.clear(),
            _ => {}
        }
    }

    pub(super) fn is_releasing(&self, index: u32) -> bool {
        self.in_progress == Some(Step::Release(index))
    }

    /// Number of chunks that wait for a store.
    pub(super) fn len(&self) -> usize {
        self.stocked.len()
    }

    /// Returns true if no step is wanted or in progress, and the stock is not too large.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.wanted.is_empty() && self.in_progress.is_none() && self.stocked.len() <= MAX_STOCKED
    }

    /// Removes the chunk that has waited longest for a store, and expects no further stores.
    pub(super) fn pop_oldest(&mut self) -> Option<u32> {
        self.wanted.clear();
        self.stocked.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes a chunk for a store, which is carried out unless the chunk is being released.
    fn take(stock: &mut Stock, index: u32, is_mapped: &[bool]) -> Taken {
        let taken = stock.take(index);
        if taken != Taken::Releasing {
            stock.expect_after(index, taken == Taken::Stocked, is_mapped);
        }
        taken
    }

    /// Carries out all steps, and returns them.
    fn work(stock: &mut Stock) -> Vec<Step> {
        let mut steps = Vec::new();
        while let Some(step) = stock.begin() {
            stock.finish(step, true);
            steps.push(step);
        }
        steps
    }

    /// Removes all chunks.
    fn drain(stock: &mut Stock) -> Vec<u32> {
        std::iter::from_fn(|| stock.pop_oldest()).collect()
    }

    fn provisions(indexes: impl IntoIterator<Item = u32>) -> Vec<Step> {
        indexes.into_iter().map(Step::Provision).collect()
    }

    #[test]
    fn consecutive_stores_find_stocked_chunks() {
        let (mut stock, mut is_mapped) = (Stock::default(), [false; 12]);
        is_mapped[0] = true;
        is_mapped[3] = true;
        assert_eq!(take(&mut stock, 1, &is_mapped), Taken::Missing);
        is_mapped[1] = true;
        assert_eq!(work(&mut stock), provisions([2, 4, 5, 6]));
        assert_eq!(take(&mut stock, 2, &is_mapped), Taken::Stocked);
        is_mapped[2] = true;
        assert_eq!(work(&mut stock), provisions([7]));
        assert_eq!((take(&mut stock, 11, &is_mapped), stock.len()), (Taken::Missing, 4));
    }

    #[test]
    fn store_far_from_others_allocates_nothing_else() {
        let (mut stock, is_mapped) = (Stock::default(), [false; 64]);
        for index in [0, 20, 40] {
            assert_eq!(take(&mut stock, index, &is_mapped), Taken::Missing);
            assert_eq!(work(&mut stock), []);
        }
    }

    #[test]
    fn oldest_unused_chunks_are_released() {
        let mut stock = Stock::default();
        let mut is_mapped = vec![false; 100];
        for index in [0, 20, 40, 60, 80] {
            is_mapped[index] = true;
            take(&mut stock, index as u32 + 1, &is_mapped);
            is_mapped[index + 1] = true;
            let steps = work(&mut stock);
            let first = index as u32 + 2;
            assert_eq!(steps[..4], provisions(first..first + 4));
            let released = if index == 80 { &[2, 3, 4, 5].map(Step::Release)[..] } else { &[] };
            assert_eq!(&steps[4..], released);
        }
        assert_eq!((stock.len(), drain(&mut stock).len()), (MAX_STOCKED, MAX_STOCKED));
    }

    #[test]
    fn chunk_in_a_step_is_not_taken_twice() {
        let (mut stock, mut is_mapped) = (Stock::default(), [false; 40]);
        is_mapped[0] = true;
        take(&mut stock, 1, &is_mapped);
        let step = stock.begin().unwrap();
        assert_eq!(step, Step::Provision(2));
        assert_eq!(take(&mut stock, 2, &is_mapped), Taken::Missing);
        stock.finish(step, true);
        assert!(!drain(&mut stock).contains(&2), "the guest uses the chunk");

        stock.stocked.extend(10..=10 + MAX_STOCKED as u32);
        stock.wanted.clear();
        let step = stock.begin().unwrap();
        assert_eq!(step, Step::Release(10));
        assert_eq!(take(&mut stock, 10, &is_mapped), Taken::Releasing);
        stock.finish(step, true);
        assert_eq!(take(&mut stock, 10, &is_mapped), Taken::Missing);
    }

    #[test]
    fn full_pool_ends_the_filling_ahead() {
        let (mut stock, mut is_mapped) = (Stock::default(), [false; 8]);
        is_mapped[0] = true;
        take(&mut stock, 1, &is_mapped);
        let step = stock.begin().unwrap();
        stock.finish(step, false);
        assert_eq!((stock.begin(), stock.len()), (None, 0));
        take(&mut stock, 1, &is_mapped);
        assert_eq!((drain(&mut stock), stock.begin()), (Vec::new(), None));
    }
}
