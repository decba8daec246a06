//! Child processes and temporary folders that this process cleans up when it ends, even after a
//! signal.
//!
//! Each job is a process group of its own, so Ctrl-C at a terminal does not reach it. On SIGINT,
//! SIGTERM or SIGHUP, a thread ends all groups, removes the temporary folders, and ends this
//! process.

use std::fs;
use std::io::{self, PipeReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitOptions, kill_process_group, test_kill_process_group,
    waitid, waitpid,
};
use tempfile::TempDir;

/// Base of a shell's exit code for a command that a signal ended. The shell adds the signal's
/// number.
pub(crate) const SIGNAL_BASE: u8 = 128;
const SIGNALS: [Signal; 3] = [Signal::HUP, Signal::INT, Signal::TERM];
/// Time after SIGTERM until a killable job is killed.
pub(crate) const GRACE: Duration = Duration::from_secs(5);
/// Time for all jobs together to end.
const END_LIMIT: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(20);

static STATE: Mutex<State> =
    Mutex::new(State { groups: Vec::new(), folders: Vec::new(), is_ending: false });

struct State {
    groups: Vec<Group>,
    folders: Vec<PathBuf>,
    /// Set when a signal has arrived. No job is started afterwards.
    is_ending: bool,
}

#[derive(Clone, Copy)]
struct Group {
    leader: Pid,
    is_killable: bool,
}

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Running child process that leads a process group.
pub(crate) struct Job {
    child: Child,
    leader: Pid,
}

impl Job {
    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    pub(crate) fn wait(&mut self) -> Result<ExitStatus> {
        // The zombie must be left until signals can no longer be sent to it, so that its process ID
        // is not reused.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while matches!(waitid(WaitId::Pid(self.leader), options), Err(Errno::INTR)) {}
        self.reap()
    }

    /// Returns the exit status if the child has ended.
    pub(crate) fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        match waitid(WaitId::Pid(self.leader), options) {
            Ok(None) | Err(Errno::INTR) => Ok(None),
            _ => self.reap().map(Some),
        }
    }

    /// Returns the process group, or `None` after the child has been reaped.
    fn group(&self) -> Option<Group> {
        state().groups.iter().find(|group| group.leader == self.leader).copied()
    }

    fn reap(&mut self) -> Result<ExitStatus> {
        let is_ending = {
            let mut state = state();
            state.groups.retain(|group| group.leader != self.leader);
            state.is_ending
        };
        let status = self.child.wait();
        if is_ending {
            park();
        }
        Ok(status?)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        // The group may have ended already.
        let _ = kill_process_group(self.leader, signal);
    }
}

impl Drop for Job {
    /// Ends a job that was abandoned because of an error.
    fn drop(&mut self) {
        let Some(group) = self.group() else { return };
        end_groups(&[group]);
        let _ = self.reap();
    }
}

/// Blocks forever, because the signal thread ends the process.
fn park() -> ! {
    loop {
        thread::park();
    }
}

/// Starts a job that receives SIGTERM when this process ends. It is never killed with SIGKILL.
pub(crate) fn spawn(command: &mut Command) -> Result<Job> {
    start(command, false)
}

/// Starts a job that is killed with SIGKILL if it ignores SIGTERM.
pub(crate) fn spawn_killable(command: &mut Command) -> Result<Job> {
    start(command, true)
}

fn start(command: &mut Command, is_killable: bool) -> Result<Job> {
    let mut state = state();
    if state.is_ending {
        drop(state);
        park();
    }
    let child = command
        .process_group(0)
        .spawn()
        .with_context(|| format!("Cannot run {}", name(command)))?;
    let leader = Pid::from_child(&child);
    state.groups.push(Group { leader, is_killable });
    Ok(Job { child, leader })
}

fn name(command: &Command) -> String {
    command.get_program().display().to_string()
}

/// Runs a command as a job, and returns its exit status.
pub(crate) fn status(command: &mut Command) -> Result<ExitStatus> {
    spawn(command)?.wait()
}

