//! One zone as the governor follows it.
//!
//! A tracker takes the zone's sizes once per step. From these it derives whether the guest's driver
//! follows the request (rule 5), what the host could not provide, and the progress of a resize for
//! its status and for reminders.

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
    /// Sized by hand, and left alone.
    pub(super) pinned: bool,
    /// Sized by hand since the last decision: what has grown may be that.
    pub(super) by_hand: bool,
    /// Size requested by a client or at boot, until all of it is requested from the guest.
    pub(super) goal_bytes: Option<u64>,
    /// No step towards the goal has been taken yet.
    pub(super) is_goal_new: bool,
    /// A dry run has said what rule 5 would do about what is requested of it.
    pub(super) told: bool,
    /// Sizes when the zone was observed last.
    sizes: ZoneSizes,
    /// Size requested since: by a plan, or as observed.
    requested_bytes: u64,
    /// The last request was a plan's, not a client's.
    is_requested_by_plan: bool,
    plug_filter: PlugFilter,
    /// The last time that the requested or the plugged size moved, and that is not taken back any
    /// more.
    moved: TimeMs,
    grow: Attempt,
    shrink: Attempt,
    /// Grows, for the host's sake.
    host: Attempt,
    /// What the guest does not follow is asked for all the same, for the floor's sake.
    kept: bool,
    resize: Resize,
}

/// Changes of a zone since it was observed last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// More is requested than was asked for.
    pub(super) has_grown: bool,
    /// What was asked for and the host could not provide.
    pub(super) shortfall_bytes: u64,
    /// Bytes by which the device has lowered a plan's request.
    pub lowered_bytes: u64,
    /// The guest's driver has become ready, and is waited for anew.
    pub has_driver_come: bool,
    /// The requested size has been reached, and stays. True once for each requested size, because
    /// a guest may give memory back and take it again as often as it likes.
    pub is_reached: bool,
}

/// How much may be asked at a time, after the guest has not followed, or the host could not provide
/// it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Attempt {
    /// At most this may be outstanding; `None`: no limit.
    cap_bytes: Option<u64>,
    /// Nothing may be asked before this.
    retry_at: Option<TimeMs>,
    /// How long the zone is left alone after the next failure.
    pause_ms: u64,
}

impl ZoneTracker {
    /// Starts to follow a zone.
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

    /// Takes the zone's present sizes.
    pub fn observe(&mut self, zone: &ZoneSizes, now: TimeMs) -> Seen {
        let has_driver_come = self.has_driver_come(zone, now);
        let before = std::mem::replace(&mut self.sizes, *zone);
        let requested_before = std::mem::replace(&mut self.requested_bytes, zone.requested_bytes);
        let (asked_bytes, is_short) =
            (requested_before.min(zone.requested_bytes), zone.shortfall.is_some());
        let less_bytes = requested_before.saturating_sub(zone.requested_bytes);
        let is_lowered = self.is_requested_by_plan && zone.lowered_by().is_some();

        // What goes without being asked back is no progress.
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
            // What comes before the host is asked again is what it had left.
            if !is_short && self.host.allowed(since) != Some(0) {
                self.host = Attempt::default();
            }
        }
        // A guest that sinks unasked has done nothing of its request. It is waited for where all of
        // it was there.
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

    /// The host could not provide what was asked for: not before the next try is it asked again.
    pub(super) fn fell_short(&mut self, rules: &Rules, now: TimeMs) {
        self.host.pause(rules, now);
    }

    /// A plan asks for this, of a zone of which `before_bytes` were requested.
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

    /// Returns true if the zone was sized by hand and is left alone.
    pub fn is_pinned(&self) -> bool {
        self.pinned
    }

    /// A client sizes the zone.
    pub(super) fn pin(&mut self) {
        (self.pinned, self.by_hand, self.is_requested_by_plan) = (true, true, false);
    }

    /// This is asked for after all, though [`ZoneTracker::fall_back`] has taken it.
    pub(super) fn keep(&mut self, requested_bytes: u64) {
        self.requested_bytes = requested_bytes;
        self.kept = true;
    }

    /// Returns true if that is so, and nothing has happened on it since.
    pub(super) fn is_kept(&self) -> bool {
        self.kept && self.plug_filter.pending_since().is_none()
    }

    /// Returns true if what is plugged stays, or is what a shrink has left.
    fn is_settled(&self) -> bool {
        self.plug_filter
            .pending_since()
            .is_none_or(|since| self.resize.asked_back_at >= Some(since))
    }

    /// A driver has come: what another one, or none, did not follow says nothing about it. The
    /// sizes are those before it came, because the memory that it has plugged since still has
    /// to stay.
    fn begin_anew(&mut self, now: TimeMs) {
        self.moved = now;
        self.plug_filter =
            PlugFilter::of(self.sizes.requested_bytes, self.sizes.plugged_bytes, now);
        self.grow = Attempt::default();
        self.shrink = Attempt::default();
        self.kept = false;
    }

    /// What to request instead, if the guest has not followed for too long: half of what is
    /// missing, so that the change itself makes the driver try again; at the end, what it has.
    /// A shrink is withdrawn at once, because memory that the guest uses is not worth fighting
    /// for, and the next one is smaller.
    ///
    /// A balloon's guest counts in pages: what it has may lie between two blocks, and what is
    /// requested never does. A withdrawn shrink leaves it the whole block; the last part of a
    /// block of a grow is as good as there.
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
        // Nor does what came before it undo the failure by staying.
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

    /// Returns true if nothing has happened for too long on what is requested.
    pub(super) fn is_stuck(&self, zone: &ZoneSizes, rules: &Rules, now: TimeMs) -> bool {
        let moved =
            self.plug_filter.pending_since().map_or(self.moved, |since| since.max(self.moved));
        zone.requested_bytes != zone.plugged_bytes && now.since(moved) >= rules.progress_ms
    }

    /// The most that may be requested of the zone, for the guest's driver's sake.
    pub(super) fn ceiling_bytes(&self, zone: &ZoneSizes, now: TimeMs) -> u64 {
        match self.grow.allowed(now) {
            Some(cap) => self.plug_filter.stayed_bytes(zone.plugged_bytes).saturating_add(cap),
            None => u64::MAX,
        }
    }

    /// The most that may be requested of the zone, for the host's sake.
    pub(super) fn host_ceiling_bytes(&self, zone: &ZoneSizes, now: TimeMs) -> u64 {
        match self.host.allowed(now) {
            Some(cap) => zone.plugged_bytes.saturating_add(cap),
            None => u64::MAX,
        }
    }

    /// The most that may be taken back from the zone at a time, for the guest's driver's sake.
    pub(super) fn shrink_cap_bytes(&self, now: TimeMs) -> u64 {
        self.shrink.allowed(now).unwrap_or(u64::MAX)
    }
}

/// What is requested of a zone after a request that was not followed: what is there, and so much of
/// a grow.
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
