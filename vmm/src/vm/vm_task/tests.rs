//! Tests of the VM task with fake machines that log each call.

mod busy;
mod devices;
mod emitted_events;
mod full_pool;
mod pauses;
mod sizes;

use std::collections::BTreeMap;
use std::sync::{Arc, mpsc};

use foreshore_devices::events::{Watcher, WatcherItem};
use foreshore_devices::memory::zone::ZoneSpec;
use foreshore_devices::volume::guest_btt::VolumeKey;
use parking_lot::Mutex;

use balloon::params::Setting;

use super::*;
use crate::config::{ParamSettings, PressureConfig, Topology, test_config};
use crate::governor::info::PressureInfo;
use crate::vm::request::VmHandle;
use crate::vm::request::{
    Counters, GrowPoolRequest, PoolInfo, Reply, ResizeZoneRequest, VolumeInfo, ZoneInfo,
    device_tree,
};
use crate::vm::resize_plan::{ResizePlan, ResizeStep};

/// Calls of all machines, in order.
type Log = Arc<Mutex<Vec<&'static str>>>;

/// Label of the resize step that fails for lack of host memory, if any.
type FailingStep = Arc<Mutex<Option<&'static str>>>;

/// Result of `has_space_for_waiting`: true if the waiting writes may find space.
type HasSpace = Arc<Mutex<Option<bool>>>;

