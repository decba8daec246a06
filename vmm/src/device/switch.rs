//! Devices without options.

use super::{DeviceContext, SetupResult};
use crate::events::DeviceEvent;

/// Device without options. Its folder has this description, from which its flag, its JSON key, its
/// help and its place on the bus follow. config/switches.rs lists all of them.
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
