//! The last reports, and rates between them.

use foreshore_proto::Report;

use super::Params;
use crate::report::is_by_agent;
use crate::units::PAGE_BYTES;

/// Number of reports that are kept. Enough for more than the window at 20 reports per second.
const LENGTH: usize = 40;

/// Window of the rates. Older reports do not show the present.
const WINDOW_MS: u64 = 1_600;

/// Extended window for reports at the rest rate of 1 Hz, in which the report before the last one is
/// used.
const STRETCH_MS: u64 = 2_500;

/// Shortest distance of reports to compare, because closer ones show noise.
const MIN_GAP_MS: u64 = 90;

/// Smallest change of used memory that is not noise, because Linux counts free pages per CPU and
/// sums them up late.
const NOISE_BYTES: u64 = 4 << 20;

/// Largest part of plugged memory that does not become available: 1/4.
const KEPT_PART: u64 = 4;

/// Values of a report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sample {
    guest_ms: u64,
    /// True for a report of an agent, false for balloon statistics.
    by_agent: bool,
    total_bytes: u64,
    used_bytes: u64,
    /// Part of it that may still become available.
    onlining_bytes: u64,
    some_us: u64,
    swapped_out_pages: u64,
    /// Pages that kswapd and allocating tasks have scanned.
    scanned_pages: u64,
    swapped_in_pages: u64,
    refault_pages: u64,
    file_refault_pages: u64,
}

/// Rates and events in the window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Rates {
    /// The window has a period in which signs of shortage count.
    pub watched: bool,
    /// Growth of used memory: the highest rate of all periods that end now.
    pub fill_bytes_per_s: u64,
    /// Bytes swapped out.
    pub swapped_out_bytes: u64,
    /// Tasks waited for at least the configured share of the time.
    pub stalled: bool,
    /// Evicted pages returned at the configured rate.
    pub refaulting: bool,
    /// Evicted anonymous pages returned at the configured rate.
    pub anon_refaulting: bool,
    /// Evicted pages of files returned at the configured rate.
    pub files_refaulting: bool,
    /// Rate of returning pages of files.
    pub file_refault_bytes_per_s: u64,
    /// Pages were swapped in at the configured refault rate.
    pub swapping_in: bool,
}

/// The last reports, newest last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct History {
    samples: std::collections::VecDeque<Sample>,
}

impl History {
    /// Adds a report. Its used memory includes `offlining_bytes`, which are about to be unplugged,
    /// and `onlining_bytes`, which are plugged but not available yet. A report from another
    /// reporter, or with a clock or totals that have restarted, discards the older reports.
    pub(super) fn push(&mut self, report: &Report, offlining_bytes: u64, onlining_bytes: u64) {
        let sample = Sample { onlining_bytes, ..Sample::of(report, offlining_bytes) };
        if self.samples.back().is_some_and(|last| !sample.goes_on_from(last)) {
            self.samples.clear();
        }
        if self.samples.len() == LENGTH {
            self.samples.pop_front();
        }
        self.samples.push_back(sample);
    }

    /// Returns the rates up to the newest report. Stalls, swapping and refaults count from
    /// `signs_from_ms` on the guest's clock, because earlier ones have been answered.
    pub(super) fn rates(&self, params: &Params, signs_from_ms: u64) -> Rates {
        let Some((newest, older)) = self.newest_and_older() else {
            return Rates::default();
        };
        let fill_bytes_per_s =
            older.clone().map(|sample| newest.fill_since(sample)).max().unwrap_or(0);
        let Some(oldest) = { older }.find(|sample| sample.guest_ms >= signs_from_ms) else {
            return Rates { fill_bytes_per_s, ..Rates::default() };
        };
        let ms = newest.guest_ms - oldest.guest_ms;
        let stalled_us = newest.some_us.saturating_sub(oldest.some_us);
        let per_s = |pages: u64| pages.saturating_mul(PAGE_BYTES).saturating_mul(1000) / ms.max(1);
        let refaulted = newest.refault_pages.saturating_sub(oldest.refault_pages);
        let files_refaulted = newest.file_refault_pages.saturating_sub(oldest.file_refault_pages);
        let swapped_in = newest.swapped_in_pages.saturating_sub(oldest.swapped_in_pages);
        Rates {
            watched: true,
            fill_bytes_per_s,
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

    /// Returns the newest report and the earlier ones that it can be compared with, oldest first.
    fn newest_and_older(&self) -> Option<(&Sample, impl Iterator<Item = &Sample> + Clone)> {
        let newest = self.samples.back()?;
        // `push` keeps the order of the guest's clock.
        let first_within =
            |ms: u64| self.samples.partition_point(|sample| newest.guest_ms - sample.guest_ms > ms);
        let end =
            self.samples.partition_point(|sample| newest.guest_ms - sample.guest_ms >= MIN_GAP_MS);
        // At rest the window is empty, so it is extended to the report before.
        let begin = match first_within(WINDOW_MS) {
            begin if begin < end => begin,
            _ => first_within(STRETCH_MS).min(end),
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

    /// Returns true if the totals continue those of `last`. Reports made from balloon statistics
    /// have no refaults, and count stalls in another way.
    fn goes_on_from(&self, last: &Sample) -> bool {
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

    /// Bytes swapped out for the guest's lack of memory. Such swapping scans at least as many
    /// pages. If a cgroup's own limit causes swapping, Linux does not count the pages as scanned
    /// (mm/vmscan.c, shrink_inactive_list: cgroup_reclaim). Balloon statistics do not always have
    /// this count.
    fn swapped_out_since(&self, older: &Sample) -> u64 {
        let pages = self.swapped_out_pages.saturating_sub(older.swapped_out_pages);
        let looked_at = self.scanned_pages.saturating_sub(older.scanned_pages);
        let pages = if self.by_agent { pages.min(looked_at) } else { pages };
        pages.saturating_mul(PAGE_BYTES)
    }

    fn fill_since(&self, older: &Sample) -> u64 {
        // Memory that was swapped out in the meantime was filled as well.
        let swapped = self.swapped_out_since(older);
        // Not all memory plugged in the meantime became available: page descriptors, watermarks and
        // the kernel's reserve are no fill.
        let kept = self.total_bytes.saturating_sub(older.total_bytes) / KEPT_PART;
        // The older report counts onlining memory as used. The kernel's part of it stays used, so
        // neither report counts it as fill.
        let used_bytes = self.used_bytes.saturating_sub(self.onlining_bytes);
        let rise = used_bytes
            .saturating_add(swapped)
            .saturating_sub(older.used_bytes.saturating_add(kept));
        if rise < NOISE_BYTES {
            return 0;
        }
        rise.saturating_mul(1000) / (self.guest_ms - older.guest_ms).max(1)
    }
}

/// Memory in use. Plugging changes the available memory and not the used memory.
pub(super) fn used_bytes(report: &Report) -> u64 {
    unprotected_bytes(report).saturating_sub(report.memory().available_bytes)
}

/// Total memory without the kernel's reserve, which is neither available nor used. The size of the
/// reserve jumps when the agent changes a ratio.
pub(super) fn unprotected_bytes(report: &Report) -> u64 {
    let pages = report.zones().iter().map(|zone| zone.protected_pages.unwrap_or(0));
    let protected_bytes = pages.fold(0u64, u64::saturating_add).saturating_mul(PAGE_BYTES);
    report.memory().total_bytes.saturating_sub(protected_bytes)
}
