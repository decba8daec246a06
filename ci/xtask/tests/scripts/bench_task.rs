//! `ci/bench` with a stub of the program that measures, which runs on this machine itself.

use std::process::Output;

use super::tree::Tree;

/// Prints its arguments and the name of another VMM, leaves a log, and ends with `$CODE`.
const BENCH: &str = r#"#!/bin/sh
echo "measured: $* $FORESHORE_TEST_BENCH_VMM"
echo words >"$OUT/vm0.vmm.log"
exit "$CODE"
"#;

fn tree() -> Option<Tree> {
    let tree = Tree::with_tools(":")?;
    tree.add_program("bench", BENCH).unwrap();
    Some(tree)
}

fn run(tree: &Tree, line: &str, code: u8, other_vmm: &str) -> Output {
    let mut command = tree.command(&format!("ci/bench {line}")).unwrap();
    command.env("CODE", code.to_string()).env("FORESHORE_BENCH_VMM", other_vmm).output().unwrap()
}

#[test]
fn choice_and_another_vmm_reach_the_program_that_measures() {
    let Some(tree) = tree() else { return };
    tree.write("other-vmm", "", 0o755).unwrap();
    let output = run(&tree, "--rounds 2 --only boot,plug", 0, "other-vmm");
    let (stdout, stderr) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert_eq!(stdout, "measured: --rounds 2 --only boot,plug other-vmm\n");
    assert!(stderr.contains("bench: load of this machine before: "), "{stderr}");
}

#[test]
fn failed_measurement_leaves_its_logs_and_its_exit_code() {
    let Some(tree) = tree() else { return };
    for earlier in ["earlier.log", "bench.json", "broken-1/vm0.vmm.log", "notes"] {
        tree.write(&format!("target/bench/{earlier}"), "", 0o644).unwrap();
    }
    let output = run(&tree, "--rounds 2", 3, "");
    assert_eq!(output.status.code(), Some(3));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        stderr.ends_with("bench: FAILED (exit code 3): the logs are in target/bench\n"),
        "{stderr}"
    );
    let left = std::fs::read_dir(tree.path("target/bench")).unwrap();
    let mut left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["notes", "vm0.vmm.log"]);
}

#[test]
fn bad_command_lines_of_a_bench_are_refused_before_any_work() {
    let Some(tree) = tree() else { return };
    for (line, other_vmm) in [
        ("--only boots", ""),
        ("--only boot,", ""),
        ("--rounds 0", ""),
        ("--clock fast", ""),
        ("--clock counted", ""),
        ("--clock counted --only agent,boot", ""),
        ("--rounds 1", "missing"),
    ] {
        let output = run(&tree, line, 0, other_vmm);
        assert_eq!(
            output.status.code(),
            Some(2),
            "{line}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        assert!(!tree.path("target/bench").exists(), "{line}");
    }
}

/// Test that takes 50 instructions per request, and 7 for its start. Like cargo, it uses the
/// setting of the runner, whose list of strings means the same in TOML and in sh. It fails if it
/// cannot write the profile.
const COSTLY_TEST: &str = r#"case $* in *--no-run*) exit ;; esac
for argument; do
    case $argument in target.x86_64-unknown-linux-gnu.runner=*) list=${argument#*=} ;; esac
done
eval "set -- $(printf %s "$list" | tr -d '[],')"
[ "$1" = valgrind ] || exit
for argument; do
    case $argument in --callgrind-out-file=*) profile=${argument#*=} ;; esac
done
: >"$profile" || exit
echo 1 passed
echo "==1== Collected : $((FORESHORE_COST_REQUESTS * 50 + 7))" >&2"#;

#[test]
fn instructions_of_a_request_are_the_difference_of_two_runs() {
    let Some(tree) = Tree::with_tools(COSTLY_TEST) else { return };
    tree.write("bin/valgrind", "#!/bin/sh\n", 0o755).unwrap();
    let temporary = tree.path("temporary files");
    std::fs::create_dir(&temporary).unwrap();
    let mut command = tree.command("ci/bench --requests").unwrap();
    let output = command.env("TMPDIR", temporary).output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let rows: Vec<_> = stdout.lines().filter(|line| line.ends_with(" | 50 |")).collect();
    assert_eq!(rows.len(), 4, "{stdout}");
    assert!(rows[0].starts_with("| BTT volume, write |"), "{stdout}");
}
