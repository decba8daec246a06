//! The rules above every policy. docs/policy.md lists them; the numbers in comments here are theirs.

mod descriptors;
mod goal;
mod rules;
mod spread;
#[cfg(test)]
mod tests;
mod zone_tracker;

use std::borrow::Cow;

use foreshore_proto::{Measure, OnlinePolicy, Report};
pub use goal::Step;
pub use rules::Rules;
use serde::Serialize;

use self::descriptors::DescriptorLimit;
use self::spread::{Limits, Spread};
pub use self::zone_tracker::{Reminder, Seen, ZoneTracker};
use crate::plan::{Direction, Plan, Reason, ZoneTarget};
use crate::policy::{Decision, Input, Policy, PolicyState, fixed, off};
use crate::units::{round_up, scale};
use crate::{DriverState, HostView, ParamError, Tier, TimeMs, ZoneId, ZoneSizes};

/// Rule 6: a guest that was short so recently may be so still, when its reports stop.
const SHORT_MS: u64 = 1_000;

/// Rule 5: what the host could not provide is asked of others for so long, and then what is wanted is another question.
const LACKING_MS: u64 = 1_000;

/// Why the controller is called.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// The guest has reported.
    Report(&'a Report),
    /// Time has passed, or a plugged size has changed. To be called at least once a second.
    Tick,
}

/// The state of the loop of one VM, apart from what its policy remembers.
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
    lost: Lost,
    lacking: Lacking,
    descriptors: DescriptorLimit,
    /// A dry run has said what rule 3 would do about what is requested.
    told_bounds: bool,
}

/// What the host could not provide, and nobody else has been asked for.
#[derive(Clone, Copy, Debug, Default)]
struct Lacking {
    bytes: u64,
    at: TimeMs,
}

impl Lacking {
    /// How much of it still counts.
    fn bytes_at(&self, now: TimeMs) -> u64 {
        if now.since(self.at) < LACKING_MS { self.bytes } else { 0 }
    }

    fn add(&mut self, bytes: u64, now: TimeMs) {
        if bytes > 0 {
            *self = Lacking { bytes: self.bytes_at(now).saturating_add(bytes), at: now };
        }
    }

    /// Others have been asked for so much.
    fn is_asked(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}

/// What is kept of the last report.
#[derive(Clone, Copy, Debug)]
struct LastReport {
    at: TimeMs,
    decision: Decision,
    /// When the guest was last known to be short, if that is not long ago.
    short_at: Option<TimeMs>,
    online_policy: OnlinePolicy,
}

/// Grows since reports were lost.
#[derive(Clone, Copy, Debug, Default)]
struct Lost {
    steps: u64,
    at: Option<TimeMs>,
}

/// What `vm.pressure` shows of the loop.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Status {
    /// The policy's name.
    pub policy: &'static str,
    /// Decisions are made and not carried out.
    pub dry_run: bool,
    /// The operator has stopped the loop.
    pub paused: bool,
    /// Zones that were sized by hand.
    pub pinned: Vec<ZoneId>,
    /// When the last report came.
    pub last_report: Option<TimeMs>,
    /// What the policy made of it.
    pub last_decision: Option<Decision>,
    /// The present cool-down: longer than configured after a shrink that turned out to have been wrong.
    pub cool_down_ms: u64,
}

