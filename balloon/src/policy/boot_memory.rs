//! The guest's total without its hotplugged memory, learned from reports: what the host calls
//! plugged and what the guest has online differ while blocks are on their way.

use super::Input;
use crate::units::scale;
use crate::{HostView, TimeMs};

/// A total that did not move for this long, while nothing was plugged or unplugged, shows what the
/// guest has beside its hotplugged memory.
const SETTLE_MS: u64 = 2_000;

/// What is known of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BootMemory {
    bytes: Option<u64>,
    /// The total and the plugged size that have not moved, and since when.
    still: Option<(u64, u64, TimeMs)>,
}

impl BootMemory {
    /// Takes a report.
    pub(crate) fn learn(&mut self, input: Input<'_>, now: TimeMs) {
        let total = input.report.memory().total_bytes;
        let plugged = input.host.plugged_bytes();
        let since = match self.still {
            Some((t, p, since)) if (t, p) == (total, plugged) => since,
            _ => now,
        };
        self.still = Some((total, plugged, since));
        let first = self.bytes.is_none();
        let settled = now.since(since) >= SETTLE_MS || (first && plugged == 0);
        if settled && total > plugged {
            self.bytes = Some(total - plugged);
        } else if first {
            // Never seen at rest: the kernel keeps a little of what it booted with to itself.
            self.bytes = Some(total.min(scale(input.host.boot_bytes, 31, 32)));
        }
    }

    /// What is online of the hotplugged memory in a guest that has `total_bytes`.
    pub(crate) fn online_bytes(&self, total_bytes: u64, host: &HostView) -> u64 {
        total_bytes.saturating_sub(self.bytes.unwrap_or(total_bytes)).min(host.max_bytes())
    }
}
