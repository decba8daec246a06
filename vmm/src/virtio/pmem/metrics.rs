//! What a virtio-pmem device counts.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Counters of one device; they only grow.
#[derive(Debug, Default)]
pub struct PmemMetrics {
    /// Flush requests answered with success.
    pub flushes: AtomicU64,
    /// Flush requests answered with an error, because the backing could not be made durable.
    pub flush_failures: AtomicU64,
    /// Requests that are no flush, or whose buffers are not those of a request.
    pub bad_requests: AtomicU64,
    /// Calls that made the backing durable: several requests that wait together share one.
    pub persists: AtomicU64,
    /// Time spent in them, in nanoseconds.
    pub persist_ns: AtomicU64,
}

impl PmemMetrics {
    /// Counts one call that made the backing durable.
    pub fn persisted(&self, took: Duration) {
        self.persists.fetch_add(1, Ordering::Relaxed);
        self.persist_ns.fetch_add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}
