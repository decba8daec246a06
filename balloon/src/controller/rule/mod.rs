//! Rules that apply to every policy, as pure functions. Comments use the numbers of the rules in
//! docs/reference/policies.md.
//!
//! Rules 1, 2, 4 and 8 limit the plans of the other rules. They are implemented in [`policy`],
//! [`super::descriptors`] and [`Context::left`].

mod policy;
mod storage;

use std::borrow::Cow;

use super::{Controller, Event, LastReport, ZoneTracker, requested, zone_tracker};
use crate::plan::{Direction, Plan, Reason};
use crate::policy::{Decision, Policy, off};
use crate::units::round_up;
use crate::{HostView, TimeMs, ZoneSizes};

/// Returns a plan, or leaves the decision to the next rule.
type Rule = fn(&Context<'_>) -> Verdict;

/// Rules in order of precedence. The rules precede the policy. The first plan that a rule returns
/// is used.
const RULES: [Rule; 6] = [
    paused_or_off,        // 7
    no_progress,          // 5
    storage::recall,      // 9
    bounds,               // 3
    cover_host_shortfall, // 5
    lost_reports,         // 6
];

/// Input of a rule.
pub(super) struct Context<'a> {
    pub controller: &'a Controller,
    pub event: Event<'a>,
    pub host: &'a HostView,
    pub now: TimeMs,
}

/// Result of a rule.
#[derive(Default)]
struct Verdict {
    /// Plan of the rule. `None` if the next rule decides.
    plan: Option<Plan>,
    update: Option<StateUpdate>,
}

impl From<Option<Plan>> for Verdict {
    fn from(plan: Option<Plan>) -> Self {
        Verdict { plan, update: None }
    }
}

/// State that the controller keeps after a rule, even if the next rule decides.
enum StateUpdate {
    Zones(Vec<ZoneTracker>),
    /// No request has failed, so a dry run will report the next failure.
    NoneFailed,
    /// True if a dry run has reported the plan of rule 3.
    BoundsReported(bool),
    /// Number and time of the grows since reports were lost.
    LostReports(LostReports),
    /// True while rule 9 recalls memory.
    Recalling(bool),
}

impl Context<'_> {
    /// Rule 8: returns the sizes on which a dry run decides. Requests that rule 5 would withdraw
    /// count as withdrawn. Otherwise, the dry run would report nothing except the withdrawal.
    pub(super) fn decision_view(&self) -> Cow<'_, HostView> {
        self.controller.exclude_failed(self.host, self.now)
    }

    /// Returns the last report, or a replacement with `decision` if there was none.
    fn last_report_or(&self, decision: Decision) -> LastReport {
        self.controller.last.unwrap_or_else(|| self.controller.unreported(decision, self.now))
    }
}

impl Controller {
    /// Applies the rules in order of precedence.
    pub(super) fn plan(&mut self, event: Event<'_>, host: &HostView, now: TimeMs) -> Plan {
        for rule in RULES {
            let Verdict { plan, update } = rule(&Context { controller: self, event, host, now });
            match update {
                Some(StateUpdate::Zones(zones)) => self.zones = zones,
                Some(StateUpdate::NoneFailed) => {
                    self.zones.iter_mut().for_each(|zone| zone.is_reported = false)
                }
                Some(StateUpdate::BoundsReported(is_reported)) => {
                    self.are_bounds_reported = is_reported
                }
                Some(StateUpdate::LostReports(lost_reports)) => self.lost_reports = lost_reports,
                Some(StateUpdate::Recalling(is_recalling)) => self.is_recalling = is_recalling,
                None => {}
            }
            if let Some(plan) = plan {
                return plan;
            }
        }
        policy::plan(&Context { controller: self, event, host, now })
    }

    pub(super) fn exclude_failed<'a>(&self, host: &'a HostView, now: TimeMs) -> Cow<'a, HostView> {
        let mut view = Cow::Borrowed(host);
        if !self.rules.dry_run {
            return view;
        }
        for (index, (zone, tracker)) in host.zones.iter().zip(&self.zones).enumerate() {
            if !tracker.pinned && tracker.has_failed(zone, &self.rules, now) {
                view.to_mut().zones[index].requested_bytes = zone_tracker::fallback_bytes(zone, 0);
            }
        }
        view
    }
}

