//! virtio-console: hvc0, one port without multiport (virtio 1.3, 5.3).

mod device;
mod event;
pub mod metrics;

pub use device::Console;
pub use metrics::ConsoleMetrics;

use crate::device::{DeviceContext, NewDevice};
use crate::host_console::HostConsole;

/// Builds the device of `--console`.
pub fn build(console: HostConsole, context: &DeviceContext) -> NewDevice {
    let device = Console::new(console, context.event_loop.clone());
    let metrics = device.metrics();
    NewDevice::fixed(device).exposing(metrics)
}
