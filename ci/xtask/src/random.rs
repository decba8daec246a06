//! Random numbers.

use std::hash::{BuildHasher, RandomState};

/// Returns a random number below `bound`.
pub(crate) fn below(bound: u32) -> u32 {
    reduce(RandomState::new().hash_one(()), bound)
}

/// Returns a number below `bound` that depends only on the arguments.
pub(crate) fn of_seed(seed: u32, index: u32, bound: u32) -> u32 {
    // Finalizer of the SplitMix64 generator.
    let number = (u64::from(seed) << 32 | u64::from(index)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    reduce(number ^ number >> 31, bound)
}

fn reduce(number: u64, bound: u32) -> u32 {
    u32::try_from(number % u64::from(bound)).expect("the bound has 32 bits")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_below_their_bound_and_of_their_seed() {
        assert!((0..100).all(|_| below(3) < 3));
        let schedule = |seed| [0, 1, 2, 3].map(|cut| of_seed(seed, cut, 1500));
        assert_eq!(schedule(7), [1221, 256, 1486, 460]);
        assert_ne!(schedule(8), schedule(7));
    }
}
