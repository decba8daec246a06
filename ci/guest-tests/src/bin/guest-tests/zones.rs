//! Functions that the tests of memory share.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::{Guest, Pool};
use serde_json::Value;

pub(crate) const MIB: u64 = 1 << 20;
/// Time limit for erasing returned memory under emulation.
const SETTLE_LIMIT: Duration = Duration::from_secs(60);

pub(crate) struct Zone {
    pub requested_bytes: u64,
    pub plugged_bytes: u64,
    pub resident_bytes: u64,
    /// One of `reached`, `pending`, `no-driver` and `stuck`.
    pub state: String,
}

pub(crate) fn zone(guest: &Guest, id: &str) -> Result<Zone> {
    let answer = guest.get("vm.memory")?;
    // The response is a list of zones, or an object that contains such a list.
    let zones = answer.as_array().or_else(|| answer["zones"].as_array());
    let zone = zones.and_then(|zones| zones.iter().find(|zone| zone["id"] == id));
    let zone = zone.with_context(|| format!("vm.memory has no zone {id}: {answer}"))?;
    let number =
        |key: &str| zone[key].as_u64().with_context(|| format!("Zone {id} has no {key}: {zone}"));
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

pub(crate) fn wait_until_plugged(
    guest: &Guest,
    id: &str,
    bytes: u64,
    limit: Duration,
) -> Result<()> {
    guest.wait_until(&format!("{} MiB of {id} are plugged", bytes / MIB), limit, || {
        Ok(zone(guest, id)?.plugged_bytes == bytes)
    })
}

/// Returns the guest's only pool as `pool.info` describes it.
pub(crate) fn pool_info(guest: &Guest) -> Result<Value> {
    let answer = guest.get("pool.info")?;
    let pools =
        answer["pools"].as_array().with_context(|| format!("pool.info has no pools: {answer}"))?;
    ensure!(pools.len() == 1, "Not exactly one pool: {answer}");
    Ok(pools[0].clone())
}

/// Waits until the guest's only pool is idle. Checks that it has lent the plugged memory of the
/// only PM zone, and that `pool.info`, the metrics and `pmvol info` agree.
pub(crate) fn check_plugged_in_pool_info(guest: &Guest, pool: &Pool) -> Result<()> {
    guest.wait_until(
        "the pool lends as much as is plugged, and scrubbing has ended",
        SETTLE_LIMIT,
        || {
            let info = pool_info(guest)?;
            Ok(info["memory_bytes"] == zone(guest, "pm")?.plugged_bytes
                && info["scrubbing_bytes"] == 0)
        },
    )?;
    let (info, metrics, by_pmvol) = (pool_info(guest)?, guest.metrics()?, pool.info()?);
    let number = |name: &str| {
        info[name].as_u64().with_context(|| format!("pool.info has no {name}: {info}"))
    };
    ensure!(info["path"] == pool.name() && info["status"]["state"] == "ok", "{info}");
    let path = pool.name();
    let state =
        |state: &str| metrics.value("foreshore_pool_bytes", &[("pool", &path), ("state", state)]);
    let lendable_bytes = metrics.value("foreshore_pool_lendable_bytes", &[("pool", &path)])?;
    for (name, metered_bytes) in [
        ("free_bytes", state("free")? + state("free-storage")?),
        ("memory_bytes", state("memory")?),
        ("volume_bytes", state("volume")?),
        ("scrubbing_bytes", state("scrubbing")?),
        ("lendable_bytes", lendable_bytes),
    ] {
        ensure!(
            number(name)? as f64 == metered_bytes,
            "{name}: the metric has {metered_bytes} bytes, pool.info {info}"
        );
    }
    let shown = info.as_object().context("The pool is not an object")?;
    for (name, shown) in shown.iter().filter(|(name, _)| *name != "status") {
        ensure!(by_pmvol[name] == *shown, "{name}: {info} differs from pmvol's {by_pmvol}");
    }
    let states = [
        "free_bytes",
        "memory_bytes",
        "volume_bytes",
        "scrubbing_bytes",
        "retired_bytes",
        "metadata_bytes",
    ];
    let sum = states.iter().try_fold(0, |sum, name| Ok::<_, anyhow::Error>(sum + number(name)?))?;
    ensure!(sum == number("total_bytes")?, "{sum} bytes have a state: {info}");
    Ok(())
}

pub(crate) fn mem_total_mib(guest: &Guest) -> Result<u64> {
    meminfo_mib(guest, "MemTotal")
}

/// Waits until MemTotal is `total_mib`. Linux plugs a memory block before it brings the block
/// online. While Linux takes an unplugged block offline, MemTotal includes the block again
/// (virtio_mem_fake_offline_going_offline in drivers/virtio/virtio_mem.c).
pub(crate) fn wait_until_mem_total(guest: &Guest, total_mib: u64, limit: Duration) -> Result<()> {
    guest.wait_until(&format!("MemTotal is {total_mib} MiB"), limit, || {
        Ok(mem_total_mib(guest)? == total_mib)
    })
}

pub(crate) fn meminfo_mib(guest: &Guest, name: &str) -> Result<u64> {
    let text = guest.run(&format!("awk '/^{name}:/ {{ print int($2 / 1024) }}' /proc/meminfo"))?;
    text.trim().parse().with_context(|| format!("{name} in /proc/meminfo: {text:?}"))
}

pub(crate) fn vmstat(guest: &Guest, counter: &str) -> Result<u64> {
    let text = guest.run(&format!("awk '$1 == \"{counter}\" {{ print $2 }}' /proc/vmstat"))?;
    text.trim().parse().with_context(|| format!("{counter} in /proc/vmstat: {text:?}"))
}
