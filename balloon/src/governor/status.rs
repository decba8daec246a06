//! State of the guest's agent, as the API shows it.

use serde::{Deserialize, Serialize};

/// State of the guest's agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AgentState {
    /// No agent has connected since the VM was started or last rebooted.
    #[default]
    Never,
    /// The agent is connected and reports.
    Live,
    /// The agent is connected, but no valid report has arrived for the time of the parameter
    /// `lost`.
    Silent,
    /// The last agent has disconnected.
    Gone,
}

impl AgentState {
    /// All states, for a metric with one series per state.
    pub const ALL: [Self; 4] = [Self::Never, Self::Live, Self::Silent, Self::Gone];

    /// Returns the name in metrics and in the API.
    pub fn label(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::Live => "live",
            Self::Silent => "silent",
            Self::Gone => "gone",
        }
    }
}
