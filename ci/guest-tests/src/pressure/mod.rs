//! Guests with less DRAM than their workload needs: configurations ([`setup`]) and measurements
//! ([`run`]).
//!
//! `ci/soak` runs the whole matrix. `ci/test` runs a short version.

pub mod run;
mod setup;

pub use run::{Condition, ConditionKind, Outcome, WatchEnd};
pub use setup::{Config, GuestSize, MIB, WORKLOADS, Workload};
