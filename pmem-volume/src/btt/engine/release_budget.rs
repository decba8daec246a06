//! Budget for released units of a thin volume. It does not read a clock. Callers pass the current
//! time.
//!
//! A guest may write a sector, discard it, and begin again. Each round would cost the erasure of a
//! unit and two changes of its owner.

use std::time::Duration;

/// Time in which an empty budget becomes full.
const FILL_TIME: Duration = Duration::from_secs(3600);

/// Minimum number of units that the budget gains per second: 16 MiB in a pool.
const MIN_UNITS_PER_S: u64 = 8;

/// A full budget suffices to release the whole volume once. It fills up within [`FILL_TIME`].
#[derive(Debug)]
pub(super) struct ReleaseBudget {
    /// Number of units of the volume.
    capacity: u64,
    /// Units that may be released, in units per [`FILL_TIME`].
    fraction: u128,
    updated: Duration,
}

impl ReleaseBudget {
    /// Creates a full budget.
    pub(super) fn new(capacity: u64) -> Self {
        Self { capacity, fraction: Self::fraction_of(capacity), updated: Duration::ZERO }
    }

    /// Adds the units of a volume that has grown to `capacity`.
    pub(super) fn grow(&mut self, capacity: u64) {
        self.fraction += Self::fraction_of(capacity.saturating_sub(self.capacity));
        self.capacity = self.capacity.max(capacity);
    }

    fn fraction_of(units: u64) -> u128 {
        u128::from(units) * FILL_TIME.as_nanos()
    }

    /// Takes up to `max` units from the budget. Returns their number.
    pub(super) fn take(&mut self, max: u64, now: Duration) -> u64 {
        let gain = u128::from(self.capacity.max(MIN_UNITS_PER_S * FILL_TIME.as_secs()));
        let elapsed = now.saturating_sub(self.updated).as_nanos();
        self.add(gain.saturating_mul(elapsed));
        self.updated = self.updated.max(now);
        let units = max.min((self.fraction / FILL_TIME.as_nanos()) as u64);
        self.fraction -= Self::fraction_of(units);
        units
    }

    /// Returns units to the budget that were taken but not released.
    pub(super) fn give_back(&mut self, units: u64) {
        self.add(Self::fraction_of(units));
    }

    fn add(&mut self, fraction: u128) {
        let full = Self::fraction_of(self.capacity);
        self.fraction = self.fraction.saturating_add(fraction).min(full);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn whole_volume_is_released_once_and_then_at_the_rate() {
        let mut budget = ReleaseBudget::new(36_000);
        let s = Duration::from_secs;
        assert_eq!(budget.take(40_000, s(0)), 36_000);
        let taken = [0, 1, 1, 60].map(|at| budget.take(1000, s(at)));
        assert_eq!(taken, [0, 10, 0, 590]);
        budget.give_back(500);
        assert_eq!([60, 59, 61].map(|at| budget.take(300, s(at))), [300, 200, 10]);
        assert_eq!(budget.take(u64::MAX, s(4000)), 36_000);
    }

    #[test]
    fn grown_volume_can_release_its_new_units_once() {
        let mut budget = ReleaseBudget::new(100);
        assert_eq!(budget.take(80, Duration::ZERO), 80);
        budget.grow(250);
        assert_eq!(budget.take(1000, Duration::ZERO), 170);
        budget.grow(200);
        assert_eq!(budget.take(1000, Duration::ZERO), 0);
    }

    #[test]
    fn small_volume_gains_the_minimum() {
        let mut budget = ReleaseBudget::new(100);
        budget.take(100, Duration::ZERO);
        let ms = Duration::from_millis;
        assert_eq!([124, 125, 1000, 60_000].map(|at| budget.take(200, ms(at))), [0, 1, 7, 100]);
        budget.give_back(200);
        assert_eq!(budget.take(200, ms(60_000)), 100, "more than the capacity");
    }

    proptest! {
        /// Over any period, at most a whole volume is released, and the gain of the period.
        #[test]
        fn limit_holds_over_every_period(
            capacity in 1..100_000u64,
            steps in prop::collection::vec((0..10_000_000_000u64, 0..20_000u64, 0..100u64), 1..60),
        ) {
            let mut budget = ReleaseBudget::new(capacity);
            let (mut now, mut released) = (Duration::ZERO, vec![]);
            for (pause_ns, wanted, unused) in steps {
                now += Duration::from_nanos(pause_ns);
                let units = budget.take(wanted, now);
                let unused = unused.min(units);
                budget.give_back(unused);
                released.push((now, units - unused));
            }
            let per_hour = capacity.max(8 * 3600);
            for from in 0..released.len() {
                let mut total = 0;
                for (at, units) in &released[from..] {
                    total += units;
                    let elapsed = (*at - released[from].0).as_nanos();
                    let gain = elapsed * u128::from(per_hour) / FILL_TIME.as_nanos();
                    prop_assert!(u128::from(total) <= u128::from(capacity) + gain + 1);
                }
            }
        }
    }
}
