//! Metrics of the virtio balloon.

use std::sync::atomic::{AtomicU64, Ordering};

use balloon::statistics::{Tag, TagUnit};

use prometheus_client::registry::Unit;

use crate::metrics::{Expose, Exposition, Family, get, one};

/// Reason to refuse pages or chains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// The pages are PM, which belongs to chunks.
    Pm,
    /// The pages are in unplugged blocks.
    Unplugged,
    /// The pages are outside of guest memory or belong to a volume.
    NoMemory,
    /// The driver listed only a part of a huge page.
    HugePage,
    /// The chain has invalid content or cannot be read.
    Malformed,
    /// The chain has more entries than a driver needs. The excess entries are ignored.
    TooLong,
}

impl Refusal {
    pub const ALL: [Self; 6] =
        [Self::Pm, Self::Unplugged, Self::NoMemory, Self::HugePage, Self::Malformed, Self::TooLong];

    /// Value of the metric label `reason`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pm => "pm",
            Self::Unplugged => "unplugged",
            Self::NoMemory => "no-memory",
            Self::HugePage => "huge-page",
            Self::Malformed => "malformed",
            Self::TooLong => "too-long",
        }
    }
}

/// Counters of the virtio balloon.
#[derive(Debug)]
pub struct BalloonMetrics {
    /// Requested size.
    pub target_bytes: AtomicU64,
    /// Size reported by the driver.
    pub actual_bytes: AtomicU64,
    /// Bytes returned to the host by inflating.
    pub inflated_bytes: AtomicU64,
    /// Bytes that the driver deflated.
    pub deflated_bytes: AtomicU64,
    /// Bytes returned to the host because the driver reported their pages as free.
    pub reported_bytes: AtomicU64,
    /// Bytes that the guest deflated because it was out of memory.
    pub oom_deflated_bytes: AtomicU64,
    /// Failed calls to return pages to the host.
    pub discard_failures: AtomicU64,
    /// Number of statistics sets received from the driver.
    pub statistics: AtomicU64,
    refused: [AtomicU64; Refusal::ALL.len()],
    values: [AtomicU64; Tag::ALL.len()],
}

/// Placeholder for a statistic that the driver has not sent.
const ABSENT: u64 = u64::MAX;

impl Default for BalloonMetrics {
    fn default() -> Self {
        Self {
            target_bytes: AtomicU64::default(),
            actual_bytes: AtomicU64::default(),
            inflated_bytes: AtomicU64::default(),
            deflated_bytes: AtomicU64::default(),
            reported_bytes: AtomicU64::default(),
            oom_deflated_bytes: AtomicU64::default(),
            discard_failures: AtomicU64::default(),
            statistics: AtomicU64::default(),
            refused: Default::default(),
            values: std::array::from_fn(|_| AtomicU64::new(ABSENT)),
        }
    }
}

impl BalloonMetrics {
    /// Counts refused pages, chains or statistics.
    pub(super) fn refuse(&self, reason: Refusal, count: u64) {
        self.refused[reason as usize].fetch_add(count, Ordering::Relaxed);
    }

    /// Number of pages refused for this reason. `Malformed` and `TooLong` count chains instead of
    /// pages.
    pub fn refused(&self, reason: Refusal) -> u64 {
        self.refused[reason as usize].load(Ordering::Relaxed)
    }

    /// Stores the latest value of a statistic for the metrics endpoint.
    pub fn set_statistic(&self, tag: Tag, value: u64) {
        self.values[tag as usize].store(value, Ordering::Relaxed);
    }

    /// Latest value of a statistic.
    pub fn statistic(&self, tag: Tag) -> Option<u64> {
        Some(self.values[tag as usize].load(Ordering::Relaxed)).filter(|value| *value != ABSENT)
    }
}

impl Expose for BalloonMetrics {
    fn expose(&self, out: &mut Exposition) {
        out.bytes(
            "balloon_target",
            "Balloon size requested from the guest.",
            [(vec![], get(&self.target_bytes))],
        );
        out.bytes(
            "balloon_actual",
            "Balloon size reported by the guest driver.",
            [(vec![], get(&self.actual_bytes))],
        );
        out.counters(
            Family("balloon_given_back", "Memory returned to the host.", Some(Unit::Bytes)),
            [
                (one("by", "inflate"), get(&self.inflated_bytes)),
                (one("by", "report"), get(&self.reported_bytes)),
            ],
        );
        out.counters(
            Family(
                "balloon_deflated",
                "Memory that the guest took out of the balloon.",
                Some(Unit::Bytes),
            ),
            [(vec![], get(&self.deflated_bytes))],
        );
        out.counters(
            Family(
                "balloon_oom_deflated",
                "Part of the deflated memory that the guest took when it ran out of memory.",
                Some(Unit::Bytes),
            ),
            [(vec![], get(&self.oom_deflated_bytes))],
        );
        out.counters(
            Family("balloon_refused", "Refused pages and requests.", None),
            Refusal::ALL.map(|reason| (one("reason", reason.as_str()), self.refused(reason))),
        );
        out.counters(
            Family(
                "balloon_discard_failures",
                "Failed calls to return pages to the host's kernel.",
                None,
            ),
            [(vec![], get(&self.discard_failures))],
        );
        out.counters(
            Family("balloon_statistics", "Sets of statistics received from the guest.", None),
            [(vec![], get(&self.statistics))],
        );
        let reported = |unit: TagUnit| {
            let tags = Tag::ALL.into_iter().filter(move |tag| tag.unit() == unit);
            tags.filter_map(|tag| Some((one("statistic", tag.label()), self.statistic(tag)?)))
        };
        out.bytes(
            "balloon_guest_memory",
            "Memory of the guest according to its kernel.",
            reported(TagUnit::Bytes),
        );
        out.counters(
            Family(
                "balloon_guest_reclaim",
                "Memory swapped, scanned and reclaimed by the guest's kernel since its boot.",
                Some(Unit::Bytes),
            ),
            reported(TagUnit::BytesSinceBoot),
        );
        out.counters(
            Family(
                "balloon_guest_events",
                "Events counted by the guest's kernel since its boot.",
                None,
            ),
            reported(TagUnit::EventsSinceBoot),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_its_own_counter() {
        let metrics = BalloonMetrics::default();
        for (index, reason) in Refusal::ALL.into_iter().enumerate() {
            metrics.refuse(reason, index as u64 + 1);
        }
        assert_eq!(Refusal::ALL.map(|reason| metrics.refused(reason)), [1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn missing_statistic_is_not_zero() {
        let metrics = BalloonMetrics::default();
        assert!(Tag::ALL.iter().all(|tag| metrics.statistic(*tag).is_none()));
        metrics.set_statistic(Tag::OomKills, 0);
        assert_eq!(
            (metrics.statistic(Tag::OomKills), metrics.statistic(Tag::Caches)),
            (Some(0), None)
        );
    }
}