/// Rule 7: changes nothing while the controller is paused or the policy is `off`. Pinned zones are
/// excluded by the allocation instead.
fn paused_or_off(context: &Context<'_>) -> Verdict {
    let controller = context.controller;
    let reason = match () {
        () if controller.paused => Some(Reason::Paused),
        () if controller.policy == Policy::Off => Some(Reason::Off),
        () => None,
    };
    reason.map(|reason| controller.hold(reason, context.host)).into()
}

/// Rule 5: withdraws or reduces a request that the guest does not follow. A dry run reports this
/// once.
fn no_progress(context: &Context<'_>) -> Verdict {
    let Context { controller, host, now, .. } = *context;
    let rules = &controller.rules;
    let has_failed = |(zone, tracker): (&ZoneSizes, &ZoneTracker)| {
        !tracker.pinned && tracker.has_failed(zone, rules, now)
    };
    // In the usual case, no zone has failed, and the copies below are not needed.
    if !host.zones.iter().zip(&controller.zones).any(has_failed) {
        return Verdict { plan: None, update: Some(StateUpdate::NoneFailed) };
    }
    let mut zones = controller.zones.clone();
    let mut reduced = host.clone();
    let mut is_new = false;
    for (zone, tracker) in
        reduced.zones.iter_mut().zip(&mut zones).filter(|(_, tracker)| !tracker.pinned)
    {
        let was_retained = tracker.is_retained();
        let was_reported = std::mem::take(&mut tracker.is_reported);
        if let Some(less) = tracker.reduce_failed_request(zone, rules, now) {
            zone.requested_bytes = less;
            is_new |= !was_retained && !was_reported;
        }
    }
    retain_floor(context, &mut reduced, &mut zones);
    if rules.dry_run {
        zones.clone_from(&controller.zones);
        for (zone, tracker) in host.zones.iter().zip(&mut zones) {
            tracker.is_reported = has_failed((zone, tracker));
        }
    } else {
        is_new |= !requested(&reduced).eq(requested(host));
    }
    let plan = is_new.then(|| {
        controller.build(Direction::Hold, Reason::NoProgress, None, requested(&reduced), host)
    });
    Verdict { plan, update: Some(StateUpdate::Zones(zones)) }
}

/// Rule 3 limits rule 5: the requested total must not fall below the floor. If rule 5 withdraws
/// part of the floor, that part is requested from other zones. If other zones have no room, the
/// requests to the failed zones are kept.
fn retain_floor(context: &Context<'_>, reduced: &mut HostView, zones: &mut [ZoneTracker]) {
    let Context { controller, host, now, .. } = *context;
    let floor = controller.rules.floor_bytes.min(host.requested_bytes());
    let missing = floor.saturating_sub(reduced.requested_bytes());
    if missing == 0 {
        return;
    }
    let mut allocation =
        controller.allocation(zones, context.last_report_or(off::decide()), None, reduced, now);
    let (added, _) = allocation.grow(missing);
    for (zone, bytes) in reduced.zones.iter_mut().zip(allocation.into_requests()) {
        zone.requested_bytes = bytes;
    }
    let mut missing = missing - added;
    for ((zone, before), tracker) in reduced.zones.iter_mut().zip(&host.zones).zip(zones) {
        let withdrawn = before.requested_bytes.saturating_sub(zone.requested_bytes);
        let restored = withdrawn.min(round_up(missing, zone.block_bytes));
        zone.requested_bytes += restored;
        missing = missing.saturating_sub(restored);
        if restored > 0 {
            tracker.retain(zone.requested_bytes);
        }
    }
}

/// Rule 3: keeps the total of all zones between floor and ceiling, even if the policy wants another
/// size.
fn bounds(context: &Context<'_>) -> Verdict {
    let controller = context.controller;
    let Some(plan) = plan_within_bounds(context) else {
        return Verdict { plan: None, update: Some(StateUpdate::BoundsReported(false)) };
    };
    // Rule 8: a dry run reports the plan of this rule once, and the plans of the policy after that.
    // A plan that changes nothing is not reported, because its obstacle also prevents the policy's
    // plan.
    let (is_dry_run, was_reported) = (controller.rules.dry_run, controller.are_bounds_reported);
    let changes = plan.direction != Direction::Hold;
    let is_new = !is_dry_run || (changes && !was_reported);
    let update = Some(StateUpdate::BoundsReported(is_dry_run && (was_reported || changes)));
    Verdict { plan: is_new.then_some(plan), update }
}

