//! Governor of one VM. The governor is a state machine without a clock, devices or sockets.
//!
//! ```text
//!   Event: message of the agent, resize, time ──┐              ┌─► requests to devices
//!   HostView: sizes of zones, pool, balloon ────┼─► Governor ──┼─► notes for the log, the trace and metrics
//!   TimeMs ─────────────────────────────────────┘    ::run
//! ```
//!
//! The caller reads the host's state and calls [`Governor::run`]. [`Devices`] carry out the
//! requests. The caller may then read the host's state again, because a device may have lowered a
//! request. The caller writes the notes last, because the guest waits for the requests.

mod agent;
mod agentless;
mod audit;
pub mod decision;
mod effects;
mod requests;
mod shortage;
mod status;
mod zone_split;

use std::collections::{BTreeMap, BTreeSet};

use foreshore_proto::{AgentMessage, OnlinePolicy, Refusal, Report, Settings};

use self::agent::Agent;
use self::agentless::{Agentless, Reporter};
pub use self::agentless::{FAST_INTERVAL_MS, Onlining};
use self::audit::DecisionContext;
pub use self::audit::{Audit, AuditedZone, Entry};
pub use self::effects::{Change, Devices, Event, Note, PlanNote, Request, StepNotes};
use self::effects::{Effects, FollowUp};
pub use self::requests::{ResizeTarget, ResizeTargetError};
use self::shortage::{EndedShortage, HeldPlan, Shortage};
pub use self::status::AgentState;
use crate::controller::{self, Controller, Reminder, Rules};
use crate::plan::{Plan, ZoneTarget};
use crate::policy::Policy;
use crate::{DriverState, HostView, Intake, ParamError, TimeMs, ZoneId, ZoneSizes};

/// Counters since the governor started.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    /// Number of plans by policy, direction and reason. Plans that request nothing and repeat an
    /// earlier plan are not counted.
    pub plans: BTreeMap<(&'static str, &'static str, &'static str), u64>,
    /// Policies that have been used.
    pub policies: BTreeSet<&'static str>,
    /// Number of accepted reports.
    pub reports: u64,
    /// Number of refused lines, by reason.
    pub refused: BTreeMap<&'static str, u64>,
    /// Number of agent connections.
    pub connections: u64,
    /// Number of reminders sent to guests that made no progress.
    pub reminders: u64,
}

/// The governor of one VM.
#[derive(Clone, Debug)]
pub struct Governor {
    controller: Controller,
    intake: Intake,
    last_report: Option<(TimeMs, Report)>,
    agent: Agent,
    settings: Settings,
    audit: Audit,
    shortage: Shortage,
    held_plan: HeldPlan,
    counters: Counters,
    last_online_ms: Option<u64>,
    /// Zones that have reached their requested size, with that size. An entry is removed when its
    /// note is written.
    reached: Vec<(ZoneId, u64)>,
    agentless: Option<Agentless>,
    /// Last known online policy of the guest.
    online_policy: OnlinePolicy,
}

impl Governor {
    /// Creates the governor of a guest that has just started. `host` contains the guest's zones.
    pub fn new(
        policy: Policy,
        rules: Rules,
        is_paused: bool,
        host: &HostView,
        now: TimeMs,
    ) -> Result<Self, ParamError> {
        let counters =
            Counters { policies: BTreeSet::from([policy.name()]), ..Counters::default() };
        let mut governor = Self {
            controller: Controller::new(policy, rules)?,
            intake: Intake::new(now),
            last_report: None,
            agent: Agent::default(),
            settings: Settings::with_watermark(0),
            audit: Audit::default(),
            shortage: Shortage::default(),
            held_plan: HeldPlan::default(),
            counters,
            last_online_ms: None,
            reached: Vec::new(),
            agentless: None,
            online_policy: OnlinePolicy::Unknown,
        };
        governor.controller.observe(host, now);
        governor.settings.hotplug_bytes = host.pluggable_bytes();
        if is_paused {
            governor.controller.pause();
        }
        Ok(governor)
    }

    /// Enables the use of balloon statistics while no agent reports.
    pub fn use_statistics(&mut self, onlining: Onlining) {
        self.agentless = Some(Agentless::new(onlining));
    }

