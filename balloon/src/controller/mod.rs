//! Rules that apply to every policy. Comments use the numbers of the rules in
//! docs/reference/policies.md.

mod allocation;
mod descriptors;
mod goal;
mod recall;
mod rule;
mod rules;
#[cfg(test)]
mod tests;
mod zone_tracker;

use std::borrow::Cow;

use foreshore_proto::{Measure, OnlinePolicy, Report};
pub(crate) use goal::GoalStep;
pub use rules::Rules;
use serde::Serialize;

use self::allocation::{Allocation, Limits, PmRoom};
use self::descriptors::DescriptorLimit;
use self::rule::{HostShortfall, LostReports};
pub use self::zone_tracker::{Reminder, ResizeStatus, ZoneChanges, ZoneTracker};
use crate::plan::{Direction, Plan, Reason, ZoneTarget};
use crate::policy::{Decision, Input, Policy, PolicyState};
use crate::{DriverState, HostView, ParamError, Tier, TimeMs, ZoneId, ZoneSizes};

/// Rule 6: time for which a guest counts as short of memory after the last sign of shortage. The
/// guest grows if its reports stop within this time.
const SHORT_MS: u64 = 1_000;

/// Reason for which the controller is called.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// The guest has sent a report.
    Report(&'a Report),
    /// Time has passed, or a plugged size has changed. Required at least once per second.
    Tick,
}

/// State of one VM's controller, including the state of its policy.
#[derive(Clone, Debug)]
pub struct Controller {
    rules: Rules,
    policy: Policy,
    state: PolicyState,
    paused: bool,
    zones: Vec<ZoneTracker>,
    last: Option<LastReport>,
    grown_at: Option<TimeMs>,
    shrunk_at: Option<TimeMs>,
    cool_down_ms: u64,
    lost_reports: LostReports,
    host_shortfall: HostShortfall,
    descriptors: DescriptorLimit,
    /// True if a dry run has already reported the plan of rule 3 for the present requests.
    are_bounds_reported: bool,
    /// Rule 9: true from the time when the pool's free space is below `low` until it is at `high`.
    is_recalling: bool,
}

/// Values from the last report that later decisions need.
#[derive(Clone, Copy, Debug)]
struct LastReport {
    at: TimeMs,
    decision: Decision,
    /// Last time at which the guest was known to be short of memory, if that was less than
    /// [`SHORT_MS`] ago.
    short_at: Option<TimeMs>,
    online_policy: OnlinePolicy,
}

/// State of the controller, as `vm.pressure` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Status {
    /// Name of the policy.
    pub policy: &'static str,
    /// True if decisions are made but not carried out.
    pub dry_run: bool,
    /// True if the operator has paused the controller.
    pub paused: bool,
    /// Zones that a client has resized. The controller does not change them.
    pub pinned: Vec<ZoneId>,
    /// Time of the last report.
    pub last_report: Option<TimeMs>,
    /// Decision that the policy made after that report.
    pub last_decision: Option<Decision>,
    /// Present cool-down. It exceeds the configured one if a shrink had to be undone.
    pub cool_down_ms: u64,
}

impl Controller {
    /// Creates the controller for a guest that has just started.
    pub fn new(policy: Policy, rules: Rules) -> Result<Self, ParamError> {
        policy.validate()?;
        rules.validate()?;
        Ok(Controller {
            state: policy.initial_state(),
            cool_down_ms: rules.cool_down_ms,
            rules,
            policy,
            paused: false,
            zones: Vec::new(),
            last: None,
            grown_at: None,
            shrunk_at: None,
            lost_reports: LostReports::default(),
            host_shortfall: HostShortfall::default(),
            descriptors: DescriptorLimit::default(),
            are_bounds_reported: false,
            is_recalling: false,
        })
    }

    /// Makes a decision about `event`. Read `host` after the last plan has been carried out.
    pub fn step(&mut self, event: Event<'_>, host: &HostView, now: TimeMs) -> Plan {
        self.observe(host, now);
        self.decide(event, host, now)
    }

