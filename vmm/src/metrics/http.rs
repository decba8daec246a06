//! Metrics of the HTTP servers: the API and the metrics themselves.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::exposition::{Expose, Exposition, Family, and, get, one};
use crate::api::ConnectionCounters;

/// Server with its counters.
pub(super) struct Server {
    pub(super) name: &'static str,
    pub(super) counters: Arc<ConnectionCounters>,
}

impl Expose for Server {
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

/// Scrapes refused because of their `Host` header.
pub(super) struct RefusedHosts(pub(super) Arc<AtomicU64>);

impl Expose for RefusedHosts {
    fn expose(&self, out: &mut Exposition) {
        let family = Family("metrics_refused_hosts", "Scrapes refused because of their Host header.", None);
        out.counters(family, [(vec![], self.0.load(Ordering::Relaxed))]);
    }
}
