//! System calls that std does not provide.

use std::io;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mm::MlockAllFlags;
use rustix::net::addr::{SocketAddrArg, SocketAddrLen, SocketAddrOpaque};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use rustix::time::ClockId;

/// Turns a result of -1 into the error of the system call.
fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

pub(crate) fn monotonic_ms() -> u64 {
    let now = rustix::time::clock_gettime(ClockId::Monotonic);
    // The clock starts at boot, so its value is never negative.
    now.tv_sec.cast_unsigned().saturating_mul(1000) + now.tv_nsec.cast_unsigned() / 1_000_000
}

/// Returns free memory, with the only system call that does so without formatting a text.
pub(crate) fn free_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.freeram.saturating_mul(u64::from(info.mem_unit))
}

/// Locks all current and future memory of the process, so that it can report under memory pressure.
pub(crate) fn lock_memory() -> io::Result<()> {
    Ok(rustix::mm::mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE)?)
}

/// Raises the priority above ordinary processes, because the agent's work is short and late reports
/// are useless.
pub(crate) fn raise_priority() -> io::Result<()> {
    Ok(rustix::process::setpriority_process(None, -10)?)
}

/// Calls `act`. After `limit_ms`, its system calls fail with EINTR. This limits calls that wait for
/// the kernel.
#[expect(unsafe_code, reason = "rustix has no timers and no signal handlers")]
pub(crate) fn within_ms<T>(limit_ms: u64, act: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    extern "C" fn ignore(_: libc::c_int) {}
    let limit = libc::timespec {
        tv_sec: (limit_ms / 1000).cast_signed(),
        tv_nsec: (limit_ms % 1000 * 1_000_000).cast_signed(),
    };
    // The timer repeats, because a signal that arrives before the call starts does not interrupt
    // it.
    let again = libc::timespec { tv_sec: 1, tv_nsec: 0 };
    let times = libc::itimerspec { it_interval: again, it_value: limit };
    let mut timer: libc::timer_t = ptr::null_mut();
    // SAFETY: the structures are plain data, for which zero is a valid value, and they outlive the
    // calls. The handler does nothing.
    let set = unsafe {
        let mut action: libc::sigaction = mem::zeroed();
        // SA_RESTART is not set, so that the signal interrupts the blocked call.
        action.sa_sigaction = ignore as extern "C" fn(libc::c_int) as libc::sighandler_t;
        check(libc::sigaction(libc::SIGALRM, &raw const action, ptr::null_mut()))?;
        let mut event: libc::sigevent = mem::zeroed();
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = libc::SIGALRM;
        event.sigev_notify_thread_id = libc::gettid();
        check(libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer))?;
        check(libc::timer_settime(timer, 0, &raw const times, ptr::null_mut()))
    };
    let result = set.and_then(|_| act());
    // SAFETY: the timer was created above and is no longer used.
    unsafe { libc::timer_delete(timer) };
    result
}

/// Returns a descriptor that becomes readable when termination is requested. Blocks the termination
/// signals, so that they no longer end the process. It must be called before any thread is started,
/// because threads inherit the mask.
#[expect(unsafe_code, reason = "rustix has no masks of signals and no signalfd")]
pub(crate) fn watch_termination() -> io::Result<OwnedFd> {
    let set = signal_set(&[libc::SIGTERM, libc::SIGINT]);
    // SAFETY: `set` outlives the calls. The kernel has just created the descriptor, and only the
    // result owns it.
    unsafe {
        check(libc::sigprocmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut()))?;
        let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
        Ok(OwnedFd::from_raw_fd(check(libc::signalfd(-1, &raw const set, flags))?))
    }
}

#[expect(unsafe_code, reason = "rustix has no masks of signals")]
fn signal_set(signals: &[libc::c_int]) -> libc::sigset_t {
    // SAFETY: the set is plain data, and sigemptyset initializes it before others read it.
    unsafe {
        let mut set: libc::sigset_t = mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in signals {
            libc::sigaddset(&raw mut set, *signal);
        }
        set
    }
}

/// Signals that are blocked in this thread. Dropping it restores the earlier mask, and a signal
/// that has arrived takes effect.
pub(crate) struct BlockedSignals {
    earlier: libc::sigset_t,
}

