//! Memory that a report includes in the guest's total but not in free memory yet.
//!
//! While Linux onlines a block, its pageblocks are isolated. Pages become managed one after the
//! other, and are then part of the total (mm/memory_hotplug.c, online_pages_range). However, free
//! pages of an isolated pageblock do not count as free (mm/page_alloc.c, account_freepages) until
//! the whole block is online (undo_isolate_page_range). In a report made in between, the block
//! seems to be used up. Memory also seems to be used up if some values of a report were read before
//! that time and others after it.

use crate::TimeMs;

/// Minimum time and number of reports since a block first appeared in the total. After both have
/// passed, the block counts as used unless it is free.
const ONLINING_MS: u64 = 100;
const ONLINING_REPORTS: u32 = 2;

/// Time after which a block counts as used even if there were few reports, because a guest that is
/// short of memory should not wait longer.
const MAX_ONLINING_MS: u64 = 500;

/// Time between two reports after which memory has had enough time to become free. Without this
/// limit, a guest with slow reports would wait for one more report. The value exceeds 250 ms,
/// because an agent that reports at this interval may wake late. An agent does so if it has no
/// reason for fast reports.
const GAP_MS: u64 = 300;

/// Memory that is part of the total but has not been free yet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct OnliningMemory {
    last: Option<PreviousReport>,
    /// Parts of that memory, oldest first.
    parts: Vec<Part>,
}

/// Values of the last report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PreviousReport {
    at: TimeMs,
    total_bytes: u64,
    free_bytes: u64,
}

/// Memory that appeared in the total in the same report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    since: TimeMs,
    /// Number of reports in which this memory was part of the total.
    reports: u32,
    /// Part of this memory that has not been free yet.
    unfreed_bytes: u64,
}

impl Part {
    fn is_expired(&self, now: TimeMs) -> bool {
        let ms = now.since(self.since);
        (ms >= ONLINING_MS && self.reports > ONLINING_REPORTS) || ms >= MAX_ONLINING_MS
    }
}

impl OnliningMemory {
    /// Updates the state from a report. Returns the part of `total_bytes` that may still become
    /// free.
    pub(super) fn learn(&mut self, total_bytes: u64, free_bytes: u64, now: TimeMs) -> u64 {
        let report = PreviousReport { at: now, total_bytes, free_bytes };
        let last = self.last.replace(report).unwrap_or(report);
        for part in &mut self.parts {
            part.reports = part.reports.saturating_add(1);
        }
        self.parts.retain(|part| !part.is_expired(now));
        let freed_bytes = self.count_freed(free_bytes.saturating_sub(last.free_bytes));
        let added_bytes = total_bytes.saturating_sub(last.total_bytes);
        let unfreed_bytes = added_bytes.saturating_sub(freed_bytes);
        // All pages of a block become free at the same time. If most of a block is free, the rest
        // is already in use.
        if unfreed_bytes > added_bytes / 2 && now.since(last.at) <= GAP_MS {
            match self.parts.last_mut() {
                // Fast reports must not create more than one part per millisecond.
                Some(part) if part.since == now => {
                    part.unfreed_bytes = part.unfreed_bytes.saturating_add(unfreed_bytes);
                }
                _ => self.parts.push(Part { since: now, reports: 1, unfreed_bytes }),
            }
        }
        self.bytes()
    }

    /// Returns the memory that may still become free after the last report.
    pub(super) fn bytes(&self) -> u64 {
        self.parts.iter().fold(0u64, |sum, part| sum.saturating_add(part.unfreed_bytes))
    }

