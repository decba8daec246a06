//! Task that owns the VM. The task takes requests and events from queues and handles them one at a
//! time, so the VM needs no locks.
//!
//! ```text
//!  API, signals ──► VmRequest ──┐
//!                               ├──► VmTask ──► Machine (built, started, paused, dropped)
//!  vCPUs, devices ► MachineEvent┘
//! ```

pub(super) mod cached_value;
mod full_pool;
mod machine;
mod restart;
mod state;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use foreshore_devices::events::{Event, Events};
use foreshore_devices::volume::interface::at_run_time;
use thiserror::Error;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{error, info};

use self::full_pool::FullPool;
pub use self::machine::{DeviceHotplug, Machine, MachineFactory, MachineResize};
pub use self::restart::RestartMetrics;
use self::state::{RestartGuard, Verb};
use crate::config::{AtGuestShutdown, DeviceConfig, VmConfig};
use crate::cpu::run::VcpuEvent;
use crate::governor::info::PressureChange;
use crate::vm::named_twice;
use crate::vm::request::{
    BusyVm, PciDeviceInfo, Reply, Requests, Resize, ResizeDiskRequest, ResizeRequest, VmError,
    VmInfo, VmRequest, VmState, VmStatus, check_vcpus,
};
use crate::vm::resize_plan::ResizePlan;
use crate::vm::resources::taps;

/// Blocks until all parts of a machine have stopped, or the machine has been resumed or dropped.
pub type Standstill = Box<dyn FnOnce() + Send>;

/// Event from a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MachineEvent {
    /// The guest powered itself off (ACPI sleep state S5).
    GuestShutdown,
    /// The guest requested a reset (ACPI reset register).
    GuestReset,
    /// A vCPU cannot continue.
    Vcpu(VcpuEvent),
    /// The guest has ejected the device in a PCI slot.
    Ejected { slot: u8 },
    /// The guest has ejected a vCPU.
    VcpuEjected { index: u8 },
    /// A failure occurred that cannot be reported to the guest, so the VM must be paused.
    MustPause { reason: String },
    /// A write waits for space in a pool, so the VM must be paused until the pool has space.
    PoolFull { reason: String },
}

impl MachineEvent {
    /// Returns true if the guest has ended in a way that leads to a restart or a shutdown. Other
    /// vCPU events end the VMM with an error.
    const fn ends_the_guest(&self) -> bool {
        matches!(
            self,
            Self::GuestShutdown | Self::GuestReset | Self::Vcpu(VcpuEvent::TripleFault { .. })
        )
    }
}

/// Sends the events of one machine to the VM task. Events from a machine that has been replaced are
/// dropped.
#[derive(Clone, Debug)]
pub struct EventSender {
    generation: u64,
    events: mpsc::UnboundedSender<(u64, MachineEvent)>,
    /// True once the guest has powered itself off or requested a reset.
    has_ended: Arc<AtomicBool>,
    /// True while the VM task has not yet handled a `PoolFull` of this machine.
    is_pool_full_sent: Arc<AtomicBool>,
}

impl EventSender {
    fn new(generation: u64, events: mpsc::UnboundedSender<(u64, MachineEvent)>) -> Self {
        Self { generation, events, has_ended: Arc::default(), is_pool_full_sent: Arc::default() }
    }

    /// Sender that drops its events.
    #[cfg(test)]
    pub(crate) fn to_nobody() -> Self {
        Self::new(0, mpsc::unbounded_channel().0)
    }

    /// Sends `event` to the VM task without blocking. Any thread may call it.
    ///
    /// The queue of a busy VM task cannot grow without bound, because a guest can cause only the
    /// following events:
    /// - Only the first power-off or reset of each machine is sent, because it ends the machine. A
    ///   register or the watchdog can cause it.
    /// - A vCPU that has sent an event waits until the VM task resumes or ends it.
    /// - Each ejection follows exactly one request of the VM task (`PciSlots`, `Plug`).
    /// - The sender of `MustPause` has already stopped the vCPUs by the inhibitor, so each vCPU
    ///   sends at most the events of its current exit.
    /// - At most one `PoolFull` of each machine is in the queue.
    pub fn send(&self, event: MachineEvent) {
        let is_end = matches!(event, MachineEvent::GuestShutdown | MachineEvent::GuestReset);
        if is_end && self.has_ended.swap(true, Ordering::Relaxed) {
            return;
        }
        let is_pool_full = matches!(event, MachineEvent::PoolFull { .. });
        if is_pool_full && self.is_pool_full_sent.swap(true, Ordering::AcqRel) {
            return;
        }
        // An error means that the VM task has already ended.
        let _ = self.events.send((self.generation, event));
    }
}

