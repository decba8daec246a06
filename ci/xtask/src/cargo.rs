//! Runs of cargo. On a terminal cargo shows its own progress. Elsewhere that would be a line for
//! each of many crates, so a line now and then stands for them.

use std::ffi::OsStr;
use std::io::{self, IsTerminal};
use std::process::{Command, ExitStatus};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::checkout::Checkout;
use crate::jobs;
use crate::messages::{Lines, say, write_errors};
use crate::programs;

/// Interval of the lines about a long build.
const REPORT_INTERVAL: Duration = Duration::from_secs(30);
/// Words with which cargo reports its own progress, apart from the start of a crate.
const PROGRESS: [&str; 5] =
    ["    Finished ", "    Updating ", "  Downloaded ", " Downloading ", "  Executable "];
const CRATE_STARTS: [&str; 2] = ["   Compiling ", "    Checking "];

#[derive(Clone, Copy)]
pub(crate) enum Part {
    /// The programs, in release mode.
    Programs,
    /// The API clients of the tests.
    Clients,
}

pub(crate) fn build(checkout: &Checkout, part: Part) -> Result<()> {
    let (arguments, failure): (&[&str], _) = match part {
        Part::Programs => {
            say!("building the programs (cargo build --release)");
            if !checkout.programs().join("foreshore").exists() {
                say!("the first build takes 4 to 7 minutes on two idle cores, later ones seconds");
            }
            (&["build", "--release", "--bins"], "the build failed")
        }
        // Apart: cargo unites the features of all crates that it builds at once, and the clients
        // need more of hyper than the VMM does.
        Part::Clients => {
            say!("building the API clients of the tests");
            (&["build", "--release", "-p", "client-tests"], "the build of the clients failed")
        }
    };
    if !run(command(checkout, arguments))?.success() {
        bail!("{failure}");
    }
    Ok(())
}

/// A command that runs cargo in the checkout.
pub(crate) fn command(
    checkout: &Checkout,
    arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
) -> Command {
    let mut cargo = programs::user("cargo");
    cargo.args(arguments).current_dir(checkout.root());
    cargo
}

/// Runs a command of cargo, and reports its progress.
pub(crate) fn run(mut cargo: Command) -> Result<ExitStatus> {
    if io::stderr().is_terminal() {
        return jobs::status(&mut cargo);
    }
    // A progress bar that the user has turned on would become part of a line.
    cargo.env("CARGO_TERM_COLOR", "never").env("CARGO_TERM_PROGRESS_WHEN", "never");
    let (progress, started) = (Mutex::new(Progress::default()), Instant::now());
    let lock = || progress.lock().unwrap_or_else(PoisonError::into_inner);
    let (over, is_over) = mpsc::channel::<()>();
    let status = thread::scope(|scope| {
        scope.spawn(move || {
            while is_over.recv_timeout(REPORT_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                say!("{}", lock().report(started.elapsed().as_secs()));
            }
        });
        let status = jobs::stream(&mut cargo, |bytes| {
            write_errors(&lock().feed(bytes));
            Ok(())
        });
        drop(over);
        status
    })?;
    let mut progress = lock();
    let last = progress.lines.finish();
    write_errors(&progress.filter(last));
    if started.elapsed() >= REPORT_INTERVAL {
        say!("cargo is done: {} crates in {} s", progress.crates, started.elapsed().as_secs());
    }
    Ok(status)
}

/// Progress of a run, read from cargo's output.
#[derive(Default)]
struct Progress {
    lines: Lines,
    crates: usize,
    last_crate: Option<String>,
}

impl Progress {
    /// Takes output of cargo, and returns the lines that are not about its progress.
    fn feed(&mut self, bytes: &[u8]) -> Vec<u8> {
        let lines = self.lines.feed(bytes);
        self.filter(lines)
    }

    fn filter(&mut self, mut lines: Vec<Vec<u8>>) -> Vec<u8> {
        lines.retain(|line| {
            let text = String::from_utf8_lossy(line);
            let started = CRATE_STARTS.iter().find_map(|start| text.strip_prefix(start));
            if let Some(started) = started {
                self.crates += 1;
                self.last_crate = started.split_whitespace().next().map(str::to_owned);
            }
            let is_progress = PROGRESS.iter().any(|start| text.starts_with(start));
            started.is_none() && !is_progress && !text.trim_end().is_empty()
        });
        lines.concat()
    }

    fn report(&self, seconds: u64) -> String {
        let last = self.last_crate.as_ref().map(|name| format!(", the last of them {name}"));
        let (crates, last) = (self.crates, last.unwrap_or_default());
        format!("cargo is at work: {crates} crates begun in {seconds} s{last}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_pass_and_progress_is_counted() {
        let mut progress = Progress::default();
        assert_eq!(progress.report(30), "cargo is at work: 0 crates begun in 30 s");
        assert_eq!(progress.feed(b"    Updating index\n   Compiling serde v1.0.1\n   Comp"), b"");
        let rest = "iling foreshore v0.1.0 (/f)\nwarning: unused\n\n    Finished `release`\n";
        assert_eq!(progress.feed(rest.as_bytes()), b"warning: unused\n");
        let expected = "cargo is at work: 2 crates begun in 31 s, the last of them foreshore";
        assert_eq!(progress.report(31), expected);
    }
}
