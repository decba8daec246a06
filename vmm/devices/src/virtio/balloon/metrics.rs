//! Metrics of the virtio balloon.

use std::sync::atomic::{AtomicU64, Ordering};

use balloon::statistics::Tag;
use prometheus_client::registry::Unit;

use crate::metrics::{Expose, Exposition, Family, Labels, get, one};

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
    /// Reasons that are counted in pages.
    const OF_PAGES: [Self; 4] = [Self::Pm, Self::Unplugged, Self::NoMemory, Self::HugePage];
    /// Reasons that are counted in requests.
    const OF_REQUESTS: [Self; 2] = [Self::Malformed, Self::TooLong];
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
        let refused = |reason: Refusal| (one("reason", reason.as_str()), self.refused(reason));
        out.counters(
            Family("balloon_refused_pages", "Pages not returned to the host.", None),
            Refusal::OF_PAGES.map(refused),
        );
        out.counters(
            Family("balloon_refused_requests", "Requests that are not valid.", None),
            Refusal::OF_REQUESTS.map(refused),
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
        self.expose_guest_memory(out);
        self.expose_guest_counters(out);
    }
}

/// Families of the driver's statistics. Each quantity has its own family, so that the sum of a
/// family is meaningful.
impl BalloonMetrics {
    /// Samples of the statistics that the driver has sent, with one label for each.
    fn reported<'a, const N: usize>(
        &'a self,
        label: &'static str,
        tags: [(Tag, &'a str); N],
    ) -> impl Iterator<Item = (Labels, u64)> + 'a {
        tags.into_iter()
            .filter_map(move |(tag, value)| Some((one(label, value), self.statistic(tag)?)))
    }

    fn expose_guest_memory(&self, out: &mut Exposition) {
        out.bytes(
            "balloon_guest_memory",
            "Memory of the guest according to its kernel.",
            self.reported(
                "state",
                [Tag::Free, Tag::Total, Tag::Available, Tag::Caches].map(|tag| (tag, tag.label())),
            ),
        );
        let mut reclaim = |name, help, label, tags: [_; 2]| {
            out.counters(Family(name, help, Some(Unit::Bytes)), self.reported(label, tags));
        };
        reclaim(
            "balloon_guest_swapped",
            "Memory swapped by the guest's kernel since its boot.",
            "direction",
            [(Tag::SwapIn, "in"), (Tag::SwapOut, "out")],
        );
        reclaim(
            "balloon_guest_scanned",
            "Memory scanned for reclaim by the guest's kernel since its boot.",
            "by",
            [(Tag::AsyncScan, "kswapd"), (Tag::DirectScan, "task")],
        );
        reclaim(
            "balloon_guest_reclaimed",
            "Memory reclaimed by the guest's kernel since its boot.",
            "by",
            [(Tag::AsyncReclaim, "kswapd"), (Tag::DirectReclaim, "task")],
        );
    }

    fn expose_guest_counters(&self, out: &mut Exposition) {
        out.counters(
            Family("balloon_guest_page_faults", "Page faults since the guest's boot.", None),
            self.reported("kind", [(Tag::MajorFaults, "major"), (Tag::MinorFaults, "minor")]),
        );
        let help = "Allocations of hugetlbfs pages since the guest's boot.";
        out.counters(
            Family("balloon_guest_hugetlb_allocations", help, None),
            self.reported(
                "result",
                [(Tag::HugetlbAllocations, "ok"), (Tag::HugetlbFailures, "error")],
            ),
        );
        let only = |tag| self.statistic(tag).map(|count| (vec![], count));
        let help = "Processes killed by the OOM killer since the guest's boot.";
        out.counters(Family("balloon_guest_oom_kills", help, None), only(Tag::OomKills));
        let help = "Allocations that had to reclaim memory first, since the guest's boot.";
        out.counters(Family("balloon_guest_allocation_stalls", help, None), only(Tag::AllocStalls));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;

    #[test]
    fn each_reason_has_its_own_counter() {
        let metrics = BalloonMetrics::default();
        for (index, reason) in Refusal::ALL.into_iter().enumerate() {
            metrics.refuse(reason, index as u64 + 1);
        }
        assert_eq!(Refusal::ALL.map(|reason| metrics.refused(reason)), [1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn each_refusal_and_statistic_has_one_series() {
        let metrics = BalloonMetrics::default();
        Tag::ALL.into_iter().for_each(|tag| metrics.set_statistic(tag, 987_654));
        Refusal::ALL.into_iter().for_each(|reason| metrics.refuse(reason, 987_654));
        let registry = Metrics::new("a");
        let text = registry.encode(&metrics).unwrap();
        let series = text.lines().filter(|line| line.ends_with(" 987654")).count();
        assert_eq!(series, Tag::ALL.len() + Refusal::ALL.len(), "{text}");
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
