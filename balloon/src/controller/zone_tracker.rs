//! Tracks one zone's requests and their results.
//!
//! The controller passes the zone's sizes once per step. The tracker uses them to check that the
//! guest's driver follows the request (rule 5), and to compute the memory that the host could not
//! provide. It also derives the progress of a resize, for its status and for reminders.

mod resize;

use self::resize::Resize;
pub use self::resize::{Reminder, ResizeStatus};
use super::Rules;
use crate::plug_filter::PlugFilter;
use crate::units::{round_down, round_up};
use crate::{TimeMs, ZoneId, ZoneSizes};

/// Tracks the requests to one zone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZoneTracker {
    pub(super) id: ZoneId,
    /// True if a client has resized the zone. The controller does not change a pinned zone.
    pub(super) pinned: bool,
    /// True if a client has resized the zone since the last decision. A grow may then be due to the
    /// client's request.
    pub(super) resized_by_client: bool,
    /// Size that a client or the boot configuration requested, until all of it has been requested
    /// from the guest.
    pub(super) goal_bytes: Option<u64>,
    /// True until the first step towards the goal is requested.
    pub(super) is_goal_new: bool,
    /// True if a dry run has reported the plan of rule 5 for the present request.
    pub(super) is_reported: bool,
    /// Sizes when the zone was last observed.
    sizes: ZoneSizes,
    /// Requested size when the zone was last observed, or as a later plan has changed it.
    requested_bytes: u64,
    /// True if the last request was made by a plan and not by a client.
    is_requested_by_plan: bool,
    plug_filter: PlugFilter,
    /// Time of the last change of the requested or plugged size, except changes that were undone.
    progress_at: TimeMs,
    grow: RequestLimit,
    shrink: RequestLimit,
    /// Limit after grows for which the host could not provide the memory.
    host: RequestLimit,
    /// True if the request is kept because of the floor, although the guest does not follow it.
    is_retained: bool,
    resize: Resize,
}

/// Changes of a zone since it was last observed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZoneChanges {
    /// True if the requested size has grown without a plan.
    pub(super) has_grown: bool,
    /// Requested memory that the host could not provide, in bytes.
    pub(super) shortfall_bytes: u64,
    /// Bytes by which the device has lowered a request of a plan.
    pub lowered_bytes: u64,
    /// True if the guest's driver has become ready. The time to follow the request then starts
    /// again.
    pub driver_became_ready: bool,
    /// True if the requested size was reached and has remained plugged for some time. The tracker
    /// reports it once for each requested size, because a guest may return memory and plug it again
    /// at any rate.
    pub is_reached: bool,
}

/// Limit for requests after the guest or the host has failed to follow one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct RequestLimit {
    /// Maximum size of an outstanding request. `None` means no limit.
    cap_bytes: Option<u64>,
    /// Time before which no request may be made.
    retry_at: Option<TimeMs>,
    /// Duration of the last pause. The next pause is twice as long.
    pause_ms: u64,
}

impl ZoneTracker {
    /// Creates a tracker for a zone.
    pub fn new(zone: &ZoneSizes, now: TimeMs) -> Self {
        ZoneTracker {
            id: zone.id,
            pinned: false,
            resized_by_client: false,
            goal_bytes: None,
            is_goal_new: false,
            is_reported: false,
            sizes: *zone,
            requested_bytes: zone.requested_bytes,
            is_requested_by_plan: false,
            plug_filter: PlugFilter::of(zone.requested_bytes, zone.plugged_bytes, now),
            progress_at: now,
            grow: RequestLimit::default(),
            shrink: RequestLimit::default(),
            host: RequestLimit::default(),
            is_retained: false,
            resize: Resize::new(zone, now),
        }
    }

