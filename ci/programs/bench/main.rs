//! Compares Foreshore with other VMMs. The VMMs take turns during one boot of the host. `ci/bench`
//! runs this program.
//!
//! The program prints results. They do not affect the exit code, because measured times are not
//! tests.

mod agent;
mod api;
mod boot;
mod confinement;
mod disk;
mod idle;
mod net;
mod plug;
mod pressure;
mod report;
mod samples;
mod stream;
mod thin;
mod tree;
mod usage;
mod vmm;
mod volume;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use samples::Samples;
use vmm::Vmm;

const USAGE: &str = "\
usage: bench [--rounds N] [--only MEASUREMENT,...] [--out DIR]; ci/bench --help lists the measurements
  FORESHORE_TEST_BENCH_VMM=NAME   also measure a VMM with Cloud Hypervisor's flags and API";

/// Maximum number of attempts to measure a group under one VMM.
const TRIES: usize = 3;

/// Groups that every VMM supports. `peers` selects all of them.
const PEERS: [&str; 5] = ["boot", "plug", "disk", "net", "api"];
const FORESHORE_ALONE: [&str; 7] =
    ["volume", "tree", "pressure", "agent", "stream", "confinement", "thin"];

struct Options {
    rounds: usize,
    groups: Vec<&'static str>,
    out: PathBuf,
}

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self> {
        let out = std::env::var_os("OUT").map_or_else(|| PathBuf::from("."), PathBuf::from);
        let mut options = Self { rounds: 5, groups: all_groups().collect(), out };
        while let Some(flag) = arguments.next() {
            let value =
                arguments.next().with_context(|| format!("{flag} needs a value\n{USAGE}"))?;
            match flag.as_str() {
                "--rounds" => {
                    options.rounds = value.parse().ok().filter(|n| *n > 0).context(USAGE)?
                }
                "--only" => options.groups = groups(&value)?,
                "--out" => options.out = value.into(),
                _ => bail!("unknown flag {flag}\n{USAGE}"),
            }
        }
        Ok(options)
    }
}

/// Returns the names of all groups. Measurements in the same group share a guest.
fn all_groups() -> impl Iterator<Item = &'static str> {
    PEERS.into_iter().chain(FORESHORE_ALONE)
}

fn groups(names: &str) -> Result<Vec<&'static str>> {
    let mut groups = Vec::new();
    for name in names.split(',') {
        match all_groups().find(|known| *known == name) {
            Some(group) => groups.push(group),
            None if name == "peers" => groups.extend(PEERS),
            None => bail!("no such measurement: {name:?}\n{USAGE}"),
        }
    }
    Ok(groups)
}

fn main() -> ExitCode {
    match Options::parse(std::env::args().skip(1)).and_then(|options| measure(&options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn measure(options: &Options) -> Result<()> {
    let vmms = Vmm::all();
    let mut samples = Samples::default();
    // The first read of a file goes to a disk. This warm-up keeps that out of the first round.
    for vmm in &vmms {
        boot::measure(vmm, &mut Samples::default())
            .with_context(|| format!("{} does not boot", vmm.name()))?;
    }
    for round in 0..options.rounds {
        eprintln!("bench: round {} of {}", round + 1, options.rounds);
        for group in &options.groups {
            run(group, &in_turn(&vmms, round), &mut samples)?;
        }
        // Results are written after each round, so that an interrupted run also has some.
        report::write(&samples, round + 1, &options.out)?;
    }
    print!("{}", report::markdown(&samples, options.rounds));
    Ok(())
}

/// Returns the order of VMMs in a round. Each round begins with a different VMM.
fn in_turn(vmms: &[Vmm], round: usize) -> Vec<&Vmm> {
    vmms.iter().cycle().skip(round % vmms.len()).take(vmms.len()).collect()
}

fn run(group: &str, vmms: &[&Vmm], samples: &mut Samples) -> Result<()> {
    let mut each = |measure| {
        vmms.iter().for_each(|vmm| of_one(vmm, samples, measure));
        Ok(())
    };
    match group {
        "boot" => each(boot::measure),
        "plug" => each(plug::measure),
        "disk" => each(disk::measure),
        "net" => each(net::measure),
        "api" => each(api::measure),
        "volume" => volume::measure(vmms, samples),
        "tree" => tree::measure(vmms, samples),
        "pressure" => pressure::measure(samples),
        "agent" => agent::measure(samples),
        "confinement" => confinement::measure(samples),
        "thin" => thin::measure(samples),
        _ => stream::measure(samples),
    }
}

/// Measures a group under one VMM, and adds either all of its results or none. An emulated host
/// sometimes breaks a guest of any VMM. Results of the other VMMs should not be lost then.
fn of_one(vmm: &Vmm, samples: &mut Samples, measure: fn(&Vmm, &mut Samples) -> Result<()>) {
    for _ in 0..TRIES {
        let mut with_these = samples.clone();
        match measure(vmm, &mut with_these) {
            Ok(()) => {
                *samples = with_these;
                return;
            }
            Err(error) => eprintln!("bench:   the measurement of {} failed: {error:#}", vmm.name()),
        }
    }
    eprintln!("bench:   {} is left out: its measurement failed {TRIES} times", vmm.name());
}

/// Removes a file of an earlier run, because the VMM has to create it.
fn forget(file: &Path) -> Result<()> {
    match std::fs::remove_file(file) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("Cannot remove {}", file.display()))
        }
        _ => Ok(()),
    }
}
