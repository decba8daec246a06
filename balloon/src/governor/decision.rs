//! Decisions of the governor, as `vm.pressure` shows them.

use serde::{Deserialize, Serialize};

/// Number of decisions that are kept.
pub const DECISIONS_KEPT: usize = 1_000;
/// Number of decisions that are shown by default.
pub const DECISIONS_SHOWN: usize = 50;

/// A decision with its input, reason and outcome.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecisionInfo {
    /// Number of the decision, from 1 since the VM was started or last rebooted.
    pub seq: u64,
    /// Time since the decision.
    pub age_ms: u64,
    /// Number of times that this decision was made without a request to the guest. A decision with
    /// a request counts alone.
    pub times: u64,
    /// Name of the policy.
    pub policy: String,
    /// `grow`, `shrink` or `hold`.
    pub direction: String,
    /// Label of the reason.
    pub reason: String,
    /// Reason why less was requested than wanted.
    pub limited_by: Option<String>,
    /// Guest node for which the decision was made. `None` for the VM as a whole.
    pub near: Option<u32>,
    /// Hotplugged memory that the policy wants in total.
    pub wanted_bytes: u64,
    /// Requested size of all zones together.
    pub requested_bytes: u64,
    /// Memory that the guest has to plug or unplug for the decision.
    pub asked_bytes: u64,
    /// Available memory of the guest. `None` before the first report.
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
    /// The last report. `None` before the first.
    pub report: Option<ReportDigest>,
    /// Free memory of the pool.
    pub pool_free_bytes: u64,
    /// Sizes of each zone.
    pub zones: Vec<DecisionSizes>,
}

/// Main values of a report. Totals are since the guest booted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportDigest {
    /// Number of the report on the agent's connection.
    pub seq: u64,
    /// Age of the report at the decision.
    pub age_ms: u64,
    /// Time of the report by the guest's clock.
    pub monotonic_ms: u64,
    /// Memory of the guest's page allocator.
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

/// Decision for a zone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecisionTarget {
    /// ID of the zone.
    pub zone: String,
    /// The size to request.
    pub requested_bytes: u64,
}

/// Outcome of a decision. `after_ms` is the time since the decision, and `moved_bytes` the memory
/// that the guest has plugged or unplugged for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub enum Outcome {
    /// No request to the guest.
    None,
    /// No request to the guest, because of a dry run.
    DryRun,
    /// The guest is following the request.
    Pending {
        /// Memory moved so far.
        moved_bytes: u64,
    },
    /// The guest makes no progress, but the request still stands.
    Stuck {
        /// Memory moved so far.
        moved_bytes: u64,
    },
    /// The guest has followed the whole request.
    Reached {
        /// Time until then.
        after_ms: u64,
    },
    /// The guest has followed a part. The rest was withdrawn, by decision `by` or because the host
    /// could not provide it.
    Partly {
        /// Memory moved.
        moved_bytes: u64,
        /// Time until the rest was withdrawn.
        after_ms: u64,
        /// Decision that withdrew the rest.
        by: Option<u64>,
        /// Reason of the host.
        lack: Option<String>,
    },
    /// The guest has followed no part of the request, and decision `by` withdrew it.
    Withdrawn {
        /// Time until then.
        after_ms: u64,
        /// Decision that withdrew the request.
        by: u64,
    },
    /// A decision with the opposite direction replaced this one before the guest had followed.
    Superseded {
        /// Memory moved until then.
        moved_bytes: u64,
        /// Time until then.
        after_ms: u64,
        /// The other decision.
        by: u64,
    },
    /// A client sized the zone before the guest had followed.
    ByHand {
        /// Memory moved until then.
        moved_bytes: u64,
        /// Time until then.
        after_ms: u64,
    },
}