    /// Makes a decision about `event`. Call [`Controller::observe`] with the same host first.
    pub(crate) fn decide(&mut self, event: Event<'_>, host: &HostView, now: TimeMs) -> Plan {
        for zone in &mut self.zones {
            zone.resized_by_client = false;
        }
        if let Event::Report(report) = event {
            self.descriptors.observe(report, host, now);
            self.apply_report(report, &self.exclude_failed(host, now), now);
        }
        let mut plan = self.plan(event, host, now);
        plan.dry_run = self.rules.dry_run;
        if !plan.dry_run {
            self.record_plan(&plan, host, now);
        }
        plan
    }

    /// Returns the tracker of a zone.
    pub fn tracker(&self, id: ZoneId) -> Option<&ZoneTracker> {
        self.zones.iter().find(|zone| zone.id == id)
    }

    /// Returns the trackers of all zones, in the order of the host's zones.
    pub(crate) fn trackers_mut(&mut self) -> impl Iterator<Item = &mut ZoneTracker> {
        self.zones.iter_mut()
    }

    /// Returns the amount of memory for which the guest can provide page descriptors (rule 4).
    pub fn describable_bytes(&self, host: &HostView, now: TimeMs) -> u64 {
        self.descriptors.room_bytes(&self.rules, host, now)
    }

    /// Counts a DIMM that is being added to the guest towards the limit of rule 4.
    pub fn add_dimm(&mut self, bytes: u64, now: TimeMs) {
        self.descriptors.add_dimm(bytes, now);
    }

    /// Returns true if a client has resized the zone, so that the controller does not change it.
    pub fn is_pinned(&self, id: ZoneId) -> bool {
        self.zones.iter().any(|zone| zone.id == id && zone.pinned)
    }

    /// Unpins zone `id`. Without `id`, unpins all zones and ends a pause.
    pub fn resume(&mut self, id: Option<ZoneId>) {
        for zone in self.zones.iter_mut().filter(|zone| id.is_none_or(|id| zone.id == id)) {
            (zone.pinned, zone.goal_bytes) = (false, None);
        }
        self.paused = self.paused && id.is_some();
    }

    /// Stops all decisions until [`Controller::resume`] or [`Controller::unpause`] is called.
    pub fn pause(&mut self) {
        self.paused = true;
    }

    /// Ends a pause. Zones that a client has resized remain pinned.
    pub fn unpause(&mut self) {
        self.paused = false;
    }

    /// Starts or ends a dry run.
    pub fn set_dry_run(&mut self, dry_run: bool) {
        self.rules.dry_run = dry_run;
    }

    /// Replaces the policy. If a parameter is out of range, the present policy remains in use.
    pub fn set_policy(&mut self, policy: Policy) -> Result<(), ParamError> {
        policy.validate()?;
        // If only the parameters change, the policy keeps its state.
        if std::mem::discriminant(&policy) != std::mem::discriminant(&self.policy) {
            self.state = policy.initial_state();
        }
        self.policy = policy;
        // The new policy may want a different amount.
        self.host_shortfall = HostShortfall::default();
        Ok(())
    }

    /// Replaces the parameters of the rules. If one is out of range, none is replaced.
    pub fn set_rules(&mut self, rules: Rules) -> Result<(), ParamError> {
        rules.validate()?;
        // A learned cool-down is kept within its new bounds. Otherwise, the configured cool-down is
        // used.
        self.cool_down_ms = match self.cool_down_ms == self.rules.cool_down_ms {
            true => rules.cool_down_ms,
            false => self.cool_down_ms.clamp(rules.cool_down_ms, rules.max_cool_down_ms),
        };
        self.rules = rules;
        self.are_bounds_reported = false;
        Ok(())
    }

    /// Returns the policy.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Returns the node for which the policy made its decision after the last report.
    pub fn near(&self) -> Option<u32> {
        self.last.and_then(|last| last.decision.near)
    }

