//! Chooses between this machine and an emulated host, limits the number of emulated hosts, and
//! describes the machine for measurements.

use std::env;
use std::fmt::{self, Display};
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::thread;

use anyhow::{Context, Result};

use super::{qemu, qemu_patch};
use crate::apt::sha256;
use crate::checkout::{Checkout, read};
use crate::jobs;
use crate::kernels;
use crate::messages::refuse;
use crate::programs;

/// Variable that overrides the choice. For the command, it is set to the place where the command
/// runs.
pub(super) const HOST_VARIABLE: &str = "FORESHORE_HOST";
/// Memory that an emulated host needs in addition to its guest memory, for QEMU and for cached
/// pages of its disks.
const OVERHEAD_MIB: u64 = 1024;
const MAX_HOSTS: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HostKind {
    Direct,
    /// On an emulated host.
    Nested,
}

impl Display for HostKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Direct => "direct",
            Self::Nested => "nested",
        })
    }
}

/// Returns where commands run, and why.
pub(super) fn choose() -> Result<(HostKind, String)> {
    let requested = env::var_os(HOST_VARIABLE).unwrap_or_default();
    let host_kind = match requested.to_str() {
        Some("direct") => HostKind::Direct,
        Some("nested") => HostKind::Nested,
        Some("") => {
            return Ok(match emulation_reason() {
                Some(reason) => (HostKind::Nested, reason.to_owned()),
                None => (HostKind::Direct, "hardware virtualization is here".to_owned()),
            });
        }
        _ => refuse!("{HOST_VARIABLE} is '{}': nested or direct", requested.display()),
    };
    Ok((host_kind, format!("{HOST_VARIABLE}={host_kind}")))
}

/// Returns the reason why commands cannot run on this machine, if any. The existence of /dev/kvm is
/// not sufficient, because a para-virtual KVM also provides it but does not run stock guests.
fn emulation_reason() -> Option<&'static str> {
    let device = Path::new("/dev/kvm");
    let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    if !cpus.split_whitespace().any(|flag| flag == "svm" || flag == "vmx") {
        Some("no hardware virtualization here (no svm or vmx in /proc/cpuinfo)")
    } else if !device.exists() {
        Some("no /dev/kvm here (is the module kvm_amd or kvm_intel loaded?)")
    } else if fs::File::options().read(true).write(true).open(device).is_err() {
        Some("this user may not use /dev/kvm (the group kvm may)")
    } else {
        None
    }
}

/// Returns how many one-CPU hosts with `memory_mib` each can run concurrently. Returns 1 if
/// commands run on this machine itself.
pub(crate) fn hosts_at_once(memory_mib: u64) -> Result<usize> {
    let available_mib =
        parse_available(&read("/proc/meminfo".as_ref())?).context("no MemAvailable")?;
    let cpus = thread::available_parallelism()?.get();
    Ok(match choose()?.0 {
        HostKind::Direct => 1,
        HostKind::Nested => count(cpus, available_mib, memory_mib),
    })
}

pub(crate) fn load() -> Result<String> {
    let load = read("/proc/loadavg".as_ref())?;
    Ok(load.split_whitespace().take(3).collect::<Vec<_>>().join(" "))
}

/// Parses MemAvailable of /proc/meminfo, in MiB.
fn parse_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? / 1024)
}

fn count(cpus: usize, available_mib: u64, memory_mib: u64) -> usize {
    let fitting = usize::try_from(available_mib / (memory_mib + OVERHEAD_MIB)).unwrap_or(MAX_HOSTS);
    fitting.min(cpus).clamp(1, MAX_HOSTS)
}

/// Describes the commit of the programs, and the machine or the emulated host's kernel and QEMU. A
/// patched QEMU prints the version of the original.
pub(super) fn measured_on(checkout: &Checkout, host_kind: HostKind) -> Result<String> {
    let commit_line = commit(checkout)?;
    if host_kind == HostKind::Direct {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
        return Ok(format!(
            "{commit_line}; this machine: {}, Linux {}",
            cpu_model()?,
            release.trim_end()
        ));
    }
    let (original, used) = (qemu::program()?, qemu_patch::patched_qemu(checkout)?);
    let version = jobs::output(programs::user(&used).arg("--version"))?;
    let version = version.lines().next().unwrap_or_default();
    let patch_note = if used == original { "" } else { ", mended" };
    let kernel = kernels::pin(checkout, kernels::DEFAULT)?;
    let (linux, hash) = (kernel.version, sha256(&used)?);
    Ok(format!("{commit_line}; emulated, Linux {linux}, {version}{patch_note}, sha256 {hash}"))
}

fn commit(checkout: &Checkout) -> Result<String> {
    let mut git = programs::user("git");
    git.arg("-C").arg(checkout.root()).args(["describe", "--always", "--dirty", "--abbrev=12"]);
    // The repository and git may both be missing.
    let described = jobs::attempt(git.stderr(Stdio::null()));
    let commit = described.ok().filter(|(status, _)| status.success());
    let commit =
        commit.map_or_else(|| "of no commit".to_owned(), |(_, commit)| commit.trim().to_owned());
    Ok(format!("foreshore {commit}"))
}

fn cpu_model() -> Result<String> {
    let cpus = fs::read_to_string("/proc/cpuinfo")?;
    let line = cpus.lines().find(|line| line.starts_with("model name"));
    let model =
        line.and_then(|line| line.split_once(": ")).context("/proc/cpuinfo has no model name")?;
    Ok(model.1.to_owned())
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
