//! Checks that every plan of the controller must pass.

use super::*;

impl World {
    pub(super) fn check(&self, plan: &Plan) -> Result<(), TestCaseError> {
        let zones = &self.host.zones;
        prop_assert_eq!(plan.targets.len(), zones.len());
        for ((zone, target), pinned) in zones.iter().zip(&plan.targets).zip(self.pinned) {
            let bytes = target.requested_bytes;
            prop_assert_eq!(zone.id, target.zone);
            prop_assert_eq!(bytes % zone.block_bytes, 0, "whole blocks");
            prop_assert!(
                bytes >= zone.floor_bytes && bytes <= zone.max_bytes,
                "{:?}: {}",
                zone,
                bytes
            );
            prop_assert!(
                !pinned || bytes == zone.requested_bytes,
                "a zone with a manual size is not changed"
            );
        }
        prop_assert_eq!(plan.dry_run, self.dry_run);
        if self.paused {
            prop_assert_eq!((plan.direction, plan.reason), (Direction::Hold, Reason::Paused));
            prop_assert!(
                plan.changes(&self.host).next().is_none(),
                "a paused controller changes nothing"
            );
        }
        self.check_lost_reports(plan)?;
        self.check_waits(plan)?;
        self.check_dry_run(plan)?;
        if self.dry_run && self.has_uncertain_progress.contains(&true) {
            return Ok(());
        }
        self.check_bounds(plan)?;
        match plan.direction {
            Direction::Grow => self.check_grow(plan),
            Direction::Shrink => self.check_shrink(plan),
            Direction::Hold => self.check_hold(plan),
        }
    }

    /// Checks that a total outside of its bounds is corrected as much as possible, even if a client
    /// requested it.
    fn check_bounds(&self, plan: &Plan) -> Result<(), TestCaseError> {
        let (rules, requested) = (self.controller.rules(), self.base().requested_bytes());
        prop_assert!(
            plan.requested_bytes() >= rules.floor_bytes.min(requested),
            "below the floor: {:?}",
            plan
        );
        // A dry run reports this correction only once, which another check verifies.
        if self.dry_run {
            return Ok(());
        }
        let hold = [Reason::Paused, Reason::Off, Reason::NoProgress, Reason::Pinned];
        let (ways, what): (&[Reason], _) = if requested < rules.floor_bytes {
            (
                &[
                    Reason::BelowFloor,
                    Reason::AtCeiling,
                    Reason::PoolEmpty,
                    Reason::HostShort,
                    Reason::Descriptors,
                    Reason::OnlinePolicy,
                ],
                "below the floor",
            )
        } else if requested > rules.ceiling_bytes {
            (
                &[Reason::AboveCeiling, Reason::InProgress, Reason::CoolDown, Reason::AtFloor],
                "above the ceiling",
            )
        } else {
            return Ok(());
        };
        let is_held = plan.direction == Direction::Hold && hold.contains(&plan.reason);
        prop_assert!(is_held || ways.contains(&plan.reason), "stays {}: {:?}", what, plan);
        Ok(())
    }

    /// Checks that a request which the guest does not follow is changed. Memory that is unplugged
    /// again immediately does not count as progress.
    fn check_waits(&self, plan: &Plan) -> Result<(), TestCaseError> {
        // A request that is needed for the floor may remain unchanged.
        if !self.decides()
            || self.dry_run
            || plan.reason == Reason::NoProgress
            || self.controller.rules().floor_bytes > 0
        {
            return Ok(());
        }
        for zone in 0..ZONES {
            prop_assert!(
                !self.is_due(zone),
                "{:?} is waited for: {:?}",
                self.host.zones[zone],
                plan
            );
        }
        Ok(())
    }

    /// Checks that a dry run shows the policy's decisions. Plans of the rules for the same sizes
    /// may be shown at most once.
    fn check_dry_run(&self, plan: &Plan) -> Result<(), TestCaseError> {
        if !self.dry_run || self.paused {
            return Ok(());
        }
        if self.is_by_rule(plan) {
            // A plan is shown once for each zone, and again after plugged memory was unplugged.
            prop_assert!(self.shown_plans < 2 * ZONES, "it keeps repeating {:?}", plan.reason);
            return Ok(());
        }
        let Some(decision) =
            self.controller.status().last_decision.filter(|_| self.arrived.is_some())
        else {
            return Ok(());
        };
        let limits = [
            Reason::AtCeiling,
            Reason::AtFloor,
            Reason::PoolEmpty,
            Reason::HostShort,
            Reason::Descriptors,
            Reason::OnlinePolicy,
            Reason::NoProgress,
            Reason::Pinned,
            Reason::CoolDown,
            Reason::InProgress,
        ];
        let has_own_reasons = matches!(self.controller.policy(), Policy::Fixed(_) | Policy::Off);
        let is_shown = plan.reason == decision.reason || limits.contains(&plan.reason);
        prop_assert!(is_shown || has_own_reasons, "{:?} is not shown: {:?}", decision, plan);
        Ok(())
    }

