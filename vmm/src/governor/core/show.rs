//! State of the governor, for the API and for metrics.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use balloon::controller::{ResizeStatus, Rules, Status};
use balloon::governor::{AgentState, AuditedZone, Entry};
use balloon::params::Parameters;
use balloon::policy::Policy;
use balloon::proto::{Report, Settings};
use balloon::{DriverState, TimeMs, ZoneId, ZoneSizes};
use serde_json::{Value, json};

use super::Core;
use crate::config::BALLOON_ZONE;
use crate::governor::GovernedZone;
use crate::governor::info::{GovernedZoneInfo, PressureInfo, RecordingInfo};
use crate::governor::metrics::{PressureSample, PressureZone};
use crate::governor::record::Recorder;

/// Snapshot of the governor's state for `vm.pressure`. Converting it to text takes ten times as
/// long as a decision, and longer for each decision that it shows. Therefore the caller converts
/// it, so that no decision is delayed.
pub struct View {
    now: TimeMs,
    status: Status,
    policy: Policy,
    rules: Rules,
    zones: Vec<ViewedZone>,
    agent: AgentState,
    agent_connected: bool,
    last_report: Option<(TimeMs, Report)>,
    settings: Settings,
    reports: u64,
    refused: BTreeMap<&'static str, u64>,
    source: Option<&'static str>,
    last_online_ms: Option<u64>,
    decisions_total: u64,
    decisions: Vec<Arc<Entry>>,
    recording: Option<RecordingInfo>,
}

struct ViewedZone {
    id: ZoneId,
    info: GovernedZoneInfo,
    plugged_bytes: u64,
    late: bool,
}

impl View {
    /// Returns true if both snapshots share the memory of their decisions.
    #[cfg(test)]
    pub fn shares_decisions_with(&self, other: &View) -> bool {
        let pairs = self.decisions.iter().zip(&other.decisions);
        !self.decisions.is_empty() && pairs.into_iter().all(|(one, other)| Arc::ptr_eq(one, other))
    }

    /// Converts the snapshot to the answer of `vm.pressure`.
    pub fn info(self) -> PressureInfo {
        let audited: Vec<_> = self
            .zones
            .iter()
            .map(|zone| AuditedZone {
                id: &zone.info.id,
                plugged_bytes: zone.plugged_bytes,
                late: zone.late,
            })
            .collect();
        let decisions = self.decisions.iter().map(|entry| entry.info(&audited, self.now)).collect();
        let pinned = self.zones.iter().filter(|zone| self.status.pinned.contains(&zone.id));
        PressureInfo {
            policy: self.status.policy.to_owned(),
            dry_run: self.status.dry_run,
            paused: self.status.paused,
            pinned_zones: pinned.map(|zone| zone.info.id.clone()).collect(),
            agent: self.agent,
            agent_connected: self.agent_connected,
            report_age_ms: self.last_report.as_ref().map(|(at, _)| self.now.since(*at)),
            decisions_total: self.decisions_total,
            decisions,
            details: self.details(),
            zones: self.zones.into_iter().map(|zone| zone.info).collect(),
            recording: self.recording,
        }
    }

    fn details(&self) -> BTreeMap<String, Value> {
        let mut details = BTreeMap::from([
            ("watermark_bytes".to_owned(), json!(self.settings.watermark_bytes)),
            ("watermark_of".to_owned(), json!(self.settings.watermark_of)),
            ("cool_down_ms".to_owned(), json!(self.status.cool_down_ms)),
            ("reports".to_owned(), json!(self.reports)),
            ("refused".to_owned(), json!(self.refused)),
        ]);
        let values = |params: &dyn Parameters| {
            let values = params
                .table()
                .iter()
                .filter_map(|param| Some((param.name, params.get(param.name)?)));
            json!(values.collect::<BTreeMap<_, _>>())
        };
        details.insert("params".to_owned(), self.policy.parameters().map_or(json!({}), values));
        details.insert("rules".to_owned(), values(&self.rules));
        if let Some((_, report)) = &self.last_report {
            details.insert("memory".to_owned(), json!(report.memory()));
            details.insert("stall".to_owned(), json!(report.stall()));
            details.insert("counters".to_owned(), json!(report.counters()));
        }
        if let Some(source) = self.source {
            details.insert("source".to_owned(), json!(source));
        }
        if let Some(took_ms) = self.last_online_ms {
            details.insert("report_to_online_ms".to_owned(), json!(took_ms));
        }
        details
    }
}

