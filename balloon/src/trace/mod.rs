//! Traces, which are JSON lines that record a VM's reports, host sizes and plans.
//! docs/reference/format.md describes the format.
//!
//! [`Writer`] writes whole lines to its output. The caller decides when, where and how much to
//! write. [`Reader`] does not trust its input: it checks that all values of an entry are within
//! their bounds, and its errors name the line.

mod reader;
#[cfg(test)]
mod tests;
mod wire;
mod writer;

use foreshore_proto::Report;
pub use reader::{Fault, Reader, Trace, TraceError};
pub use writer::Writer;

use crate::plan::Direction;
use crate::{Distances, StorageSpace, TimeMs, ZoneId, ZoneSizes};

/// Version of the format. This crate only writes and reads this version.
pub const TRACE_VERSION: u32 = 1;

/// Length of the longest line without its newline. The length is that of the protocol's longest
/// report plus the fields around it.
pub const MAX_LINE_BYTES: usize = foreshore_proto::MAX_LINE_BYTES + 1024;

/// First line of a trace, which describes the VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Name of the VM: up to 128 bytes of printable ASCII, or an empty name.
    pub vm: String,
    /// Guest's boot memory, without the part that a balloon may take.
    pub boot_bytes: u64,
    /// Zones with hotpluggable memory, as they were when the trace started.
    pub zones: Vec<ZoneSizes>,
    /// Zone that is a balloon, if any.
    pub balloon: Option<ZoneId>,
    /// Distances between the guest's nodes.
    pub distances: Distances,
}

/// Any line after the first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// A report of the guest.
    Report {
        /// Time at which the report arrived, by the host's clock.
        at: TimeMs,
        /// The report.
        report: Box<Report>,
    },
    /// A change of a size on the host.
    Host {
        /// Time of the change.
        at: TimeMs,
        /// All zones of the header, in the same order.
        zones: Vec<HostZone>,
        /// Free memory in the pool.
        pool_free_bytes: u64,
        /// Free space of the pool for volumes. `None` if memory borrows none, and in older traces.
        storage: Option<StorageSpace>,
    },
    /// A plan of the governor.
    Plan {
        /// Time of the plan.
        at: TimeMs,
        /// The plan.
        plan: RecordedPlan,
    },
}

impl Entry {
    /// Returns the time of the entry, by the host's clock.
    pub fn at(&self) -> TimeMs {
        match self {
            Entry::Report { at, .. } | Entry::Host { at, .. } | Entry::Plan { at, .. } => *at,
        }
    }
}

/// Sizes of a zone that may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostZone {
    /// ID of the zone.
    pub id: ZoneId,
    /// Requested size.
    pub requested_bytes: u64,
    /// Plugged size.
    pub plugged_bytes: u64,
}

/// Plan as it was recorded. Its reasons are strings, because a later version may add reasons.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedPlan {
    /// Direction in which the VM's total size changes.
    pub direction: Direction,
    /// Label of the reason.
    pub reason: String,
    /// Reason why the request was smaller than the policy wanted.
    pub limited_by: Option<String>,
    /// Hotplugged memory that the policy wants in total.
    pub wanted_bytes: u64,
    /// Requested size of each zone. Empty if the plan changed nothing.
    pub targets: Vec<(ZoneId, u64)>,
    /// True if the plan was made in a dry run.
    pub dry_run: bool,
}
