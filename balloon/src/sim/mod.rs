//! Model of guests, which is used to compare policies. docs/reference/simulator.md describes the
//! model and its limits.
//!
//! ```text
//!   Workload or Trace -> Demand -> Vm: Guest <-> Agent -> Report -> Governor -> Requests -> Guest
//!                                   |
//!                              Pool, shared by the VMs of a host
//! ```
//!
//! The governor and the policies are the same code as in the VMM. Everything else in this module is
//! a model. It has no clock and no I/O, and random numbers are generated from a seed, so a run has
//! the same result on every machine.

mod agent;
mod demand;
mod guest;
mod host;
mod kernel_blocks;
mod outcome;
mod random;
mod replay;
mod series;
mod storage;
mod swap;
#[cfg(test)]
mod tests;
mod vm;
mod workload;

pub use demand::{Demand, DemandError, Segment};
pub use guest::{Guest, GuestConfig, Pool, Totals};
pub use host::{Governed, HostPool, VmSetup, run_fleet, run_host};
pub use outcome::Outcome;
pub use random::Random;
pub use replay::{ReplayError, replay};
pub use series::{Extremes, Point, Series};
pub use storage::{RecordedPool, StorageOutcome, StorageParams};
pub use swap::SwapDevice;
pub use vm::{Channel, DecisionCounts, Observer, Skip, Vm};
pub use workload::{Params as WorkloadParams, Workload};
