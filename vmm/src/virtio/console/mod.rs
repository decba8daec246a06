//! virtio-console: hvc0, one port without multiport (virtio 1.3, 5.3).

mod device;
mod event;
pub mod metrics;

pub use device::Console;
pub use metrics::ConsoleMetrics;
