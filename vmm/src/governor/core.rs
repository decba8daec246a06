//! Governor and its devices: reads the host, passes events to [`balloon::governor::Governor`], and
//! carries out the resulting requests.

#[cfg(test)]
mod agent_tests;
#[cfg(test)]
mod bounds_tests;
mod change;
mod notes;
mod show;

use std::fmt;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use balloon::governor::{
    Devices, Event, Governor, Onlining, Request, ResizeTarget, ResizeTargetError, StepNotes,
};
use balloon::policy::Policy;
use balloon::proto::{AgentMessage, Hello, Refusal, Settings};
use balloon::{Distances, HostView, TimeMs, ZoneId};
use foreshore_devices::metrics::LatencyHistogram;

pub use self::show::{ZoneQuery, ZoneResize, ZoneState};
use super::GovernorError;
use super::error::{AboveZones, DescriptorLack};
use super::metrics::GuestSoftwareHistory;
use super::record::{Recorder, Target};
use super::{BalloonSource, GovernedZone, GovernedZones, PoolFree, StorageSource, UnmanagedMemory};
use crate::config::{BALLOON_ZONE, FIXED_SIZE, PressureConfig};

/// Name of the call in error messages.
const CALL: &str = "vm.pressure";

/// Governor of one VM, with the devices that it sizes.
pub struct Core {
    pub(super) governor: Governor,
    devices: GovernedDevices,
    agent_bytes: Arc<AtomicU64>,
    report_to_plan: LatencyHistogram,
    report_to_online: LatencyHistogram,
    on_hello: Option<OnHello>,
    on_tick: Option<OnTick>,
    /// Software of the guest, according to the hellos of its agent.
    guest: GuestSoftwareHistory,
    recorder: Option<Recorder>,
}

/// Checks that all zones together have room for `floor` and for the size of policy `fixed`.
fn fit(policy: &Policy, floor_bytes: u64, most_bytes: u64) -> Result<(), AboveZones> {
    let reserved_bytes = match policy {
        Policy::Fixed(params) => params.size_bytes,
        _ => 0,
    };
    let sizes = [(FIXED_SIZE, reserved_bytes), ("floor", floor_bytes)];
    match sizes.into_iter().find(|(_, bytes)| *bytes > most_bytes) {
        Some((name, bytes)) => Err(AboveZones { name, bytes, most_bytes }),
        None => Ok(()),
    }
}

/// Callback for each hello message of an agent.
pub type OnHello = Box<dyn Fn(&Hello) + Send>;

/// Callback for each tick. It must not block, because the guest waits for this thread.
pub type OnTick = Box<dyn Fn(TimeMs) + Send>;

impl Core {
    /// Creates a governor for a guest that has just started. `config` must be valid.
    pub fn new(
        config: &PressureConfig,
        zones: Vec<GovernedZone>,
        boot_bytes: u64,
        pool_free: PoolFree,
        now: TimeMs,
    ) -> Result<Self, GovernorError> {
        let policy = config.policy(CALL)?;
        let rules = config.rules(CALL)?;
        let devices = GovernedDevices {
            zones: GovernedZones(zones.into()),
            balloon: None,
            boot_bytes,
            unmanaged: UnmanagedMemory::default(),
            pool_free,
            storage: None,
            distances: Distances::default(),
        };
        let host = devices.view();
        fit(&policy, rules.floor_bytes, host.region_bytes())?;
        let governor = Governor::new(policy, rules, config.paused, &host, now)?;
        Ok(Self {
            governor,
            devices,
            agent_bytes: Arc::default(),
            report_to_plan: LatencyHistogram::default(),
            report_to_online: LatencyHistogram::default(),
            on_hello: None,
            on_tick: None,
            guest: GuestSoftwareHistory::default(),
            recorder: None,
        })
    }

    pub fn with_distances(mut self, distances: Distances) -> Self {
        self.devices.distances = distances;
        self
    }

    /// Sets the source of the pool's free space for volumes.
    pub fn with_storage(mut self, storage: Option<StorageSource>) -> Self {
        self.devices.storage = storage;
        self
    }

    /// Sets the memory that the guest may use but the governor does not size.
    pub fn with_unmanaged(mut self, unmanaged: UnmanagedMemory) -> Self {
        self.devices.unmanaged = unmanaged;
        self
    }

    pub fn on_hello(mut self, listener: OnHello) -> Self {
        self.on_hello = Some(listener);
        self
    }

    pub fn on_tick(mut self, listener: OnTick) -> Self {
        self.on_tick = Some(listener);
        self
    }

    /// Sets the source of statistics about a guest without an agent.
    pub fn with_statistics(mut self, balloon: Arc<dyn BalloonSource>, onlining: Onlining) -> Self {
        self.devices.balloon = Some(balloon);
        self.governor.use_statistics(onlining);
        self
    }

