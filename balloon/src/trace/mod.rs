//! Traces of the reports, host sizes and plans of a VM, as JSON lines. docs/reference/format.md
//! describes the format.
//!
//! [`Writer`] writes whole lines to its output. It does not decide when, where or how much to
//! write. [`Reader`] trusts no input: all values of an entry are within their bounds, and an error
//! names the line.

mod reader;
#[cfg(test)]
mod tests;
mod wire;
mod writer;

use foreshore_proto::Report;
pub use reader::{Fault, Reader, Trace, TraceError};
pub use writer::Writer;

use crate::plan::Direction;
use crate::{Distances, TimeMs, ZoneId, ZoneSizes};

/// Version of the format that this crate writes, and the only one that it reads.
pub const TRACE_VERSION: u32 = 1;

/// Length of the longest line, without its newline: the longest report of the protocol and its
/// wrapping.
pub const MAX_LINE_BYTES: usize = foreshore_proto::MAX_LINE_BYTES + 1024;

/// First line of a trace, which describes the VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Name of the VM, up to 128 bytes of printable ASCII. It may be empty.
    pub vm: String,
    /// Boot memory of the guest, without the part that a balloon may take.
    pub boot_bytes: u64,
    /// Zones with a hotplug part, at the start of the trace.
    pub zones: Vec<ZoneSizes>,
    /// The zone that is a balloon.
    pub balloon: Option<ZoneId>,
    /// Distances between the guest's nodes.
    pub distances: Distances,
}

/// Line after the first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Report of the guest.
    Report {
        /// Time of arrival, by the host's clock.
        at: TimeMs,
        /// The report.
        report: Box<Report>,
    },
    /// Change of a size on the host.
    Host {
        /// Time of the change.
        at: TimeMs,
        /// All zones of the header, in its order.
        zones: Vec<HostZone>,
        /// Free size of the pool.
        pool_free_bytes: u64,
    },
    /// Plan.
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

/// Variable sizes of a zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostZone {
    /// ID of the zone.
    pub id: ZoneId,
    /// Requested size.
    pub requested_bytes: u64,
    /// Plugged size.
    pub plugged_bytes: u64,
}

/// Plan as it was recorded. Its reasons are strings, because a later version may have more of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedPlan {
    /// Direction of the VM as a whole.
    pub direction: Direction,
    /// Label of the reason.
    pub reason: String,
    /// Reason why less was requested than wanted.
    pub limited_by: Option<String>,
    /// Hotplugged memory that the policy wants in total.
    pub wanted_bytes: u64,
    /// Requested size of each zone. Empty for a plan that changed nothing.
    pub targets: Vec<(ZoneId, u64)>,
    /// The plan was made in a dry run.
    pub dry_run: bool,
}
