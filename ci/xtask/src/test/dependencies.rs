//! Check of the dependencies' licenses, sources and versions (deny.toml).

use std::path::Path;

use anyhow::{Result, bail};

use crate::cargo;
use crate::checkout::Checkout;
use crate::jobs;
use crate::messages::say;
use crate::programs;

/// Version that is built if it is missing. A newer one may refuse what this one accepts.
const VERSION: &str = "0.20.2";
/// Folder of programs that checks need.
const TOOLS: &str = "tools";

pub(super) fn check(checkout: &Checkout) -> Result<bool> {
    let program = checkout.ci(TOOLS).join("bin/cargo-deny");
    if !is_installed(&program) {
        install(checkout)?;
    }
    let mut deny = programs::user(&program);
    deny.args(["--offline", "--all-features", "check", "bans", "licenses", "sources"]);
    Ok(jobs::status(deny.current_dir(checkout.root()))?.success())
}

fn is_installed(program: &Path) -> bool {
    let version = jobs::output(programs::user(program).arg("--version"));
    version.is_ok_and(|version| version.trim() == format!("cargo-deny {VERSION}"))
}

fn install(checkout: &Checkout) -> Result<()> {
    say!("building cargo-deny {VERSION}, which takes 2 to 4 minutes once");
    let mut cargo = cargo::command(checkout, ["install", "--quiet", "--locked", "cargo-deny"]);
    cargo.args(["--version", VERSION, "--force", "--root"]).arg(checkout.ci(TOOLS));
    // cargo's settings of this repository are for our programs: a static build and a target.
    if !jobs::status(cargo.current_dir("/"))?.success() {
        bail!("cargo-deny {VERSION} could not be built");
    }
    Ok(())
}
