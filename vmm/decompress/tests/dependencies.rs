//! Test of the crates that the VMM is built from.

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::Value;

/// Crates that build C code.
const BUILDERS_OF_C: [&str; 2] = ["cc", "cmake"];

fn cargo(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO")).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Name and version of each crate that `package` needs.
fn crates(package: &str, edges: &str) -> BTreeSet<(String, String)> {
    let arguments = ["tree", "--offline", "--locked", "--prefix", "none", "--format", "{p}"];
    let tree = cargo(&[&arguments[..], &["--package", package, "--edges", edges]].concat());
    let name_and_version = |line: &str| {
        let (name, rest) = line.split_once(" v")?;
        Some((name.to_owned(), rest.split(' ').next()?.to_owned()))
    };
    tree.lines().filter_map(name_and_version).collect()
}

/// Crates that build C code, and crates with a key `links`, which names the library that a crate
/// binds.
fn crates_with_c(package: &str, edges: &str) -> Vec<String> {
    let metadata = cargo(&["metadata", "--offline", "--locked", "--format-version", "1"]);
    let metadata: Value = serde_json::from_str(&metadata).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let links = |name: &str, version: &str| {
        let package = packages.iter().find(|one| one["name"] == name && one["version"] == version);
        package.unwrap_or_else(|| panic!("{name} {version} has no metadata"))["links"].as_str()
    };
    let with_c = crates(package, edges).into_iter().filter_map(|(name, version)| {
        if BUILDERS_OF_C.contains(&name.as_str()) {
            return Some(name);
        }
        links(&name, &version).map(|library| format!("{name} links {library}"))
    });
    with_c.collect()
}

#[test]
fn no_crate_of_the_vmm_contains_or_binds_c_code() {
    assert_eq!(crates_with_c("foreshore", "normal,build"), [""; 0]);
    // The tests and the benchmark compare with C libraries.
    let of_tests = crates_with_c("foreshore-decompress", "all");
    for expected in ["cc", "liblzma-sys links lzma", "zstd-sys links zstd"] {
        assert!(of_tests.iter().any(|one| one == expected), "{of_tests:?}");
    }
}
