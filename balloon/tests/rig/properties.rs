//! Policies, and runs of faulty code, that several property tests share.

use balloon::params::Setting;
use balloon::policy::Policy;
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestCaseResult, TestError, TestRng, TestRunner};

pub(crate) const POLICIES: [(&str, &[(&str, &str)]); 12] = [
    ("psi", &[]),
    ("psi", &[("margin", "200"), ("idle", "1s")]),
    ("amf", &[]),
    ("amf", &[("watermark-scale", "16"), ("reclaim", "5")]),
    ("dapper", &[]),
    ("dapper", &[("watermark-scale", "4")]),
    ("pmb", &[]),
    ("pmb", &[("watermark-scale", "4"), ("unit", "16M")]),
    ("memorage", &[("unit", "64M"), ("calm", "1s")]),
    ("memorage", &[("watermark-scale", "4"), ("storage_floor", "300M")]),
    ("fixed", &[("size", "300M")]),
    ("off", &[]),
];

pub(crate) fn policy(index: usize) -> Policy {
    let (name, params) = POLICIES[index];
    let settings: Vec<_> =
        params.iter().map(|(name, text)| (*name, Setting::from(*text))).collect();
    let policy = Policy::from_name(name).expect("known");
    policy.with(settings.iter().map(|(name, setting)| (*name, setting))).expect("in bounds")
}

/// Returns true if `check` fails for any of `cases` inputs. The inputs are the same in each run.
pub(crate) fn fails<S: Strategy>(
    cases: u32,
    inputs: &S,
    check: impl Fn(S::Value) -> TestCaseResult,
) -> bool {
    let config = ProptestConfig {
        cases,
        failure_persistence: None,
        max_shrink_iters: 0,
        ..Default::default()
    };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    match TestRunner::new_with_rng(config, rng).run(inputs, check) {
        Ok(()) => false,
        Err(TestError::Fail(..)) => true,
        Err(TestError::Abort(reason)) => panic!("{reason}"),
    }
}
