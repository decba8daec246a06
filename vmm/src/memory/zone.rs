//! Memory zones: ranges of guest-physical memory with one tier and one guest NUMA node.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a zone's memory is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// The host's DRAM.
    Dram,
    /// Chunks of a PM pool.
    Pm,
}

impl Tier {
    /// The value of the metric label `tier`.
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

/// What a zone shall be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZoneSpec {
    /// Its name, which metrics and API calls use.
    pub id: String,
    /// What it is made of.
    pub tier: Tier,
    /// Its node in the guest (an ACPI proximity domain).
    pub guest_node: u32,
    /// The host's node from which all its memory comes; wherever the host likes otherwise.
    pub host_node: Option<u32>,
    /// The part that is there from the start.
    pub boot_bytes: u64,
    /// The most that may be plugged beyond it; 0 for a zone without a virtio-mem device.
    pub hotplug_bytes: u64,
    /// How much of that is requested when the guest starts.
    pub hotplugged_bytes: u64,
}
