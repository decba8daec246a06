//! Parses verdicts and reruns of guest tests from a lane's output.

use std::collections::HashSet;
use std::ops::AddAssign;

/// Number of lines of a test's output that the report repeats.
const LAST_LINES: usize = 40;
/// Prefix of output lines of a failed or suspect test.
const OUTPUT_PREFIX: &str = "  |";
/// Prefix of the line about a dead host.
pub(super) const HOST_DEATH: &str = "THE EMULATION BROKE";
/// Prefix of the reason for a failure without a verdict from the runner.
pub(super) const NO_VERDICT: &str = "no verdict";
/// Name of a failure in a run whose tests have all passed.
pub(super) const THE_HOST: &str = "the-host";
const FAILED: &str = "FAILED";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Passed,
    Failed,
    Skipped,
    /// The test runs again because the emulation broke a guest kernel.
    Rerun,
    /// The test runs again although its log shows no sign of an emulation bug.
    Suspect,
    HostDeath,
}

impl Kind {
    /// Parses the result of a test. An incomplete `FAILED` counts as a failure, because a host may
    /// die in the middle of a line.
    fn of_result(result: &str) -> Option<Self> {
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

/// Line that is not output of a test.
struct Event {
    kind: Kind,
    /// Name of the test. Empty for a dead host.
    name: String,
    line: String,
    /// Following lines of the test's output.
    output: Vec<String>,
}

impl Event {
    /// Parses `test NAME ... VERDICT`, `rerun NAME: REASON` or a line about a dead host.
    fn parse(line: &str) -> Option<Self> {
        let (kind, name) = if line.starts_with(HOST_DEATH) {
            (Kind::HostDeath, "")
        } else if let Some(rest) = line.strip_prefix("rerun ") {
            let (name, reason) = rest.split_once(": ")?;
            let is_suspect = reason.starts_with("suspect, ");
            (if is_suspect { Kind::Suspect } else { Kind::Rerun }, name)
        } else {
            let (name, result) = line.strip_prefix("test ")?.split_once(" ... ")?;
            (Kind::of_result(result)?, name)
        };
        let event =
            || Self { kind, name: name.to_owned(), line: line.to_owned(), output: Vec::new() };
        let is_name = !name.is_empty() && !name.contains(' ');
        (is_name || kind == Kind::HostDeath).then(event)
    }

    fn is_verdict(&self) -> bool {
        matches!(self.kind, Kind::Passed | Kind::Failed | Kind::Skipped)
    }

    /// Returns the time of the test and the boots of its guests from the end of
    /// `ok (8.5 s; boots: 2, 6.1 s)`. The second part is missing if the test has no boots.
    fn times(&self) -> Option<(f64, Boots)> {
        let times = self.line.strip_suffix(" s)")?.rsplit('(').next()?;
        let Some((seconds, boots)) = times.split_once(" s; boots: ") else {
            return Some((times.parse().ok()?, Boots::default()));
        };
        let (count, boots_seconds) = boots.split_once(", ")?;
        let boots = Boots { count: count.parse().ok()?, seconds: boots_seconds.parse().ok()? };
        Some((seconds.parse().ok()?, boots))
    }

    /// Returns the line and the last lines of its output.
    fn block(&self) -> String {
        let omitted = self.output.len().saturating_sub(LAST_LINES);
        let mut block = format!("{}\n", self.line);
        if omitted > 0 {
            block += &format!("{OUTPUT_PREFIX} ({omitted} lines before these are in the log)\n");
        }
        block.extend(self.output[omitted..].iter().map(|line| format!("{line}\n")));
        block
    }
}

/// Returns a line about a failure that the runner has not reported.
pub(super) fn failure(name: &str, reason: &str) -> String {
    format!("test {name} ... {FAILED} ({reason})")
}

/// Number of boots, and their time in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Boots {
    pub count: usize,
    pub seconds: f64,
}

impl AddAssign for Boots {
    fn add_assign(&mut self, other: Self) {
        self.count += other.count;
        self.seconds += other.seconds;
    }
}

/// All events of one or more lanes.
#[derive(Default)]
pub(super) struct Events {
    all: Vec<Event>,
    pub host_boots: Boots,
    /// True while lines belong to the last event. Later lines may come from a dead host.
    is_in_output: bool,
}

impl Events {
    pub(super) fn add_line(&mut self, line: &str) {
        if let Some(event) = Event::parse(line) {
            self.all.push(event);
            self.is_in_output = true;
        } else {
            self.is_in_output &= line.starts_with(OUTPUT_PREFIX);
            if let Some(event) = self.all.last_mut().filter(|_| self.is_in_output) {
                event.output.push(line.to_owned());
            }
        }
    }

