//! Decides when the agent checks memory and when it sends reports.
//!
//! This module does no I/O. Callers pass the time and the values. The agent and the simulated
//! guests both use this module, so their timing is the same.
//!
//! For a report, the guest has to format four files in /proc. A check costs only one cheap system
//! call. Therefore, at rest, the agent reports once per second and checks more often. The less
//! memory is left, the more often it checks. If a check finds a large decrease, the agent reports
//! immediately.
//!
//! The VMM's settings select whether checks measure free or available memory
//! ([`Settings::watermark_of`]), because the VMM bases its decisions on one of them.
//!
//! If a check finds that the measured amount is falling, the next check is early. The VMM is then
//! notified while more memory is left. (The simulated guests do not use early checks, and so report
//! a fall up to 35 ms later.)
//!
//! Between the fastest and the slowest rate, the report interval depends on two values: the
//! distance to the watermark, and the time until the watermark is reached at the current rate
//! ([`interval_ms`]).

use crate::{Measure, Memory, Settings, scale};

/// Upper bound of the rate at which a guest fills memory for a sustained time. The bound determines
/// the time of the next check.
const FASTEST_FILL_BYTES_PER_MS: u64 = (512 << 20) / 1000;

/// Longest time between checks. It limits how late the agent notices a shortage in a guest that had
/// plenty of memory.
const MAX_CHECK_MS: u64 = 100;

/// Time to the next check while the measured amount is falling. Each of these checks has found a
/// decrease by an eighth of [`Pace::margin_bytes`], so at most eight of them precede a report.
const FALLING_CHECK_MS: u64 = 15;

/// The measured amount counts as falling if it decreases between two checks by more than
/// [`Pace::margin_bytes`] divided by this number.
const FALLING_PART: u64 = 8;

/// Time after which available memory is read again even if the number of free pages is unchanged.
/// Page cache may hide a decrease, but reclaim frees 32 pages at a time and hardly ever restores
/// the exact number.
const UNCHANGED_READ_MS: u64 = 500;

/// Duration of fast reports after an alert. They show the VMM how the shortage develops.
const ALERT_MS: u64 = 1_000;

/// Time without a change after which reports become slower.
const STEADY_MS: u64 = 3_000;

/// Factor by which steady reports become slower below the watermark. Above it, they slow down to
/// the rate at rest.
const STEADY_FACTOR: u64 = 5;

/// A decrease is reported immediately if it is at least the last reported amount divided by this
/// number.
const DECREASE_PART: u64 = 8;

/// Smallest growth of kernel memory that is reported immediately.
const MIN_KERNEL_GROWTH_BYTES: u64 = 4 << 20;

/// A change by less than the reported amount divided by this number counts as steady.
const STEADY_PART: u64 = 16;

/// Number of reports to send before memory falls to the watermark at the current rate.
const REPORTS_BEFORE: u64 = 5;

/// Schedule of checks and reports.
#[derive(Clone, Debug)]
pub struct Pace {
    settings: Settings,
    /// Memory at the last report.
    reported: Memory,
    reported_ms: u64,
    /// Time of the last check or report.
    checked_ms: u64,
    /// Time when the measured memory was last read, and the free memory at that time.
    read_ms: u64,
    read_free_bytes: u64,
    /// Free memory and measured amount at the last check. `is_falling` is true if the last check
    /// found a decrease.
    checked_free_bytes: u64,
    checked_measured_bytes: u64,
    is_falling: bool,
    alert_until_ms: u64,
    /// Measured amount when it last changed too much to count as steady, and the time of that
    /// report.
    steady_bytes: u64,
    steady_since_ms: u64,
    /// Rate computed by [`fall_rate`].
    fall_per_s: u64,
    kernel_bytes: u64,
}

