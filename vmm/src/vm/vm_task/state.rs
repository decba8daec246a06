//! Tables of permitted requests and of decisions about restarts, without side effects.

use std::time::Duration;

use crate::vm::request::{VmError, VmState};

/// Request that affects the whole VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    /// Start the VM, or resume it if it is paused, as in Cloud Hypervisor 52. Version 53 returns an
    /// error in the latter case.
    Boot,
    /// Stop the vCPUs, but keep the machine.
    Pause,
    /// Continue after a pause.
    Resume,
    /// End the machine, but keep its configuration.
    Shutdown,
    /// End the machine, and start a new one.
    Reboot,
    /// Any other call to a machine. A change takes effect in a paused guest on resume.
    Use(&'static str),
}

impl Verb {
    const fn call(self) -> &'static str {
        match self {
            Self::Boot => "vm.boot",
            Self::Pause => "vm.pause",
            Self::Resume => "vm.resume",
            Self::Shutdown => "vm.shutdown",
            Self::Reboot => "vm.reboot",
            Self::Use(call) => call,
        }
    }

    /// States in which the request is permitted, for the error text.
    const fn needs(self) -> &'static str {
        match self {
            Self::Boot => "not booted, or paused",
            Self::Resume => "paused",
            Self::Pause => "running",
            Self::Shutdown | Self::Reboot | Self::Use(_) => "running or paused",
        }
    }

    /// Calls that change `state` to one that permits the request, for the error text.
    const fn remedy(self, state: VmState) -> &'static str {
        match (self, state) {
            (_, VmState::Created) => "vm.boot boots it",
            (Self::Boot, VmState::Running) => "vm.reboot restarts it, and vm.shutdown ends it",
            (_, VmState::Running) => "vm.pause pauses it",
            (_, VmState::Paused) => "vm.resume resumes it",
        }
    }
}

/// Returns the error for a request that is not permitted in `state`.
pub(super) fn refusal(state: VmState, verb: Verb) -> VmError {
    VmError::WrongState {
        call: verb.call(),
        state,
        needs: verb.needs(),
        remedy: verb.remedy(state),
    }
}

/// Returns the state after `verb`. Fails if `verb` is not permitted in `state`.
pub(super) fn next(state: VmState, verb: Verb) -> Result<VmState, VmError> {
    use VmState::{Created, Paused, Running};
    match (verb, state) {
        (Verb::Boot, Created | Paused) | (Verb::Resume, Paused) => Ok(Running),
        (Verb::Pause, Running) => Ok(Paused),
        (Verb::Use(_), Running | Paused) => Ok(state),
        (Verb::Shutdown, Running | Paused) => Ok(Created),
        (Verb::Reboot, Running | Paused) => Ok(Running),
        _ => Err(refusal(state, verb)),
    }
}

/// Decision about a restart that the guest caused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Restart {
    /// Restart the guest after this delay.
    After(Duration),
    /// End the VM, after [`RestartGuard::LIMIT`] early faults in a row.
    GiveUp,
}

/// Limits how often a guest that keeps restarting causes a machine to be built. Restarts by reset
/// register, watchdog and triple fault are all counted. The first early restart is immediate,
/// because installers and firmware restart on purpose. Later restarts are delayed by 1, 2, 4 s and
/// so on. A guest that has run for a while restarts immediately.
#[derive(Debug, Default)]
pub(super) struct RestartGuard {
    early_restarts: u32,
    early_faults: u32,
}

impl RestartGuard {
    /// Number of early faults in a row that end the VM.
    pub(super) const LIMIT: u32 = 3;
    /// A restart counts as early within this time after the start.
    pub(super) const EARLY: Duration = Duration::from_secs(10);
    pub(super) const MAX_DELAY: Duration = Duration::from_secs(30);