    pub(super) fn append(&mut self, mut other: Self) {
        self.all.append(&mut other.all);
        self.host_boots += other.host_boots;
    }

    /// Returns the names of tests with an event of this kind.
    pub(super) fn names(&self, kind: Kind) -> Vec<&str> {
        self.all.iter().filter(|event| event.kind == kind).map(|event| &event.name[..]).collect()
    }

    pub(super) fn without_verdict(&self, tests: &[String]) -> Vec<String> {
        let with_verdict =
            self.all.iter().filter(|event| event.is_verdict()).map(|event| &event.name);
        let with_verdict: HashSet<_> = with_verdict.collect();
        tests.iter().filter(|test| !with_verdict.contains(test)).cloned().collect()
    }

    /// Returns true if a test ended without a verdict from the runner.
    pub(super) fn has_failure_without_verdict(&self) -> bool {
        let reason = format!(" ... {FAILED} ({NO_VERDICT}");
        self.all.iter().any(|event| event.line.contains(&reason))
    }

    /// Returns times in seconds and names of the tests that report a time, slowest first.
    pub(super) fn times(&self) -> Vec<(f64, &str)> {
        let with_verdict = self.all.iter().filter(|event| event.is_verdict());
        let mut times: Vec<_> =
            with_verdict.filter_map(|event| Some((event.times()?.0, &event.name[..]))).collect();
        times.sort_by(|one, other| other.0.total_cmp(&one.0));
        times
    }

    /// Returns the boots of guests in the tests that report a time.
    pub(super) fn guest_boots(&self) -> Boots {
        let mut boots = Boots::default();
        let of_tests = self.all.iter().filter(|event| event.is_verdict()).filter_map(Event::times);
        of_tests.for_each(|(_, of_test)| boots += of_test);
        boots
    }

