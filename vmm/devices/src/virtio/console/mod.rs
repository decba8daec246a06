//! virtio-console (virtio 1.3, 5.3): a single port without multiport. Linux names it hvc0.

mod device;
mod event;
mod metrics;

pub use device::Console;
pub use metrics::ConsoleMetrics;

use super::new_device;
use crate::device::{DeviceContext, SetupResult};
use crate::host_console::HostConsole;

/// Builds the `--console` device.
pub fn build(console: HostConsole, context: &DeviceContext) -> SetupResult {
    let device = Console::new(console, context.machine.event_loop.clone());
    let metrics = device.metrics();
    Ok(new_device(device, context)?.exposing(metrics).attach(context)?)
}
