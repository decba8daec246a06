//! Guests with less DRAM than their workload needs: what they have instead ([`setup`]), and what
//! became of them ([`run`]).
//!
//! `ci/soak` has the whole matrix of them, `ci/test` a short form.

pub mod run;
mod setup;

pub use run::{About, Condition, Outcome, Watched};
pub use setup::{Config, GuestSize, MIB, WORKLOADS, Workload};
