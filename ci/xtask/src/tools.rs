//! Programs from crates.io that checks need. They are built once, at pinned versions.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::cargo;
use crate::checkout::Checkout;
use crate::jobs;
use crate::messages::report;
use crate::programs;

pub(crate) struct Tool {
    name: &'static str,
    version: &'static str,
    install_options: &'static [&'static str],
    /// Text that `--version` prints before the version.
    version_prefix: &'static str,
}

/// Checks dependencies. A newer version may reject a license or source that this version accepts.
pub(crate) const CARGO_DENY: Tool = Tool {
    name: "cargo-deny",
    version: "0.20.2",
    install_options: &[],
    version_prefix: "cargo-deny ",
};

/// Builds the book. Compiled without its web server and its search index.
pub(crate) const MDBOOK: Tool = Tool {
    name: "mdbook",
    version: "0.5.4",
    install_options: &["--no-default-features"],
    version_prefix: "mdbook v",
};

impl Tool {
    /// Returns the path of the program. Builds the pinned version if it is missing.
    pub(crate) fn path(&self, checkout: &Checkout) -> Result<PathBuf> {
        let program = checkout.ci("tools").join("bin").join(self.name);
        if !self.is_installed(&program) {
            self.install(checkout)?;
        }
        Ok(program)
    }

    fn is_installed(&self, program: &Path) -> bool {
        let printed = jobs::output(programs::user(program).arg("--version"));
        let expected = format!("{}{}", self.version_prefix, self.version);
        printed.is_ok_and(|printed| printed.trim() == expected)
    }

    fn install(&self, checkout: &Checkout) -> Result<()> {
        let Self { name, version, .. } = self;
        report!("building {name} {version}, which takes 1 to 2 minutes once");
        let mut cargo = cargo::command(checkout, ["install", "--quiet", "--locked", name]);
        // Not optimized. Each tool runs for seconds, and optimizing it would take minutes.
        cargo.args(["--debug", "--config", "profile.dev.debug=false"]);
        cargo.args(self.install_options);
        cargo.args(["--version", version, "--force", "--root"]).arg(checkout.ci("tools"));
        // Run outside the repository, because its cargo settings are for our programs: a static
        // build and a target.
        if !jobs::status(cargo.current_dir("/"))?.success() {
            bail!("cannot build {name} {version}");
        }
        Ok(())
    }
}
