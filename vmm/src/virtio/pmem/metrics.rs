//! What a virtio-pmem device counts.

use std::sync::atomic::AtomicU64;

use crate::metrics::LatencyHistogram;

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
    pub persists: LatencyHistogram,
}
