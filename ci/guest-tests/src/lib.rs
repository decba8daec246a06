//! Test harness that boots guests under Foreshore. The demo and benchmarks use it as well.
//!
//! Example of a test:
//!
//! ```no_run
//! use guest_tests::{Guest, Kernel, wait_until};
//! use std::time::Duration;
//!
//! # fn test() -> anyhow::Result<()> {
//! let guest = Guest::builder().kernel(Kernel::V6_12).cpus(2).memory("size=512M").boot()?;
//! assert_eq!(guest.run("nproc")?.trim(), "2");
//! guest.no_kernel_complaints()?;
//! # Ok(())
//! # }
//! ```
//!
//! Tests do not sleep for a fixed time. [`wait_until`] waits for a condition. If the condition does
//! not become true in time, the error names it.

mod boots;
pub mod btt_media;
pub mod disk;
mod flush_noop;
pub mod guest;
pub mod host;
pub mod host_memory;
pub mod http;
pub mod lent_memory;
pub mod limits;
mod metrics;
pub mod namespace;
pub mod pool;
pub mod pressure;
pub mod qemu;
mod resource_counts;
pub mod runner;
pub mod table;
pub mod tap;
pub mod torn;
pub mod traced_thread;
pub mod user;

pub use disk::{Disk, FileSystem, LoopDevice};
pub use guest::{BOOT_LIMIT, Guest, GuestBuilder, Image, Kernel, Output, Script, program};
pub use guest_tools::wait::{scale_limits, wait_for, wait_until};
pub use metrics::Metrics;
pub use pool::Pool;
pub use resource_counts::ResourceCounts;
pub use runner::skip;
pub use table::this_tests_kernel;
