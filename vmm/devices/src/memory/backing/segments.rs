//! Mappings in a reservation, and the budget that limits their number.
//!
//! Linux allows a process 65,530 mappings (vm.max_map_count). A fragmented PM zone can need one for
//! each 2 MiB. At the limit, every mmap fails, including those of the memory allocator. Each
//! backing therefore counts its mappings and reserves them from a budget first.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{fs, io};

use super::super::build::MemoryError;
use super::BackingError;
use crate::metrics::{Expose, Exposition, Family};

/// Memory that backs a segment of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Nothing,
    Anonymous,
    /// A file, starting at this offset.
    File {
        offset: u64,
    },
    /// A private mapping of a file, starting at this offset. Some pages may not be copied yet.
    Copying {
        offset: u64,
    },
    /// A private mapping of a file, starting at this offset. All pages are copies in DRAM.
    Copied {
        offset: u64,
    },
    /// The zone's spill file, at the same offset as in the zone.
    SpillFile,
}

impl Source {
    /// Source of the memory that begins `bytes` after the start of a segment with this source.
    pub(super) fn at(self, bytes: u64) -> Self {
        match self {
            Self::File { offset } => Self::File { offset: offset + bytes },
            Self::Copying { offset } => Self::Copying { offset: offset + bytes },
            Self::Copied { offset } => Self::Copied { offset: offset + bytes },
            Self::Nothing | Self::Anonymous | Self::SpillFile => self,
        }
    }
}

/// Part of a reservation that is one mapping in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    /// Offset in the reservation.
    pub start: u64,
    pub len: u64,
    pub source: Source,
}

/// Segments of one reservation. They cover it completely, and contiguous neighbors are merged.
#[derive(Debug)]
pub(super) struct Segments {
    by_start: BTreeMap<u64, (u64, Source)>,
    len: u64,
}

impl Segments {
    /// Creates the segments for a reservation of `len` bytes without mappings.
    pub(super) fn new(len: u64) -> Self {
        Self { by_start: BTreeMap::from([(0, (len, Source::Nothing))]), len }
    }

    /// Number of mappings in the kernel.
    pub(super) fn count(&self) -> usize {
        self.by_start.len()
    }

    /// Segments in `start..start + len`, clipped to this range.
    pub(super) fn in_range(&self, start: u64, len: u64) -> Vec<Segment> {
        let end = start + len;
        let first = self.by_start.range(..=start).next_back().map_or(start, |(&at, _)| at);
        self.by_start
            .range(first..end)
            .map(|(&at, &(segment_len, source))| {
                let (from, to) = (at.max(start), (at + segment_len).min(end));
                Segment { start: from, len: to - from, source: source.at(from - at) }
            })
            .collect()
    }

    /// Records `source` for `start..start + len`.
    pub(super) fn set(&mut self, start: u64, len: u64, source: Source) {
        let end = start + len;
        assert!(len > 0 && end <= self.len, "a segment is outside of its reservation");
        self.split_at(start);
        self.split_at(end);
        let inner: Vec<u64> = self.by_start.range(start..end).map(|(&at, _)| at).collect();
        for at in inner {
            self.by_start.remove(&at);
        }
        self.by_start.insert(start, (len, source));
        self.join_at(end);
        self.join_at(start);
    }

    fn split_at(&mut self, at: u64) {
        let Some((&start, &(len, source))) = self.by_start.range(..at).next_back() else { return };
        if start + len > at {
            self.by_start.insert(start, (at - start, source));
            self.by_start.insert(at, (start + len - at, source.at(at - start)));
        }
    }

    fn join_at(&mut self, at: u64) {
        let Some(&(len, source)) = self.by_start.get(&at) else { return };
        let Some((&start, &(previous_len, previous))) = self.by_start.range(..at).next_back()
        else {
            return;
        };
        if previous.at(previous_len) == source {
            self.by_start.remove(&at);
            self.by_start.insert(start, (previous_len + len, previous));
        }
    }
}

