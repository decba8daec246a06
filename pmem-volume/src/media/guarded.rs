//! Loads and stores that survive the loss of the accessed page.
//!
//! If a file is truncated, its file system is full, or memory is bad, a mapping can lose pages. The
//! kernel then raises SIGBUS at the next access (mmap(2); Linux Documentation/mm/hwpoison.rst). The
//! access must return an error, instead of ending the process and its guest. Therefore, only the
//! routines below access mapped media. The routines are contiguous, use no stack, and return 0. If
//! a SIGBUS interrupts one of them, the handler resumes at a landing pad, which returns 1 to the
//! same caller.
//!
//! If other code accesses watched memory, the handler completes the access ([`super::watch`]).
//! Every other SIGBUS is passed to the previous handler. A program that installs a handler later
//! must call [`handle_sigbus`] from it first. A thread must not block SIGBUS, because the kernel
//! would end the process.

use std::arch::global_asm;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::{Once, OnceLock};

use libc::{c_int, c_void};

#[cfg(test)]
use super::flush::recorded_ops::{RecordedOp, record};
use super::flush::{CACHE_LINE_BYTES, LineFlush};
use super::watch;

// System V calling convention: arguments in rdi, rsi and rdx, result in rax. All used registers are
// caller-saved. On a fault, the instruction pointer is that of the faulting instruction, even
// within a repeated one (Intel SDM, volume 1, 7.3.9.3).
global_asm!(
    ".pushsection .text.foreshore_guarded, \"ax\", @progbits",
    ".balign 64",
    ".globl foreshore_guarded_start",
    "foreshore_guarded_start:",
    // (to, from, length). Copies whole words first, because a crash may tear a store only between
    // words.
    ".globl foreshore_guarded_copy",
    "foreshore_guarded_copy:",
    "mov rcx, rdx",
    "shr rcx, 3",
    "rep movsq",
    "mov ecx, edx",
    "and ecx, 7",
    "rep movsb",
    "xor eax, eax",
    "ret",
    // (to, from, length): a copy in pieces of 256 bytes, at least one, with AVX-512. Each line is
    // loaded and stored as a unit. ZMM16 to ZMM31 need no VZEROUPPER, because SSE instructions
    // cannot access them and so cannot depend on them (Intel 64 Optimization Manual, 3.11.5).
    ".balign 32",
    ".globl foreshore_guarded_copy_wide",
    "foreshore_guarded_copy_wide:",
    "vmovdqu64 zmm16, [rsi]",
    "vmovdqu64 zmm17, [rsi + 64]",
    "vmovdqu64 zmm18, [rsi + 128]",
    "vmovdqu64 zmm19, [rsi + 192]",
    "vmovdqu64 [rdi], zmm16",
    "vmovdqu64 [rdi + 64], zmm17",
    "vmovdqu64 [rdi + 128], zmm18",
    "vmovdqu64 [rdi + 192], zmm19",
    "add rsi, 256",
    "add rdi, 256",
    "sub rdx, 256",
    "ja foreshore_guarded_copy_wide",
    "xor eax, eax",
    "ret",
    // (from, to): one load that cannot tear. Like all loads on x86, it has acquire order.
    ".globl foreshore_guarded_load",
    "foreshore_guarded_load:",
    "mov rcx, [rdi]",
    "mov [rsi], rcx",
    "xor eax, eax",
    "ret",
    // (to, word): one store that cannot tear. Like all stores on x86, it has release order.
    ".globl foreshore_guarded_store",
    "foreshore_guarded_store:",
    "mov [rdi], rsi",
    "xor eax, eax",
    "ret",
    // (to, end): zeroes at least one whole line with non-temporal stores.
    ".balign 16",
    ".globl foreshore_guarded_zero",
    "foreshore_guarded_zero:",
    "pxor xmm0, xmm0",
    "2:",
    "movntdq [rdi], xmm0",
    "movntdq [rdi + 16], xmm0",
    "movntdq [rdi + 32], xmm0",
    "movntdq [rdi + 48], xmm0",
    "add rdi, 64",
    "cmp rdi, rsi",
    "jb 2b",
    "sfence",
    "xor eax, eax",
    "ret",
    // (to, from, length): copies at least one whole line with non-temporal stores. They are
    // unordered, so the caller needs a fence.
    ".balign 16",
    ".globl foreshore_guarded_stream",
    "foreshore_guarded_stream:",
    "movdqu xmm0, [rsi]",
    "movdqu xmm1, [rsi + 16]",
    "movdqu xmm2, [rsi + 32]",
    "movdqu xmm3, [rsi + 48]",
    "movntdq [rdi], xmm0",
    "movntdq [rdi + 16], xmm1",
    "movntdq [rdi + 32], xmm2",
    "movntdq [rdi + 48], xmm3",
    "add rsi, 64",
    "add rdi, 64",
    "sub rdx, 64",
    "ja foreshore_guarded_stream",
    "xor eax, eax",
    "ret",
    // (to, from, length): like `foreshore_guarded_stream`, but with AVX-512, which writes each line
    // with a single store.
    ".balign 16",
    ".globl foreshore_guarded_stream_wide",
    "foreshore_guarded_stream_wide:",
    "vmovdqu64 zmm16, [rsi]",
    "vmovntdq [rdi], zmm16",
    "add rsi, 64",
    "add rdi, 64",
    "sub rdx, 64",
    "ja foreshore_guarded_stream_wide",
    "xor eax, eax",
    "ret",
    // (first line, end): three routines that write back at least one line, up to the end.
    ".globl foreshore_guarded_clwb",
    "foreshore_guarded_clwb:",
    "clwb [rdi]",
    "add rdi, 64",
    "cmp rdi, rsi",
    "jb foreshore_guarded_clwb",
    "xor eax, eax",
    "ret",
    ".globl foreshore_guarded_clflushopt",
    "foreshore_guarded_clflushopt:",
    "clflushopt [rdi]",
    "add rdi, 64",
    "cmp rdi, rsi",
    "jb foreshore_guarded_clflushopt",
    "xor eax, eax",
    "ret",
    ".globl foreshore_guarded_clflush",
    "foreshore_guarded_clflush:",
    "clflush [rdi]",
    "add rdi, 64",
    "cmp rdi, rsi",
    "jb foreshore_guarded_clflush",
    "xor eax, eax",
    "ret",
    ".globl foreshore_guarded_end",
    "foreshore_guarded_end:",
    // Landing pad of all routines. The landing pad orders the non-temporal stores that preceded the
    // fault.
    ".globl foreshore_guarded_lost",
    "foreshore_guarded_lost:",
    "sfence",
    "mov eax, 1",
    "ret",
    ".popsection",
);

