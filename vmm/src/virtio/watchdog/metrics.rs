//! What a watchdog counts.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::metrics::{Expose, Exposition, Family};

/// Counters of one device; they only grow.
#[derive(Debug, Default)]
pub struct WatchdogMetrics {
    /// Pings of the guest.
    pub pings: AtomicU64,
    /// Requests without a byte that can be written.
    pub bad_requests: AtomicU64,
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

impl Expose for WatchdogMetrics {
    fn expose(&self, out: &mut Exposition) {
        out.counters(Family("watchdog_pings", "Pings of the guest.", None), [(vec![], get(&self.pings))]);
        out.counters(
            Family("watchdog_bad_requests", "Requests without a byte that can be written.", None),
            [(vec![], get(&self.bad_requests))],
        );
    }
}
