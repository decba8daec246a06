//! Lines of the trace format, which docs/reference/format.md describes. Only this file defines
//! them.

use foreshore_proto::RawReport;
use serde::{Deserialize, Serialize};

use crate::{NodeDistance, StorageSpace, Tier, ZoneSizes};

/// A line after parsing. Its shape is valid, but its values have not been checked.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Raw {
    Trace(RawHeader),
    Report {
        at_ms: u64,
        report: Box<RawReport>,
    },
    Host {
        at_ms: u64,
        zones: Vec<RawHostZone>,
        pool_free_bytes: u64,
        storage: Option<StorageSpace>,
    },
    Plan(RawPlan),
}

/// A line to be written.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Line<'a> {
    Trace(RawHeader),
    Report {
        at_ms: u64,
        report: &'a RawReport,
    },
    Host {
        at_ms: u64,
        zones: &'a [RawHostZone],
        pool_free_bytes: u64,
        #[serde(skip_serializing_if = "Option::is_none")]
        storage: Option<StorageSpace>,
        /// Number of lines that were lost before this one.
        #[serde(skip_serializing_if = "is_none")]
        lost_lines: u64,
    },
    Plan(RawPlan),
}

fn is_none(lost_lines: &u64) -> bool {
    *lost_lines == 0
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RawHeader {
    pub version: u32,
    #[serde(default)]
    pub vm: String,
    pub boot_bytes: u64,
    pub zones: Vec<RawZone>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balloon: Option<u32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub distances: Vec<RawDistance>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct RawDistance {
    pub from: u32,
    pub to: u32,
    pub distance: u8,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RawZone {
    pub id: u32,
    pub tier: Tier,
    pub guest_numa_node: u32,
    pub block_bytes: u64,
    pub floor_bytes: u64,
    pub max_bytes: u64,
    pub requested_bytes: u64,
    pub plugged_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RawHostZone {
    pub id: u32,
    pub requested_bytes: u64,
    pub plugged_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum RawDirection {
    Grow,
    Shrink,
    Hold,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RawPlan {
    pub at_ms: u64,
    pub direction: RawDirection,
    pub reason: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limited_by: Option<String>,
    pub wanted_bytes: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub zones: Vec<RawTarget>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct RawTarget {
    pub id: u32,
    pub requested_bytes: u64,
}

impl From<&NodeDistance> for RawDistance {
    fn from(&NodeDistance { from, to, distance }: &NodeDistance) -> Self {
        RawDistance { from, to, distance }
    }
}

impl From<&ZoneSizes> for RawZone {
    fn from(zone: &ZoneSizes) -> Self {
        RawZone {
            id: zone.id.0,
            tier: zone.tier,
            guest_numa_node: zone.guest_numa_node,
            block_bytes: zone.block_bytes,
            floor_bytes: zone.floor_bytes,
            max_bytes: zone.max_bytes,
            requested_bytes: zone.requested_bytes,
            plugged_bytes: zone.plugged_bytes,
        }
    }
}

impl From<&ZoneSizes> for RawHostZone {
    fn from(zone: &ZoneSizes) -> Self {
        RawHostZone {
            id: zone.id.0,
            requested_bytes: zone.requested_bytes,
            plugged_bytes: zone.plugged_bytes,
        }
    }
}