    /// Returns the parameters of the rules.
    pub fn rules(&self) -> &Rules {
        &self.rules
    }

    /// Returns true if time alone does not change the policy's decision after reports have been the
    /// same for [`Policy::quiesce_ms`].
    pub fn is_quiescent(&self, now: TimeMs) -> bool {
        self.policy.is_quiescent(&self.state, now)
    }

    /// Returns the state of the controller.
    pub fn status(&self) -> Status {
        Status {
            policy: self.policy.name(),
            dry_run: self.rules.dry_run,
            paused: self.paused,
            pinned: self.zones.iter().filter(|zone| zone.pinned).map(|zone| zone.id).collect(),
            last_report: self.last.map(|last| last.at),
            last_decision: self.last.map(|last| last.decision),
            cool_down_ms: self.cool_down_ms,
        }
    }

    /// Updates the trackers with the host's present sizes. If a zone grows without a plan, this
    /// counts as a grow, so that the memory is not removed immediately. For example, the guest may
    /// deflate a balloon on OOM. A second call with the same sizes has no effect.
    pub fn observe(&mut self, host: &HostView, now: TimeMs) -> Vec<ZoneChanges> {
        if !host.zones.iter().map(|zone| zone.id).eq(self.zones.iter().map(|known| known.id)) {
            let known = std::mem::take(&mut self.zones);
            for zone in &host.zones {
                let known = known.iter().find(|known| known.id == zone.id).cloned();
                self.zones.push(known.unwrap_or_else(|| ZoneTracker::new(zone, now)));
            }
        }
        let mut has_grown = false;
        let mut all = Vec::with_capacity(host.zones.len());
        for (zone, tracker) in host.zones.iter().zip(&mut self.zones) {
            let changes = tracker.observe(zone, now);
            all.push(changes);
            if tracker.pinned || tracker.resized_by_client {
                continue;
            }
            has_grown |= changes.has_grown;
            if changes.shortfall_bytes > 0 {
                tracker.pause_for_host(&self.rules, now);
                self.host_shortfall.add(changes.shortfall_bytes, now);
            }
        }
        if has_grown {
            self.record_grow(now);
        }
        all
    }

    fn apply_report(&mut self, report: &Report, host: &HostView, now: TimeMs) {
        let state = std::mem::replace(&mut self.state, PolicyState::Empty);
        let view = self.exclude_stuck(&self.zones, host, now);
        let is_carried_out = !self.rules.dry_run && !self.paused;
        let input = Input { report, host: &view, is_carried_out };
        let (state, mut decision) = self.policy.decide(state, input, now);
        self.state = state;
        // The policy's size is relative to the requested size that was passed to it.
        let change = |want: u64| {
            want.saturating_add(host.requested_bytes()).saturating_sub(view.requested_bytes())
        };
        decision.want_bytes = decision.want_bytes.map(change);
        self.lost_reports = LostReports::default();
        // The policy reports no pressure while a grow is in progress, but the guest may still be
        // short of memory.
        let was_short_at = self.last.and_then(|last| last.short_at);
        let is_short = decision.pressure || (was_short_at.is_some() && self.is_growing(host));
        let short_at = if is_short { Some(now) } else { was_short_at };
        self.last = Some(LastReport {
            at: now,
            decision,
            short_at: short_at.filter(|at| now.since(*at) < SHORT_MS),
            online_policy: report.blocks().online_policy,
        });
    }

