//! System calls that each kind of thread may make.
//!
//! A table consists of groups. The comment of each group states its purpose. `--seccomp log` prints
//! the calls that a table lacks.

use libc::*;
use rustix::process::getpid;

use super::request;
use crate::thread::ThreadKind;

/// System call that a filter allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Allowed {
    pub call: i64,
    /// Conditions that must all hold.
    pub conditions: Vec<Condition>,
}

/// Condition on an argument of a call: the bits in `mask` have one of `values`. Arguments are
/// numbered from 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Condition {
    pub argument: u8,
    pub mask: u64,
    pub values: Vec<u64>,
}

/// Bits of an ioctl() request that are compared: its type and number.
const REQUEST: u64 = 0xffff;
/// Option for features of vCPUs with large registers (asm/prctl.h of x86).
const ARCH_REQ_XCOMP_GUEST_PERM: i32 = 0x1025;
/// Bits of an argument of the C type `int`.
const INT: u64 = 0xffff_ffff;

/// Returns the table of a thread.
pub(super) fn allowed(kind: ThreadKind) -> Vec<Allowed> {
    let own = match kind {
        ThreadKind::SetUp => return set_up(),
        ThreadKind::Api => api(),
        ThreadKind::Vcpu => vcpu(),
        ThreadKind::Device => device(),
        ThreadKind::Vsock => vsock(),
        ThreadKind::Queue => queue(),
        ThreadKind::Memory => memory(),
        ThreadKind::Governor => governor(),
        ThreadKind::Writer => writer(),
        ThreadKind::ConsoleFile => console_file(),
        ThreadKind::Scrubber => scrubber(),
        ThreadKind::Holes => holes(),
        ThreadKind::Trim => trim(),
    };
    [every_thread(), own].concat()
}

/// Memory, locks, time, the log, and the end of a thread or of the process.
pub(super) fn every_thread() -> Vec<Allowed> {
    [
        always(&[
            SYS_brk,
            SYS_clock_gettime,
            SYS_clock_nanosleep,
            SYS_close,
            SYS_exit,
            SYS_exit_group,
            SYS_fstat,
            SYS_futex,
            SYS_getpid,
            SYS_getrandom,
            SYS_gettid,
            SYS_madvise,
            SYS_mremap,
            SYS_munmap,
            // A handler of faults calls it by rustix, without the C library.
            SYS_nanosleep,
            SYS_ppoll,
            SYS_read,
            SYS_restart_syscall,
            SYS_rseq,
            SYS_rt_sigprocmask,
            SYS_rt_sigreturn,
            SYS_sched_getaffinity,
            SYS_sched_yield,
            SYS_set_robust_list,
            SYS_sigaltstack,
            SYS_write,
            SYS_writev,
        ]),
        without(SYS_mmap, 2, PROT_EXEC),
        without(SYS_mprotect, 2, PROT_EXEC),
        int(SYS_fcntl, 1, &[F_DUPFD_CLOEXEC, F_GETFD, F_GETFL, F_SETFL]),
        int(SYS_prctl, 0, &[PR_SET_NAME, PR_GET_NAME]),
        // A signal to a thread of this process: abort(), and a request to leave the guest.
        int(SYS_tgkill, 0, &[getpid().as_raw_nonzero().get()]),
        // Reads a limit. The pointer to a new limit is null.
        vec![Allowed { call: SYS_prlimit64, conditions: vec![is(2, u64::MAX, &[0])] }],
        // Default actions, which the handlers of faults and abort() restore.
        int(SYS_rt_sigaction, 0, &[SIGABRT, SIGBUS, SIGSEGV]),
    ]
    .concat()
}

