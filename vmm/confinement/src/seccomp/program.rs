//! Compilation of a thread's table of system calls to a filter.

use std::collections::BTreeMap;
use std::env::consts::ARCH;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, sock_filter,
};

use super::calls::{Allowed, Condition, allowed};
use super::request::{KVM_RUN, KVM_SIGNAL_MSI};
use super::{SeccompMode, report};
use crate::thread::ThreadKind;

// Instructions of classic BPF (linux/bpf_common.h).
const LOAD_WORD: u16 = 0x20;
const JUMP_IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;

// Offsets in `struct seccomp_data` (linux/seccomp.h).
const CALL: u32 = 0;
const ARCHITECTURE: u32 = 4;
const INSTRUCTION_POINTER: u32 = 8;
const SECOND_ARGUMENT: u32 = 24;

/// `AUDIT_ARCH_X86_64` of linux/audit.h.
const X86_64: u32 = 0xc000_003e;

/// Direction and size in the request `KVM_SIGNAL_MSI`, an `_IOW` of `struct kvm_msi` (32 bytes).
const KVM_MSI_WRITTEN: u32 = 0x4020_0000;

/// Compiles the filter of a thread.
///
/// # Panics
/// Panics if the table of the thread cannot be compiled.
pub(super) fn compile(kind: ThreadKind, mode: SeccompMode) -> BpfProgram {
    let rules = rules(allowed(kind));
    let otherwise = match mode {
        SeccompMode::Enforce | SeccompMode::Log => SeccompAction::Trap,
        SeccompMode::Errno => SeccompAction::Errno(libc::EPERM as u32),
        SeccompMode::Off => SeccompAction::Allow,
    };
    let architecture = ARCH.try_into().expect("an architecture of seccompiler");
    let filter = SeccompFilter::new(rules, otherwise, SeccompAction::Allow, architecture);
    let rest: BpfProgram = filter.expect("valid rules").try_into().expect("a valid filter");
    let is_of_vcpu = kind == ThreadKind::Vcpu;
    let mut program = if is_of_vcpu { allow_requests_of_vcpu().to_vec() } else { Vec::new() };
    program.extend(refuse_clone3());
    if mode == SeccompMode::Log {
        program.extend(allow_repeated_calls());
    }
    program.extend(rest);
    program
}

/// Returns the rules of each call. A call without rules is allowed with all arguments.
fn rules(allowed: Vec<Allowed>) -> BTreeMap<i64, Vec<SeccompRule>> {
    let mut rules = BTreeMap::<i64, Option<Vec<SeccompRule>>>::new();
    for Allowed { call, conditions } in allowed {
        let of_call = rules.entry(call).or_insert(Some(Vec::new()));
        if conditions.is_empty() {
            *of_call = None;
        }
        if let Some(rules) = of_call {
            let rule = |conditions| SeccompRule::new(conditions).expect("at least one condition");
            rules.extend(alternatives(&conditions).into_iter().map(rule));
        }
    }
    rules.into_iter().map(|(call, rules)| (call, rules.unwrap_or_default())).collect()
}

/// Returns all combinations of a value for each condition.
fn alternatives(conditions: &[Condition]) -> Vec<Vec<SeccompCondition>> {
    let Some((first, rest)) = conditions.split_first() else { return vec![Vec::new()] };
    let rest = alternatives(rest);
    let with_first = |value: &u64| {
        let first = compiled(first.argument, first.mask, *value);
        rest.iter().map(|rest| [std::slice::from_ref(&first), rest].concat()).collect::<Vec<_>>()
    };
    first.values.iter().flat_map(with_first).collect()
}

fn compiled(argument: u8, mask: u64, value: u64) -> SeccompCondition {
    let length = match u32::try_from(mask) {
        Ok(_) => SeccompCmpArgLen::Dword,
        Err(_) => SeccompCmpArgLen::Qword,
    };
    let condition = SeccompCondition::new(argument, length, SeccompCmpOp::MaskedEq(mask), value);
    condition.expect("an argument of a call")
}

