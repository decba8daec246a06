//! Tracker of a zone.
//!
//! The controller passes the zone's sizes once per step. From these, the tracker derives three
//! results: whether the guest's driver follows the request (rule 5), the memory that the host could
//! not provide, and the progress of a resize for its status and for reminders.

mod resize;

use self::resize::Resize;
pub use self::resize::{Reminder, ResizeStatus};
use super::Rules;
use crate::plug_filter::PlugFilter;
use crate::units::{round_down, round_up};
use crate::{TimeMs, ZoneId, ZoneSizes};

/// Tracker of one zone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZoneTracker {
    pub(super) id: ZoneId,
    /// Sized by a client, so the controller leaves it alone.
    pub(super) pinned: bool,
    /// Sized by a client since the last decision, so a grow may be the client's.
    pub(super) by_hand: bool,
    /// Size requested by a client or at boot, until all of it is requested from the guest.
    pub(super) goal_bytes: Option<u64>,
    /// No step towards the goal has been taken yet.
    pub(super) is_goal_new: bool,
    /// A dry run has reported the plan of rule 5 for the present request.
    pub(super) told: bool,
    /// Sizes at the last observation.
    sizes: ZoneSizes,
    /// Requested size, from the last observation or from a plan after it.
    requested_bytes: u64,
    /// The last request was from a plan, not from a client.
    is_requested_by_plan: bool,
    plug_filter: PlugFilter,
    /// Last change of the requested or the plugged size that was not undone.
    moved: TimeMs,
    grow: Attempt,
    shrink: Attempt,
    /// Grows that the host could not provide.
    host: Attempt,
    /// The request stays for the floor, although the guest does not follow it.
    kept: bool,
    resize: Resize,
}

/// Changes of a zone since the last observation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// The requested size has grown without a plan.
    pub(super) has_grown: bool,
    /// Requested memory that the host could not provide.
    pub(super) shortfall_bytes: u64,
    /// Bytes by which the device has lowered a plan's request.
    pub lowered_bytes: u64,
    /// The guest's driver has become ready, so its time to follow starts again.
    pub has_driver_come: bool,
    /// The requested size has been reached, and stays. True once for each requested size, because a
    /// guest may give memory back and plug it again as often as it likes.
    pub is_reached: bool,
}

/// Limit of requests after a failure of the guest or the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Attempt {
    /// Most memory that may be outstanding. `None` if unlimited.
    cap_bytes: Option<u64>,
    /// Time before which nothing may be requested.
    retry_at: Option<TimeMs>,
    /// Length of the last pause. The next one is twice as long.
    pause_ms: u64,
}

impl ZoneTracker {
    /// Creates the tracker of a zone.
    pub fn new(zone: &ZoneSizes, now: TimeMs) -> Self {
        ZoneTracker {
            id: zone.id,
            pinned: false,
            by_hand: false,
            goal_bytes: None,
            is_goal_new: false,
            told: false,
            sizes: *zone,
            requested_bytes: zone.requested_bytes,
            is_requested_by_plan: false,
            plug_filter: PlugFilter::of(zone.requested_bytes, zone.plugged_bytes, now),
            moved: now,
            grow: Attempt::default(),
            shrink: Attempt::default(),
            host: Attempt::default(),
            kept: false,
            resize: Resize::new(zone, now),
        }
    }

