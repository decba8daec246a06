//! Recent reports, and rates that are computed from them.

use foreshore_proto::Report;

use super::Params;
use crate::report::is_by_agent;
use crate::units::PAGE_BYTES;

/// Number of reports that are kept. The number covers more than the window at 20 reports per
/// second.
const LENGTH: usize = 40;

/// Period over which rates are computed. Older reports no longer show the guest's present state.
const WINDOW_MS: u64 = 1_600;

/// Longer period that is used if the agent reports at its slow rate of 1 Hz. The longer period
/// includes the report before the last one.
const SLOW_WINDOW_MS: u64 = 2_500;

/// Shortest time between two reports that are compared. The difference of closer reports is mostly
/// noise.
const MIN_GAP_MS: u64 = 90;

/// Smallest change of used memory that is not noise. Linux counts free pages per CPU and adds the
/// counts up late.
const NOISE_BYTES: u64 = 4 << 20;

/// Largest part of plugged memory that does not become available: a quarter.
const UNAVAILABLE_PART: u64 = 4;

/// Values from one report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sample {
    guest_ms: u64,
    /// True for an agent's report, and false for one made from balloon statistics.
    by_agent: bool,
    total_bytes: u64,
    used_bytes: u64,
    /// Part of the used memory that may still become available, because it is being onlined.
    onlining_bytes: u64,
    some_us: u64,
    swapped_out_pages: u64,
    /// Number of pages that kswapd and allocating tasks have scanned.
    scanned_pages: u64,
    swapped_in_pages: u64,
    refault_pages: u64,
    file_refault_pages: u64,
}

/// Rates and events within the window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Rates {
    /// True if the window contains an earlier report from `signs_from_ms` or later. Without it, no
    /// sign of shortage can be found.
    pub has_signs: bool,
    /// Growth of used memory per second: the highest rate of all periods that end with the newest
    /// report.
    pub fill_rate_bytes_per_s: u64,
    /// Memory that was swapped out within the window.
    pub swapped_out_bytes: u64,
    /// True if tasks waited for memory for at least the configured share of the time.
    pub stalled: bool,
    /// True if evicted pages were read back at the configured rate or faster.
    pub refaulting: bool,
    /// True if evicted anonymous pages were read back at the configured rate or faster.
    pub anon_refaulting: bool,
    /// True if evicted file pages were read back at the configured rate or faster.
    pub files_refaulting: bool,
    /// Rate at which evicted file pages were read back.
    pub file_refault_bytes_per_s: u64,
    /// True if pages were swapped in at the configured refault rate or faster.
    pub swapping_in: bool,
}

/// Recent reports, newest last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct History {
    samples: std::collections::VecDeque<Sample>,
}

impl History {
    /// Adds a report. Its used memory includes `offlining_bytes`, which are being unplugged, and
    /// `onlining_bytes`, which are plugged but not available yet. The older reports are discarded
    /// if the source of the reports has changed, or if a clock or total has restarted.
    pub(super) fn push(&mut self, report: &Report, offlining_bytes: u64, onlining_bytes: u64) {
        let sample = Sample { onlining_bytes, ..Sample::of(report, offlining_bytes) };
        if self.samples.back().is_some_and(|last| !sample.continues(last)) {
            self.samples.clear();
        }
        if self.samples.len() == LENGTH {
            self.samples.pop_front();
        }
        self.samples.push_back(sample);
    }

    /// Returns the rates up to the newest report. Stalls, swapping and refaults before
    /// `signs_from_ms` on the guest's clock are ignored, because memory has been requested for
    /// them.
    pub(super) fn rates(&self, params: &Params, signs_from_ms: u64) -> Rates {
        let Some((newest, older)) = self.newest_and_older() else {
            return Rates::default();
        };
        let fill_rate_bytes_per_s =
            older.clone().map(|sample| newest.fill_rate_since(sample)).max().unwrap_or(0);
        let Some(oldest) = { older }.find(|sample| sample.guest_ms >= signs_from_ms) else {
            return Rates { fill_rate_bytes_per_s, ..Rates::default() };
        };
        let ms = newest.guest_ms - oldest.guest_ms;
        let stalled_us = newest.some_us.saturating_sub(oldest.some_us);
        let per_s = |pages: u64| pages.saturating_mul(PAGE_BYTES).saturating_mul(1000) / ms.max(1);
        let refaulted = newest.refault_pages.saturating_sub(oldest.refault_pages);
        let files_refaulted = newest.file_refault_pages.saturating_sub(oldest.file_refault_pages);
        let swapped_in = newest.swapped_in_pages.saturating_sub(oldest.swapped_in_pages);
        Rates {
            has_signs: true,
            fill_rate_bytes_per_s,
            swapped_out_bytes: newest.swapped_out_since(oldest),
            stalled: stalled_us >= ms.saturating_mul(params.stall_permille),
            refaulting: per_s(refaulted) >= params.refault_bytes_per_s,
            anon_refaulting: per_s(refaulted.saturating_sub(files_refaulted))
                >= params.refault_bytes_per_s,
            files_refaulting: per_s(files_refaulted) >= params.refault_bytes_per_s,
            file_refault_bytes_per_s: per_s(files_refaulted),
            swapping_in: per_s(swapped_in) >= params.refault_bytes_per_s,
        }
    }

