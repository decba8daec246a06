//! Makes reports from the virtio-balloon driver's statistics (virtio 1.3, 5.5.6.4) for guests
//! without an agent. Also corrects the reports of guests with a balloon.
//!
//! The driver sends fewer values than an agent. Watermarks are computed as Linux computes them, and
//! stall time is estimated from the driver's counters. docs/reference/balloon.md describes the
//! estimates and their accuracy.

use foreshore_proto::{
    Blocks, Bound, Cause, Counters, Memory, OnlinePolicy, PROTOCOL_VERSION, RawReport, Refusal,
    Report, Stall, Zone, ZoneKind,
};

use crate::TimeMs;
use crate::units::{PAGE_BYTES, scale};

/// Size of one statistic on the wire: a tag of 2 bytes and a value of 8 bytes.
const ENTRY_BYTES: usize = 10;

/// Memory size above which a guest has an additional memory zone, because the memory that does not
/// fit below the 32-bit devices is placed above 4 GiB.
const LOW_MEMORY_BYTES: u64 = 3 << 30;

/// Pages in a huge page. khugepaged keeps several huge pages free.
const PAGEBLOCK_PAGES: u64 = 512;

/// Estimated stall of an allocation that enters direct reclaim. Reclaim scans 32 pages at a time. A
/// few rounds with one or two writes take about this long.
const STALL_US: u64 = 1000;

/// Estimated time to swap in a page from a disk that is at least as fast as an SSD.
const SWAP_IN_US: u64 = 100;

/// Time after which refused sets of statistics are accepted, if they are consistent with each other
/// but not with the last accepted set. By then they are more likely to be true, and the estimator
/// must not refuse true sets forever.
const OVERRIDE_MS: u64 = 3_000;

/// Averaging period of `avg10`.
const AVERAGE_MS: u64 = 10_000;

macro_rules! tags {
    ($($(#[$doc:meta])* $name:ident => $label:literal,)*) => {
        /// Tag of a statistic. The order is that of the tag numbers in the specification.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Tag {
            $($(#[$doc])* $name,)*
        }

        impl Tag {
            /// All tags, in the order of their numbers.
            pub const ALL: [Tag; 16] = [$(Tag::$name,)*];

            /// Returns the statistic's name in errors and metrics.
            pub fn label(self) -> &'static str {
                match self { $(Tag::$name => $label,)* }
            }
        }
    };
}

tags! {
    /// Memory swapped in since boot.
    SwapIn => "swap-in",
    /// Memory swapped out since boot.
    SwapOut => "swap-out",
    /// Faults that waited for I/O.
    MajorFaults => "major-faults",
    /// Faults that did not wait for I/O.
    MinorFaults => "minor-faults",
    /// MemFree.
    Free => "free",
    /// MemTotal.
    Total => "total",
    /// MemAvailable.
    Available => "available",
    /// Page cache, including swap cache and shared memory.
    Caches => "caches",
    /// Huge pages allocated from the pool of hugetlbfs.
    HugetlbAllocations => "hugetlb-allocations",
    /// Failed allocations of huge pages.
    HugetlbFailures => "hugetlb-failures",
    /// Processes killed for lack of memory (this and the following: Linux 6.10 and later).
    OomKills => "oom-kills",
    /// Allocations that entered direct reclaim.
    AllocStalls => "alloc-stalls",
    /// Memory scanned by kswapd.
    AsyncScan => "async-scan",
    /// Memory scanned by allocating tasks.
    DirectScan => "direct-scan",
    /// Memory reclaimed by kswapd.
    AsyncReclaim => "async-reclaim",
    /// Memory reclaimed by allocating tasks.
    DirectReclaim => "direct-reclaim",
}

/// One set of statistics that the device has received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Statistics as the driver sent them.
    pub statistics: Statistics,
    /// Sequence number of the set.
    pub number: u64,
    /// Generation of the driver, which increases when a driver is loaded again.
    pub driver_generation: u64,
}

/// State of a guest's balloon at one point in time, except its sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BalloonState {
    /// Last set of statistics.
    pub sample: Option<Sample>,
    /// Memory in the balloon.
    pub ballooned_bytes: u64,
    /// True if the guest counts the memory in the balloon as used.
    pub is_counted: bool,
}

