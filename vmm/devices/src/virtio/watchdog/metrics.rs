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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;

    #[test]
    fn each_counter_is_exposed_by_its_own_name() {
        let metrics = WatchdogMetrics { pings: 81.into(), bad_requests: 7.into() };
        let text = Metrics::new("vm").encode(&metrics).unwrap();
        for line in ["pings_total{vm=\"vm\"} 81", "bad_requests_total{vm=\"vm\"} 7"] {
            assert!(text.contains(&format!("foreshore_watchdog_{line}\n")), "{text}");
        }
    }
}