/// Failure that ends the VMM.
#[derive(Debug, Error)]
pub enum RunError {
    #[error("cannot boot the VM")]
    Boot(#[source] VmError),
    #[error("the VM has ended: {0}")]
    Vm(VcpuEvent),
    #[error("the VM has ended: {event}, {count} times in a row soon after its start")]
    KeepsFaulting {
        event: VcpuEvent,
        /// Number of faults in a row.
        count: u32,
    },
}

enum Flow {
    Continue,
    End(Result<(), RunError>),
}

/// Configuration of a VM, and its machine if there is one.
struct Vm {
    config: VmConfig,
    state: VmState,
    machine: Option<Box<dyn Machine>>,
    started: Instant,
    /// `started` as wall-clock time.
    started_at: SystemTime,
    restarts: RestartGuard,
    /// Time of the delayed restart, after the guest has reset itself or a vCPU has faulted.
    restart_at: Option<Instant>,
    /// Reason for a pause after a failure. The machine must not be resumed.
    failure: Option<String>,
    /// Wait for space in a pool.
    full_pool: Option<FullPool>,
    /// Power-off or reset by the guest during a pause. It takes effect on resume.
    kept: Option<MachineEvent>,
}

impl Vm {
    fn new(mut config: VmConfig) -> Self {
        config.address_devices(taps::draw_address);
        Self {
            config,
            state: VmState::Created,
            machine: None,
            started: Instant::now(),
            started_at: SystemTime::now(),
            restarts: RestartGuard::default(),
            restart_at: None,
            failure: None,
            full_pool: None,
            kept: None,
        }
    }

    /// Returns the machine for `call`.
    fn running(&mut self, call: &'static str) -> Result<&mut Box<dyn Machine>, VmError> {
        let refusal = state::refusal(self.state, Verb::Use(call));
        self.machine.as_mut().ok_or(refusal)
    }

    fn pause(&mut self) -> Result<Standstill, VmError> {
        // A client may pause a VM that waits for space, so that it is not resumed without the
        // client.
        let next = match self.pool_full_reason() {
            Some(_) => VmState::Paused,
            None => state::next(self.state, Verb::Pause)?,
        };
        let standstill = self.running("vm.pause")?.pause();
        self.state = next;
        self.full_pool.iter_mut().for_each(FullPool::pause_by_client);
        Ok(standstill)
    }

    /// Checks that the VM may be resumed. A VM must not be resumed after a failed flush, because
    /// data is lost. The kernel reports a failed write of a page once, and then drops the page. The
    /// flush cannot be retried.
    fn may_resume(&self) -> Result<VmState, VmError> {
        let next = state::next(self.state, Verb::Resume)?;
        match &self.failure {
            Some(reason) => Err(VmError::CannotResume { reason: reason.clone() }),
            None => Ok(next),
        }
    }

    fn resume(&mut self) -> Result<(), VmError> {
        let next = self.may_resume()?;
        // A guest with a delayed restart remains stopped until the restart.
        if self.restart_at.is_none() {
            self.running("vm.resume")?.resume();
        }
        self.state = next;
        Ok(())
    }

    fn shut_down(&mut self) -> Result<(), VmError> {
        let next = state::next(self.state, Verb::Shutdown)?;
        self.machine = None;
        (self.failure, self.kept, self.restart_at) = (None, None, None);
        self.full_pool = None;
        // The client may have fixed the cause of the restarts.
        self.restarts = RestartGuard::default();
        self.state = next;
        Ok(())
    }

    fn press_power_button(&mut self) -> Result<(), VmError> {
        self.running("vm.power-button").map(|machine| machine.press_power_button())
    }

