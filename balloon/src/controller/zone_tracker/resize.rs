//! Progress of a resize, for its status and for reminders to the guest's driver.
//!
//! A resize is stuck if it has made no progress for `patience_ms` (parameter `progress` of the
//! rules). The guest's driver is then reminded.

use serde::{Deserialize, Serialize};

use super::ZoneTracker;
use crate::{
    DriverState, Shortfall, TimeMs, UNSUPPORTED_DRIVER, UNSUPPORTED_DRIVER_REASON, ZoneSizes,
};

/// Longest time between two reminders. It equals the default of `max_retry`, after which a
/// withdrawn request is repeated.
const MAX_REMINDER_INTERVAL_MS: u64 = 60_000;

/// Minimum time between two restarts because of a driver. A guest can reset a device at any rate.
const DRIVER_RESTART_INTERVAL_MS: u64 = 60_000;

/// Times of the last changes, and flags for results that have already been reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Resize {
    /// Time of the last request or of the last change of a size, except changes that were undone.
    changed_at: TimeMs,
    reminded_at: TimeMs,
    /// Number of reminders since the last change.
    reminders: u32,
    /// Last time at which the driver became ready and the time to follow the request started again.
    driver_ready_at: Option<TimeMs>,
    /// Time of the last unplug on request. The memory that is left was plugged before it.
    pub requested_unplug_at: Option<TimeMs>,
    /// True if the last requested size has not been reached yet.
    is_awaited: bool,
    /// Plugged size to which rule 5 has just withdrawn the request, if it differed from the
    /// requested size.
    pub withdrawn_bytes: Option<u64>,
    /// True if it was reported that the guest has no room for the page descriptors of the last
    /// request.
    is_held_reported: bool,
}

/// State of a resize.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "state", content = "reason")]
pub enum ResizeStatus {
    /// The plugged size equals the requested size.
    #[default]
    Reached,
    /// The guest is following the request.
    Pending,
    /// The guest's driver is not ready.
    NoDriver,
    /// The guest makes no progress. The value is the reason, as far as it is known.
    Stuck(String),
}

/// A reminder that should be sent now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reminder {
    /// The first reminder since the last change. It is also logged.
    First,
    /// Another reminder, with no change since the previous one.
    Repeated,
}

impl Resize {
    pub(super) fn new(sizes: &ZoneSizes, now: TimeMs) -> Self {
        Self {
            changed_at: now,
            reminded_at: now,
            reminders: 0,
            driver_ready_at: None,
            requested_unplug_at: None,
            is_awaited: !is_reached(sizes),
            withdrawn_bytes: None,
            is_held_reported: false,
        }
    }

    fn record_change(&mut self, now: TimeMs) {
        (self.changed_at, self.reminders) = (now, 0);
    }
}

impl ZoneTracker {
    /// Returns true if the guest's driver has become ready since the last observation. The time to
    /// follow the request then starts again, at most once per [`DRIVER_RESTART_INTERVAL_MS`].
    pub(super) fn observe_driver(&mut self, zone: &ZoneSizes, now: TimeMs) -> bool {
        let became_ready = zone.driver == DriverState::Ready
            && self.sizes.driver != DriverState::Ready
            && self
                .resize
                .driver_ready_at
                .is_none_or(|at| now.since(at) >= DRIVER_RESTART_INTERVAL_MS);
        if became_ready {
            self.resize.driver_ready_at = Some(now);
            self.restart_for_driver(now);
            self.resize.record_change(now);
        }
        became_ready
    }

