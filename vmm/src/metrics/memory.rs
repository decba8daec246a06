//! Zones: four sizes that are never the same for long, and what plugging takes.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use balloon::DriverState;
use prometheus_client::registry::Unit;

use super::expose::{Exposer, Family, Labels, one};
use crate::memory::backing::MappingBudget;
use crate::memory::lost::GuestRange;
use crate::virtio::mem::{FailureReason, MemMetrics};
use crate::vm::request::{ResizeStatus, ZoneInfo};

/// What the virtio-mem device of a zone counts.
#[derive(Clone, Debug)]
pub struct PlugMetrics {
    /// The zone's name.
    pub zone: String,
    /// Its tier's name.
    pub tier: String,
    /// The device's counters.
    pub counters: Arc<MemMetrics>,
}

impl PlugMetrics {
    /// Requests that were not carried out, by reason: the host's, or the driver's own fault.
    fn refused(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counters = &self.counters;
        let host = FailureReason::ALL.map(|reason| (reason.as_str(), counters.busy(reason)));
        let driver = [
            ("more-than-requested", counters.nacks()),
            ("invalid", counters.errors()),
            ("malformed", counters.malformed()),
        ];
        host.into_iter().chain(driver)
    }
}

/// Mappings of the process: when they are used up, nothing can be plugged.
pub(super) fn expose_mappings(out: &mut Exposer<'_>, budget: &MappingBudget) -> fmt::Result {
    let gauges = [
        (Family("memory_mappings", "Mappings of the process that guest memory takes.", None), budget.used()),
        (Family("memory_mappings_limit", "The most that it may take.", None), budget.limit()),
    ];
    for (family, value) in gauges {
        out.gauges(family, [(Labels::new(), value as f64)])?;
    }
    Ok(())
}

pub(super) fn expose(out: &mut Exposer<'_>, zones: &[ZoneInfo], plugs: &[PlugMetrics]) -> fmt::Result {
    expose_sizes(out, zones)?;
    expose_statuses(out, zones)?;
    expose_drivers(out, zones)?;
    let each = || plugs.iter().map(|plug| (labels(&plug.zone, &plug.tier), plug));
    out.latencies(
        "memory_plug_duration",
        "Time that the VMM took to carry out a request to plug.",
        each().map(|(labels, plug)| (labels, plug.counters.plug.latency().sample())),
    )?;
    out.latencies(
        "memory_unplug_duration",
        "Time that the VMM took to carry out a request to unplug.",
        each().map(|(labels, plug)| (labels, plug.counters.unplug.latency().sample())),
    )?;
    out.counters(
        Family("memory_plug", "Bytes plugged so far.", Some(Unit::Bytes)),
        each().map(|(labels, plug)| (labels, plug.counters.plug.bytes())),
    )?;
    out.counters(
        Family("memory_unplug", "Bytes unplugged so far.", Some(Unit::Bytes)),
        each().map(|(labels, plug)| (labels, plug.counters.unplug.bytes())),
    )?;
    let refused = each().flat_map(|(labels, plug)| {
        plug.refused().map(move |(reason, count)| {
            let mut labels = labels.clone();
            labels.push(("reason", reason.to_owned()));
            (labels, count)
        })
    });
    out.counters(
        Family("memory_refused_requests", "Requests of the guest that were not carried out.", None),
        refused,
    )?;
    out.counters(
        Family("memory_throttled_requests", "Requests of the guest that exceeded the zone's budget.", None),
        each().map(|(labels, plug)| (labels, plug.counters.throttled.requests())),
    )?;
    out.seconds_total(
        "memory_throttled",
        "Time by which these requests were delayed.",
        each().map(|(labels, plug)| (labels, plug.counters.throttled.delay().as_secs_f64())),
    )?;
    out.counters(
        Family("memory_scrub_failures", "Unplugs after which memory could not be scrubbed.", None),
        each().map(|(labels, plug)| (labels, plug.counters.scrub_failures())),
    )
}

fn expose_sizes(out: &mut Exposer<'_>, zones: &[ZoneInfo]) -> fmt::Result {
    type SizeOf = fn(&ZoneInfo) -> Option<u64>;
    let sizes: [(&str, &str, SizeOf); 8] = [
        ("memory_boot", "Memory that is there from boot on.", |zone| Some(zone.boot_bytes)),
        ("memory_hotplug", "The most that can be plugged.", |zone| Some(zone.hotplug_bytes)),
        ("memory_requested", "What the guest is asked to have plugged.", |zone| Some(zone.requested_bytes)),
        (
            "memory_held",
            "Requested size that waits until the guest has DRAM for its page descriptors.",
            |zone| Some(zone.held_bytes),
        ),
        ("memory_plugged", "What the guest has plugged.", |zone| Some(zone.plugged_bytes)),
        ("memory_descriptor", "Guest DRAM that page descriptors of plugged memory take, at least.", |zone| {
            Some(zone.descriptor_bytes)
        }),
        ("memory_online", "What is plugged and online, as the agent says.", |zone| zone.online_bytes),
        ("memory_resident", "What is in the host's memory.", |zone| Some(zone.resident_bytes)),
    ];
    for (name, help, size) in sizes {
        out.bytes(name, help, zones.iter().filter_map(|zone| Some((labels_of(zone), size(zone)?))))?;
    }
    Ok(())
}

fn expose_statuses(out: &mut Exposer<'_>, zones: &[ZoneInfo]) -> fmt::Result {
    let family = Family("memory_resize_status", "1 for how the last resize goes, 0 for the rest.", None);
    let statuses = zones.iter().flat_map(|zone| {
        let current = match zone.status {
            ResizeStatus::Reached => "reached",
            ResizeStatus::Pending => "pending",
            ResizeStatus::NoDriver => "no-driver",
            ResizeStatus::Stuck(_) => "stuck",
        };
        ["reached", "pending", "no-driver", "stuck"].map(|status| {
            let mut labels = labels_of(zone);
            labels.push(("status", status.to_owned()));
            (labels, if status == current { 1.0 } else { 0.0 })
        })
    });
    out.gauges(family, statuses)
}

fn expose_drivers(out: &mut Exposer<'_>, zones: &[ZoneInfo]) -> fmt::Result {
    let family =
        Family("memory_driver_state", "1 for the state of the guest's driver, 0 for the rest.", None);
    let states = zones.iter().filter_map(|zone| Some((zone, zone.driver?))).flat_map(|(zone, current)| {
        DriverState::ALL.map(|state| {
            let mut labels = labels_of(zone);
            labels.push(("state", state.label().to_owned()));
            (labels, f64::from(u8::from(state == current)))
        })
    });
    out.gauges(family, states)
}

pub(super) fn expose_lost(out: &mut Exposer<'_>, ranges: &[Arc<GuestRange>]) -> fmt::Result {
    // A zone has several parts, and one name.
    let mut lost = BTreeMap::new();
    for range in ranges {
        *lost.entry(range.name()).or_insert(false) |= range.loss().is_some();
    }
    let lost = lost.into_iter().map(|(name, lost)| (one("memory", name), f64::from(u8::from(lost))));
    out.gauges(Family("memory_lost", "1 when memory that the guest has is gone.", None), lost)
}

fn labels_of(zone: &ZoneInfo) -> Labels {
    labels(&zone.id, &zone.tier)
}

fn labels(zone: &str, tier: &str) -> Labels {
    vec![("zone", zone.to_owned()), ("tier", tier.to_owned())]
}
