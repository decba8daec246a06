//! A lane runs guest tests one after another on an emulated host. If the emulation breaks the host,
//! the lane continues on a new one.
//!
//! At the end, the lane's log contains a verdict for each test.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};

use super::verdicts::{Boots, Events, HOST_DEATH, Kind, NO_VERDICT, THE_HOST, failure};
use crate::host::ends;
use crate::messages::Lines;

/// Maximum number of boots for one share. A boot takes seconds, and only the test that ran while
/// the host died is repeated.
const MAX_BOOTS: usize = 5;

/// Prefix of the first line of the runner. The prefix shows that the host has booted.
const FIRST_LINE: &str = "running ";

/// Log of a lane. Its lines are also printed, prefixed with the lane's number.
pub(super) struct Log {
    file: File,
    pub events: Events,
    lines: Lines,
    lane: usize,
    show: fn(&[u8]),
    /// Start of a boot that has not printed its first line yet.
    boot_started: Option<Instant>,
}

impl Log {
    pub(super) fn create(path: &Path, lane: usize, show: fn(&[u8])) -> Result<Self> {
        let file =
            File::create(path).with_context(|| format!("Cannot create {}", path.display()))?;
        let (events, lines) = (Events::default(), Lines::default());
        Ok(Self { file, events, lines, lane, show, boot_started: None })
    }

    fn begin_boot(&mut self) {
        self.boot_started = Some(Instant::now());
    }

    fn end_boot(&mut self) {
        if let Some(started) = self.boot_started.take() {
            let seconds = started.elapsed().as_secs_f64();
            self.events.host_boots += Boots { count: 1, seconds };
        }
    }

    pub(super) fn add(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).context("Cannot write the log")?;
        for line in self.lines.feed(bytes) {
            let line = String::from_utf8_lossy(&line);
            if line.starts_with(FIRST_LINE) {
                self.end_boot();
            }
            self.events.add_line(line.trim_end_matches('\n'));
            (self.show)(format!("{}| {line}", self.lane).as_bytes());
        }
        Ok(())
    }

    /// Completes a line that was cut off when the host ended.
    fn end_line(&mut self) -> Result<()> {
        if self.lines.is_partial() { self.add(b"\n") } else { Ok(()) }
    }

    fn add_line(&mut self, line: &str) -> Result<()> {
        self.add(format!("{line}\n").as_bytes())
    }
}

pub(super) trait Host {
    /// Boots a host that runs these tests. Adds all output to the log, and returns the exit code.
    fn boot(&mut self, tests: &[String], log: &mut Log) -> Result<u8>;

    /// Returns true if the emulation ended the last boot, which returned `code`.
    fn has_died(&self, code: u8) -> bool;

    /// Keeps the logs of a dead host. `death` is the number of hosts of this lane that have died so
    /// far.
    fn store_logs(&mut self, death: usize) -> Result<()>;
}

/// Runs tests until every test has a verdict.
pub(super) fn run_share(tests: &[String], host: &mut impl Host, log: &mut Log) -> Result<()> {
    let (mut deaths, mut interrupted) = (0, None);
    let mut left = tests.to_owned();
    let code = loop {
        log.begin_boot();
        let code = host.boot(&left, log)?;
        // Counts the boot even if the host ended before it ran tests.
        log.end_boot();
        log.end_line()?;
        left = log.events.without_verdict(tests);
        if !host.has_died(code) {
            break code;
        }
        deaths += 1;
        host.store_logs(deaths)?;
        if left.is_empty() {
            log.add_line(&format!("{HOST_DEATH} the host after its last test"))?;
            break 0;
        }
        let (test, count) = (left[0].clone(), left.len());
        log.add_line(&format!(
            "{HOST_DEATH} the host in {test}: {count} tests have no verdict yet"
        ))?;
        if interrupted.replace(test.clone()).as_ref() == Some(&test) {
            // If a host dies twice during the same test, the test counts as the cause.
            log.add_line(&failure(&test, "the emulated host died in it twice"))?;
            left.remove(0);
        }
        if left.is_empty() || deaths >= MAX_BOOTS {
            break code;
        }
    };
    close(log, &left, code)
}

