//! Watches all memory of the guest, and pauses the VM if some of it is lost.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use foreshore_confinement::thread::ThreadKind;
use foreshore_devices::event_loop::EventLoop;
use foreshore_devices::log::rate_limited;
use foreshore_devices::memory::Memory;
use foreshore_devices::memory::backing::Reservation;
use foreshore_devices::memory::lost_memory::{LostMemory, RangeSource};
use foreshore_devices::memory::zone::Tier;
use vmm_sys_util::timerfd::TimerFd;

use crate::config::VmConfig;
use crate::vm::error::BuildError;
use crate::vm::numa_tables;
use crate::vm::resources::Resources;
use crate::vm::vm_task::{EventSender, MachineEvent};

/// Interval between checks of file lengths. If a file is truncated, vCPUs may access the lost
/// memory until the next check.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

const LOST: u32 = 0;
const LOOK: u32 = 1;

/// Adds all zones to the watched memory. A PM zone may use any part of its pool, so the whole pool
/// is watched.
pub(in crate::vm) fn watch_zones(
    config: &VmConfig,
    resources: &Resources,
    memory: &Memory,
    lost: &LostMemory,
) -> Result<(), BuildError> {
    for (zone, reservation) in memory.parts() {
        let source = numa_tables::source(zone, config);
        match (zone.tier, config.pm_memory.first()) {
            (Tier::Pm, Some(pm)) => {
                let pool = resources.pool(&pm.pool);
                let error = BuildError::device(source.to_string());
                lost.watch_file(source, reservation, pool.file(), pool.info().total_bytes)
                    .map_err(error)?;
            }
            _ => watch_dram(memory, reservation, source, lost)?,
        }
    }
    Ok(())
}

/// Adds a part of a DRAM zone to the watched memory. It may be mapped from a file, and files can be
/// truncated.
fn watch_dram(
    memory: &Memory,
    reservation: &Reservation,
    source: RangeSource,
    lost: &LostMemory,
) -> Result<(), BuildError> {
    let error = BuildError::device(source.to_string());
    match memory.file_of(reservation) {
        Some(file) => {
            let mapped_bytes =
                file.metadata().map_err(BuildError::device(source.to_string()))?.len();
            lost.watch_file(source, reservation, file.as_fd(), mapped_bytes)
                .map(drop)
                .map_err(error)
        }
        None => lost.watch(source, reservation).map_err(error),
    }
}

struct Watcher {
    memory: Arc<LostMemory>,
    /// Timer for the checks, if there are files to check.
    timer: Option<TimerFd>,
    events: EventSender,
    /// Most recent loss that the VM task was notified of.
    reported: Option<String>,
}

/// Pauses the VM when memory is lost, for as long as the returned loop exists. The loop has a
/// thread of its own, because any other thread may wait for the lost memory.
pub(in crate::vm) fn watch(
    memory: &Arc<LostMemory>,
    events: &EventSender,
) -> Result<EventLoop, BuildError> {
    let timer = if memory.has_files() { Some(timer()?) } else { None };
    let event_loop = EventLoop::spawn(ThreadKind::Memory, "_lost")?;
    let watcher =
        Watcher { memory: Arc::clone(memory), timer, events: events.clone(), reported: None };
    event_loop.handle().add(Box::new(watcher))?;
    Ok(event_loop)
}

fn timer() -> Result<TimerFd, BuildError> {
    let mut timer = TimerFd::new().map_err(BuildError::device("the timer of lost memory"))?;
    timer
        .reset(LOOK_INTERVAL, Some(LOOK_INTERVAL))
        .map_err(BuildError::device("the timer of lost memory"))?;
    Ok(timer)
}

impl MutEventSubscriber for Watcher {
    fn init(&mut self, ops: &mut EventOps) {
        let lost = Some(Events::with_data(self.memory.event(), LOST, EventSet::IN));
        let look = self.timer.as_ref().map(|timer| Events::with_data(timer, LOOK, EventSet::IN));
        for event in [lost, look].into_iter().flatten() {
            if let Err(err) = ops.add(event) {
                rate_limited!(
                    error,
                    ?err,
                    "Cannot watch the files of guest memory; if one is truncated, the guest may hang \
                     instead of being paused"
                );
            }
        }
    }

    fn process(&mut self, events: Events, _: &mut EventOps) {
        // Clears the event. The timer is ready, and the eventfd does not block.
        match (events.data(), &mut self.timer) {
            (LOOK, Some(timer)) => drop(timer.wait()),
            _ => drop(self.memory.event().read()),
        }
        // The call stops the guest by `EntryInhibitor` before the VM task is notified.
        let reason = self.memory.check_files();
        if let Some(reason) = &reason
            && self.reported.as_ref() != Some(reason)
        {
            self.events.send(MachineEvent::MustPause { reason: reason.clone() });
        }
        self.reported = reason;
    }
}
