//! virtio-blk (virtio 1.3, 5.2): disks of image files and block devices.
//!
//! [`request`] parses, [`job`] cuts a request into steps, a [disk](crate::disk) executes them, and
//! a worker for each queue (`event`) moves all that along, by calls (`calls`) or by io_uring
//! (`ring`).
//! docs/decisions/0008-disks.md has the reasons.

mod calls;
pub mod config;
pub mod device;
mod event;
pub mod flush;
pub mod job;
pub mod metrics;
pub mod request;
mod ring;
pub mod segments;
pub mod serial;
pub mod state;
#[cfg(test)]
mod tests;

pub use self::device::{Block, BlockHandle};
pub use self::metrics::{BlockMetrics, DiskMetrics, Kind};
pub use self::state::DiskShape;
