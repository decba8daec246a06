//! Generates the rules of a run. Some of them differ from the defaults.

use balloon::params::{Param, Parameters};

use super::*;

/// Most of the rules have their defaults, because rare events would be even rarer with other rules.
pub(super) fn rules() -> impl Strategy<Value = Rules> {
    prop_oneof![3 => Just(Rules::default()), 1 => drawn()]
}

fn drawn() -> impl Strategy<Value = Rules> {
    Rules::TABLE.iter().map(value).collect::<Vec<_>>().prop_map(|values| {
        let mut rules = Rules::default();
        for (index, value) in values.into_iter().enumerate() {
            *rules.slot(index) = value;
        }
        rules.max_cool_down_ms = rules.max_cool_down_ms.max(rules.cool_down_ms);
        rules.max_retry_ms = rules.max_retry_ms.max(rules.progress_ms);
        rules
    })
}

/// Generates a value between a sixteenth and 32 times the default, or one of the bounds.
fn value(param: &Param) -> BoxedStrategy<u64> {
    let Param { low, high, default, .. } = *param;
    // Events in the run change these parameters.
    if ["floor", "ceiling"].contains(&param.name) {
        return Just(default).boxed();
    }
    let near = (0u32..=8, 1_000u64..2_000).prop_map(move |(shift, permille)| {
        (((default * permille / 1000) << shift) >> 4).clamp(low, high)
    });
    prop_oneof![4 => Just(default), 4 => near, 1 => Just(low), 1 => Just(high)].boxed()
}