unsafe extern "C" {
    static foreshore_guarded_start: u8;
    static foreshore_guarded_end: u8;
    static foreshore_guarded_lost: u8;
    fn foreshore_guarded_copy(to: *mut u8, from: *const u8, length: usize) -> u32;
    fn foreshore_guarded_copy_wide(to: *mut u8, from: *const u8, length: usize) -> u32;
    fn foreshore_guarded_load(from: *const u64, to: *mut u64) -> u32;
    fn foreshore_guarded_store(to: *mut u64, word: u64) -> u32;
    fn foreshore_guarded_zero(to: *mut u8, end: *mut u8) -> u32;
    fn foreshore_guarded_stream(to: *mut u8, from: *const u8, length: usize) -> u32;
    fn foreshore_guarded_stream_wide(to: *mut u8, from: *const u8, length: usize) -> u32;
    fn foreshore_guarded_clwb(first: usize, end: usize) -> u32;
    fn foreshore_guarded_clflushopt(first: usize, end: usize) -> u32;
    fn foreshore_guarded_clflush(first: usize, end: usize) -> u32;
}

/// The page of an access is lost. A longer access may have been performed partially.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageLost;

#[inline]
fn to_result(result: u32) -> Result<(), PageLost> {
    if result == 0 { Ok(()) } else { Err(PageLost) }
}

/// Guarded accesses. A guard exists only after the SIGBUS handler is installed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Guard {
    /// The CPU has AVX-512, and the kernel saves its registers.
    is_wide: bool,
}

/// Preferred unit of [`Guard::copy`] in bytes.
const WIDE_BYTES: usize = 256;

