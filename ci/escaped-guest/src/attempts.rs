//! Attempts of an attacker to leave the process of the VMM.

use std::cell::RefCell;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use foreshore_confinement::thread::ThreadKind;

use crate::ring;
use crate::threads::VmmThread;
use crate::traced_thread::TracedThread;

/// Exit status of a VMM whose filter has refused a call.
pub const REFUSED: i32 = 159;
const PROGRAM: &str = "/bin/true";
/// Content of the pool of another VM.
const POOL_CONTENT: &str = "pool of another VM";
/// `PTRACE_SEIZE` of linux/ptrace.h traces a process without stopping it.
const PTRACE_SEIZE: u64 = libc::PTRACE_SEIZE as u64;

/// Objects of the host that do not belong to a VM.
pub struct Targets {
    /// File that only root may read.
    pub(crate) secret: &'static str,
    socket: PathBuf,
    _listener: UnixListener,
    pool: PathBuf,
    /// Folder to mount a file system on.
    folder: PathBuf,
    processes: RefCell<Vec<Child>>,
}

impl Targets {
    /// Creates the objects in `folder`, which must be outside the limits of the VM. They must
    /// outlive the VMM, because an attempt may have made it the tracer of a process.
    pub fn create(folder: &Path) -> Result<Self> {
        let mut secrets = ["/etc/shadow", "/etc/passwd"].into_iter();
        let secret = secrets.find(|path| Path::new(path).exists());
        let [socket, pool, mounts] = ["socket", "pool", "mounts"].map(|name| folder.join(name));
        fs::create_dir(&mounts)?;
        fs::write(&pool, POOL_CONTENT)?;
        Ok(Self {
            secret: secret.context("this host has no file with users")?,
            _listener: UnixListener::bind(&socket)?,
            socket,
            pool,
            folder: mounts,
            processes: RefCell::default(),
        })
    }

    /// Returns true if the pool of the other VM has its first content.
    pub fn is_pool_unchanged(&self) -> Result<bool> {
        Ok(fs::read_to_string(&self.pool)? == POOL_CONTENT)
    }

    /// Starts a process that waits, and returns its ID.
    fn process(&self) -> Result<u32> {
        // The program copies its input until this value is dropped.
        let mut command = Command::new("cat");
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        // Once it has copied a byte, it has loaded its libraries.
        process.stdin.as_mut().context("no input")?.write_all(&[0])?;
        process.stdout.as_mut().context("no output")?.read_exact(&mut [0])?;
        let id = process.id();
        self.processes.borrow_mut().push(process);
        Ok(id)
    }
}

impl Drop for Targets {
    fn drop(&mut self) {
        let unmount = || Command::new("umount").arg(&self.folder).stderr(Stdio::null()).status();
        // Each attempt has added a mount. The command fails when none is left.
        while unmount().is_ok_and(|status| status.success()) {}
        for process in self.processes.get_mut() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// Limit of a VMM's threads in addition to their filters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Limit {
    /// Landlock, unless it is off.
    Landlock,
    /// Capabilities that no thread of a VMM keeps, even without confinement.
    Capabilities,
}

/// Attempt of an attacker.
pub struct Attempt {
    pub name: &'static str,
    /// System call that a filter refuses, by its name.
    call: &'static str,
    /// Limit that also refuses the attempt, besides the filter.
    other_limit: Option<Limit>,
    /// Kinds of threads whose filters allow all calls of the attempt, each with the reason.
    allowed: &'static [(ThreadKind, &'static str)],
    /// Returns the result of the first call that fails, or of the last call.
    make: fn(&mut TracedThread, &Targets) -> Result<i64>,
}

impl Attempt {
    /// Returns the result of the first call that fails, or of the last call: a value or a negative
    /// error number. Fails if the call ends the VMM.
    pub fn make(&self, thread: &mut TracedThread, targets: &Targets) -> Result<i64> {
        (self.make)(thread, targets).with_context(|| self.name.to_owned())
    }

