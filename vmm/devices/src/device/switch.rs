//! Devices without options.

use super::{DeviceContext, SetupResult};
use crate::events::DeviceEvent;

/// Description of a device without options. The flag, the JSON key and the help are derived from
/// it. Each device defines its description in its own module, and config/switches.rs lists them in
/// the order of their PCI slots.
pub struct Switch {
    /// Name of the flag (without dashes) and of the JSON key.
    pub key: &'static str,
    /// Description in the help.
    pub about: &'static str,
    /// Events that the device defines.
    pub events: &'static [DeviceEvent],
    pub build: fn(&DeviceContext) -> SetupResult,
}

impl Switch {
    /// Id in the API.
    pub fn id(&self) -> String {
        format!("__{}", self.key)
    }
}
