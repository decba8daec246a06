//! The governor's state: what the guest said, what was decided, what was asked of the devices.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::time::Duration;

use balloon::controller::{Controller, Event, Rules};
use balloon::plan::{Direction, Plan, Reason};
use balloon::policy::{Policy, fixed};
use balloon::proto::{AgentMessage, Hello, Refusal, Report, Settings};
use balloon::{Distances, HostView, Intake, TimeMs, ZoneId, ZoneSizes};
use serde_json::json;
use tracing::{info, warn};

use super::episode::{Ended, Episode};
use super::progress::Progress;
use super::{GovernedZone, PoolFree};
use crate::config::PressureConfig;
use crate::metrics::{LatencyHistogram, PressureSample};
use crate::vm::request::{PressureChange, PressureInfo, ResizeStatus, VmError};

/// So many decisions are kept for `vm.pressure`.
const AUDIT_LEN: usize = 1_000;
/// So many of them are shown by it.
const AUDIT_SHOWN: usize = 50;

/// What is counted; totals since the governor started.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    /// Plans by policy, direction and reason. Holds for want of anything new are left out.
    pub plans: BTreeMap<(&'static str, &'static str, &'static str), u64>,
    /// Reports accepted.
    pub reports: u64,
    /// Lines refused, by reason.
    pub refused: BTreeMap<&'static str, u64>,
    /// Connections of agents.
    pub connections: u64,
    /// Reminders sent to guests that made no progress.
    pub reminders: u64,
}

/// One decision as the audit ring keeps it.
#[derive(Clone, Debug)]
struct Audited {
    at: TimeMs,
    plan: Plan,
    available_bytes: Option<u64>,
}

/// A zone and what was seen of it.
struct Zone {
    zone: GovernedZone,
    progress: Progress,
}

