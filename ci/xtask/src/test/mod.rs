//! Runs all tests, in the same way here and in CI.

mod checks;
mod guests;
mod lanes;
mod promtool;
mod report;
mod shares;
mod unit;
mod verdicts;

use std::path::Path;

use anyhow::{Context, Result, ensure};
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use rustix::fs::statvfs;

use crate::checkout::{Checkout, create_folder};
use crate::messages::{Refused, attempt, report, with_task_name};
use crate::setup;
use report::Report;

/// Time limit for all guest tests on one host.
const GUEST_TESTS_S: u64 = 6000;
const ALL_GUEST_TESTS_S: u64 = 12_000;
/// Disk space that a first run needs, mostly for three builds.
const FIRST_RUN_BYTES: u64 = 10_000_000_000;

#[derive(Args, Clone, Debug)]
#[command(args_override_self = true)]
pub(crate) struct Arguments {
    /// Run long guest tests as well, as CI does
    #[arg(long)]
    long: bool,
    /// Run long and extended guest tests as well
    #[arg(long)]
    all: bool,
    /// Run only guest tests
    #[arg(long)]
    guest: bool,
    /// Treat each FILTER as the whole name of a test
    #[arg(long, requires = "guest")]
    exact: bool,
    /// Run guest tests as an ordinary user in group kvm; those that need root are skipped
    #[arg(long, requires = "guest")]
    as_user: bool,
    /// Run the guest tests whose names contain a filter, of any class
    ///
    /// Each filter must match a test.
    #[arg(requires = "guest", value_name = "FILTER", value_parser = NonEmptyStringValueParser::new())]
    filters: Vec<String>,
}

impl Arguments {
    /// Returns the arguments that make `guest-tests` choose the same tests.
    fn choice(&self) -> Vec<&str> {
        let flags = [("--long", self.long), ("--all", self.all), ("--exact", self.exact)];
        let flags = flags.into_iter().filter_map(|(flag, is_set)| is_set.then_some(flag));
        flags.chain(self.filters.iter().map(String::as_str)).collect()
    }

    /// Returns the arguments that make `guest-tests` run the tests as the same user.
    fn user(&self) -> Option<&str> {
        self.as_user.then_some("--as-user")
    }

    fn guest_tests_s(&self) -> u64 {
        if self.all { ALL_GUEST_TESTS_S } else { GUEST_TESTS_S }
    }
}

pub(crate) fn run(checkout: &Checkout, arguments: &Arguments) -> Result<u8> {
    with_task_name("test", || {
        let mut report = Report::new();
        report.begin_step("set-up");
        setup::ensure_set_up(checkout)?;
        if arguments.guest {
            run_guest_tests(checkout, arguments, &mut report)?;
        } else {
            run_all(checkout, arguments, &mut report)?;
        }
        report.print();
        Ok(u8::from(report.has_failed()))
    })
}

fn run_all(checkout: &Checkout, arguments: &Arguments, report: &mut Report) -> Result<()> {
    if !checkout.path("target/debug").is_dir() {
        check_space(&checkout.ci(""), FIRST_RUN_BYTES)?;
        report!(
            "the first run builds everything three times, for lints, tests and guests: up to 40 minutes on \
             two cores"
        );
    }
    checks::run(checkout, report);
    run_part(report, "unit tests", |report| unit::run(checkout, report));
    run_guest_tests(checkout, arguments, report)?;
    run_part(report, "power cuts", |report| checks::cut_power(checkout, report));
    Ok(())
}

/// Rejects a first run that would run out of disk space after half an hour.
fn check_space(folder: &Path, needed_bytes: u64) -> Result<()> {
    create_folder(folder)?;
    let space = statvfs(folder).with_context(|| format!("Cannot look at {}", folder.display()))?;
    let available_bytes = space.f_bavail.saturating_mul(space.f_frsize);
    ensure!(
        available_bytes >= needed_bytes,
        "the first run needs {} GB of disk space in {}, but only {} GB are free",
        needed_bytes / 1_000_000_000,
        folder.display(),
        available_bytes / 1_000_000_000
    );
    Ok(())
}

/// Runs the guest tests. Returns an error if `guest-tests` rejects the filters on the command line.
fn run_guest_tests(checkout: &Checkout, arguments: &Arguments, report: &mut Report) -> Result<()> {
    let mut refused = Ok(());
    run_part(report, "guest tests", |report| match guests::run(checkout, arguments, report) {
        Err(error) if error.is::<Refused>() => {
            refused = Err(error);
            Ok(())
        }
        result => result,
    });
    refused
}

/// Runs one part. Reports an error as a failure, so that results of other parts are kept.
fn run_part(report: &mut Report, name: &str, part: impl FnOnce(&mut Report) -> Result<()>) {
    if attempt(|| part(report)).is_none() {
        report!("{name}: FAILED");
        report.add_failure(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choice_reaches_the_program_of_the_guest_tests() {
        let parse = |line: &str| crate::tests::parse::<Arguments>(line).unwrap();
        let choice = |line: &str| parse(line).choice().join(" ");
        assert_eq!(choice(""), "");
        assert_eq!(choice("--long --long"), "--long");
        assert_eq!(choice("--guest --all --exact a::b c::d"), "--all --exact a::b c::d");
        assert_eq!(parse("--all").guest_tests_s(), 2 * GUEST_TESTS_S);
        assert_eq!(parse("--guest --as-user").user(), Some("--as-user"));
        assert_eq!(parse("--guest").user(), None);
        // Unit tests do not change their user.
        assert!(crate::tests::parse::<Arguments>("--as-user").is_err());
    }

    #[test]
    fn lack_of_disk_space_names_the_folder_and_the_size() {
        let folder = tempfile::tempdir().unwrap();
        check_space(folder.path(), 1).unwrap();
        let error = check_space(folder.path(), u64::MAX).unwrap_err().to_string();
        let path = folder.path().display();
        let start =
            format!("the first run needs 18446744073 GB of disk space in {path}, but only ");
        assert!(error.starts_with(&start), "{error}");
    }
}
