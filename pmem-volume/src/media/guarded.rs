//! Loads and stores that outlive what they touch.
//!
//! A file that is truncated, a file system that is full, and memory that turns out to be bad take
//! pages away from under a mapping, and the kernel answers the next access with SIGBUS (mmap(2);
//! Linux Documentation/mm/hwpoison.rst). That is to be an error of the call that made the access,
//! not the end of the process and of the guest in it. So mapped media is touched only by the
//! routines below. They lie side by side, use no stack, and return zero; a SIGBUS whose instruction
//! pointer is among them resumes at a landing pad, which returns one to the same caller.
//!
//! Accesses of other code to memory that somebody watches are let finish ([`super::watch`]). Every
//! other SIGBUS goes to whoever handled it before. A program that puts a handler in place later
//! calls [`handle_sigbus`] from it first. A thread that blocks SIGBUS cannot be helped: the kernel
//! ends the process then.

use std::arch::global_asm;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::{Once, OnceLock};

use libc::{c_int, c_void};

#[cfg(test)]
use super::flush::noted::{Noted, note};
use super::flush::{CACHE_LINE_BYTES, LineFlush};
use super::watch;

// System V calling convention: rdi, rsi, rdx in, rax out; all registers used are the caller's to
// save. The instruction pointer of a fault is that of the instruction, also within a repeated one
// (Intel SDM, volume 1, 7.3.9.3).
global_asm!(
    ".pushsection .text.foreshore_guarded, \"ax\", @progbits",
    ".balign 64",
    ".globl foreshore_guarded_start",
    "foreshore_guarded_start:",
    // (to, from, length). Whole words first: a crash may tear a store at words, and at nothing
    // smaller.
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
    // (to, from, length): the same in pieces of 256 bytes, at least one, with AVX-512. A line is
    // loaded at once, and stored at once. These registers have no lower parts that other
    // instructions would wait for, and need no VZEROUPPER (Intel 64 Optimization Manual,
    // 3.11.5).
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
    // (from, to): one load that cannot tear, and with the order of an acquire, as all loads have
    // here.
    ".globl foreshore_guarded_load",
    "foreshore_guarded_load:",
    "mov rcx, [rdi]",
    "mov [rsi], rcx",
    "xor eax, eax",
    "ret",
    // (to, word): one store that cannot tear, and with the order of a release, as all stores have
    // here.
    ".globl foreshore_guarded_store",
    "foreshore_guarded_store:",
    "mov [rdi], rsi",
    "xor eax, eax",
    "ret",
    // (to, end): past the cache, in whole lines, at least one.
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
    // (to, from, length): past the cache, in whole lines, at least one. Not ordered: the caller
    // fences.
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
    // The same with AVX-512: each line leaves the CPU in one piece.
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
    // (first line, end), three times: lines up to the end, at least one.
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
    // The landing pad of all of them. Non-temporal stores that were made before the fault are
    // closed as ever.
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

/// The page under an access is gone. Of a longer access, any part may have been done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageLost;

#[inline]
fn done(result: u32) -> Result<(), PageLost> {
    if result == 0 { Ok(()) } else { Err(PageLost) }
}

/// The accesses. Whoever has one has seen to it that SIGBUS is handled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Guard {
    /// The CPU has AVX-512, and the kernel keeps its registers.
    is_wide: bool,
}

/// What [`Guard::copy`] copies at once where it can.
const WIDE_BYTES: usize = 256;

impl Guard {
    /// Puts the handler in place, once in a process.
    pub(super) fn new() -> Self {
        static INSTALLED: Once = Once::new();
        INSTALLED.call_once(install);
        Self { is_wide: is_x86_feature_detected!("avx512f") }
    }

    /// Without what not every CPU has.
    #[cfg(test)]
    fn narrow(self) -> Self {
        Self { is_wide: false }
    }