/// Calls of a machine that block until a sender is dropped.
#[derive(Clone, Default)]
struct Delays(Arc<Mutex<BTreeMap<&'static str, mpsc::Receiver<()>>>>);

impl Delays {
    /// Makes the next call of `what` block until the returned sender is dropped.
    fn add(&self, what: &'static str) -> mpsc::Sender<()> {
        let (sender, delay) = mpsc::channel();
        self.0.lock().insert(what, delay);
        sender
    }

    /// Returns true until the call of `what` has started.
    fn has(&self, what: &str) -> bool {
        self.0.lock().contains_key(what)
    }

    /// Blocks until the sender for `what` is dropped.
    fn wait(&self, what: &str) {
        let delay = self.0.lock().remove(what);
        // An error means that the sender was dropped.
        let _ = delay.map(|delay| delay.recv());
    }
}

struct FakeMachine {
    log: Log,
    delays: Delays,
    zones: Vec<ZoneSpec>,
    failing_step: FailingStep,
    has_space: HasSpace,
    /// Stored size of the volume `data`.
    volume_bytes: u64,
}

impl Machine for FakeMachine {
    fn resume(&mut self) {
        self.log.lock().push("resume");
    }
    fn pause(&mut self) -> Standstill {
        self.log.lock().push("pause");
        let delays = self.delays.clone();
        Box::new(move || delays.wait("stand still"))
    }
    fn has_space_for_waiting(&self) -> Option<bool> {
        *self.has_space.lock()
    }
    fn retry_writes(&self) {
        self.log.lock().push("retry");
    }
    fn press_power_button(&mut self) {
        self.log.lock().push("power button");
    }
    fn send_nmi(&mut self) {
        self.log.lock().push("nmi");
    }
    fn counters(&self) -> Counters {
        Counters::new()
    }
    fn zones(&self, reply: Reply<Vec<ZoneInfo>>) {
        self.log.lock().push("zones");
        answer(reply, Ok(Vec::new()));
    }
    fn complete(&self, info: &mut VmInfo) {
        info.memory_actual_size = 3 << 30;
        info.device_tree = Some(device_tree(self.devices()));
    }
    fn volumes(&self) -> Vec<VolumeInfo> {
        Vec::new()
    }
    fn volume_of(&self, id: &str) -> Option<VolumeKey> {
        (id == "data").then(|| VolumeKey { pool: "/p".into(), name: "data".to_owned() })
    }
    fn pools(&self) -> Vec<PoolInfo> {
        Vec::new()
    }
    fn pressure(&self, _: usize) -> PressureInfo {
        PressureInfo { policy: "off".to_owned(), ..PressureInfo::default() }
    }
    fn change_pressure(&mut self, change: &PressureChange) -> Result<(), VmError> {
        match change.policy.as_deref() {
            Some("magic") => Err(VmError::BadRequest("magic".to_owned())),
            _ => Ok(()),
        }
    }
}

impl MachineResize for FakeMachine {
    fn plan_resize(&self, resize: &Resize) -> Result<ResizePlan, VmError> {
        let is_odd = |size: Option<u64>| size.is_some_and(|size_bytes| size_bytes % 2 == 1);
        match resize {
            Resize::Vm(request) if request.desired_vcpus == Some(3) => {
                Err(VmError::VcpusLeaving { leaving: "2".to_owned() })
            }
            Resize::Vm(request)
                if is_odd(request.desired_ram) || is_odd(request.desired_balloon) =>
            {
                Err(VmError::BadRequest("odd".to_owned()))
            }
            _ => ResizePlan::unchecked(resize, &self.zones),
        }
    }
    fn resize(&mut self, step: ResizeStep) -> Result<(), VmError> {
        self.log.lock().push(step.label());
        self.delays.wait(step.label());
        match *self.failing_step.lock() {
            Some(label) if label == step.label() => Err(VmError::Failed("no memory".to_owned())),
            _ => Ok(()),
        }
    }
    fn vcpu_ejected(&mut self, _: u8) {
        self.log.lock().push("vcpu ejected");
    }
    fn stored_volume(&self, id: &str) -> Option<(VolumeKey, u64)> {
        Some((self.volume_of(id)?, self.volume_bytes))
    }
    fn resize_disk(&mut self, resize: &ResizeDiskRequest) -> Result<(), VmError> {
        self.log.lock().push("resize disk");
        self.delays.wait("resize disk");
        self.volume_bytes = resize.desired_size;
        match *self.failing_step.lock() {
            Some("resize disk") => Err(VmError::Failed("no new arena".to_owned())),
            _ => Ok(()),
        }
    }
    fn grow_pool(&self, _: GrowPoolRequest, reply: Reply<()>) {
        self.log.lock().push("grow pool");
        reply.send(Ok(())).unwrap();
    }
}

impl DeviceHotplug for FakeMachine {
    fn devices(&self) -> Vec<PciDeviceInfo> {
        vec![PciDeviceInfo { id: "_disk1".to_owned(), bdf: "0000:00:04.0".to_owned() }]
    }
    fn add_device(&mut self, id: &str, device: &DeviceConfig) -> Result<PciDeviceInfo, VmError> {
        self.log.lock().push("add device");
        self.delays.wait("add device");
        match device {
            DeviceConfig::Disk(disk) if disk.path.ends_with("missing") => {
                Err(VmError::Failed("no such file".to_owned()))
            }
            _ => Ok(PciDeviceInfo { id: id.to_owned(), bdf: "0000:00:05.0".to_owned() }),
        }
    }
    fn remove_device(&mut self, id: &str) -> Result<(), VmError> {
        self.log.lock().push("remove device");
        if id == "nobody" { Err(VmError::NoSuchDevice { id: id.to_owned() }) } else { Ok(()) }
    }
    fn ejected(&mut self, _: u8) {
        self.log.lock().push("ejected");
    }
}

impl Drop for FakeMachine {
    fn drop(&mut self) {
        self.delays.wait("drop");
        self.log.lock().push("drop");
    }
}

#[derive(Default)]
pub(crate) struct FakeFactory {
    log: Log,
    senders: Arc<Mutex<Vec<EventSender>>>,
    /// Configuration of the governor in each machine.
    pressure: Arc<Mutex<Vec<PressureConfig>>>,
    fail_from: Option<usize>,
    delays: Delays,
    failing_step: FailingStep,
    has_space: HasSpace,
}

impl MachineFactory for FakeFactory {
    fn build(
        &mut self,
        config: &VmConfig,
        events: EventSender,
    ) -> Result<Box<dyn Machine>, VmError> {
        self.pressure.lock().push(config.governing());
        self.delays.wait("build");
        let mut senders = self.senders.lock();
        if self.fail_from.is_some_and(|count| senders.len() >= count) {
            return Err(VmError::Failed("no memory".to_owned()));
        }
        senders.push(events);
        self.log.lock().push("build");
        let (log, delays) = (Arc::clone(&self.log), self.delays.clone());
        let zones = Topology::of(config).unwrap().zones().to_vec();
        let failing_step = Arc::clone(&self.failing_step);
        let has_space = Arc::clone(&self.has_space);
        let volume_bytes = 20 << 20;
        Ok(Box::new(FakeMachine { log, delays, zones, failing_step, has_space, volume_bytes }))
    }

    fn check(&self, device: &DeviceConfig) -> Result<(), VmError> {
        match device {
            DeviceConfig::Net(net) if net.queue_size == 32 => {
                Err(VmError::BadRequest("no tap interface".to_owned()))
            }
            _ => Ok(()),
        }
    }

    fn keep(&mut self, _: &VmConfig) {
        self.log.lock().push("keep");
    }

    fn release(&mut self) {
        self.log.lock().push("release");
    }
}

struct Fixture {
    events: Events,
    watcher: Watcher,
    restarts: Arc<RestartMetrics>,
    handle: VmHandle,
    log: Log,
    senders: Arc<Mutex<Vec<EventSender>>>,
    pressure: Arc<Mutex<Vec<PressureConfig>>>,
    delays: Delays,
    failing_step: FailingStep,
    has_space: HasSpace,
    end: tokio::task::JoinHandle<Result<(), RunError>>,
}

/// Starts a VM task on the test's runtime. On return its first machine has been built, unless
/// `fail_from` is 0.
async fn start(fail_from: Option<usize>) -> Fixture {
    let fixture = serve(fail_from, Some(test_config()), AtGuestShutdown::End);
    if fail_from != Some(0) {
        assert_eq!(fixture.state().await, VmState::Running);
    }
    fixture
}

/// Starts a task. It has a VM if `config` is given.
fn serve(
    fail_from: Option<usize>,
    config: Option<VmConfig>,
    at_guest_shutdown: AtGuestShutdown,
) -> Fixture {
    let factory = FakeFactory { fail_from, ..Default::default() };
    let (log, senders) = (Arc::clone(&factory.log), Arc::clone(&factory.senders));
    let (pressure, delays) = (Arc::clone(&factory.pressure), factory.delays.clone());
    let failing_step = Arc::clone(&factory.failing_step);
    let has_space = Arc::clone(&factory.has_space);
    let (handle, requests) = VmHandle::channel();
    let events = Events::start();
    let watcher = events.watch();
    let restarts = Arc::<RestartMetrics>::default();
    let task = VmTask::new(factory, at_guest_shutdown, events.clone(), Arc::clone(&restarts));
    let end = tokio::task::spawn_local(task.run(config, requests));
    Fixture {
        events,
        watcher,
        restarts,
        handle,
        log,
        senders,
        pressure,
        delays,
        failing_step,
        has_space,
        end,
    }
}

impl Fixture {
    async fn state(&self) -> VmState {
        self.handle.ask(VmRequest::Info).await.unwrap().state
    }

    fn send(&self, machine: usize, event: MachineEvent) {
        self.senders.lock()[machine].send(event);
    }

    async fn emitted(mut self) -> Vec<&'static str> {
        self.events.end();
        let mut emitted = Vec::new();
        while let Some(WatcherItem::Event(event)) = self.watcher.next().await {
            emitted.push(event.event);
        }
        emitted
    }

    /// Waits until `count` machines have been built. The clock is paused, and advances to the next
    /// timer when all tasks are idle.
    async fn built(&self, count: usize) {
        while self.senders.lock().len() < count {
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
        assert_eq!(self.state().await, VmState::Running);
    }

    fn log(&self) -> Vec<&'static str> {
        self.log.lock().clone()
    }
}

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, test);
}