    /// Updates the tracker with the present sizes of the zone.
    pub fn observe(&mut self, zone: &ZoneSizes, now: TimeMs) -> ZoneChanges {
        let driver_became_ready = self.observe_driver(zone, now);
        let before = std::mem::replace(&mut self.sizes, *zone);
        let requested_before = std::mem::replace(&mut self.requested_bytes, zone.requested_bytes);
        let (min_requested_bytes, is_short) =
            (requested_before.min(zone.requested_bytes), zone.shortfall.is_some());
        let less_bytes = requested_before.saturating_sub(zone.requested_bytes);
        let is_lowered = self.is_requested_by_plan && zone.lowered_by().is_some();

        // If the guest unplugs memory without a request, that is not progress.
        let is_requested_unplug =
            zone.plugged_bytes < before.plugged_bytes && min_requested_bytes < before.plugged_bytes;
        if zone.requested_bytes != requested_before || is_requested_unplug {
            (self.progress_at, self.is_retained) = (now, false);
        }
        if is_requested_unplug {
            self.shrink = RequestLimit::default();
        }
        let was_confirmed = self.is_confirmed();
        let confirmed_since =
            self.plug_filter.observe(min_requested_bytes, zone.plugged_bytes, now);
        if let Some(since) = confirmed_since {
            (self.progress_at, self.is_retained) = (self.progress_at.max(since), false);
            self.grow = RequestLimit::default();
            // Memory that was plugged before the pause ended does not show that the host has memory
            // again.
            if !is_short && self.host.cap_bytes(since) != Some(0) {
                self.host = RequestLimit::default();
            }
        }
        // If a guest unplugs memory without a request, it has made no progress. However, if it had
        // reached the requested size, its time to follow starts again.
        let has_left_reached_size = zone.plugged_bytes < before.plugged_bytes
            && was_confirmed
            && resize::is_reached(&before);
        if is_requested_unplug {
            self.resize.requested_unplug_at = Some(now);
        }
        let is_reached = self.observe_resize(
            &before,
            is_requested_unplug || has_left_reached_size,
            confirmed_since,
            now,
        );
        ZoneChanges {
            has_grown: zone.requested_bytes > requested_before,
            shortfall_bytes: if is_short { less_bytes } else { 0 },
            lowered_bytes: if is_lowered { less_bytes } else { 0 },
            driver_became_ready,
            is_reached,
        }
    }

    /// Pauses requests to this zone because the host could not provide the requested memory.
    pub(super) fn pause_for_host(&mut self, rules: &Rules, now: TimeMs) {
        self.host.pause(rules, now);
    }

    /// Records a request that a plan makes. `before_bytes` is the previously requested size.
    pub(super) fn record_request(&mut self, requested_bytes: u64, before_bytes: u64, now: TimeMs) {
        if requested_bytes != before_bytes {
            (self.goal_bytes, self.is_requested_by_plan) = (None, true);
        }
        if requested_bytes != self.requested_bytes {
            self.requested_bytes = requested_bytes;
            self.progress_at = now;
            self.is_retained = false;
        }
    }

    /// Returns true if a client has resized the zone, so that the controller does not change it.
    pub fn is_pinned(&self) -> bool {
        self.pinned
    }

    /// Pins the zone because a client has resized it.
    pub(super) fn pin(&mut self) {
        (self.pinned, self.resized_by_client, self.is_requested_by_plan) = (true, true, false);
    }

    /// Keeps a request although [`ZoneTracker::reduce_failed_request`] has withdrawn it.
    pub(super) fn retain(&mut self, requested_bytes: u64) {
        self.requested_bytes = requested_bytes;
        self.is_retained = true;
    }

    /// Returns true if a withdrawn request is kept, and no memory has been plugged for it since.
    pub(super) fn is_retained(&self) -> bool {
        self.is_retained && self.plug_filter.pending_since().is_none()
    }

    /// Returns true if the plugged memory has been confirmed, or was plugged before the last
    /// shrink.
    fn is_confirmed(&self) -> bool {
        self.plug_filter
            .pending_since()
            .is_none_or(|since| self.resize.requested_unplug_at >= Some(since))
    }

    /// Restarts the tracker because a driver has become ready. Failures under another driver or
    /// without a driver do not count for this driver. The filter starts from the sizes before this
    /// driver was ready, because memory that it has plugged is not confirmed yet.
    fn restart_for_driver(&mut self, now: TimeMs) {
        self.progress_at = now;
        self.plug_filter =
            PlugFilter::of(self.sizes.requested_bytes, self.sizes.plugged_bytes, now);
        self.grow = RequestLimit::default();
        self.shrink = RequestLimit::default();
        self.is_retained = false;
    }

