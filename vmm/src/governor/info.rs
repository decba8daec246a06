//! `vm.pressure`: the governor's state for clients, and changes to it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use balloon::governor::AgentState;
use balloon::governor::decision::DecisionInfo;
use foreshore_config::{ConfigError, section};
use serde::{Deserialize, Serialize};

use crate::config::{FIXED_SIZE, ParamSettings, PressureConfig, check_fixed_size, check_policy};

/// Answer to `vm.pressure`. The default value has no policy and no history.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PressureInfo {
    pub policy: String,
    /// True if decisions are made but not carried out.
    pub dry_run: bool,
    /// True if no decisions are made until the governor is resumed.
    pub paused: bool,
    /// Zones pinned by a manual resize. They are pinned until they are resumed.
    pub pinned_zones: Vec<String>,
    pub agent: AgentState,
    pub agent_connected: bool,
    /// Age of the last report in milliseconds; `None` before the first report.
    pub report_age_ms: Option<u64>,
    pub zones: Vec<GovernedZoneInfo>,
    pub decisions_total: u64,
    /// Latest decisions, newest first.
    pub decisions: Vec<DecisionInfo>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recording: Option<RecordingInfo>,
    /// Parameters, last report and other details.
    pub details: BTreeMap<String, serde_json::Value>,
}

/// `vm.pressure`: zone that the governor sizes. `vm.memory` reports its sizes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GovernedZoneInfo {
    pub id: String,
    /// True if the guest's driver is ready. Otherwise, no memory is plugged or unplugged.
    pub driver_ready: bool,
    /// True if the zone was resized manually. The governor does not size it until it is resumed.
    pub pinned: bool,
}

/// `vm.pressure`: recording and its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordingInfo {
    pub file: PathBuf,
    pub written_bytes: u64,
    /// Number of lines dropped because the file was too slow.
    pub lost_lines: u64,
    pub status: RecordingState,
}

/// State of a recording.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "state", content = "reason")]
pub enum RecordingState {
    Recording,
    /// The recording reached its size limit.
    Full,
    /// Writing the file failed for this reason.
    Failed(String),
}

section! {
    /// Change to the governor by `vm.pressure`. Fields that are `None` are not changed.
    pub struct PressureChange: "vm.pressure" {
        policy: Option<String> => "Another policy",
        size: Option<u64>
            => "Hotplugged memory to keep in bytes, with policy `fixed` or while it is in force",
        dry_run: Option<bool> => "Decide only",
        pause: Option<bool> => "Pause or resume decisions; pins stay unchanged",
        resume: Option<bool> => "Return pinned zones to the governor, and resume decisions",
        zone: Option<String>
            => "With `resume`: only this zone; a paused governor stays paused",
        params: Option<ParamSettings>
            => "Parameters of the policy; all others stay, or get their defaults with `policy`",
        rules: Option<ParamSettings>
            => "Parameters of the rules above every policy; all others stay",
    }
    strict true;
    defaults true;
}

impl PressureChange {
    /// Checks the parts of the change that do not depend on the VM. Errors mention `caller`.
    pub fn check(&self, caller: &'static str) -> Result<(), ConfigError> {
        let has_param = self.params.as_ref().is_some_and(|params| params.contains_key(FIXED_SIZE));
        if self.size.is_some() && has_param {
            return Err(ConfigError::Duplicate { flag: caller, key: FIXED_SIZE.to_owned() });
        }
        if let Some(policy) = &self.policy {
            check_policy(caller, policy)?;
            if !has_param {
                check_fixed_size(caller, policy, self.size)?;
            }
        }
        let refused = |key: &str, value: &str, expected: &str| {
            Err(ConfigError::BadValue {
                flag: caller,
                key: key.to_owned(),
                value: value.to_owned(),
                expected: expected.to_owned(),
            })
        };
        let resumes = self.resume == Some(true);
        match &self.zone {
            Some(zone) if !resumes => refused("zone", zone, "valid without \"resume\": true"),
            None if resumes && self.pause == Some(true) => {
                refused("pause", "true", "valid with \"resume\": true, which ends a pause")
            }
            _ => Ok(()),
        }
    }

    /// Applies the change to `config`. Pins are not included, because a rebuilt machine has no
    /// pinned zones.
    pub fn apply(&self, config: &mut PressureConfig) {
        if let Some(policy) = &self.policy {
            config.policy.clone_from(policy);
            config.size = None;
            config.params.clear();
        }
        // The size can be set by two names. The last setting is used.
        if self.size.is_some()
            || self.params.as_ref().is_some_and(|params| params.contains_key(FIXED_SIZE))
        {
            config.size = self.size;
            config.params.remove(FIXED_SIZE);
        }
        config.params.extend(self.params.clone().into_iter().flatten());
        config.rules.extend(self.rules.clone().into_iter().flatten());
        if let Some(dry_run) = self.dry_run {
            config.dry_run = dry_run;
        }
        if let Some(paused) = self.paused() {
            config.paused = paused;
        }
    }

    /// Pause state after the change, or `None` if the change does not set it.
    pub fn paused(&self) -> Option<bool> {
        let resumed = self.resume == Some(true) && self.zone.is_none();
        self.pause.or(resumed.then_some(false))
    }
}
