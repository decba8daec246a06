//! Random numbers.

use std::fs::File;
use std::io::Read;

use anyhow::{Context, Result};

/// Generator of bash's `RANDOM`, so that seeds of earlier runs keep their schedules.
pub struct Random {
    state: u32,
    last: u32,
}

impl Random {
    pub fn new(seed: u32) -> Self {
        Self { state: seed % 32768, last: 0 }
    }

    /// Returns the next number, which is below 32768.
    pub fn next(&mut self) -> u32 {
        loop {
            self.state = minimal_standard(self.state);
            let number = (self.state >> 16 ^ self.state & 0xffff) & 0x7fff;
            if number != self.last {
                self.last = number;
                return number;
            }
        }
    }
}

/// `16807 * x mod (2^31 - 1)`, the minimal standard of Park and Miller.
fn minimal_standard(state: u32) -> u32 {
    let state = if state == 0 { 123_459_876 } else { state };
    let next = u64::from(state) * 16807 % 0x7fff_ffff;
    u32::try_from(next).expect("the modulus has 31 bits")
}

/// Returns a random number below `bound`.
pub fn from_kernel(bound: u32) -> Result<u32> {
    let mut bytes = [0; 4];
    let read = File::open("/dev/urandom").and_then(|mut device| device.read_exact(&mut bytes));
    read.context("Cannot read /dev/urandom")?;
    Ok(u32::from_ne_bytes(bytes) % bound)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_bash() {
        // RANDOM=SEED; echo $RANDOM $RANDOM $RANDOM
        for (seed, expected) in [
            (0, [20814, 24386, 149]),
            (1, [16807, 10791, 19566]),
            (4100, [29319, 23256, 13009]),
            (32767, [7818, 22855, 18024]),
            (604203, [362, 5438, 17994]),
        ] {
            let mut random = Random::new(seed);
            assert_eq!([(); 3].map(|()| random.next()), expected, "{seed}");
        }
    }

    #[test]
    fn chosen_seeds_are_below_the_bound() {
        assert!((0..100).all(|_| from_kernel(3).unwrap() < 3));
    }
}
