//! Faulty callers of the governor. Each of them breaks one invariant.

use balloon::governor::Request;
use balloon::{BLOCK_BYTES, DriverState, HostView, Tier};

use super::world::State;

/// Fault of a caller. Each breaks one invariant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Unaligned,
    AboveMaximum,
    BelowZoneFloor,
    /// Requests size 0 for all zones, although the floor is higher.
    BelowFloor,
    IgnoresCeiling,
    IgnoresPool,
    ActsInDryRun,
    ActsInPause,
    MovesPinned,
    /// Shows a refused driver to the governor as ready.
    HidesRefusal,
    /// Turns a policy's request into a step without a goal.
    StepsWithoutGoal,
    StepsAfterResume,
    /// Does not request the size that a client wants.
    DropsSteps,
    /// Does not end the goals of a zone that is returned to the governor.
    RetainsGoals,
    /// Requests the whole goal in a single step.
    IgnoresDescriptors,
    /// Shows DRAM to the governor as PM, and PM as DRAM.
    SwapsTiers,
    /// Requests more memory when it handles the same event a second time.
    IsNondeterministic,
}

impl Fault {
    /// All faulty callers, each with the message of the check that should fail.
    pub(crate) const ALL: [(Self, &str); 21] = [
        (Self::Unaligned, "not whole blocks"),
        (Self::Unaligned, "no step to the goal"),
        (Self::AboveMaximum, "above the maximum"),
        (Self::BelowZoneFloor, "below the zone's floor"),
        (Self::BelowFloor, "below the floor of all zones"),
        (Self::IgnoresCeiling, "above the ceiling of all zones"),
        (Self::IgnoresPool, "more PM than the pool has"),
        (Self::ActsInDryRun, "sized in a dry run"),
        (Self::ActsInDryRun, "reminded in a dry run"),
        (Self::ActsInPause, "sized in a pause"),
        (Self::MovesPinned, "zone is pinned"),
        (Self::HidesRefusal, "sized without a driver"),
        (Self::HidesRefusal, "steps without a driver"),
        (Self::StepsWithoutGoal, "no goal of a client"),
        (Self::StepsAfterResume, "no goal of a client"),
        (Self::DropsSteps, "size of a client is not requested"),
        (Self::RetainsGoals, "waits without a goal"),
        (Self::IgnoresDescriptors, "more than the guest can describe"),
        (Self::SwapsTiers, "PM comes before DRAM"),
        (Self::SwapsTiers, "DRAM goes before PM"),
        (Self::IsNondeterministic, "effects differ upon the same inputs"),
    ];

    /// Applies the fault to the requests of a step.
    pub(crate) fn distort(self, requests: &mut Vec<Request>, state: &State) {
        requests.retain(|request| match *request {
            Request::Step { zone, size_bytes, goal_bytes } => {
                let is_end = [size_bytes, goal_bytes] == [state.zone(zone).requested_bytes; 2];
                self != Self::DropsSteps && (self != Self::RetainsGoals || !is_end)
            }
            _ => true,
        });
        for request in requests.iter_mut() {
            match request {
                Request::Size(_, bytes) | Request::Step { size_bytes: bytes, .. }
                    if self == Self::Unaligned =>
                {
                    *bytes += BLOCK_BYTES / 2;
                }
                Request::Size(id, bytes) => {
                    let zone = state.zone(*id);
                    match self {
                        Self::AboveMaximum => *bytes = zone.max_bytes + BLOCK_BYTES,
                        Self::BelowZoneFloor if zone.floor_bytes > 0 => *bytes = 0,
                        Self::BelowFloor if zone.floor_bytes == 0 => *bytes = 0,
                        Self::StepsWithoutGoal => {
                            let (zone, size_bytes, goal_bytes) = (*id, *bytes, *bytes);
                            *request = Request::Step { zone, size_bytes, goal_bytes };
                        }
                        _ => {}
                    }
                }
                Request::Step { size_bytes, goal_bytes, .. }
                    if self == Self::IgnoresDescriptors =>
                {
                    *size_bytes = *goal_bytes;
                }
                _ => {}
            }
        }
        let pinned = state.host.zones.iter().zip(state.pinned).find(|(_, pinned)| *pinned);
        if let (Self::MovesPinned, Some((zone, _))) = (self, pinned) {
            requests.push(Request::Size(zone.id, zone.max_bytes));
        }
        if self == Self::IsNondeterministic && state.is_repeated {
            requests.push(Request::Statistics);
        }
    }

    /// Applies the fault to the host that the governor observes.
    pub(crate) fn distort_host(self, host: &mut HostView) {
        if self == Self::IgnoresPool {
            host.pool_free_bytes = u64::MAX;
        }
        for zone in &mut host.zones {
            match self {
                Self::SwapsTiers if zone.tier == Tier::Dram => zone.tier = Tier::Pm,
                Self::SwapsTiers => zone.tier = Tier::Dram,
                Self::HidesRefusal => zone.driver = DriverState::Ready,
                _ => {}
            }
        }
    }
}
