//! Reads the sizes of zones and of the pool from the metrics.

use std::fmt;

use anyhow::{Context, Result};
use guest_tests::{Guest, Metrics};

pub(crate) const MIB: u64 = 1 << 20;

/// Sizes of the hotpluggable part of a zone. The resident size covers the whole zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Zone {
    pub boot_bytes: u64,
    pub requested_bytes: u64,
    pub plugged_bytes: u64,
    pub resident_bytes: u64,
}

/// Sizes of both zones and of the pool at one point in time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub dram: Zone,
    pub pm: Zone,
    pub pool_free_bytes: u64,
    pub pool_memory_bytes: u64,
}

impl Sizes {
    pub(crate) fn of(guest: &Guest) -> Result<Self> {
        let metrics = guest.metrics()?;
        let pool = |state: &str| bytes(&metrics, "foreshore_pool_bytes", &[("state", state)]);
        Ok(Self {
            dram: zone(&metrics, "dram")?,
            pm: zone(&metrics, "pm")?,
            pool_free_bytes: pool("free")?,
            pool_memory_bytes: pool("memory")?,
        })
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "DRAM {} MiB, PM {} MiB",
            (self.dram.boot_bytes + self.dram.plugged_bytes) / MIB,
            self.pm.plugged_bytes / MIB
        )
    }
}

fn zone(metrics: &Metrics, id: &str) -> Result<Zone> {
    let size =
        |which: &str| bytes(metrics, &format!("foreshore_memory_{which}_bytes"), &[("zone", id)]);
    Ok(Zone {
        boot_bytes: size("boot")?,
        requested_bytes: size("requested")?,
        plugged_bytes: size("plugged")?,
        resident_bytes: size("resident")?,
    })
}

fn bytes(metrics: &Metrics, name: &str, labels: &[(&str, &str)]) -> Result<u64> {
    // A gauge in bytes is an integer far below 2^53.
    Ok(metrics.value(name, labels)? as u64)
}

/// Reads a counter from the guest's /proc/vmstat, without using the agent.
pub(crate) fn vmstat(guest: &Guest, counter: &str) -> Result<u64> {
    let text = guest.run(&format!("awk '$1 == \"{counter}\" {{ print $2 }}' /proc/vmstat"))?;
    text.trim().parse().with_context(|| format!("{counter} in /proc/vmstat: {text:?}"))
}