    /// Checks that without reports, only a fixed size or a bound shrinks the guest. Also checks
    /// that a guest that was short of memory grows.
    fn check_lost_reports(&self, plan: &Plan) -> Result<(), TestCaseError> {
        if self.arrived.is_some() {
            return Ok(());
        }
        let is_forced = [Reason::AboveCeiling, Reason::FixedSize].contains(&plan.reason);
        let is_taken = plan.direction == Direction::Shrink;
        prop_assert!(!is_taken || is_forced, "{:?} without a report of the guest", plan.reason);
        let was_short = self.last_report.is_some_and(|(_, was_short)| was_short);
        let may_try = self.controller.rules().lost_steps > 0;
        let is_grow_due =
            may_try && was_short && self.are_reports_lost() && !self.has_tried_without_report;
        prop_assert!(
            !(is_grow_due && is_hold_for_lost_reports(plan)),
            "a guest with a shortage gets no memory"
        );
        Ok(())
    }

    /// Returns true if the guest has followed all requests that the controller made.
    pub(super) fn has_followed(&self) -> bool {
        let host = self.base();
        let own = host.zones.iter().zip(self.pinned).filter(|(_, pinned)| !pinned);
        let mut outstanding =
            own.map(|(zone, _)| (zone.outstanding_grow_bytes(), zone.outstanding_shrink_bytes()));
        outstanding.all(|(grow, shrink)| grow < BLOCK_BYTES && shrink == 0)
    }

    /// Checks that the guest counted the events that `psi` gives as the reason for a plan.
    fn check_counted(&self, plan: &Plan) -> Result<(), TestCaseError> {
        let kind = match plan.reason {
            Reason::Swapping => 0,
            Reason::Thrashing => 1,
            Reason::Stalled => 2,
            _ => return Ok(()),
        };
        let until_ms = self.arrived.as_ref().map_or(0, |(_, report)| report.monotonic_ms());
        let seen = self.counted_ms[kind]
            .iter()
            .any(|ms| (until_ms.saturating_sub(HISTORY_MS)..=until_ms).contains(ms));
        prop_assert!(seen, "{:?} was not observed: {:?}", plan.reason, self.counted_ms[kind]);
        Ok(())
    }

    /// Checks that `psi` does not remove more memory than is idle or free, if all nodes report idle
    /// memory.
    fn check_idle(&self, plan: &Plan) -> Result<(), TestCaseError> {
        let (Policy::Psi(params), Some((_, report))) = (self.controller.policy(), &self.arrived)
        else {
            return Ok(());
        };
        let is_known = report.idle().iter().any(|idle| idle.span_ms >= params.idle_ms);
        // A late report shows earlier changes as new. The next report then lacks these changes.
        if plan.reason != Reason::Surplus || !is_known || self.is_misled {
            return Ok(());
        }
        let idle_bytes: u64 = report.idle().iter().map(|idle| idle.idle_bytes).sum();
        let taken = self.taken_bytes(plan);
        let bound = idle_bytes.max(report.memory().free_bytes);
        prop_assert!(taken <= bound, "{} of {} that no task uses", taken, bound);
        Ok(())
    }