    /// Counts `freed_bytes` as free memory of the oldest parts first. Returns the remainder.
    fn count_freed(&mut self, mut freed_bytes: u64) -> u64 {
        for part in &mut self.parts {
            let part_freed_bytes = freed_bytes.min(part.unfreed_bytes);
            part.unfreed_bytes -= part_freed_bytes;
            freed_bytes -= part_freed_bytes;
        }
        self.parts.retain(|part| part.unfreed_bytes > 0);
        freed_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Processes reports with these times, totals and free sizes. Returns each result.
    fn onlining(reports: &[(u64, u64, u64)]) -> Vec<u64> {
        let mut onlining = OnliningMemory::default();
        let learn =
            |(at, total, free): &(u64, u64, u64)| onlining.learn(*total, *free, TimeMs(*at));
        reports.iter().map(learn).collect()
    }

    #[test]
    fn memory_in_the_first_report_is_not_onlining() {
        assert_eq!(onlining(&[(1_000, 500, 30), (1_050, 500, 30)]), [0, 0]);
    }

    #[test]
    fn block_is_onlining_until_it_is_free() {
        let reports =
            [(0, 500, 30), (50, 564, 30), (99, 628, 20), (100, 628, 148), (150, 628, 148)];
        assert_eq!(onlining(&reports), [0, 64, 128, 0, 0]);
        assert_eq!(onlining(&[(0, 500, 30), (50, 628, 158)]), [0, 0], "free at once");
        assert_eq!(
            onlining(&[(0, 500, 30), (50, 628, 95), (99, 628, 140)]),
            [0, 0, 0],
            "most of it"
        );
        assert_eq!(
            onlining(&[(0, 500, 30), (50, 756, 90), (99, 756, 200)]),
            [0, 196, 86],
            "one of two, in part"
        );
    }

    #[test]
    fn block_that_does_not_become_free_counts_as_used() {
        let reports = [(0, 500, 30), (50, 628, 30), (149, 628, 30), (150, 628, 30)];
        assert_eq!(onlining(&reports), [0, 128, 128, 0]);
        // With a report every 5 ms, the minimum time is reached last. With slower reports, the
        // minimum number of reports is reached last.
        let reports: Vec<_> =
            (0..=21).map(|at| (at * 5, if at > 0 { 628 } else { 500 }, 30)).collect();
        let fast = onlining(&reports);
        assert_eq!((fast[0], &fast[1..21], fast[21]), (0, [128; 20].as_slice(), 0));
        for ms in [50, 100, 200, 249] {
            let at = |reports: u64| (reports * ms, if reports > 0 { 628 } else { 500 }, 30);
            assert_eq!(onlining(&[0, 1, 2, 3].map(at)), [0, 128, 128, 0], "each {ms} ms");
        }
        // After half a second, the block counts as used in any case.
        assert_eq!(onlining(&[(0, 500, 30), (50, 628, 30), (549, 628, 30)]), [0, 128, 128]);
        assert_eq!(onlining(&[(0, 500, 30), (50, 628, 30), (550, 628, 30)]), [0, 128, 0]);
        // Each block has its own time limit. Blocks that arrive later do not extend it.
        let reports = [(0, 500, 30), (50, 628, 30), (100, 756, 30), (150, 884, 30), (200, 884, 30)];
        assert_eq!(onlining(&reports), [0, 128, 256, 256, 128]);
    }

    #[test]
    fn memory_that_arrives_between_distant_reports_is_not_onlining() {
        assert_eq!(onlining(&[(0, 500, 30), (300, 628, 30), (601, 756, 30)]), [0, 128, 128]);
        assert_eq!(onlining(&[(0, 500, 30), (1_000, 628, 30), (2_000, 756, 30)]), [0, 0, 0]);
    }

    #[test]
    fn steady_pace_of_agent_is_not_a_gap() {
        for ms in 250..=260 {
            let reports = [(0, 500, 30), (ms, 628, 30), (2 * ms, 628, 158)];
            assert_eq!(onlining(&reports), [0, 128, 0], "each {ms} ms");
        }
    }

    /// The total rises and falls, and grows overall, but nothing becomes free.
    #[test]
    fn no_memory_is_onlining_for_long() {
        for ms in [1, 20, 50, 100, 250, 1_000] {
            let swings = (0..200).map(|at| (at * ms, 500 + at % 2 * 128, 30));
            let mut reports: Vec<_> = swings.collect();
            let last = (200 * ms, 628, 30);
            reports.extend([last, (200 * ms + MAX_ONLINING_MS, 628, 30)]);
            assert_eq!(onlining(&reports).last(), Some(&0), "each {ms} ms");
        }
    }
}