/// Rate in bytes per second at which memory falls, computed from two amounts and the time between
/// them. The result is at least half the previous rate, because a load may continue after a short
/// pause.
fn fall_rate(before_per_s: u64, before_bytes: u64, now_bytes: u64, elapsed_ms: u64) -> u64 {
    let now_per_s = scale(before_bytes.saturating_sub(now_bytes), 1000, elapsed_ms);
    now_per_s.max(before_per_s / 2)
}

/// Report intervals below the watermark and at rest. The former never exceeds the latter.
fn bounds_ms(settings: &Settings) -> (u64, u64) {
    let rest_ms = u64::from(settings.rest_interval_ms);
    (u64::from(settings.watermark_interval_ms).min(rest_ms), rest_ms)
}

/// Report interval while `measured_bytes` of memory remain and fall by `fall_per_s`.
///
/// At the watermark, the interval for use below the watermark applies. At twice the watermark, the
/// interval at rest applies. In between, the interval is proportional, and short enough for
/// [`REPORTS_BEFORE`] reports before memory falls to the watermark.
fn interval_ms(settings: &Settings, measured_bytes: u64, fall_per_s: u64) -> u64 {
    let (fast_ms, rest_ms) = bounds_ms(settings);
    let watermark = settings.watermark_bytes;
    let Some(over) = measured_bytes.checked_sub(watermark) else { return fast_ms };
    let by_distance_ms = if over >= watermark {
        rest_ms
    } else {
        fast_ms + scale(rest_ms - fast_ms, over, watermark)
    };
    let by_fall_ms = match fall_per_s {
        0 => rest_ms,
        fall_per_s => scale(1000, over, fall_per_s) / REPORTS_BEFORE,
    };
    by_distance_ms.min(by_fall_ms).clamp(fast_ms, rest_ms)
}

impl Pace {
    /// Creates the schedule of a new connection. The first report is due immediately.
    pub fn new(settings: Settings) -> Self {
        Pace {
            settings: settings.clamped(),
            reported: Memory::default(),
            reported_ms: 0,
            checked_ms: 0,
            read_ms: 0,
            read_free_bytes: 0,
            checked_free_bytes: 0,
            checked_measured_bytes: 0,
            is_falling: false,
            alert_until_ms: 0,
            steady_bytes: 0,
            steady_since_ms: 0,
            fall_per_s: 0,
            kernel_bytes: 0,
        }
    }

    /// Replaces the settings.
    pub fn set(&mut self, settings: Settings) {
        if settings.watermark_of != self.settings.watermark_of {
            // Rates and amounts of the previous kind of memory do not apply to the new one.
            self.fall_per_s = 0;
            self.steady_bytes = settings.watermark_of.of(&self.reported);
            self.steady_since_ms = self.reported_ms;
        }
        self.settings = settings.clamped();
    }

    /// Kind of memory that the watermark is compared with.
    pub fn measure(&self) -> Measure {
        self.settings.watermark_of
    }

    /// Records a report of `memory`.
    pub fn record_report(&mut self, memory: &Memory, now_ms: u64) {
        let measured_bytes = self.measure().of(memory);
        if self.reported_ms > 0 {
            let elapsed_ms = now_ms.saturating_sub(self.reported_ms);
            self.fall_per_s =
                fall_rate(self.fall_per_s, self.measured_bytes(), measured_bytes, elapsed_ms);
        }
        self.reported = *memory;
        self.reported_ms = now_ms;
        self.record_read(memory.free_bytes, now_ms);
        (self.checked_free_bytes, self.checked_measured_bytes) =
            (memory.free_bytes, measured_bytes);
        self.is_falling = false;
        if measured_bytes.abs_diff(self.steady_bytes)
            > self.base_bytes(self.steady_bytes) / STEADY_PART
        {
            self.steady_bytes = measured_bytes;
            self.steady_since_ms = now_ms;
        }
    }

    /// Records the kernel memory in the last report.
    pub fn record_kernel(&mut self, kernel_bytes: u64) {
        self.kernel_bytes = kernel_bytes;
    }

