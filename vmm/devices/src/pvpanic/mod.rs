//! pvpanic: a PCI function through which a guest's kernel reports a panic.
//!
//! QEMU's docs/specs/pvpanic.rst specifies the device. The Linux driver is drivers/misc/pvpanic.

mod device;
mod metrics;

use std::sync::Arc;

pub use self::device::{GuestPanic, PvPanic};
pub use self::metrics::PvPanicMetrics;
use crate::device::{DeviceContext, NewDevice, SetupResult, Switch};
use crate::events::{DeviceEvent, Event};

/// `--pvpanic`.
pub const SWITCH: Switch = Switch {
    key: "pvpanic",
    about: "A pvpanic device, which reports a panic of the guest's kernel as an event",
    events: &[PANIC],
    build,
};

/// Event that is emitted when the guest's kernel reports a panic.
const PANIC: DeviceEvent = DeviceEvent { source: "guest", name: "panic", properties: &["event"] };

fn build(context: &DeviceContext) -> SetupResult {
    let events = context.machine.events.clone();
    let device = PvPanic::new(move |report| {
        events.emit_of_guest(Event::OfDevice { event: &PANIC, values: &[report.label()] });
    });
    let metrics = device.metrics();
    let new = NewDevice::new(&SWITCH.id(), Arc::new(device), Vec::new());
    Ok(new.exposing(metrics).attach(context)?)
}