    /// Returns the sizes to pass to the policy. Requested memory is included as long as the guest
    /// makes progress, even if a client requested it. A request without progress that rule 5 does
    /// not withdraw is replaced by the plugged size. Otherwise, the policy would expect memory that
    /// never arrives, although the guest is short of memory.
    fn exclude_stuck<'a>(
        &self,
        trackers: &[ZoneTracker],
        host: &'a HostView,
        now: TimeMs,
    ) -> Cow<'a, HostView> {
        let prefers_driver = self.prefers_driver(trackers, host, now);
        let mut view = Cow::Borrowed(host);
        for (index, (zone, tracker)) in host.zones.iter().zip(trackers).enumerate() {
            let is_exempt =
                tracker.pinned || (1..zone.block_bytes).contains(&zone.outstanding_grow_bytes());
            let is_stuck = tracker.is_stuck(zone, &self.rules, now);
            // Another zone that has a driver can grow.
            let is_driverless = zone.driver == DriverState::Absent;
            let is_skipped = prefers_driver
                && is_driverless
                && !tracker.pinned
                && zone.outstanding_grow_bytes() > 0;
            if (is_exempt && is_stuck) || tracker.is_retained() || is_skipped {
                view.to_mut().zones[index].requested_bytes = zone.plugged_bytes;
            }
        }
        view
    }

    /// Rule 5: returns true if zones without a driver are used last and are not waited for, because
    /// another zone can grow. If no other zone can grow, they are used as if they had a driver,
    /// because a driver may still load.
    fn prefers_driver(&self, trackers: &[ZoneTracker], host: &HostView, now: TimeMs) -> bool {
        let online_policy = self.last.map_or(OnlinePolicy::Unknown, |last| last.online_policy);
        allocation::can_grow_with_driver(
            host,
            trackers,
            self.unmovable_permille(online_policy),
            self.pm_room(host),
            now,
        )
    }

    /// Returns the memory of the pool with which PM may grow.
    fn pm_room(&self, host: &HostView) -> PmRoom {
        let of_pool = PmRoom::of_pool(host);
        let lendable_bytes = host.lendable_bytes();
        let reason = Reason::StorageLow;
        if self.is_recalling {
            PmRoom { bytes: 0, reason, is_recalled: true }
        } else if lendable_bytes < of_pool.bytes {
            PmRoom { bytes: lendable_bytes, reason, is_recalled: false }
        } else {
            of_pool
        }
    }

    /// Share of each zone that may be lent to a guest with this online policy. `None` means no
    /// limit.
    fn unmovable_permille(&self, online_policy: OnlinePolicy) -> Option<u64> {
        let movable = matches!(online_policy, OnlinePolicy::OnlineMovable | OnlinePolicy::Unknown);
        (!movable).then_some(self.rules.unmovable_permille)
    }

    /// Zones that the controller resizes. Pinned zones are excluded, because the client that
    /// resized them waits for its own request.
    fn unpinned_zones<'a>(&'a self, host: &'a HostView) -> impl Iterator<Item = &'a ZoneSizes> {
        let zones = host.zones.iter().zip(&self.zones);
        zones.filter(|(_, tracker)| !tracker.pinned).map(|(zone, _)| zone)
    }

    /// Returns true if some zone that the controller resizes has not reached its requested size.
    fn is_in_progress(&self, host: &HostView) -> bool {
        self.is_growing(host)
            || self.unpinned_zones(host).any(|zone| zone.outstanding_shrink_bytes() > 0)
    }

    /// Returns true if the guest has not plugged all memory that the controller requested. A
    /// difference of less than a block is ignored.
    fn is_growing(&self, host: &HostView) -> bool {
        self.unpinned_zones(host)
            .any(|zone| zone.outstanding_grow_bytes() >= zone.block_bytes.max(1))
    }

    /// Floor of all zones in total. The floor is limited to the sum of the zones' limits, because a
    /// zone with an unsupported driver cannot grow.
    fn floor_bytes(&self, host: &HostView) -> u64 {
        self.rules.floor_bytes.min(host.max_bytes())
    }

    /// Replacement for a report, so that `fixed` works without an agent. The replacement assumes
    /// that the guest is idle.
    fn unreported(&self, decision: Decision, now: TimeMs) -> LastReport {
        LastReport {
            at: now,
            decision,
            short_at: None,
            online_policy: self.last.map_or(OnlinePolicy::Unknown, |last| last.online_policy),
        }
    }

    /// Creates an allocation for the state in `trackers`.
    fn allocation(
        &self,
        trackers: &[ZoneTracker],
        last: LastReport,
        from: Option<u32>,
        host: &HostView,
        now: TimeMs,
    ) -> Allocation {
        let awaited = self.exclude_stuck(trackers, host, now);
        let limits = Limits {
            descriptor_bytes: self.descriptors.room_bytes(&self.rules, &awaited, now),
            room_bytes: self.rules.ceiling_bytes.saturating_sub(host.requested_bytes()),
            unmovable_permille: self.unmovable_permille(last.online_policy),
            driverless_zones_last: self.prefers_driver(trackers, host, now),
            pm_room: self.pm_room(host),
        };
        let is_retained_pm = |(zone, tracker): &(&ZoneSizes, &ZoneTracker)| {
            zone.tier == Tier::Pm && !tracker.pinned && tracker.is_retained()
        };
        let retained = host.zones.iter().zip(trackers).filter(is_retained_pm);
        let retained_bytes =
            retained.fold(0u64, |sum, (zone, _)| sum.saturating_add(zone.outstanding_grow_bytes()));
        Allocation::new(host, &awaited, trackers, last.decision.near, from, limits, now)
            .reserve_pool(retained_bytes)
    }

    fn hold(&self, reason: Reason, host: &HostView) -> Plan {
        self.build(Direction::Hold, reason, None, requested(host), host)
    }

    fn build(
        &self,
        direction: Direction,
        reason: Reason,
        limited_by: Option<Reason>,
        requests: impl IntoIterator<Item = u64>,
        host: &HostView,
    ) -> Plan {
        let targets = host.zones.iter().zip(requests);
        Plan {
            direction,
            reason,
            limited_by,
            wanted_bytes: host.requested_bytes(),
            targets: targets
                .map(|(zone, requested_bytes)| ZoneTarget { zone: zone.id, requested_bytes })
                .collect(),
            dry_run: false,
            watermark_bytes: self.last.map_or(0, |last| last.decision.watermark_bytes),
            watermark_of: self
                .last
                .map_or_else(Measure::default, |last| last.decision.watermark_of),
        }
    }

    /// Updates the state for a plan that will be carried out.
    fn record_plan(&mut self, plan: &Plan, host: &HostView, now: TimeMs) {
        for ((zone, target), before) in self.zones.iter_mut().zip(&plan.targets).zip(&host.zones) {
            zone.record_request(target.requested_bytes, before.requested_bytes, now);
        }
        match (plan.reason, plan.direction) {
            // The plan requests all of the memory that other zones can provide.
            (Reason::HostShort, _) => self.host_shortfall = HostShortfall::default(),
            (_, Direction::Grow) => {
                self.host_shortfall
                    .subtract(plan.requested_bytes().saturating_sub(host.requested_bytes()));
            }
            _ => {}
        }
        match plan.direction {
            Direction::Hold => {}
            Direction::Shrink => self.shrunk_at = Some(now),
            Direction::Grow => self.record_grow(now),
        }
    }

    /// Rule 2: a grow that follows soon after a shrink lengthens the cool-down, because the shrink
    /// was too early.
    fn record_grow(&mut self, now: TimeMs) {
        let undone = self.shrunk_at.filter(|at| now.since(*at) < self.rules.max_cool_down_ms);
        self.cool_down_ms = match undone {
            None => self.rules.cool_down_ms,
            Some(_) if self.shrunk_at > self.grown_at => {
                self.cool_down_ms.saturating_mul(2).min(self.rules.max_cool_down_ms)
            }
            Some(_) => self.cool_down_ms,
        };
        self.grown_at = Some(now);
    }
}

/// Requested sizes of all zones.
fn requested(host: &HostView) -> impl Iterator<Item = u64> {
    host.zones.iter().map(|zone| zone.requested_bytes)
}