/// Set of statistics as the driver sent it. Its values are not trusted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    values: [Option<u64>; Tag::ALL.len()],
}

impl Statistics {
    /// Largest size of a set in bytes. Linux sends 16 statistics.
    pub const MAX_BYTES: usize = 64 * ENTRY_BYTES;

    /// Parses the driver's buffer. Returns `None` if it is empty, too large, or contains an
    /// incomplete entry. Tags of later versions are skipped. If a tag occurs twice, the last value
    /// is used.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes.is_empty()
            || bytes.len() > Self::MAX_BYTES
            || !bytes.len().is_multiple_of(ENTRY_BYTES)
        {
            return None;
        }
        let mut statistics = Self::default();
        for entry in bytes.chunks_exact(ENTRY_BYTES) {
            let tag = u16::from_le_bytes([entry[0], entry[1]]);
            let mut value = [0; 8];
            value.copy_from_slice(&entry[2..]);
            if let Some(slot) = statistics.values.get_mut(usize::from(tag)) {
                *slot = Some(u64::from_le_bytes(value));
            }
        }
        Some(statistics)
    }

    /// Returns the value of `tag`.
    pub fn get(&self, tag: Tag) -> Option<u64> {
        self.values[tag as usize]
    }

    /// Returns a copy of this set in which `tag` has another value.
    pub fn with(mut self, tag: Tag, value: u64) -> Self {
        self.values[tag as usize] = Some(value);
        self
    }
}

/// Facts that the host knows about the guest that sends the statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuestFacts {
    /// Generation of the driver. Counters may restart with each generation.
    pub driver_generation: u64,
    /// Largest amount of memory that the guest can have: boot memory and plugged memory.
    pub memory_bytes: u64,
    /// Memory in the balloon.
    pub ballooned_bytes: u64,
    /// True if the guest counts the memory in the balloon as used. Linux does so only with
    /// DEFLATE_ON_OOM.
    pub counts_ballooned: bool,
}

/// Sets of statistics from one driver that are consistent with each other, but not with the last
/// accepted set.
#[derive(Clone, Copy, Debug)]
struct RefusedSequence {
    driver_generation: u64,
    last: Statistics,
    since: TimeMs,
}

/// Makes reports from balloon statistics.
///
/// The last accepted set bounds the counters of the next one. To prevent a false set from doing so
/// forever, a long enough sequence of refused sets overrides it, as for an agent's reports
/// ([`crate::Intake`]).
#[derive(Clone, Debug, Default)]
pub struct Estimator {
    last: Option<(u64, Statistics)>,
    /// Refused sets since the last accepted one, if they are consistent with each other.
    refused: Option<RefusedSequence>,
    seq: u64,
    /// Estimated clock of the guest, and the host's time of that estimate. Statistics contain no
    /// time. The clock therefore continues from the last report of an agent, if any, so that
    /// policies see a single clock.
    clock: Option<(u64, TimeMs)>,
    stall: Stall,
    /// How the guest onlines plugged memory, from the last report of an agent. The guest keeps this
    /// setting after the agent has stopped.
    online_policy: OnlinePolicy,
}

impl Estimator {
    /// Continues the clock and the online policy from an agent's report.
    pub fn continue_from_agent(&mut self, report: &Report, now: TimeMs) {
        self.clock = Some((report.monotonic_ms(), now));
        self.stall = *report.stall();
        self.online_policy = report.blocks().online_policy;
        (self.last, self.refused) = (None, None);
    }

