//! Requests of clients, which resize zones or change the governor.

use foreshore_types::size::Size;
use thiserror::Error;

use super::{Change, Effects, FollowUp, Governor, Note, Request};
use crate::controller::GoalStep;
use crate::{DriverState, HostView, TimeMs, ZoneId, ZoneSizes};

/// Requested size that is valid for its zone: a multiple of the block size, within the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResizeTarget {
    zone: ZoneId,
    size_bytes: u64,
}

/// Reason why a zone cannot be resized to the requested size.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ResizeTargetError {
    /// The requested size exceeds the zone's region.
    #[error("{} exceeds the maximum {}", Size(*size_bytes), Size(*max_bytes))]
    TooLarge {
        /// Requested size.
        size_bytes: u64,
        /// Size of the region.
        max_bytes: u64,
    },
    /// The size is not a multiple of the block size.
    #[error("{} is not a multiple of the block size {}", Size(*size_bytes), Size(*block_bytes))]
    NotMultiple {
        /// Requested size.
        size_bytes: u64,
        /// Size of a block.
        block_bytes: u64,
    },
    /// The device has refused the guest's driver.
    #[error("{}", crate::UNSUPPORTED_DRIVER)]
    UnsupportedDriver,
}

impl ResizeTarget {
    /// Checks that `zone` can be resized to `size_bytes`.
    pub fn parse(zone: &ZoneSizes, size_bytes: u64) -> Result<Self, ResizeTargetError> {
        let ZoneSizes { id, max_bytes, block_bytes, .. } = *zone;
        if size_bytes > max_bytes {
            return Err(ResizeTargetError::TooLarge { size_bytes, max_bytes });
        }
        if !size_bytes.is_multiple_of(block_bytes) {
            return Err(ResizeTargetError::NotMultiple { size_bytes, block_bytes });
        }
        let target = Self { zone: id, size_bytes };
        if !target.has_driver(zone) {
            return Err(ResizeTargetError::UnsupportedDriver);
        }
        Ok(target)
    }

    /// Returns false if the requested size needs a driver that the device has refused. Unlike the
    /// bounds of the size, the driver can change at any time.
    pub fn has_driver(&self, zone: &ZoneSizes) -> bool {
        zone.driver != DriverState::Unsupported || self.size_bytes == zone.plugged_bytes
    }

    /// Zone to resize.
    pub fn zone(&self) -> ZoneId {
        self.zone
    }

    /// Requested size.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }
}

impl Governor {
    /// Resizes a zone for a client, and pins it.
    pub(super) fn resize(
        &mut self,
        target: ResizeTarget,
        host: &HostView,
        now: TimeMs,
        effects: &mut Effects,
    ) {
        self.observe(host, now, effects);
        let (zone, size_bytes) = (target.zone(), target.size_bytes());
        self.controller.pin(zone);
        let index = host.zones.iter().position(|sizes| sizes.id == zone).expect("was observed");
        let sizes = &host.zones[index];
        self.shortage.abandon();
        self.audit.resized_by_client(index, &host.zones, now);
        // If the device has lowered the last request, requesting the same size again is not a
        // repetition.
        if size_bytes != sizes.requested_bytes + sizes.held_bytes || sizes.lowered_by().is_some() {
            effects.notes.push(Note::Resized(zone, size_bytes));
            self.controller.set_goal(zone, size_bytes);
            self.follow_goals(host, now, effects);
        }
        self.note_reached(effects);
    }

    /// Requests the next steps towards the sizes that clients requested, as far as the guest has
    /// room for page descriptors. Returns true if a step was requested. The timeout of a resize
    /// starts when the new sizes are observed.
    pub(super) fn follow_goals(
        &mut self,
        host: &HostView,
        now: TimeMs,
        effects: &mut Effects,
    ) -> bool {
        let steps = self.controller.next_steps(host, now);
        let changes_sizes = !steps.is_empty();
        if changes_sizes {
            effects.next = Some(FollowUp::Observe);
        }
        effects.requests.extend(steps.into_iter().map(|step| {
            let GoalStep { zone, requested_bytes, goal_bytes } = step;
            Request::Step { zone, size_bytes: requested_bytes, goal_bytes }
        }));
        changes_sizes
    }

