//! Checks with one verdict each: formatting, lints, fuzz targets, names of documents, power cuts.

use std::path::Path;

use anyhow::{Result, bail};

use super::report::Report;
use crate::cargo;
use crate::checkout::Checkout;
use crate::host;
use crate::jobs;
use crate::messages::{attempt, say};
use crate::names_resolve;
use crate::programs;
use crate::repository::Repository;
use crate::tidy;

const FUZZED: [&str; 2] = ["pmem-volume", "vmm"];
/// Number of power cuts. `ci/soak` makes more.
const POWER_CUTS: &str = "2";

/// Version of cargo-deny that is built if it is missing. A newer one may refuse what this one
/// accepts.
const CARGO_DENY: &str = "0.20.2";
/// Folder of programs that checks need.
const TOOLS: &str = "tools";

pub(super) fn run(checkout: &Checkout, report: &mut Report) {
    check(report, "formatting (cargo fmt)", || {
        let status = jobs::status(&mut cargo::command(checkout, ["fmt", "--all", "--check"]))?;
        Ok(status.success())
    });
    check(report, "lints (cargo clippy)", || {
        let arguments = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
        Ok(cargo::run(cargo::command(checkout, arguments))?.success())
    });
    check(report, "fuzz targets (cargo check)", || compile_fuzz_targets(checkout));
    check(report, "names of documents and headings (cargo xtask names-resolve)", || {
        let unresolved = names_resolve::unresolved(&Repository::at(checkout.root()))?;
        Ok(crate::print(unresolved)? == 0)
    });
    check(report, "files, lines and layers (cargo xtask tidy)", || {
        let violations = tidy::violations(&Repository::at(checkout.root()))?;
        Ok(crate::print(violations)? == 0)
    });
    check(report, "dependencies (cargo deny)", || check_dependencies(checkout));
}

/// Runs a check, which counts only if it fails. Returns true if it has passed.
fn check(report: &mut Report, name: &str, work: impl FnOnce() -> Result<bool>) -> bool {
    report.begin_step(name);
    say!("{name}");
    let has_passed = attempt(work).unwrap_or(false);
    if !has_passed {
        say!("{name}: FAILED");
        report.add_failure(name);
    }
    has_passed
}

/// Compiles the fuzz targets, which no other step builds.
fn compile_fuzz_targets(checkout: &Checkout) -> Result<bool> {
    for package in FUZZED {
        let manifest = format!("{package}/fuzz/Cargo.toml");
        let arguments =
            ["check", "--locked", "--manifest-path", &manifest, "--target-dir", "target"];
        let mut cargo = cargo::command(checkout, arguments);
        // Nothing is linked, so libFuzzer, which is C++, is left out: its build script takes a path
        // as a library that is built already.
        cargo.env("CUSTOM_LIBFUZZER_PATH", "/nonexistent/libfuzzer.a");
        // With the profile of our workspace, both share the artifacts of the lints.
        cargo.env("CARGO_PROFILE_DEV_DEBUG", "line-tables-only");
        if !cargo::run(cargo)?.success() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Checks the dependencies' licenses, sources and versions (deny.toml).
fn check_dependencies(checkout: &Checkout) -> Result<bool> {
    let program = checkout.ci(TOOLS).join("bin/cargo-deny");
    if !is_deny_installed(&program) {
        install_deny(checkout)?;
    }
    let mut deny = programs::user(&program);
    deny.args(["--offline", "--all-features", "check", "bans", "licenses", "sources"]);
    Ok(jobs::status(deny.current_dir(checkout.root()))?.success())
}

fn is_deny_installed(program: &Path) -> bool {
    let version = jobs::output(programs::user(program).arg("--version"));
    version.is_ok_and(|version| version.trim() == format!("cargo-deny {CARGO_DENY}"))
}

fn install_deny(checkout: &Checkout) -> Result<()> {
    say!("building cargo-deny {CARGO_DENY}, which takes 2 to 4 minutes once");
    let mut cargo = cargo::command(checkout, ["install", "--quiet", "--locked", "cargo-deny"]);
    cargo.args(["--version", CARGO_DENY, "--force", "--root"]).arg(checkout.ci(TOOLS));
    // cargo's settings of this repository are for our programs: a static build and a target.
    if !jobs::status(cargo.current_dir("/"))?.success() {
        bail!("cargo-deny {CARGO_DENY} could not be built");
    }
    Ok(())
}

/// Cuts the power of emulated hosts, unless commands run on this machine itself.
pub(super) fn cut_power(checkout: &Checkout, report: &mut Report) -> Result<()> {
    if host::is_direct()? {
        say!("power cuts: skipped, the host is this machine");
        report.skipped += 1;
        return Ok(());
    }
    let has_passed = check(report, "power cuts (ci/soak --only power)", || {
        let mut soak = programs::task(checkout, "soak")?;
        soak.args(["--no-build", "--only", "power", "--rounds", POWER_CUTS])
            .current_dir(checkout.root());
        Ok(jobs::status(&mut soak)?.success())
    });
    report.passed += usize::from(has_passed);
    Ok(())
}