    /// Returns a report made from `statistics`. A refused set does not affect the check of the next
    /// set, unless consistent sets have been refused for `OVERRIDE_MS`.
    pub fn report(
        &mut self,
        statistics: &Statistics,
        facts: GuestFacts,
        now: TimeMs,
    ) -> Result<Report, Refusal> {
        let need = |tag: Tag| {
            let missing =
                || Refusal::WrongShape { reason: format!("no statistic {}", tag.label()) };
            statistics.get(tag).ok_or_else(missing)
        };
        let (total, free) = (need(Tag::Total)?, need(Tag::Free)?);
        if total > facts.memory_bytes {
            let bound = Bound::AtMost(facts.memory_bytes);
            return Err(Refusal::OutOfRange { field: "total_bytes", value: total, bound });
        }
        let mut before = self
            .last
            .filter(|(life, _)| *life == facts.driver_generation)
            .map(|(_, before)| before);
        if let Some(Err(refusal)) = before.map(|before| check_order(&before, statistics)) {
            if !self.is_override_due(statistics, facts.driver_generation, now) {
                return Err(refusal);
            }
            // The events since the false set are unknown.
            before = None;
        }
        let guest_ms =
            self.clock.map_or(now.0, |(guest_ms, at)| guest_ms.saturating_add(now.since(at)));
        let elapsed_ms = self.clock.map_or(0, |(_, at)| now.since(at));
        let stall = self.estimate_stall(before.as_ref(), statistics, elapsed_ms);
        let raw = RawReport {
            version: PROTOCOL_VERSION,
            seq: self.seq + 1,
            monotonic_ms: guest_ms,
            cause: Cause::Rest,
            memory: Memory {
                total_bytes: total,
                free_bytes: free,
                // Linux before 4.6 does not send this statistic.
                available_bytes: statistics.get(Tag::Available).unwrap_or(free),
                cached_bytes: statistics.get(Tag::Caches).unwrap_or(0),
                ..Memory::default()
            },
            stall,
            zones: vec![estimate_zone(total, free, facts)],
            blocks: Blocks { online_policy: self.online_policy, ..Blocks::default() },
            counters: counters(statistics),
            ..RawReport::default()
        };
        let report = Report::try_from(raw)?;
        self.seq += 1;
        self.last = Some((facts.driver_generation, *statistics));
        self.refused = None;
        self.clock = Some((guest_ms, now));
        self.stall = stall;
        Ok(exclude_ballooned(report, facts))
    }

    /// Returns true if this set ends a sequence of refused sets that is long enough to be accepted.
    fn is_override_due(
        &mut self,
        statistics: &Statistics,
        driver_generation: u64,
        now: TimeMs,
    ) -> bool {
        let continues = |refused: &RefusedSequence| {
            refused.driver_generation == driver_generation
                && check_order(&refused.last, statistics).is_ok()
        };
        let since = self.refused.filter(continues).map_or(now, |refused| refused.since);
        self.refused = Some(RefusedSequence { driver_generation, last: *statistics, since });
        now.since(since) >= OVERRIDE_MS
    }

    fn estimate_stall(
        &self,
        before: Option<&Statistics>,
        now: &Statistics,
        elapsed_ms: u64,
    ) -> Stall {
        let Some(before) = before else { return self.stall };
        let since = |tag| match (before.get(tag), now.get(tag)) {
            (Some(before), Some(now)) => now.saturating_sub(before),
            _ => 0,
        };
        let waits_us = since(Tag::AllocStalls)
            .saturating_mul(STALL_US)
            .saturating_add((since(Tag::SwapIn) / PAGE_BYTES).saturating_mul(SWAP_IN_US));
        // Stall time cannot exceed the elapsed time, even if several tasks wait.
        let elapsed_us = elapsed_ms.saturating_mul(1000);
        let some_us = waits_us.min(elapsed_us);
        let share = scale(some_us, 10_000, elapsed_us.max(1));
        let old = u64::from(self.stall.some_avg10_basis_points);
        let average = (old * AVERAGE_MS + share * elapsed_ms.min(AVERAGE_MS))
            / (AVERAGE_MS + elapsed_ms.min(AVERAGE_MS));
        Stall {
            some_us: self.stall.some_us.saturating_add(some_us),
            some_avg10_basis_points: average.min(10_000) as u32,
            ..self.stall
        }
    }
}

