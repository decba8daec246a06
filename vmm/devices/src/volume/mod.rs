//! Volumes of PM pools as a VM sees them: which interface is safe, how their chunks are mapped, and
//! what makes them durable.

pub mod build;
pub mod config;
pub mod file;
pub mod guest_btt;
pub mod interface;
pub mod kernel_gate;
pub mod metrics;
pub mod plan;
pub mod pmem_config;
