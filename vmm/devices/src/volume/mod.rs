//! Volumes of PM pools in a VM: the choice of a safe interface, the mapping into guest memory, and
//! durability.

pub mod build;
pub mod compactor;
pub mod config;
pub mod file;
pub mod guest_btt;
pub mod interface;
pub mod kernel_gate;
mod mapped_thin;
pub mod metrics;
pub mod plan;
pub mod pmem_config;
