//! A guest without an agent: what its balloon's driver tells takes the place of reports.

use std::sync::Arc;

use crate::statistics::{Estimator, Known, Placing, Statistics, correct};
use crate::{HostView, TimeMs};
use foreshore_proto::{Memory, Refusal, Report, Settings};

/// Time since the last report of an agent after which the governor uses statistics instead, so that
/// an agent can restart. A connection does not extend this time, because a program may connect and
/// die in a loop.
///
/// If no agent has reported under the present kernel, the governor uses statistics at once, because
/// a guest may run short as soon as it has booted. If the agent decides how plugged memory is
/// onlined, the governor waits as long for its first report.
const PATIENCE_MS: u64 = 10_000;
/// How often statistics are asked for.
const REST_INTERVAL_MS: u64 = 1_000;
/// The same under the policy's watermark. An agent reports twice as often then; statistics take the guest more.
pub const FAST_INTERVAL_MS: u64 = 100;

/// A set of statistics as the device has it.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// What the driver says.
    pub statistics: Statistics,
    /// Counts up with every set.
    pub number: u64,
    /// Counts the driver's lives.
    pub driver_life: u64,
}

/// Who tells how the guest's memory is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Teller {
    /// Its agent, which knows of zones.
    Agent,
    /// The balloon's statistics, which know of memory as a whole.
    Statistics,
}

/// What the governor needs of a balloon beside its sizes.
pub trait BalloonSource: Send + Sync {
    /// Has the driver asked for statistics.
    fn ask(&self);
    /// The last that came.
    fn sample(&self) -> Option<Sample>;
    /// What is in the balloon.
    fn ballooned_bytes(&self) -> u64;
    /// Whether the guest counts that as used memory.
    fn is_counted(&self) -> bool;
}

/// Component that decides how memory is onlined that is plugged before the agent reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Onlining {
    /// The kernel, by the VMM's command line: all of it as movable.
    CommandLine,
    /// The agent. Until it starts, memory may be onlined so that it cannot leave again.
    Agent,
}

/// Last report of an agent.
#[derive(Clone, Copy, Debug)]
struct Reported {
    at: TimeMs,
    /// Life of the balloon driver at that time, if it had sent statistics. In another life the
    /// kernel is another one, after kexec, or the driver was loaded again.
    driver_life: Option<u64>,
}

/// Whether statistics are what a guest is sized by, and what has been taken of them.
pub struct Agentless {
    source: Arc<dyn BalloonSource>,
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
    /// Creates the state before any agent has reported. `source` provides the statistics.
    pub fn new(source: Arc<dyn BalloonSource>, onlining: Onlining) -> Self {
        Self {
            source,
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

    /// Whether statistics take the agent's place.
    pub fn is_active(&self) -> bool {
        self.is_active
    }

    /// Whether they are wanted more often than at rest.
    pub fn is_fast(&self, settings: &Settings) -> bool {
        self.is_active && self.memory.is_some_and(|memory| settings.is_under(&memory))
    }

    /// An agent has reported: it is listened to from now on. Returns the report as if what is in the balloon were no memory.
    pub fn agent_reported(&mut self, report: Report, memory_bytes: u64, now: TimeMs) -> Report {
        self.is_active = false;
        self.estimator.follow(&report, now);
        let driver_life = self.source.sample().map(|sample| sample.driver_life);
        self.agent = Some(Reported { at: now, driver_life });
        correct(report, self.known(driver_life.unwrap_or(0), memory_bytes))
    }

    /// Time has passed, or statistics have come: asks for the next ones, and returns a report if they are what the guest is
    /// sized by. `memory_bytes` is all that the guest can have.
    pub fn tick(
        &mut self,
        settings: &Settings,
        memory_bytes: u64,
        now: TimeMs,
    ) -> Option<Result<Report, Refusal>> {
        let sample = self.source.sample().filter(|sample| sample.number != self.taken);
        let interval_ms = if self.is_fast(settings) { FAST_INTERVAL_MS } else { REST_INTERVAL_MS };
        if self.asked.is_none_or(|at| now.since(at) >= interval_ms) {
            self.asked = Some(now);
            self.source.ask();
        }
        let sample = sample?;
        self.taken = sample.number;
        if self.is_agent_awaited(sample.driver_life, now) {
            return None;
        }
        let known = self.known(sample.driver_life, memory_bytes);
        let result = self.estimator.report(&sample.statistics, known, now);
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

    /// A report of statistics with what the host knows of where memory lies. An agent's stays as it is, and is learned from.
    pub fn place(&mut self, report: Report, teller: Teller, host: &HostView) -> Report {
        match teller {
            Teller::Statistics => self.placing.place(report, host),
            Teller::Agent => {
                self.placing.learn(&report, host);
                report
            }
        }
    }

    fn known(&self, driver_life: u64, memory_bytes: u64) -> Known {
        Known {
            driver_life,
            memory_bytes,
            ballooned_bytes: self.source.ballooned_bytes(),
            counted: self.source.is_counted(),
        }
    }
}
