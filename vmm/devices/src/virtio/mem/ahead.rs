//! Populates host pages in advance for a driver that zeroes memory before it unplugs the memory.
//! This module only selects the pages. The caller populates them.
//!
//! Before Linux unplugs a block, it isolates the block's pages (alloc_contig_range). With
//! init_on_alloc, which distribution kernels enable, it writes zeros to each of these pages. If the
//! guest has never used the block, each write faults, and the host must allocate and zero a page.
//! The faults take more than half of the time of the unplug, all of it on the vCPU. However, Linux
//! unplugs from the highest memory block downward, so the run of blocks that it unplugs next is
//! known. Another CPU can populate the pages of that run in the meantime.
//!
//! Pages are populated only if the driver is known to zero memory. In each populated run, one block
//! without a page is left unpopulated: the probe. If the probe has a page when the run is
//! unplugged, moments later, the driver has written to it. The first run has no probe, so the
//! driver is assumed to zero only if all blocks of that run have pages. If this assumption is
//! wrong, the host needlessly populates the unused rest of one run each time that the guest's
//! memory shrinks.

use std::ops::Range;

/// Number of blocks to populate in one step. Requests from the driver wait until the step has
/// ended.
const STEP_BLOCKS: u64 = 2;
/// Size of Linux's largest memory block, and therefore of the longest run that is populated in
/// advance.
const RUN_MAX_BYTES: u64 = 2 << 30;

/// State of the run that the driver is expected to unplug next. Offsets are relative to the start
/// of the region.
#[derive(Debug)]
pub(super) struct ZeroAhead {
    block_bytes: u64,
    /// Part of the run that is not populated yet.
    left: Range<u64>,
    /// Block in the last populated run that will have a page only if the driver zeroes memory.
    probe: Option<u64>,
}

impl ZeroAhead {
    pub(super) fn new(block_bytes: u64) -> Self {
        Self { block_bytes, left: 0..0, probe: None }
    }

    /// Returns true if the driver has zeroed `run`, which it is about to unplug. For each block of
    /// a run, `populated` returns true if the block's first page is populated. It is called only
    /// once, because it needs a system call.
    pub(super) fn was_zeroed(
        &self,
        run: &Range<u64>,
        populated: impl FnOnce(&Range<u64>, u64) -> Vec<bool>,
    ) -> bool {
        let telling = match self.probe.filter(|probe| run.contains(probe)) {
            Some(probe) => probe..probe + self.block_bytes,
            None => run.clone(),
        };
        populated(&telling, self.block_bytes).into_iter().all(|populated| populated)
    }

    /// Plans to populate the run below `run`, because `run` was zeroed and unplugged.
    /// `surplus_bytes` is the amount by which the plugged size exceeds the requested size.
    pub(super) fn expect_below(
        &mut self,
        run: &Range<u64>,
        surplus_bytes: u64,
        populated: impl FnOnce(&Range<u64>, u64) -> Vec<bool>,
    ) {
        let len = (run.end - run.start).min(surplus_bytes).min(run.start).min(RUN_MAX_BYTES);
        let below = run.start - len..run.start;
        // If all blocks already have pages, there is nothing to populate.
        let missing = populated(&below, self.block_bytes).iter().position(|populated| !populated);
        self.probe = missing.map(|block| below.start + block as u64 * self.block_bytes);
        self.left = self.probe.map_or(0..0, |probe| probe + self.block_bytes..below.end);
    }

    /// Returns the next range to populate.
    pub(super) fn next(&mut self) -> Option<Range<u64>> {
        let end = self.left.end.min(self.left.start + STEP_BLOCKS * self.block_bytes);
        let step = self.left.start..end;
        self.left.start = end;
        (!step.is_empty()).then_some(step)
    }

    /// Stops populating because the driver has sent another request. The probe remains valid.
    pub(super) fn pause(&mut self) {
        self.left = 0..0;
    }

    pub(super) fn forget(&mut self) {
        self.pause();
        self.probe = None;
    }

