//! Runs the guest tests, shared among several hosts with one CPU each.
//!
//! On hosts with more CPUs, the emulation breaks kernels (docs/design/testing.md).

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result};

use super::Arguments;
use super::lanes::{self, Host, Log};
use super::report::{Guests, Report};
use super::shares::Queue;
use super::verdicts::Events;
use crate::BAD_COMMAND_LINE;
use crate::cargo;
use crate::checkout::{Checkout, create_folder, remove_folder, rename};
use crate::host::{ends, host_kind};
use crate::images;
use crate::jobs;
use crate::messages::{attempt, refuse, report, write_output};
use crate::programs;
use crate::soak::in_lanes;

const HOST_CPUS: u64 = 1;
const HOST_MIB: u64 = 6144;
const HOST_NVDIMM_MIB: u64 = 512;
/// Persistent memory of a host: two devices for tests.
const HOST_PMEM_MIB: u64 = 320;
/// Extra time for each host, for boots and because shares differ in length.
const UNEVEN_S: u64 = 600;
/// Time for a runner to end by itself and to save the logs of the test that it cuts off. After
/// that, the host's own time limit ends it.
const RUNNER_END_S: u64 = 60;
const FOLDER: &str = "guest-tests";

pub(super) fn run(checkout: &Checkout, arguments: &Arguments, report: &mut Report) -> Result<()> {
    report!("guest tests");
    // Logs of an earlier run should not remain if this build fails.
    remove_folder(&checkout.ci(FOLDER))?;
    if attempt(|| build(checkout, report)).is_none() {
        report.add_failure("build of the guest tests");
        return Ok(());
    }
    report.begin_step("guest tests");
    let started = Instant::now();
    let tests = list(checkout, arguments)?;
    let hosts = host_kind::hosts_at_once(HOST_MIB + HOST_NVDIMM_MIB + 2 * HOST_PMEM_MIB)?;
    let hosts = hosts.clamp(1, tests.len().max(1));
    let lanes = Lanes {
        checkout,
        user: arguments.user(),
        started,
        seconds: arguments.guest_tests_s() / u64::try_from(hosts)? + UNEVEN_S,
        queue: Mutex::new(Queue::new(&tests, hosts)),
        events: Mutex::default(),
    };
    // If a lane itself fails, its tests have no verdict.
    let run = |lane: &usize| lanes.run_lane(*lane).with_context(|| format!("lane {lane}"));
    in_lanes(hosts, (1..=hosts).collect(), run, |_| false);
    let events = lanes.events.into_inner().unwrap_or_else(PoisonError::into_inner);
    report.add_guests(Guests { events, folder: format!("target/ci/{FOLDER}") }, &tests);
    Ok(())
}

/// Builds the programs, the clients, and the guest images, which contain some of these programs.
fn build(checkout: &Checkout, report: &mut Report) -> Result<()> {
    report.begin_step("build of the programs");
    cargo::build_programs(checkout)?;
    report.begin_step("build of the API clients");
    cargo::build_clients(checkout)?;
    report.begin_step("guest images");
    images::guests::build_all(checkout)
}

/// Returns the names of the chosen tests. A filter that matches no test is an error, before any
/// boot.
fn list(checkout: &Checkout, arguments: &Arguments) -> Result<Vec<String>> {
    let mut program = programs::user(checkout.programs().join("guest-tests"));
    let (status, listed) = jobs::attempt(program.arg("--names").args(arguments.choice()))?;
    if status.code() == Some(BAD_COMMAND_LINE.into()) && !arguments.filters.is_empty() {
        refuse!("the guest tests were refused");
    }
    jobs::check(&program, status)?;
    Ok(listed.lines().map(str::to_owned).collect())
}

/// Emulated hosts that run tests concurrently.
struct Lanes<'run> {
    checkout: &'run Checkout,
    /// Argument of `guest-tests`.
    user: Option<&'run str>,
    started: Instant,
    /// Time limit of each lane.
    seconds: u64,
    queue: Mutex<Queue>,
    events: Mutex<Events>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Lanes<'_> {
    /// Runs shares of tests until none is left.
    fn run_lane(&self, lane: usize) -> Result<()> {
        for number in 1.. {
            let share = lock(&self.queue).next_share();
            if share.is_empty() {
                break;
            }
            let suffix = if number > 1 { format!("-{number}") } else { String::new() };
            let folder = self.checkout.ci(FOLDER).join(format!("host-{lane}{suffix}"));
            create_folder(&folder)?;
            let mut log = Log::create(&folder.join("log"), lane, write_output)?;
            let mut host = EmulatedHost { lanes: self, folder: &folder };
            let result = lanes::run_share(&share, &mut host, &mut log);
            // A host that fails to boot or has run out of time must not take tests from other
            // hosts.
            let is_over = log.events.has_failure_without_verdict();
            lock(&self.events).append(log.events);
            result?;
            if is_over {
                break;
            }
        }
        Ok(())
    }

    fn seconds_left(&self) -> u64 {
        self.seconds.saturating_sub(self.started.elapsed().as_secs()).max(1)
    }
}

struct EmulatedHost<'lane> {
    lanes: &'lane Lanes<'lane>,
    folder: &'lane PathBuf,
}

impl Host for EmulatedHost<'_> {
    fn boot(&mut self, tests: &[String], log: &mut Log) -> Result<u8> {
        let left = self.lanes.seconds_left();
        let mut command = programs::task(self.lanes.checkout, "host")?;
        let options = format!(
            "--no-build --peers --mem {HOST_MIB} --cpus {HOST_CPUS} --nvdimm {HOST_NVDIMM_MIB} \
             --pmem-devices {HOST_PMEM_MIB} --timeout {} --out",
            left + RUNNER_END_S
        );
        command.args(options.split(' ')).arg(self.folder);
        command.args(["--", "guest-tests", "--within", &left.to_string()]);
        command.args(self.lanes.user).arg("--exact").args(tests);
        command.current_dir(self.lanes.checkout.root());
        let status = jobs::stream(&mut command, |bytes| log.add(bytes))?;
        Ok(jobs::exit_code(status))
    }

    fn has_died(&self, code: u8) -> bool {
        ends::has_host_died(code, self.folder)
    }

    fn store_logs(&mut self, death: usize) -> Result<()> {
        for name in [ends::CONSOLE, ends::REGISTERS] {
            let path = self.folder.join(name);
            if path.exists() {
                let (stem, extension) = name.split_once('.').context("no extension")?;
                rename(&path, &self.folder.join(format!("{stem}-{death}.{extension}")))?;
            }
        }
        Ok(())
    }
}
