//! What a virtio-rng device counts.

use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::registry::Unit;

use crate::metrics::{Expose, Exposition, Family};

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

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

impl Expose for RngMetrics {
    fn expose(&self, out: &mut Exposition) {
        out.counters(
            Family("rng_requests", "Requests answered with entropy.", None),
            [(vec![], get(&self.requests))],
        );
        out.counters(
            Family("rng", "Entropy given to the guest.", Some(Unit::Bytes)),
            [(vec![], get(&self.bytes))],
        );
        out.counters(
            Family("rng_bad_requests", "Requests without a buffer that can be written.", None),
            [(vec![], get(&self.bad_requests))],
        );
        out.counters(
            Family("rng_source_failures", "Times that the source failed or ended.", None),
            [(vec![], get(&self.source_failures))],
        );
    }
}
