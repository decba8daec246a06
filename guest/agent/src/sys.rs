//! The system calls that std does not have.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Turns the -1 of a system call into its error.
fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Denies other users all access to files that this process creates.
pub fn make_files_private() {
    // SAFETY: takes a number, touches no memory and cannot fail (umask(2)).
    unsafe { libc::umask(0o077) };
}

pub fn monotonic_ms() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a timespec that outlives the call, which writes nothing else.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    debug_assert_eq!(result, 0, "Linux always has this clock");
    let (seconds, nanos) =
        (u64::try_from(now.tv_sec).unwrap_or(0), u64::try_from(now.tv_nsec).unwrap_or(0));
    seconds.saturating_mul(1000).saturating_add(nanos / 1_000_000)
}

/// Free memory, by the one system call that costs no text.
pub fn free_bytes() -> Option<u64> {
    // SAFETY: every field of sysinfo is a number, for which zero is a value.
    let mut info: libc::sysinfo = unsafe { std::mem::zeroed() };
    // SAFETY: `info` is a sysinfo that outlives the call, which writes nothing else.
    let result = unsafe { libc::sysinfo(&raw mut info) };
    (result == 0).then(|| info.freeram.saturating_mul(u64::from(info.mem_unit)))
}

/// Release and version of the running kernel.
pub fn kernel() -> io::Result<(String, String)> {
    // SAFETY: every field of utsname is an array of characters, for which zero is a value.
    let mut name: libc::utsname = unsafe { std::mem::zeroed() };
    // SAFETY: `name` is a utsname that outlives the call, which writes nothing else.
    check(unsafe { libc::uname(&raw mut name) })?;
    let text = |field: &[libc::c_char]| {
        let bytes: Vec<u8> = field.iter().map(|&c| c.to_ne_bytes()[0]).collect();
        CStr::from_bytes_until_nul(&bytes)
            .map(|text| text.to_string_lossy().into_owned())
            .unwrap_or_default()
    };
    Ok((text(&name.release), text(&name.version)))
}

pub fn page_size_bytes() -> u64 {
    // SAFETY: sysconf reads and writes no memory of ours.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).unwrap_or(4096)
}

/// Locks all memory that the process has and will have, so that it can report under the pressure it
/// reports.
pub fn lock_memory() -> io::Result<()> {
    // SAFETY: mlockall reads and writes no memory of ours.
    check(unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE) }).map(drop)
}

/// Runs before ordinary processes: what it does is short, and late reports are of no use.
pub fn raise_priority() -> io::Result<()> {
    // SAFETY: setpriority reads and writes no memory of ours.
    check(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -10) }).map(drop)
}

/// Calls `act`, whose system calls fail with EINTR once `limit_ms` have passed. For calls that wait
/// for the kernel.
pub fn within_ms<T>(limit_ms: u64, act: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    extern "C" fn ignore(_: libc::c_int) {}
    // SAFETY: plain data, for which zero is a valid value.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // Without SA_RESTART, so that the signal ends the call.
    action.sa_sigaction = ignore as extern "C" fn(libc::c_int) as libc::sighandler_t;
    // SAFETY: both structures outlive the call; the handler does nothing.
    check(unsafe { libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut()) })?;
    // SAFETY: as above.
    let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
    event.sigev_notify = libc::SIGEV_THREAD_ID;
    event.sigev_signo = libc::SIGALRM;
    // SAFETY: no arguments.
    event.sigev_notify_thread_id = unsafe { libc::gettid() };
    let mut timer: libc::timer_t = std::ptr::null_mut();
    // SAFETY: both structures outlive the call.
    check(unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) })?;
    let limit = libc::timespec {
        tv_sec: (limit_ms / 1000).cast_signed(),
        tv_nsec: (limit_ms % 1000 * 1_000_000).cast_signed(),
    };
    // The timer repeats, because a signal that arrives before the call begins does not end it.
    let again = libc::timespec { tv_sec: 1, tv_nsec: 0 };
    let times = libc::itimerspec { it_interval: again, it_value: limit };
    // SAFETY: the timer was made above; `times` outlives the call.
    let set =
        check(unsafe { libc::timer_settime(timer, 0, &raw const times, std::ptr::null_mut()) });
    let result = set.and_then(|_| act());
    // SAFETY: the timer was made above and is not used any more.
    unsafe { libc::timer_delete(timer) };
    result
}

/// A descriptor that becomes readable when the process is to end, which it does not do by itself
/// from now on. Of threads started later; so it is called before any is.
pub fn watch_termination() -> io::Result<OwnedFd> {
    // SAFETY: sigset_t is plain data, and sigemptyset makes a set of it before anything else looks.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` outlives the calls, which write to nothing else.
    unsafe {
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGTERM);
        libc::sigaddset(&raw mut set, libc::SIGINT);
    }
    // SAFETY: `set` outlives the call, which only reads it; a null pointer asks for no old mask.
    check(unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) })?;
    // SAFETY: `set` outlives the call, which only reads it.
    let fd = check(unsafe {
        libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
    })?;
    // SAFETY: the kernel has just made `fd`, and nobody else knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Waits until one of `fds` is ready or `timeout_ms` have passed. An interruption counts as a
