//! Which request is legal when, and what an end of the guest leads to: pure, one table each.

use std::time::Duration;

use super::request::{VmError, VmState};

/// What is asked of a VM as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Start it. One that is paused goes on, as in Cloud Hypervisor until 52.
    Boot,
    /// Stop its vCPUs, keep everything.
    Pause,
    /// Let them go on.
    Resume,
    /// End it, keep its configuration.
    Shutdown,
    /// End it and start it again.
    Reboot,
    /// Change it, or tell its guest something. A guest that stands still sees it when it goes on.
    Change,
}

impl Verb {
    const fn name(self) -> &'static str {
        match self {
            Self::Boot => "vm.boot",
            Self::Pause => "vm.pause",
            Self::Resume => "vm.resume",
            Self::Shutdown => "vm.shutdown",
            Self::Reboot => "vm.reboot",
            Self::Change => "a change",
        }
    }

    /// The states in which this may be asked, in words for the error.
    const fn needs(self) -> &'static str {
        match self {
            Self::Boot => "not booted, or paused",
            Self::Resume => "paused",
            Self::Pause => "running",
            Self::Shutdown | Self::Reboot | Self::Change => "running or paused",
        }
    }
}

/// The state that `verb` leads to from `state`, or why it may not be asked.
pub fn next(state: VmState, verb: Verb) -> Result<VmState, VmError> {
    use VmState::{Created, Paused, Running};
    match (verb, state) {
        (Verb::Boot, Created | Paused) | (Verb::Resume, Paused) => Ok(Running),
        (Verb::Pause, Running) => Ok(Paused),
        (Verb::Change, Running | Paused) => Ok(state),
        (Verb::Shutdown, Running | Paused) => Ok(Created),
        (Verb::Reboot, Running | Paused) => Ok(Running),
        _ => Err(VmError::WrongState { verb: verb.name(), state, needs: verb.needs() }),
    }
}

/// Keeps a guest that cannot even start from restarting for ever: a triple fault resets a machine, but after
/// so many in a row, each soon after its start, it is the payload that is broken.
#[derive(Debug, Default)]
pub struct RestartGuard {
    early_faults: u32,
}

impl RestartGuard {
    /// So many early faults in a row end the VM.
    pub const LIMIT: u32 = 3;
    /// A fault is early up to this time after the start.
    pub const EARLY: Duration = Duration::from_secs(10);

    /// Whether a guest that has faulted `uptime` after its start may be started again.
    pub fn may_restart(&mut self, uptime: Duration) -> bool {
        self.early_faults = if uptime <= Self::EARLY { self.early_faults + 1 } else { 0 };
        self.early_faults < Self::LIMIT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_transitions() {
        use VmState::{Created, Paused, Running};
        let table = [
            (Verb::Boot, [Some(Running), None, Some(Running)]),
            (Verb::Pause, [None, Some(Paused), None]),
            (Verb::Resume, [None, None, Some(Running)]),
            (Verb::Shutdown, [None, Some(Created), Some(Created)]),
            (Verb::Reboot, [None, Some(Running), Some(Running)]),
            (Verb::Change, [None, Some(Running), Some(Paused)]),
        ];
        for (verb, expected) in table {
            for (state, expected) in [Created, Running, Paused].into_iter().zip(expected) {
                assert_eq!(next(state, verb).ok(), expected, "{verb:?} in {state:?}");
            }
        }
    }

    #[test]
    fn a_refusal_says_what_would_be_needed() {
        let text = next(VmState::Created, Verb::Pause).unwrap_err().to_string();
        assert_eq!(text, "The VM is Created, and vm.pause needs it running");
    }

    #[test]
    fn only_early_faults_in_a_row_end_a_guest() {
        let mut guard = RestartGuard::default();
        let (early, late) = (Duration::from_secs(1), Duration::from_secs(60));
        assert!(guard.may_restart(early));
        assert!(guard.may_restart(early));
        assert!(guard.may_restart(late));
        assert!(guard.may_restart(early));
        assert!(guard.may_restart(early));
        assert!(!guard.may_restart(early));
    }
}
