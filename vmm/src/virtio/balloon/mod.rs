//! virtio-balloon (virtio 1.3, 5.5): memory that the guest gives back without hotplug.
//!
//! The device asks for an amount of memory; the driver allocates as many pages, tells which, and leaves them alone until it
//! is asked for less. Beside that the driver may report pages that happen to be free, of which it may use each again
//! whenever it likes, and tell what its kernel counts. Given back are pages of DRAM that is plugged: pages of PM belong to
//! chunks, which come and go by virtio-mem.

pub mod config;
mod device;
mod event;
mod handle;
mod metrics;
pub mod request;
mod state;
#[cfg(test)]
mod tests;

pub use device::{Balloon, BalloonOptions};
pub use handle::{BalloonHandle, BalloonObserver, BalloonSizes, Heard, TargetError};
pub use metrics::{BalloonMetrics, Refusal};
