//! Input and output of [`Governor::run`](super::Governor::run).

use foreshore_proto::{AgentMessage, Hello, OnlinePolicy, Refusal, Report};

use super::{AgentState, ResizeTarget};
use crate::controller::Rules;
use crate::plan::Plan;
use crate::policy::Policy;
use crate::{HostView, TimeMs, ZoneId};

/// Event of a VM.
#[derive(Clone, Debug)]
pub enum Event {
    /// An agent has connected.
    AgentConnected,
    /// The agent's connection has ended.
    AgentGone,
    /// The agent has sent a line.
    Message {
        /// The message, or the reason why the line was refused.
        message: Result<AgentMessage, Refusal>,
        /// The present time including the time in which the host slept.
        with_sleep: TimeMs,
    },
    /// The guest has reported. The report has passed all checks.
    Report(Report),
    /// Time has passed, or a plugged size or statistics have changed. Due at least once a second.
    Tick,
    /// A client has sized a zone, which pins it.
    Resize(ResizeTarget),
    /// A zone has a size at boot. The policy may change it later.
    BootWith(ResizeTarget),
    /// A client has changed the governor.
    Change(Change),
    /// A DIMM of this size in bytes is added. Its page descriptors need room like those of a zone.
    AddDimm(u64),
}

/// Change of the governor. `None` leaves a value unchanged. All values have been validated.
#[derive(Clone, Debug, Default)]
pub struct Change {
    /// The policy with its parameters.
    pub policy: Option<Policy>,
    /// The rules' parameters.
    pub rules: Option<Rules>,
    /// Make decisions without carrying them out.
    pub dry_run: Option<bool>,
    /// Return a zone, or all zones (`None`), to the governor. The latter also ends a pause of the
    /// governor.
    pub resume: Option<Option<ZoneId>>,
    /// Pause or resume decisions.
    pub paused: Option<bool>,
}

/// Access to the devices of a VM.
pub trait Devices {
    /// Performs the requests of a step.
    fn perform(&mut self, requests: Vec<Request>);

    /// Reads the sizes of zones, pool and balloon.
    fn host(&mut self) -> HostView;
}

/// Notes of a step, with the host on which it was decided.
#[derive(Clone, Debug)]
pub struct StepNotes {
    /// Notes for the log, the trace and metrics.
    pub notes: Vec<Note>,
    /// The host before the requests of the step.
    pub host: HostView,
}

/// Results of a step, in the order in which they are performed.
#[derive(Debug, Default)]
pub(super) struct Effects {
    pub requests: Vec<Request>,
    pub notes: Vec<Note>,
    /// Step that follows the requests.
    pub next: Option<FollowUp>,
}

/// Step that follows the requests of another one.
#[derive(Clone, Copy, Debug)]
pub(super) enum FollowUp {
    /// Requests the next steps towards sizes that a client requested, after the requests of a plan.
    Goals {
        /// Decides after these steps.
        then_decide: bool,
    },
    /// Second half of a tick, after steps towards a client's size.
    Decide,
    /// Only observes the new sizes.
    Observe,
}

impl Effects {
    /// Reports that a zone waits for room for page descriptors.
    pub(super) fn report_held(&mut self, zone: ZoneId) {
        self.requests.push(Request::ReportHeld(zone));
        self.notes.push(Note::Held(zone));
    }

    /// Returns true if sizes are requested.
    pub(super) fn is_sizing(&self) -> bool {
        let is_size =
            |request: &Request| matches!(request, Request::Size(..) | Request::Step { .. });
        self.requests.iter().any(is_size)
    }
}

/// Request to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Request a size in bytes: a multiple of the zone's block size, within its bounds.
    Size(ZoneId, u64),
    /// Request a size as a step towards another one.
    Step {
        /// The zone.
        zone: ZoneId,
        /// Size to request now.
        size_bytes: u64,
        /// Size that the client requested.
        goal_bytes: u64,
    },
    /// Notify the guest's driver again of the requested size. A driver that waits for its next try
    /// makes it at once.
    Remind(ZoneId),
    /// Report that a size is out of reach, because the guest has no room for page descriptors.
    ReportHeld(ZoneId),
    /// Request statistics from the driver of the balloon.
    AskStatistics,
}

/// Note for the log, the trace or metrics.
#[derive(Clone, Debug)]
pub enum Note {
    /// An agent has connected.
    AgentConnected,
    /// The agent's connection has ended.
    AgentGone,
    /// No agent has connected for `lost` since the last one disconnected.
    AgentMissed,
    /// The state of the agent has changed to `Silent`, or from it.
    AgentState(AgentState),
    /// Hello of the agent.
    Hello(Hello),
    /// A line of the agent, or statistics of the balloon, were refused.
    Refused {
        /// The reason.
        refusal: Refusal,
        /// False for statistics.
        by_agent: bool,
        /// Number of refusals for this reason.
        count: u64,
    },
    /// Statistics of the balloon replace reports from now on.
    StatisticsTakeOver,
    /// The guest's driver of a zone is ready.
    DriverReady(ZoneId),
    /// A zone makes no progress, and its driver is reminded for the first time.
    NoProgress(ZoneId),
    /// A zone waits for room for page descriptors.
    Held(ZoneId),
    /// The memory that the guest was short of is online.
    Online {
        /// Time since the first report of the shortage.
        took_ms: u64,
        /// Growth of the guest.
        grown_bytes: u64,
    },
    /// A zone has reached the size in bytes that was requested last.
    Reached(ZoneId, u64),
    /// The online policy of the guest has changed.
    OnlinePolicy(OnlinePolicy),
    /// A client has requested another size of a zone, in bytes.
    Resized(ZoneId, u64),
    /// A plan was made.
    Decided(Decided),
}

/// A plan, for the log and the trace.
#[derive(Clone, Debug)]
pub struct Decided {
    /// The plan.
    pub plan: Plan,
    /// Name of the policy.
    pub policy: &'static str,
    /// The plan follows a report, which is the last one.
    pub has_reported: bool,
    /// Number of the decision. `None` if it repeats an earlier one.
    pub number: Option<u64>,
}