/// Checks that no counter has decreased.
fn check_order(before: &Statistics, now: &Statistics) -> Result<(), Refusal> {
    let totals = Tag::ALL
        .into_iter()
        .filter(|tag| !matches!(tag, Tag::Free | Tag::Total | Tag::Available | Tag::Caches));
    for tag in totals {
        if let (Some(last), Some(value)) = (before.get(tag), now.get(tag))
            && value < last
        {
            return Err(Refusal::OutOfOrder { field: tag.label(), value, last });
        }
    }
    Ok(())
}

fn counters(statistics: &Statistics) -> Counters {
    let count = |tag| statistics.get(tag).unwrap_or(0);
    let pages = |tag| count(tag) / PAGE_BYTES;
    Counters {
        pswpin: pages(Tag::SwapIn),
        pswpout: pages(Tag::SwapOut),
        pgmajfault: count(Tag::MajorFaults),
        pgscan_kswapd: pages(Tag::AsyncScan),
        pgscan_direct: pages(Tag::DirectScan),
        pgsteal_kswapd: pages(Tag::AsyncReclaim),
        pgsteal_direct: pages(Tag::DirectReclaim),
        allocstall: count(Tag::AllocStalls),
        oom_kill: count(Tag::OomKills),
        ..Counters::default()
    }
}

/// Returns a single zone with all memory of the guest. Linux divides the watermarks among zones by
/// size, so their sums are the same.
fn estimate_zone(total_bytes: u64, free_bytes: u64, facts: GuestFacts) -> Zone {
    // Linux computes watermarks at boot and when memory is plugged. Inflating a balloon does not
    // change them.
    let whole_bytes = if facts.counts_ballooned {
        total_bytes
    } else {
        total_bytes.saturating_add(facts.ballooned_bytes)
    };
    let marks = Watermarks::estimate(whole_bytes);
    Zone {
        node: 0,
        kind: ZoneKind::Normal,
        free_pages: free_bytes / PAGE_BYTES,
        min_pages: marks.min_pages,
        low_pages: marks.low_pages,
        high_pages: marks.high_pages,
        managed_pages: total_bytes / PAGE_BYTES,
        ..Zone::default()
    }
}

/// Sums of the watermarks of all zones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watermarks {
    /// Number of free pages below which only the kernel's reserves serve allocations.
    pub min_pages: u64,
    /// Number of free pages below which kswapd is woken.
    pub low_pages: u64,
    /// Number of free pages at which kswapd stops.
    pub high_pages: u64,
}

impl Watermarks {
    /// Computes the watermarks of Linux 6.x for an x86-64 guest. Assumes that the kernel and
    /// programs can use all memory, and that transparent huge pages are enabled, as they are in
    /// distributions.
    pub fn estimate(memory_bytes: u64) -> Self {
        let pages = memory_bytes / PAGE_BYTES;
        // 1. mm/page_alloc.c, calculate_min_free_kbytes(): sqrt(16 x low memory in KiB), 128 KiB to
        //    256 MiB.
        let plain_kib = (memory_bytes / 1024).saturating_mul(16).isqrt().clamp(128, 262_144);
        // 2. mm/khugepaged.c, set_recommended_min_free_kbytes(): for each zone 2 page blocks, and
        //    one for each pair of the 3 page types that fall back to one another, at most a
        //    twentieth of memory.
        let zones = if memory_bytes > LOW_MEMORY_BYTES { 3 } else { 2 };
        let recommended_pages = (PAGEBLOCK_PAGES * zones * (2 + 3 * 3)).min(pages / 20);
        let min_pages = (plain_kib / 4).max(recommended_pages);
        // 3. mm/page_alloc.c, __setup_per_zone_wmarks(): the watermarks are a quarter of that
        //    apart, or watermark_scale_factor (10) ten-thousandths of memory if that is more.
        let distance_pages = (min_pages / 4).max(scale(pages, 10, 10_000));
        let low_pages = min_pages + distance_pages;
        Self { min_pages, low_pages, high_pages: low_pages + distance_pages }
    }
}

