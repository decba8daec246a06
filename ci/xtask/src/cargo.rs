//! Runs of cargo. On a terminal cargo shows its own progress. Elsewhere that would be a line for
//! each of many crates, so a line now and then stands for them.

use std::ffi::OsStr;
use std::io::{self, IsTerminal, PipeReader, Read};
use std::process::{Command, ExitStatus};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::checkout::Checkout;
use crate::jobs;
use crate::messages::{say, write_errors};
use crate::programs;

/// Interval of the lines about a long build.
const REPORT_INTERVAL: Duration = Duration::from_secs(30);
/// Words with which cargo reports its own progress, apart from the start of a crate.
const PROGRESS: [&str; 6] = [
    "    Finished ",
    "    Building [",
    "    Updating ",
    "  Downloaded ",
    " Downloading ",
    "  Executable ",
];
const CRATE_STARTS: [&str; 2] = ["   Compiling ", "    Checking "];
/// Start of cargo's bar: `    Building [===>      ] 3/19: serde(build)   \r`.
const BAR: &str = "Building [";

/// Programs that are built together.
#[derive(Clone, Copy)]
pub enum Part {
    /// The programs, in release mode.
    Programs,
    /// The API clients of the tests.
    Clients,
}

/// Builds a part of the workspace.
pub fn build(checkout: &Checkout, part: Part) -> Result<()> {
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
pub fn command(
    checkout: &Checkout,
    arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
) -> Command {
    let mut cargo = programs::user("cargo");
    cargo.args(arguments).current_dir(checkout.root());
    cargo
}

/// Runs a command of cargo, and reports its progress.
pub fn run(mut cargo: Command) -> Result<ExitStatus> {
    if io::stderr().is_terminal() {
        return jobs::status(&mut cargo);
    }
    let (reader, writer) = io::pipe()?;
    // The bar alone has the number of steps.
    cargo.env("CARGO_TERM_COLOR", "never").env("CARGO_TERM_PROGRESS_WHEN", "always");
    cargo.env("CARGO_TERM_PROGRESS_WIDTH", "80").stdout(writer.try_clone()?).stderr(writer);
    let mut job = jobs::spawn(&mut cargo)?;
    // The command holds ends of the pipe.
    drop(cargo);
    report(reader);
    job.wait()
}

/// Passes on warnings and errors, and reports progress until the pipe is closed.
fn report(mut reader: PipeReader) {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut buffer = [0; 8192];
        while let Ok(len) = reader.read(&mut buffer) {
            if len == 0 || sender.send(buffer[..len].to_owned()).is_err() {
                break;
            }
        }
    });
    let (mut progress, started) = (Progress::default(), Instant::now());
    let mut next_report = started + REPORT_INTERVAL;
    loop {
        match receiver.recv_timeout(next_report.saturating_duration_since(Instant::now())) {
            Ok(bytes) => write_errors(&progress.feed(&bytes)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        if Instant::now() >= next_report {
            say!("{}", progress.report(started.elapsed().as_secs()));
            next_report += REPORT_INTERVAL;
        }
    }
    write_errors(&progress.take_line());
    if started + REPORT_INTERVAL < next_report {
        say!("cargo is done: {} crates in {} s", progress.crates, started.elapsed().as_secs());
    }
}

/// Progress of a run, read from cargo's output.
#[derive(Debug, Default)]
struct Progress {
    /// Output since the last end of a line.
    line: Vec<u8>,
    crates: usize,
    last_crate: Option<String>,
    /// Steps that are done and steps in total.
    steps: Option<(u64, u64)>,
}

impl Progress {
    /// Takes output of cargo, and returns the lines that are not about its progress.
    fn feed(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut passed = Vec::new();
        for byte in bytes {
            self.line.push(*byte);
            match byte {
                b'\n' => passed.extend(self.take_line()),
                // The next bar, or a line, overwrites a bar.
                b'\r' => self.take_bar(),
                _ => {}
            }
        }
        passed
    }

    fn take_bar(&mut self) {
        let bar = std::mem::take(&mut self.line);
        self.steps = parse_bar(&String::from_utf8_lossy(&bar)).or(self.steps);
    }

    /// The line, unless it is about the progress.
    fn take_line(&mut self) -> Vec<u8> {
        let line = std::mem::take(&mut self.line);
        let text = String::from_utf8_lossy(&line);
        let started = CRATE_STARTS.iter().find_map(|start| text.strip_prefix(start));
        if let Some(started) = started {
            self.crates += 1;
            self.last_crate = started.split_whitespace().next().map(str::to_owned);
            return Vec::new();
        }
        let is_progress = PROGRESS.iter().any(|start| text.starts_with(start));
        if is_progress || text.trim_end().is_empty() { Vec::new() } else { line }
    }

    fn report(&self, seconds: u64) -> String {
        let steps = self
            .steps
            .map(|(done, all)| format!("{done} of {all} steps done, "))
            .unwrap_or_default();
        let last = self.last_crate.as_ref().map(|name| format!(", the last of them {name}"));
        let (crates, last) = (self.crates, last.unwrap_or_default());
        format!("cargo is at work: {steps}{crates} crates begun in {seconds} s{last}")
    }
}

fn parse_bar(bar: &str) -> Option<(u64, u64)> {
    let (_, rest) = bar.split_once(BAR)?;
    let (_, counts) = rest.split_once("] ")?;
    let (done, rest) = counts.split_once('/')?;
    let (all, _) = rest.split_once(':')?;
    Some((done.parse().ok()?, all.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_pass_and_progress_is_counted() {
        let mut progress = Progress::default();
        let output = "    Updating index\n   Compiling serde v1.0.1\n    Building [==>     ] 3/19: serde(bui";
        assert_eq!(progress.feed(output.as_bytes()), b"");
        let rest = "ld)   \r   Compiling foreshore v0.1.0 (/f)\nwarning: unused\n\n    Finished `release`\nend";
        assert_eq!(progress.feed(rest.as_bytes()), b"warning: unused\n");
        let expected = "cargo is at work: 3 of 19 steps done, 2 crates begun in 31 s, the last of them foreshore";
        assert_eq!(progress.report(31), expected);
        assert_eq!(progress.take_line(), b"end");
    }

    #[test]
    fn first_report_needs_no_crate() {
        assert_eq!(Progress::default().report(30), "cargo is at work: 0 crates begun in 30 s");
    }
}
