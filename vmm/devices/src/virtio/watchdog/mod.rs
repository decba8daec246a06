//! A watchdog (device type 35). It restarts a guest that has begun to ping it and then stops.
//!
//! virtio reserves this device type but does not specify it. The device works as in Cloud
//! Hypervisor: it has one queue, and the driver pings by adding a writable byte. The device sets
//! the byte to one.

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

/// Builds the watchdog. If the guest stops pinging, it is restarted as if it had requested that
/// itself.
fn build(context: &DeviceContext) -> SetupResult {
    let machine = &context.machine;
    let (events, reset_guest) = (machine.events.clone(), Arc::clone(&machine.reset_guest));
    let on_timeout = move || {
        events.emit_of_guest(Event::WatchdogExpired);
        reset_guest();
    };
    let device = Watchdog::new(Arc::new(on_timeout), machine.event_loop.clone());
    let metrics = device.metrics();
    Ok(new_device(device, context)?.exposing(metrics).attach(context)?)
}
