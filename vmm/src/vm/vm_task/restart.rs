//! Restarts caused by the guest. Repeated restarts are delayed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use foreshore_devices::events::{Event, Events};
use foreshore_devices::log::rate_limited;
use foreshore_devices::metrics::{Expose, Exposition, Family};
use tokio::time::{Instant, sleep_until};

use super::{Flow, MachineEvent, MachineFactory, RunError, VmError, VmState, VmTask};
use crate::cpu::run::VcpuEvent;
use crate::vm::vm_task::state::{self, Restart, RestartGuard, Verb};

/// Counters of delayed restarts. The counters continue across restarts.
#[derive(Debug, Default)]
pub struct RestartMetrics {
    delayed: AtomicU64,
    delay_ms: AtomicU64,
}

impl RestartMetrics {
    /// Counts a restart that will be delayed by `delay`. A client may end the delay early.
    pub(crate) fn count(&self, delay: Duration) {
        self.delayed.fetch_add(1, Ordering::Relaxed);
        self.delay_ms.fetch_add(delay.as_millis() as u64, Ordering::Relaxed);
    }

    pub fn delayed(&self) -> u64 {
        self.delayed.load(Ordering::Relaxed)
    }

    pub fn delay(&self) -> Duration {
        Duration::from_millis(self.delay_ms.load(Ordering::Relaxed))
    }
}

impl Expose for RestartMetrics {
    fn expose(&self, out: &mut Exposition) {
        let delayed = Family("delayed_restarts", "Restarts of the guest that were delayed.", None);
        out.counters(delayed, [(vec![], self.delayed())]);
        out.seconds_total(
            "restart_delay",
            "Delays imposed on restarts of the guest; a client may end one early.",
            [(vec![], self.delay().as_secs_f64())],
        );
    }
}

/// Waits until the time of a restart, or forever if no restart is due.
pub(super) async fn due(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

impl<F: MachineFactory> VmTask<F> {
    /// Time of the delayed restart, if there is one. A pause postpones it.
    pub(super) fn restart_at(&self) -> Option<Instant> {
        self.vm.as_ref().filter(|vm| vm.state == VmState::Running).and_then(|vm| vm.restart_at)
    }

    /// Restarts a guest that has reset itself or has faulted, immediately or after a delay.
    pub(super) fn restart_by_guest(&mut self, event: MachineEvent) -> Flow {
        let vm = self.vm.as_mut().expect("a machine that sends events has a VM");
        let fault = match event {
            MachineEvent::Vcpu(event @ VcpuEvent::TripleFault { .. }) => Some(event),
            _ => None,
        };
        let delay = match (vm.restarts.decide(fault.is_some(), vm.started.elapsed()), fault) {
            (Restart::GiveUp, Some(event)) => {
                return Flow::End(Err(RunError::KeepsFaulting {
                    event,
                    count: RestartGuard::LIMIT,
                }));
            }
            (Restart::GiveUp, None) => unreachable!("only faults end a guest"),
            (Restart::After(delay), Some(event)) => {
                rate_limited!(warn, %event, ?delay, "The guest restarts itself");
                delay
            }
            (Restart::After(delay), None) => {
                rate_limited!(info, ?delay, "The guest restarts itself");
                delay
            }
        };
        if delay == Duration::ZERO {
            return self.restart();
        }
        self.restarts.count(delay);
        self.emitter.emit_of_guest(Event::RestartDelayed { delay_ms: delay.as_millis() as u64 });
        // Other vCPUs of the guest may still be running.
        if let Some(machine) = &mut vm.machine {
            tokio::task::spawn_blocking(machine.pause());
        }
        let waits_for_space = vm.pool_full_reason().is_some();
        (vm.restart_at, vm.full_pool) = (Some(Instant::now() + delay), None);
        // The restart does not wait for space. The guest remains stopped until the restart.
        if waits_for_space {
            self.resume_without_client();
        }
        Flow::Continue
    }

    /// Builds a new machine for a guest that has reset itself or has faulted.
    pub(super) fn restart(&mut self) -> Flow {
        match self.busily(|task| task.reboot(Events::emit_of_guest)) {
            Ok(()) => Flow::Continue,
            Err(err) => Flow::End(Err(RunError::Boot(err))),
        }
    }

    /// Ends the machine, and builds a new one from the current configuration. DRAM is requested
    /// with the same size as before. PM has been returned to its pool. `emit` emits the events, and
    /// limits their rate if the guest caused the reboot.
    pub(super) fn reboot(&mut self, emit: fn(&Events, Event<'_>)) -> Result<(), VmError> {
        let vm = self.vm()?;
        let next = state::next(vm.state, Verb::Reboot)?;
        self.pauses_over += 1;
        emit(&self.emitter, Event::VmRebooting);
        self.vm()?.machine = None;
        self.emitter.end_machine();
        let result = self.start();
        self.vm()?.state = if result.is_ok() { next } else { VmState::Created };
        match result {
            Ok(()) => emit(&self.emitter, Event::VmRebooted),
            Err(_) => self.has_shut_down(),
        }
        result
    }
}
