//! Rate limit for erasing. The rate limit does not read a clock. Callers pass the current time.

use std::num::NonZeroU64;
use std::time::Duration;

/// Limits the average rate of erased bytes over any period. The limit is exceeded by at most one
/// batch.
#[derive(Debug)]
pub(crate) struct Pacer {
    /// Limit in bytes per second. `None` means unlimited.
    bytes_per_s: Option<NonZeroU64>,
    /// Earliest start of the next batch.
    next: Duration,
}

impl Pacer {
    pub(crate) fn new(bytes_per_s: Option<NonZeroU64>) -> Self {
        Self { bytes_per_s, next: Duration::ZERO }
    }

    /// Changes the limit, starting with the next batch.
    pub(crate) fn set(&mut self, bytes_per_s: Option<NonZeroU64>) {
        if self.bytes_per_s != bytes_per_s {
            *self = Self::new(bytes_per_s);
        }
    }

    /// Returns the size of the next batch, which is at most `max_bytes`. A low limit results in
    /// smaller batches, and therefore in shorter pauses.
    pub(crate) fn batch_bytes(&self, max_bytes: u64) -> u64 {
        self.bytes_per_s.map_or(max_bytes, |rate| max_bytes.min(rate.get() / BATCHES_PER_S))
    }

    /// Accounts for a batch that began at `began`. Idle time before the batch does not allow more
    /// bytes later.
    pub(crate) fn spend(&mut self, bytes: u64, began: Duration) {
        let Some(rate) = self.bytes_per_s else { return };
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(rate.get());
        let duration = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        self.next = self.next.max(began).saturating_add(duration);
    }

    /// Accounts for `bytes` that were erased by `now` without waiting for the limit. The next batch
    /// is delayed accordingly, but by at most `MAX_DEBT`. Otherwise, a large number of bytes would
    /// stop the thread for many minutes.
    pub(crate) fn owe(&mut self, bytes: u64, now: Duration) {
        let latest = self.next.max(now.saturating_add(MAX_DEBT));
        self.spend(bytes, now);
        self.next = self.next.min(latest);
    }

    /// Returns the time until the next batch may begin.
    pub(crate) fn wait(&self, now: Duration) -> Duration {
        self.next.saturating_sub(now)
    }
}

/// Maximum delay of a batch that is caused by `owe`.
pub(in crate::pool) const MAX_DEBT: Duration = Duration::from_secs(10);
/// Minimum number of batches per second, so that a low limit applies to each second instead of each
/// minute.
const BATCHES_PER_S: u64 = 16;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn pacer(bytes_per_s: u64) -> Pacer {
        Pacer::new(NonZeroU64::new(bytes_per_s))
    }

    #[test]
    fn duration_of_a_batch_counts() {
        let mut pacer = pacer(100 * MIB);
        let s = Duration::from_secs;
        assert_eq!(pacer.wait(s(5)), Duration::ZERO);
        pacer.spend(50 * MIB, s(5));
        assert_eq!(pacer.wait(s(5)), Duration::from_millis(500));
        assert_eq!(pacer.wait(Duration::from_millis(5400)), Duration::from_millis(100));
        // A batch that is slower than the limit causes no wait, and does not allow more bytes
        // later.
        assert_eq!(pacer.wait(s(60)), Duration::ZERO);
        pacer.spend(100 * MIB, s(60));
        assert_eq!(pacer.wait(s(60)), s(1));
    }

    #[test]
    fn next_batch_waits_at_most_ten_seconds_for_unpaced_bytes() {
        let mut pacer = pacer(16 * MIB);
        let s = Duration::from_secs;
        pacer.owe(32 * MIB, s(5));
        assert_eq!(pacer.wait(s(5)), s(2));
        pacer.owe(24 << 30, s(6));
        assert_eq!(pacer.wait(s(6)), MAX_DEBT);
        pacer.owe(24 << 30, s(7));
        assert_eq!(pacer.wait(s(7)), MAX_DEBT);
    }

    #[test]
    fn unlimited_pacer_never_waits() {
        let mut pacer = Pacer::new(None);
        assert_eq!(pacer.batch_bytes(16 * MIB), 16 * MIB);
        pacer.spend(u64::MAX, Duration::ZERO);
        assert_eq!(pacer.wait(Duration::ZERO), Duration::ZERO);
        pacer.set(NonZeroU64::new(MIB));
        pacer.spend(MIB, Duration::ZERO);
        assert_eq!(pacer.wait(Duration::ZERO), Duration::from_secs(1));
        pacer.set(None);
        assert_eq!(pacer.wait(Duration::ZERO), Duration::ZERO);
    }

    #[test]
    fn slow_limit_makes_small_batches() {
        assert_eq!(pacer(1 << 30).batch_bytes(16 * MIB), 16 * MIB);
        assert_eq!(pacer(64 * MIB).batch_bytes(16 * MIB), 4 * MIB);
    }

    proptest! {
        /// Checks batches of any size and duration with any pauses. Between the starts of any two
        /// batches, no more bytes are erased than the limit allows.
        #[test]
        fn limit_holds_over_every_period(
            rate in MIB..4096 * MIB,
            batches in prop::collection::vec((1..16 * MIB, 0..50_000_000u64, 0..100_000_000u64), 2..50),
        ) {
            let mut pacer = pacer(rate);
            let (mut now, mut begun) = (Duration::ZERO, Vec::new());
            for (bytes, takes_ns, pause_ns) in batches {
                now += pacer.wait(now);
                begun.push((now, bytes));
                pacer.spend(bytes, now);
                now += Duration::from_nanos(takes_ns + pause_ns);
            }
            for from in 0..begun.len() {
                let mut done = 0;
                for to in from + 1..begun.len() {
                    done += begun[to - 1].1;
                    let allowed = (begun[to].0 - begun[from].0).as_nanos() * u128::from(rate) / 1_000_000_000;
                    // Allows 1 ns for each rounding.
                    let tolerance = (to as u128) * (u128::from(rate) / 1_000_000_000 + 1);
                    prop_assert!(u128::from(done) <= allowed + tolerance, "{} bytes, {} allowed", done, allowed);
                }
            }
        }
    }
}
