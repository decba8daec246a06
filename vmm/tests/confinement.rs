//! Tests of what a VMM process keeps after its start. KVM is not needed.

mod support;

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs;
use std::io::{self, Read};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use escaped_guest::threads::{self, VmmThread};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, Mode, mkfifoat};
use rustix::process::Signal;
use support::{FORESHORE, Process, foreshore, is_root, run, wait_for, wait_for_answer};
use tempfile::TempDir;

/// Number of the descriptor that a VMM inherits. It is greater than those that this process uses,
/// because dup2() to the same number would not clear FD_CLOEXEC.
const INHERITED: RawFd = 200;
/// A VMM starts within milliseconds. The limit only ends a test that has failed.
const LIMIT_SECS: u64 = 30;
const LIMIT: Timespec = Timespec { tv_sec: LIMIT_SECS as i64, tv_nsec: 0 };

/// Starts a VMM without a VM, which inherits `file`, and waits until it answers.
fn start(api_socket: &Path, arguments: &[&str], file: &impl AsRawFd) -> Process {
    let mut command = foreshore();
    command.arg("--api-socket").arg(api_socket).args(arguments);
    let fd = file.as_raw_fd();
    // SAFETY: the child process only makes a system call.
    unsafe {
        command.pre_exec(move || match libc::dup2(fd, INHERITED) {
            INHERITED => Ok(()),
            _ => Err(io::Error::last_os_error()),
        })
    };
    let vmm = Process::spawn(&mut command);
    wait_for_answer(api_socket);
    vmm
}

/// Returns true if RLIMIT_NICE permits the governor's nice value of -10, which is 30 there.
fn permits_nice(vmm: &Process) -> bool {
    let limits = fs::read_to_string(format!("/proc/{}/limits", vmm.id())).unwrap();
    let nice = limits.lines().find_map(|line| line.strip_prefix("Max nice priority"));
    nice.unwrap().split_whitespace().next() == Some("30")
}

/// Returns the names of all threads, each with its value of `key` (proc(5)).
fn values(vmm: &Process, key: &str) -> Vec<(String, String)> {
    let threads = threads::of(vmm.id()).unwrap();
    let value = |thread: &VmmThread| thread.status(key).unwrap().to_owned();
    threads.iter().map(|thread| (thread.name.clone(), value(thread))).collect()
}

/// Returns true if this process may raise limits of its children.
fn may_set_limits() -> bool {
    let held = rustix::thread::capabilities(None).unwrap();
    held.effective.contains(rustix::thread::CapabilitySet::SYS_RESOURCE)
}

/// Ends the VMM as a service manager does, and waits for its end.
fn terminate(mut vmm: Process) {
    vmm.signal(Signal::TERM);
    assert!(vmm.wait().success());
}

/// Waits until a read from the pipe does not block. Returns the bytes of the read.
fn read(pipe: &mut io::PipeReader) -> Vec<u8> {
    let ready = poll(&mut [PollFd::new(pipe, PollFlags::IN)], Some(&LIMIT)).unwrap();
    assert_eq!(ready, 1, "the VMM has neither closed the pipe nor written to it");
    let mut bytes = vec![0; 4096];
    let len = pipe.read(&mut bytes).unwrap();
    bytes.truncate(len);
    bytes
}

#[test]
fn signal_during_the_start_ends_the_vmm_like_a_later_one() {
    for signal in [Signal::TERM, Signal::INT].repeat(10) {
        let folder = TempDir::new().unwrap();
        let socket = folder.path().join("api");
        let mut vmm = Process::spawn(foreshore().arg("--api-socket").arg(&socket));
        // A pause would let the VMM complete its start.
        while !socket.exists() {
            assert!(vmm.is_running(), "the VMM has ended");
        }
        vmm.signal(signal);
        let status = wait_for("end of the VMM", || vmm.exit_status());
        assert!(status.success(), "{signal:?}: {status}");
        let left: Vec<_> = fs::read_dir(folder.path()).unwrap().collect();
        assert!(left.is_empty(), "{signal:?}: {left:?}");
    }
}

#[test]
fn signal_ends_a_vmm_that_waits_for_the_reader_of_a_fifo() {
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name);
    mkfifoat(CWD, path("fifo"), Mode::RUSR | Mode::WUSR).unwrap();
    let events = format!("path={}", path("fifo").display());
    let log = path("fifo").display().to_string();
    for arguments in [["--event-monitor", &events], ["--log-file", &log]] {
        let mut command = foreshore();
        let mut vmm = Process::spawn(command.arg("--api-socket").arg(path("api")).args(arguments));
        wait_for("socket of the API", || path("api").exists().then_some(()));
        vmm.signal(Signal::TERM);
        wait_for("end of the VMM", || vmm.exit_status());
        fs::remove_file(path("api")).unwrap();
    }
}