/// Allows the frequent requests of a vCPU's thread with few instructions. The kernel remembers only
/// calls that are allowed for all arguments (kernel/seccomp.c, `seccomp_cache_prepare`), so the
/// filter runs at each request.
fn allow_requests_of_vcpu() -> [sock_filter; 9] {
    [
        load(ARCHITECTURE),
        unless_equal(X86_64, 7),
        load(CALL),
        unless_equal(libc::SYS_ioctl as u32, 5),
        load(SECOND_ARGUMENT),
        unless_equal(KVM_RUN, 1),
        allow(),
        unless_equal(KVM_SIGNAL_MSI | KVM_MSI_WRITTEN, 1),
        allow(),
    ]
}

/// Allows calls that the handler of SIGSYS repeats.
fn allow_repeated_calls() -> [sock_filter; 5] {
    let from = report::repeated_call_address();
    [
        load(INSTRUCTION_POINTER),
        unless_equal(from as u32, 3),
        load(INSTRUCTION_POINTER + 4),
        unless_equal((from >> 32) as u32, 1),
        allow(),
    ]
}

/// Makes clone3() fail as on kernels without it, so that the C library calls clone(), whose flags a
/// filter can see.
fn refuse_clone3() -> [sock_filter; 5] {
    [
        load(ARCHITECTURE),
        unless_equal(X86_64, 3),
        load(CALL),
        unless_equal(libc::SYS_clone3 as u32, 1),
        return_value(libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
    ]
}

fn load(offset: u32) -> sock_filter {
    sock_filter { code: LOAD_WORD, jt: 0, jf: 0, k: offset }
}

/// Skips `skipped` instructions unless the loaded word is `value`.
fn unless_equal(value: u32, skipped: u8) -> sock_filter {
    sock_filter { code: JUMP_IF_EQUAL, jt: 0, jf: skipped, k: value }
}

fn allow() -> sock_filter {
    return_value(libc::SECCOMP_RET_ALLOW)
}

fn return_value(value: u32) -> sock_filter {
    sock_filter { code: RETURN, jt: 0, jf: 0, k: value }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Opcodes of classic BPF that only seccompiler emits.
    const JUMP: u16 = 0x05;
    const AND: u16 = 0x54;

    /// Runs a filter on a call. Returns the result and the number of executed instructions.
    fn run(program: &[sock_filter], architecture: u32, call: u32, request: u32) -> (u32, usize) {
        let (mut word, mut next) = (0, 0);
        for count in 1.. {
            let sock_filter { code, jt, jf, k } = program[next];
            next += 1;
            match code {
                LOAD_WORD => {
                    word = match k {
                        CALL => call,
                        ARCHITECTURE => architecture,
                        SECOND_ARGUMENT => request,
                        _ => 0,
                    };
                }
                AND => word &= k,
                JUMP => next += k as usize,
                JUMP_IF_EQUAL => next += usize::from(if word == k { jt } else { jf }),
                RETURN => return (k, count),
                other => panic!("unexpected instruction {other:#x}"),
            }
        }
        unreachable!()
    }

    #[test]
    fn frequent_requests_of_vcpu_take_few_instructions() {
        const IOCTL: u32 = libc::SYS_ioctl as u32;
        /// `AUDIT_ARCH_I386` of linux/audit.h. 32-bit programs use other call numbers.
        const I386: u32 = 0x4000_0003;
        // KVM_RUN and KVM_SIGNAL_MSI with sizes (linux/kvm.h).
        let program = compile(ThreadKind::Vcpu, SeccompMode::Enforce);
        for (request, count) in [(0xae80, 7), (0x4020_aea5, 8)] {
            let outcome = run(&program, X86_64, IOCTL, request);
            assert_eq!(outcome, (libc::SECCOMP_RET_ALLOW, count));
            for (architecture, call) in [(I386, IOCTL), (X86_64, libc::SYS_execve as u32)] {
                let (result, _) = run(&program, architecture, call, request);
                assert_ne!(result, libc::SECCOMP_RET_ALLOW, "{architecture:#x}");
            }
        }
    }
}