/// Number of mappings that all zones of the process may use in total.
#[derive(Debug)]
pub struct MappingBudget {
    limit: usize,
    used: AtomicUsize,
}

impl Expose for MappingBudget {
    fn expose(&self, out: &mut Exposition) {
        let used =
            Family("memory_mappings", "Mappings of the process that guest memory uses.", None);
        out.gauges(used, [(vec![], self.used() as f64)]);
        let limit = Family(
            "memory_mappings_limit",
            "Upper limit of the mappings that guest memory may use.",
            None,
        );
        out.gauges(limit, [(vec![], self.limit() as f64)]);
    }
}

impl MappingBudget {
    /// Linux's default of vm.max_map_count.
    pub const DEFAULT_MAX_MAPPINGS: usize = 65_530;

    pub fn new(limit: usize) -> Self {
        Self { limit, used: AtomicUsize::new(0) }
    }

    /// Budget for this host: the kernel's limit, less an eighth for the rest of the process, such
    /// as libraries, threads and volumes.
    pub fn of_host() -> Self {
        let max = read_max_map_count().unwrap_or_else(|err| {
            tracing::warn!(%err, "Cannot read vm.max_map_count; using its default");
            Self::DEFAULT_MAX_MAPPINGS
        });
        Self::new(max - max / 8)
    }

    pub fn limit(&self) -> usize {
        self.limit
    }

    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Reserves `count` mappings. Returns false and reserves none if fewer are left.
    fn reserve(&self, count: usize) -> bool {
        let add = |used: usize| used.checked_add(count).filter(|used| *used <= self.limit);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
    }

    /// Reserves `count` mappings for a volume until the result is dropped.
    pub fn hold(self: &Arc<Self>, count: usize) -> Result<HeldMappings, MemoryError> {
        match self.reserve(count) {
            true => Ok(HeldMappings { budget: Arc::clone(self), count }),
            false => {
                let (used, limit) = (self.used(), self.limit);
                Err(MemoryError::Mappings { needed: count, used, limit })
            }
        }
    }

    /// Counts `count` mappings without checking the limit.
    fn take(&self, count: usize) {
        self.used.fetch_add(count, Ordering::Relaxed);
    }

    fn release(&self, count: usize) {
        let before = self.used.fetch_sub(count, Ordering::Relaxed);
        assert!(before >= count, "more mappings returned than allocated");
    }
}

/// Mappings that are reserved for a volume.
#[derive(Debug)]
pub struct HeldMappings {
    budget: Arc<MappingBudget>,
    count: usize,
}

impl Drop for HeldMappings {
    fn drop(&mut self) {
        self.budget.release(self.count);
    }
}

/// Segments of one reservation, counted against the shared budget.
#[derive(Debug)]
pub(super) struct Ledger {
    segments: Segments,
    budget: Arc<MappingBudget>,
}

impl Ledger {
    /// Creates the ledger for a reservation of `len` bytes without mappings.
    pub(super) fn new(len: u64, budget: Arc<MappingBudget>) -> Self {
        budget.take(1);
        Self { segments: Segments::new(len), budget }
    }

    pub(super) fn segments(&self) -> &Segments {
        &self.segments
    }

    /// Runs `change`, which maps up to `pieces` pieces, if the budget has room for them.
    pub(super) fn map<T>(
        &mut self,
        pieces: usize,
        change: impl FnOnce(&mut Segments) -> Result<T, BackingError>,
    ) -> Result<T, BackingError> {
        // A piece in the middle of a segment splits it into three.
        if !self.budget.reserve(2 * pieces) {
            return Err(BackingError::MappingBudget {
                limit: self.budget.limit,
                used: self.budget.used(),
            });
        }
        self.apply_change(2 * pieces, change)
    }

