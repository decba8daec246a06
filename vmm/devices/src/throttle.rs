//! Rate limits for requests and output. The functions read no clock. The caller passes the time.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub(crate) const NANOS_PER_S: u128 = 1_000_000_000;

/// Token bucket: tokens are added at a rate, up to a capacity.
#[derive(Debug)]
pub(crate) struct TokenBucket {
    capacity: u64,
    rate_per_s: NonZeroU64,
    /// Level in billionths of a token, so that refills at any interval are exact.
    pub(crate) level: u128,
    refilled: Instant,
}

impl TokenBucket {
    pub(crate) fn full(capacity: u64, rate_per_s: NonZeroU64, now: Instant) -> Self {
        Self { capacity, rate_per_s, level: u128::from(capacity) * NANOS_PER_S, refilled: now }
    }

    pub(crate) fn refill(&mut self, now: Instant) {
        let nanos = now.saturating_duration_since(self.refilled).as_nanos();
        let more = nanos.saturating_mul(u128::from(self.rate_per_s.get()));
        self.level = self.level.saturating_add(more).min(u128::from(self.capacity) * NANOS_PER_S);
        self.refilled = self.refilled.max(now);
    }

    /// Time from the last refill until `tokens` are available.
    pub(crate) fn wait(&self, tokens: u64) -> Duration {
        assert!(tokens <= self.capacity, "{tokens} tokens of a bucket of {}", self.capacity);
        let missing = (u128::from(tokens) * NANOS_PER_S).saturating_sub(self.level);
        let nanos = missing.div_ceil(u128::from(self.rate_per_s.get()));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// Takes tokens. Enough tokens must be available.
    pub(crate) fn take(&mut self, tokens: u64) {
        self.level -= u128::from(tokens) * NANOS_PER_S;
    }

    /// Takes tokens, or all available tokens if there are fewer.
    pub(crate) fn take_available(&mut self, tokens: u64) {
        self.level = self.level.saturating_sub(u128::from(tokens) * NANOS_PER_S);
    }
}

/// Counters of requests that were delayed because they exceeded a rate limit.
#[derive(Debug, Default)]
pub struct ThrottleMetrics {
    requests: AtomicU64,
    nanos: AtomicU64,
}

impl ThrottleMetrics {
    pub fn begin(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    pub fn end(&self, delay: Duration) {
        let nanos = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
        self.nanos.fetch_add(nanos, Ordering::Relaxed);
    }

    /// Number of delayed requests, including one that is waiting now.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Total length of all delays that have ended.
    pub fn delay(&self) -> Duration {
        Duration::from_nanos(self.nanos.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(per_s: u64) -> NonZeroU64 {
        NonZeroU64::new(per_s).unwrap()
    }

    #[test]
    fn bucket_refills_exactly_up_to_its_capacity() {
        let start = Instant::now();
        let mut bucket = TokenBucket::full(10, rate(3), start);
        bucket.take(10);
        assert_eq!(bucket.wait(1), Duration::from_nanos(333_333_334));
        // Refilling every millisecond loses nothing by rounding.
        for ms in 1..=1000 {
            bucket.refill(start + Duration::from_millis(ms));
        }
        assert_eq!((bucket.wait(3), bucket.level), (Duration::ZERO, 3 * NANOS_PER_S));
        // A clock that stops or goes back adds no tokens.
        bucket.refill(start);
        bucket.refill(start + Duration::from_secs(1));
        assert_eq!(bucket.level, 3 * NANOS_PER_S);
        bucket.refill(start + Duration::from_secs(1 << 40));
        assert_eq!(bucket.level, 10 * NANOS_PER_S);
    }
}