fn triple_fault() -> MachineEvent {
    MachineEvent::Vcpu(VcpuEvent::TripleFault { index: 0, rip: 0x1000 })
}

#[test]
fn reboot_drops_old_machine_before_building_new_one() {
    run(async {
        let vm = start(None).await;
        vm.send(0, MachineEvent::GuestReset);
        assert_eq!(vm.state().await, VmState::Running);
        assert_eq!(vm.log(), ["build", "resume", "drop", "build", "resume"]);
    });
}

/// A client requested the reboot, so the VMM continues to run.
#[test]
fn failed_reboot_shuts_vm_down() {
    run(async {
        let vm = start(Some(1)).await;
        let mut watcher = vm.events.watch();
        assert!(vm.handle.ask(VmRequest::Reboot).await.is_err());
        assert_eq!(vm.state().await, VmState::Created);
        assert_eq!(vm.log(), ["build", "resume", "drop"]);
        let mut emitted = Vec::new();
        while emitted.last().is_none_or(|event| event != "shutdown") {
            let Some(WatcherItem::Event(event)) = watcher.next().await else {
                panic!("{emitted:?}")
            };
            emitted
                .push(serde_json::to_value(&*event).unwrap()["event"].as_str().unwrap().to_owned());
        }
        assert_eq!(emitted, ["rebooting", "boot-failed", "shutdown"]);
    });
}

