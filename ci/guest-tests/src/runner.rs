//! Runs guest tests: each in a process of its own, so that a test that hangs or panics takes only
//! itself and the VMMs it started.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::str::FromStr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::guest::{console, end_with_parent, unpacked, without_logs};
use crate::wait::wait_for;

/// A test by its name: `topic::what_holds`.
#[derive(Clone, Copy)]
pub struct Test {
    pub name: &'static str,
    pub run: fn() -> Result<()>,
    pub limit: Duration,
    pub class: Class,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    Usual,
    /// On each change that lands: it takes long for what it adds.
    Long,
    /// Now and then: others see the same, in less.
    Extended,
}

/// What a test may take unless it says otherwise. Emulated: ten times what it takes when all is
/// well.
pub const DEFAULT_LIMIT: Duration = Duration::from_secs(120);

/// Table of a module's tests. A row has the name of a test, its limit in seconds if the default is
/// too short, its class unless it is `usual`, and the call that runs it unless that is a function
/// of the same name without arguments:
///
/// ```ignore
/// tests![
///     boots,
///     survives_a_kill: 300 (long) => survives(Kernel::V6_12, 2),
///     survives_a_kill_on_6_1: 300 (extended) => survives(Kernel::V6_1, 2),
/// ]
/// ```
///
/// `long` is for tests of 15 s and more, emulated, and for a kernel on which another test shows
/// nearly the same. `extended` is for tests that CI does not need, because others show the same.
#[macro_export]
macro_rules! tests {
    (@class) => { $crate::runner::Class::Usual };
    (@class long) => { $crate::runner::Class::Long };
    (@class extended) => { $crate::runner::Class::Extended };
    (@run $name:ident) => { $name };
    (@run $name:ident $run:expr) => { || $run };
    ($($name:ident $(: $seconds:literal)? $(($class:ident))? $(=> $run:expr)?),+ $(,)?) => {
        pub const TESTS: &[$crate::runner::Test] = &[$(
            $crate::runner::Test {
                name: concat!(module_path!(), "::", stringify!($name)),
                run: $crate::tests!(@run $name $($run)?),
                limit: {
                    let limit = $crate::runner::DEFAULT_LIMIT;
                    $(let limit = { let _ = limit; std::time::Duration::from_secs($seconds) };)?
                    limit
                },
                class: $crate::tests!(@class $($class)?),
            },
        )+];
    };
}

/// Why a test did not run. Returned as an error by [`skip`].
#[derive(Debug)]
struct Skipped(String);

impl fmt::Display for Skipped {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.0)
    }
}

impl std::error::Error for Skipped {}

/// Ends a test without a verdict, with the reason: `return skip("the kernel is too old")`.
pub fn skip<T>(reason: impl Into<String>) -> Result<T> {
    Err(Skipped(reason.into()).into())
}

/// Exit code of a test's process that has been skipped; its reason is the last line of its output.
const SKIPPED_CODE: i32 = 77;

/// The context of an error that nothing excuses: what was stored is not there as it has to be. A
/// test that ends with it gets no second chance.
#[derive(Debug)]
pub struct StoredWrong;

impl StoredWrong {
    /// Exit code of a process that has ended with it: a test's, and a guest's that holds a disk
    /// against what it should be.
    pub const CODE: i32 = 78;

    pub fn code_of(error: &anyhow::Error) -> i32 {
        if error.downcast_ref::<Self>().is_some() { Self::CODE } else { 1 }
    }
}

impl fmt::Display for StoredWrong {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("What was stored is wrong, whatever the emulation did")
    }
}

#[derive(Debug, Clone)]
pub struct Options {
    /// Only tests whose name contains one of these, of whatever class.
    pub filters: Vec<String>,
    /// Filters are whole names.
    pub exact: bool,
    /// Without filters: those of this class and of the ones before it.
    pub most: Class,
    /// How many at once.
    pub jobs: usize,
    /// Say what there is, run nothing.
    pub list: bool,
    /// For all of them together. What has no time left fails.
    pub within: Option<Duration>,
}

