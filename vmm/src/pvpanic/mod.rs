//! pvpanic: a PCI function by which a guest's kernel reports that it has panicked.
//!
//! QEMU's docs/specs/pvpanic.rst describes it; the driver in Linux is drivers/misc/pvpanic.

mod device;
mod metrics;

pub use self::device::{GuestPanic, PvPanic};
pub use self::metrics::PvPanicMetrics;
use crate::device::{DeviceContext, NewDevice};
use crate::events::Event;

/// Builds the device of `--pvpanic`.
pub fn build(is_given: bool, context: &DeviceContext) -> Option<NewDevice> {
    let events = context.events.clone();
    is_given.then(|| {
        let device = PvPanic::new(move |report| {
            events.tell_of_guest(Event::GuestPanic { event: report.label() });
        });
        let metrics = device.metrics();
        NewDevice::pci("__pvpanic", device).exposing(metrics)
    })
}