    fn send_nmi(&mut self) -> Result<(), VmError> {
        self.running("vm.nmi").map(|machine| machine.send_nmi())
    }

    fn status(&self) -> VmStatus {
        let started = self.machine.as_ref().map(|_| self.started_at);
        VmStatus { state: self.state, started }
    }

    fn info(&self) -> VmInfo {
        let mut info = VmInfo {
            config: self.config.clone(),
            state: self.state,
            memory_actual_size: self.config.memory.boot_bytes(),
            pause_reason: self.failure.clone().or_else(|| self.pool_full_reason()),
            balloon: None,
            guest_kernel: None,
            device_tree: None,
        };
        self.machine.iter().for_each(|machine| machine.complete(&mut info));
        info
    }

    /// Changes the governor, and stores the settings for the machine that the next reboot builds.
    fn change_pressure(&mut self, change: &PressureChange) -> Result<(), VmError> {
        self.running("vm.pressure")?.change_pressure(change)?;
        let before = self.config.governing();
        let mut pressure = before.clone();
        change.apply(&mut pressure);
        // If a change has no effect, the section is not added to the configuration.
        if pressure != before {
            self.config.pressure = Some(pressure);
        }
        Ok(())
    }

    /// Checks a resize of the machine as a whole, before the first step.
    fn plan_resize(&mut self, resize: &Resize) -> Result<ResizePlan, VmError> {
        state::next(self.state, Verb::Use(resize.call()))?;
        if let Resize::Vm(ResizeRequest { desired_vcpus: Some(desired), .. }) = resize {
            check_vcpus(*desired, &self.config)?;
        }
        let plan = self.running(resize.call())?.plan_resize(resize)?;
        self.check_next_boot(resize, &plan)?;
        Ok(plan)
    }

    /// Resizes the machine. Each step is immediately stored for the next boot, without waiting for
    /// the guest. It remains stored even if a later step fails.
    fn carry_out(&mut self, plan: ResizePlan) -> Result<(), VmError> {
        for step in plan {
            let next_boot = step.next_boot().clone();
            self.running("vm.resize")?.resize(step)?;
            next_boot.store(&mut self.config);
        }
        Ok(())
    }

    /// Refuses a resize that would prevent the VM from booting. All parts are checked together,
    /// because they depend on each other. A balloon that fits now may be too large for the next
    /// boot memory, unless the same call deflates it.
    fn check_next_boot(&self, resize: &Resize, plan: &ResizePlan) -> Result<(), VmError> {
        let mut config = self.config.clone();
        plan.store(&mut config);
        config.validate().map_err(|error| VmError::BadRequest(format!("{resize}: {error}")))
    }

    /// Resizes a disk. The next boot expects the stored size of a volume, because a growth can fail
    /// after the volume has grown.
    fn resize_disk(&mut self, resize: &ResizeDiskRequest) -> Result<(), VmError> {
        let machine = self.running("vm.resize-disk")?;
        let result = machine.resize_disk(resize);
        if let Some((key, size_bytes)) = machine.stored_volume(&resize.id) {
            let volumes = self.config.pm_volumes.iter_mut().filter(|volume| volume.is(&key));
            volumes.for_each(|volume| volume.has_grown(size_bytes));
        }
        result
    }

    /// Adds a device to the configuration for the next boot, and to the machine if there is one.
    fn add_device(&mut self, device: DeviceConfig) -> Result<Option<PciDeviceInfo>, VmError> {
        let device = match device {
            DeviceConfig::Volume(volume) if self.machine.is_some() => {
                let volume = at_run_time(volume);
                DeviceConfig::Volume(volume.map_err(|err| VmError::BadRequest(err.to_string()))?)
            }
            device => device,
        };
        let mut config = self.config.clone();
        let in_use = self.machine.as_ref().map_or_else(Vec::new, |machine| machine.devices());
        let in_use: Vec<_> = in_use.into_iter().map(|device| device.id).collect();
        let id = named_twice::add_device(&mut config, device, &in_use)?;
        config.address_devices(taps::draw_address);
        let info = match &mut self.machine {
            Some(machine) => {
                let device = config.device(&id).expect("the device that was added");
                Some(machine.add_device(&id, &device)?)
            }
            None => None,
        };
        self.config = config;
        Ok(info)
    }

