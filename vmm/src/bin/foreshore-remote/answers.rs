//! Tables that present the VMM's answers.

use std::collections::BTreeMap;

use balloon::DriverState;
use foreshore::vm::request::{
    PoolInfo, PoolStatus, ResizeStatus, VmInfo, VmState, VolumeInfo, VolumeStatus, ZoneInfo,
};

use crate::table::{size_cell, table};

pub(crate) fn zones_table(zones: &[ZoneInfo]) -> String {
    let header = [
        "ZONE",
        "NODE",
        "BOOT",
        "HOTPLUG",
        "REQUESTED",
        "PLUGGED",
        "ONLINE",
        "RESIDENT",
        "DRIVER",
        "STATUS",
    ];
    let rows = zones.iter().map(|zone| {
        [
            zone.id.clone(),
            zone.guest_numa_node.to_string(),
            size_cell(zone.boot_bytes),
            size_cell(zone.hotplug_bytes),
            size_cell(zone.requested_bytes),
            size_cell(zone.plugged_bytes),
            zone.online_bytes.map_or_else(|| "-".to_owned(), size_cell),
            size_cell(zone.resident_bytes),
            zone.driver.map_or("-", DriverState::label).to_owned(),
            status(&zone.status),
        ]
    });
    table(header, 1, rows)
}

fn status(status: &ResizeStatus) -> String {
    match status {
        ResizeStatus::Reached => "reached".to_owned(),
        ResizeStatus::Pending => "pending".to_owned(),
        ResizeStatus::NoDriver => "no-driver".to_owned(),
        ResizeStatus::Stuck(reason) => format!("stuck: {reason}"),
    }
}

/// Table of pools. Retired bytes and metadata have no column, so a row may not sum to its total.
pub(crate) fn pools_table(pools: &[PoolInfo]) -> String {
    let header = [
        "POOL",
        "DURABILITY",
        "TOTAL",
        "FREE",
        "MEMORY",
        "VOLUMES",
        "PROMISED",
        "SCRUBBING",
        "RESERVED",
        "LENDABLE",
        "STATUS",
    ];
    let rows = pools.iter().map(|pool| {
        [
            pool.path.clone(),
            pool.durability.clone(),
            size_cell(pool.total_bytes),
            size_cell(pool.free_bytes),
            size_cell(pool.memory_bytes),
            format!("{} in {}", size_cell(pool.volume_bytes), pool.volumes),
            size_cell(pool.promised_bytes),
            size_cell(pool.scrubbing_bytes),
            size_cell(pool.reserved_bytes),
            size_cell(pool.lendable_bytes),
            match &pool.status {
                PoolStatus::Ok => "ok".to_owned(),
                PoolStatus::ReadOnly(reason) => format!("read-only: {reason}"),
            },
        ]
    });
    table(header, 2, rows)
}

/// Lines about the VM, and a table of its devices.
pub(crate) fn info_lines(info: &VmInfo) -> String {
    let state = match info.state {
        VmState::Created => "created",
        VmState::Running => "running",
        VmState::Paused => "paused",
    };
    let cpus = &info.config.cpus;
    let mut lines = vec![("STATE", state.to_owned())];
    lines.extend(info.pause_reason.as_ref().map(|reason| ("PAUSED", printable(reason))));
    lines.push(("MEMORY", size_cell(info.memory_actual_size)));
    lines.push(("VCPUS", format!("{}, at most {}", cpus.boot_vcpus, cpus.max_vcpus)));
    lines.extend(info.balloon.map(|balloon| {
        let [actual, target, max] =
            [balloon.actual_bytes, balloon.target_bytes, balloon.max_bytes].map(size_cell);
        ("BALLOON", format!("{actual}, requested {target}, at most {max}"))
    }));
    lines.extend(info.guest_kernel.as_ref().map(|kernel| {
        let text = format!("{}, preemption {}", kernel.release, kernel.preemption);
        ("KERNEL", printable(&text))
    }));
    let mut text: String =
        lines.iter().map(|(name, value)| format!("{name:<8} {value}\n")).collect();
    // The node of a PCI function contains the address, and the IDs of its devices as children.
    let functions = info.device_tree.iter().flat_map(BTreeMap::values);
    let mut devices: Vec<_> = functions
        .filter_map(|function| Some([function.pci_bdf.clone()?, function.children.join(", ")]))
        .collect();
    if !devices.is_empty() {
        devices.sort();
        text.push('\n');
        text.push_str(&table(["ADDRESS", "DEVICE"], 1, devices));
    }
    text
}