/// Returns the report without the memory in the balloon. Linux reports that memory as used only
/// with DEFLATE_ON_OOM. Otherwise, the report already excludes it.
pub fn exclude_ballooned(report: Report, facts: GuestFacts) -> Report {
    if !facts.counts_ballooned || facts.ballooned_bytes == 0 {
        return report;
    }
    let mut raw = report.as_raw().clone();
    let memory = &mut raw.memory;
    // A driver updates the balloon's size only after a change. Memory that the report shows as free
    // or idle is therefore not in the balloon.
    let min_total_bytes = memory
        .free_bytes
        .max(memory.available_bytes)
        .max(memory.anon_bytes)
        .max(memory.cached_bytes);
    memory.total_bytes =
        memory.total_bytes.saturating_sub(facts.ballooned_bytes).max(min_total_bytes);
    // The zones of the memory in the balloon are unknown. The memory is therefore divided among the
    // zones in proportion to their used memory.
    let used = |zone: &Zone| zone.managed_pages.saturating_sub(zone.free_pages);
    let all_used = raw.zones.iter().fold(0u64, |sum, zone| sum.saturating_add(used(zone)));
    let ballooned_pages = (facts.ballooned_bytes / PAGE_BYTES).min(all_used);
    for zone in &mut raw.zones {
        zone.managed_pages -= scale(ballooned_pages, used(zone), all_used).min(used(zone));
    }
    // Memory in the balloon is never touched, so the report may have counted it as idle.
    for idle in &mut raw.idle {
        let zones = raw.zones.iter().filter(|zone| zone.node == idle.node);
        let managed_pages = zones.fold(0u64, |sum, zone| sum.saturating_add(zone.managed_pages));
        idle.idle_bytes = idle.idle_bytes.min(managed_pages.saturating_mul(PAGE_BYTES));
    }
    // Valid values that are reduced are still valid. If the new report is invalid nevertheless, the
    // original report is better than none.
    Report::try_from(raw).unwrap_or(report)
}

#[cfg(test)]
mod tests {
    use foreshore_proto::NodeIdle;
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn facts() -> GuestFacts {
        GuestFacts { driver_generation: 1, memory_bytes: 512 * MIB, ..GuestFacts::default() }
    }

    fn statistics() -> Statistics {
        Statistics::default()
            .with(Tag::Total, 480 * MIB)
            .with(Tag::Free, 100 * MIB)
            .with(Tag::Available, 200 * MIB)
            .with(Tag::Caches, 120 * MIB)
            .with(Tag::SwapIn, 8 * MIB)
            .with(Tag::SwapOut, 4 * MIB)
            .with(Tag::MajorFaults, 7)
            .with(Tag::AllocStalls, 20)
            .with(Tag::DirectScan, 3 * MIB)
            .with(Tag::OomKills, 1)
    }

    fn bytes(entries: &[(u16, u64)]) -> Vec<u8> {
        let entry =
            |(tag, value): &(u16, u64)| [&tag.to_le_bytes()[..], &value.to_le_bytes()].concat();
        entries.iter().flat_map(entry).collect()
    }

    #[test]
    fn statistics_are_parsed_as_in_the_specification() {
        let read = Statistics::parse(&bytes(&[
            (5, 480),
            (4, 100),
            (15, 9),
            (16, 1),
            (0xffff, 2),
            (4, 101),
        ]))
        .unwrap();
        assert_eq!(read.get(Tag::Total), Some(480));
        assert_eq!(read.get(Tag::Free), Some(101), "the last of two");
        assert_eq!((read.get(Tag::DirectReclaim), read.get(Tag::SwapIn)), (Some(9), None));
    }

    #[test]
    fn buffers_of_other_lengths_are_refused() {
        for wrong in [0, 1, 9, 11, Statistics::MAX_BYTES + 10] {
            assert_eq!(Statistics::parse(&vec![0; wrong]), None, "{wrong}");
        }
        assert!(Statistics::parse(&[0; Statistics::MAX_BYTES]).is_some());
    }

