//! Tests that SIGTERM, or a time limit, ends everything that a task has started. A killed task
//! leaves no command and no QEMU running.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, ExitStatus, Stdio};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use super::images::{builder, kernel_lock};
use super::tree::{BUILT, PROMETHEUS, Tree, is_skipped, missing_tool};

/// Limit of each wait. The limit is reached only on failure, and is long because build machines are
/// slow and busy.
const LIMIT: Duration = Duration::from_secs(300);
/// Starts a process that runs until a signal ends it, and writes its process ID to `$STARTED`.
const LASTING: &str =
    "#!/bin/sh\nsleep 1000 &\necho $! >\"$STARTED.new\"\nmv \"$STARTED.new\" \"$STARTED\"\nwait\n";

/// Lists one guest test. The test runs until it is ended.
const GUEST_TESTS: &str = "#!/bin/sh\n[ \"$1\" != --names ] || exec echo a::one\nexec stub\n";

/// Fake QEMU that emulates nothing. It writes its process ID to `$STARTED`, and a line to the file
/// for the command's output.
const LASTING_QEMU: &str = r#"#!/bin/sh
[ "$1" != --version ] || exit 0
echo $$ >"$STARTED.new"
mv "$STARTED.new" "$STARTED"
for argument; do
    case $argument in file,id=stdout,path=*) echo written >"${argument#*path=}" ;; esac
done
exec sleep 1000
"#;

/// Running task. Drop sends SIGTERM, so that the task ends before its tree is removed.
struct Task(Child);

impl Task {
    fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill_process(Pid::from_child(&self.0), signal)?)
    }

    fn wait(&mut self) -> Result<ExitStatus> {
        wait_for("the task has ended", || Ok(self.0.try_wait()?))
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            let _ = self.signal(Signal::TERM);
            if self.wait().is_err() {
                let _ = self.0.kill();
            }
        }
    }
}

/// Tree for a task in which the command `stub`, and commands that use it, run until they are ended.
struct Stubs {
    tree: Tree,
    host: &'static str,
}

impl Stubs {
    /// Returns a tree with all tools except cargo and this repository's programs.
    fn without_cargo() -> Option<Self> {
        (!is_skipped(missing_tool())).then(|| Self::new("no-cargo").unwrap())
    }

    /// `lasting` is the cargo subcommand that runs until it is ended.
    fn new(lasting: &str) -> Result<Self> {
        let cargo = format!("[ \"$1\" != {lasting} ] || exec stub");
        let tree = Tree::new(&std::env::temp_dir(), 0o022, &cargo)?;
        tree.add_program("guest-tests", GUEST_TESTS)?;
        tree.add_program("soak", "#!/bin/sh\nexec stub\n")?;
        tree.write(PROMETHEUS, "#!/bin/sh\nexec stub\n", 0o755)?;
        Self::add_to(tree, "direct")
    }

    /// Returns a tree with everything that an emulated host needs, already built, except QEMU.
    fn with_qemu(kernel_lock: &str) -> Result<Self> {
        let stubs = Self::add_to(builder(kernel_lock, 0o022)?, "nested")?;
        stubs.tree.write("bin/qemu-system-x86_64", LASTING_QEMU, 0o755)?;
        stubs.tree.write("ci/xtask/src/host/qemu_patch.rs", "", 0o644)?;
        for line in ["ci/setup", "ci/xtask/run host-disk"] {
            let status = stubs.start(line)?.wait()?;
            ensure!(status.success(), "{line}: {status}");
        }
        Ok(stubs)
    }

    fn add_to(tree: Tree, host: &'static str) -> Result<Self> {
        tree.write("bin/stub", LASTING, 0o755)?;
        fs::create_dir(tree.path("tmp"))?;
        Ok(Self { tree, host })
    }

    fn start(&self, line: &str) -> Result<Task> {
        self.start_in(self.tree.folder(), line)
    }

