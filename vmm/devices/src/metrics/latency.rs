//! Lock-free histograms of durations.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper bounds of the buckets. They range from a flush of one cache line to a response of a guest
/// after a minute. One more bucket counts longer durations.
pub const LATENCY_BOUNDS_NS: [u64; 16] = [
    1_000,
    5_000,
    10_000,
    50_000,
    100_000,
    500_000,
    1_000_000,
    5_000_000,
    10_000_000,
    50_000_000,
    100_000_000,
    500_000_000,
    1_000_000_000,
    5_000_000_000,
    10_000_000_000,
    60_000_000_000,
];

const BUCKETS: usize = LATENCY_BOUNDS_NS.len() + 1;

/// Histogram of durations. Recording an observation costs two additions.
#[derive(Debug, Default)]
pub struct LatencyHistogram {
    buckets: [AtomicU64; BUCKETS],
    sum_ns: AtomicU64,
}

impl LatencyHistogram {
    pub fn observe(&self, duration: Duration) {
        let ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let bucket = LATENCY_BOUNDS_NS.partition_point(|bound| *bound < ns);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// Current counts.
    pub fn sample(&self) -> LatencySample {
        LatencySample {
            buckets: std::array::from_fn(|index| self.buckets[index].load(Ordering::Relaxed)),
            sum_ns: self.sum_ns.load(Ordering::Relaxed),
        }
    }

    /// Number of observations.
    pub fn count(&self) -> u64 {
        self.sample().count()
    }
}

/// Snapshot of a histogram.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LatencySample {
    /// Observations in each bucket, not cumulative. The last bucket has no upper bound.
    pub buckets: [u64; BUCKETS],
    /// Sum of all observed durations.
    pub sum_ns: u64,
}

impl LatencySample {
    /// Number of observations.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Upper bounds in seconds, with the number of observations in each bucket.
    pub(super) fn seconds(&self) -> Vec<(f64, u64)> {
        let bounds = LATENCY_BOUNDS_NS.iter().map(|ns| *ns as f64 / 1e9).chain([f64::INFINITY]);
        bounds.zip(self.buckets).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_fall_into_their_buckets() {
        let histogram = LatencyHistogram::default();
        for ns in [0, 1_000, 1_001, 60_000_000_000, 60_000_000_001] {
            histogram.observe(Duration::from_nanos(ns));
        }
        let sample = histogram.sample();
        assert_eq!(sample.count(), 5);
        assert_eq!(sample.sum_ns, 120_000_002_002);
        let filled: Vec<_> =
            sample.seconds().into_iter().filter(|(_, count)| *count != 0).collect();
        assert_eq!(filled, [(1e-6, 2), (5e-6, 1), (60.0, 1), (f64::INFINITY, 1)]);
    }
}
