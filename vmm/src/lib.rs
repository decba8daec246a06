//! Foreshore: a virtual machine monitor whose guest takes memory and storage from one pool of
//! persistent memory.
//!
//! The tree shows the architecture. Devices, and memory, buses and pools below them, are the crate
//! `foreshore-devices`. This crate has the configuration, ACPI tables, the boot of kernels, the
//! governor's thread and the interfaces; only [`vm`] composes a machine.

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
