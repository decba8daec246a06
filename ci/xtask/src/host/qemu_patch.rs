//! Patches a copy of this machine's QEMU: it removes the instruction that makes QEMU deliver a
//! guest interrupt twice.
//!
//! When VMRUN injects an interrupt, QEMU stores the vector in cs->exception_index, delivers the
//! interrupt, and does not clear the field (QEMU 7.2, target/i386/tcg/sysemu/svm_helper.c,
//! helper_vmrun). Before the guest's next exit, a due timer or another CPU may make this CPU leave
//! its loop (accel/tcg/cpu-exec.c, cpu_handle_interrupt). QEMU then takes the stale vector for an
//! exception and delivers the interrupt again, even if the guest has disabled interrupts. The
//! second handler spins for the lock that the first one holds. If instructions are counted, every
//! due timer triggers this.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::qemu;
use crate::checkout::{Checkout, create_folder, rename, write};
use crate::messages::{report, with_task_name};

/// Byte of a pattern. `None` matches any byte.
type Byte = Option<u8>;

/// Instruction that stores the vector, with a displacement of four bytes.
const STORE: [Byte; 6] = [Some(0x89), Some(0xb3), None, None, None, None];
/// No-op of the same length.
const NO_OPERATION: [u8; 6] = [0x66, 0x0f, 0x1f, 0x44, 0x00, 0x00];
/// Instructions after the store: error_code, exception_is_int = 0, exception_next_eip = -1, the
/// check of the log, and do_interrupt_x86_hardirq(env, vector, 1). `..` matches any byte.
const CONTEXT: &str = "c7 83 .. .. .. .. 00 00 00 00 48 c7 83 .. .. .. .. ff ff ff ff f6 05 .. .. .. .. 02 \
                       0f 85 .. .. .. .. ba 01 00 00 00 48 89 df e8";

/// Returns the QEMU for emulated hosts: a patched copy, or this machine's own QEMU if the
/// instruction is not found exactly once.
pub(super) fn patched_qemu(checkout: &Checkout) -> Result<PathBuf> {
    with_task_name("nested", || {
        let original = qemu::program()?;
        let folder = checkout.ci("host");
        create_folder(&folder)?;
        let patched = folder.join("qemu-system-x86_64");
        let this_file = checkout.path("ci/xtask/src/host/qemu_patch.rs");
        if is_newer(&patched, &original)? && is_newer(&patched, &this_file)? {
            return Ok(patched);
        }
        let mut program =
            fs::read(&original).with_context(|| format!("Cannot read {}", original.display()))?;
        if !patch(&mut program)? {
            report!(
                "unknown QEMU, used without the patch: hosts may hang (docs/design/testing.md)"
            );
            return Ok(original);
        }
        let new = folder.join(format!("qemu-system-x86_64.{}", std::process::id()));
        write(&new, program)?;
        fs::set_permissions(&new, Permissions::from_mode(0o755))?;
        rename(&new, &patched)?;
        Ok(patched)
    })
}

/// Returns false if `made` is missing or older than `source`.
fn is_newer(made: &Path, source: &Path) -> Result<bool> {
    let Ok(made) = made.metadata() else { return Ok(false) };
    let source = source.metadata().with_context(|| format!("no {}", source.display()))?;
    Ok(made.modified()? >= source.modified()?)
}

/// Replaces the store with a no-op. Returns false if the store does not occur exactly once.
fn patch(program: &mut [u8]) -> Result<bool> {
    let context = CONTEXT.split_whitespace().map(parse_byte).collect::<Result<Vec<_>>>()?;
    let pattern = [&STORE[..], &context].concat();
    let is_match = |bytes: &[u8]| {
        bytes
            .iter()
            .zip(&pattern)
            .all(|(byte, expected)| expected.is_none_or(|expected| *byte == expected))
    };
    let mut found = program.windows(pattern.len()).enumerate().filter(|(_, bytes)| is_match(bytes));
    let (Some((start, _)), None) = (found.next(), found.next()) else { return Ok(false) };
    program[start..start + NO_OPERATION.len()].copy_from_slice(&NO_OPERATION);
    Ok(true)
}

fn parse_byte(text: &str) -> Result<Byte> {
    Ok(if text == ".." { None } else { Some(u8::from_str_radix(text, 16)?) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The store and its context, with a displacement.
    fn instructions() -> Vec<u8> {
        let context =
            CONTEXT.split_whitespace().map(|text| parse_byte(text).unwrap().unwrap_or(0x77));
        [0x89, 0xb3, 1, 2, 3, 4].into_iter().chain(context).collect()
    }

    #[test]
    fn only_store_is_replaced() {
        let known = [vec![0x89; 9], instructions(), vec![0; 9]].concat();
        let mut program = known.clone();
        assert!(patch(&mut program).unwrap());
        assert_eq!(program[9..15], NO_OPERATION);
        assert_eq!((&program[..9], &program[15..]), (&known[..9], &known[15..]));
    }

    #[test]
    fn store_that_is_missing_or_ambiguous_is_left() {
        for known in [vec![0; 99], [instructions(), instructions()].concat()] {
            let mut program = known.clone();
            assert!(!patch(&mut program).unwrap());
            assert_eq!(program, known);
        }
    }
}