    /// Returns true if kernel memory has grown enough since the last report to require another one.
    /// Available memory may not show the growth, because it includes slabs that cannot be reclaimed
    /// (mm/show_mem.c, si_mem_available).
    pub fn needs_kernel_report(&self, kernel_bytes: u64) -> bool {
        let report_threshold_bytes = (self.margin_bytes() / 2).max(MIN_KERNEL_GROWTH_BYTES);
        kernel_bytes.saturating_sub(self.kernel_bytes) > report_threshold_bytes
    }

    fn measured_bytes(&self) -> u64 {
        self.measure().of(&self.reported)
    }

    /// Amount that relative thresholds refer to. In a guest that has run for a while, page cache
    /// leaves little free memory, and every file read changes it by a large part. Therefore,
    /// thresholds for free memory refer to at least the watermark.
    fn base_bytes(&self, measured_bytes: u64) -> u64 {
        match self.measure() {
            Measure::Free => measured_bytes.max(self.settings.watermark_bytes),
            Measure::Available => measured_bytes,
        }
    }

    /// Records a check that did not lead to a report.
    pub fn record_check(&mut self, now_ms: u64) {
        self.checked_ms = now_ms;
    }

    /// Records a read of the measured memory that did not lead to a report, and `free_bytes` at
    /// that time.
    pub fn record_read(&mut self, free_bytes: u64, now_ms: u64) {
        self.checked_ms = now_ms;
        (self.read_free_bytes, self.read_ms) = (free_bytes, now_ms);
    }

    /// Records the free memory found by a check.
    pub fn record_free(&mut self, free_bytes: u64) {
        self.is_falling = self.is_fall(self.checked_free_bytes, free_bytes);
        self.checked_free_bytes = free_bytes;
    }

    /// Records the measured memory that a check has read. A change of free memory that only comes
    /// from page cache does not count as a fall.
    pub fn record_measured(&mut self, free_bytes: u64, measured_bytes: u64) {
        self.is_falling = self.is_fall(self.checked_measured_bytes, measured_bytes);
        (self.checked_free_bytes, self.checked_measured_bytes) = (free_bytes, measured_bytes);
    }

    fn is_fall(&self, before_bytes: u64, now_bytes: u64) -> bool {
        before_bytes.saturating_sub(now_bytes) > self.margin_bytes() / FALLING_PART
    }

    /// Makes reports fast for the duration of [`ALERT_MS`].
    pub fn alert(&mut self, now_ms: u64) {
        self.alert_until_ms = now_ms.saturating_add(ALERT_MS);
    }

    /// Time of the next report if nothing changes.
    pub fn report_due_ms(&self) -> u64 {
        let (fast_ms, rest_ms) = bounds_ms(&self.settings);
        let steady = self.reported_ms.saturating_sub(self.steady_since_ms) >= STEADY_MS;
        let interval_ms = if self.reported_ms < self.alert_until_ms {
            fast_ms
        } else if !steady {
            interval_ms(&self.settings, self.measured_bytes(), self.fall_per_s)
        } else if self.settings.is_under(&self.reported) {
            fast_ms.saturating_mul(STEADY_FACTOR).min(rest_ms)
        } else {
            // The governor keeps guests near their watermark, so the agent does not report more
            // frequently near it. Checks continue.
            rest_ms
        };
        self.reported_ms.saturating_add(interval_ms)
    }

    /// Returns true if a report of `memory` should be followed by fast reports.
    pub fn is_fast(&self, memory: &Memory, now_ms: u64) -> bool {
        self.settings.is_under(memory) || now_ms < self.alert_until_ms
    }

    /// Time of the next check.
    pub fn check_due_ms(&self) -> u64 {
        let fast_ms = u64::from(self.settings.watermark_interval_ms);
        let until_report_ms = self.margin_bytes() / FASTEST_FILL_BYTES_PER_MS;
        let check_ms = until_report_ms.clamp(fast_ms, MAX_CHECK_MS.max(fast_ms));
        let falling_ms = if self.is_falling { FALLING_CHECK_MS } else { check_ms };
        self.checked_ms.saturating_add(check_ms.min(falling_ms))
    }