    /// Returns true if the resize has just ended: the requested size is plugged and has remained
    /// plugged, and the host has not lowered it. `has_unplugged` is true if memory was unplugged,
    /// either on request or after its size had been reached.
    pub(super) fn observe_resize(
        &mut self,
        before: &ZoneSizes,
        has_unplugged: bool,
        confirmed_since: Option<TimeMs>,
        now: TimeMs,
    ) -> bool {
        let (sizes, resize) = (&self.sizes, &mut self.resize);
        let goal_bytes = |sizes: &ZoneSizes| sizes.requested_bytes + sizes.held_bytes;
        resize.is_held_reported &= goal_bytes(sizes) == goal_bytes(before) && sizes.held_bytes > 0;
        resize.is_awaited |= sizes.requested_bytes != before.requested_bytes && !is_reached(sizes);
        // A withdrawn request does not count as reached, even if a supported driver is loaded
        // later.
        let is_withdrawn_by_plan = resize.withdrawn_bytes.take() == Some(sizes.requested_bytes);
        resize.is_awaited &= !sizes.is_withdrawn && !is_withdrawn_by_plan;
        if let Some(since) = confirmed_since.filter(|since| *since >= resize.changed_at) {
            resize.record_change(since);
        }
        // Plugged memory counts after it has remained plugged for some time. Loading or unloading a
        // driver is not progress.
        let (plugged_bytes, driver) = (sizes.plugged_bytes, sizes.driver);
        if *sizes != (ZoneSizes { plugged_bytes, driver, ..*before }) || has_unplugged {
            resize.record_change(now);
        }
        let has_ended = self.resize.is_awaited && self.is_confirmed() && is_reached(&self.sizes);
        self.resize.is_awaited &= !has_ended;
        has_ended
    }

    /// Returns the time of the last change and the number of reminders since. Memory that was
    /// plugged just now counts as a change, although it may be unplugged again.
    fn last_change(&self) -> (TimeMs, u32) {
        let Resize { changed_at, reminders, .. } = self.resize;
        match self.plug_filter.pending_since() {
            Some(since) if since > changed_at => (since, 0),
            _ => (changed_at, reminders),
        }
    }

    /// Returns the reminder to send now, if any. The first one is sent after `patience_ms` without
    /// progress, and each pause is twice as long as the previous one.
    pub fn remind(&mut self, patience_ms: u64, now: TimeMs) -> Option<Reminder> {
        let (changed_at, reminders) = self.last_change();
        let doubled_ms = patience_ms.saturating_mul(1 << reminders.min(31));
        let pause_ms = doubled_ms.min(MAX_REMINDER_INTERVAL_MS.max(patience_ms));
        let is_due = self.is_late(patience_ms, now)
            && now.since(self.resize.reminded_at.max(changed_at)) >= pause_ms
            && self.sizes.driver == DriverState::Ready;
        if !is_due {
            return None;
        }
        self.resize.reminded_at = now;
        self.resize.reminders = reminders.saturating_add(1);
        Some(if reminders == 0 { Reminder::First } else { Reminder::Repeated })
    }

    /// Returns true once for each request that has waited too long for room for its page
    /// descriptors.
    pub fn is_held_report_due(&mut self, patience_ms: u64, now: TimeMs) -> bool {
        let is_new = self.is_held(patience_ms, now) && !self.resize.is_held_reported;
        self.resize.is_held_reported |= is_new;
        is_new
    }

    fn is_held(&self, patience_ms: u64, now: TimeMs) -> bool {
        let ZoneSizes { requested_bytes, plugged_bytes, held_bytes, .. } = self.sizes;
        held_bytes > 0
            && plugged_bytes == requested_bytes
            && now.since(self.last_change().0) >= patience_ms
    }

    /// Returns true if the zone has made no progress for `patience_ms`.
    pub fn is_late(&self, patience_ms: u64, now: TimeMs) -> bool {
        self.sizes.plugged_bytes != self.sizes.requested_bytes
            && now.since(self.last_change().0) >= patience_ms
    }

    /// Returns the state of the resize. `offline_bytes` is the memory on the zone's node that was
    /// not online in the agent's last report.
    pub fn status(&self, offline_bytes: u64, patience_ms: u64, now: TimeMs) -> ResizeStatus {
        let ZoneSizes { requested_bytes, plugged_bytes, held_bytes, driver, shortfall, .. } =
            self.sizes;
        let stuck_for_host = |Shortfall { reason, wanted_bytes }| {
            let text = format!(
                "{reason}: the host cannot provide the {wanted_bytes} bytes, only {requested_bytes}"
            );
            ResizeStatus::Stuck(text)
        };
        if self.sizes.is_withdrawn {
            return ResizeStatus::Stuck(format!(
                "{UNSUPPORTED_DRIVER_REASON}: {UNSUPPORTED_DRIVER}"
            ));
        }
        if self.is_held(patience_ms, now) {
            return ResizeStatus::Stuck(format!(
                "descriptors: the guest lacks DRAM for the page descriptors of the other {held_bytes} bytes"
            ));
        }
        if plugged_bytes == requested_bytes && held_bytes > 0 {
            return ResizeStatus::Pending;
        }
        if plugged_bytes == requested_bytes {
            return shortfall.map_or(ResizeStatus::Reached, stuck_for_host);
        }
        if !self.is_late(patience_ms, now) {
            return ResizeStatus::Pending;
        }
        if driver != DriverState::Ready {
            return ResizeStatus::NoDriver;
        }
        if let Some(shortfall) = shortfall {
            return stuck_for_host(shortfall);
        }
        ResizeStatus::Stuck(if plugged_bytes > requested_bytes {
            "the guest has pages in these blocks that it cannot move".to_owned()
        } else if offline_bytes > 0 {
            format!("the guest has {offline_bytes} bytes of plugged memory that is not online")
        } else {
            "the guest plugs no more memory, possibly because it lacks memory for page descriptors"
                .to_owned()
        })
    }
}

