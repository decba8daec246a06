//! Metrics of an HTTP server.

use std::sync::Arc;

use foreshore_devices::metrics::{Expose, Exposition, Family, and, get, one};

use super::ConnectionCounters;

#[derive(Debug)]
pub struct ServerMetrics {
    name: &'static str,
    counters: Arc<ConnectionCounters>,
}

impl ServerMetrics {
    pub fn new(name: &'static str, counters: Arc<ConnectionCounters>) -> Self {
        Self { name, counters }
    }
}

impl Expose for ServerMetrics {
    fn expose(&self, out: &mut Exposition) {
        let labels = one("server", self.name);
        let closed = [
            ("silent", &self.counters.silent),
            ("idle", &self.counters.idle),
            ("timeout", &self.counters.timed_out),
        ];
        let closed = closed.map(|(reason, counter)| (and(&labels, "reason", reason), get(counter)));
        out.counters(
            Family("http_connections", "Connections accepted by the server.", None),
            [(labels, get(&self.counters.accepted))],
        );
        out.counters(
            Family(
                "http_closed_connections",
                "Connections closed by the server to make room or after a timeout.",
                None,
            ),
            closed,
        );
    }
}
