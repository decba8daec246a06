//! VMM processes and their clients, for tests of the built programs.

#![allow(dead_code, reason = "each test program uses a part of this module")]

use std::fs::{self, File};
use std::io::{Read, Seek};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, geteuid, kill_process};
use tempfile::TempDir;

pub(crate) const FORESHORE: &str = env!("CARGO_BIN_EXE_foreshore");
pub(crate) const FORESHORE_REMOTE: &str = env!("CARGO_BIN_EXE_foreshore-remote");

/// Conditions are met, and processes end, within milliseconds. The limit only ends a test that has
/// failed.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Repeats `attempt` until it returns a value. `condition` names what the test waits for.
pub(crate) fn wait_for<T>(condition: &str, attempt: impl FnMut() -> Option<T>) -> T {
    wait_within(LIMIT, condition, attempt)
}

fn wait_within<T>(limit: Duration, condition: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(value) = attempt() {
            return value;
        }
        assert!(begin.elapsed() < limit, "timeout: {condition}");
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Process that is ended when this value is dropped.
pub(crate) struct Process {
    child: Child,
    /// Command for messages.
    command: String,
}

impl Process {
    pub(crate) fn spawn(command: &mut Command) -> Self {
        Self { child: command.spawn().unwrap(), command: format!("{command:?}") }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns `None` while the process is running.
    pub(crate) fn exit_status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.exit_status().is_none()
    }

    /// Waits until the process ends. Fails the test if it does not.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.wait_within(LIMIT)
    }

    fn wait_within(&mut self, limit: Duration) -> ExitStatus {
        let condition = format!("end of {}", self.command);
        wait_within(limit, &condition, || self.exit_status())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs a command to its end, and returns its output. Fails the test if it does not end.
pub(crate) fn output(command: &mut Command) -> Output {
    output_within(LIMIT, command)
}

/// Same as [`output`], with another limit.
pub(crate) fn output_within(limit: Duration, command: &mut Command) -> Output {
    // Unlike a pipe, a file holds all output until it is read.
    let mut files = [(); 2].map(|()| tempfile::tempfile().unwrap());
    let [stdout, stderr] = files.each_ref().map(|file| file.try_clone().unwrap());
    let command = command.stdin(Stdio::null()).stdout(stdout).stderr(stderr);
    let status = Process::spawn(command).wait_within(limit);
    let [stdout, stderr] = files.each_mut().map(|file| {
        let mut bytes = Vec::new();
        file.rewind().and_then(|()| file.read_to_end(&mut bytes)).unwrap();
        bytes
    });
    Output { status, stdout, stderr }
}

/// VMM process in a folder with its files. The log is printed if the test fails.
pub(crate) struct Vmm {
    pub(crate) process: Process,
    pub(crate) folder: TempDir,
}

impl Vmm {
    /// Starts a VMM with `command`, with its log in `folder`.
    pub(crate) fn spawn(folder: TempDir, command: &mut Command) -> Self {
        let log = File::create(folder.path().join("log")).unwrap();
        Self { process: Process::spawn(command.stderr(log)), folder }
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.file("log")).unwrap()
    }

    /// Waits until the log of a VMM with `-v` shows the address of `--metrics`.
    pub(crate) fn metrics_address(&mut self) -> SocketAddr {
        const START: &str = "Listening flag=\"--metrics\" address=";
        wait_for("address of metrics", || {
            let log = self.log();
            let mut lines = log.split_inclusive('\n').filter(|line| line.ends_with('\n'));
            let address = lines.find_map(|line| line.split_once(START));
            assert!(address.is_some() || self.process.is_running(), "the VMM has ended");
            address.map(|(_, address)| address.trim().parse().unwrap())
        })
    }

    pub(crate) fn remote(&self) -> Command {
        remote(&self.file("api"))
    }

    /// Runs `foreshore-remote`, and returns its exit status.
    pub(crate) fn request(&self, arguments: &[&str]) -> ExitStatus {
        output(self.remote().args(arguments)).status
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.log());
        }
    }
}

pub(crate) fn foreshore() -> Command {
    Command::new(FORESHORE)
}

/// Returns a `foreshore-remote` command for the VMM that listens on `api_socket`.
pub(crate) fn remote(api_socket: &Path) -> Command {
    let mut remote = Command::new(FORESHORE_REMOTE);
    remote.arg("--api-socket").arg(api_socket);
    remote
}

/// Waits until the VMM that listens on `api_socket` answers.
pub(crate) fn wait_for_answer(api_socket: &Path) {
    let output = output(remote(api_socket).args(["ping", "--wait"]));
    assert!(output.status.success(), "{output:?}");
}

/// Runs a VMM that ends by itself. Returns its exit code and its standard error.
pub(crate) fn run(arguments: &[&str]) -> (Option<i32>, String) {
    let Output { status, stderr, .. } = output(foreshore().args(arguments));
    (status.code(), String::from_utf8(stderr).unwrap())
}

/// Returns true if this process is of root. Otherwise, prints that the test is skipped. `task` is
/// what only root can do.
pub(crate) fn is_root(task: &str) -> bool {
    let is_root = geteuid().is_root();
    if !is_root {
        eprintln!("skipped: only root can {task}");
    }
    is_root
}
