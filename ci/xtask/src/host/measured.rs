//! A line that names what figures are measured on.

use std::fs;
use std::process::Stdio;

use anyhow::{Context, Result};

use super::mend;
use super::place::Place;
use super::qemu;
use crate::apt::sha256;
use crate::checkout::Checkout;
use crate::jobs;
use crate::kernels;
use crate::programs;

/// The programs by their commit, and the machine or the emulated host's kernel and QEMU. A mended
/// QEMU prints the version of the original.
pub(super) fn measured_on(checkout: &Checkout, place: Place) -> Result<String> {
    let ours = commit(checkout)?;
    if place == Place::Direct {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
        return Ok(format!("{ours}; this machine: {}, Linux {}", cpu_model()?, release.trim_end()));
    }
    let (original, used) = (qemu::program()?, mend::mended_qemu(checkout)?);
    let version = jobs::output(programs::user(&used).arg("--version"))?;
    let version = version.lines().next().unwrap_or_default();
    let is_mended = if used == original { "" } else { ", mended" };
    let kernel = kernels::pin(checkout, kernels::DEFAULT)?;
    let (linux, hash) = (kernel.version(), sha256(&used)?);
    Ok(format!("{ours}; emulated, Linux {linux}, {version}{is_mended}, sha256 {hash}"))
}

fn commit(checkout: &Checkout) -> Result<String> {
    let mut git = programs::user("git");
    git.arg("-C").arg(checkout.root()).args(["describe", "--always", "--dirty", "--abbrev=12"]);
    // Neither a repository nor git need be here.
    let described = jobs::attempt(git.stderr(Stdio::null()));
    let commit = described.ok().filter(|(status, _)| status.success());
    let commit =
        commit.map_or_else(|| "of no commit".to_owned(), |(_, commit)| commit.trim().to_owned());
    Ok(format!("foreshore {commit}"))
}

fn cpu_model() -> Result<String> {
    let cpus = fs::read_to_string("/proc/cpuinfo")?;
    let line = cpus.lines().find(|line| line.starts_with("model name"));
    let model =
        line.and_then(|line| line.split_once(": ")).context("/proc/cpuinfo has no model name")?;
    Ok(model.1.to_owned())
}