#[test]
fn inherited_descriptor_that_no_argument_names_is_closed() {
    let folder = TempDir::new().unwrap();
    let (mut reader, writer) = io::pipe().unwrap();
    let _vmm = start(&folder.path().join("api"), &[], &writer);
    drop(writer);
    // The VMM is still running, and no one can write to the pipe.
    assert_eq!(read(&mut reader), b"");
}

#[test]
fn inherited_descriptor_that_an_argument_names_stays_open() {
    for argument in ["fd=200", "path=/dev/fd/200", "path=/proc/self/fd/200"] {
        let folder = TempDir::new().unwrap();
        let (mut reader, writer) = io::pipe().unwrap();
        let arguments = ["--event-monitor", argument];
        let _vmm = start(&folder.path().join("api"), &arguments, &writer);
        drop(writer);
        let events = String::from_utf8(read(&mut reader)).unwrap();
        assert!(events.contains("\"starting\""), "{argument}: {events}");
    }
}

#[test]
fn process_cannot_gain_privileges() {
    let folder = TempDir::new().unwrap();
    let (_reader, writer) = io::pipe().unwrap();
    let vmm = start(&folder.path().join("api"), &[], &writer);
    for (name, value) in values(&vmm, "NoNewPrivs") {
        assert_eq!(value, "1", "{name}");
    }
}

#[test]
fn each_thread_has_a_filter_unless_filters_are_disabled() {
    // Mode 2 of seccomp(2) is a filter.
    for (mode, expected) in [
        (None, "2"),
        (Some("true"), "2"),
        (Some("log"), "2"),
        (Some("errno"), "2"),
        (Some("false"), "0"),
    ] {
        let folder = TempDir::new().unwrap();
        let (_reader, writer) = io::pipe().unwrap();
        let flag: Vec<_> = mode.iter().flat_map(|mode| ["--seccomp", mode]).collect();
        let arguments = [&["--event-monitor", "fd=200"], &flag[..]].concat();
        let vmm = start(&folder.path().join("api"), &arguments, &writer);
        let threads = values(&vmm, "Seccomp");
        assert!(threads.len() >= 3, "{threads:?}");
        assert!(threads.iter().all(|(_, value)| value == expected), "{mode:?}: {threads:?}");
        // The main thread and the thread that starts vCPUs have one filter. The others have
        // inherited that of the main thread, and added their own.
        if expected == "2" {
            for (name, filters) in values(&vmm, "Seccomp_filters") {
                let least = if ["foreshore", "_vcpus"].contains(&&*name) { 1 } else { 2 };
                assert!(filters.parse::<u32>().unwrap() >= least, "{name}: {filters}");
            }
        }
    }
}

/// Number of a user and a group that own nothing.
const NOBODY: &str = "65534";

#[test]
fn vmm_becomes_another_user_without_capabilities() {
    if !is_root("become another user") {
        return;
    }
    let folder = TempDir::new().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let (_reader, writer) = io::pipe().unwrap();
    let arguments = ["--user", NOBODY, "--group", NOBODY];
    let vmm = start(&folder.path().join("api"), &arguments, &writer);
    let all = [NOBODY; 4].join("\t");
    for (key, expected) in
        [("Uid", all.as_str()), ("Gid", &all), ("CapEff", "0000000000000000"), ("Seccomp", "2")]
    {
        for (name, value) in values(&vmm, key) {
            assert_eq!(value, expected, "{key} of {name}");
        }
    }
    assert_eq!(permits_nice(&vmm), may_set_limits());
    let socket = fs::metadata(folder.path().join("api")).unwrap();
    assert_eq!((socket.uid().to_string(), socket.mode() & 0o777), (NOBODY.to_owned(), 0o600));
}

/// Capabilities of the main thread: CHOWN, DAC_OVERRIDE, FOWNER, NET_ADMIN and IPC_LOCK.
const OF_MAIN_THREAD: u64 = 0x500b;
const NONE: &str = "0000000000000000";

