//! Who dies when there is no memory left.

use anyhow::{Context, Result};

/// Linux adds so many thousandths of all memory to what a process has when it looks for the one to
/// kill: more there is not.
const SCORE_ADJ: &str = "1000";

/// Has the OOM killer take this process and those that it starts before anybody else: the shell
/// that a test speaks to has to live on and tell what became of the load.
pub fn volunteer() -> Result<()> {
    std::fs::write("/proc/self/oom_score_adj", SCORE_ADJ).context("Cannot set oom_score_adj")
}

/// Exempts this process from the OOM killer. A process that fills memory on purpose would be the
/// first victim, and without its shell a guest cannot report which processes were killed.
pub fn be_spared() -> Result<()> {
    std::fs::write("/proc/self/oom_score_adj", "-1000").context("Cannot set oom_score_adj")
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn what_a_volunteer_starts_is_one_too() {
        // In a process of its own: a test program is nobody's load.
        const CHILD: &str = "GUEST_TOOL_VOLUNTEERS";
        if std::env::var_os(CHILD).is_some() {
            volunteer().unwrap();
            let started = Command::new("cat").arg("/proc/self/oom_score_adj").output().unwrap();
            assert_eq!(started.stdout, b"1000\n");
            return;
        }
        let this = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "oom::tests::what_a_volunteer_starts_is_one_too"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        // libtest runs nothing, successfully, where no test has that name.
        let has_run = String::from_utf8_lossy(&this.stdout).contains("1 passed");
        assert!(this.status.success() && has_run, "{this:?}");
    }
}