/// Runs a command as a job. Returns an error if the command fails.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = status(command)?;
    check(command, status)
}

/// Runs a command as a job and returns its output. Returns an error if the command fails.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let (status, output) = attempt(command)?;
    check(command, status)?;
    Ok(output)
}

/// Runs a command as a job, and returns its exit status and output.
pub(crate) fn attempt(command: &mut Command) -> Result<(ExitStatus, String)> {
    let mut output = Vec::new();
    let status = stream_output(command, |bytes| {
        output.extend_from_slice(bytes);
        Ok(())
    })?;
    let output = String::from_utf8(output);
    Ok((status, output.with_context(|| format!("Output of {}", name(command)))?))
}

/// Runs a command as a job, immediately forwards its output and errors, and returns its exit
/// status.
pub(crate) fn stream(
    command: &mut Command,
    receive: impl FnMut(&[u8]) -> Result<()>,
) -> Result<ExitStatus> {
    let (reader, writer) = io::pipe()?;
    let job = spawn(command.stdout(writer.try_clone()?).stderr(writer))?;
    // The command itself holds write ends of the pipe.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    drain(command, job, reader, receive)
}

/// Runs a command as a job, immediately forwards its output, and returns its exit status. The job
/// inherits this process's standard error.
pub(crate) fn stream_output(
    command: &mut Command,
    receive: impl FnMut(&[u8]) -> Result<()>,
) -> Result<ExitStatus> {
    let mut job = spawn(command.stdout(Stdio::piped()))?;
    let output = job.child.stdout.take().context("standard output is not piped")?;
    drain(command, job, output, receive)
}

/// Forwards the content of a pipe until all writers have closed it, and returns the job's exit
/// status.
fn drain(
    command: &Command,
    mut job: Job,
    mut reader: impl Read,
    mut receive: impl FnMut(&[u8]) -> Result<()>,
) -> Result<ExitStatus> {
    let mut buffer = [0; 8192];
    loop {
        let read = match reader.read(&mut buffer) {
            Ok(0) => return job.wait(),
            Ok(len) => receive(&buffer[..len]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(error.into()),
        };
        read.with_context(|| format!("Output of {}", name(command)))?;
    }
}

/// Returns an error unless the command succeeded.
pub(crate) fn check(command: &Command, status: ExitStatus) -> Result<()> {
    if !status.success() {
        bail!("{} failed: {status}", name(command));
    }
    Ok(())
}

/// Returns the exit code that a shell would report for a process.
pub(crate) fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| Some(status.signal()? + i32::from(SIGNAL_BASE)));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}

/// Temporary folder. It is removed on drop and when a signal ends this process.
pub(crate) struct Scratch(TempDir);

impl Scratch {
    /// Creates a folder below `parent`, or in the default folder for temporary files if `parent` is
    /// `None`.
    pub(crate) fn new(parent: Option<&Path>, prefix: &str) -> Result<Self> {
        let mut builder = tempfile::Builder::new();
        builder.prefix(prefix);
        let mut state = state();
        if state.is_ending {
            drop(state);
            park();
        }
        let folder = match parent {
            Some(parent) => builder.tempdir_in(parent),
            None => builder.tempdir(),
        };
        let folder = folder.context("Cannot create a temporary folder")?;
        state.folders.push(folder.path().to_owned());
        Ok(Self(folder))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        state().folders.retain(|folder| folder != self.0.path());
    }
}

/// Starts a thread that ends this process and its jobs when a signal arrives.
pub(crate) fn end_on_signals() -> Result<()> {
    let (reader, writer) = io::pipe()?;
    let writer = std::sync::Arc::new(writer);
    let ignored = ignored_signals()?;
    for signal in SIGNALS.into_iter().filter(|signal| ignored & 1 << (signal.as_raw() - 1) == 0) {
        let writer = writer.clone();
        let byte = [u8::try_from(signal.as_raw())?];
        let action = move || {
            let _ = rustix::io::write(&*writer, &byte);
        };
        // SAFETY: the handler only calls write(2), which signal-safety(7) allows.
        unsafe { signal_hook_registry::register(signal.as_raw(), action) }?;
    }
    thread::spawn(move || wait_for_signal(reader));
    Ok(())
}

