//! Metrics of a virtio-rng device.

use std::sync::atomic::AtomicU64;

use prometheus_client::registry::Unit;

use crate::metrics::{Expose, Exposition, Family, get};

/// Counters of a virtio-rng device.
#[derive(Debug, Default)]
pub struct RngMetrics {
    /// Requests answered with entropy.
    pub requests: AtomicU64,
    /// Bytes of entropy provided to the guest.
    pub bytes: AtomicU64,
    /// Requests without a writable buffer.
    pub bad_requests: AtomicU64,
    /// Number of times that the source failed or ended. After that, the device reads from the
    /// kernel's generator.
    pub source_failures: AtomicU64,
}

impl Expose for RngMetrics {
    fn expose(&self, out: &mut Exposition) {
        out.counters(
            Family("rng_requests", "Requests answered with entropy.", None),
            [(vec![], get(&self.requests))],
        );
        out.counters(
            Family("rng", "Entropy provided to the guest.", Some(Unit::Bytes)),
            [(vec![], get(&self.bytes))],
        );
        out.counters(
            Family("rng_bad_requests", "Requests without a writable buffer.", None),
            [(vec![], get(&self.bad_requests))],
        );
        out.counters(
            Family(
                "rng_source_failures",
                "Failures or ends of the entropy source; the device reads from the kernel afterward.",
                None,
            ),
            [(vec![], get(&self.source_failures))],
        );
    }
}
