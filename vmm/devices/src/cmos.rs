//! Real-time clock of a PC (Motorola MC146818A), on ports 0x70 and 0x71. Firmware reads the time
//! from it.
//!
//! Each read returns the host's current time in UTC, in 24-hour mode and BCD. The clock cannot be
//! set, because guest kernels have better clocks.

use std::time::SystemTime;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use parking_lot::Mutex;

use crate::bus::BusDevice;

pub const CMOS_PORT: u64 = 0x70;
/// Number of ports: one for the register number and one for data.
pub const CMOS_LEN: u64 = 2;

/// Mask of the register number. The mask excludes bit 7, which masks non-maskable interrupts on
/// real hardware.
const REGISTER: u8 = 0x7f;
/// Time base of 32,768 Hz. Bit 7 would report an update in progress.
const STATUS_A: u8 = 0x26;
/// Bit for 24-hour mode.
const STATUS_B: u8 = 1 << 1;
/// Bit that shows that the time is valid.
const STATUS_D: u8 = 1 << 7;

pub fn wall_clock() -> Timestamp {
    // The conversion fails if the host's clock is beyond the year 9999.
    Timestamp::try_from(SystemTime::now()).unwrap_or(Timestamp::UNIX_EPOCH)
}

pub struct Cmos {
    register: Mutex<u8>,
    now: fn() -> Timestamp,
}

impl Cmos {
    /// Creates a clock that returns the time of `now`.
    pub fn new(now: fn() -> Timestamp) -> Self {
        Self { register: Mutex::new(0), now }
    }

    fn value(&self, register: u8) -> u8 {
        let now = TimeZone::UTC.to_datetime((self.now)());
        let bcd = |value: i8| {
            let value = value.unsigned_abs();
            ((value / 10) << 4) | (value % 10)
        };
        let [century, year] = [now.year() / 100, now.year() % 100].map(|part| part as i8);
        match register {
            0x00 => bcd(now.second()),
            0x02 => bcd(now.minute()),
            0x04 => bcd(now.hour()),
            0x06 => bcd(now.weekday().to_sunday_one_offset()),
            0x07 => bcd(now.day()),
            0x08 => bcd(now.month()),
            0x09 => bcd(year),
            0x0a => STATUS_A,
            0x0b => STATUS_B,
            0x0d => STATUS_D,
            0x32 => bcd(century),
            _ => 0,
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

    /// Registers of the time, from the century to the second.
    const TIME: [u8; 8] = [0x32, 0x09, 0x08, 0x07, 0x06, 0x04, 0x02, 0x00];

    fn read(cmos: &Cmos, register: u8) -> u8 {
        let mut data = [0];
        cmos.write(0, &[register | 0x80]);
        cmos.read(1, &mut data);
        data[0]
    }

    #[test]
    fn week_begins_on_sunday() {
        // 2023-12-31 23:59:59.
        let cmos = Cmos::new(|| Timestamp::constant(1_704_067_199, 0));
        let time = TIME.map(|register| read(&cmos, register));
        assert_eq!(time, [0x20, 0x23, 0x12, 0x31, 0x01, 0x23, 0x59, 0x59]);
    }

    #[test]
    fn clock_is_in_bcd_without_update_in_progress() {
        // 2009-02-13 23:31:30, a Friday.
        let cmos = Cmos::new(|| Timestamp::constant(1_234_567_890, 0));
        let read = |register| read(&cmos, register);
        assert_eq!(TIME.map(read), [0x20, 0x09, 0x02, 0x13, 0x06, 0x23, 0x31, 0x30]);
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
