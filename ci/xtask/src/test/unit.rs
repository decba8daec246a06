//! Runs the unit tests, and parses the results that `cargo test` prints.

use std::fs::File;
use std::io::Write;

use anyhow::{Context, Result};

use super::report::Report;
use crate::cargo;
use crate::checkout::{Checkout, create_folder};
use crate::jobs;
use crate::messages::{Lines, attempt, report, write_output};
use crate::root::IS_JOB;

/// All packages in one build. The API clients request more features of hyper than the VMM ships
/// with (Cargo.toml), so these tests run with them. Guest tests run programs without them.
const PACKAGES: &str = "--workspace";
/// Minimum number of images that the media simulator must have opened. Images are distinct within
/// one operation or crash point (docs/design/testing.md).
const MIN_CRASH_IMAGES: u64 = 300_000;

pub(super) fn run(checkout: &Checkout, report: &mut Report) -> Result<()> {
    report!("unit tests");
    create_folder(&checkout.ci(""))?;
    let path = checkout.ci("unit-tests.log");
    let file = File::create(&path).with_context(|| format!("Cannot create {}", path.display()))?;
    let mut log = Log { file, results: Results::default() };
    report.begin_step("build of the unit tests");
    // Separate from the test run, so that progress and the cause of a failure are clear.
    let build = ["test", PACKAGES, "--no-run"];
    let is_built = attempt(|| Ok(cargo::run(cargo::command(checkout, build))?.success()));
    if is_built != Some(true) {
        report!("build of the unit tests: FAILED");
        report.add_failure("build of the unit tests");
        return Ok(());
    }
    report.begin_step("unit tests");
    let has_passed = attempt(|| log.run_tests(checkout)).unwrap_or(false);
    add_results(report, &log.results, has_passed);
    Ok(())
}

fn add_results(report: &mut Report, results: &Results, has_passed: bool) {
    if !results.skipped.is_empty() {
        report!("unit tests that were skipped, whole or in part:");
        results.skipped.iter().for_each(|skipped| eprintln!("  {skipped}"));
    }
    report.passed += results.passed.saturating_sub(results.skipped.len());
    report.skipped += results.ignored + results.skipped.len();
    report.crash_images = results.crash_images;
    if results.crash_images < MIN_CRASH_IMAGES {
        let opened = results.crash_images;
        let failure = format!(
            "crash images (pools and BTTs): only {opened} of at least {MIN_CRASH_IMAGES} were opened"
        );
        report!("{failure}, FAILED");
        report.add_failure(&failure);
    }
    // A test program that aborts, or a documentation test that does not compile, prints no result
    // line.
    let failed = if has_passed { results.failed } else { results.failed.max(1) };
    report.add_failures(failed, results.failures.clone());
    if failed > results.failures.len() {
        report.add_failures(0, ["unit tests (target/ci/unit-tests.log)".to_owned()]);
    }
}

struct Log {
    file: File,
    results: Results,
}

impl Log {
    /// Runs the tests. Returns true if all have passed.
    fn run_tests(&mut self, checkout: &Checkout) -> Result<bool> {
        let mut cargo = cargo::command(checkout, ["test", PACKAGES]);
        cargo.args(["--no-fail-fast", "--quiet", "--", "--show-output"]);
        // Tests must create file systems with the same options as outside this task.
        cargo.env_remove("MKE2FS_CONFIG").env(IS_JOB, "yes");
        self.results.section = "";
        let mut lines = Lines::default();
        let mut show = |lines: Vec<Vec<u8>>| {
            for line in lines {
                if self.results.add(String::from_utf8_lossy(&line).trim_end_matches('\n')) {
                    write_output(&line);
                }
            }
        };
        let status = jobs::stream(&mut cargo, |bytes| {
            self.file.write_all(bytes)?;
            show(lines.feed(bytes));
            Ok(())
        })?;
        show(lines.finish());
        Ok(status.success())
    }
}

const SUCCESSES: &str = "successes:";
const FAILURES: &str = "failures:";
const RESULT: &str = "test result:";
/// Lines that begin a section in a test program's output.
const SECTIONS: [&str; 3] = [SUCCESSES, FAILURES, RESULT];

/// Results of all test programs, parsed line by line.
#[derive(Debug, Default)]
struct Results {
    passed: usize,
    failed: usize,
    ignored: usize,
    failures: Vec<String>,
    /// `NAME: REASON` of each test that passed but skipped itself or a part.
    skipped: Vec<String>,
    crash_images: u64,
    /// Current section of the output.
    section: &'static str,
    /// Test that printed the current lines.
    test: Option<String>,
}

