//! Rule 6: reports are lost. Hold; if the guest was short when they stopped, give it a little more.

use super::{Context, Memory, Verdict};
use crate::TimeMs;
use crate::plan::Reason;
use crate::policy::Policy;

/// Grows since reports were lost.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lost {
    steps: u64,
    at: Option<TimeMs>,
}

pub(super) fn decide(context: &Context<'_>) -> Verdict {
    let Context { controller, now, .. } = *context;
    let rules = &controller.rules;
    // The policy `fixed` needs no reports.
    let is_by_reports = !matches!(controller.policy, Policy::Fixed(_));
    let is_lost = |at: TimeMs| now.since(at) >= rules.lost_ms;
    let Some(last) = controller.last.filter(|last| is_by_reports && is_lost(last.at)) else {
        return Verdict::default();
    };
    let host = &*context.left();
    let lost = controller.lost;
    let is_due = is_lost(lost.at.unwrap_or(last.at));
    if last.short_at.is_none() || lost.steps >= rules.lost_steps || !is_due {
        return Some(controller.hold(Reason::ReportsLost, host)).into();
    }
    let step = rules.lost_step_bytes.saturating_mul(1 << lost.steps.min(32));
    let plan = controller.grow(step, Reason::ReportsLost, last, host, now);
    let memory =
        (!rules.dry_run).then_some(Memory::Lost(Lost { steps: lost.steps + 1, at: Some(now) }));
    Verdict { plan: Some(plan), memory }
}
