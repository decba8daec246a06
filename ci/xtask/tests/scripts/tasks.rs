//! Tests of `ci/bench`, `ci/demo` and `ci/soak` with stubs for the programs that they run on this
//! machine.

use std::ffi::OsString;
use std::fs;

use super::tree::{PROMETHEUS, Tree, run};

fn names(tree: &Tree, folder: &str) -> Vec<OsString> {
    let entries = fs::read_dir(tree.path(folder)).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    names
}

/// Stub that prints its arguments and the name of another VMM, leaves a log, and exits with
/// `$CODE`.
const BENCH: &str = r#"#!/bin/sh
echo "measured: $* $FORESHORE_TEST_BENCH_VMM"
echo words >"$OUT/vm0.vmm.log"
exit "$CODE"
"#;

fn bench_tree() -> Option<Tree> {
    let tree = Tree::with_tools(":")?;
    tree.add_program_of_profile("release", "bench", BENCH).unwrap();
    Some(tree)
}

fn bench(tree: &Tree, line: &str, code: u8, other_vmm: &str) -> (i32, String, String) {
    let mut command = tree.command(&format!("ci/bench {line}")).unwrap();
    run(command.env("CODE", code.to_string()).env("FORESHORE_BENCH_VMM", other_vmm))
}

#[test]
fn choice_and_another_vmm_reach_the_program_that_measures() {
    let Some(tree) = bench_tree() else { return };
    tree.write("other-vmm", "", 0o755).unwrap();
    let (code, stdout, stderr) = bench(&tree, "--rounds 2 --only boot,plug", 0, "other-vmm");
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(stdout, "measured: --rounds 2 --only boot,plug other-vmm\n");
    assert!(stderr.contains("bench: load of this machine before: "), "{stderr}");
}

#[test]
fn failed_measurement_leaves_its_logs_and_its_exit_code() {
    let Some(tree) = bench_tree() else { return };
    tree.write("target/bench/broken-1/vm0.vmm.log", "", 0o644).unwrap();
    let (code, _, stderr) = bench(&tree, "--rounds 2", 3, "");
    assert_eq!(code, 3);
    let end = "bench: FAILED (exit code 3): the logs are in target/bench\n";
    assert!(stderr.ends_with(end), "{stderr}");
    assert_eq!(names(&tree, "target/bench"), ["vm0.vmm.log"]);
}

#[test]
fn bad_command_lines_of_a_bench_are_refused_before_any_work() {
    let Some(tree) = bench_tree() else { return };
    for (line, other_vmm) in [
        ("--only boots", ""),
        ("--only boot,", ""),
        ("--rounds 0", ""),
        ("--clock fast", ""),
        ("--clock counted", ""),
        ("--clock counted --only agent,boot", ""),
        ("--rounds 1", "missing"),
    ] {
        let (code, _, stderr) = bench(&tree, line, 0, other_vmm);
        assert_eq!(code, 2, "{line}: {stderr}");
        assert!(!tree.path("target/bench").exists(), "{line}");
    }
}

/// Stub of a test that executes 50 instructions per request, and 7 to start. Like cargo, it uses
/// the runner setting, whose list of strings is valid in TOML and in sh. It fails if it cannot
/// write the profile.
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
    fs::create_dir(&temporary).unwrap();
    let mut command = tree.command("ci/bench --requests").unwrap();
    let (code, stdout, stderr) = run(command.env("TMPDIR", temporary));
    assert_eq!(code, 0, "{stderr}");
    let rows: Vec<_> = stdout.lines().filter(|line| line.ends_with(" | 50 |")).collect();
    assert_eq!(rows.len(), 8, "{stdout}");
    assert!(rows[0].starts_with("| BTT volume, write of 4 KiB |"), "{stdout}");
}

#[test]
fn early_end_of_prometheus_is_reported_with_its_last_lines() {
    let Some(tree) = Tree::with_tools(":") else { return };
    tree.write("ci/kernels.lock", "", 0o644).unwrap();
    tree.write(PROMETHEUS, "#!/bin/sh\necho early\necho the port is taken >&2\nexit 1\n", 0o755)
        .unwrap();
    let mut command = tree.command_in(tree.folder(), "ci/demo --no-build", "nested").unwrap();
    let (code, _, stderr) = run(&mut command);
    assert_eq!(code, 1, "{stderr}");
    assert!(stderr.ends_with("demo: Prometheus ended: early\nthe port is taken\n"), "{stderr}");
    // The data that Prometheus collected are removed.
    assert_eq!(names(&tree, "target/demo/prometheus"), ["prometheus.log", "prometheus.yml"]);
}

/// Stub that prints the tally of a batch, except with the seed `$MUTE`. Fails with the seed `$BAD`.
const SOAK: &str = r#"#!/bin/sh
[ "$1" = kills ] || exit 1
[ "$5" = "$MUTE" ] || echo "$2 on $3, seed $5: $4 kills, 10 looks; longest time between two flushes $4 ms"
[ "$5" != "$BAD" ]
"#;

/// Runs a soak of guest kills, in batches of 25 with the seeds 7, 9 and so on.
fn kill(tree: &Tree, rounds: u32, seeds: &[(&str, &str)]) -> (i32, String, String) {
    tree.add_program("soak", SOAK).unwrap();
    let line = format!(
        "ci/soak --no-build --only kills --kernel 6.1 --interface nvdimm --rounds {rounds} --seed 7"
    );
    run(tree.command(&line).unwrap().envs(seeds.iter().copied()))
}

#[test]
fn tallies_of_all_kills_are_a_row_of_the_table() {
    let Some(tree) = Tree::with_tools(":") else { return };
    let (code, stdout, stderr) = kill(&tree, 60, &[]);
    assert_eq!(code, 0, "{stderr}");
    let row = "nvdimm on 6.1, thin          7          60 kills, 30 looks, longest time between two flushes 25 ms\n";
    assert!(stdout.contains("nvdimm 6.1 9| nvdimm on 6.1, seed 9: 25 kills"), "{stdout}");
    assert!(stdout.contains("\nmeasured on: ") && stdout.ends_with(row), "{stdout}");
    assert!(fs::read_to_string(tree.path("target/soak/table")).unwrap().ends_with(row));
}

#[test]
fn kills_that_fail_or_have_no_tally_are_the_last_ones() {
    let Some(tree) = Tree::with_tools(":") else { return };
    for (variable, reason) in [("BAD", "exit code 1"), ("MUTE", "no tally")] {
        let (code, stdout, stderr) = kill(&tree, 75, &[(variable, "9")]);
        assert_eq!(code, 1);
        let row =
            "nvdimm on 6.1, thin          7          FAILED: see target/soak/nvdimm-6.1-thin/9\n";
        assert!(stdout.ends_with(row), "{stdout}");
        assert!(!tree.path("target/soak/nvdimm-6.1-thin/11").exists());
        assert!(stderr.contains(&format!("nvdimm on 6.1, thin, seed 9: {reason}\n")), "{stderr}");
    }
}
