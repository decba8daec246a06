//! Rule 7: a paused loop decides nothing, and neither does the policy `off`. Pinned zones are left
//! out where sizes are allocated.

use super::{Context, Verdict};
use crate::plan::Reason;
use crate::policy::Policy;

pub(super) fn decide(context: &Context<'_>) -> Verdict {
    let controller = context.controller;
    let reason = match () {
        () if controller.paused => Some(Reason::Paused),
        () if controller.policy == Policy::Off => Some(Reason::Off),
        () => None,
    };
    reason.map(|reason| controller.hold(reason, context.host)).into()
}