impl Guard {
    /// Installs the handler once per process.
    pub(super) fn new() -> Self {
        static INSTALLED: Once = Once::new();
        INSTALLED.call_once(install_handler);
        Self { is_wide: is_x86_feature_detected!("avx512f") }
    }

    /// Returns a guard that uses no instructions that some CPUs lack.
    #[cfg(test)]
    fn narrow(self) -> Self {
        Self { is_wide: false }
    }

    /// Copies bytes to or from mapped media, in words if possible.
    ///
    /// # Safety
    /// `length` bytes at `to` are writable without concurrent stores, and `length` bytes at `from`
    /// are readable and do not overlap them. One of them is in a mapping.
    #[inline]
    pub(super) unsafe fn copy(
        self,
        to: *mut u8,
        from: *const u8,
        length: usize,
    ) -> Result<(), PageLost> {
        // SAFETY: guaranteed by the caller. The routines access nothing else, and the CPU has their
        // instructions.
        to_result(unsafe {
            if self.is_wide && length > 0 && length.is_multiple_of(WIDE_BYTES) {
                foreshore_guarded_copy_wide(to, from, length)
            } else {
                foreshore_guarded_copy(to, from, length)
            }
        })
    }

    /// Loads a word, which is never torn.
    ///
    /// # Safety
    /// `from` is in a mapping, and is aligned.
    #[inline]
    pub(super) unsafe fn load(self, from: *const u64) -> Result<u64, PageLost> {
        let mut word = 0;
        // SAFETY: guaranteed by the caller, and `word` is a local variable.
        to_result(unsafe { foreshore_guarded_load(from, &raw mut word) })?;
        Ok(word)
    }

    /// Stores a word, which is never torn.
    ///
    /// # Safety
    /// `to` is in a writable mapping, and is aligned.
    #[inline]
    pub(super) unsafe fn store(self, to: *mut u64, word: u64) -> Result<(), PageLost> {
        #[cfg(test)]
        record(RecordedOp::Stored(to as usize..to as usize + 8));
        // SAFETY: guaranteed by the caller.
        to_result(unsafe { foreshore_guarded_store(to, word) })
    }

    /// Zeroes memory with non-temporal stores, which need no write-back and evict nothing from the
    /// cache. The stores are ordered before later stores.
    ///
    /// # Safety
    /// `length` bytes at `to` are in a writable mapping and unused. Both are multiples of a cache
    /// line.
    pub(super) unsafe fn zero(self, to: *mut u8, length: usize) -> Result<(), PageLost> {
        assert!(
            (to as usize).is_multiple_of(CACHE_LINE_BYTES)
                && length.is_multiple_of(CACHE_LINE_BYTES)
        );
        if length == 0 {
            return Ok(());
        }
        // SAFETY: guaranteed by the caller. The end pointer is at most one byte after the mapping.
        to_result(unsafe { foreshore_guarded_zero(to, to.add(length)) })
    }

    /// Copies bytes to mapped media with non-temporal stores, which need no write-back. The caller
    /// must fence afterwards.
    ///
    /// # Safety
    /// As for [`Guard::copy`] to a mapping. `to` and `length` are multiples of a cache line.
    #[inline]
    pub(super) unsafe fn stream(
        self,
        to: *mut u8,
        from: *const u8,
        length: usize,
    ) -> Result<(), PageLost> {
        assert!(
            (to as usize).is_multiple_of(CACHE_LINE_BYTES)
                && length.is_multiple_of(CACHE_LINE_BYTES)
        );
        if length == 0 {
            return Ok(());
        }
        #[cfg(test)]
        record(RecordedOp::Streamed(to as usize..to as usize + length));
        // SAFETY: guaranteed by the caller. The routines access nothing else, and the CPU has their
        // instructions.
        to_result(unsafe {
            if self.is_wide {
                foreshore_guarded_stream_wide(to, from, length)
            } else {
                foreshore_guarded_stream(to, from, length)
            }
        })
    }

