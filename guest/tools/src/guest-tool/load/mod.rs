//! Workloads of a known size, whose results are known: what they print is the same however little
//! memory they had.
//!
//! Each prints `phase NAME MICROSECONDS` as it goes, and at its end `sum HEX`. Its memory is free
//! once it has ended.

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
pub(crate) use watch::{say_counters, watch};

const MIB: u64 = 1 << 20;
/// What a workload keeps in files is memory as well.
const DIR: &str = "/run/load";

/// Runs a workload with a working set of about so many MiB.
pub(crate) fn run(name: &str, mib: u64) -> Result<()> {
    let workload = match name {
        "touch" => touch::run,
        "bfs" => bfs::run,
        "redis" => redis::run,
        "sqlite" => sqlite::run,
        "compile" => compile::run,
        _ => bail!("no workload {name:?}: there are touch, bfs, redis, sqlite, compile"),
    };
    guest_tools::oom::volunteer()?;
    // Linux refuses a mapping larger than all memory before anybody could grow the guest
    // (docs/reference/policies.md).
    std::fs::write("/proc/sys/vm/overcommit_memory", "1").context("Cannot allow overcommit")?;
    let sum = workload(mib, &mut Phases::new())?;
    println!("sum {sum:016x}");
    Ok(())
}

/// Says how long each phase took.
struct Phases(Instant);

impl Phases {
    fn new() -> Self {
        Self(Instant::now())
    }

    /// What was not counted is over.
    fn begin(&mut self) {
        self.0 = Instant::now();
    }

    /// A phase is over, and another begins.
    fn end(&mut self, name: &str) {
        println!("phase {name} {}", self.0.elapsed().as_micros());
        self.begin();
    }
}

/// A program of a workload, which ends with it, also when that is killed.
fn program(name: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(name);
    end_with_parent(&mut command);
    command
}

/// A file system in memory for a workload's files. Dropping it takes it away with all that is in
/// it.
struct MemoryFiles;

impl MemoryFiles {
    fn mount() -> Result<Self> {
        std::fs::create_dir_all(DIR)?;
        // A load that was killed has left its own.
        let dir = CString::new(DIR).expect("no NUL in it");
        // SAFETY: a string that lives through the call.
        while unsafe { libc::umount2(dir.as_ptr(), libc::MNT_DETACH) } == 0 {}
        // A tmpfs is half of what the memory was when it was mounted, if nobody says otherwise.
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
        // What is still open there keeps it until it is closed.
        let _ = Command::new("umount").args(["-l", DIR]).status();
    }
}

/// Mixes a number into a sum, in which order counts.
fn mixed(sum: u64, number: u64) -> u64 {
    (sum ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}