pub(super) fn is_reached(sizes: &ZoneSizes) -> bool {
    sizes.plugged_bytes == sizes.requested_bytes
        && sizes.held_bytes == 0
        && sizes.lowered_by().is_none()
}

#[cfg(test)]
mod tests {
    use crate::Tier;
    use crate::controller::Rules;
    use crate::plug_filter::CONFIRM_MS;

    use super::*;

    /// Default of the parameter `progress`.
    const PATIENCE_MS: u64 = 5_000;

    fn tracker(sizes: ZoneSizes, now: TimeMs) -> ZoneTracker {
        ZoneTracker::new(&sizes, now)
    }

    impl ZoneTracker {
        /// Returns true if the requested size has just been reached.
        fn reaches(&mut self, sizes: ZoneSizes, now: TimeMs) -> bool {
            self.observe(&sizes, now).is_reached
        }
    }

    fn sizes(requested_bytes: u64, plugged_bytes: u64, is_ready: bool) -> ZoneSizes {
        ZoneSizes {
            block_bytes: 2,
            requested_bytes,
            plugged_bytes,
            driver: if is_ready { DriverState::Ready } else { DriverState::Absent },
            ..ZoneSizes::empty(0, Tier::Dram, 100)
        }
    }

    #[test]
    fn size_lowered_by_host_is_stuck_and_never_reached() {
        let shortfall = Some(Shortfall { reason: "pool-full", wanted_bytes: 10 });
        let lowered = |plugged| ZoneSizes { shortfall, ..sizes(6, plugged, true) };
        let mut zone = tracker(sizes(10, 4, true), TimeMs(0));
        assert!(!zone.reaches(lowered(4), TimeMs(100)));
        assert_eq!(zone.status(0, PATIENCE_MS, TimeMs(100)), ResizeStatus::Pending);
        assert!(!zone.reaches(lowered(6), TimeMs(200)));
        let ResizeStatus::Stuck(reason) = zone.status(0, PATIENCE_MS, TimeMs(200)) else {
            panic!("{zone:?}")
        };
        assert!(reason.starts_with("pool-full: ") && reason.contains("10 bytes"), "{reason}");
        // The driver has already done all it can, so it is not reminded.
        assert_eq!(zone.remind(PATIENCE_MS, TimeMs(60_000)), None);
        // Another request is made after the host's shortfall has ended.
        assert!(!zone.reaches(sizes(10, 6, true), TimeMs(60_000)));
        assert!(!zone.reaches(sizes(10, 10, true), TimeMs(60_100)));
        assert!(zone.reaches(sizes(10, 10, true), TimeMs(61_100)));
        assert_eq!(zone.status(0, PATIENCE_MS, TimeMs(60_100)), ResizeStatus::Reached);
    }

    #[test]
    fn request_withdrawn_for_refused_driver_is_never_reached() {
        let mut zone = tracker(sizes(0, 0, false), TimeMs(0));
        assert!(!zone.reaches(sizes(10, 0, false), TimeMs(0)));
        let driver = DriverState::Unsupported;
        let withdrawn = ZoneSizes { driver, is_withdrawn: true, ..sizes(0, 0, false) };
        // The request is not reached when the driver is refused, nor when a newer driver is loaded.
        let observations = [
            (withdrawn, 100),
            (withdrawn, 60_000),
            (sizes(0, 0, true), 60_100),
            (sizes(0, 0, true), 70_000),
        ];
        for (sizes, now) in observations {
            assert!(!zone.reaches(sizes, TimeMs(now)), "{now}");
        }
        assert_eq!(zone.status(0, PATIENCE_MS, TimeMs(70_000)), ResizeStatus::Reached);
    }

