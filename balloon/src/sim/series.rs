//! Values of a run over time, for a plot.

use super::demand::Segment;
use super::guest::Guest;
use super::vm::Observer;
use crate::TimeMs;

/// Minimum and maximum of a value in an interval of the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extremes {
    /// Minimum.
    pub least: u64,
    /// Maximum.
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

/// The guest in an interval of the run. Minimum and maximum show even short peaks and dips.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Point {
    /// Start of the interval.
    pub at: TimeMs,
    /// Memory in use, including kernel memory, without page cache.
    pub used_bytes: Extremes,
    /// Total memory of the guest, including boot memory.
    pub total_bytes: Extremes,
    /// Available memory.
    pub available_bytes: Extremes,
    /// Swapped memory.
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

    /// Includes the state at one moment, in which minimum and maximum are equal.
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

/// Points of a run, one for each interval.
#[derive(Clone, Debug)]
pub struct Series {
    stretch_ms: u64,
    points: Vec<Point>,
    last: Option<Point>,
}

impl Series {
    /// Divides a run of `duration_ms` into `stretches` intervals.
    pub fn new(duration_ms: u64, stretches: u64) -> Self {
        let stretch_ms = duration_ms.div_ceil(stretches.max(1)).max(1);
        Series { stretch_ms, points: Vec::new(), last: None }
    }

    /// Returns the points so far, one for each interval.
    pub fn points(&self) -> &[Point] {
        &self.points
    }
}

impl Observer for Series {
    fn lived(&mut self, guest: &Guest, _: &Segment) {
        let seen = Point::of(guest, guest.now());
        // The last state also applies to the intervals since then, because nothing has changed in
        // them.
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
    fn short_peak_is_kept_and_intervals_at_rest_are_filled() {
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
