//! Runs a command on a KVM host, which is this machine or a machine that QEMU emulates.

mod direct;
pub(crate) mod ends;
mod heartbeat;
pub(crate) mod host_kind;
mod job;
mod nested;
pub(crate) mod qemu;
mod qemu_patch;
pub(crate) mod reruns;
mod tail;

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, anyhow};
use clap::Args;

use crate::cargo;
use crate::checkout::Checkout;
use crate::images;
use crate::messages::{refuse, with_task_name};
use crate::setup;
use host_kind::HostKind;

/// Exit code if the command exceeded its time limit.
pub(crate) const CUT_OFF: u8 = 124;
/// Exit code if the host itself failed.
pub(crate) const HOST_FAILED: u8 = 125;

#[derive(Args, Clone, Debug)]
#[command(args_override_self = true)]
pub(crate) struct Arguments {
    /// Memory of the emulated host
    #[arg(long = "mem", value_name = "MIB", default_value_t = 4096)]
    memory_mib: u32,
    /// CPUs of the emulated host
    #[arg(long, value_name = "N", default_value_t = 2)]
    cpus: u32,
    /// Forward port HOSTPORT of 127.0.0.1 on this machine to PORT of the emulated host; may be
    /// repeated
    #[arg(long = "forward", value_name = "HOSTPORT:PORT", value_parser = parse_forward)]
    forwards: Vec<(u16, u16)>,
    /// Copy a file to the folder in which the command is started; may be repeated
    #[arg(long = "put", value_name = "FILE", value_parser = parse_put)]
    puts: Vec<PathBuf>,
    /// Copy the files that the command has written to $OUT back to DIR
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// End the command after that time with exit code 124, and still copy the files in $OUT back
    #[arg(
        long = "timeout",
        value_name = "SECONDS",
        default_value_t = 1200,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    timeout_s: u32,
    /// Provide an ext4 file system with real DAX on /pm (emulated host only)
    #[arg(long = "nvdimm", value_name = "MIB", conflicts_with = "nvdimm_file")]
    nvdimm_mib: Option<u32>,
    /// Add two more empty persistent memory devices: the block device /dev/pmem1 and the devdax
    /// device /dev/dax2.0
    #[arg(long = "pmem-devices", value_name = "MIB", requires = "nvdimm_mib")]
    pmem_mib: Option<u32>,
    /// Keep a disk of 512 MiB in a file, with ext4 on /disk; a missing file is created (emulated
    /// host only)
    #[arg(long, value_name = "FILE")]
    disk: Option<PathBuf>,
    /// Keep an NVDIMM of 256 MiB in a file, with ext4 and real DAX on /pm; a missing file is
    /// created (emulated host only)
    #[arg(long, value_name = "FILE")]
    nvdimm_file: Option<PathBuf>,
    /// Kill the host this many milliseconds after the command has printed LINE
    ///
    /// The disks lose all writes that are still in their caches. The exit code is then 0. If the
    /// host ends earlier, the exit code is the usual one.
    #[arg(long, value_name = "LINE:MS", value_parser = parse_power_cut)]
    power_cut: Option<PowerCut>,
    /// Add other VMMs to PATH: QEMU, and the programs listed in FORESHORE_PEERS
    #[arg(long)]
    peers: bool,
    /// Allocate all memory of the emulated host at the start, so that the first access to a page is
    /// not slower
    #[arg(long)]
    prealloc: bool,
    /// Let the emulated host's clock count executed instructions, one for each nanosecond
    ///
    /// Other load on this machine then does not affect measured times. Requires --cpus 1.
    #[arg(long)]
    counted: bool,
    /// Use programs of the release profile, which benchmarks measure, instead of the profile of
    /// guest tests
    #[arg(long)]
    pub(crate) release: bool,
    /// Do not build programs and images
    #[arg(long)]
    no_build: bool,
    /// Print where the command would run (nested or direct), without running it
    #[arg(long)]
    which: bool,
    /// Command and its arguments
    #[arg(last = true, required_unless_present = "which", value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Time of a power cut, as a delay after a line of the command's output.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PowerCut {
    line: String,
    delay: Duration,
}

fn parse_forward(text: &str) -> Result<(u16, u16)> {
    let parsed = text
        .split_once(':')
        .and_then(|(host, guest)| Some((host.parse().ok()?, guest.parse().ok()?)));
    parsed.ok_or_else(|| anyhow!("not HOSTPORT:PORT"))
}