    /// Returns the newest report, and the earlier reports that it can be compared with, oldest
    /// first.
    fn newest_and_older(&self) -> Option<(&Sample, impl Iterator<Item = &Sample> + Clone)> {
        let newest = self.samples.back()?;
        // `push` guarantees that reports are ordered by the guest's clock.
        let first_within =
            |ms: u64| self.samples.partition_point(|sample| newest.guest_ms - sample.guest_ms > ms);
        let end =
            self.samples.partition_point(|sample| newest.guest_ms - sample.guest_ms >= MIN_GAP_MS);
        // If no earlier report is within the window, the window is extended to the previous report.
        let begin = match first_within(WINDOW_MS) {
            begin if begin < end => begin,
            _ => first_within(SLOW_WINDOW_MS).min(end),
        };
        let older = self.samples.range(begin..end);
        Some((newest, older))
    }
}

impl Sample {
    fn of(report: &Report, offlining_bytes: u64) -> Self {
        let (memory, counters) = (report.memory(), report.counters());
        Sample {
            guest_ms: report.monotonic_ms(),
            by_agent: is_by_agent(report),
            total_bytes: memory.total_bytes,
            used_bytes: used_bytes(report).saturating_sub(offlining_bytes),
            onlining_bytes: 0,
            some_us: report.stall().some_us,
            swapped_out_pages: counters.pswpout,
            scanned_pages: counters.pgscan_kswapd.saturating_add(counters.pgscan_direct),
            swapped_in_pages: counters.pswpin,
            refault_pages: counters
                .workingset_refault_anon
                .saturating_add(counters.workingset_refault_file),
            file_refault_pages: counters.workingset_refault_file,
        }
    }

    /// Returns true if the totals of `self` continue those of `last`. The source must be the same,
    /// because reports made from balloon statistics have no refaults and count stalls differently.
    fn continues(&self, last: &Sample) -> bool {
        let totals = |sample: &Sample| {
            [
                sample.guest_ms,
                sample.some_us,
                sample.swapped_out_pages,
                sample.scanned_pages,
                sample.swapped_in_pages,
                sample.refault_pages,
                sample.file_refault_pages,
            ]
        };
        let grow = totals(last).into_iter().zip(totals(self)).all(|(before, now)| before <= now);
        grow && last.by_agent == self.by_agent
    }

    /// Memory that was swapped out because the guest was short of memory. Such swapping scans at
    /// least as many pages as it swaps. If a cgroup's own limit causes the swapping, Linux does not
    /// count the pages as scanned (mm/vmscan.c, shrink_inactive_list: cgroup_reclaim). Balloon
    /// statistics do not always contain the number of scanned pages.
    fn swapped_out_since(&self, older: &Sample) -> u64 {
        let pages = self.swapped_out_pages.saturating_sub(older.swapped_out_pages);
        let scanned_pages = self.scanned_pages.saturating_sub(older.scanned_pages);
        let pages = if self.by_agent { pages.min(scanned_pages) } else { pages };
        pages.saturating_mul(PAGE_BYTES)
    }

    fn fill_rate_since(&self, older: &Sample) -> u64 {
        // Memory that was swapped out in the meantime was also filled.
        let swapped = self.swapped_out_since(older);
        // Part of the memory plugged in the meantime did not become available, because page
        // descriptors, watermarks and the kernel's reserve occupy it. This part does not count as
        // fill.
        let unavailable_bytes =
            self.total_bytes.saturating_sub(older.total_bytes) / UNAVAILABLE_PART;
        // Memory that was being onlined counts as used in the older report. The part that the
        // kernel keeps remains used in the newer report. It counts as fill in neither report.
        let used_bytes = self.used_bytes.saturating_sub(self.onlining_bytes);
        let increase_bytes = used_bytes
            .saturating_add(swapped)
            .saturating_sub(older.used_bytes.saturating_add(unavailable_bytes));
        if increase_bytes < NOISE_BYTES {
            return 0;
        }
        increase_bytes.saturating_mul(1000) / (self.guest_ms - older.guest_ms).max(1)
    }
}

/// Used memory. Plugging memory changes the available memory, but not the used memory.
pub(super) fn used_bytes(report: &Report) -> u64 {
    unprotected_bytes(report).saturating_sub(report.memory().available_bytes)
}

/// Total memory without the kernel's reserve, which is neither available nor used. The reserve
/// changes abruptly when the agent changes a ratio.
pub(super) fn unprotected_bytes(report: &Report) -> u64 {
    let pages = report.zones().iter().map(|zone| zone.protected_pages.unwrap_or(0));
    let protected_bytes = pages.fold(0u64, u64::saturating_add).saturating_mul(PAGE_BYTES);
    report.memory().total_bytes.saturating_sub(protected_bytes)
}
