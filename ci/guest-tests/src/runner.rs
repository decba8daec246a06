//! Runs guest tests. Each test has its own process, so a test that hangs or panics affects only
//! itself and the VMMs that it started.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Parser;
use guest_tools::CorruptData;
use guest_tools::process::end_with_parent;
use guest_tools::wait::wait_for;
use rustix::process::{Pid, Signal, kill_process_group};

use crate::boots::Boots;
use crate::guest::{console, unpacked, without_logs};
use crate::table::{Class, Row, Test, begin_test, table};
use crate::user;

/// Reason why a test did not run. [`skip`] returns it as an error.
#[derive(Debug)]
struct Skipped(String);

impl fmt::Display for Skipped {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.0)
    }
}

impl std::error::Error for Skipped {}

/// Ends a test without a verdict and gives the reason: `return skip("the kernel is too old")`.
pub fn skip<T>(reason: impl Into<String>) -> Result<T> {
    Err(Skipped(reason.into()).into())
}

/// Start of an output line that is shown although the test has passed.
const FIGURE: &str = "figure: ";

/// Prints a measured value for the log of the whole run.
pub fn print_figure(figure: impl fmt::Display) {
    println!("{FIGURE}{figure}");
}

/// Exit code of the process of a skipped test. The last line of its output is the reason.
const SKIPPED_CODE: i32 = 77;

#[derive(Parser, Debug)]
#[command(args_override_self = true)]
struct Options {
    /// Run the tests whose names contain a filter, of any class
    #[arg(value_name = "FILTER")]
    filters: Vec<String>,
    /// Treat each FILTER as a whole name
    #[arg(long)]
    exact: bool,
    /// Run long tests as well
    #[arg(long)]
    long: bool,
    /// Run long and extended tests as well
    #[arg(long)]
    all: bool,
    /// Print the table of the tests, and run nothing
    #[arg(long)]
    list: bool,
    /// Print the names, and run nothing
    #[arg(long, conflicts_with = "list")]
    names: bool,
    /// Time limit for all tests together; a test that has no time left fails
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    within: Option<u32>,
    /// Run the tests as an ordinary user in the group of /dev/kvm; tests that need root are skipped
    #[arg(long)]
    as_user: bool,
    /// Run this test in this process
    #[arg(long, value_name = "NAME", hide = true)]
    one: Option<String>,
}

impl Options {
    /// Returns the tests selected by the options. A filter without a match is an error, because one
    /// misspelled filter among several would otherwise go unnoticed.
    fn choose(&self, tests: &[Test]) -> Result<Vec<Test>> {
        if let Some(filter) =
            self.filters.iter().find(|filter| !tests.iter().any(|test| self.matches(test, filter)))
        {
            let topics: BTreeSet<_> = tests
                .iter()
                .filter_map(|test| test.name.split_once("::"))
                .map(|(topic, _)| topic)
                .collect();
            bail!(
                "no test matches {filter:?}; the topics are {}",
                Vec::from_iter(topics).join(", ")
            );
        }
        Ok(tests.iter().filter(|test| self.wants(test)).cloned().collect())
    }

    fn wants(&self, test: &Test) -> bool {
        if self.filters.is_empty() {
            return match test.variant.class {
                Class::Usual => true,
                Class::Long => self.long || self.all,
                Class::Extended => self.all,
            };
        }
        self.filters.iter().any(|filter| self.matches(test, filter))
    }

