//! When to look, and when to report. Pure: the caller brings the time and the figures.
//!
//! Two costs are weighed: a report costs the guest the formatting of four texts in /proc, a look costs one cheap
//! system call. So at rest the agent reports once a second, but looks more often, and the sooner the less there is
//! to lose; a look that finds much gone leads to a report at once.

use foreshore_proto::Settings;

/// No guest fills memory faster than this for long; it sets how soon to look again.
const FASTEST_FILL_BYTES_PER_MS: u64 = (512 << 20) / 1000;

/// Look at least this often: how soon a shortage is noticed in a guest that had plenty.
const MAX_LOOK_MS: u64 = 250;

/// Report at the fast rate for this long after something was seen, to show how it goes on.
const ALERT_MS: u64 = 1_000;

/// Under the watermark, but nothing moves: after this long a slower rate will do.
const STEADY_MS: u64 = 3_000;

/// That rate is so many times slower.
const STEADY_FACTOR: u64 = 5;

/// A fall by this part of what was available is news.
const NEWS_PART: u64 = 8;

/// A change by less than this part is no movement.
const STEADY_PART: u64 = 16;

/// What was seen at the last report or look at /proc/meminfo.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    free_bytes: u64,
    available_bytes: u64,
}

/// Decides when to look and when to report.
#[derive(Clone, Debug)]
pub struct Pace {
    settings: Settings,
    /// At the last report.
    reported: Seen,
    reported_ms: u64,
    /// At the last look, or report.
    free_bytes: u64,
    looked_ms: u64,
    alert_until_ms: u64,
    /// Where available memory stays, and since when.
    steady_bytes: u64,
    steady_since_ms: u64,
}

impl Pace {
    /// The pace of a new connection: nothing has been reported, so a report is due.
    pub fn new(settings: Settings) -> Self {
        Pace {
            settings: settings.clamped(),
            reported: Seen::default(),
            reported_ms: 0,
            free_bytes: 0,
            looked_ms: 0,
            alert_until_ms: 0,
            steady_bytes: 0,
            steady_since_ms: 0,
        }
    }

    /// The VMM wants something else.
    pub fn set(&mut self, settings: Settings) {
        self.settings = settings.clamped();
    }

    /// A report has been made.
    pub fn reported(&mut self, free_bytes: u64, available_bytes: u64, now_ms: u64) {
        self.reported = Seen { free_bytes, available_bytes };
        self.reported_ms = now_ms;
        self.looked(free_bytes, now_ms);
        if available_bytes.abs_diff(self.steady_bytes) > self.steady_bytes / STEADY_PART {
            self.steady_bytes = available_bytes;
            self.steady_since_ms = now_ms;
        }
    }

    /// A look has shown nothing new.
    pub fn looked(&mut self, free_bytes: u64, now_ms: u64) {
        self.free_bytes = free_bytes;
        self.looked_ms = now_ms;
    }

    /// Something has been seen: report fast for a while.
    pub fn alert(&mut self, now_ms: u64) {
        self.alert_until_ms = now_ms.saturating_add(ALERT_MS);
    }

    /// When the next report is due, if nothing happens.
    pub fn report_due_ms(&self) -> u64 {
        let rest_ms = u64::from(self.settings.rest_interval_ms);
        let fast_ms = u64::from(self.settings.watermark_interval_ms).min(rest_ms);
        let steady = self.reported_ms.saturating_sub(self.steady_since_ms) >= STEADY_MS;
        let interval_ms = if self.reported_ms < self.alert_until_ms {
            fast_ms
        } else if self.reported.available_bytes < self.settings.watermark_bytes {
            if steady { fast_ms.saturating_mul(STEADY_FACTOR).min(rest_ms) } else { fast_ms }
        } else {
            rest_ms
        };
        self.reported_ms.saturating_add(interval_ms)
    }

    /// Whether a report with so much available is one of the fast ones.
    pub fn is_fast(&self, available_bytes: u64, now_ms: u64) -> bool {
        available_bytes < self.settings.watermark_bytes || now_ms < self.alert_until_ms
    }

    /// When to look next.
    pub fn look_due_ms(&self) -> u64 {
        let fast_ms = u64::from(self.settings.watermark_interval_ms);
        let until_news_ms = self.margin_bytes() / FASTEST_FILL_BYTES_PER_MS;
        self.looked_ms.saturating_add(until_news_ms.clamp(fast_ms, MAX_LOOK_MS.max(fast_ms)))
    }