impl Options {
    pub fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self> {
        let mut options = Self {
            filters: Vec::new(),
            exact: false,
            most: Class::Usual,
            jobs: 1,
            list: false,
            within: None,
        };
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--list" => options.list = true,
                "--exact" => options.exact = true,
                "--long" => options.most = options.most.max(Class::Long),
                "--all" => options.most = Class::Extended,
                "--jobs" => options.jobs = positive("--jobs", arguments.next())?,
                "--within" => {
                    let seconds: u32 = positive("--within", arguments.next())?;
                    options.within = Some(Duration::from_secs(seconds.into()));
                }
                flag if flag.starts_with('-') => {
                    bail!(
                        "unknown flag {flag}: there are --list, --long, --all, --exact, --jobs N, --within SECONDS \
                         and filters"
                    )
                }
                filter => options.filters.push(filter.to_owned()),
            }
        }
        Ok(options)
    }

    /// The tests that are wanted. A filter that matches none is an error: who has misspelt one of
    /// several would take the others' success for its own.
    fn choose(&self, tests: &[Test]) -> Result<Vec<Test>> {
        if let Some(filter) =
            self.filters.iter().find(|filter| !tests.iter().any(|test| self.matches(test, filter)))
        {
            let topics: BTreeSet<_> = tests
                .iter()
                .filter_map(|test| short_name(test).split_once("::"))
                .map(|(topic, _)| topic)
                .collect();
            bail!(
                "no test matches {filter:?}; the topics are {}",
                Vec::from_iter(topics).join(", ")
            );
        }
        Ok(tests.iter().copied().filter(|test| self.wants(test)).collect())
    }

    fn wants(&self, test: &Test) -> bool {
        if self.filters.is_empty() {
            return test.class <= self.most;
        }
        self.filters.iter().any(|filter| self.matches(test, filter))
    }

    fn matches(&self, test: &Test, filter: &str) -> bool {
        let name = short_name(test);
        if self.exact { name == filter } else { name.contains(filter) }
    }
}

fn positive<T: FromStr + PartialOrd + Default>(flag: &str, value: Option<String>) -> Result<T> {
    let number = value
        .as_deref()
        .and_then(|value| value.parse().ok())
        .filter(|number| *number > T::default());
    number.with_context(|| format!("{flag} needs a number above 0, not {value:?}"))
}

/// The name without the program's: `boot::boots`.
fn short_name(test: &Test) -> &'static str {
    test.name.split_once("::").map_or(test.name, |(_, name)| name)
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Verdict {
    Passed,
    Skipped(String),
    Failed(String),
    /// Failed, with [`StoredWrong`].
    FailedForGood(String),
}

/// Runs the tests that the command line asks for and returns the process's exit code. In a test's
/// own process (the runner starts itself with `--one NAME`) it runs that test.
pub fn main(tests: &[Test]) -> Result<i32> {
    let mut arguments = std::env::args().skip(1).peekable();
    if arguments.peek().is_some_and(|argument| argument == "--one") {
        let name = arguments.nth(1).context("--one needs a name")?;
        let test = tests.iter().find(|test| short_name(test) == name);
        return Ok(run_here(test.with_context(|| format!("no test {name}"))?));
    }
    let options = Options::parse(arguments)?;
    let chosen = options.choose(tests)?;
    if options.list {
        chosen.iter().for_each(|test| println!("{}", short_name(test)));
        return Ok(0);
    }
    let verdicts = run_all(chosen, &options);
    let count =
        |wanted: fn(&Verdict) -> bool| verdicts.iter().filter(|verdict| wanted(verdict)).count();
    let failed = count(|verdict| matches!(verdict, Verdict::Failed(_) | Verdict::FailedForGood(_)));
    println!(
        "guest tests: {} passed, {failed} failed, {} skipped",
        count(|verdict| *verdict == Verdict::Passed),
        count(|verdict| matches!(verdict, Verdict::Skipped(_)))
    );
    Ok(i32::from(failed > 0))
}

fn run_here(test: &Test) -> i32 {
    match (test.run)() {
        Ok(()) => 0,
        Err(error) => match error.downcast_ref::<Skipped>() {
            Some(reason) => {
                println!("{reason}");
                SKIPPED_CODE
            }
            None => {
                // The runner prints the last lines of all logs.
                println!("{}", without_logs(&error));
                StoredWrong::code_of(&error)
            }
        },
    }
}