    fn matches(&self, test: &Test, filter: &str) -> bool {
        if self.exact { test.name == filter } else { test.name.contains(filter) }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Verdict {
    /// Contains the figures of [`print_figure`].
    Passed(String),
    Skipped(String),
    Failed(String),
    /// The test failed with [`CorruptData`] and must not be repeated.
    FailedForGood(String),
}

/// Runs the selected tests and returns the exit code. The runner starts itself with `--one NAME`
/// for each test, and then runs only that test.
pub fn main(rows: &[Row]) -> Result<i32> {
    let options = Options::parse();
    let tests: Vec<_> = rows.iter().flat_map(Row::tests).collect();
    if let Some(name) = options.one {
        let test = tests.into_iter().find(|test| test.name == name);
        let test = test.with_context(|| format!("no such test: {name}"))?;
        return Ok(run_in_this_process(begin_test(test)));
    }
    let chosen = options.choose(&tests)?;
    if options.list || options.names {
        let name = |test: &Test| format!("{}\n", test.name);
        print!("{}", if options.list { table(&chosen) } else { chosen.iter().map(name).collect() });
        return Ok(0);
    }
    if options.as_user {
        user::become_ordinary(true)?;
    }
    let deadline =
        options.within.map(|seconds| Instant::now() + Duration::from_secs(seconds.into()));
    // The line shows `ci/test` that the host has booted.
    println!("running {} tests", chosen.len());
    let mut suspects = 0;
    let run = |test| run_and_report(test, deadline, &mut suspects);
    let verdicts: Vec<_> = chosen.iter().map(run).collect();
    let count = |predicate: fn(&Verdict) -> bool| {
        verdicts.iter().filter(|verdict| predicate(verdict)).count()
    };
    let failed = count(|verdict| matches!(verdict, Verdict::Failed(_) | Verdict::FailedForGood(_)));
    println!(
        "guest tests: {} passed, {failed} failed, {} skipped",
        count(|verdict| matches!(verdict, Verdict::Passed(_))),
        count(|verdict| matches!(verdict, Verdict::Skipped(_)))
    );
    Ok(i32::from(failed > 0))
}

fn run_in_this_process(test: &Test) -> i32 {
    match (test.row.run)() {
        Ok(()) => 0,
        Err(error) => match error.downcast_ref::<Skipped>() {
            Some(reason) => {
                println!("{reason}");
                SKIPPED_CODE
            }
            None => {
                // The runner itself prints the last lines of all logs.
                println!("{}", without_logs(&error));
                CorruptData::code_of(&error)
            }
        },
    }
}

fn run_and_report(test: &Test, deadline: Option<Instant>, suspects: &mut usize) -> Verdict {
    let name = &test.name;
    let (started, mut boots) = (Instant::now(), Boots::default());
    let left =
        deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(started));
    let verdict = if left.is_zero() {
        Ok(Verdict::Failed("Not run: the tests before it have taken all the time".to_owned()))
    } else {
        run_until_the_emulation_holds(test, deadline, suspects, &mut boots)
    };
    let verdict =
        verdict.unwrap_or_else(|error| Verdict::Failed(format!("Cannot run the test: {error:#}")));
    let seconds = started.elapsed().as_secs_f64();
    match &verdict {
        Verdict::Passed(figures) => {
            print!("test {name} ... ok ({seconds:.1} s{boots})\n{}", marked(figures));
        }
        Verdict::Skipped(reason) => println!("test {name} ... skipped: {reason}"),
        Verdict::Failed(output) | Verdict::FailedForGood(output) => {
            println!("test {name} ... FAILED ({seconds:.1} s{boots})\n{}", marked(output));
        }
    }
    verdict
}

/// Marks the output lines of a test to distinguish them from lines of the runner.
fn marked(output: &str) -> String {
    output.lines().map(|line| format!("  | {line}\n")).collect()
}

/// Maximum number of reruns of a test after the emulation broke a guest's kernel.
const MAX_RERUNS: usize = 2;

/// Maximum number of suspects in one boot. A suspect is a test that fails without signs of the
/// emulation bug and is repeated once. The emulation also breaks guests without such signs, for
/// example by a triple fault or a hung vCPU. A fault in our programs would appear again, or in more
/// tests than this limit.
const MAX_SUSPECTS: usize = 2;

/// Repeats a test if the emulation broke its guest. The emulation sometimes breaks a kernel that
/// patches its own code (docs/design/testing.md), in guests with two CPUs during their boot. If a
/// guest console shows this fault, the test has no verdict and runs again. The output reports the
/// rerun.
fn run_until_the_emulation_holds(
    test: &Test,
    deadline: Option<Instant>,
    suspects: &mut usize,
    boots: &mut Boots,
) -> Result<Verdict> {
    let name = &test.name;
    let left = || {
        deadline
            .map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()))
    };
    let mut reruns = Reruns::default();
    loop {
        let verdict = run_in_process(test, test.row.limit.min(left()))?;
        boots.take_from(&test_dir(name))?;
        let output = match &verdict {
            Verdict::Failed(output) if emulated() && !left().is_zero() => output,
            _ => return Ok(with_the_reason(verdict, left())),
        };
        let console = broken_console(&test_dir(name));
        if !reruns.once_more(console.is_some(), suspects) {
            return Ok(with_the_reason(verdict, left()));
        }
        match console {
            Some(console) => {
                println!("rerun {name}: the emulation broke a guest's kernel ({console})")
            }
            None => println!(
                "rerun {name}: suspect, it failed without a mark of the emulation\n{}",
                marked(output)
            ),
        }
    }
}

#[derive(Default)]
struct Reruns {
    broken: usize,
    is_suspect: bool,
}