    #[test]
    fn resize_is_pending_while_it_makes_progress() {
        let mut zone = tracker(sizes(0, 0, true), TimeMs(0));
        assert_eq!(zone.status(0, PATIENCE_MS, TimeMs(0)), ResizeStatus::Reached);
        assert!(!zone.reaches(sizes(10, 0, true), TimeMs(100_000)));
        assert_eq!(zone.status(0, PATIENCE_MS, TimeMs(104_999)), ResizeStatus::Pending);
        assert!(!zone.reaches(sizes(10, 2, true), TimeMs(104_999)));
        assert_eq!(zone.status(0, PATIENCE_MS, TimeMs(109_998)), ResizeStatus::Pending);
        assert!(!zone.reaches(sizes(10, 10, true), TimeMs(109_998)));
        assert!(zone.reaches(sizes(10, 10, true), TimeMs(110_998)), "the memory has stayed");
        assert_eq!(zone.status(0, PATIENCE_MS, TimeMs(200_000)), ResizeStatus::Reached);
    }

    #[test]
    fn size_is_reached_once_although_guest_leaves_it_again() {
        let mut zone = tracker(sizes(0, 0, true), TimeMs(0));
        let plugged =
            [(10, 0), (10, 10), (10, 8), (10, 10), (10, 8), (10, 10), (12, 10), (12, 8), (12, 12)];
        let mut now = 0;
        let reached = plugged.map(|(requested, plugged)| {
            now += 8 * CONFIRM_MS;
            let at_once = zone.reaches(sizes(requested, plugged, true), TimeMs(now));
            let then = zone.reaches(sizes(requested, plugged, true), TimeMs(now + 4 * CONFIRM_MS));
            (at_once || then).then_some(requested)
        });
        assert_eq!(reached.into_iter().flatten().collect::<Vec<_>>(), [10, 12]);
    }

    #[test]
    fn resize_without_progress_is_stuck_with_reason() {
        let stuck = |sizes, offline| {
            tracker(sizes, TimeMs(0)).status(offline, PATIENCE_MS, TimeMs(PATIENCE_MS))
        };
        assert_eq!(stuck(sizes(10, 0, false), 0), ResizeStatus::NoDriver);
        let reason = |status| match status {
            ResizeStatus::Stuck(reason) => reason,
            other => panic!("{other:?}"),
        };
        assert!(reason(stuck(sizes(0, 10, true), 0)).contains("cannot move"));
        assert!(reason(stuck(sizes(10, 0, true), 5)).contains("5 bytes"));
        assert!(reason(stuck(sizes(10, 0, true), 0)).contains("page descriptors"));
    }

    #[test]
    fn driver_that_flaps_is_waited_for_at_most_once_a_minute() {
        let mut zone = tracker(sizes(10, 0, false), TimeMs(0));
        let mut came = Vec::new();
        for now in (0..150_000).step_by(1000) {
            let flapping = sizes(10, 0, now % 2000 == 1000);
            if zone.observe(&flapping, TimeMs(now)).driver_became_ready {
                came.push(now);
            }
            let waited_ms = now - came.last().copied().unwrap_or(0);
            assert_eq!(zone.is_late(PATIENCE_MS, TimeMs(now)), waited_ms >= PATIENCE_MS, "{now}");
        }
        assert_eq!(came, [1_000, 61_000, 121_000]);
    }

    #[test]
    fn request_that_rule_5_withdraws_is_not_reported_as_reached() {
        let mut zone = tracker(sizes(10, 0, true), TimeMs(0));
        zone.reaches(sizes(10, 8, true), TimeMs(100));
        let rules = Rules { progress_ms: 900, ..Rules::default() };
        let stuck = sizes(10, 8, true);
        assert_eq!(
            zone.reduce_failed_request(&stuck, &rules, TimeMs(1_050)),
            Some(8),
            "half of it is less than a block"
        );
        for now in [1_060, 1_100, 5_000] {
            assert!(!zone.reaches(sizes(8, 8, true), TimeMs(now)), "{now}");
        }
        // The next request can be reached as usual.
        assert!(!zone.reaches(sizes(12, 8, true), TimeMs(6_000)));
        assert!(!zone.reaches(sizes(12, 12, true), TimeMs(6_100)));
        assert!(zone.reaches(sizes(12, 12, true), TimeMs(6_100 + CONFIRM_MS)));
    }

