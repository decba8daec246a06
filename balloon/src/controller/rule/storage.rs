//! Rule 9: returns PM to the pool while volumes have too little free space.
//!
//! Like kswapd, it begins when the free space is below `low` and ends when `high` is free. In
//! between, PM does not grow. The pool itself refuses memory below `min`.

use super::{Context, StateUpdate, Verdict};
use crate::plan::{Direction, Plan, Reason};
use crate::policy::off;
use crate::units::{BLOCK_BYTES, round_down, round_up};
use crate::{HostView, Tier, ZoneSizes};

/// Recalls the missing memory at once. Otherwise, the pool becomes full: writes of the guest wait
/// until memory is moved to DRAM. The order of the zones, the floors and the pins are those of any
/// other shrink. A dry run reports the first recall.
pub(super) fn recall(context: &Context<'_>) -> Verdict {
    let Context { controller, host, .. } = *context;
    let Some(storage) = host.storage else { return Verdict::default() };
    let was_recalling = controller.is_recalling;
    let is_recalling = storage.is_low() || (was_recalling && storage.below_high_bytes() > 0);
    let is_reported = controller.rules.dry_run && was_recalling;
    let plan =
        (is_recalling && !is_reported).then(|| plan(context, storage.below_high_bytes())).flatten();
    Verdict { plan, update: Some(StateUpdate::Recalling(is_recalling)) }
}

/// Returns a plan that makes `missing_bytes` of the pool free, as far as PM can be unplugged.
/// `None` if nothing changes, so that the next rule decides.
fn plan(context: &Context<'_>, missing_bytes: u64) -> Option<Plan> {
    let Context { controller, host, now, .. } = *context;
    let last = context.last_report_or(off::decide());
    let leaving_bytes = sum_of_pm(host, ZoneSizes::outstanding_shrink_bytes);
    let bytes = round_up(missing_bytes.saturating_sub(leaving_bytes), BLOCK_BYTES);
    let mut over_bytes = host.requested_bytes().saturating_sub(controller.floor_bytes(host));
    // Requests that the guest has not followed yet are withdrawn first.
    let mut reduced = host.clone();
    for (zone, tracker) in reduced.zones.iter_mut().zip(&controller.zones) {
        if zone.tier == Tier::Pm && !tracker.pinned {
            let least_bytes = zone.plugged_bytes.max(zone.floor_bytes);
            let above_bytes = zone.requested_bytes.saturating_sub(least_bytes).min(over_bytes);
            let withdrawn_bytes = round_down(above_bytes, zone.block_bytes.max(1));
            zone.requested_bytes -= withdrawn_bytes;
            over_bytes -= withdrawn_bytes;
        }
    }
    let mut allocation =
        controller.allocation(&controller.zones, last, last.decision.from, &reduced, now);
    let (_, limit) = allocation.shrink_tiers(bytes.min(over_bytes), &[Tier::Pm]);
    let limit = limit.or((over_bytes < bytes).then_some(Reason::AtFloor));
    let requests = allocation.into_requests();
    let changes =
        host.zones.iter().zip(&requests).any(|(zone, bytes)| zone.requested_bytes != *bytes);
    let (direction, reason) = (Direction::Shrink, Reason::StorageLow);
    let plan = controller.build(direction, reason, limit, requests, host);
    let wanted_bytes = host.requested_bytes().saturating_sub(bytes);
    changes.then_some(Plan { wanted_bytes, ..plan })
}

fn sum_of_pm(host: &HostView, size: fn(&ZoneSizes) -> u64) -> u64 {
    let zones = host.zones.iter().filter(|zone| zone.tier == Tier::Pm);
    zones.fold(0u64, |sum, zone| sum.saturating_add(size(zone)))
}
