//! `pmb`: one watermark, small units, and units back as soon as they are wholly free, as in "PM
//! Buddy" (SAY-Go). docs/reference/policies.md says how its rules were brought from an allocator's
//! hooks to reports.

#[cfg(test)]
mod tests;

use super::numa_view::{self, Coming};
use super::{Decision, Input};
use crate::params::params;
use crate::plan::Reason;
use crate::units::PAGE_BYTES;
use crate::{MIB, Tier, TimeMs};

/// What a free block of the allocator's largest order has on x86-64.
const LARGEST_BLOCK_BYTES: u64 = 4 * MIB;

params! {
    /// Parameters of `pmb`.
    pub struct Params {
        /// Factor from the sum of the guest's high watermarks to the watermark of the policy.
        watermark_scale: "watermark-scale", Count, 1 => 65_536, 32;
        /// Unit in which memory is added and returned.
        unit_bytes: "unit", Blocks, 2 * MIB => 1 << 30, 4 * MIB;
    }
}

/// What `pmb` remembers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    coming: Coming,
}

/// Decides on one report.
pub(super) fn decide(
    params: &Params,
    mut state: State,
    input: Input<'_>,
    now: TimeMs,
) -> (State, Decision) {
    state.coming.observe(input, now);
    let watermark = numa_view::scaled_high_bytes(&numa_view::nodes(input), params.watermark_scale);
    let free_bytes = input.report.memory().free_bytes;
    let coming_bytes = free_bytes.saturating_add(state.coming.bytes());
    let requested_bytes = input.host.requested_bytes();
    let decision = if coming_bytes < watermark {
        // As many migrations as the allocator would have come to by now.
        let units = (watermark - coming_bytes) / params.unit_bytes + 1;
        let bytes = units.saturating_mul(params.unit_bytes);
        let grow = Decision::want(requested_bytes.saturating_add(bytes), Reason::LowFree);
        Decision { pressure: true, ..grow }
    } else {
        // Twice the watermark stays, or the next few pages would bring back what has gone: of what
        // has been seen free, as who waits for what is on its way may fill it as it comes.
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

/// The units of PM that are wholly free. An agent that does not count them leaves an estimate: as
/// many as there would be if free pages lay side by side.
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