    /// Updates the tracker with the zone's present sizes.
    pub fn observe(&mut self, zone: &ZoneSizes, now: TimeMs) -> Seen {
        let has_driver_come = self.has_driver_come(zone, now);
        let before = std::mem::replace(&mut self.sizes, *zone);
        let requested_before = std::mem::replace(&mut self.requested_bytes, zone.requested_bytes);
        let (asked_bytes, is_short) =
            (requested_before.min(zone.requested_bytes), zone.shortfall.is_some());
        let less_bytes = requested_before.saturating_sub(zone.requested_bytes);
        let is_lowered = self.is_requested_by_plan && zone.lowered_by().is_some();

        // Memory that the guest unplugs without a request does not count as progress.
        let is_asked_back =
            zone.plugged_bytes < before.plugged_bytes && asked_bytes < before.plugged_bytes;
        if zone.requested_bytes != requested_before || is_asked_back {
            (self.moved, self.kept) = (now, false);
        }
        if is_asked_back {
            self.shrink = Attempt::default();
        }
        let was_settled = self.is_settled();
        let stayed_since = self.plug_filter.observe(asked_bytes, zone.plugged_bytes, now);
        if let Some(since) = stayed_since {
            (self.moved, self.kept) = (self.moved.max(since), false);
            self.grow = Attempt::default();
            // Memory plugged before the host's retry was available to the host earlier, so it does
            // not end the pause.
            if !is_short && self.host.allowed(since) != Some(0) {
                self.host = Attempt::default();
            }
        }
        // A guest that unplugs memory without a request has made no progress. If it had reached the
        // requested size, its time to follow starts again.
        let has_left =
            zone.plugged_bytes < before.plugged_bytes && was_settled && resize::is_reached(&before);
        if is_asked_back {
            self.resize.asked_back_at = Some(now);
        }
        let is_reached = self.observe_resize(&before, is_asked_back || has_left, stayed_since, now);
        Seen {
            has_grown: zone.requested_bytes > requested_before,
            shortfall_bytes: if is_short { less_bytes } else { 0 },
            lowered_bytes: if is_lowered { less_bytes } else { 0 },
            has_driver_come,
            is_reached,
        }
    }

    /// Pauses requests because the host could not provide the requested memory.
    pub(super) fn fell_short(&mut self, rules: &Rules, now: TimeMs) {
        self.host.pause(rules, now);
    }

    /// Records the request of a plan. `before_bytes` is the size requested before it.
    pub(super) fn asked(&mut self, requested_bytes: u64, before_bytes: u64, now: TimeMs) {
        if requested_bytes != before_bytes {
            (self.goal_bytes, self.is_requested_by_plan) = (None, true);
        }
        if requested_bytes != self.requested_bytes {
            self.requested_bytes = requested_bytes;
            self.moved = now;
            self.kept = false;
        }
    }

    /// Returns true if the zone was sized by a client, so that the controller leaves it alone.
    pub fn is_pinned(&self) -> bool {
        self.pinned
    }

    /// Pins the zone because a client has sized it.
    pub(super) fn pin(&mut self) {
        (self.pinned, self.by_hand, self.is_requested_by_plan) = (true, true, false);
    }

    /// Keeps a request that [`ZoneTracker::fall_back`] has withdrawn.
    pub(super) fn keep(&mut self, requested_bytes: u64) {
        self.requested_bytes = requested_bytes;
        self.kept = true;
    }

    /// Returns true if a withdrawn request is kept and nothing has been plugged for it since.
    pub(super) fn is_kept(&self) -> bool {
        self.kept && self.plug_filter.pending_since().is_none()
    }

    /// Returns true if the plugged memory stays, or is the rest after a shrink.
    fn is_settled(&self) -> bool {
        self.plug_filter
            .pending_since()
            .is_none_or(|since| self.resize.asked_back_at >= Some(since))
    }

    /// Restarts the tracker for a driver that has become ready, because failures under another
    /// driver or none do not count for it. The filter starts from the sizes before this driver,
    /// because memory that it has plugged since still has to stay.
    fn begin_anew(&mut self, now: TimeMs) {
        self.moved = now;
        self.plug_filter =
            PlugFilter::of(self.sizes.requested_bytes, self.sizes.plugged_bytes, now);
        self.grow = Attempt::default();
        self.shrink = Attempt::default();
        self.kept = false;
    }

