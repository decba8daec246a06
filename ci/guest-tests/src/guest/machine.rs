//! A guest under any VMM: the VMM's process, the console, and the shell in the guest.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use guest_tools::wait::{wait_for, wait_until};
use rustix::process::Signal;

use super::console::{self, LogTails, complaints};
use super::{Endpoint, Output, Script, VmmProcess};
use crate::boots;
use crate::resource_counts::ResourceCounts;

/// Time limit for a boot until init accepts commands. On an emulated host without other load, a
/// boot takes 3 s.
pub const BOOT_LIMIT: Duration = Duration::from_secs(60);

/// Time limit for a command that does not wait for anything.
const RUN_LIMIT: Duration = Duration::from_secs(60);

/// Time limit for the connection to close when a guest ends.
const END_LIMIT: Duration = Duration::from_secs(20);

/// Time limit for threads and connections that are about to end.
const FREE_LIMIT: Duration = Duration::from_secs(20);

#[derive(Debug)]
pub struct Machine {
    pub(crate) process: VmmProcess,
    pub(crate) endpoint: Endpoint,
    pub(crate) console: PathBuf,
    pub(crate) log: PathBuf,
}

impl Machine {
    pub fn run(&self, command: &str) -> Result<String> {
        self.run_within(RUN_LIMIT, command)
    }

    pub fn run_within(&self, limit: Duration, command: &str) -> Result<String> {
        self.try_run(limit, command)?.success(command)
    }

    pub fn try_run(&self, limit: Duration, command: &str) -> Result<Output> {
        self.start_script(limit, command)?
            .finish()
            .with_context(|| format!("While the guest ran `{command}`"))
    }

    /// Starts a command and lets the caller read its output while it runs. Dropping the script
    /// kills it.
    pub fn start_script(&self, silence_limit: Duration, command: &str) -> Result<Script> {
        Script::start(&self.endpoint, silence_limit, command)
    }

    /// Starts a load that fills `mib` MiB with incompressible data, and waits until the guest holds
    /// all of it. Fails if the load prints nothing for longer than the limit.
    pub fn hog(&self, mib: u64, silence_limit: Duration) -> Result<Script> {
        let mut hog = self.start_script(silence_limit, &format!("exec guest-tool hog {mib}"))?;
        hog.wait_for_line(&format!("held {mib}"))?;
        Ok(hog)
    }

    /// Repeats a command in the guest until it exits with 0.
    pub fn wait_until_run(&self, description: &str, limit: Duration, command: &str) -> Result<()> {
        self.wait_until(description, limit, || Ok(self.try_run(limit, command)?.code == 0))
    }

    /// Waits until the condition is true. Fails if the VMM ends first.
    pub fn wait_until(
        &self,
        description: &str,
        limit: Duration,
        mut condition: impl FnMut() -> Result<bool>,
    ) -> Result<()> {
        wait_until(description, limit, || {
            self.process.still_running()?;
            condition()
        })
    }

    pub fn console_file(&self) -> PathBuf {
        self.console.clone()
    }

    pub fn console_log(&self) -> Result<String> {
        console::read(&self.console)
    }

    pub fn vmm_log(&self) -> Result<String> {
        console::read(&self.log)
    }

    /// Fails if the guest's kernel has reported an error: BUG, WARNING, Oops, a hung task or a
    /// stall. Reads the console and, if the guest is running, its kernel log.
    pub fn no_kernel_complaints(&self) -> Result<()> {
        let mut log = self.console_log()?;
        if self.process.still_running().is_ok() {
            log += &self.run("dmesg")?;
        }
        let found = complaints(&log);
        ensure!(found.is_empty(), "The guest's kernel logged errors:\n{}", found.join("\n"));
        Ok(())
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Resident memory of the VMM process, including guest memory.
    pub fn rss_bytes(&self) -> Result<u64> {
        self.process.smaps_rollup_bytes("Rss")
    }

    pub fn resource_counts(&self) -> Result<ResourceCounts> {
        ResourceCounts::of(self.pid())
    }

    /// Waits until the VMM uses no more resources than before.
    pub fn wait_until_resources_are_freed(&self, before: &ResourceCounts) -> Result<()> {
        let waited =
            self.wait_until("the VMM holds the same resources as before", FREE_LIMIT, || {
                Ok(self.resource_counts()?.has_no_more_than(before))
            });
        waited.with_context(|| format!("{:?}, before: {before:?}", self.resource_counts()))?;
        self.resource_counts()?.check_memory(before)
    }

    /// Kills the VMM without waiting until it has ended.
    pub fn kill_now(&self) -> Result<()> {
        self.process.kill_now()
    }

    /// Stops the VMM with all its vCPUs, and waits until it has stopped. Its files are then in the
    /// state that a kill at this time would leave.
    pub fn stop(&self) -> Result<()> {
        self.process.stop()
    }

    /// Resumes a stopped VMM.
    pub fn resume(&self) -> Result<()> {
        self.process.signal(Signal::CONT)
    }

    /// Reboots the guest from inside, and waits until the new boot accepts commands. The VMM should
    /// keep running.
    pub fn reboot_from_inside(&self) -> Result<()> {
        const BOOT_ID: &str = "cat /proc/sys/kernel/random/boot_id";
        let before = self.run(BOOT_ID)?;
        let started = Instant::now();
        self.run_to_its_end("sync; reboot -f")?;
        self.wait_until("the next boot serves commands", BOOT_LIMIT, || {
            // During the reboot, no shell responds, or the shell of the old boot still does.
            let answer = Script::start(&self.endpoint, RUN_LIMIT, BOOT_ID).and_then(Script::finish);
            Ok(answer.is_ok_and(|output| output.code == 0 && output.stdout != before))
        })?;
        boots::add_to_this_test(started.elapsed())
    }

    /// Runs a command that ends the guest. The connection breaks before an exit code arrives.
    pub(super) fn run_to_its_end(&self, command: &str) -> Result<()> {
        match self.start_script(END_LIMIT, command)?.finish() {
            Ok(output) => bail!("`{command}` returned {output:?}"),
            Err(_broken) => Ok(()),
        }
    }

    /// Fails if the VMM has ended. The error contains the last lines of the log.
    pub fn still_running(&self) -> Result<()> {
        self.process.still_running()
    }

    pub fn wait_for_shell(&self, limit: Duration) -> Result<()> {
        let started = Instant::now();
        let answer = wait_for("the guest serves commands", limit, || {
            self.process.still_running()?;
            ensure!(
                !self.console_log()?.contains("---[ end Kernel panic"),
                "The guest's kernel has panicked"
            );
            // Until the guest listens, the connection is refused or the socket does not exist.
            Ok(Script::start(&self.endpoint, RUN_LIMIT, "echo up").and_then(Script::finish).ok())
        });
        match answer {
            Ok(output) if output.stdout == "up\n" => boots::add_to_this_test(started.elapsed()),
            Ok(output) => bail!("Unexpected answer of the guest's shell: {output:?}"),
            Err(error) => Err(self.with_evidence(&error)),
        }
    }

    /// Adds the states of the VMM's threads and the last lines of all logs to an error.
    fn with_evidence(&self, error: &anyhow::Error) -> anyhow::Error {
        let logs = LogTails::read(&[
            ("the VMM's last lines", &self.log),
            ("the guest's last lines", &self.console),
        ]);
        let threads = format!("\n--- the VMM's threads\n{}", self.process.threads());
        logs.below(threads).context(console::without_logs(error))
    }
}
