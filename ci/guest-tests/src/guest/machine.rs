//! Machine with a guest under any VMM: its process, its console, and the shell in the guest.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use guest_tools::wait::{wait_for, wait_until};
use rustix::process::Signal;

use super::console::{self, LogTails, complaints};
use super::{Endpoint, Output, Script, VmmProcess};
use crate::holdings::Holdings;

/// Until init serves commands. A guest boots in 3 s in an emulated host that has nothing else to
/// do.
pub const BOOT_LIMIT: Duration = Duration::from_secs(60);

/// For a command that has nothing to wait for.
const RUN_LIMIT: Duration = Duration::from_secs(60);

/// Until the connection to a guest that ends is closed.
const END_LIMIT: Duration = Duration::from_secs(20);

/// Until threads and connections that end have ended.
const LEFT_LIMIT: Duration = Duration::from_secs(20);

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

    pub fn start_script(&self, silence_limit: Duration, command: &str) -> Result<Script> {
        Script::start(&self.endpoint, silence_limit, command)
    }

    /// Starts a load that fills `mib` MiB with incompressible data, and waits until it holds all of
    /// it. Fails if the load prints nothing for longer than the limit.
    pub fn hog(&self, mib: u64, silence_limit: Duration) -> Result<Script> {
        let mut hog = self.start_script(silence_limit, &format!("exec guest-tool hog {mib}"))?;
        hog.wait_for_line(&format!("held {mib}"))?;
        Ok(hog)
    }

    /// Waits until a command in the guest ends with zero.
    pub fn wait_until_run(&self, what: &str, limit: Duration, command: &str) -> Result<()> {
        self.wait_until(what, limit, || Ok(self.try_run(limit, command)?.code == 0))
    }

    /// Waits until the condition holds, but not past the end of the VMM.
    pub fn wait_until(
        &self,
        what: &str,
        limit: Duration,
        mut condition: impl FnMut() -> Result<bool>,
    ) -> Result<()> {
        wait_until(what, limit, || {
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

    /// Fails if the guest's kernel has complained: BUG, WARNING, Oops, hung tasks, stalls. Looks at
    /// the console and, while the guest runs, at its kernel log.
    pub fn no_kernel_complaints(&self) -> Result<()> {
        let mut log = self.console_log()?;
        if self.process.still_running().is_ok() {
            log += &self.run("dmesg")?;
        }
        let found = complaints(&log);
        ensure!(found.is_empty(), "The guest's kernel complains:\n{}", found.join("\n"));
        Ok(())
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Memory of the VMM's process that is resident, guest memory included.
    pub fn rss_bytes(&self) -> Result<u64> {
        self.process.smaps_rollup_bytes("Rss")
    }

    pub fn holdings(&self) -> Result<Holdings> {
        Holdings::of(self.pid())
    }

    /// Waits until the VMM has no more than it had before.
    pub fn wait_until_nothing_is_left(&self, before: &Holdings) -> Result<()> {
        let waited = self.wait_until("the VMM has what it had before", LEFT_LIMIT, || {
            Ok(self.holdings()?.are_those_of(before))
        });
        waited.with_context(|| format!("{:?}, and before {before:?}", self.holdings()))?;
        self.holdings()?.check_memory(before)
    }

    /// Kills the VMM, and does not wait for anything.
    pub fn kill_now(&self) -> Result<()> {
        self.process.kill_now()
    }

    /// Stops the VMM where it is, vCPUs and all, and waits until it has stopped: what it would
    /// leave if it were killed now can be looked at.
    pub fn stop(&self) -> Result<()> {
        self.process.stop()
    }

    /// Lets it go on.
    pub fn go_on(&self) -> Result<()> {
        self.process.signal(Signal::CONT)
    }

    /// Reboots the guest from inside and waits until the next boot serves commands. Its VMM must
    /// live on.
    pub fn reboot_from_inside(&self) -> Result<()> {
        const BOOT_ID: &str = "cat /proc/sys/kernel/random/boot_id";
        let before = self.run(BOOT_ID)?;
        self.run_to_its_end("sync; reboot -f")?;
        self.wait_until("the next boot serves commands", BOOT_LIMIT, || {
            // While it goes down and comes up again nobody answers, or the old boot still does.
            let answer = Script::start(&self.endpoint, RUN_LIMIT, BOOT_ID).and_then(Script::finish);
            Ok(answer.is_ok_and(|output| output.code == 0 && output.stdout != before))
        })
    }

    /// Runs a command that ends the guest: the connection dies with it, and no exit code comes.
    pub(super) fn run_to_its_end(&self, command: &str) -> Result<()> {
        match self.start_script(END_LIMIT, command)?.finish() {
            Ok(output) => bail!("`{command}` came back with {output:?}"),
            Err(_broken) => Ok(()),
        }
    }

    /// An error with its last words, if the VMM has ended.
    pub fn still_running(&self) -> Result<()> {
        self.process.still_running()
    }

    pub fn wait_for_shell(&self, limit: Duration) -> Result<()> {
        let answer = wait_for("the guest serves commands", limit, || {
            self.process.still_running()?;
            ensure!(
                !self.console_log()?.contains("---[ end Kernel panic"),
                "The guest's kernel has panicked"
            );
            // Before the guest listens the connection is refused, or the socket is not there yet.
            Ok(Script::start(&self.endpoint, RUN_LIMIT, "echo up").and_then(Script::finish).ok())
        });
        match answer {
            Ok(output) if output.stdout == "up\n" => Ok(()),
            Ok(output) => bail!("The guest's shell answers {output:?}"),
            Err(error) => Err(self.with_evidence(&error)),
        }
    }

    /// Adds the state of the VMM's threads and the last lines of the logs to an error.
    fn with_evidence(&self, error: &anyhow::Error) -> anyhow::Error {
        let logs = LogTails::read(&[
            ("the VMM's last lines", &self.log),
            ("the guest's last lines", &self.console),
        ]);
        let threads = format!("\n--- the VMM's threads\n{}", self.process.threads());
        logs.below(threads).context(console::without_logs(error))
    }
}
