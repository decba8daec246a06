//! Sets up a machine: installs tools with apt, adds Rust components, and fetches kernels.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::apt::Apt;
use crate::checkout::{Checkout, create_folder, lock};
use crate::jobs;
use crate::kernels;
use crate::messages::{report, with_task_name};
use crate::programs::{self, SYSTEM_PATH, user_path};

/// Name of a tool and of its Debian package.
type Tool = (&'static str, &'static str);

/// Tools that the user may have installed.
const USER_TOOLS: [Tool; 3] =
    [("cc", "gcc"), ("qemu-system-x86_64", "qemu-system-x86"), ("qemu-img", "qemu-utils")];
/// Tools that must come from the distribution, because they build images or because scripts use
/// their options.
const SYSTEM_TOOLS: [Tool; 12] = [
    ("busybox", "busybox-static"),
    ("cpio", "cpio"),
    ("xz", "xz-utils"),
    ("lz4", "lz4"),
    ("depmod", "kmod"),
    ("mke2fs", "e2fsprogs"),
    ("sha256sum", "coreutils"),
    ("tar", "tar"),
    ("timeout", "coreutils"),
    ("flock", "util-linux"),
    ("setpriv", "util-linux"),
    ("strip", "binutils"),
];
/// File that static glibc programs need, and its package. No missing command reveals that the file
/// is missing.
const STATIC_LIBC: Tool = ("/usr/lib/x86_64-linux-gnu/libc.a", "libc6-dev");
const BUSYBOX_PACKAGE: &str = "busybox-static";

#[derive(Args)]
pub(crate) struct Arguments {
    /// Update ci/kernels.lock to the newest kernels on the mirror
    #[arg(long)]
    update_kernels: bool,
}

pub(crate) fn set_up(checkout: &Checkout, arguments: &Arguments) -> Result<()> {
    with_task_name("setup", || {
        create_folder(&checkout.ci(""))?;
        // Two concurrent runs would overwrite each other's unpacked files.
        let _lock = lock(&checkout.ci("setup.lock"))?;
        let mut apt = Apt::new(checkout);
        let missing = missing_packages()?;
        if !missing.is_empty() {
            apt.install(&missing)?;
        }
        add_components()?;
        if arguments.update_kernels {
            kernels::update(checkout, &mut apt)?;
        }
        kernels::pins(checkout)?.iter().try_for_each(|pin| kernels::fetch(checkout, &mut apt, pin))
    })
}

/// Sets up this machine without updating the pinned kernels.
pub(crate) fn ensure_set_up(checkout: &Checkout) -> Result<()> {
    set_up(checkout, &Arguments { update_kernels: false })
}

fn missing_packages() -> Result<Vec<&'static str>> {
    let user_path = user_path();
    let is_missing = |(tool, _): &&Tool| programs::find(tool, &user_path).is_none();
    let mut missing: Vec<_> = USER_TOOLS.iter().filter(is_missing).collect();
    missing.extend(
        SYSTEM_TOOLS.iter().filter(|(tool, _)| programs::find(tool, SYSTEM_PATH).is_none()),
    );
    if !Path::new(STATIC_LIBC.0).exists() {
        missing.push(&STATIC_LIBC);
    }
    let mut packages: Vec<_> = missing.into_iter().map(|(_, package)| *package).collect();
    if !packages.contains(&BUSYBOX_PACKAGE) && !has_static_busybox()? {
        packages.push(BUSYBOX_PACKAGE);
    }
    Ok(packages)
}

/// Returns false if another package installed busybox, because a dynamically linked busybox would
/// not run in an initramfs.
fn has_static_busybox() -> Result<bool> {
    let mut query = programs::system("dpkg-query");
    query.args(["-W", "-f", "${Status}", BUSYBOX_PACKAGE]).stderr(Stdio::null());
    let (_, status) = jobs::attempt(&mut query)?;
    Ok(status == "install ok installed")
}

/// Adds rustfmt and clippy, which a minimal Rust installation lacks. `ci/xtask/run` checks the
/// version of Rust, because an older version cannot build this program.
fn add_components() -> Result<()> {
    let works = |tool: &str| {
        let mut command = programs::user("cargo");
        let command = command.args([tool, "--version"]).stdout(Stdio::null()).stderr(Stdio::null());
        jobs::status(command).context("cannot run cargo").map(|status| status.success())
    };
    if works("fmt")? && works("clippy")? {
        return Ok(());
    }
    report!("adding rustfmt and clippy");
    if programs::find("rustup", user_path()).is_none() {
        bail!("cargo fmt and cargo clippy are missing; install them, or rustup, which adds them");
    }
    let mut rustup = programs::user("rustup");
    if !jobs::status(rustup.args(["component", "add", "rustfmt", "clippy"]))?.success() {
        bail!("rustup could not add rustfmt and clippy");
    }
    Ok(())
}
