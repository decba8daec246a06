//! The governor's state: what the guest said, what was decided, what was asked of the devices.

#[cfg(test)]
mod agent_tests;
#[cfg(test)]
mod agentless_tests;
#[cfg(test)]
mod bounds_tests;
mod goals;
#[cfg(test)]
mod held_plan_tests;
#[cfg(test)]
mod kexec_tests;
mod present;
mod show;
#[cfg(test)]
mod unsupported_driver_tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::{self, Write};
use std::time::Duration;

use balloon::controller::{Controller, Event, Rules};
use balloon::params::{Setting, Unit};
use balloon::plan::{Direction, Plan};
use balloon::policy::Policy;
use balloon::proto::{AgentMessage, Hello, OnlinePolicy, Refusal, Report, Settings};
use balloon::{Distances, DriverState, HostView, Intake, TimeMs, ZoneId, ZoneSizes};
use thiserror::Error;
use tracing::{info, warn};

use self::present::Present;
use super::record::{Recorder, Target};
use super::{Beside, GovernedZone, PoolFree};
use crate::config::{FIXED_SIZE, ParamSettings, PressureConfig, rules_as_well};
use crate::log::sparsely;
use crate::metrics::LatencyHistogram;
use crate::vm::request::{AgentState, PressureChange, VmError};
use balloon::governor::agentless::{Agentless, Teller};
use balloon::governor::audit::{Audit, Grounds};
use balloon::governor::episode::{Ended, Episode};
use balloon::governor::held_plan::HeldPlan;
use balloon::governor::progress::{Progress, Reminder};

/// The call that changes what it does, as errors name it.
const CALL: &str = "vm.pressure";

/// What is counted; totals since the governor started.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    /// Plans by policy, direction and reason. What asks nothing of the guest and says nothing new is left out.
    pub plans: BTreeMap<(&'static str, &'static str, &'static str), u64>,
    /// The policies that there have been, whether they have planned anything or not.
    pub policies: BTreeSet<&'static str>,
    /// Reports accepted.
    pub reports: u64,
    /// Lines refused, by reason.
    pub refused: BTreeMap<&'static str, u64>,
    /// Connections of agents.
    pub connections: u64,
    /// Bytes that agents have sent.
    pub agent_bytes: u64,
    /// Reminders sent to guests that made no progress.
    pub reminders: u64,
}

/// The guest's agent, as its connections show it.
#[derive(Clone, Copy, Debug, Default)]
struct Agent {
    connected: bool,
    /// When it connected, or reported last.
    heard: Option<TimeMs>,
    /// When its connection ended.
    gone: Option<TimeMs>,
    /// What was said of it last.
    said: Option<AgentState>,
    /// Whether it was said that it has not come back.
    missed: bool,
}

impl Agent {
    /// Whether it has been gone for so long that it is news, which it is once. It goes whenever its guest ends, too.
    fn is_missed(&mut self, now: TimeMs, lost_ms: u64) -> bool {
        let is_late = self.gone.is_some_and(|at| now.since(at) >= lost_ms);
        let is_news = is_late && !self.missed;
        self.missed |= is_news;
        is_news
    }
}

/// A zone and what was seen of it.
struct Zone {
    zone: GovernedZone,
    progress: Progress,
    /// What a plan has asked of it, as far as its device has not been seen to lower that; `None`: no plan has, or a hand has
    /// since.
    asked_bytes: Option<u64>,
}

impl Zone {
    fn report_held(&self) {
        sparsely!(
            warn,
            zone = self.zone.id,
            "The guest has no room for the page descriptors of the requested memory; the rest waits"
        );
        self.zone.device.report_held();
    }

    /// Bytes by which the device has lowered a plan's request since the last check.
    fn lacks_bytes(&mut self, sizes: &ZoneSizes) -> u64 {
        let Some(asked_bytes) = &mut self.asked_bytes else { return 0 };
        let before = std::mem::replace(asked_bytes, sizes.requested_bytes);
        if sizes.lowered_by().is_some() { before.saturating_sub(sizes.requested_bytes) } else { 0 }
    }
}