    /// Handles an event, and passes the resulting requests to `devices`. `host` is the host's
    /// present state. Returns the notes of each step for the log and the trace, with the host's
    /// state before that step.
    pub fn run(
        &mut self,
        event: Event,
        mut host: HostView,
        devices: &mut impl Devices,
        now: TimeMs,
    ) -> Vec<StepNotes> {
        let mut steps = Vec::new();
        let mut effects = Effects::default();
        self.handle(event, &host, now, &mut effects);
        loop {
            let Effects { requests, notes, next } = std::mem::take(&mut effects);
            devices.perform(requests);
            steps.push(StepNotes { notes, host });
            let Some(next) = next else { return steps };
            host = devices.host();
            self.observe(&host, now, &mut effects);
            match next {
                FollowUp::Goals { then_decide } => {
                    self.request_goals(then_decide, &host, now, &mut effects);
                }
                FollowUp::Decide => self.decide(&host, now, &mut effects),
                FollowUp::Observe => self.note_reached(&mut effects),
            }
        }
    }

    fn handle(&mut self, event: Event, host: &HostView, now: TimeMs, effects: &mut Effects) {
        match event {
            Event::AgentConnected => self.agent_connected(now, effects),
            Event::AgentDisconnected => self.agent_disconnected(now, effects),
            Event::Message { message, boottime } => {
                self.message(message, boottime, host, now, effects);
            }
            Event::Report(report) => self.agent_report(report, host, now, effects),
            Event::Tick => self.tick(host, now, effects),
            Event::Resize(target) => self.resize(target, host, now, effects),
            Event::BootSize(target) => {
                self.observe(host, now, effects);
                self.controller.set_goal(target.zone(), target.size_bytes());
                self.follow_goals(host, now, effects);
            }
            Event::Change(change) => self.change(change, host, effects),
            Event::AddDimm(bytes) => self.controller.add_dimm(bytes, now),
        }
    }

    /// Handles a message of the agent, or the reason why its line was refused. `boottime` is
    /// `now` plus the time during which the host was suspended. The guest's clock is compared with
    /// it.
    fn message(
        &mut self,
        message: Result<AgentMessage, Refusal>,
        boottime: TimeMs,
        host: &HostView,
        now: TimeMs,
        effects: &mut Effects,
    ) {
        match message.and_then(|message| self.accept(message, host, boottime)) {
            Ok(AgentMessage::Hello(hello)) => effects.notes.push(Note::Hello(hello)),
            Ok(AgentMessage::Report(report)) => {
                self.agent.last_contact = Some(now);
                let report = match &mut self.agentless {
                    Some(agentless) => agentless.agent_reported(report, host, now),
                    None => report,
                };
                self.agent_report(report, host, now, effects);
            }
            Err(refusal) => self.count_refusal(refusal, Reporter::Agent, effects),
        }
    }

    /// Decides after an agent's report, and requests the next steps towards sizes that clients
    /// requested.
    fn agent_report(
        &mut self,
        report: Report,
        host: &HostView,
        now: TimeMs,
        effects: &mut Effects,
    ) {
        self.report(report, Reporter::Agent, host, now, effects);
        // The plan's requests change the sizes from which the goals proceed.
        match effects.requests.is_empty() {
            true => self.request_goals(false, host, now, effects),
            false if self.controller.has_goals() => {
                effects.next = Some(FollowUp::Goals { then_decide: false });
            }
            false => {}
        }
    }

    /// Accepts an agent's message if its values are possible for this VM. The protocol only checks
    /// bounds that apply to any machine.
    fn accept(
        &mut self,
        message: AgentMessage,
        host: &HostView,
        boottime: TimeMs,
    ) -> Result<AgentMessage, Refusal> {
        let message = self.intake.accept(message, boottime)?;
        if let AgentMessage::Report(report) = &message {
            report.check_within(host.max_memory_bytes())?;
        }
        Ok(message)
    }

    /// Counts a refusal. Writes a note when the count is a power of two, so that the log grows
    /// slowly.
    fn count_refusal(&mut self, refusal: Refusal, from: Reporter, effects: &mut Effects) {
        let count = self.counters.refused.entry(refusal.label()).or_default();
        *count += 1;
        if count.is_power_of_two() {
            let by_agent = from == Reporter::Agent;
            effects.notes.push(Note::Refused { refusal, by_agent, count: *count });
        }
    }

    fn report(
        &mut self,
        report: Report,
        from: Reporter,
        host: &HostView,
        now: TimeMs,
        effects: &mut Effects,
    ) {
        self.counters.reports += 1;
        let ended = self.shortage.record_report(report.memory().total_bytes, now);
        self.observe(host, now, effects);
        let report = match &mut self.agentless {
            Some(agentless) => agentless.split(report, from, host),
            None => report,
        };
        let plan = self.controller.decide(controller::Event::Report(&report), host, now);
        self.last_report = Some((now, report));
        self.request(&plan, host, now, effects);
        self.note_plan(plan, ended, true, host, now, effects);
    }

