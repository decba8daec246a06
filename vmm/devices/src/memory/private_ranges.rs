//! Boot memory that no other process can access.

use std::ops::Range;

use super::layout::GuestRange;

/// Ranges of boot memory that no other process can access.
///
/// Only these may be borrowed as a slice. Another process could change other memory at the same
/// time, which is undefined behavior for a slice, and could change bytes between a check and their
/// use.
#[derive(Clone, Debug, Default)]
pub struct PrivateRanges(Vec<GuestRange>);

impl PrivateRanges {
    pub(super) fn new(ranges: Vec<GuestRange>) -> Self {
        Self(ranges)
    }

    /// Memory of a test, which no other process has mapped.
    #[cfg(any(test, feature = "testing"))]
    pub fn of_test(ranges: impl IntoIterator<Item = Range<u64>>) -> Self {
        let ranges = ranges.into_iter();
        Self(ranges.map(|Range { start, end }| GuestRange { start, len: end - start }).collect())
    }

    /// First part of `range`, up to the end of the private range that contains its start. `None` if
    /// no private range does.
    pub fn start_of(&self, range: Range<u64>) -> Option<Range<u64>> {
        let private = self.0.iter().find(|private| private.contains(range.start, 1))?;
        Some(range.start..range.end.min(private.end()))
    }
}
