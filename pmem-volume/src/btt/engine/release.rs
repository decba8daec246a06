//! Release of units without live blocks, which gives space of a thin volume back to its pool.
//!
//! 1. Take units from the queue. Omit those in which an unwritten sector has data. Unlike other
//!    sectors, it would read as zeros after the release.
//! 2. Claim the units, so that no writer stores to them.
//! 3. Release them. The media waits for readers that have found one of their blocks in the map
//!    before. A reader announces its block before it accesses the media, so that either the release
//!    sees the announcement, or the reader finds the hole.
//! 4. End the release. Writers that have waited allocate new space.
//!
//! Map entries of discarded sectors still name the released blocks, and lanes may own them. Both
//! are allowed in a hole. If a change of a map entry is lost in a crash after the release, the
//! sector also reads as zeros. A lost change of an exchange is redone.

use std::ops::Range;

use super::arena::Arena;
use super::live_blocks::LiveBlocks;
use super::map::is_unwritten;
use super::{BttError, Common};
use crate::btt::map_reader::MapReader;
use crate::media::Media;

/// Maximum number of units that are released together. Their owners become durable together.
const BATCH_UNITS: u64 = 128;

impl Arena {
    /// Releases the queued units, as far as the budget allows.
    pub(super) fn release_unused(&self, common: &Common<impl Media>) -> Result<(), BttError> {
        let Some(live) = self.live.as_deref() else { return Ok(()) };
        let mut left = live.queued() as u64;
        if left == 0 {
            return Ok(());
        }
        let _locked = live.lock_for_release();
        // Units that are queued in the meantime wait for the next discard.
        while left > 0 {
            let now = common.epoch.elapsed();
            let allowed = common.locked_budget().take(left.min(BATCH_UNITS), now);
            let units = live.take_queued(allowed as usize);
            let taken = units.len() as u64;
            let released = self.release_units(common, live, units)?;
            common.locked_budget().give_back(allowed - released);
            if taken == 0 {
                break;
            }
            left = left.saturating_sub(taken);
        }
        Ok(())
    }

    /// Releases units from the queue. Returns the number of those that had no live blocks.
    fn release_units(
        &self,
        common: &Common<impl Media>,
        live: &LiveBlocks,
        mut units: Vec<u32>,
    ) -> Result<u64, BttError> {
        units.retain(|unit| {
            !self.has_unwritten_data(&common.space, live.range_of(*unit)) && live.claim(*unit)
        });
        if units.is_empty() {
            return Ok(0);
        }
        units.sort_unstable();
        let ranges: Vec<_> = units.iter().map(|unit| live.range_of(*unit)).collect();
        let before = u64::from(self.info.block_bytes) - 1;
        let is_read = |unit: &Range<u64>| {
            // A block that ends in the unit begins before it.
            common.readers.is_announced(unit.start.saturating_sub(before)..unit.end)
        };
        let kept = common.space.release(&ranges, &is_read);
        for (unit, range) in units.iter().zip(&ranges) {
            live.end_release(*unit, kept.as_ref().is_ok_and(|kept| !kept.contains(range)));
        }
        Ok((units.len() - self.latch(kept)?.len()) as u64)
    }

    /// Returns true if an unwritten sector may have data in a range of blocks. A sector never
    /// becomes unwritten again, so the result remains valid while no unit becomes a hole.
    pub(super) fn has_unwritten_data(&self, space: &impl Media, range: Range<u64>) -> bool {
        let block_bytes = u64::from(self.info.block_bytes);
        let first = (range.start - self.info.data_at) / block_bytes;
        let end = (range.end - self.info.data_at).div_ceil(block_bytes);
        let [first, end] = [first, end].map(|block| block.min(u64::from(self.info.sectors)) as u32);
        let mut found = false;
        let mut add = |_| {
            found = true;
            Ok(())
        };
        let mut reader = MapReader::new(space, &self.info, first..end);
        while let Some(piece) = reader.read_next() {
            let Ok(piece) = piece else { return true };
            let entries: Vec<(u32, u32)> = piece.iter().collect();
            let runs = entries.chunk_by(|a, b| is_unwritten(a.1) == is_unwritten(b.1));
            for run in runs.filter(|run| is_unwritten(run[0].1)) {
                let sectors = run[0].0..run[0].0 + run.len() as u32;
                if self.add_nonzero(space, sectors, &mut add).is_err() {
                    return true;
                }
            }
        }
        found
    }
}