/// Counters of each device, by its ID.
pub(crate) type Counters = BTreeMap<String, BTreeMap<String, i64>>;

pub(crate) fn counters_table(counters: &Counters) -> String {
    let rows = counters.iter().flat_map(|(device, counters)| {
        let row =
            |(name, value): (&String, &i64)| [device.clone(), name.clone(), value.to_string()];
        counters.iter().map(row)
    });
    table(["DEVICE", "COUNTER", "VALUE"], 2, rows)
}

pub(crate) fn volumes_table(volumes: &[VolumeInfo]) -> String {
    let header = [
        "VOLUME",
        "POOL",
        "SIZE",
        "ALLOCATED",
        "ACCESS",
        "INTERFACE",
        "DURABILITY",
        "GUEST-BTT",
        "STATUS",
    ];
    let rows = volumes.iter().map(|volume| {
        [
            volume.name.clone(),
            volume.pool.clone(),
            size_cell(volume.size_bytes),
            volume.allocated_bytes.map_or("-".to_owned(), size_cell),
            if volume.readonly { "read-only" } else { "read-write" }.to_owned(),
            volume.interface.clone(),
            volume.durability.clone(),
            volume.guest_btt.as_ref().map_or("-", |verdict| verdict.label()).to_owned(),
            match &volume.status {
                VolumeStatus::Ok => "ok".to_owned(),
                VolumeStatus::Failed(reason) => format!("failed: {reason}"),
            },
        ]
    });
    table(header, 2, rows)
}

/// Escapes control characters in a text from the guest.
fn printable(text: &str) -> String {
    text.escape_debug().to_string()
}

#[cfg(test)]
mod tests {
    use foreshore_devices::volume::kernel_gate::Verdict;

    use super::*;

    fn zone() -> ZoneInfo {
        ZoneInfo {
            id: "dram".to_owned(),
            tier: "dram".to_owned(),
            boot_bytes: 384 << 20,
            hotplug_bytes: 128 << 20,
            requested_bytes: 128 << 20,
            plugged_bytes: 64 << 20,
            descriptor_bytes: 1 << 20,
            saved_descriptor_bytes: 1 << 20,
            resident_bytes: 5 << 20,
            driver: Some(DriverState::Unsupported),
            status: ResizeStatus::Stuck("busy pages".to_owned()),
            ..ZoneInfo::default()
        }
    }

    #[test]
    fn zones_are_shown_in_columns() {
        let expected = "\
ZONE  NODE     BOOT  HOTPLUG  REQUESTED  PLUGGED  ONLINE  RESIDENT       DRIVER  STATUS
dram     0  384 MiB  128 MiB    128 MiB   64 MiB       -     5 MiB  unsupported  stuck: busy pages
";
        assert_eq!(zones_table(&[zone()]), expected);
    }

    #[test]
    fn pools_are_shown_in_columns() {
        let pool = |status| PoolInfo {
            path: "/pm/pool".to_owned(),
            uuid: "3d3b7c0e-8a6c-4d1b-9a57-0c1f2e9b6a44".to_owned(),
            durability: "page-cache".to_owned(),
            total_bytes: 1 << 30,
            free_bytes: 666 << 20,
            memory_bytes: 256 << 20,
            volume_bytes: 96 << 20,
            scrubbing_bytes: 2 << 20,
            retired_bytes: 0,
            metadata_bytes: 4 << 20,
            reserve_bytes: 256 << 20,
            reserved_bytes: 256 << 20,
            promised_bytes: 104 << 20,
            provisioned_bytes: 104 << 20,
            lendable_bytes: 508 << 20,
            borrowable_bytes: 0,
            volumes: 2,
            status,
        };
        let expected = "\
POOL      DURABILITY  TOTAL     FREE   MEMORY      VOLUMES  PROMISED  SCRUBBING  RESERVED  LENDABLE  STATUS
/pm/pool  page-cache  1 GiB  666 MiB  256 MiB  96 MiB in 2   104 MiB      2 MiB   256 MiB   508 MiB  ok
/pm/pool  page-cache  1 GiB  666 MiB  256 MiB  96 MiB in 2   104 MiB      2 MiB   256 MiB   508 MiB  read-only: no room
";
        let pools = [PoolStatus::Ok, PoolStatus::ReadOnly("no room".to_owned())].map(pool);
        assert_eq!(pools_table(&pools), expected);
    }

