//! Rate limit of a console's output file.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Port;
use super::config::DEFAULT_MAX_SIZE;
use super::rotated_file::ConsoleFileMetrics;
use crate::throttle::{ThrottleMetrics, TokenBucket};

/// Number of bytes that a console may write without delay. No boot writes that much. A log whose
/// average is below the rate hardly uses the burst, so only a flood of output is delayed. The burst
/// equals the default size limit, so a flood fills one file before it is delayed.
pub(super) const BURST_BYTES: u64 = DEFAULT_MAX_SIZE;

/// Rate limits of a VM's consoles. They are kept across reboots, so that a guest cannot reset them
/// by rebooting.
#[derive(Debug, Default)]
pub(super) struct FileRates(BTreeMap<Port, FileRate>);

#[derive(Debug)]
struct FileRate {
    bytes_per_s: NonZeroU64,
    bucket: Arc<Mutex<TokenBucket>>,
}

impl FileRates {
    /// Returns the token bucket of `port`. Creates a full bucket if the port has none, or if its
    /// rate has changed.
    pub(super) fn bucket(
        &mut self,
        port: Port,
        bytes_per_s: NonZeroU64,
        now: Instant,
    ) -> Arc<Mutex<TokenBucket>> {
        match self.0.get(&port) {
            Some(rate) if rate.bytes_per_s == bytes_per_s => Arc::clone(&rate.bucket),
            _ => {
                let bucket = Arc::new(Mutex::new(TokenBucket::full(BURST_BYTES, bytes_per_s, now)));
                self.0.insert(port, FileRate { bytes_per_s, bucket: Arc::clone(&bucket) });
                bucket
            }
        }
    }
}

/// Delays output to a file, and counts the delays.
#[derive(Debug)]
pub(super) struct FileThrottle {
    bucket: Arc<Mutex<TokenBucket>>,
    metrics: Arc<ConsoleFileMetrics>,
}

impl FileThrottle {
    pub(super) fn new(bucket: Arc<Mutex<TokenBucket>>, metrics: Arc<ConsoleFileMetrics>) -> Self {
        Self { bucket, metrics }
    }

    /// Takes one token for each of `len` bytes. If there are too few, takes none and returns the
    /// time to wait before the next attempt.
    pub(super) fn take(&self, len: usize, now: Instant) -> Result<(), Duration> {
        let mut bucket = self.bucket.lock();
        bucket.refill(now);
        let wait = bucket.wait(len as u64);
        if wait > Duration::ZERO {
            return Err(wait);
        }
        bucket.take(len as u64);
        Ok(())
    }

    /// Takes up to `len` tokens, for bytes that are written without delay.
    pub(super) fn take_available(&self, len: usize, now: Instant) {
        let mut bucket = self.bucket.lock();
        bucket.refill(now);
        bucket.take_available(len as u64);
    }

    pub(super) fn metrics(&self) -> &ThrottleMetrics {
        &self.metrics.throttled
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::throttle::NANOS_PER_S;

    const RATE: NonZeroU64 = NonZeroU64::new(1 << 20).unwrap();

    #[test]
    fn console_keeps_its_bucket_until_the_rate_changes() {
        let now = Instant::now();
        let mut rates = FileRates::default();
        let bytes = |bucket: &Mutex<TokenBucket>| bucket.lock().level / NANOS_PER_S;
        rates.bucket(Port::Serial, RATE, now).lock().take(BURST_BYTES);
        assert_eq!(bytes(&rates.bucket(Port::Serial, RATE, now)), 0);
        assert_eq!(bytes(&rates.bucket(Port::Console, RATE, now)), u128::from(BURST_BYTES));
        let other = RATE.saturating_add(1);
        assert_eq!(bytes(&rates.bucket(Port::Serial, other, now)), u128::from(BURST_BYTES));
    }

    #[test]
    fn output_beyond_the_burst_is_delayed_by_the_rate() {
        let now = Instant::now();
        let bucket = FileRates::default().bucket(Port::Serial, RATE, now);
        let throttle = FileThrottle::new(bucket, Arc::default());
        let step = 64 << 10;
        for _ in 0..BURST_BYTES / step as u64 {
            assert_eq!(throttle.take(step, now), Ok(()));
        }
        let wait = Duration::from_millis(1000) / 16;
        assert_eq!(throttle.take(step, now), Err(wait));
        assert_eq!(throttle.take(step, now + wait), Ok(()));
        // Output without delay takes the available tokens, so the next output is delayed.
        throttle.take_available(step, now + wait * 3 / 2);
        assert_eq!(throttle.take(step, now + wait * 3 / 2), Err(wait));
    }
}
