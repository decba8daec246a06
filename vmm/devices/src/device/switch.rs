//! Devices without options.

use super::{DeviceContext, SetupResult};
use crate::events::DeviceEvent;

/// Description of a device without options, in the folder of the device. The flag, the JSON key and
/// the help follow from it. config/switches.rs lists all of them, in the order of their PCI slots.
pub struct Switch {
    /// Name of the flag, without its dashes, and of the JSON key.
    pub key: &'static str,
    /// Description in the help.
    pub about: &'static str,
    /// Events that the folder defines.
    pub events: &'static [DeviceEvent],
    pub build: fn(&DeviceContext) -> SetupResult,
}

impl Switch {
    /// Id in the API.
    pub fn id(&self) -> String {
        format!("__{}", self.key)
    }
}