    #[test]
    fn report_contains_values_of_statistics() {
        let report = Estimator::default().report(&statistics(), facts(), TimeMs(5000)).unwrap();
        let memory = report.memory();
        assert_eq!((memory.total_bytes, memory.free_bytes), (480 * MIB, 100 * MIB));
        assert_eq!((memory.available_bytes, memory.cached_bytes), (200 * MIB, 120 * MIB));
        let counters = report.counters();
        assert_eq!((counters.pswpin, counters.pswpout), (2048, 1024));
        assert_eq!((counters.pgmajfault, counters.allocstall, counters.oom_kill), (7, 20, 1));
        assert_eq!(counters.pgscan_direct, 768);
        assert_eq!((report.seq(), report.monotonic_ms()), (1, 5000));
        assert_eq!(report.zones()[0].free_pages, 100 * 256);
    }

    #[test]
    fn impossible_statistics_are_refused_and_next_are_accepted() {
        let mut estimator = Estimator::default();
        let mut label = |statistics: Statistics| {
            estimator
                .report(&statistics, facts(), TimeMs(1000))
                .err()
                .map(|refusal| refusal.label())
        };
        assert_eq!(label(statistics()), None);
        assert_eq!(label(Statistics::default().with(Tag::Total, 480 * MIB)), Some("wrong_shape"));
        assert_eq!(label(Statistics::default().with(Tag::Free, MIB)), Some("wrong_shape"));
        // The sets contain more memory than the host gave to the guest, more free memory than total
        // memory, and fewer swapped pages than before.
        assert_eq!(label(statistics().with(Tag::Total, 512 * MIB + 1)), Some("out_of_range"));
        assert_eq!(label(statistics().with(Tag::Free, 481 * MIB)), Some("out_of_range"));
        assert_eq!(label(statistics().with(Tag::Available, u64::MAX)), Some("out_of_range"));
        assert_eq!(label(statistics().with(Tag::Total, 0)), Some("out_of_range"));
        assert_eq!(label(statistics().with(Tag::OomKills, u64::MAX)), Some("out_of_range"));
        assert_eq!(label(statistics().with(Tag::SwapIn, 8 * MIB - 1)), Some("out_of_order"));
        assert_eq!(label(statistics()), None);
        // Counters restart with another driver.
        let other = GuestFacts { driver_generation: 2, ..facts() };
        assert!(estimator.report(&statistics().with(Tag::SwapIn, 0), other, TimeMs(1000)).is_ok());
    }

    #[test]
    fn false_set_locks_out_true_ones_only_for_a_limited_time() {
        let mut estimator = Estimator::default();
        let mut accept = |swap_in, at_s: u64| {
            let statistics = statistics().with(Tag::SwapIn, swap_in);
            estimator.report(&statistics, facts(), TimeMs(at_s * 1000))
        };
        accept(8 * MIB, 1).unwrap();
        let false_set = accept(1 << 60, 2).unwrap();
        let refused_count =
            (3..3_600).filter(|at_s| accept(8 * MIB + at_s, *at_s).is_err()).count();
        assert_eq!(refused_count as u64, OVERRIDE_MS / 1000, "of the hour after");
        // The stall time of the false set remains, but nothing is added to it.
        let true_set = accept(8 * MIB + 3_600, 3_600).unwrap();
        assert_eq!(true_set.stall().some_us, false_set.stall().some_us);
        assert_eq!(true_set.counters().pswpin, 2048);
    }

