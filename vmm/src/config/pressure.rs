//! `--pressure policy=,size=,dry_run=`.

use balloon::policy::Policy;
use serde::{Deserialize, Serialize};

use super::error::ConfigError;
use super::option_parser::Syntax;
use super::size::{MAX_BYTES, Size, UNIT_BYTES};

const SYNTAX: Syntax =
    Syntax { flag: "--pressure", keys: &["policy", "size", "dry_run"], words: &[], refused: &[] };

/// The policies by name.
pub const POLICIES: &[&str] = &Policy::NAMES;

/// `--pressure policy=,...`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PressureConfig {
    /// The policy's name, one of [`POLICIES`].
    pub policy: String,
    /// With policy `fixed`, and only with it: the hotplugged memory to keep in bytes, all zones together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Decide, say so, and do nothing.
    #[serde(default)]
    pub dry_run: bool,
    /// Decide nothing. Not in the flag: set by `vm.pressure`, and kept over reboots.
    #[serde(default)]
    pub paused: bool,
}

impl Default for PressureConfig {
    fn default() -> Self {
        Self { policy: "psi".to_owned(), size: None, dry_run: false, paused: false }
    }
}

impl PressureConfig {
    /// Reads the flag's value.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let options = SYNTAX.parse(text)?;
        let default = Self::default();
        Ok(Self {
            policy: options.text("policy").map_or(default.policy, str::to_owned),
            size: options.size("size")?,
            dry_run: options.switch("dry_run")?.unwrap_or(false),
            paused: false,
        })
    }

    /// A policy that exists, and a size where that policy takes one.
    pub fn validate(&self) -> Result<(), ConfigError> {
        check_policy(SYNTAX.flag, &self.policy)?;
        check_fixed_size(SYNTAX.flag, &self.policy, self.size)
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

/// Checks that a size is given with the policy that takes one, with no other, and is whole blocks. `flag` is who asks.
pub fn check_fixed_size(flag: &'static str, policy: &str, size: Option<u64>) -> Result<(), ConfigError> {
    let Some(bytes) = size else {
        // Without one it would be 0, and nobody who writes "fixed" means that all memory is to go.
        return if policy == "fixed" { Err(ConfigError::Missing { flag, key: "size" }) } else { Ok(()) };
    };
    let expected = if policy != "fixed" {
        "taken by policy=fixed alone"
    } else if !bytes.is_multiple_of(UNIT_BYTES) {
        "a multiple of 2M"
    } else if bytes > MAX_BYTES {
        "at most 1T"
    } else {
        return Ok(());
    };
    let (key, value) = ("size".to_owned(), Size(bytes).to_string());
    Err(ConfigError::BadValue { flag, key, value, expected: expected.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flag_is_read() {
        let pressure = PressureConfig::parse("policy=off,dry_run=on").unwrap();
        assert_eq!(
            pressure,
            PressureConfig { policy: "off".to_owned(), dry_run: true, ..Default::default() }
        );
        assert!(pressure.validate().is_ok());
        assert_eq!(PressureConfig::parse("dry_run=off"), Ok(PressureConfig::default()));
    }

    #[test]
    fn a_size_is_whole_blocks_and_for_the_policy_that_keeps_one() {
        let parsed = |text| PressureConfig::parse(text).unwrap().validate().map_err(|err| err.to_string());
        assert_eq!(parsed("policy=fixed,size=256M"), Ok(()));
        assert_eq!(parsed("policy=fixed,size=0"), Ok(()));
        for text in ["policy=psi,size=256M", "policy=fixed,size=3M", "policy=fixed,size=32T"] {
            let error = parsed(text).unwrap_err();
            assert!(error.starts_with("--pressure: size="), "{error}");
        }
        assert_eq!(parsed("policy=fixed"), Err("--pressure: size= is missing".to_owned()));
    }

    #[test]
    fn unknown_policies_are_told_with_the_known_ones() {
        let error = PressureConfig::parse("policy=magic").unwrap().validate().unwrap_err();
        assert_eq!(
            error.to_string(),
            r#"--pressure: policy="magic" is not one of the policies psi, amf, dapper, pmb, memorage, fixed, off"#
        );
    }
}
