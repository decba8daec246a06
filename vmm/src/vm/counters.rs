//! `vm.counters`: what devices have counted, under Cloud Hypervisor's names.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use crate::virtio::block::{BlockMetrics, Kind};
use crate::virtio::net::NetMetrics;
use crate::virtio::net::metrics::Direction;

/// The counters of each device that has some, by the device's name.
pub type Counters = BTreeMap<String, DeviceCounters>;

/// A device's counters. None is above what 63 bits hold: clients read them as signed.
pub type DeviceCounters = BTreeMap<&'static str, u64>;

/// Those of a disk; latencies are in microseconds, and 0 before there was one.
pub(super) fn of_disk(metrics: &BlockMetrics) -> DeviceCounters {
    let [read_least, read_most, read_mean] = metrics.reads.least_most_mean_us();
    let [write_least, write_most, write_mean] = metrics.writes.least_most_mean_us();
    let counters = [
        ("read_bytes", metrics.read_bytes.load(Ordering::Relaxed)),
        ("read_ops", metrics.done(Kind::Read)),
        ("read_latency_min", read_least),
        ("read_latency_max", read_most),
        ("read_latency_avg", read_mean),
        ("write_bytes", metrics.written_bytes.load(Ordering::Relaxed)),
        ("write_ops", metrics.done(Kind::Write)),
        ("write_latency_min", write_least),
        ("write_latency_max", write_most),
        ("write_latency_avg", write_mean),
    ];
    signed(counters)
}

/// Those of a network interface, as its guest sees them.
pub(super) fn of_net(metrics: &NetMetrics) -> DeviceCounters {
    let names =
        [(Direction::ToGuest, ["rx_bytes", "rx_frames"]), (Direction::FromGuest, ["tx_bytes", "tx_frames"])];
    let mut counters = DeviceCounters::new();
    for (direction, [bytes, frames]) in names {
        // Of one that the kernel serves in another network namespace nobody here knows.
        if let Some(traffic) = metrics.traffic(direction) {
            counters.extend(signed([(bytes, traffic.bytes), (frames, traffic.frames)]));
        }
    }
    counters
}

/// None is above what a signed number holds.
fn signed<const N: usize>(counters: [(&'static str, u64); N]) -> DeviceCounters {
    counters.map(|(name, value)| (name, value.min(i64::MAX as u64))).into()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_disk_has_ten_counters_that_fit_a_signed_number() {
        let metrics = BlockMetrics::default();
        assert!(of_disk(&metrics).values().all(|value| *value == 0));
        metrics.finished(Kind::Write, true);
        metrics.transferred(Kind::Write, u64::MAX);
        metrics.took(Kind::Write, Duration::from_micros(7));
        let counters = of_disk(&metrics);
        assert_eq!(counters.len(), 10);
        assert_eq!((counters["write_ops"], counters["write_latency_min"], counters["read_ops"]), (1, 7, 0));
        assert_eq!(counters["write_bytes"], i64::MAX as u64);
    }

    #[test]
    fn what_the_guest_receives_is_rx() {
        let metrics = NetMetrics::default();
        metrics.passed(Direction::ToGuest, 100);
        metrics.passed(Direction::FromGuest, 60);
        metrics.passed(Direction::FromGuest, 60);
        let expected = [("rx_bytes", 100), ("rx_frames", 1), ("tx_bytes", 120), ("tx_frames", 2)];
        assert_eq!(of_net(&metrics), expected.into());
    }
}