#[test]
fn events_of_replaced_machine_are_dropped() {
    run(async {
        let vm = start(None).await;
        vm.handle.ask(VmRequest::Reboot).await.unwrap();
        vm.send(0, MachineEvent::GuestShutdown);
        vm.send(0, triple_fault());
        assert_eq!(vm.state().await, VmState::Running);
        assert_eq!(vm.senders.lock().len(), 2);
    });
}

/// A guest can write a port in a loop while a machine is being built or memory is being populated.
#[test]
fn only_first_end_of_a_machine_is_sent() {
    let (sender, mut events) = tokio::sync::mpsc::unbounded_channel();
    for generation in 0..2 {
        let machine = EventSender::new(generation, sender.clone());
        for _ in 0..1000 {
            // Each port has its own sender, and so does the watchdog.
            machine.clone().send(MachineEvent::GuestReset);
            machine.clone().send(MachineEvent::GuestShutdown);
        }
        assert_eq!(events.try_recv(), Ok((generation, MachineEvent::GuestReset)));
        assert!(events.is_empty());
        // The guest ejects each device once.
        (0..3).for_each(|slot| machine.send(MachineEvent::Ejected { slot }));
        assert_eq!(events.len(), 3);
        while events.try_recv().is_ok() {}
    }
}

#[test]
fn governor_settings_survive_reboot_and_shutdown() {
    run(async {
        let vm = start(None).await;
        let change =
            async |change| vm.handle.ask(|reply| VmRequest::ChangePressure(change, reply)).await;
        let fixed = PressureChange {
            policy: Some("fixed".to_owned()),
            size: Some(256 << 20),
            ..PressureChange::default()
        };
        change(fixed).await.unwrap();
        change(PressureChange { dry_run: Some(true), ..PressureChange::default() }).await.unwrap();
        let set = PressureConfig {
            policy: "fixed".to_owned(),
            size: Some(256 << 20),
            dry_run: true,
            ..PressureConfig::default()
        };
        let shown = async || vm.handle.ask(VmRequest::Info).await.unwrap().config.pressure.unwrap();
        assert_eq!(shown().await, set);
        vm.send(0, MachineEvent::GuestReset);
        assert_eq!(vm.state().await, VmState::Running);
        // A pause of the governor also lasts across reboots, until it is ended.
        let pause = |pause| PressureChange { pause: Some(pause), ..PressureChange::default() };
        change(pause(true)).await.unwrap();
        assert!(shown().await.paused);
        vm.handle.ask(VmRequest::Reboot).await.unwrap();
        let zone = PressureChange {
            resume: Some(true),
            zone: Some("pm".to_owned()),
            ..PressureChange::default()
        };
        change(zone).await.unwrap();
        assert!(shown().await.paused);
        change(PressureChange { resume: Some(true), ..PressureChange::default() }).await.unwrap();
        // Parameters last across reboots, until the policy changes.
        let named = |json| serde_json::from_value::<PressureChange>(json).unwrap();
        let params = serde_json::json!({"policy": "amf", "params": {"reclaim": 40}});
        change(named(params)).await.unwrap();
        let more =
            serde_json::json!({"params": {"watermark-scale": 64}, "rules": {"cool_down": "2s"}});
        change(named(more)).await.unwrap();
        vm.handle.ask(VmRequest::Reboot).await.unwrap();
        // A new policy drops the size. A refused change has no effect.
        let off = PressureChange { policy: Some("off".to_owned()), ..PressureChange::default() };
        change(off).await.unwrap();
        let magic =
            PressureChange { policy: Some("magic".to_owned()), ..PressureChange::default() };
        assert!(change(magic).await.is_err());
        vm.handle.ask(VmRequest::Shutdown).await.unwrap();
        vm.handle.ask(VmRequest::Boot).await.unwrap();
        let rules = ParamSettings::from([("cool_down", Setting::from("2s"))]);
        let params = [("reclaim", 40), ("watermark-scale", 64)];
        let params = params.map(|(name, value)| (name, Setting::Number(value)));
        let none = PressureConfig { rules, dry_run: true, ..PressureConfig::default() };
        let amf =
            PressureConfig { policy: "amf".to_owned(), params: params.into(), ..none.clone() };
        let off = PressureConfig { policy: "off".to_owned(), ..none };
        let configured = test_config().governing();
        assert_ne!(configured, set);
        let paused = PressureConfig { paused: true, ..set.clone() };
        assert_eq!(*vm.pressure.lock(), [configured, set, paused, amf, off]);
    });
}

