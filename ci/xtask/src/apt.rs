//! Debian packages: installation, downloads, and a cache of `.deb` files.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};

use crate::checkout::{Checkout, create_folder, list, remove_folder, rename};
use crate::jobs;
use crate::messages::report;
use crate::programs;
use crate::root::Root;

const INSTALL: &str =
    "env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends";

/// Runner of apt commands. Refreshes the package lists at most once.
pub(crate) struct Apt<'checkout> {
    checkout: &'checkout Checkout,
    root: Root,
    has_fresh_lists: bool,
}

impl<'checkout> Apt<'checkout> {
    pub(crate) fn new(checkout: &'checkout Checkout) -> Self {
        Self { checkout, root: Root::new(), has_fresh_lists: false }
    }

    pub(crate) fn install(&mut self, packages: &[&str]) -> Result<()> {
        report!("installing by apt: {}", packages.join(" "));
        // Lack of permission is reported here, because errors of the first attempt below are
        // discarded.
        self.root.require(&["apt-get", "install"])?;
        let command: Vec<_> = INSTALL.split(' ').chain(packages.iter().copied()).collect();
        if self.root.run(&command, true)?.success() {
            return Ok(());
        }
        self.refresh_lists()?;
        if !self.root.run(&command, false)?.success() {
            bail!("apt could not install: {}{}", packages.join(" "), self.root.advice());
        }
        Ok(())
    }

    /// Refreshes the package lists, unless they have been refreshed already.
    pub(crate) fn refresh_lists(&mut self) -> Result<()> {
        if self.has_fresh_lists {
            return Ok(());
        }
        report!("refreshing the package lists (apt-get update)");
        if !self.root.run(&["apt-get", "update", "-qq"], false)?.success() {
            bail!("apt-get update failed{}", self.root.advice());
        }
        self.has_fresh_lists = true;
        Ok(())
    }

    /// Downloads `PACKAGE` or `PACKAGE=VERSION` to the cache. Returns false if the mirror does not
    /// have it.
    pub(crate) fn download(&mut self, package: &str) -> Result<bool> {
        let cache = self.checkout.debs();
        create_folder(cache)?;
        let download = || {
            // apt's sandbox user cannot write to the cache. The caller verifies the file.
            let options = ["download", "-q", "-o", "APT::Sandbox::User=root", package];
            let mut command = programs::system("apt-get");
            command.args(options).current_dir(cache).stdout(Stdio::null()).stderr(Stdio::null());
            jobs::status(&mut command).map(|status| status.success())
        };
        if download()? {
            return Ok(true);
        }
        self.refresh_lists()?;
        download()
    }

    /// Returns the folder with the unpacked package. Downloads and unpacks the package first if the
    /// folder is missing.
    pub(crate) fn unpacked(&mut self, package: &str) -> Result<PathBuf> {
        let tree = self.checkout.ci("packages").join(package);
        if tree.is_dir() {
            return Ok(tree);
        }
        let cached = match self.newest_cached(package)? {
            Some(cached) => cached,
            None => {
                report!("fetching {package}");
                if !self.download(package)? {
                    bail!("the mirror has no package {package}");
                }
                self.newest_cached(package)?
                    .with_context(|| format!("apt left no file of {package}"))?
            }
        };
        let new = tree.with_file_name(format!("{package}.new"));
        unpack(&cached, &new)?;
        rename(&new, &tree)?;
        Ok(tree)
    }

    /// Returns the package's newest file in the cache.
    fn newest_cached(&self, package: &str) -> Result<Option<PathBuf>> {
        let prefix = format!("{package}_");
        let mut newest = None;
        for path in list(self.checkout.debs()).unwrap_or_default() {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with(&prefix) && name.ends_with(".deb") {
                newest = newest.max(Some((path.metadata()?.modified()?, path)));
            }
        }
        Ok(newest.map(|(_, path)| path))
    }
}

/// Unpacks a `.deb` file to `folder`, and replaces a folder of that name.
pub(crate) fn unpack(deb: &Path, folder: &Path) -> Result<()> {
    remove_folder(folder)?;
    create_folder(folder)?;
    jobs::run(programs::system("dpkg").arg("-x").arg(deb).arg(folder))
}

/// SHA-256 of a file in hexadecimal digits.
pub(crate) fn sha256(path: &Path) -> Result<String> {
    let file = File::open(path).with_context(|| format!("Cannot open {}", path.display()))?;
    let listed = jobs::output(programs::system("sha256sum").stdin(file))?;
    listed.split(' ').next().map(str::to_owned).context("sha256sum printed nothing")
}
