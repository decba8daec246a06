//! What the governor shows of itself: to the API, and to metrics.

use std::collections::BTreeMap;
use std::time::Duration;

use balloon::params::Parameters;
use balloon::{TimeMs, ZoneId};
use serde_json::json;

use super::{BALLOON_ZONE, Core, Zone};
use crate::governor::audit::AuditedZone;
use crate::governor::record::Recorder;
use crate::metrics::{PressureSample, PressureZone};
use crate::vm::request::{GovernedZoneInfo, PressureInfo, ResizeStatus};

impl Core {
    /// What `vm.pressure` answers.
    pub fn info(&self, decisions: usize, now: TimeMs) -> PressureInfo {
        let status = self.controller.status();
        let name = |id: &ZoneId| self.zones[id.0 as usize].zone.id.clone();
        let audited: Vec<_> = self
            .zones
            .iter()
            .map(|Zone { zone, progress }| AuditedZone {
                id: &zone.id,
                plugged_bytes: zone.device.sizes().plugged_bytes,
                late: progress.is_late(now),
            })
            .collect();
        let mut details = BTreeMap::from([
            ("watermark_bytes".to_owned(), json!(self.settings.watermark_bytes)),
            ("watermark_of".to_owned(), json!(self.settings.watermark_of)),
            ("cool_down_ms".to_owned(), json!(status.cool_down_ms)),
            ("reports".to_owned(), json!(self.counters.reports)),
            ("refused".to_owned(), json!(self.counters.refused)),
        ]);
        let values = |params: &dyn Parameters| {
            let values =
                params.table().iter().filter_map(|param| Some((param.name, params.get(param.name)?)));
            json!(values.collect::<BTreeMap<_, _>>())
        };
        details.insert("params".to_owned(), self.controller.policy().parameters().map_or(json!({}), values));
        details.insert("rules".to_owned(), values(self.controller.rules()));
        if let Some((_, report)) = &self.last_report {
            details.insert("memory".to_owned(), json!(report.memory()));
            details.insert("stall".to_owned(), json!(report.stall()));
            details.insert("counters".to_owned(), json!(report.counters()));
        }
        if let Some(agentless) = &self.agentless {
            let source = if agentless.is_active() { "statistics" } else { "agent" };
            details.insert("source".to_owned(), json!(source));
        }
        if let Some(took_ms) = self.last_online_ms {
            details.insert("report_to_online_ms".to_owned(), json!(took_ms));
        }
        PressureInfo {
            policy: status.policy.to_owned(),
            dry_run: status.dry_run,
            paused: status.paused,
            pinned_zones: status.pinned.iter().map(name).collect(),
            agent: self.agent_state(now),
            agent_connected: self.agent.connected,
            report_age_ms: self.last_report.as_ref().map(|(at, _)| now.since(*at)),
            zones: self.governed_zones().map(|(_, zone)| zone).collect(),
            decisions_total: self.audit.total(),
            decisions: self.audit.newest(decisions, &audited, now),
            recording: self.recorder.as_ref().map(Recorder::info),
            details,
        }
    }

    /// Tier and state of each zone.
    fn governed_zones(&self) -> impl Iterator<Item = (&'static str, GovernedZoneInfo)> {
        let pinned = self.controller.status().pinned;
        self.zones.iter().zip(0..).map(move |(Zone { zone, .. }, index)| {
            let info = GovernedZoneInfo {
                id: zone.id.clone(),
                driver_ready: zone.device.sizes().driver_ready,
                pinned: pinned.contains(&ZoneId(index)),
            };
            (zone.tier.label(), info)
        })
    }

    /// How the last resize of zone `id` goes; `None` if the governor does not size it.
    pub fn resize_status(&self, id: &str, now: TimeMs) -> Option<ResizeStatus> {
        let Zone { zone, progress } = self.zones.iter().find(|zone| zone.zone.id == id)?;
        let offline = self.node_blocks(zone.guest_numa_node).map_or(0, |(_, offline)| offline);
        Some(progress.status(offline, now))
    }

    /// What the agent says is online of the hotplug part of zone `id`. Of zones in one node it says what they have together:
    /// then the first ones' memory counts first.
    pub fn online_bytes(&self, id: &str) -> Option<u64> {
        let Zone { zone, .. } = self.zones.iter().find(|zone| zone.zone.id == id)?;
        let (online, _) = self.node_blocks(zone.guest_numa_node)?;
        let mut left = online.saturating_sub(zone.boot_bytes);
        // A balloon's memory is boot memory.
        let is_neighbour = |other: &&Zone| {
            other.zone.guest_numa_node == zone.guest_numa_node && other.zone.id != BALLOON_ZONE
        };
        let mut neighbours = self.zones.iter().filter(is_neighbour).peekable();
        while let Some(Zone { zone: neighbour, .. }) = neighbours.next() {
            let is_last = neighbours.peek().is_none();
            let its = if is_last { left } else { left.min(neighbour.device.sizes().plugged_bytes) };
            if neighbour.id == id {
                return Some(its);
            }
            left -= its;
        }
        None
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

    /// Everything for metrics.
    pub fn sample(&self, now: TimeMs) -> PressureSample {
        let age = |at: TimeMs| Duration::from_millis(now.since(at));
        PressureSample {
            plans_total: self.counters.plans.clone(),
            policies: self.counters.policies.clone(),
            reports_total: self.counters.reports,
            refused_total: self.counters.refused.clone(),
            connections_total: self.counters.connections,
            reminders_total: self.counters.reminders,
            agent_connected: self.agent.connected,
            agent: Some(self.agent_state(now)),
            zones: self.governed_zones().map(|(tier, zone)| PressureZone { tier, zone }).collect(),
            decisions_total: self.audit.total(),
            paused: self.controller.status().paused,
            recording: self.recorder.as_ref().map(Recorder::info),
            dry_run: self.controller.rules().dry_run,
            watermark_bytes: self.settings.watermark_bytes,
            report: self.last_report.as_ref().map(|(at, report)| (age(*at), report.clone())),
            report_to_plan: self.report_to_plan.sample(),
            report_to_online: self.report_to_online.sample(),
        }
    }
}
