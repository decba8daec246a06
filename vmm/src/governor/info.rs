//! `vm.pressure`: the governor as clients see it, and its changes.

use std::collections::BTreeMap;
use std::path::PathBuf;

use balloon::governor::AgentState;
use balloon::governor::decision::DecisionInfo;
use foreshore_config::section;
use serde::{Deserialize, Serialize};

use crate::config::{FIXED_SIZE, ParamSettings, PressureConfig};

/// `vm.pressure`, as it is answered. The default is that of no policy, before anything has
/// happened.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PressureInfo {
    pub policy: String,
    /// Decides, and does nothing.
    pub dry_run: bool,
    /// Decides nothing, until resumed.
    pub paused: bool,
    /// Zones pinned by a manual resize, until resumed.
    pub pinned_zones: Vec<String>,
    /// How the guest's agent is.
    pub agent: AgentState,
    /// Whether an agent is connected.
    pub agent_connected: bool,
    /// Age of the last report in milliseconds; `None` before the first.
    pub report_age_ms: Option<u64>,
    pub zones: Vec<GovernedZoneInfo>,
    /// How many decisions there have been.
    pub decisions_total: u64,
    /// The last decisions, newest first.
    pub decisions: Vec<DecisionInfo>,
    /// How the recording goes, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recording: Option<RecordingInfo>,
    /// Anything else that a policy wants to tell.
    pub details: BTreeMap<String, serde_json::Value>,
}

/// `vm.pressure`: a zone that is governed. Its sizes are in `vm.memory`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GovernedZoneInfo {
    pub id: String,
    /// Whether the guest's driver is up: without it nothing is plugged or unplugged.
    pub driver_ready: bool,
    /// Whether it was sized by hand, and is left alone until resumed.
    pub pinned: bool,
}

/// `vm.pressure`: the trace that is being recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordingInfo {
    pub file: PathBuf,
    /// How much has been written.
    pub written_bytes: u64,
    /// Lines that could not be written in time.
    pub lost_lines: u64,
    /// Whether it goes on.
    pub status: RecordingState,
}

/// Whether a recording goes on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "state", content = "reason")]
pub enum RecordingState {
    Recording,
    /// It has reached its size.
    Full,
    /// Its file has failed, and why.
    Failed(String),
}

section! {
    /// Change of the governor by `vm.pressure`. A field that is `None` stays unchanged.
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
    /// Makes the change in `config`. Pins are not part of it: a machine that is built anew has
    /// none.
    pub fn apply(&self, config: &mut PressureConfig) {
        if let Some(policy) = &self.policy {
            config.policy.clone_from(policy);
            config.size = None;
            config.params.clear();
        }
        // It has two names, and what is set last counts.
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

    /// Whether the governor is to be paused after it.
    pub fn paused(&self) -> Option<bool> {
        let resumed = self.resume == Some(true) && self.zone.is_none();
        self.pause.or(resumed.then_some(false))
    }
}
