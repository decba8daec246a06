//! Foreshore: a virtual machine monitor whose guest takes memory and storage from one pool of
//! persistent memory.
//!
//! The tree shows the architecture. Pure parts (layout, configuration, ACPI tables, request
//! parsing) know nothing of KVM; devices know neither each other nor the machine they are part of;
//! only [`vm`] composes.

pub mod api;
mod boot;
pub mod config;
mod cpu;
pub mod governor;
pub mod inherited;
mod metrics_server;
pub mod run;
pub mod vm;

// The layers below the configuration.
use foreshore_devices::{
    acpi, brake, bus, cmos, device, disk, event_loop, events, file_id, host_console, interrupt,
    log, memory, metrics, nmi_status, nvdimm, persist, pool, serial, standard_stream, unix_socket,
    virtio, volume,
};
