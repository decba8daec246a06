//! Number of emulated hosts that this machine can run at the same time, and its load.

use std::thread;

use anyhow::{Context, Result};

use super::place::{self, Place};
use crate::checkout::read;

/// Memory of an emulated host beside that of its guests: QEMU, and the pages of its disks.
const OVERHEAD_MIB: u64 = 1024;
const MAX_HOSTS: usize = 4;

/// Number of hosts with one CPU and `memory_mib` each. One if commands run on this machine itself.
pub(crate) fn hosts_at_once(memory_mib: u64) -> Result<usize> {
    let available_mib =
        parse_available(&read("/proc/meminfo".as_ref())?).context("no MemAvailable")?;
    let cpus = thread::available_parallelism()?.get();
    Ok(match place::choose()?.0 {
        Place::Direct => 1,
        Place::Nested => count(cpus, available_mib, memory_mib),
    })
}

pub(crate) fn load() -> Result<String> {
    let load = read("/proc/loadavg".as_ref())?;
    Ok(load.split_whitespace().take(3).collect::<Vec<_>>().join(" "))
}

/// MemAvailable of /proc/meminfo in MiB.
fn parse_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? / 1024)
}

fn count(cpus: usize, available_mib: u64, memory_mib: u64) -> usize {
    let room = usize::try_from(available_mib / (memory_mib + OVERHEAD_MIB)).unwrap_or(MAX_HOSTS);
    room.min(cpus).clamp(1, MAX_HOSTS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_and_memory_limit_the_hosts() {
        assert_eq!(count(8, 100_000, 7000), MAX_HOSTS);
        assert_eq!(count(2, 100_000, 7000), 2);
        assert_eq!(count(8, 3 * 8024 - 1, 7000), 2);
        assert_eq!(count(8, 1000, 7000), 1);
    }

    #[test]
    fn available_memory_is_that_of_the_kernel() {
        let meminfo =
            "MemTotal:       24682516 kB\nMemFree:          500 kB\nMemAvailable:   20744192 kB\n";
        assert_eq!(parse_available(meminfo), Some(20258));
        assert_eq!(parse_available("MemAvailableX: 1 kB"), None);
    }
}
