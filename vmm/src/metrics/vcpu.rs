//! What vCPUs do.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::expose::{Exposer, Family};
use crate::bus::BusMetrics;

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
