//! Time and sizes.

use std::fmt;

pub(crate) use foreshore_proto::scale;
use serde::Serialize;

/// 2^20 bytes.
pub const MIB: u64 = 1 << 20;

/// Unit in which memory is plugged: a block of virtio-mem and a chunk of a pool.
pub const BLOCK_BYTES: u64 = 2 * MIB;

/// Page of the guest. The protocol counts in pages, and x86-64 has no other size.
pub(crate) const PAGE_BYTES: u64 = 4096;

/// Section, the unit in which Linux adds page descriptors, even if only one block of it is plugged.
pub(crate) const SECTION_BYTES: u64 = 128 * MIB;

/// Size of the page descriptors of a section: 64 bytes for each page of 4 KiB.
pub(crate) const SECTION_DESCRIPTOR_BYTES: u64 = SECTION_BYTES / PAGE_BYTES * 64;

/// Time on the caller's monotonic clock, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct TimeMs(pub u64);

impl TimeMs {
    /// Milliseconds since `earlier`, or 0 if that is later.
    pub fn since(self, earlier: TimeMs) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl std::ops::Add<u64> for TimeMs {
    type Output = TimeMs;

    fn add(self, ms: u64) -> TimeMs {
        TimeMs(self.0.saturating_add(ms))
    }
}

impl fmt::Display for TimeMs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}ms", self.0)
    }
}

/// The largest multiple of `unit` that is at most `value`.
pub(crate) fn round_down(value: u64, unit: u64) -> u64 {
    value - value % unit.max(1)
}

/// The smallest multiple of `unit` that is at least `value`, or the largest one that fits.
pub(crate) fn round_up(value: u64, unit: u64) -> u64 {
    let down = round_down(value, unit);
    if down == value { value } else { down.checked_add(unit).unwrap_or(down) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_stays_on_multiples_at_limits() {
        assert_eq!(round_down(5, 2), 4);
        assert_eq!(round_up(5, 2), 6);
        assert_eq!(round_up(6, 2), 6);
        assert_eq!(round_up(u64::MAX, BLOCK_BYTES) % BLOCK_BYTES, 0);
        assert_eq!(round_up(0, BLOCK_BYTES), 0);
    }

    #[test]
    fn time_since_a_later_moment_is_zero() {
        assert_eq!(TimeMs(5).since(TimeMs(9)), 0);
        assert_eq!(TimeMs(9).since(TimeMs(5)), 4);
    }
}