#[test]
fn empty_change_of_governor_is_not_stored() {
    run(async {
        let config = VmConfig { pressure: None, ..test_config() };
        let vm = serve(None, Some(config), AtGuestShutdown::End);
        let change =
            async |change| vm.handle.ask(|reply| VmRequest::ChangePressure(change, reply)).await;
        let said = async || vm.handle.ask(VmRequest::Info).await.unwrap().config.pressure;
        change(PressureChange::default()).await.unwrap();
        assert_eq!(said().await, None);
        // Without PM, the policy is `off`, but a client can still pause the governor.
        change(PressureChange { pause: Some(true), ..PressureChange::default() }).await.unwrap();
        let paused =
            PressureConfig { policy: "off".to_owned(), paused: true, ..PressureConfig::default() };
        assert_eq!(said().await, Some(paused));
    });
}

#[test]
fn guest_shutdown_ends_the_run_without_error() {
    run(async {
        let vm = start(None).await;
        vm.send(0, MachineEvent::GuestShutdown);
        assert!(vm.end.await.unwrap().is_ok());
        assert_eq!(vm.log.lock().last(), Some(&"release"));
    });
}

#[test]
fn access_to_unplugged_memory_ends_the_run_with_error() {
    run(async {
        let vm = start(None).await;
        vm.send(0, MachineEvent::Vcpu(VcpuEvent::UnpluggedAccess { index: 1, rip: 0xabc }));
        let error = vm.end.await.unwrap().unwrap_err().to_string();
        assert!(error.contains("unplugged-access") && error.contains("0xabc"), "{error}");
    });
}

