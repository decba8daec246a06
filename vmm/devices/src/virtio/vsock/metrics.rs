//! Metrics of a vsock device.

use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::registry::Unit;

use crate::metrics::{Expose, Exposition, Family, one};

#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub fn increment(&self) {
        self.add(1);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A metric that can rise and fall.
#[derive(Debug, Default)]
pub struct Gauge(AtomicU64);

impl Gauge {
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Metrics of one device, which are retained across resets.
#[derive(Debug, Default)]
pub struct VsockMetrics {
    /// Sockets that are open on the host, in any state.
    pub connections: Gauge,
    pub connections_total: Counter,
    /// Connections refused: no listener, no room, or a malformed request.
    pub rejected_total: Counter,
    /// Connections that timed out.
    pub expired_total: Counter,
    /// Connections ended because the guest violated the protocol.
    pub violations_total: Counter,
    /// Packets received from the guest, including invalid ones.
    pub packets_from_guest_total: Counter,
    /// Packets sent to the guest.
    pub packets_to_guest_total: Counter,
    /// Bytes of payload received from the guest.
    pub bytes_from_guest_total: Counter,
    /// Bytes of payload sent to the guest.
    pub bytes_to_guest_total: Counter,
    /// Resets sent to the guest.
    pub resets_total: Counter,
    /// Packets ignored: wrong addresses, or too many resets are pending.
    pub dropped_total: Counter,
    /// Buffers that the device cannot use: too short, too many pieces, or outside guest memory.
    pub bad_buffers_total: Counter,
    /// Queues that are stopped until the next reset, because their rings are invalid.
    pub broken_queues_total: Counter,
}

impl Expose for VsockMetrics {
    fn expose(&self, out: &mut Exposition) {
        out.gauges(
            Family("vsock_open_connections", "Open connections on the host.", None),
            [(vec![], self.connections.get() as f64)],
        );
        out.counters(
            Family("vsock_connections", "Established connections.", None),
            [(vec![], self.connections_total.get())],
        );
        out.counters(
            Family("vsock_failed_connections", "Connections refused or ended by the VMM.", None),
            [
                (one("reason", "rejected"), self.rejected_total.get()),
                (one("reason", "expired"), self.expired_total.get()),
                (one("reason", "violation"), self.violations_total.get()),
            ],
        );
        out.counters(
            Family("vsock_packets", "Packets, including invalid ones.", None),
            [
                (one("direction", "from-guest"), self.packets_from_guest_total.get()),
                (one("direction", "to-guest"), self.packets_to_guest_total.get()),
            ],
        );
        out.counters(
            Family("vsock", "Bytes of payload.", Some(Unit::Bytes)),
            [
                (one("direction", "from-guest"), self.bytes_from_guest_total.get()),
                (one("direction", "to-guest"), self.bytes_to_guest_total.get()),
            ],
        );
        out.counters(
            Family("vsock_resets", "Resets sent to the guest.", None),
            [(vec![], self.resets_total.get())],
        );
        out.counters(
            Family("vsock_bad_input", "Invalid packets, buffers and queues of the guest.", None),
            [
                (one("kind", "packet"), self.dropped_total.get()),
                (one("kind", "buffer"), self.bad_buffers_total.get()),
                (one("kind", "queue"), self.broken_queues_total.get()),
            ],
        );
    }
}
