//! Files of `--pmem`: what the guest does with them is not seen by the VMM, except its flushes.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pmem_volume::Durability;

use super::expose::{Exposer, Family, Labels, one};
use crate::virtio::pmem::metrics::PmemMetrics;

/// A device and its counters.
#[derive(Clone, Debug)]
pub struct PmemFileMetrics {
    /// What the device is called.
    pub name: String,
    /// Its file.
    pub file: String,
    /// How much of it the guest sees.
    pub size_bytes: u64,
    /// What a flush survives; `None` where writes are discarded.
    pub durability: Option<Durability>,
    /// Whether a flush of the file has failed: from then on all do.
    pub failed: Arc<AtomicBool>,
    /// Its counters.
    pub counters: Arc<PmemMetrics>,
}

impl PmemFileMetrics {
    fn labels(&self) -> Labels {
        one("pmem", &self.name)
    }

    fn info(&self) -> Labels {
        let durability = self.durability.map_or("discarded", Durability::name);
        let mut labels = self.labels();
        labels.extend([("file", self.file.clone()), ("durability", durability.to_owned())]);
        labels
    }
}

pub(super) fn expose(out: &mut Exposer<'_>, devices: &[PmemFileMetrics]) -> fmt::Result {
    let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    out.gauges(
        Family("pmem_info", "Files that the guest has as persistent memory; always 1.", None),
        devices.iter().map(|device| (device.info(), 1.0)),
    )?;
    let sizes = devices.iter().map(|device| (device.labels(), device.size_bytes));
    out.bytes("pmem_size", "How much of the file the guest sees.", sizes)?;
    let flushes = devices.iter().flat_map(|device| {
        [("ok", &device.counters.flushes), ("error", &device.counters.flush_failures)].map(
            |(result, counter)| {
                let mut labels = device.labels();
                labels.push(("result", result.to_owned()));
                (labels, get(counter))
            },
        )
    });
    out.counters(Family("pmem_flushes", "Flushes that the guest has asked for.", None), flushes)?;
    let failed = devices.iter().map(|device| {
        let failed = device.failed.load(Ordering::Relaxed);
        (device.labels(), f64::from(u8::from(failed)))
    });
    out.gauges(Family("pmem_failed", "1 when a flush of the file has failed.", None), failed)?;
    let persists = devices.iter().map(|device| (device.labels(), device.counters.persists.sample()));
    out.latencies(
        "pmem_flush_duration",
        "Time to make the file durable; waiting flushes share one.",
        persists,
    )?;
    let bad = devices.iter().map(|device| (device.labels(), get(&device.counters.bad_requests)));
    out.counters(Family("pmem_bad_requests", "Requests that are no flush.", None), bad)
}