#[test]
fn triple_faults_restart_the_guest_until_it_keeps_faulting() {
    run(async {
        let vm = start(None).await;
        vm.send(0, triple_fault());
        assert_eq!(vm.state().await, VmState::Running);
        vm.send(1, triple_fault());
        vm.built(3).await;
        vm.send(2, triple_fault());
        assert!(matches!(vm.end.await.unwrap(), Err(RunError::KeepsFaulting { .. })));
    });
}

#[test]
fn restart_is_immediate_after_shutdown_and_boot_by_client() {
    run(async {
        let vm = start(None).await;
        for machine in 0..4 {
            vm.send(machine, MachineEvent::GuestReset);
            vm.built(machine + 2).await;
        }
        vm.handle.ask(VmRequest::Shutdown).await.unwrap();
        vm.handle.ask(VmRequest::Boot).await.unwrap();
        let begin = tokio::time::Instant::now();
        vm.send(5, MachineEvent::GuestReset);
        vm.built(7).await;
        assert_eq!(begin.elapsed().as_secs(), 0);
    });
}

#[test]
fn reset_loop_is_delayed_while_api_is_served() {
    run(async {
        let mut vm = start(None).await;
        let begin = tokio::time::Instant::now();
        for machine in 0..8 {
            vm.send(machine, MachineEvent::GuestReset);
            vm.built(machine + 2).await;
        }
        // The delays are 0, 1, 2, 4, 8, 16, 30 and 30 s. Without delays, the restarts would take
        // some milliseconds.
        let elapsed = begin.elapsed().as_secs();
        assert!((91..93).contains(&elapsed), "{elapsed}");
        // A reboot that a client requests is not delayed.
        vm.send(8, MachineEvent::GuestReset);
        assert_eq!(vm.state().await, VmState::Running);
        vm.send(8, triple_fault());
        let now = tokio::time::Instant::now();
        vm.handle.ask(VmRequest::Reboot).await.unwrap();
        assert_eq!((vm.senders.lock().len(), now.elapsed().as_millis()), (10, 0));
        tokio::time::sleep(std::time::Duration::from_secs(60)).await;
        assert_eq!(vm.senders.lock().len(), 10, "the restart that was due is over");
        // The guest has run for a while, so its next restart is immediate.
        vm.send(9, MachineEvent::GuestReset);
        assert_eq!(vm.state().await, VmState::Running);
        assert_eq!(vm.senders.lock().len(), 11);
        let mut delays = 0;
        vm.events.end();
        while let Some(WatcherItem::Event(event)) = vm.watcher.next().await {
            delays += u32::from(event.event == "restart-delayed");
        }
        assert_eq!(delays, 8);
        // The last delay would also be 30 s, but a client has ended it early.
        assert_eq!((vm.restarts.delayed(), vm.restarts.delay().as_secs()), (8, 121));
    });
}

#[test]
fn vcpus_stop_until_delayed_restart() {
    run(async {
        let vm = start(None).await;
        vm.send(0, MachineEvent::GuestReset);
        vm.built(2).await;
        vm.log.lock().clear();
        vm.send(1, MachineEvent::GuestReset);
        assert_eq!(vm.state().await, VmState::Running);
        assert_eq!(vm.log(), ["pause"]);
        vm.built(3).await;
        assert_eq!(vm.log(), ["pause", "drop", "build", "resume"]);
    });
}

#[test]
fn pause_postpones_delayed_restart() {
    run(async {
        let vm = start(None).await;
        vm.send(0, MachineEvent::GuestReset);
        vm.built(2).await;
        vm.send(1, MachineEvent::GuestReset);
        vm.handle.ask(VmRequest::Pause).await.unwrap();
        tokio::time::sleep(std::time::Duration::from_secs(60)).await;
        assert_eq!((vm.state().await, vm.senders.lock().len()), (VmState::Paused, 2));
        let resumes = || vm.log().iter().filter(|entry| **entry == "resume").count();
        let before = resumes();
        vm.handle.ask(VmRequest::Resume).await.unwrap();
        vm.built(3).await;
        assert_eq!(resumes(), before + 1, "the old machine never runs again");
        vm.send(2, MachineEvent::GuestReset);
        vm.handle.ask(VmRequest::Shutdown).await.unwrap();
        tokio::time::sleep(std::time::Duration::from_secs(60)).await;
        assert_eq!((vm.state().await, vm.senders.lock().len()), (VmState::Created, 3));
    });
}

