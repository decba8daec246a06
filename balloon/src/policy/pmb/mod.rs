//! `pmb`: adds small units at a single watermark, and returns each unit once all of its pages are
//! free, as in the paper "PM Buddy" (SAY-Go). docs/design/papers.md lists the differences from the
//! paper.

#[cfg(test)]
mod tests;

use super::numa_view::{self, OutstandingMemory};
use super::{Decision, Input};
use crate::params::params;
use crate::plan::Reason;
use crate::units::PAGE_BYTES;
use crate::{MIB, Tier, TimeMs};

/// Size of the largest free block of Linux's page allocator on x86-64.
const LARGEST_BLOCK_BYTES: u64 = 4 * MIB;

params! {
    /// Parameters of `pmb`.
    pub struct Params {
        /// Memory is added if free memory is below this multiple of the sum of the guest's high watermarks.
        watermark_scale: "watermark-scale", Count, 1 => 65_536, 32;
        /// Amount of memory that is added or returned at a time.
        unit_bytes: "unit", Blocks, 2 * MIB => 1 << 30, 4 * MIB;
    }
}

/// State of `pmb` between two reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    outstanding: OutstandingMemory,
}

pub(super) fn decide(
    params: &Params,
    mut state: State,
    input: Input<'_>,
    now: TimeMs,
) -> (State, Decision) {
    state.outstanding.observe(input, now);
    let watermark = numa_view::scaled_high_bytes(&numa_view::nodes(input), params.watermark_scale);
    let free_bytes = input.report.memory().free_bytes;
    let expected_free_bytes = free_bytes.saturating_add(state.outstanding.bytes());
    let requested_bytes = input.host.requested_bytes();
    let decision = if expected_free_bytes < watermark {
        // The paper's allocator would have moved the same number of units by now.
        let units = (watermark - expected_free_bytes) / params.unit_bytes + 1;
        let bytes = units.saturating_mul(params.unit_bytes);
        let grow = Decision::want(requested_bytes.saturating_add(bytes), Reason::LowFree);
        Decision { pressure: true, ..grow }
    } else {
        // Twice the watermark is kept free, because otherwise the next few allocations would add
        // the units again. Memory that has not arrived yet is not counted, because tasks that wait
        // for it may fill it as soon as it arrives.
        let spare_bytes = free_bytes.saturating_sub(watermark.saturating_mul(2));
        match free_units_bytes(params, input).min(spare_bytes) / params.unit_bytes
            * params.unit_bytes
        {
            0 => Decision::hold(Reason::Enough),
            bytes => Decision::want(requested_bytes.saturating_sub(bytes), Reason::FreeUnits),
        }
    };
    (state, decision.watching_one(watermark, input))
}

/// Size of the free units of PM. If the agent does not report the number of free blocks, the result
/// is an estimate that assumes that free pages are adjacent.
fn free_units_bytes(params: &Params, input: Input<'_>) -> u64 {
    let zones = numa_view::pm_zones(input);
    let free_bytes = zones.fold(0u64, |sum, zone| {
        let bytes = match zone.largest_free_blocks {
            Some(blocks) => blocks.saturating_mul(LARGEST_BLOCK_BYTES),
            None => zone.free_pages * PAGE_BYTES,
        };
        sum.saturating_add(bytes / params.unit_bytes * params.unit_bytes)
    });
    let lent = input.host.zones.iter().filter(|zone| zone.tier == Tier::Pm);
    free_bytes.min(lent.fold(0u64, |sum, zone| sum.saturating_add(zone.requested_bytes)))
}
