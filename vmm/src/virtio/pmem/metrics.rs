//! What a virtio-pmem device counts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pmem_volume::Durability;

use crate::metrics::{Expose, Exposition, Family, LatencyHistogram, and, one};

/// Counters of one device; they only grow.
#[derive(Debug, Default)]
pub struct PmemMetrics {
    /// Flush requests answered with success.
    pub flushes: AtomicU64,
    /// Flush requests answered with an error, because the backing could not be made durable.
    pub flush_failures: AtomicU64,
    /// Requests that are no flush, or whose buffers are not those of a request.
    pub bad_requests: AtomicU64,
    /// Calls that made the backing durable: several requests that wait together share one.
    pub persists: LatencyHistogram,
}

/// Device of `--pmem` with its counters. The VMM sees the guest's flushes only.
#[derive(Clone, Debug)]
pub struct PmemFileMetrics {
    /// Id of the device.
    pub name: String,
    /// Its file.
    pub file: String,
    /// Size that the guest sees.
    pub size_bytes: u64,
    /// What a flush survives; `None` where writes are discarded.
    pub durability: Option<Durability>,
    /// Set once a flush of the file has failed. All later ones fail as well.
    pub failed: Arc<AtomicBool>,
    /// Its counters.
    pub counters: Arc<PmemMetrics>,
}

impl Expose for PmemFileMetrics {
    fn expose(&self, out: &mut Exposition) {
        let (labels, counters) = (one("pmem", &self.name), &self.counters);
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let durability = self.durability.map_or("discarded", Durability::name);
        let info = and(&and(&labels, "file", &self.file), "durability", durability);
        let family = Family("pmem_info", "Files that the guest has as persistent memory; always 1.", None);
        out.gauges(family, [(info, 1.0)]);
        let help = "How much of the file the guest sees.";
        out.bytes("pmem_size", help, [(labels.clone(), self.size_bytes)]);
        let flushes = [("ok", &counters.flushes), ("error", &counters.flush_failures)]
            .map(|(result, counter)| (and(&labels, "result", result), get(counter)));
        out.counters(Family("pmem_flushes", "Flushes that the guest has asked for.", None), flushes);
        let failed = Family("pmem_failed", "1 when a flush of the file has failed.", None);
        out.flags(failed, [(labels.clone(), self.failed.load(Ordering::Relaxed))]);
        out.latencies(
            "pmem_flush_duration",
            "Time to make the file durable; waiting flushes share one.",
            [(labels.clone(), counters.persists.sample())],
        );
        let bad = Family("pmem_bad_requests", "Requests that are no flush.", None);
        out.counters(bad, [(labels, get(&counters.bad_requests))]);
    }
}