impl Reruns {
    /// Returns true if a failed test should be repeated once. `suspects` counts such tests in this
    /// boot.
    fn once_more(&mut self, has_the_mark: bool, suspects: &mut usize) -> bool {
        if has_the_mark {
            self.broken += 1;
            return self.broken <= MAX_RERUNS;
        }
        if std::mem::replace(&mut self.is_suspect, true) {
            return false;
        }
        *suspects += 1;
        *suspects <= MAX_SUSPECTS
    }
}

fn with_the_reason(verdict: Verdict, left: Duration) -> Verdict {
    match verdict {
        Verdict::Failed(output) if left.is_zero() => {
            Verdict::Failed(format!("Cut off: the tests reached their common time limit\n{output}"))
        }
        verdict => verdict,
    }
}

/// Returns true on an emulated host. ci/nested/host sets the variable for this.
pub fn emulated() -> bool {
    std::env::var_os("FORESHORE_HOST").is_some_and(|host| host == "nested")
}

/// Returns the name of a guest console in the test's directory that shows signs of the emulation
/// bug.
fn broken_console(dir: &Path) -> Option<String> {
    fs::read_dir(dir).ok()?.flatten().find_map(|entry| {
        let name =
            entry.file_name().into_string().ok().filter(|name| name.ends_with(".console.log"))?;
        let console = fs::read(entry.path()).ok()?;
        has_the_mark(&String::from_utf8_lossy(&console)).then_some(name)
    })
}

/// Looks for a breakpoint that no debugger has set, or for a debug exception in the kernel. They
/// occur if an instruction of several bytes is executed when only half of it has been patched.
/// These guests do not use debuggers or debug registers.
fn has_the_mark(console: &str) -> bool {
    console.contains("Oops: int3") || console.contains(" exc_debug_kernel+")
}

/// Returns true if the console shows that the emulation broke the guest.
pub fn emulation_broke(console: &str) -> bool {
    emulated() && has_the_mark(console)
}

fn run_in_process(test: &Test, limit: Duration) -> Result<Verdict> {
    let dir = test_dir(&test.name);
    // Removes files left by an earlier run.
    match fs::remove_dir_all(&dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("Cannot empty {}", dir.display()));
        }
        _ => {}
    }
    Boots::default().take_from(&dir)?;
    fs::create_dir_all(&dir).with_context(|| format!("Cannot create {}", dir.display()))?;
    let output_path = dir.join("output");
    let output = File::create(&output_path)?;
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["--one", &test.name])
        .env(TEST_DIR_VARIABLE, &dir)
        // A backtrace of a panic shows where it occurred. A backtrace of an error would only hide
        // the message.
        .env("RUST_LIB_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output)
        // The test's VMMs belong to this process group and end with it.
        .process_group(0);
    if emulated() {
        command.env(unpacked::VARIABLE, std::env::temp_dir().join("guest-tests-kernels"));
    }
    let mut child = end_with_parent(&mut command).spawn()?;
    let status = wait_for("the test ended", limit, || Ok(child.try_wait()?));
    end_group(&mut child);
    let output = String::from_utf8_lossy(&fs::read(&output_path)?).into_owned();
    let mut verdict = verdict_of(status, output);
    if let Verdict::Failed(reason) | Verdict::FailedForGood(reason) = &mut verdict {
        reason.push_str(&last_words(&dir));
    }
    match &verdict {
        Verdict::Failed(_) | Verdict::FailedForGood(_) => store_evidence(&test.name, &dir),
        // Pools and images are large, and not needed after a test has passed.
        _ => fs::remove_dir_all(&dir)?,
    }
    Ok(verdict)
}

fn verdict_of(status: Result<ExitStatus>, output: String) -> Verdict {
    match status.map(|status| (status.code(), status)) {
        Ok((Some(0), _)) => {
            let figures = output.lines().filter_map(|line| line.strip_prefix(FIGURE));
            Verdict::Passed(figures.collect::<Vec<_>>().join("\n"))
        }
        Ok((Some(SKIPPED_CODE), _)) => {
            Verdict::Skipped(output.lines().last().unwrap_or("no reason given").to_owned())
        }
        Ok((Some(CorruptData::CODE), _)) => Verdict::FailedForGood(output),
        Ok((Some(_), _)) => Verdict::Failed(output),
        Ok((None, status)) => {
            Verdict::Failed(format!("{output}\nThe test's process ended by {status}"))
        }
        Err(error) => Verdict::Failed(format!("{output}\n{error:#}")),
    }
}

