//! `--pressure`, and the named parameters of the policy and of the rules.

use std::collections::{BTreeMap, btree_map};
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;

use balloon::controller::Rules;
use balloon::params::{ParamError, Setting};
use balloon::policy::{Policy, fixed};
use foreshore_config::{
    ConfigError, JsonError, JsonValue, Options, Section, SectionError, Table, Walk, section,
};
use foreshore_types::similar::suggestion;
use foreshore_types::size::Size;
use serde::{Deserialize, Serialize};
use serde_json::Value;

const FLAG: &str = PressureConfig::FLAG;

/// Names of the parameters of all policies and of the rules. The names are compared with those of
/// the chosen policy later. [`FIXED_SIZE`] is not included, because it is a key of its own.
pub fn parameter_names() -> Vec<&'static str> {
    let policies = Policy::NAMES.into_iter().filter_map(Policy::from_name);
    let tables = policies.map(|policy| policy.table()).chain([Rules::TABLE]);
    let mut names: Vec<_> =
        tables.flatten().map(|param| param.name).filter(|name| *name != FIXED_SIZE).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// In an error about an unknown key, limits the list of keys to those of the policy in `text`.
fn of_policy(error: ConfigError, text: &str) -> ConfigError {
    let ConfigError::UnknownKey { flag, key, .. } = error else { return error };
    let named = text.split(',').find_map(|part| part.strip_prefix("policy="));
    let named = named
        .map_or_else(|| Some(Policy::default()), |name| Policy::from_name(name.trim_matches('"')));
    let own = named.as_ref().map_or(&[][..], Policy::table).iter().map(|param| param.name);
    let rules = Rules::TABLE.iter().map(|param| param.name);
    let keys = TABLE.names().filter(|key| *key != FIXED_SIZE).chain(own).chain(rules);
    let known = keys.map(|key| format!("{key}=")).collect::<Vec<_>>().join(", ");
    ConfigError::UnknownKey { flag, key, known }
}

/// Parameters by name, with their values as text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ParamSettings(BTreeMap<String, Setting>);