fn run_all(tests: Vec<Test>, options: &Options) -> Vec<Verdict> {
    let deadline = options.within.map(|within| Instant::now() + within);
    let queue = Mutex::new(VecDeque::from(tests));
    let verdicts = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..options.jobs {
            scope.spawn(|| {
                loop {
                    let Some(test) = queue.lock().expect("no holder panics").pop_front() else {
                        break;
                    };
                    let verdict = run_and_report(&test, deadline);
                    verdicts.lock().expect("no holder panics").push(verdict);
                }
            });
        }
    });
    verdicts.into_inner().expect("no holder panics")
}

fn run_and_report(test: &Test, deadline: Option<Instant>) -> Verdict {
    let name = short_name(test);
    let started = Instant::now();
    let left =
        deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(started));
    let verdict = if left.is_zero() {
        Ok(Verdict::Failed("Not run: the tests before it have taken all the time".to_owned()))
    } else {
        run_until_the_emulation_holds(test, deadline)
    };
    let verdict =
        verdict.unwrap_or_else(|error| Verdict::Failed(format!("Cannot run the test: {error:#}")));
    let seconds = started.elapsed().as_secs_f64();
    match &verdict {
        Verdict::Passed => println!("test {name} ... ok ({seconds:.1} s)"),
        Verdict::Skipped(reason) => println!("test {name} ... skipped: {reason}"),
        Verdict::Failed(output) | Verdict::FailedForGood(output) => {
            // One write, so that two failures do not mix.
            let output: String = output.lines().map(|line| format!("  | {line}\n")).collect();
            println!("test {name} ... FAILED ({seconds:.1} s)\n{output}");
        }
    }
    verdict
}

/// How often a test runs anew because the emulation broke a guest's kernel.
const MAX_RERUNS: usize = 2;

/// Limit of suspects in one boot: tests that fail without the emulation's mark and run once more.
/// The emulation also breaks guests without a mark, by a triple fault or a vCPU that stands still.
/// A fault of the programs fails again, or in more tests than these.
const MAX_SUSPECTS: usize = 2;

/// The emulation that trips over a kernel which patches its own text (docs/testing.md) does so in
/// guests as well: with two CPUs, while they boot. A test in which that shows in a guest's console
/// says nothing; it runs anew, and the output tells.
fn run_until_the_emulation_holds(test: &Test, deadline: Option<Instant>) -> Result<Verdict> {
    let name = short_name(test);
    let left = || {
        deadline
            .map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()))
    };
    let mut reruns = Reruns::default();
    loop {
        let verdict = run_in_process(test, test.limit.min(left()))?;
        let output = match &verdict {
            Verdict::Failed(output) if emulated() && !left().is_zero() => output,
            _ => return Ok(with_the_reason(verdict, left())),
        };
        let console = broken_console(&test_dir(name));
        if !reruns.once_more(console.is_some(), &SUSPECTS) {
            return Ok(with_the_reason(verdict, left()));
        }
        match console {
            Some(console) => {
                println!("rerun {name}: the emulation broke a guest's kernel ({console})")
            }
            None => println!(
                "rerun {name}: suspect, it failed without a mark of the emulation\n{output}"
            ),
        }
    }
}

/// How often a test has run anew, and why.
#[derive(Default)]
struct Reruns {
    broken: usize,
    is_suspect: bool,
}

impl Reruns {
    /// Returns whether a test that has failed runs once more. `suspects` counts those of this boot.
    fn once_more(&mut self, has_the_mark: bool, suspects: &AtomicUsize) -> bool {
        if has_the_mark {
            self.broken += 1;
            return self.broken <= MAX_RERUNS;
        }
        !std::mem::replace(&mut self.is_suspect, true)
            && suspects.fetch_add(1, Ordering::Relaxed) < MAX_SUSPECTS
    }
}

/// Number of suspects in this boot.
static SUSPECTS: AtomicUsize = AtomicUsize::new(0);

fn with_the_reason(verdict: Verdict, left: Duration) -> Verdict {
    match verdict {
        Verdict::Failed(output) if left.is_zero() => Verdict::Failed(format!(
            "Cut off: all tests together have used their time up\n{output}"
        )),
        verdict => verdict,
    }
}

/// Whether this is the emulated host: ci/nested/host says so.
pub fn emulated() -> bool {
    std::env::var_os("FORESHORE_HOST").is_some_and(|way| way == "nested")
}

