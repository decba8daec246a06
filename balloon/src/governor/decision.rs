//! Decisions of the governor, as `vm.pressure` shows them.

use serde::{Deserialize, Serialize};

use crate::StorageSpace;

/// Number of past decisions that are kept in memory.
pub const MAX_DECISIONS: usize = 1_000;
/// Default number of decisions that `vm.pressure` shows.
pub const DECISIONS_SHOWN: usize = 50;

/// A decision with its input, its reason and its outcome.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecisionInfo {
    /// Sequence number of the decision. Numbers start at 1 when the VM is started or rebooted.
    pub seq: u64,
    /// Time since the decision.
    pub age_ms: u64,
    /// Number of consecutive times that this decision was made without a request to the guest. It
    /// is 1 for a decision with a request.
    pub times: u64,
    /// Name of the policy.
    pub policy: String,
    /// `grow`, `shrink` or `hold`.
    pub direction: String,
    /// Label of the reason.
    pub reason: String,
    /// Reason why the request was smaller than the policy wanted.
    pub limited_by: Option<String>,
    /// Guest node for which the decision was made. `None` for a decision about the whole VM.
    pub near: Option<u32>,
    /// Hotplugged memory that the policy wants in total.
    pub wanted_bytes: u64,
    /// Sum of the requested sizes of all zones.
    pub requested_bytes: u64,
    /// Amount of memory that the guest has to plug or unplug to follow the decision.
    pub change_bytes: u64,
    /// Guest's available memory. `None` before the first report.
    pub available_bytes: Option<u64>,
    /// The decision was made in a dry run, so nothing was requested from the guest.
    pub dry_run: bool,
    /// Input of the decision.
    pub input: DecisionInput,
    /// Requested sizes by zone.
    pub targets: Vec<DecisionTarget>,
    /// Outcome of the decision.
    pub outcome: Outcome,
}

/// Input of a decision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecisionInput {
    /// Last report. `None` before the first report.
    pub report: Option<ReportDigest>,
    /// Free memory of the pool.
    pub pool_free_bytes: u64,
    /// Free space of the pool for volumes. `None` if memory borrows none.
    pub storage: Option<StorageSpace>,
    /// Sizes of each zone.
    pub zones: Vec<DecisionSizes>,
}

/// Main values of a report. Totals are counted since the guest booted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportDigest {
    /// Sequence number of the report on the agent's connection.
    pub seq: u64,
    /// Age of the report when the decision was made.
    pub age_ms: u64,
    /// Time of the report, by the guest's clock.
    pub monotonic_ms: u64,
    /// Memory managed by the guest's page allocator.
    pub total_bytes: u64,
    /// Available memory.
    pub available_bytes: u64,
    /// Free memory.
    pub free_bytes: u64,
    /// Used swap.
    pub swap_used_bytes: u64,
    /// Total time in which at least one task waited for memory.
    pub stall_some_us: u64,
    /// Total time in which all tasks waited for memory.
    pub stall_full_us: u64,
    /// Pages swapped in.
    pub pswpin: u64,
    /// Pages swapped out.
    pub pswpout: u64,
}

/// A zone's sizes before a decision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecisionSizes {
    /// ID of the zone.
    pub zone: String,
    /// Requested size.
    pub requested_bytes: u64,
    /// Plugged size.
    pub plugged_bytes: u64,
}

/// Request to one zone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecisionTarget {
    /// ID of the zone.
    pub zone: String,
    /// The size to request.
    pub requested_bytes: u64,
}

/// Outcome of a decision. `after_ms` counts from the decision, and `moved_bytes` is the memory that
/// the guest has plugged or unplugged because of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub enum Outcome {
    /// The decision made no request to the guest.
    None,
    /// The decision made no request to the guest because it was a dry run.
    DryRun,
    /// The guest is following the request.
    Pending {
        /// Memory moved so far.
        moved_bytes: u64,
    },
    /// The guest makes no progress, but the request has not been withdrawn.
    Stuck {
        /// Memory moved so far.
        moved_bytes: u64,
    },
    /// The guest has followed the whole request.
    Reached {
        /// Time from the decision until the guest had followed it.
        after_ms: u64,
    },
    /// The guest has followed part of the request. The rest was withdrawn by decision `by`, or
    /// because the host could not provide the memory.
    Partly {
        /// Memory moved in total.
        moved_bytes: u64,
        /// Time until the rest was withdrawn.
        after_ms: u64,
        /// Decision that withdrew the rest.
        by: Option<u64>,
        /// Reason why the host could not provide the memory.
        lack: Option<String>,
    },
    /// The guest has not followed any part of the request, and decision `by` withdrew it.
    Withdrawn {
        /// Time until the request was withdrawn.
        after_ms: u64,
        /// Decision that withdrew the request.
        by: u64,
    },
    /// A decision in the opposite direction replaced this one before the guest had followed it.
    Superseded {
        /// Memory moved before the replacement.
        moved_bytes: u64,
        /// Time until the replacement.
        after_ms: u64,
        /// Number of the decision that replaced this one.
        by: u64,
    },
    /// A client resized the zone before the guest had followed the decision.
    ByHand {
        /// Memory moved before the resize.
        moved_bytes: u64,
        /// Time until the resize.
        after_ms: u64,
    },
}
