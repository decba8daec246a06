//! Metrics of a pvpanic device.

use std::sync::atomic::{AtomicU64, Ordering};

use super::GuestPanic;
use crate::metrics::{Expose, Exposition, Family, one};

/// Counters of a pvpanic device.
#[derive(Debug, Default)]
pub struct PvPanicMetrics {
    reports: [AtomicU64; GuestPanic::ALL.len()],
}

impl PvPanicMetrics {
    pub(super) fn count(&self, report: GuestPanic) {
        self.reports[report as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Number of reports of the given kind.
    pub fn reports(&self, report: GuestPanic) -> u64 {
        self.reports[report as usize].load(Ordering::Relaxed)
    }
}

impl Expose for PvPanicMetrics {
    fn expose(&self, out: &mut Exposition) {
        let samples =
            GuestPanic::ALL.map(|report| (one("event", report.label()), self.reports(report)));
        out.counters(
            Family("guest_panics", "Panics reported by the guest's kernel.", None),
            samples,
        );
    }
}