impl Controller {
    /// A loop for a guest that has just started.
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
            lost: Lost::default(),
            lacking: Lacking::default(),
            descriptors: DescriptorLimit::default(),
            told_bounds: false,
        })
    }

    /// Decides what to do about `event`. `host` must be read after the last plan was carried out.
    pub fn step(&mut self, event: Event<'_>, host: &HostView, now: TimeMs) -> Plan {
        self.observe(host, now);
        for zone in &mut self.zones {
            zone.by_hand = false;
        }
        if let Event::Report(report) = event {
            self.descriptors.observe(report, host, now);
            self.take_report(report, &self.without_failed(host, now), now);
        }
        let mut plan = self.plan(event, host, now);
        plan.dry_run = self.rules.dry_run;
        if !plan.dry_run {
            self.note(&plan, host, now);
        }
        plan
    }

    /// The tracker of a zone.
    pub fn tracker(&self, id: ZoneId) -> Option<&ZoneTracker> {
        self.zones.iter().find(|zone| zone.id == id)
    }

    /// Trackers of all zones, in the host's order.
    pub(crate) fn trackers_mut(&mut self) -> impl Iterator<Item = &mut ZoneTracker> {
        self.zones.iter_mut()
    }

    /// Memory for whose page descriptors the guest has room (rule 4).
    pub fn describable_bytes(&self, host: &HostView, now: TimeMs) -> u64 {
        self.descriptors.room_bytes(&self.rules, host, now)
    }

    /// Counts a DIMM that the guest gets towards the limit of rule 4.
    pub fn add_dimm(&mut self, bytes: u64, now: TimeMs) {
        self.descriptors.add_dimm(bytes, now);
    }

    /// Whether a zone was sized by hand, and is left alone.
    pub fn is_pinned(&self, id: ZoneId) -> bool {
        self.zones.iter().any(|zone| zone.id == id && zone.pinned)
    }

    /// Takes up a zone that was sized by hand, or every one of them, and a loop that was paused.
    pub fn resume(&mut self, id: Option<ZoneId>) {
        for zone in self.zones.iter_mut().filter(|zone| id.is_none_or(|id| zone.id == id)) {
            (zone.pinned, zone.goal_bytes) = (false, None);
        }
        self.paused = self.paused && id.is_some();
    }

    /// Stops deciding until [`Controller::resume`].
    pub fn pause(&mut self) {
        self.paused = true;
    }

    /// Decides again. Zones that were sized by hand stay pinned.
    pub fn unpause(&mut self) {
        self.paused = false;
    }

    /// Decides without acting, or acts again.
    pub fn set_dry_run(&mut self, dry_run: bool) {
        self.rules.dry_run = dry_run;
    }

    /// Exchanges the policy. If its parameters are out of range the present one stays.
    pub fn set_policy(&mut self, policy: Policy) -> Result<(), ParamError> {
        policy.validate()?;
        // With other parameters it goes on with what it remembers.
        if std::mem::discriminant(&policy) != std::mem::discriminant(&self.policy) {
            self.state = policy.initial_state();
        }
        self.policy = policy;
        // What is wanted is another question now.
        self.lacking = Lacking::default();
        Ok(())
    }

    /// Exchanges the rules' parameters. If one is out of range the present ones stay.
    pub fn set_rules(&mut self, rules: Rules) -> Result<(), ParamError> {
        rules.validate()?;
        // What was learned stays, within the new bounds; what was not is as configured.
        self.cool_down_ms = match self.cool_down_ms == self.rules.cool_down_ms {
            true => rules.cool_down_ms,
            false => self.cool_down_ms.clamp(rules.cool_down_ms, rules.max_cool_down_ms),
        };
        self.rules = rules;
        self.told_bounds = false;
        Ok(())
    }

    /// The policy.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The node for whose sake the policy decided upon the last report.
    pub fn near(&self) -> Option<u32> {
        self.last.and_then(|last| last.decision.near)
    }

    /// The rules' parameters.
    pub fn rules(&self) -> &Rules {
        &self.rules
    }

    /// Whether the passing of time alone changes nothing of what the policy decides, once reports have been the same for
    /// [`Policy::settle_ms`].
    pub fn is_settled(&self, now: TimeMs) -> bool {
        self.policy.is_settled(&self.state, now)
    }

    /// The state of the loop.
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

    /// Takes the host's present sizes. A zone that has grown of itself, as a balloon does that deflates when its guest
    /// has nothing else left, is a grow like any other: what the guest took is not taken back at once. A second call with
    /// the same sizes changes nothing.
    pub fn observe(&mut self, host: &HostView, now: TimeMs) -> Vec<Seen> {
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
            let seen = tracker.observe(zone, now);
            all.push(seen);
            if tracker.pinned || tracker.by_hand {
                continue;
            }
            has_grown |= seen.has_grown;
            if seen.lacks_bytes > 0 {
                tracker.fell_short(&self.rules, now);
                self.lacking.add(seen.lacks_bytes, now);
            }
        }
        if has_grown {
            self.has_grown(now);
        }
        all
    }

    fn take_report(&mut self, report: &Report, host: &HostView, now: TimeMs) {
        let state = std::mem::replace(&mut self.state, PolicyState::Empty);
        let seen = self.without_stuck(host, now);
        let is_carried_out = !self.rules.dry_run && !self.paused;
        let input = Input { report, host: &seen, is_carried_out };
        let (state, mut decision) = self.policy.decide(state, input, now);
        self.state = state;
        // A policy's sizes begin at what it saw requested.
        let change =
            |want: u64| want.saturating_add(host.requested_bytes()).saturating_sub(seen.requested_bytes());
        decision.want_bytes = decision.want_bytes.map(change);
        self.lost = Lost::default();
        // A grow that is under way ends a policy's want, and not yet the guest's.
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

    /// What the policy is shown. Memory on its way to a zone, or from it, counts for as long as it comes, whoever asked for
    /// it. Where nothing has come for too long, and rule 5 does not end the request, the zone stays as it is: or what a
    /// hand has asked for would be waited for by a guest that is short.
    fn without_stuck<'a>(&self, host: &'a HostView, now: TimeMs) -> Cow<'a, HostView> {
        let passes_over = self.passes_over_driverless(host, now);
        let mut seen = Cow::Borrowed(host);
        for (index, (zone, followed)) in host.zones.iter().zip(&self.zones).enumerate() {
            let is_left = followed.pinned || (1..zone.block_bytes).contains(&zone.outstanding_grow_bytes());
            let is_stuck = followed.is_stuck(zone, &self.rules, now);
            // Nobody is there to take it, and somebody else is.
            let is_driverless = zone.driver == DriverState::Absent;
            let is_passed_over =
                passes_over && is_driverless && !followed.pinned && zone.outstanding_grow_bytes() > 0;
            if (is_left && is_stuck) || followed.is_kept() || is_passed_over {
                seen.to_mut().zones[index].requested_bytes = zone.plugged_bytes;
            }
        }
        seen
    }

    /// Rule 8: what a dry run decides upon. Of what the guest does not follow, rule 5 would leave what is there, if it were
    /// carried out; as it is not, it is taken for done, or nothing else would ever be said.
    fn without_failed<'a>(&self, host: &'a HostView, now: TimeMs) -> Cow<'a, HostView> {
        let mut left = Cow::Borrowed(host);
        if !self.rules.dry_run {
            return left;
        }
        for (index, (zone, followed)) in host.zones.iter().zip(&self.zones).enumerate() {
            if !followed.pinned && followed.has_failed(zone, &self.rules, now) {
                left.to_mut().zones[index].requested_bytes = zone_tracker::left_bytes(zone, 0);
            }
        }
        left
    }

    /// Rule 5: whether zones without a driver are asked last, and not waited for: where another zone can be asked. Where none
    /// can, they are asked as if somebody were there, for the driver that may come.
    fn passes_over_driverless(&self, host: &HostView, now: TimeMs) -> bool {
        let online_policy = self.last.map_or(OnlinePolicy::Unknown, |last| last.online_policy);
        spread::has_live_room(host, &self.zones, self.unmovable_permille(online_policy), now)
    }

    /// The share of a zone that may be lent to a guest that onlines memory like this.
    fn unmovable_permille(&self, online_policy: OnlinePolicy) -> Option<u64> {
        let movable = matches!(online_policy, OnlinePolicy::OnlineMovable | OnlinePolicy::Unknown);
        (!movable).then_some(self.rules.unmovable_permille)
    }

    /// The zones that the loop sizes: a hand's request is the hand's to wait for.
    fn own<'a>(&'a self, host: &'a HostView) -> impl Iterator<Item = &'a ZoneSizes> {
        let zones = host.zones.iter().zip(&self.zones);
        zones.filter(|(_, followed)| !followed.pinned).map(|(zone, _)| zone)
    }

    /// Whether a zone that the loop sizes is still to follow.
    fn is_in_progress(&self, host: &HostView) -> bool {
        self.is_growing(host) || self.own(host).any(|zone| zone.outstanding_shrink_bytes() > 0)
    }

    /// Whether memory that the loop has asked for is on its way to the guest. Less than a block is not waited for.
    fn is_growing(&self, host: &HostView) -> bool {
        self.own(host).any(|zone| zone.outstanding_grow_bytes() >= zone.block_bytes.max(1))
    }

    fn plan(&mut self, event: Event<'_>, host: &HostView, now: TimeMs) -> Plan {
        if self.paused {
            return self.hold(Reason::Paused, host);
        }
        if self.policy == Policy::Off {
            return self.hold(Reason::Off, host);
        }
        if let Some(plan) = self.fall_back(host, now) {
            return plan;
        }
        let host = &*self.without_failed(host, now);
        match self.come_within_bounds(host, now) {
            Some(plan) if self.is_to_be_told(&plan) => return plan,
            Some(_) => {}
            None => self.told_bounds = false,
        }
        // While the loop is paused, or does something else first, it is kept. A dry run asks nobody, and would ask for ever.
        let lacks_bytes = self.lacking.bytes_at(now);
        if lacks_bytes > 0 && !self.rules.dry_run {
            return self.go_elsewhere(event, lacks_bytes, host, now);
        }
        if let Policy::Fixed(params) = &self.policy {
            let last = self.unreported(fixed::decide(params, host), now);
            return self.plan_decision(last, host, now);
        }
        let Some(last) = self.last else {
            return self.hold(Reason::NoReport, host);
        };
        if now.since(last.at) >= self.rules.lost_ms {
            return self.plan_without_reports(last, host, now);
        }
        match event {
            Event::Tick => self.hold(Reason::Quiet, host),
            Event::Report(_) => self.plan_decision(last, host, now),
        }
    }

    /// Rule 8: a dry run says once what rule 3 would do, and then what the policy does.
    fn is_to_be_told(&mut self, plan: &Plan) -> bool {
        let was_told = self.told_bounds;
        // What stands in the way of a bound stands in a policy's, too.
        let changes = plan.direction != Direction::Hold;
        self.told_bounds = self.rules.dry_run && (was_told || changes);
        !self.rules.dry_run || (changes && !was_told)
    }

    /// Rule 5: a guest that does not follow is asked for less. A dry run says so once.
    fn fall_back(&mut self, host: &HostView, now: TimeMs) -> Option<Plan> {
        let has_failed = |(zone, followed): (&ZoneSizes, &ZoneTracker)| {
            !followed.pinned && followed.has_failed(zone, &self.rules, now)
        };
        // None of them, mostly.
        if !host.zones.iter().zip(&self.zones).any(has_failed) {
            self.zones.iter_mut().for_each(|zone| zone.told = false);
            return None;
        }
        let mut before = self.zones.clone();
        for (zone, followed) in host.zones.iter().zip(&mut before) {
            followed.told = self.rules.dry_run && has_failed((zone, followed));
        }
        let mut asked = host.clone();
        let mut is_news = false;
        for (zone, followed) in asked.zones.iter_mut().zip(&mut self.zones).filter(|(_, zone)| !zone.pinned) {
            let was_kept = followed.is_kept();
            let was_told = std::mem::take(&mut followed.told);
            if let Some(less) = followed.fall_back(zone, &self.rules, now) {
                zone.requested_bytes = less;
                is_news |= !was_kept && !was_told;
            }
        }
        self.keep_floor(&mut asked, host, now);
        match self.rules.dry_run {
            true => self.zones = before,
            false => is_news |= !requested(&asked).eq(requested(host)),
        }
        is_news.then(|| self.build(Direction::Hold, Reason::NoProgress, None, requested(&asked), host))
    }

    /// Rule 3 against rule 5: what of the floor is no longer asked of one zone is asked of others, and where they have none
    /// it stays asked for.
    fn keep_floor(&mut self, asked: &mut HostView, host: &HostView, now: TimeMs) {
        let floor = self.rules.floor_bytes.min(host.requested_bytes());
        let missing = floor.saturating_sub(asked.requested_bytes());
        if missing == 0 {
            return;
        }
        let last = self.last.unwrap_or_else(|| self.unreported(off::decide(), now));
        let mut spread = self.spread(last, None, asked, now);
        let (added, _) = spread.grow(missing);
        for (zone, bytes) in asked.zones.iter_mut().zip(spread.into_requests()) {
            zone.requested_bytes = bytes;
        }
        let mut missing = missing - added;
        for ((zone, before), followed) in asked.zones.iter_mut().zip(&host.zones).zip(&mut self.zones) {
            let taken = before.requested_bytes.saturating_sub(zone.requested_bytes);
            let back = taken.min(round_up(missing, zone.block_bytes));
            zone.requested_bytes += back;
            missing = missing.saturating_sub(back);
            if back > 0 {
                followed.keep(zone.requested_bytes);
            }
        }
    }

    /// Rule 5: what the host could not provide is asked of other zones, at once, and with what has come to be wanted since.
    fn go_elsewhere(&self, event: Event<'_>, lacks_bytes: u64, host: &HostView, now: TimeMs) -> Plan {
        let last = self.last.unwrap_or_else(|| self.unreported(off::decide(), now));
        let more = match event {
            Event::Report(_) => {
                last.decision.want_bytes.map_or(0, |want| want.saturating_sub(host.requested_bytes()))
            }
            Event::Tick => 0,
        };
        let reason = Reason::HostShort;
        let plan = self.grow(lacks_bytes.max(more), reason, last, host, now);
        // Also where nobody has it: what stood in the way of others is not what happened.
        Plan { reason, ..plan }
    }

    /// Rule 3: the VM as a whole has a floor and a ceiling, whatever is reported and whoever
    /// wants something else.
    fn come_within_bounds(&self, host: &HostView, now: TimeMs) -> Option<Plan> {
        let requested = host.requested_bytes();
        let (floor, ceiling) = (self.floor_bytes(host), self.rules.ceiling_bytes);
        let last = || self.last.unwrap_or_else(|| self.unreported(off::decide(), now));
        if requested < floor {
            Some(self.grow(floor - requested, Reason::BelowFloor, last(), host, now))
        } else if requested > ceiling {
            Some(self.shrink(requested - ceiling, Reason::AboveCeiling, last(), host, now))
        } else {
            None
        }
    }

    /// Floor of all zones together, at most the sum of their limits: a zone with an unsupported driver cannot grow.
    fn floor_bytes(&self, host: &HostView) -> u64 {
        self.rules.floor_bytes.min(host.max_bytes())
    }

    /// Rule 6: reports are lost. Hold; if the guest was short when they stopped, give it a little more.
    fn plan_without_reports(&mut self, last: LastReport, host: &HostView, now: TimeMs) -> Plan {
        let due = now.since(self.lost.at.unwrap_or(last.at)) >= self.rules.lost_ms;
        if last.short_at.is_none() || self.lost.steps >= self.rules.lost_steps || !due {
            return self.hold(Reason::ReportsLost, host);
        }
        let step = self.rules.lost_step_bytes.saturating_mul(1 << self.lost.steps.min(32));
        if !self.rules.dry_run {
            self.lost = Lost { steps: self.lost.steps + 1, at: Some(now) };
        }
        self.grow(step, Reason::ReportsLost, last, host, now)
    }

    /// A decision that needed no report, so that `fixed` works without an agent. An idle guest is assumed.
    fn unreported(&self, decision: Decision, now: TimeMs) -> LastReport {
        LastReport {
            at: now,
            decision,
            short_at: None,
            online_policy: self.last.map_or(OnlinePolicy::Unknown, |last| last.online_policy),
        }
    }

    fn plan_decision(&self, last: LastReport, host: &HostView, now: TimeMs) -> Plan {
        let requested = host.requested_bytes();
        let (floor, ceiling) = (self.floor_bytes(host), self.rules.ceiling_bytes);
        let reason = last.decision.reason;
        match last.decision.want_bytes {
            // Only of what a dry run leaves outside of the bounds does a policy want what stays there.
            Some(want) if want > requested && want < floor => {
                bound(self.grow(floor - requested, reason, last, host, now), want, Reason::BelowFloor)
            }
            Some(want) if want < requested && want > ceiling => {
                bound(self.shrink(requested - ceiling, reason, last, host, now), want, Reason::AboveCeiling)
            }
            Some(want) if want > requested => self.grow(want - requested, reason, last, host, now),
            Some(want) if want < requested => self.shrink(requested - want, reason, last, host, now),
            // What is on its way counts as there: the guest will have enough, and has not got it yet.
            _ if reason == Reason::Enough && self.is_in_progress(&self.without_stuck(host, now)) => {
                self.hold(Reason::InProgress, host)
            }
            _ => self.hold(reason, host),
        }
    }

    /// Rules 1, 2 and 4: at once, DRAM first, as far as the guest can carry it.
    fn grow(&self, bytes: u64, reason: Reason, last: LastReport, host: &HostView, now: TimeMs) -> Plan {
        // Where memory was to go from is nothing to a grow, which a floor or lost reports may ask for after it.
        let mut spread = self.spread(last, None, host, now);
        let (added, limit) = spread.grow(bytes);
        let wanted = host.requested_bytes().saturating_add(bytes);
        let requests = spread.into_requests();
        let plan = match limit {
            Some(limit) if added == 0 => self.build(Direction::Hold, limit, None, requests, host),
            limit => self.build(Direction::Grow, reason, limit, requests, host),
        };
        Plan { wanted_bytes: wanted, ..plan }
    }

    /// Rules 2 and 3: PM first, in steps, after a cool-down.
    fn shrink(&self, bytes: u64, reason: Reason, last: LastReport, host: &HostView, now: TimeMs) -> Plan {
        let wanted = host.requested_bytes() - bytes;
        let hold = |reason| Plan { wanted_bytes: wanted, ..self.hold(reason, host) };
        if self.is_in_progress(host) {
            return hold(Reason::InProgress);
        }
        let cooling = self.grown_at.is_some_and(|at| now.since(at) < self.cool_down_ms)
            || self.shrunk_at.is_some_and(|at| now.since(at) < self.rules.shrink_interval_ms);
        if cooling {
            return hold(Reason::CoolDown);
        }
        let share_bytes = scale(host.plugged_bytes(), self.rules.shrink_share_permille, 1000);
        let step = self.rules.shrink_step_bytes.max(share_bytes);
        let over = host.requested_bytes().saturating_sub(self.floor_bytes(host));
        let mut spread = self.spread(last, last.decision.from, host, now);
        let (taken, limit) = spread.shrink(bytes.min(step).min(over));
        let limit = limit.or((over < bytes.min(step)).then_some(Reason::AtFloor));
        let requests = spread.into_requests();
        let plan = match limit {
            limit if taken == 0 => self.build(Direction::Hold, limit.unwrap_or(reason), None, requests, host),
            limit => self.build(Direction::Shrink, reason, limit, requests, host),
        };
        Plan { wanted_bytes: wanted, ..plan }
    }

    fn spread(&self, last: LastReport, from: Option<u32>, host: &HostView, now: TimeMs) -> Spread {
        let awaited = self.without_stuck(host, now);
        let limits = Limits {
            descriptor_bytes: self.descriptors.room_bytes(&self.rules, &awaited, now),
            room_bytes: self.rules.ceiling_bytes.saturating_sub(host.requested_bytes()),
            unmovable_permille: self.unmovable_permille(last.online_policy),
            driverless_last: self.passes_over_driverless(host, now),
        };
        let is_kept_pm = |(zone, followed): &(&ZoneSizes, &ZoneTracker)| {
            zone.tier == Tier::Pm && !followed.pinned && followed.is_kept()
        };
        let kept = host.zones.iter().zip(&self.zones).filter(is_kept_pm);
        let kept_bytes = kept.fold(0u64, |sum, (zone, _)| sum.saturating_add(zone.outstanding_grow_bytes()));
        Spread::new(host, &awaited, &self.zones, last.decision.near, from, limits, now).owing(kept_bytes)
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
            watermark_of: self.last.map_or_else(Measure::default, |last| last.decision.watermark_of),
        }
    }

    /// Remembers what a plan that is carried out means for the ones to come.
    fn note(&mut self, plan: &Plan, host: &HostView, now: TimeMs) {
        for ((zone, target), before) in self.zones.iter_mut().zip(&plan.targets).zip(&host.zones) {
            zone.asked(target.requested_bytes, before.requested_bytes, now);
        }
        match (plan.reason, plan.direction) {
            // It has been answered, as far as it can be.
            (Reason::HostShort, _) => self.lacking = Lacking::default(),
            (_, Direction::Grow) => {
                self.lacking.is_asked(plan.requested_bytes().saturating_sub(host.requested_bytes()));
            }
            _ => {}
        }
        match plan.direction {
            Direction::Hold => {}
            Direction::Shrink => self.shrunk_at = Some(now),
            Direction::Grow => self.has_grown(now),
        }
    }

    /// Rule 2: a shrink that has to be undone came too early: wait longer before the next one.
    fn has_grown(&mut self, now: TimeMs) {
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

/// A plan that goes to a bound of all zones together, beyond what the policy wants.
fn bound(plan: Plan, wanted_bytes: u64, by: Reason) -> Plan {
    let limited_by = (plan.direction != Direction::Hold).then(|| plan.limited_by.unwrap_or(by));
    Plan { wanted_bytes, limited_by, ..plan }
}

/// What is requested of each zone.
fn requested(host: &HostView) -> impl Iterator<Item = u64> {
    host.zones.iter().map(|zone| zone.requested_bytes)
}
