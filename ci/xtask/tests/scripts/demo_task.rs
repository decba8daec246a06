//! `ci/demo` without the demo itself.

use super::tree::{PROMETHEUS, Tree};

#[test]
fn early_end_of_prometheus_is_reported_with_its_last_lines() {
    let Some(tree) = Tree::with_tools(":") else { return };
    tree.write("ci/kernels.lock", "", 0o644).unwrap();
    tree.write(PROMETHEUS, "#!/bin/sh\necho early\necho the port is taken >&2\nexit 1\n", 0o755)
        .unwrap();
    let mut command = tree.command_in(tree.folder(), "ci/demo --no-build", "nested").unwrap();
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.ends_with("demo: Prometheus ended: early\nthe port is taken\n"), "{stderr}");
    // Its data are removed.
    let left = std::fs::read_dir(tree.path("target/demo/prometheus")).unwrap();
    let mut left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["prometheus.log", "prometheus.yml"]);
}
