//! What vCPUs do.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::expose::{Exposer, Family};
use crate::bus::BusMetrics;

/// How many vCPUs there are.
#[derive(Debug, Default)]
pub struct VcpuMetrics {
    /// That the guest has, or has been given.
    pub present: AtomicU64,
    /// That it was asked to let go, and has not.
    pub leaving: AtomicU64,
    /// That it has let go, and that wait until it is to have them again.
    pub parked: AtomicU64,
}

pub(super) fn expose_counts(out: &mut Exposer<'_>, metrics: &VcpuMetrics) -> fmt::Result {
    let states = [("present", &metrics.present), ("leaving", &metrics.leaving), ("parked", &metrics.parked)];
    let samples = states
        .map(|(state, gauge)| (vec![("state", state.to_owned())], gauge.load(Ordering::Relaxed) as f64));
    out.gauges(Family("vcpus", "vCPUs.", None), samples)
}

pub(super) fn expose(out: &mut Exposer<'_>, buses: &[(&'static str, Arc<BusMetrics>)]) -> fmt::Result {
    let sample = |space: &str, direction: &str, counter: &AtomicU64| {
        let labels = vec![("space", space.to_owned()), ("direction", direction.to_owned())];
        (labels, counter.load(Ordering::Relaxed))
    };
    let samples = buses.iter().flat_map(|(space, counters)| {
        [
            sample(space, "read", &counters.unanswered_reads),
            sample(space, "write", &counters.unanswered_writes),
        ]
    });
    out.counters(
        Family("vcpu_unanswered_accesses", "Accesses of the guest that no device answers.", None),
        samples,
    )
}
