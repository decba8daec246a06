//! Handler of SIGSYS, which the kernel sends to a thread at a call that its filter does not allow.
//!
//! The handler may interrupt any code, so it makes system calls only, and allocates nothing
//! (signal-safety(7)).
//!
//! The kernel ends the process without the handler if SIGSYS is blocked (kernel/signal.c,
//! `force_sig_info_to_task`). No code of the VMM blocks signals. The C library blocks all signals
//! for a moment when it starts or ends a thread, sends a signal to a thread, or aborts. Each table
//! therefore contains the calls that the library makes during this time. The tables of threads that
//! start no threads are an exception.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::fmt::{self, Write};
use std::io;
use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{ReportTarget, SeccompMode};
use crate::thread::ThreadKind;
use jiff::Timestamp;

/// Exit status of a VMM that ends because of a refused call: 128 plus the number of SIGSYS, as
/// shells report a process that the signal ends.
const EXIT_STATUS: c_int = 128 + libc::SIGSYS;
/// Code of a SIGSYS that comes from a filter (asm-generic/siginfo.h).
const SYS_SECCOMP: c_int = 1;
/// Maximum length of a printed line.
const LINE_BYTES: usize = 512;
/// Buffer for the name of a thread (prctl(2), `PR_GET_NAME`).
const NAME_BYTES: usize = 16;
/// Number of different calls that mode `log` remembers, so that it prints each of them once.
const PRINTED_CALLS: usize = 1024;

#[derive(Clone, Copy, Debug)]
struct Report {
    mode: SeccompMode,
    target: ReportTarget,
}

static REPORT: OnceLock<Report> = OnceLock::new();
thread_local! {
    /// Kind of this thread. A constant initial value makes it accessible to a signal handler.
    static KIND: Cell<ThreadKind> = const { Cell::new(ThreadKind::SetUp) };
}

static PRINTED: [AtomicU64; PRINTED_CALLS] = [const { AtomicU64::new(0) }; PRINTED_CALLS];

/// System call with its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Call {
    number: i64,
    arguments: [i64; 6],
}

std::arch::global_asm!(
    ".text",
    ".hidden foreshore_repeat_call",
    ".globl foreshore_repeat_call",
    ".type foreshore_repeat_call, @function",
    "foreshore_repeat_call:",
    "mov rax, rdi",
    "mov rdi, rsi",
    "mov rsi, rdx",
    "mov rdx, rcx",
    "mov r10, r8",
    "mov r8, r9",
    "mov r9, [rsp + 8]",
    "syscall",
    ".hidden foreshore_after_call",
    ".globl foreshore_after_call",
    "foreshore_after_call:",
    "ret",
    ".size foreshore_repeat_call, . - foreshore_repeat_call",
);

unsafe extern "C" {
    /// Makes a system call, and returns the kernel's result: a value or a negative error number.
    fn foreshore_repeat_call(
        number: i64,
        first: i64,
        second: i64,
        third: i64,
        fourth: i64,
        fifth: i64,
        sixth: i64,
    ) -> i64;
    /// Label of the instruction after the system call. It is not a function.
    fn foreshore_after_call();
}

/// Remembers the kind of this thread.
pub(super) fn set_kind(kind: ThreadKind) {
    KIND.set(kind);
}

pub(super) fn kind() -> ThreadKind {
    KIND.get()
}

/// Instruction pointer that filters see at a repeated call: that of the next instruction.
pub(super) fn repeated_call_address() -> u64 {
    foreshore_after_call as *const () as u64
}