    /// Runs `change`, which unmaps one piece and may need two more mappings. The budget never
    /// refuses this, because it leaves an eighth of the kernel's limit, which has room for these
    /// mappings.
    pub(super) fn unmap<T>(
        &mut self,
        change: impl FnOnce(&mut Segments) -> Result<T, BackingError>,
    ) -> Result<T, BackingError> {
        self.budget.take(2);
        self.apply_change(2, change)
    }

    fn apply_change<T>(
        &mut self,
        reserved: usize,
        change: impl FnOnce(&mut Segments) -> Result<T, BackingError>,
    ) -> Result<T, BackingError> {
        let before = self.segments.count();
        let result = change(&mut self.segments);
        self.budget.release(before + reserved - self.segments.count());
        result
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        self.budget.release(self.segments.count());
    }
}

fn read_max_map_count() -> io::Result<usize> {
    let text = fs::read_to_string("/proc/sys/vm/max_map_count")?;
    text.trim().parse().map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn budget_rejects_mappings_beyond_its_limit() {
        let budget = MappingBudget::new(5);
        assert!(budget.reserve(3));
        assert!(!budget.reserve(3));
        assert!(budget.reserve(2));
        budget.release(4);
        assert_eq!(budget.used(), 1);
        assert!(!budget.reserve(usize::MAX));
    }

    #[test]
    fn volume_holds_mappings_until_it_is_removed() {
        let budget = Arc::new(MappingBudget::new(5));
        let held = budget.hold(3).unwrap();
        let text = budget.hold(3).unwrap_err().to_string();
        for part in ["can need 3", "3 of 5", "vm.max_map_count", "interface=virtio-blk"] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        drop(held);
        assert_eq!((budget.used(), budget.hold(5).is_ok()), (0, true));
    }

    #[test]
    fn ledger_counts_exactly_the_present_mappings() {
        let budget = Arc::new(MappingBudget::new(4));
        let mut ledger = Ledger::new(16, Arc::clone(&budget));
        let set = |start, source| {
            move |segments: &mut Segments| {
                segments.set(start, 1, source);
                Ok(())
            }
        };
        ledger.map(1, set(4, Source::Anonymous)).unwrap();
        assert_eq!(budget.used(), 3);
        let err = ledger.map(1, set(8, Source::Anonymous)).unwrap_err();
        assert!(matches!(err, BackingError::MappingBudget { limit: 4, used: 3 }));
        ledger.unmap(set(4, Source::Nothing)).unwrap();
        assert_eq!(budget.used(), 1);
        drop(ledger);
        assert_eq!(budget.used(), 0);
    }

    fn source() -> impl Strategy<Value = Source> {
        prop_oneof![
            Just(Source::Nothing),
            Just(Source::Anonymous),
            (0u64..12).prop_map(|offset| Source::File { offset }),
        ]
    }

    proptest! {
        /// Compares the segments with a model that stores the source of every byte separately.
        #[test]
        fn segments_match_an_array_of_bytes(
            ops in prop::collection::vec((0u64..16, 1u64..16, source()), 1..40),
        ) {
            const LEN: u64 = 16;
            let mut segments = Segments::new(LEN);
            let mut bytes = [Source::Nothing; LEN as usize];
            for (start, len, source) in ops {
                let len = len.min(LEN - start);
                segments.set(start, len, source);
                for at in start..start + len {
                    bytes[at as usize] = source.at(at - start);
                }
                let breaks = bytes.windows(2).filter(|pair| pair[0].at(1) != pair[1]).count();
                prop_assert_eq!(segments.count(), breaks + 1);
                for segment in segments.in_range(start, len) {
                    for at in 0..segment.len {
                        prop_assert_eq!(segment.source.at(at), bytes[(segment.start + at) as usize]);
                    }
                }
                let covered: u64 = segments.in_range(start, len).iter().map(|segment| segment.len).sum();
                prop_assert_eq!(covered, len);
            }
        }
    }
}
