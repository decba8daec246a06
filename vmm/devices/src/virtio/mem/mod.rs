//! virtio-mem (virtio 1.3, 5.15): one device for the hotplug part of each zone.
//!
//! The device requests a size. The driver then selects blocks and sends requests to plug or unplug
//! them. The device chooses its answers according to how Linux reacts. After ERROR, Linux's driver
//! permanently stops using the device. After NACK, it retries immediately. After BUSY, it retries
//! in 50 seconds or at the next configuration change. If the host fails, the device therefore
//! answers BUSY and lowers the requested size to a size that the host can provide.

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

use std::sync::Arc;

use parking_lot::Mutex;

use super::new_device;
use crate::device::{DeviceContext, DeviceHandle, SetupResult};
use crate::event_loop::EventLoopHandle;
use crate::memory::HotplugPart;

pub use balloon::UNSUPPORTED_DRIVER;
pub use budget::{PlugBudget, PlugBudgets};
pub use device::MemDevice;
pub use handle::{MemEvent, MemHandle, MemObserver, RequestSizeError};
pub use metrics::{FailureReason, MemMetrics, OperationMetrics, PlugMetrics};

impl DeviceHandle for MemHandle {}

/// Builds the device of a zone's hotplug part. `observer` is called for each event.
pub fn build(
    part: HotplugPart,
    event_loop: &EventLoopHandle,
    observer: MemObserver,
    budget: Arc<Mutex<PlugBudget>>,
    context: &DeviceContext,
) -> SetupResult {
    let view = context.machine.view.clone();
    let (device, handle) = MemDevice::new(part, view, event_loop.clone(), observer, budget);
    let zone = handle.zone();
    let source = PlugMetrics {
        zone: zone.id.clone(),
        tier: zone.tier.as_str().to_owned(),
        counters: handle.metrics(),
    };
    let new = new_device(device, context)?.exposing(Arc::new(source)).with_handle(handle);
    Ok(new.attach(context)?)
}
