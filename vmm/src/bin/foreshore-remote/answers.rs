//! Tables of the VMM's answers.

use balloon::DriverState;
use foreshore::vm::request::{PoolInfo, PoolStatus, ResizeStatus, ZoneInfo};

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
        "SCRUBBING",
        "STRG",
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
            size_cell(pool.scrubbing_bytes),
            size_cell(pool.strg_bytes),
            size_cell(pool.lendable_bytes),
            match &pool.status {
                PoolStatus::Ok => "ok".to_owned(),
                PoolStatus::ReadOnly(reason) => format!("read-only: {reason}"),
            },
        ]
    });
    table(header, 2, rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zone() -> ZoneInfo {
        ZoneInfo {
            id: "dram".to_owned(),
            tier: "dram".to_owned(),
            guest_numa_node: 0,
            boot_bytes: 384 << 20,
            hotplug_bytes: 128 << 20,
            requested_bytes: 128 << 20,
            held_bytes: 0,
            plugged_bytes: 64 << 20,
            descriptor_bytes: 1 << 20,
            online_bytes: None,
            resident_bytes: 5 << 20,
            driver: Some(DriverState::Unsupported),
            status: ResizeStatus::Stuck("busy pages".to_owned()),
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
            strg_bytes: 256 << 20,
            lendable_bytes: 508 << 20,
            volumes: 2,
            status,
        };
        let expected = "\
POOL      DURABILITY  TOTAL     FREE   MEMORY      VOLUMES  SCRUBBING     STRG  LENDABLE  STATUS
/pm/pool  page-cache  1 GiB  666 MiB  256 MiB  96 MiB in 2      2 MiB  256 MiB   508 MiB  ok
/pm/pool  page-cache  1 GiB  666 MiB  256 MiB  96 MiB in 2      2 MiB  256 MiB   508 MiB  read-only: no room
";
        let pools = [PoolStatus::Ok, PoolStatus::ReadOnly("no room".to_owned())].map(pool);
        assert_eq!(pools_table(&pools), expected);
    }
}