fn parse_put(text: &str) -> Result<PathBuf> {
    let path = PathBuf::from(text);
    if path.is_file() { Ok(path) } else { Err(anyhow!("no such file")) }
}

fn parse_power_cut(text: &str) -> Result<PowerCut> {
    let parsed = text.rsplit_once(':').filter(|(line, _)| !line.is_empty());
    let parsed = parsed.and_then(|(line, delay)| Some((line.to_owned(), delay.parse().ok()?)));
    let (line, delay) = parsed.ok_or_else(|| anyhow!("not LINE:MS"))?;
    Ok(PowerCut { line, delay: Duration::from_millis(delay) })
}

impl Arguments {
    /// Rejects combinations of arguments that clap cannot express.
    fn check(&self) -> Result<()> {
        // Instructions can be counted only if one thread emulates all CPUs. The CPUs would take
        // turns in it and wait for each other.
        if self.counted && self.cpus != 1 {
            refuse!("--counted requires --cpus 1");
        }
        // QEMU's q35 machine has memory above 4 GiB only if its size exceeds 2816 MiB.
        for (option, is_given) in
            [("--nvdimm", self.nvdimm_mib.is_some()), ("--nvdimm-file", self.nvdimm_file.is_some())]
        {
            if is_given && self.memory_mib < 3072 {
                refuse!("{option} requires --mem 3072 or more");
            }
        }
        Ok(())
    }

    fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout_s.into())
    }
}

/// Returns true if commands run on this machine itself.
pub(crate) fn is_direct() -> Result<bool> {
    Ok(host_kind::choose()?.0 == HostKind::Direct)
}

/// Returns a line that describes the machine on which measurements are made.
pub(crate) fn measured_here(checkout: &Checkout) -> Result<String> {
    host_kind::measured_on(checkout, host_kind::choose()?.0)
}

pub(crate) fn run(checkout: &Checkout, arguments: &Arguments) -> Result<u8> {
    with_task_name("host", || {
        let (host_kind, reason) = host_kind::choose()?;
        if arguments.which {
            writeln!(io::stdout(), "{host_kind}")?;
            return Ok(0);
        }
        arguments.check()?;
        setup::ensure_set_up(checkout)?;
        if !arguments.no_build {
            cargo::build_programs(checkout)?;
            images::guests::build_all(checkout)?;
        }
        match host_kind {
            HostKind::Direct => direct::run(checkout, arguments, &reason),
            HostKind::Nested => nested::run(checkout, arguments, &reason),
        }
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use clap::error::ErrorKind;

    use super::*;

    pub(crate) fn parse(line: &str) -> Result<Arguments, clap::Error> {
        crate::tests::parse(line)
    }

    #[test]
    fn options_after_the_separator_belong_to_the_command() {
        let arguments = parse("--cpus 1 -- guest-tests --exact --cpus 3").unwrap();
        assert_eq!(arguments.cpus, 1);
        assert_eq!(
            arguments.command,
            ["guest-tests", "--exact", "--cpus", "3"].map(OsString::from)
        );
        assert_eq!(parse("guest-tests").unwrap_err().kind(), ErrorKind::UnknownArgument);
    }

    #[test]
    fn last_of_two_values_counts() {
        assert_eq!(parse("--mem 3072 --mem 4096 -- a").unwrap().memory_mib, 4096);
    }

    #[test]
    fn contradictions_are_refused() {
        for line in [
            "--nvdimm 1 --nvdimm-file f -- a",
            "--pmem-devices 1 -- a",
            "--mem x -- a",
            "--timeout 0 -- a",
            "--cpus 1",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
        for line in ["--counted -- a", "--nvdimm 1 --mem 3071 -- a", "--nvdimm-file f --mem 1 -- a"]
        {
            assert!(parse(line).unwrap().check().is_err(), "{line}");
        }
    }

    #[test]
    fn line_of_a_power_cut_may_have_colons() {
        let cut = parse_power_cut("a: b:150").unwrap();
        assert_eq!(cut, PowerCut { line: "a: b".to_owned(), delay: Duration::from_millis(150) });
        assert!(parse_power_cut(":150").is_err() && parse_power_cut("a").is_err());
    }
}