    /// Requests the removal of a device. It is removed from the configuration immediately, although
    /// the guest may release it later.
    fn remove_device(&mut self, id: &str) -> Result<(), VmError> {
        if let Some(machine) = &mut self.machine {
            let volume = machine.volume_of(id);
            machine.remove_device(id)?;
            match volume {
                // The configuration may not contain the interface that the volume has.
                Some(key) => self.config.pm_volumes.retain(|volume| !volume.is(&key)),
                None => drop(self.config.remove_device(id)),
            }
            return Ok(());
        }
        match self.config.remove_device(id) {
            true => Ok(()),
            false => Err(VmError::NoSuchDevice { id: id.to_owned() }),
        }
    }

    /// Changes the configuration if the result is valid. Errors about an invalid result begin with
    /// `request`.
    fn reconfigure(
        &mut self,
        request: impl fmt::Display,
        change: impl FnOnce(&mut VmConfig) -> Result<(), VmError>,
    ) -> Result<(), VmError> {
        let mut config = self.config.clone();
        change(&mut config)?;
        config.validate().map_err(|error| VmError::BadRequest(format!("{request}: {error}")))?;
        self.config = config;
        Ok(())
    }
}

/// Task that owns a VM. The task starts without a VM.
pub struct VmTask<F> {
    factory: F,
    vm: Option<Vm>,
    at_guest_shutdown: AtGuestShutdown,
    emitter: Events,
    restarts: Arc<RestartMetrics>,
    generation: u64,
    events: mpsc::UnboundedReceiver<(u64, MachineEvent)>,
    sender: mpsc::UnboundedSender<(u64, MachineEvent)>,
    /// Flag of the current machine's [`EventSender`].
    is_pool_full_sent: Arc<AtomicBool>,
    /// Number of resumes, reboots, shutdowns and deletions so far. If this number changes during a
    /// pause, the pause is obsolete.
    pauses_over: u64,
    /// Pauses in progress, each with the value of `pauses_over` at its start, and its reply.
    pauses: JoinSet<(u64, Reply<()>)>,
    /// State of the VM while this task is busy, for answers to `vm.info` and to scrapes of the
    /// metrics.
    busy: watch::Sender<Option<BusyVm>>,
}

impl<F: MachineFactory> VmTask<F> {
    /// Creates a VM task without a VM. It emits events to `events`, and counts delayed restarts in
    /// `restarts`.
    pub fn new(
        factory: F,
        at_guest_shutdown: AtGuestShutdown,
        emitter: Events,
        restarts: Arc<RestartMetrics>,
    ) -> Self {
        let (sender, events) = mpsc::unbounded_channel();
        let (busy, pauses) = (watch::channel(None).0, JoinSet::new());
        let (vm, generation, pauses_over) = (None, 0, 0);
        Self {
            factory,
            vm,
            at_guest_shutdown,
            emitter,
            restarts,
            generation,
            events,
            sender,
            is_pool_full_sent: Arc::default(),
            pauses_over,
            pauses,
            busy,
        }
    }

    /// Boots the VM of `config` if there is one, and then serves requests until the VMM ends.
    pub async fn run(
        mut self,
        config: Option<VmConfig>,
        mut requests: Requests,
    ) -> Result<(), RunError> {
        self.busy = requests.busy();
        if let Some(config) = config {
            self.create(config).and_then(|()| self.busily(Self::boot)).map_err(RunError::Boot)?;
        }
        loop {
            // Events are handled before requests, so that no answer contains an outdated state.
            let (restart_at, check_at) = (self.restart_at(), self.full_pool_check_at());
            let flow = tokio::select! {
                biased;
                Some(event) = self.events.recv() => self.handle_event(event),
                Some(ended) = self.pauses.join_next() => {
                    // After a panic in the task, its reply is dropped, which informs the waiting
                    // client.
                    let _ = ended.map(|(since, reply)| self.stands_still(since, reply));
                    Flow::Continue
                }
                () = restart::due(restart_at) => self.restart(),
                () = restart::due(check_at) => {
                    self.check_full_pool();
                    Flow::Continue
                }
                request = requests.recv() => match request {
                    Some(request) => self.serve(request),
                    None => Flow::End(Ok(())),
                },
            };
            if let Flow::End(result) = flow {
                return result;
            }
        }
    }

