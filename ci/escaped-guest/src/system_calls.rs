//! System calls that neither the standard library nor rustix has. All unsafe code of this crate is
//! here.

use std::io;
use std::mem::{MaybeUninit, offset_of};
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr;

use anyhow::{Result, bail};

/// Reason why a traced thread has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// Delivery of a signal. Single steps and system calls send SIGTRAP.
    Signal(i32),
    /// PTRACE_INTERRUPT or SIGSTOP.
    Event,
}

/// Waits until a traced thread of the process `pid` stops. Fails if the thread ends.
pub(crate) fn wait(pid: u32, tid: libc::pid_t) -> Result<Stop> {
    let info = wait_for_change(tid, libc::WNOWAIT)?;
    let is_stop = [libc::CLD_TRAPPED, libc::CLD_STOPPED].contains(&info.si_code);
    // The parent waits for the exit of the process. The tracer must wait for all other changes.
    if is_stop || tid as u32 != pid {
        wait_for_change(tid, 0)?;
    }
    // SAFETY: waitid() has filled the fields of SIGCHLD.
    let status = unsafe { info.si_status() };
    if !is_stop {
        bail!("the traced thread has ended with status {status}");
    }
    Ok(match status >> 8 {
        libc::PTRACE_EVENT_STOP => Stop::Event,
        _ => Stop::Signal(status & 0xff),
    })
}

/// Calls waitid(2) for a thread.
fn wait_for_change(tid: libc::pid_t, options: i32) -> io::Result<libc::siginfo_t> {
    let mut info = MaybeUninit::uninit();
    let options = options | libc::WEXITED | libc::WSTOPPED | libc::__WALL;
    // SAFETY: the kernel writes one `siginfo_t`.
    while unsafe { libc::waitid(libc::P_PID, tid as u32, info.as_mut_ptr(), options) } != 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    // SAFETY: the kernel has filled the structure.
    Ok(unsafe { info.assume_init() })
}

/// Makes a request of ptrace(2) that takes numbers.
pub(crate) fn request(
    request: libc::c_uint,
    tid: libc::pid_t,
    address: u64,
    data: i32,
) -> io::Result<()> {
    // SAFETY: these requests take numbers, and change only the traced thread.
    match unsafe { libc::ptrace(request, tid, address, i64::from(data)) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Returns the registers of a stopped thread.
pub(crate) fn registers(tid: libc::pid_t) -> io::Result<libc::user_regs_struct> {
    let mut registers = MaybeUninit::uninit();
    let none = ptr::null_mut::<libc::c_void>();
    // SAFETY: the kernel writes one `user_regs_struct`.
    match unsafe { libc::ptrace(libc::PTRACE_GETREGS, tid, none, registers.as_mut_ptr()) } {
        // SAFETY: the kernel has filled the structure.
        0 => Ok(unsafe { registers.assume_init() }),
        _ => Err(io::Error::last_os_error()),
    }
}

pub(crate) fn set_registers(
    tid: libc::pid_t,
    registers: &libc::user_regs_struct,
) -> io::Result<()> {
    let none = ptr::null_mut::<libc::c_void>();
    // SAFETY: the kernel reads one `user_regs_struct`.
    match unsafe { libc::ptrace(libc::PTRACE_SETREGS, tid, none, ptr::from_ref(registers)) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// `struct io_uring_params` of linux/io_uring.h.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Parameters {
    entries: [u32; 2],
    flags: [u32; 8],
    pub submission_ring: Offsets,
    pub completion_ring: Offsets,
}

/// `struct io_sqring_offsets` and `struct io_cqring_offsets` of linux/io_uring.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Offsets {
    pub head: u32,
    pub tail: u32,
    pub mask: u32,
    entries: u32,
    flags_or_overflow: u32,
    /// Offset of the completions in the completion ring.
    pub dropped_or_completions: u32,
    /// Offset of the indices of entries in the submission ring.
    pub array_or_flags: u32,
    reserved: [u32; 3],
}

const _: () = assert!(size_of::<Parameters>() == 120);
const _: () = assert!(offset_of!(Parameters, completion_ring) == 80);

/// Creates a ring, and closes it again. Returns the kernel's description of it.
pub(crate) fn create_ring(entries: u32) -> io::Result<Parameters> {
    let mut parameters = Parameters::default();
    // SAFETY: the kernel reads and writes one `io_uring_params`.
    let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, entries, &raw mut parameters) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has returned a new descriptor.
    drop(unsafe { OwnedFd::from_raw_fd(fd as i32) });
    Ok(parameters)
}