/// time-out.
pub fn poll(fds: &mut [libc::pollfd], timeout_ms: u64) -> io::Result<()> {
    let timeout = libc::c_int::try_from(timeout_ms).unwrap_or(libc::c_int::MAX);
    let count = libc::nfds_t::try_from(fds.len()).unwrap_or(0);
    // SAFETY: `fds` is `count` entries long and outlives the call, which writes to nothing else.
    match check(unsafe { libc::poll(fds.as_mut_ptr(), count, timeout) }) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => {
            fds.iter_mut().for_each(|fd| fd.revents = 0);
            Ok(())
        }
        result => result.map(drop),
    }
}

/// An entry for [`poll`].
pub fn pollfd(fd: Option<BorrowedFd<'_>>, events: libc::c_short) -> libc::pollfd {
    // A negative descriptor is skipped (poll(2)).
    libc::pollfd { fd: fd.map_or(-1, |fd| fd.as_raw_fd()), events, revents: 0 }
}

/// The highest port that Linux gives to privileged processes only (LAST_RESERVED_PORT in its
/// af_vsock.c): the VMM takes reports from these alone.
const LAST_PRIVILEGED_PORT: u32 = 1023;
/// How many of them to try: those of earlier connections may still be in use on one side.
const PORTS_TO_TRY: u32 = 64;

/// The privileged ports to try, beginning with another one each millisecond.
fn privileged_ports(now_ms: u64) -> impl Iterator<Item = u32> {
    let first = (now_ms % u64::from(PORTS_TO_TRY)) as u32;
    (0..PORTS_TO_TRY).map(move |n| LAST_PRIVILEGED_PORT - (first + n) % PORTS_TO_TRY)
}

/// Takes the first of `ports` that `bind` gets. A port in use is not the end of it; anything else
/// is.
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

fn vsock_address(cid: u32, port: u32) -> libc::sockaddr_vm {
    // SAFETY: every field of sockaddr_vm is a number, for which zero is a value.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    address.svm_cid = cid;
    address.svm_port = port;
    address
}

const VSOCK_ADDRESS_LEN: libc::socklen_t = size_of::<libc::sockaddr_vm>() as libc::socklen_t;

fn bind_vsock(socket: &OwnedFd, port: u32) -> io::Result<()> {
    let address = vsock_address(libc::VMADDR_CID_ANY, port);
    // SAFETY: `address` has the length that is passed and outlives the call, which only reads it.
    let result =
        unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), VSOCK_ADDRESS_LEN) };
    check(result).map(drop)
}

/// A stream to `port` of `cid`, from a privileged port.
pub fn connect_vsock(cid: u32, port: u32) -> io::Result<OwnedFd> {
    // SAFETY: socket reads and writes no memory of ours.
    let fd =
        check(unsafe { libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: the kernel has just made `fd`, and nobody else knows of it.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    bind_first(privileged_ports(monotonic_ms()), |port| bind_vsock(&socket, port))?;
    let address = vsock_address(cid, port);
    // SAFETY: `address` has the length that is passed and outlives the call, which only reads it.
    let result = unsafe {
        libc::connect(socket.as_raw_fd(), (&raw const address).cast(), VSOCK_ADDRESS_LEN)
    };
    check(result)?;
    Ok(socket)
}

/// Sends what the socket takes now. Nothing is sent if it takes nothing.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: `bytes` outlives the call, which only reads it.
    let sent = unsafe { libc::send(socket.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) };
    transferred(sent)
}

/// Takes what has arrived; `None` at the end of the stream.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    // SAFETY: `buffer` outlives the call, which writes at most its length.
    let received = unsafe {
        libc::recv(socket.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), libc::MSG_DONTWAIT)
    };
    if received == 0 { Ok(None) } else { transferred(received).map(Some) }
}

/// The count of a transfer. That nothing can be transferred now is no error.
fn transferred(count: isize) -> io::Result<usize> {
    if let Ok(count) = usize::try_from(count) {
        return Ok(count);
    }
    match io::Error::last_os_error() {
        error if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
            Ok(0)
        }
        error => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn the_kernel_says_who_it_is() {
        let (release, version) = kernel().expect("uname");
        assert!(release.contains('.') && !version.is_empty());
        assert!(page_size_bytes().is_power_of_two());
        assert!(free_bytes().is_some_and(|bytes| bytes > 0));
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
    fn a_port_in_use_is_passed_over_and_a_missing_privilege_is_not() {
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
    fn a_full_socket_takes_nothing_and_an_ended_one_says_so() {
        let (ours, theirs) = UnixStream::pair().expect("socketpair");
        let mut buffer = [0; 16];
        assert_eq!(receive(ours.as_fd(), &mut buffer).expect("empty"), Some(0));
        while send(ours.as_fd(), &[7; 4096]).expect("send") > 0 {}
        drop(theirs);
        assert_eq!(receive(ours.as_fd(), &mut buffer).ok().flatten(), None, "end or reset");
        assert!(send(ours.as_fd(), &[7]).is_err());
    }
}
