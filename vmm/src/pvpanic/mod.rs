//! pvpanic: a PCI function by which a guest's kernel reports that it has panicked.
//!
//! QEMU's docs/specs/pvpanic.rst describes it; the driver in Linux is drivers/misc/pvpanic.

mod device;
mod metrics;

pub use self::device::{GuestPanic, PvPanic};
pub use self::metrics::PvPanicMetrics;