fn plan_within_bounds(context: &Context<'_>) -> Option<Plan> {
    let Context { controller, now, .. } = *context;
    let host = &*context.decision_view();
    let requested = host.requested_bytes();
    let (floor, ceiling) = (controller.floor_bytes(host), controller.rules.ceiling_bytes);
    let last = || context.last_report_or(off::decide());
    if requested < floor {
        Some(controller.grow(floor - requested, Reason::BelowFloor, last(), host, now))
    } else if requested > ceiling {
        Some(controller.shrink(requested - ceiling, Reason::AboveCeiling, last(), host, now))
    } else {
        None
    }
}

/// Time after which a shortfall expires, because the guest's need may have changed.
const SHORTFALL_MS: u64 = 1_000;

/// Bytes that the host could not provide and that have not been requested from another zone yet.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HostShortfall {
    bytes: u64,
    at: TimeMs,
}

impl HostShortfall {
    /// Returns the bytes that have not expired.
    fn bytes_at(&self, now: TimeMs) -> u64 {
        if now.since(self.at) < SHORTFALL_MS { self.bytes } else { 0 }
    }

    pub(super) fn add(&mut self, bytes: u64, now: TimeMs) {
        if bytes > 0 {
            *self = HostShortfall { bytes: self.bytes_at(now).saturating_add(bytes), at: now };
        }
    }

    /// Subtracts bytes that have now been requested from other zones.
    pub(super) fn subtract(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}

/// Rule 5: if the host could not provide memory for a zone, immediately requests the same amount
/// from other zones, or more if the policy now wants more.
///
/// The shortfall is kept while the controller is paused or another rule decides first. In a dry
/// run, this rule does not apply, because nothing is requested and the shortfall would never end.
fn cover_host_shortfall(context: &Context<'_>) -> Verdict {
    let Context { controller, now, .. } = *context;
    let shortfall_bytes = controller.host_shortfall.bytes_at(now);
    if shortfall_bytes == 0 || controller.rules.dry_run {
        return Verdict::default();
    }
    let host = context.host;
    let last = context.last_report_or(off::decide());
    let more = match context.event {
        Event::Report(_) => {
            last.decision.want_bytes.map_or(0, |want| want.saturating_sub(host.requested_bytes()))
        }
        Event::Tick => 0,
    };
    let reason = Reason::HostShort;
    let plan = controller.grow(shortfall_bytes.max(more), reason, last, host, now);
    // The reason remains `HostShort` even if no other zone has room, because the host's shortfall
    // is the cause.
    Some(Plan { reason, ..plan }).into()
}

/// Number and time of the grows since reports were lost.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LostReports {
    steps: u64,
    at: Option<TimeMs>,
}

/// Rule 6: changes nothing while reports are lost. If the guest was short of memory when they
/// stopped, grows it in a limited number of steps.
fn lost_reports(context: &Context<'_>) -> Verdict {
    let Context { controller, now, .. } = *context;
    let rules = &controller.rules;
    // The policy `fixed` does not use reports.
    let is_by_reports = !matches!(controller.policy, Policy::Fixed(_));
    let is_lost = |at: TimeMs| now.since(at) >= rules.lost_ms;
    let Some(last) = controller.last.filter(|last| is_by_reports && is_lost(last.at)) else {
        return Verdict::default();
    };
    let host = &*context.decision_view();
    let lost = controller.lost_reports;
    let is_due = is_lost(lost.at.unwrap_or(last.at));
    if last.short_at.is_none() || lost.steps >= rules.lost_steps || !is_due {
        return Some(controller.hold(Reason::ReportsLost, host)).into();
    }
    let step = rules.lost_step_bytes.saturating_mul(1 << lost.steps.min(32));
    let plan = controller.grow(step, Reason::ReportsLost, last, host, now);
    let update = (!rules.dry_run)
        .then_some(StateUpdate::LostReports(LostReports { steps: lost.steps + 1, at: Some(now) }));
    Verdict { plan: Some(plan), update }
}
