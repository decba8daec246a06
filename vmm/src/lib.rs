//! Foreshore: a virtual machine monitor whose guest takes memory and storage from one pool of
//! persistent memory.
//!
//! The tree shows the architecture. Pure parts (layout, configuration, ACPI tables, request
//! parsing) know nothing of KVM; devices know neither each other nor the machine they are part of;
//! only [`vm`] composes.

pub mod acpi;
pub mod api;
pub mod boot;
pub mod brake;
pub mod bus;
pub mod cmos;
pub mod config;
pub mod core_dumps;
pub mod cpu;
pub mod device;
pub mod disk;
pub mod event_loop;
pub mod events;
pub mod file_id;
pub mod file_mark;
pub mod governor;
pub mod guest_file;
pub mod host_console;
pub mod inherited;
pub mod interrupt;
pub mod log;
pub mod memory;
pub mod metrics;
pub mod metrics_server;
pub mod nmi_status;
pub mod nvdimm;
pub mod open_files;
pub mod output_file;
pub mod pci;
pub mod persist;
pub mod pool;
pub mod pvpanic;
pub mod run;
pub mod serial;
pub mod standard_stream;
pub mod throttle;
pub mod unix_socket;
pub mod virtio;
pub mod vm;
pub mod volume;
