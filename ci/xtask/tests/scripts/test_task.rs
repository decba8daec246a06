//! Tests of `ci/test` with stubs for cargo and for the program with the guest tests. The stubs run
//! on this machine itself.

use std::fs;
use std::process::Command;

use super::tree::{self, Tree};

/// Stub that names three tests, or aborts if `$CODE` is 134. If it is run, it prints `$VERDICTS`
/// and exits with `$CODE`.
const GUEST_TESTS: &str = r#"#!/bin/sh
if [ "$1" = --names ]; then
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
        echo 'crash images opened: 300000'
        echo 'test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured' ;;
esac";
const VERDICTS: &str = "test a::one ... ok (1.0 s)\ntest a::two ... FAILED (2.0 s)\n  | the reason\n\n\
                        test a::three ... skipped: no disk\n";

/// Diagram with one layer that has no module.
const DRAWING: &str = "```mermaid\nflowchart TD\n    L0[\"Base\"]\n```\n";
/// Source file with the headings of the layer tables.
const LAYERS: &str = include_str!("../../src/tidy/layers.rs");
/// Source file with the names and versions of the tools.
const TOOLS: &str = include_str!("../../src/tools.rs");

/// Adds stub tools that accept all dependencies and pages.
fn add_tools(tree: &Tree) {
    let values = |key: &'static str| {
        let values = TOOLS.lines().filter_map(move |line| line.trim().strip_prefix(key));
        values.map(|value| value.trim_matches(['"', ',']))
    };
    let versions = values("version_prefix: ").zip(values("version: "));
    for (name, (prefix, version)) in values("name: ").zip(versions) {
        let program = format!("#!/bin/sh\n[ \"$1\" != --version ] || echo '{prefix}{version}'\n");
        tree.write(&format!("target/ci/tools/bin/{name}"), program, 0o755).unwrap();
    }
}

/// Adds a stub that accepts all metrics, and the files that it checks.
fn add_promtool(tree: &Tree) {
    let program = "target/ci/packages/prometheus/usr/bin/promtool";
    for (path, content, mode) in [
        (program, "#!/bin/sh\n", 0o755),
        ("vmm/src/metrics_server/tests/scrape.prometheus.txt", "", 0o644),
        ("docs/how-to/watch.md", "```yaml\ngroups:\n```\n", 0o644),
    ] {
        tree.write(path, content, mode).unwrap();
    }
}

/// Returns a document whose tables have one layer each, without a module.
fn architecture() -> String {
    let headings =
        LAYERS.lines().filter_map(|line| line.split_once("heading: \"")?.1.split_once('"'));
    let table = "\n\n| Layer | Modules |\n|---|---|\n| Base | |\n\n";
    headings.map(|(heading, _)| heading.to_owned() + table).collect::<String>() + DRAWING
}

fn fakes(cargo: &str) -> Option<Tree> {
    let tree = Tree::with_tools(cargo)?;
    tree.add_program("guest-tests", GUEST_TESTS).unwrap();
    tree.write("docs/design/architecture.md", architecture(), 0o644).unwrap();
    add_tools(&tree);
    add_promtool(&tree);
    tree.write(".gitignore", "/target\n/bin\n", 0o644).unwrap();
    let mut git = Command::new("git");
    assert!(git.args(["init", "--quiet"]).arg(tree.folder()).status().unwrap().success());
    Some(tree)
}

/// Runs `ci/test`. The guest tests print `verdicts` and exit with `code`.
fn run(tree: &Tree, arguments: &[&str], verdicts: &str, code: u8) -> (i32, String, String) {
    let mut command = tree.command("ci/test").unwrap();
    tree::run(command.args(arguments).env("VERDICTS", verdicts).env("CODE", code.to_string()))
}

fn read(tree: &Tree, path: &str) -> String {
    fs::read_to_string(tree.path(path)).unwrap()
}

#[test]
fn bad_command_lines_of_a_test_run_are_refused_before_any_work() {
    let Some(tree) = fakes(":") else { return };
    for arguments in [&["a::"][..], &["--exact"], &["--quick"], &["--guest", ""]] {
        let (code, _, stderr) = run(&tree, arguments, "", 0);
        assert_eq!(code, 2, "{arguments:?}: {stderr}");
        assert!(!tree.path("target/ci/setup.lock").exists(), "{arguments:?}");
    }
    let (code, stdout, _) = run(&tree, &["-h"], "", 0);
    assert!(code == 0 && stdout.contains("--guest"), "{stdout}");
}

