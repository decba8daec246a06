//! Memory that a report counts in the guest's total and not yet in what is free.
//!
//! Linux onlines a block in isolated pageblocks: its pages are managed, and in the total, one after the other
//! (mm/memory_hotplug.c, online_pages_range), but free pages of an isolated pageblock are not counted as free
//! (mm/page_alloc.c, account_freepages) before all of the block has come (undo_isolate_page_range). A report from in
//! between looks as if the block had been used up; so does one whose figures were read on both sides of that.

use crate::TimeMs;

/// For so long after the first report that has it in the total: at the fast rate two reports. What is not free by then
/// has been filled.
const ARRIVING_MS: u64 = 100;

/// What has come into the total and has not been seen free.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Arriving {
    /// The total and what was free, in the last report.
    last: Option<(u64, u64)>,
    /// Oldest first, each with the time of the report that had it first.
    parts: Vec<(TimeMs, u64)>,
}

impl Arriving {
    /// Takes a report, and says how much of `total_bytes` may yet become free.
    pub fn learn(&mut self, total_bytes: u64, free_bytes: u64, now: TimeMs) -> u64 {
        let (last_total, last_free) = self.last.unwrap_or((total_bytes, free_bytes));
        self.last = Some((total_bytes, free_bytes));
        self.parts.retain(|(since, _)| now.since(*since) < ARRIVING_MS);
        let came_bytes = total_bytes.saturating_sub(last_total);
        if came_bytes > 0 {
            match self.parts.last_mut() {
                // No more parts than there are milliseconds, however often a guest reports.
                Some((since, bytes)) if *since == now => *bytes = bytes.saturating_add(came_bytes),
                _ => self.parts.push((now, came_bytes)),
            }
        }
        let mut freed_bytes = free_bytes.saturating_sub(last_free);
        for (_, bytes) in &mut self.parts {
            let seen_bytes = freed_bytes.min(*bytes);
            *bytes -= seen_bytes;
            freed_bytes -= seen_bytes;
        }
        self.parts.retain(|(_, bytes)| *bytes > 0);
        self.parts.iter().fold(0u64, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is said of reports at these times, with these totals and free sizes.
    fn arriving(reports: &[(u64, u64, u64)]) -> Vec<u64> {
        let mut arriving = Arriving::default();
        let learn = |(at, total, free): &(u64, u64, u64)| arriving.learn(*total, *free, TimeMs(*at));
        reports.iter().map(learn).collect()
    }

    #[test]
    fn what_a_guest_has_at_first_is_not_arriving() {
        assert_eq!(arriving(&[(1_000, 500, 30), (1_050, 500, 30)]), [0, 0]);
    }

    #[test]
    fn a_block_is_arriving_until_it_is_free() {
        let reports = [(0, 500, 30), (50, 564, 30), (99, 628, 20), (100, 628, 148), (150, 628, 148)];
        assert_eq!(arriving(&reports), [0, 64, 128, 0, 0]);
        assert_eq!(arriving(&[(0, 500, 30), (50, 628, 158)]), [0, 0], "free at once");
        assert_eq!(arriving(&[(0, 500, 30), (50, 628, 130)]), [0, 28], "some of it");
    }

    #[test]
    fn a_block_that_does_not_become_free_has_been_filled() {
        let reports = [(0, 500, 30), (50, 628, 30), (149, 628, 30), (150, 628, 30)];
        assert_eq!(arriving(&reports), [0, 128, 128, 0]);
        assert_eq!(arriving(&[(0, 500, 30), (1_000, 628, 30), (2_000, 628, 30)]), [0, 128, 0]);
        // Each block has its own time: those that follow do not lengthen it.
        let reports = [(0, 500, 30), (50, 628, 30), (100, 756, 30), (150, 884, 30), (200, 884, 30)];
        assert_eq!(arriving(&reports), [0, 128, 256, 256, 128]);
    }
}
