//! Names that devices are given: they end up in logs, as labels of metrics and in the API.

use super::error::ConfigError;

const MAX_BYTES: usize = 64;

/// Devices that there is one of are called so.
const OURS: &str = "__";

/// Refuses what is no name.
pub(super) fn check(flag: &'static str, key: &str, name: &str) -> Result<(), ConfigError> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if (1..=MAX_BYTES).contains(&name.len()) && name.chars().all(is_plain) && !name.starts_with(OURS) {
        return Ok(());
    }
    Err(ConfigError::BadValue {
        flag,
        key: key.to_owned(),
        value: name.to_owned(),
        expected: format!("1 to {MAX_BYTES} letters, digits, '-', '_' and '.', without '{OURS}' in front"),
    })
}
