//! Metrics of a disk.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::registry::Unit;

use super::request::Operation;
use crate::device::{DeviceCounters, signed};
use crate::metrics::{Expose, Exposition, Family, Labels, LatencyHistogram, and, one};

/// Kinds of requests in metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
    /// Request for the serial number.
    GetId,
}

impl Kind {
    pub const ALL: [Self; 6] =
        [Self::Read, Self::Write, Self::Flush, Self::Discard, Self::WriteZeroes, Self::GetId];

    /// Value of the metric label `operation`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Discard => "discard",
            Self::WriteZeroes => "write-zeroes",
            Self::GetId => "get-id",
        }
    }
}

impl From<&Operation> for Kind {
    fn from(operation: &Operation) -> Self {
        match operation {
            Operation::Read(..) => Self::Read,
            Operation::Write(..) => Self::Write,
            Operation::Flush => Self::Flush,
            Operation::Discard(_) => Self::Discard,
            Operation::WriteZeroes(_) => Self::WriteZeroes,
            Operation::GetId(_) => Self::GetId,
        }
    }
}

/// Minimum, maximum, sum and number of durations.
#[derive(Debug)]
pub struct DurationRange {
    min_us: AtomicU64,
    max_us: AtomicU64,
    sum_ns: AtomicU64,
    count: AtomicU64,
}

impl Default for DurationRange {
    fn default() -> Self {
        Self {
            min_us: AtomicU64::new(u64::MAX),
            max_us: AtomicU64::new(0),
            sum_ns: AtomicU64::new(0),
            count: AtomicU64::new(0),
        }
    }
}

impl DurationRange {
    fn observe(&self, duration: Duration) {
        let ns = saturating_ns(duration);
        let us = ns / 1000;
        self.min_us.fetch_min(us, Ordering::Relaxed);
        self.max_us.fetch_max(us, Ordering::Relaxed);
        self.sum_ns.fetch_add(ns, Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the minimum, the maximum and the mean, or zeros if no duration was recorded.
    pub fn min_max_mean_us(&self) -> [u64; 3] {
        let count = self.count.load(Ordering::Relaxed);
        if count == 0 {
            return [0; 3];
        }
        let sum_us = self.sum_ns.load(Ordering::Relaxed) / 1000;
        [self.min_us.load(Ordering::Relaxed), self.max_us.load(Ordering::Relaxed), sum_us / count]
    }
}

/// Number of requests with one result, and the sum of their durations.
#[derive(Debug, Default)]
struct RequestTotals {
    count: AtomicU64,
    sum_ns: AtomicU64,
}

impl RequestTotals {
    fn add(&self, duration: Duration) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add(saturating_ns(duration), Ordering::Relaxed);
    }

    fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    fn seconds(&self) -> f64 {
        Duration::from_nanos(self.sum_ns.load(Ordering::Relaxed)).as_secs_f64()
    }
}

fn saturating_ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Counters of one disk. The counters never decrease.
#[derive(Debug, Default)]
pub struct BlockMetrics {
    done: [RequestTotals; Kind::ALL.len()],
    failed: [RequestTotals; Kind::ALL.len()],
    pub size_bytes: AtomicU64,
    /// Bytes read by the guest.
    pub read_bytes: AtomicU64,
    /// Bytes written by the guest.
    pub written_bytes: AtomicU64,
    /// Buffer chains that are not valid requests, and requests that the disk refuses.
    pub bad_requests: AtomicU64,
    /// Writes to a volume that found no space in the pool. A write that waits is counted again by
    /// each attempt.
    pub full_writes: AtomicU64,
    /// Number of times that a queue was stopped because its ring was invalid. A reset makes the
    /// queue usable again.
    pub broken_queues: AtomicU64,
    /// Number of passes over the queues. Tests check that an idle worker makes no passes.
    #[cfg(test)]
    pub passes: AtomicU64,
    /// True if every queue of the last activation uses io_uring. Cleared when a queue stops using
    /// it.
    pub io_uring: AtomicBool,
    /// Durations of successful reads, from taking the request from the ring to its answer.
    pub reads: DurationRange,
    /// Durations of successful writes, from taking the request from the ring to its answer.
    pub writes: DurationRange,
    /// Durations of flushes on the media, whether successful or failed.
    pub flushes: LatencyHistogram,
    /// Set by the first failed flush. The disk is not written after that.
    pub read_only: AtomicBool,
}

impl BlockMetrics {
    /// Counts an executed request, its result, and the time from taking it from the ring to its
    /// answer.
    pub fn finished(&self, kind: Kind, ok: bool, duration: Duration) {
        let totals = if ok { &self.done } else { &self.failed };
        totals[kind as usize].add(duration);
        match kind {
            Kind::Read if ok => self.reads.observe(duration),
            Kind::Write if ok => self.writes.observe(duration),
            _ => {}
        }
    }

    pub fn transferred(&self, kind: Kind, bytes: u64) {
        match kind {
            Kind::Read => self.read_bytes.fetch_add(bytes, Ordering::Relaxed),
            Kind::Write => self.written_bytes.fetch_add(bytes, Ordering::Relaxed),
            Kind::Flush | Kind::Discard | Kind::WriteZeroes | Kind::GetId => 0,
        };
    }

    /// Requests answered with success.
    pub fn done(&self, kind: Kind) -> u64 {
        self.done[kind as usize].count()
    }

