//! System call filters of the VMM's threads (Linux Documentation/userspace-api/seccomp_filter.rst).

mod calls;
mod program;
mod report;
mod request;
#[cfg(test)]
mod unreached;

use std::hint::black_box;
use std::os::fd::RawFd;
use std::sync::OnceLock;

use seccompiler::{BpfProgram, apply_filter};
use thiserror::Error;

use crate::thread::{self, ThreadKind};

/// Reaction to a system call that a thread's filter does not allow (`--seccomp`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SeccompMode {
    /// The VMM prints the call and ends.
    #[default]
    Enforce,
    /// No filters are installed.
    Off,
    /// The VMM prints the call and carries it out.
    Log,
    /// The call fails with EPERM.
    Errno,
}

impl SeccompMode {
    pub const ALL: [Self; 4] = [Self::Enforce, Self::Off, Self::Log, Self::Errno];

    /// Name of the mode in the flag.
    pub fn name(self) -> &'static str {
        match self {
            Self::Enforce => "true",
            Self::Off => "false",
            Self::Log => "log",
            Self::Errno => "errno",
        }
    }
}

/// The filters could not be installed.
#[derive(Debug, Error)]
pub enum SeccompError {
    #[error("cannot handle SIGSYS")]
    Handler(#[source] std::io::Error),
    #[error("cannot start the thread that starts vCPUs")]
    VcpuStarter(#[source] std::io::Error),
    #[error("the kernel refuses a system call filter")]
    Install(#[from] seccompiler::Error),
}

/// Destination and format of reports about refused calls.
#[derive(Clone, Copy, Debug)]
pub struct ReportTarget {
    pub fd: RawFd,
    pub is_json: bool,
}

static PROGRAMS: OnceLock<Vec<(ThreadKind, BpfProgram)>> = OnceLock::new();

/// Compiles the filters of all threads, and installs that of the calling thread, which is inherited
/// by the threads that it starts, except those of vCPUs. Must be called only once.
pub fn start(mode: SeccompMode, target: ReportTarget) -> Result<(), SeccompError> {
    if mode == SeccompMode::Off {
        return Ok(());
    }
    limit_heaps();
    shrink_a_heap();
    // rustix reads the auxiliary vector at the first use and stores it. Filters refuse the prctl()
    // for this, and most of them the file that is opened instead before Linux 6.4.
    let _ = rustix::param::clock_ticks_per_second();
    report::install(mode, target).map_err(SeccompError::Handler)?;
    let programs = ThreadKind::ALL.map(|kind| (kind, program::compile(kind, mode)));
    let programs = PROGRAMS.get_or_init(|| programs.into());
    // Calls that are only logged are carried out, so Landlock must apply to vCPUs as well.
    if mode != SeccompMode::Log {
        thread::start_vcpu_starter().map_err(SeccompError::VcpuStarter)?;
    }
    apply_filter(of(programs, ThreadKind::SetUp))?;
    Ok(())
}

/// Sets the number of heaps that the C library calculates by default from the number of CPUs
/// (glibc malloc/arena.c, `arena_get2`). It would otherwise read that number from a file when
/// threads have more than eight heaps, and a new vCPU thread may not open this file.
fn limit_heaps() {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let heaps = 8 * cpus.min(4096);
    // SAFETY: the call changes only an upper limit.
    let is_set = unsafe { libc::mallopt(libc::M_ARENA_MAX, heaps as libc::c_int) };
    assert_eq!(is_set, 1, "the C library accepts any positive limit");
}

/// Makes the C library read a setting that it otherwise reads when a thread first returns memory to
/// the kernel (glibc malloc/arena.c, `check_may_shrink_heap`). The library caches the setting, and
/// most threads may not open its file later.
fn shrink_a_heap() {
    // The heap of the main thread does not need the setting. Memory is returned from 128 KiB on
    // (mallopt(3), M_TRIM_THRESHOLD).
    let fill = || drop(black_box((0..64).map(|_| Box::new([0_u8; 4096])).collect::<Vec<_>>()));
    std::thread::spawn(fill).join().expect("no panic");
}

/// Kind that appears in reports of the calling thread.
pub(crate) fn kind() -> ThreadKind {
    report::kind()
}

/// Sets the `kind` that appears in reports of the calling thread. A thread inherits the filter of
/// the thread that starts it, but not this kind.
pub(crate) fn inherit_kind(kind: ThreadKind) {
    report::set_kind(kind);
}

/// Limits the calling thread to the system calls of its kind, if filters are in use.
///
/// # Panics
/// Panics if the kernel refuses the filter, because the thread must not run without it.
pub(crate) fn enter(kind: ThreadKind) {
    let Some(programs) = PROGRAMS.get() else { return };
    report::set_kind(kind);
    apply_filter(of(programs, kind)).expect("the kernel has accepted a filter before");
}

fn of(programs: &[(ThreadKind, BpfProgram)], kind: ThreadKind) -> &BpfProgram {
    let (_, program) = programs.iter().find(|(of, _)| *of == kind).expect("one of each kind");
    program
}
