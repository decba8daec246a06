//! Entropy and console.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::registry::Unit;

use super::expose::{Exposer, Family, one};
use crate::virtio::console::ConsoleMetrics;
use crate::virtio::rng::RngMetrics;

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

pub(super) fn expose_rng(out: &mut Exposer<'_>, counters: &RngMetrics) -> fmt::Result {
    out.counters(
        Family("rng_requests", "Requests answered with entropy.", None),
        [(vec![], get(&counters.requests))],
    )?;
    out.counters(
        Family("rng", "Entropy given to the guest.", Some(Unit::Bytes)),
        [(vec![], get(&counters.bytes))],
    )?;
    out.counters(
        Family("rng_bad_requests", "Requests without a buffer that can be written.", None),
        [(vec![], get(&counters.bad_requests))],
    )?;
    out.counters(
        Family("rng_source_failures", "Times that the source failed or ended.", None),
        [(vec![], get(&counters.source_failures))],
    )
}

pub(super) fn expose_console(out: &mut Exposer<'_>, counters: &ConsoleMetrics) -> fmt::Result {
    out.counters(
        Family("console", "Bytes of hvc0.", Some(Unit::Bytes)),
        [
            (one("direction", "from-guest"), get(&counters.output_bytes)),
            (one("direction", "to-guest"), get(&counters.input_bytes)),
        ],
    )?;
    out.counters(
        Family("console_lost", "Output of hvc0 that could not be written.", Some(Unit::Bytes)),
        [(vec![], get(&counters.lost_bytes))],
    )?;
    out.counters(
        Family("console_bad_requests", "Requests without a buffer that the device can use.", None),
        [(vec![], get(&counters.bad_requests))],
    )
}
