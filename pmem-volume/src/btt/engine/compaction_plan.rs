//! Choice of the units that a compaction empties. It does no I/O.
//!
//! Emptying a unit moves its live blocks to free blocks of other units, which keep their space. The
//! sparsest units are emptied and the densest ones are filled, so that no block moves twice.

/// Unit with live blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UsedUnit {
    pub(super) unit: u32,
    /// Number of live blocks.
    pub(super) live: u32,
}

/// Result of all compactions of an arena since it was opened.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Account {
    pub(super) moved_blocks: u64,
    pub(super) freed_units: u64,
}

/// Limits of a plan.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Number of blocks in a unit.
    pub(super) unit_blocks: u32,
    pub(super) max_units: usize,
    /// Free blocks that are needed in addition to those for the moved blocks.
    pub(super) spare_blocks: u64,
    pub(super) account: Account,
}

/// Units to empty and to fill. No unit is in both lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// Sparsest first.
    emptied: Vec<UsedUnit>,
    /// Sorted numbers of `emptied`.
    emptied_units: Vec<u32>,
    /// Sorted.
    filled: Vec<u32>,
}

impl Account {
    /// Records the units that a pass has emptied. If it has emptied none, for example because of
    /// writes to them, half of the account is forgotten. Otherwise, the blocks that it has moved
    /// could prevent all later passes.
    pub(super) fn add_pass(&mut self, freed_units: u64) {
        self.freed_units += freed_units;
        if freed_units == 0 {
            *self = Self { moved_blocks: self.moved_blocks / 2, freed_units: self.freed_units / 2 };
        }
    }
}

impl Limits {
    /// Returns true if at most half a byte has been moved for each freed byte, after `units` more
    /// units are emptied by moving `blocks` blocks.
    fn allow(&self, units: u64, blocks: u64) -> bool {
        let freed = (self.account.freed_units + units) * u64::from(self.unit_blocks);
        2 * (self.account.moved_blocks + blocks) <= freed
    }
}

impl Plan {
    /// Empties as many units as the limits and the free blocks of the other units allow.
    pub(super) fn new(mut units: Vec<UsedUnit>, limits: &Limits) -> Self {
        units.sort_unstable_by_key(|unit| (unit.live, unit.unit));
        let free_of = |unit: &UsedUnit| u64::from(limits.unit_blocks.saturating_sub(unit.live));
        let mut free: u64 = units.iter().map(free_of).sum();
        let (mut moved, mut best) = (0, (0, 0));
        for (index, unit) in units.iter().take(limits.max_units).enumerate() {
            moved += u64::from(unit.live);
            free -= free_of(unit);
            let needed = moved + limits.spare_blocks;
            if limits.allow(index as u64 + 1, moved) && needed <= free {
                best = (index + 1, needed);
            }
        }
        let (count, mut needed) = best;
        let others = units.split_off(count);
        let mut filled = Vec::new();
        for unit in others.iter().rev() {
            if needed == 0 {
                break;
            }
            needed = needed.saturating_sub(free_of(unit));
            filled.push(unit.unit);
        }
        filled.sort_unstable();
        Self { filled, ..Self::default() }.with_emptied(units)
    }

    fn with_emptied(self, emptied: Vec<UsedUnit>) -> Self {
        let mut emptied_units: Vec<u32> = emptied.iter().map(|unit| unit.unit).collect();
        emptied_units.sort_unstable();
        Self { emptied, emptied_units, ..self }
    }

    /// Omits units for which `is_kept` returns false, and the densest units for which the limits or
    /// `free_blocks` do not suffice then.
    pub(super) fn retain(
        self,
        limits: &Limits,
        free_blocks: u64,
        is_kept: impl Fn(u32) -> bool,
    ) -> Self {
        let mut kept = self.emptied.clone();
        kept.retain(|unit| is_kept(unit.unit));
        let mut moved = 0;
        let mut best = 0;
        for (units, unit) in (1..).zip(&kept) {
            moved += u64::from(unit.live);
            if limits.allow(units, moved) && moved + limits.spare_blocks <= free_blocks {
                best = units as usize;
            }
        }
        kept.truncate(best);
        self.with_emptied(kept)
    }

    /// Returns the units to empty, sparsest first.
    pub(super) fn emptied(&self) -> &[UsedUnit] {
        &self.emptied
    }

    pub(super) fn is_emptied(&self, unit: u32) -> bool {
        self.emptied_units.binary_search(&unit).is_ok()
    }

    pub(super) fn is_filled(&self, unit: u32) -> bool {
        self.filled.binary_search(&unit).is_ok()
    }