    /// Returns true if the measured memory should be read, although this costs many times as much
    /// as a check of free memory. When page cache has used up free memory, free memory says nothing
    /// about available memory. But if the number of free pages is exactly the same as at the last
    /// read, no memory has been allocated.
    pub fn needs_read(&self, free_bytes: u64, now_ms: u64) -> bool {
        if self.measure() == Measure::Free {
            return self.needs_report(free_bytes);
        }
        // Compares with the last report instead of the last check, because memory may fall over
        // many checks.
        let fall_bytes = self.reported.free_bytes.saturating_sub(free_bytes);
        let is_below_watermark = free_bytes < self.settings.watermark_bytes;
        let has_changed = free_bytes != self.read_free_bytes;
        (is_below_watermark || fall_bytes > self.margin_bytes() / 2)
            && (has_changed || now_ms.saturating_sub(self.read_ms) >= UNCHANGED_READ_MS)
    }

    /// Returns true if memory has fallen enough since the last report to require an immediate one.
    pub fn needs_report(&self, measured_bytes: u64) -> bool {
        self.report_threshold_bytes()
            .is_some_and(|report_threshold_bytes| measured_bytes <= report_threshold_bytes)
    }

    /// Largest amount for which [`needs_report`](Self::needs_report) returns true. `None` if memory
    /// is already so low that no further decrease needs an immediate report.
    pub fn report_threshold_bytes(&self) -> Option<u64> {
        let (before, watermark) = (self.measured_bytes(), self.settings.watermark_bytes);
        let by_part = before.checked_sub((self.base_bytes(before) / DECREASE_PART).max(1));
        let by_watermark = watermark.checked_sub(1).filter(|_| before >= watermark);
        by_part.max(by_watermark)
    }

