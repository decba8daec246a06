//! The guest's total memory without its hotplugged memory, learned from reports. It cannot be
//! computed from each report, because the host's plugged size differs from the guest's online
//! memory while blocks are being plugged or unplugged.

use super::Input;
use crate::units::scale;
use crate::{HostView, TimeMs};

/// Time for which the guest's total and the plugged size must not change before their difference is
/// used as boot memory.
const STABLE_MS: u64 = 2_000;

/// Boot memory learned from reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BootMemory {
    bytes: Option<u64>,
    /// Guest's total and plugged size, and the time since which neither has changed.
    stable_since: Option<(u64, u64, TimeMs)>,
}

impl BootMemory {
    /// Updates the boot memory from a report.
    pub(crate) fn learn(&mut self, input: Input<'_>, now: TimeMs) {
        let total = input.report.memory().total_bytes;
        let plugged = input.host.plugged_bytes();
        let since = match self.stable_since {
            Some((t, p, since)) if (t, p) == (total, plugged) => since,
            _ => now,
        };
        self.stable_since = Some((total, plugged, since));
        let first = self.bytes.is_none();
        let is_stable = now.since(since) >= STABLE_MS || (first && plugged == 0);
        if is_stable && total > plugged {
            self.bytes = Some(total - plugged);
        } else if first {
            // The sizes have not been constant for long enough yet, so the boot memory is
            // estimated. The kernel reserves a small part of it for itself.
            self.bytes = Some(total.min(scale(input.host.boot_bytes, 31, 32)));
        }
    }

    /// Returns the online part of the hotplugged memory, if the guest's total is `total_bytes`.
    pub(crate) fn online_bytes(&self, total_bytes: u64, host: &HostView) -> u64 {
        total_bytes.saturating_sub(self.bytes.unwrap_or(total_bytes)).min(host.max_bytes())
    }
}