/// Returns the last lines of all logs in a test's directory. They help where the directory itself
/// cannot be accessed.
fn last_words(dir: &Path) -> String {
    let mut logs: Vec<PathBuf> = match fs::read_dir(dir) {
        Ok(entries) => entries.flatten().map(|entry| entry.path()).collect(),
        Err(_) => return String::new(),
    };
    logs.retain(|path| path.extension().is_some_and(|extension| extension == "log"));
    logs.sort();
    let words = |path: &PathBuf| {
        let text = console::read(path).unwrap_or_else(|error| format!("{error:#}"));
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        format!("\n--- the end of {name}:\n{}", console::tail(&text))
    };
    logs.iter().map(words).collect()
}

fn end_group(child: &mut Child) {
    // The child leads its own process group, which exists until its last member has ended. If the
    // group no longer exists, that is not an error.
    let _ = kill_process_group(Pid::from_child(child), Signal::KILL);
    // The child has ended or has been killed, so this does not block for long. The result is
    // already known.
    let _ = child.wait();
}

/// Copies the logs of a failed test from the emulated host to $OUT, if that is set.
fn store_evidence(name: &str, dir: &Path) {
    let Some(out) = std::env::var_os("OUT") else { return };
    let target = Path::new(&out).join(name.replace("::", "-"));
    let stored = fs::create_dir_all(&target).and_then(|()| {
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            let small = entry.metadata()?.is_file() && entry.metadata()?.len() < 16 << 20;
            if small {
                fs::copy(entry.path(), target.join(entry.file_name()))?;
            }
        }
        Ok(())
    });
    if let Err(error) = stored {
        println!("Cannot keep the logs of {name}: {error}");
    }
}

const TEST_DIR_VARIABLE: &str = "FORESHORE_TEST_DIR";

pub fn this_tests_dir() -> PathBuf {
    std::env::var_os(TEST_DIR_VARIABLE).map_or_else(|| test_dir("by-hand"), PathBuf::from)
}

/// Returns the directory of a test. It is on tmpfs, because the emulated host's disk is read-only.
/// The path is short, because the path of a Unix socket has at most 107 bytes.
fn test_dir(name: &str) -> PathBuf {
    tests_dir().join(name.replace("::", "-"))
}

