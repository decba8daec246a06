//! Network interfaces.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use prometheus_client::registry::Unit;

use super::expose::{Exposer, Family, one};
use crate::virtio::net::NetMetrics;
use crate::virtio::net::metrics::{Direction, DropReason};

/// An interface and its counters.
#[derive(Clone, Debug)]
pub struct NetDeviceMetrics {
    /// What the VMM calls it.
    pub net: String,
    /// Its counters.
    pub counters: Arc<NetMetrics>,
}

pub(super) fn expose(out: &mut Exposer<'_>, all: &[NetDeviceMetrics]) -> fmt::Result {
    let directions = |value: fn(&NetMetrics, Direction) -> u64| {
        all.iter().flat_map(move |device| {
            Direction::ALL.map(|direction| {
                let mut labels = one("net", &device.net);
                labels.push(("direction", direction.as_str().to_owned()));
                (labels, value(&device.counters, direction))
            })
        })
    };
    let frames = Family("net_frames", "Frames that have passed.", None);
    out.counters(frames, directions(NetMetrics::frames))?;
    let bytes = Family("net", "Bytes of these frames.", Some(Unit::Bytes));
    out.counters(bytes, directions(NetMetrics::bytes))?;
    let drops = all.iter().flat_map(|device| {
        Direction::ALL.into_iter().flat_map(move |direction| {
            DropReason::ALL.map(|reason| {
                let mut labels = one("net", &device.net);
                labels.push(("direction", direction.as_str().to_owned()));
                labels.push(("reason", reason.as_str().to_owned()));
                (labels, device.counters.drops(direction, reason))
            })
        })
    });
    out.counters(Family("net_dropped_frames", "Frames that were dropped.", None), drops)?;
    let count = |counter: fn(&NetMetrics) -> u64| {
        all.iter().map(move |device| (one("net", &device.net), counter(&device.counters)))
    };
    let bad = Family("net_bad_requests", "Requests that are no frame, or no place for one.", None);
    out.counters(bad, count(|counters| counters.bad_requests.load(Ordering::Relaxed)))?;
    let broken = Family("net_broken_queues", "Queues whose ring made no sense, until a reset.", None);
    out.counters(broken, count(|counters| counters.broken_queues.load(Ordering::Relaxed)))
}