/// The guest's console in a test's directory that has the emulation's mark.
fn broken_console(dir: &Path) -> Option<String> {
    fs::read_dir(dir).ok()?.flatten().find_map(|entry| {
        let name =
            entry.file_name().into_string().ok().filter(|name| name.ends_with(".console.log"))?;
        let console = fs::read(entry.path()).ok()?;
        has_the_mark(&String::from_utf8_lossy(&console)).then_some(name)
    })
}

/// A breakpoint that nobody set, or a debug exception in the kernel: what an instruction of several
/// bytes is while half of it has been patched. Guests here have no debugger, and nobody loads their
/// debug registers.
fn has_the_mark(console: &str) -> bool {
    console.contains("Oops: int3") || console.contains(" exc_debug_kernel+")
}

/// Whether the emulation, and not what is tested, broke the guest whose console this is.
pub fn emulation_broke(console: &str) -> bool {
    emulated() && has_the_mark(console)
}

fn run_in_process(test: &Test, limit: Duration) -> Result<Verdict> {
    let dir = test_dir(short_name(test));
    // What an earlier run left is not evidence of this one.
    match fs::remove_dir_all(&dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("Cannot empty {}", dir.display()));
        }
        _ => {}
    }
    fs::create_dir_all(&dir).with_context(|| format!("Cannot make {}", dir.display()))?;
    let output_path = dir.join("output");
    let output = File::create(&output_path)?;
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["--one", short_name(test)])
        .env(TEST_DIR_VARIABLE, &dir)
        // A panic's backtrace says where; an error says what, and its backtrace would bury that.
        .env("RUST_LIB_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output)
        // The VMMs that the test starts stay in its group, and end with it.
        .process_group(0);
    if emulated() {
        command.env(unpacked::VARIABLE, std::env::temp_dir().join("guest-tests-kernels"));
    }
    let mut child = end_with_parent(&mut command).spawn()?;
    let status = wait_for("the test ended", limit, || Ok(child.try_wait()?));
    end_group(&mut child);
    let output = String::from_utf8_lossy(&fs::read(&output_path)?).into_owned();
    let mut verdict = verdict_of(status, output);
    if let Verdict::Failed(why) | Verdict::FailedForGood(why) = &mut verdict {
        why.push_str(&last_words(&dir));
    }
    match &verdict {
        Verdict::Failed(_) | Verdict::FailedForGood(_) => keep_evidence(short_name(test), &dir),
        // Pools and images are large; nobody looks at those of a test that passed.
        _ => fs::remove_dir_all(&dir)?,
    }
    Ok(verdict)
}

fn verdict_of(status: Result<ExitStatus>, output: String) -> Verdict {
    match status.map(|status| (status.code(), status)) {
        Ok((Some(0), _)) => Verdict::Passed,
        Ok((Some(SKIPPED_CODE), _)) => {
            Verdict::Skipped(output.lines().last().unwrap_or("no reason given").to_owned())
        }
        Ok((Some(StoredWrong::CODE), _)) => Verdict::FailedForGood(output),
        Ok((Some(_), _)) => Verdict::Failed(output),
        Ok((None, status)) => {
            Verdict::Failed(format!("{output}\nThe test's process ended by {status}"))
        }
        Err(error) => Verdict::Failed(format!("{output}\n{error:#}")),
    }
}

/// The ends of the logs in a test's directory: where nobody can look into it, they are what a
/// failure leaves.
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
    // SAFETY: no pointers. The group is the child's own, and outlives it as long as a member does;
    // a group that is gone is no error that matters.
    unsafe { libc::kill(-(child.id() as libc::pid_t), libc::SIGKILL) };
    // The child is killed or has ended: this cannot block for long, and its result is known
    // already.
    let _ = child.wait();
}

/// Brings the logs of a failed test out of the emulated host, when $OUT says where to.
fn keep_evidence(name: &str, dir: &Path) {
    let Some(out) = std::env::var_os("OUT") else { return };
    let target = Path::new(&out).join(name.replace("::", "-"));
    let kept = fs::create_dir_all(&target).and_then(|()| {
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            let small = entry.metadata()?.is_file() && entry.metadata()?.len() < 16 << 20;
            if small {
                fs::copy(entry.path(), target.join(entry.file_name()))?;
            }
        }
        Ok(())
    });
    if let Err(error) = kept {
        println!("Cannot keep the logs of {name}: {error}");
    }
}

const TEST_DIR_VARIABLE: &str = "FORESHORE_TEST_DIR";

