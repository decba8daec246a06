//! The guest's total without its hotplugged memory, learned from reports. While blocks are on their
//! way, the host's plugged size differs from the guest's online memory.

use super::Input;
use crate::units::scale;
use crate::{HostView, TimeMs};

/// Time without a change of the total and the plugged size after which their difference is the boot
/// memory.
const SETTLE_MS: u64 = 2_000;

/// Learned boot memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BootMemory {
    bytes: Option<u64>,
    /// Total and plugged size, and the time since when both are unchanged.
    still: Option<(u64, u64, TimeMs)>,
}

impl BootMemory {
    /// Learns from a report.
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
            // No report was at rest yet. The kernel reserves a small part of boot memory for
            // itself.
            self.bytes = Some(total.min(scale(input.host.boot_bytes, 31, 32)));
        }
    }

    /// Returns the online part of hotplugged memory in a guest with `total_bytes`.
    pub(crate) fn online_bytes(&self, total_bytes: u64, host: &HostView) -> u64 {
        total_bytes.saturating_sub(self.bytes.unwrap_or(total_bytes)).min(host.max_bytes())
    }
}
