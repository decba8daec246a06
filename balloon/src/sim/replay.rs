//! From a recorded trace to what its guest wanted.

use foreshore_proto::{Report, ZoneKind};
use thiserror::Error;

use super::demand::{Demand, Segment};
use super::guest::GuestConfig;
use super::host::VmSetup;
use crate::trace::{Entry, Trace};
use crate::{HostView, MIB, Tier, TimeMs};

/// A trace that cannot be replayed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ReplayError {
    /// There is nothing to see.
    #[error("The trace has {0} reports, must be at least 2")]
    Reports(usize),
    /// A balloon could take all that its guest booted with, and the simulated guest has no balloon.
    #[error("The trace's guest booted with {0} bytes beside its balloon, must be at least 1048576")]
    Boot(u64),
    /// No time passes.
    #[error("The trace's reports are {0} ms apart in all, must be at least 1000")]
    Short(u64),
}

/// What a report shows of the demand.
struct Seen {
    at_ms: u64,
    anon_bytes: u64,
}

/// The VM of a trace, which wants what the recorded one used, and what its pool could give. `guest` has everything that a
/// trace does not say.
///
/// A guest that was short had less than it wanted, and what it waited for is not seen: its demand is at least this. What it had
/// in swap counts as wanted. Page cache is not demand, but for what came back soon after it had been evicted.
pub fn replay(
    trace: &Trace,
    guest: &GuestConfig,
    touches_per_s: u64,
    hot_permille: u64,
) -> Result<(VmSetup, u64), ReplayError> {
    let mut seen: Vec<Seen> = Vec::new();
    // The agent keeps a sixteenth of DRAM from user pages where that has a hotplug part, movablecore= a quarter elsewhere.
    let has_dram = trace.header.zones.iter().any(|zone| zone.tier == Tier::Dram && zone.max_bytes > 0);
    let reserve_part = if has_dram { 16 } else { 4 };
    let (mut reports, mut first, mut pool_free_bytes) = (0, None, None);
    for entry in &trace.entries {
        match entry {
            Entry::Report { at, report } => {
                reports += 1;
                let start = *first.get_or_insert(*at);
                let at_ms = at.since(start);
                // Of two in a millisecond the later one counts.
                if seen.last().is_some_and(|last| last.at_ms == at_ms) {
                    seen.pop();
                }
                seen.push(Seen { at_ms, anon_bytes: used_bytes(report, reserve_part) });
            }
            Entry::Host { pool_free_bytes: free, .. } => {
                pool_free_bytes.get_or_insert(*free);
            }
            Entry::Plan { .. } => {}
        }
    }
    if reports < 2 {
        return Err(ReplayError::Reports(reports));
    }
    let last_ms = seen.last().map_or(0, |last| last.at_ms);
    if last_ms < 1000 {
        return Err(ReplayError::Short(last_ms));
    }
    let segments = seen.iter().zip(seen.iter().skip(1)).map(|(from, to)| {
        let change = i128::from(to.anon_bytes) - i128::from(from.anon_bytes);
        let bytes_per_s = change * 1000 / i128::from(to.at_ms - from.at_ms);
        Segment {
            at: TimeMs(from.at_ms),
            anon_bytes: from.anon_bytes,
            anon_bytes_per_s: i64::try_from(bytes_per_s).unwrap_or(0),
            file_bytes: 0,
            stream_bytes_per_s: 0,
            touches_per_s,
            hot_permille: hot_permille.min(1000),
        }
    });
    let demand = Demand::new(segments.collect(), TimeMs(last_ms)).expect("in order");
    let boot_bytes = trace.header.boot_bytes;
    if boot_bytes < MIB {
        return Err(ReplayError::Boot(boot_bytes));
    }
    // The simulated guest's balloon, if it had one, is hotplugged memory.
    let mut host = HostView { boot_bytes, distances: trace.header.distances.clone(), ..HostView::default() };
    host.zones = trace.header.zones.clone();
    // The run starts as a guest does: with what it booted with and what its zones never go below.
    for zone in &mut host.zones {
        zone.requested_bytes = zone.floor_bytes - zone.floor_bytes % zone.block_bytes;
        zone.plugged_bytes = zone.requested_bytes;
    }
    let all_pm = host.zones.iter().filter(|zone| zone.tier == Tier::Pm).map(|zone| zone.max_bytes);
    let pool_bytes = pool_free_bytes.unwrap_or_else(|| all_pm.sum());
    let guest = GuestConfig { boot_bytes: trace.header.boot_bytes, ..guest.clone() };
    Ok((VmSetup { guest, host, demand }, pool_bytes))
}

/// Memory in use that is not the kernel's own: what is neither available nor kept back by the kernel, and what is in swap.
fn used_bytes(report: &Report, reserve_part: u64) -> u64 {
    let memory = report.memory();
    let swapped = memory.swap_total_bytes - memory.swap_free_bytes;
    let (mut high_pages, mut lowmem_pages, mut descriptors) = (0, 0, 0);
    for zone in report.zones() {
        high_pages += zone.high_pages;
        match zone.kind {
            ZoneKind::Movable => descriptors += (zone.managed_pages * 4096).div_ceil(128 * MIB) * 2 * MIB,
            _ => lowmem_pages += zone.managed_pages,
        }
    }
    // MemAvailable leaves out the watermarks and what is kept of boot memory; descriptors are used by the kernel.
    let kept = high_pages * 4096 + lowmem_pages * 4096 / reserve_part + descriptors;
    (memory.total_bytes - memory.available_bytes + swapped).saturating_sub(kept)
}
