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

/// Kills guests in batches of 25 with the seeds 7, 9 and so on.
fn kill(rounds: u32, seeds: &[(&str, &str)]) -> Option<(Tree, Output)> {
    let tree = Tree::with_tools(":")?;
    tree.add_program("soak", SOAK).unwrap();
    let line = format!(
        "ci/soak --no-build --only kills --kernel 6.1 --interface nvdimm --rounds {rounds} --seed 7"
    );
    let output = tree.command(&line).unwrap().envs(seeds.iter().copied()).output().unwrap();
    Some((tree, output))
}

#[test]
fn tallies_of_all_kills_are_a_row_of_the_table() {
    let Some((tree, output)) = kill(60, &[]) else { return };
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
fn kills_that_fail_or_have_no_tally_are_the_last_ones() {
    for (variable, reason) in [("BAD", "exit code 1"), ("MUTE", "no tally")] {
        let Some((tree, output)) = kill(75, &[(variable, "9")]) else { return };
        assert_eq!(output.status.code(), Some(1));
        let row = "nvdimm on 6.1                7          FAILED: see target/soak/nvdimm-6.1/9\n";
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(stdout.ends_with(row), "{stdout}");
        assert!(!tree.path("target/soak/nvdimm-6.1/11").exists());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(stderr.contains(&format!("nvdimm on 6.1, seed 9: {reason}\n")), "{stderr}");
    }
}
