//! Foreshore: a virtual machine monitor whose guest takes memory and storage from one pool of
//! persistent memory.
//!
//! The tree of modules shows the architecture. The crate `foreshore-devices` has the devices, and
//! the memory, buses and pools below them. This crate has the configuration, ACPI tables, the boot
//! of kernels, the governor's thread and the interfaces. Only [`vm`] composes a machine.

mod acpi;
pub mod api;
mod boot;
pub mod config;
pub mod core_dumps;
mod cpu;
pub mod governor;
pub mod inherited;
mod metrics_server;
pub mod run;
pub mod vm;