    #[test]
    fn withdrawn_request_that_is_kept_for_the_floor_is_still_awaited() {
        let mut zone = tracker(sizes(10, 0, true), TimeMs(0));
        zone.reaches(sizes(10, 8, true), TimeMs(100));
        let rules = Rules::default();
        assert_eq!(
            zone.reduce_failed_request(&sizes(10, 8, true), &rules, TimeMs(60_000)),
            Some(8)
        );
        zone.retain(10);
        assert!(!zone.reaches(sizes(10, 10, true), TimeMs(60_010)));
        assert!(zone.reaches(sizes(10, 10, true), TimeMs(60_010 + CONFIRM_MS)));
    }

    #[test]
    fn memory_plugged_while_the_driver_becomes_ready_is_reached_only_once_it_stays() {
        let mut zone = tracker(sizes(10, 0, false), TimeMs(0));
        assert!(!zone.reaches(sizes(10, 10, true), TimeMs(500)));
        assert!(!zone.reaches(sizes(10, 0, true), TimeMs(510)), "the memory was unplugged again");
        assert!(!zone.reaches(sizes(10, 10, true), TimeMs(600)));
        assert!(zone.reaches(sizes(10, 10, true), TimeMs(600 + CONFIRM_MS)));
    }

    #[test]
    fn memory_unplugged_at_once_is_neither_reached_nor_progress() {
        let mut zone = tracker(sizes(0, 0, true), TimeMs(0));
        zone.reaches(sizes(10, 0, true), TimeMs(0));
        let mut reminders = Vec::new();
        for now in (0..=80_000).step_by(10) {
            if let Some(reminder) = zone.remind(PATIENCE_MS, TimeMs(now)) {
                reminders.push((now, reminder));
                // The guest tries to plug the memory, but has no memory for page descriptors.
                assert!(!zone.reaches(sizes(10, 10, true), TimeMs(now)));
            } else {
                assert!(!zone.reaches(sizes(10, 0, true), TimeMs(now)));
            }
        }
        let again = [15_000, 35_000, 75_000].map(|now| (now, Reminder::Repeated));
        assert_eq!(reminders, [&[(5_000, Reminder::First)], &again[..]].concat());
        let ResizeStatus::Stuck(_) = zone.status(0, PATIENCE_MS, TimeMs(80_000)) else {
            panic!("{zone:?}")
        };
        // Memory that remains plugged is progress.
        assert!(!zone.reaches(sizes(10, 8, true), TimeMs(80_000)));
        assert!(!zone.is_late(PATIENCE_MS, TimeMs(84_990)));
        assert_eq!(zone.remind(PATIENCE_MS, TimeMs(85_000)), Some(Reminder::First));
    }

    #[test]
    fn reminders_follow_patience_of_rule() {
        let reminded = |patience_ms: u64| {
            let mut zone = tracker(sizes(10, 0, true), TimeMs(0));
            let times = (0..=200_000).step_by(100).map(TimeMs);
            times
                .filter(|now| zone.remind(patience_ms, *now).is_some())
                .map(|now| now.0)
                .collect::<Vec<_>>()
        };
        assert_eq!(reminded(30_000), [30_000, 90_000, 150_000]);
        assert_eq!(reminded(90_000), [90_000, 180_000], "no reminder before the deadline");
        assert_eq!(reminded(1_000)[..4], [1_000, 3_000, 7_000, 15_000]);
        assert_eq!(reminded(PATIENCE_MS)[..5], [5_000, 15_000, 35_000, 75_000, 135_000]);
        let mut without_driver = tracker(sizes(10, 0, false), TimeMs(0));
        assert_eq!(without_driver.remind(PATIENCE_MS, TimeMs(60_000)), None);
        let zone = tracker(sizes(10, 0, true), TimeMs(0));
        assert_eq!(zone.status(0, 30_000, TimeMs(29_999)), ResizeStatus::Pending);
        assert!(matches!(zone.status(0, 30_000, TimeMs(30_000)), ResizeStatus::Stuck(_)));
        // The patience may be changed during a resize.
        assert!(zone.is_late(PATIENCE_MS, TimeMs(29_999)) && !zone.is_late(30_000, TimeMs(29_999)));
    }