/// Adds failures that no test has reported: those of a host, of a time limit, or of a runner that
/// aborted.
fn close(log: &mut Log, left: &[String], code: u8) -> Result<()> {
    let meaning = ends::meaning(code);
    for test in left {
        log.add_line(&failure(test, &format!("{NO_VERDICT}: {meaning}")))?;
    }
    if code != 0 && log.events.names(Kind::Failed).is_empty() {
        let reason = format!("every test has passed, but the run has failed: {meaning}");
        log.add_line(&failure(THE_HOST, &reason))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::VecDeque;

    use super::*;
    use crate::host::HOST_FAILED;

    struct Boot {
        output: &'static str,
        code: u8,
        has_died: bool,
    }

    fn ended(output: &'static str, code: u8) -> Boot {
        Boot { output, code, has_died: false }
    }

    fn died(output: &'static str) -> Boot {
        Boot { output, code: HOST_FAILED, has_died: true }
    }

    /// Fake host with a fixed list of boots.
    struct Script {
        boots: VecDeque<Boot>,
        has_died: bool,
        /// Tests that each boot received.
        tests: Vec<String>,
        stored: Vec<usize>,
    }

    impl Host for Script {
        fn boot(&mut self, tests: &[String], log: &mut Log) -> Result<u8> {
            self.tests.push(tests.join(" "));
            let boot = self.boots.pop_front().context("no such boot")?;
            log.add(boot.output.as_bytes())?;
            self.has_died = boot.has_died;
            Ok(boot.code)
        }

        fn has_died(&self, _: u8) -> bool {
            self.has_died
        }

        fn store_logs(&mut self, death: usize) -> Result<()> {
            self.stored.push(death);
            self.has_died = false;
            Ok(())
        }
    }

    thread_local! {
        /// Lines that the lane has printed in this test.
        static SHOWN: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }

    /// Runs the boots. Checks that each of them was counted and that each line of the log was
    /// printed. Returns the host after the last boot, and the log.
    fn run(tests: &str, boots: impl IntoIterator<Item = Boot>) -> (Script, String) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let tests: Vec<_> = tests.split(' ').map(str::to_owned).collect();
        let boots: VecDeque<_> = boots.into_iter().collect();
        let count = boots.len();
        let mut host = Script { boots, has_died: false, tests: Vec::new(), stored: Vec::new() };
        let mut log = Log::create(&path, 2, |line| {
            SHOWN.with_borrow_mut(|shown| shown.extend_from_slice(line));
        })
        .unwrap();
        run_share(&tests, &mut host, &mut log).unwrap();
        assert!(host.boots.is_empty());
        assert_eq!(log.events.host_boots.count, count);
        let shown = String::from_utf8(SHOWN.take()).unwrap();
        let log = std::fs::read_to_string(&path).unwrap();
        assert_eq!(shown.replace("2| ", ""), log);
        assert!(shown.lines().all(|line| line.starts_with("2| ")), "{shown}");
        (host, log)
    }

    /// Checks the logs of lanes on hosts that do not die.
    #[test]
    fn end_of_a_boot_is_a_failure_of_each_test_left_or_of_the_host() {
        let failed = "test a ... FAILED (1.0 s)\n";
        for (tests, output, code, added) in [
            ("a b", "test a ... ok (1.0 s)\ntest b ... FAILED (1.0 s)\n  | no\n\n", 1, ""),
            (
                "a b c",
                "test a ... ok (1.0 s)\n",
                124,
                "test b ... FAILED (no verdict: time limit reached)\n\
                 test c ... FAILED (no verdict: time limit reached)\n",
            ),
            (
                "a",
                "test a ... ok (1.0 s)\n",
                137,
                "test the-host ... FAILED (every test has passed, but the run has failed: \
                 signal: 9 (SIGKILL))\n",
            ),
            ("a", failed, 1, ""),
        ] {
            let (host, log) = run(tests, [ended(output, code)]);
            assert_eq!(log, format!("{output}{added}"));
            assert_eq!(host.tests, [tests]);
        }
    }

    #[test]
    fn tests_without_a_verdict_run_in_a_new_boot_after_a_death() {
        let rest = "running 2 tests\ntest b ... ok (1.0 s)\ntest c ... ok (1.0 s)\n";
        let first = died("running 3 tests\ntest a ... ok (1.0 s)\ntes");
        let (host, log) = run("a b c", [first, ended(rest, 0)]);
        assert_eq!(host.tests, ["a b c", "b c"]);
        assert_eq!(host.stored, [1]);
        let death =
            "\ntes\nTHE EMULATION BROKE the host in b: 2 tests have no verdict yet\nrunning 2";
        assert!(log.contains(death) && !log.contains("FAILED"), "{log}");
        // If a host dies after the last verdict, no result is lost, but the death is counted.
        let (host, log) = run("a", [died("test a ... ok (1.0 s)\n")]);
        assert_eq!(
            log,
            "test a ... ok (1.0 s)\nTHE EMULATION BROKE the host after its last test\n"
        );
        assert_eq!(host.stored, [1]);
    }

    #[test]
    fn second_death_in_the_same_test_is_its_failure() {
        let failed = "test a ... FAILED (the emulated host died in it twice)\n";
        let (host, log) = run("a b", [died(""), died(""), ended("test b ... ok (1.0 s)\n", 0)]);
        assert_eq!(host.tests, ["a b", "a b", "b"]);
        assert!(log.contains(failed) && !log.contains("no verdict:"), "{log}");
        assert!(run("a", [died(""), died("")]).1.ends_with(failed));
    }

    #[test]
    fn boots_have_a_limit() {
        let verdicts =
            ["test a ... ok\n", "test b ... ok\n", "test c ... ok\n", "test d ... ok\n", ""];
        let (host, log) = run("a b c d e f", verdicts.map(died));
        assert_eq!(host.tests.len(), MAX_BOOTS);
        // The host died twice in test `e`.
        assert!(log.contains("test e ... FAILED (the emulated host died in it twice)\n"));
        assert!(log.ends_with("test f ... FAILED (no verdict: the host failed)\n"), "{log}");
    }
}
