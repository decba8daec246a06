//! Compares the VMM's filters of system calls with the calls that tests make.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::cargo;
use crate::checkout::{Checkout, create_folder};
use crate::jobs;
use crate::messages::{refuse, report};
use crate::programs;

/// Test programs that start the VMM with filters. `escaped` is not among them, because its tests
/// trace the VMM, and a process has only one tracer at a time.
const TESTS: [&str; 7] = [
    "--test=walk",
    "--test=confinement",
    "--test=file_flags",
    "--test=file_modes",
    "--test=hypervisor",
    "--test=remote",
    "--test=standard_streams",
];
/// Tracer and the format of its lines. The arguments of calls are numbers.
const STRACE: [&str; 8] = ["strace", "-f", "-n", "-Y", "-e", "raw=all", "-e", "signal=none"];
/// Variable with the traces for the comparison, separated by colons.
const TRACES: &str = "FORESHORE_CALL_TRACES";
/// Test of `foreshore-confinement` that prints the comparison.
const COMPARISON: &str = "seccomp::unreached::traces_are_compared_with_the_tables";

#[derive(Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// More traces, for example of guests
    ///
    /// They must be recorded with `strace -f -n -Y -e raw=all -e signal=none`.
    traces: Vec<PathBuf>,
}

/// Prints the calls that filters allow and no test makes, and calls that a filter does not allow.
pub(super) fn run(checkout: &Checkout, arguments: &Arguments) -> Result<()> {
    if programs::find("strace", programs::user_path()).is_none() {
        refuse!("calls requires strace (apt install strace)");
    }
    let folder = checkout.ci("calls");
    create_folder(&folder)?;
    let trace = folder.join("trace");
    report!("recording the calls of {} test programs", TESTS.len());
    let tests = [&["test", "--quiet", "-p", "foreshore"], &TESTS[..]].concat();
    let build = cargo::command(checkout, tests.iter().chain(&["--no-run"]));
    ensure!(cargo::run(build)?.success(), "the tests could not be built");
    let cargo = cargo::command(checkout, &tests);
    let mut strace = programs::user(STRACE[0]);
    strace.args(&STRACE[1..]).arg("-o").arg(&trace).arg(cargo.get_program()).args(cargo.get_args());
    ensure!(jobs::status(strace.current_dir(checkout.root()))?.success(), "a test failed");
    let traces = [&[trace], &arguments.traces[..]].concat();
    let traces = std::env::join_paths(traces).context("a path contains a colon")?;
    let compare = ["test", "--quiet", "-p", "foreshore-confinement", "--lib", COMPARISON];
    let mut cargo =
        cargo::command(checkout, compare.iter().chain(&["--", "--exact", "--nocapture"]));
    let status = jobs::status(cargo.env(TRACES, traces))?;
    ensure!(status.success(), "a filter lacks a call");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cargo succeeds if no test has the name.
    #[test]
    fn comparison_exists() {
        let checkout = Checkout::new().unwrap();
        let (module, name) = COMPARISON.rsplit_once("::").unwrap();
        let path = format!("vmm/confinement/src/{}.rs", module.replace("::", "/"));
        let source = std::fs::read_to_string(checkout.root().join(path)).unwrap();
        assert!(source.contains(&format!("\n#[test]\nfn {name}()")));
    }
}