    /// Returns the lines of failed and suspect tests, each with the end of its output.
    pub(super) fn blocks(&self) -> String {
        let is_shown = |event: &&Event| matches!(event.kind, Kind::Failed | Kind::Suspect);
        self.all.iter().filter(is_shown).map(Event::block).collect()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Log of a lane whose host died during a test. The lines are real, with shortened output.
    const LOG: &str = "\
host: booting the emulated KVM host (1 CPUs, 6144 MiB): no hardware virtualization here
running 6 tests
test boot::debian_6_1_boots_from_its_bzimage ... ok (8.5 s; boots: 1, 4.5 s)
rerun cpus::vcpus_come_run_and_go: the emulation broke a guest's kernel (vm0.console.log)
test cpus::vcpus_come_run_and_go ... ok (18.9 s)
rerun boot::a_reset_reboots: suspect, it failed without a mark of the emulation
  | Timed out after 30.0 s of waiting until the guest serves commands
  |\u{20}
  | --- the end of vm0.vmm.log:

test boot::a_reset_reboots ... ok (41.0 s)
test firmware::a_users_firmware_boots_debian_from_a_disk ... skipped: FORESHORE_TEST_FIRMWARE names no firmware
test balloon::free
THE EMULATION BROKE the host in balloon::free: 2 tests have no verdict yet
host: booting the emulated KVM host (1 CPUs, 6144 MiB): no hardware virtualization here
test balloon::free ... FAILED (3.0 s; boots: 2, 2.5 s)
  | Not two CPUs
  | test balloon::free ... ok (8.5 s; boots: 3, 6.0 s)

host: the host's last lines:
  | [    9.1] Kernel panic
test hotplug::a_disk_comes ... ok (100.1 s)
test result: ok. 3 passed ... ok
guest tests: 3 passed, 1 failed, 1 skipped
";

    pub(crate) fn events(log: &str) -> Events {
        let mut events = Events::default();
        log.lines().for_each(|line| events.add_line(line));
        events
    }

    pub(crate) fn events_of_log() -> Events {
        events(LOG)
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn lines_of_the_runner_are_recognized() {
        let events = events(LOG);
        let passed = ["boot::debian_6_1_boots_from_its_bzimage", "cpus::vcpus_come_run_and_go"];
        let passed = [&passed[..], &["boot::a_reset_reboots", "hotplug::a_disk_comes"]].concat();
        assert_eq!(events.names(Kind::Passed), passed);
        assert_eq!(events.names(Kind::Failed), ["balloon::free"]);
        let skipped = events.names(Kind::Skipped);
        assert_eq!(skipped, ["firmware::a_users_firmware_boots_debian_from_a_disk"]);
        assert_eq!(events.names(Kind::Rerun), ["cpus::vcpus_come_run_and_go"]);
        assert_eq!(events.names(Kind::Suspect), ["boot::a_reset_reboots"]);
        assert_eq!(events.names(Kind::HostDeath).len(), 1);
        let times: Vec<_> = events.times().iter().map(|(seconds, _)| *seconds).collect();
        assert_eq!(times, [100.1, 41.0, 18.9, 8.5, 3.0]);
        assert_eq!(events.guest_boots(), Boots { count: 3, seconds: 7.0 });
        let tests = names(&["hotplug::a_disk_comes", "late::one", "balloon::free"]);
        assert_eq!(events.without_verdict(&tests), ["late::one"]);
        assert!(!events.has_failure_without_verdict());
    }

    #[test]
    fn verdict_that_the_end_of_a_host_cuts_off_is_one_only_of_a_failure() {
        for (line, kind) in [("F", Some(Kind::Failed)), ("o", None), ("", None), ("skip", None)] {
            assert_eq!(Kind::of_result(line), kind, "{line:?}");
        }
        // A filter must match the whole name.
        let tests = names(&["a", "b", "c"]);
        let log = "test a ... FAIL\nrerun b: suspect, no\ntest b ... o\ntest cc ... ok (1.0 s)\n";
        assert_eq!(events(log).without_verdict(&tests), ["b", "c"]);
    }

    #[test]
    fn failure_without_verdict_is_a_failure() {
        let line = failure("boot::boots", &format!("{NO_VERDICT}: signal: 9 (SIGKILL)"));
        assert_eq!(line, "test boot::boots ... FAILED (no verdict: signal: 9 (SIGKILL))");
        let events = events(&line);
        assert_eq!(events.names(Kind::Failed), ["boot::boots"]);
        assert!(events.has_failure_without_verdict() && events.times().is_empty());
    }

    #[test]
    fn output_of_failed_and_suspect_tests_is_repeated() {
        let expected = "\
rerun boot::a_reset_reboots: suspect, it failed without a mark of the emulation
  | Timed out after 30.0 s of waiting until the guest serves commands
  |\u{20}
  | --- the end of vm0.vmm.log:
test balloon::free ... FAILED (3.0 s; boots: 2, 2.5 s)
  | Not two CPUs
  | test balloon::free ... ok (8.5 s; boots: 3, 6.0 s)
";
        assert_eq!(events(LOG).blocks(), expected);
    }

    #[test]
    fn last_lines_of_a_long_output_remain() {
        let output: String =
            (1..=LAST_LINES + 3).map(|line| format!("  | line {line}\n")).collect();
        let blocks = events(&format!("test a ... FAILED (1.0 s)\n{output}\n")).blocks();
        let lines: Vec<_> = blocks.lines().collect();
        assert_eq!(lines.len(), LAST_LINES + 2);
        assert_eq!(lines[1..3], ["  | (3 lines before these are in the log)", "  | line 4"]);
        assert_eq!(lines.last(), Some(&"  | line 43"));
    }
}