    /// Decides about a restart at `uptime` after the start. Only triple faults can end the VM,
    /// because any other restart may be intentional.
    pub(super) fn decide(&mut self, is_fault: bool, uptime: Duration) -> Restart {
        let is_early = uptime <= Self::EARLY;
        self.early_faults = if is_early && is_fault { self.early_faults + 1 } else { 0 };
        self.early_restarts = if is_early { self.early_restarts.saturating_add(1) } else { 0 };
        if self.early_faults >= Self::LIMIT {
            return Restart::GiveUp;
        }
        let doublings = self.early_restarts.checked_sub(2);
        let delay_s =
            doublings.map_or(0, |doublings| 1_u64.checked_shl(doublings).unwrap_or(u64::MAX));
        Restart::After(Duration::from_secs(delay_s).min(Self::MAX_DELAY))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_verb_leads_to_its_state() {
        use VmState::{Created, Paused, Running};
        let table = [
            (Verb::Boot, [Some(Running), None, Some(Running)]),
            (Verb::Pause, [None, Some(Paused), None]),
            (Verb::Resume, [None, None, Some(Running)]),
            (Verb::Shutdown, [None, Some(Created), Some(Created)]),
            (Verb::Reboot, [None, Some(Running), Some(Running)]),
            (Verb::Use("vm.resize"), [None, Some(Running), Some(Paused)]),
        ];
        for (verb, expected) in table {
            for (state, expected) in [Created, Running, Paused].into_iter().zip(expected) {
                assert_eq!(next(state, verb).ok(), expected, "{verb:?} in {state:?}");
            }
        }
    }

    #[test]
    fn refusal_names_the_call_the_state_and_the_remedy() {
        let text = |state, verb| next(state, verb).unwrap_err().to_string();
        for (state, verb, expected) in [
            (
                VmState::Created,
                Verb::Pause,
                "vm.pause needs a VM that is running, but the VM is not booted; vm.boot boots it",
            ),
            (
                VmState::Created,
                Verb::Use("vm.resize-disk"),
                "vm.resize-disk needs a VM that is running or paused, but the VM is not booted; vm.boot boots it",
            ),
            (
                VmState::Running,
                Verb::Boot,
                "vm.boot needs a VM that is not booted, or paused, but the VM is running; vm.reboot restarts it, and vm.shutdown ends it",
            ),
            (
                VmState::Running,
                Verb::Resume,
                "vm.resume needs a VM that is paused, but the VM is running; vm.pause pauses it",
            ),
            (
                VmState::Paused,
                Verb::Pause,
                "vm.pause needs a VM that is running, but the VM is paused; vm.resume resumes it",
            ),
        ] {
            assert_eq!(text(state, verb), expected);
        }
    }

    const SOON: Duration = Duration::from_millis(50);
    const LATE: Duration = Duration::from_secs(60);

    #[test]
    fn restart_is_early_up_to_ten_seconds_after_the_start() {
        let last = RestartGuard::EARLY;
        let delay_s = |uptimes: [Duration; 2]| {
            let mut guard = RestartGuard::default();
            uptimes.map(|uptime| match guard.decide(false, uptime) {
                Restart::After(delay) => delay.as_secs(),
                Restart::GiveUp => panic!("a reset ends no guest"),
            })
        };
        assert_eq!(last.as_secs(), 10);
        assert_eq!(delay_s([last, last]), [0, 1]);
        let late = last + Duration::from_nanos(1);
        assert_eq!([delay_s([last, late]), delay_s([late, last])], [[0, 0]; 2]);
    }

    #[test]
    fn only_early_faults_in_a_row_end_the_vm() {
        let mut guard = RestartGuard::default();
        let mut gives_up = |uptime| guard.decide(true, uptime) == Restart::GiveUp;
        assert!([SOON, SOON, LATE, SOON, SOON].into_iter().all(|uptime| !gives_up(uptime)));
        assert!(gives_up(SOON));
    }

    #[test]
    fn delay_of_early_restarts_doubles_without_ending_the_vm() {
        let mut guard = RestartGuard::default();
        let mut delay_s = |uptime| match guard.decide(false, uptime) {
            Restart::After(delay) => delay.as_secs(),
            Restart::GiveUp => panic!("a guest may restart as often as it likes"),
        };
        let delays: Vec<_> = (0..9).map(|_| delay_s(SOON)).collect();
        assert_eq!(delays, [0, 1, 2, 4, 8, 16, 30, 30, 30]);
        assert!((0..1000).all(|_| delay_s(SOON) == 30));
        assert_eq!([LATE, SOON, SOON].map(delay_s), [0, 0, 1]);
    }

    #[test]
    fn resets_and_faults_both_count_as_restarts() {
        let mut guard = RestartGuard::default();
        for nth in 0..1000 {
            // A reset between two faults prevents the end of the VM, but does not shorten the
            // delay.
            let decision = guard.decide(nth % 3 != 0, SOON);
            assert!(
                matches!(decision, Restart::After(delay) if nth < 6 || delay == RestartGuard::MAX_DELAY)
            );
        }
    }
}
