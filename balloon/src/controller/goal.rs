//! Sizes that a client requested or that were set at boot.
//!
//! The controller requests such a size in steps within the limit of rule 4, because the guest
//! allocates the page descriptors of plugged memory from DRAM. If a guest has no room for them,
//! Linux kills its processes.

use super::{Controller, ZoneTracker};
use crate::units::round_down;
use crate::{DriverState, HostView, TimeMs, ZoneId};

/// Request to a zone that is a step towards its goal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GoalStep {
    /// Zone to resize.
    pub zone: ZoneId,
    /// Size to request now.
    pub requested_bytes: u64,
    /// Size that the client requested. The size is less than `requested_bytes` only for a shrink.
    pub goal_bytes: u64,
}

impl Controller {
    /// Pins a zone that a client has resized. The controller does not resize it until
    /// [`Controller::resume`].
    ///
    /// # Panics
    ///
    /// Panics if [`Controller::observe`] has not observed the zone.
    pub fn pin(&mut self, id: ZoneId) {
        self.tracker_mut(id).pin();
    }

    /// Sets the size that an observed zone has to reach in steps. The first step is returned by
    /// [`Controller::next_steps`].
    pub(crate) fn set_goal(&mut self, id: ZoneId, size_bytes: u64) {
        let zone = self.tracker_mut(id);
        (zone.goal_bytes, zone.is_goal_new) = (Some(size_bytes), true);
    }

    fn tracker_mut(&mut self, id: ZoneId) -> &mut ZoneTracker {
        let zone = self.zones.iter_mut().find(|zone| zone.id == id);
        zone.unwrap_or_else(|| panic!("{id} is not a zone of the VM"))
    }

    /// Returns true if some zone has a goal that has not been requested completely.
    pub(crate) fn has_goals(&self) -> bool {
        self.zones.iter().any(|zone| zone.goal_bytes.is_some())
    }

    /// Returns the next requests towards the goals. Call [`Controller::observe`] with the same host
    /// first. Carry out the requests, and read the host's state again before calling
    /// [`Controller::step`]. Goals also apply during a pause and a dry run, because a client set
    /// them.
    pub(crate) fn next_steps(&mut self, host: &HostView, now: TimeMs) -> Vec<GoalStep> {
        if !self.has_goals() {
            return Vec::new();
        }
        let mut room_bytes = self.descriptors.room_bytes(&self.rules, host, now);
        let mut steps = Vec::new();
        for (zone, tracker) in host.zones.iter().zip(&mut self.zones) {
            let Some(goal_bytes) = tracker.goal_bytes else { continue };
            // The device has lowered the request. The goal ends, because only a new request can
            // raise the size again.
            let is_unsupported =
                zone.driver == DriverState::Unsupported && goal_bytes != zone.requested_bytes;
            if is_unsupported || (!tracker.is_goal_new && zone.shortfall.is_some()) {
                tracker.goal_bytes = None;
                continue;
            }
            let missing_bytes = goal_bytes.saturating_sub(zone.requested_bytes);
            // Blocks that are still plugged already have their page descriptors.
            let plugged_bytes = zone.outstanding_shrink_bytes().min(missing_bytes);
            let needs_descriptors = host.balloon != Some(zone.id);
            let allowed_bytes = match needs_descriptors {
                true => plugged_bytes + room_bytes.min(missing_bytes - plugged_bytes),
                false => missing_bytes,
            };
            let more_bytes = round_down(allowed_bytes, zone.block_bytes);
            if needs_descriptors {
                room_bytes -= more_bytes.saturating_sub(plugged_bytes);
            }
            let requested_bytes = goal_bytes.min(zone.requested_bytes + more_bytes);
            if requested_bytes == goal_bytes {
                tracker.goal_bytes = None;
            }
            if std::mem::take(&mut tracker.is_goal_new) || requested_bytes != zone.requested_bytes {
                steps.push(GoalStep { zone: zone.id, requested_bytes, goal_bytes });
            }
        }
        steps
    }
}
