//! System calls of an attacker in the threads of a VMM. KVM is not needed, so these are the threads
//! that a VMM without a guest has. Guest tests make the same attempts in all kinds of threads.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};

use escaped_guest::threads::{self, ThreadKind, VmmThread};
use escaped_guest::{
    ATTEMPTS, Confinement, Targets, TracedThread, check_attempts, check_attempts_without_limits,
    execute_program,
};
use tempfile::TempDir;

/// Kinds of threads that start without a guest.
const KINDS: [ThreadKind; 3] = [ThreadKind::SetUp, ThreadKind::Api, ThreadKind::Writer];
/// Line of the log when the limits of Landlock begin.
const LIMITED: &str = "Landlock limits the files";
/// Exit status of a VMM whose filter has refused a call.
const REFUSED: i32 = 159;

/// VMM process in a folder with its files. It is ended when this value is dropped.
struct Vmm {
    process: Child,
    folder: TempDir,
}

impl Vmm {
    fn start(seccomp: &str, landlock: &str) -> Self {
        let folder = TempDir::new().unwrap();
        let file = |name: &str| folder.path().join(name);
        let mut command = Command::new(env!("CARGO_BIN_EXE_foreshore"));
        command.arg("--api-socket").arg(file("api")).args(["-v", "--seccomp", seccomp]);
        command.args(["--landlock", landlock]);
        command.args(["--event-monitor", &format!("path={}", file("events").display())]);
        let process = command.stderr(File::create(file("log")).unwrap()).spawn().unwrap();
        let vmm = Self { process, folder };
        assert!(vmm.request(&["ping", "--wait"]).success());
        vmm
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.file("log")).unwrap()
    }

    fn request(&self, arguments: &[&str]) -> ExitStatus {
        let mut remote = Command::new(env!("CARGO_BIN_EXE_foreshore-remote"));
        remote.arg("--api-socket").arg(self.file("api")).args(arguments);
        remote.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap()
    }

    /// Boots a VM without a kernel. The boot fails, but the limits of Landlock stay in force.
    /// Returns false if the kernel has no Landlock.
    fn enter_limits(&self) -> bool {
        let config = self.file("vm.json");
        let kernel = self.file("kernel");
        fs::write(&kernel, "no kernel").unwrap();
        let kernel = kernel.display();
        let text =
            format!(r#"{{"payload": {{"kernel": "{kernel}"}}, "console": {{"mode": "Off"}}}}"#);
        fs::write(&config, text).unwrap();
        assert!(self.request(&["create", config.to_str().unwrap()]).success());
        assert!(!self.request(&["boot"]).success());
        self.log().contains(LIMITED)
    }

    /// Returns one thread of each kind.
    fn threads(&self) -> Vec<VmmThread> {
        threads::wait_for_kinds(self.process.id(), &KINDS).unwrap()
    }

    fn attach(&self, thread: &VmmThread) -> TracedThread {
        TracedThread::attach(self.process.id(), thread.id).unwrap()
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns objects of the host that no VM uses. `None` if this user cannot trace a VMM.
fn targets() -> Option<(Targets, TempDir)> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can trace a VMM");
        return None;
    }
    let folder = TempDir::new().unwrap();
    Some((Targets::create(folder.path()).unwrap(), folder))
}

#[test]
fn attempts_succeed_without_confinement() {
    let Some((targets, _folder)) = targets() else { return };
    check_attempts_without_limits(&targets).unwrap();
    for (nth, kind) in KINDS.into_iter().enumerate() {
        let mut vmm = Vmm::start("false", "off");
        let thread = &vmm.threads()[nth];
        let mut traced = vmm.attach(thread);
        check_attempts(thread, &mut traced, &targets, Confinement::Off).unwrap();
        if kind == ThreadKind::Api {
            continue;
        }
        execute_program(traced).unwrap();
        assert!(vmm.process.wait().unwrap().success(), "{}: execve", thread.name);
    }
    assert!(!targets.is_pool_unchanged().unwrap());
}

#[test]
fn attempts_fail_in_each_thread() {
    let Some((targets, _folder)) = targets() else { return };
    let vmm = Vmm::start("errno", "on");
    if !vmm.enter_limits() {
        return eprintln!("skipped: the kernel has no Landlock");
    }
    for thread in vmm.threads() {
        let mut traced = vmm.attach(&thread);
        check_attempts(&thread, &mut traced, &targets, Confinement::On).unwrap();
    }
    assert!(targets.is_pool_unchanged().unwrap());
    // The threads continue with their work.
    assert!(vmm.request(&["ping"]).success());
}

#[test]
fn refused_attempt_ends_the_vmm_with_a_log_line() {
    let Some((targets, _folder)) = targets() else { return };
    for (nth, kind) in KINDS.into_iter().enumerate() {
        for attempt in ATTEMPTS.iter().filter(|attempt| attempt.is_filtered(kind)) {
            let mut vmm = Vmm::start("true", "auto");
            let thread = &vmm.threads()[nth];
            let result = attempt.make(&mut vmm.attach(thread), &targets);
            assert!(result.is_err(), "{}: {result:?}", thread.name);
            assert_eq!(vmm.process.wait().unwrap().code(), Some(REFUSED), "{}", attempt.name);
            assert!(vmm.log().contains(&attempt.log_line(thread)), "{}", vmm.log());
        }
    }
    assert!(targets.is_pool_unchanged().unwrap());
}

#[test]
fn attempts_are_logged_in_log_mode() {
    let Some((targets, _folder)) = targets() else { return };
    let mut vmm = Vmm::start("log", "off");
    let threads = vmm.threads();
    for thread in &threads {
        let mut traced = vmm.attach(thread);
        for attempt in &ATTEMPTS {
            attempt.make(&mut traced, &targets).unwrap();
        }
    }
    assert!(vmm.request(&["ping"]).success());
    let log = vmm.log();
    for thread in &threads {
        let kind = thread.kind().unwrap();
        for attempt in ATTEMPTS.iter().filter(|attempt| attempt.is_filtered(kind)) {
            assert!(log.contains(&attempt.log_line(thread)), "{}: {log}", attempt.name);
        }
    }
    // The program inherits the filter, so it cannot run for long.
    execute_program(vmm.attach(&threads[0])).unwrap();
    vmm.process.wait().unwrap();
    assert!(vmm.log().contains("thread foreshore: the system call execve ("), "{}", vmm.log());
}
