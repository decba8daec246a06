//! What a watchdog counts.

use std::sync::atomic::AtomicU64;

/// Counters of one device; they only grow.
#[derive(Debug, Default)]
pub struct WatchdogMetrics {
    /// Pings of the guest.
    pub pings: AtomicU64,
    /// Requests without a byte that can be written.
    pub bad_requests: AtomicU64,
}