    /// Copies bytes to mapped media, or from it, in words as far as they go.
    ///
    /// # Safety
    /// `length` bytes at `to` are writable, and nobody else stores there; `length` bytes at `from`
    /// are readable, and elsewhere. One of them lies in a mapping.
    #[inline]
    pub(super) unsafe fn copy(
        self,
        to: *mut u8,
        from: *const u8,
        length: usize,
    ) -> Result<(), PageLost> {
        // SAFETY: vouched for by the caller; the routines touch nothing else, and the CPU has what
        // they need.
        done(unsafe {
            if self.is_wide && length > 0 && length.is_multiple_of(WIDE_BYTES) {
                foreshore_guarded_copy_wide(to, from, length)
            } else {
                foreshore_guarded_copy(to, from, length)
            }
        })
    }

    /// Loads a word, untorn.
    ///
    /// # Safety
    /// `from` lies in a mapping, and is aligned.
    #[inline]
    pub(super) unsafe fn load(self, from: *const u64) -> Result<u64, PageLost> {
        let mut word = 0;
        // SAFETY: vouched for by the caller, and `word` is ours.
        done(unsafe { foreshore_guarded_load(from, &raw mut word) })?;
        Ok(word)
    }

    /// Stores a word, untorn.
    ///
    /// # Safety
    /// `to` lies in a writable mapping, and is aligned.
    #[inline]
    pub(super) unsafe fn store(self, to: *mut u64, word: u64) -> Result<(), PageLost> {
        #[cfg(test)]
        note(Noted::Stored(to as usize..to as usize + 8));
        // SAFETY: vouched for by the caller.
        done(unsafe { foreshore_guarded_store(to, word) })
    }

    /// Zeroes memory past the cache: nothing is left to write back, and the caches keep what they
    /// hold. Ordered before anything later.
    ///
    /// # Safety
    /// `length` bytes at `to` lie in a writable mapping and are nobody's. Both are multiples of a
    /// cache line.
    pub(super) unsafe fn zero(self, to: *mut u8, length: usize) -> Result<(), PageLost> {
        assert!(
            (to as usize).is_multiple_of(CACHE_LINE_BYTES)
                && length.is_multiple_of(CACHE_LINE_BYTES)
        );
        if length == 0 {
            return Ok(());
        }
        // SAFETY: vouched for by the caller; the end is at most one behind the mapping.
        done(unsafe { foreshore_guarded_zero(to, to.add(length)) })
    }

    /// Copies bytes to mapped media past the cache: nothing is left to write back. The caller
    /// fences afterwards.
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
        note(Noted::Streamed(to as usize..to as usize + length));
        // SAFETY: vouched for by the caller; the routines touch nothing else, and the CPU has what
        // they need.
        done(unsafe {
            if self.is_wide {
                foreshore_guarded_stream_wide(to, from, length)
            } else {
                foreshore_guarded_stream(to, from, length)
            }
        })
    }

    /// Writes back every line that `length` bytes at `start` touch. The caller fences afterwards.
    ///
    /// # Safety
    /// The bytes lie in a mapping, and the CPU has the instruction ([`LineFlush::detect`]).
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
        note(Noted::WrittenBack(first..end.next_multiple_of(CACHE_LINE_BYTES)));
        // SAFETY: writing a line back changes nothing that a program can see; each line holds a
        // byte of the range.
        done(unsafe {
            match flush {
                LineFlush::Clwb => foreshore_guarded_clwb(first, end),
                LineFlush::ClflushOpt => foreshore_guarded_clflushopt(first, end),
                LineFlush::Clflush => foreshore_guarded_clflush(first, end),
            }
        })
    }
}

/// What handled SIGBUS before.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

fn install() {
    // 1. What was there is kept before the handler is: it may be needed at once.
    let mut previous = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: a query, which fills the struct; all of it was zero before, which is valid too.
    let previous = unsafe {
        let result = libc::sigaction(libc::SIGBUS, ptr::null(), previous.as_mut_ptr());
        assert_eq!(result, 0, "SIGBUS can be asked for");
        previous.assume_init()
    };
    PREVIOUS.set(previous).expect("installed once");
    // 2. Ours.
    assert_eq!(put_in_place(&previous), 0, "SIGBUS can be handled");
}

