//! Time of a report in the format of the log, without allocations.

use std::fmt;

const SECONDS_OF_DAY: i64 = 86_400;
/// Days of the Gregorian calendar in 400 years, after which it repeats.
const DAYS_OF_ERA: i64 = 146_097;
/// Days from 1 March of year 0 to 1 January 1970.
const DAYS_TO_EPOCH: i64 = 719_468;

/// Time in UTC, for example `2026-01-31T12:00:00.000001Z`.
pub(super) struct Utc {
    /// Seconds since 1970.
    seconds: i64,
    nanoseconds: i64,
}

impl Utc {
    /// Reads the host's clock. The call is signal-safe.
    pub(super) fn now() -> Self {
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the kernel writes one `timespec`.
        unsafe { libc::clock_gettime(libc::CLOCK_REALTIME, &raw mut now) };
        Self { seconds: now.tv_sec, nanoseconds: now.tv_nsec }
    }

    /// Returns the year, the month and the day of the month. Years begin in March, so that the leap
    /// day is the last day of a year.
    fn date(&self) -> (i64, i64, i64) {
        let days = self.seconds.div_euclid(SECONDS_OF_DAY) + DAYS_TO_EPOCH;
        let (era, day) = (days.div_euclid(DAYS_OF_ERA), days.rem_euclid(DAYS_OF_ERA));
        // Subtracts the leap days: one in 4 years, none in 100 years, one in 400 years.
        let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
        let day = day - (365 * year + year / 4 - year / 100);
        // Five months from March have 153 days, and so have five months from August.
        let month = (5 * day + 2) / 153;
        let day = day - (153 * month + 2) / 5 + 1;
        let is_next_year = month >= 10;
        let month = if is_next_year { month - 9 } else { month + 3 };
        (400 * era + year + i64::from(is_next_year), month, day)
    }
}

impl fmt::Display for Utc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (year, month, day) = self.date();
        let second = self.seconds.rem_euclid(SECONDS_OF_DAY);
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        let microseconds = self.nanoseconds / 1000;
        write!(
            f,
            "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{microseconds:06}Z"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_converted_to_dates() {
        // Values of `date --utc --date @SECONDS`.
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00"),
            (951_782_399, "2000-02-28T23:59:59"),
            (951_782_400, "2000-02-29T00:00:00"),
            (951_868_800, "2000-03-01T00:00:00"),
            (1_709_210_096, "2024-02-29T12:34:56"),
            (1_767_225_599, "2025-12-31T23:59:59"),
            (1_767_225_600, "2026-01-01T00:00:00"),
            (4_107_542_400, "2100-03-01T00:00:00"),
        ] {
            let utc = Utc { seconds, nanoseconds: 1_999 };
            assert_eq!(utc.to_string(), format!("{expected}.000001Z"));
        }
    }
}
