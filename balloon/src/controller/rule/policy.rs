//! Rules 1, 2 and 4: grows the guest to the policy's size immediately, and shrinks it in steps.

use super::Context;
use crate::controller::allocation::Allocation;
use crate::controller::{Controller, Event, LastReport};
use crate::plan::{Direction, Plan, Reason};
use crate::policy::{Policy, fixed};
use crate::units::scale;
use crate::{HostView, TimeMs};

pub(super) fn plan(context: &Context<'_>) -> Plan {
    let Context { controller, now, .. } = *context;
    let host = &*context.decision_view();
    match (&controller.policy, controller.last, context.event) {
        (Policy::Fixed(params), ..) => {
            let last = controller.unreported(fixed::decide(params, host), now);
            controller.plan_decision(last, host, now)
        }
        (_, None, _) => controller.hold(Reason::NoReport, host),
        (_, _, Event::Tick) => controller.hold(Reason::Quiet, host),
        (_, Some(last), Event::Report(_)) => controller.plan_decision(last, host, now),
    }
}

impl Controller {
    fn plan_decision(&self, last: LastReport, host: &HostView, now: TimeMs) -> Plan {
        let requested = host.requested_bytes();
        let (floor, ceiling) = (self.floor_bytes(host), self.rules.ceiling_bytes);
        let reason = last.decision.reason;
        match last.decision.want_bytes {
            // Only in a dry run can the requests remain outside of the bounds. Otherwise, rule 3
            // corrects them first.
            Some(want) if want > requested && want < floor => bound(
                self.grow(floor - requested, reason, last, host, now),
                want,
                Reason::BelowFloor,
            ),
            Some(want) if want < requested && want > ceiling => bound(
                self.shrink(requested - ceiling, reason, last, host, now),
                want,
                Reason::AboveCeiling,
            ),
            Some(want) if want > requested => self.grow(want - requested, reason, last, host, now),
            Some(want) if want < requested => {
                self.shrink(requested - want, reason, last, host, now)
            }
            // The guest has enough memory only if memory that has not arrived yet is included.
            _ if reason == Reason::Enough
                && self.is_in_progress(&self.exclude_stuck(&self.zones, host, now)) =>
            {
                self.hold(Reason::InProgress, host)
            }
            _ => self.hold(reason, host),
        }
    }

    /// Rules 1, 2 and 4: grows the guest immediately, DRAM first, as far as there is room for page
    /// descriptors.
    pub(super) fn grow(
        &self,
        bytes: u64,
        reason: Reason,
        last: LastReport,
        host: &HostView,
        now: TimeMs,
    ) -> Plan {
        // The policy may have named a node from which to remove memory, before the floor or lost
        // reports require a grow. The grow ignores that node.
        let mut allocation = self.allocation(&self.zones, last, None, host, now);
        let moved = allocation.grow(bytes);
        let plan = self.plan_move(Direction::Grow, reason, moved, allocation, host);
        Plan { wanted_bytes: host.requested_bytes().saturating_add(bytes), ..plan }
    }

    /// Rules 2 and 3: shrinks the guest in steps after a cool-down, PM first.
    pub(super) fn shrink(
        &self,
        bytes: u64,
        reason: Reason,
        last: LastReport,
        host: &HostView,
        now: TimeMs,
    ) -> Plan {
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
        let mut allocation = self.allocation(&self.zones, last, last.decision.from, host, now);
        let (taken, limit) = allocation.shrink(bytes.min(step).min(over));
        let limit = limit.or((over < bytes.min(step)).then_some(Reason::AtFloor));
        let plan = self.plan_move(Direction::Shrink, reason, (taken, limit), allocation, host);
        Plan { wanted_bytes: wanted, ..plan }
    }

    /// Returns a plan that adds or removes `moved_bytes`, or a plan that changes nothing if they
    /// are 0.
    fn plan_move(
        &self,
        direction: Direction,
        reason: Reason,
        (moved_bytes, limit): (u64, Option<Reason>),
        allocation: Allocation,
        host: &HostView,
    ) -> Plan {
        let (direction, reason, limit) = match moved_bytes {
            0 => (Direction::Hold, limit.unwrap_or(reason), None),
            _ => (direction, reason, limit),
        };
        self.build(direction, reason, limit, allocation.into_requests(), host)
    }
}

/// Records in a plan that ends at the bound `by` which size the policy wants.
fn bound(plan: Plan, wanted_bytes: u64, by: Reason) -> Plan {
    let limited_by = (plan.direction != Direction::Hold).then(|| plan.limited_by.unwrap_or(by));
    Plan { wanted_bytes, limited_by, ..plan }
}
