//! Devices of a machine, which is the VM from one boot to the next. They register and unregister
//! themselves.
//!
//! The module of each device contains a function `build`, which vmm/src/vm/devices calls. The
//! function takes the device's configuration and a [`DeviceContext`], and returns an
//! [`AttachedDevice`], which the guest finds on the PCI bus. Dropping the [`AttachedDevice`]
//! removes the device and everything that was registered for it.

mod attached_device;
mod context;
mod device_work;
mod event_emitter;
mod mapped_file;
mod switch;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod trim;

use std::any::Any;
use std::collections::BTreeMap;

pub use self::attached_device::{AttachedDevice, DeviceList, NewDevice};
pub use self::context::{DeviceContext, InterruptLine, MachineParts};
pub use self::device_work::DeviceWork;
pub use self::event_emitter::EventEmitter;
pub use self::mapped_file::MappedFile;
pub use self::switch::Switch;
pub use self::trim::{TrimCommand, TrimService, TrimVolume};

/// Error from building a device. The cause is in the device itself, in its transport or on the bus.
pub type SetupError = Box<dyn std::error::Error + Send + Sync>;

/// Result of a device's `build`.
pub type SetupResult<T = AttachedDevice> = Result<T, SetupError>;

/// Counters of a device, by Cloud Hypervisor's names. Each value is at most `i64::MAX`, because
/// clients parse them as signed numbers.
pub type DeviceCounters = BTreeMap<&'static str, u64>;

/// Collects counters, and limits each value to `i64::MAX`.
pub fn signed<const N: usize>(counters: [(&'static str, u64); N]) -> DeviceCounters {
    counters.map(|(name, value)| (name, value.min(i64::MAX as u64))).into()
}

/// Interface of an attached device for the API. [`AttachedDevice::handle`] returns the handle of a
/// given type.
pub trait DeviceHandle: Any + Send {
    /// Returns the counters for the API call `vm.counters`, if the device has any.
    fn counters(&self) -> Option<DeviceCounters> {
        None
    }
}
