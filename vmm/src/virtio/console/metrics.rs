//! What a virtio-console device counts.

use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::registry::Unit;

use crate::metrics::{Expose, Exposition, Family, one};

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

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

impl Expose for ConsoleMetrics {
    fn expose(&self, out: &mut Exposition) {
        out.counters(
            Family("console", "Bytes of hvc0.", Some(Unit::Bytes)),
            [
                (one("direction", "from-guest"), get(&self.output_bytes)),
                (one("direction", "to-guest"), get(&self.input_bytes)),
            ],
        );
        out.counters(
            Family("console_lost", "Output of hvc0 that could not be written.", Some(Unit::Bytes)),
            [(vec![], get(&self.lost_bytes))],
        );
        out.counters(
            Family("console_bad_requests", "Requests without a buffer that the device can use.", None),
            [(vec![], get(&self.bad_requests))],
        );
    }
}
