//! What the tests of memory share.

use anyhow::{Context, Result};
use guest_tests::Guest;

pub const MIB: u64 = 1 << 20;

/// A zone as `vm.memory` shows it.
pub struct Zone {
    pub requested_bytes: u64,
    pub plugged_bytes: u64,
    pub resident_bytes: u64,
    /// `reached`, `pending`, `no-driver`, `stuck`.
    pub state: String,
}

/// Asks the API for a zone.
pub fn zone(guest: &Guest, id: &str) -> Result<Zone> {
    let answer = guest.api("GET", "vm.memory", None)?;
    // A list of zones, or an object that has one.
    let zones = answer.as_array().or_else(|| answer["zones"].as_array());
    let zone = zones.and_then(|zones| zones.iter().find(|zone| zone["id"] == id));
    let zone = zone.with_context(|| format!("vm.memory has no zone {id}: {answer}"))?;
    let number = |key: &str| zone[key].as_u64().with_context(|| format!("Zone {id} has no {key}: {zone}"));
    Ok(Zone {
        requested_bytes: number("requested_bytes")?,
        plugged_bytes: number("plugged_bytes")?,
        resident_bytes: number("resident_bytes")?,
        state: zone["status"]["state"]
            .as_str()
            .with_context(|| format!("Zone {id} has no state: {zone}"))?
            .to_owned(),
    })
}

/// MemTotal as the guest's kernel counts it.
pub fn mem_total_mib(guest: &Guest) -> Result<u64> {
    Ok(guest.run("awk '/^MemTotal/ { print int($2 / 1024) }' /proc/meminfo")?.trim().parse()?)
}

/// A counter of the guest's /proc/vmstat.
pub fn vmstat(guest: &Guest, counter: &str) -> Result<u64> {
    let text = guest.run(&format!("awk '$1 == \"{counter}\" {{ print $2 }}' /proc/vmstat"))?;
    text.trim().parse().with_context(|| format!("{counter} in /proc/vmstat: {text:?}"))
}
