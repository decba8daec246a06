//! Traces: what a guest reported, what its host gave it and what was planned, as JSON lines.
//! docs/reference/format.md has the format.
//!
//! [`Writer`] writes whole lines to whatever takes bytes, and decides nothing: not when, not where,
//! not how much. [`Reader`] believes nothing: an entry that it returns has every value inside its
//! bound, and an error names the line.

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

/// The version of the format that this crate writes, and the only one that it reads.
pub const TRACE_VERSION: u32 = 1;

/// The longest line, without its newline: a report may be as long as the protocol lets it be, and
/// has a wrapping here.
pub const MAX_LINE_BYTES: usize = foreshore_proto::MAX_LINE_BYTES + 1024;

/// Of whom the trace is: its first line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The VM's name, up to 128 bytes of printable ASCII. It may be empty.
    pub vm: String,
    /// Memory that the guest booted with, without what a balloon may take of it.
    pub boot_bytes: u64,
    /// The hotplug part of every zone that has one, as it was when the trace began.
    pub zones: Vec<ZoneSizes>,
    /// The zone among them that is a balloon.
    pub balloon: Option<ZoneId>,
    /// How far the guest's nodes are from each other.
    pub distances: Distances,
}

/// The lines after the first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// The guest reported.
    Report {
        /// When it arrived, by the host's clock.
        at: TimeMs,
        /// What it said.
        report: Box<Report>,
    },
    /// A size on the host has changed.
    Host {
        /// When.
        at: TimeMs,
        /// Every zone of the header, in its order.
        zones: Vec<HostZone>,
        /// What the pool could still give.
        pool_free_bytes: u64,
    },
    /// A plan was made.
    Plan {
        /// When.
        at: TimeMs,
        /// What it was.
        plan: RecordedPlan,
    },
}

impl Entry {
    /// When it happened, by the host's clock.
    pub fn at(&self) -> TimeMs {
        match self {
            Entry::Report { at, .. } | Entry::Host { at, .. } | Entry::Plan { at, .. } => *at,
        }
    }
}

/// The sizes of a zone that change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostZone {
    /// Which zone.
    pub id: ZoneId,
    /// What the guest has been asked to have plugged.
    pub requested_bytes: u64,
    /// What it has plugged.
    pub plugged_bytes: u64,
}

/// A plan as it was recorded. Its reasons are words: a later version may have more of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedPlan {
    /// Which way the VM as a whole went.
    pub direction: Direction,
    /// Why.
    pub reason: String,
    /// What kept it smaller than the policy wanted.
    pub limited_by: Option<String>,
    /// The hotplugged memory that the policy wanted in all.
    pub wanted_bytes: u64,
    /// What was requested of each zone; empty for a plan that changed nothing.
    pub targets: Vec<(ZoneId, u64)>,
    /// Decided only.
    pub dry_run: bool,
}
