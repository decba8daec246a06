//! State of the guest's agent, as the API shows it.

use serde::{Deserialize, Serialize};

/// How the guest's agent is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AgentState {
    /// None has been there since the VM was started or last rebooted.
    #[default]
    Never,
    /// It reports.
    Live,
    /// It is connected, and no report that can be believed has come for as long as makes reports
    /// lost.
    Silent,
    /// There was one, and it is not connected any more.
    Gone,
}

impl AgentState {
    /// All of them, for a metric that shows every one.
    pub const ALL: [Self; 4] = [Self::Never, Self::Live, Self::Silent, Self::Gone];

    /// The name in metrics and on the API.
    pub fn label(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::Live => "live",
            Self::Silent => "silent",
            Self::Gone => "gone",
        }
    }
}
