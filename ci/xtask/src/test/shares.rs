//! Divides the guest tests among hosts that run concurrently.
//!
//! The time of a test cannot be predicted, because it may be repeated, and a host may hang for
//! minutes. Therefore, a host takes one share at a time and then returns for another. Shares become
//! smaller.

use std::collections::VecDeque;

/// Smallest share. A boot costs seconds, and fewer tests would not be worth one.
const MIN_SHARE: usize = 5;

/// Tests that no host has taken yet.
pub(super) struct Queue {
    tests: VecDeque<String>,
    hosts: usize,
}

impl Queue {
    pub(super) fn new(tests: &[String], hosts: usize) -> Self {
        Self { tests: tests.iter().cloned().collect(), hosts }
    }

    /// Takes two thirds of an equal share of the remaining tests. A single host takes all of them.
    pub(super) fn next_share(&mut self) -> Vec<String> {
        let equal = self.tests.len() / self.hosts;
        let count = if self.hosts == 1 { equal } else { 2 * equal / 3 };
        let count = count.max(MIN_SHARE).min(self.tests.len());
        self.tests.drain(..count).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(count: usize, hosts: usize) -> Vec<usize> {
        let tests: Vec<_> = (0..count).map(|number| number.to_string()).collect();
        let mut queue = Queue::new(&tests, hosts);
        let next = || Some(queue.next_share()).filter(|share| !share.is_empty());
        let shares: Vec<_> = std::iter::from_fn(next).collect();
        assert_eq!(shares.concat(), tests);
        shares.iter().map(Vec::len).collect()
    }

    #[test]
    fn shares_become_smaller_and_one_host_has_one() {
        assert_eq!(shares(234, 2), [78, 52, 34, 23, 15, 10, 7, 5, 5, 5]);
        assert_eq!(shares(12, 2), [5, 5, 2]);
        assert_eq!(shares(234, 1), [234]);
    }
}