pub fn this_tests_dir() -> PathBuf {
    std::env::var_os(TEST_DIR_VARIABLE).map_or_else(|| test_dir("by-hand"), PathBuf::from)
}

/// On tmpfs in the emulated host: its disk cannot be written to. Short, for a unix socket's path is
/// at most 107 bytes.
fn test_dir(name: &str) -> PathBuf {
    std::env::temp_dir().join("guest-tests").join(name.replace("::", "-"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    fn parse(arguments: &[&str]) -> Result<Options> {
        Options::parse(arguments.iter().map(|argument| (*argument).to_owned()))
    }

    fn nothing() -> Result<()> {
        Ok(())
    }

    #[test]
    fn filters_choose_by_part_of_the_name() {
        let test = Test {
            name: "guest_tests::boot::starts",
            run: nothing,
            limit: DEFAULT_LIMIT,
            class: Class::Usual,
        };
        assert!(parse(&[]).unwrap().wants(&test));
        assert!(parse(&["volume", "boot::"]).unwrap().wants(&test));
        assert!(!parse(&["volume"]).unwrap().wants(&test));
        assert!(parse(&["--exact", "boot::starts"]).unwrap().wants(&test));
        assert!(!parse(&["--exact", "boot::start"]).unwrap().wants(&test));
    }

    #[test]
    fn long_and_extended_tests_run_when_they_are_asked_for() {
        const TESTS: &[Test] = &[
            Test {
                name: "guest_tests::boot::short",
                run: nothing,
                limit: DEFAULT_LIMIT,
                class: Class::Usual,
            },
            Test {
                name: "guest_tests::boot::long",
                run: nothing,
                limit: DEFAULT_LIMIT,
                class: Class::Long,
            },
            Test {
                name: "guest_tests::boot::longer",
                run: nothing,
                limit: DEFAULT_LIMIT,
                class: Class::Extended,
            },
        ];
        let count = |arguments: &[&str]| {
            let options = parse(arguments).unwrap();
            TESTS.iter().filter(|test| options.wants(test)).count()
        };
        assert_eq!((count(&[]), count(&["--long"]), count(&["--all"])), (1, 2, 3));
        assert_eq!((count(&["--all", "--long"]), count(&["--long", "--all"])), (3, 3));
        assert_eq!(
            (count(&["boot::"]), count(&["longer"]), count(&["--long", "short"])),
            (3, 1, 1)
        );
    }

    #[test]
    fn every_filter_must_match_a_test() {
        const TESTS: &[Test] = &[
            Test {
                name: "guest_tests::boot::starts",
                run: nothing,
                limit: DEFAULT_LIMIT,
                class: Class::Usual,
            },
            Test {
                name: "guest_tests::boot::long",
                run: nothing,
                limit: DEFAULT_LIMIT,
                class: Class::Extended,
            },
        ];
        let chosen = |arguments: &[&str]| {
            let chosen =
                parse(arguments).unwrap().choose(TESTS).map_err(|error| error.to_string())?;
            Ok::<_, String>(chosen.iter().map(short_name).collect::<Vec<_>>())
        };
        assert_eq!(chosen(&[]), Ok(vec!["boot::starts"]));
        assert_eq!(chosen(&["starts", "long"]), Ok(vec!["boot::starts", "boot::long"]));
        for wrong in [["starts", "lng"], ["lng", "starts"]] {
            assert_eq!(
                chosen(&wrong),
                Err("no test matches \"lng\"; the topics are boot".to_owned())
            );
        }
        assert!(chosen(&["--exact", "boot::start"]).is_err());
    }

    #[test]
    fn unknown_flags_and_numbers_are_refused() {
        assert!(parse(&["--bogus"]).is_err());
        assert!(parse(&["--jobs", "0"]).is_err());
        assert!(parse(&["--within", "soon"]).is_err());
        assert!(parse(&["--within"]).is_err());
        let options = parse(&["--jobs", "3", "--within", "60"]).unwrap();
        assert_eq!((options.jobs, options.within), (3, Some(Duration::from_secs(60))));
    }

    #[test]
    fn a_test_without_time_left_fails() {
        let test = Test {
            name: "guest_tests::boot::starts",
            run: nothing,
            limit: DEFAULT_LIMIT,
            class: Class::Usual,
        };
        let verdict = run_and_report(&test, Some(Instant::now()));
        assert!(matches!(verdict, Verdict::Failed(why) if why.starts_with("Not run")));
    }

    #[test]
    fn a_test_that_is_cut_off_says_why() {
        let failed = || Verdict::Failed("waited".to_owned());
        assert_eq!(with_the_reason(failed(), Duration::from_secs(1)), failed());
        let cut = with_the_reason(failed(), Duration::ZERO);
        assert!(
            matches!(cut, Verdict::Failed(why) if why.starts_with("Cut off") && why.ends_with("waited"))
        );
        assert_eq!(with_the_reason(Verdict::Passed, Duration::ZERO), Verdict::Passed);
    }

    #[test]
    fn what_is_stored_wrong_fails_for_good_however_deep_the_error_is() {
        fn stored_wrong() -> Result<()> {
            Err(anyhow::anyhow!("1 of 8 sectors are wrong")).context(StoredWrong).context("Round 3")
        }
        fn else_wrong() -> Result<()> {
            Err(anyhow::anyhow!("no such device")).context("Round 3")
        }
        let test = |run| Test {
            name: "guest_tests::torn::kills",
            run,
            limit: DEFAULT_LIMIT,
            class: Class::Usual,
        };
        assert_eq!(run_here(&test(stored_wrong)), StoredWrong::CODE);
        assert_eq!(run_here(&test(else_wrong)), 1);
    }

    #[test]
    fn what_fails_twice_without_the_mark_or_in_one_test_too_many_has_failed() {
        let suspects = AtomicUsize::new(0);
        let mut marked = Reruns::default();
        assert_eq!([(); 3].map(|()| marked.once_more(true, &suspects)), [true, true, false]);
        for _ in 0..MAX_SUSPECTS {
            let mut test = Reruns::default();
            assert_eq!([(); 2].map(|()| test.once_more(false, &suspects)), [true, false]);
        }
        assert!(!Reruns::default().once_more(false, &suspects));
    }

    #[test]
    fn the_emulations_mark_is_found_in_consoles_alone() {
        let dir = std::env::temp_dir().join(format!("guest-tests-runner-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("vm0.vmm.log"), "Oops: int3").unwrap();
        fs::write(dir.join("vm0.console.log"), "Oops: general protection fault").unwrap();
        assert_eq!(broken_console(&dir), None);
        fs::write(dir.join("vm1.console.log"), b"\xff[ 2.3] Oops: int3: 0000 [#2] PREEMPT SMP")
            .unwrap();
        assert_eq!(broken_console(&dir).as_deref(), Some("vm1.console.log"));
        let debug =
            "WARNING: CPU: 1 PID: 181 at arch/x86/kernel/traps.c:1120 exc_debug_kernel+0xca/0x160";
        fs::write(dir.join("vm1.console.log"), debug).unwrap();
        assert_eq!(broken_console(&dir).as_deref(), Some("vm1.console.log"));
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_failure_shows_the_ends_of_the_logs() {
        let dir = std::env::temp_dir().join(format!("guest-tests-words-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("pool"), "not a log").unwrap();
        let lines: String = (1..=20).map(|line| format!("line {line}\n")).collect();
        fs::write(dir.join("vm0.console.log"), lines).unwrap();
        fs::write(dir.join("vm0.vmm.log"), "WARN no driver").unwrap();
        let words = last_words(&dir);
        let expected: String = (6..=20).map(|line| format!("\nline {line}")).collect();
        assert_eq!(
            words,
            format!(
                "\n--- the end of vm0.console.log:{expected}\n--- the end of vm0.vmm.log:\nWARN no driver"
            )
        );
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(last_words(&dir), "");
    }

    #[test]
    fn a_skip_carries_its_reason_and_a_signal_fails() {
        let exited = |code: i32| Ok(ExitStatus::from_raw(code << 8));
        let output = || "booting\nno such driver".to_owned();
        assert_eq!(verdict_of(exited(0), output()), Verdict::Passed);
        assert_eq!(verdict_of(exited(77), output()), Verdict::Skipped("no such driver".to_owned()));
        assert!(matches!(verdict_of(exited(101), output()), Verdict::Failed(_)));
        assert!(matches!(verdict_of(exited(78), output()), Verdict::FailedForGood(_)));
        assert!(matches!(verdict_of(Ok(ExitStatus::from_raw(9)), output()), Verdict::Failed(_)));
    }
}