    /// Returns true if the filter of this kind of thread refuses a call of the attempt.
    pub fn is_filtered(&self, kind: ThreadKind) -> bool {
        !self.allowed.iter().any(|(allowed, _)| *allowed == kind)
    }

    /// Start of the line that `--seccomp true` and `--seccomp log` write.
    pub fn log_line(&self, thread: &VmmThread) -> String {
        format!("thread {}: the system call {} (", thread.name, self.call)
    }

    /// Error that a thread of this kind is expected to get. `None` if the attempt succeeds.
    fn expected_error(&self, kind: ThreadKind, confinement: Confinement) -> Option<i32> {
        let is_on = confinement == Confinement::On;
        match self.other_limit {
            _ if is_on && self.is_filtered(kind) => Some(libc::EPERM),
            Some(Limit::Capabilities) => Some(libc::EPERM),
            Some(Limit::Landlock) if is_on => Some(libc::EACCES),
            Some(Limit::Landlock) | None => None,
        }
    }
}

/// Confinement of the VMM in which attempts are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Confinement {
    /// `--seccomp errno --landlock on`, after the limits of files have begun.
    On,
    /// `--seccomp false --landlock off`.
    Off,
}

/// Makes all attempts in a thread, and fails if a result is not that of this confinement.
pub fn check_attempts(
    thread: &VmmThread,
    traced: &mut TracedThread,
    targets: &Targets,
    confinement: Confinement,
) -> Result<()> {
    let kind = thread.kind()?;
    let mut unexpected = Vec::new();
    for attempt in &ATTEMPTS {
        let result = attempt.make(traced, targets)?;
        let expected = attempt.expected_error(kind, confinement);
        let is_expected = expected.map_or(result >= 0, |error| result == -i64::from(error));
        if !is_expected {
            unexpected.push(format!("{}: {result}", attempt.name));
        }
    }
    ensure!(unexpected.is_empty(), "{}, {confinement:?}: {unexpected:?}", thread.name);
    if confinement == Confinement::On {
        let path = traced.place_text(PROGRAM)?;
        let result = traced.call(libc::SYS_execve, &[path, 0, 0])?;
        ensure!(result == -i64::from(libc::EPERM), "{}: execve: {result}", thread.name);
    }
    Ok(())
}

/// Makes all attempts in a process of root that is not a VMM, and fails unless they succeed.
pub fn check_attempts_without_limits(targets: &Targets) -> Result<()> {
    let process = targets.process()?;
    let mut traced = TracedThread::attach(process, process)?;
    for attempt in &ATTEMPTS {
        let result = attempt.make(&mut traced, targets)?;
        ensure!(result >= 0, "{}: {result}", attempt.name);
    }
    Ok(())
}

/// Makes a thread execute another program, which exits with code 0, instead of the VMM. Without
/// confinement, every thread can do this.
pub fn execute_program(mut thread: TracedThread) -> Result<()> {
    let path = thread.place_text(PROGRAM)?;
    let arguments = thread.place(&[path.to_ne_bytes(), [0; 8]].concat())?;
    thread.continue_with(libc::SYS_execve, &[path, arguments, 0]);
    Ok(())
}

const OPENS_FILES: [(ThreadKind, &str); 5] = [
    (ThreadKind::SetUp, "opens the files of VMs; Landlock limits them"),
    (ThreadKind::Api, "reads /proc and /sys for metrics; Landlock limits the files"),
    (ThreadKind::Memory, "reads /sys for huge pages; Landlock limits the files"),
    (ThreadKind::Governor, "reads /proc and /sys for decisions; Landlock limits the files"),
    (ThreadKind::ConsoleFile, "opens the next console file; Landlock limits the files"),
];

