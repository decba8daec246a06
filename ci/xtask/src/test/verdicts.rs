//! Verdicts and reruns of guest tests, read from the log of a lane.

use std::collections::HashSet;

/// Number of lines of a test's output that the report repeats.
const LAST_LINES: usize = 40;
/// Start of a line of a failed test's output.
const OUTPUT_PREFIX: &str = "  | ";
/// Start of the runner's line after its last test.
const RUNNER_END: &str = "guest tests: ";
/// Start of the line about a dead host.
pub(super) const HOST_DEATH: &str = "THE EMULATION BROKE";
/// Start of the reason of a failure that has no verdict of the runner's.
pub(super) const NO_VERDICT: &str = "no verdict";
/// Name for a failure of a run whose tests have all passed.
pub(super) const THE_HOST: &str = "the-host";
const FAILED: &str = "FAILED";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Passed,
    Failed,
    Skipped,
}

/// A line of the log that is not output of a test.
#[derive(Debug, PartialEq)]
enum Event<'log> {
    /// `test NAME ... VERDICT`, with the seconds that the test took.
    Verdict {
        name: &'log str,
        verdict: Verdict,
        seconds: Option<f64>,
    },
    /// `rerun NAME: REASON`.
    Rerun {
        name: &'log str,
        is_suspect: bool,
    },
    HostDeath,
    RunnerEnd,
}

impl<'log> Event<'log> {
    fn parse(line: &'log str) -> Option<Self> {
        if line.starts_with(HOST_DEATH) {
            return Some(Self::HostDeath);
        }
        if line.starts_with(RUNNER_END) {
            return Some(Self::RunnerEnd);
        }
        if let Some(rest) = line.strip_prefix("rerun ") {
            let (name, reason) = rest.split_once(": ").filter(|(name, _)| is_name(name))?;
            return Some(Self::Rerun { name, is_suspect: reason.starts_with("suspect, ") });
        }
        let (name, result) = line.strip_prefix("test ")?.split_once(" ... ")?;
        let verdict = Verdict::parse(result).filter(|_| is_name(name))?;
        Some(Self::Verdict { name, verdict, seconds: parse_seconds(result) })
    }
}

fn is_name(word: &str) -> bool {
    !word.is_empty() && !word.contains(' ')
}

impl Verdict {
    /// A host may die in the middle of a line, and a failure counts even then.
    fn parse(result: &str) -> Option<Self> {
        if result.starts_with("ok") {
            Some(Self::Passed)
        } else if result.starts_with("skipped: ") {
            Some(Self::Skipped)
        } else if result.starts_with(FAILED) || !result.is_empty() && FAILED.starts_with(result) {
            Some(Self::Failed)
        } else {
            None
        }
    }
}

/// The time at the end of `ok (1.2 s)`.
fn parse_seconds(result: &str) -> Option<f64> {
    result.strip_suffix(" s)")?.rsplit('(').next()?.parse().ok()
}

/// The line of a failure that the runner has not reported.
pub(super) fn failure(name: &str, reason: &str) -> String {
    format!("test {name} ... {FAILED} ({reason})")
}

/// The tests that the log has no verdict of.
pub(super) fn without_verdict(log: &str, tests: &[String]) -> Vec<String> {
    let judged: HashSet<_> = log.lines().filter_map(Event::parse).filter_map(judged).collect();
    tests.iter().filter(|test| !judged.contains(test.as_str())).cloned().collect()
}

fn judged(event: Event<'_>) -> Option<&str> {
    if let Event::Verdict { name, .. } = event { Some(name) } else { None }
}

/// True if the log has a failed test.
pub(super) fn has_failure(log: &str) -> bool {
    let failed = |event| matches!(event, Event::Verdict { verdict: Verdict::Failed, .. });
    log.lines().filter_map(Event::parse).any(failed)
}

/// True if the log has a test that ended without a verdict of the runner's.
pub(super) fn has_failure_without_verdict(log: &str) -> bool {
    let reason = format!(" ... {FAILED} ({NO_VERDICT}");
    log.lines().any(|line| line.starts_with("test ") && line.contains(&reason))
}