    /// Returns the replacement for a request that the guest has failed to follow for too long. A
    /// grow is halved, because the driver retries only after the request changes. In the end, it is
    /// withdrawn down to the plugged size. A shrink is withdrawn immediately, because the guest
    /// uses the memory. The next shrink is smaller.
    ///
    /// A balloon is inflated in pages, so the plugged size may not be a multiple of the block size,
    /// but requests must be. A withdrawn shrink leaves the whole block to the guest. A grow that is
    /// incomplete by less than a block counts as reached.
    pub(super) fn reduce_failed_request(
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
        let limit = if growing { &mut self.grow } else { &mut self.shrink };
        limit.record_failure(half, zone, rules, now, growing);
        // The failure stands even if memory that was plugged earlier is confirmed later.
        self.plug_filter.confirm_all();
        self.progress_at = now;
        self.is_retained = false;
        let left = fallback_bytes(zone, half);
        self.resize.withdrawn_bytes = (left == zone.plugged_bytes).then_some(left);
        Some(left)
    }

    /// Returns true if the guest has failed to follow the request for too long.
    pub(super) fn has_failed(&self, zone: &ZoneSizes, rules: &Rules, now: TimeMs) -> bool {
        let is_nearly_complete = (0..zone.block_bytes).contains(&zone.outstanding_grow_bytes());
        self.is_stuck(zone, rules, now)
            && !(is_nearly_complete && zone.requested_bytes > zone.plugged_bytes)
    }

    /// Returns true if the request has made no progress for too long.
    pub(super) fn is_stuck(&self, zone: &ZoneSizes, rules: &Rules, now: TimeMs) -> bool {
        let progress_at = self
            .plug_filter
            .pending_since()
            .map_or(self.progress_at, |since| since.max(self.progress_at));
        zone.requested_bytes != zone.plugged_bytes && now.since(progress_at) >= rules.progress_ms
    }

    /// Largest size that may be requested, considering failures of the guest's driver.
    pub(super) fn ceiling_bytes(&self, zone: &ZoneSizes, now: TimeMs) -> u64 {
        match self.grow.cap_bytes(now) {
            Some(cap) => self.plug_filter.confirmed_bytes(zone.plugged_bytes).saturating_add(cap),
            None => u64::MAX,
        }
    }

    /// Largest size that may be requested, considering failures of the host.
    pub(super) fn host_ceiling_bytes(&self, zone: &ZoneSizes, now: TimeMs) -> u64 {
        match self.host.cap_bytes(now) {
            Some(cap) => zone.plugged_bytes.saturating_add(cap),
            None => u64::MAX,
        }
    }

    /// Largest amount that one step may remove, considering failures of the guest's driver.
    pub(super) fn shrink_cap_bytes(&self, now: TimeMs) -> u64 {
        self.shrink.cap_bytes(now).unwrap_or(u64::MAX)
    }
}

/// Fallback request after a timeout. The fallback is the plugged size, plus `more_bytes` for a
/// grow.
pub(super) fn fallback_bytes(zone: &ZoneSizes, more_bytes: u64) -> u64 {
    let left = match zone.requested_bytes > zone.plugged_bytes {
        true => round_down(zone.plugged_bytes + more_bytes, zone.block_bytes),
        false => round_up(zone.plugged_bytes, zone.block_bytes),
    };
    let most = round_down(zone.max_bytes, zone.block_bytes);
    left.max(round_up(zone.floor_bytes, zone.block_bytes)).min(most)
}

impl RequestLimit {
    fn record_failure(
        &mut self,
        half_bytes: u64,
        zone: &ZoneSizes,
        rules: &Rules,
        now: TimeMs,
        skips_pause: bool,
    ) {
        self.cap_bytes = Some(half_bytes.max(zone.block_bytes));
        if skips_pause && half_bytes > 0 {
            return;
        }
        self.pause(rules, now);
    }

    fn pause(&mut self, rules: &Rules, now: TimeMs) {
        self.pause_ms =
            self.pause_ms.saturating_mul(2).clamp(rules.progress_ms, rules.max_retry_ms);
        self.retry_at = Some(now + self.pause_ms);
    }

    fn cap_bytes(&self, now: TimeMs) -> Option<u64> {
        match self.retry_at {
            Some(at) if now < at => Some(0),
            _ => self.cap_bytes,
        }
    }
}
