//! Devices of the VMM, and the memory, pools, interrupts and buses that they use.

pub mod bus;
pub mod cmos;
pub mod device;
pub mod disk;
pub mod end_signals;
pub mod entry_inhibitor;
pub mod event_loop;
pub mod events;
pub mod file_id;
mod file_mark;
mod guest_file;
pub mod host_console;
pub mod interrupt;
pub mod log;
pub mod memory;
pub mod metrics;
pub mod nmi_status;
pub mod nvdimm;
pub mod open_files;
mod output_file;
mod pci;
pub mod persist;
pub mod pool;
pub mod pvpanic;
pub mod serial;
pub mod standard_stream;
mod throttle;
pub mod unix_socket;
pub mod virtio;
pub mod volume;

// A macro in [`log`] uses this path, so that its callers need not depend on `tracing`.
#[doc(hidden)]
pub use tracing;