/// The state of one VM's governor.
pub struct Core {
    controller: Controller,
    intake: Intake,
    zones: Vec<Zone>,
    boot_bytes: u64,
    pool_free: PoolFree,
    last_report: Option<(TimeMs, Report)>,
    agent_connected: bool,
    watermark_bytes: u64,
    audit: VecDeque<Audited>,
    episode: Episode,
    counters: Counters,
    report_to_plan: LatencyHistogram,
    report_to_online: LatencyHistogram,
    last_online_ms: Option<u64>,
    on_hello: Option<OnHello>,
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
        let rules = Rules { dry_run: config.dry_run, ..Rules::default() };
        let controller = Controller::new(policy(config)?, rules).map_err(bad_request)?;
        let zones = zones
            .into_iter()
            .map(|zone| Zone { progress: Progress::new(zone.device.sizes(), now), zone })
            .collect();
        Ok(Self {
            controller,
            intake: Intake::new(),
            zones,
            boot_bytes,
            pool_free,
            last_report: None,
            agent_connected: false,
            watermark_bytes: 0,
            audit: VecDeque::new(),
            episode: Episode::default(),
            counters: Counters::default(),
            report_to_plan: LatencyHistogram::default(),
            report_to_online: LatencyHistogram::default(),
            last_online_ms: None,
            on_hello: None,
        })
    }

    /// Who else wants to know what the agent says of itself and its kernel.
    pub fn on_hello(mut self, listener: OnHello) -> Self {
        self.on_hello = Some(listener);
        self
    }

    /// An agent has connected.
    pub fn agent_connected(&mut self) {
        self.intake.connected();
        self.agent_connected = true;
        self.counters.connections += 1;
        info!("The guest's agent is connected");
    }

    /// Its connection has ended.
    pub fn agent_gone(&mut self) {
        self.agent_connected = false;
        warn!("The guest's agent is gone");
    }

    /// How the agent is to report.
    pub fn settings(&self) -> Settings {
        Settings::with_watermark(self.watermark_bytes)
    }

    /// A line of the agent, or what was refused before it was one.
    pub fn line(&mut self, line: Result<&[u8], Refusal>, now: TimeMs) {
        match line.and_then(|line| self.intake.accept_line(line, now)) {
            Ok(AgentMessage::Hello(hello)) => {
                info!(
                    agent = hello.agent_version(),
                    kernel = hello.kernel_release(),
                    preemption = hello.preemption(),
                    "The guest's agent says who it is"
                );
                if let Some(listener) = &self.on_hello {
                    listener(&hello);
                }
            }
            Ok(AgentMessage::Report(report)) => self.report(report, now),
            Err(refusal) => {
                let label = refusal.label();
                let count = self.counters.refused.entry(label).or_default();
                *count += 1;
                // A flood of refusals is a number, not a flood of lines.
                if count.is_power_of_two() {
                    warn!(reason = label, count = *count, %refusal, "A line of the agent is refused");
                }
            }
        }
    }

    fn report(&mut self, report: Report, now: TimeMs) {
        self.counters.reports += 1;
        if let Some(Ended { took_ms, grown_bytes }) = self.episode.reported(report.memory().total_bytes, now)
        {
            info!(took_ms, grown_bytes, "The memory that the guest was short of is online");
            self.report_to_online.observe(Duration::from_millis(took_ms));
            self.last_online_ms = Some(took_ms);
        }
        let host = self.observe(now);
        let plan = self.controller.step(Event::Report(&report), &host, now);
        self.last_report = Some((now, report));
        self.carry_out(plan, &host, now);
    }

    /// Time has passed, or a plugged size has changed.
    pub fn tick(&mut self, now: TimeMs) {
        let host = self.observe(now);
        for zone in &mut self.zones {
            if zone.progress.remind(now) {
                warn!(zone = zone.zone.id, "No progress; the guest is reminded");
                self.counters.reminders += 1;
                zone.zone.device.remind();
            }
        }
        let plan = self.controller.step(Event::Tick, &host, now);
        self.carry_out(plan, &host, now);
    }

    /// Reads the devices, notes what has changed.
    fn observe(&mut self, now: TimeMs) -> HostView {
        for Zone { zone, progress } in &mut self.zones {
            let sizes = zone.device.sizes();
            if progress.observe(sizes, now) {
                info!(zone = zone.id, plugged_bytes = sizes.plugged_bytes, "resize-reached");
            }
        }
        self.host_view()
    }

    fn host_view(&self) -> HostView {
        let zones = self.zones.iter().zip(0..).map(|(Zone { zone, .. }, id)| {
            let sizes = zone.device.sizes();
            ZoneSizes {
                id: ZoneId(id),
                tier: zone.tier,
                guest_numa_node: zone.guest_numa_node,
                block_bytes: sizes.block_bytes,
                floor_bytes: 0,
                max_bytes: sizes.region_bytes,
                requested_bytes: sizes.requested_bytes,
                plugged_bytes: sizes.plugged_bytes,
            }
        });
        HostView {
            zones: zones.collect(),
            boot_bytes: self.boot_bytes,
            pool_free_bytes: (self.pool_free)(),
            distances: Distances::default(),
            balloon: None,
        }
    }

    fn carry_out(&mut self, plan: Plan, host: &HostView, now: TimeMs) {
        if plan.watermark_bytes != 0 {
            self.watermark_bytes = plan.watermark_bytes;
        }
        let before = host.requested_bytes();
        if !plan.dry_run {
            for change in plan.changes(host) {
                let zone = &self.zones[change.zone.0 as usize].zone;
                zone.device.request(change.requested_bytes);
            }
            let after = plan.requested_bytes();
            let total = self.last_report.as_ref().map(|(_, report)| report.memory().total_bytes);
            match total {
                Some(total) if after > before => self.episode.grown(after - before, total, now),
                _ if after < before => self.episode.abandoned(),
                _ => {}
            }
        }
        self.record(plan, now);
    }

    /// Notes a plan. A hold that says nothing new is not worth a line: there is one for each report.
    fn record(&mut self, plan: Plan, now: TimeMs) {
        let policy = self.controller.policy().name();
        let last = self.audit.back().map(|last| (last.plan.direction, last.plan.reason));
        if plan.direction == Direction::Hold
            && (plan.reason == Reason::Quiet || last == Some((plan.direction, plan.reason)))
        {
            return;
        }
        let (direction, reason) = (plan.direction.label(), plan.reason.label());
        *self.counters.plans.entry((policy, direction, reason)).or_default() += 1;
        let available_bytes = self.last_report.as_ref().map(|(_, report)| report.memory().available_bytes);
        if plan.direction != Direction::Hold {
            info!(
                policy,
                direction,
                reason,
                requested_bytes = plan.requested_bytes(),
                available_bytes,
                "Plan"
            );
        }
        if self.audit.len() == AUDIT_LEN {
            self.audit.pop_front();
        }
        self.audit.push_back(Audited { at: now, plan, available_bytes });
    }

    /// Sizes a zone by hand and pins it.
    pub fn resize(&mut self, id: &str, size_bytes: u64, now: TimeMs) -> Result<(), VmError> {
        let host = self.observe(now);
        let Some(index) = self.zones.iter().position(|zone| zone.zone.id == id) else {
            return Err(VmError::BadRequest(format!("There is no zone {id:?} that can be resized")));
        };
        let device = &self.zones[index].zone.device;
        let sizes = device.sizes();
        if size_bytes > sizes.region_bytes {
            return Err(VmError::BadRequest(format!(
                "Zone {id:?} can have at most {} bytes plugged, not {size_bytes}",
                sizes.region_bytes
            )));
        }
        if !size_bytes.is_multiple_of(sizes.block_bytes) {
            return Err(VmError::BadRequest(format!(
                "Zone {id:?} is resized in blocks of {} bytes; {size_bytes} is not a multiple",
                sizes.block_bytes
            )));
        }
        self.controller.pin(ZoneId(index as u32), &host, now);
        self.episode.abandoned();
        // What the device had to lower may be asked for again, or be enough now.
        if size_bytes != sizes.requested_bytes || sizes.shortfall.is_some() {
            device.request(size_bytes);
            info!(zone = id, size_bytes, "Resized by hand; the zone is pinned");
        }
        // The next tick counts its patience from here.
        self.observe(now);
        Ok(())
    }

    /// Changes what the governor does.
    pub fn change(&mut self, change: &PressureChange) -> Result<(), VmError> {
        if let Some(name) = &change.policy {
            let config = PressureConfig { policy: name.clone(), size: change.size, dry_run: false };
            let policy = policy(&config)?;
            self.controller.set_policy(policy).map_err(bad_request)?;
        }
        if let Some(dry_run) = change.dry_run {
            self.controller.set_dry_run(dry_run);
        }
        if change.resume == Some(true) {
            self.controller.resume(None);
        }
        Ok(())
    }

    /// What `vm.pressure` answers.
    pub fn info(&self, now: TimeMs) -> PressureInfo {
        let status = self.controller.status();
        let name = |id: &ZoneId| self.zones[id.0 as usize].zone.id.clone();
        let decisions = self.audit.iter().rev().take(AUDIT_SHOWN);
        let mut details = BTreeMap::from([
            ("watermark_bytes".to_owned(), json!(self.watermark_bytes)),
            ("cool_down_ms".to_owned(), json!(status.cool_down_ms)),
            ("reports".to_owned(), json!(self.counters.reports)),
            ("refused".to_owned(), json!(self.counters.refused)),
        ]);
        if let Some((_, report)) = &self.last_report {
            details.insert("memory".to_owned(), json!(report.memory()));
            details.insert("stall".to_owned(), json!(report.stall()));
            details.insert("counters".to_owned(), json!(report.counters()));
        }
        if let Some(took_ms) = self.last_online_ms {
            details.insert("report_to_online_ms".to_owned(), json!(took_ms));
        }
        PressureInfo {
            policy: status.policy.to_owned(),
            dry_run: status.dry_run,
            pinned_zones: status.pinned.iter().map(name).collect(),
            agent_connected: self.agent_connected,
            report_age_ms: self.last_report.as_ref().map(|(at, _)| now.since(*at)),
            decisions: decisions.map(|audited| audited.to_json(now)).collect(),
            details,
        }
    }

    /// How the last resize of zone `id` goes; `None` if the governor does not size it.
    pub fn resize_status(&self, id: &str, now: TimeMs) -> Option<ResizeStatus> {
        let Zone { zone, progress } = self.zones.iter().find(|zone| zone.zone.id == id)?;
        let offline = self.node_blocks(zone.guest_numa_node).map_or(0, |(_, offline)| offline);
        Some(progress.status(offline, now))
    }

    /// What the agent says is online of the hotplug part of zone `id`.
    pub fn online_bytes(&self, id: &str) -> Option<u64> {
        let Zone { zone, .. } = self.zones.iter().find(|zone| zone.zone.id == id)?;
        let (online, _) = self.node_blocks(zone.guest_numa_node)?;
        Some(online.saturating_sub(zone.boot_bytes))
    }

    /// Online and offline bytes of a node in the last report that knew of blocks.
    fn node_blocks(&self, node: u32) -> Option<(u64, u64)> {
        let (_, report) = self.last_report.as_ref()?;
        let blocks = report.blocks();
        if blocks.block_bytes == 0 {
            return None;
        }
        let found = blocks.nodes.iter().find(|blocks| blocks.node == node);
        Some(found.map_or((0, 0), |blocks| (blocks.online_bytes, blocks.offline_bytes)))
    }

    /// How long it took to take one line in, decide, and ask the devices.
    pub fn line_took(&mut self, took: Duration) {
        self.report_to_plan.observe(took);
    }

    /// Everything for metrics.
    pub fn sample(&self, now: TimeMs) -> PressureSample {
        let age = |at: TimeMs| Duration::from_millis(now.since(at));
        PressureSample {
            plans_total: self.counters.plans.clone(),
            reports_total: self.counters.reports,
            refused_total: self.counters.refused.clone(),
            connections_total: self.counters.connections,
            reminders_total: self.counters.reminders,
            agent_connected: self.agent_connected,
            dry_run: self.controller.rules().dry_run,
            watermark_bytes: self.watermark_bytes,
            report: self.last_report.as_ref().map(|(at, report)| (age(*at), report.clone())),
            report_to_plan: self.report_to_plan.sample(),
            report_to_online: self.report_to_online.sample(),
        }
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("controller", &self.controller).finish_non_exhaustive()
    }
}

