//! `ci/demo` without the demo itself.

use std::process::{Command, Output, Stdio};

use super::tree::{PROMETHEUS, Tree, missing_tool};

fn tree() -> Option<Tree> {
    if let Some(missing) = missing_tool() {
        eprintln!("skipped: {missing} is not there (ci/setup does that)");
        return None;
    }
    let tree = Tree::new(&std::env::temp_dir(), 0o022, ":").unwrap();
    tree.write("ci/kernels.lock", "", 0o644).unwrap();
    Some(tree)
}

fn run(tree: &Tree, line: &str) -> Output {
    let mut command = Command::new("setsid");
    command.arg("ci/demo").args(line.split(' ')).current_dir(tree.folder()).stdin(Stdio::null());
    command.env("PATH", tree.user_path().unwrap()).env("FORESHORE_HOST", "nested").output().unwrap()
}

#[test]
fn early_end_of_prometheus_is_reported_with_its_last_lines() {
    let Some(tree) = tree() else { return };
    tree.write(PROMETHEUS, "#!/bin/sh\necho early\necho the port is taken >&2\nexit 1\n", 0o755).unwrap();
    let output = run(&tree, "--no-build");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.ends_with("demo: Prometheus ended: early\nthe port is taken\n"), "{stderr}");
    // Its data are removed.
    let left = std::fs::read_dir(tree.path("target/demo/prometheus")).unwrap();
    let mut left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["prometheus.log", "prometheus.yml"]);
}

#[test]
fn bad_command_lines_of_a_demo_are_refused_before_any_work() {
    let Some(tree) = tree() else { return };
    for line in ["--within 0", "--within", "picture"] {
        assert_eq!(run(&tree, line).status.code(), Some(2), "{line}");
        assert!(!tree.path("target/ci/setup.lock").exists(), "{line}");
    }
}