    /// Requests answered with an error because memory or the media failed.
    pub fn failed(&self, kind: Kind) -> u64 {
        self.failed[kind as usize].count()
    }
}

/// Counters and id of a disk, for the metrics endpoint.
#[derive(Clone, Debug)]
pub struct DiskMetrics {
    pub disk: String,
    pub counters: Arc<BlockMetrics>,
}

impl Expose for DiskMetrics {
    fn expose(&self, out: &mut Exposition) {
        let (labels, counters) = (one("disk", &self.disk), &self.counters);
        let get = |counter: &AtomicU64| [(labels.clone(), counter.load(Ordering::Relaxed))];
        let is_set = |flag: &AtomicBool| [(labels.clone(), flag.load(Ordering::Relaxed))];
        out.bytes("disk_size", "Size of the disk as the guest sees it.", get(&counters.size_bytes));
        counters.expose_operations(out, "disk_operations", "disk_operation", &labels);
        counters.expose_bytes(out, "disk", &labels);
        out.latencies(
            "disk_flush_duration",
            "Time to make the disk durable.",
            [(labels.clone(), counters.flushes.sample())],
        );
        let bad = Family("disk_bad_requests", "Requests refused by the disk.", None);
        out.counters(bad, get(&counters.bad_requests));
        let broken = Family(
            "disk_broken_queues",
            "Queues stopped until a reset because their rings were invalid.",
            None,
        );
        out.counters(broken, get(&counters.broken_queues));
        let by_ring = Family(
            "disk_io_uring",
            "1 if all queues use io_uring, 0 if system calls serve at least one.",
            None,
        );
        out.flags(by_ring, is_set(&counters.io_uring));
        let failed =
            Family("disk_failed", "1 after a flush has failed; all later writes fail.", None);
        out.flags(failed, is_set(&counters.read_only));
    }
}

impl BlockMetrics {
    /// Returns the counters for `vm.counters`. Latencies are in microseconds, or 0 before the first
    /// request.
    pub fn counters(&self) -> DeviceCounters {
        let [read_min, read_max, read_mean] = self.reads.min_max_mean_us();
        let [write_min, write_max, write_mean] = self.writes.min_max_mean_us();
        let counters = [
            ("read_bytes", self.read_bytes.load(Ordering::Relaxed)),
            ("read_ops", self.done(Kind::Read)),
            ("read_latency_min", read_min),
            ("read_latency_max", read_max),
            ("read_latency_avg", read_mean),
            ("write_bytes", self.written_bytes.load(Ordering::Relaxed)),
            ("write_ops", self.done(Kind::Write)),
            ("write_latency_min", write_min),
            ("write_latency_max", write_max),
            ("write_latency_avg", write_mean),
        ];
        signed(counters)
    }

    /// Adds the numbers of requests to the family `count_name`, and their durations to the family
    /// `seconds_name`. Both have the same labels, so that a query for the mean can divide one by
    /// the other.
    pub fn expose_operations(
        &self,
        out: &mut Exposition,
        count_name: &'static str,
        seconds_name: &'static str,
        labels: &Labels,
    ) {
        let totals: Vec<_> = Kind::ALL
            .into_iter()
            .flat_map(|kind| {
                let labels = and(labels, "operation", kind.as_str());
                [("ok", &self.done), ("error", &self.failed)].map(|(result, totals)| {
                    (and(&labels, "result", result), &totals[kind as usize])
                })
            })
            .collect();
        let counts = totals.iter().map(|(labels, totals)| (labels.clone(), totals.count()));
        let help = "Completed and failed requests of the guest.";
        out.counters(Family(count_name, help, None), counts);
        let seconds = totals.iter().map(|(labels, totals)| (labels.clone(), totals.seconds()));
        out.seconds_total(seconds_name, "Sum of the durations of the guest's requests.", seconds);
    }

    /// Adds the bytes read and written to the family `name`.
    pub fn expose_bytes(&self, out: &mut Exposition, name: &'static str, labels: &Labels) {
        let samples = [("read", &self.read_bytes), ("write", &self.written_bytes)].map(
            |(operation, bytes)| {
                (and(labels, "operation", operation), bytes.load(Ordering::Relaxed))
            },
        );
        out.counters(
            Family(name, "Bytes read and written by the guest.", Some(Unit::Bytes)),
            samples,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_minimum_maximum_and_mean() {
        let metrics = BlockMetrics::default();
        assert_eq!(metrics.reads.min_max_mean_us(), [0; 3]);
        for us in [30, 10, 50] {
            metrics.finished(Kind::Read, true, Duration::from_micros(us));
        }
        metrics.finished(Kind::Read, false, Duration::from_secs(1));
        metrics.finished(Kind::Flush, true, Duration::from_secs(1));
        assert_eq!(metrics.reads.min_max_mean_us(), [10, 50, 30]);
        assert_eq!(metrics.writes.min_max_mean_us(), [0; 3]);
    }

    #[test]
    fn disk_has_ten_counters_that_fit_a_signed_number() {
        let metrics = BlockMetrics::default();
        assert!(metrics.counters().values().all(|value| *value == 0));
        metrics.finished(Kind::Write, true, Duration::from_micros(7));
        metrics.transferred(Kind::Write, u64::MAX);
        let counters = metrics.counters();
        assert_eq!(counters.len(), 10);
        assert_eq!(
            (counters["write_ops"], counters["write_latency_min"], counters["read_ops"]),
            (1, 7, 0)
        );
        assert_eq!(counters["write_bytes"], i64::MAX as u64);
    }
}
