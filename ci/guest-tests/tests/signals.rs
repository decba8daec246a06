//! SIGTERM to a script under ci/ ends everything that the script has started. For tasks of xtask its own
//! tests check that.
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
const HELPERS: [&str; 3] = ["ci/setup", "guest/image/build", "ci/xtask/run"];
/// A program that a machine may lack.
const PROGRAMS: [&str; 1] = ["bin/gnuplot"];
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
        for copied in ["ci/lib.sh", script] {
            tree.write(copied, &fs::read_to_string(repository.join(copied))?)?;
        }
        fs::create_dir(tree.0.path().join("tmp"))?;
        Ok(tree)
    }

    fn write(&self, path: &str, text: &str) -> Result<()> {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().context("no folder")?)?;
        fs::write(&path, text)?;
        Ok(fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?)
    }

    /// Starts a script without a terminal, so that sudo cannot ask for a password.
    fn start(&self, script: &str) -> Result<Child> {
        let path = std::env::var("PATH")?;
        let child = Command::new("setsid")
            .arg(script)
            .current_dir(&self.0)
            .env("PATH", format!("{}:{path}", self.0.path().join("bin").display()))
            .env("STARTED", self.0.path().join("started"))
            .env("FORESHORE_HOST", "direct")
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

fn check(script: &str, lasting: &str) -> Result<()> {
    let tree = Tree::new(script, lasting)?;
    let mut script = tree.start(script)?;
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
        ("ci/demo", "ci/setup"),
        ("ci/demo", "ci/xtask/run"),
        ("ci/demo", "guest/image/build"),
    ];
    // All cases run at the same time, because a script may wait until init has reaped its processes.
    let failed: Vec<_> = thread::scope(|scope| {
        let run = |case: (_, _)| (case, scope.spawn(move || check(case.0, case.1)));
        let running = cases.map(run).into_iter();
        let failure = |((script, lasting), checked): (_, ScopedJoinHandle<'_, Result<()>>)| {
            let error = checked.join().expect("no check panics").err()?;
            Some(format!("{script}, while {lasting} runs: {error:#}"))
        };
        running.filter_map(failure).collect()
    });
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}
