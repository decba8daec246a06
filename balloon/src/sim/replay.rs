//! From a recorded trace to what its guest wanted.

use std::io::BufRead;

use foreshore_proto::{Report, ZoneKind};
use thiserror::Error;

use super::demand::{Demand, Segment};
use super::guest::GuestConfig;
use super::host::VmSetup;
use crate::trace::{Entry, Reader, TraceError};
use crate::{HostView, MIB, Tier, TimeMs};

/// So many moments of a trace are kept at most: a recording of the default size has no more.
const MOST_MOMENTS: usize = 1 << 20;

/// A trace that cannot be replayed.
#[derive(Debug, Error)]
pub enum ReplayError {
    /// It cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// There is nothing to see.
    #[error("The trace has {0} reports, must be at least 2")]
    Reports(u64),
    /// A balloon could take all that its guest booted with, and the simulated guest has no balloon.
    #[error("The trace's guest booted with {0} bytes beside its balloon, must be at least 1048576")]
    Boot(u64),
    /// No time passes.
    #[error("The trace's reports are {0} ms apart in all, must be at least 1000")]
    Short(u64),
}

/// What a report shows of the demand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    at_ms: u64,
    anon_bytes: u64,
}

/// The demand as reports show it, in no more than so many moments however many reports there are.
struct Moments {
    seen: Vec<Seen>,
    most: usize,
}

impl Moments {
    fn new(most: usize) -> Self {
        Moments { seen: Vec::new(), most }
    }

    fn push(&mut self, seen: Seen) {
        // Of two in a millisecond the later one counts.
        if self.seen.last().is_some_and(|last| last.at_ms == seen.at_ms) {
            self.seen.pop();
        }
        if self.seen.len() >= self.most {
            self.thin_out();
        }
        self.seen.push(seen);
    }

    /// Keeps the least and the most of equal stretches, each at its moment, and where all begins and ends. What is seen
    /// later is kept whole again, until that is too much.
    fn thin_out(&mut self) {
        let (Some(first), Some(last)) = (self.seen.first().copied(), self.seen.last().copied()) else {
            return;
        };
        let stretches = (self.most / 4).max(1) as u64;
        let stretch_ms = (last.at_ms + 1).div_ceil(stretches);
        let mut kept = vec![first];
        for stretch in self.seen.chunk_by(|a, b| a.at_ms / stretch_ms == b.at_ms / stretch_ms) {
            let least = stretch.iter().min_by_key(|seen| seen.anon_bytes);
            let most = stretch.iter().max_by_key(|seen| seen.anon_bytes);
            let mut both: Vec<Seen> = least.into_iter().chain(most).copied().collect();
            both.sort_by_key(|seen| seen.at_ms);
            kept.extend(both);
        }
        kept.push(last);
        kept.dedup();
        self.seen = kept;
    }
}

/// The VM of a trace, which wants what the recorded one used, and what its pool could give. `guest` has everything that a
/// trace does not say. However long the trace is, no more than a part of it is held.
///
/// A guest that was short had less than it wanted, and what it waited for is not seen: its demand is at least this. What it had
/// in swap counts as wanted. Page cache is not demand, but for what came back soon after it had been evicted.
pub fn replay(
    trace: &mut Reader<impl BufRead>,
    guest: &GuestConfig,
    touches_per_s: u64,
    hot_permille: u64,
) -> Result<(VmSetup, u64), ReplayError> {
    let header = trace.header().clone();
    let mut moments = Moments::new(MOST_MOMENTS);
    // The agent keeps a sixteenth of DRAM from user pages where that has a hotplug part, movablecore= a quarter elsewhere.
    let has_dram = header.zones.iter().any(|zone| zone.tier == Tier::Dram && zone.max_bytes > 0);
    let reserve_part = if has_dram { 16 } else { 4 };
    let (mut reports, mut first, mut pool_free_bytes) = (0, None, None);
    for entry in trace {
        match entry? {
            Entry::Report { at, report } => {
                reports += 1;
                let start = *first.get_or_insert(at);
                let anon_bytes = used_bytes(&report, reserve_part);
                moments.push(Seen { at_ms: at.since(start), anon_bytes });
            }
            Entry::Host { pool_free_bytes: free, .. } => {
                pool_free_bytes.get_or_insert(free);
            }
            Entry::Plan { .. } => {}
        }
    }
    let seen = moments.seen;
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
    let boot_bytes = header.boot_bytes;
    if boot_bytes < MIB {
        return Err(ReplayError::Boot(boot_bytes));
    }
    // The simulated guest's balloon, if it had one, is hotplugged memory.
    let mut host = HostView { boot_bytes, distances: header.distances.clone(), ..HostView::default() };
    host.zones = header.zones.clone();
    // The run starts as a guest does: with what it booted with and what its zones never go below.
    for zone in &mut host.zones {
        zone.requested_bytes = zone.floor_bytes - zone.floor_bytes % zone.block_bytes;
        zone.plugged_bytes = zone.requested_bytes;
    }
    let all_pm = host.zones.iter().filter(|zone| zone.tier == Tier::Pm).map(|zone| zone.max_bytes);
    let pool_bytes = pool_free_bytes.unwrap_or_else(|| all_pm.sum());
    let guest = GuestConfig { boot_bytes: header.boot_bytes, ..guest.clone() };
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

#[cfg(test)]
mod tests {
    use super::*;

    fn pushed(most: usize, seen: impl Iterator<Item = (u64, u64)>) -> Vec<Seen> {
        let mut moments = Moments::new(most);
        for (at_ms, anon_bytes) in seen {
            moments.push(Seen { at_ms, anon_bytes });
            assert!(moments.seen.len() <= most, "{} of {most}", moments.seen.len());
        }
        moments.seen
    }

    #[test]
    fn as_many_moments_as_may_be_are_kept_as_they_are() {
        let all: Vec<_> = (0..64).map(|at| (at * 50, at % 7)).collect();
        let kept = pushed(64, all.iter().copied());
        assert!(kept.iter().map(|seen| (seen.at_ms, seen.anon_bytes)).eq(all));
    }

    #[test]
    fn of_two_in_a_millisecond_the_later_counts() {
        let kept = pushed(64, [(0, 5), (7, 6), (7, 9), (8, 1)].into_iter());
        assert!(kept.iter().map(|seen| (seen.at_ms, seen.anon_bytes)).eq([(0, 5), (7, 9), (8, 1)]));
    }

    #[test]
    fn of_more_the_begin_the_end_and_every_peak_stay_where_they_were() {
        // At rest for hours, but for three bursts of one report each, and a dip.
        let spikes = [(1_234, 900), (50_001, 800), (99_998, 700), (70_000, 1)];
        let level = |at: u64| spikes.iter().find(|(spike, _)| *spike == at).map_or(100 + at % 3, |(_, v)| *v);
        let kept = pushed(64, (0..100_000).map(|at| (at * 1_000, level(at))));
        assert_eq!(kept[0], Seen { at_ms: 0, anon_bytes: level(0) });
        assert_eq!(kept.last(), Some(&Seen { at_ms: 99_999_000, anon_bytes: level(99_999) }));
        for (at, anon_bytes) in spikes {
            assert!(kept.contains(&Seen { at_ms: at * 1_000, anon_bytes }), "{at}");
        }
        assert!(kept.windows(2).all(|pair| pair[0].at_ms < pair[1].at_ms), "in order");
        assert!(kept.len() > 16, "there is something in between: {}", kept.len());
    }
}
