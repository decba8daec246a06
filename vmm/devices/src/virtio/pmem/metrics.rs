//! Metrics of a virtio-pmem device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pmem_volume::Durability;

use crate::metrics::{Expose, Exposition, Family, LatencyHistogram, and, get, one};

/// Counters of a virtio-pmem device.
#[derive(Debug, Default)]
pub struct PmemMetrics {
    /// Flush requests answered with success.
    pub flushes: AtomicU64,
    /// Flush requests answered with an error, because the backing could not be made durable.
    pub flush_failures: AtomicU64,
    /// Requests that are not flushes or have invalid buffers.
    pub bad_requests: AtomicU64,
    /// Durations of the calls that make the backing durable. Requests that wait at the same time
    /// share one call.
    pub persists: LatencyHistogram,
}

/// Counters and properties of a `--pmem` device, for the metrics endpoint. Reads and writes are not
/// counted, because the guest makes them without exits.
#[derive(Clone, Debug)]
pub struct PmemFileMetrics {
    /// Id of the device.
    pub name: String,
    pub file: String,
    /// Size of the device as seen by the guest.
    pub size_bytes: u64,
    /// Durability that a completed flush guarantees. `None` if writes are discarded.
    pub durability: Option<Durability>,
    /// Set after a flush of the file has failed. All later flushes fail as well.
    pub failed: Arc<AtomicBool>,
    pub counters: Arc<PmemMetrics>,
}

impl Expose for PmemFileMetrics {
    fn expose(&self, out: &mut Exposition) {
        let (labels, counters) = (one("pmem", &self.name), &self.counters);
        let durability = self.durability.map_or("discarded", Durability::name);
        let info = and(&and(&labels, "file", &self.file), "durability", durability);
        let family =
            Family("pmem_info", "Files that are persistent memory of the guest; always 1.", None);
        out.gauges(family, [(info, 1.0)]);
        let help = "Size of the file as the guest sees it.";
        out.bytes("pmem_size", help, [(labels.clone(), self.size_bytes)]);
        let flushes = [("ok", &counters.flushes), ("error", &counters.flush_failures)]
            .map(|(result, counter)| (and(&labels, "result", result), get(counter)));
        out.counters(Family("pmem_flushes", "Flushes requested by the guest.", None), flushes);
        let failed = Family(
            "pmem_failed",
            "1 when a flush of the file has failed; all later flushes fail as well.",
            None,
        );
        out.flags(failed, [(labels.clone(), self.failed.load(Ordering::Relaxed))]);
        out.latencies(
            "pmem_flush_duration",
            "Time to make the file durable; waiting flushes share one call.",
            [(labels.clone(), counters.persists.sample())],
        );
        let bad = Family(
            "pmem_bad_requests",
            "Requests other than flushes, or with invalid buffers.",
            None,
        );
        out.counters(bad, [(labels, get(&counters.bad_requests))]);
    }
}