    /// Decrease that makes a report due immediately.
    fn margin_bytes(&self) -> u64 {
        let measured_bytes = self.measured_bytes();
        let part = self.base_bytes(measured_bytes) / DECREASE_PART;
        let over = measured_bytes.saturating_sub(self.settings.watermark_bytes);
        if over == 0 { part } else { over.min(part) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn memory(free_bytes: u64, available_bytes: u64) -> Memory {
        Memory { free_bytes, available_bytes, ..Memory::default() }
    }

    /// Schedule with a watermark of 60 MiB of `measure`, one second after boot and just after a
    /// report.
    fn pace_by(watermark_of: Measure, free_mib: u64, available_mib: u64) -> Pace {
        let settings = Settings { watermark_of, ..Settings::with_watermark(60 * MIB) };
        let mut pace = Pace::new(settings);
        pace.record_report(&memory(free_mib * MIB, available_mib * MIB), 1_000);
        pace
    }

    fn pace(free_mib: u64, available_mib: u64) -> Pace {
        pace_by(Measure::Available, free_mib, available_mib)
    }

    fn free_pace(free_mib: u64, available_mib: u64) -> Pace {
        pace_by(Measure::Free, free_mib, available_mib)
    }

    #[test]
    fn growth_of_kernel_memory_is_reported_at_once() {
        let mut pace = pace(800, 800);
        pace.record_kernel(40 * MIB);
        // The limit is a growth by 50 MiB, a sixteenth of available memory.
        assert!(!pace.needs_kernel_report(90 * MIB));
        assert!(pace.needs_kernel_report(91 * MIB));
        assert!(!pace.needs_kernel_report(0));
        pace.record_report(&memory(0, 0), 2_000);
        assert!(!pace.needs_kernel_report(44 * MIB));
        assert!(pace.needs_kernel_report(45 * MIB));
    }

    #[test]
    fn a_new_connection_reports_at_once() {
        assert!(Pace::new(Settings::with_watermark(0)).report_due_ms() <= 1_000);
    }

    #[test]
    fn less_memory_means_earlier_reports_and_checks() {
        for (free, available, report_due_ms, check_due_ms) in [
            (8_000, 8_000, 2_000, 1_100),
            (280, 280, 2_000, 1_000 + 35 * MIB / FASTEST_FILL_BYTES_PER_MS),
            // Page cache counts as available memory.
            (59, 120, 2_000, 1_050),
            // Below the watermark.
            (59, 60, 1_050, 1_050),
            (59, 59, 1_050, 1_050),
            (0, 0, 1_050, 1_050),
        ] {
            let pace = pace(free, available);
            assert_eq!(
                (pace.report_due_ms(), pace.check_due_ms()),
                (report_due_ms, check_due_ms),
                "{free} MiB free, {available} MiB available"
            );
        }
    }

    fn interval(available: u64, fall_per_s: u64) -> u64 {
        interval_ms(&Settings::with_watermark(60 * MIB), available, fall_per_s)
    }

    #[test]
    fn interval_is_proportional_up_to_twice_the_watermark() {
        for (available, expected_ms) in [
            (0, 50),
            (60 * MIB - 1, 50),
            (60 * MIB, 50),
            (75 * MIB, 50 + 950 / 4),
            (90 * MIB, 50 + 950 / 2),
            (120 * MIB - 1, 999),
            (120 * MIB, 1_000),
            (u64::MAX, 1_000),
        ] {
            assert_eq!(interval(available, 0), expected_ms, "{available} available");
        }
    }

    #[test]
    fn fast_fall_is_reported_several_times_before_the_watermark() {
        for (fall_per_s, expected_ms) in [
            (0, 1_000),
            (1, 1_000),
            // Time until memory has fallen by 500 MiB to the watermark: 5 s, 4 s, 1 s, 250 ms, and
            // no time at all.
            (100 * MIB, 1_000),
            (125 * MIB, 800),
            (500 * MIB, 200),
            (2_000 * MIB, 50),
            (u64::MAX, 50),
        ] {
            assert_eq!(interval(560 * MIB, fall_per_s), expected_ms, "{fall_per_s} bytes a second");
        }
        assert_eq!(interval(61 * MIB, 1), 50 + 950 / 60, "the distance counts as well");
        assert_eq!(interval(59 * MIB, 1), 50);
    }

    #[test]
    fn interval_is_within_the_two_of_the_settings_in_any_order() {
        for (rest_interval_ms, watermark_interval_ms) in
            [(1_000, 50), (50, 1_000), (20, 20), (60_000, 20)]
        {
            for watermark_bytes in [0, 1, 60 * MIB, u64::MAX] {
                let settings = Settings {
                    rest_interval_ms,
                    watermark_interval_ms,
                    ..Settings::with_watermark(watermark_bytes)
                };
                for available in [0, 1, 60 * MIB, 61 * MIB, u64::MAX] {
                    for fall_per_s in [0, 1, MIB, u64::MAX] {
                        let ms = interval_ms(&settings, available, fall_per_s);
                        let fast_ms = u64::from(watermark_interval_ms.min(rest_interval_ms));
                        assert!(
                            (fast_ms..=u64::from(rest_interval_ms)).contains(&ms),
                            "{settings:?}: {ms}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn rate_of_a_fall_needs_two_reports_and_decays_by_halves() {
        let mut pace = pace(8_000, 1_000);
        assert_eq!(pace.fall_per_s, 0, "a single report shows no fall");
        pace.record_report(&memory(900 * MIB, 900 * MIB), 1_500);
        assert_eq!(pace.fall_per_s, 200 * MIB);
        assert_eq!(pace.report_due_ms(), 1_500 + 840);
        pace.record_report(&memory(900 * MIB, 950 * MIB), 2_000);
        assert_eq!(pace.fall_per_s, 100 * MIB, "a rise does not end it at once");
        pace.record_report(&memory(900 * MIB, 900 * MIB), 2_000);
        assert_eq!(pace.fall_per_s, 50_000 * MIB, "reports at the same time count as 1 ms apart");
        assert_eq!(fall_rate(0, u64::MAX, 0, 0), u64::MAX);
    }

    #[test]
    fn steady_memory_near_the_watermark_slows_reports_until_it_changes() {
        let mut pace = pace(70, 70);
        assert!(pace.report_due_ms() < 1_300);
        for now_ms in (1_200..=4_200).step_by(200) {
            pace.record_report(&memory(70 * MIB, 70 * MIB), now_ms);
        }
        assert_eq!(pace.report_due_ms(), 5_200);
        assert_eq!(pace.check_due_ms(), 4_250, "it checks as often as before");
        pace.record_report(&memory(64 * MIB, 64 * MIB), 4_400);
        assert!(pace.report_due_ms() < 4_700);
    }

    #[test]
    fn steady_memory_below_the_watermark_slows_reports_until_it_changes() {
        let mut pace = pace(50, 50);
        for now_ms in (1_050..=4_000).step_by(50) {
            pace.record_report(&memory(50 * MIB, 50 * MIB), now_ms);
        }
        assert_eq!(pace.report_due_ms(), 4_250);
        assert_eq!(pace.check_due_ms(), 4_050, "it checks as often as before");
        pace.record_report(&memory(40 * MIB, 40 * MIB), 4_250);
        assert_eq!(pace.report_due_ms(), 4_300);
    }

    #[test]
    fn alert_makes_reports_fast_for_a_second() {
        let mut pace = pace(280, 280);
        pace.alert(1_000);
        assert_eq!(pace.report_due_ms(), 1_050);
        pace.record_report(&memory(280 * MIB, 280 * MIB), 2_000);
        assert_eq!(pace.report_due_ms(), 3_000);
    }

    #[test]
    fn fall_by_an_eighth_or_below_the_watermark_is_reported_at_once() {
        for (before, now, needs_report) in [
            (280, 246, false),
            (280, 245, true),
            (64, 61, false),
            (64, 59, true),
            // The previous report was already below the watermark.
            (59, 58, false),
            (0, 0, false),
        ] {
            assert_eq!(
                pace(280, before).needs_report(now * MIB),
                needs_report,
                "{before} to {now} MiB"
            );
        }
    }

    #[test]
    fn threshold_of_an_immediate_report_is_exact() {
        for (available, expected) in [
            (0, None),
            (1, Some(0)),
            (59 * MIB, Some(59 * MIB - 59 * MIB / 8)),
            (60 * MIB, Some(60 * MIB - 1)),
            (68 * MIB, Some(60 * MIB - 1)),
            (80 * MIB, Some(70 * MIB)),
        ] {
            let mut pace = pace(0, 0);
            pace.record_report(&memory(available, available), 2_000);
            assert_eq!(pace.report_threshold_bytes(), expected, "{available} available");
            assert!(
                expected.is_none_or(|most| pace.needs_report(most) && !pace.needs_report(most + 1))
            );
        }
    }

    #[test]
    fn fall_of_free_memory_needs_read() {
        const PAGE: u64 = 4096;
        for (before, now_bytes, needs_read) in [
            (280, 270 * MIB, false),
            (280, 262 * MIB, true),
            // Page cache hides the fall, because kswapd frees more memory than the load allocates.
            (20, 20 * MIB - PAGE, true),
            (20, 20 * MIB + PAGE, true),
        ] {
            let pace = pace(before, 280);
            assert_eq!(pace.needs_read(now_bytes, 1_050), needs_read, "{before} MiB");
        }
    }

    /// Number of times that available memory is read in ten seconds, not counting reads for
    /// reports, if `free_bytes` are free at each check.
    fn reads_in_ten_seconds(available_mib: u64, free_bytes: impl Fn(u64) -> u64) -> u64 {
        let mut pace = pace(20, available_mib);
        let mut reads = 0;
        let mut now_ms = 1_000;
        while now_ms < 11_000 {
            now_ms = pace.check_due_ms().min(pace.report_due_ms());
            let free_bytes = free_bytes(now_ms);
            let memory = memory(free_bytes, available_mib * MIB);
            if now_ms >= pace.report_due_ms() {
                pace.record_report(&memory, now_ms);
            } else if pace.needs_read(free_bytes, now_ms) {
                assert!(!pace.needs_report(available_mib * MIB));
                pace.record_read(free_bytes, now_ms);
                reads += 1;
            } else {
                pace.record_check(now_ms);
            }
        }
        reads
    }

    #[test]
    fn steady_guest_full_of_page_cache_reads_little_more_than_it_reports() {
        for available_mib in [70, 280, 8_000] {
            let at_rest = reads_in_ten_seconds(available_mib, |_| 20 * MIB);
            assert!(at_rest <= 2 * 10, "{available_mib} MiB available: {at_rest} reads at rest");
            // A program writes a line to a log now and then.
            let hardly =
                reads_in_ten_seconds(available_mib, |now_ms| 20 * MIB - now_ms / 1_000 * 4096);
            assert!(
                hardly <= 3 * 10,
                "{available_mib} MiB available: {hardly} reads, and hardly anything moves"
            );
            // While memory changes, each check reads available memory, ten to twenty times per
            // second.
            let moving =
                reads_in_ten_seconds(available_mib, |now_ms| 20 * MIB + now_ms % 7_919 * 4096);
            assert!((80..=200).contains(&moving), "{available_mib} MiB available: {moving} reads");
        }
    }

    #[test]
    fn memory_hidden_by_page_cache_is_read_again_even_if_unchanged() {
        let mut pace = pace(20, 280);
        assert!(!pace.needs_read(20 * MIB, 1_499) && pace.needs_read(20 * MIB, 1_500));
        pace.record_read(20 * MIB, 1_500);
        assert_eq!(pace.check_due_ms(), 1_568, "a report is also a check");
        assert!(!pace.needs_read(20 * MIB, 1_999) && pace.needs_read(20 * MIB, 2_000));
        assert!(pace.needs_read(19 * MIB, 1_550));
    }

    #[test]
    fn checks_are_early_during_a_fall_until_its_end_or_a_report() {
        // A fall by 35 MiB triggers a report. An eighth of that is 4.4 MiB.
        let mut pace = pace(280, 280);
        let usual_ms = pace.check_due_ms() - 1_000;
        let check = |pace: &mut Pace, free_mib, now_ms| {
            pace.record_check(now_ms);
            pace.record_free(free_mib * MIB);
            pace.check_due_ms() - now_ms
        };
        assert_eq!(check(&mut pace, 276, 1_068), usual_ms, "a small decrease does not count");
        assert_eq!(check(&mut pace, 271, 1_136), FALLING_CHECK_MS);
        assert_eq!(check(&mut pace, 266, 1_151), FALLING_CHECK_MS);
        assert_eq!(check(&mut pace, 264, 1_166), usual_ms, "the fall has ended");
        assert_eq!(check(&mut pace, 255, 1_234), FALLING_CHECK_MS);
        pace.record_report(&memory(245 * MIB, 245 * MIB), 1_249);
        assert!(pace.check_due_ms() >= 1_249 + 50, "a report restarts the interval");
    }

    #[test]
    fn free_memory_used_by_page_cache_does_not_count_as_a_fall() {
        let mut pace = pace(100, 280);
        pace.record_read(20 * MIB, 1_050);
        pace.record_measured(20 * MIB, 279 * MIB);
        assert_eq!(pace.check_due_ms(), 1_118);
        pace.record_read(20 * MIB, 1_118);
        pace.record_measured(20 * MIB, 270 * MIB);
        assert_eq!(pace.check_due_ms(), 1_118 + FALLING_CHECK_MS);
    }

    #[test]
    fn any_fall_causes_a_few_early_checks_before_a_report() {
        for fall_mib in 1..=35 {
            let mut pace = pace(280, 280);
            let (mut free_bytes, mut soon) = (280 * MIB, 0);
            while !pace.needs_report(free_bytes - fall_mib * MIB) {
                free_bytes -= fall_mib * MIB;
                let now_ms = pace.check_due_ms();
                pace.record_check(now_ms);
                pace.record_free(free_bytes);
                soon += u64::from(pace.check_due_ms() - now_ms == FALLING_CHECK_MS);
            }
            assert!(
                soon <= FALLING_PART,
                "{soon} looks soon where {fall_mib} MiB go from each to the next"
            );
        }
    }

    #[test]
    fn fall_spread_over_several_checks_needs_read() {
        let mut pace = pace(280, 280);
        for free in [274, 268, 263] {
            assert!(!pace.needs_read(free * MIB, 1_100));
            pace.record_check(1_100);
        }
        assert!(pace.needs_read(262 * MIB, 1_100), "more than a sixteenth in four checks");
    }

    #[test]
    fn available_memory_does_not_hide_a_watermark_of_free_memory() {
        assert!(free_pace(59, 8_000).is_fast(&memory(59 * MIB, 8_000 * MIB), 1_000));
        for (free, available, report_due_ms) in [
            (59, 8_000, 1_050),
            // The amount of available memory has no effect. Between the watermark and twice the
            // watermark, the interval is proportional.
            (8_000, 59, 2_000),
            (90, 0, 1_000 + 50 + 950 / 2),
        ] {
            assert_eq!(free_pace(free, available).report_due_ms(), report_due_ms);
        }
        let mut pace = free_pace(8_000, 8_000);
        pace.record_report(&memory(1_000 * MIB, 8_000 * MIB), 2_000);
        assert_eq!(pace.fall_per_s, 7_000 * MIB, "free memory falls");
    }

    #[test]
    fn free_memory_below_its_watermark_is_reported_despite_available_memory() {
        assert!(free_pace(280, 8_000).needs_read(245 * MIB, 1_050), "an eighth is gone");
        assert!(!free_pace(280, 8_000).needs_read(246 * MIB, 1_050));
        assert!(free_pace(64, 8_000).needs_read(60 * MIB - 1, 1_050), "under it");
        assert!(!free_pace(64, 8_000).needs_read(60 * MIB, 1_050));
    }

    #[test]
    fn small_changes_of_free_memory_beside_page_cache_are_not_reported() {
        let mut pace = free_pace(10, 8_000);
        assert!(!pace.needs_read(3 * MIB, 1_050), "less than an eighth of the watermark");
        for at in 1..=80 {
            pace.record_report(&memory((10 + at % 2 * 3) * MIB, 8_000 * MIB), 1_000 + at * 50);
        }
        assert_eq!(pace.report_due_ms(), 5_000 + 250, "it counts as steady");
        pace.record_report(&memory(40 * MIB, 8_000 * MIB), 5_250);
        assert_eq!(pace.report_due_ms(), 5_300, "this is movement");
        assert!(pace.needs_read(32 * MIB, 1_050));
    }

    #[test]
    fn change_of_the_measure_resets_rates() {
        let mut pace = pace(8_000, 8_000);
        pace.record_report(&memory(8_000 * MIB, 1_000 * MIB), 1_100);
        assert_eq!(pace.report_due_ms(), 1_150, "available memory falls");
        pace.set(Settings { watermark_of: Measure::Free, ..Settings::with_watermark(60 * MIB) });
        assert_eq!(pace.report_due_ms(), 2_100, "free memory does not fall");
    }
}
