//! A watchdog (device type 35): a guest that has begun to ping it and stops is restarted.
//!
//! virtio has reserved the type and specifies nothing. What is here is Cloud Hypervisor's device: one queue; the driver puts a byte
//! that can be written, the device sets it to one.

mod countdown;
mod device;
mod event;
pub mod metrics;

pub use countdown::TIMEOUT;
pub use device::Watchdog;
pub use metrics::WatchdogMetrics;
