//! Controls which processes the OOM killer kills.

use anyhow::{Context, Result};

/// Value of oom_score_adj. When Linux selects a victim, it adds this many thousandths of all memory
/// to the size of a process. 1000 is the maximum.
const SCORE_ADJ: &str = "1000";

/// Makes this process, and processes that it starts, the first victims of the OOM killer. The
/// test's shell should survive to report the result of the load.
pub fn prefer_as_victim() -> Result<()> {
    std::fs::write("/proc/self/oom_score_adj", SCORE_ADJ).context("Cannot set oom_score_adj")
}

/// Exempts this process from the OOM killer. A process that fills memory on purpose would be the
/// first victim. Without its shell, a guest could not report which processes were killed.
pub fn exempt() -> Result<()> {
    std::fs::write("/proc/self/oom_score_adj", "-1000").context("Cannot set oom_score_adj")
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn children_of_a_preferred_victim_are_preferred() {
        // Runs in a separate process, because the test program itself must not become a victim.
        const CHILD: &str = "GUEST_TOOL_VOLUNTEERS";
        if std::env::var_os(CHILD).is_some() {
            prefer_as_victim().unwrap();
            let started = Command::new("cat").arg("/proc/self/oom_score_adj").output().unwrap();
            assert_eq!(started.stdout, b"1000\n");
            return;
        }
        let this = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "oom::tests::children_of_a_preferred_victim_are_preferred"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        // If no test has that name, libtest succeeds without running one.
        let has_run = String::from_utf8_lossy(&this.stdout).contains("1 passed");
        assert!(this.status.success() && has_run, "{this:?}");
    }
}
