//! Results of a run, and the report printed at its end.

use std::time::Instant;

use super::verdicts::{Boots, Events, Kind};
use crate::messages::{report, write_errors, write_output};

/// Maximum number of suspects in a run. A suspect is a test that failed without signs of an
/// emulation bug, and then passed in one more run.
const MAX_SUSPECTS: usize = 2;
/// Number of slowest guest tests to list.
const LONGEST_TESTS: usize = 20;

pub(super) struct Report {
    started: Instant,
    /// Name of each step, and seconds from the start of the run to the start of the step.
    steps: Vec<(String, u64)>,
    pub passed: usize,
    failed: usize,
    pub skipped: usize,
    /// Names of failed tests, checks and conditions.
    failures: Vec<String>,
    pub crash_images: u64,
    guests: Option<Guests>,
}

pub(super) struct Guests {
    pub events: Events,
    /// Folder with the logs, relative to the checkout.
    pub folder: String,
}

impl Report {
    pub(super) fn new() -> Self {
        Self {
            started: Instant::now(),
            steps: Vec::new(),
            passed: 0,
            failed: 0,
            skipped: 0,
            failures: Vec::new(),
            crash_images: 0,
            guests: None,
        }
    }

    /// Begins a step, which ends the previous one.
    pub(super) fn begin_step(&mut self, name: &str) {
        self.steps.push((name.to_owned(), self.started.elapsed().as_secs()));
    }

    pub(super) fn add_failure(&mut self, name: &str) {
        self.add_failures(1, [name.to_owned()]);
    }

    /// Adds `count` failures. There may be fewer names than failures.
    pub(super) fn add_failures(&mut self, count: usize, names: impl IntoIterator<Item = String>) {
        self.failed += count;
        self.failures.extend(names);
    }

    pub(super) fn add_guests(&mut self, guests: Guests, tests: &[String]) {
        let events = &guests.events;
        self.passed += events.names(Kind::Passed).len();
        self.skipped += events.names(Kind::Skipped).len();
        let failed = events.names(Kind::Failed);
        self.add_failures(failed.len(), failed.into_iter().map(str::to_owned));
        let unjudged = events.without_verdict(tests);
        if !unjudged.is_empty() {
            let (with_verdict, count) = (tests.len() - unjudged.len(), tests.len());
            report!("guest tests: {with_verdict} verdicts of {count} tests");
            self.add_failures(unjudged.len(), unjudged);
        }
        let suspects = events.names(Kind::Suspect).len();
        if suspects > MAX_SUSPECTS {
            let failure =
                format!("guest tests: {suspects} suspects, at most {MAX_SUSPECTS} are allowed");
            report!("{failure}, FAILED");
            self.add_failure(&failure);
        }
        self.guests = Some(guests);
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed > 0
    }

    /// Prints the report. Its last line goes to standard output, and all others go to standard
    /// error.
    pub(super) fn print(&self) {
        if let Some(guests) = &self.guests {
            guests.notes().iter().for_each(|note| report!("{note}"));
        }
        report!("time of each step:");
        let mut text = format_steps(&self.steps, self.started.elapsed().as_secs());
        if let Some(guests) = &self.guests {
            text.push_str(&guests.times());
        }
        write_errors(text.as_bytes());
        if self.crash_images > 0 {
            report!("crash images (pools and BTTs) verified by the oracle: {}", self.crash_images);
        }
        let blocks = self.guests.as_ref().map(|guests| (guests.events.blocks(), &guests.folder));
        if let Some((blocks, folder)) = blocks.filter(|(blocks, _)| !blocks.is_empty()) {
            report!("output of failed and suspect guest tests (all of it: {folder}/host-*/log):");
            write_errors(blocks.as_bytes());
        }
        if !self.failures.is_empty() {
            report!("FAILED:");
            self.failures.iter().for_each(|name| write_errors(format!("  {name}\n").as_bytes()));
        }
        write_output(format!("{}\n", self.last_line()).as_bytes());
    }

    pub(super) fn last_line(&self) -> String {
        let line = format!("{} passed, {} failed", self.passed, self.failed);
        if self.skipped > 0 { format!("{line}, {} skipped", self.skipped) } else { line }
    }
}

fn format_steps(steps: &[(String, u64)], seconds: u64) -> String {
    let ends = steps.iter().skip(1).map(|(_, start)| *start).chain([seconds]);
    let lines = steps
        .iter()
        .zip(ends)
        .map(|((name, start), end)| format!("  {:5} s  {name}\n", end - start));
    lines.chain([format!("  {seconds:5} s  in all\n")]).collect()
}

