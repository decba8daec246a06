//! What a virtio-rng device counts.

use std::sync::atomic::AtomicU64;

/// Counters of one device; they only grow.
#[derive(Debug, Default)]
pub struct RngMetrics {
    /// Requests answered with entropy.
    pub requests: AtomicU64,
    /// Bytes of it.
    pub bytes: AtomicU64,
    /// Requests without a buffer that can be written.
    pub bad_requests: AtomicU64,
    /// Times the source failed or ended; from then on the kernel is asked instead.
    pub source_failures: AtomicU64,
}