    #[test]
    fn memory_that_stays_does_not_confirm_memory_plugged_later() {
        let mut zone = tracker(sizes(20, 0, true), TimeMs(0));
        zone.reaches(sizes(20, 10, true), TimeMs(10));
        // The rest is plugged. The next observation follows just after the first part has been
        // plugged for long enough.
        for (plugged, now) in [(20, 1_000), (20, 1_010), (10, 1_020)] {
            assert!(!zone.reaches(sizes(20, plugged, true), TimeMs(now)), "reached at {now}");
        }
        assert_eq!(zone.remind(PATIENCE_MS, TimeMs(5_009)), None);
        assert_eq!(
            zone.remind(PATIENCE_MS, TimeMs(5_010)),
            Some(Reminder::First),
            "5 s since the first part was plugged"
        );
        // The memory that is plugged now also has to remain plugged for a second.
        assert!(!zone.reaches(sizes(20, 18, true), TimeMs(6_000)));
        assert!(!zone.reaches(sizes(20, 20, true), TimeMs(6_990)));
        assert!(!zone.reaches(sizes(20, 20, true), TimeMs(7_989)));
        assert!(zone.reaches(sizes(20, 20, true), TimeMs(7_990)));
    }

    #[test]
    fn memory_unplugged_between_rare_observations_is_no_progress() {
        let mut zone = tracker(sizes(10, 0, true), TimeMs(0));
        for now in (0..5_000).step_by(1_200) {
            let plugged = if now % 2_400 == 0 { 10 } else { 0 };
            assert!(!zone.reaches(sizes(10, plugged, true), TimeMs(now)), "reached at {now}");
        }
        zone.reaches(sizes(10, 0, true), TimeMs(5_000));
        assert!(zone.is_late(PATIENCE_MS, TimeMs(5_000)));
    }

    #[test]
    fn replugging_of_memory_unplugged_without_request_is_no_progress() {
        let mut zone = tracker(sizes(10, 0, true), TimeMs(0));
        for now in (0..8_000).step_by(200) {
            zone.reaches(sizes(10, if now % 2_000 < 1_400 { 8 } else { 6 }, true), TimeMs(now));
            assert_eq!(
                zone.is_late(PATIENCE_MS, TimeMs(now)),
                now >= 5_000,
                "{now}: the memory was plugged first and stayed"
            );
        }
        // A size larger than all earlier ones is progress.
        assert!(!zone.reaches(sizes(10, 9, true), TimeMs(8_000)));
        assert!(!zone.is_late(PATIENCE_MS, TimeMs(12_900)));
    }

    #[test]
    fn reached_size_that_guest_leaves_is_awaited_again() {
        let mut zone = tracker(sizes(10, 0, true), TimeMs(0));
        zone.reaches(sizes(10, 10, true), TimeMs(100));
        assert!(zone.reaches(sizes(10, 10, true), TimeMs(1_100)));
        assert!(!zone.reaches(sizes(10, 4, true), TimeMs(60_000)));
        assert_eq!(zone.status(0, PATIENCE_MS, TimeMs(64_999)), ResizeStatus::Pending);
        assert!(zone.is_late(PATIENCE_MS, TimeMs(65_000)));
        assert!(!zone.reaches(sizes(10, 10, true), TimeMs(65_000)), "the size was already reached");
    }

    #[test]
    fn shrink_is_reached_at_once() {
        let mut zone = tracker(sizes(10, 0, true), TimeMs(0));
        zone.reaches(sizes(10, 10, true), TimeMs(100));
        assert!(!zone.reaches(sizes(4, 10, true), TimeMs(200)));
        assert!(zone.reaches(sizes(4, 4, true), TimeMs(300)));
    }

    #[test]
    fn requested_unplug_is_progress() {
        let mut zone = tracker(sizes(0, 0, true), TimeMs(0));
        zone.reaches(sizes(10, 0, true), TimeMs(0));
        zone.reaches(sizes(10, 10, true), TimeMs(100));
        zone.reaches(sizes(4, 10, true), TimeMs(200));
        assert!(!zone.reaches(sizes(4, 6, true), TimeMs(5_000)));
        assert!(!zone.is_late(PATIENCE_MS, TimeMs(9_999)));
        assert!(zone.reaches(sizes(4, 4, true), TimeMs(9_999)), "a shrink is reached at once");
    }
}