/// All attempts but the execution of a program, which ends the VMM if it succeeds.
pub const ATTEMPTS: [Attempt; 10] = [
    Attempt {
        name: "read a file",
        call: "openat",
        other_limit: Some(Limit::Landlock),
        allowed: &OPENS_FILES,
        make: |thread, targets| {
            let path = thread.place_text(targets.secret)?;
            open(thread, path, libc::O_RDONLY)
        },
    },
    Attempt {
        name: "write to the pool of another VM",
        call: "openat",
        other_limit: Some(Limit::Landlock),
        allowed: &[OPENS_FILES[0], OPENS_FILES[4]],
        make: |thread, targets| {
            let path = place_path(thread, &targets.pool)?;
            let file = open(thread, path, libc::O_RDWR)?;
            if file < 0 {
                return Ok(file);
            }
            let bytes = thread.place(b"overwritten")?;
            thread.call(libc::SYS_pwrite64, &[file as u64, bytes, 11, 0])
        },
    },
    Attempt {
        name: "open a file through io_uring",
        call: "io_uring_setup",
        other_limit: Some(Limit::Landlock),
        allowed: &[(ThreadKind::SetUp, "creates the rings of disks; Landlock limits the files")],
        make: ring::open_through_new_ring,
    },
    Attempt {
        name: "connect to a socket",
        call: "socket",
        other_limit: None,
        allowed: &[
            (ThreadKind::SetUp, "binds sockets, and its filter includes that of vsock"),
            (ThreadKind::Vsock, "connects to services of the host"),
        ],
        make: |thread, targets| {
            let unix = libc::AF_UNIX as u64;
            let socket = thread.call(libc::SYS_socket, &[unix, libc::SOCK_STREAM as u64, 0])?;
            if socket < 0 {
                return Ok(socket);
            }
            let family = (libc::AF_UNIX as u16).to_ne_bytes();
            let address = [&family, targets.socket.as_os_str().as_bytes(), &[0]].concat();
            let len = address.len() as u64;
            let address = thread.place(&address)?;
            thread.call(libc::SYS_connect, &[socket as u64, address, len])
        },
    },
    Attempt {
        name: "trace another process",
        call: "ptrace",
        other_limit: Some(Limit::Capabilities),
        allowed: &[],
        make: |thread, targets| {
            let process = targets.process()?.into();
            thread.call(libc::SYS_ptrace, &[PTRACE_SEIZE, process, 0, 0])
        },
    },
    Attempt {
        name: "kill another process",
        call: "kill",
        other_limit: None,
        allowed: &[],
        make: |thread, targets| {
            let process = targets.process()?.into();
            thread.call(libc::SYS_kill, &[process, libc::SIGKILL as u64])
        },
    },
    Attempt {
        name: "map executable memory",
        call: "mmap",
        other_limit: None,
        allowed: &[],
        make: |thread, _| {
            let access = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let arguments = [0, 4096, access as u64, flags as u64, u64::MAX, 0];
            thread.call(libc::SYS_mmap, &arguments)
        },
    },
    Attempt {
        name: "mount a file system",
        call: "mount",
        other_limit: Some(Limit::Capabilities),
        allowed: &[],
        make: |thread, targets| {
            let name = thread.place_text("tmpfs")?;
            let folder = place_path(thread, &targets.folder)?;
            thread.call(libc::SYS_mount, &[name, folder, name, 0, 0])
        },
    },
    Attempt {
        name: "become root",
        call: "setuid",
        other_limit: None,
        allowed: &[],
        make: |thread, _| thread.call(libc::SYS_setuid, &[0]),
    },
    Attempt {
        name: "create a namespace",
        call: "unshare",
        other_limit: Some(Limit::Capabilities),
        allowed: &[],
        make: |thread, _| thread.call(libc::SYS_unshare, &[libc::CLONE_NEWUTS as u64]),
    },
];

fn open(thread: &mut TracedThread, path: u64, flags: i32) -> Result<i64> {
    thread.call(libc::SYS_openat, &[libc::AT_FDCWD as u64, path, flags as u64, 0])
}

fn place_path(thread: &mut TracedThread, path: &Path) -> Result<u64> {
    thread.place_text(path.to_str().context("a path that is not UTF-8")?)
}