impl Guests {
    /// Returns notes about reruns, suspects and dead hosts.
    fn notes(&self) -> Vec<String> {
        let (events, folder) = (&self.events, &self.folder);
        let suspects = events.names(Kind::Suspect);
        let reruns = events.names(Kind::Rerun).len() + suspects.len();
        let deaths = events.names(Kind::HostDeath).len();
        let mut notes = Vec::new();
        if reruns > 0 {
            notes.push(format!(
                "tests run again because the emulation broke a guest's kernel, or because they failed once \
                 (docs/design/testing.md): {reruns}"
            ));
        }
        if !suspects.is_empty() {
            let suspects = suspects.join(" ");
            notes.push(format!(
                "suspects, which failed once without a mark of the emulation (logs: {folder}): {suspects}"
            ));
        }
        if deaths > 0 {
            notes.push(format!(
                "emulated hosts that the emulation broke (docs/design/testing.md): {deaths}\n  (their logs: \
                 {folder}/host-*/host-*-*.log)"
            ));
        }
        notes
    }

    /// Returns the lines of the table about guest tests: the total times of boots and tests, and
    /// the times of the slowest tests. Boots of guests are a part of the tests.
    fn times(&self) -> String {
        let times = self.events.times();
        let tests = Boots { count: times.len(), seconds: times.iter().map(|(time, _)| time).sum() };
        let line = |name: &str, Boots { count, seconds }: Boots| {
            format!("  {:5} s  {name}: {count}", seconds.floor())
        };
        let longest = times.iter().take(LONGEST_TESTS);
        let longest: String =
            longest.map(|(seconds, name)| format!("  {seconds:7.1} s  {name}\n")).collect();
        format!(
            "guest tests, all hosts together:\n{}\n{}\n{}, the longest:\n{longest}",
            line("boots of hosts", self.events.host_boots),
            line("boots of guests", self.events.guest_boots()),
            line("tests with their guests", tests)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::verdicts::tests::{events, events_of_log};
    use super::*;

    fn guests(events: Events) -> Guests {
        Guests { events, folder: "target/ci/guest-tests".to_owned() }
    }

    #[test]
    fn steps_add_up_to_the_whole_time() {
        let steps = [("set-up".to_owned(), 0), ("lints (cargo clippy)".to_owned(), 7)];
        let expected = "      7 s  set-up\n   1193 s  lints (cargo clippy)\n   1200 s  in all\n";
        assert_eq!(format_steps(&steps, 1200), expected);
    }

    #[test]
    fn too_many_suspects_fail_the_run() {
        let log = |count: usize| {
            let rerun = |number| {
                format!("rerun a::{number}: suspect, it failed\ntest a::{number} ... ok (1.0 s)\n")
            };
            (0..count).map(rerun).collect::<String>()
        };
        for (count, failed) in [(MAX_SUSPECTS, 0), (MAX_SUSPECTS + 1, 1)] {
            let mut report = Report::new();
            report.add_guests(guests(events(&log(count))), &[]);
            assert_eq!(report.last_line(), format!("{count} passed, {failed} failed"));
        }
    }

    #[test]
    fn tests_without_a_verdict_have_failed() {
        let mut report = Report::new();
        report.add_guests(guests(events_of_log()), &["late::one".to_owned()]);
        assert_eq!(report.last_line(), "4 passed, 2 failed, 1 skipped");
        assert_eq!(report.failures, ["balloon::free", "late::one"]);
    }

    #[test]
    fn remarks_name_reruns_suspects_and_dead_hosts() {
        let guests = guests(events_of_log());
        let notes = guests.notes();
        assert!(notes[0].ends_with("(docs/design/testing.md): 2"), "{notes:?}");
        assert!(
            notes[1].ends_with("(logs: target/ci/guest-tests): boot::a_reset_reboots"),
            "{notes:?}"
        );
        assert!(notes[2].contains("(docs/design/testing.md): 1\n"), "{notes:?}");
    }

    #[test]
    fn table_has_boots_and_the_longest_tests() {
        let mut guests = guests(events_of_log());
        guests.events.host_boots = Boots { count: 12, seconds: 47.9 };
        let expected = "\
guest tests, all hosts together:
     47 s  boots of hosts: 12
      7 s  boots of guests: 3
    171 s  tests with their guests: 5, the longest:
    100.1 s  hotplug::a_disk_comes
     41.0 s  boot::a_reset_reboots
     18.9 s  cpus::vcpus_come_run_and_go
      8.5 s  boot::debian_6_1_boots_from_its_bzimage
      3.0 s  balloon::free
";
        assert_eq!(guests.times(), expected);
    }
}
