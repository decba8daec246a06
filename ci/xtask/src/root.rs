//! Runs commands that need root.

use std::env;
use std::fs::File;
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Result, bail};

use crate::jobs;
use crate::programs::{self, SYSTEM_PATH};

/// Variable set by tasks that run this program as a background job. Such a job cannot ask for a
/// password, because it would be stopped when it reads from the terminal.
pub(crate) const IS_JOB: &str = "FORESHORE_IS_JOB";
const ADVICE: &str =
    "sudo asks for a password, which no job can give. Run `sudo -v`, and then this script again";

/// Method by which this user becomes root.
pub(crate) struct Root {
    is_root: bool,
    is_job: bool,
    /// Folders in which sudo is looked up.
    path: String,
}

impl Root {
    pub(crate) fn new() -> Self {
        Self {
            is_root: rustix::process::geteuid().is_root(),
            is_job: env::var_os(IS_JOB).is_some_and(|value| !value.is_empty()),
            path: SYSTEM_PATH.to_owned(),
        }
    }

    /// Runs a command as root. Other users run it through sudo.
    pub(crate) fn run(&self, arguments: &[&str], is_silent: bool) -> Result<ExitStatus> {
        self.require(arguments)?;
        let mut command = if self.is_root {
            let mut command = programs::with_path(arguments[0], &self.path);
            command.args(&arguments[1..]);
            command
        } else {
            self.sudo(arguments)
        };
        command.stdout(Stdio::null());
        if is_silent {
            command.stderr(Stdio::null());
        }
        if self.asks_for_password() {
            // Runs in the foreground, where sudo can ask for the password. Ctrl-C also ends the
            // command there.
            return Ok(command.stdin(Stdio::inherit()).status()?);
        }
        jobs::status(&mut command)
    }

    fn sudo(&self, arguments: &[&str]) -> Command {
        let mut command = programs::with_path("sudo", &self.path);
        if !self.asks_for_password() {
            command.arg("-n");
        }
        command.args(arguments);
        command
    }

    /// Returns an error if this user cannot run the command as root.
    pub(crate) fn require(&self, arguments: &[&str]) -> Result<()> {
        if !self.is_root && programs::find("sudo", &self.path).is_none() {
            bail!("needs root for: {} (neither root nor sudo here)", arguments.join(" "));
        }
        Ok(())
    }

    /// Returns a remedy if sudo would ask a background job for a password, and an empty text
    /// otherwise. sudo remembers a password only for some minutes, and a job may need root later
    /// than that.
    pub(crate) fn advice(&self) -> String {
        if self.is_root || self.remembers_password() {
            String::new()
        } else {
            format!(": {ADVICE}")
        }
    }

    /// Returns true if sudo would ask for a password and a terminal is available.
    fn asks_for_password(&self) -> bool {
        !self.is_root
            && !self.is_job
            && File::open("/dev/tty").is_ok()
            && !self.remembers_password()
    }

    fn remembers_password(&self) -> bool {
        let mut command = programs::with_path("sudo", &self.path);
        let command = command.args(["-n", "true"]).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn job_without_sudo_or_password_gets_a_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().display().to_string();
        let root = Root { is_root: false, is_job: true, path };
        let error = root.run(&["apt-get", "install"], true).unwrap_err();
        let expected = "needs root for: apt-get install (neither root nor sudo here)";
        assert_eq!(error.to_string(), expected);
        // Behaves like `sudo -n` after sudo has forgotten the password.
        let sudo = folder.path().join("sudo");
        fs::write(&sudo, "#!/bin/sh\n[ \"$1\" = -n ] || exit 0\nexit 1\n").unwrap();
        fs::set_permissions(&sudo, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(!root.run(&["apt-get", "install"], true).unwrap().success());
        assert!(root.advice().contains("Run `sudo -v`"));
    }
}
