//! Memory that a guest's processes demand over time.

use std::sync::Arc;

use thiserror::Error;

use crate::TimeMs;

/// Demand from one point in time until the next segment starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// Start of the segment.
    pub at: TimeMs,
    /// Anonymous memory when the segment starts.
    pub anon_bytes: u64,
    /// Change of `anon_bytes` per second during the segment.
    pub anon_bytes_per_s: i64,
    /// Kernel memory when the segment starts, for example slabs that cannot be reclaimed, page
    /// tables and stacks. It occupies the kernel's zones and cannot be swapped.
    pub kernel_bytes: u64,
    /// Change of `kernel_bytes` per second during the segment.
    pub kernel_bytes_per_s: i64,
    /// Size of the files that are read repeatedly.
    pub file_bytes: u64,
    /// Rate at which other files are read once, in bytes per second.
    pub stream_bytes_per_s: u64,
    /// Number of pages touched per second, among the pages in use.
    pub touches_per_s: u64,
    /// Share of anonymous memory that is in use, in thousandths. The rest is never touched again.
    pub hot_permille: u64,
}

impl Segment {
    /// Returns the demand for anonymous memory at a time in the segment.
    pub fn anon_bytes_at(&self, now: TimeMs) -> u64 {
        self.at_rate(self.anon_bytes, self.anon_bytes_per_s, now)
    }

    /// Returns the demand for kernel memory at a time in the segment.
    pub fn kernel_bytes_at(&self, now: TimeMs) -> u64 {
        self.at_rate(self.kernel_bytes, self.kernel_bytes_per_s, now)
    }

    fn at_rate(&self, bytes: u64, bytes_per_s: i64, now: TimeMs) -> u64 {
        if bytes_per_s == 0 {
            return bytes;
        }
        let change = i128::from(bytes_per_s) * i128::from(now.since(self.at)) / 1000;
        u64::try_from((i128::from(bytes) + change).max(0)).unwrap_or(u64::MAX)
    }

    /// Returns true if the demand is constant and no files are read once.
    pub fn is_flat(&self) -> bool {
        [self.anon_bytes_per_s, self.kernel_bytes_per_s] == [0, 0] && self.stream_bytes_per_s == 0
    }
}

/// Reason why segments do not form a valid demand.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DemandError {
    /// The first segment does not start at time 0.
    #[error("the first segment begins at {0}, must be 0ms")]
    Late(TimeMs),
    /// A segment does not start after the previous one.
    #[error("segment {index} begins at {at}, must be after {last}")]
    Order {
        /// Index of the segment.
        index: usize,
        /// Start of the segment.
        at: TimeMs,
        /// Start of the previous segment.
        last: TimeMs,
    },
    /// A share exceeds 1000 thousandths.
    #[error("segment {index} has {value} thousandths in use, must be 0 to 1000")]
    Hot {
        /// Index of the segment.
        index: usize,
        /// The invalid share.
        value: u64,
    },
}

/// Demand of a guest's processes from its start to the end of the run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Demand {
    /// Segments in order. The list is shared, because a recorded guest may have a million segments
    /// and many guests may have the same demand.
    segments: Arc<Vec<Segment>>,
    end: TimeMs,
}

impl Demand {
    /// Creates a demand from ordered segments and the end of the run. Segments that start at or
    /// after the end are dropped.
    pub fn new(mut segments: Vec<Segment>, end: TimeMs) -> Result<Self, DemandError> {
        match segments.first() {
            Some(Segment { at: TimeMs(0), .. }) => {}
            first => return Err(DemandError::Late(first.map_or(end, |segment| segment.at))),
        }
        for (index, pair) in segments.windows(2).enumerate() {
            if pair[1].at <= pair[0].at {
                return Err(DemandError::Order {
                    index: index + 1,
                    at: pair[1].at,
                    last: pair[0].at,
                });
            }
        }
        if let Some((index, segment)) =
            segments.iter().enumerate().find(|(_, s)| s.hot_permille > 1000)
        {
            return Err(DemandError::Hot { index, value: segment.hot_permille });
        }
        segments.retain(|segment| segment.at < end || segment.at == TimeMs(0));
        Ok(Demand { segments: Arc::new(segments), end })
    }

    /// Extends the demand by `ms`. `segment` describes the extension, except that its memory sizes
    /// start from the last ones.
    pub fn extend(&mut self, segment: Segment, ms: u64) {
        if ms == 0 {
            return;
        }
        let last = self.segments[self.segments.len() - 1];
        Arc::make_mut(&mut self.segments).push(Segment {
            at: self.end,
            anon_bytes: last.anon_bytes_at(self.end),
            kernel_bytes: last.kernel_bytes_at(self.end),
            ..segment
        });
        self.end = self.end + ms;
    }

    /// Ends the demand at a time in the last segment.
    pub fn end_at(&mut self, at: TimeMs) {
        self.end = self.end.min(at);
    }

    /// Returns the segments in order.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Returns the end of the run.
    pub fn end(&self) -> TimeMs {
        self.end
    }

    /// Returns the peak demand for memory, including kernel memory and files that are read
    /// repeatedly.
    pub fn peak_bytes(&self) -> u64 {
        let ends = self.segments.iter().enumerate().map(|(index, segment)| {
            let end = self.segments.get(index + 1).map_or(self.end, |next| next.at);
            let wanted = |at| segment.anon_bytes_at(at).saturating_add(segment.kernel_bytes_at(at));
            wanted(segment.at).max(wanted(end)).saturating_add(segment.file_bytes)
        });
        ends.max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(at: u64, anon_bytes: u64, anon_bytes_per_s: i64) -> Segment {
        Segment { at: TimeMs(at), anon_bytes, anon_bytes_per_s, ..Segment::default() }
    }

    #[test]
    fn demand_rises_and_falls_but_not_below_zero() {
        let up = segment(1_000, 500, 1_000);
        assert_eq!([1_000, 1_001, 2_500].map(|at| up.anon_bytes_at(TimeMs(at))), [500, 501, 2_000]);
        let down = segment(0, 500, -250);
        assert_eq!(
            [0, 1_000, 2_000, 9_000].map(|at| down.anon_bytes_at(TimeMs(at))),
            [500, 250, 0, 0]
        );
    }

    #[test]
    fn segments_must_begin_at_start_and_be_in_order() {
        let demand =
            |segments| Demand::new(segments, TimeMs(100)).map_err(|error| error.to_string());
        assert_eq!(
            demand(vec![]),
            Err("the first segment begins at 100ms, must be 0ms".to_owned())
        );
        assert_eq!(
            demand(vec![segment(5, 0, 0)]),
            Err("the first segment begins at 5ms, must be 0ms".to_owned())
        );
        let twice = demand(vec![segment(0, 0, 0), segment(7, 0, 0), segment(7, 0, 0)]);
        assert_eq!(twice, Err("segment 2 begins at 7ms, must be after 7ms".to_owned()));
        let hot = demand(vec![Segment { hot_permille: 1001, ..segment(0, 0, 0) }]);
        assert_eq!(hot, Err("segment 0 has 1001 thousandths in use, must be 0 to 1000".to_owned()));
        let late = demand(vec![segment(0, 8, 10_000), segment(50, 9, 0), segment(100, 1 << 40, 0)])
            .expect("sound");
        assert_eq!(late.segments().len(), 2);
        assert_eq!(late.peak_bytes(), 508);
    }
}
