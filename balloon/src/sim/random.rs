//! Random numbers that are the same on every machine and in every release, so that a seed
//! completely determines a run.

/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates a generator for a seed and a stream. Each VM uses its own stream, which is
    /// independent of the others.
    pub fn new(seed: u64, stream: u64) -> Self {
        let mut random = Random(seed);
        random.0 = random.next_u64() ^ stream.wrapping_mul(0xd134_2543_de82_ef95);
        random
    }

    /// Returns the next random number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a random number that is at least `low` and less than `high`. `high` must be larger
    /// than `low`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        let span = u128::from(high.saturating_sub(low).max(1));
        low + ((u128::from(self.next_u64()) * span) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_equal_those_of_the_reference_implementation() {
        // These are the first numbers of the reference implementation for the seed 1234567.
        let mut random = Random(1_234_567);
        let expected =
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!([(); 3].map(|()| random.next_u64()), expected);
    }

    #[test]
    fn streams_of_a_seed_differ_and_ranges_hold() {
        let [mut a, mut b] = [0, 1].map(|stream| Random::new(7, stream));
        assert_ne!(a.next_u64(), b.next_u64());
        let drawn: Vec<u64> = (0..1000).map(|_| a.between(3, 6)).collect();
        assert!(
            (3..6).all(|value| drawn.contains(&value))
                && drawn.iter().all(|value| (3..6).contains(value))
        );
        assert_eq!(a.between(9, 9), 9);
    }
}
