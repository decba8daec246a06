//! Filters, each in a process of its own, because a filter cannot be removed again.
//!
//! A test starts this program again. The new process installs the filters and makes one call in one
//! thread. Its exit status and its output show what has happened.

use std::env;
use std::fs::{self, File};
use std::hint::black_box;
use std::io::{self, stderr};
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, exit};
use std::sync::Barrier;

use foreshore_confinement::seccomp::{self, ReportTarget, SeccompMode};
use foreshore_confinement::thread::{ThreadKind, spawn_confined, spawn_same_kind};
use rustix::thread::{NanosleepRelativeResult, Timespec, nanosleep};

/// Variable that names the call, the mode, the kind of the thread and the format of the report.
const CHILD: &str = "FORESHORE_TEST_CHILD";
/// Exit status of a child whose call has failed with EPERM.
const NOT_PERMITTED: i32 = 3;
/// Exit status of a child whose filter has refused the call: 128 and the number of SIGSYS.
const REFUSED: i32 = 159;

/// Request of rustix's tcsetattr() (asm-generic/ioctls.h).
const TCSETS2: libc::Ioctl = 0x402c_542b;
/// linux/vhost.h.
const VHOST_RESET_OWNER: libc::Ioctl = 0xaf02;

/// Reached by the main thread of a child, and by its thread under its filter.
static RUNS: Barrier = Barrier::new(2);

/// Action of a child in its thread.
type Action = fn() -> io::Result<()>;

/// Calls that an attacker may try after an escape from a guest into the VMM, by name.
/// No kind of thread needs any of these calls.
const ATTEMPTS: [(&str, Action); 8] = [
    ("execve", || {
        let (program, end) = (c"/bin/true".as_ptr(), std::ptr::null());
        // SAFETY: the strings end with a null byte, and the lists with a null pointer.
        outcome(unsafe { libc::execve(program, [program, end].as_ptr(), [end].as_ptr()) }.into())
    }),
    ("ptrace", || {
        // SAFETY: an attempt to trace no process changes nothing.
        let result = unsafe { libc::ptrace(libc::PTRACE_ATTACH, 0) };
        let error = io::Error::last_os_error();
        // Without a filter, the process does not exist.
        if result < 0 && error.raw_os_error() != Some(libc::ESRCH) { Err(error) } else { Ok(()) }
    }),
    ("process_vm_readv", || {
        let none = std::ptr::null();
        // SAFETY: the lists of buffers are empty, so no memory is read.
        let len = unsafe { libc::process_vm_readv(libc::getpid(), none, 0, none, 0, 0) };
        outcome(len as i64)
    }),
    ("mount", || {
        let (none, root) = (c"none".as_ptr(), c"/proc".as_ptr());
        // SAFETY: the strings end with a null byte. The call changes an attribute of a mount, if
        // the process may do so.
        outcome(unsafe { libc::mount(none, root, none, libc::MS_SHARED, std::ptr::null()) }.into())
    }),
    ("mmap", || {
        let access = libc::PROT_READ | libc::PROT_EXEC;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address that the kernel chooses does not affect others.
        let mapped = unsafe { libc::mmap(std::ptr::null_mut(), 4096, access, flags, -1, 0) };
        outcome(if mapped == libc::MAP_FAILED { -1 } else { 0 })
    }),
    ("unshare", || {
        // SAFETY: a new UTS namespace affects host names only.
        outcome(unsafe { libc::unshare(libc::CLONE_NEWUTS) }.into())
    }),
    ("kill", || {
        // SAFETY: signal 0 is not delivered.
        outcome(unsafe { libc::kill(libc::getpid(), 0) }.into())
    }),
    ("setfsuid", || {
        // SAFETY: an invalid user changes nothing (setfsuid(2)).
        outcome(unsafe { libc::setfsuid(u32::MAX) }.into())
    }),
];

