//! Network interfaces.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use prometheus_client::registry::Unit;

use super::expose::{Exposer, Family, Labels, one};
use crate::virtio::net::NetMetrics;
use crate::virtio::net::metrics::{Direction, DropReason, Traffic};

/// An interface and its counters.
#[derive(Clone, Debug)]
pub struct NetDeviceMetrics {
    /// What the VMM calls it.
    pub net: String,
    /// Its counters.
    pub counters: Arc<NetMetrics>,
}

/// What has passed of a device, of which not all is known that the kernel serves.
fn traffic(device: &NetDeviceMetrics) -> Vec<(Labels, Traffic)> {
    let known = Direction::ALL.into_iter().filter_map(|direction| {
        let mut labels = one("net", &device.net);
        labels.push(("direction", direction.as_str().to_owned()));
        Some((labels, device.counters.traffic(direction)?))
    });
    known.collect()
}

pub(super) fn expose(out: &mut Exposer<'_>, all: &[NetDeviceMetrics]) -> fmt::Result {
    let backends = all.iter().map(|device| {
        let mut labels = one("net", &device.net);
        let backend = if device.counters.is_left_to_kernel() { "vhost" } else { "vmm" };
        labels.push(("backend", backend.to_owned()));
        (labels, 1.0)
    });
    out.gauges(Family("net_backend", "Who moves frames: 1 for each interface.", None), backends)?;
    let passed: Vec<_> = all.iter().flat_map(traffic).collect();
    let directions = |value: fn(&Traffic) -> u64| {
        passed.iter().map(move |(labels, traffic)| (labels.clone(), value(traffic)))
    };
    let frames = Family("net_frames", "Frames that have passed.", None);
    out.counters(frames, directions(|traffic| traffic.frames))?;
    let bytes = Family("net", "Bytes of these frames.", Some(Unit::Bytes));
    out.counters(bytes, directions(|traffic| traffic.bytes))?;
    // The kernel counts no frame that it drops on the way to the guest.
    let drops = all.iter().filter(|device| !device.counters.is_left_to_kernel()).flat_map(|device| {
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