/// Results of all guest tests.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Tally {
    pub passed: usize,
    pub skipped: usize,
    /// Names of the tests that have failed, and of those without a verdict.
    pub failed: Vec<String>,
    /// Number of tests that have no verdict at all, because their lane itself ended early.
    pub unjudged: usize,
    pub reruns: usize,
    pub suspects: Vec<String>,
    pub host_deaths: usize,
    /// Seconds and names of the tests that report a time, the longest first.
    pub times: Vec<(f64, String)>,
}

impl Tally {
    /// Counts what the logs of all lanes have about `tests`.
    pub(super) fn of(log: &str, tests: &[String]) -> Self {
        let mut tally = Self::default();
        log.lines().filter_map(Event::parse).for_each(|event| tally.add(event));
        let unjudged = without_verdict(log, tests);
        tally.unjudged = unjudged.len();
        tally.failed.extend(unjudged);
        tally.times.sort_by(|one, other| other.0.total_cmp(&one.0));
        tally
    }

    fn add(&mut self, event: Event<'_>) {
        match event {
            Event::Verdict { name, verdict, seconds } => {
                match verdict {
                    Verdict::Passed => self.passed += 1,
                    Verdict::Skipped => self.skipped += 1,
                    Verdict::Failed => self.failed.push(name.to_owned()),
                }
                self.times.extend(seconds.map(|seconds| (seconds, name.to_owned())));
            }
            Event::Rerun { name, is_suspect } => {
                self.reruns += 1;
                self.suspects.extend(is_suspect.then(|| name.to_owned()));
            }
            Event::HostDeath => self.host_deaths += 1,
            Event::RunnerEnd => {}
        }
    }
}

/// Blocks of a log that belong to failed and suspect tests: the line with the result, and the last
/// lines of the output below it.
pub(super) fn failure_blocks(log: &str) -> Vec<String> {
    let lines: Vec<_> = log.lines().collect();
    let block = |(index, line): (usize, &&str)| {
        let output = &lines[index + 1..];
        let len = match Event::parse(line)? {
            // The runner marks each line of the output.
            Event::Verdict { verdict: Verdict::Failed, .. } => {
                output.iter().take_while(|line| line.starts_with(OUTPUT_PREFIX.trim_end())).count()
            }
            Event::Rerun { is_suspect: true, .. } => {
                output.iter().take_while(|line| Event::parse(line).is_none()).count()
            }
            _ => return None,
        };
        Some(format_block(line, &output[..len]))
    };
    lines.iter().enumerate().filter_map(block).collect()
}