/// Makes our handler that of SIGBUS, with the same mask as the previous one, and the other stack if
/// the thread has one, as whoever is called next may rely on them. Returns what the kernel does.
/// May be called in a handler.
fn put_in_place(previous: &libc::sigaction) -> c_int {
    let action = libc::sigaction {
        sa_sigaction: on_sigbus as *const () as libc::sighandler_t,
        sa_flags: previous.sa_flags & (libc::SA_NODEFER | libc::SA_RESTART)
            | libc::SA_SIGINFO
            | libc::SA_ONSTACK,
        ..*previous
    };
    // SAFETY: the handler has the signature that SA_SIGINFO asks for and calls only what may be
    // called in one.
    unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) }
}

/// The handler.
extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel's arguments, passed on as they are.
    if !unsafe { handle_sigbus(info, context) } {
        // SAFETY: as above.
        unsafe { pass_on(signal, info, context) };
    }
}

/// Was this SIGBUS raised by an access to a pool's media, or to memory that is watched? Then it has
/// been dealt with: the handler returns, and the access with an error, or with zeros. So has early
/// news of bad memory that nobody has touched yet (BUS_MCEERR_AO), which a process gets that
/// asked for them (prctl(2), PR_MCE_KILL_EARLY): whoever touches it gets a SIGBUS of his own. For
/// programs that handle SIGBUS themselves, with SA_SIGINFO, and have put their handler in place
/// after the first pool was opened.
///
/// # Safety
/// Called in a handler of SIGBUS, with the arguments that the kernel gave it.
pub unsafe fn handle_sigbus(info: *mut libc::siginfo_t, context: *mut c_void) -> bool {
    // Raised by the access itself, and not sent by somebody (zero and less) nor news, which may
    // arrive anywhere. SAFETY: the caller's siginfo.
    let code = unsafe { (*info).si_code };
    if code == libc::BUS_MCEERR_AO {
        return true;
    }
    if code <= 0 {
        return false;
    }
    // SAFETY: the caller's context, which nobody else looks at meanwhile.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let at = &mut registers[libc::REG_RIP as usize];
    let guarded =
        (&raw const foreshore_guarded_start as usize)..(&raw const foreshore_guarded_end as usize);
    let ours = guarded.contains(&(*at as usize));
    if ours {
        // The stack is as it was at the call, so the pad returns to the caller. The kernel restores
        // the flags; the direction flag is clear as the calling convention has it.
        *at = &raw const foreshore_guarded_lost as i64;
        return true;
    }
    // SAFETY: the kernel gives the address of whatever an access has raised.
    let address = unsafe { (*info).si_addr() } as usize;
    // SAFETY: this thread's own, which the code that was interrupted may be about to look at.
    let errno = unsafe { &mut *libc::__errno_location() };
    let before = *errno;
    let replaced = watch::replace(address);
    *errno = before;
    replaced
}

/// Does with a SIGBUS that is not ours what would have been done without us.
///
/// # Safety
/// As for [`handle_sigbus`].
unsafe fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let Some(previous) = PREVIOUS.get() else { return };
    // SAFETY: the caller's siginfo.
    let by_access = unsafe { (*info).si_code } > 0;
    match previous.sa_sigaction {
        // The kernel does not let a fault be ignored, but a signal that somebody sends.
        libc::SIG_IGN if !by_access => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: both calls may be made in a handler. A fault is raised anew when this
            // returns, and a signal that was sent is sent again; both now end the
            // process.
            unsafe {
                libc::signal(signal, libc::SIG_DFL);
                if !by_access {
                    libc::raise(signal);
                }
            }
            return;
        }
        handler if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: whoever put it there gave it this signature.
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
        stay_in_place(previous);
    }
}