/// The state of one VM's governor.
pub struct Core {
    controller: Controller,
    intake: Intake,
    zones: Vec<Zone>,
    boot_bytes: u64,
    beside: Beside,
    pool_free: PoolFree,
    last_report: Option<(TimeMs, Report)>,
    agent: Agent,
    settings: Settings,
    audit: Audit,
    episode: Episode,
    held_plan: HeldPlan,
    counters: Counters,
    report_to_plan: LatencyHistogram,
    report_to_online: LatencyHistogram,
    last_online_ms: Option<u64>,
    /// Zones that have reached what was requested of them, and how much that is: to be logged.
    reached: Vec<(usize, u64)>,
    on_hello: Option<OnHello>,
    agentless: Option<Agentless>,
    recorder: Option<Recorder>,
    distances: Distances,
    /// What the guest last said that becomes of memory that is plugged; what it does not know is no news.
    onlining: OnlinePolicy,
}

/// What is to be written down of a decision.
struct Noted {
    plan: Plan,
    /// The sizes that it was made for.
    host: HostView,
    /// What has come online with the report.
    ended: Option<Ended>,
    /// The last report led to it.
    has_reported: bool,
}

/// The zone that is a balloon.
pub const BALLOON_ZONE: &str = "balloon";

/// A size that there cannot be.
#[derive(Debug, Error)]
#[error("{name} is {}, must be at most {}, which is what all zones can have", Unit::Bytes.show(*.bytes), Unit::Bytes.show(*.most_bytes))]
struct AboveZones {
    /// The parameter.
    name: &'static str,
    bytes: u64,
    most_bytes: u64,
}

/// Whether what must be there in any case can be.
fn fit(policy: &Policy, rules: &Rules, most_bytes: u64) -> Result<(), AboveZones> {
    let kept_bytes = match policy {
        Policy::Fixed(params) => params.size_bytes,
        _ => 0,
    };
    let sizes = [(FIXED_SIZE, kept_bytes), ("floor", rules.floor_bytes)];
    match sizes.into_iter().find(|(_, bytes)| *bytes > most_bytes) {
        Some((name, bytes)) => Err(AboveZones { name, bytes, most_bytes }),
        None => Ok(()),
    }
}

/// Called with each hello of an agent.
pub type OnHello = Box<dyn Fn(&Hello) + Send>;

impl Core {
    /// A governor for a guest that has just started. The configuration has been validated.
    pub fn new(
        config: &PressureConfig,
        zones: Vec<GovernedZone>,
        boot_bytes: u64,
        pool_free: PoolFree,
        now: TimeMs,
    ) -> Result<Self, VmError> {
        let (policy, rules) = (config.policy(CALL), config.rules(CALL));
        let (policy, rules) = (policy.map_err(bad_request)?, rules.map_err(bad_request)?);
        let most_bytes =
            zones.iter().fold(0u64, |sum, zone| sum.saturating_add(zone.device.sizes().max_bytes));
        fit(&policy, &rules, most_bytes).map_err(bad_request)?;
        let policy_name = policy.name();
        let mut controller = Controller::new(policy, rules).map_err(bad_request)?;
        if config.paused {
            controller.pause();
        }
        let counters = Counters { policies: BTreeSet::from([policy_name]), ..Counters::default() };
        let zones = zones
            .into_iter()
            .map(|zone| Zone { progress: Progress::new(zone.device.sizes(), now), zone, asked_bytes: None })
            .collect();
        let mut core = Self {
            controller,
            intake: Intake::new(now),
            zones,
            boot_bytes,
            beside: Beside::default(),
            pool_free,
            last_report: None,
            agent: Agent::default(),
            settings: Settings::with_watermark(0),
            audit: Audit::default(),
            episode: Episode::default(),
            held_plan: HeldPlan::default(),
            counters,
            report_to_plan: LatencyHistogram::default(),
            report_to_online: LatencyHistogram::default(),
            last_online_ms: None,
            reached: Vec::new(),
            on_hello: None,
            agentless: None,
            recorder: None,
            distances: Distances::default(),
            onlining: OnlinePolicy::Unknown,
        };
        core.observe(now);
        Ok(core)
    }

    /// How far the guest's nodes are from each other.
    pub fn with_distances(mut self, distances: Distances) -> Self {
        self.distances = distances;
        self
    }

    /// What the guest may have of memory that is not sized here.
    pub fn with_beside(mut self, beside: Beside) -> Self {
        self.beside = beside;
        self
    }

    /// Who else wants to know what the agent says of itself and its kernel.
    pub fn on_hello(mut self, listener: OnHello) -> Self {
        self.on_hello = Some(listener);
        self
    }

    /// Where a guest without an agent is heard from.
    pub fn with_statistics(mut self, agentless: Agentless) -> Self {
        self.agentless = Some(agentless);
        self
    }

