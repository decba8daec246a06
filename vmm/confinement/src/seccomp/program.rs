//! Compilation of a thread's table of system calls to a filter.

use std::collections::BTreeMap;
use std::env::consts::ARCH;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, sock_filter,
};

use super::calls::{Allowed, Condition, allowed};
use super::request::KVM_RUN;
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
    let mut program = refuse_clone3().to_vec();
    // The filter that a vCPU's thread inherits runs as well.
    if matches!(kind, ThreadKind::Vcpu | ThreadKind::SetUp) {
        program.extend(allow_kvm_run());
    }
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

/// Allows `KVM_RUN` with few instructions. The kernel remembers only calls that are allowed for all
/// arguments (kernel/seccomp.c, `seccomp_cache_prepare`), so the filter runs at each guest entry.
fn allow_kvm_run() -> [sock_filter; 7] {
    [
        load(ARCHITECTURE),
        unless_equal(X86_64, 5),
        load(CALL),
        unless_equal(libc::SYS_ioctl as u32, 3),
        load(SECOND_ARGUMENT),
        unless_equal(KVM_RUN, 1),
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
