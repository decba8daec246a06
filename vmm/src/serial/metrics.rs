//! What the serial port counts.

use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::registry::Unit;

use crate::metrics::{Expose, Exposition, Family, one};

/// Counters; they only grow.
#[derive(Debug, Default)]
pub struct SerialMetrics {
    /// Bytes that the guest has sent.
    pub output_bytes: AtomicU64,
    /// Bytes that could not be written where they should go.
    pub lost_bytes: AtomicU64,
    /// Bytes that the guest has been given.
    pub input_bytes: AtomicU64,
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

impl Expose for SerialMetrics {
    fn expose(&self, out: &mut Exposition) {
        out.counters(
            Family("serial", "Bytes of COM1.", Some(Unit::Bytes)),
            [
                (one("direction", "from-guest"), get(&self.output_bytes)),
                (one("direction", "to-guest"), get(&self.input_bytes)),
            ],
        );
        out.counters(
            Family("serial_lost", "Output of COM1 that could not be written.", Some(Unit::Bytes)),
            [(vec![], get(&self.lost_bytes))],
        );
    }
}