    #[test]
    fn inconsistent_sets_are_never_accepted() {
        let mut estimator = Estimator::default();
        let mut label = |swap_in, at_s: u64, driver_generation| {
            let statistics = statistics().with(Tag::SwapIn, swap_in);
            let facts = GuestFacts { driver_generation, ..facts() };
            estimator
                .report(&statistics, facts, TimeMs(at_s * 1000))
                .err()
                .map(|refusal| refusal.label())
        };
        assert_eq!(label(1 << 40, 0, 1), None);
        for at_s in 1..60 {
            assert_eq!(
                label(MIB * (60 - at_s), at_s, 1),
                Some("out_of_order"),
                "later reports count less: {at_s} s"
            );
        }
        // The sequence ends when a set is consistent with the last accepted one, or when another
        // driver is loaded.
        assert_eq!(label(1 << 40, 60, 1), None);
        assert_eq!(label(MIB, 61, 1), Some("out_of_order"));
        assert_eq!(label(1 << 40, 62, 2), None);
        assert_eq!(label(MIB, 64, 2), Some("out_of_order"));
    }

    #[test]
    fn stall_time_is_estimated_and_limited_to_elapsed_time() {
        let mut estimator = Estimator::default();
        let mut report = |stalls, swapped_in_pages: u64, at| {
            let swap_in = 8 * MIB + swapped_in_pages * PAGE_BYTES;
            let statistics = statistics().with(Tag::AllocStalls, stalls).with(Tag::SwapIn, swap_in);
            *estimator.report(&statistics, facts(), TimeMs(at)).unwrap().stall()
        };
        assert_eq!(report(20, 0, 1000).some_us, 0, "earlier values are unknown");
        assert_eq!(report(70, 0, 2000).some_us, 50_000);
        assert_eq!(report(70, 1000, 3000).some_us, 150_000);
        let all = report(70_000, 1000, 4000);
        assert_eq!(all.some_us, 1_150_000);
        assert!((900..=1100).contains(&all.some_avg10_basis_points), "{all:?}");
        // The average declines over time.
        assert!(report(70_000, 1000, 60_000).some_avg10_basis_points < 600);
    }

    #[test]
    fn stall_time_of_older_kernels_is_estimated_from_swapping() {
        let mut estimator = Estimator::default();
        let old = |pages: u64| {
            Statistics::default()
                .with(Tag::Total, 480 * MIB)
                .with(Tag::Free, MIB)
                .with(Tag::SwapIn, pages * PAGE_BYTES)
        };
        let first = estimator.report(&old(0), facts(), TimeMs(0)).unwrap();
        assert_eq!(first.memory().available_bytes, MIB, "assumed free without better data");
        let report = estimator.report(&old(500), facts(), TimeMs(1000)).unwrap();
        assert_eq!(report.stall().some_us, 50_000);
    }

    #[test]
    fn clock_and_stall_time_continue_from_those_of_an_agent() {
        let mut estimator = Estimator::default();
        let agents = {
            let report =
                Estimator::default().report(&statistics(), facts(), TimeMs(77_000)).unwrap();
            let mut raw = report.as_raw().clone();
            raw.stall.some_us = 9_000;
            Report::try_from(raw).unwrap()
        };
        estimator.continue_from_agent(&agents, TimeMs(10_000));
        let report = estimator.report(&statistics(), facts(), TimeMs(22_000)).unwrap();
        assert_eq!((report.monotonic_ms(), report.stall().some_us), (89_000, 9_000));
    }

    #[test]
    fn online_policy_of_an_agent_stays_without_it() {
        let mut estimator = Estimator::default();
        let policy = |report: Report| report.blocks().online_policy;
        let first = estimator.report(&statistics(), facts(), TimeMs(0)).unwrap();
        assert_eq!(policy(first.clone()), OnlinePolicy::Unknown, "it is unknown");
        for said in [OnlinePolicy::Online, OnlinePolicy::Offline, OnlinePolicy::OnlineMovable] {
            let mut raw = first.as_raw().clone();
            raw.blocks.online_policy = said;
            estimator.continue_from_agent(&Report::try_from(raw).unwrap(), TimeMs(1000));
            assert_eq!(
                policy(estimator.report(&statistics(), facts(), TimeMs(2000)).unwrap()),
                said
            );
        }
    }