/// Puts our handler back if the previous one left the default in its place, as the Rust runtime's
/// does for what it does not know: the process goes on, and the next page that is lost must not end
/// it. After a fault that is right, and ends the process at the same access: to go back to it with
/// our handler would never end.
fn stay_in_place(previous: &libc::sigaction) {
    let mut now = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: a query, which may be made in a handler and fills the struct; all of it was zero
    // before, which is valid.
    let now = unsafe {
        libc::sigaction(libc::SIGBUS, ptr::null(), now.as_mut_ptr());
        now.assume_init()
    };
    if now.sa_sigaction == libc::SIG_DFL {
        put_in_place(previous);
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

    /// Two pages of a file on tmpfs.
    struct Pages {
        file: File,
        map: *mut u8,
    }

    impl Pages {
        fn new() -> Self {
            let file = tempfile::tempfile_in("/dev/shm").unwrap();
            file.set_len(2 * PAGE_BYTES as u64).unwrap();
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: a new mapping at an address of the kernel's choice.
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

        /// The second page, which is no more.
        fn lost(&self) -> *mut u8 {
            self.file.set_len(PAGE_BYTES as u64).unwrap();
            // SAFETY: inside the mapping.
            unsafe { self.map.add(PAGE_BYTES) }
        }
    }

    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: mapped in new(), and used no more.
            unsafe { libc::munmap(self.map.cast(), 2 * PAGE_BYTES) };
        }
    }

    #[test]
    fn an_access_to_a_page_that_is_gone_is_an_error_of_the_access() {
        let pages = Pages::new();
        let guard = Guard::new();
        let lost = pages.lost();
        let bytes = [7u8; 512];
        // SAFETY: all of it lies in the mapping; the routines are what is under test.
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
            // What is still there is as good as before, and so is the handler.
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
    fn copies_have_every_length_and_alignment() {
        let from: Vec<u8> = (0..2000u32).map(|at| (at % 251) as u8 | 1).collect();
        for start in 0..9 {
            for length in (0..70).chain([255, 256, 257, 512, 1024]) {
                for guard in [Guard::new(), Guard::new().narrow()] {
                    let mut to = [0u8; 1100];
                    // SAFETY: inside both.
                    unsafe { guard.copy(to.as_mut_ptr().add(start), from.as_ptr().add(3), length) }
                        .unwrap();
                    assert_eq!(to[start..start + length], from[3..3 + length]);
                    assert!(to[..start].iter().chain(&to[start + length..]).all(|b| *b == 0));
                }
            }
        }
    }

    #[test]
    fn streams_have_exactly_their_range_from_any_source() {
        let pages = Pages::new();
        let from: Vec<u8> = (0..2000u32).map(|at| (at % 251) as u8 | 1).collect();
        // SAFETY: the first page, which is ours.
        let bytes = unsafe { std::slice::from_raw_parts_mut(pages.map, PAGE_BYTES) };
        for guard in [Guard::new(), Guard::new().narrow()] {
            for (start, length) in [(0, 0), (0, 64), (3, 64), (1, 512), (5, 1024)] {
                bytes.fill(0);
                // SAFETY: inside the page and the vector.
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
        // SAFETY: the first page, which is ours.
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
    fn every_line_of_an_unaligned_range_is_written_back_without_harm() {
        let bytes = vec![0x5au8; 300];
        // SAFETY: the range is inside the vector.
        unsafe { Guard::new().write_back(LineFlush::detect(), bytes.as_ptr().add(3), 290) }
            .unwrap();
        assert!(bytes.iter().all(|b| *b == 0x5a));
    }

    const CHILD: &str = "FORESHORE_TEST_CHILD";

    /// Runs `child` in a process of its own, and says how that ended. `name` is the test that calls
    /// this: the process is this very program, made to run that test alone.
    fn end_of_child(name: &str, child: fn()) -> ExitStatus {
        if env::var_os(CHILD).is_some() {
            // It is to leave no core behind.
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: a system call that takes the numbers.
            unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const none) };
            child();
            panic!("the child was to end before");
        }
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", &format!("media::guarded::tests::{name}")]).env(CHILD, "1");
        command.output().unwrap().status
    }

    /// An access that is not one of the routines'.
    fn touch_lost_page() {
        let pages = Pages::new();
        // SAFETY: inside the mapping; it is to fail.
        unsafe { pages.lost().read_volatile() };
    }

    fn guarded_access_fails() {
        let pages = Pages::new();
        // SAFETY: inside the mapping.
        assert_eq!(unsafe { Guard::new().load(pages.lost().cast()) }, Err(PageLost));
    }

    #[test]
    fn a_fault_elsewhere_ends_the_process_as_ever() {
        let status = end_of_child("a_fault_elsewhere_ends_the_process_as_ever", || {
            guarded_access_fails();
            touch_lost_page();
        });
        assert_eq!(status.signal(), Some(libc::SIGBUS));
    }

    #[test]
    fn a_signal_that_is_sent_ends_the_process_as_ever() {
        let status = end_of_child("a_signal_that_is_sent_ends_the_process_as_ever", || {
            // As in a program without a handler of its own; the Rust runtime has one.
            // SAFETY: nobody else handles signals in this process.
            unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
            guarded_access_fails();
            // SAFETY: a system call that takes a number.
            unsafe { libc::raise(libc::SIGBUS) };
        });
        assert_eq!(status.signal(), Some(libc::SIGBUS));
    }

    /// How a process ends of which a handler of its own was called.
    const HANDLED: c_int = 42;

    extern "C" fn end_process(_: c_int) {
        // SAFETY: may be called in a handler.
        unsafe { libc::_exit(HANDLED) };
    }

    extern "C" fn ask_then_end_process(_: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
        // SAFETY: the kernel's arguments.
        if !unsafe { handle_sigbus(info, context) } {
            end_process(0);
        }
    }

    fn handle(handler: *const (), flags: c_int) {
        // SAFETY: all zero is valid, and the handler has the signature that the flags ask for.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as libc::sighandler_t;
            action.sa_flags = flags;
            assert_eq!(libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()), 0);
        }
    }

    #[test]
    fn a_handler_that_was_there_before_gets_the_faults_of_others() {
        let status =
            end_of_child("a_handler_that_was_there_before_gets_the_faults_of_others", || {
                handle(end_process as *const (), 0);
                guarded_access_fails();
                touch_lost_page();
            });
        assert_eq!(status.code(), Some(HANDLED));
    }

    #[test]
    fn a_handler_that_comes_later_can_ask_whose_fault_it_is() {
        let status = end_of_child("a_handler_that_comes_later_can_ask_whose_fault_it_is", || {
            guarded_access_fails();
            handle(ask_then_end_process as *const (), libc::SA_SIGINFO);
            guarded_access_fails();
            touch_lost_page();
        });
        assert_eq!(status.code(), Some(HANDLED));
    }
    /// A SIGBUS that no access raised, with that code.
    fn send_to_this_thread(code: c_int) {
        // SAFETY: all zero is valid; the kernel lets a process send itself any code
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
    fn early_news_of_bad_memory_leave_the_guard_in_place() {
        let status = end_of_child("early_news_of_bad_memory_leave_the_guard_in_place", || {
            // Whoever was there before would end the process.
            handle(end_process_otherwise as *const (), 0);
            guarded_access_fails();
            send_to_this_thread(libc::BUS_MCEERR_AO);
            guarded_access_fails();
            end_process(0);
        });
        assert_eq!(status.code(), Some(HANDLED), "{status:?}");
    }

    #[test]
    fn a_signal_after_which_the_process_lives_leaves_the_guard_in_place() {
        let status = end_of_child(
            "a_signal_after_which_the_process_lives_leaves_the_guard_in_place",
            || {
                // The Rust runtime's handler was there before.
                guarded_access_fails();
                send_to_this_thread(libc::SI_QUEUE);
                guarded_access_fails();
                end_process(0);
            },
        );
        assert_eq!(status.code(), Some(HANDLED), "{status:?}");
    }

    extern "C" fn end_process_otherwise(_: c_int) {
        // SAFETY: may be called in a handler.
        unsafe { libc::_exit(HANDLED + 1) };
    }
}
