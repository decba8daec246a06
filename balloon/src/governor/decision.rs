//! Decisions of the governor as `vm.pressure` shows them.

use serde::{Deserialize, Serialize};

/// So many decisions are kept.
pub const DECISIONS_KEPT: usize = 1_000;
/// So many of them are shown unless more are asked for.
pub const DECISIONS_SHOWN: usize = 50;

/// One decision: upon what, what, why, and what came of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecisionInfo {
    /// Counts decisions from 1 on, since the VM was started or last rebooted.
    pub seq: u64,
    /// How long ago it was made.
    pub age_ms: u64,
    /// How often it was made, with nothing asked of the guest. Those that asked for something
    /// stand for themselves.
    pub times: u64,
    /// The policy that was asked.
    pub policy: String,
    /// `grow`, `shrink` or `hold`.
    pub direction: String,
    /// Why.
    pub reason: String,
    /// What kept it smaller than was wanted.
    pub limited_by: Option<String>,
    /// The node for whose sake it was made; `None`: the VM as a whole.
    pub near: Option<u32>,
    /// The hotplugged memory that the policy wanted in all.
    pub wanted_bytes: u64,
    /// What of it is requested, all zones together.
    pub requested_bytes: u64,
    /// By how much the guest was asked to change what it has plugged.
    pub asked_bytes: u64,
    /// What was available to the guest; `None` before the first report.
    pub available_bytes: Option<u64>,
    /// Decided only: nothing was asked of the guest.
    pub dry_run: bool,
    /// What it was decided upon.
    pub input: DecisionInput,
    /// What was decided for each zone.
    pub targets: Vec<DecisionTarget>,
    /// What came of it.
    pub outcome: Outcome,
}

/// What a decision was made upon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecisionInput {
    /// The last report; `None` before the first.
    pub report: Option<ReportDigest>,
    /// What the pool could still lend.
    pub pool_free_bytes: u64,
    /// Each zone's sizes.
    pub zones: Vec<DecisionSizes>,
}

/// What a report came down to. Totals are since the guest booted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportDigest {
    /// Its number on its agent's connection.
    pub seq: u64,
    /// How old it was.
    pub age_ms: u64,
    /// The guest's clock when it was made.
    pub monotonic_ms: u64,
    /// All memory of the guest's page allocator.
    pub total_bytes: u64,
    /// What was available.
    pub available_bytes: u64,
    /// What was free.
    pub free_bytes: u64,
    /// What was swapped out.
    pub swap_used_bytes: u64,
    /// Total time in which at least one task waited for memory.
    pub stall_some_us: u64,
    /// Total time in which all tasks did.
    pub stall_full_us: u64,
    /// Pages swapped in.
    pub pswpin: u64,
    /// Pages swapped out.
    pub pswpout: u64,
}

/// A zone's sizes before a decision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecisionSizes {
    /// Which zone.
    pub zone: String,
    /// What the guest was asked to have plugged.
    pub requested_bytes: u64,
    /// What it had plugged.
    pub plugged_bytes: u64,
}

/// What was decided for a zone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecisionTarget {
    /// Which zone.
    pub zone: String,
    /// The size to request.
    pub requested_bytes: u64,
}

/// What came of a decision. `after_ms` counts from the decision; `moved_bytes` is what the guest
/// has followed of what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub enum Outcome {
    /// Nothing was asked of the guest.
    None,
    /// Nothing was asked of the guest, because of the dry run.
    DryRun,
    /// The guest is at it.
    Pending {
        /// What has moved so far.
        moved_bytes: u64,
    },
    /// The guest makes no progress. It may yet.
    Stuck {
        /// What has moved so far.
        moved_bytes: u64,
    },
    /// All of it was followed.
    Reached {
        /// When.
        after_ms: u64,
    },
    /// Some of it was followed; the rest was taken back, by decision `by` or because the host could
    /// not provide it.
    Partly {
        /// What has moved.
        moved_bytes: u64,
        /// When that was final.
        after_ms: u64,
        /// The decision that took the rest back.
        by: Option<u64>,
        /// What the host lacked.
        lack: Option<String>,
    },
    /// None of it was followed, and decision `by` took it back.
    Withdrawn {
        /// When.
        after_ms: u64,
        /// The decision that took it back.
        by: u64,
    },
    /// Another decision wanted the opposite before this one was followed.
    Superseded {
        /// What had moved.
        moved_bytes: u64,
        /// When.
        after_ms: u64,
        /// The other decision.
        by: u64,
    },
    /// Somebody sized the zone by hand before it was followed.
    ByHand {
        /// What had moved.
        moved_bytes: u64,
        /// When.
        after_ms: u64,
    },
}
