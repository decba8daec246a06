//! `ci/soak` with a stub of the program that kills guests, which runs on this machine itself.

use std::fs;
use std::process::Output;

use super::tree::Tree;

/// Prints the tally of a batch, but none with the seed `$MUTE`. Fails with the seed `$BAD`.
const SOAK: &str = r#"#!/bin/sh
[ "$1" = kills ] || exit 1
[ "$5" = "$MUTE" ] || echo "$2 on $3, seed $5: $4 kills, 10 looks; 3 flushes acknowledged"
[ "$5" != "$BAD" ]
"#;

fn run(tree: &Tree, line: &str, seeds: &[(&str, &str)]) -> Output {
    let mut command = tree.command(&format!("ci/soak {line}")).unwrap();
    command.envs(seeds.iter().copied()).output().unwrap()
}

fn tree() -> Option<Tree> {
    let tree = Tree::with_tools(":")?;
    tree.add_program("soak", SOAK).unwrap();
    Some(tree)
}

#[test]
fn tallies_of_all_kills_are_a_row_of_the_table() {
    let Some(tree) = tree() else { return };
    let output = run(
        &tree,
        "--no-build --only kills --kernel 6.1 --interface nvdimm --rounds 60 --seed 7",
        &[],
    );
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    let row =
        "nvdimm on 6.1                7          60 kills, 30 looks, 9 flushes acknowledged\n";
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(stdout.contains("nvdimm 6.1 9| nvdimm on 6.1, seed 9: 25 kills"), "{stdout}");
    assert!(stdout.contains("\nmeasured on: ") && stdout.ends_with(row), "{stdout}");
    assert!(fs::read_to_string(tree.path("target/soak/table")).unwrap().ends_with(row));
}

#[test]
fn no_kills_begin_after_a_failure() {
    let Some(tree) = tree() else { return };
    let output = run(
        &tree,
        "--no-build --only kills --kernel 6.1 --interface nvdimm --rounds 75 --seed 7",
        &[("BAD", "9")],
    );
    assert_eq!(output.status.code(), Some(1));
    let row = "nvdimm on 6.1                7          FAILED: see target/soak/nvdimm-6.1/9\n";
    assert!(String::from_utf8_lossy(&output.stdout).ends_with(row));
    assert!(!tree.path("target/soak/nvdimm-6.1/11").exists());
}

#[test]
fn kills_without_a_tally_have_failed() {
    let Some(tree) = tree() else { return };
    let output = run(
        &tree,
        "--no-build --only kills --kernel 6.1 --interface nvdimm --rounds 60 --seed 7",
        &[("MUTE", "11")],
    );
    assert_eq!(output.status.code(), Some(1));
    let row = "nvdimm on 6.1                7          FAILED: see target/soak/nvdimm-6.1/11\n";
    assert!(String::from_utf8_lossy(&output.stdout).ends_with(row));
    assert!(String::from_utf8_lossy(&output.stderr).contains("nvdimm on 6.1, seed 11: no tally\n"));
}
