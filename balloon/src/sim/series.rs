//! A run over time, for a plot.

use super::demand::Segment;
use super::guest::Guest;
use super::vm::Observer;
use crate::TimeMs;

/// The least and the most of a figure in a stretch of the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extremes {
    /// The least.
    pub least: u64,
    /// The most.
    pub most: u64,
}

impl Extremes {
    fn with(self, value: u64) -> Self {
        Extremes { least: self.least.min(value), most: self.most.max(value) }
    }
}

impl From<u64> for Extremes {
    fn from(value: u64) -> Self {
        Extremes { least: value, most: value }
    }
}

/// The guest over a stretch of the run: the extremes, so that neither a peak nor a dip is lost
/// however short it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Point {
    /// When the stretch begins.
    pub at: TimeMs,
    /// Memory in use, including kernel memory, without page cache.
    pub used_bytes: Extremes,
    /// The guest's memory in all, its boot memory included.
    pub total_bytes: Extremes,
    /// What was available.
    pub available_bytes: Extremes,
    /// What was in swap.
    pub swapped_bytes: Extremes,
}

impl Point {
    fn of(guest: &Guest, at: TimeMs) -> Self {
        Point {
            at,
            used_bytes: (guest.resident_bytes() + guest.kernel_bytes()).into(),
            total_bytes: guest.total_bytes().into(),
            available_bytes: guest.available_bytes().into(),
            swapped_bytes: guest.swapped_bytes().into(),
        }
    }

    /// With what is seen at a moment, whose least and most are the same.
    fn with(self, seen: &Point) -> Self {
        Point {
            at: self.at,
            used_bytes: self.used_bytes.with(seen.used_bytes.least),
            total_bytes: self.total_bytes.with(seen.total_bytes.least),
            available_bytes: self.available_bytes.with(seen.available_bytes.least),
            swapped_bytes: self.swapped_bytes.with(seen.swapped_bytes.least),
        }
    }
}

/// The points of a run.
#[derive(Clone, Debug)]
pub struct Series {
    stretch_ms: u64,
    points: Vec<Point>,
    last: Option<Point>,
}

impl Series {
    /// A run of so long, in so many stretches.
    pub fn new(duration_ms: u64, stretches: u64) -> Self {
        let stretch_ms = duration_ms.div_ceil(stretches.max(1)).max(1);
        Series { stretch_ms, points: Vec::new(), last: None }
    }

    /// The points so far, one for each stretch.
    pub fn points(&self) -> &[Point] {
        &self.points
    }
}

impl Observer for Series {
    fn lived(&mut self, guest: &Guest, _: &Segment) {
        let seen = Point::of(guest, guest.now());
        // Stretches in which nothing was seen, and the beginning of this one: nothing had moved.
        let before = self.last.unwrap_or(seen);
        let stretch = guest.now().0 / self.stretch_ms;
        while (self.points.len() as u64) <= stretch {
            let at = TimeMs(self.points.len() as u64 * self.stretch_ms);
            self.points.push(Point { at, ..before });
        }
        if let Some(point) = self.points.last_mut() {
            *point = point.with(&seen);
        }
        self.last = Some(seen);
    }
}

#[cfg(test)]
mod tests {
    use super::super::guest::GuestConfig;
    use super::super::host::HostPool;
    use super::*;
    use crate::MIB;

    #[test]
    fn a_peak_between_two_points_is_kept_and_a_rest_is_filled() {
        let mut series = Series::new(10_000, 10);
        let low = Segment { anon_bytes: 50 * MIB, hot_permille: 1000, ..Segment::default() };
        let high = Segment { anon_bytes: 90 * MIB, ..low };
        let mut guest = Guest::new(GuestConfig::default(), &[], &low);
        for (to, segment) in [(2_100, &low), (2_500, &high), (2_900, &low), (9_000, &low)] {
            guest.live(TimeMs(to), segment, &mut HostPool(0));
            series.lived(&guest, segment);
        }
        let used = |point: &Point| (point.used_bytes.least / MIB, point.used_bytes.most / MIB);
        let all: Vec<_> = series.points().iter().map(used).collect();
        let rest = (50, 50);
        assert_eq!(all, [rest, rest, (50, 90), rest, rest, rest, rest, rest, rest, rest]);
        assert_eq!(series.points()[5].at, TimeMs(5_000));
        let available = |index: usize| series.points()[index].available_bytes;
        assert!(available(2).least + 40 * MIB <= available(3).least);
        assert_eq!(available(2).most, available(3).most);
    }
}