    fn start_in(&self, folder: &Path, line: &str) -> Result<Task> {
        let started = self.tree.path("started");
        let _ = fs::remove_file(&started);
        let mut command = self.tree.command_in(folder, line, self.host)?;
        command.env("STARTED", started).env("TMPDIR", self.tree.path("tmp"));
        Ok(Task(command.stdout(Stdio::null()).spawn()?))
    }

    /// Waits for the stub to start a process, and returns its process ID.
    fn started(&self, task: &mut Task) -> Result<Pid> {
        wait_for("the task runs the stub", || {
            if let Some(status) = task.0.try_wait()? {
                bail!("the task has ended: {status}");
            }
            let text = fs::read_to_string(self.tree.path("started")).ok();
            let number = text.map(|text| text.trim().parse()).transpose()?;
            Ok(number.and_then(Pid::from_raw))
        })
    }

    /// Checks that the task has left no temporary files.
    fn assert_clean(&self) -> Result<()> {
        let left = fs::read_dir(self.tree.path("tmp"))?.next().transpose()?;
        ensure!(left.is_none(), "{left:?} is left");
        Ok(())
    }
}

/// Polls `value` until it returns a value.
fn wait_for<T>(description: &str, mut value: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let started = Instant::now();
    loop {
        if let Some(value) = value()? {
            return Ok(value);
        }
        ensure!(started.elapsed() < LIMIT, "Timed out waiting until {description}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Returns true until the process has ended. A zombie counts as ended.
fn is_running(process: Pid) -> bool {
    let stat = fs::read_to_string(Path::new("/proc").join(process.to_string()).join("stat"));
    stat.is_ok_and(|stat| {
        stat.rsplit(") ").next().is_some_and(|rest| !rest.starts_with(['Z', 'X']))
    })
}

/// Checks that a process has ended or is about to end. Kills it otherwise.
fn has_ended(process: Pid) -> Result<()> {
    let ended = wait_for("its process has ended", || Ok((!is_running(process)).then_some(())));
    if ended.is_err() {
        let _ = kill_process(process, Signal::KILL);
    }
    ended
}

/// Checks that a task ends when it receives a signal while the stub runs. SIGKILL leaves temporary
/// files behind.
fn check(stubs: &Stubs, line: &str, signal: Signal) -> Result<()> {
    let mut task = stubs.start(line)?;
    let started = stubs.started(&mut task)?;
    task.signal(signal)?;
    let status = task.wait();
    has_ended(started)?;
    let status = status?;
    if signal == Signal::KILL {
        return Ok(());
    }
    ensure!(status.code() == Some(143), "{status}");
    stubs.assert_clean()
}

#[test]
fn task_that_gets_term_ends_all_its_processes() {
    if is_skipped(missing_tool()) {
        return;
    }
    let cases = [
        ("ci/nested/host --no-build -- stub", "no-cargo"),
        ("ci/nested/host --no-build -- stub", "fmt"),
        ("ci/nested/host -- stub", "build"),
        ("ci/setup", "fmt"),
        ("ci/test", "fmt"),
        ("ci/test", "clippy"),
        ("ci/test", "test"),
        ("ci/test --guest", "build"),
        ("ci/test --guest", "no-cargo"),
        ("ci/bench", "fmt"),
        ("ci/demo", "build"),
        ("ci/demo --no-build", "no-cargo"),
        ("ci/bench", "build"),
        ("ci/soak", "fmt"),
        ("ci/soak --only kills", "no-cargo"),
    ];
    // All cases run concurrently, because a task may wait until init has reaped its processes.
    let failed: Vec<_> = thread::scope(|scope| {
        let check = |(line, lasting): (_, _)| check(&Stubs::new(lasting)?, line, Signal::TERM);
        let run = |case| (case, scope.spawn(move || check(case)));
        let running = cases.map(run).into_iter();
        let failure = |((line, lasting), checked): (_, ScopedJoinHandle<'_, Result<()>>)| {
            let error = checked.join().expect("no check panics").err()?;
            Some(format!("{line}, while cargo {lasting} or the command runs: {error:#}"))
        };
        running.filter_map(failure).collect()
    });
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn qemu_of_an_emulated_host_ends_with_a_power_cut_and_with_its_task() {
    let Some(lock) = kernel_lock() else { return };
    let stubs = Stubs::with_qemu(&lock).unwrap();
    let line = "ci/nested/host --no-build -- true";
    check(&stubs, line, Signal::TERM).unwrap();
    assert_eq!(fs::read_dir(stubs.tree.path("target/ci/run")).unwrap().count(), 0);
    let mut task = stubs.start("ci/nested/host --no-build --power-cut written:1 -- true").unwrap();
    let started = stubs.started(&mut task).unwrap();
    assert_eq!(task.wait().unwrap().code(), Some(0));
    // The task has reaped its child, so there is not even a zombie.
    assert!(!is_running(started));
    check(&stubs, line, Signal::KILL).unwrap();
}

#[test]
fn command_of_a_killed_task_ends() {
    let Some(stubs) = Stubs::without_cargo() else { return };
    for line in ["ci/nested/host --no-build -- stub", "ci/test --guest"] {
        check(&stubs, line, Signal::KILL).unwrap_or_else(|error| panic!("{line}: {error:#}"));
    }
}

#[test]
fn time_limit_ends_all_processes_of_a_command() {
    let Some(stubs) = Stubs::without_cargo() else { return };
    let mut task = stubs.start("ci/nested/host --no-build --timeout 3 -- stub").unwrap();
    let started = stubs.started(&mut task).unwrap();
    let status = task.wait();
    let ended = has_ended(started);
    assert_eq!(status.unwrap().code(), Some(124));
    ended.unwrap();
    stubs.assert_clean().unwrap();
}

/// Returns true if a process waits for a lock on the file.
fn is_awaited(lock: &File) -> Result<bool> {
    let suffix = format!(":{}", lock.metadata()?.ino());
    let is_waiter = |line: &str| {
        line.contains("-> FLOCK") && line.split_whitespace().any(|word| word.ends_with(&suffix))
    };
    Ok(fs::read_to_string("/proc/locks")?.lines().any(is_waiter))
}

#[test]
fn script_without_a_built_xtask_waits_for_another_installation() {
    let Some(stubs) = Stubs::without_cargo() else { return };
    stubs.tree.write("Cargo.toml", "rust-version = \"1.0\"\n", 0o644).unwrap();
    fs::remove_file(stubs.tree.path(BUILT)).unwrap();
    fs::create_dir_all(stubs.tree.path("target/ci")).unwrap();
    let lock = File::create(stubs.tree.path("target/ci/setup.lock")).unwrap();
    lock.lock().unwrap();
    // This task itself takes no lock.
    let mut task = stubs.start("ci/nested/host --which").unwrap();
    let waiting = wait_for("the task waits for the lock", || {
        ensure!(task.0.try_wait()?.is_none(), "the task has ended");
        Ok(is_awaited(&lock)?.then_some(()))
    });
    waiting.unwrap();
    drop(lock);
    assert_eq!(task.wait().unwrap().code(), Some(0));
}

#[test]
fn exit_code_and_caller_folder_reach_the_command() {
    let Some(stubs) = Stubs::without_cargo() else { return };
    // A relative path is relative to the caller's folder.
    stubs.tree.write("caller/file", "exit 7\n", 0o644).unwrap();
    let line = "../ci/nested/host --no-build --put file -- sh file";
    let code = |line: &str| stubs.start(line).unwrap().wait().unwrap().code();
    assert_eq!(code("ci/nested/host --no-build -- missing-command"), Some(127));
    assert_eq!(code("ci/nested/host --no-build -- sh -c exit\t124"), Some(124));
    let mut task = stubs.start_in(&stubs.tree.path("caller"), line).unwrap();
    assert_eq!(task.wait().unwrap().code(), Some(7));
    let mut task = stubs.start("ci/nested/host --no-build --put missing -- sh file").unwrap();
    assert_eq!(task.wait().unwrap().code(), Some(2));
}