    /// Number of live blocks in the units to empty.
    pub(super) fn blocks(&self) -> u64 {
        self.emptied.iter().map(|unit| u64::from(unit.live)).sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn units(live: &[u32]) -> Vec<UsedUnit> {
        (0..).zip(live).map(|(unit, live)| UsedUnit { unit, live: *live }).collect()
    }

    fn limits(unit_blocks: u32) -> Limits {
        Limits { unit_blocks, max_units: 100, spare_blocks: 0, account: Account::default() }
    }

    /// Returns the units to empty and to fill.
    fn plan(live: &[u32], limits: &Limits) -> (Vec<u32>, Vec<u32>) {
        let plan = Plan::new(units(live), limits);
        (plan.emptied.iter().map(|unit| unit.unit).collect(), plan.filled)
    }

    #[test]
    fn sparsest_units_are_emptied_into_the_densest() {
        assert_eq!(plan(&[5, 1, 7, 2, 4], &limits(8)), (vec![1, 3], vec![0, 2]));
        // A dense unit is emptied if sparse ones are released for fewer blocks than allowed.
        assert_eq!(plan(&[1, 1, 5, 5, 5, 5], &limits(8)), (vec![0, 1, 2], vec![3, 4, 5]));
        assert_eq!(plan(&[8, 8, 8], &limits(8)), (vec![], vec![]));
        assert_eq!(plan(&[3], &limits(8)), (vec![], vec![]), "no other unit has space");
    }

    #[test]
    fn limits_reduce_the_number_of_emptied_units() {
        let live = [1, 1, 4, 4, 8];
        assert_eq!(plan(&live, &limits(8)).0, [0, 1]);
        assert_eq!(plan(&live, &Limits { max_units: 1, ..limits(8) }).0, [0]);
        assert_eq!(plan(&live, &Limits { spare_blocks: 6, ..limits(8) }).0, [0, 1]);
        assert_eq!(plan(&live, &Limits { spare_blocks: 7, ..limits(8) }).0, [0]);
        let moved = |moved_blocks| Account { moved_blocks, freed_units: 0 };
        assert_eq!(plan(&live, &Limits { account: moved(6), ..limits(8) }).0, [0, 1]);
        assert_eq!(plan(&live, &Limits { account: moved(7), ..limits(8) }).0, [0; 0]);
    }

    #[test]
    fn units_without_enough_free_blocks_are_omitted() {
        let plan = Plan::new(units(&[2, 3, 1, 6, 6, 6]), &limits(8));
        let emptied = |plan: &Plan| plan.emptied.iter().map(|unit| unit.unit).collect::<Vec<_>>();
        assert_eq!(emptied(&plan), [2, 0, 1]);
        assert_eq!(emptied(&plan.clone().retain(&limits(8), 5, |_| true)), [2, 0]);
        let without_2 = plan.clone().retain(&limits(8), 6, |unit| unit != 2);
        assert_eq!((emptied(&without_2), without_2.is_emptied(2)), (vec![0, 1], false));
        // Without the sparsest unit, too many blocks would move for each freed one.
        let account = Account { moved_blocks: 3, freed_units: 0 };
        let strict = Limits { account, ..limits(8) };
        assert_eq!(emptied(&plan.retain(&strict, 6, |unit| unit == 1)), [0; 0]);
    }

    proptest! {
        /// A plan keeps the limits, and no allowed plan of the same kind empties more units.
        #[test]
        fn plan_keeps_the_limits_and_is_the_largest(
            live in prop::collection::vec(1..=16u32, 0..40),
            max_units in 0..50usize,
            spare_blocks in 0..40u64,
            moved_blocks in 0..100u64,
            freed_units in 0..20u64,
        ) {
            let account = Account { moved_blocks, freed_units };
            let limits = Limits { unit_blocks: 16, max_units, spare_blocks, account };
            let plan = Plan::new(units(&live), &limits);
            prop_assert_eq!(&plan, &Plan::new(units(&live), &limits));
            let emptied = plan.emptied.len();
            prop_assert!(emptied <= max_units);
            prop_assert!(emptied == 0 || limits.allow(emptied as u64, plan.blocks()));
            let free = |unit: &u32| u64::from(16 - live[*unit as usize]);
            let room: u64 = plan.filled.iter().map(free).sum();
            prop_assert!(emptied == 0 || room >= plan.blocks() + spare_blocks);
            prop_assert!(plan.filled.iter().all(|unit| !plan.is_emptied(*unit)));
            let mut sorted = live.clone();
            sorted.sort_unstable();
            let sparsest = sorted[..emptied].iter().copied();
            prop_assert!(plan.emptied.iter().map(|unit| unit.live).eq(sparsest));
            for more in emptied + 1..=sorted.len().min(max_units) {
                let (moved, others) = sorted.split_at(more);
                let moved: u64 = moved.iter().map(|live| u64::from(*live)).sum();
                let room: u64 = others.iter().map(|live| u64::from(16 - live)).sum();
                prop_assert!(!limits.allow(more as u64, moved) || room < moved + spare_blocks);
            }
        }
    }
}
