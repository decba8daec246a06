//! A watchdog (device type 35): a guest that has begun to ping it and stops is restarted.
//!
//! virtio has reserved the type and specifies nothing. What is here is Cloud Hypervisor's device:
//! one queue; the driver puts a byte that can be written, the device sets it to one.

mod countdown;
mod device;
mod event;
pub mod metrics;

pub use countdown::TIMEOUT;
pub use device::Watchdog;
pub use metrics::WatchdogMetrics;

use std::sync::Arc;

use crate::device::{DeviceContext, NewDevice};
use crate::events::Event;

/// Builds the device of `--watchdog`. A guest that stops to ping it is restarted as if it had
/// requested that.
pub fn build(is_given: bool, context: &DeviceContext) -> Option<NewDevice> {
    let (events, reset_guest) = (context.events.clone(), Arc::clone(&context.reset_guest));
    is_given.then(|| {
        let on_silence = move || {
            events.tell_of_guest(Event::WatchdogExpired);
            reset_guest();
        };
        let device = Watchdog::new(Arc::new(on_silence), context.event_loop.clone());
        let metrics = device.metrics();
        NewDevice::fixed(device).exposing(metrics)
    })
}
