//! Tasks of this repository. `cargo xtask --help` lists them.

mod apt;
mod bench;
mod book;
mod calls;
mod cargo;
mod checkout;
mod demo;
mod facts_kept;
mod host;
mod images;
mod jobs;
mod kernels;
mod messages;
mod names_resolve;
mod programs;
mod random;
mod repository;
mod root;
mod same_tokens;
mod setup;
mod soak;
mod test;
mod tidy;
mod tools;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use rustix::fs::Mode;
use rustix::process::umask;

use crate::checkout::{Checkout, Profile};
use crate::messages::{Refused, report};
use crate::repository::Repository;

/// Exit code for an invalid command line. clap uses the same code.
const BAD_COMMAND_LINE: u8 = 2;

/// Checks and tasks of the Foreshore repository
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Prepare a Debian 12 machine with Rust and git for ci/test, ci/demo and ci/bench
    ///
    /// Installs tools with apt, and fetches the kernels pinned by ci/kernels.lock to target/ci. A
    /// second run changes nothing.
    Setup(setup::Arguments),
    /// Build the guests' initramfs images from Debian packages and our programs
    ///
    ///   basic-KERNEL               busybox, the drivers, e2fsprogs, the agent, guest-shell,
    ///   guest-tool
    ///   ndctl-KERNEL               basic with Debian's ndctl
    ///   redis-6.12                 basic with Debian's Redis
    ///   workloads-KERNEL           basic with Debian's Redis, SQLite's shell and tcc
    ///   file-systems-6.12-generic  basic with XFS, F2FS and Btrfs, their tools, and sfdisk
    ///
    /// The images are NAME.img under target/ci/guests. Packages are fetched once. An image is built
    /// again when a program, guest/image or the code that builds images has changed.
    #[command(verbatim_doc_comment)]
    Image(images::guests::Arguments),
    /// Run a command on a KVM host that has our programs and guest images
    ///
    /// The command runs on this machine if it has hardware virtualization. Otherwise QEMU emulates
    /// a machine with AMD SVM in software, a Debian kernel boots in it, and the command runs there.
    /// Its output is streamed, its exit code is passed on, and its input is empty.
    /// FORESHORE_HOST=nested|direct overrides the choice.
    ///
    /// The command finds our programs in PATH. These variables are set: $GUESTS, the folder with
    /// vmlinuz-KERNEL and the images; $OUT; $FORESHORE_HOST, nested or direct;
    /// $FORESHORE_MEASURED_ON, a description of the machine for measurements.
    ///
    /// Exit code 124: the command exceeded its time limit; 125: the host itself failed; 2: the
    /// command line is invalid.
    Host(Box<host::Arguments>),
    /// Run all tests: formatting, lints, fuzz targets, names of documents, the book, unit tests,
    /// build of the programs, guest tests on KVM hosts, power cuts
    ///
    /// Without options, long and extended guest tests are left out. The last line is "N passed, N
    /// failed", with ", N skipped" if tests were skipped. The exit code is 0 only if nothing
    /// failed. Guest tests that fail leave their logs under target/ci/guest-tests.
    ///
    /// A fault of the emulation may kill the kernel of an emulated host (docs/design/testing.md).
    /// Tests without a verdict then run in a new boot. Failed tests are not run again.
    Test(test::Arguments),
    /// Show the purpose of Foreshore in six phases with a line for each claim, and in a picture
    ///
    /// Starts from an unprepared Debian 12 with Rust and git. The exit code is 0 only if all claims
    /// were observed to hold.
    ///
    /// Leaves target/demo: timeline.svg, timeline.png and timeline.csv with the data of Prometheus,
    /// the guests' consoles, the VMMs' logs, the list of acknowledged files, and all output
    /// (demo.log). If the emulation breaks a kernel (docs/design/testing.md), the demo runs again,
    /// at most twice, and reports that.
    Demo(demo::Arguments),
    /// Measure foreshore and Debian's QEMU alternately in one boot of the host, with the same
    /// kernel and guest
    ///
    /// FORESHORE_BENCH_VMM=PATH adds a VMM with Cloud Hypervisor's flags and API (a static
    /// program). Prints a table, and leaves it with all samples in target/bench. Measured values do
    /// not affect the exit code. If the emulation breaks a kernel (docs/design/testing.md),
    /// everything runs again, at most twice, and the output reports that.
    Bench(bench::Arguments),
    /// Run tests that take hours: kills, power cuts, and workloads in too little DRAM
    ///
    /// docs/design/testing.md (Torn sectors in a guest) and docs/design/benchmarks.md (Guests that
    /// are too small) describe the conditions. Each part prints its seed. The table of results is
    /// printed at the end, and written to target/soak/table row by row. The exit code is 0 only if
    /// all conditions held. Logs and pools of failures are under target/soak. Pressure leaves
    /// tables, time series and plots in target/soak/pressure. Target times that psi misses are
    /// reported, but do not affect the exit code.
    Soak(soak::Arguments),
    /// Print the system calls that filters allow and no test makes, and those that a filter lacks
    ///
    /// Runs tests of the VMM under strace, as root on a machine with /dev/kvm. Their guest only
    /// halts, so devices make fewer calls than with a kernel: add traces of other guests as
    /// arguments. The exit code is 1 if a filter lacks a call.
    Calls(calls::Arguments),
    /// Build the disk and the initramfs of the emulated host, which `host` does as well
    #[command(hide = true)]
    HostDisk,
    /// Compare the tokens of all Rust files with a commit, ignoring comments
    ///
    /// Prints each difference and exits with 1 if there is one. A commit that changes only words
    /// differs in string literals alone. Help texts from doc comments are not compared.
    SameTokens {
        /// Commit to compare with
        base: String,
    },
    /// Compare comments and documents with a commit, and print facts that are missing
    ///
    /// Facts are back-ticked words, numbers, and names of C files and functions. The message of a
    /// commit that drops facts on purpose lists them: "Dropped facts: mm/vmscan.c; 5.10". Exits
    /// with 1 if another fact is missing.
    FactsKept {
        /// Commit to compare with
        base: String,
    },
    /// Check that documents, anchors and included files that other files name exist
    NamesResolve,
    /// Check the length of files, the width of comments, and the direction of the VMM's layers
    Tidy,
    /// Build the book of the pages in docs/ in target/book
    ///
    /// mdBook is built in target/ci/tools if it is missing.
    Book,
    /// Print the drawing of the VMM's layers in docs/design/architecture.md
    DrawLayers,
}

