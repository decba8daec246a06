//! Sizes a guest without an agent by its balloon statistics, which replace the agent's reports.

use foreshore_proto::{Memory, Refusal, Report, Settings};

use super::zone_split::ZoneSplit;
use super::{Effects, Request};
use crate::statistics::{Estimator, GuestFacts, exclude_ballooned};
use crate::{HostView, TimeMs};

/// Time since the agent's last report after which the governor uses statistics instead. The time
/// gives an agent time to restart. A new connection does not extend this time, because a program
/// may connect and crash in a loop.
///
/// If no agent has reported under the present kernel, the governor uses statistics immediately,
/// because a guest may run short of memory as soon as it has booted. However, if the agent decides
/// how plugged memory is onlined, the governor waits for the agent's first report, up to this time.
const AGENT_TIMEOUT_MS: u64 = 10_000;
/// Interval between requests for statistics.
const IDLE_INTERVAL_MS: u64 = 1_000;
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
struct LastAgentReport {
    at: TimeMs,
    /// Generation of the balloon driver at that time, if the driver had sent statistics. A new
    /// generation means that the driver was loaded again, possibly by another kernel after kexec.
    driver_generation: Option<u64>,
}

/// State of the statistics that replace the agent's reports.
#[derive(Clone, Debug)]
pub(super) struct Agentless {
    onlining: Onlining,
    agent: Option<LastAgentReport>,
    estimator: Estimator,
    zone_split: ZoneSplit,
    requested_at: Option<TimeMs>,
    last_number: u64,
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
            zone_split: ZoneSplit::default(),
            requested_at: None,
            last_number: 0,
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
        self.estimator.continue_from_agent(&report, now);
        let sample = host.balloon_state.and_then(|balloon| balloon.sample);
        let driver_generation = sample.map(|sample| sample.driver_generation);
        self.agent = Some(LastAgentReport { at: now, driver_generation });
        exclude_ballooned(report, guest_facts(driver_generation.unwrap_or(0), host))
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
        let sample = host.balloon_state?.sample.filter(|sample| sample.number != self.last_number);
        let interval_ms = if self.is_fast(settings) { FAST_INTERVAL_MS } else { IDLE_INTERVAL_MS };
        if self.requested_at.is_none_or(|at| now.since(at) >= interval_ms) {
            self.requested_at = Some(now);
            effects.requests.push(Request::Statistics);
        }
        let sample = sample?;
        self.last_number = sample.number;
        if self.is_agent_awaited(sample.driver_generation, now) {
            return None;
        }
        let result = self.estimator.report(
            &sample.statistics,
            guest_facts(sample.driver_generation, host),
            now,
        );
        if let Ok(report) = &result {
            self.is_active = true;
            self.memory = Some(*report.memory());
        }
        Some(result)
    }

    fn is_agent_awaited(&self, driver_generation: u64, now: TimeMs) -> bool {
        match self.agent {
            Some(LastAgentReport { at, driver_generation: generation }) => {
                generation.is_none_or(|generation| generation == driver_generation)
                    && now.since(at) < AGENT_TIMEOUT_MS
            }
            None => self.onlining == Onlining::Agent && now < TimeMs(AGENT_TIMEOUT_MS),
        }
    }

    /// Splits a report made from statistics into nodes. An agent's report is returned unchanged,
    /// and its values calibrate the split.
    pub(super) fn split(&mut self, report: Report, from: Reporter, host: &HostView) -> Report {
        match from {
            Reporter::Statistics => self.zone_split.split(report, host),
            Reporter::Agent => {
                self.zone_split.learn(&report, host);
                report
            }
        }
    }
}

fn guest_facts(driver_generation: u64, host: &HostView) -> GuestFacts {
    let balloon = host.balloon_state.unwrap_or_default();
    GuestFacts {
        driver_generation,
        memory_bytes: host.max_memory_bytes(),
        ballooned_bytes: balloon.ballooned_bytes,
        counts_ballooned: balloon.is_counted,
    }
}