/// Event loop, and interrupts of devices. The first interrupt of a vector connects it to KVM.
fn event_loop() -> Vec<Allowed> {
    [
        always(&[
            SYS_epoll_ctl,
            SYS_epoll_wait,
            SYS_eventfd2,
            SYS_poll,
            SYS_timerfd_create,
            SYS_timerfd_settime,
        ]),
        ioctl(&[request::KVM_IRQFD, request::KVM_SET_GSI_ROUTING, request::KVM_SIGNAL_MSI]),
    ]
    .concat()
}

/// Reads and writes of files at offsets, and their durability.
fn transfers() -> Vec<Allowed> {
    always(&[
        SYS_fallocate,
        SYS_fdatasync,
        SYS_fsync,
        SYS_lseek,
        SYS_msync,
        SYS_pread64,
        SYS_pwrite64,
        SYS_statx,
        SYS_sync_file_range,
    ])
}

fn start_of_threads() -> Vec<Allowed> {
    // The namespace flags must be absent, so a thread cannot create a namespace.
    let namespaces = CLONE_NEWNS
        | CLONE_NEWCGROUP
        | CLONE_NEWUTS
        | CLONE_NEWIPC
        | CLONE_NEWUSER
        | CLONE_NEWPID
        | CLONE_NEWNET;
    let mask = (CLONE_THREAD | namespaces) as u64 & INT;
    vec![Allowed { call: SYS_clone, conditions: vec![is(0, mask, &[CLONE_THREAD as u64])] }]
}

/// Calls that confine a new thread.
fn confinement() -> Vec<Allowed> {
    [
        int(SYS_prctl, 0, &[PR_SET_NO_NEW_PRIVS]),
        int(SYS_seccomp, 0, &[SECCOMP_SET_MODE_FILTER as i32]),
        always(&[
            SYS_capset,
            SYS_landlock_add_rule,
            SYS_landlock_create_ruleset,
            SYS_landlock_restrict_self,
        ]),
    ]
    .concat()
}

fn files_read_only() -> Vec<Allowed> {
    [
        without(SYS_openat, 2, O_ACCMODE | O_CREAT | O_TRUNC),
        always(&[SYS_lseek, SYS_newfstatat, SYS_pread64, SYS_readlinkat, SYS_statx]),
    ]
    .concat()
}

/// API and metrics over sockets, and metrics of the process from /proc.
fn api() -> Vec<Allowed> {
    [
        event_loop(),
        files_read_only(),
        start_of_threads(),
        confinement(),
        always(&[
            SYS_accept4,
            SYS_getdents64,
            SYS_getsockopt,
            SYS_recvfrom,
            SYS_recvmsg,
            SYS_sendto,
            SYS_shutdown,
        ]),
        // Sets FD_CLOEXEC on the descriptors of a new API client.
        int(SYS_fcntl, 1, &[F_SETFD]),
        // Reads the guest's clock.
        ioctl(&[request::KVM_GET_CLOCK]),
    ]
    .concat()
}

/// Execution of the guest, accesses to device registers, activation of devices, and flushes during
/// an exit of the guest.
fn vcpu() -> Vec<Allowed> {
    [
        event_loop(),
        // vCPUs inherit the filter of the thread that starts them.
        start_of_threads(),
        transfers(),
        int(SYS_prctl, 0, &[PR_SCHED_CORE]),
        ioctl(&[
            request::KVM_RUN,
            request::KVM_GET_MP_STATE,
            request::KVM_GET_REGS,
            request::KVM_IOEVENTFD,
            request::KVM_IRQ_LINE,
            request::KVM_KVMCLOCK_CTRL,
            request::KVM_NMI,
            // Reset the state of a vCPU that is added again.
            request::KVM_SET_LAPIC,
            request::KVM_SET_MP_STATE,
            request::KVM_SET_MSRS,
            request::KVM_SET_REGS,
            request::KVM_SET_SREGS,
            // Maps the registers of an active device.
            request::KVM_SET_USER_MEMORY_REGION,
            request::KVM_SET_VCPU_EVENTS,
            request::TIOCGWINSZ,
            request::TUNSETOFFLOAD,
            request::TUNSETQUEUE,
        ]),
    ]
    .concat()
}