impl BlockedSignals {
    /// Blocks the signals with which users and service managers end a process.
    #[expect(unsafe_code, reason = "rustix has no masks of signals")]
    pub(crate) fn of_termination() -> Self {
        let mut earlier = signal_set(&[]);
        let set = signal_set(&[libc::SIGTERM, libc::SIGINT, libc::SIGHUP]);
        // SAFETY: the sets outlive the call. It fails only for an invalid operation.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, &raw mut earlier) };
        Self { earlier }
    }
}

impl Drop for BlockedSignals {
    #[expect(unsafe_code, reason = "rustix has no masks of signals")]
    fn drop(&mut self) {
        // SAFETY: the set outlives the call, which initialized it. It fails only for an invalid
        // operation.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.earlier, ptr::null_mut());
        }
    }
}

/// Waits until one of `fds` is ready or `timeout_ms` have passed, and returns the events of each. A
/// missing descriptor has no events. An interruption counts as a time-out.
pub(crate) fn poll<const N: usize>(
    fds: [(Option<BorrowedFd<'_>>, PollFlags); N],
    timeout_ms: u64,
) -> io::Result<[PollFlags; N]> {
    // The kernel skips negative descriptors (do_pollfd in fs/select.c). AT_FDCWD is negative.
    let mut polled = fds.map(|(fd, events)| PollFd::from_borrowed_fd(fd.unwrap_or(CWD), events));
    let timeout = Timespec {
        tv_sec: (timeout_ms / 1000).cast_signed(),
        tv_nsec: (timeout_ms % 1000 * 1_000_000).cast_signed(),
    };
    match rustix::event::poll(&mut polled, Some(&timeout)) {
        Err(Errno::INTR) => return Ok([PollFlags::empty(); N]),
        result => result?,
    };
    Ok(polled.map(|fd| fd.revents()))
}

/// Highest port that Linux reserves for privileged processes (LAST_RESERVED_PORT in its
/// af_vsock.c). The VMM accepts reports only from privileged ports.
const LAST_PRIVILEGED_PORT: u32 = 1023;
/// Number of ports to try. Ports of earlier connections may still be in use on either side.
const PORTS_TO_TRY: u32 = 64;

/// Returns privileged ports to try. The first one changes each millisecond.
fn privileged_ports(now_ms: u64) -> impl Iterator<Item = u32> {
    let first = (now_ms % u64::from(PORTS_TO_TRY)) as u32;
    (0..PORTS_TO_TRY).map(move |n| LAST_PRIVILEGED_PORT - (first + n) % PORTS_TO_TRY)
}

/// Returns the first of `ports` for which `bind` succeeds. Any error other than a port in use ends
/// the search.
fn bind_first(
    ports: impl Iterator<Item = u32>,
    mut bind: impl FnMut(u32) -> io::Result<()>,
) -> io::Result<u32> {
    let mut in_use = io::Error::from(io::ErrorKind::AddrInUse);
    for port in ports {
        match bind(port) {
            Ok(()) => return Ok(port),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => in_use = error,
            Err(error) => return Err(error),
        }
    }
    Err(in_use)
}

struct VsockAddress(libc::sockaddr_vm);

impl VsockAddress {
    fn new(cid: u32, port: u32) -> Self {
        VsockAddress(libc::sockaddr_vm {
            svm_family: libc::AF_VSOCK as libc::sa_family_t,
            svm_reserved1: 0,
            svm_port: port,
            svm_cid: cid,
            svm_zero: [0; 4],
        })
    }
}

#[expect(unsafe_code, reason = "rustix has no addresses of virtual sockets")]
// SAFETY: the pointer and the length are those of a sockaddr_vm that outlives the call.
unsafe impl SocketAddrArg for VsockAddress {
    unsafe fn with_sockaddr<R>(
        &self,
        act: impl FnOnce(*const SocketAddrOpaque, SocketAddrLen) -> R,
    ) -> R {
        act((&raw const self.0).cast(), size_of::<libc::sockaddr_vm>() as SocketAddrLen)
    }
}

/// Opens a stream from a privileged port to `port` of `cid`.
pub(crate) fn connect_vsock(cid: u32, port: u32) -> io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(
        AddressFamily::VSOCK,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let bind =
        |port| Ok(rustix::net::bind(&socket, &VsockAddress::new(libc::VMADDR_CID_ANY, port))?);
    bind_first(privileged_ports(monotonic_ms()), bind)?;
    rustix::net::connect(&socket, &VsockAddress::new(cid, port))?;
    Ok(socket)
}

/// Sends as many bytes as the socket accepts without blocking, possibly none.
pub(crate) fn send(socket: impl AsFd, bytes: &[u8]) -> io::Result<usize> {
    transferred(rustix::net::send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL))
}

/// Receives available bytes. Returns `None` at the end of the stream.
pub(crate) fn receive(socket: impl AsFd, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    match rustix::net::recv(socket, buffer, RecvFlags::DONTWAIT) {
        Ok((0, _)) => Ok(None),
        result => transferred(result.map(|(count, _)| count)).map(Some),
    }
}

/// Returns the number of transferred bytes, or zero if the transfer would block.
fn transferred(result: rustix::io::Result<usize>) -> io::Result<usize> {
    match result {
        Err(Errno::WOULDBLOCK | Errno::INTR) => Ok(0),
        result => Ok(result?),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::allocations;

    #[test]
    fn poll_skips_missing_descriptors_and_allocates_nothing() {
        let (ours, theirs) = UnixStream::pair().expect("socketpair");
        let in_of = |socket| (socket, PollFlags::IN);
        let fds = [in_of(None), in_of(Some(theirs.as_fd())), in_of(Some(ours.as_fd()))];
        let nothing = PollFlags::empty();
        assert_eq!(poll(fds, 0).expect("polls"), [nothing; 3]);
        send(&theirs, &[7]).expect("sends");
        let (count, events) = allocations::count(|| poll(fds, u64::MAX));
        assert_eq!((count, events.expect("polls")), (0, [nothing, nothing, PollFlags::IN]));
        assert_eq!(poll([in_of(None)], 0).expect("polls"), [nothing], "and if all are missing");
    }

    #[test]
    fn termination_signals_are_blocked_until_the_value_is_dropped() {
        let blocked = || {
            let status = std::fs::read_to_string("/proc/thread-self/status").expect("proc");
            let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
            let mask = u64::from_str_radix(mask.expect("a mask").trim(), 16).expect("a number");
            let signals = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];
            signals.map(|signal| mask & 1 << (signal - 1) != 0)
        };
        assert_eq!(blocked(), [false; 3]);
        let signals = BlockedSignals::of_termination();
        assert_eq!(blocked(), [true; 3]);
        drop(signals);
        assert_eq!(blocked(), [false; 3]);
    }

    #[test]
    fn some_memory_of_this_machine_is_free() {
        assert!(free_bytes() > 0);
    }

    #[test]
    fn only_privileged_ports_are_tried_and_each_of_them() {
        for now_ms in [0, 1, 63, 64, u64::MAX] {
            let mut ports: Vec<u32> = privileged_ports(now_ms).collect();
            assert_eq!(u64::from(LAST_PRIVILEGED_PORT - ports[0]), now_ms % 64);
            ports.sort_unstable();
            assert!(ports.iter().copied().eq(960..=1023));
        }
    }

    #[test]
    fn port_in_use_is_skipped_and_a_missing_privilege_is_an_error() {
        let bind = |port| match port {
            1023 => Err(io::ErrorKind::AddrInUse.into()),
            1021 => Err(io::ErrorKind::PermissionDenied.into()),
            _ => Ok(()),
        };
        let kind =
            |ports: [u32; 2]| bind_first(ports.into_iter(), bind).map_err(|error| error.kind());
        assert_eq!(kind([1023, 1022]), Ok(1022));
        assert_eq!(kind([1023, 1023]), Err(io::ErrorKind::AddrInUse));
        assert_eq!(kind([1021, 1022]), Err(io::ErrorKind::PermissionDenied));
    }

    #[test]
    fn full_socket_accepts_nothing_and_an_ended_one_is_reported() {
        let (ours, theirs) = UnixStream::pair().expect("socketpair");
        let mut buffer = [0; 16];
        assert_eq!(receive(&ours, &mut buffer).expect("empty"), Some(0));
        while send(&ours, &[7; 4096]).expect("send") > 0 {}
        drop(theirs);
        assert_eq!(receive(&ours, &mut buffer).ok().flatten(), None, "end or reset");
        assert!(send(&ours, &[7]).is_err());
    }
}
