//! Checks with one verdict each: formatting, lints, fuzz targets, references to documents, the
//! book, metrics, power cuts.

use anyhow::Result;

use super::promtool;
use super::report::Report;
use crate::book;
use crate::cargo;
use crate::checkout::Checkout;
use crate::host;
use crate::jobs;
use crate::messages::{attempt, report};
use crate::names_resolve;
use crate::programs;
use crate::repository::Repository;
use crate::tidy;
use crate::tools::CARGO_DENY;

const FUZZED: [&str; 2] = ["pmem-volume", "vmm"];
/// Number of power cuts. `ci/soak` runs more of them.
const POWER_CUTS: &str = "2";

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
    check(report, "book (cargo xtask book)", || book::build(checkout));
    check(report, "metrics, alerts and queries (promtool)", || promtool::check(checkout));
}

/// Runs a check and returns true if it passed. A check adds to the report only if it fails.
fn check(report: &mut Report, name: &str, work: impl FnOnce() -> Result<bool>) -> bool {
    report.begin_step(name);
    report!("{name}");
    let has_passed = attempt(work).unwrap_or(false);
    if !has_passed {
        report!("{name}: FAILED");
        report.add_failure(name);
    }
    has_passed
}

/// Compiles the fuzz targets, which no other step compiles.
fn compile_fuzz_targets(checkout: &Checkout) -> Result<bool> {
    for package in FUZZED {
        let manifest = format!("{package}/fuzz/Cargo.toml");
        let arguments =
            ["check", "--locked", "--manifest-path", &manifest, "--target-dir", "target"];
        let mut cargo = cargo::command(checkout, arguments);
        // A check links nothing, so libFuzzer, a C++ library, need not be built. If this variable
        // is set, its build script assumes that the library at this path is already built.
        cargo.env("CUSTOM_LIBFUZZER_PATH", "/nonexistent/libfuzzer.a");
        // With the workspace's profile, fuzz targets and lints share build artifacts.
        cargo.env("CARGO_PROFILE_DEV_DEBUG", "line-tables-only");
        if !cargo::run(cargo)?.success() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Checks licenses, sources and versions of dependencies (deny.toml).
fn check_dependencies(checkout: &Checkout) -> Result<bool> {
    let mut deny = programs::user(&CARGO_DENY.path(checkout)?);
    deny.args(["--offline", "--all-features", "check", "bans", "licenses", "sources"]);
    Ok(jobs::status(deny.current_dir(checkout.root()))?.success())
}

/// Cuts the power of emulated hosts. Skipped if commands run on this machine itself.
pub(super) fn cut_power(checkout: &Checkout, report: &mut Report) -> Result<()> {
    if host::is_direct()? {
        report!("power cuts: skipped, the host is this machine");
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
