//! `--pressure policy=,dry_run=`.

use balloon::policy::Policy;
use serde::{Deserialize, Serialize};

use super::error::ConfigError;
use super::option_parser::Syntax;

const SYNTAX: Syntax = Syntax { flag: "--pressure", keys: &["policy", "dry_run"], words: &[], refused: &[] };

/// The policies by name.
pub const POLICIES: &[&str] = &Policy::NAMES;

/// `--pressure policy=,...`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PressureConfig {
    /// The policy's name, one of [`POLICIES`].
    pub policy: String,
    /// Decide, say so, and do nothing.
    #[serde(default)]
    pub dry_run: bool,
}

impl Default for PressureConfig {
    fn default() -> Self {
        Self { policy: "psi".to_owned(), dry_run: false }
    }
}

impl PressureConfig {
    /// Reads the flag's value.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let options = SYNTAX.parse(text)?;
        let default = Self::default();
        Ok(Self {
            policy: options.text("policy").map_or(default.policy, str::to_owned),
            dry_run: options.switch("dry_run")?.unwrap_or(false),
        })
    }

    /// A policy that exists.
    pub fn validate(&self) -> Result<(), ConfigError> {
        check_policy(SYNTAX.flag, &self.policy)
    }
}

/// Checks that there is a policy of this name. `flag` is who asks.
pub fn check_policy(flag: &'static str, policy: &str) -> Result<(), ConfigError> {
    if POLICIES.contains(&policy) {
        return Ok(());
    }
    Err(ConfigError::BadValue {
        flag,
        key: "policy".to_owned(),
        value: policy.to_owned(),
        expected: format!("one of the policies {}", POLICIES.join(", ")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flag_is_read() {
        let pressure = PressureConfig::parse("policy=fixed,dry_run=on").unwrap();
        assert_eq!(pressure, PressureConfig { policy: "fixed".to_owned(), dry_run: true });
        assert!(pressure.validate().is_ok());
        assert_eq!(PressureConfig::parse("dry_run=off"), Ok(PressureConfig::default()));
    }

    #[test]
    fn unknown_policies_are_told_with_the_known_ones() {
        let error = PressureConfig::parse("policy=magic").unwrap().validate().unwrap_err();
        assert_eq!(
            error.to_string(),
            r#"--pressure: policy="magic" is not one of the policies psi, fixed, off"#
        );
    }
}
