//! Shares of the guest tests for hosts that run at the same time.
//!
//! The time of a test is unknown beforehand, because it may run again, and a host may stand still
//! for minutes. So hosts share most of the tests before they boot, and return for the rest.

use std::collections::VecDeque;

/// Part of the tests that hosts return for.
const KEPT_PART: usize = 5;
/// A boot costs seconds, so fewer tests are not worth one.
const LEAST_SHARE: usize = 3;

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Shares {
    /// First share of each host.
    pub first: Vec<Vec<String>>,
    pub kept: Kept,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Kept {
    tests: VecDeque<String>,
    hosts: usize,
}

/// Divides the tests between at most `hosts` hosts.
pub(super) fn divide(tests: &[String], hosts: usize) -> Shares {
    let hosts = hosts.clamp(1, tests.len().max(1));
    let kept = tests.len() / KEPT_PART;
    let kept = if hosts > 1 && kept >= hosts * LEAST_SHARE { kept } else { 0 };
    let (dealt, kept) = tests.split_at(tests.len() - kept);
    // Neighbors are of one topic and take similar times.
    let share = |host| dealt.iter().skip(host).step_by(hosts).cloned().collect();
    Shares {
        first: (0..hosts).map(share).collect(),
        kept: Kept { tests: kept.iter().cloned().collect(), hosts },
    }
}

impl Kept {
    /// Takes half of one host's equal part of the rest.
    pub(super) fn next_share(&mut self) -> Vec<String> {
        let count = (self.tests.len() / (2 * self.hosts)).max(LEAST_SHARE).min(self.tests.len());
        self.tests.drain(..count).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tests(count: usize) -> Vec<String> {
        (0..count).map(|number| number.to_string()).collect()
    }

    fn sizes(count: usize, hosts: usize) -> (Vec<usize>, Vec<usize>) {
        let mut shares = divide(&tests(count), hosts);
        let first = shares.first.iter().map(Vec::len).collect();
        let returns =
            std::iter::from_fn(|| Some(shares.kept.next_share()).filter(|share| !share.is_empty()));
        (first, returns.map(|share| share.len()).collect())
    }

    #[test]
    fn hosts_return_for_a_fifth_in_ever_smaller_shares() {
        assert_eq!(sizes(234, 2), (vec![94, 94], vec![11, 8, 6, 5, 4, 3, 3, 3, 3]));
        assert_eq!(sizes(60, 4).0, [12; 4]);
    }

    #[test]
    fn one_host_and_few_tests_share_nothing() {
        assert_eq!(sizes(234, 1), (vec![234], vec![]));
        assert_eq!(sizes(29, 2), (vec![15, 14], vec![]));
        assert_eq!(sizes(30, 2), (vec![12, 12], vec![3, 3]));
        assert_eq!(sizes(1, 4), (vec![1], vec![]));
    }

    #[test]
    fn each_test_is_in_one_share() {
        let mut shares = divide(&tests(101), 3);
        let mut all = shares.first.concat();
        for _ in 0..20 {
            all.extend(shares.kept.next_share());
        }
        all.sort_by_key(|name| name.parse::<usize>().unwrap());
        assert_eq!(all, tests(101));
        assert_eq!(shares.first[1][..3], ["1", "4", "7"]);
    }
}