/// Returns a bit mask of the signals that the parent process ignored, as `nohup` does. This process
/// ignores them too.
fn ignored_signals() -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).context("no SigIgn")?;
    Ok(u64::from_str_radix(mask.trim(), 16)?)
}

fn wait_for_signal(mut reader: PipeReader) {
    let mut signal = [0];
    if reader.read_exact(&mut signal).is_ok() {
        end(signal[0]);
    }
}

/// Ends all jobs and this process.
fn end(signal: u8) -> ! {
    let groups = {
        let mut state = state();
        state.is_ending = true;
        state.groups.clone()
    };
    end_groups(&groups);
    for folder in &state().folders {
        let _ = fs::remove_dir_all(folder);
    }
    std::process::exit(i32::from(SIGNAL_BASE + signal));
}

fn end_groups(groups: &[Group]) {
    for group in groups {
        let _ = kill_process_group(group.leader, Signal::TERM);
        // A stopped process handles SIGTERM only after it continues.
        let _ = kill_process_group(group.leader, Signal::CONT);
    }
    let started = Instant::now();
    while groups.iter().any(|group| is_running(*group)) && started.elapsed() < END_LIMIT {
        if started.elapsed() >= GRACE {
            for group in groups.iter().filter(|group| group.is_killable) {
                let _ = kill_process_group(group.leader, Signal::KILL);
            }
        }
        thread::sleep(POLL);
    }
}

/// Returns true if the group contains a process other than a zombie of this process.
fn is_running(group: Group) -> bool {
    // The main thread may reap the process at the same time.
    let _ = waitpid(Some(group.leader), WaitOptions::NOHANG);
    test_kill_process_group(group.leader).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_that_an_error_leaves_behind_ends_with_its_group() {
        let mut command = Command::new("sh");
        let mut job =
            spawn(command.args(["-c", "sleep 1000 & echo $!; wait"]).stdout(Stdio::piped()))
                .unwrap();
        let (mut line, leader) = (String::new(), job.leader);
        let mut output = io::BufReader::new(job.child().stdout.take().unwrap());
        io::BufRead::read_line(&mut output, &mut line).unwrap();
        let failing = move || -> Result<()> {
            let _job = job;
            bail!("an error")
        };
        failing().unwrap_err();
        test_kill_process_group(leader).unwrap_err();
        assert!(state().groups.iter().all(|group| group.leader != leader));
    }

    #[test]
    fn output_and_errors_are_streamed_in_their_order() {
        let mut command = Command::new("sh");
        let mut streamed = Vec::new();
        let status =
            stream(command.args(["-c", "echo a; echo b >&2; printf c; exit 3"]), |bytes| {
                streamed.extend_from_slice(bytes);
                Ok(())
            });
        assert_eq!(status.unwrap().code(), Some(3));
        assert_eq!(streamed, b"a\nb\nc");
    }

    #[test]
    fn receiver_that_fails_ends_a_job_that_is_silent() {
        let folder = tempfile::tempdir().unwrap();
        let late = folder.path().join("late");
        let script = format!("echo first; sleep 20; echo late >{}", late.display());
        let mut received = Vec::new();
        let result = stream_output(Command::new("sh").args(["-c", &script]), |bytes| {
            received.extend_from_slice(bytes);
            bail!("disk full")
        });
        assert_eq!(result.unwrap_err().root_cause().to_string(), "disk full");
        assert_eq!(received, b"first\n");
        assert!(!late.exists());
    }

    #[test]
    fn exit_code_of_a_signal_is_that_of_a_shell() {
        let code =
            |script: &str| exit_code(status(Command::new("sh").args(["-c", script])).unwrap());
        assert_eq!(code("exit 7"), 7);
        assert_eq!(code("kill -KILL $$"), 137);
    }
}
