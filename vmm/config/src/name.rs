//! Names of devices. They are used in logs, in metric labels and in the API, but never in a path.

use crate::error::ConfigError;

/// Prefix of the IDs that Foreshore assigns to devices that a VM can have only once.
const OURS: &str = "__";

/// Checks that `name` is a valid name.
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
