//! The real-time clock of a PC, ports 0x70 and 0x71, for firmware that asks it for the time (Motorola MC146818A).
//!
//! The host's time in UTC, by 24 hours and in BCD, as it is read. The guest sets nothing: its kernel has better clocks.

use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

use crate::bus::BusDevice;

/// The first port.
pub const CMOS_PORT: u64 = 0x70;
/// How many there are: the register's number, and what is in it.
pub const CMOS_LEN: u64 = 2;

/// Bit 7 of the number masks non-maskable interrupts, elsewhere.
const REGISTER: u8 = 0x7f;
/// A time base of 32,768 Hz; bit 7 would say that the time is just changing.
const STATUS_A: u8 = 0x26;
/// 24 hours.
const STATUS_B: u8 = 1 << 1;
/// The time is valid.
const STATUS_D: u8 = 1 << 7;
const SECONDS_PER_DAY: u64 = 24 * 60 * 60;

/// Seconds since 1970, UTC.
pub fn wall_clock() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The clock.
pub struct Cmos {
    register: Mutex<u8>,
    now: fn() -> u64,
}

impl Cmos {
    /// A clock that shows `now`, in seconds since 1970, UTC.
    pub fn new(now: fn() -> u64) -> Self {
        Self { register: Mutex::new(0), now }
    }

    fn value(&self, register: u8) -> u8 {
        let Date { year, month, day, weekday, second_of_day } = Date::at((self.now)());
        let bcd = |value: u64| (((value / 10 % 10) << 4) | (value % 10)) as u8;
        match register {
            0x00 => bcd(second_of_day % 60),
            0x02 => bcd(second_of_day / 60 % 60),
            0x04 => bcd(second_of_day / 3600),
            0x06 => bcd(weekday),
            0x07 => bcd(day),
            0x08 => bcd(month),
            0x09 => bcd(year % 100),
            0x0a => STATUS_A,
            0x0b => STATUS_B,
            0x0d => STATUS_D,
            0x32 => bcd(year / 100),
            _ => 0,
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Date {
    year: u64,
    month: u64,
    day: u64,
    /// Sunday is 1.
    weekday: u64,
    second_of_day: u64,
}

impl Date {
    /// The Gregorian calendar, counted in years that begin in March: the day that is there at times is the last.
    fn at(since_1970: u64) -> Self {
        const DAYS_0000_03_01_TO_1970: u64 = 719_468;
        const DAYS_IN_400_YEARS: u64 = 146_097;
        let days = since_1970 / SECONDS_PER_DAY;
        let (era, of_era) = {
            let days = days + DAYS_0000_03_01_TO_1970;
            (days / DAYS_IN_400_YEARS, days % DAYS_IN_400_YEARS)
        };
        let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        // Months of 31, 30, 31, 30 and 31 days, again and again.
        let from_march = (5 * of_year + 2) / 153;
        let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
        Self {
            year: 400 * era + year_of_era + u64::from(month <= 2),
            month,
            day: of_year - (153 * from_march + 2) / 5 + 1,
            // 1970 began with a Thursday.
            weekday: (days + 4) % 7 + 1,
            second_of_day: since_1970 % SECONDS_PER_DAY,
        }
    }
}

impl BusDevice for Cmos {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match (offset, data) {
            (1, [byte]) => *byte = self.value(*self.register.lock()),
            (_, data) => data.fill(0xff),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let (0, [register]) = (offset, data) {
            *self.register.lock() = register & REGISTER;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let date = |since_1970| {
            let Date { year, month, day, weekday, second_of_day } = Date::at(since_1970);
            (year, month, day, weekday, second_of_day)
        };
        assert_eq!(date(0), (1970, 1, 1, 5, 0));
        assert_eq!(date(951_782_400), (2000, 2, 29, 3, 0));
        assert_eq!(date(951_868_799), (2000, 2, 29, 3, 86_399));
        assert_eq!(date(951_868_800), (2000, 3, 1, 4, 0));
        assert_eq!(date(4_107_542_400), (2100, 3, 1, 2, 0));
        assert_eq!(date(1_704_067_199), (2023, 12, 31, 1, 86_399));
        // Days follow each other.
        let days = (0..200_000).map(|day| Date::at(day * SECONDS_PER_DAY)).collect::<Vec<_>>();
        for pair in days.windows(2) {
            let [before, after] = pair else { unreachable!() };
            let next_day =
                (after.year, after.month, after.day) == (before.year, before.month, before.day + 1);
            let next_month = after.day == 1 && before.day >= 28;
            assert!(
                (next_day || next_month) && after.weekday == before.weekday % 7 + 1,
                "{before:?} {after:?}"
            );
        }
    }

    #[test]
    fn the_clock_is_read_in_bcd_and_never_changes_under_a_reader() {
        // 2009-02-13 23:31:30, a Friday.
        let cmos = Cmos::new(|| 1_234_567_890);
        let read = |register: u8| {
            let mut data = [0];
            cmos.write(0, &[register | 0x80]);
            cmos.read(1, &mut data);
            data[0]
        };
        let time = [0x32, 0x09, 0x08, 0x07, 0x06, 0x04, 0x02, 0x00].map(read);
        assert_eq!(time, [0x20, 0x09, 0x02, 0x13, 0x06, 0x23, 0x31, 0x30]);
        assert_eq!(read(0x0a) & 0x80, 0);
        assert_eq!((read(0x0b), read(0x0d)), (0x02, 0x80));
        assert_eq!(read(0x7f), 0);
        let mut wide = [0; 2];
        cmos.read(0, &mut wide);
        assert_eq!(wide, [0xff; 2]);
        cmos.write(0, &[1, 2]);
        cmos.write(1, &[3]);
        assert_eq!(read(0x00), 0x30);
    }
}
