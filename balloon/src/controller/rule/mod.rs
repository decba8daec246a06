//! The rules above every policy, as pure functions. docs/policy.md explains them, and their numbers
//! here are its.
//!
//! Rules 1, 2, 4 and 8 limit plans of the others: see [`policy`], [`super::descriptors`] and
//! [`Context::left`].

mod bounds;
mod by_hand;
mod host_short;
mod lost_reports;
mod no_progress;
mod policy;

use std::borrow::Cow;

pub(super) use self::host_short::HostShortfall;
pub(super) use self::lost_reports::Lost;
use super::{Controller, Event, LastReport, ZoneTracker, zone_tracker};
use crate::plan::Plan;
use crate::policy::Decision;
use crate::{HostView, TimeMs};

/// Decides upon a context, or leaves the decision to the next rule.
type Rule = fn(&Context<'_>) -> Verdict;

/// Rules in order of precedence, before the policy. The first that returns a plan decides.
const RULES: [Rule; 5] = [
    by_hand::decide,      // 7
    no_progress::decide,  // 5
    bounds::decide,       // 3
    host_short::decide,   // 5
    lost_reports::decide, // 6
];

/// Input of a rule.
pub(super) struct Context<'a> {
    pub controller: &'a Controller,
    pub event: Event<'a>,
    pub host: &'a HostView,
    pub now: TimeMs,
}

/// Decision of a rule.
#[derive(Default)]
struct Verdict {
    /// `None`: the next rule decides.
    plan: Option<Plan>,
    memory: Option<Memory>,
}

impl From<Option<Plan>> for Verdict {
    fn from(plan: Option<Plan>) -> Self {
        Verdict { plan, memory: None }
    }
}

/// State that the controller keeps after a rule, also if the next rule decides.
enum Memory {
    /// State of the zones.
    Zones(Vec<ZoneTracker>),
    /// No zone has failed: a dry run reports the next failure again.
    NoneFailed,
    /// A dry run has reported what rule 3 would do.
    BoundsTold(bool),
    /// Grows since reports were lost.
    Lost(Lost),
}

impl Context<'_> {
    /// Rule 8: sizes that a dry run decides upon. Requests that rule 5 would withdraw count as
    /// withdrawn, or the dry run would report nothing else.
    pub fn left(&self) -> Cow<'_, HostView> {
        self.controller.without_failed(self.host, self.now)
    }

    /// The last report, or `decision` if there is none.
    fn last_or(&self, decision: Decision) -> LastReport {
        self.controller.last.unwrap_or_else(|| self.controller.unreported(decision, self.now))
    }
}

impl Controller {
    /// Asks the rules in their order.
    pub(super) fn plan(&mut self, event: Event<'_>, host: &HostView, now: TimeMs) -> Plan {
        for rule in RULES {
            let Verdict { plan, memory } = rule(&Context { controller: self, event, host, now });
            match memory {
                Some(Memory::Zones(zones)) => self.zones = zones,
                Some(Memory::NoneFailed) => {
                    self.zones.iter_mut().for_each(|zone| zone.told = false)
                }
                Some(Memory::BoundsTold(told)) => self.told_bounds = told,
                Some(Memory::Lost(lost)) => self.lost = lost,
                None => {}
            }
            if let Some(plan) = plan {
                return plan;
            }
        }
        policy::plan(&Context { controller: self, event, host, now })
    }

    pub(super) fn without_failed<'a>(&self, host: &'a HostView, now: TimeMs) -> Cow<'a, HostView> {
        let mut left = Cow::Borrowed(host);
        if !self.rules.dry_run {
            return left;
        }
        for (index, (zone, followed)) in host.zones.iter().zip(&self.zones).enumerate() {
            if !followed.pinned && followed.has_failed(zone, &self.rules, now) {
                left.to_mut().zones[index].requested_bytes = zone_tracker::left_bytes(zone, 0);
            }
        }
        left
    }
}
