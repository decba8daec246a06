//! Plans that a lack of room for page descriptors holds back. Each size is reported once.

use crate::TimeMs;
use crate::plan::{Plan, Reason};

/// Requested size at which page descriptors hold back the plans.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HeldPlan {
    held: Option<Held>,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    since: TimeMs,
    requested_bytes: u64,
    is_reported: bool,
}

impl HeldPlan {
    /// Returns true if page descriptors have held back the plans for `patience_ms` at one size.
    /// Returns true only once until the plans proceed, although the policy makes a plan with each
    /// report.
    ///
    /// A quiet plan makes no decision, so it changes nothing here.
    pub(super) fn is_held_too_long(&mut self, plan: &Plan, patience_ms: u64, now: TimeMs) -> bool {
        if plan.reason == Reason::Quiet {
            return false;
        }
        let is_held = !plan.dry_run
            && [Some(plan.reason), plan.limited_by].contains(&Some(Reason::Descriptors));
        let requested_bytes = plan.requested_bytes();
        self.held = self.held.filter(|held| is_held && held.requested_bytes == requested_bytes);
        if !is_held {
            return false;
        }
        let held =
            self.held.get_or_insert(Held { since: now, requested_bytes, is_reported: false });
        let is_news = !held.is_reported && now.since(held.since) >= patience_ms;
        held.is_reported |= is_news;
        is_news
    }
}
