//! virtio-mem (virtio 1.3, 5.15): one device for each zone's hotplug part.
//!
//! The device asks for an amount of memory; the driver picks blocks and requests that they be plugged or
//! unplugged. What Linux makes of the answers decides what may be answered: ERROR makes its driver give the
//! device up for good, NACK makes it try again at once, BUSY after 50 seconds or with the next configuration
//! change. So whatever fails on the host is BUSY, together with a lower requested size that can be reached.

mod ahead;
mod budget;
mod device;
mod event;
mod handle;
mod metrics;
mod plug;
mod request;
mod state;
#[cfg(test)]
mod tests;

pub use budget::{PlugBudget, PlugBudgets};
pub use device::MemDevice;
pub use handle::{MemEvent, MemHandle, MemObserver, PluggedSizes, RequestSizeError, UNSUPPORTED_DRIVER};
pub use metrics::{FailureReason, MemMetrics, OperationMetrics, PlugMetrics};
pub use state::Shortfall;
