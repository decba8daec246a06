//! Rule 3: the VM as a whole has a floor and a ceiling, whatever is reported and whoever wants
//! something else.

use super::{Context, Memory, Verdict};
use crate::plan::{Direction, Plan, Reason};
use crate::policy::off;

pub(super) fn decide(context: &Context<'_>) -> Verdict {
    let controller = context.controller;
    let Some(plan) = come_within_bounds(context) else {
        return Verdict { plan: None, memory: Some(Memory::BoundsTold(false)) };
    };
    // Rule 8: a dry run says once what this rule would do, and then what the policy does. What
    // stands in the way of a bound stands in a policy's, too.
    let (is_dry_run, was_told) = (controller.rules.dry_run, controller.told_bounds);
    let changes = plan.direction != Direction::Hold;
    let is_news = !is_dry_run || (changes && !was_told);
    let memory = Some(Memory::BoundsTold(is_dry_run && (was_told || changes)));
    Verdict { plan: is_news.then_some(plan), memory }
}

fn come_within_bounds(context: &Context<'_>) -> Option<Plan> {
    let Context { controller, now, .. } = *context;
    let host = &*context.left();
    let requested = host.requested_bytes();
    let (floor, ceiling) = (controller.floor_bytes(host), controller.rules.ceiling_bytes);
    let last = || context.last_or(off::decide());
    if requested < floor {
        Some(controller.grow(floor - requested, Reason::BelowFloor, last(), host, now))
    } else if requested > ceiling {
        Some(controller.shrink(requested - ceiling, Reason::AboveCeiling, last(), host, now))
    } else {
        None
    }
}