    /// Runs work that may block: building or ending a machine, or waiting for memory, a file or a
    /// removed device. `vm.info` and scrapes are answered in the meantime.
    fn busily<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let busy = |vm: &Vm| BusyVm { info: vm.info(), status: vm.status() };
        self.busy.send_replace(self.vm.as_ref().map(busy));
        let result = work(self);
        self.busy.send_replace(None);
        result
    }

    fn vm(&mut self) -> Result<&mut Vm, VmError> {
        self.vm.as_mut().ok_or(VmError::NotCreated)
    }

    fn create(&mut self, config: VmConfig) -> Result<(), VmError> {
        if self.vm.is_some() {
            return Err(VmError::AlreadyCreated);
        }
        self.vm = Some(Vm::new(config));
        // Cloud Hypervisor has no event for the creation of a VM.
        info!("The VM is created");
        Ok(())
    }

    /// Ends the VM in any state, and closes its files, so that the next VM does not inherit them.
    /// Has no effect without a VM.
    fn delete(&mut self) {
        let Some(vm) = self.vm.take() else { return };
        let ran = vm.machine.is_some();
        self.pauses_over += 1;
        drop(vm);
        self.factory.release();
        if ran {
            self.emitter.end_machine();
            self.emitter.emit(Event::VmShutdown);
        }
        self.emitter.emit(Event::VmDeleted);
    }

    fn boot(&mut self) -> Result<(), VmError> {
        let state = self.vm()?.state;
        let next = state::next(state, Verb::Boot)?;
        if state == VmState::Paused {
            return self.resume();
        }
        self.emitter.emit(Event::VmBooting);
        self.start()?;
        self.vm()?.state = next;
        self.emitter.emit(Event::VmBooted);
        Ok(())
    }

    fn resume(&mut self) -> Result<(), VmError> {
        let emitter = self.emitter.clone();
        let vm = self.vm()?;
        vm.may_resume()?;
        vm.full_pool.iter_mut().for_each(|full| full.run(Instant::now()));
        self.pauses_over += 1;
        emitter.emit(Event::VmResuming);
        let vm = self.vm()?;
        vm.resume()?;
        emitter.emit(Event::VmResumed);
        if let Some(event) = vm.kept.take() {
            // The event is handled before the next request. Sending it cannot fail, because this
            // task holds the receiver.
            let _ = self.sender.send((self.generation, event));
        }
        Ok(())
    }

    fn shut_down(&mut self) -> Result<(), VmError> {
        self.vm()?.shut_down()?;
        self.pauses_over += 1;
        self.has_shut_down();
        Ok(())
    }

    /// Emits the events after a shutdown that does not delete the VM.
    fn has_shut_down(&mut self) {
        self.emitter.end_machine();
        self.emitter.emit(Event::VmShutdown);
    }

    /// Resizes the machine. Without a machine, changes the configuration, and the size takes effect
    /// at the next boot. Emits events only if the request has passed all checks.
    fn resize(&mut self, resize: &Resize) -> Result<(), VmError> {
        let emitter = self.emitter.clone();
        let vm = self.vm()?;
        if vm.machine.is_none() {
            return vm.reconfigure(resize, |config| resize.apply(config));
        }
        let plan = vm.plan_resize(resize)?;
        emitter.emit(Event::VmResizing);
        vm.carry_out(plan)?;
        emitter.emit(Event::VmResized);
        // Only a running guest can return the memory that the pool lacks.
        if vm.pool_full_reason().is_some() { self.resume() } else { Ok(()) }
    }

    fn add_device(&mut self, device: DeviceConfig) -> Result<Option<PciDeviceInfo>, VmError> {
        self.vm()?;
        self.factory.check(&device)?;
        self.vm()?.add_device(device)
    }

    fn remove_device(&mut self, id: &str) -> Result<(), VmError> {
        let vm = self.vm.as_mut().ok_or(VmError::NotCreated)?;
        vm.remove_device(id)?;
        if vm.machine.is_none() {
            self.factory.keep(&vm.config);
        }
        Ok(())
    }

