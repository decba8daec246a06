//! Metrics of a virtio-console device.

use std::sync::atomic::AtomicU64;

use prometheus_client::registry::Unit;

use crate::metrics::{Expose, Exposition, Family, get, one};

/// Counters of a virtio-console device.
#[derive(Debug, Default)]
pub struct ConsoleMetrics {
    /// Bytes that the guest has sent.
    pub output_bytes: AtomicU64,
    /// Bytes of output that were lost or that exceeded the limit for one buffer chain.
    pub lost_bytes: AtomicU64,
    /// Bytes that the guest has received.
    pub input_bytes: AtomicU64,
    /// Buffer chains that contain no usable buffer.
    pub bad_requests: AtomicU64,
}

impl Expose for ConsoleMetrics {
    fn expose(&self, out: &mut Exposition) {
        out.counters(
            Family("console", "Bytes sent and received by the guest on hvc0.", Some(Unit::Bytes)),
            [
                (one("direction", "from-guest"), get(&self.output_bytes)),
                (one("direction", "to-guest"), get(&self.input_bytes)),
            ],
        );
        out.counters(
            Family("console_lost", "Output of hvc0 that was lost.", Some(Unit::Bytes)),
            [(vec![], get(&self.lost_bytes))],
        );
        out.counters(
            Family("console_bad_requests", "Requests without a usable buffer.", None),
            [(vec![], get(&self.bad_requests))],
        );
    }
}
