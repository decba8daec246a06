//! Threads of the VMM, by what they do.

use std::io;
use std::sync::{OnceLock, mpsc};
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

use crate::{capabilities, seccomp};

/// Work of a thread. It determines the system calls that the thread may make, and its capabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadKind {
    /// Builds VMs, and adds and removes devices. Most other kinds inherit its filter, and all its
    /// capabilities, so it has everything that any of them needs.
    SetUp,
    /// Serves the API and the metrics.
    Api,
    /// Runs a vCPU, and handles accesses to device registers.
    Vcpu,
    /// Serves devices that share a thread, or a console.
    Device,
    /// Connects the guest to sockets of the host.
    Vsock,
    /// Serves queues of disks, network interfaces and persistent memory.
    Queue,
    /// Changes guest memory: serves virtio-mem, detects lost memory, and moves lent memory.
    Memory,
    /// Decides about guest memory, and reads the reports of agents.
    Governor,
    /// Writes events or a recording to an open file.
    Writer,
    /// Writes the output of a console to a file, and renames full files.
    ConsoleFile,
    /// Erases chunks of a pool, and allocates chunks for holes in advance.
    Scrubber,
    /// Fills holes of mapped thin volumes.
    Holes,
    /// Serves commands of the guest that release chunks of mapped thin volumes.
    Trim,
}

impl ThreadKind {
    pub const ALL: [Self; 13] = [
        Self::SetUp,
        Self::Api,
        Self::Vcpu,
        Self::Device,
        Self::Vsock,
        Self::Queue,
        Self::Memory,
        Self::Governor,
        Self::Writer,
        Self::ConsoleFile,
        Self::Scrubber,
        Self::Holes,
        Self::Trim,
    ];

    /// Returns the kind of a thread by its name, for tests of all threads of a VMM.
    pub fn of_name(name: &str) -> Option<Self> {
        Some(match name {
            "foreshore" | "_grow" | "_removed" => Self::SetUp,
            "_api" => Self::Api,
            "_device" | "_console" => Self::Device,
            "_vsock" => Self::Vsock,
            "_pmem" | "_compact" => Self::Queue,
            "_mem" | "_lost" | "_spill" | "_barrier" => Self::Memory,
            "_agent" | "_pressure" => Self::Governor,
            "_events" | "_record" => Self::Writer,
            "_console_file" => Self::ConsoleFile,
            "pool-scrubber" | "_stock" => Self::Scrubber,
            "_holes" => Self::Holes,
            "_trim" => Self::Trim,
            "_vcpus" => Self::Vcpu,
            _ if is_numbered(name, "vcpu") => Self::Vcpu,
            _ => {
                let (_device, queue) = name.rsplit_once('_')?;
                let is_queue = is_numbered(queue, "q") || is_numbered(queue, "qp");
                return is_queue.then_some(Self::Queue);
            }
        })
    }
}

fn is_numbered(name: &str, prefix: &str) -> bool {
    name.strip_prefix(prefix).is_some_and(|number| number.parse::<u32>().is_ok())
}

/// Confines the calling thread to its kind, for the rest of its life.
///
/// # Panics
/// Panics if the kernel refuses, because the thread must not run without its limits.
pub fn enter(kind: ThreadKind) {
    capabilities::limit(kind);
    seccomp::enter(kind);
}

/// Starts a thread that is confined to its kind before it runs `work`. The kernel keeps at most 15
/// bytes of the thread's `name`.
pub fn spawn_confined<T: Send + 'static>(
    kind: ThreadKind,
    name: impl Into<String>,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let builder = Builder::new().name(name.into());
    match VCPU_STARTER.get() {
        Some(starter) if kind == ThreadKind::Vcpu => starter.spawn(builder, work),
        _ => builder.spawn(move || {
            enter(kind);
            work()
        }),
    }
}

static VCPU_STARTER: OnceLock<VcpuStarter> = OnceLock::new();

/// Starts a thread that starts the threads of vCPUs. They inherit its filter, and not also that of
/// [`ThreadKind::SetUp`]: the kernel runs all filters of a thread at each `KVM_RUN`. Must be called
/// before the calling thread has a filter.
///
/// Landlock limits that are set later do not apply to these threads. Their filter permits none of
/// the calls that Landlock controls.
pub(crate) fn start_vcpu_starter() -> io::Result<()> {
    let (sender, starts) = mpsc::channel::<Start>();
    let (confined, is_confined) = mpsc::channel();
    spawn_confined(ThreadKind::Vcpu, "_vcpus", move || {
        confined.send(()).expect("the caller waits for it");
        starts.into_iter().for_each(|start| start());
    })?;
    is_confined.recv().expect("the thread is confined, or ends the process");
    VCPU_STARTER.get_or_init(|| VcpuStarter(sender));
    Ok(())
}

/// Start of a thread.
type Start = Box<dyn FnOnce() + Send>;

struct VcpuStarter(mpsc::Sender<Start>);

impl VcpuStarter {
    fn spawn<T: Send + 'static>(
        &self,
        builder: Builder,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<JoinHandle<T>> {
        let (sender, started) = mpsc::channel();
        let work = || {
            seccomp::inherit_kind(ThreadKind::Vcpu);
            work()
        };
        let start = move || sender.send(builder.spawn(work)).expect("the caller waits for it");
        self.0.send(Box::new(start)).expect("it runs until the process ends");
        started.recv().expect("it starts threads until the process ends")
    }
}

/// Starts a thread that has the kind and the limits of the calling thread.
pub fn spawn_same_kind<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> ScopedJoinHandle<'scope, T> {
    let kind = seccomp::kind();
    scope.spawn(move || {
        seccomp::inherit_kind(kind);
        work()
    })
}
