//! Values of a run over time, which are used for a plot.

use super::demand::Segment;
use super::guest::Guest;
use super::vm::Observer;
use crate::units::scale;
use crate::{Tier, TimeMs};

/// Minimum and maximum of a value in one interval of the run.
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

/// State of the guest in one interval of the run. Minimum and maximum show even short peaks and
/// dips.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Point {
    /// Start of the interval.
    pub at: TimeMs,
    /// Memory in use. The memory includes kernel memory but not page cache.
    pub used_bytes: Extremes,
    /// DRAM of the guest, including boot memory.
    pub dram_bytes: Extremes,
    /// Sum of the guest's DRAM and PM.
    pub total_bytes: Extremes,
    /// Available memory.
    pub available_bytes: Extremes,
    /// Swapped memory.
    pub swapped_bytes: Extremes,
    /// Time within the interval for which tasks waited for memory.
    pub stall_us: u64,
}

impl Point {
    fn of(guest: &Guest, at: TimeMs) -> Self {
        Point {
            at,
            used_bytes: (guest.resident_bytes() + guest.kernel_bytes()).into(),
            dram_bytes: guest.total_bytes().saturating_sub(guest.plugged_of(Tier::Pm)).into(),
            total_bytes: guest.total_bytes().into(),
            available_bytes: guest.available_bytes().into(),
            swapped_bytes: guest.swapped_bytes().into(),
            stall_us: 0,
        }
    }

    /// Includes another state, in which minimum and maximum are equal.
    fn with(self, point: &Point) -> Self {
        Point {
            at: self.at,
            used_bytes: self.used_bytes.with(point.used_bytes.least),
            dram_bytes: self.dram_bytes.with(point.dram_bytes.least),
            total_bytes: self.total_bytes.with(point.total_bytes.least),
            available_bytes: self.available_bytes.with(point.available_bytes.least),
            swapped_bytes: self.swapped_bytes.with(point.swapped_bytes.least),
            stall_us: self.stall_us,
        }
    }
}

/// Points of a run, with one point for each interval.
#[derive(Clone, Debug)]
pub struct Series {
    interval_ms: u64,
    points: Vec<Point>,
    last: Option<Point>,
    /// Stall time from the start of the run to `last`.
    stall_us: u64,
}

impl Series {
    /// Divides a run of `duration_ms` into `intervals` intervals.
    pub fn new(duration_ms: u64, intervals: u64) -> Self {
        let interval_ms = duration_ms.div_ceil(intervals.max(1)).max(1);
        Series { interval_ms, points: Vec::new(), last: None, stall_us: 0 }
    }

    /// Returns the length of an interval. The last interval ends with the run.
    pub fn interval_ms(&self) -> u64 {
        self.interval_ms
    }

    /// Returns the points so far, with one point for each interval.
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// Distributes the stall time between two times evenly over the intervals between them.
    fn add_stalls(&mut self, from_ms: u64, to_ms: u64, total_us: u64) {
        let new_us = total_us - self.stall_us;
        self.stall_us = total_us;
        if new_us == 0 {
            return;
        }
        let first = (from_ms / self.interval_ms) as usize;
        let mut added_us = 0;
        for point in self.points.iter_mut().skip(first) {
            let end_ms = to_ms.min(point.at.0 + self.interval_ms);
            let until_us = scale(new_us, end_ms - from_ms, to_ms - from_ms);
            point.stall_us += until_us - added_us;
            added_us = until_us;
        }
    }
}

impl Observer for Series {
    fn advanced(&mut self, guest: &Guest, _: &Segment) {
        let latest = Point::of(guest, guest.now());
        // The VM has not changed since the last state, so that state also applies to the intervals
        // since then.
        let before = self.last.unwrap_or(latest);
        let interval = guest.now().0 / self.interval_ms;
        while (self.points.len() as u64) <= interval {
            let at = TimeMs(self.points.len() as u64 * self.interval_ms);
            self.points.push(Point { at, stall_us: 0, ..before });
        }
        self.add_stalls(
            self.last.map_or(0, |last| last.at.0),
            latest.at.0,
            guest.totals().stall_us,
        );
        if let Some(point) = self.points.last_mut() {
            *point = point.with(&latest);
        }
        self.last = Some(latest);
    }
}

#[cfg(test)]
mod tests {
    use super::super::guest::GuestConfig;
    use super::super::host::HostPool;
    use super::*;
    use crate::{MIB, ZoneSizes};

    #[test]
    fn short_peak_is_kept_and_intervals_at_rest_are_filled() {
        let mut series = Series::new(10_000, 10);
        let low = Segment { anon_bytes: 50 * MIB, hot_permille: 1000, ..Segment::default() };
        let high = Segment { anon_bytes: 90 * MIB, ..low };
        let mut guest = Guest::new(GuestConfig::default(), &[], &low);
        for (to, segment) in [(2_100, &low), (2_500, &high), (2_900, &low), (9_000, &low)] {
            guest.advance(TimeMs(to), segment, &mut HostPool::new(0));
            series.advanced(&guest, segment);
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

    #[test]
    fn stalls_are_spread_over_the_time_in_which_they_were() {
        let mut series = Series::new(10_000, 10);
        series.points =
            (0..5).map(|index| Point { at: TimeMs(index * 1_000), ..Point::default() }).collect();
        series.add_stalls(500, 500, 0);
        series.add_stalls(500, 3_000, 250_001);
        series.add_stalls(3_000, 4_500, 250_001);
        series.add_stalls(4_500, 4_900, 280_001);
        let stalls: Vec<_> = series.points().iter().map(|point| point.stall_us).collect();
        assert_eq!(stalls, [50_000, 100_000, 100_001, 0, 30_000]);
    }

    #[test]
    fn series_has_all_stalls_of_a_guest_and_its_pm_apart() {
        let mut series = Series::new(20_000, 10);
        let demand = Segment {
            anon_bytes: 50 * MIB,
            anon_bytes_per_s: 40 * MIB as i64,
            hot_permille: 1000,
            touches_per_s: 10_000,
            ..Segment::default()
        };
        let zones = [(0, Tier::Dram), (1, Tier::Pm)].map(|(id, tier)| ZoneSizes {
            requested_bytes: 64 * MIB,
            plugged_bytes: 64 * MIB,
            ..ZoneSizes::empty(id, tier, 64 * MIB)
        });
        let mut guest = Guest::new(GuestConfig::default(), &zones, &demand);
        for step in 1..=40 {
            if step == 5 {
                guest.request([64 * MIB, 0]);
            }
            guest.advance(TimeMs(step * 500), &demand, &mut HostPool::new(0));
            series.advanced(&guest, &demand);
        }
        let stall_us: u64 = series.points().iter().map(|point| point.stall_us).sum();
        assert!(stall_us > 0);
        assert_eq!(stall_us, guest.totals().stall_us);
        let pm = |point: &Point| point.total_bytes.most - point.dram_bytes.most;
        let points = series.points();
        assert_eq!((pm(&points[0]), pm(&points[9])), (64 * MIB, 0));
        assert_eq!(points[9].dram_bytes, guest.total_bytes().into());
    }
}