impl Audited {
    fn to_json(&self, now: TimeMs) -> serde_json::Value {
        json!({
            "age_ms": now.since(self.at),
            "direction": self.plan.direction.label(),
            "reason": self.plan.reason.label(),
            "limited_by": self.plan.limited_by.map(Reason::label),
            "wanted_bytes": self.plan.wanted_bytes,
            "requested_bytes": self.plan.requested_bytes(),
            "available_bytes": self.available_bytes,
            "dry_run": self.plan.dry_run,
        })
    }
}

fn policy(config: &PressureConfig) -> Result<Policy, VmError> {
    let policy = Policy::from_name(&config.policy).ok_or_else(|| {
        let known = Policy::NAMES.join(", ");
        VmError::BadRequest(format!("There is no policy {:?}; there are {known}", config.policy))
    })?;
    Ok(match policy {
        Policy::Fixed(_) => {
            let missing = || VmError::BadRequest("The policy \"fixed\" needs a size".to_owned());
            Policy::Fixed(fixed::Params { size_bytes: config.size.ok_or_else(missing)? })
        }
        other => other,
    })
}

fn bad_request(err: balloon::ParamError) -> VmError {
    VmError::BadRequest(err.to_string())
}

#[cfg(test)]
#[path = "core_tests.rs"]
mod tests;
