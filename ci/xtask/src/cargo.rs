//! Runs cargo and reports its progress. On a terminal, cargo shows its own progress. Otherwise,
//! cargo would print a line per crate, so this module prints a progress line at intervals instead.

use std::ffi::OsStr;
use std::io::{self, IsTerminal};
use std::process::{Command, ExitStatus};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::checkout::Checkout;
use crate::jobs;
use crate::messages::report;
use crate::programs;

/// Interval between progress lines during a long build.
const REPORT_INTERVAL: Duration = Duration::from_secs(30);

/// Builds the programs in the checkout's profile.
pub(crate) fn build_programs(checkout: &Checkout) -> Result<()> {
    let profile = checkout.profile().name();
    report!("building the programs (cargo build --profile {profile})");
    if !checkout.programs().join("foreshore").exists() {
        report!("the first build takes 3 to 8 minutes on two idle cores");
    }
    build(checkout, &["--profile", profile, "--bins"])
}

/// Program with the API clients for tests.
pub(crate) const CLIENTS: &str = "client-tests";

/// Builds the API clients for tests. They need a separate build: cargo merges the features of all
/// crates in one build, and the clients need more features of hyper than the VMM. The profile and
/// the packages are those of the unit tests, so that cargo reuses the crates of these tests.
pub(crate) fn build_clients(checkout: &Checkout) -> Result<()> {
    report!("building the API clients of the tests");
    // Without a test, cargo would leave out the features that tests request.
    build(checkout, &["--workspace", "--bin", CLIENTS, "--test", "without_machines"])
}

fn build(checkout: &Checkout, choice: &[&str]) -> Result<()> {
    let arguments = [&["build"], choice].concat();
    let status = run(command(checkout, &arguments))?;
    ensure!(status.success(), "cargo {} failed", arguments.join(" "));
    Ok(())
}

/// Returns a command that runs cargo in the checkout.
pub(crate) fn command(
    checkout: &Checkout,
    arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
) -> Command {
    let mut cargo = programs::user("cargo");
    cargo.args(arguments).current_dir(checkout.root());
    cargo
}

/// Runs a cargo command and reports its progress.
pub(crate) fn run(mut cargo: Command) -> Result<ExitStatus> {
    if io::stderr().is_terminal() {
        return jobs::status(&mut cargo);
    }
    cargo.env("CARGO_TERM_COLOR", "never").env("CARGO_TERM_QUIET", "true");
    // Even with --quiet, cargo shows a progress bar if the user has enabled it.
    cargo.env("CARGO_TERM_PROGRESS_WHEN", "never");
    let started = Instant::now();
    let (over, is_over) = mpsc::channel::<()>();
    let status = thread::scope(|scope| {
        scope.spawn(move || {
            while is_over.recv_timeout(REPORT_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                report!("cargo has been running for {} s", started.elapsed().as_secs());
            }
        });
        let status = jobs::status(&mut cargo);
        drop(over);
        status
    })?;
    if started.elapsed() >= REPORT_INTERVAL {
        report!("cargo finished after {} s", started.elapsed().as_secs());
    }
    Ok(status)
}
