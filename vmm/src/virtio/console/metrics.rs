//! What a virtio-console device counts.

use std::sync::atomic::AtomicU64;

/// Counters of one device; they only grow.
#[derive(Debug, Default)]
pub struct ConsoleMetrics {
    /// Bytes that the guest has sent.
    pub output_bytes: AtomicU64,
    /// Bytes that could not be written where they should go, or that were too many for one buffer chain.
    pub lost_bytes: AtomicU64,
    /// Bytes that the guest has been given.
    pub input_bytes: AtomicU64,
    /// Chains without a buffer that the device can use.
    pub bad_requests: AtomicU64,
}
