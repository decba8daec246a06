//! A watchdog (device type 35). A guest that has begun to ping it and stops is restarted.
//!
//! virtio has reserved the type without a specification. The device is Cloud Hypervisor's: it has
//! one queue, the driver adds a writable byte, and the device sets it to one.

mod countdown;
mod device;
mod event;
mod metrics;

pub use countdown::TIMEOUT;
pub use device::Watchdog;
pub use metrics::WatchdogMetrics;

use std::sync::Arc;

use super::new_device;
use crate::device::{DeviceContext, SetupResult, Switch};
use crate::events::Event;

/// `--watchdog`.
pub const SWITCH: Switch = Switch {
    key: "watchdog",
    about: "A virtio watchdog, which restarts a guest that stops pinging it for 20 s",
    events: &[],
    build,
};

/// Builds the device. A guest that stops pinging it is restarted as if it had requested a restart.
fn build(context: &DeviceContext) -> SetupResult {
    let machine = &context.machine;
    let (events, reset_guest) = (machine.events.clone(), Arc::clone(&machine.reset_guest));
    let on_silence = move || {
        events.tell_of_guest(Event::WatchdogExpired);
        reset_guest();
    };
    let device = Watchdog::new(Arc::new(on_silence), machine.event_loop.clone());
    let metrics = device.metrics();
    Ok(new_device(device, context)?.exposing(metrics).attach(context)?)
}
