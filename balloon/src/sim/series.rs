//! A run over time, for a plot.

use super::demand::Segment;
use super::guest::Guest;
use super::vm::Observer;
use crate::TimeMs;

/// The guest over a stretch of the run: the extremes, so that no peak is lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Point {
    /// When the stretch begins.
    pub at: TimeMs,
    /// The most that was used: wanted and there, without page cache.
    pub used_bytes: u64,
    /// The most that the guest held, its boot memory included.
    pub held_bytes: u64,
    /// The least that was available.
    pub available_bytes: u64,
    /// The most that was in swap.
    pub swapped_bytes: u64,
}

/// The points of a run.
#[derive(Clone, Debug)]
pub struct Series {
    stretch_ms: u64,
    points: Vec<Point>,
    last: Point,
}

impl Series {
    /// A run of so long, in so many stretches.
    pub fn new(duration_ms: u64, stretches: u64) -> Self {
        let stretch_ms = duration_ms.div_ceil(stretches.max(1)).max(1);
        Series { stretch_ms, points: Vec::new(), last: Point::default() }
    }

    /// The points so far, one for each stretch.
    pub fn points(&self) -> &[Point] {
        &self.points
    }
}

impl Observer for Series {
    fn lived(&mut self, guest: &Guest, _: &Segment) {
        let seen = Point {
            at: guest.now(),
            used_bytes: guest.resident_bytes(),
            held_bytes: guest.total_bytes(),
            available_bytes: guest.available_bytes(),
            swapped_bytes: guest.swapped_bytes(),
        };
        let stretch = guest.now().0 / self.stretch_ms;
        // Stretches in which nothing was seen: nothing moved.
        while (self.points.len() as u64) <= stretch {
            let at = TimeMs(self.points.len() as u64 * self.stretch_ms);
            let before = if self.points.len() as u64 == stretch { seen } else { self.last };
            self.points.push(Point { at, ..before });
        }
        if let Some(point) = self.points.last_mut() {
            *point = Point {
                at: point.at,
                used_bytes: point.used_bytes.max(seen.used_bytes),
                held_bytes: point.held_bytes.max(seen.held_bytes),
                available_bytes: point.available_bytes.min(seen.available_bytes),
                swapped_bytes: point.swapped_bytes.max(seen.swapped_bytes),
            };
        }
        self.last = seen;
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
        let used: Vec<u64> = series.points().iter().map(|point| point.used_bytes / MIB).collect();
        assert_eq!(used[2..], [90, 50, 50, 50, 50, 50, 50, 50]);
        assert_eq!(series.points()[5].at, TimeMs(5_000));
        assert!(series.points()[2].available_bytes + 40 * MIB <= series.points()[3].available_bytes);
    }
}
