//! Has the host's pages ready for a driver that zeroes memory before it unplugs it. Pure: it
//! decides, others do.
//!
//! With init_on_alloc, which distributions' kernels have on, Linux writes zeros to every page of a
//! block that it isolates to be unplugged (alloc_contig_range). Where the guest has never used the
//! block, the host must first find, and zero, a page for each fault: more than half of the time
//! that the unplug takes, all of it spent by the vCPU. Linux unplugs from the highest memory block
//! down, so the next run is known, and another CPU can provide its pages meanwhile.
//!
//! Whether a driver does zero is seen, not assumed. Of each run that is made ready one block that
//! has no page, the probe, is left without one: if it has one when the run is unplugged, moments
//! later, the driver has written to it. Only for the first run, which has no probe, all blocks
//! having pages must do. So a driver that does not zero costs the host the untouched rest of one
//! run, once for each time that its memory shrinks.

use std::ops::Range;

/// What is made ready in one go: requests that come meanwhile wait for it.
const STEP_BLOCKS: u64 = 2;
/// Linux's largest memory block: the driver asks for no longer run of its own accord.
const RUN_MAX_BYTES: u64 = 2 << 30;

/// The run that is expected to be unplugged next. Offsets count from the region's start.
#[derive(Debug)]
pub(super) struct ZeroAhead {
    block_bytes: u64,
    /// What is left to be made ready.
    left: Range<u64>,
    /// The block that shows whether the driver zeroes, in the run that was made ready last.
    probe: Option<u64>,
}

impl ZeroAhead {
    pub(super) fn new(block_bytes: u64) -> Self {
        Self { block_bytes, left: 0..0, probe: None }
    }

    /// Whether the driver, which asks for `run` to be unplugged, has zeroed it. `populated` tells
    /// of each block of a run whether its first page is there; it takes a system call, and so
    /// it is asked once.
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

    /// Plans for the run that lies below `run`, which has been unplugged after it had been zeroed.
    /// `surplus_bytes` is what is still plugged beyond what is requested.
    pub(super) fn expect_below(
        &mut self,
        run: &Range<u64>,
        surplus_bytes: u64,
        populated: impl FnOnce(&Range<u64>, u64) -> Vec<bool>,
    ) {
        let len = (run.end - run.start).min(surplus_bytes).min(run.start).min(RUN_MAX_BYTES);
        let below = run.start - len..run.start;
        // Without a block that has no page there is nothing to make ready.
        let missing = populated(&below, self.block_bytes).iter().position(|populated| !populated);
        self.probe = missing.map(|block| below.start + block as u64 * self.block_bytes);
        self.left = self.probe.map_or(0..0, |probe| probe + self.block_bytes..below.end);
    }

    /// What to make ready now.
    pub(super) fn next(&mut self) -> Option<Range<u64>> {
        let end = self.left.end.min(self.left.start + STEP_BLOCKS * self.block_bytes);
        let step = self.left.start..end;
        self.left.start = end;
        (!step.is_empty()).then_some(step)
    }

    /// Makes nothing more ready: the driver does something else. What the probe shows still counts.
    pub(super) fn pause(&mut self) {
        self.left = 0..0;
    }

    pub(super) fn forget(&mut self) {
        self.pause();
        self.probe = None;
    }

    /// Whether there is more to make ready.
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

    /// Whether the blocks of a run are populated, by a function of their offsets.
    fn of(has_page: impl Fn(u64) -> bool) -> impl FnOnce(&Range<u64>, u64) -> Vec<bool> {
        move |run, block_bytes| run.clone().step_by(block_bytes as usize).map(has_page).collect()
    }

    fn nowhere(run: &Range<u64>, block_bytes: u64) -> Vec<bool> {
        of(|_| false)(run, block_bytes)
    }

    #[test]
    fn the_run_below_is_made_ready_but_for_the_probe() {
        let mut ahead = ZeroAhead::new(BLOCK);
        assert!(!ahead.is_busy() && ahead.next().is_none());
        ahead.expect_below(&run(16, 22), PLENTY, nowhere);
        assert!(ahead.is_busy());
        assert_eq!(steps(&mut ahead), [(11, 13), (13, 15), (15, 16)]);
        assert!(!ahead.is_busy());
        // Of a run that was used in part, what lies above the first block that was not.
        ahead.expect_below(&run(16, 22), PLENTY, of(|block| block < 13 * BLOCK));
        assert_eq!(steps(&mut ahead), [(14, 16)]);
        ahead.expect_below(&run(16, 22), PLENTY, of(|_| true));
        assert_eq!(steps(&mut ahead), []);
    }

    #[test]
    fn the_probe_tells_whether_a_driver_zeroes() {
        let mut ahead = ZeroAhead::new(BLOCK);
        ahead.expect_below(&run(16, 22), PLENTY, of(|block| block == 10 * BLOCK));
        ahead.pause();
        // All that was made ready has pages, and what the guest used has; the probe, block 11, has
        // one if it was zeroed.
        assert!(!ahead.was_zeroed(&run(10, 16), of(|block| block != 11 * BLOCK)));
        assert!(ahead.was_zeroed(&run(10, 16), of(|_| true)));
    }

    #[test]
    fn without_a_probe_every_block_must_have_a_page() {
        let mut ahead = ZeroAhead::new(BLOCK);
        assert!(ahead.was_zeroed(&run(10, 16), of(|_| true)));
        assert!(!ahead.was_zeroed(&run(10, 16), of(|block| block != 15 * BLOCK)));
        // One in another run says nothing about this one, nor does one that is forgotten.
        ahead.expect_below(&run(6, 8), PLENTY, nowhere);
        assert!(!ahead.was_zeroed(&run(10, 16), of(|block| block != 15 * BLOCK)));
        ahead.forget();
        assert!(!ahead.was_zeroed(&run(4, 6), of(|block| block != 5 * BLOCK)) && !ahead.is_busy());
    }

    #[test]
    fn no_more_is_made_ready_than_is_to_go() {
        let mut ahead = ZeroAhead::new(BLOCK);
        ahead.expect_below(&run(16, 22), 3 * BLOCK, nowhere);
        assert_eq!(steps(&mut ahead), [(14, 16)]);
        for surplus_bytes in [BLOCK, 0] {
            ahead.expect_below(&run(16, 22), surplus_bytes, nowhere);
            assert_eq!(steps(&mut ahead), []);
        }
        // At the region's start there is no room for a whole run.
        ahead.expect_below(&run(4, 10), PLENTY, nowhere);
        assert_eq!(steps(&mut ahead), [(1, 3), (3, 4)]);
        ahead.expect_below(&run(0, 6), PLENTY, nowhere);
        assert_eq!(steps(&mut ahead), []);
        ahead.expect_below(&run(5000, 9000), u64::MAX, nowhere);
        assert_eq!(ahead.next(), Some(run(5000 - 1024 + 1, 5000 - 1024 + 3)));
    }
}
