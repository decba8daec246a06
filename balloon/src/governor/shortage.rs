//! Measures how long a guest that is short of memory waits for it.
//!
//! A shortage begins with the first report that leads to a grow, and includes all grows until its
//! end. It ends with the first report in which the guest's total memory has grown by the requested
//! amount.
//!
//! A guest also counts as short of memory while plans are on hold because its DRAM has no room for
//! page descriptors. Such a hold is reported once for each requested size.

use crate::plan::{Plan, Reason};
use crate::{HostView, TimeMs};

/// Part of the plugged memory that may be missing from the guest's total, because Linux reserves
/// some blocks.
const TOLERANCE_PERCENT: u64 = 2;

/// Present shortage, if any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Shortage {
    active: Option<ActiveShortage>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ActiveShortage {
    started: TimeMs,
    /// Guest's total memory in bytes when the shortage began.
    from_bytes: u64,
    grown_bytes: u64,
}

/// A shortage that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EndedShortage {
    /// Time from the first report until the requested memory was online.
    pub took_ms: u64,
    /// Sum of the requested grows.
    pub grown_bytes: u64,
}

impl Shortage {
    /// Starts, extends or ends a shortage because of a plan. `total_bytes` is the guest's total
    /// memory in the last report.
    pub(super) fn record_plan(
        &mut self,
        plan: &Plan,
        host: &HostView,
        total_bytes: Option<u64>,
        now: TimeMs,
    ) {
        let (before, after) = (host.requested_bytes(), plan.requested_bytes());
        // If the guest has not completed a shrink, the memory that is still plugged is already
        // online.
        let outstanding_bytes = after.saturating_sub(before.max(host.plugged_bytes()));
        match total_bytes {
            Some(total_bytes) if outstanding_bytes > 0 => {
                self.add_grow(outstanding_bytes, total_bytes, now)
            }
            _ if after < before => self.abandon(),
            _ => {}
        }
    }

    /// Adds a grow by `bytes` to the shortage. `total_bytes` is the guest's present total memory.
    fn add_grow(&mut self, bytes: u64, total_bytes: u64, now: TimeMs) {
        let start = ActiveShortage { started: now, from_bytes: total_bytes, grown_bytes: 0 };
        self.active.get_or_insert(start).grown_bytes += bytes;
    }

    /// Subtracts memory that the host could not provide. If another zone grows instead, that grow
    /// is part of the same shortage.
    pub(super) fn subtract_shortfall(&mut self, bytes: u64) {
        if let Some(active) = &mut self.active {
            active.grown_bytes = active.grown_bytes.saturating_sub(bytes);
        }
    }

    /// Ends the shortage without a result. A smaller size was requested, so the missing memory will
    /// never arrive.
    pub(super) fn abandon(&mut self) {
        self.active = None;
    }

    /// Handles a report in which the guest's total memory is `total_bytes`.
    pub(super) fn record_report(&mut self, total_bytes: u64, now: TimeMs) -> Option<EndedShortage> {
        let active = self.active?;
        if active.grown_bytes == 0 {
            // The host could provide none of the memory, and no other zone received a request.
            self.active = None;
            return None;
        }
        let need = active.grown_bytes - active.grown_bytes / 100 * TOLERANCE_PERCENT;
        if total_bytes.saturating_sub(active.from_bytes) < need {
            return None;
        }
        self.active = None;
        Some(EndedShortage { took_ms: now.since(active.started), grown_bytes: active.grown_bytes })
    }
}

/// Requested size at which plans are on hold because page descriptors have no room.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HeldPlan {
    held: Option<HeldSize>,
}

#[derive(Clone, Copy, Debug)]
struct HeldSize {
    since: TimeMs,
    requested_bytes: u64,
    is_reported: bool,
}

impl HeldPlan {
    /// Returns true if plans have been on hold for `patience_ms` at the same size, because page
    /// descriptors have no room. Although the policy makes a plan for each report, the function
    /// returns true only once until the plans proceed.
    ///
    /// A plan with the reason `Quiet` does not affect the result.
    pub(super) fn is_held_report_due(
        &mut self,
        plan: &Plan,
        patience_ms: u64,
        now: TimeMs,
    ) -> bool {
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
            self.held.get_or_insert(HeldSize { since: now, requested_bytes, is_reported: false });
        let is_new = !held.is_reported && now.since(held.since) >= patience_ms;
        held.is_reported |= is_new;
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortage_lasts_from_first_grow_until_all_memory_is_online() {
        let mut shortage = Shortage::default();
        assert_eq!(shortage.record_report(1000, TimeMs(5)), None);
        shortage.add_grow(500, 1000, TimeMs(10));
        assert_eq!(shortage.record_report(1400, TimeMs(20)), None);
        shortage.add_grow(500, 1400, TimeMs(20));
        assert_eq!(shortage.record_report(1900, TimeMs(30)), None);
        assert_eq!(
            shortage.record_report(1990, TimeMs(40)),
            Some(EndedShortage { took_ms: 30, grown_bytes: 1000 })
        );
        assert_eq!(shortage.record_report(1990, TimeMs(50)), None);
    }

    #[test]
    fn memory_missing_on_host_is_only_awaited_from_other_zones() {
        let mut shortage = Shortage::default();
        shortage.add_grow(500, 1000, TimeMs(10));
        shortage.subtract_shortfall(400);
        shortage.add_grow(400, 1000, TimeMs(20));
        assert_eq!(shortage.record_report(1400, TimeMs(30)), None);
        assert_eq!(
            shortage.record_report(1500, TimeMs(40)),
            Some(EndedShortage { took_ms: 30, grown_bytes: 500 })
        );
    }

    #[test]
    fn grow_that_no_zone_could_provide_is_no_shortage() {
        let mut shortage = Shortage::default();
        shortage.add_grow(500, 1000, TimeMs(10));
        shortage.subtract_shortfall(600);
        assert_eq!(shortage.record_report(1000, TimeMs(20)), None);
        shortage.add_grow(300, 1000, TimeMs(9_000));
        assert_eq!(
            shortage.record_report(1300, TimeMs(9_100)),
            Some(EndedShortage { took_ms: 100, grown_bytes: 300 })
        );
    }

    #[test]
    fn shrink_ends_shortage_without_result() {
        let mut shortage = Shortage::default();
        shortage.add_grow(500, 1000, TimeMs(10));
        shortage.abandon();
        assert_eq!(shortage.record_report(9000, TimeMs(20)), None);
    }
}
