//! Metrics of a watchdog.

use std::sync::atomic::AtomicU64;

use crate::metrics::{Expose, Exposition, Family, get};

/// Counters of a watchdog.
#[derive(Debug, Default)]
pub struct WatchdogMetrics {
    /// Pings received from the guest.
    pub pings: AtomicU64,
    /// Requests without a writable byte.
    pub bad_requests: AtomicU64,
}

impl Expose for WatchdogMetrics {
    fn expose(&self, out: &mut Exposition) {
        out.counters(
            Family("watchdog_pings", "Pings received from the guest.", None),
            [(vec![], get(&self.pings))],
        );
        out.counters(
            Family("watchdog_bad_requests", "Requests without a writable byte.", None),
            [(vec![], get(&self.bad_requests))],
        );
    }
}
