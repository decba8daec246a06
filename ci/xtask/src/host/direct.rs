//! Runs the command on this machine.

use std::env;
use std::os::unix::process::ExitStatusExt;
use std::time::Instant;

use anyhow::{Context, Result};
use rustix::process::Signal;

use super::host_kind::{HOST_VARIABLE, HostKind, measured_on};
use super::job::{MEASURED_ON, copy_puts};
use super::{Arguments, CUT_OFF};
use crate::checkout::{Checkout, create_folder, link};
use crate::jobs::{self, GRACE, Scratch};
use crate::kernels;
use crate::messages::{refuse, report};
use crate::programs::{self, user_path};

pub(super) fn run(checkout: &Checkout, host: &Arguments, reason: &str) -> Result<u8> {
    if host.disk.is_some() || host.nvdimm_file.is_some() || host.power_cut.is_some() {
        // A task must not cut the power of this machine.
        refuse!("--disk, --nvdimm-file and --power-cut require {HOST_VARIABLE}=nested");
    }
    report!("running directly on this machine: {reason}");
    let work = Scratch::new(None, "foreshore.")?;
    copy_puts(host, work.path())?;
    let out = host.out.clone().unwrap_or_else(|| work.path().join("out"));
    create_folder(&out)?;
    let out = out.canonicalize()?;
    let guests = checkout.ci("guests");
    create_folder(&guests)?;
    for pin in kernels::pins(checkout)? {
        link(&pin.image(checkout)?, &guests.join(format!("vmlinuz-{}", pin.name)))?;
    }
    let (program, arguments) = host.command.split_first().context("no command")?;
    let ours = [checkout.programs(), checkout.test_programs()];
    let path = env::join_paths(ours.into_iter().chain(env::split_paths(&user_path())))?;
    // timeout kills the whole process group, even if this task is killed.
    let mut command =
        programs::ending_with_this_one("TERM", &programs::find_system("timeout")?, path)?;
    command.args(["-k", &GRACE.as_secs().to_string(), &host.timeout_s.to_string()]);
    command.arg(program).args(arguments).current_dir(work.path());
    command.env("GUESTS", guests).env("OUT", out).env(HOST_VARIABLE, HostKind::Direct.to_string());
    command.env(MEASURED_ON, measured_on(checkout, HostKind::Direct)?);
    let started = Instant::now();
    let status = jobs::spawn_killable(&mut command)?.wait()?;
    // If timeout(1) has to use SIGKILL, it ends by SIGKILL itself.
    let may_be_cut_off =
        status.code() == Some(CUT_OFF.into()) || status.signal() == Some(Signal::KILL.as_raw());
    if may_be_cut_off && started.elapsed() >= host.timeout() {
        report!("cut off after {} s", host.timeout_s);
        return Ok(CUT_OFF);
    }
    Ok(jobs::exit_code(status))
}
