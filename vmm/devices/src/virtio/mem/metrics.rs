//! Metrics of virtio-mem devices.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::registry::Unit;

use crate::memory::backing::BackingError;
use crate::metrics::{Expose, Exposition, Family, LatencyHistogram, and, one};
use crate::throttle::ThrottleMetrics;

/// Counters of executed requests of one kind.
#[derive(Debug, Default)]
pub struct OperationMetrics {
    bytes: AtomicU64,
    latency: LatencyHistogram,
}

impl OperationMetrics {
    pub fn done(&self, bytes: u64, duration: Duration) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.latency.observe(duration);
    }

    /// Bytes plugged or unplugged so far.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Number of requests and their durations, not including their time in the queue.
    pub fn latency(&self) -> &LatencyHistogram {
        &self.latency
    }
}

/// Reason why the host could not execute a plug or unplug.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailureReason {
    /// The process has too many mappings.
    MappingBudget,
    /// The kernel refused the mapping.
    Map,
    /// The host has too few free huge pages.
    HugePages,
    /// The pool has too little free memory.
    PoolFull,
    /// The pool withholds its free space for thin volumes.
    Storage,
    Pool,
    /// KVM refused a memory slot.
    Slot,
}

impl FailureReason {
    pub const ALL: [Self; 7] = [
        Self::MappingBudget,
        Self::Map,
        Self::HugePages,
        Self::PoolFull,
        Self::Storage,
        Self::Pool,
        Self::Slot,
    ];

    /// Value of the metric label `reason`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::MappingBudget => "mapping-budget",
            Self::Map => "map",
            Self::HugePages => "huge-pages",
            Self::PoolFull => "pool-full",
            Self::Storage => "storage",
            Self::Pool => "pool",
            Self::Slot => "slot",
        }
    }
}

impl From<&BackingError> for FailureReason {
    fn from(err: &BackingError) -> Self {
        match err {
            BackingError::MappingBudget { .. } => Self::MappingBudget,
            BackingError::Map { .. } => Self::Map,
            BackingError::HugePages { .. } => Self::HugePages,
            BackingError::PoolFull { .. } => Self::PoolFull,
            BackingError::Storage { .. } => Self::Storage,
            BackingError::Pool(_) => Self::Pool,
        }
    }
}

/// Counters of a virtio-mem device.
#[derive(Debug, Default)]
pub struct MemMetrics {
    /// Acknowledged PLUG requests.
    pub plug: OperationMetrics,
    /// Acknowledged UNPLUG and UNPLUG ALL requests.
    pub unplug: OperationMetrics,
    /// Delayed requests of any kind.
    pub throttled: ThrottleMetrics,
    busy: [AtomicU64; FailureReason::ALL.len()],
    pub(super) nacks: AtomicU64,
    pub(super) errors: AtomicU64,
    pub(super) malformed: AtomicU64,
    pub(super) scrub_failures: AtomicU64,
}

impl MemMetrics {
    pub fn failed(&self, reason: FailureReason) {
        self.busy[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Number of requests answered with BUSY for this reason.
    pub fn busy(&self, reason: FailureReason) -> u64 {
        self.busy[reason as usize].load(Ordering::Relaxed)
    }

    /// Number of refused requests to plug more than the requested size.
    pub fn nacks(&self) -> u64 {
        self.nacks.load(Ordering::Relaxed)
    }

    /// Number of invalid requests. After the first one, Linux stops using the device.
    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }

    /// Number of descriptor chains without a valid request or without a writable buffer for the
    /// answer.
    pub fn malformed(&self) -> u64 {
        self.malformed.load(Ordering::Relaxed)
    }

    /// Number of unplugs after which the memory could not be scrubbed. The memory remains unused
    /// until it can be scrubbed.
    pub fn scrub_failures(&self) -> u64 {
        self.scrub_failures.load(Ordering::Relaxed)
    }
}

/// Counters and labels of a zone's device, for the metrics endpoint.
#[derive(Clone, Debug)]
pub struct PlugMetrics {
    pub zone: String,
    pub tier: String,
    pub counters: Arc<MemMetrics>,
}

impl PlugMetrics {
    /// Returns the number of failed requests for each reason. Reasons are failures of the host and
    /// errors of the driver.
    fn refused(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counters = &self.counters;
        let host = FailureReason::ALL.map(|reason| (reason.as_str(), counters.busy(reason)));
        let driver = [
            ("more-than-requested", counters.nacks()),
            ("invalid", counters.errors()),
            ("malformed", counters.malformed()),
        ];
        host.into_iter().chain(driver)
    }
}

impl Expose for PlugMetrics {
    fn expose(&self, out: &mut Exposition) {
        let (labels, counters) =
            (and(&one("zone", &self.zone), "tier", &self.tier), &self.counters);
        out.latencies(
            "memory_plug_duration",
            "Time that the VMM spends on a plug request.",
            [(labels.clone(), counters.plug.latency().sample())],
        );
        out.latencies(
            "memory_unplug_duration",
            "Time that the VMM spends on an unplug request.",
            [(labels.clone(), counters.unplug.latency().sample())],
        );
        out.counters(
            Family("memory_plug", "Bytes plugged.", Some(Unit::Bytes)),
            [(labels.clone(), counters.plug.bytes())],
        );
        out.counters(
            Family("memory_unplug", "Bytes unplugged.", Some(Unit::Bytes)),
            [(labels.clone(), counters.unplug.bytes())],
        );
        out.counters(
            Family("memory_refused_requests", "Refused requests of the guest's driver.", None),
            self.refused().map(|(reason, count)| (and(&labels, "reason", reason), count)),
        );
        out.counters(
            Family(
                "memory_throttled_requests",
                "Requests of the guest's driver delayed because they exceeded the zone's budget.",
                None,
            ),
            [(labels.clone(), counters.throttled.requests())],
        );
        out.seconds_total(
            "memory_throttled",
            "Time by which throttled requests were delayed.",
            [(labels.clone(), counters.throttled.delay().as_secs_f64())],
        );
        out.counters(
            Family(
                "memory_scrub_failures",
                "Unplugs whose memory could not be returned to the host or the pool.",
                None,
            ),
            [(labels, counters.scrub_failures())],
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_its_own_counter() {
        let metrics = MemMetrics::default();
        for (index, reason) in FailureReason::ALL.into_iter().enumerate() {
            (0..=index).for_each(|_| metrics.failed(reason));
        }
        assert_eq!(FailureReason::ALL.map(|reason| metrics.busy(reason)), [1, 2, 3, 4, 5, 6, 7]);
    }
}
