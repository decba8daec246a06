//! Has the host's pages ready for a driver that zeroes memory before it unplugs it. Pure: it decides, others do.
//!
//! With init_on_alloc, which distributions' kernels have on, Linux writes zeros to every page of a block that it isolates to
//! be unplugged (alloc_contig_range). Where the guest has never used the block, the host must first find, and zero, a page
//! for each fault: more than half of the time that the unplug takes, all of it spent by the vCPU. Linux unplugs from the
//! highest memory block down, so the next run is known, and another CPU can provide its pages meanwhile.
//!
//! Whether a driver does zero is seen, not assumed: the first block of each run is left as it is, and only if it has a page
//! when it is unplugged is the run below it made ready. A driver that does not zero costs the host one run at most.

use std::ops::Range;

/// What is made ready in one go: requests that come meanwhile wait for it.
const STEP_BLOCKS: u64 = 2;

/// The run that is expected to be unplugged next. Offsets count from the region's start.
#[derive(Debug)]
pub(super) struct ZeroAhead {
    block_bytes: u64,
    /// What is left to be made ready.
    left: Range<u64>,
}

impl ZeroAhead {
    pub(super) fn new(block_bytes: u64) -> Self {
        Self { block_bytes, left: 0..0 }
    }

    /// Notes that the run `offset..offset + len` has been unplugged, and whether its first block had a page. `surplus_bytes`
    /// is what is still plugged beyond what is requested.
    pub(super) fn unplugged(&mut self, offset: u64, len: u64, first_had_page: bool, surplus_bytes: u64) {
        let len = len.min(surplus_bytes).min(offset);
        let start = offset - len + self.block_bytes;
        self.left = if first_had_page && start < offset { start..offset } else { 0..0 };
    }

    /// What to make ready now.
    pub(super) fn next(&mut self) -> Option<Range<u64>> {
        let end = self.left.end.min(self.left.start + STEP_BLOCKS * self.block_bytes);
        let step = self.left.start..end;
        self.left.start = end;
        (!step.is_empty()).then_some(step)
    }

    /// Forgets the run: the driver does something else.
    pub(super) fn cancel(&mut self) {
        self.left = 0..0;
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

    fn steps(ahead: &mut ZeroAhead) -> Vec<(u64, u64)> {
        std::iter::from_fn(|| ahead.next()).map(|step| (step.start / BLOCK, step.end / BLOCK)).collect()
    }

    #[test]
    fn the_run_below_is_made_ready_but_for_its_first_block() {
        let mut ahead = ZeroAhead::new(BLOCK);
        assert!(!ahead.is_busy() && ahead.next().is_none());
        ahead.unplugged(16 * BLOCK, 6 * BLOCK, true, 100 * BLOCK);
        assert!(ahead.is_busy());
        assert_eq!(steps(&mut ahead), [(11, 13), (13, 15), (15, 16)]);
        assert!(!ahead.is_busy());
    }

    #[test]
    fn a_driver_that_does_not_zero_gets_nothing() {
        let mut ahead = ZeroAhead::new(BLOCK);
        ahead.unplugged(16 * BLOCK, 6 * BLOCK, false, 100 * BLOCK);
        assert!(!ahead.is_busy());
        ahead.unplugged(16 * BLOCK, 6 * BLOCK, true, 100 * BLOCK);
        ahead.unplugged(10 * BLOCK, 6 * BLOCK, false, 100 * BLOCK);
        assert_eq!(steps(&mut ahead), []);
    }

    #[test]
    fn no_more_is_made_ready_than_is_to_go() {
        let mut ahead = ZeroAhead::new(BLOCK);
        ahead.unplugged(16 * BLOCK, 6 * BLOCK, true, 3 * BLOCK);
        assert_eq!(steps(&mut ahead), [(14, 16)]);
        ahead.unplugged(16 * BLOCK, 6 * BLOCK, true, BLOCK);
        assert_eq!(steps(&mut ahead), []);
        ahead.unplugged(16 * BLOCK, 6 * BLOCK, true, 0);
        assert_eq!(steps(&mut ahead), []);
        // At the region's start there is no room for a whole run.
        ahead.unplugged(4 * BLOCK, 6 * BLOCK, true, 100 * BLOCK);
        assert_eq!(steps(&mut ahead), [(1, 3), (3, 4)]);
        ahead.unplugged(0, 6 * BLOCK, true, 100 * BLOCK);
        assert_eq!(steps(&mut ahead), []);
    }

    #[test]
    fn another_request_cancels_it() {
        let mut ahead = ZeroAhead::new(BLOCK);
        ahead.unplugged(16 * BLOCK, 6 * BLOCK, true, 100 * BLOCK);
        ahead.next();
        ahead.cancel();
        assert_eq!(steps(&mut ahead), []);
    }
}