/// Zone that `vm.memory` reports. The governor does not necessarily size it.
pub struct ZoneQuery {
    pub id: String,
    pub guest_node: u32,
    pub boot_bytes: u64,
    /// True if the zone grows by DIMMs. The governor does not size such a zone.
    pub has_dimms: bool,
}

/// Information from the governor about a zone in `vm.memory`.
#[derive(Debug, PartialEq, Eq)]
pub struct ZoneState {
    /// Hotplugged memory that is online, according to the agent's last report.
    pub online_bytes: Option<u64>,
    /// Plugged PM above the floor and outside pinned zones, whatever the policy.
    pub recallable_bytes: u64,
    /// Current sizes, and the progress of the last resize. `None` if the governor does not size the
    /// zone.
    pub resize: Option<ZoneResize>,
}

/// Sizes of a zone, and the resize status at the time when they were read.
#[derive(Debug, PartialEq, Eq)]
pub struct ZoneResize {
    pub sizes: ZoneSizes,
    pub status: ResizeStatus,
}

impl Core {
    /// Snapshot for `vm.pressure`, with at most `decisions` of the latest decisions. See
    /// [`View::info`].
    pub fn view(&self, decisions: usize, now: TimeMs) -> View {
        let governor = &self.governor;
        let patience_ms = governor.controller().rules().progress_ms;
        let zones = self.zones().iter().zip(self.governed_zones()).zip(0..).map(
            |((zone, (_, info)), id)| {
                let id = ZoneId(id);
                let plugged_bytes = zone.device.sizes().plugged_bytes;
                let tracker = governor.controller().tracker(id);
                let late = tracker.is_some_and(|zone| zone.is_late(patience_ms, now));
                ViewedZone { id, plugged_bytes, late, info }
            },
        );
        let source = |is_active| if is_active { "statistics" } else { "agent" };
        View {
            now,
            status: governor.controller().status(),
            policy: governor.controller().policy().clone(),
            rules: governor.controller().rules().clone(),
            zones: zones.collect(),
            agent: governor.agent_state(now),
            agent_connected: governor.is_agent_connected(),
            last_report: governor.last_report().map(|(at, report)| (at, report.clone())),
            settings: governor.settings(),
            reports: governor.counters().reports,
            refused: governor.counters().refused.clone(),
            source: governor.by_statistics().map(source),
            last_online_ms: governor.last_online_ms(),
            decisions_total: governor.audit().total(),
            decisions: governor.audit().newest(decisions),
            recording: self.recorder.as_ref().map(Recorder::info),
        }
    }

    /// Complete answer to `vm.pressure`, for tests.
    #[cfg(test)]
    pub fn info(&self, decisions: usize, now: TimeMs) -> PressureInfo {
        self.view(decisions, now).info()
    }

    /// Tier and state of each governed zone.
    fn governed_zones(&self) -> impl Iterator<Item = (&'static str, GovernedZoneInfo)> {
        let pinned = self.governor.controller().status().pinned;
        self.zones().iter().zip(0..).map(move |(zone, index)| {
            let info = GovernedZoneInfo {
                id: zone.id.clone(),
                driver_ready: zone.device.sizes().driver == DriverState::Ready,
                pinned: pinned.contains(&ZoneId(index)),
            };
            (zone.tier.as_str(), info)
        })
    }

    /// States of `zones`, in the same order. The sizes of each zone are read only once.
    pub fn zone_states(&self, zones: &[ZoneQuery], now: TimeMs) -> Vec<ZoneState> {
        let host = self.devices.view();
        let (sizes, recallable) =
            (&host.zones[..], self.governor.controller().recallable_bytes(&host));
        let recallable_bytes = |id: &str| {
            let mut zones = self.zones().iter().zip(&recallable);
            zones.find(|(zone, _)| zone.id == id).map_or(0, |(_, bytes)| *bytes)
        };
        let state = |zone: &ZoneQuery| ZoneState {
            online_bytes: match zone.has_dimms {
                true => self.online_beside_boot(zone.guest_node, zone.boot_bytes),
                false => self.online_bytes(&zone.id, sizes),
            },
            recallable_bytes: recallable_bytes(&zone.id),
            resize: self.zone_resize(&zone.id, sizes, now),
        };
        zones.iter().map(state).collect()
    }

