//! Time that a short guest waits for its memory.
//!
//! A shortage begins with the first report that leads to a grow, and includes every grow until its
//! end. It ends with the first report in which the guest's own total has grown by the requested
//! memory.
//!
//! A guest is also short while a lack of room for page descriptors holds back its plans. Each size
//! at which that happens is reported once.

use crate::plan::{Plan, Reason};
use crate::{HostView, TimeMs};

/// Part of the plugged memory that may be missing in the guest's total, because Linux reserves some
/// blocks.
const TOLERANCE_PERCENT: u64 = 2;

/// The present shortage, if any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Shortage {
    running: Option<Running>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Running {
    started: TimeMs,
    /// The guest's total in bytes at the start.
    from_bytes: u64,
    grown_bytes: u64,
}

/// A shortage that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ended {
    /// Time from the first report until the memory was online.
    pub took_ms: u64,
    /// Requested growth.
    pub grown_bytes: u64,
}

impl Shortage {
    /// Starts, extends or ends a shortage for a plan. `total_bytes` is the guest's total in the
    /// last report.
    pub(super) fn requested(
        &mut self,
        plan: &Plan,
        host: &HostView,
        total_bytes: Option<u64>,
        now: TimeMs,
    ) {
        let (before, after) = (host.requested_bytes(), plan.requested_bytes());
        // Memory that is still plugged, because the guest has not followed a shrink, is online
        // already.
        let to_come = after.saturating_sub(before.max(host.plugged_bytes()));
        match total_bytes {
            Some(total_bytes) if to_come > 0 => self.grown(to_come, total_bytes, now),
            _ if after < before => self.abandoned(),
            _ => {}
        }
    }

    /// Adds a grow by `bytes` of a guest with a total of `total_bytes`.
    fn grown(&mut self, bytes: u64, total_bytes: u64, now: TimeMs) {
        let start = Running { started: now, from_bytes: total_bytes, grown_bytes: 0 };
        self.running.get_or_insert(start).grown_bytes += bytes;
    }

    /// Subtracts memory that the host could not provide. If it is requested from another zone, that
    /// grow is part of the same shortage.
    pub(super) fn lacks(&mut self, bytes: u64) {
        if let Some(running) = &mut self.running {
            running.grown_bytes = running.grown_bytes.saturating_sub(bytes);
        }
    }

    /// Ends the shortage without a result, because less was requested, so the missing memory will
    /// not arrive.
    pub(super) fn abandoned(&mut self) {
        self.running = None;
    }

    /// Handles a report with a total of `total_bytes`.
    pub(super) fn reported(&mut self, total_bytes: u64, now: TimeMs) -> Option<Ended> {
        let running = self.running?;
        if running.grown_bytes == 0 {
            // The host could provide nothing, and no other zone got a request.
            self.running = None;
            return None;
        }
        let need = running.grown_bytes - running.grown_bytes / 100 * TOLERANCE_PERCENT;
        if total_bytes.saturating_sub(running.from_bytes) < need {
            return None;
        }
        self.running = None;
        Some(Ended { took_ms: now.since(running.started), grown_bytes: running.grown_bytes })
    }
}

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
    /// Returns whether page descriptors have held back the plans for `patience_ms` at one size. It
    /// returns true once until the plans proceed, although the policy makes a plan with each
    /// report.
    ///
    /// A quiet plan decides nothing, so it changes nothing here.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortage_lasts_from_first_grow_until_all_memory_is_online() {
        let mut shortage = Shortage::default();
        assert_eq!(shortage.reported(1000, TimeMs(5)), None);
        shortage.grown(500, 1000, TimeMs(10));
        assert_eq!(shortage.reported(1400, TimeMs(20)), None);
        shortage.grown(500, 1400, TimeMs(20));
        assert_eq!(shortage.reported(1900, TimeMs(30)), None);
        assert_eq!(
            shortage.reported(1990, TimeMs(40)),
            Some(Ended { took_ms: 30, grown_bytes: 1000 })
        );
        assert_eq!(shortage.reported(1990, TimeMs(50)), None);
    }

    #[test]
    fn memory_missing_on_host_is_only_awaited_from_other_zones() {
        let mut shortage = Shortage::default();
        shortage.grown(500, 1000, TimeMs(10));
        shortage.lacks(400);
        shortage.grown(400, 1000, TimeMs(20));
        assert_eq!(shortage.reported(1400, TimeMs(30)), None);
        assert_eq!(
            shortage.reported(1500, TimeMs(40)),
            Some(Ended { took_ms: 30, grown_bytes: 500 })
        );
    }

    #[test]
    fn grow_that_no_zone_could_provide_is_no_shortage() {
        let mut shortage = Shortage::default();
        shortage.grown(500, 1000, TimeMs(10));
        shortage.lacks(600);
        assert_eq!(shortage.reported(1000, TimeMs(20)), None);
        shortage.grown(300, 1000, TimeMs(9_000));
        assert_eq!(
            shortage.reported(1300, TimeMs(9_100)),
            Some(Ended { took_ms: 100, grown_bytes: 300 })
        );
    }

    #[test]
    fn shrink_ends_shortage_without_result() {
        let mut shortage = Shortage::default();
        shortage.grown(500, 1000, TimeMs(10));
        shortage.abandoned();
        assert_eq!(shortage.reported(9000, TimeMs(20)), None);
    }
}
