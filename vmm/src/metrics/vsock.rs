//! The vsock device.

use std::fmt;

use prometheus_client::registry::Unit;

use super::expose::{Exposer, Family, one};
use crate::virtio::vsock::VsockMetrics;

pub(super) fn expose(out: &mut Exposer<'_>, counters: &VsockMetrics) -> fmt::Result {
    out.gauges(
        Family("vsock_open_connections", "Connections that are open on the host's side.", None),
        [(vec![], counters.connections.get() as f64)],
    )?;
    out.counters(
        Family("vsock_connections", "Connections on which both sides agreed.", None),
        [(vec![], counters.connections_total.get())],
    )?;
    out.counters(
        Family("vsock_failed_connections", "Connections that were refused or ended by the VMM.", None),
        [
            (one("reason", "rejected"), counters.rejected_total.get()),
            (one("reason", "expired"), counters.expired_total.get()),
            (one("reason", "violation"), counters.violations_total.get()),
        ],
    )?;
    out.counters(
        Family("vsock_packets", "Packets, good or bad.", None),
        [
            (one("direction", "from-guest"), counters.packets_from_guest_total.get()),
            (one("direction", "to-guest"), counters.packets_to_guest_total.get()),
        ],
    )?;
    out.counters(
        Family("vsock", "Payload.", Some(Unit::Bytes)),
        [
            (one("direction", "from-guest"), counters.bytes_from_guest_total.get()),
            (one("direction", "to-guest"), counters.bytes_to_guest_total.get()),
        ],
    )?;
    out.counters(
        Family("vsock_resets", "Resets given to the guest.", None),
        [(vec![], counters.resets_total.get())],
    )?;
    out.counters(
        Family("vsock_bad_input", "What the guest sent and the device could not use.", None),
        [
            (one("kind", "packet"), counters.dropped_total.get()),
            (one("kind", "buffer"), counters.bad_buffers_total.get()),
            (one("kind", "queue"), counters.broken_queues_total.get()),
        ],
    )
}
