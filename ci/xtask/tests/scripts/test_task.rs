//! `ci/test` with stubs of cargo and of the program with the guest tests, which run on this machine
//! itself.

use std::fs;
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};

use super::tree::Tree;

/// Lists three tests, but aborts if `$CODE` is 134. A run of them prints `$VERDICTS`, and ends with
/// `$CODE`.
const GUEST_TESTS: &str = r#"#!/bin/sh
if [ "$1" = --list ]; then
    case $* in *NOSUCH*) echo "no test matches" >&2; exit 2 ;; esac
    [ "$CODE" != 134 ] || exit 134
    printf 'a::one\na::two\na::three\n'
    exit
fi
echo "$@" >"$OUT/arguments"
printf "$VERDICTS"
exit "$CODE"
"#;
/// Output of unit tests. One of them skips itself.
const UNIT_TESTS: &str = r"case $* in
    *--no-run*) ;;
    test*)
        echo 'successes:'
        echo '---- hidden stdout ----'
        echo 'skipped: no disk'
        echo 'crash images opened: 150000'
        echo 'test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured' ;;
esac";
const VERDICTS: &str = "test a::one ... ok (1.0 s)\ntest a::two ... FAILED (2.0 s)\n  | the reason\n\n\
                        test a::three ... skipped: no disk\n";

/// Layers without a module, and their drawing.
const ARCHITECTURE: &str = "| Layer | Modules |\n|---|---|\n| Base | |\n\n```mermaid\n\
                            flowchart TD\n    L0[\"<b>Base</b><br>\"]\n```\n";
/// Code with the version of cargo-deny.
const CHECKS: &str = include_str!("../../src/test/checks.rs");

/// A cargo-deny that has nothing against any dependency.
fn cargo_deny() -> String {
    let version = CHECKS.lines().find_map(|line| line.strip_prefix("const CARGO_DENY: &str = "));
    let version = version.unwrap().trim_matches([';', '"']);
    format!("#!/bin/sh\n[ \"$1\" != --version ] || echo cargo-deny {version}\n")
}

struct Fakes(Tree);

impl Fakes {
    fn new(tree: Tree) -> Result<Self> {
        tree.add_program("guest-tests", GUEST_TESTS)?;
        tree.write("docs/architecture.md", ARCHITECTURE, 0o644)?;
        tree.write("target/ci/tools/bin/cargo-deny", cargo_deny(), 0o755)?;
        tree.write(".gitignore", "/target\n/bin\n", 0o644)?;
        let status = Command::new("git").args(["init", "--quiet"]).arg(tree.folder()).status()?;
        ensure!(status.success(), "git init: {status}");
        Ok(Self(tree))
    }

    /// Runs `ci/test`. The guest tests print `verdicts` and end with `code`.
    fn run(&self, arguments: &[&str], verdicts: &str, code: u8) -> Result<Output> {
        let mut command = self.0.command("ci/test")?;
        command.args(arguments).env("VERDICTS", verdicts).env("CODE", code.to_string());
        command.output().context("ci/test does not run")
    }

    fn read(&self, path: &str) -> Result<String> {
        let path = self.0.path(path);
        fs::read_to_string(&path).with_context(|| format!("no {}", path.display()))
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn fakes(cargo: &str) -> Option<Fakes> {
    Tree::with_tools(cargo).map(|tree| Fakes::new(tree).unwrap())
}

#[test]
fn bad_command_lines_of_a_test_run_are_refused_before_any_work() {
    let Some(fakes) = fakes(":") else { return };
    for arguments in [&["a::"][..], &["--exact"], &["--quick"], &["--guest", ""]] {
        let output = fakes.run(arguments, "", 0).unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", text(&output.stderr));
        assert!(!fakes.0.path("target/ci/setup.lock").exists(), "{arguments:?}");
    }
    let output = fakes.run(&["-h"], "", 0).unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stdout).contains("--guest"));
}

#[test]
fn filter_without_a_match_boots_no_host() {
    let Some(fakes) = fakes(":") else { return };
    let output = fakes.run(&["--guest", "a::", "NOSUCH"], "", 0).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("no test matches"));
    assert!(!fakes.0.path("target/ci/guest-tests").exists());
}

