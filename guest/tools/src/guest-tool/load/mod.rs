//! Workloads of known size and result. Their result is the same however little memory the guest
//! has.
//!
//! Each workload prints `phase NAME MICROSECONDS` for each phase, and `sum HEX` at the end. All of
//! its memory is free after it has ended.

mod bfs;
mod compile;
mod leak;
mod redis;
mod sqlite;
mod touch;
mod watch;

use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use guest_tools::process::end_with_parent;

pub(crate) use leak::leak;
pub(crate) use watch::{print_counters, watch};

const MIB: u64 = 1 << 20;
/// Directory for the files of a workload. The directory is a tmpfs, so its files count as memory.
const DIR: &str = "/run/load";

/// Runs a workload with a working set of about `mib` MiB.
pub(crate) fn run(name: &str, mib: u64) -> Result<()> {
    let workload = match name {
        "touch" => touch::run,
        "bfs" => bfs::run,
        "redis" => redis::run,
        "sqlite" => sqlite::run,
        "compile" => compile::run,
        _ => bail!(
            "no such workload: {name:?}; existing workloads: touch, bfs, redis, sqlite, compile"
        ),
    };
    guest_tools::oom::prefer_as_victim()?;
    // Otherwise Linux would refuse a mapping larger than all memory before the guest could grow
    // (docs/reference/policies.md).
    std::fs::write("/proc/sys/vm/overcommit_memory", "1").context("Cannot allow overcommit")?;
    let sum = workload(mib, &mut Phases::new())?;
    println!("sum {sum:016x}");
    Ok(())
}

/// Stopwatch that prints the duration of each phase.
struct Phases(Instant);

impl Phases {
    fn new() -> Self {
        Self(Instant::now())
    }

    /// Restarts the stopwatch without printing a line.
    fn begin(&mut self) {
        self.0 = Instant::now();
    }

    /// Prints the duration of the current phase, and starts the next one.
    fn end(&mut self, name: &str) {
        println!("phase {name} {}", self.0.elapsed().as_micros());
        self.begin();
    }
}

/// Returns a command of a workload. Its process ends with the workload, even if the workload is
/// killed.
fn program(name: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(name);
    end_with_parent(&mut command);
    command
}

/// Mounted tmpfs for the files of a workload. Drop unmounts it, which deletes the files.
struct MemoryFiles;

impl MemoryFiles {
    fn mount() -> Result<Self> {
        std::fs::create_dir_all(DIR)?;
        // A killed workload has left its mount behind.
        let dir = CString::new(DIR).expect("DIR contains no NUL");
        // SAFETY: the string outlives the call.
        while unsafe { libc::umount2(dir.as_ptr(), libc::MNT_DETACH) } == 0 {}
        // By default, the size of a tmpfs is half of the memory at the time of the mount.
        let status =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=4g", "load", DIR]).status();
        ensure!(status.context("Cannot start mount")?.success(), "Cannot mount a tmpfs on {DIR}");
        Ok(Self)
    }

    fn path(&self, name: &str) -> PathBuf {
        Path::new(DIR).join(name)
    }
}

impl Drop for MemoryFiles {
    fn drop(&mut self) {
        // Files that are still open keep the tmpfs alive until they are closed.
        let _ = Command::new("umount").args(["-l", DIR]).status();
    }
}

/// Mixes a number into a sum. The result depends on the order.
fn mixed(sum: u64, number: u64) -> u64 {
    (sum ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}
