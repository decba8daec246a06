//! Balloon statistics in place of reports, for a guest without an agent.

use foreshore_proto::{Memory, Refusal, Report, Settings};

use super::placing::Placing;
use super::{Effects, Request};
use crate::statistics::{Estimator, Known, correct};
use crate::{HostView, TimeMs};

/// Time since the last report of an agent after which the governor uses statistics instead, so that
/// an agent can restart. A connection does not extend this time, because a program may connect and
/// die in a loop.
///
/// If no agent has reported under the present kernel, the governor uses statistics at once, because
/// a guest may run short as soon as it has booted. If the agent decides how plugged memory is
/// onlined, the governor waits as long for its first report.
const PATIENCE_MS: u64 = 10_000;
/// Time between two requests for statistics.
const REST_INTERVAL_MS: u64 = 1_000;
/// Time between two requests for statistics below the policy's watermark. An agent then reports
/// twice as often, but statistics cost the guest more.
pub const FAST_INTERVAL_MS: u64 = 100;

/// Source of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reporter {
    /// The agent, which reports zones.
    Agent,
    /// The statistics of the balloon, which have totals only.
    Statistics,
}

/// Component that brings memory online that is plugged before the agent reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Onlining {
    /// The kernel, by the VMM's command line: all memory as movable.
    CommandLine,
    /// The agent. Until it starts, memory may come online in a way that prevents its removal.
    Agent,
}

/// Last report of an agent.
#[derive(Clone, Copy, Debug)]
struct Reported {
    at: TimeMs,
    /// Life of the balloon driver at that time, if it had sent statistics. A new life means that
    /// the driver was loaded again, perhaps by another kernel after kexec.
    driver_life: Option<u64>,
}

/// State for statistics in place of reports.
#[derive(Clone, Debug)]
pub(super) struct Agentless {
    onlining: Onlining,
    agent: Option<Reported>,
    estimator: Estimator,
    placing: Placing,
    asked: Option<TimeMs>,
    taken: u64,
    is_active: bool,
    memory: Option<Memory>,
}

impl Agentless {
    /// Creates the state before any agent has reported.
    pub(super) fn new(onlining: Onlining) -> Self {
        Self {
            onlining,
            agent: None,
            estimator: Estimator::default(),
            placing: Placing::default(),
            asked: None,
            taken: 0,
            is_active: false,
            memory: None,
        }
    }

    /// Returns true if statistics take the agent's place.
    pub(super) fn is_active(&self) -> bool {
        self.is_active
    }

    /// Returns true if statistics are needed more often than at rest.
    pub(super) fn is_fast(&self, settings: &Settings) -> bool {
        self.is_active && self.memory.is_some_and(|memory| settings.is_under(&memory))
    }

    /// Handles a report of an agent, which replaces statistics from now on. Returns the report
    /// without the memory in the balloon.
    pub(super) fn agent_reported(
        &mut self,
        report: Report,
        host: &HostView,
        now: TimeMs,
    ) -> Report {
        self.is_active = false;
        self.estimator.follow(&report, now);
        let sample = host.balloon_state.and_then(|balloon| balloon.sample);
        let driver_life = sample.map(|sample| sample.driver_life);
        self.agent = Some(Reported { at: now, driver_life });
        correct(report, known(driver_life.unwrap_or(0), host))
    }

    /// Requests the next statistics when they are due. Returns a report made from new statistics,
    /// if the agent is not awaited.
    pub(super) fn tick(
        &mut self,
        settings: &Settings,
        host: &HostView,
        now: TimeMs,
        effects: &mut Effects,
    ) -> Option<Result<Report, Refusal>> {
        let sample = host.balloon_state?.sample.filter(|sample| sample.number != self.taken);
        let interval_ms = if self.is_fast(settings) { FAST_INTERVAL_MS } else { REST_INTERVAL_MS };
        if self.asked.is_none_or(|at| now.since(at) >= interval_ms) {
            self.asked = Some(now);
            effects.requests.push(Request::AskStatistics);
        }
        let sample = sample?;
        self.taken = sample.number;
        if self.is_agent_awaited(sample.driver_life, now) {
            return None;
        }
        let result =
            self.estimator.report(&sample.statistics, known(sample.driver_life, host), now);
        if let Ok(report) = &result {
            self.is_active = true;
            self.memory = Some(*report.memory());
        }
        Some(result)
    }

    fn is_agent_awaited(&self, driver_life: u64, now: TimeMs) -> bool {
        match self.agent {
            Some(Reported { at, driver_life: life }) => {
                life.is_none_or(|life| life == driver_life) && now.since(at) < PATIENCE_MS
            }
            None => self.onlining == Onlining::Agent && now < TimeMs(PATIENCE_MS),
        }
    }

    /// Divides a report of statistics by nodes. An agent's report stays as it is and calibrates the
    /// division.
    pub(super) fn place(&mut self, report: Report, from: Reporter, host: &HostView) -> Report {
        match from {
            Reporter::Statistics => self.placing.place(report, host),
            Reporter::Agent => {
                self.placing.learn(&report, host);
                report
            }
        }
    }
}

fn known(driver_life: u64, host: &HostView) -> Known {
    let balloon = host.balloon_state.unwrap_or_default();
    Known {
        driver_life,
        memory_bytes: host.most_memory_bytes(),
        ballooned_bytes: balloon.ballooned_bytes,
        counted: balloon.is_counted,
    }
}
