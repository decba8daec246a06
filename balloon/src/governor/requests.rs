//! Requests of clients: sizes of zones, and changes of the governor.

use super::{Change, Effects, FollowUp, Governor, Note, Request, ResizeTarget};
use crate::controller::Step;
use crate::{HostView, TimeMs, ZoneId};

impl Governor {
    /// Sizes a zone by hand and pins it.
    pub(super) fn resize(
        &mut self,
        target: ResizeTarget,
        host: &HostView,
        now: TimeMs,
        effects: &mut Effects,
    ) {
        self.observe(host, now, effects);
        let (zone, size_bytes) = (target.zone(), target.size_bytes());
        let index = host.zones.iter().position(|sizes| sizes.id == zone);
        let index = index.unwrap_or_else(|| panic!("{zone} is not a zone of the VM"));
        let sizes = &host.zones[index];
        self.controller.pin(zone);
        self.shortage.abandoned();
        self.audit.sized_by_hand(index, &host.zones, now);
        // If the device has lowered the last request, the same size is a new request.
        if size_bytes != sizes.requested_bytes + sizes.held_bytes || sizes.lowered_by().is_some() {
            effects.notes.push(Note::Resized(zone, size_bytes));
            self.controller.set_goal(zone, size_bytes);
            self.follow_goals(host, now, effects);
        }
        self.note_reached(effects);
    }

    /// Requests as much of the goals as the guest can describe. Returns true if that is more than
    /// before. The timeout of a resize begins when the new sizes are observed.
    pub(super) fn follow_goals(
        &mut self,
        host: &HostView,
        now: TimeMs,
        effects: &mut Effects,
    ) -> bool {
        let steps = self.controller.next_steps(host, now);
        let is_sizing = !steps.is_empty();
        if is_sizing {
            effects.next = Some(FollowUp::Observe);
        }
        effects.requests.extend(steps.into_iter().map(|step| {
            let Step { zone, requested_bytes, goal_bytes } = step;
            Request::Step { zone, size_bytes: requested_bytes, goal_bytes }
        }));
        is_sizing
    }

    /// Changes what the governor does.
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

    /// Ends the goals of one zone or of all zones at the size that is requested now, because the
    /// controller has dropped them.
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
    use crate::{Tier, ZoneSizes};

    fn step(event: Event) {
        let host = HostView::default();
        let mut governor =
            Governor::new(Policy::default(), Rules::default(), false, &host, TimeMs(0))
                .expect("defaults");
        governor.effects_of(event, &host, TimeMs(0));
    }

    #[test]
    #[should_panic(expected = "zone7 is not a zone of the VM")]
    fn resize_of_unknown_zone_violates_an_invariant() {
        let sizes = ZoneSizes::empty(7, Tier::Pm, 0);
        step(Event::Resize(ResizeTarget::parse(&sizes, 0).unwrap()));
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
}