    /// Starts a recording of reports, sizes and plans under the VM's name.
    pub fn record<W: Write + Send + 'static>(
        mut self,
        target: Target<W>,
        vm: &str,
        now: TimeMs,
    ) -> io::Result<Self> {
        self.recorder = Some(Recorder::start(target, vm, &self.devices.view(), now)?);
        Ok(self)
    }

    pub fn agent_connected(&mut self, now: TimeMs) {
        self.step(Event::AgentConnected, now);
    }

    pub fn agent_gone(&mut self, now: TimeMs) {
        self.step(Event::AgentDisconnected, now);
    }

    /// Settings that determine when the agent reports.
    pub fn settings(&self) -> Settings {
        self.governor.settings()
    }

    /// Returns true if the next tick is due earlier than usual.
    pub fn is_fast(&self) -> bool {
        self.governor.is_fast()
    }

    pub fn agent_bytes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.agent_bytes)
    }

    /// Handles a message of the agent, or the reason for refusing its line. Timestamps from the
    /// guest are compared with `boottime`, the sum of `now` and the time during which the host
    /// slept. `took` returns the time since the line arrived.
    pub fn message(
        &mut self,
        message: Result<AgentMessage, Refusal>,
        now: TimeMs,
        boottime: TimeMs,
        took: impl FnOnce() -> Duration,
    ) {
        let reports = self.governor.counters().reports;
        let observe = |core: &Self| {
            if core.governor.counters().reports > reports {
                core.report_to_plan.observe(took());
            }
        };
        self.run(Event::Message { message, boottime }, self.devices.view(), now, observe);
    }

    /// Handles a tick: the time that has passed, and changes of plugged sizes and statistics.
    pub fn tick(&mut self, now: TimeMs) {
        self.step(Event::Tick, now);
        if let Some(listener) = &self.on_tick {
            listener(now);
        }
    }

    /// Zones that the governor sizes. The zones also validate targets for [`Core::resize`] and
    /// [`Core::boot_with`].
    pub fn zones(&self) -> &GovernedZones {
        &self.devices.zones
    }

    /// Resizes a zone at a client's request, and pins it. Fails if the device has refused the
    /// guest's driver since the target was validated.
    pub fn resize(&mut self, target: ResizeTarget, now: TimeMs) -> Result<(), GovernorError> {
        let (zone, host) = (target.zone(), self.devices.view());
        if !target.has_driver(&host.zones[zone.0 as usize]) {
            let (id, reason) =
                (self.zones()[zone].id.clone(), ResizeTargetError::UnsupportedDriver);
            return Err(GovernorError::NotResizable { id, reason });
        }
        self.run(Event::Resize(target), host, now, |_| ());
        Ok(())
    }

    /// Sets the size that a zone has at boot. The policy may change the size later.
    pub fn boot_with(&mut self, target: ResizeTarget, now: TimeMs) {
        self.step(Event::BootSize(target), now);
    }

    /// Checks that the guest has room for the page descriptors of a new DIMM. The room is known
    /// from the last report. Without a report, the parameter `unreported` is used.
    pub fn check_dimm(&self, dimm_bytes: u64, now: TimeMs) -> Result<(), DescriptorLack> {
        self.check_room(dimm_bytes, &self.devices.view(), now)
    }

    /// Repeats the check for a DIMM, and reserves the room for its page descriptors, so that other
    /// memory cannot use it (rule 4 in docs/reference/policies.md).
    pub fn add_dimm(&mut self, dimm_bytes: u64, now: TimeMs) -> Result<(), DescriptorLack> {
        let host = self.devices.view();
        self.check_room(dimm_bytes, &host, now)?;
        self.run(Event::AddDimm(dimm_bytes), host, now, |_| ());
        Ok(())
    }

    fn check_room(
        &self,
        dimm_bytes: u64,
        host: &HostView,
        now: TimeMs,
    ) -> Result<(), DescriptorLack> {
        let most_bytes = self.governor.controller().describable_bytes(host, now);
        if dimm_bytes > most_bytes {
            return Err(DescriptorLack { dimm_bytes, most_bytes });
        }
        Ok(())
    }

    fn step(&mut self, event: Event, now: TimeMs) {
        self.run(event, self.devices.view(), now, |_| ());
    }

    /// Handles an event, and the events that its requests cause. All requests are made before
    /// `performed` is called and before notes are written. The guest waits for the requests, while
    /// a log reader may be slow. `host` is the current state of the host.
    fn run(&mut self, event: Event, host: HostView, now: TimeMs, performed: impl FnOnce(&Self)) {
        let steps = self.governor.run(event, host, &mut self.devices, now);
        performed(self);
        for StepNotes { notes, host } in steps {
            notes.into_iter().for_each(|note| self.write_down(note, &host, now));
        }
    }
}

/// Devices of a VM that the governor reads and resizes.
struct GovernedDevices {
    zones: GovernedZones,
    balloon: Option<Arc<dyn BalloonSource>>,
    boot_bytes: u64,
    unmanaged: UnmanagedMemory,
    pool_free: PoolFree,
    storage: Option<StorageSource>,
    distances: Distances,
}

impl GovernedDevices {
    /// Reads the state of the host, and the sizes of each zone once.
    fn view(&self) -> HostView {
        let balloon = self.zones.iter().position(|zone| zone.id == BALLOON_ZONE);
        HostView {
            zones: self.zones.sizes(),
            boot_bytes: self.boot_bytes.saturating_add(self.unmanaged.dimm_bytes()),
            mapped_bytes: self.unmanaged.mapped_bytes(),
            pool_free_bytes: (self.pool_free)(),
            storage: self.storage.as_ref().map(|storage| storage()),
            distances: self.distances.clone(),
            balloon: balloon.map(|at| ZoneId(at as u32)),
            balloon_state: self.balloon.as_ref().map(|balloon| balloon.state()),
        }
    }
}

impl Devices for GovernedDevices {
    fn perform(&mut self, requests: Vec<Request>) {
        let device = |zone: ZoneId| &self.zones[zone].device;
        for request in requests {
            match request {
                Request::Size(zone, size_bytes) => device(zone).request(size_bytes),
                Request::Step { zone, size_bytes, goal_bytes } => {
                    device(zone).request_step(size_bytes, goal_bytes);
                }
                Request::Remind(zone) => device(zone).remind(),
                Request::ReportHeld(zone) => device(zone).report_held(),
                Request::Statistics => {
                    self.balloon.iter().for_each(|balloon| balloon.request_statistics())
                }
            }
        }
    }

    fn host(&mut self) -> HostView {
        self.view()
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("governor", &self.governor).finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "core_tests.rs"]
mod tests;