    /// Changes the governor's settings.
    pub(super) fn change(&mut self, change: Change, host: &HostView, effects: &mut Effects) {
        let Change { policy, rules, dry_run, resume, paused } = change;
        // The caller has validated all values.
        if let Some(policy) = policy {
            self.controller.set_policy(policy).unwrap_or_else(|err| panic!("policy: {err}"));
            self.counters.policies.insert(self.controller.policy().name());
        }
        if let Some(rules) = rules {
            self.controller.set_rules(rules).unwrap_or_else(|err| panic!("rules: {err}"));
        }
        if let Some(dry_run) = dry_run {
            self.controller.set_dry_run(dry_run);
        }
        if let Some(zone) = resume {
            self.controller.resume(zone);
            self.end_goals(zone, host, effects);
        }
        match paused {
            Some(true) => self.controller.pause(),
            Some(false) => self.controller.unpause(),
            None => {}
        }
    }

    /// Ends the goals of one zone or of all zones, because the controller has dropped them. The
    /// requested size at this time becomes final.
    fn end_goals(&self, zone: Option<ZoneId>, host: &HostView, effects: &mut Effects) {
        let is_ended = |id| zone.is_none_or(|zone| zone == id);
        let held = host.zones.iter().filter(|zone| is_ended(zone.id) && zone.held_bytes > 0);
        effects.requests.extend(held.map(|zone| {
            let bytes = zone.requested_bytes;
            Request::Step { zone: zone.id, size_bytes: bytes, goal_bytes: bytes }
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::Rules;
    use crate::governor::Event;
    use crate::policy::{Policy, fixed};
    use crate::{MIB, Tier};

    fn step(event: Event) {
        let host = HostView::default();
        let mut governor =
            Governor::new(Policy::default(), Rules::default(), false, &host, TimeMs(0))
                .expect("defaults");
        governor.effects_of(event, &host, TimeMs(0));
    }

    fn unknown_zone() -> ResizeTarget {
        ResizeTarget::parse(&ZoneSizes::empty(7, Tier::Pm, 0), 0).unwrap()
    }

    #[test]
    #[should_panic(expected = "zone7 is not a zone of the VM")]
    fn resize_of_unknown_zone_violates_an_invariant() {
        step(Event::Resize(unknown_zone()));
    }

    #[test]
    #[should_panic(expected = "zone7 is not a zone of the VM")]
    fn boot_size_of_unknown_zone_violates_an_invariant() {
        step(Event::BootSize(unknown_zone()));
    }

    #[test]
    #[should_panic(expected = "policy: ")]
    fn policy_out_of_range_violates_an_invariant() {
        let policy = Some(Policy::Fixed(fixed::Params { size_bytes: u64::MAX }));
        step(Event::Change(Change { policy, ..Change::default() }));
    }

    #[test]
    #[should_panic(expected = "rules: ")]
    fn rules_out_of_range_violate_an_invariant() {
        let rules = Some(Rules { cool_down_ms: u64::MAX, ..Rules::default() });
        step(Event::Change(Change { rules, ..Change::default() }));
    }

    #[test]
    fn target_is_whole_blocks_within_the_region() {
        let zone = ZoneSizes::empty(1, Tier::Pm, 64 * MIB);
        for size_bytes in [0, 2 * MIB, 64 * MIB] {
            let target = ResizeTarget::parse(&zone, size_bytes).unwrap();
            assert_eq!((target.zone(), target.size_bytes()), (ZoneId(1), size_bytes));
        }
        let max_bytes = 64 * MIB;
        for size_bytes in [max_bytes + 1, max_bytes + 2 * MIB, u64::MAX] {
            let too_large = ResizeTargetError::TooLarge { size_bytes, max_bytes };
            assert_eq!(ResizeTarget::parse(&zone, size_bytes), Err(too_large));
        }
        for size_bytes in [1, MIB, max_bytes - 1] {
            let odd = ResizeTargetError::NotMultiple { size_bytes, block_bytes: 2 * MIB };
            assert_eq!(ResizeTarget::parse(&zone, size_bytes), Err(odd));
        }
    }

    #[test]
    fn zone_with_unsupported_driver_can_only_have_its_plugged_size() {
        let mut zone = ZoneSizes::empty(0, Tier::Pm, 64 * MIB);
        let ready = ResizeTarget::parse(&zone, 2 * MIB).unwrap();
        (zone.driver, zone.plugged_bytes) = (DriverState::Unsupported, 4 * MIB);
        assert!(ResizeTarget::parse(&zone, 4 * MIB).is_ok());
        let refused = Err(ResizeTargetError::UnsupportedDriver);
        assert_eq!(ResizeTarget::parse(&zone, 2 * MIB), refused);
        assert!(!ready.has_driver(&zone));
    }
}
