//! Test of the crates that the VMM is built from.

use std::process::Command;

/// Crates that build C code.
const BUILDERS_OF_C: [&str; 2] = ["cc", "cmake"];

fn builders_of_c(package: &str, edges: &str) -> Vec<String> {
    let arguments = ["tree", "--offline", "--locked", "--prefix", "none", "--format", "{p}"];
    let mut cargo = Command::new(env!("CARGO"));
    let cargo = cargo.args(arguments).args(["--package", package, "--edges", edges]);
    let output = cargo.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let tree = String::from_utf8(output.stdout).unwrap();
    let names = tree.lines().filter_map(|line| line.split(' ').next());
    names.filter(|name| BUILDERS_OF_C.contains(name)).map(str::to_owned).collect()
}

#[test]
fn no_crate_of_the_vmm_contains_c_code() {
    assert_eq!(builders_of_c("foreshore", "normal,build"), [""; 0]);
    // The tests and the benchmark compare with C libraries.
    assert_ne!(builders_of_c("foreshore-decompress", "all"), [""; 0]);
}
