//! Debian kernels for guests and the emulated host. `ci/kernels.lock` pins their versions.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};

use crate::apt::{Apt, sha256, unpack};
use crate::checkout::{Checkout, read, write};
use crate::jobs;
use crate::messages::report;
use crate::programs;

/// Path of the pins in the checkout.
pub(crate) const LOCK: &str = "ci/kernels.lock";
/// Kernel of the emulated host, and of guests whose image does not name another kernel.
pub(crate) const DEFAULT: &str = "6.12";
/// Suffix of kernel names with all drivers. Other names are kernels of the cloud flavor.
const GENERIC: &str = "-generic";

/// Line of the lock file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pin {
    /// Kernel series, followed by the flavor for generic kernels.
    pub name: String,
    package: String,
    pub version: String,
    sha256: String,
}

impl Pin {
    /// Returns true for the generic flavor. It has drivers that the cloud flavor lacks, for example
    /// F2FS.
    pub(crate) fn is_generic(&self) -> bool {
        self.name.ends_with(GENERIC)
    }

    /// Returns the name that `apt-get download` gives to the file. The colon of an epoch is
    /// encoded.
    fn file_name(&self) -> String {
        format!("{}_{}_amd64.deb", self.package, self.version.replace(':', "%3a"))
    }

    /// Returns a pattern for `apt-cache search` that matches packages of this series and flavor.
    fn search_pattern(&self) -> String {
        let series = self.name.trim_end_matches(GENERIC).replace('.', "\\.");
        // Names of other flavors also end in amd64. Therefore, the pattern allows only the hyphens
        // of the ABI and of the flavor.
        let flavor = if self.is_generic() { "amd64" } else { "cloud-amd64" };
        format!("^linux-image-{series}\\.[^-]*(-[0-9]+)?-{flavor}-unsigned$")
    }

    /// Folder with the unpacked package.
    pub(crate) fn tree(&self, checkout: &Checkout) -> PathBuf {
        checkout.ci("kernels").join(&self.package)
    }

    /// Returns the release of the unpacked kernel, as `uname -r` prints it.
    pub(crate) fn release(&self, checkout: &Checkout) -> Result<String> {
        let modules = self.tree(checkout).join("lib/modules");
        let mut entries =
            fs::read_dir(&modules).with_context(|| format!("no {}", modules.display()))?;
        let release =
            entries.next().with_context(|| format!("{} is empty", modules.display()))??;
        release.file_name().into_string().ok().context("the release is not UTF-8")
    }

    /// Returns the path of the unpacked kernel image.
    pub(crate) fn image(&self, checkout: &Checkout) -> Result<PathBuf> {
        let release = self.release(checkout)?;
        Ok(self.tree(checkout).join(format!("boot/vmlinuz-{release}")))
    }
}

pub(crate) fn pins(checkout: &Checkout) -> Result<Vec<Pin>> {
    parse(&read(&checkout.path(LOCK))?)
}

/// Returns the pin of the kernel `name`.
pub(crate) fn pin(checkout: &Checkout, name: &str) -> Result<Pin> {
    let pin = pins(checkout)?.into_iter().find(|pin| pin.name == name);
    pin.with_context(|| format!("{LOCK} has no kernel {name}"))
}

fn parse(text: &str) -> Result<Vec<Pin>> {
    let lines = (1..)
        .zip(text.lines())
        .filter(|(_, line)| !line.starts_with('#') && !line.trim().is_empty());
    let pin = |(number, line): (usize, &str)| {
        let [name, package, version, sha256] = line.split_whitespace().collect::<Vec<_>>()[..]
        else {
            bail!("{LOCK}:{number}: not a name, a package, a version and a SHA-256: {line}");
        };
        let [name, package, version, sha256] = [name, package, version, sha256].map(str::to_owned);
        Ok(Pin { name, package, version, sha256 })
    };
    lines.map(pin).collect()
}

/// Fetches, verifies and unpacks a kernel, unless that has been done already.
pub(crate) fn fetch(checkout: &Checkout, apt: &mut Apt<'_>, pin: &Pin) -> Result<()> {
    let Pin { name, package, version, .. } = pin;
    let tree = pin.tree(checkout);
    // The stamp is the verified hash. If the pin changes, the kernel is unpacked again.
    let stamp = tree.join("verified");
    if fs::read_to_string(&stamp).is_ok_and(|verified| verified.trim_end() == pin.sha256) {
        return Ok(());
    }
    let deb = checkout.debs().join(pin.file_name());
    if !deb.is_file() {
        report!("fetching kernel {name}: {package} {version}");
        if !apt.download(&format!("{package}={version}"))? {
            bail!(
                "the mirror no longer carries {package} {version}.
  ci/setup --update-kernels writes the newest kernels that it has into {LOCK};
  commit that file if the tests pass with them."
            );
        }
    }
    let found = sha256(&deb)?;
    ensure!(
        found == pin.sha256,
        "{} has SHA-256
  {found}, {LOCK} pins
  {}: not used. Remove the file if it was damaged under way.",
        deb.display(),
        pin.sha256
    );
    report!("unpacking kernel {name}");
    unpack(&deb, &tree)?;
    let release = pin.release(checkout)?;
    jobs::run(programs::system("depmod").args(["-C", "/dev/null", "-b"]).arg(&tree).arg(release))?;
    write(&stamp, format!("{}\n", pin.sha256))
}