    /// Writes back every line of `length` bytes at `start`. The caller must fence afterwards.
    ///
    /// # Safety
    /// The bytes are in a mapping, and the CPU has the instruction ([`LineFlush::detect`]).
    #[inline]
    pub(super) unsafe fn write_back(
        self,
        flush: LineFlush,
        start: *const u8,
        length: usize,
    ) -> Result<(), PageLost> {
        if length == 0 {
            return Ok(());
        }
        let first = start as usize & !(CACHE_LINE_BYTES - 1);
        let end = start as usize + length;
        #[cfg(test)]
        record(RecordedOp::WrittenBack(first..end.next_multiple_of(CACHE_LINE_BYTES)));
        // SAFETY: the write-back of a line has no effect that a program can observe. Each line
        // contains at least one byte of the range.
        to_result(unsafe {
            match flush {
                LineFlush::Clwb => foreshore_guarded_clwb(first, end),
                LineFlush::ClflushOpt => foreshore_guarded_clflushopt(first, end),
                LineFlush::Clflush => foreshore_guarded_clflush(first, end),
            }
        })
    }
}

/// SIGBUS handler that was installed before this one.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

fn install_handler() {
    // 1. Store the previous handler before installing the new one, because the new one may be
    //    called immediately.
    let mut previous = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: a query that fills the struct, for which zeros are valid too.
    let previous = unsafe {
        let result = libc::sigaction(libc::SIGBUS, ptr::null(), previous.as_mut_ptr());
        assert_eq!(result, 0, "sigaction accepts SIGBUS");
        previous.assume_init()
    };
    PREVIOUS.set(previous).expect("installed once");
    // 2. Install the handler.
    assert_eq!(set_handler(&previous), 0, "SIGBUS can be handled");
}

/// Installs the handler of SIGBUS with the signal mask of the previous handler. It runs on the
/// alternate stack if the thread has one. The previous handler may depend on the mask and the
/// stack. Returns the result of the system call. May be called in a handler.
fn set_handler(previous: &libc::sigaction) -> c_int {
    let action = libc::sigaction {
        sa_sigaction: on_sigbus as *const () as libc::sighandler_t,
        sa_flags: previous.sa_flags & (libc::SA_NODEFER | libc::SA_RESTART)
            | libc::SA_SIGINFO
            | libc::SA_ONSTACK,
        ..*previous
    };
    // SAFETY: the handler has the signature for SA_SIGINFO and calls only functions that are
    // allowed in handlers.
    unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) }
}

extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the arguments are those of the kernel.
    if !unsafe { handle_sigbus(info, context) } {
        // SAFETY: as above.
        unsafe { call_previous_handler(signal, info, context) };
    }
}

/// Handles a SIGBUS if an access to a pool's media or to watched memory has raised it, and returns
/// true. The calling handler must then return. The access ends with an error or reads zeros. Also
/// handles early reports of bad memory (BUS_MCEERR_AO), which a process can request (prctl(2),
/// PR_MCE_KILL_EARLY). They can be ignored, because a later access to the memory raises its own
/// SIGBUS. Call it in programs that handle SIGBUS themselves with SA_SIGINFO, and that install
/// their handler after opening the first pool.
///
/// # Safety
/// It must be called in a handler of SIGBUS, with the arguments of the kernel.
pub unsafe fn handle_sigbus(info: *mut libc::siginfo_t, context: *mut c_void) -> bool {
    // Only signals that an access raised are handled. Sent signals (codes of 0 and less) and early
    // reports may interrupt any code.
    // SAFETY: the siginfo is that of the caller.
    let code = unsafe { (*info).si_code };
    if code == libc::BUS_MCEERR_AO {
        return true;
    }
    if code <= 0 {
        return false;
    }
    // SAFETY: the context is that of the caller, and no other code accesses it in the meantime.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let at = &mut registers[libc::REG_RIP as usize];
    let guarded =
        (&raw const foreshore_guarded_start as usize)..(&raw const foreshore_guarded_end as usize);
    let is_guarded = guarded.contains(&(*at as usize));
    if is_guarded {
        // The routines do not change the stack, so the landing pad returns to their caller. The
        // kernel restores the flags, and the direction flag is clear according to the calling
        // convention.
        *at = &raw const foreshore_guarded_lost as i64;
        return true;
    }
    // SAFETY: the kernel stores the address for a signal raised by an access.
    let address = unsafe { (*info).si_addr() } as usize;
    // SAFETY: errno belongs to this thread. The interrupted code may be about to read it, so it is
    // restored.
    let errno = unsafe { &mut *libc::__errno_location() };
    let before = *errno;
    let replaced = watch::replace(address);
    *errno = before;
    replaced
}

