//! Faulty controllers. Each of them has one fault.

use super::*;

/// Fault that is applied to the controller's plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// Shrinks a zone below its floor.
    ZoneFloor,
    /// Grows a zone above its maximum.
    ZoneCeiling,
    /// Requests a size that is not a multiple of the block size.
    HalfBlock,
    /// Shrinks the total of all zones below the floor.
    Floor,
    /// Grows the total of all zones above the ceiling.
    Ceiling,
    /// Shrinks during the cool-down.
    EarlyShrink,
    /// Does not lengthen the cool-down after a shrink that had to be undone.
    NeverDoubles,
    /// Shrinks in steps of an eighth of the plugged memory, even if the rules set another share.
    FixedShare,
    /// After a shrink, grows the guest again without pressure.
    GrowsWithoutPressure,
    /// Grows the guest again after a shrink because of a fill that did not happen.
    GrowsWithoutFill,
    /// Shrinks while reports are lost.
    ShrinksWithoutReports,
    /// Does not grow a guest that was short of memory when reports were lost.
    IgnoresShortageWithoutReports,
    /// Gives a grow the reason of a hold or of a policy that is not in use.
    GrowReason,
    /// Gives a shrink the reason of a grow.
    ShrinkReason,
    /// Gives a hold the reason of a policy that is not in use.
    HoldReason,
    /// Shrinks DRAM before PM.
    DramFirst,
    /// Resizes a zone that a client has pinned.
    ResizesPinned,
    /// Continues to resize the guest during a pause.
    ActsInPause,
    /// Carries out plans in a dry run.
    ActsInDryRun,
    /// Does not correct a total that is outside of its bounds.
    IgnoresBounds,
    /// Shrinks a guest that is short of memory.
    ShortShrink,
    /// Removes memory that is in use.
    RemovesUsedMemory,
    /// Gives swapping, refaults or stalls as the reason of a grow, although no such event happened.
    UnfoundedReason(Reason),
    /// Requests the memory that the host could not provide from other zones again and again.
    RepeatsHostShortfall,
    /// Lets rule 5 withdraw requests that the floor needs.
    FallsBelowFloor,
    /// Counts memory as progress although it is unplugged again immediately.
    FlapIsProgress,
    /// Reports repeatedly in a dry run that the guest does not follow a request.
    RepeatsDryRunReport,
    /// Removes the memory that the guest should keep in addition to the surplus.
    RemovesMargin,
    /// Never stops changing sizes.
    NeverStabilizes,
}

pub(super) const RANDOM_RUN_FAULTS: [Fault; 27] = [
    Fault::ZoneFloor,
    Fault::ZoneCeiling,
    Fault::HalfBlock,
    Fault::Floor,
    Fault::Ceiling,
    Fault::EarlyShrink,
    Fault::NeverDoubles,
    Fault::FixedShare,
    Fault::GrowsWithoutPressure,
    Fault::ShrinksWithoutReports,
    Fault::IgnoresShortageWithoutReports,
    Fault::GrowReason,
    Fault::ShrinkReason,
    Fault::HoldReason,
    Fault::DramFirst,
    Fault::ResizesPinned,
    Fault::ActsInPause,
    Fault::ActsInDryRun,
    Fault::IgnoresBounds,
    Fault::ShortShrink,
    Fault::RemovesUsedMemory,
    Fault::UnfoundedReason(Reason::Swapping),
    Fault::UnfoundedReason(Reason::Thrashing),
    Fault::UnfoundedReason(Reason::Stalled),
    Fault::RepeatsHostShortfall,
    Fault::FallsBelowFloor,
    Fault::FlapIsProgress,
];

