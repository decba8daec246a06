//! What a vsock device counts. The registry reads it; nothing here knows how metrics are exposed.

use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::registry::Unit;

use crate::metrics::{Expose, Exposition, Family, one};

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Adds one.
    pub fn increment(&self) {
        self.add(1);
    }

    /// The count.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A number that goes up and down.
#[derive(Debug, Default)]
pub struct Gauge(AtomicU64);

impl Gauge {
    /// Sets it.
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// Its value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The metrics of one device, kept over its resets.
#[derive(Debug, Default)]
pub struct VsockMetrics {
    /// Sockets that are open on the host's side now, whatever their state.
    pub connections: Gauge,
    /// Connections on which both sides agreed.
    pub connections_total: Counter,
    /// Connections refused: nobody listens, no room, or not asked for in the right words.
    pub rejected_total: Counter,
    /// Connections ended because one side's silence lasted too long.
    pub expired_total: Counter,
    /// Connections ended because the guest broke the protocol.
    pub violations_total: Counter,
    /// Packets taken from the guest, good or bad.
    pub packets_from_guest_total: Counter,
    /// Packets given to the guest.
    pub packets_to_guest_total: Counter,
    /// Payload taken from the guest.
    pub bytes_from_guest_total: Counter,
    /// Payload given to the guest.
    pub bytes_to_guest_total: Counter,
    /// Resets given to the guest.
    pub resets_total: Counter,
    /// Packets ignored: wrong addresses, or too many resets owed already.
    pub dropped_total: Counter,
    /// Buffers that the device could not use: too short, too many pieces, or not in memory.
    pub bad_buffers_total: Counter,
    /// Queues given up until the next reset, because their rings make no sense.
    pub broken_queues_total: Counter,
}

impl Expose for VsockMetrics {
    fn expose(&self, out: &mut Exposition) {
        out.gauges(
            Family("vsock_open_connections", "Connections that are open on the host's side.", None),
            [(vec![], self.connections.get() as f64)],
        );
        out.counters(
            Family("vsock_connections", "Connections on which both sides agreed.", None),
            [(vec![], self.connections_total.get())],
        );
        out.counters(
            Family("vsock_failed_connections", "Connections that were refused or ended by the VMM.", None),
            [
                (one("reason", "rejected"), self.rejected_total.get()),
                (one("reason", "expired"), self.expired_total.get()),
                (one("reason", "violation"), self.violations_total.get()),
            ],
        );
        out.counters(
            Family("vsock_packets", "Packets, good or bad.", None),
            [
                (one("direction", "from-guest"), self.packets_from_guest_total.get()),
                (one("direction", "to-guest"), self.packets_to_guest_total.get()),
            ],
        );
        out.counters(
            Family("vsock", "Payload.", Some(Unit::Bytes)),
            [
                (one("direction", "from-guest"), self.bytes_from_guest_total.get()),
                (one("direction", "to-guest"), self.bytes_to_guest_total.get()),
            ],
        );
        out.counters(
            Family("vsock_resets", "Resets given to the guest.", None),
            [(vec![], self.resets_total.get())],
        );
        out.counters(
            Family("vsock_bad_input", "What the guest sent and the device could not use.", None),
            [
                (one("kind", "packet"), self.dropped_total.get()),
                (one("kind", "buffer"), self.bad_buffers_total.get()),
                (one("kind", "queue"), self.broken_queues_total.get()),
            ],
        );
    }
}
