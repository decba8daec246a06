//! The command on this machine.

use std::env;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;

use anyhow::{Context, Result};

use super::job::{MEASURED_ON, copy_puts};
use super::measured::measured_on;
use super::place::{PLACE, Place};
use super::{Arguments, CUT_OFF};
use crate::checkout::{Checkout, create_folder, remove_file};
use crate::jobs::{self, Scratch};
use crate::kernels;
use crate::messages::{refuse, say};
use crate::programs::{self, user_path};

/// Exit code of a shell for a command that it does not find, and for one that it cannot run.
const NOT_FOUND: u8 = 127;
const NOT_RUN: u8 = 126;

/// Runs the command, and returns its exit code.
pub fn run(checkout: &Checkout, host: &Arguments, reason: &str) -> Result<u8> {
    if host.disk.is_some() || host.nvdimm_file.is_some() || host.power_cut.is_some() {
        // Cutting this machine's power is out of the question.
        refuse!("--disk, --nvdimm-file and --power-cut require {PLACE}=nested");
    }
    say!("running directly on this machine: {reason}");
    let work = Scratch::new(None, "foreshore.")?;
    copy_puts(host, work.path())?;
    let out = host.out.clone().unwrap_or_else(|| work.path().join("out"));
    create_folder(&out)?;
    let out = out.canonicalize()?;
    let guests = checkout.ci("guests");
    create_folder(&guests)?;
    for pin in kernels::pins(checkout)? {
        let link = guests.join(format!("vmlinuz-{}", pin.name));
        remove_file(&link)?;
        symlink(pin.image(checkout)?, &link).with_context(|| format!("Cannot link {}", link.display()))?;
    }
    let (program, arguments) = host.command.split_first().context("no command")?;
    let path = env::join_paths([checkout.programs()].into_iter().chain(env::split_paths(&user_path())))?;
    let mut command = programs::with_path(program, path);
    command.args(arguments).current_dir(work.path());
    command.env("GUESTS", guests).env("OUT", out).env(PLACE, Place::Direct.to_string());
    command.env(MEASURED_ON, measured_on(checkout, Place::Direct)?);
    let job = match jobs::spawn_killable(&mut command) {
        Ok(job) => job,
        Err(error) => {
            say!("{error:#}");
            let cause = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
            return Ok(if cause == Some(ErrorKind::NotFound) { NOT_FOUND } else { NOT_RUN });
        }
    };
    let Some(status) = job.wait_for(host.timeout())? else {
        say!("cut off after {} s", host.timeout_s);
        return Ok(CUT_OFF);
    };
    Ok(jobs::exit_code(status))
}