fn format_block(line: &str, output: &[&str]) -> String {
    let omitted = output.len().saturating_sub(LAST_LINES);
    let mut block = format!("{line}\n");
    if omitted > 0 {
        block.push_str(&format!("{OUTPUT_PREFIX}({omitted} lines before these are in the log)\n"));
    }
    for line in &output[omitted..] {
        let text = line.strip_prefix(OUTPUT_PREFIX).unwrap_or(line);
        block.push_str(&format!("{OUTPUT_PREFIX}{text}\n"));
    }
    block
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Log of a lane whose host died in a test. Real lines, with a shorter output.
    pub(crate) const LOG: &str = "\
host: booting the emulated KVM host (1 CPUs, 6144 MiB): no hardware virtualization here
test boot::debian_6_1_boots_from_its_bzimage ... ok (8.5 s)
rerun cpus::vcpus_come_run_and_go: the emulation broke a guest's kernel (vm0.console.log)
test cpus::vcpus_come_run_and_go ... ok (18.9 s)
rerun boot::a_reset_reboots: suspect, it failed without a mark of the emulation
Waited 30 s in vain until the guest serves commands

--- the end of vm0.vmm.log:
WARN no driver
test boot::a_reset_reboots ... ok (41.0 s)
test firmware::a_users_firmware_boots_debian_from_a_disk ... skipped: FORESHORE_TEST_FIRMWARE names no firmware
test balloon::free
THE EMULATION BROKE the host in balloon::free: 2 tests have no verdict yet
host: booting the emulated KVM host (1 CPUs, 6144 MiB): no hardware virtualization here
test balloon::free ... FAILED (3.0 s)
  | Not two CPUs
  |\u{20}
  | --- the end of vm0.console.log:
  | [    1.2] login

test hotplug::a_disk_comes ... ok (100.1 s)
guest tests: 3 passed, 1 failed, 1 skipped
";

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn lines_of_the_runner_are_recognized() {
        let verdict = |name, verdict, seconds| Some(Event::Verdict { name, verdict, seconds });
        for (line, event) in [
            ("test boot::boots ... ok (8.5 s)", verdict("boot::boots", Verdict::Passed, Some(8.5))),
            (
                "test boot::boots ... skipped: no (2 s) disk",
                verdict("boot::boots", Verdict::Skipped, None),
            ),
            (
                "test boot::boots ... FAILED (0.1 s)",
                verdict("boot::boots", Verdict::Failed, Some(0.1)),
            ),
            (
                "test a ... FAILED (no verdict: signal: 9 (SIGKILL))",
                verdict("a", Verdict::Failed, None),
            ),
            ("rerun a: suspect, it failed", Some(Event::Rerun { name: "a", is_suspect: true })),
            ("rerun a: the emulation broke a", Some(Event::Rerun { name: "a", is_suspect: false })),
            ("guest tests: 3 passed, 0 failed, 0 skipped", Some(Event::RunnerEnd)),
            ("  | test boot::boots ... ok (8.5 s)", None),
            ("test result: ok. 3 passed ... ok", None),
            ("rerun of a test: no", None),
        ] {
            assert_eq!(Event::parse(line), event, "{line}");
        }
    }

    #[test]
    fn verdict_that_the_end_of_a_host_cuts_off_is_one_only_of_a_failure() {
        for (line, verdict) in
            [("F", Some(Verdict::Failed)), ("o", None), ("", None), ("skip", None)]
        {
            assert_eq!(Verdict::parse(line), verdict, "{line:?}");
        }
        let tests = names(&["a", "b", "c"]);
        let log = "test a ... FAIL\nTHE EMULATION BROKE the host in b: 2 tests have no verdict yet\ntest b ... o";
        assert_eq!(without_verdict(log, &tests), ["b", "c"]);
        // The whole name must match.
        assert_eq!(without_verdict("test ab ... ok (1.0 s)", &tests), tests);
    }

    #[test]
    fn results_are_counted() {
        let tests = names(&["hotplug::a_disk_comes", "late::one", "balloon::free"]);
        let tally = Tally::of(LOG, &tests);
        assert_eq!((tally.passed, tally.skipped, tally.unjudged), (4, 1, 1));
        assert_eq!(tally.failed, ["balloon::free", "late::one"]);
        assert_eq!((tally.reruns, tally.host_deaths), (2, 1));
        assert_eq!(tally.suspects, ["boot::a_reset_reboots"]);
        let times: Vec<_> = tally.times.iter().map(|(seconds, _)| *seconds).collect();
        assert_eq!(times, [100.1, 41.0, 18.9, 8.5, 3.0]);
    }

    #[test]
    fn tests_without_verdict_are_counted_beside_failures() {
        assert!(has_failure(LOG) && !has_failure_without_verdict(LOG));
        let line = failure("boot::boots", &format!("{NO_VERDICT}: the host failed"));
        assert_eq!(line, "test boot::boots ... FAILED (no verdict: the host failed)");
        assert!(has_failure(&line) && has_failure_without_verdict(&line));
        assert!(!has_failure("  | test boot::boots ... FAILED (no verdict: no)\n"));
    }

    #[test]
    fn output_of_failed_and_suspect_tests_is_repeated() {
        let suspect = "\
rerun boot::a_reset_reboots: suspect, it failed without a mark of the emulation
  | Waited 30 s in vain until the guest serves commands
  |\u{20}
  | --- the end of vm0.vmm.log:
  | WARN no driver
";
        let failed = "\
test balloon::free ... FAILED (3.0 s)
  | Not two CPUs
  |\u{20}
  | --- the end of vm0.console.log:
  | [    1.2] login
";
        assert_eq!(failure_blocks(LOG), [suspect, failed]);
    }

    #[test]
    fn last_lines_of_a_long_output_remain() {
        let output: String =
            (1..=LAST_LINES + 3).map(|line| format!("  | line {line}\n")).collect();
        let blocks = failure_blocks(&format!(
            "test a ... FAILED (1.0 s)\n{output}\ntest b ... ok (1.0 s)\n"
        ));
        let lines: Vec<_> = blocks[0].lines().collect();
        assert_eq!((blocks.len(), lines.len()), (1, LAST_LINES + 2));
        assert_eq!(lines[1..3], ["  | (3 lines before these are in the log)", "  | line 4"]);
        assert_eq!(lines.last(), Some(&"  | line 43"));
    }
}
