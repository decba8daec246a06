//! Rule 5: a guest that does not follow is asked for less. A dry run says so once.

use super::{Context, Memory, Verdict};
use crate::controller::{ZoneTracker, requested};
use crate::plan::{Direction, Reason};
use crate::policy::off;
use crate::units::round_up;
use crate::{HostView, ZoneSizes};

pub(super) fn decide(context: &Context<'_>) -> Verdict {
    let Context { controller, host, now, .. } = *context;
    let rules = &controller.rules;
    let has_failed = |(zone, tracker): (&ZoneSizes, &ZoneTracker)| {
        !tracker.pinned && tracker.has_failed(zone, rules, now)
    };
    // None of them, mostly.
    if !host.zones.iter().zip(&controller.zones).any(has_failed) {
        return Verdict { plan: None, memory: Some(Memory::NoneFailed) };
    }
    let mut zones = controller.zones.clone();
    let mut asked = host.clone();
    let mut is_news = false;
    for (zone, tracker) in
        asked.zones.iter_mut().zip(&mut zones).filter(|(_, tracker)| !tracker.pinned)
    {
        let was_kept = tracker.is_kept();
        let was_told = std::mem::take(&mut tracker.told);
        if let Some(less) = tracker.fall_back(zone, rules, now) {
            zone.requested_bytes = less;
            is_news |= !was_kept && !was_told;
        }
    }
    keep_floor(context, &mut asked, &mut zones);
    if rules.dry_run {
        zones.clone_from(&controller.zones);
        for (zone, tracker) in host.zones.iter().zip(&mut zones) {
            tracker.told = has_failed((zone, tracker));
        }
    } else {
        is_news |= !requested(&asked).eq(requested(host));
    }
    let plan = is_news.then(|| {
        controller.build(Direction::Hold, Reason::NoProgress, None, requested(&asked), host)
    });
    Verdict { plan, memory: Some(Memory::Zones(zones)) }
}

/// Rule 3 against rule 5: what of the floor is no longer asked of one zone is asked of others, and
/// where they have none it stays asked for.
fn keep_floor(context: &Context<'_>, asked: &mut HostView, zones: &mut [ZoneTracker]) {
    let Context { controller, host, now, .. } = *context;
    let floor = controller.rules.floor_bytes.min(host.requested_bytes());
    let missing = floor.saturating_sub(asked.requested_bytes());
    if missing == 0 {
        return;
    }
    let mut spread = controller.spread(zones, context.last_or(off::decide()), None, asked, now);
    let (added, _) = spread.grow(missing);
    for (zone, bytes) in asked.zones.iter_mut().zip(spread.into_requests()) {
        zone.requested_bytes = bytes;
    }
    let mut missing = missing - added;
    for ((zone, before), tracker) in asked.zones.iter_mut().zip(&host.zones).zip(zones) {
        let taken = before.requested_bytes.saturating_sub(zone.requested_bytes);
        let back = taken.min(round_up(missing, zone.block_bytes));
        zone.requested_bytes += back;
        missing = missing.saturating_sub(back);
        if back > 0 {
            tracker.keep(zone.requested_bytes);
        }
    }
}
