//! Volumes of PM pools in a VM: choice of safe interfaces, mapping of chunks, and durability.

pub mod build;
pub mod config;
pub mod file;
pub mod guest_btt;
pub mod interface;
pub mod kernel_gate;
pub mod metrics;
pub mod plan;
pub mod pmem_config;