#[test]
fn failed_guest_test_is_shown_again_at_the_end() {
    let Some(fakes) = fakes(":") else { return };
    let output =
        fakes.run(&["--guest", "--exact", "a::one", "a::two", "a::three"], VERDICTS, 1).unwrap();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{stdout}{stderr}");
    assert!(stdout.contains("1| test a::one ... ok (1.0 s)\n"), "{stdout}");
    assert!(stdout.ends_with("\n1 passed, 1 failed, 1 skipped\n"), "{stdout}");
    let end = "test a::two ... FAILED (2.0 s)\n  | the reason\ntest: FAILED:\n  a::two\n";
    assert!(stderr.ends_with(end), "{stderr}");
    assert!(stderr.contains("test: time of each step:\n"), "{stderr}");
    let arguments = fakes.read("target/ci/guest-tests/host-1/arguments").unwrap();
    assert!(
        arguments.starts_with("--within ")
            && arguments.ends_with(" --exact a::one a::two a::three\n")
    );
    let log = fakes.read("target/ci/guest-tests/host-1/log").unwrap();
    assert!(log.ends_with(VERDICTS), "{log}");
}

#[test]
fn all_parts_of_a_run_are_counted() {
    let Some(fakes) = fakes(UNIT_TESTS) else { return };
    let verdicts = VERDICTS.replace("FAILED", "ok");
    let output = fakes.run(&["--long"], &verdicts, 0).unwrap();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    // Unit tests run twice, for two sets of packages. Power cuts are skipped.
    assert!(stdout.ends_with("\n6 passed, 0 failed, 6 skipped\n"), "{stdout}{stderr}");
    assert_eq!(output.status.code(), Some(0));
    assert!(!stdout.contains("hidden"), "{stdout}");
    assert!(stderr.contains("  hidden: no disk\n"), "{stderr}");
    for step in ["lints (cargo clippy)", "unit tests (--package=client-tests)", "guest images"] {
        assert!(stderr.contains(&format!(" s  {step}\n")), "{step}: {stderr}");
    }
    assert!(fakes.read("target/ci/unit-tests.log").unwrap().contains("hidden"));
}

#[test]
fn check_that_fails_does_not_end_the_run() {
    let clippy = "[ \"$1\" != clippy ] || { echo \"quiet: $CARGO_TERM_QUIET, bars: $CARGO_TERM_PROGRESS_WHEN\" >&2; exit 1; }";
    let cargo = format!("{clippy}\n{}", UNIT_TESTS.replace("150000", "149999"));
    let Some(fakes) = fakes(&cargo) else { return };
    // Without this document, the check of the layers cannot run.
    fs::remove_file(fakes.0.path("docs/architecture.md")).unwrap();
    let output = fakes.run(&[], VERDICTS, 1).unwrap();
    let stderr = text(&output.stderr);
    assert!(
        text(&output.stdout).ends_with("\n5 passed, 4 failed, 6 skipped\n"),
        "{}",
        text(&output.stdout)
    );
    assert!(
        stderr.contains("quiet: true, bars: never\ntest: lints (cargo clippy): FAILED\n"),
        "{stderr}"
    );
    let failed = "test: FAILED:\n  lints (cargo clippy)\n  files, lines and layers (cargo xtask tidy)\n  crash images (pools and BTTs): only 299998 were opened";
    assert!(stderr.contains(failed), "{stderr}");
}

#[test]
fn guest_tests_that_cannot_be_listed_leave_the_results_of_unit_tests() {
    let Some(fakes) = fakes(UNIT_TESTS) else { return };
    let output = fakes.run(&[], "", 134).unwrap();
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(
        text(&output.stdout).ends_with("\n4 passed, 1 failed, 5 skipped\n"),
        "{}",
        text(&output.stdout)
    );
    assert!(stderr.contains("guest-tests failed: exit status: 134\n"), "{stderr}");
    assert!(stderr.ends_with("test: FAILED:\n  guest tests\n"), "{stderr}");
    let output = fakes.run(&["--guest", "a::"], "", 134).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).ends_with("0 passed, 1 failed\n"), "{}", text(&output.stdout));
}