/// Passes a SIGBUS to the previous handler, or takes the previous default action.
///
/// # Safety
/// As for [`handle_sigbus`].
unsafe fn call_previous_handler(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let Some(previous) = PREVIOUS.get() else { return };
    // SAFETY: the siginfo is that of the caller.
    let by_access = unsafe { (*info).si_code } > 0;
    match previous.sa_sigaction {
        // A sent signal can be ignored, but the kernel does not allow a fault to be ignored.
        libc::SIG_IGN if !by_access => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: both calls are allowed in a handler. With the default action, the signal ends
            // the process: a fault recurs after the return, and a sent signal is raised again.
            unsafe {
                libc::signal(signal, libc::SIG_DFL);
                if !by_access {
                    libc::raise(signal);
                }
            }
            return;
        }
        handler if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: the handler's flags require this signature.
            let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: as above.
            let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
    if !by_access {
        reinstall_if_default(previous);
    }
}

/// Reinstalls the handler if the previous one has restored the default action, as the Rust runtime
/// does for unknown signals. The process continues, and the next lost page must not end it. Not
/// called after a fault, because then the repeated access must end the process. With the handler
/// installed, it would fault forever.
fn reinstall_if_default(previous: &libc::sigaction) {
    let mut now = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: a query that is allowed in a handler and fills the struct, for which zeros are valid
    // too.
    let now = unsafe {
        libc::sigaction(libc::SIGBUS, ptr::null(), now.as_mut_ptr());
        now.assume_init()
    };
    if now.sa_sigaction == libc::SIG_DFL {
        set_handler(previous);
    }
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, ExitStatus};

    use super::*;

    const PAGE_BYTES: usize = 4096;

    /// Mapping of a file on tmpfs with two pages.
    struct Pages {
        file: File,
        map: *mut u8,
    }

    impl Pages {
        fn new() -> Self {
            let file = tempfile::tempfile_in("/dev/shm").unwrap();
            file.set_len(2 * PAGE_BYTES as u64).unwrap();
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: a new mapping at an address that the kernel chooses.
            let map = unsafe {
                let length = 2 * PAGE_BYTES;
                libc::mmap(
                    ptr::null_mut(),
                    length,
                    protection,
                    libc::MAP_SHARED,
                    file.as_raw_fd(),
                    0,
                )
            };
            assert_ne!(map, libc::MAP_FAILED);
            Self { file, map: map.cast() }
        }

        /// Removes the second page and returns its address.
        fn lose_second(&self) -> *mut u8 {
            self.file.set_len(PAGE_BYTES as u64).unwrap();
            // SAFETY: inside the mapping.
            unsafe { self.map.add(PAGE_BYTES) }
        }
    }

    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: mapped in new(), and no longer used.
            unsafe { libc::munmap(self.map.cast(), 2 * PAGE_BYTES) };
        }
    }

    #[test]
    fn access_to_a_lost_page_is_an_error() {
        let pages = Pages::new();
        let guard = Guard::new();
        let lost = pages.lose_second();
        let bytes = [7u8; 512];
        // SAFETY: the addresses are inside the mapping. The routines are under test.
        unsafe {
            assert_eq!(guard.load(lost.cast()), Err(PageLost));
            assert_eq!(guard.store(lost.cast(), 1), Err(PageLost));
            assert_eq!(guard.copy(lost.add(5), bytes.as_ptr(), 3), Err(PageLost));
            assert_eq!(
                guard.copy(lost.sub(96), bytes.as_ptr(), 200),
                Err(PageLost),
                "in the middle"
            );
            assert_eq!(guard.zero(lost.sub(64), 128), Err(PageLost), "in the middle");
            for guard in [guard, guard.narrow()] {
                assert_eq!(
                    guard.copy(lost.sub(256), bytes.as_ptr(), 512),
                    Err(PageLost),
                    "in the middle"
                );
                assert_eq!(
                    guard.stream(lost.sub(128), bytes.as_ptr(), 192),
                    Err(PageLost),
                    "in the middle"
                );
            }
            for flush in [LineFlush::detect(), LineFlush::Clflush] {
                assert_eq!(guard.write_back(flush, lost.sub(3), 7), Err(PageLost));
            }
            // The remaining page is still accessible, and the handler still works.
            guard.store(pages.map.cast(), 9).unwrap();
            assert_eq!(guard.load(pages.map.cast()), Ok(9));
            assert_eq!(
                guard.load(lost.sub(64).cast()),
                Ok(0x0707_0707_0707_0707),
                "stored before the page was missed"
            );
        }
    }

    #[test]
    fn copies_of_every_length_and_alignment_are_exact() {
        let from: Vec<u8> = (0..2000u32).map(|at| (at % 251) as u8 | 1).collect();
        for start in 0..9 {
            for length in (0..70).chain([255, 256, 257, 512, 1024]) {
                for guard in [Guard::new(), Guard::new().narrow()] {
                    let mut to = [0u8; 1100];
                    // SAFETY: the ranges are inside both buffers.
                    unsafe { guard.copy(to.as_mut_ptr().add(start), from.as_ptr().add(3), length) }
                        .unwrap();
                    assert_eq!(to[start..start + length], from[3..3 + length]);
                    assert!(to[..start].iter().chain(&to[start + length..]).all(|b| *b == 0));
                }
            }
        }
    }

    #[test]
    fn streams_write_exactly_their_range() {
        let pages = Pages::new();
        let from: Vec<u8> = (0..2000u32).map(|at| (at % 251) as u8 | 1).collect();
        // SAFETY: the first page of the mapping.
        let bytes = unsafe { std::slice::from_raw_parts_mut(pages.map, PAGE_BYTES) };
        for guard in [Guard::new(), Guard::new().narrow()] {
            for (start, length) in [(0, 0), (0, 64), (3, 64), (1, 512), (5, 1024)] {
                bytes.fill(0);
                // SAFETY: the ranges are inside the page and the vector.
                unsafe { guard.stream(pages.map.add(256), from.as_ptr().add(start), length) }
                    .unwrap();
                super::super::flush::fence();
                assert_eq!(bytes[256..256 + length], from[start..start + length]);
                assert!(bytes[..256].iter().chain(&bytes[256 + length..]).all(|b| *b == 0));
            }
        }
    }

    #[test]
    fn zeroing_zeroes_exactly_its_range() {
        let pages = Pages::new();
        // SAFETY: the first page of the mapping.
        let bytes = unsafe { std::slice::from_raw_parts_mut(pages.map, PAGE_BYTES) };
        for length in [0, 64, 1024] {
            bytes.fill(0xff);
            // SAFETY: inside the page.
            unsafe { Guard::new().zero(pages.map.add(256), length) }.unwrap();
            assert!(bytes[256..256 + length].iter().all(|b| *b == 0));
            assert!(bytes[..256].iter().chain(&bytes[256 + length..]).all(|b| *b == 0xff));
        }
    }

    #[test]
    fn write_back_of_an_unaligned_range_keeps_its_content() {
        let bytes = vec![0x5au8; 300];
        // SAFETY: the range is inside the vector.
        unsafe { Guard::new().write_back(LineFlush::detect(), bytes.as_ptr().add(3), 290) }
            .unwrap();
        assert!(bytes.iter().all(|b| *b == 0x5a));
    }

    const CHILD: &str = "FORESHORE_TEST_CHILD";

    /// Runs `child` in a separate process, and returns the exit status. The process is this test
    /// program, which runs only the calling test `name`.
    fn end_of_child(name: &str, child: fn()) -> ExitStatus {
        if env::var_os(CHILD).is_some() {
            // Prevents a core dump.
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: a system call that takes only numbers.
            unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const none) };
            child();
            panic!("the child did not end");
        }
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", &format!("media::guarded::tests::{name}")]).env(CHILD, "1");
        command.output().unwrap().status
    }

    /// Accesses a lost page without the routines.
    fn touch_lost_page() {
        let pages = Pages::new();
        // SAFETY: inside the mapping. The access must fail.
        unsafe { pages.lose_second().read_volatile() };
    }

    fn guarded_access_fails() {
        let pages = Pages::new();
        // SAFETY: inside the mapping.
        assert_eq!(unsafe { Guard::new().load(pages.lose_second().cast()) }, Err(PageLost));
    }

    #[test]
    fn unguarded_fault_ends_the_process() {
        let status = end_of_child("unguarded_fault_ends_the_process", || {
            guarded_access_fails();
            touch_lost_page();
        });
        assert_eq!(status.signal(), Some(libc::SIGBUS));
    }

    #[test]
    fn sent_signal_ends_the_process() {
        let status = end_of_child("sent_signal_ends_the_process", || {
            // Removes the handler of the Rust runtime, as in a program without any handler.
            // SAFETY: no other code handles signals in this process.
            unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
            guarded_access_fails();
            // SAFETY: a system call that takes a number.
            unsafe { libc::raise(libc::SIGBUS) };
        });
        assert_eq!(status.signal(), Some(libc::SIGBUS));
    }

    /// Exit code of a process in which the test's handler was called.
    const HANDLED: c_int = 42;

    extern "C" fn end_process(_: c_int) {
        // SAFETY: allowed in a handler.
        unsafe { libc::_exit(HANDLED) };
    }

    extern "C" fn handle_or_end_process(
        _: c_int,
        info: *mut libc::siginfo_t,
        context: *mut c_void,
    ) {
        // SAFETY: arguments of the kernel.
        if !unsafe { handle_sigbus(info, context) } {
            end_process(0);
        }
    }

    fn install_test_handler(handler: *const (), flags: c_int) {
        // SAFETY: all zeros are valid, and the handler has the signature for the flags.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as libc::sighandler_t;
            action.sa_flags = flags;
            assert_eq!(libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()), 0);
        }
    }

    #[test]
    fn previous_handler_gets_other_faults() {
        let status = end_of_child("previous_handler_gets_other_faults", || {
            install_test_handler(end_process as *const (), 0);
            guarded_access_fails();
            touch_lost_page();
        });
        assert_eq!(status.code(), Some(HANDLED));
    }

    #[test]
    fn later_handler_can_call_handle_sigbus() {
        let status = end_of_child("later_handler_can_call_handle_sigbus", || {
            guarded_access_fails();
            install_test_handler(handle_or_end_process as *const (), libc::SA_SIGINFO);
            guarded_access_fails();
            touch_lost_page();
        });
        assert_eq!(status.code(), Some(HANDLED));
    }
    /// Sends a SIGBUS with this code to the current thread, as if another process had sent it.
    fn send_to_this_thread(code: c_int) {
        // SAFETY: zeros are valid, and the kernel allows a process to send any code to itself
        // (kernel/signal.c, do_rt_sigqueueinfo).
        unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            (info.si_signo, info.si_code) = (libc::SIGBUS, code);
            let (process, thread) = (libc::getpid(), libc::gettid());
            let call = libc::SYS_rt_tgsigqueueinfo;
            assert_eq!(libc::syscall(call, process, thread, libc::SIGBUS, &raw const info), 0);
        }
    }

    #[test]
    fn early_report_of_bad_memory_keeps_the_handler() {
        let status = end_of_child("early_report_of_bad_memory_keeps_the_handler", || {
            // If it were called, the previous handler would end the process.
            install_test_handler(end_process_with_failure as *const (), 0);
            guarded_access_fails();
            send_to_this_thread(libc::BUS_MCEERR_AO);
            guarded_access_fails();
            end_process(0);
        });
        assert_eq!(status.code(), Some(HANDLED), "{status:?}");
    }

    #[test]
    fn survived_signal_keeps_the_handler() {
        let status = end_of_child("survived_signal_keeps_the_handler", || {
            // The previous handler is that of the Rust runtime.
            guarded_access_fails();
            send_to_this_thread(libc::SI_QUEUE);
            guarded_access_fails();
            end_process(0);
        });
        assert_eq!(status.code(), Some(HANDLED), "{status:?}");
    }

    extern "C" fn end_process_with_failure(_: c_int) {
        // SAFETY: allowed in a handler.
        unsafe { libc::_exit(HANDLED + 1) };
    }
}
