//! Exit codes and logs of `host`, for tasks that run it.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;

use super::{CUT_OFF, HOST_FAILED};
use crate::jobs::SIGNAL_BASE;

/// Console log of the emulated host in the folder of `--out`.
pub(crate) const CONSOLE: &str = "host-console.log";
/// Register dump of a host that hung or triple-faulted.
pub(crate) const REGISTERS: &str = "host-registers.log";

const PANIC: &str = "Kernel panic - not syncing";
/// Console lines of a host that ran out of memory. The workload caused this, so it is a valid
/// result.
const RESULTS: [&str; 2] = [": Out of memory", ": System is deadlocked"];
/// Prefix of the line that `host` appends to the console log if QEMU ends before the command.
pub(crate) const CAUSE: &str = "host: ";
pub(crate) const TRIPLE_FAULT: &str = "a CPU triple-faulted";
pub(crate) const ENDED_BY_SIGNAL: &str = "QEMU was ended by signal";
pub(crate) const HOST_HUNG: &str = "the host stood still";

/// Returns true if the emulated host's kernel or QEMU ended the run, rather than the command.
/// `folder` contains the console log.
pub(crate) fn has_host_died(code: u8, folder: &Path) -> bool {
    let console = fs::read(folder.join(CONSOLE));
    console.is_ok_and(|console| is_death(code, &String::from_utf8_lossy(&console)))
}

fn is_death(code: u8, console: &str) -> bool {
    let is_result = |line: &str| {
        line.split(PANIC).skip(1).any(|rest| RESULTS.iter().any(|result| rest.starts_with(result)))
    };
    let is_cause = |line: &str| {
        let cause = line.strip_prefix(CAUSE);
        let causes = [TRIPLE_FAULT, ENDED_BY_SIGNAL, HOST_HUNG];
        cause.is_some_and(|cause| causes.iter().any(|start| cause.starts_with(start)))
    };
    code == HOST_FAILED
        && console.lines().any(|line| line.contains(PANIC) || is_cause(line))
        && !console.lines().any(is_result)
}

/// Describes an exit code of `host`.
pub(crate) fn meaning(code: u8) -> String {
    match code {
        CUT_OFF => "time limit reached".to_owned(),
        HOST_FAILED => "the host failed".to_owned(),
        _ => {
            let status = ExitStatus::from_raw(code.saturating_sub(SIGNAL_BASE).into());
            if status.signal().is_some() { status.to_string() } else { format!("exit code {code}") }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_has_died_of_a_panic_or_of_its_emulator() {
        for console in [
            "[  9.1] Oops: int3: 0000 [#1] SMP\r\n[  9.2] Kernel panic - not syncing: Fatal exception\r\n",
            "[  9.1] Kernel panic - not syncing: NMI: Not continuing",
            "[  1.0] foreshore-host: ready\n\nhost: a CPU triple-faulted\n",
            "\nhost: QEMU was ended by signal 9 (9: was memory short?)\n",
            "\nhost: the host stood still\n",
        ] {
            assert!(is_death(HOST_FAILED, console), "{console}");
            assert!(!is_death(1, console) && !is_death(CUT_OFF, console), "{console}");
        }
    }

    #[test]
    fn host_without_memory_and_other_ends_are_results() {
        for console in [
            "[  9.2] Kernel panic - not syncing: Out of memory: compulsory panic_on_oom is enabled",
            "[  9.2] Kernel panic - not syncing: System is deadlocked on memory\n\nhost: a CPU triple-faulted\n",
            "a line that ends with host: the host stood still\n",
            "",
        ] {
            assert!(!is_death(HOST_FAILED, console), "{console}");
        }
        assert!(!has_host_died(HOST_FAILED, Path::new("/nonexistent")));
    }

    #[test]
    fn exit_codes_have_meanings() {
        let expected = [
            (124, "time limit reached"),
            (125, "the host failed"),
            (137, "signal: 9 (SIGKILL)"),
            (143, "signal: 15 (SIGTERM)"),
            (1, "exit code 1"),
            (128, "exit code 128"),
            (255, "exit code 255"),
        ];
        for (code, text) in expected {
            assert_eq!(meaning(code), text);
        }
    }
}