#[test]
fn failed_flush_pauses_the_vm() {
    run(async {
        let vm = start(None).await;
        vm.send(0, MachineEvent::MustPause { reason: "flush failed".to_owned() });
        assert_eq!(vm.state().await, VmState::Paused);
        assert_eq!(vm.log(), ["build", "resume", "pause"]);
        vm.send(0, MachineEvent::MustPause { reason: "flush failed again".to_owned() });
        assert_eq!(vm.state().await, VmState::Paused);
        assert_eq!(vm.log(), ["build", "resume", "pause", "pause"]);
    });
}

#[test]
fn vm_paused_by_failure_shows_reason_and_cannot_resume() {
    run(async {
        let vm = start(None).await;
        for reason in ["flush of data failed: no room", "flush of more failed"] {
            vm.send(0, MachineEvent::MustPause { reason: reason.to_owned() });
        }
        let info = vm.handle.ask(VmRequest::Info).await.unwrap();
        // The first failure is reported, because later failures follow from it.
        assert_eq!(info.pause_reason.unwrap(), "flush of data failed: no room");
        let refused = vm.handle.ask(VmRequest::Resume).await.unwrap_err();
        assert!(matches!(&refused, VmError::CannotResume { reason } if reason.contains("no room")));
        assert_eq!(vm.state().await, VmState::Paused);
        assert_eq!(vm.log(), ["build", "resume", "pause", "pause"]);
        // A new machine starts without a failure.
        vm.handle.ask(VmRequest::Reboot).await.unwrap();
        assert_eq!(vm.handle.ask(VmRequest::Info).await.unwrap().pause_reason, None);
        vm.handle.ask(VmRequest::Pause).await.unwrap();
        vm.handle.ask(VmRequest::Resume).await.unwrap();
        assert_eq!(vm.state().await, VmState::Running);
    });
}

#[test]
fn governor_of_paused_vm_can_be_changed() {
    run(async {
        let vm = start(None).await;
        vm.handle.ask(VmRequest::Pause).await.unwrap();
        let change = PressureChange { pause: Some(true), ..Default::default() };
        vm.handle.ask(|reply| VmRequest::ChangePressure(change, reply)).await.unwrap();
        assert_eq!(vm.state().await, VmState::Paused);
    });
}

#[test]
fn failure_during_a_pause_prevents_resume() {
    run(async {
        let vm = start(None).await;
        vm.handle.ask(VmRequest::Pause).await.unwrap();
        assert!(matches!(vm.handle.ask(VmRequest::Pause).await, Err(VmError::WrongState { .. })));
        vm.send(0, MachineEvent::MustPause { reason: "flush failed".to_owned() });
        assert!(matches!(
            vm.handle.ask(VmRequest::Resume).await,
            Err(VmError::CannotResume { .. })
        ));
        assert_eq!(vm.log(), ["build", "resume", "pause", "pause"]);
    });
}

#[test]
fn failed_initial_boot_is_error_of_the_run() {
    run(async {
        let vm = start(Some(0)).await;
        assert!(matches!(vm.end.await.unwrap(), Err(RunError::Boot(VmError::Failed(_)))));
    });
}

#[test]
fn shutdown_vmm_is_answered_after_end_of_vm() {
    run(async {
        let vm = start(None).await;
        vm.handle.ask(VmRequest::ShutdownVmm).await.unwrap();
        assert_eq!(vm.log.lock().last(), Some(&"release"));
        assert!(vm.end.await.unwrap().is_ok());
    });
}

