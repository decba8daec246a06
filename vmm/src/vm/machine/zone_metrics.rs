//! Sizes and states of zones, which are read for each scrape.

use balloon::DriverState;
use foreshore_devices::metrics::{Expose, Exposition, Family, Labels, and, one};

use crate::vm::request::{ResizeStatus, ZoneInfo};

#[derive(Debug, Default)]
pub(crate) struct ZoneMetrics(pub Vec<ZoneInfo>);

impl Expose for ZoneMetrics {
    fn expose(&self, out: &mut Exposition) {
        expose_sizes(out, &self.0);
        let help = "Failed moves of PM to the spill file.";
        let failures = Family("memory_spill_file_failures", help, None);
        let failed = |zone: &ZoneInfo| (labels_of(zone), zone.spill_file_failures);
        out.counters(failures, self.0.iter().map(failed));
        expose_statuses(out, &self.0);
        expose_drivers(out, &self.0);
    }
}

fn expose_sizes(out: &mut Exposition, zones: &[ZoneInfo]) {
    type SizeOf = fn(&ZoneInfo) -> Option<u64>;
    let sizes: [(&str, &str, SizeOf); 12] = [
        ("memory_boot", "Memory of the zone at boot.", |zone| Some(zone.boot_bytes)),
        ("memory_hotplug", "Upper limit of the plugged size.", |zone| Some(zone.hotplug_bytes)),
        ("memory_requested", "Plugged size requested from the guest.", |zone| {
            Some(zone.requested_bytes)
        }),
        (
            "memory_held",
            "Part of the requested size that waits until the guest has DRAM for its page descriptors.",
            |zone| Some(zone.held_bytes),
        ),
        ("memory_plugged", "Memory that the guest has plugged.", |zone| Some(zone.plugged_bytes)),
        (
            "memory_descriptor",
            "Least guest DRAM that page descriptors of the plugged memory take.",
            |zone| Some(zone.descriptor_bytes),
        ),
        (
            "memory_saved_descriptor",
            "Guest DRAM that page descriptors of the memory that is not plugged would take.",
            |zone| Some(zone.saved_descriptor_bytes),
        ),
        (
            "memory_recallable",
            "Plugged PM that a guest can unplug, above the floor and outside pinned zones.",
            |zone| Some(zone.recallable_bytes),
        ),
        ("memory_spilled", "Plugged PM that was moved from the pool.", |zone| {
            Some(zone.spilled_bytes)
        }),
        ("memory_spilled_file", "Part of the moved PM in the spill file.", |zone| {
            Some(zone.spilled_file_bytes)
        }),
        (
            "memory_online",
            "Online memory in the zone's address range, as reported by the agent.",
            |zone| zone.online_bytes,
        ),
        (
            "memory_resident",
            "Host memory that backs the zone; for pm, memory of the pool.",
            |zone| Some(zone.resident_bytes),
        ),
    ];
    for (name, help, size) in sizes {
        out.bytes(name, help, zones.iter().filter_map(|zone| Some((labels_of(zone), size(zone)?))));
    }
}

fn expose_statuses(out: &mut Exposition, zones: &[ZoneInfo]) {
    let family = Family(
        "memory_resize_status",
        "1 for the status of the last resize, 0 for all others.",
        None,
    );
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
    let family = Family(
        "memory_driver_state",
        "1 for the state of the guest's virtio-mem driver, 0 for all others.",
        None,
    );
    let states =
        zones.iter().filter_map(|zone| Some((zone, zone.driver?))).flat_map(|(zone, current)| {
            DriverState::ALL
                .map(|state| (and(&labels_of(zone), "state", state.label()), state == current))
        });
    out.flags(family, states);
}

fn labels_of(zone: &ZoneInfo) -> Labels {
    and(&one("zone", &zone.id), "tier", &zone.tier)
}
