//! Plans, which are the governor's requests for all zones of a VM.

use foreshore_proto::Measure;
use serde::Serialize;

use crate::{HostView, ZoneId};

/// Direction of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// The guest receives memory.
    Grow,
    /// The guest returns memory.
    Shrink,
    /// No size changes. However, a request that the guest does not follow may be reduced or
    /// withdrawn.
    Hold,
}

impl Direction {
    /// All directions, for a metric with one series per direction from the start.
    pub const ALL: [Direction; 3] = [Direction::Grow, Direction::Shrink, Direction::Hold];

    /// Returns the name in metrics and in the API.
    pub fn label(self) -> &'static str {
        match self {
            Direction::Grow => "grow",
            Direction::Shrink => "shrink",
            Direction::Hold => "hold",
        }
    }
}

macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $name:ident => $label:literal,)*) => {
        /// Reason for a plan.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Reason {
            $($(#[doc = $doc])+ $name,)*
        }

        impl Reason {
            /// All reasons, for a metric with one series per reason from the start.
            pub const ALL: &'static [Reason] = &[$(Reason::$name,)*];

            /// Returns the name in metrics and in the API. The name does not change between
            /// releases.
            pub fn label(self) -> &'static str {
                match self {
                    $(Reason::$name => $label,)*
                }
            }

            /// Returns the description for documentation.
            pub fn about(self) -> &'static str {
                match self {
                    $(Reason::$name => concat!($($doc,)+).trim_ascii(),)*
                }
            }
        }
    };
}

reasons! {
    /// Available memory is below the headroom.
    LowAvailable => "low_available",
    /// Available memory is being used up fast.
    Filling => "filling",
    /// The guest swaps.
    Swapping => "swapping",
    /// Tasks wait for memory.
    Stalled => "stalled",
    /// Tasks wait for pages that were evicted.
    Thrashing => "thrashing",
    /// The guest's kernel is short of memory.
    KernelMemory => "kernel_memory",
    /// No report has arrived for `lost`.
    ReportsLost => "reports_lost",
    /// Free memory is below the scaled watermarks.
    LowFree => "low_free",
    /// Free memory is down to the kernel's watermarks.
    AtWatermarks => "at_watermarks",
    /// The policy requests a fixed size.
    FixedSize => "fixed_size",
    /// Memory above headroom and margin has been idle.
    Surplus => "surplus",
    /// Page descriptors of free sections exceed `reclaim`.
    DescriptorSpace => "descriptor_space",
    /// A large part of the PM is free.
    FreeShare => "free_share",
    /// Whole units of lent memory are free.
    FreeUnits => "free_units",
    /// Much memory has been free for `calm`.
    Calm => "calm",
    /// The pool's free space does not exceed `storage_floor` or `storage_high`.
    StorageShort => "storage_short",
    /// The pool has less free space for volumes than its watermarks require.
    StorageLow => "storage_low",
    /// Requested memory is below `floor`.
    BelowFloor => "below_floor",
    /// Requested memory is above `ceiling`.
    AboveCeiling => "above_ceiling",
    /// The guest has enough memory or will get it.
    Enough => "enough",
    /// The policy makes no decisions.
    Off => "off",
    /// The operator has paused the governor.
    Paused => "paused",
    /// No report has arrived yet.
    NoReport => "no_report",
    /// No event has occurred since the last plan.
    Quiet => "quiet",
    /// It is too soon to take memory back.
    CoolDown => "cool_down",
    /// The guest is following an earlier request.
    InProgress => "in_progress",
    /// The guest did not follow in time.
    NoProgress => "no_progress",
    /// The host could not provide the memory.
    HostShort => "host_short",
    /// Every zone has its largest permitted size.
    AtCeiling => "at_ceiling",
    /// Every zone has its smallest permitted size.
    AtFloor => "at_floor",
    /// The pool has no memory left to lend.
    PoolEmpty => "pool_empty",
    /// DRAM has no room for more page descriptors.
    Descriptors => "descriptors",
    /// The guest does not online memory as movable.
    OnlinePolicy => "online_policy",
    /// The virtio-mem driver lacks a feature.
    UnsupportedDriver => "unsupported_driver",
    /// The zones that could change were resized manually.
    Pinned => "pinned",
}

/// Request for one zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ZoneTarget {
    /// ID of the zone.
    pub zone: ZoneId,
    /// Size to request: a multiple of the zone's block size, between its floor and its ceiling.
    pub requested_bytes: u64,
}

/// Requests for all zones, and the reason for them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// Direction in which the VM's total size changes.
    pub direction: Direction,
    /// Reason for the plan. For `Hold`, it may be the obstacle that prevents a change.
    pub reason: Reason,
    /// Reason why a grow or shrink is smaller than the policy wants, or the bound that made it
    /// larger.
    pub limited_by: Option<Reason>,
    /// Hotplugged memory that the policy wants in total.
    pub wanted_bytes: u64,
    /// One target for each zone, in the order of the zones in the host's view. Zones that do not
    /// change are included.
    pub targets: Vec<ZoneTarget>,
    /// The plan was made in a dry run, so its targets must not be requested.
    pub dry_run: bool,
    /// Size below which the agent should report at its fast rate.
    pub watermark_bytes: u64,
    /// Measure that is compared with `watermark_bytes`.
    pub watermark_of: Measure,
}

impl Plan {
    /// Returns the targets that differ from the present requests in `host`.
    pub fn changes<'a>(&'a self, host: &'a HostView) -> impl Iterator<Item = &'a ZoneTarget> {
        self.targets.iter().filter(|target| {
            host.zones.iter().any(|zone| {
                zone.id == target.zone && zone.requested_bytes != target.requested_bytes
            })
        })
    }

    /// Returns the sum of the targets.
    pub fn requested_bytes(&self) -> u64 {
        self.targets.iter().fold(0, |sum, target| sum.saturating_add(target.requested_bytes))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn labels_are_distinct_and_valid_in_metrics() {
        let labels: HashSet<_> = Reason::ALL.iter().map(|reason| reason.label()).collect();
        assert_eq!(labels.len(), Reason::ALL.len());
        assert!(
            labels.iter().all(|label| label.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'))
        );
        let directions: HashSet<_> =
            Direction::ALL.iter().map(|direction| direction.label()).collect();
        assert_eq!(directions.len(), 3);
    }
}