#[test]
fn threads_of_root_have_only_the_capabilities_that_they_need() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: only root has capabilities");
    }
    for seccomp in ["true", "false"] {
        let folder = TempDir::new().unwrap();
        let (_reader, writer) = io::pipe().unwrap();
        let arguments = ["--event-monitor", "fd=200", "--seccomp", seccomp];
        let vmm = start(&folder.path().join("api"), &arguments, &writer);
        // Without the limit, the governor's thread needs SYS_NICE for its priority.
        let nice = if permits_nice(&vmm) { 0 } else { 1 << 23 };
        let of_main = format!("{:016x}", OF_MAIN_THREAD | nice);
        for key in ["CapEff", "CapPrm", "CapInh", "CapAmb", "CapBnd"] {
            let threads = values(&vmm, key);
            assert!(threads.len() >= 3, "{threads:?}");
            for (name, value) in threads {
                let is_main = name == "foreshore" && ["CapEff", "CapPrm"].contains(&key);
                let expected = if is_main { &of_main } else { NONE };
                assert_eq!(value, expected, "{key} of {name}");
            }
        }
    }
}

/// Returns true if this process can open /dev/kvm but the user [`NOBODY`] cannot.
fn is_kvm_private() -> bool {
    let is_private = fs::metadata("/dev/kvm").is_ok_and(|kvm| kvm.mode() & 0o006 == 0);
    is_private && fs::File::options().read(true).write(true).open("/dev/kvm").is_ok()
}

#[test]
fn kvm_is_opened_before_the_user_and_the_root_folder_change() {
    if !rustix::process::geteuid().is_root() || !is_kvm_private() {
        return eprintln!("skipped: only root can become another user, and needs KVM");
    }
    let folder = TempDir::new().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(folder.path().join("kernel"), "no kernel").unwrap();
    let root = folder.path().to_str().unwrap();
    let identity = ["--user", NOBODY, "--group", NOBODY, "--chroot", root];
    let (code, error) = run(&[&["--kernel", "/kernel"], &identity[..]].concat());
    // The boot fails later, because the host has no hardware virtualization, or no kernel is given.
    assert!(code == Some(1) && error.contains("cannot boot the VM"), "{error}");
    assert!(!error.contains("cannot open /dev/kvm"), "{error}");
}

#[test]
fn socket_is_bound_in_a_folder_of_root_and_belongs_to_the_user() {
    if !is_root("become another user") {
        return;
    }
    let (_reader, writer) = io::pipe().unwrap();
    for (mode, is_removed) in [(0o755, false), (0o777, true)] {
        let folder = TempDir::new().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(mode)).unwrap();
        let path = folder.path().join("api");
        let vmm = start(&path, &["--user", NOBODY, "--group", NOBODY], &writer);
        for name in ["api", "api.lock"] {
            let file = fs::metadata(folder.path().join(name)).unwrap();
            let owner = [file.uid().to_string(), file.gid().to_string()];
            assert_eq!((owner, file.mode() & 0o777), ([NOBODY; 2].map(str::to_owned), 0o600));
        }
        terminate(vmm);
        let left = fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(left == 0, is_removed, "{left} files are left");
        // The next VMM replaces files that are left.
        let logs = TempDir::new().unwrap();
        fs::set_permissions(logs.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let log = logs.path().join("log");
        let arguments = ["--user", NOBODY, "--group", NOBODY, "-v", "--log-file"];
        let arguments = [&arguments[..], &[log.to_str().unwrap()]].concat();
        terminate(start(&path, &arguments, &writer));
        let log = fs::read_to_string(log).unwrap();
        assert_eq!(log.contains("Replaced a stale socket"), !is_removed, "{log}");
    }
}

#[test]
fn port_of_root_is_bound_before_the_user_changes() {
    if !is_root("become another user") {
        return;
    }
    let (_reader, writer) = io::pipe().unwrap();
    // Ports below 1024 need CAP_NET_BIND_SERVICE (ip(7)).
    let free = (512..1024).find_map(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok());
    let metrics = free.expect("all ports are in use").local_addr().unwrap().to_string();
    let folder = TempDir::new().unwrap();
    let arguments = ["--metrics", &metrics, "--user", NOBODY, "--group", NOBODY];
    let _vmm = start(&folder.path().join("api"), &arguments, &writer);
    TcpStream::connect(&metrics).unwrap();
}

