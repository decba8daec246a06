//! What the serial port counts.

use std::sync::atomic::AtomicU64;

/// Counters; they only grow.
#[derive(Debug, Default)]
pub struct SerialMetrics {
    /// Bytes that the guest has sent.
    pub output_bytes: AtomicU64,
    /// Bytes that could not be written where they should go.
    pub lost_bytes: AtomicU64,
    /// Bytes that the guest has been given.
    pub input_bytes: AtomicU64,
}
