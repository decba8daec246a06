//! Input and output types of [`Governor::run`](super::Governor::run).

use foreshore_proto::{AgentMessage, Hello, OnlinePolicy, Refusal, Report};

use super::{AgentState, ResizeTarget};
use crate::controller::Rules;
use crate::plan::Plan;
use crate::policy::Policy;
use crate::{HostView, TimeMs, ZoneId};

/// Event that the governor handles.
#[derive(Clone, Debug)]
pub enum Event {
    /// An agent has connected.
    AgentConnected,
    /// The agent's connection has ended.
    AgentDisconnected,
    /// The agent has sent a line.
    Message {
        /// The message, or the reason why its line was refused.
        message: Result<AgentMessage, Refusal>,
        /// Present time, including time during which the host was suspended.
        boottime: TimeMs,
    },
    /// The guest has sent a report, and it has passed all checks.
    Report(Report),
    /// Time has passed, or a plugged size or the statistics have changed. Required at least once
    /// per second.
    Tick,
    /// A client has resized a zone, which also pins it.
    Resize(ResizeTarget),
    /// A zone has been given a size at boot. The policy may change this size later.
    BootSize(ResizeTarget),
    /// A client has changed the governor's settings.
    Change(Change),
    /// A DIMM of this size in bytes is being added. Like a zone's memory, it needs room for its
    /// page descriptors.
    AddDimm(u64),
}

/// Change of the governor's settings. `None` leaves a setting unchanged. All values have been
/// validated.
#[derive(Clone, Debug, Default)]
pub struct Change {
    /// New policy with its parameters.
    pub policy: Option<Policy>,
    /// New parameters of the rules.
    pub rules: Option<Rules>,
    /// If true, decisions are made but not carried out.
    pub dry_run: Option<bool>,
    /// Zone to return to the governor, or `None` for all zones. Returning all zones also ends a
    /// pause of the governor.
    pub resume: Option<Option<ZoneId>>,
    /// If true, pauses the governor. If false, ends a pause.
    pub paused: Option<bool>,
}

/// Access to the devices of a VM.
pub trait Devices {
    /// Sends the requests of one step to the devices.
    fn perform(&mut self, requests: Vec<Request>);

    /// Reads the sizes of the zones, the pool and the balloon.
    fn host(&mut self) -> HostView;
}

/// Notes of one step, and the host's state on which the step was based.
#[derive(Clone, Debug)]
pub struct StepNotes {
    /// Notes for the log, the trace and metrics.
    pub notes: Vec<Note>,
    /// State of the host before the requests of this step.
    pub host: HostView,
}

/// Results of one step, in the order in which they are carried out.
#[derive(Debug, Default)]
pub(super) struct Effects {
    pub requests: Vec<Request>,
    pub notes: Vec<Note>,
    /// Step to run after the requests.
    pub next: Option<FollowUp>,
}

/// Step that the governor runs after the requests of the present step.
#[derive(Clone, Copy, Debug)]
pub(super) enum FollowUp {
    /// Requests the next steps towards the sizes that clients requested, after a plan's requests.
    Goals {
        /// If true, makes a decision after these steps.
        then_decide: bool,
    },
    /// Second half of a tick, which runs after steps towards the sizes that clients requested.
    Decide,
    /// Observes the new sizes without making a decision.
    Observe,
}

impl Effects {
    /// Notes that a zone waits until the guest has room for page descriptors.
    pub(super) fn report_held(&mut self, zone: ZoneId) {
        self.requests.push(Request::ReportHeld(zone));
        self.notes.push(Note::Held(zone));
    }

    /// Returns true if any request changes a size.
    pub(super) fn changes_sizes(&self) -> bool {
        let is_size =
            |request: &Request| matches!(request, Request::Size(..) | Request::Step { .. });
        self.requests.iter().any(is_size)
    }
}

/// Request to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Request a size in bytes, which is a multiple of the zone's block size and within the zone's
    /// bounds.
    Size(ZoneId, u64),
    /// Request a size that is a step towards the size that a client requested.
    Step {
        /// The zone.
        zone: ZoneId,
        /// Size to request now.
        size_bytes: u64,
        /// Size that the client requested.
        goal_bytes: u64,
    },
    /// Notify the guest's driver again of the requested size. A driver that is waiting before its
    /// next attempt then retries immediately.
    Remind(ZoneId),
    /// Report that a size cannot be reached because the guest has no room for page descriptors.
    ReportHeld(ZoneId),
    /// Request statistics from the balloon driver.
    Statistics,
}

/// Note for the log, the trace or metrics.
#[derive(Clone, Debug)]
pub enum Note {
    /// An agent has connected.
    AgentConnected,
    /// The agent's connection has ended.
    AgentDisconnected,
    /// No agent has connected since the last one disconnected, for the time of the parameter
    /// `lost`.
    AgentMissing,
    /// The agent's state has changed to `Silent`, or from `Silent` to another state.
    AgentState(AgentState),
    /// The agent has sent its hello.
    Hello(Hello),
    /// A line from the agent or a set of balloon statistics was refused.
    Refused {
        /// The reason.
        refusal: Refusal,
        /// True for a line from the agent, and false for statistics.
        by_agent: bool,
        /// Number of refusals so far for this reason.
        count: u64,
    },
    /// From now on, balloon statistics replace the agent's reports.
    StatisticsTakeOver,
    /// The guest's driver of a zone is ready.
    DriverReady(ZoneId),
    /// A zone makes no progress, and its driver has been reminded for the first time.
    NoProgress(ZoneId),
    /// A zone waits until the guest has room for page descriptors.
    Held(ZoneId),
    /// A shortage has ended because the requested memory is online.
    Online {
        /// Time since the first report of the shortage.
        took_ms: u64,
        /// Amount of memory that was added during the shortage.
        grown_bytes: u64,
    },
    /// A zone has reached the last requested size, in bytes.
    Reached(ZoneId, u64),
    /// The online policy of the guest has changed.
    OnlinePolicy(OnlinePolicy),
    /// A client has requested another size for a zone, in bytes.
    Resized(ZoneId, u64),
    /// The governor has made a plan.
    Plan(PlanNote),
}

/// A plan as written to the log and the trace.
#[derive(Clone, Debug)]
pub struct PlanNote {
    /// The plan.
    pub plan: Plan,
    /// Name of the policy.
    pub policy: &'static str,
    /// True if the governor's last report caused the plan.
    pub is_from_report: bool,
    /// Number of the decision. `None` if the plan repeats an earlier decision.
    pub number: Option<u64>,
}