    /// Handles a tick: time has passed, or a plugged size or statistics have changed.
    fn tick(&mut self, host: &HostView, now: TimeMs, effects: &mut Effects) {
        self.watch_agent(now, effects);
        let was_active = self.is_by_statistics();
        let statistics_report = self
            .agentless
            .as_mut()
            .and_then(|agentless| agentless.tick(&self.settings, host, now, effects));
        if self.is_by_statistics() && !was_active {
            effects.notes.push(Note::StatisticsTakeOver);
        }
        match statistics_report {
            Some(Ok(report)) => self.report(report, Reporter::Statistics, host, now, effects),
            Some(Err(refusal)) => {
                self.count_refusal(refusal, Reporter::Statistics, effects);
                self.observe(host, now, effects);
            }
            None => self.observe(host, now, effects),
        }
        match effects.changes_sizes() {
            true => effects.next = Some(FollowUp::Goals { then_decide: true }),
            false => self.request_goals(true, host, now, effects),
        }
    }

    /// Requests the next steps towards sizes that clients requested. If `then_decide` is set, the
    /// tick's decision is made after those steps, or immediately if no step is needed.
    fn request_goals(
        &mut self,
        then_decide: bool,
        host: &HostView,
        now: TimeMs,
        effects: &mut Effects,
    ) {
        if self.follow_goals(host, now, effects) {
            effects.next = Some(if then_decide { FollowUp::Decide } else { FollowUp::Observe });
        } else if then_decide {
            self.decide(host, now, effects);
        }
    }

    /// Reminds zones that make no progress, and makes a decision without a report.
    fn decide(&mut self, host: &HostView, now: TimeMs, effects: &mut Effects) {
        let (patience_ms, is_dry_run) =
            (self.controller.rules().progress_ms, self.controller.rules().dry_run);
        for (zone, sizes) in self.controller.trackers_mut().zip(&host.zones) {
            // In a dry run, the guest receives requests from clients only.
            if is_dry_run && !zone.is_pinned() {
                continue;
            }
            if zone.is_held_report_due(patience_ms, now) {
                effects.report_held(sizes.id);
            }
            if let Some(reminder) = zone.remind(patience_ms, now) {
                if reminder == Reminder::First {
                    effects.notes.push(Note::NoProgress(sizes.id));
                }
                self.counters.reminders += 1;
                effects.requests.push(Request::Remind(sizes.id));
            }
        }
        let plan = self.controller.decide(controller::Event::Tick, host, now);
        self.request(&plan, host, now, effects);
        self.note_plan(plan, None, false, host, now, effects);
    }

    /// Passes the host's present sizes to the controller. Called once per step.
    fn observe(&mut self, host: &HostView, now: TimeMs, effects: &mut Effects) {
        for (changes, sizes) in self.controller.observe(host, now).into_iter().zip(&host.zones) {
            self.shortage.subtract_shortfall(changes.lowered_bytes);
            if changes.driver_became_ready {
                effects.notes.push(Note::DriverReady(sizes.id));
            }
            if changes.is_reached {
                self.reached.push((sizes.id, sizes.plugged_bytes));
            }
        }
        self.audit.observe(&host.zones, now);
        self.settings.hotplug_bytes = host.pluggable_bytes();
    }

    /// Makes a plan's requests, unless the plan is a dry run.
    fn request(&mut self, plan: &Plan, host: &HostView, now: TimeMs, effects: &mut Effects) {
        if plan.watermark_bytes != 0 {
            self.settings.watermark_bytes = plan.watermark_bytes;
            self.settings.watermark_of = plan.watermark_of;
        }
        if !plan.dry_run {
            let size = |target: &ZoneTarget| Request::Size(target.zone, target.requested_bytes);
            effects.requests.extend(plan.changes(host).map(size));
            let total_bytes =
                self.last_report.as_ref().map(|(_, report)| report.memory().total_bytes);
            self.shortage.record_plan(plan, host, total_bytes, now);
        }
        if self.held_plan.is_held_report_due(plan, self.controller.rules().progress_ms, now)
            && let Some(zone) = self.first_growable(plan, host)
        {
            effects.report_held(zone);
        }
    }

