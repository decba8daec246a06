//! Keys of Cloud Hypervisor that Foreshore refuses unless their value is neutral.

use serde_json::Value;

use crate::error::ConfigError;

#[derive(Debug)]
pub struct Refused {
    /// Name in the flag and in JSON.
    pub key: &'static str,
    /// Neutral values, which request nothing. Case is ignored.
    pub neutral: &'static [&'static str],
    pub why: &'static str,
}

impl Refused {
    /// Finds a key in the tables of a section.
    pub fn find(tables: &'static [&'static [Self]], key: &str) -> Option<&'static Self> {
        tables.iter().copied().flatten().find(|refused| refused.key == key)
    }

    /// Returns true if a value in a flag is neutral. An empty value counts as not given.
    pub fn is_neutral_text(&self, value: &str) -> bool {
        value.is_empty() || self.neutral.iter().any(|neutral| neutral.eq_ignore_ascii_case(value))
    }

    /// Returns true if a value in JSON is neutral.
    pub fn is_neutral_json(&self, value: &Value) -> bool {
        asks_for_nothing(value, self.neutral)
    }

    /// Returns the error for a key with this value. `value` begins with `=`, or is empty if the key
    /// has no value.
    pub fn error(&self, flag: &'static str, value: String) -> ConfigError {
        ConfigError::Unsupported { flag, key: self.key, value, why: self.why }
    }
}

/// Returns true if `value` is empty or one of `neutral`. If `neutral` is empty, `false` is also
/// neutral.
pub fn asks_for_nothing(value: &Value, neutral: &[&str]) -> bool {
    match value {
        Value::Null => true,
        Value::Array(values) => values.is_empty(),
        Value::Object(fields) => fields.values().all(|value| asks_for_nothing(value, &[])),
        Value::String(text) => neutral.iter().any(|neutral| neutral.eq_ignore_ascii_case(text)),
        Value::Bool(false) if neutral.is_empty() => true,
        Value::Bool(_) | Value::Number(_) => neutral.contains(&&*value.to_string()),
    }
}