    /// Pauses the VM. [`VmTask::stands_still`] answers the request when all parts have stopped.
    fn pause(&mut self, reply: Reply<()>) {
        match self.vm().and_then(Vm::pause) {
            Ok(standstill) => {
                self.emitter.emit(Event::VmPausing);
                let since = self.pauses_over;
                // The wait runs on another thread, because a device may wait for a disk.
                self.pauses.spawn_blocking(move || {
                    standstill();
                    (since, reply)
                });
            }
            Err(err) => answer(reply, Err(err)),
        }
    }

    /// Completes a pause after all parts have stopped. If the VM was resumed or ended in the
    /// meantime, the pause is refused and no event is emitted. This runs in the VM task instead of
    /// on the waiting thread, so that nothing can happen between the check and the answer.
    fn stands_still(&mut self, since: u64, reply: Reply<()>) {
        if since == self.pauses_over {
            self.emitter.emit(Event::VmPaused);
            return answer(reply, Ok(()));
        }
        answer(reply, self.vm().and_then(|vm| Err(VmError::PauseEnded { state: vm.state })));
    }

    fn start(&mut self) -> Result<(), VmError> {
        self.generation += 1;
        let events = EventSender::new(self.generation, self.sender.clone());
        self.is_pool_full_sent = Arc::clone(&events.is_pool_full_sent);
        let vm = self.vm.as_mut().ok_or(VmError::NotCreated)?;
        (vm.failure, vm.kept, vm.restart_at) = (None, None, None);
        vm.full_pool = None;
        vm.config.name_devices();
        let built = self.factory.build(&vm.config, events);
        let mut machine = built.inspect_err(|error| {
            self.emitter.emit(Event::BootFailed { reason: &error.to_string() });
        })?;
        machine.resume();
        vm.machine = Some(machine);
        (vm.started, vm.started_at) = (Instant::now(), SystemTime::now());
        Ok(())
    }

    fn handle_event(&mut self, (generation, event): (u64, MachineEvent)) -> Flow {
        let is_now = generation == self.generation;
        let Some(vm) = self.vm.as_mut().filter(|vm| is_now && vm.machine.is_some()) else {
            return Flow::Continue;
        };
        // After a pause, the guest may still be ended by an exit in progress or by the watchdog.
        // The answer to the client reported that the guest is stopped, so the VM remains paused. In
        // a pause without a client, the end is handled now, because it ends the wait for space.
        let is_paused = vm.state == VmState::Paused && vm.pool_full_reason().is_none();
        if is_paused && event.ends_the_guest() {
            info!(?event, "The guest has ended during a pause; this is handled at resume");
            vm.kept.get_or_insert(event);
            return Flow::Continue;
        }
        if vm.restart_at.is_some() && event.ends_the_guest() {
            return Flow::Continue;
        }
        match event {
            MachineEvent::GuestShutdown => {
                info!("The guest has powered off");
                match self.at_guest_shutdown {
                    AtGuestShutdown::End => {
                        self.busily(Self::delete);
                        Flow::End(Ok(()))
                    }
                    AtGuestShutdown::Stay => {
                        self.busily(Self::shut_down).expect("a VM with a machine can be shut down");
                        Flow::Continue
                    }
                }
            }
            event @ (MachineEvent::GuestReset
            | MachineEvent::Vcpu(VcpuEvent::TripleFault { .. })) => self.restart_by_guest(event),
            MachineEvent::Vcpu(event) => Flow::End(Err(RunError::Vm(event))),
            MachineEvent::Ejected { slot } => {
                vm.machine.iter_mut().for_each(|machine| machine.ejected(slot));
                Flow::Continue
            }
            MachineEvent::VcpuEjected { index } => {
                vm.machine.iter_mut().for_each(|machine| machine.vcpu_ejected(index));
                Flow::Continue
            }
            MachineEvent::PoolFull { reason } => {
                // Cleared first, so that a write that finds no space from now on is not missed.
                self.is_pool_full_sent.store(false, Ordering::Release);
                self.wait_for_space(reason);
                Flow::Continue
            }
            MachineEvent::MustPause { reason } => {
                error!(
                    %reason,
                    "The VM is paused and cannot be resumed; reboot it or shut it down"
                );
                self.emitter.emit(Event::Failed { reason: &reason });
                // The machine is paused even if the VM is already paused, because the vCPU that
                // sent this event has set the inhibitor again.
                if let Some(machine) = &mut vm.machine {
                    tokio::task::spawn_blocking(machine.pause());
                    vm.state = VmState::Paused;
                    vm.failure.get_or_insert(reason);
                    vm.full_pool = None;
                }
                Flow::Continue
            }
        }
    }