fn main() -> ExitCode {
    // Image files and outputs have the same modes whichever user creates them.
    umask(Mode::from(0o022));
    let result = jobs::end_on_signals().and_then(|()| {
        checkout::enter_caller_folder()?;
        messages::with_task_name("xtask", || run(Arguments::parse().task))
    });
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            report!("{error:#}");
            ExitCode::from(if error.is::<Refused>() { BAD_COMMAND_LINE } else { 1 })
        }
    }
}

impl Task {
    fn profile(&self) -> Profile {
        match self {
            Self::Bench(_) => Profile::Release,
            Self::Host(arguments) if arguments.release => Profile::Release,
            _ => Profile::GuestTests,
        }
    }
}

fn run(task: Task) -> Result<u8> {
    let checkout = &Checkout::new()?.with_profile(task.profile());
    match task {
        Task::Setup(arguments) => setup::set_up(checkout, &arguments)?,
        Task::Image(arguments) => images::guests::build(checkout, &arguments)?,
        Task::Host(arguments) => return host::run(checkout, &arguments),
        Task::HostDisk => images::host::build(checkout)?,
        Task::SameTokens { base } => {
            return print(same_tokens::differences(&Repository::at(checkout.root()), &base)?);
        }
        Task::FactsKept { base } => {
            return print(facts_kept::lost(&Repository::at(checkout.root()), &base)?);
        }
        Task::NamesResolve => {
            return print(names_resolve::unresolved(&Repository::at(checkout.root()))?);
        }
        Task::Tidy => return print(tidy::violations(&Repository::at(checkout.root()))?),
        Task::Book => return Ok(u8::from(!book::build(checkout)?)),
        Task::DrawLayers => print!("{}", tidy::drawing(&Repository::at(checkout.root()))?),
        Task::Calls(arguments) => calls::run(checkout, &arguments)?,
        Task::Demo(arguments) => return demo::run(checkout, &arguments),
        Task::Bench(arguments) => return bench::run(checkout, &arguments),
        Task::Soak(arguments) => return soak::run(checkout, &arguments),
        Task::Test(arguments) => return test::run(checkout, &arguments),
    }
    Ok(0)
}

/// Prints `findings` and returns the exit code: 0 without findings.
fn print(findings: Vec<String>) -> Result<u8> {
    findings.iter().for_each(|finding| println!("{finding}"));
    Ok(u8::from(!findings.is_empty()))
}

#[cfg(test)]
mod tests {
    use clap::{Args, Command, CommandFactory, Error};

    use super::*;

    /// Parses a task's options.
    pub(crate) fn parse<T: Args>(line: &str) -> Result<T, Error> {
        let command = T::augment_args(Command::new("task").no_binary_name(true));
        T::from_arg_matches(&command.try_get_matches_from(line.split_whitespace())?)
    }

    #[test]
    fn command_line_is_consistent() {
        Arguments::command().debug_assert();
        Arguments::try_parse_from(["xtask", "setup", "--update-kernels"]).unwrap();
    }
}
