//! Rule 5: what the host could not provide is asked of other zones, at once, and with what has come
//! to be wanted since.

use super::{Context, Verdict};
use crate::TimeMs;
use crate::controller::Event;
use crate::plan::{Plan, Reason};
use crate::policy::off;

/// Time for which others are asked for what the host could not provide. Later, the guest may want
/// something else.
const SHORTFALL_MS: u64 = 1_000;

/// Bytes that the host could not provide, and that no other zone has been asked for.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostShortfall {
    bytes: u64,
    at: TimeMs,
}

impl HostShortfall {
    /// Bytes that still count.
    fn bytes_at(&self, now: TimeMs) -> u64 {
        if now.since(self.at) < SHORTFALL_MS { self.bytes } else { 0 }
    }

    pub fn add(&mut self, bytes: u64, now: TimeMs) {
        if bytes > 0 {
            *self = HostShortfall { bytes: self.bytes_at(now).saturating_add(bytes), at: now };
        }
    }

    /// Subtracts bytes that other zones have been asked for.
    pub fn is_asked(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}

/// While the loop is paused, or does something else first, the shortfall is kept. A dry run asks
/// nobody, and would ask for ever.
pub(super) fn decide(context: &Context<'_>) -> Verdict {
    let Context { controller, now, .. } = *context;
    let shortfall_bytes = controller.host_shortfall.bytes_at(now);
    if shortfall_bytes == 0 || controller.rules.dry_run {
        return Verdict::default();
    }
    let host = context.host;
    let last = context.last_or(off::decide());
    let more = match context.event {
        Event::Report(_) => {
            last.decision.want_bytes.map_or(0, |want| want.saturating_sub(host.requested_bytes()))
        }
        Event::Tick => 0,
    };
    let reason = Reason::HostShort;
    let plan = controller.grow(shortfall_bytes.max(more), reason, last, host, now);
    // Also where nobody has it: what stood in the way of others is not what happened.
    Some(Plan { reason, ..plan }).into()
}