/// Devices that share a thread, and consoles.
fn device() -> Vec<Allowed> {
    [
        event_loop(),
        always(&[SYS_accept4, SYS_recvfrom, SYS_sendto, SYS_shutdown]),
        ioctl(&[request::FIONBIO, request::TCGETS, request::TCSETS2, request::TIOCGWINSZ]),
    ]
    .concat()
}

/// Connections between the guest and sockets of the host.
fn vsock() -> Vec<Allowed> {
    [
        event_loop(),
        always(&[SYS_accept4, SYS_connect, SYS_recvfrom, SYS_sendto, SYS_shutdown]),
        int(SYS_socket, 0, &[AF_UNIX]),
        int(SYS_socketpair, 0, &[AF_UNIX]),
        ioctl(&[request::FIONBIO]),
    ]
    .concat()
}

/// Disks, network interfaces and flushes of persistent memory.
fn queue() -> Vec<Allowed> {
    [
        event_loop(),
        transfers(),
        always(&[SYS_io_uring_enter]),
        ioctl(&[
            request::TUNGETIFF,
            request::TUNSETOFFLOAD,
            request::TUNSETQUEUE,
            request::VHOST_SET_OWNER,
            request::VHOST_RESET_OWNER,
            request::VHOST_SET_FEATURES,
            request::VHOST_SET_MEM_TABLE,
            request::VHOST_SET_VRING_NUM,
            request::VHOST_SET_VRING_ADDR,
            request::VHOST_SET_VRING_BASE,
            request::VHOST_SET_VRING_KICK,
            request::VHOST_SET_VRING_CALL,
            request::VHOST_SET_VRING_ERR,
            request::VHOST_NET_SET_BACKEND,
        ]),
    ]
    .concat()
}

/// Changes of guest memory, and erasure of persistent memory. Large ranges are allocated by several
/// threads. Their number, and the number of free huge pages, are read from files.
fn memory() -> Vec<Allowed> {
    [
        event_loop(),
        files_read_only(),
        start_of_threads(),
        transfers(),
        always(&[SYS_mbind, SYS_mincore]),
        ioctl(&[
            request::KVM_SET_USER_MEMORY_REGION,
            // Wakes accesses to memory that was moved to a file.
            request::UFFDIO_WAKE,
            // Updates the memory of a queue pair, or disables the pair after a failure.
            request::VHOST_SET_MEM_TABLE,
            request::VHOST_RESET_OWNER,
        ]),
    ]
    .concat()
}

/// Decisions about guest memory, and reports of agents, which arrive on sockets.
fn governor() -> Vec<Allowed> {
    [
        event_loop(),
        files_read_only(),
        always(&[SYS_recvfrom, SYS_sendto, SYS_shutdown]),
        // Raises the priority of the governor. Process 0 is the calling thread.
        vec![Allowed {
            call: SYS_setpriority,
            conditions: vec![is(0, INT, &[PRIO_PROCESS.into()]), is(1, INT, &[0])],
        }],
    ]
    .concat()
}

/// Events and recordings, which are written to open files.
fn writer() -> Vec<Allowed> {
    always(&[SYS_poll, SYS_statx])
}

/// Files with the output of consoles, which are renamed when they reach their maximum size.
fn console_file() -> Vec<Allowed> {
    always(&[
        SYS_fchmod,
        SYS_fchown,
        SYS_fgetxattr,
        SYS_flock,
        SYS_fsetxattr,
        SYS_fstatfs,
        SYS_ftruncate,
        SYS_lseek,
        SYS_openat,
        SYS_pread64,
        SYS_rename,
        SYS_statx,
        SYS_unlink,
    ])
}

/// Erasure of chunks of a pool.
fn scrubber() -> Vec<Allowed> {
    [transfers(), always(&[SYS_mincore])].concat()
}