#[test]
fn filter_without_a_match_boots_no_host() {
    let Some(tree) = fakes(":") else { return };
    let (code, _, stderr) = run(&tree, &["--guest", "a::", "NOSUCH"], "", 0);
    assert!(code == 2 && stderr.contains("no test matches"), "{stderr}");
    assert!(!tree.path("target/ci/guest-tests").exists());
}

#[test]
fn failed_guest_test_is_shown_again_at_the_end() {
    let Some(tree) = fakes(":") else { return };
    let choice = ["--guest", "--exact", "a::one", "a::two", "a::three"];
    let (code, stdout, stderr) = run(&tree, &choice, VERDICTS, 1);
    assert_eq!(code, 1, "{stdout}{stderr}");
    assert!(stdout.contains("1| test a::one ... ok (1.0 s)\n"), "{stdout}");
    assert!(stdout.ends_with("\n1 passed, 1 failed, 1 skipped\n"), "{stdout}");
    let end = "test a::two ... FAILED (2.0 s)\n  | the reason\ntest: FAILED:\n  a::two\n";
    assert!(stderr.ends_with(end), "{stderr}");
    assert!(stderr.contains("test: time of each step:\n"), "{stderr}");
    let arguments = read(&tree, "target/ci/guest-tests/host-1/arguments");
    assert!(arguments.starts_with("--within "), "{arguments}");
    assert!(arguments.ends_with(" --exact a::one a::two a::three\n"), "{arguments}");
    let log = read(&tree, "target/ci/guest-tests/host-1/log");
    assert!(log.ends_with(VERDICTS), "{log}");
}

#[test]
fn all_parts_of_a_run_are_counted() {
    let Some(tree) = fakes(UNIT_TESTS) else { return };
    let verdicts = VERDICTS.replace("FAILED", "ok");
    let (code, stdout, stderr) = run(&tree, &["--long"], &verdicts, 0);
    // Power cuts are skipped.
    assert!(stdout.ends_with("\n4 passed, 0 failed, 4 skipped\n"), "{stdout}{stderr}");
    assert!(code == 0 && !stdout.contains("hidden"), "{stdout}");
    assert!(stderr.contains("  hidden: no disk\n"), "{stderr}");
    for step in ["lints (cargo clippy)", "unit tests", "guest images"] {
        assert!(stderr.contains(&format!(" s  {step}\n")), "{step}: {stderr}");
    }
    assert!(read(&tree, "target/ci/unit-tests.log").contains("hidden"));
}

#[test]
fn check_that_fails_does_not_end_the_run() {
    let clippy = "[ \"$1\" != clippy ] || { echo \"quiet: $CARGO_TERM_QUIET, bars: $CARGO_TERM_PROGRESS_WHEN\" >&2; exit 1; }";
    let cargo = format!("{clippy}\n{}", UNIT_TESTS.replace("300000", "299999"));
    let Some(tree) = fakes(&cargo) else { return };
    // The layer check cannot run without this document.
    fs::remove_file(tree.path("docs/design/architecture.md")).unwrap();
    let (_, stdout, stderr) = run(&tree, &[], VERDICTS, 1);
    assert!(stdout.ends_with("\n3 passed, 4 failed, 4 skipped\n"), "{stdout}");
    let clippy = "quiet: true, bars: never\ntest: lints (cargo clippy): FAILED\n";
    assert!(stderr.contains(clippy), "{stderr}");
    let failed = "test: FAILED:\n  lints (cargo clippy)\n  files, lines and layers (cargo xtask tidy)\n  crash images (pools and BTTs): only 299999 of at least 300000 were opened";
    assert!(stderr.contains(failed), "{stderr}");
}

#[test]
fn guest_tests_that_cannot_be_listed_leave_the_results_of_unit_tests() {
    let Some(tree) = fakes(UNIT_TESTS) else { return };
    let (code, stdout, stderr) = run(&tree, &[], "", 134);
    assert_eq!(code, 1, "{stderr}");
    assert!(stdout.ends_with("\n2 passed, 1 failed, 3 skipped\n"), "{stdout}");
    assert!(stderr.contains("guest-tests failed: exit status: 134\n"), "{stderr}");
    assert!(stderr.ends_with("test: FAILED:\n  guest tests\n"), "{stderr}");
    let (code, stdout, _) = run(&tree, &["--guest", "a::"], "", 134);
    assert!(code == 1 && stdout.ends_with("0 passed, 1 failed\n"), "{stdout}");
}