/// Same as [`ATTEMPTS`], for calls that only some kinds of threads need.
const SPECIAL: [(&str, Action, &[ThreadKind]); 7] = [
    (
        "openat",
        || File::open("/proc/version").map(drop),
        &[
            ThreadKind::SetUp,
            ThreadKind::Api,
            ThreadKind::Memory,
            ThreadKind::Governor,
            ThreadKind::ConsoleFile,
        ],
    ),
    (
        // An existing file is opened for writing, but not written to.
        "openat, writable",
        || File::options().write(true).open("/dev/zero").map(drop),
        &[ThreadKind::SetUp, ThreadKind::ConsoleFile],
    ),
    (
        "socket",
        || std::os::unix::net::UnixDatagram::unbound().map(drop),
        &[ThreadKind::SetUp, ThreadKind::Vsock],
    ),
    (
        "io_uring_setup",
        || {
            // SAFETY: the kernel refuses a null pointer.
            let result = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, 0) };
            let error = io::Error::last_os_error();
            let is_reached = error.raw_os_error() == Some(libc::EFAULT);
            if result < 0 && !is_reached { Err(error) } else { Ok(()) }
        },
        &[ThreadKind::SetUp],
    ),
    (
        "reset of vhost",
        || ioctl(VHOST_RESET_OWNER),
        &[ThreadKind::SetUp, ThreadKind::Queue, ThreadKind::Memory],
    ),
    (
        // Any thread waits for vCPUs if it finds that memory is lost.
        "nanosleep",
        || match nanosleep(&Timespec { tv_sec: 0, tv_nsec: 1 }) {
            NanosleepRelativeResult::Err(error) => Err(error.into()),
            NanosleepRelativeResult::Ok | NanosleepRelativeResult::Interrupted(_) => Ok(()),
        },
        &ThreadKind::ALL,
    ),
    (
        // A console whose terminal has hung up restores the settings of the terminal.
        "tcsetattr",
        || ioctl(TCSETS2),
        &[ThreadKind::SetUp, ThreadKind::Device],
    ),
];

/// Other actions of children.
const CHECKS: [(&str, Action); 7] = [
    ("open", || {
        for _ in 0..3 {
            assert!(std::fs::read_to_string("/proc/self/status")?.starts_with("Name:"));
            let missing = File::open("/proc/self/missing").unwrap_err();
            assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        }
        Ok(())
    }),
    ("live", || {
        let bytes = vec![1_u8; 64 << 20];
        assert_eq!(bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>(), 64 << 20);
        // The C library returns this memory to the kernel.
        drop((0..4000).map(|_| Box::new([0_u8; 4096])).collect::<Vec<_>>());
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        assert!(receiver.recv_timeout(std::time::Duration::from_millis(1)).is_err());
        drop(sender);
        io::Write::write_all(&mut stderr(), b"live\n")
    }),
    ("clock_ticks", || {
        assert!(rustix::param::clock_ticks_per_second() > 0);
        Ok(())
    }),
    ("open_on_two_threads", || {
        let open = || File::options().write(true).open("/dev/zero").map(drop);
        open()?;
        std::thread::scope(|scope| spawn_same_kind(scope, open).join().unwrap())
    }),
    ("park", || {
        RUNS.wait();
        loop {
            std::thread::park();
        }
    }),
    ("allocate_on_threads", || {
        let all_run = Barrier::new(20);
        let allocate = || {
            drop(black_box(vec![1_u8; 4096]));
            all_run.wait();
        };
        std::thread::scope(|scope| {
            for _ in 0..20 {
                spawn_same_kind(scope, allocate);
            }
        });
        Ok(())
    }),
    ("start_thread", || {
        assert_eq!(std::thread::spawn(|| 1).join().unwrap(), 1);
        Ok(())
    }),
];

