//! Pause of a VM because a write of its guest found no space in a pool.
//!
//! The VM is resumed when the pool has space. A client may also resume it, or resize its memory.
//! The guest then runs for a while although the pool is full, because it must run to return memory
//! or to discard data. Meanwhile, the write still waits.

use std::time::Duration;

use foreshore_devices::log::rate_limited;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::{MachineFactory, Vm, VmTask};
use crate::vm::request::VmState;

/// Interval between checks whether the pool has space.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Time for which a resumed guest runs although the pool is full.
const RUN_TIME: Duration = Duration::from_secs(10);

/// Wait of a VM for space in a pool.
#[derive(Debug)]
pub(super) struct FullPool {
    reason: String,
    next_check: Instant,
    phase: Phase,
}

/// State of a VM that waits for space in a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The VM is paused until there is space.
    Paused,
    /// A client has paused the VM, so only the client resumes it.
    PausedByClient,
    /// The guest runs until this time, although the pool may be full.
    RunsUntil(Instant),
}

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Nothing,
    /// Resume the VM.
    Resume,
    /// Retry the waiting writes.
    Retry,
    /// Pause the VM again.
    Pause,
    /// No write waits any more.
    Finish,
}

impl FullPool {
    fn new(reason: String, now: Instant) -> Self {
        Self { reason, next_check: now + CHECK_INTERVAL, phase: Phase::Paused }
    }

    /// Records that the guest runs again, although the pool may be full.
    pub(super) fn run(&mut self, now: Instant) {
        self.next_check = now + CHECK_INTERVAL;
        self.phase = Phase::RunsUntil(now + RUN_TIME);
    }

    /// Records that a client has paused the VM.
    pub(super) fn pause_by_client(&mut self) {
        self.phase = Phase::PausedByClient;
    }

    /// Selects the next action. `has_space` is `None` if no write waits.
    fn check(&mut self, now: Instant, has_space: Option<bool>) -> Action {
        self.next_check = now + CHECK_INTERVAL;
        match (self.phase, has_space) {
            (Phase::PausedByClient, _) | (Phase::Paused, Some(false)) => Action::Nothing,
            (Phase::Paused, _) => Action::Resume,
            (Phase::RunsUntil(_), Some(true)) => Action::Retry,
            (Phase::RunsUntil(until), _) if now < until => Action::Nothing,
            (Phase::RunsUntil(_), Some(false)) => Action::Pause,
            (Phase::RunsUntil(_), None) => Action::Finish,
        }
    }
}

impl Vm {
    /// Returns the reason for the pause if the VM is paused because a pool is full.
    pub(super) fn pool_full_reason(&self) -> Option<String> {
        let full = self.full_pool.as_ref().filter(|full| full.phase == Phase::Paused)?;
        Some(full.reason.clone())
    }
}

impl<F: MachineFactory> VmTask<F> {
    pub(super) fn full_pool_check_at(&self) -> Option<Instant> {
        let full = self.vm.as_ref()?.full_pool.as_ref()?;
        (full.phase != Phase::PausedByClient).then_some(full.next_check)
    }

    /// Pauses the running VM, unless a client has just resumed it. A guest that is about to restart
    /// is already stopped, and its writes end with its machine. In a pause by a client, only
    /// records that a write waits, so that the guest has time to make space after the pause.
    pub(super) fn wait_for_space(&mut self, reason: String) {
        let Some(vm) = &mut self.vm else { return };
        if vm.full_pool.is_some() || vm.restart_at.is_some() {
            return;
        }
        let full = FullPool::new(reason, Instant::now());
        if vm.state == VmState::Paused {
            vm.full_pool.insert(full).pause_by_client();
            return;
        }
        rate_limited!(warn, reason = %full.reason, "The VM is paused until the pool has space");
        self.pause(oneshot::channel().0);
        if let Some(vm) = &mut self.vm {
            vm.full_pool = Some(full);
        }
    }

    pub(super) fn check_full_pool(&mut self) {
        let Some(Vm { machine: Some(machine), full_pool: Some(full), .. }) = &mut self.vm else {
            return;
        };
        match full.check(Instant::now(), machine.has_space_for_waiting()) {
            Action::Nothing => {}
            Action::Retry => machine.retry_writes(),
            Action::Pause => {
                let reason = std::mem::take(&mut full.reason);
                self.forget_full_pool();
                self.wait_for_space(reason);
            }
            Action::Finish => self.forget_full_pool(),
            Action::Resume => {
                self.forget_full_pool();
                rate_limited!(info, "The pool has space, so the VM is resumed");
                self.resume_without_client();
            }
        }
    }

    /// Resumes the VM although no client has requested it.
    pub(super) fn resume_without_client(&mut self) {
        if let Err(err) = self.resume() {
            rate_limited!(warn, %err, "Cannot resume the VM");
        }
    }

    fn forget_full_pool(&mut self) {
        self.vm.iter_mut().for_each(|vm| vm.full_pool = None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paused_vm_is_resumed_when_there_is_space() {
        let now = Instant::now();
        let mut full = FullPool::new(String::new(), now);
        assert_eq!(full.check(now, Some(false)), Action::Nothing);
        assert_eq!(full.next_check, now + CHECK_INTERVAL);
        assert_eq!(full.check(now + 1000 * RUN_TIME, Some(false)), Action::Nothing);
        assert_eq!(full.check(now, Some(true)), Action::Resume);
        assert_eq!(full.check(now, None), Action::Resume, "a reset has dropped the writes");
    }

    #[test]
    fn resumed_guest_runs_for_a_while_although_the_pool_is_full() {
        let now = Instant::now();
        let mut full = FullPool::new(String::new(), now);
        full.run(now);
        let end = now + RUN_TIME;
        let before = end - Duration::from_millis(1);
        assert_eq!(full.check(before, Some(false)), Action::Nothing);
        assert_eq!(full.check(before, Some(true)), Action::Retry);
        assert_eq!(full.check(before, None), Action::Nothing, "the next write may find no space");
        assert_eq!(full.check(end, Some(true)), Action::Retry);
        assert_eq!(full.check(end, Some(false)), Action::Pause);
        assert_eq!(full.check(end, None), Action::Finish);
    }

    #[test]
    fn only_a_client_ends_its_pause() {
        let now = Instant::now();
        let mut full = FullPool::new(String::new(), now);
        full.run(now);
        full.pause_by_client();
        for has_space in [None, Some(false), Some(true)] {
            assert_eq!(full.check(now + 1000 * RUN_TIME, has_space), Action::Nothing);
        }
    }
}