pub(crate) fn tests_dir() -> PathBuf {
    std::env::temp_dir().join("guest-tests")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::Kernel;
    use crate::table::{DEFAULT_LIMIT, Variant, Vcpus};
    use std::os::unix::process::ExitStatusExt;

    fn options(line: &str) -> Options {
        Options::try_parse_from(["guest-tests"].into_iter().chain(line.split_whitespace())).unwrap()
    }

    fn tests() -> Vec<Test> {
        let classes =
            [("starts", Class::Usual), ("long", Class::Long), ("longer", Class::Extended)];
        let test = |(name, class)| {
            let variant = Variant { kernels: &[Kernel::V6_12], class };
            let row = Row {
                name,
                run: || Ok(()),
                limit: DEFAULT_LIMIT,
                variants: &[],
                vcpus: Vcpus::Each(1),
            };
            Test { name: format!("boot::{name}"), row, variant }
        };
        classes.map(test).to_vec()
    }

    fn runs(run: fn() -> Result<()>) -> Test {
        let mut test = tests().remove(0);
        test.row.run = run;
        test
    }

    #[test]
    fn classes_and_filters_choose_tests() {
        for (line, expected) in [
            ("", "boot::starts"),
            ("--long", "boot::starts boot::long"),
            ("--all", "boot::starts boot::long boot::longer"),
            ("--all --long", "boot::starts boot::long boot::longer"),
            ("boot::", "boot::starts boot::long boot::longer"),
            ("longer", "boot::longer"),
            ("--long starts", "boot::starts"),
            ("starts longer", "boot::starts boot::longer"),
            ("--exact boot::long", "boot::long"),
        ] {
            let chosen = options(line).choose(&tests()).unwrap();
            let names: Vec<_> = chosen.iter().map(|test| &test.name[..]).collect();
            assert_eq!(names.join(" "), expected, "{line}");
        }
    }

    #[test]
    fn every_filter_must_match_a_test() {
        for line in ["starts lng", "lng starts"] {
            let error = options(line).choose(&tests()).err().unwrap().to_string();
            assert_eq!(error, "no test matches \"lng\"; the topics are boot");
        }
        assert!(options("--exact boot::start").choose(&tests()).is_err());
    }

    #[test]
    fn bad_options_are_refused_and_a_time_limit_is_accepted() {
        for line in ["--bogus", "--within 0", "--within soon", "--within"] {
            let line = ["guest-tests"].into_iter().chain(line.split(' '));
            Options::try_parse_from(line).unwrap_err();
        }
        assert_eq!(options("--within 60").within, Some(60));
    }

    #[test]
    fn test_without_time_left_fails() {
        let verdict = run_and_report(&tests()[0], Some(Instant::now()), &mut 0);
        assert!(matches!(verdict, Verdict::Failed(reason) if reason.starts_with("Not run")));
    }

    #[test]
    fn cut_off_test_reports_the_reason() {
        let failed = || Verdict::Failed("waited".to_owned());
        assert_eq!(with_the_reason(failed(), Duration::from_secs(1)), failed());
        let cut = with_the_reason(failed(), Duration::ZERO);
        assert!(
            matches!(cut, Verdict::Failed(reason) if reason.starts_with("Cut off") && reason.ends_with("waited"))
        );
        let passed = || Verdict::Passed(String::new());
        assert_eq!(with_the_reason(passed(), Duration::ZERO), passed());
    }

    #[test]
    fn wrong_stored_data_at_any_depth_of_an_error_is_a_final_failure() {
        fn stored_wrong() -> Result<()> {
            Err(anyhow::anyhow!("1 of 8 sectors are wrong")).context(CorruptData).context("Round 3")
        }
        fn else_wrong() -> Result<()> {
            Err(anyhow::anyhow!("no such device")).context("Round 3")
        }
        assert_eq!(run_in_this_process(&runs(stored_wrong)), CorruptData::CODE);
        assert_eq!(run_in_this_process(&runs(else_wrong)), 1);
    }

    #[test]
    fn second_failure_or_too_many_suspects_is_a_failure() {
        let mut suspects = 0;
        let mut marked = Reruns::default();
        assert_eq!([(); 3].map(|()| marked.once_more(true, &mut suspects)), [true, true, false]);
        for _ in 0..MAX_SUSPECTS {
            let mut test = Reruns::default();
            assert_eq!([(); 2].map(|()| test.once_more(false, &mut suspects)), [true, false]);
        }
        assert!(!Reruns::default().once_more(false, &mut suspects));
    }

    #[test]
    fn mark_of_the_emulation_counts_only_in_consoles() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path();
        fs::write(dir.join("vm0.vmm.log"), "Oops: int3").unwrap();
        fs::write(dir.join("vm0.console.log"), "Oops: general protection fault").unwrap();
        assert_eq!(broken_console(dir), None);
        fs::write(dir.join("vm1.console.log"), b"\xff[ 2.3] Oops: int3: 0000 [#2] PREEMPT SMP")
            .unwrap();
        assert_eq!(broken_console(dir).as_deref(), Some("vm1.console.log"));
        let debug =
            "WARNING: CPU: 1 PID: 181 at arch/x86/kernel/traps.c:1120 exc_debug_kernel+0xca/0x160";
        fs::write(dir.join("vm1.console.log"), debug).unwrap();
        assert_eq!(broken_console(dir).as_deref(), Some("vm1.console.log"));
    }

    #[test]
    fn failure_shows_the_ends_of_the_logs() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path();
        fs::write(dir.join("pool"), "not a log").unwrap();
        let lines: String = (1..=20).map(|line| format!("line {line}\n")).collect();
        fs::write(dir.join("vm0.console.log"), lines).unwrap();
        fs::write(dir.join("vm0.vmm.log"), "WARN no driver").unwrap();
        let words = last_words(dir);
        let expected: String = (6..=20).map(|line| format!("\nline {line}")).collect();
        assert_eq!(
            words,
            format!(
                "\n--- the end of vm0.console.log:{expected}\n--- the end of vm0.vmm.log:\nWARN no driver"
            )
        );
        assert_eq!(last_words(&dir.join("missing")), "");
    }

    #[test]
    fn skip_has_a_reason_and_a_signal_is_a_failure() {
        let exited = |code: i32| Ok(ExitStatus::from_raw(code << 8));
        let output = || "booting\nno such driver".to_owned();
        assert_eq!(verdict_of(exited(0), output()), Verdict::Passed(String::new()));
        let measured = "booting\nfigure: 3 s\nfigure: 4 s".to_owned();
        assert_eq!(verdict_of(exited(0), measured), Verdict::Passed("3 s\n4 s".to_owned()));
        assert_eq!(verdict_of(exited(77), output()), Verdict::Skipped("no such driver".to_owned()));
        assert!(matches!(verdict_of(exited(101), output()), Verdict::Failed(_)));
        assert!(matches!(verdict_of(exited(78), output()), Verdict::FailedForGood(_)));
        assert!(matches!(verdict_of(Ok(ExitStatus::from_raw(9)), output()), Verdict::Failed(_)));
    }
}