    #[test]
    fn vm_is_shown_in_lines_and_its_devices_in_columns() {
        let info = serde_json::json!({
            "config": {
                "payload": { "kernel": "/vmlinuz" },
                "cpus": { "boot_vcpus": 2, "max_vcpus": 4 },
            },
            "state": "Paused",
            "memory_actual_size": 768u64 << 20,
            "pause_reason": "no room",
            "balloon": {
                "target_bytes": 64u64 << 20,
                "actual_bytes": 32u64 << 20,
                "max_bytes": 128u64 << 20,
                "driver_ready": true,
            },
            "guest_kernel": { "release": "6.12.9\u{1b}", "version": "", "preemption": "full" },
            "device_tree": {
                "_disk0": {
                    "id": "_disk0", "resources": [], "parent": "_virtio-pci-_disk0",
                    "children": [], "pci_bdf": null,
                },
                "_virtio-pci-_disk0": {
                    "id": "_virtio-pci-_disk0", "resources": [], "parent": null,
                    "children": ["_disk0"], "pci_bdf": "0000:00:02.0",
                },
            },
        });
        let expected = "\
STATE    paused
PAUSED   no room
MEMORY   768 MiB
VCPUS    2, at most 4
BALLOON  32 MiB, requested 64 MiB, at most 128 MiB
KERNEL   6.12.9\\u{1b}, preemption full

ADDRESS       DEVICE
0000:00:02.0  _disk0
";
        assert_eq!(info_lines(&serde_json::from_value(info).unwrap()), expected);
        let bare = serde_json::json!({
            "config": { "payload": { "kernel": "/vmlinuz" } },
            "state": "Created",
            "memory_actual_size": 512u64 << 20,
        });
        let expected = "STATE    created\nMEMORY   512 MiB\nVCPUS    1, at most 1\n";
        assert_eq!(info_lines(&serde_json::from_value(bare).unwrap()), expected);
    }

    #[test]
    fn counters_are_shown_in_columns() {
        let json = r#"{"_net1": {"rx_bytes": 9}, "_disk0": {"read_ops": 2, "latency_avg": 120}}"#;
        let expected = "\
DEVICE  COUNTER      VALUE
_disk0  latency_avg  120
_disk0  read_ops     2
_net1   rx_bytes     9
";
        assert_eq!(counters_table(&serde_json::from_str(json).unwrap()), expected);
    }

    #[test]
    fn volumes_are_shown_in_columns() {
        let volume = |guest_btt, status| VolumeInfo {
            pool: "/pm/pool".to_owned(),
            name: "data".to_owned(),
            size_bytes: 8 << 30,
            reserve_bytes: 8 << 30,
            allocated_bytes: Some(9 << 30),
            live_bytes: None,
            interface: "nvdimm".to_owned(),
            unmapped_reason: None,
            readonly: false,
            durability: "dax-sync".to_owned(),
            extents: 1,
            guest_btt,
            status,
        };
        let expected = "\
VOLUME  POOL       SIZE  ALLOCATED      ACCESS  INTERFACE  DURABILITY  GUEST-BTT  STATUS
data    /pm/pool  8 GiB      9 GiB  read-write     nvdimm    dax-sync          -  ok
data    /pm/pool  8 GiB      9 GiB  read-write     nvdimm    dax-sync       safe  failed: no room
";
        let failed = VolumeStatus::Failed("no room".to_owned());
        let volumes = [volume(None, VolumeStatus::Ok), volume(Some(Verdict::Safe), failed)];
        assert_eq!(volumes_table(&volumes), expected);
    }
}
