//! Benchmarks that compare foreshore with Debian's QEMU during one boot of the host.

mod requests;

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};

use crate::cargo;
use crate::checkout::{Checkout, create_folder, remove_folder};
use crate::host::host_kind::load;
use crate::host::{ends, reruns};
use crate::images;
use crate::jobs;
use crate::messages::{print, refuse, report, with_task_name};
use crate::programs::{self, user_path};
use crate::setup;

const FOLDER: &str = "target/bench";
const MEASUREMENTS: [&str; 13] = [
    "peers",
    "boot",
    "plug",
    "disk",
    "net",
    "api",
    "volume",
    "tree",
    "pressure",
    "agent",
    "stream",
    "confinement",
    "thin",
];
/// Benchmarks that work with a counted clock. Such a host has one CPU. Its guests have one CPU as
/// well, because two vCPUs on it would wait for each other.
const COUNTABLE: [&str; 3] = ["agent", "confinement", "thin"];
/// Variable with the path of another VMM to measure.
const OTHER_VMM: &str = "FORESHORE_BENCH_VMM";
const PEERS: &str = "FORESHORE_PEERS";
/// Shell script that runs on the host. The shell script keeps logs of guests and VMMs, because they
/// may show why a run failed.
const SCRIPT: &str =
    r#"bench "$@" && exit; code=$?; cp "$FORESHORE_TEST_DIR"/*.log "$OUT"; exit $code"#;

#[derive(Args, Clone, Debug)]
#[command(args_override_self = true)]
pub(crate) struct Arguments {
    /// Number of rounds (5)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..1_000_000))]
    rounds: Option<u32>,
    /// Run only these measurements; peers stands for boot, plug, disk, net and api, which run for
    /// every VMM
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        value_parser = PossibleValuesParser::new(MEASUREMENTS)
    )]
    only: Vec<String>,
    /// Clock of the emulated host; with counted, each instruction takes one nanosecond, and --only
    /// is required
    #[arg(long, value_name = "NAME", default_value = "real")]
    clock: Clock,
    /// Instead count the instructions of virtio-blk and virtio-mem requests, on this machine;
    /// requires valgrind
    #[arg(long, exclusive = true)]
    requests: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Clock {
    Real,
    Counted,
}

impl Arguments {
    /// Arguments for `host`, separated by spaces.
    fn of_host(&self) -> Result<String> {
        let is_counted = self.clock == Clock::Counted;
        let is_countable = |name: &String| COUNTABLE.contains(&name.as_str());
        if is_counted && (self.only.is_empty() || !self.only.iter().all(is_countable)) {
            refuse!("--clock counted requires --only {}", COUNTABLE.join(" or "));
        }
        let counted = if is_counted { " --cpus 1 --counted" } else { "" };
        Ok(format!(
            "--release --no-build --peers --prealloc --mem 6144{counted} --timeout 5400 --out"
        ))
    }

    fn command(&self) -> Vec<String> {
        let mut command = ["--", "sh", "-c", SCRIPT, "bench"].map(str::to_owned).to_vec();
        if let Some(rounds) = self.rounds {
            command.extend(["--rounds".to_owned(), rounds.to_string()]);
        }
        if !self.only.is_empty() {
            command.extend(["--only".to_owned(), self.only.join(",")]);
        }
        command
    }
}

pub(crate) fn run(checkout: &Checkout, arguments: &Arguments) -> Result<u8> {
    with_task_name("bench", || {
        if arguments.requests {
            return requests::run(checkout).map(|()| 0);
        }
        let options = arguments.of_host()?;
        let other_vmm = other_vmm()?;
        let folder = checkout.path(FOLDER);
        // Results of an earlier run should not be taken for results of this run.
        remove_folder(&folder)?;
        create_folder(&folder)?;
        setup::ensure_set_up(checkout)?;
        cargo::build_programs(checkout)?;
        cargo::build_clients(checkout)?;
        images::guests::build_all(checkout)?;
        let before = load()?;
        let end = reruns::run(checkout, &folder, print, || {
            let mut host = programs::task(checkout, "host")?;
            host.args(options.split(' ')).arg(&folder).args(arguments.command());
            host.env("FORESHORE_TEST_DIR", "/tmp/foreshore-bench").current_dir(checkout.root());
            if let Some(vmm) = &other_vmm {
                add_vmm(&mut host, vmm)?;
            }
            Ok(jobs::exit_code(jobs::status(&mut host)?))
        })?;
        end.note();
        if end.code == 0 {
            let after = load()?;
            report!(
                "load of this machine before: {before}, after: {after} (valid only if nothing else ran)"
            );
        } else {
            report!("FAILED ({}): the logs are in {FOLDER}", ends::meaning(end.code));
        }
        Ok(end.code)
    })
}

fn other_vmm() -> Result<Option<PathBuf>> {
    let Some(path) = env::var_os(OTHER_VMM).filter(|path| !path.is_empty()).map(PathBuf::from)
    else {
        return Ok(None);
    };
    if !programs::is_program(&path) {
        refuse!("{OTHER_VMM}: {} is not a program", path.display());
    }
    Ok(Some(path.canonicalize()?))
}

/// Makes another VMM available to the `bench` program on the host.
fn add_vmm(host: &mut Command, vmm: &Path) -> Result<()> {
    let (folder, name) = (
        vmm.parent().context("path without a folder")?,
        vmm.file_name().context("path without a file name")?,
    );
    let peers = env::var_os(PEERS).filter(|peers| !peers.is_empty());
    let peers = peers.iter().flat_map(env::split_paths);
    host.env(PEERS, env::join_paths([vmm.to_owned()].into_iter().chain(peers))?);
    let path = user_path();
    let path = env::split_paths(&path).chain([folder.to_owned()]);
    host.env("PATH", env::join_paths(path)?).env("FORESHORE_TEST_BENCH_VMM", name);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    #[test]
    fn clock_reaches_the_host() {
        let of_host =
            |line: &str| crate::tests::parse::<Arguments>(line).unwrap().of_host().unwrap();
        assert!(!of_host("--only boot,plug").contains("--counted"));
        assert!(of_host("--clock counted --only agent").contains(" --cpus 1 --counted "));
        assert!(of_host("--clock counted --only confinement").contains(" --cpus 1 --counted "));
    }

    #[test]
    fn other_vmm_is_a_peer_and_in_the_path() {
        let mut host = Command::new("host");
        add_vmm(&mut host, Path::new("/vmms/other")).unwrap();
        let value = |name: &str| {
            let found = host.get_envs().find(|(key, _)| *key == OsStr::new(name));
            found.and_then(|(_, value)| value).unwrap().to_str().unwrap().to_owned()
        };
        assert!(value(PEERS).starts_with("/vmms/other"));
        assert!(value("PATH").ends_with(":/vmms"));
        assert_eq!(value("FORESHORE_TEST_BENCH_VMM"), "other");
    }
}