    /// Returns the request to make instead if the guest has not followed for too long. A grow is
    /// halved, because only a change of the request makes the driver try again. In the end, it is
    /// withdrawn to the plugged size. A shrink is withdrawn at once, because the guest uses the
    /// memory, and the next one is smaller.
    ///
    /// A guest with a balloon counts in pages, so its plugged size may lie between two blocks, but
    /// requests are whole blocks. A withdrawn shrink leaves the whole block. A grow that lacks less
    /// than a block counts as reached.
    pub(super) fn fall_back(
        &mut self,
        zone: &ZoneSizes,
        rules: &Rules,
        now: TimeMs,
    ) -> Option<u64> {
        if !self.has_failed(zone, rules, now) {
            return None;
        }
        let growing = zone.requested_bytes > zone.plugged_bytes;
        let missing = zone.requested_bytes.abs_diff(zone.plugged_bytes);
        let half = round_down(missing / 2, zone.block_bytes);
        let attempt = if growing { &mut self.grow } else { &mut self.shrink };
        attempt.failed(half, zone, rules, now, growing);
        // Memory plugged earlier does not undo the failure by staying.
        self.plug_filter.settle();
        self.moved = now;
        self.kept = false;
        let left = left_bytes(zone, half);
        self.resize.withdrawn_bytes = (left == zone.plugged_bytes).then_some(left);
        Some(left)
    }

    /// Returns true if the guest has not followed for too long.
    pub(super) fn has_failed(&self, zone: &ZoneSizes, rules: &Rules, now: TimeMs) -> bool {
        let is_there = (0..zone.block_bytes).contains(&zone.outstanding_grow_bytes());
        self.is_stuck(zone, rules, now) && !(is_there && zone.requested_bytes > zone.plugged_bytes)
    }

    /// Returns true if the request has made no progress for too long.
    pub(super) fn is_stuck(&self, zone: &ZoneSizes, rules: &Rules, now: TimeMs) -> bool {
        let moved =
            self.plug_filter.pending_since().map_or(self.moved, |since| since.max(self.moved));
        zone.requested_bytes != zone.plugged_bytes && now.since(moved) >= rules.progress_ms
    }

    /// Largest size that may be requested, after failures of the guest's driver.
    pub(super) fn ceiling_bytes(&self, zone: &ZoneSizes, now: TimeMs) -> u64 {
        match self.grow.allowed(now) {
            Some(cap) => self.plug_filter.stayed_bytes(zone.plugged_bytes).saturating_add(cap),
            None => u64::MAX,
        }
    }

    /// Largest size that may be requested, after failures of the host.
    pub(super) fn host_ceiling_bytes(&self, zone: &ZoneSizes, now: TimeMs) -> u64 {
        match self.host.allowed(now) {
            Some(cap) => zone.plugged_bytes.saturating_add(cap),
            None => u64::MAX,
        }
    }

    /// Most memory that one step may remove, after failures of the guest's driver.
    pub(super) fn shrink_cap_bytes(&self, now: TimeMs) -> u64 {
        self.shrink.allowed(now).unwrap_or(u64::MAX)
    }
}

/// Fallback request after a timeout: the plugged size plus, for a grow, `more_bytes`.
pub(super) fn left_bytes(zone: &ZoneSizes, more_bytes: u64) -> u64 {
    let left = match zone.requested_bytes > zone.plugged_bytes {
        true => round_down(zone.plugged_bytes + more_bytes, zone.block_bytes),
        false => round_up(zone.plugged_bytes, zone.block_bytes),
    };
    let most = round_down(zone.max_bytes, zone.block_bytes);
    left.max(round_up(zone.floor_bytes, zone.block_bytes)).min(most)
}

impl Attempt {
    fn failed(
        &mut self,
        half_bytes: u64,
        zone: &ZoneSizes,
        rules: &Rules,
        now: TimeMs,
        at_once: bool,
    ) {
        self.cap_bytes = Some(half_bytes.max(zone.block_bytes));
        if at_once && half_bytes > 0 {
            return;
        }
        self.pause(rules, now);
    }

    fn pause(&mut self, rules: &Rules, now: TimeMs) {
        self.pause_ms =
            self.pause_ms.saturating_mul(2).clamp(rules.progress_ms, rules.max_retry_ms);
        self.retry_at = Some(now + self.pause_ms);
    }

    fn allowed(&self, now: TimeMs) -> Option<u64> {
        match self.retry_at {
            Some(at) if now < at => Some(0),
            _ => self.cap_bytes,
        }
    }
}