impl Fault {
    /// Applies the fault to a plan if it can be applied.
    pub(super) fn distort(self, plan: &mut Plan, world: &World) {
        let rules = world.controller.rules();
        let own = world.controller.policy().reasons();
        let since = |at: Option<TimeMs>| at.map(|at| world.now.since(at));
        let unpinned = |zone: &usize| !world.pinned[*zone];
        let idle = plan.direction == Direction::Hold && plan.reason != Reason::NoProgress;
        match self {
            Fault::ZoneFloor => {
                plan.targets[3].requested_bytes = world.host.zones[3].floor_bytes - BLOCK_BYTES
            }
            Fault::ZoneCeiling => {
                plan.targets[2].requested_bytes = world.host.zones[2].max_bytes + BLOCK_BYTES
            }
            Fault::HalfBlock => plan.targets[0].requested_bytes |= MIB,
            Fault::Floor if plan.direction == Direction::Shrink && rules.floor_bytes > 0 => {
                for (zone, target) in world.host.zones.iter().zip(&mut plan.targets) {
                    target.requested_bytes = target.requested_bytes.min(zone.floor_bytes);
                }
            }
            Fault::Ceiling if plan.direction == Direction::Grow => {
                let pm = (0..2).find(unpinned).unwrap_or(0);
                plan.targets[pm].requested_bytes = world.host.zones[pm].max_bytes;
            }
            Fault::EarlyShrink
                if idle && since(world.last_grow).is_some_and(|ms| ms < rules.cool_down_ms) =>
            {
                let zone = (0..ZONES)
                    .find(|i| unpinned(i) && plan.targets[*i].requested_bytes >= 64 * MIB);
                if let (Some(zone), Some(reason)) = (zone, own.1.first()) {
                    plan.targets[zone].requested_bytes -= BLOCK_BYTES;
                    (plan.direction, plan.reason) = (Direction::Shrink, *reason);
                }
            }
            Fault::FixedShare if plan.direction == Direction::Shrink => {
                let taken = world.host.requested_bytes() - plan.requested_bytes();
                let mut more = (world.host.plugged_bytes() / 8).saturating_sub(taken);
                for zone in (0..2).filter(unpinned) {
                    let bytes = &mut plan.targets[zone].requested_bytes;
                    let less = (*bytes - world.host.zones[zone].floor_bytes).min(more)
                        / BLOCK_BYTES
                        * BLOCK_BYTES;
                    (*bytes, more) = (*bytes - less, more - less);
                }
            }
            Fault::GrowsWithoutPressure
                if idle && since(world.last_shrink).is_some_and(|ms| ms < rules.cool_down_ms) =>
            {
                if let (Some(zone), Some(reason)) = ((2..ZONES).find(unpinned), own.0.first()) {
                    let bytes = &mut plan.targets[zone].requested_bytes;
                    *bytes = (*bytes + BLOCK_BYTES).min(world.host.zones[zone].max_bytes);
                    (plan.direction, plan.reason) = (Direction::Grow, *reason);
                }
            }
            Fault::GrowsWithoutFill
                if idle
                    && !world.paused
                    && world.may_fill()
                    && since(world.last_shrink).is_some_and(|ms| ms < rules.cool_down_ms)
                    && world.host.requested_bytes() + BLOCK_BYTES <= rules.ceiling_bytes =>
            {
                let has_room =
                    |zone: &ZoneSizes| zone.requested_bytes + BLOCK_BYTES <= zone.max_bytes;
                let zone = (2..ZONES).find(|i| unpinned(i) && has_room(&world.host.zones[*i]));
                if let Some(zone) = zone {
                    plan.targets[zone].requested_bytes += BLOCK_BYTES;
                    (plan.direction, plan.reason) = (Direction::Grow, Reason::Filling);
                }
            }
            Fault::ShrinksWithoutReports
                if plan.reason == Reason::ReportsLost
                    && world.has_followed()
                    && since(world.last_grow).is_none_or(|ms| ms >= rules.cool_down_ms)
                    && world.host.requested_bytes() >= rules.floor_bytes + BLOCK_BYTES =>
            {
                let zone = (0..2)
                    .find(|i| unpinned(i) && world.host.zones[*i].requested_bytes >= 64 * MIB);
                if let (Some(zone), Some(reason)) = (zone, own.1.first()) {
                    for (zone, target) in world.host.zones.iter().zip(&mut plan.targets) {
                        target.requested_bytes = zone.requested_bytes;
                    }
                    plan.targets[zone].requested_bytes -= BLOCK_BYTES;
                    (plan.direction, plan.reason) = (Direction::Shrink, *reason);
                }
            }
            Fault::IgnoresShortageWithoutReports if plan.reason == Reason::ReportsLost => {
                plan.direction = Direction::Hold;
                for (zone, target) in world.host.zones.iter().zip(&mut plan.targets) {
                    target.requested_bytes = zone.requested_bytes;
                }
            }
            Fault::GrowReason if plan.direction == Direction::Grow => plan.reason = Reason::Enough,
            Fault::ShrinkReason if plan.direction == Direction::Shrink => {
                plan.reason = Reason::LowAvailable
            }
            Fault::HoldReason if idle => plan.reason = Reason::DescriptorSpace,
            Fault::DramFirst if plan.direction == Direction::Shrink => {
                for zone in (0..ZONES).filter(unpinned) {
                    let sizes = &world.host.zones[zone];
                    let step = if sizes.tier == Tier::Dram { BLOCK_BYTES } else { 0 };
                    plan.targets[zone].requested_bytes = (sizes.requested_bytes
                        - step.min(sizes.requested_bytes))
                    .max(sizes.floor_bytes);
                }
            }
            Fault::ResizesPinned => {
                if let Some(zone) = (0..ZONES).find(|zone| world.pinned[*zone]) {
                    plan.targets[zone].requested_bytes = world.host.zones[zone].floor_bytes;
                }
            }
            Fault::IgnoresBounds
                if !(rules.floor_bytes..=rules.ceiling_bytes)
                    .contains(&world.host.requested_bytes()) =>
            {
                (plan.direction, plan.reason) = (Direction::Hold, Reason::Quiet);
                for (zone, target) in world.host.zones.iter().zip(&mut plan.targets) {
                    target.requested_bytes = zone.requested_bytes;
                }
            }
            Fault::ShortShrink if idle && world.found_shortage() => {
                let zone = (0..2)
                    .find(|i| unpinned(i) && world.host.zones[*i].requested_bytes >= 64 * MIB);
                if let (Some(zone), Some(reason)) = (zone, own.1.first()) {
                    plan.targets[zone].requested_bytes -= BLOCK_BYTES;
                    (plan.direction, plan.reason) = (Direction::Shrink, *reason);
                }
            }
            Fault::RemovesUsedMemory if plan.reason == Reason::Surplus => {
                if let Some(zone) = (0..2).find(|zone| unpinned(zone)) {
                    let sizes = &world.host.zones[zone];
                    let least =
                        sizes.requested_bytes.saturating_sub(96 * MIB).max(sizes.floor_bytes);
                    plan.targets[zone].requested_bytes =
                        least.min(plan.targets[zone].requested_bytes);
                }
            }
            Fault::UnfoundedReason(reason)
                if [Reason::LowAvailable, Reason::Filling].contains(&plan.reason) =>
            {
                plan.reason = reason
            }
            Fault::RepeatsHostShortfall
                if idle
                    && !world.paused
                    && world.host.zones.iter().any(|zone| zone.shortfall.is_some())
                    && world.host.requested_bytes() + BLOCK_BYTES <= rules.ceiling_bytes =>
            {
                let has_room =
                    |zone: &ZoneSizes| zone.requested_bytes + BLOCK_BYTES <= zone.max_bytes;
                let zone = (2..ZONES).find(|i| unpinned(i) && has_room(&world.host.zones[*i]));
                if let Some(zone) = zone {
                    plan.targets[zone].requested_bytes += BLOCK_BYTES;
                    (plan.direction, plan.reason) = (Direction::Grow, Reason::HostShort);
                }
            }
            Fault::FallsBelowFloor if plan.reason == Reason::NoProgress => {
                for (zone, target) in world.host.zones.iter().zip(&mut plan.targets) {
                    let there = zone.plugged_bytes.next_multiple_of(BLOCK_BYTES);
                    target.requested_bytes =
                        target.requested_bytes.min(there.max(zone.floor_bytes));
                }
            }
            Fault::FlapIsProgress
                if plan.reason == Reason::NoProgress
                    && (0..ZONES)
                        .all(|zone| !world.is_due(zone) || world.waits[zone].has_flapped)
                    && (0..ZONES).any(|zone| world.is_due(zone)) =>
            {
                plan.reason = Reason::InProgress;
                for (zone, target) in world.host.zones.iter().zip(&mut plan.targets) {
                    target.requested_bytes = zone.requested_bytes;
                }
            }
            Fault::RepeatsDryRunReport
                if plan.dry_run && (0..ZONES).any(|zone| world.is_due(zone)) =>
            {
                (plan.direction, plan.reason) = (Direction::Hold, Reason::NoProgress);
                plan.wanted_bytes = world.host.requested_bytes();
                for (zone, target) in world.host.zones.iter().zip(&mut plan.targets) {
                    target.requested_bytes = zone.requested_bytes;
                }
            }
            Fault::RemovesMargin if plan.reason == Reason::Surplus => {
                let taken = world.host.requested_bytes() - plan.requested_bytes();
                let mut more = (128 * MIB).saturating_sub(taken);
                for zone in (0..2).filter(unpinned) {
                    let bytes = &mut plan.targets[zone].requested_bytes;
                    let less = (*bytes - world.host.zones[zone].floor_bytes).min(more);
                    (*bytes, more) = (*bytes - less, more - less);
                }
            }
            Fault::NeverStabilizes
                if idle && world.now.0 / 60_000 != (world.now.0 - 1_000) / 60_000 =>
            {
                let up = (world.now.0 / 60_000).is_multiple_of(2);
                let (sizes, bytes) = (&world.host.zones[0], &mut plan.targets[0].requested_bytes);
                *bytes = if up { *bytes + BLOCK_BYTES } else { *bytes - BLOCK_BYTES.min(*bytes) };
                *bytes = (*bytes).clamp(sizes.floor_bytes, sizes.max_bytes);
            }
            _ => {}
        }
    }
}