/// Makes a request to a descriptor that is not open. Fails unless the request reaches the kernel.
fn ioctl(request: libc::Ioctl) -> io::Result<()> {
    // SAFETY: no file is open at this number.
    let result = unsafe { libc::ioctl(-1, request) };
    let error = io::Error::last_os_error();
    let is_reached = error.raw_os_error() == Some(libc::EBADF);
    if result < 0 && !is_reached { Err(error) } else { Ok(()) }
}

fn outcome(value: i64) -> io::Result<()> {
    if value < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Runs `name` in a thread of this kind in a new process.
fn attempt(name: &str, mode: SeccompMode, kind: ThreadKind, format: &str) -> Output {
    let nth = ThreadKind::ALL.iter().position(|one| *one == kind).expect("one of all kinds");
    Command::new(env::current_exe().unwrap())
        .args(["child", "--exact", "--nocapture"])
        .env(CHILD, format!("{} {} {nth} {format}", name.replace(' ', "-"), mode.name()))
        .output()
        .unwrap()
}

/// Runs in a child process of the other tests.
#[test]
fn child() {
    let Ok(given) = env::var(CHILD) else { return };
    let [name, mode, nth, format] = given.split(' ').collect::<Vec<_>>().try_into().unwrap();
    let mode = SeccompMode::ALL.into_iter().find(|one| one.name() == mode).unwrap();
    let kind = ThreadKind::ALL[nth.parse::<usize>().unwrap()];
    let special = SPECIAL.map(|(name, call, _)| (name, call));
    let mut all = ATTEMPTS.into_iter().chain(CHECKS).chain(special);
    let (_, call) = all.find(|(one, _)| one.replace(' ', "-") == name).unwrap();
    let target = ReportTarget { fd: stderr().as_raw_fd(), is_json: format == "json" };
    seccomp::start(mode, target).unwrap();
    let thread = spawn_confined(kind, "attempt", call).unwrap();
    if name == "park" {
        RUNS.wait();
        let filters = thread_status("attempt", "Seccomp_filters").unwrap();
        exit(filters.parse().unwrap());
    }
    let result = thread.join().unwrap();
    match result {
        Ok(()) => exit(0),
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => exit(NOT_PERMITTED),
        Err(error) => panic!("{error}"),
    }
}

/// Returns a field of the status of the thread with this name (proc_pid_status(5)).
fn thread_status(name: &str, field: &str) -> Option<String> {
    let of_thread = |text: &str| text.starts_with(&format!("Name:\t{name}\n"));
    let read = |entry: io::Result<fs::DirEntry>| {
        fs::read_to_string(entry.unwrap().path().join("status")).unwrap()
    };
    let text = fs::read_dir("/proc/self/task").unwrap().map(read).find(|text| of_thread(text))?;
    let value = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    Some(value?.trim().to_owned())
}

#[test]
fn vcpu_has_one_filter() {
    for (mode, kind, filters) in [
        (SeccompMode::Enforce, ThreadKind::Vcpu, 1),
        (SeccompMode::Errno, ThreadKind::Vcpu, 1),
        (SeccompMode::Log, ThreadKind::Vcpu, 2),
        (SeccompMode::Enforce, ThreadKind::Queue, 2),
    ] {
        let output = attempt("park", mode, kind, "text");
        assert_eq!(output.status.code(), Some(filters), "{mode:?}, {kind:?}: {output:?}");
    }
}

#[test]
fn calls_of_an_attacker_are_refused_in_every_thread() {
    for (name, _) in ATTEMPTS {
        // The call succeeds without a filter, so the filter causes the later failures.
        let free = attempt(name, SeccompMode::Off, ThreadKind::Vcpu, "text");
        assert_eq!(free.status.code(), Some(0), "{name}: {free:?}");
        for kind in ThreadKind::ALL {
            let refused = attempt(name, SeccompMode::Enforce, kind, "text");
            assert_eq!(refused.status.code(), Some(REFUSED), "{name}, {kind:?}: {refused:?}");
            let printed = String::from_utf8(refused.stderr).unwrap();
            let start = format!("foreshore: thread attempt: the system call {name} (");
            assert!(printed.starts_with(&start), "{printed}");
            let failed = attempt(name, SeccompMode::Errno, kind, "text");
            assert_eq!(failed.status.code(), Some(NOT_PERMITTED), "{name}, {kind:?}: {failed:?}");
        }
    }
}

#[test]
fn special_calls_are_limited_to_the_threads_that_need_them() {
    for (name, _, kinds) in SPECIAL {
        for kind in ThreadKind::ALL {
            let output = attempt(name, SeccompMode::Enforce, kind, "text");
            let expected = if kinds.contains(&kind) { 0 } else { REFUSED };
            assert_eq!(output.status.code(), Some(expected), "{name}, {kind:?}: {output:?}");
        }
    }
}

#[test]
fn refused_call_is_one_line() {
    let [text, json] = ["text", "json"].map(|format| {
        let output = attempt("setfsuid", SeccompMode::Enforce, ThreadKind::Vcpu, format);
        String::from_utf8(output.stderr).unwrap()
    });
    let line = "the system call setfsuid (122) with the arguments 0xffffffff ";
    assert!(
        text.contains(line) && text.ends_with("not allowed by its filter; the VMM ends\n"),
        "{text}"
    );
    let value: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(value["level"], "ERROR");
    // UTC with microseconds, for example 2026-01-31T12:00:00.000001Z.
    let time = value["timestamp"].as_str().unwrap();
    assert!(time.len() == 27 && time.starts_with("20") && time.ends_with('Z'), "{time}");
    assert!(value["message"].as_str().unwrap().contains(line), "{json}");
}

#[test]
fn logged_call_is_carried_out_and_printed_once() {
    let output = attempt("open", SeccompMode::Log, ThreadKind::Writer, "text");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let printed = String::from_utf8(output.stderr).unwrap();
    assert_eq!(printed.matches("the system call openat (257)").count(), 1, "{printed}");
}

#[test]
fn logged_call_is_printed_once_for_threads_of_one_kind() {
    let output = attempt("open_on_two_threads", SeccompMode::Log, ThreadKind::Memory, "text");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let printed = String::from_utf8(output.stderr).unwrap();
    assert_eq!(printed.matches("the system call openat (257)").count(), 1, "{printed}");
}

#[test]
fn thread_allocates_and_waits_under_its_filter() {
    for kind in ThreadKind::ALL {
        let output = attempt("live", SeccompMode::Enforce, kind, "text");
        assert_eq!(output.status.code(), Some(0), "{kind:?}: {output:?}");
    }
}

/// rustix must use the auxiliary vector that was read before the filters.
#[test]
fn clock_ticks_are_available_under_every_filter() {
    for kind in ThreadKind::ALL {
        let output = attempt("clock_ticks", SeccompMode::Enforce, kind, "text");
        assert_eq!(output.status.code(), Some(0), "{kind:?}: {output:?}");
    }
}

/// The C library must not read the number of CPUs for the heaps of many threads.
#[test]
fn threads_of_vcpus_have_heaps() {
    let output = attempt("allocate_on_threads", SeccompMode::Enforce, ThreadKind::Vcpu, "text");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}

#[test]
fn only_kinds_that_need_it_start_threads() {
    for kind in ThreadKind::ALL {
        let output = attempt("start_thread", SeccompMode::Enforce, kind, "text");
        let kinds = [ThreadKind::SetUp, ThreadKind::Api, ThreadKind::Vcpu, ThreadKind::Memory];
        let may_start = kinds.contains(&kind);
        assert_eq!(output.status.success(), may_start, "{kind:?}: {output:?}");
        // The C library blocks signals while it starts a thread, so the kernel ends the process
        // without the handler.
        assert_eq!(output.status.signal() == Some(libc::SIGSYS), !may_start, "{kind:?}");
    }
}