    /// Sizes of zone `id` from `sizes`, and the matching status. The sizes may have changed since
    /// the governor's last step, so a copy of the tracker observes them first.
    fn zone_resize(&self, id: &str, sizes: &[ZoneSizes], now: TimeMs) -> Option<ZoneResize> {
        let (_, sizes) = self.zones().iter().zip(sizes).find(|(zone, _)| zone.id == id)?;
        let offline = self.node_blocks(sizes.guest_numa_node).map_or(0, |(_, offline)| offline);
        let controller = self.governor.controller();
        let mut tracker = controller.tracker(sizes.id)?.clone();
        tracker.observe(sizes, now);
        let status = tracker.status(offline, controller.rules().progress_ms, now);
        Some(ZoneResize { sizes: *sizes, status })
    }

    /// Online bytes in the hotplug part of zone `id`, according to the agent's last report. The
    /// report has one sum for each node. If several zones are on one node, the sum is assigned to
    /// them in order. No zone is assigned more than its plugged size, whatever the report contains.
    /// `sizes` must contain the sizes of all zones.
    fn online_bytes(&self, id: &str, sizes: &[ZoneSizes]) -> Option<u64> {
        let zone = self.zones().iter().find(|zone| zone.id == id)?;
        let (online, _) = self.node_blocks(zone.guest_numa_node)?;
        let mut left = online.saturating_sub(zone.boot_bytes);
        // The balloon zone is skipped, because its memory is boot memory.
        let is_neighbour = |(other, _): &(&GovernedZone, &ZoneSizes)| {
            other.guest_numa_node == zone.guest_numa_node && other.id != BALLOON_ZONE
        };
        for (neighbour, sizes) in self.zones().iter().zip(sizes).filter(is_neighbour) {
            let its = left.min(sizes.plugged_bytes);
            if neighbour.id == id {
                return Some(its);
            }
            left -= its;
        }
        None
    }

    /// Online memory on a node in addition to `boot_bytes` of boot memory. Linux counts the last
    /// memory block of boot memory as a whole block. Used for a zone that the governor does not
    /// size and that is alone on its node.
    pub fn online_beside_boot(&self, node: u32, boot_bytes: u64) -> Option<u64> {
        let (online, _) = self.node_blocks(node)?;
        let (_, report) = self.governor.last_report()?;
        Some(online.saturating_sub(boot_bytes.next_multiple_of(report.blocks().block_bytes)))
    }

    /// Online and offline bytes on a node, according to the last report. `None` if the report has
    /// no memory blocks for the node.
    fn node_blocks(&self, node: u32) -> Option<(u64, u64)> {
        let (_, report) = self.governor.last_report()?;
        let blocks = report.blocks();
        if blocks.block_bytes == 0 {
            return None;
        }
        let found = blocks.nodes.iter().find(|blocks| blocks.node == node);
        Some(found.map_or((0, 0), |blocks| (blocks.online_bytes, blocks.offline_bytes)))
    }

    pub fn sample(&self, now: TimeMs) -> PressureSample {
        let governor = &self.governor;
        let counters = governor.counters().clone();
        let age = |at: TimeMs| Duration::from_millis(now.since(at));
        PressureSample {
            plans_total: counters.plans,
            policies: counters.policies,
            reports_total: counters.reports,
            refused_total: counters.refused,
            connections_total: counters.connections,
            agent_bytes_total: self.agent_bytes.load(Ordering::Relaxed),
            reminders_total: counters.reminders,
            agent_connected: governor.is_agent_connected(),
            agent: Some(governor.agent_state(now)),
            zones: self.governed_zones().map(|(tier, zone)| PressureZone { tier, zone }).collect(),
            decisions_total: governor.audit().total(),
            paused: governor.controller().status().paused,
            recording: self.recorder.as_ref().map(Recorder::info),
            dry_run: governor.controller().rules().dry_run,
            guest: self.guest.shown().cloned().filter(|_| governor.is_agent_connected()),
            watermark_bytes: governor.settings().watermark_bytes,
            report: governor.last_report().map(|(at, report)| (age(at), report.clone())),
            report_to_plan: self.report_to_plan.sample(),
            report_to_online: self.report_to_online.sample(),
        }
    }
}
