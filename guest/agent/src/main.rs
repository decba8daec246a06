//! Guest agent that reports memory pressure to the VMM over vsock (docs/reference/agent.md).

#![deny(unsafe_code)]

mod agent;
#[cfg(test)]
#[expect(unsafe_code, reason = "the trait of allocators is unsafe")]
#[path = "../../proto/tests/allocations/mod.rs"]
mod allocations;
mod args;
mod blocks;
mod guest;
mod idle;
mod kernel;
mod kernel_blocks;
mod parse;
mod proc;
mod record;
mod reserve;
mod session;
mod sys;
#[cfg(test)]
mod tree;
mod trigger;
mod trim;
mod tune;

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use foreshore_proto::{Cause, encode_report};
use foreshore_types::size::Size;
use rustix::fs::Mode;

use crate::agent::Agent;
use crate::args::{Address, Command, Online, Options};
use crate::blocks::{BlockReader, BlockWatch};
use crate::idle::{IdleWatch, Roots};
use crate::kernel_blocks::KernelBlocks;
use crate::reserve::Reserve;
use crate::trigger::Triggers;
use crate::tune::Tuning;

const ROOT: &str = "/";
const PROC: &str = "/proc";
const MEMORY: &str = "/sys/devices/system/memory";
const IOMEM: &str = "/proc/iomem";
const SYS: &str = "/sys";
const SYSCTL_VM: &str = "/proc/sys/vm";
const CMDLINE: &str = "/proc/cmdline";
/// Folder for records that the next agent reads. The folder exists until the guest reboots.
const RUN: &str = "/run/foreshore-agent";

/// Exit code for an invalid command line.
const WRONG_COMMAND_LINE: u8 = 2;

fn main() -> ExitCode {
    // Other users must not have access to files that the agent creates.
    rustix::process::umask(Mode::RWXG | Mode::RWXO);
    let command = match args::parse(std::env::args_os().skip(1)) {
        Ok(command) => command,
        Err(error) => {
            eprintln!("foreshore-agent: {error}");
            return ExitCode::from(WRONG_COMMAND_LINE);
        }
    };
    match execute(command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("foreshore-agent: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn execute(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Help => print(args::HELP.as_bytes()),
        Command::Version => {
            let (version, build) = (env!("CARGO_PKG_VERSION"), env!("FORESHORE_BUILD"));
            print(format!("foreshore-agent {version}\n{build}\n").as_bytes())
        }
        Command::Once => once(),
        Command::Trim { folder, address } => trim(&folder, &address),
        Command::Run(options) => run(&options),
    }
}

fn print(bytes: &[u8]) -> anyhow::Result<()> {
    io::stdout().lock().write_all(bytes).context("cannot write to standard output")
}

fn trim(folder: &Path, address: &Address) -> anyhow::Result<()> {
    let trim::Trimmed { disk, free_bytes, released_bytes } =
        trim::run(folder, address, Path::new(SYS))?;
    let (free, released) = (Size(free_bytes).rounded(), Size(released_bytes).rounded());
    print(format!("{disk}: {free} free, {released} ({released_bytes} bytes) released\n").as_bytes())
}

fn once() -> anyhow::Result<()> {
    let mut line = Vec::new();
    encode_report(
        Agent::open(Path::new(PROC), Path::new(MEMORY))?.make_report(Cause::Rest)?,
        &mut line,
    );
    print(&line)
}

fn run(options: &Options) -> anyhow::Result<()> {
    let options = &guest::permitted(options, Path::new(SYS));
    let mut agent = Agent::open(Path::new(PROC), Path::new(MEMORY))?;
    // Failures of the following steps are not fatal. The agent then still reports, but less
    // reliably.
    agent.termination = logged("watch for its end", sys::watch_termination());
    logged("protect itself from the OOM killer", fs::write("/proc/self/oom_score_adj", "-1000"));
    logged("raise its priority", sys::raise_priority());
    let reader = BlockReader::new(Path::new(MEMORY), options.online);
    agent.blocks = logged("watch memory blocks", BlockWatch::start(reader, sys::monotonic_ms));
    if options.reserve {
        let cmdline = fs::read_to_string(CMDLINE).unwrap_or_default();
        let reserve = Reserve::open(Path::new(SYSCTL_VM), Path::new(RUN), &cmdline);
        agent.reserve = logged("keep memory for the kernel", reserve);
    } else {
        let left = Reserve::restore_leftover(Path::new(SYSCTL_VM), Path::new(RUN));
        logged("give the guest its vm.lowmem_reserve_ratio back", left);
    }
    if options.kernel_blocks && options.online == Online::Movable {
        let kernel_blocks = KernelBlocks::start(Path::new(MEMORY), Path::new(IOMEM));
        agent.kernel_blocks = logged("watch the kernel's memory", kernel_blocks);
    }
    let mut tuning = Tuning::open(Path::new(ROOT), Path::new(RUN));
    if options.tune {
        agent.tuning = Some(tuning);
    } else {
        logged("give the guest its kernel's settings back", tuning.restore());
    }
    if options.idle {
        let idle = IdleWatch::start(&Roots::under(Path::new(SYS)), sys::monotonic_ms);
        agent.idle = logged("look for idle memory", idle);
    }
    let triggers = Triggers::register(Path::new(PROC), sys::monotonic_ms());
    agent.triggers = logged("register a pressure trigger", triggers);
    logged("lock its memory", sys::lock_memory());
    agent.run(&options.address);
    Ok(())
}

/// Returns the value of a successful result. Otherwise prints the failure to standard error.
fn logged<T>(what: &str, result: io::Result<T>) -> Option<T> {
    result.inspect_err(|error| eprintln!("foreshore-agent: Cannot {what}: {error}")).ok()
}