    /// Whether so little free memory makes it worth reading what is available. Where page cache takes what is
    /// free, free memory says nothing, so it is read every time.
    pub fn is_suspicious(&self, free_bytes: u64) -> bool {
        let gone = self.free_bytes.min(self.reported.free_bytes).saturating_sub(free_bytes);
        free_bytes < self.settings.watermark_bytes || gone > self.margin_bytes() / 2
    }

    /// Whether so much less is available than at the last report that the VMM should know at once.
    pub fn is_news(&self, available_bytes: u64) -> bool {
        let before = self.reported.available_bytes;
        let crossed =
            available_bytes < self.settings.watermark_bytes && before >= self.settings.watermark_bytes;
        crossed || before.saturating_sub(available_bytes) >= (before / NEWS_PART).max(1)
    }

    /// What may go before there is news.
    fn margin_bytes(&self) -> u64 {
        let available = self.reported.available_bytes;
        let over = available.saturating_sub(self.settings.watermark_bytes);
        if over == 0 { available / NEWS_PART } else { over.min(available / NEWS_PART) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A guest with a watermark of 60 MiB that has reported at one second.
    fn pace(free_mib: u64, available_mib: u64) -> Pace {
        let mut pace = Pace::new(Settings::with_watermark(60 * MIB));
        pace.reported(free_mib * MIB, available_mib * MIB, 1_000);
        pace
    }

    #[test]
    fn a_new_connection_reports_at_once() {
        assert!(Pace::new(Settings::with_watermark(0)).report_due_ms() <= 1_000);
    }

    #[test]
    fn a_guest_at_rest_reports_once_a_second_and_looks_in_between() {
        let pace = pace(8_000, 8_000);
        assert_eq!(pace.report_due_ms(), 2_000);
        assert_eq!(pace.look_due_ms(), 1_250);
    }

    #[test]
    fn the_less_there_is_the_sooner_it_looks() {
        assert_eq!(pace(280, 280).look_due_ms(), 1_000 + 35 * MIB / FASTEST_FILL_BYTES_PER_MS);
        assert_eq!(pace(70, 70).look_due_ms(), 1_050);
        assert_eq!(pace(0, 0).look_due_ms(), 1_050);
    }

    #[test]
    fn under_the_watermark_it_reports_twenty_times_a_second() {
        assert_eq!(pace(59, 59).report_due_ms(), 1_050);
        assert_eq!(pace(59, 60).report_due_ms(), 2_000);
    }

    #[test]
    fn under_the_watermark_with_nothing_moving_it_slows_down_and_any_movement_ends_that() {
        let mut pace = pace(50, 50);
        for now_ms in (1_050..=4_000).step_by(50) {
            pace.reported(50 * MIB, 50 * MIB, now_ms);
        }
        assert_eq!(pace.report_due_ms(), 4_250);
        assert_eq!(pace.look_due_ms(), 4_050, "it looks as often as before");
        pace.reported(40 * MIB, 40 * MIB, 4_250);
        assert_eq!(pace.report_due_ms(), 4_300);
    }

    #[test]
    fn an_alert_makes_it_fast_for_a_second() {
        let mut pace = pace(280, 280);
        pace.alert(1_000);
        assert_eq!(pace.report_due_ms(), 1_050);
        pace.reported(280 * MIB, 280 * MIB, 2_000);
        assert_eq!(pace.report_due_ms(), 3_000);
    }

    #[test]
    fn a_fall_by_an_eighth_or_under_the_watermark_is_news() {
        assert!(!pace(280, 280).is_news(246 * MIB));
        assert!(pace(280, 280).is_news(245 * MIB));
        assert!(!pace(280, 64).is_news(61 * MIB));
        assert!(pace(280, 64).is_news(59 * MIB));
        assert!(!pace(280, 59).is_news(58 * MIB), "known to be under it already");
        assert!(!pace(0, 0).is_news(0));
    }

    #[test]
    fn free_memory_that_falls_is_worth_a_second_look() {
        assert!(!pace(280, 280).is_suspicious(270 * MIB));
        assert!(pace(280, 280).is_suspicious(262 * MIB));
        assert!(pace(20, 280).is_suspicious(20 * MIB), "page cache hides it");
    }
}
