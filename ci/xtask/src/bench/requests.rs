//! Counts the instructions of virtio-blk and virtio-mem requests with callgrind. Other load on the
//! machine hardly changes the result.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::cargo;
use crate::checkout::Checkout;
use crate::jobs::{self, Scratch};
use crate::messages::{refuse, report, write_output};
use crate::programs;

/// Devices, operations, and the tests of `foreshore-devices` that send such requests one at a time.
/// A test is given by its device's module and its name.
const LOADS: [(&str, &str, &str); 8] = [
    ("BTT volume, write of 4 KiB", "block", "volume_returns_each_page_that_was_written"),
    ("BTT volume, read of 4 KiB", "block", "volume_returns_the_same_page_to_each_read"),
    ("thin BTT volume, write of 4 KiB", "block", "thin_volume_returns_each_page_that_was_written"),
    ("thin BTT volume, read of 4 KiB", "block", "thin_volume_returns_the_same_page_to_each_read"),
    (
        "image without io_uring, write of 4 KiB",
        "block",
        "image_without_io_uring_returns_each_page_that_was_written",
    ),
    (
        "image without io_uring, read of 4 KiB",
        "block",
        "image_without_io_uring_returns_the_same_page_to_each_read",
    ),
    ("virtio-mem, plug of 2 MiB of DRAM", "mem", "each_block_is_plugged_by_a_request_of_its_own"),
    (
        "virtio-mem, unplug of 2 MiB of DRAM",
        "mem",
        "each_block_is_unplugged_by_a_request_of_its_own",
    ),
];
/// Variable that sets how many requests a test sends.
const REQUESTS: &str = "FORESHORE_COST_REQUESTS";
/// Numbers of requests in the two runs. Subtracting one run from the other removes the cost of
/// starting and stopping the device.
const COUNTS: [u64; 2] = [1000, 3000];
/// Variable with the command that cargo uses to run tests. Cargo splits it at each space.
const RUNNER: &str = "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER";
/// Key in cargo's configuration for the same command as a list.
const RUNNER_KEY: &str = "target.x86_64-unknown-linux-gnu.runner";
/// Command that counts instructions only while device workers serve requests. The command does not
/// name the event handler of virtio-mem, which is inlined into its caller.
const VALGRIND: [&str; 4] = [
    "valgrind",
    "--tool=callgrind",
    "--toggle-collect=*virtio*block*event*Worker*process*",
    "--toggle-collect=*virtio*mem*event*Worker*serve_unless_early*",
];

/// Prints a table with the instructions per request.
pub(super) fn run(checkout: &Checkout) -> Result<()> {
    if programs::find("valgrind", programs::user_path()).is_none() {
        refuse!("--requests requires valgrind (apt install valgrind)");
    }
    report!("building the tests (cargo test --release)");
    jobs::run(&mut command(checkout, &["--no-run"]))?;
    // Callgrind replaces its profile file, so that file cannot be /dev/null.
    let scratch = Scratch::new(None, "requests")?;
    let runner = runner(scratch.path());
    write_output(b"| Request | Instructions |\n|---|---|\n");
    for (name, device, test) in LOADS {
        let test = format!("virtio::{device}::tests::cost::{test}");
        let count = |requests| count(checkout, &runner, &test, requests);
        let [few, many] = [count(COUNTS[0])?, count(COUNTS[1])?];
        write_output(format!("| {name} | {} |\n", difference(few, many)?).as_bytes());
    }
    Ok(())
}

/// Cargo setting that runs a test under callgrind, which writes its profile to `folder`.
fn runner(folder: &Path) -> String {
    let profile = format!("--callgrind-out-file={}/profile", folder.display());
    // Rust's debug format of a list of strings is valid TOML.
    format!("{RUNNER_KEY}={:?}", [&VALGRIND[..], &[&profile]].concat())
}

fn command(checkout: &Checkout, arguments: &[&str]) -> Command {
    let first = ["test", "--quiet", "--release", "-p", "foreshore-devices", "--lib"];
    cargo::command(checkout, first.iter().chain(arguments))
}

/// Runs a test with `requests` requests, and returns the number of instructions in the worker.
fn count(checkout: &Checkout, runner: &str, test: &str, requests: u64) -> Result<u64> {
    let mut cargo = command(checkout, &["--config", runner, "--", "--exact", test]);
    cargo.env_remove(RUNNER).env(REQUESTS, requests.to_string());
    let mut output = Vec::new();
    let status = jobs::stream(&mut cargo, |bytes| {
        output.extend_from_slice(bytes);
        Ok(())
    })?;
    let output = String::from_utf8_lossy(&output);
    if !status.success() || !output.contains("1 passed") {
        bail!("{test} failed: {status}\n{output}");
    }
    collected(&output).with_context(|| format!("{test}: no count in\n{output}"))
}

/// Returns the number in `==1234== Collected : 56789`.
fn collected(output: &str) -> Option<u64> {
    let line = output.lines().find_map(|line| line.split_once("Collected :"))?;
    line.1.trim().parse().ok()
}

/// Returns the instructions per request.
fn difference(few: u64, many: u64) -> Result<u64> {
    let more = many.checked_sub(few).filter(|more| *more > 0);
    let more = more.context("more requests took no more instructions")?;
    Ok(more / (COUNTS[1] - COUNTS[0]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cost_of_a_request_excludes_start_and_end() {
        assert_eq!(difference(10_009_000, 30_009_000).unwrap(), 10_000);
        assert!(difference(5, 5).is_err() && difference(6, 5).is_err());
    }
}
