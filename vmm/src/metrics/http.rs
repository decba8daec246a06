//! The servers of the API and of these metrics.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::expose::{Exposer, Family, one};
use crate::api::ConnectionCounters;

/// A server's name, and its counters.
pub(super) type NamedServer = (&'static str, Arc<ConnectionCounters>);

pub(super) fn expose(
    out: &mut Exposer<'_>,
    servers: &[NamedServer],
    refused_hosts: &AtomicU64,
) -> fmt::Result {
    let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    out.counters(
        Family("http_connections", "Connections that a server has accepted.", None),
        servers.iter().map(|(server, counters)| (one("server", server), get(&counters.accepted))),
    )?;
    let closed = servers.iter().flat_map(|(server, counters)| {
        [("silent", &counters.silent), ("idle", &counters.idle), ("timeout", &counters.timed_out)].map(
            |(reason, counter)| {
                (vec![("server", (*server).to_owned()), ("reason", reason.to_owned())], get(counter))
            },
        )
    });
    out.counters(
        Family("http_closed_connections", "Connections closed to make room, or after a time-out.", None),
        closed,
    )?;
    let refused = Family("metrics_refused_hosts", "Scrapes refused because of their Host header.", None);
    out.counters(refused, [(Vec::new(), get(refused_hosts))])
}