    /// Records what comes and what is decided, under the VM's name.
    pub fn record<W: Write + Send + 'static>(
        mut self,
        target: Target<W>,
        vm: &str,
        now: TimeMs,
    ) -> io::Result<Self> {
        let host = self.observe(now);
        self.recorder = Some(Recorder::start(target, vm, &host, now)?);
        Ok(self)
    }

    /// An agent has connected.
    pub fn agent_connected(&mut self, now: TimeMs) {
        self.intake.connected();
        self.agent = Agent {
            connected: true,
            heard: Some(now),
            gone: None,
            said: Some(AgentState::Live),
            missed: false,
        };
        self.counters.connections += 1;
        sparsely!(info, "The guest's agent is connected");
    }

    /// Its connection has ended.
    pub fn agent_gone(&mut self, now: TimeMs) {
        self.agent.connected = false;
        self.agent.gone = Some(now);
        self.agent.said = Some(AgentState::Gone);
        sparsely!(info, "The guest's agent is gone");
    }

    /// How the agent is. Who is connected and says nothing that can be believed is silent.
    pub fn agent_state(&self, now: TimeMs) -> AgentState {
        match self.agent {
            Agent { heard: None, .. } => AgentState::Never,
            Agent { connected: false, .. } => AgentState::Gone,
            Agent { heard: Some(at), .. } if now.since(at) >= self.controller.rules().lost_ms => {
                AgentState::Silent
            }
            _ => AgentState::Live,
        }
    }

    /// Says once that an agent has fallen silent or does not come back, and once that it speaks again.
    fn watch_agent(&mut self, now: TimeMs) {
        if self.agent.is_missed(now, self.controller.rules().lost_ms) {
            sparsely!(warn, "The guest's agent is gone, and none has come since");
        }
        let state = self.agent_state(now);
        if self.agent.said.is_some_and(|said| said != state) {
            match state {
                AgentState::Silent => warn!("The guest's agent is connected, and no report comes"),
                _ => info!(state = state.label(), "The guest's agent reports again"),
            }
            self.agent.said = Some(state);
        }
    }

    /// How the agent is to report.
    pub fn settings(&self) -> Settings {
        self.settings
    }

    /// Counts bytes that an agent has sent.
    pub fn agent_sent(&mut self, bytes: usize) {
        self.counters.agent_bytes += bytes as u64;
    }

    /// Handles a message of the agent, or the reason why its line was refused. The guest's clock is
    /// compared with `with_sleep`, which is `now` including the time in which the host slept.
    /// `took` returns the time since the line arrived, up to the moment of the call.
    pub fn message(
        &mut self,
        message: Result<AgentMessage, Refusal>,
        now: TimeMs,
        with_sleep: TimeMs,
        took: impl FnOnce() -> Duration,
    ) {
        match message.and_then(|message| self.accept(message, with_sleep)) {
            Ok(AgentMessage::Hello(hello)) => {
                sparsely!(
                    info,
                    agent = hello.agent_version(),
                    kernel = hello.kernel_release(),
                    preemption = hello.preemption(),
                    "The guest's agent says who it is"
                );
                if let Some(listener) = &self.on_hello {
                    listener(&hello);
                }
            }
            Ok(AgentMessage::Report(report)) => {
                self.agent.heard = Some(now);
                let memory_bytes = self.most_memory_bytes();
                let report = match &mut self.agentless {
                    Some(agentless) => agentless.agent_reported(report, memory_bytes, now),
                    None => report,
                };
                let noted = self.report(report, Teller::Agent, now);
                self.report_to_plan.observe(took());
                self.write_down(&noted, now);
            }
            Err(refusal) => self.refused(&refusal, "A line of the agent is refused"),
        }
    }

    /// A flood of refusals is a number, not a flood of lines.
    fn refused(&mut self, refusal: &Refusal, what: &'static str) {
        let label = refusal.label();
        let count = self.counters.refused.entry(label).or_default();
        *count += 1;
        if count.is_power_of_two() {
            warn!(reason = label, count = *count, %refusal, "{what}");
        }
    }

    /// Decides upon a report, and asks the devices. The guest waits for that; what is to be written down comes after it.
    fn report(&mut self, report: Report, teller: Teller, now: TimeMs) -> Noted {
        self.counters.reports += 1;
        let ended = self.episode.reported(report.memory().total_bytes, now);
        let host = self.observe(now);
        let report = match &mut self.agentless {
            Some(agentless) => agentless.place(report, teller, &host),
            None => report,
        };
        let plan = self.controller.step(Event::Report(&report), &host, now);
        self.last_report = Some((now, report));
        self.carry_out(&plan, &host, now);
        self.report_held_plan(&plan, now);
        if self.controller.has_goals() {
            let host = self.observe(now);
            self.follow_goals(host, now);
        }
        Noted { plan, host, ended, has_reported: true }
    }

    /// The most that all zones can have.
    fn region_bytes(&self) -> u64 {
        let regions = self.zones.iter().map(|zone| zone.zone.device.sizes().max_bytes);
        regions.fold(0, u64::saturating_add)
    }

    /// What the guest has in any case: memory that it booted with, or that has come by ACPI.
    fn kept_bytes(&self) -> u64 {
        self.boot_bytes.saturating_add(self.beside.dimm_bytes())
    }

    /// That, all zones, and what else a guest can make memory of: no guest has more.
    fn most_memory_bytes(&self) -> u64 {
        let sizes = [self.kept_bytes(), self.region_bytes(), self.beside.mapped_bytes()];
        sizes.into_iter().fold(0, u64::saturating_add)
    }

    /// Accepts a message of the agent if its values are possible for this VM. The protocol itself
    /// only checks bounds that apply to any machine.
    fn accept(&mut self, message: AgentMessage, with_sleep: TimeMs) -> Result<AgentMessage, Refusal> {
        let message = self.intake.accept(message, with_sleep)?;
        if let AgentMessage::Report(report) = &message {
            report.check_within(self.most_memory_bytes())?;
        }
        Ok(message)
    }

    /// Whether the next tick is wanted sooner than usual.
    pub fn is_fast(&self) -> bool {
        self.agentless.as_ref().is_some_and(|agentless| agentless.is_fast(&self.settings))
    }

    /// Takes statistics where there is no agent.
    fn take_statistics(&mut self, now: TimeMs) {
        let memory_bytes = self.most_memory_bytes();
        let settings = self.settings;
        let Some(agentless) = &mut self.agentless else { return };
        let was_active = agentless.is_active();
        let taken = agentless.tick(&settings, memory_bytes, now);
        if agentless.is_active() && !was_active {
            info!("Balloon statistics size the guest until its agent reports");
        }
        match taken {
            Some(Ok(report)) => {
                let noted = self.report(report, Teller::Statistics, now);
                self.write_down(&noted, now);
            }
            Some(Err(refusal)) => self.refused(&refusal, "Statistics of the balloon are refused"),
            None => {}
        }
    }

    /// Time has passed, or a plugged size or statistics have changed.
    pub fn tick(&mut self, now: TimeMs) {
        self.watch_agent(now);
        self.take_statistics(now);
        let host = self.observe(now);
        let host = self.follow_goals(host, now);
        let patience_ms = self.controller.rules().progress_ms;
        for (zone, id) in self.zones.iter_mut().zip((0..).map(ZoneId)) {
            // A dry run asks nothing of the guest; what a hand asks for is not the loop's.
            if self.controller.rules().dry_run && !self.controller.is_pinned(id) {
                continue;
            }
            if zone.progress.is_held_too_long(patience_ms, now) {
                zone.report_held();
            }
            if let Some(reminder) = zone.progress.remind(patience_ms, now) {
                if reminder == Reminder::First {
                    sparsely!(
                        warn,
                        zone = zone.zone.id,
                        "No progress; the guest is reminded, ever more rarely"
                    );
                }
                self.counters.reminders += 1;
                zone.zone.device.remind();
            }
        }
        let plan = self.controller.step(Event::Tick, &host, now);
        self.carry_out(&plan, &host, now);
        self.report_held_plan(&plan, now);
        self.write_down(&Noted { plan, host, ended: None, has_reported: false }, now);
    }

    /// Memory for whose page descriptors the guest has room, by its last report or by `unreported`.
    pub fn describable_bytes(&self, now: TimeMs) -> u64 {
        self.controller.describable_bytes(&self.host_view(self.sizes()), now)
    }

    /// Counts a DIMM that the guest gets towards the limit of rule 4.
    pub fn add_dimm(&mut self, bytes: u64, now: TimeMs) {
        self.controller.add_dimm(bytes, now);
    }

    /// Reads the devices, notes what has changed.
    fn observe(&mut self, now: TimeMs) -> HostView {
        let mut all = Vec::with_capacity(self.zones.len());
        for (governed, id) in self.zones.iter_mut().zip(0..) {
            let sizes = governed.zone.sizes(id);
            self.episode.lacks(governed.lacks_bytes(&sizes));
            let Zone { zone, progress, .. } = governed;
            if progress.has_driver_come(sizes, now) {
                sparsely!(info, zone = zone.id, "The guest's driver is there");
                self.controller.driver_came(ZoneId(id), now);
            }
            if progress.observe(sizes, now) {
                self.reached.push((id as usize, sizes.plugged_bytes));
            }
            all.push(sizes);
        }
        self.audit.observe(&all, now);
        let host = self.host_view(all);
        self.settings.hotplug_bytes = host.pluggable_bytes();
        host
    }

    /// Sizes of all zones.
    fn sizes(&self) -> Vec<ZoneSizes> {
        self.zones.iter().zip(0..).map(|(zone, id)| zone.zone.sizes(id)).collect()
    }

    fn host_view(&self, zones: Vec<ZoneSizes>) -> HostView {
        let balloon = self.zones.iter().position(|zone| zone.zone.id == BALLOON_ZONE);
        HostView {
            zones,
            boot_bytes: self.kept_bytes(),
            pool_free_bytes: (self.pool_free)(),
            distances: self.distances.clone(),
            balloon: balloon.map(|at| ZoneId(at as u32)),
        }
    }

    fn carry_out(&mut self, plan: &Plan, host: &HostView, now: TimeMs) {
        if plan.watermark_bytes != 0 {
            self.settings.watermark_bytes = plan.watermark_bytes;
            self.settings.watermark_of = plan.watermark_of;
        }
        if plan.dry_run {
            return;
        }
        for change in plan.changes(host) {
            let zone = &mut self.zones[change.zone.0 as usize];
            zone.asked_bytes = Some(change.requested_bytes);
            zone.zone.device.request(change.requested_bytes);
        }
        let (before, after) = (host.requested_bytes(), plan.requested_bytes());
        // What is plugged still, because the guest has not followed a shrink, need not come online.
        let to_come = after.saturating_sub(before.max(host.plugged_bytes()));
        let total = self.last_report.as_ref().map(|(_, report)| report.memory().total_bytes);
        match total {
            Some(total) if to_come > 0 => self.episode.grown(to_come, total, now),
            _ if after < before => self.episode.abandoned(),
            _ => {}
        }
    }

    /// Reports a plan that a lack of room for page descriptors has held back too long. The event names
    /// the first zone that could have grown, because a plan is for all zones.
    fn report_held_plan(&mut self, plan: &Plan, now: TimeMs) {
        if !self.held_plan.is_held_too_long(plan, self.controller.rules().progress_ms, now) {
            return;
        }
        let could_grow = |(zone, id): &(&Zone, ZoneId)| {
            let sizes = zone.zone.device.sizes();
            zone.zone.id != BALLOON_ZONE
                && sizes.requested_bytes < sizes.max_bytes
                && sizes.driver != DriverState::Unsupported
                && !self.controller.is_pinned(*id)
        };
        if let Some((zone, _)) = self.zones.iter().zip((0..).map(ZoneId)).find(could_grow) {
            zone.report_held();
        }
    }

    /// Records, notes and logs what was seen and decided, once nobody waits for it any more.
    fn write_down(&mut self, noted: &Noted, now: TimeMs) {
        let Noted { plan, host, ended, has_reported } = noted;
        if let Some(Ended { took_ms, grown_bytes }) = *ended {
            info!(took_ms, grown_bytes, "The memory that the guest was short of is online");
            self.report_to_online.observe(Duration::from_millis(took_ms));
            self.last_online_ms = Some(took_ms);
        }
        self.say_reached();
        self.watch_onlining();
        if let Some(recorder) = &mut self.recorder {
            if let Some((_, report)) = self.last_report.as_ref().filter(|_| *has_reported) {
                recorder.report(report, host, now);
            }
            recorder.host(host, now);
        }
        self.note(plan, host, now);
    }

    /// Says once, whenever that changes, that the guest does not online memory so that it can leave again: less is lent then.
    fn watch_onlining(&mut self) {
        let Some((_, report)) = &self.last_report else { return };
        let (before, now) = (self.onlining, report.blocks().online_policy);
        if now == before || now == OnlinePolicy::Unknown {
            return;
        }
        self.onlining = now;
        // A balloon's memory is online in any case.
        let has_hotplug = self.zones.iter().any(|zone| zone.zone.id != BALLOON_ZONE);
        match now {
            _ if !has_hotplug => {}
            OnlinePolicy::OnlineMovable if before == OnlinePolicy::Unknown => {}
            OnlinePolicy::OnlineMovable => {
                sparsely!(
                    info,
                    online_policy = now.label(),
                    "The guest onlines plugged memory movable again"
                );
            }
            _ => sparsely!(
                warn,
                online_policy = now.label(),
                lent_permille = self.controller.rules().unmovable_permille,
                "The guest does not online plugged memory movable: it may not come back, and only this part of each zone is lent"
            ),
        }
    }

    fn say_reached(&mut self) {
        for (index, plugged_bytes) in self.reached.drain(..) {
            info!(zone = self.zones[index].zone.id, plugged_bytes, "resize-reached");
        }
    }

    /// Notes a plan that was carried out.
    fn note(&mut self, plan: &Plan, host: &HostView, now: TimeMs) {
        let policy = self.controller.policy().name();
        let report = self.last_report.as_ref().map(|(at, report)| (*at, report));
        let near = self.controller.near();
        if !self.audit.record(plan, Grounds { policy, report, near, host }, now) {
            return;
        }
        if let Some(recorder) = &mut self.recorder {
            recorder.plan(plan, host, now);
        }
        let (direction, reason) = (plan.direction.label(), plan.reason.label());
        *self.counters.plans.entry((policy, direction, reason)).or_default() += 1;
        if plan.direction != Direction::Hold {
            info!(
                decision = self.audit.total(),
                policy,
                direction,
                reason,
                dry_run = plan.dry_run,
                requested_bytes = plan.requested_bytes(),
                available_bytes = report.map(|(_, report)| report.memory().available_bytes),
                "Plan"
            );
        }
    }

    fn find(&self, id: &str) -> Result<ZoneId, VmError> {
        let index = self.zones.iter().position(|zone| zone.zone.id == id);
        index
            .map(|index| ZoneId(index as u32))
            .ok_or_else(|| VmError::BadRequest(format!("There is no zone {id:?} that can be resized")))
    }

    /// Changes what the governor does, and says what was changed.
    pub fn change(&mut self, change: &PressureChange) -> Result<(), VmError> {
        let before = Present::of(&self.controller);
        self.make(change)?;
        before.say_changes(&Present::of(&self.controller), |zone| &self.zones[zone.0 as usize].zone.id);
        Ok(())
    }

    fn make(&mut self, change: &PressureChange) -> Result<(), VmError> {
        // All or nothing: what can be wrong is found before anything changes.
        let resumed = change.zone.as_deref().map(|id| self.find(id)).transpose()?;
        let policy = match &change.policy {
            Some(name) => {
                let (policy, params) = (name.clone(), change.params.clone().unwrap_or_default());
                let config = PressureConfig { policy, params, size: change.size, ..Default::default() };
                config.policy(CALL).map_err(bad_request)?
            }
            None => {
                let size = change.size.map(|bytes| (FIXED_SIZE, Setting::Number(bytes)));
                let size = size.iter().map(|(name, setting)| (*name, setting));
                let settings = size.chain(by_name(&change.params));
                let policy = self.controller.policy().with(settings);
                policy.map_err(|error| bad_request(rules_as_well(error)))?
            }
        };
        let rules = self.controller.rules().with(by_name(&change.rules)).map_err(bad_request)?;
        fit(&policy, &rules, self.region_bytes()).map_err(bad_request)?;
        if change.policy.is_some() || change.params.is_some() || change.size.is_some() {
            self.controller.set_policy(policy).map_err(bad_request)?;
            self.counters.policies.insert(self.controller.policy().name());
        }
        if change.rules.is_some() {
            self.controller.set_rules(rules).map_err(bad_request)?;
        }
        if let Some(dry_run) = change.dry_run {
            self.controller.set_dry_run(dry_run);
        }
        if change.resume == Some(true) {
            self.controller.resume(resumed);
            self.end_goals(resumed);
        }
        match change.paused() {
            Some(true) => self.controller.pause(),
            Some(false) => self.controller.unpause(),
            None => {}
        }
        Ok(())
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("controller", &self.controller).finish_non_exhaustive()
    }
}

fn by_name(settings: &Option<ParamSettings>) -> impl Iterator<Item = (&str, &Setting)> {
    settings.iter().flatten().map(|(name, setting)| (name.as_str(), setting))
}

fn bad_request(err: impl fmt::Display) -> VmError {
    VmError::BadRequest(err.to_string())
}

#[cfg(test)]
#[path = "core_tests.rs"]
mod tests;