    /// Returns true if more ranges remain to be populated.
    pub(super) fn is_busy(&self) -> bool {
        !self.left.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u64 = 2 << 20;
    const PLENTY: u64 = 100 * BLOCK;

    fn run(start: u64, end: u64) -> Range<u64> {
        start * BLOCK..end * BLOCK
    }

    fn steps(ahead: &mut ZeroAhead) -> Vec<(u64, u64)> {
        std::iter::from_fn(|| ahead.next())
            .map(|step| (step.start / BLOCK, step.end / BLOCK))
            .collect()
    }

    /// Creates a `populated` callback from a function that takes the offset of one block.
    fn of(has_page: impl Fn(u64) -> bool) -> impl FnOnce(&Range<u64>, u64) -> Vec<bool> {
        move |run, block_bytes| run.clone().step_by(block_bytes as usize).map(has_page).collect()
    }

    fn nowhere(run: &Range<u64>, block_bytes: u64) -> Vec<bool> {
        of(|_| false)(run, block_bytes)
    }

    #[test]
    fn run_below_is_populated_except_for_the_probe() {
        let mut ahead = ZeroAhead::new(BLOCK);
        assert!(!ahead.is_busy() && ahead.next().is_none());
        ahead.expect_below(&run(16, 22), PLENTY, nowhere);
        assert!(ahead.is_busy());
        assert_eq!(steps(&mut ahead), [(11, 13), (13, 15), (15, 16)]);
        assert!(!ahead.is_busy());
        // If parts of the run are in use, only the blocks above the first unused block are
        // populated.
        ahead.expect_below(&run(16, 22), PLENTY, of(|block| block < 13 * BLOCK));
        assert_eq!(steps(&mut ahead), [(14, 16)]);
        ahead.expect_below(&run(16, 22), PLENTY, of(|_| true));
        assert_eq!(steps(&mut ahead), []);
    }

    #[test]
    fn probe_shows_if_a_driver_zeroes() {
        let mut ahead = ZeroAhead::new(BLOCK);
        ahead.expect_below(&run(16, 22), PLENTY, of(|block| block == 10 * BLOCK));
        ahead.pause();
        // Populated blocks and blocks in use have pages. The probe, block 11, has a page only if
        // the driver has zeroed it.
        assert!(!ahead.was_zeroed(&run(10, 16), of(|block| block != 11 * BLOCK)));
        assert!(ahead.was_zeroed(&run(10, 16), of(|_| true)));
    }

    #[test]
    fn without_a_probe_every_block_must_have_a_page() {
        let mut ahead = ZeroAhead::new(BLOCK);
        assert!(ahead.was_zeroed(&run(10, 16), of(|_| true)));
        assert!(!ahead.was_zeroed(&run(10, 16), of(|block| block != 15 * BLOCK)));
        // A probe in another run or a forgotten probe has no effect on this run.
        ahead.expect_below(&run(6, 8), PLENTY, nowhere);
        assert!(!ahead.was_zeroed(&run(10, 16), of(|block| block != 15 * BLOCK)));
        ahead.forget();
        assert!(!ahead.was_zeroed(&run(4, 6), of(|block| block != 5 * BLOCK)) && !ahead.is_busy());
    }

    #[test]
    fn populated_run_is_limited_to_the_surplus() {
        let mut ahead = ZeroAhead::new(BLOCK);
        ahead.expect_below(&run(16, 22), 3 * BLOCK, nowhere);
        assert_eq!(steps(&mut ahead), [(14, 16)]);
        for surplus_bytes in [BLOCK, 0] {
            ahead.expect_below(&run(16, 22), surplus_bytes, nowhere);
            assert_eq!(steps(&mut ahead), []);
        }
        // The run ends at the start of the region.
        ahead.expect_below(&run(4, 10), PLENTY, nowhere);
        assert_eq!(steps(&mut ahead), [(1, 3), (3, 4)]);
        ahead.expect_below(&run(0, 6), PLENTY, nowhere);
        assert_eq!(steps(&mut ahead), []);
        ahead.expect_below(&run(5000, 9000), u64::MAX, nowhere);
        assert_eq!(ahead.next(), Some(run(5000 - 1024 + 1, 5000 - 1024 + 3)));
    }
}
