//! Names of devices. They appear in logs, as labels of metrics and in the API, and never in a path.

use crate::error::ConfigError;

/// Devices that there is one of are called so.
const OURS: &str = "__";

/// Refuses what is no name.
pub fn check(flag: &'static str, key: &str, name: &str) -> Result<(), ConfigError> {
    if !name.is_empty() && !name.contains(char::is_control) && !name.starts_with(OURS) {
        return Ok(());
    }
    Err(ConfigError::BadValue {
        flag,
        key: key.to_owned(),
        value: name.to_owned(),
        expected: format!("a name without control characters and without '{OURS}' in front"),
    })
}
