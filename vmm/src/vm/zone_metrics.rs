//! Sizes of zones, which are never the same for long.

use balloon::DriverState;

use super::request::{ResizeStatus, ZoneInfo};
use crate::metrics::{Expose, Exposition, Family, Labels, and, one};

/// Zones as they are at a scrape.
#[derive(Debug, Default)]
pub struct ZoneMetrics(pub Vec<ZoneInfo>);

impl Expose for ZoneMetrics {
    fn expose(&self, out: &mut Exposition) {
        expose_sizes(out, &self.0);
        expose_statuses(out, &self.0);
        expose_drivers(out, &self.0);
    }
}

fn expose_sizes(out: &mut Exposition, zones: &[ZoneInfo]) {
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
        out.bytes(name, help, zones.iter().filter_map(|zone| Some((labels_of(zone), size(zone)?))));
    }
}

fn expose_statuses(out: &mut Exposition, zones: &[ZoneInfo]) {
    let family = Family("memory_resize_status", "1 for how the last resize goes, 0 for the rest.", None);
    let statuses = zones.iter().flat_map(|zone| {
        let current = match zone.status {
            ResizeStatus::Reached => "reached",
            ResizeStatus::Pending => "pending",
            ResizeStatus::NoDriver => "no-driver",
            ResizeStatus::Stuck(_) => "stuck",
        };
        ["reached", "pending", "no-driver", "stuck"]
            .map(|status| (and(&labels_of(zone), "status", status), status == current))
    });
    out.flags(family, statuses);
}

fn expose_drivers(out: &mut Exposition, zones: &[ZoneInfo]) {
    let family =
        Family("memory_driver_state", "1 for the state of the guest's driver, 0 for the rest.", None);
    let states = zones.iter().filter_map(|zone| Some((zone, zone.driver?))).flat_map(|(zone, current)| {
        DriverState::ALL.map(|state| (and(&labels_of(zone), "state", state.label()), state == current))
    });
    out.flags(family, states);
}

fn labels_of(zone: &ZoneInfo) -> Labels {
    and(&one("zone", &zone.id), "tier", &zone.tier)
}