impl Deref for ParamSettings {
    type Target = BTreeMap<String, Setting>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for ParamSettings {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl IntoIterator for ParamSettings {
    type Item = (String, Setting);
    type IntoIter = btree_map::IntoIter<String, Setting>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<'a> IntoIterator for &'a ParamSettings {
    type Item = (&'a String, &'a Setting);
    type IntoIter = btree_map::Iter<'a, String, Setting>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl<S: Into<String>, const N: usize> From<[(S, Setting); N]> for ParamSettings {
    fn from(settings: [(S, Setting); N]) -> Self {
        Self(settings.into_iter().map(|(name, setting)| (name.into(), setting)).collect())
    }
}

impl JsonValue for ParamSettings {
    fn from_json(json: Value, walk: &mut Walk) -> Result<Self, JsonError> {
        let read = |json: Value, walk: &mut Walk| {
            Setting::deserialize(&json).map_err(|_| walk.wrong(&json, Setting::EXPECTED))
        };
        walk.entries(json, read).map(Self)
    }

    fn absent() -> Option<Self> {
        Some(Self::default())
    }

    fn is_absent(&self) -> bool {
        self.is_empty()
    }
}

/// Default size limit of a recording, enough for days of an idle guest.
pub const RECORD_BYTES: u64 = 1 << 30;
/// A recording with a smaller limit would cover only minutes.
const LEAST_RECORD_BYTES: u64 = 1 << 20;
/// A recording with a larger limit would cover centuries.
const MOST_RECORD_BYTES: u64 = 1 << 40;

pub const POLICIES: &[&str] = &Policy::NAMES;

section! {
    /// Governor of the guest's memory.
    pub struct PressureConfig: "--pressure"
        "Governor of memory, also PARAMETER=VALUE (docs/reference/policies.md); without it, psi with --pm-memory, else off" {
        policy (json_required syntax (POLICIES.join("|"))): String = "psi".to_owned() => "Policy that sizes the guest",
        size: Option<u64> => "Hotplugged memory of all zones together; only with policy=fixed",
        params (json_only): ParamSettings => "Parameters of the policy that are not the default",
        rules (json_only): ParamSettings
            => "Parameters of the rules above every policy that are not the default",
        dry_run: bool = false => "Make and report decisions, but resize nothing",
        paused (json_only): bool = false
            => "Pause decisions; set by vm.pressure and kept over reboots",
        record (syntax ("FILE")): Option<PathBuf>
            => "File to record reports and decisions in",
        record_size (usually (RECORD_BYTES)): Option<u64> => "Largest size of the recording",
    }
    strict true;
    defaults true;
    parse own;
}

/// Key table of the flag.
pub(super) const TABLE: Table = Table::of::<PressureConfig>();

impl PressureConfig {
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let parameters = parameter_names();
        let options =
            Options::parse(&TABLE, &parameters, text).map_err(|error| of_policy(error, text))?;
        let settings = options.given().filter(|(key, _)| parameters.contains(key));
        let settings = settings.map(|(key, value)| (key.to_owned(), Setting::from(value)));
        let (rules, params) =
            settings.partition(|(key, _)| Rules::TABLE.iter().any(|param| param.name == key));
        let (params, rules) = (ParamSettings(params), ParamSettings(rules));
        Ok(Self { params, rules, ..Self::from_options(&options)? })
    }

    /// Checks that the policy exists, that it has a size if it needs one, and that all parameters
    /// are within their bounds.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.policy(FLAG)?;
        self.rules(FLAG)?;
        self.check_recording()
    }

    /// Returns the policy with its parameters. Errors mention `flag`.
    pub fn policy(&self, flag: &'static str) -> Result<Policy, ConfigError> {
        check_policy(flag, &self.policy)?;
        if !self.params.contains_key(FIXED_SIZE) {
            check_fixed_size(flag, &self.policy, self.size)?;
        }
        let policy = Policy::from_name(&self.policy).unwrap_or_default();
        let size = self.size.map(|bytes| (FIXED_SIZE.to_owned(), Setting::Number(bytes)));
        let settings = size.iter().map(|(name, size)| (name.as_str(), size));
        let params = self.params.iter().map(|(name, setting)| (name.as_str(), setting));
        let policy = policy.with(settings.chain(params));
        policy.map_err(|error| parameter(flag, rules_as_well(error)))
    }

    /// Returns the rules with their parameters. Errors mention `flag`.
    pub fn rules(&self, flag: &'static str) -> Result<Rules, ConfigError> {
        let rules = Rules { dry_run: self.dry_run, ..Rules::default() };
        let settings = self.rules.iter().map(|(name, setting)| (name.as_str(), setting));
        rules.with(settings).map_err(|error| parameter(flag, error))
    }

    fn check_recording(&self) -> Result<(), ConfigError> {
        let Some(bytes) = self.record_size else { return Ok(()) };
        let expected = match self.record {
            None => "valid without record=",
            Some(_) if !(LEAST_RECORD_BYTES..=MOST_RECORD_BYTES).contains(&bytes) => {
                "from 1M to 1T"
            }
            Some(_) => return Ok(()),
        };
        let (key, value) = ("record_size".to_owned(), Size(bytes).to_string());
        Err(ConfigError::BadValue { flag: FLAG, key, value, expected: expected.to_owned() })
    }
}

fn parameter(flag: &'static str, error: ParamError) -> ConfigError {
    ConfigError::Parameter { flag, error: SectionError::new(error) }
}

/// Parameter of the policy `fixed` that is also a key of the flag.
pub const FIXED_SIZE: &str = "size";

/// Adds the parameters of the rules to the list in an error about an unknown parameter.
///
/// A name that the rules do not have is passed to the policy, although the user may have meant a
/// rule.
pub fn rules_as_well(error: ParamError) -> ParamError {
    let ParamError::Unknown { name, of, known } = error else { return error };
    let rules = Rules::TABLE.iter().map(|param| param.name).collect::<Vec<_>>().join(", ");
    ParamError::Unknown { name, of, known: format!("{known}; parameters of the rules: {rules}") }
}

/// Checks that the policy exists. Errors mention `flag`.
pub fn check_policy(flag: &'static str, policy: &str) -> Result<(), ConfigError> {
    if POLICIES.contains(&policy) {
        return Ok(());
    }
    Err(ConfigError::BadValue {
        flag,
        key: "policy".to_owned(),
        value: policy.to_owned(),
        expected: format!(
            "one of the policies {}{}",
            POLICIES.join(", "),
            suggestion(policy, POLICIES.iter().copied())
        ),
    })
}

/// Checks that a size within its bounds is given if the policy needs one, and that no size is given
/// otherwise. Errors mention `flag`.
pub fn check_fixed_size(
    flag: &'static str,
    policy: &str,
    size: Option<u64>,
) -> Result<(), ConfigError> {
    let Some(bytes) = size else {
        // The default size is 0, but a user of `fixed` without a size hardly intends to unplug all
        // memory.
        return if policy == "fixed" {
            Err(ConfigError::MissingFor { flag, key: FIXED_SIZE, needed_by: "policy=fixed" })
        } else {
            Ok(())
        };
    };
    if policy != "fixed" {
        let (key, value) = (FIXED_SIZE.to_owned(), Size(bytes).to_string());
        let expected = format!("a parameter of policy {policy}, only of fixed");
        return Err(ConfigError::BadValue { flag, key, value, expected });
    }
    let fixed =
        Policy::Fixed(fixed::Params::default()).with([(FIXED_SIZE, &Setting::Number(bytes))]);
    fixed.map(drop).map_err(|error| parameter(flag, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flag_is_parsed() {
        let pressure = PressureConfig::parse("policy=off,dry_run=on").unwrap();
        assert_eq!(
            pressure,
            PressureConfig { policy: "off".to_owned(), dry_run: true, ..Default::default() }
        );
        assert!(pressure.validate().is_ok());
        assert_eq!(PressureConfig::parse("dry_run=off"), Ok(PressureConfig::default()));
    }

    #[test]
    fn size_is_a_multiple_of_blocks_and_only_for_fixed() {
        let parsed =
            |text| PressureConfig::parse(text).unwrap().validate().map_err(|err| err.to_string());
        assert_eq!(parsed("policy=fixed,size=256M"), Ok(()));
        assert_eq!(parsed("policy=fixed,size=0"), Ok(()));
        assert_eq!(parsed("policy=fixed,size=64T"), Ok(()));
        for (text, message) in [
            (
                "policy=psi,size=256M",
                r#"--pressure: size="256 MiB" is not a parameter of policy psi, only of fixed"#,
            ),
            (
                "policy=fixed,size=3M",
                "--pressure: size is 3145728, must be a multiple of 2M: bytes, or a number with K, M, G or T",
            ),
            ("policy=fixed,size=65T", "--pressure: size is 65T, must be 0 to 64T"),
        ] {
            assert_eq!(parsed(text), Err(message.to_owned()));
        }
        assert_eq!(
            parsed("policy=fixed"),
            Err("--pressure: size= is missing: policy=fixed needs it".to_owned())
        );
    }

    #[test]
    fn parameters_follow_the_policy_by_name() {
        let text = "policy=amf,watermark-scale=512,cool_down=2s,ceiling=1G";
        let pressure = PressureConfig::parse(text).unwrap();
        assert_eq!(pressure.validate(), Ok(()));
        let policy = pressure.policy(FLAG).unwrap();
        assert_eq!(policy.parameters().unwrap().get("watermark-scale"), Some(512));
        let rules = pressure.rules(FLAG).unwrap();
        assert_eq!((rules.cool_down_ms, rules.ceiling_bytes), (2_000, 1 << 30));
        let json = serde_json::to_value(&pressure).unwrap();
        assert_eq!(json["params"], serde_json::json!({"watermark-scale": "512"}));
        assert_eq!(json["rules"], serde_json::json!({"cool_down": "2s", "ceiling": "1G"}));
        assert_eq!(serde_json::from_value::<PressureConfig>(json).unwrap(), pressure);
    }

    #[test]
    fn errors_of_parameters_name_value_and_bound() {
        let error =
            |text| PressureConfig::parse(text).and_then(|p| p.validate()).unwrap_err().to_string();
        for (text, message) in [
            ("watermark-scale=0", "--pressure: watermark-scale is 0, must be 1 to 65536"),
            ("cool_down=99ms", "--pressure: cool_down is 99ms, must be 100ms to 24h"),
            (
                "cool_down=2m",
                "--pressure: max_cool_down is 1m, must be at least cool_down, which is 2m",
            ),
            ("idle=3", r#"--pressure: idle is "3", must be a time: a number with ms, s, m or h"#),
            (
                "floor=1M",
                r#"--pressure: floor is "1M", must be a multiple of 2M: bytes, or a number with K, M, G or T"#,
            ),
            ("idle=3s,idle=3s", "--pressure: idle is given twice"),
        ] {
            assert_eq!(error(text), message);
        }
        for (text, its) in [
            ("policy=amf,idle=3s", "parameters of amf: watermark-scale, watermark-share, reclaim"),
            ("policy=off,idle=3s", "parameters of off: none"),
        ] {
            let known = format!(
                r#"--pressure: parameter "idle" is unknown; {its}; parameters of the rules: floor, ceiling, cool_down, "#
            );
            assert!(error(text).starts_with(&known), "{}", error(text));
        }
    }

    #[test]
    fn unknown_key_lists_those_of_the_named_policy() {
        let known = |text| {
            let error = PressureConfig::parse(text).unwrap_err().to_string();
            let known = error.strip_prefix(r#"--pressure: unknown key "moon"; the keys are "#);
            known.unwrap_or_else(|| panic!("{error}")).to_owned()
        };
        let own = "policy=, dry_run=, record=, record_size=, ";
        let rules = "floor=, ceiling=, cool_down=, ";
        for (text, its) in [
            ("policy=amf,moon=high", "watermark-scale=, watermark-share=, reclaim=, "),
            ("moon=high,policy=\"pmb\"", "watermark-scale=, unit=, "),
            ("policy=fixed,size=0,moon=high", "size=, "),
            ("policy=off,moon=high", ""),
            ("policy=magic,moon=high", ""),
        ] {
            let all = known(text);
            assert!(all.starts_with(&format!("{own}{its}{rules}")), "{text}: {all}");
        }
        assert!(known("moon=high").starts_with(&format!("{own}burst=, ")));
        // One name is spelled with a hyphen, both in the flag and in JSON. An error about the other
        // spelling lists the right name.
        let error = PressureConfig::parse("watermark_scale=2").unwrap_err().to_string();
        assert!(error.contains(" watermark-scale=, "), "{error}");
        let json = |name: &str| serde_json::json!({"policy": "psi", "params": {name: 2}});
        let read = |name| serde_json::from_value::<PressureConfig>(json(name)).unwrap().validate();
        assert_eq!(read("watermark-scale"), Ok(()));
        assert!(read("watermark_scale").unwrap_err().to_string().contains(" watermark-scale, "));
    }

    #[test]
    fn recording_has_a_file_and_an_optional_size() {
        let pressure = PressureConfig::parse("record=/t/trace,record_size=64M").unwrap();
        assert_eq!(pressure.record, Some(PathBuf::from("/t/trace")));
        assert_eq!((pressure.record_size, pressure.validate()), (Some(64 << 20), Ok(())));
        for text in ["record_size=64M", "record=/t,record_size=4K", "record=/t,record_size=2T"] {
            let error = PressureConfig::parse(text).unwrap().validate().unwrap_err().to_string();
            assert!(error.starts_with("--pressure: record_size="), "{error}");
        }
        assert_eq!(PressureConfig::parse("record=,idle="), Ok(PressureConfig::default()));
    }

    #[test]
    fn unknown_policy_lists_the_known_ones() {
        let error = PressureConfig::parse("policy=magic").unwrap().validate().unwrap_err();
        assert_eq!(
            error.to_string(),
            r#"--pressure: policy="magic" is not one of the policies psi, amf, dapper, pmb, memorage, fixed, off"#
        );
    }
}