/// Result of each way to read or debug a process as an ordinary user: its mappings, its memory, and
/// ptrace(2).
fn attempts(pid: u32) -> [io::Result<()>; 3] {
    let path = |name| CString::new(format!("/proc/{pid}/{name}")).unwrap();
    let open = |path: CString| {
        // SAFETY: `path` is a string. The descriptor is closed when the child process ends.
        as_ordinary_user(move || unsafe { libc::open(path.as_ptr(), libc::O_RDONLY) })
    };
    let pid = pid as libc::pid_t;
    // SAFETY: attaching affects only the other process. The attachment ends with this child
    // process.
    let attach = move || unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0, 0) } as libc::c_int;
    [open(path("maps")), open(path("mem")), as_ordinary_user(attach)]
}

/// Makes a system call in a child process that is an ordinary user, and returns its result.
fn as_ordinary_user(call: impl Fn() -> libc::c_int + Send + Sync + 'static) -> io::Result<()> {
    let mut command = Command::new("true");
    become_ordinary_user(&mut command);
    // SAFETY: the child process only makes system calls. It already is the ordinary user.
    unsafe {
        command.pre_exec(move || match call() {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        })
    };
    command.status().map(|_| ())
}

/// Starts `command` as another user if this process is root.
fn become_ordinary_user(command: &mut Command) {
    if rustix::process::geteuid().is_root() {
        let nobody = NOBODY.parse().unwrap();
        command.uid(nobody).gid(nobody);
    }
}

/// `--user` is not used, because the kernel makes a process that changes its user not dumpable
/// anyway.
#[test]
fn process_of_the_same_user_can_neither_read_nor_debug_the_vmm() {
    let mut other = Command::new("sleep");
    become_ordinary_user(&mut other);
    let other = Process::spawn(other.arg("1000"));
    let permitted = attempts(other.id());
    assert!(permitted[0].is_ok(), "{permitted:?}");
    let folder = TempDir::new().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    // The other user may not be able to enter the folder of the program.
    let program = fs::File::open(FORESHORE).unwrap();
    let mut command = Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()));
    become_ordinary_user(&mut command);
    let api_socket = folder.path().join("api");
    let vmm = Process::spawn(command.arg("--api-socket").arg(&api_socket));
    wait_for_answer(&api_socket);
    for (nth, attempt) in attempts(vmm.id()).into_iter().enumerate() {
        let error = attempt.expect_err("an attempt is permitted");
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{nth}: {error}");
    }
    if permitted.iter().any(Result::is_err) {
        eprintln!("partly skipped: the host restricts debugging of all processes: {permitted:?}");
    }
}

#[test]
fn chroot_changes_the_root_folder() {
    if !is_root("change the root folder") {
        return;
    }
    let folder = TempDir::new().unwrap();
    let root = folder.path().to_str().unwrap().to_owned();
    let refused = |arguments: &[&str]| {
        let (code, error) = run(&[&["--api-socket", "/api"], arguments].concat());
        assert_eq!(code, Some(2), "{error}");
        error
    };
    let missing = format!("{root}/missing");
    let error = refused(&["--chroot", &missing]);
    let expected = format!("foreshore: --chroot: cannot make {missing:?} the root folder: ");
    assert!(error.starts_with(&expected) && error.contains("No such file"), "{error}");
    let error = refused(&["--user", "no-such-user"]);
    assert_eq!(error, "foreshore: --user: the host has no user \"no-such-user\"\n");
    let groups = fs::read_to_string("/etc/group").unwrap();
    let mut groups = groups.lines().map(|line| line.split(':').collect::<Vec<_>>());
    let group = groups.find(|fields| fields.len() == 4 && fields[2] != "0").unwrap();
    // The folder is empty. Names of users and groups are those of the host.
    let socket = format!("/api,group={}", group[0]);
    let mut command = foreshore();
    let arguments = ["--api-socket", &socket, "--chroot", &root, "--user", NOBODY];
    let vmm = Process::spawn(command.args(arguments).args(["--group", NOBODY]));
    wait_for_answer(&folder.path().join("api"));
    let link = fs::read_link(format!("/proc/{}/root", vmm.id())).unwrap();
    assert_eq!(link, folder.path().canonicalize().unwrap());
    let socket = fs::metadata(folder.path().join("api")).unwrap();
    assert_eq!([socket.uid().to_string(), socket.gid().to_string()], [NOBODY, group[2]]);
}