    /// Returns the zone to name in an event about a plan on hold. The event needs one zone, but the
    /// plan applies to all zones.
    fn first_growable(&self, plan: &Plan, host: &HostView) -> Option<ZoneId> {
        let could_grow = |(zone, target): &(&ZoneSizes, &ZoneTarget)| {
            host.balloon != Some(zone.id)
                && target.requested_bytes < zone.max_bytes
                && zone.driver != DriverState::Unsupported
                && !self.controller.is_pinned(zone.id)
        };
        host.zones.iter().zip(&plan.targets).find(could_grow).map(|(zone, _)| zone.id)
    }

    /// Writes a note about a plan, after notes about the changes that preceded it.
    fn note_plan(
        &mut self,
        plan: Plan,
        ended: Option<EndedShortage>,
        is_from_report: bool,
        host: &HostView,
        now: TimeMs,
        effects: &mut Effects,
    ) {
        if let Some(EndedShortage { took_ms, grown_bytes }) = ended {
            self.last_online_ms = Some(took_ms);
            effects.notes.push(Note::Online { took_ms, grown_bytes });
        }
        self.note_reached(effects);
        self.watch_online_policy(host, effects);
        let policy = self.controller.policy().name();
        let report = self.last_report.as_ref().map(|(at, report)| (*at, report));
        let near = self.controller.near();
        let is_new = self.audit.record(&plan, DecisionContext { policy, report, near, host }, now);
        if is_new {
            let key = (policy, plan.direction.label(), plan.reason.label());
            *self.counters.plans.entry(key).or_default() += 1;
        }
        let number = is_new.then(|| self.audit.total());
        effects.notes.push(Note::Plan(PlanNote { plan, policy, is_from_report, number }));
    }

    fn note_reached(&mut self, effects: &mut Effects) {
        effects
            .notes
            .extend(self.reached.drain(..).map(|(zone, bytes)| Note::Reached(zone, bytes)));
    }

    /// Writes a note for each change of the guest's online policy, because that policy limits how
    /// much memory is lent.
    fn watch_online_policy(&mut self, host: &HostView, effects: &mut Effects) {
        let Some((_, report)) = &self.last_report else { return };
        let (before, now) = (self.online_policy, report.blocks().online_policy);
        if now == before || now == OnlinePolicy::Unknown {
            return;
        }
        self.online_policy = now;
        // The balloon's memory is always online.
        let has_hotplug = host.zones.iter().any(|zone| host.balloon != Some(zone.id));
        let is_first_movable =
            now == OnlinePolicy::OnlineMovable && before == OnlinePolicy::Unknown;
        if has_hotplug && !is_first_movable {
            effects.notes.push(Note::OnlinePolicy(now));
        }
    }
}

#[cfg(test)]
impl Governor {
    /// Returns the effects of an event, without the steps that follow them.
    fn effects_of(&mut self, event: Event, host: &HostView, now: TimeMs) -> Effects {
        let mut effects = Effects::default();
        self.handle(event, host, now, &mut effects);
        effects
    }
}

/// State that the API and metrics show.
impl Governor {
    /// Returns the settings for the agent: its watermark and the hotplugged size.
    pub fn settings(&self) -> Settings {
        self.settings
    }

    /// Returns true if the next tick is due earlier than usual.
    pub fn is_fast(&self) -> bool {
        self.agentless.as_ref().is_some_and(|agentless| agentless.is_fast(&self.settings))
    }

    /// Returns true if the guest is currently sized by its balloon statistics. `None` if it has no
    /// balloon.
    pub fn by_statistics(&self) -> Option<bool> {
        self.agentless.as_ref().map(Agentless::is_active)
    }

    fn is_by_statistics(&self) -> bool {
        self.by_statistics() == Some(true)
    }

    /// Returns the controller, with its policy, rules and trackers.
    pub fn controller(&self) -> &Controller {
        &self.controller
    }

    /// Returns the last accepted report, and the time at which it arrived.
    pub fn last_report(&self) -> Option<(TimeMs, &Report)> {
        self.last_report.as_ref().map(|(at, report)| (*at, report))
    }

    /// Returns the counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Returns true if an agent is connected.
    pub fn is_agent_connected(&self) -> bool {
        self.agent.connected
    }

    /// Returns the duration of the last shortage, from its first report until the requested memory
    /// was online.
    pub fn last_online_ms(&self) -> Option<u64> {
        self.last_online_ms
    }

    /// Returns the record of recent decisions.
    pub fn audit(&self) -> &Audit {
        &self.audit
    }
}
