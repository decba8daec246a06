//! System calls that a test makes in a thread of another process (ptrace(2)).

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, bail, ensure};

use crate::system_calls::{Stop, registers, request, set_registers, wait};

/// Machine code of the instruction `syscall`.
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// Machine code of the instruction `ret`. In mode `log`, the VMM's handler repeats refused calls
/// with a `syscall` before a `ret`, and filters allow every call from there.
const RETURN: u8 = 0xc3;
/// Results of calls that the kernel repeats after an interruption (include/linux/errno.h).
const RESTARTS: [i64; 4] = [-512, -513, -514, -516];
/// Bytes below the stack pointer that a function may use without moving it (System V ABI).
const RED_ZONE: u64 = 128;
/// Unused part of the stack that holds arguments of calls.
const SCRATCH_BYTES: u64 = 16 << 10;

/// Stopped thread of another process. When this value is dropped, the thread continues where it was
/// stopped. All methods must be called on the test's thread that has attached to it.
pub struct TracedThread {
    pid: u32,
    tid: libc::pid_t,
    memory: File,
    /// Registers of the thread when it was stopped.
    registers: libc::user_regs_struct,
    /// Address of a `syscall` instruction in the program.
    syscall: u64,
    /// Lowest address of the scratch memory, and the end of its used part.
    scratch: (u64, u64),
}

impl TracedThread {
    /// Stops a thread of the process `pid`.
    pub fn attach(pid: u32, tid: u32) -> Result<Self> {
        let memory = File::options().read(true).write(true).open(format!("/proc/{pid}/mem"))?;
        let syscall = find_syscall(pid, &memory)?;
        let tid = libc::pid_t::try_from(tid)?;
        request(libc::PTRACE_SEIZE, tid, 0, 0).context("cannot trace the VMM")?;
        request(libc::PTRACE_INTERRUPT, tid, 0, 0)?;
        while let Stop::Signal(signal) = wait(pid, tid)? {
            request(libc::PTRACE_CONT, tid, 0, signal)?;
        }
        let registers = restarting(registers(tid)?);
        let scratch = (registers.rsp - RED_ZONE - SCRATCH_BYTES) & !63;
        Ok(Self { pid, tid, memory, registers, syscall, scratch: (scratch, scratch) })
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Makes a system call, and returns the kernel's result: a value or a negative error number.
    pub fn call(&mut self, number: i64, arguments: &[u64]) -> Result<i64> {
        let calling = self.registers_of_call(number, arguments);
        set_registers(self.tid, &calling)?;
        let (mut resume, mut signal) = (libc::PTRACE_SINGLESTEP, 0);
        loop {
            request(resume, self.tid, 0, signal)?;
            let stop = wait(self.pid, self.tid)?;
            let now = registers(self.tid)?;
            if (now.rsp, now.rip) == (calling.rsp, self.syscall + SYSCALL.len() as u64)
                && stop != Stop::Signal(libc::SIGSYS)
            {
                return Ok(now.rax as i64);
            }
            // Otherwise, a signal handler runs, for example that of refused calls. The thread stops
            // at each system call of the handler, and last at the sigreturn(2) that ends it.
            let is_before = (now.rsp, now.rip) == (calling.rsp, self.syscall);
            resume = if is_before { libc::PTRACE_SINGLESTEP } else { libc::PTRACE_SYSCALL };
            signal = match stop {
                Stop::Signal(signal) if signal != libc::SIGTRAP => signal,
                Stop::Signal(_) | Stop::Event => 0,
            };
        }
    }

    /// Lets the thread continue with a system call that does not return to it, because it ends or
    /// replaces the process.
    pub fn continue_with(mut self, number: i64, arguments: &[u64]) {
        self.registers = self.registers_of_call(number, arguments);
    }

    fn registers_of_call(&self, number: i64, arguments: &[u64]) -> libc::user_regs_struct {
        let mut all = [0; 6];
        all[..arguments.len()].copy_from_slice(arguments);
        let [rdi, rsi, rdx, r10, r8, r9] = all;
        // Without an `orig_rax`, the kernel does not restart the call that the stop interrupted.
        let (rax, orig_rax, rip) = (number as u64, u64::MAX, self.syscall);
        // A handler of a signal uses the stack below the scratch memory.
        let rsp = self.scratch.0;
        let kept = self.registers;
        libc::user_regs_struct { rax, orig_rax, rip, rsp, rdi, rsi, rdx, r10, r8, r9, ..kept }
    }

    /// Writes an argument of a call to the thread's stack, and returns its address.
    pub fn place(&mut self, bytes: &[u8]) -> Result<u64> {
        let (start, address) = self.scratch;
        let end = address + bytes.len() as u64;
        ensure!(end <= start + SCRATCH_BYTES, "the arguments are too long");
        self.scratch.1 = end.next_multiple_of(8);
        self.write(address, bytes)?;
        Ok(address)
    }

    /// Same as [`Self::place`], for a string that ends with a null byte.
    pub fn place_text(&mut self, text: &str) -> Result<u64> {
        self.place(&[text.as_bytes(), &[0]].concat())
    }

    pub fn read<const LEN: usize>(&self, address: u64) -> Result<[u8; LEN]> {
        let mut bytes = [0; LEN];
        self.memory.read_exact_at(&mut bytes, address)?;
        Ok(bytes)
    }

    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        Ok(self.memory.write_all_at(bytes, address)?)
    }
}

impl Drop for TracedThread {
    fn drop(&mut self) {
        // Both fail if the process has ended.
        let _ = set_registers(self.tid, &self.registers);
        let _ = request(libc::PTRACE_DETACH, self.tid, 0, 0);
    }
}

/// Returns registers that make a thread repeat the call that a stop has interrupted. The kernel
/// repeats the call only if the thread continues directly from that stop.
fn restarting(interrupted: libc::user_regs_struct) -> libc::user_regs_struct {
    let is_call = interrupted.orig_rax as i64 >= 0;
    if !is_call || !RESTARTS.contains(&(interrupted.rax as i64)) {
        return interrupted;
    }
    let (rax, rip) = (interrupted.orig_rax, interrupted.rip - SYSCALL.len() as u64);
    libc::user_regs_struct { rax, rip, orig_rax: u64::MAX, ..interrupted }
}

/// Returns the address of a `syscall` instruction in the program of a process.
fn find_syscall(pid: u32, memory: &File) -> Result<u64> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    for line in maps.lines().filter(|line| line.contains(" r-xp ") && line.contains('/')) {
        let range = line.split([' ', '-']).take(2).map(|end| u64::from_str_radix(end, 16));
        let [start, end] = range.collect::<Result<Vec<_>, _>>()?[..] else { continue };
        let mut code = vec![0; usize::try_from(end - start)?];
        memory.read_exact_at(&mut code, start)?;
        let is_syscall = |code: &[u8]| code[..2] == SYSCALL && code[2] != RETURN;
        if let Some(offset) = code.windows(3).position(is_syscall) {
            return Ok(start + offset as u64);
        }
    }
    bail!("the program makes no system calls");
}
