//! Memory tiers.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Source of a zone's memory. DRAM is plugged first and unplugged last.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// DRAM of the host.
    #[default]
    Dram,
    /// Chunks of a PM pool.
    Pm,
}

impl Tier {
    /// Name in the API, in traces and in the metric label `tier`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Dram => "dram",
            Self::Pm => "pm",
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
