//! Sizes a guest without an agent by its balloon statistics, which replace the agent's reports.

use foreshore_proto::{Memory, Refusal, Report, Settings};

use super::placing::Placing;
use super::{Effects, Request};
use crate::statistics::{Estimator, Known, correct};
use crate::{HostView, TimeMs};

/// Time since the agent's last report after which the governor uses statistics instead. It gives an
/// agent time to restart. A new connection does not extend this time, because a program may connect
/// and crash in a loop.
///
/// If no agent has reported under the present kernel, the governor uses statistics immediately,
/// because a guest may run short of memory as soon as it has booted. However, if the agent decides
/// how plugged memory is onlined, the governor waits for the agent's first report, up to this time.
const PATIENCE_MS: u64 = 10_000;
/// Interval between requests for statistics.
const REST_INTERVAL_MS: u64 = 1_000;
/// Interval between requests for statistics while memory is below the policy's watermark. An agent
/// then reports twice as often, but statistics cost the guest more.
pub const FAST_INTERVAL_MS: u64 = 100;

/// Source of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reporter {
    /// The agent. Its reports show each zone.
    Agent,
    /// Statistics of the balloon. They contain totals only.
    Statistics,
}

/// Component that onlines memory that is plugged before the agent's first report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Onlining {
    /// The kernel, which the VMM's command line configures to online all memory as movable.
    CommandLine,
    /// The agent. Until it starts, memory may be onlined in a way that prevents its removal.
    Agent,
}

/// Last report of the agent.
#[derive(Clone, Copy, Debug)]
struct Reported {
    at: TimeMs,
    /// Generation of the balloon driver at that time, if the driver had sent statistics. A new
    /// generation means that the driver was loaded again, possibly by another kernel after kexec.
    driver_life: Option<u64>,
}

/// State of the statistics that replace the agent's reports.
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
    /// Creates the state for a guest whose agent has not reported yet.
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

    /// Returns true if statistics currently replace the agent's reports.
    pub(super) fn is_active(&self) -> bool {
        self.is_active
    }

    /// Returns true if statistics should be requested at the fast rate.
    pub(super) fn is_fast(&self, settings: &Settings) -> bool {
        self.is_active && self.memory.is_some_and(|memory| settings.is_under(&memory))
    }

    /// Handles an agent's report, after which statistics are no longer used. Returns the report
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

    /// Requests statistics when they are due. If new statistics have arrived and no agent's report
    /// is awaited, returns a report made from them.
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

    /// Splits a report made from statistics into nodes. An agent's report is returned unchanged,
    /// and its values calibrate the split.
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