#[test]
fn vmm_without_vm_serves_create() {
    run(async {
        let vm = serve(None, None, AtGuestShutdown::End);
        for nothing in [
            vm.handle.ask(VmRequest::Info).await.map(drop),
            vm.handle.ask(VmRequest::Boot).await,
            vm.handle.ask(VmRequest::Pause).await,
            vm.handle.ask(VmRequest::Shutdown).await,
            vm.handle.ask(VmRequest::Reboot).await,
            vm.handle.ask(VmRequest::Memory).await.map(drop),
        ] {
            assert!(matches!(nothing, Err(VmError::NotCreated)), "{nothing:?}");
        }
        vm.handle.ask(VmRequest::Delete).await.unwrap();
        let create =
            async || vm.handle.ask(|reply| VmRequest::Create(test_config().into(), reply)).await;
        create().await.unwrap();
        assert_eq!(vm.state().await, VmState::Created);
        assert!(matches!(create().await, Err(VmError::AlreadyCreated)));
        assert!(vm.log().is_empty(), "nothing is built before it is booted");
        vm.handle.ask(VmRequest::Boot).await.unwrap();
        assert_eq!(vm.state().await, VmState::Running);
        assert!(matches!(create().await, Err(VmError::AlreadyCreated)));
        // Once the VM is deleted, another one can be created.
        vm.handle.ask(VmRequest::Delete).await.unwrap();
        assert!(matches!(vm.handle.ask(VmRequest::Info).await, Err(VmError::NotCreated)));
        create().await.unwrap();
        // Events from the machine of the deleted VM are dropped.
        vm.send(0, MachineEvent::GuestShutdown);
        vm.handle.ask(VmRequest::Boot).await.unwrap();
        vm.send(0, triple_fault());
        assert_eq!(vm.state().await, VmState::Running);
        assert_eq!(vm.log(), ["build", "resume", "drop", "release", "build", "resume"]);
    });
}

#[test]
fn paused_vm_accepts_power_button_and_nmi() {
    run(async {
        let vm = start(None).await;
        vm.handle.ask(VmRequest::PowerButton).await.unwrap();
        vm.handle.ask(VmRequest::Nmi).await.unwrap();
        assert_eq!(vm.log(), ["build", "resume", "power button", "nmi"]);
        vm.handle.ask(VmRequest::Pause).await.unwrap();
        vm.handle.ask(VmRequest::PowerButton).await.unwrap();
        vm.handle.ask(VmRequest::Nmi).await.unwrap();
        assert_eq!(vm.log()[4..], ["pause", "power button", "nmi"]);
        assert_eq!(vm.state().await, VmState::Paused);
        vm.handle.ask(VmRequest::Shutdown).await.unwrap();
        for refused in
            [vm.handle.ask(VmRequest::PowerButton).await, vm.handle.ask(VmRequest::Nmi).await]
        {
            assert!(matches!(refused, Err(VmError::WrongState { .. })));
        }
    });
}

#[test]
fn failed_boot_leaves_vm_created() {
    run(async {
        let vm = serve(Some(0), None, AtGuestShutdown::End);
        vm.handle.ask(|reply| VmRequest::Create(test_config().into(), reply)).await.unwrap();
        assert!(matches!(vm.handle.ask(VmRequest::Boot).await, Err(VmError::Failed(_))));
        assert_eq!(vm.state().await, VmState::Created);
        vm.handle.ask(VmRequest::Delete).await.unwrap();
    });
}

#[test]
fn no_shutdown_keeps_vmm_after_guest_shutdown() {
    run(async {
        let vm = serve(None, Some(test_config()), AtGuestShutdown::Stay);
        assert_eq!(vm.state().await, VmState::Running);
        vm.send(0, MachineEvent::GuestShutdown);
        assert_eq!(vm.state().await, VmState::Created);
        vm.handle.ask(VmRequest::Boot).await.unwrap();
        assert_eq!(vm.state().await, VmState::Running);
        assert_eq!(vm.log(), ["build", "resume", "drop", "build", "resume"]);
    });
}