    #[test]
    fn watermarks_equal_those_of_debian_guests() {
        // Sums of the watermarks in /proc/zoneinfo over DMA, DMA32 and Normal, in pages; see
        // docs/reference/balloon.md.
        let marks = Watermarks::estimate(480 * MIB);
        assert_eq!(marks.min_pages, 480 * 256 / 20);
        assert_eq!(marks.low_pages, marks.min_pages + marks.min_pages / 4);
        assert_eq!(marks.high_pages - marks.low_pages, marks.low_pages - marks.min_pages);
        // These guests have two and three zones, with 11 page blocks for each zone.
        assert_eq!(Watermarks::estimate(2048 * MIB).min_pages, 2 * 11 * 512);
        assert_eq!(Watermarks::estimate(8192 * MIB).min_pages, 3 * 11 * 512);
        // With much memory, the square root determines the value, up to its upper bound.
        assert_eq!(Watermarks::estimate(1 << 40).min_pages, 131_072 / 4);
    }

    #[test]
    fn balloon_that_linux_counts_as_used_is_removed_from_report() {
        let report = Estimator::default().report(&statistics(), facts(), TimeMs(0)).unwrap();
        let facts = GuestFacts { ballooned_bytes: 128 * MIB, counts_ballooned: true, ..facts() };
        let corrected = exclude_ballooned(report.clone(), facts);
        assert_eq!(corrected.memory().total_bytes, (480 - 128) * MIB);
        assert_eq!(corrected.memory().available_bytes, 200 * MIB);
        assert_eq!(corrected.zones()[0].managed_pages, (480 - 128) * 256);
        assert_eq!(corrected.zones()[0].high_pages, report.zones()[0].high_pages);
        let uncounted = GuestFacts { counts_ballooned: false, ..facts };
        assert_eq!(exclude_ballooned(report.clone(), uncounted), report, "Linux has onlined it");
        // A driver that claims an impossible balloon size does not remove memory that the report
        // shows.
        let false_set =
            exclude_ballooned(report, GuestFacts { ballooned_bytes: u64::MAX, ..facts });
        assert_eq!(false_set.memory().total_bytes, 200 * MIB);
        assert!(false_set.zones()[0].managed_pages >= false_set.zones()[0].free_pages);
    }

    #[test]
    fn ballooned_memory_is_not_idle() {
        let report = Estimator::default().report(&statistics(), facts(), TimeMs(60_000)).unwrap();
        let mut raw = report.as_raw().clone();
        raw.idle = vec![NodeIdle { node: 0, idle_bytes: 400 * MIB, span_ms: 1000 }];
        let report = Report::try_from(raw).unwrap();
        let corrected = exclude_ballooned(
            report,
            GuestFacts { ballooned_bytes: 128 * MIB, counts_ballooned: true, ..facts() },
        );
        assert_eq!(corrected.memory().total_bytes, 352 * MIB);
        assert_eq!(corrected.idle()[0].idle_bytes, 352 * MIB);
    }

    proptest! {
        #[test]
        fn any_buffers_result_in_valid_reports_or_refusals(
            buffers in prop::collection::vec(
                prop::collection::vec((0u16..20, prop_oneof![any::<u64>(), 0..(1u64 << 30)]), 1..20), 1..8),
            ballooned_bytes in any::<u64>(),
            counts_ballooned in any::<bool>(),
        ) {
            let mut estimator = Estimator::default();
            let mut clock = 0;
            for entries in buffers {
                clock += 700;
                let statistics = Statistics::parse(&bytes(&entries)).unwrap();
                let facts = GuestFacts { memory_bytes: 1 << 30, ballooned_bytes, counts_ballooned, driver_generation: 1 };
                if let Ok(report) = estimator.report(&statistics, facts, TimeMs(clock)) {
                    prop_assert!(report.memory().total_bytes <= 1 << 30);
                    // The corrected report is verified again.
                    prop_assert!(Report::try_from(report.as_raw().clone()).is_ok());
                    prop_assert!(report.stall().some_us <= clock * 1000);
                }
            }
        }
    }
}
