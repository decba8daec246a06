//! Disks, and volumes that are shown as one: what the guest does with them goes through the VMM.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use prometheus_client::registry::Unit;

use super::expose::{Exposer, Family, Labels, one};
use crate::virtio::block::{BlockMetrics, Kind};

/// A disk and its counters.
#[derive(Clone, Debug)]
pub struct DiskMetrics {
    /// What the VMM calls it.
    pub disk: String,
    /// Its counters.
    pub counters: Arc<BlockMetrics>,
}

/// Something with labels and a disk's counters.
pub(super) type Labelled<'a> = (Labels, &'a BlockMetrics);

pub(super) fn expose(out: &mut Exposer<'_>, disks: &[DiskMetrics]) -> fmt::Result {
    let all: Vec<_> = disks.iter().map(|disk| (one("disk", &disk.disk), &*disk.counters)).collect();
    let each = || all.iter().cloned();
    let sizes = each().map(|(labels, counters)| (labels, counters.size_bytes.load(Ordering::Relaxed)));
    out.bytes("disk_size", "The disk's size as the guest sees it.", sizes)?;
    expose_operations(out, "disk_operations", &all)?;
    expose_bytes(out, "disk", &all)?;
    let flushes = each().map(|(labels, counters)| (labels, counters.flushes.sample()));
    out.latencies("disk_flush_duration", "Time to make the disk durable.", flushes)?;
    let bad = each().map(|(labels, counters)| (labels, counters.bad_requests.load(Ordering::Relaxed)));
    out.counters(Family("disk_bad_requests", "Requests that the disk refuses.", None), bad)?;
    let broken = each().map(|(labels, counters)| (labels, counters.broken_queues.load(Ordering::Relaxed)));
    let family = Family("disk_broken_queues", "Queues whose ring made no sense, until a reset.", None);
    out.counters(family, broken)?;
    let by_ring = each()
        .map(|(labels, counters)| (labels, f64::from(u8::from(counters.io_uring.load(Ordering::Relaxed)))));
    out.gauges(Family("disk_io_uring", "1 when io_uring carries requests out, 0 for calls.", None), by_ring)?;
    expose_failed(out, "disk_failed", &all)
}

pub(super) fn expose_operations(
    out: &mut Exposer<'_>,
    name: &'static str,
    all: &[Labelled<'_>],
) -> fmt::Result {
    let samples = all.iter().flat_map(|(labels, counters)| {
        Kind::ALL.into_iter().flat_map(move |kind| {
            [("ok", counters.done(kind)), ("error", counters.failed(kind))].map(|(result, count)| {
                let mut labels = labels.clone();
                labels.push(("operation", kind.as_str().to_owned()));
                labels.push(("result", result.to_owned()));
                (labels, count)
            })
        })
    });
    out.counters(Family(name, "Requests of the guest that were carried out or tried.", None), samples)
}

pub(super) fn expose_bytes(out: &mut Exposer<'_>, name: &'static str, all: &[Labelled<'_>]) -> fmt::Result {
    let samples = all.iter().flat_map(|(labels, counters)| {
        [("read", &counters.read_bytes), ("write", &counters.written_bytes)].map(|(operation, bytes)| {
            let mut labels = labels.clone();
            labels.push(("operation", operation.to_owned()));
            (labels, bytes.load(Ordering::Relaxed))
        })
    });
    out.counters(Family(name, "Bytes that the guest has read and written.", Some(Unit::Bytes)), samples)
}

pub(super) fn expose_failed(out: &mut Exposer<'_>, name: &'static str, all: &[Labelled<'_>]) -> fmt::Result {
    let failed = all.iter().map(|(labels, counters)| {
        (labels.clone(), f64::from(u8::from(counters.read_only.load(Ordering::Relaxed))))
    });
    out.gauges(Family(name, "1 when a flush has failed: nothing is written any more.", None), failed)
}
