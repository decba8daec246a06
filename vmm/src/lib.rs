//! Foreshore: a virtual machine monitor that provides guest memory and storage from one pool of
//! persistent memory.
//!
//! The module tree reflects the architecture. The crate `foreshore-devices` contains the devices,
//! and the memory, buses and pools that they use. This crate contains the configuration, the ACPI
//! tables, kernel loading, the governor's threads and the user interfaces. Only [`vm`] composes a
//! machine from these parts.

mod acpi;
pub mod api;
#[doc(hidden)]
pub mod boot;
pub mod config;
mod cpu;
pub mod governor;
pub mod inherited;
mod metrics_server;
pub mod opened;
pub mod run;
pub mod vm;