#[test]
fn flags_that_need_proc_or_sys_are_refused_in_a_root_folder_without_them() {
    if !is_root("change the root folder") {
        return;
    }
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("kernel"), "no kernel").unwrap();
    let has_kvm = fs::File::options().read(true).write(true).open("/dev/kvm").is_ok();
    let root = folder.path().to_str().unwrap();
    let vm = "--kernel /kernel --console off";
    for (flags, error, needs_kvm) in [
        ("--api-socket /api,mode=0660".to_owned(), "--api-socket: cannot listen on", false),
        (format!("{vm} --memory size=64M,hugepages=on"), "huge page size", true),
        (
            format!("{vm} --memory size=0 --memory-zone id=a,size=64M,host_numa_node=0"),
            "does not list its nodes",
            true,
        ),
    ] {
        if needs_kvm && !has_kvm {
            eprintln!("partly skipped: {flags} needs KVM");
            continue;
        }
        let flags: Vec<_> = flags.split(' ').chain(["--chroot", root]).collect();
        let (code, message) = run(&flags);
        assert!(code == Some(1) && message.contains(error), "{flags:?}: {message}");
    }
}

#[test]
fn group_that_the_host_lacks_is_refused() {
    let folder = TempDir::new().unwrap();
    let socket = format!("{}/api,group=no-such-group", folder.path().display());
    let (code, error) = run(&["--api-socket", &socket]);
    let expected = "--api-socket: cannot look up group=: the host has no group \"no-such-group\"";
    assert_eq!((code, error), (Some(1), format!("foreshore: {expected}\n")));
}

/// Returns the files that the VMM has open, each with the number of its descriptors. `folder` is
/// replaced with a dot, and sockets, pipes and anonymous files have no number.
fn open_files(vmm: &Process, folder: &Path) -> BTreeMap<String, usize> {
    let folder = format!("{}/", folder.canonicalize().unwrap().display());
    let mut files = BTreeMap::new();
    for descriptor in fs::read_dir(format!("/proc/{}/fd", vmm.id())).unwrap() {
        let descriptor = descriptor.unwrap();
        // The first three are the streams of the test.
        if descriptor.file_name().to_str().unwrap().parse::<u32>().unwrap() > 2 {
            let file = fs::read_link(descriptor.path()).unwrap().display().to_string();
            let file = file.replace(&folder, "./");
            let end = file.find(":[").unwrap_or(file.len());
            let name = if file.starts_with("anon_inode:") { &*file } else { &file[..end] };
            *files.entry(name.to_owned()).or_default() += 1;
        }
    }
    files
}

/// A new descriptor must be added here, because code that a guest runs in the VMM can use it.
#[test]
fn vmm_has_only_the_files_open_that_it_needs() {
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (_reader, writer) = io::pipe().unwrap();
    let (metrics, log) = (format!("unix:{}", path("metrics")), path("log"));
    let events = format!("path={}", path("events"));
    let arguments = ["--metrics", &metrics, "--event-monitor", &events, "--log-file", &log];
    let vmm = start(&folder.path().join("api"), &arguments, &writer);
    let count = |path| usize::from(fs::File::options().read(true).write(true).open(path).is_ok());
    let expected = [
        // Locks of the sockets' paths.
        ("./api.lock", 1),
        ("./events", 1),
        ("./log", 1),
        ("./metrics.lock", 1),
        ("/dev/kvm", count("/dev/kvm")),
        ("/dev/userfaultfd", count("/dev/userfaultfd")),
        // Event loop of the servers.
        ("anon_inode:[eventfd]", 1),
        ("anon_inode:[eventpoll]", 2),
        // The sockets of the API and of metrics, and three by which handlers of signals report.
        ("socket", 2 + 3),
    ];
    let expected = expected.map(|(name, count)| (name.to_owned(), count));
    let expected: BTreeMap<_, _> = expected.into_iter().filter(|(_, count)| *count > 0).collect();
    // The VMM closes the connection of `wait_for` when it notices that the client has closed it.
    let begin = Instant::now();
    while open_files(&vmm, folder.path()) != expected && begin.elapsed().as_secs() < LIMIT_SECS {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(open_files(&vmm, folder.path()), expected);
}

/// The VMM resolves relative paths when it checks that no file is named twice, and when it makes
/// the rules of Landlock.
#[test]
fn vm_with_relative_paths_is_not_ended_by_its_filters() {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("kernel"), "no kernel").unwrap();
    for api_socket in [&[][..], &["--api-socket", "api"]] {
        let output = foreshore()
            .current_dir(folder.path())
            .args(["--kernel", "kernel", "--serial", "file=serial", "--console", "off"])
            .args(["--vsock", "cid=3,socket=vsock"])
            .args(api_socket)
            .output()
            .unwrap();
        // The boot fails, because the kernel is not valid or the host has no KVM.
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(message.contains("cannot boot the VM"), "{message}");
    }
}