/// Allocation of chunks for stores of the guest, and their mapping.
fn holes() -> Vec<Allowed> {
    let register = u64::from(request::UFFDIO_REGISTER);
    [
        trim(),
        ioctl(&[request::UFFDIO_WAKE, request::UFFDIO_WRITEPROTECT]),
        always(&[SYS_mincore]),
        // Not USERFAULTFD_IOC_NEW, whose type and number are the same.
        vec![Allowed { call: SYS_ioctl, conditions: vec![is(1, INT, &[register])] }],
    ]
    .concat()
}

/// Commands of the guest, and the release of chunks.
fn trim() -> Vec<Allowed> {
    [scrubber(), always(&[SYS_poll])].concat()
}

/// Construction of VMs and devices. Other threads inherit this filter, and then add their own.
fn set_up() -> Vec<Allowed> {
    let mut allowed = every_thread();
    for kind in ThreadKind::ALL.into_iter().filter(|kind| *kind != ThreadKind::SetUp) {
        allowed.extend(self::allowed(kind));
    }
    allowed.extend(confinement());
    allowed.extend(always(&[
        SYS_bind,
        SYS_epoll_create1,
        SYS_faccessat,
        SYS_faccessat2,
        SYS_fadvise64,
        SYS_fchmod,
        SYS_fgetxattr,
        SYS_flistxattr,
        SYS_flock,
        SYS_fremovexattr,
        SYS_fsetxattr,
        SYS_fstatfs,
        SYS_getdents64,
        SYS_getcwd,
        SYS_geteuid,
        SYS_getpgrp,
        SYS_getsockname,
        SYS_getuid,
        SYS_inotify_add_watch,
        SYS_inotify_init1,
        SYS_io_uring_register,
        SYS_io_uring_setup,
        SYS_listen,
        SYS_mbind,
        SYS_memfd_create,
        // rustix opens /dev/ptmx with it (openpt).
        SYS_open,
        SYS_openat,
        SYS_pipe2,
        SYS_readlink,
        SYS_rt_sigaction,
        SYS_sched_setaffinity,
        SYS_setsockopt,
        SYS_sysinfo,
        SYS_uname,
        SYS_unlink,
    ]));
    allowed.extend(int(SYS_socket, 0, &[AF_UNIX, AF_INET, AF_INET6]));
    allowed.extend(int(SYS_fcntl, 1, &[F_OFD_SETLK, F_SETFD]));
    // Permission for features of vCPUs with large registers (AMX).
    allowed.extend(int(SYS_arch_prctl, 0, &[ARCH_REQ_XCOMP_GUEST_PERM]));
    allowed.extend(ioctl(request::SET_UP));
    allowed
}

fn always(calls: &[i64]) -> Vec<Allowed> {
    calls.iter().map(|&call| Allowed { call, conditions: Vec::new() }).collect()
}

/// A call whose argument, of the C type `int`, is one of `values`.
fn int(call: i64, argument: u8, values: &[i32]) -> Vec<Allowed> {
    let values: Vec<_> = values.iter().map(|value| u64::from(*value as u32)).collect();
    vec![Allowed { call, conditions: vec![is(argument, INT, &values)] }]
}

/// A call whose argument has none of `bits`.
fn without(call: i64, argument: u8, bits: i32) -> Vec<Allowed> {
    vec![Allowed { call, conditions: vec![is(argument, u64::from(bits as u32), &[0])] }]
}

fn ioctl(requests: &[u32]) -> Vec<Allowed> {
    let values: Vec<_> = requests.iter().map(|request| u64::from(*request)).collect();
    vec![Allowed { call: SYS_ioctl, conditions: vec![is(1, REQUEST, &values)] }]
}

fn is(argument: u8, mask: u64, values: &[u64]) -> Condition {
    Condition { argument, mask, values: values.to_owned() }
}