/// Installs the handler. It runs on the stack of the interrupted thread.
pub(super) fn install(mode: SeccompMode, target: ReportTarget) -> io::Result<()> {
    REPORT.get_or_init(|| Report { mode, target });
    let action = libc::sigaction {
        sa_sigaction: on_sigsys as *const () as libc::sighandler_t,
        // SAFETY: an empty set of signals is all zeros (sigset_t of the C library).
        sa_mask: unsafe { std::mem::zeroed() },
        // A repeated call may be interrupted by a signal whose handler makes a refused call.
        sa_flags: libc::SA_SIGINFO | libc::SA_NODEFER | libc::SA_ONSTACK,
        sa_restorer: None,
    };
    // SAFETY: the handler has the signature that SA_SIGINFO requires, and is signal-safe.
    match unsafe { libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

extern "C" fn on_sigsys(_: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid siginfo_t to a handler with SA_SIGINFO.
    if unsafe { (*info).si_code } != SYS_SECCOMP {
        return;
    }
    let Some(report) = REPORT.get() else { end() };
    // SAFETY: the kernel passes the interrupted context, which the handler may change. The
    // registers are those before the call (Documentation/userspace-api/seccomp_filter.rst).
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let call = Call::of(registers);
    // SAFETY: the location of errno is valid in every thread.
    let errno = unsafe { &mut *libc::__errno_location() };
    let saved_errno = *errno;
    if report.mode != SeccompMode::Log {
        print(report.target, &call, "the VMM ends");
        end();
    }
    if call.returns_elsewhere() {
        print(report.target, &call, "it cannot be repeated, so the VMM ends");
        end();
    }
    if is_first(&call) {
        print(report.target, &call, "it is carried out");
    }
    registers[libc::REG_RAX as usize] = call.repeat();
    *errno = saved_errno;
}

fn end() -> ! {
    // SAFETY: _exit() is signal-safe, and ends the process.
    unsafe { libc::_exit(EXIT_STATUS) }
}

impl Call {
    fn of(registers: &[libc::greg_t; 23]) -> Self {
        use libc::{REG_R8, REG_R9, REG_R10, REG_RAX, REG_RDI, REG_RDX, REG_RSI};
        let arguments = [REG_RDI, REG_RSI, REG_RDX, REG_R10, REG_R8, REG_R9];
        Self {
            number: registers[REG_RAX as usize],
            arguments: arguments.map(|register| registers[register as usize]),
        }
    }

    /// Returns true for calls that return twice, or to another place.
    fn returns_elsewhere(&self) -> bool {
        let calls = [
            libc::SYS_clone,
            libc::SYS_clone3,
            libc::SYS_fork,
            libc::SYS_vfork,
            libc::SYS_rt_sigreturn,
        ];
        calls.contains(&self.number)
    }

    fn repeat(self) -> i64 {
        let [first, second, third, fourth, fifth, sixth] = self.arguments;
        // SAFETY: the interrupted code made this call with these arguments.
        unsafe { foreshore_repeat_call(self.number, first, second, third, fourth, fifth, sixth) }
    }
}

/// Returns true if no thread of this kind has made such a call before. Calls with different
/// requests count as different calls.
fn is_first(call: &Call) -> bool {
    let request = match call.number {
        libc::SYS_ioctl | libc::SYS_fcntl => call.arguments[1] as u32,
        libc::SYS_prctl => call.arguments[0] as u32,
        _ => 0,
    };
    let kind = KIND.get() as u64 + 1;
    let key = kind << 48 | (call.number as u64) << 32 | u64::from(request);
    for slot in &PRINTED {
        match slot.compare_exchange(0, key, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return true,
            Err(other) if other == key => return false,
            Err(_) => {}
        }
    }
    true
}

fn print(target: ReportTarget, call: &Call, result: &str) {
    let mut line = Line { bytes: [0; LINE_BYTES], len: 0 };
    // A line that is too long is cut off.
    let _ = line.describe(target.is_json, &thread_name(), call, result);
    let _ = line.bytes[line.len.min(LINE_BYTES - 1)..].first_mut().map(|end| *end = b'\n');
    let len = (line.len + 1).min(LINE_BYTES);
    if !is_writable(target.fd) {
        return;
    }
    // SAFETY: the buffer has `len` bytes. If the descriptor is closed, the write fails.
    unsafe { libc::write(target.fd, line.bytes.as_ptr().cast(), len) };
}

/// Returns true if a write does not wait for a reader, which might never read.
fn is_writable(fd: RawFd) -> bool {
    let mut poll = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointers are valid during the call, and no signal mask is given.
    unsafe { libc::ppoll(&raw mut poll, 1, &raw const now, std::ptr::null()) == 1 }
}

fn thread_name() -> [u8; NAME_BYTES] {
    let mut name = [0; NAME_BYTES];
    // SAFETY: the kernel writes at most 16 bytes to the buffer.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    name
}

/// Line of text in a buffer of fixed size.
struct Line {
    bytes: [u8; LINE_BYTES],
    len: usize,
}

impl Line {
    fn describe(
        &mut self,
        is_json: bool,
        name: &[u8; NAME_BYTES],
        call: &Call,
        result: &str,
    ) -> fmt::Result {
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        let is_plain = |byte: &u8| byte.is_ascii_graphic() && !b"\"\\".contains(byte);
        let name = std::str::from_utf8(name).ok().filter(|name| name.bytes().all(|b| is_plain(&b)));
        let name = name.unwrap_or("?");
        let known = syscall_numbers::x86_64::sys_call_name(call.number).unwrap_or("unknown");
        let end = if is_json { "\"}" } else { "" };
        match is_json {
            true => write!(
                self,
                "{{\"timestamp\":\"{:.6}\",\"level\":\"ERROR\",\"message\":\"",
                // Reads the clock and calculates, which is safe in a handler of a signal.
                Timestamp::now()
            )?,
            false => self.write_str("foreshore: ")?,
        }
        write!(
            self,
            "thread {name}: the system call {known} ({}) with the arguments",
            call.number
        )?;
        for argument in call.arguments {
            write!(self, " {argument:#x}")?;
        }
        write!(self, " is not allowed by its filter; {result}{end}")
    }
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let free = &mut self.bytes[self.len..];
        let len = text.len().min(free.len());
        free[..len].copy_from_slice(&text.as_bytes()[..len]);
        self.len += len;
        if len == text.len() { Ok(()) } else { Err(fmt::Error) }
    }
}