    fn check_grow(&self, plan: &Plan) -> Result<(), TestCaseError> {
        let (own, _) = self.controller.policy().reasons();
        let rules = [Reason::ReportsLost, Reason::BelowFloor, Reason::HostShort];
        prop_assert!(own.contains(&plan.reason) || rules.contains(&plan.reason), "{:?}", plan);
        let host = self.base();
        prop_assert!(plan.requested_bytes() > host.requested_bytes());
        prop_assert!(
            plan.requested_bytes() <= self.controller.rules().ceiling_bytes,
            "above the ceiling"
        );
        let is_asked_twice = plan.reason == Reason::HostShort && !self.has_host_shortfall;
        prop_assert!(!is_asked_twice, "memory that the host lacks is requested again: {:?}", plan);
        self.check_counted(plan)?;
        let (mut new_pm, mut owed) = (0, 0);
        for (index, (zone, target)) in host.zones.iter().zip(&plan.targets).enumerate() {
            prop_assert!(
                target.requested_bytes >= zone.requested_bytes,
                "nothing shrinks in a grow"
            );
            if zone.tier == Tier::Pm && !self.is_stuck(index) {
                new_pm += target.requested_bytes.saturating_sub(zone.plugged_bytes);
                owed += zone.outstanding_grow_bytes();
            }
        }
        prop_assert!(new_pm <= host.pool_free_bytes.max(owed), "more PM than the pool has");
        let undone = self.last_shrink.is_some_and(|at| self.now.since(at) < self.cool_down_ms);
        let is_forced =
            [Reason::ReportsLost, Reason::BelowFloor, Reason::FixedSize, Reason::HostShort]
                .contains(&plan.reason);
        let justified = is_forced || self.is_misled || self.is_needed(plan.reason);
        prop_assert!(!undone || justified, "returned without pressure: {:?}", plan.reason);
        Ok(())
    }

    fn check_shrink(&self, plan: &Plan) -> Result<(), TestCaseError> {
        let (_, own) = self.controller.policy().reasons();
        prop_assert!(
            own.contains(&plan.reason) || plan.reason == Reason::AboveCeiling,
            "{:?}",
            plan
        );
        self.check_idle(plan)?;
        self.check_remaining(plan)?;
        let host = self.base();
        prop_assert!(plan.requested_bytes() < host.requested_bytes());
        let rules = self.controller.rules();
        prop_assert!(plan.requested_bytes() >= rules.floor_bytes, "below the floor");
        let taken = host.requested_bytes() - plan.requested_bytes();
        let share_bytes = host.plugged_bytes() * rules.shrink_share_permille / 1000;
        prop_assert!(taken <= rules.shrink_step_bytes.max(share_bytes), "a step of {}", taken);
        prop_assert!(self.has_followed(), "the guest has not completed the last step");
        let cooled = self.last_grow.is_none_or(|at| self.now.since(at) >= self.cool_down_ms);
        prop_assert!(cooled, "shrunk too soon after a grow");
        let is_next =
            self.last_shrink.is_none_or(|at| self.now.since(at) >= rules.shrink_interval_ms);
        prop_assert!(is_next, "a step too soon after the last");
        let takes_dram = host.zones.iter().zip(&plan.targets).any(|(zone, target)| {
            zone.tier == Tier::Dram && target.requested_bytes < zone.requested_bytes
        });
        let has_removable_pm = (0..ZONES).any(|zone| {
            let sizes = &host.zones[zone];
            sizes.tier == Tier::Pm
                && !self.pinned[zone]
                && plan.targets[zone].requested_bytes > sizes.floor_bytes
        });
        prop_assert!(!(takes_dram && has_removable_pm), "DRAM before PM");
        Ok(())
    }

    /// Checks that a plan with the direction `Hold` requests no additional memory. A request may
    /// only move towards the plugged size. The reason should not be that of another policy.
    fn check_hold(&self, plan: &Plan) -> Result<(), TestCaseError> {
        let own = self.controller.policy().reasons();
        let is_of =
            |(grow, shrink): (&[Reason], &[Reason])| [grow, shrink].concat().contains(&plan.reason);
        let policies = Policy::NAMES.into_iter().filter_map(Policy::from_name);
        let foreign = policies.map(|policy| policy.reasons()).any(is_of) && !is_of(own);
        prop_assert!(!foreign, "{:?} of {}", plan.reason, self.controller.policy().name());
        let host = if self.is_by_rule(plan) { self.host.clone() } else { self.base() };
        let at_floor = plan.requested_bytes() < self.controller.rules().floor_bytes + BLOCK_BYTES;
        for (zone, target) in host.zones.iter().zip(&plan.targets) {
            let (now, then) = (zone.requested_bytes, target.requested_bytes);
            if then != now {
                prop_assert_eq!(plan.reason, Reason::NoProgress);
                // This memory is needed for the floor, and no other zone could provide it.
                if then > now && then > zone.plugged_bytes && at_floor {
                    continue;
                }
                let (left, was) =
                    (then.abs_diff(zone.plugged_bytes), now.abs_diff(zone.plugged_bytes));
                prop_assert!(left < was || left < BLOCK_BYTES, "{:?}: {}", zone, then);
            }
        }
        Ok(())
    }
}
