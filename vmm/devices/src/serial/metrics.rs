//! Metrics of the serial port.

use std::sync::atomic::AtomicU64;

use prometheus_client::registry::Unit;

use crate::metrics::{Expose, Exposition, Family, get, one};

/// Counters of the serial port.
#[derive(Debug, Default)]
pub struct SerialMetrics {
    /// Bytes that the guest has sent.
    pub output_bytes: AtomicU64,
    /// Bytes of output that were lost.
    pub lost_bytes: AtomicU64,
    /// Bytes that the guest has received.
    pub input_bytes: AtomicU64,
}

impl Expose for SerialMetrics {
    fn expose(&self, out: &mut Exposition) {
        out.counters(
            Family("serial", "Bytes sent and received by the guest on COM1.", Some(Unit::Bytes)),
            [
                (one("direction", "from-guest"), get(&self.output_bytes)),
                (one("direction", "to-guest"), get(&self.input_bytes)),
            ],
        );
        out.counters(
            Family("serial_lost", "Output of COM1 that was lost.", Some(Unit::Bytes)),
            [(vec![], get(&self.lost_bytes))],
        );
    }
}