    fn serve(&mut self, request: VmRequest) -> Flow {
        match request {
            VmRequest::Create(config, reply) => answer(reply, self.create(*config)),
            VmRequest::Delete(reply) => {
                self.busily(Self::delete);
                answer(reply, Ok(()));
            }
            VmRequest::Info(reply) => self.of_vm(reply, |vm| Ok(vm.info())),
            VmRequest::Status(reply) => self.of_vm(reply, |vm| Ok(vm.status())),
            VmRequest::Resize(resize, reply) => {
                answer(reply, self.busily(|task| task.resize(&resize)));
            }
            VmRequest::ResizeDisk(resize, reply) => {
                answer(reply, self.busily(|task| task.vm()?.resize_disk(&resize)));
            }
            VmRequest::GrowPool(growth, reply) => {
                match self.vm().and_then(|vm| vm.running("pool.grow")) {
                    Ok(machine) => machine.grow_pool(growth, reply),
                    Err(err) => answer(reply, Err(err)),
                }
            }
            VmRequest::AddDevice(device, reply) => {
                answer(reply, self.busily(|task| task.add_device(*device)));
            }
            VmRequest::RemoveDevice(id, reply) => answer(reply, self.remove_device(&id)),
            VmRequest::Memory(reply) => match self.vm().and_then(|vm| vm.running("vm.memory")) {
                Ok(machine) => machine.zones(reply),
                Err(err) => answer(reply, Err(err)),
            },
            VmRequest::Counters(reply) => {
                self.of_vm(reply, |vm| Ok(vm.running("vm.counters")?.counters()))
            }
            VmRequest::Volumes(reply) => {
                self.of_vm(reply, |vm| Ok(vm.running("vm.volumes")?.volumes()))
            }
            VmRequest::Pools(reply) => self.of_vm(reply, |vm| Ok(vm.running("pool.info")?.pools())),
            VmRequest::Pressure(decisions, reply) => {
                self.of_vm(reply, |vm| Ok(vm.running("vm.pressure")?.pressure(decisions)));
            }
            VmRequest::ChangePressure(change, reply) => {
                self.of_vm(reply, |vm| vm.change_pressure(&change))
            }
            VmRequest::Boot(reply) => answer(reply, self.busily(Self::boot)),
            VmRequest::Pause(reply) => self.pause(reply),
            VmRequest::Resume(reply) => answer(reply, self.resume()),
            VmRequest::Shutdown(reply) => answer(reply, self.busily(Self::shut_down)),
            VmRequest::Reboot(reply) => {
                answer(reply, self.busily(|task| task.reboot(Events::emit)))
            }
            VmRequest::PowerButton(reply) => self.of_vm(reply, Vm::press_power_button),
            VmRequest::Nmi(reply) => self.of_vm(reply, Vm::send_nmi),
            VmRequest::ShutdownVmm(reply) => {
                // The VM is deleted before the answer, so that the client can use its pool
                // immediately.
                self.busily(Self::delete);
                answer(reply, Ok(()));
                return Flow::End(Ok(()));
            }
        }
        Flow::Continue
    }

    fn of_vm<T>(&mut self, reply: Reply<T>, ask: impl FnOnce(&mut Vm) -> Result<T, VmError>) {
        answer(reply, self.vm().and_then(ask));
    }
}

fn answer<T>(reply: Reply<T>, result: Result<T, VmError>) {
    // An error means that the client has disconnected.
    let _ = reply.send(result);
}

#[cfg(test)]
pub(crate) mod tests;
