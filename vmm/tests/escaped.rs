//! System calls of an attacker in the threads of a VMM. KVM is not needed, so these are the threads
//! that a VMM without a guest has. Guest tests make the same attempts in all kinds of threads.

mod support;

use std::fs;

use escaped_guest::threads::{self, ThreadKind, VmmThread};
use escaped_guest::{
    ATTEMPTS, Confinement, REFUSED, Targets, TracedThread, check_attempts,
    check_attempts_without_limits, execute_program,
};
use support::{Vmm, foreshore, is_root, wait_for_answer};
use tempfile::TempDir;

/// Kinds of threads that start without a guest.
const KINDS: [ThreadKind; 3] = [ThreadKind::SetUp, ThreadKind::Api, ThreadKind::Writer];
/// Line of the log when the limits of Landlock begin.
const LIMITED: &str = "Landlock limits the files";

fn start(seccomp: &str, landlock: &str) -> Vmm {
    let folder = TempDir::new().unwrap();
    let file = |name: &str| folder.path().join(name);
    let mut command = foreshore();
    command.arg("--api-socket").arg(file("api")).args(["-v", "--seccomp", seccomp]);
    command.args(["--landlock", landlock]);
    command.args(["--event-monitor", &format!("path={}", file("events").display())]);
    let vmm = Vmm::spawn(folder, &mut command);
    wait_for_answer(&vmm.file("api"));
    vmm
}

/// Boots a VM without a kernel. The boot fails, but the limits of Landlock stay in force. Returns
/// false if the kernel has no Landlock.
fn enter_limits(vmm: &Vmm) -> bool {
    let config = vmm.file("vm.json");
    let kernel = vmm.file("kernel");
    fs::write(&kernel, "no kernel").unwrap();
    let kernel = kernel.display();
    let text = format!(r#"{{"payload": {{"kernel": "{kernel}"}}, "console": {{"mode": "Off"}}}}"#);
    fs::write(&config, text).unwrap();
    assert!(vmm.request(&["create", config.to_str().unwrap()]).success());
    assert!(!vmm.request(&["boot"]).success());
    vmm.log().contains(LIMITED)
}

/// Returns one thread of each kind.
fn threads(vmm: &Vmm) -> Vec<VmmThread> {
    threads::wait_for_kinds(vmm.process.id(), &KINDS).unwrap()
}

fn attach(vmm: &Vmm, thread: &VmmThread) -> TracedThread {
    TracedThread::attach(vmm.process.id(), thread.id).unwrap()
}

/// Returns objects of the host that no VM uses. `None` if this user cannot trace a VMM.
fn targets() -> Option<(Targets, TempDir)> {
    if !is_root("trace a VMM") {
        return None;
    }
    let folder = TempDir::new().unwrap();
    Some((Targets::create(folder.path()).unwrap(), folder))
}

#[test]
fn attempts_succeed_without_confinement() {
    let Some((targets, _folder)) = targets() else { return };
    check_attempts_without_limits(&targets).unwrap();
    for nth in 0..KINDS.len() {
        let mut vmm = start("false", "off");
        let thread = &threads(&vmm)[nth];
        let mut traced = attach(&vmm, thread);
        check_attempts(thread, &mut traced, &targets, Confinement::Off).unwrap();
        execute_program(traced).unwrap();
        assert!(vmm.process.wait().success(), "{}: execve", thread.name);
    }
    assert!(!targets.is_pool_unchanged().unwrap());
}

#[test]
fn attempts_fail_in_each_thread() {
    let Some((targets, _folder)) = targets() else { return };
    let vmm = start("errno", "on");
    if !enter_limits(&vmm) {
        return eprintln!("skipped: the kernel has no Landlock");
    }
    for thread in threads(&vmm) {
        let mut traced = attach(&vmm, &thread);
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
            let mut vmm = start("true", "auto");
            let thread = &threads(&vmm)[nth];
            let result = attempt.make(&mut attach(&vmm, thread), &targets);
            assert!(result.is_err(), "{}: {result:?}", thread.name);
            assert_eq!(vmm.process.wait().code(), Some(REFUSED), "{}", attempt.name);
            assert!(vmm.log().contains(&attempt.log_line(thread)), "{}", vmm.log());
        }
    }
    assert!(targets.is_pool_unchanged().unwrap());
}

#[test]
fn attempts_are_logged_in_log_mode() {
    let Some((targets, _folder)) = targets() else { return };
    let mut vmm = start("log", "off");
    let threads = threads(&vmm);
    for thread in &threads {
        let mut traced = attach(&vmm, thread);
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
    execute_program(attach(&vmm, &threads[0])).unwrap();
    vmm.process.wait();
    assert!(vmm.log().contains("thread foreshore: the system call execve ("), "{}", vmm.log());
}
