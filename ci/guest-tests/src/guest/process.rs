//! Process of a VMM.

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, Result};
use guest_tools::process::end_with_parent;
use guest_tools::wait::{wait_for, wait_until};
use rustix::process::{Pid, Signal, kill_process};

use super::console::LogTails;
use super::describe;
use crate::user::need_proc;

/// Returns the path of one of this repository's programs: FORESHORE_TEST_<NAME> if it is set, and
/// otherwise the program in PATH. A test can therefore run with a debug build or another VMM.
pub fn program(name: &str) -> PathBuf {
    let variable = format!("FORESHORE_TEST_{}", name.to_uppercase().replace('-', "_"));
    std::env::var_os(variable).map_or_else(|| PathBuf::from(name), PathBuf::from)
}

/// Makes `command` start a session on `terminal`. The terminal is its standard input and output,
/// and its controlling terminal.
pub(super) fn at_terminal(command: &mut Command, terminal: &Path) -> Result<()> {
    let terminal = CString::new(terminal.as_os_str().as_bytes())?;
    let begin_session = move || {
        // SAFETY: the calls are async-signal-safe, and the path is a C string that outlives them. A
        // terminal that a session leader opens becomes its controlling terminal.
        let is_terminal = unsafe {
            libc::setsid();
            let fd = libc::open(terminal.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
            fd >= 0 && libc::dup2(fd, 0) == 0 && libc::dup2(fd, 1) == 1
        };
        if is_terminal { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    // SAFETY: the closure only makes system calls that are async-signal-safe, and does not
    // allocate.
    unsafe { command.pre_exec(begin_session) };
    Ok(())
}

/// Running VMM. Drop kills it.
#[derive(Debug)]
pub struct VmmProcess {
    /// Behind a lock, because waiting modifies it, and tests check whether it is running while they
    /// use the guest.
    child: Mutex<Child>,
    pid: u32,
    log: PathBuf,
}

impl VmmProcess {
    pub fn start(command: &mut Command, log: &Path) -> Result<Self> {
        let output = File::options().create(true).append(true).open(log);
        let output = output.with_context(|| format!("Cannot open {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        // The VMM should not outlive a test process that dies.
        let child = end_with_parent(command)
            .spawn()
            .with_context(|| format!("Cannot start {:?}", command.get_program()))?;
        Ok(Self { pid: child.id(), child: Mutex::new(child), log: log.to_owned() })
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Fails if the VMM has ended. The error contains the last lines of the log.
    pub fn still_running(&self) -> Result<()> {
        let status = self.child.lock().expect("no holder panics").try_wait()?;
        match status {
            None => Ok(()),
            Some(status) => Err(LogTails::read(&[("the VMM's last lines", &self.log)])
                .below(format!("The VMM has ended with {}", describe(status)))),
        }
    }

    pub fn kill(&mut self) -> Result<()> {
        let child = self.child.get_mut().expect("no holder panics");
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    pub fn kill_now(&self) -> Result<()> {
        self.signal(Signal::KILL)
    }

    pub fn stop(&self) -> Result<()> {
        self.signal(Signal::STOP)?;
        wait_until("the VMM has stopped", STOP_LIMIT, || {
            self.still_running()?;
            threads_have_stopped(self.pid)
        })
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        // The child cannot be reaped while the lock is held, so its process ID cannot be reused.
        let child = self.child.lock().expect("no holder panics");
        kill_process(Pid::from_child(&child), signal)
            .with_context(|| format!("Cannot send {signal:?} to the VMM"))
    }

    /// Returns a line for each thread, with its name, its state and the kernel function in which it
    /// waits. If a guest hangs, this shows whether the VMM blocks it.
    pub fn threads(&self) -> String {
        let task = format!("/proc/{}/task", self.pid);
        let lines = fs::read_dir(task).into_iter().flatten().flatten().map(|thread| {
            let file = |name| fs::read_to_string(thread.path().join(name)).unwrap_or_default();
            let stat = file("stat");
            let state = state_of(&stat).unwrap_or('?');
            format!("{}: {state}, {}", file("comm").trim_end(), file("wchan"))
        });
        lines.collect::<Vec<_>>().join("\n")
    }

    pub fn wait_for_exit(&mut self, limit: Duration) -> Result<ExitStatus> {
        let child = self.child.get_mut().expect("no holder panics");
        wait_for("the VMM ended", limit, || Ok(child.try_wait()?))
    }

    /// Returns a field of /proc/PID/smaps_rollup in bytes, for example `Rss`, `Pss` or `Anonymous`.
    pub fn smaps_rollup_bytes(&self, field: &str) -> Result<u64> {
        let path = need_proc(self.pid, "smaps_rollup")?;
        let text =
            fs::read_to_string(&path).with_context(|| format!("Cannot read {}", path.display()))?;
        let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        let kib = line.and_then(|rest| rest.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
        Ok(kib.with_context(|| format!("smaps_rollup has no {field}"))? * 1024)
    }
}

const STOP_LIMIT: Duration = Duration::from_secs(20);

/// Returns true if all threads of a process are in state T (proc(5)).
fn threads_have_stopped(pid: u32) -> Result<bool> {
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        let stat = fs::read_to_string(thread?.path().join("stat"))?;
        if state_of(&stat) != Some('T') {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns the state in a line of /proc/PID/stat. The name in parentheses before it may contain any
/// character.
fn state_of(stat: &str) -> Option<char> {
    stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next())
}

impl Drop for VmmProcess {
    fn drop(&mut self) {
        // An error is ignored, because the process may already have ended.
        let _ = self.kill();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ended_process_is_reported_with_the_end_of_its_log() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let mut process =
            VmmProcess::start(Command::new("sh").args(["-c", "echo no kvm here; exit 3"]), &log)
                .unwrap();
        process.wait_for_exit(Duration::from_secs(10)).unwrap();
        let error = format!("{:#}", process.still_running().unwrap_err());
        assert!(error.contains("exit code 3") && error.contains("no kvm here"), "{error}");
    }

    #[test]
    fn stopped_process_continues_only_after_a_signal() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let count = "while :; do echo; sleep 0.001; done";
        let process = VmmProcess::start(Command::new("sh").args(["-c", count]), &log).unwrap();
        let length = || fs::metadata(&log).unwrap().len();
        let grows = |from| {
            wait_until("it counts", Duration::from_secs(10), || Ok(length() > from)).unwrap()
        };
        grows(0);
        process.stop().unwrap();
        let stopped = length();
        assert!(threads_have_stopped(process.pid()).unwrap());
        assert!(process.threads().starts_with("sh: T, "), "{}", process.threads());
        process.signal(Signal::CONT).unwrap();
        grows(stopped);
        assert!(!threads_have_stopped(process.pid()).unwrap());
    }

    #[test]
    fn memory_is_read_from_smaps() {
        let dir = tempfile::tempdir().unwrap();
        let process =
            VmmProcess::start(Command::new("sleep").arg("60"), &dir.path().join("log")).unwrap();
        assert!(process.smaps_rollup_bytes("Rss").unwrap() > 0);
        assert!(process.smaps_rollup_bytes("NoSuchField").is_err());
    }
}