/// Changes all pins to the newest kernels on the mirror.
pub(crate) fn update(checkout: &Checkout, apt: &mut Apt<'_>) -> Result<()> {
    apt.refresh_lists()?;
    let lock = checkout.path(LOCK);
    let comments = read(&lock)?;
    let mut new: String =
        comments.split_inclusive('\n').filter(|line| line.starts_with('#')).collect();
    for old in pins(checkout)? {
        let (package, version) =
            newest(&old)?.with_context(|| format!("the mirror has no kernel {}", old.name))?;
        let mut pin = Pin { package, version, ..old.clone() };
        let Pin { name, package, version, .. } = &pin;
        if !apt.download(&format!("{package}={version}"))? {
            bail!("could not download {package} {version}");
        }
        report!("kernel {name}: {} -> {version}", old.version);
        pin.sha256 = sha256(&checkout.debs().join(pin.file_name()))?;
        new += &format!("{} {} {} {}\n", pin.name, pin.package, pin.version, pin.sha256);
    }
    write(&lock, new)
}

fn newest(pin: &Pin) -> Result<Option<(String, String)>> {
    let pattern = pin.search_pattern();
    let found =
        jobs::output(programs::system("apt-cache").args(["search", "--names-only", &pattern]))?;
    let mut newest: Option<(String, String)> = None;
    for package in found.lines().filter_map(|line| line.split(' ').next()) {
        let offered = jobs::output(programs::system("apt-cache").args(["madison", package]))?;
        let Some(version) = offered.lines().next().and_then(|line| line.split('|').nth(1)) else {
            continue;
        };
        let version = version.trim();
        let is_newer = match &newest {
            Some((_, known)) => is_newer(version, known)?,
            None => true,
        };
        if is_newer {
            newest = Some((package.to_owned(), version.to_owned()));
        }
    }
    Ok(newest)
}

/// Returns true if `version` is newer than `known` in Debian's order.
fn is_newer(version: &str, known: &str) -> Result<bool> {
    let mut command = programs::system("dpkg");
    let command = command.args(["--compare-versions", version, "gt", known]).stderr(Stdio::null());
    Ok(jobs::status(command)?.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The guest test of README.md creates these files itself.
    #[test]
    fn readme_names_the_kernel_and_the_image_that_the_demo_builds() {
        let checkout = Checkout::new().unwrap();
        let readme = read(&checkout.path("README.md")).unwrap();
        let kernels = "target/ci/kernels";
        assert!(readme.contains(&format!("{kernels}/*/boot/vmlinuz-6.12*-cloud-amd64")));
        assert!(readme.contains("target/ci/guests/basic-6.12.img"));
        assert_eq!(checkout.ci("guests"), checkout.path("target/ci/guests"));
        let is_of_readme = |pin: &Pin| {
            pin.package.starts_with("linux-image-6.12") && pin.package.contains("-cloud-amd64")
        };
        let mut pins = pins(&checkout).unwrap();
        pins.retain(is_of_readme);
        let [pin] = &pins[..] else { panic!("the pattern of README.md matches {}", pins.len()) };
        assert_eq!(pin.name, DEFAULT);
        assert_eq!(pin.tree(&checkout).parent(), Some(&*checkout.path(kernels)));
    }

    #[test]
    fn lock_of_the_repository_names_the_kernels_of_the_images() {
        let pins = pins(&Checkout::new().unwrap()).unwrap();
        let names: Vec<_> = pins.iter().map(|pin| pin.name.as_str()).collect();
        assert_eq!(names, [DEFAULT, "6.1", "6.12-generic"]);
        assert!(pins[2].is_generic() && !pins[0].is_generic());
        assert!(pins.iter().all(|pin| pin.sha256.len() == 64));
    }

    #[test]
    fn lock_skips_comments_and_reports_the_line_of_an_error() {
        let parsed = parse("# a comment\n\n6.1 package 1:2.3-4 abc\n").unwrap();
        assert_eq!(parsed[0].file_name(), "package_1%3a2.3-4_amd64.deb");
        assert_eq!(parsed.len(), 1);
        let error = parse("# a comment\n6.1 package 1\n").unwrap_err().to_string();
        assert!(error.starts_with("ci/kernels.lock:2: "), "{error}");
    }

    #[test]
    fn search_pattern_excludes_other_flavors() {
        let pattern = |name: &str| {
            let pin = parse(&format!("{name} package 1 abc")).unwrap().remove(0);
            pin.search_pattern()
        };
        assert_eq!(pattern("6.1"), r"^linux-image-6\.1\.[^-]*(-[0-9]+)?-cloud-amd64-unsigned$");
        assert_eq!(pattern("6.12-generic"), r"^linux-image-6\.12\.[^-]*(-[0-9]+)?-amd64-unsigned$");
    }
}
