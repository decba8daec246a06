//! VMM processes and their clients, for tests of the built programs.

#![allow(dead_code, reason = "each test program uses a part of this module")]

use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, geteuid, kill_process};
use tempfile::TempDir;

pub(crate) const FORESHORE: &str = env!("CARGO_BIN_EXE_foreshore");
pub(crate) const FORESHORE_REMOTE: &str = env!("CARGO_BIN_EXE_foreshore-remote");

/// Conditions are met within milliseconds. The limit only ends a test that has failed.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Repeats `attempt` until it returns a value. `condition` names what the test waits for.
pub(crate) fn wait_for<T>(condition: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(value) = attempt() {
            return value;
        }
        assert!(begin.elapsed() < LIMIT, "timeout: {condition}");
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Process that is ended when this value is dropped.
pub(crate) struct Process(Child);

impl Process {
    pub(crate) fn spawn(command: &mut Command) -> Self {
        Self(command.spawn().unwrap())
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    /// Returns `None` while the process is running.
    pub(crate) fn exit_status(&mut self) -> Option<ExitStatus> {
        self.0.try_wait().unwrap()
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.exit_status().is_none()
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.0.wait().unwrap()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
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
        let mut remote = self.remote();
        remote.args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap()
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
    let output = remote(api_socket).args(["ping", "--wait"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// Runs a VMM that ends by itself. Returns its exit code and its standard error.
pub(crate) fn run(arguments: &[&str]) -> (Option<i32>, String) {
    let Output { status, stderr, .. } = foreshore().args(arguments).output().unwrap();
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
