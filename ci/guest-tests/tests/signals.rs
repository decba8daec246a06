//! SIGTERM to a script under ci/ or guest/ ends everything that the script has started.
//!
//! The scripts are copied to a directory of their own. A stub takes the place of each program that takes long.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use guest_tests::{wait_for, wait_until};
use tempfile::TempDir;

/// Scripts that other scripts run.
const HELPERS: [&str; 4] = ["ci/setup", "guest/image/build", "ci/nested/build-root", "ci/nested/build-peers"];
/// Programs that would change the machine or take long, or that a machine may lack.
const PROGRAMS: [&str; 4] = ["bin/apt-get", "bin/cargo", "bin/gnuplot", "bin/qemu-system-x86_64"];
const LIMIT: Duration = Duration::from_secs(20);
const DONE: &str = "#!/bin/sh\n";
/// Starts a process that lasts until a signal ends it, and writes its number to `$STARTED`.
const LASTING: &str =
    "#!/bin/sh\nsleep 1000 &\necho $! >\"$STARTED.new\"\nmv \"$STARTED.new\" \"$STARTED\"\nwait\n";

/// A copy of the scripts.
struct Tree(TempDir);

impl Tree {
    /// Copies `script`. Its helpers end at once, except `lasting`.
    fn new(script: &str, lasting: &str) -> Result<Self> {
        let tree = Self(TempDir::new()?);
        let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for stub in HELPERS.into_iter().chain(PROGRAMS) {
            tree.write(stub, DONE)?;
        }
        tree.write(lasting, LASTING)?;
        for copied in ["ci/lib.sh", "ci/nested/host", script] {
            tree.write(copied, &fs::read_to_string(repository.join(copied))?)?;
        }
        tree.prefer_stubs()?;
        fs::create_dir(tree.0.path().join("tmp"))?;
        // There are no kernels.
        tree.write("ci/kernels.lock", "")?;
        Ok(tree)
    }

    /// Makes the stubs programs of the distribution.
    fn prefer_stubs(&self) -> Result<()> {
        let system_path = "SYSTEM_PATH=/usr/sbin:";
        let lib = fs::read_to_string(self.0.path().join("ci/lib.sh"))?;
        ensure!(lib.contains(system_path), "ci/lib.sh has no {system_path}");
        let stubs = format!("SYSTEM_PATH={}:/usr/sbin:", self.0.path().join("bin").display());
        self.write("ci/lib.sh", &lib.replace(system_path, &stubs))
    }

    fn write(&self, path: &str, text: &str) -> Result<()> {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().context("no folder")?)?;
        fs::write(&path, text)?;
        Ok(fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?)
    }

    /// Starts a script without a terminal, so that sudo cannot ask for a password.
    fn start(&self, line: &str, host: &str) -> Result<Child> {
        let path = std::env::var("PATH")?;
        let child = Command::new("setsid")
            .args(line.split(' '))
            .current_dir(&self.0)
            .env("PATH", format!("{}:{path}", self.0.path().join("bin").display()))
            .env("STARTED", self.0.path().join("started"))
            .env("FORESHORE_HOST", host)
            .env("TMPDIR", self.0.path().join("tmp"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()?;
        Ok(child)
    }

    /// Checks that the script has left no temporary files.
    fn assert_clean(&self) -> Result<()> {
        let left = fs::read_dir(self.0.path().join("tmp"))?.next().transpose()?;
        ensure!(left.is_none(), "{left:?} is left");
        Ok(())
    }

    /// The process that the stub has started, once it has.
    fn started(&self, script: &mut Child) -> Result<u32> {
        wait_for("the script runs the stub", LIMIT, || {
            if let Some(status) = script.try_wait()? {
                bail!("the script has ended: {status}");
            }
            let text = fs::read_to_string(self.0.path().join("started")).ok();
            Ok(text.map(|text| text.trim().parse()).transpose()?)
        })
    }
}

/// True until the process has ended. A zombie has ended.
fn is_running(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| stat.rsplit(") ").next().is_some_and(|rest| !rest.starts_with(['Z', 'X'])))
}

fn signal(pid: u32, signal: i32) {
    // SAFETY: takes numbers only.
    unsafe { libc::kill(pid.cast_signed(), signal) };
}

/// Checks that a process has ended, or is about to. Ends it if it is not.
fn has_ended(pid: u32) -> Result<()> {
    let ended = wait_until("its process has ended", Duration::from_secs(1), || Ok(!is_running(pid)));
    if ended.is_err() {
        signal(pid, libc::SIGKILL);
    }
    ended
}

fn check(line: &str, lasting: &str, host: &str) -> Result<()> {
    let tree = Tree::new(line.split(' ').next().unwrap_or(line), lasting)?;
    let mut script = tree.start(line, host)?;
    let started = tree.started(&mut script).inspect_err(|_| signal(script.id(), libc::SIGKILL))?;
    signal(script.id(), libc::SIGTERM);
    let status = wait_for("the script has ended", LIMIT, || Ok(script.try_wait()?));
    has_ended(started)?;
    // The exit status of a shell, or the signal itself.
    let status = status?;
    ensure!(status.code() == Some(143) || status.signal() == Some(libc::SIGTERM), "{status}");
    tree.assert_clean()
}

#[test]
fn script_that_gets_term_ends_all_its_processes() {
    let cases = [
        ("ci/nested/host --no-build -- stub", "bin/stub", "direct"),
        ("ci/nested/host --no-build -- stub", "ci/setup", "direct"),
        ("ci/nested/host -- stub", "guest/image/build", "direct"),
        ("ci/nested/host --no-build -- stub", "ci/nested/build-root", "nested"),
        ("ci/nested/host --no-build --peers -- stub", "ci/nested/build-peers", "nested"),
        ("ci/setup", "bin/flock", "direct"),
        ("guest/image/build", "bin/flock", "direct"),
        ("ci/nested/build-root", "bin/flock", "direct"),
        ("ci/nested/build-peers", "bin/flock", "direct"),
        ("ci/test", "ci/setup", "direct"),
        ("ci/demo", "ci/setup", "direct"),
        ("ci/demo", "guest/image/build", "direct"),
        ("ci/bench", "ci/setup", "direct"),
        ("ci/soak", "ci/setup", "direct"),
    ];
    // All cases run at the same time, because a script may wait until init has reaped its processes.
    let failed: Vec<_> = thread::scope(|scope| {
        let run = |case: (_, _, _)| (case, scope.spawn(move || check(case.0, case.1, case.2)));
        let running = cases.map(run).into_iter();
        let failure = |((line, lasting, host), checked): (_, ScopedJoinHandle<'_, Result<()>>)| {
            let error = checked.join().expect("no check panics").err()?;
            Some(format!("{line} ({host}), while {lasting} runs: {error:#}"))
        };
        running.filter_map(failure).collect()
    });
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn time_limit_ends_all_processes_of_a_command() {
    let tree = Tree::new("ci/nested/host", "bin/stub").unwrap();
    let mut script = tree.start("ci/nested/host --no-build --timeout 3 -- stub", "direct").unwrap();
    let started = tree.started(&mut script).unwrap();
    let status = wait_for("the script has ended", LIMIT, || Ok(script.try_wait()?));
    let ended = has_ended(started);
    assert_eq!(status.unwrap().code(), Some(124));
    ended.unwrap();
    tree.assert_clean().unwrap();
}