impl Results {
    /// Adds a line. Returns false if the line should not be shown: it reports progress, or is
    /// output of a test that passed.
    fn add(&mut self, line: &str) -> bool {
        let section = if line.starts_with(RESULT) { RESULT } else { line };
        if let Some(section) = SECTIONS.into_iter().find(|known| *known == section) {
            (self.section, self.test) = (section, None);
        }
        if let Some(counts) = line.strip_prefix(RESULT) {
            self.add_counts(counts);
        } else if let Some(count) = line.strip_prefix("crash images opened: ") {
            self.crash_images += count.trim().parse::<u64>().unwrap_or(0);
        } else if let Some(test) = line.strip_prefix("---- ") {
            self.test = test.strip_suffix(" stdout ----").map(str::to_owned);
        } else if self.section == SUCCESSES
            && let Some(reason) = line.strip_prefix("skipped: ")
        {
            // Only the first reason of each test is reported.
            self.skipped.extend(self.test.take().map(|test| format!("{test}: {reason}")));
        } else if self.section == FAILURES
            && self.test.is_none()
            && let Some(test) = line.strip_prefix("    ")
        {
            // The list of failures follows the output of the tests under its own heading.
            self.failures.push(test.to_owned());
        }
        let is_start =
            line.starts_with("running ") && line.trim_end_matches('s').ends_with(" test");
        let is_progress = line.bytes().all(|byte| byte == b'.');
        self.section != SUCCESSES && !is_start && !is_progress
    }

    /// Adds the counts in ` ok. 5 passed; 0 failed; 1 ignored; ...`.
    fn add_counts(&mut self, counts: &str) {
        let words: Vec<_> = counts.split_whitespace().collect();
        for pair in words.windows(2) {
            let count = pair[0].parse().unwrap_or(0);
            match pair[1] {
                "passed;" => self.passed += count,
                "failed;" => self.failed += count,
                "ignored;" => self.ignored += count,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "
running 1320 tests
....................................................................................... 1218/1320
F..............
successes:

---- acpi::tests::tables_can_be_dumped stdout ----
skipped: FORESHORE_ACPI_DUMP names no directory
skipped: and one more

---- crash_each stdout ----
crash images opened: 675807

---- runner::tests::a_test_says_what_it_is stdout ----
    an indented line

successes:
    acpi::tests::tables_can_be_dumped

failures:

---- boot::kernel::tests::kernels_load stdout ----
skipped: this one has failed
    an indented line

failures:
    boot::kernel::tests::kernels_load
    vmm/src/lib.rs - Machine (line 12)

test result: FAILED. 1318 passed; 2 failed; 1 ignored; 0 measured; 0 filtered out; finished in 3.55s

skipped: no test
running 1 test
.
test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
error: test failed, to rerun pass `-p foreshore --lib`
";

    /// Returns the results, and the lines of the log that are shown.
    fn read() -> (Results, Vec<&'static str>) {
        let mut results = Results::default();
        let shown = LOG.lines().filter(|line| results.add(line)).collect();
        (results, shown)
    }

    #[test]
    fn results_are_read() {
        let (results, _) = read();
        assert_eq!((results.passed, results.failed, results.ignored), (1319, 2, 1));
        assert_eq!(
            results.skipped,
            ["acpi::tests::tables_can_be_dumped: FORESHORE_ACPI_DUMP names no directory"]
        );
        assert_eq!(
            results.failures,
            ["boot::kernel::tests::kernels_load", "vmm/src/lib.rs - Machine (line 12)"]
        );
        assert_eq!(results.crash_images, 675_807);
    }

    #[test]
    fn output_of_tests_that_passed_is_hidden() {
        let (before, rest) = LOG.split_once("successes:\n").unwrap();
        let (_, failures) = rest.split_once("\nfailures:\n").unwrap();
        let is_shown =
            |line: &&str| !line.is_empty() && !line.starts_with("running ") && *line != ".";
        let expected = before.lines().chain(["failures:"]).chain(failures.lines());
        assert_eq!(read().1, expected.filter(is_shown).collect::<Vec<_>>());
    }

    fn report(results: &Results, has_passed: bool) -> String {
        let mut report = Report::new();
        add_results(&mut report, results, has_passed);
        report.last_line()
    }

    #[test]
    fn skipped_tests_do_not_count_as_passed() {
        assert_eq!(report(&read().0, false), "1318 passed, 2 failed, 2 skipped");
    }

    #[test]
    fn too_few_crash_images_and_an_abort_without_result_are_failures() {
        let results = |crash_images| Results { passed: 5, crash_images, ..Results::default() };
        assert_eq!(report(&results(MIN_CRASH_IMAGES), true), "5 passed, 0 failed");
        assert_eq!(report(&results(MIN_CRASH_IMAGES - 1), true), "5 passed, 1 failed");
        assert_eq!(report(&results(MIN_CRASH_IMAGES), false), "5 passed, 1 failed");
    }
}
