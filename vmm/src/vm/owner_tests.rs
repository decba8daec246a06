//! The owner with machines that only say what is done to them.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use balloon::params::Setting;

use super::*;
use crate::config::{MemoryConfig, PressureConfig, test_config};
use crate::events::{Seen, Watcher};
use crate::vm::request::VmHandle;

/// What happened to the machines that were built, in order.
type Log = Arc<Mutex<Vec<&'static str>>>;

/// What keeps a machine from standing still, until its sender is gone.
type Moves = Arc<Mutex<Option<std::sync::mpsc::Receiver<()>>>>;

struct FakeMachine(Log, Moves);

impl Machine for FakeMachine {
    fn resume(&mut self) {
        self.0.lock().push("resume");
    }
    fn pause(&mut self) -> Standstill {
        self.0.lock().push("pause");
        let moves = self.1.lock().take();
        Box::new(move || {
            // Its sender is gone.
            let _ = moves.map(|moves| moves.recv());
        })
    }
    fn press_power_button(&mut self) {
        self.0.lock().push("power button");
    }
    fn send_nmi(&mut self) {
        self.0.lock().push("nmi");
    }
    fn counters(&self) -> Counters {
        Counters::new()
    }
    fn zones(&self, reply: Reply<Vec<ZoneInfo>>) {
        self.0.lock().push("zones");
        answer(reply, Ok(Vec::new()));
    }
    fn memory_bytes(&self) -> u64 {
        3 << 30
    }
    fn volumes(&self) -> Vec<VolumeInfo> {
        Vec::new()
    }
    fn guest_kernel(&self) -> Option<GuestKernel> {
        None
    }
    fn resize_dram(&mut self, _: u64) -> Result<(), VmError> {
        self.0.lock().push("resize");
        Ok(())
    }
    fn balloon(&self) -> Option<BalloonInfo> {
        None
    }
    fn resize_balloon(&mut self, _: u64) -> Result<(), VmError> {
        self.0.lock().push("resize balloon");
        Ok(())
    }
    fn resize_zone(&mut self, _: &ResizeZoneRequest) -> Result<(), VmError> {
        self.0.lock().push("resize zone");
        Ok(())
    }
    fn resize_disk(&mut self, _: &ResizeDiskRequest) -> Result<(), VmError> {
        self.0.lock().push("resize disk");
        Ok(())
    }
    fn devices(&self) -> Vec<PciDeviceInfo> {
        vec![PciDeviceInfo { id: "_disk1".to_owned(), bdf: "0000:00:04.0".to_owned() }]
    }
    fn add_device(&mut self, id: &str, device: &DeviceConfig) -> Result<PciDeviceInfo, VmError> {
        self.0.lock().push("add device");
        match device {
            DeviceConfig::Disk(disk) if disk.path.ends_with("missing") => {
                Err(VmError::Failed("no such file".to_owned()))
            }
            _ => Ok(PciDeviceInfo { id: id.to_owned(), bdf: "0000:00:05.0".to_owned() }),
        }
    }
    fn remove_device(&mut self, id: &str) -> Result<(), VmError> {
        self.0.lock().push("remove device");
        if id == "nobody" { Err(VmError::NoSuchDevice { id: id.to_owned() }) } else { Ok(()) }
    }
    fn ejected(&mut self, _: u8) {
        self.0.lock().push("ejected");
    }
    fn resize_vcpus(&mut self, desired: u8) -> Result<(), VmError> {
        self.0.lock().push("resize vcpus");
        if desired == 3 { Err(VmError::VcpusLeaving { leaving: "2".to_owned() }) } else { Ok(()) }
    }
    fn vcpu_ejected(&mut self, _: u8) {
        self.0.lock().push("vcpu ejected");
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

impl Drop for FakeMachine {
    fn drop(&mut self) {
        self.0.lock().push("drop");
    }
}

#[derive(Default)]
pub(crate) struct FakeFactory {
    log: Log,
    senders: Arc<Mutex<Vec<EventSender>>>,
    /// What each machine was built with.
    pressure: Arc<Mutex<Vec<PressureConfig>>>,
    fail_from: Option<usize>,
    moves: Moves,
    /// What keeps a machine from being built, until its sender is gone.
    delay: Moves,
}

impl MachineFactory for FakeFactory {
    fn build(&mut self, config: &VmConfig, events: EventSender) -> Result<Box<dyn Machine>, VmError> {
        self.pressure.lock().push(config.pressure.clone());
        if let Some(delay) = self.delay.lock().take() {
            self.log.lock().push("delay");
            // Its sender is gone.
            let _ = delay.recv();
        }
        let mut senders = self.senders.lock();
        if self.fail_from.is_some_and(|count| senders.len() >= count) {
            return Err(VmError::Failed("no memory".to_owned()));
        }
        senders.push(events);
        self.log.lock().push("build");
        Ok(Box::new(FakeMachine(Arc::clone(&self.log), Arc::clone(&self.moves))))
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
    told: Watcher,
    handle: VmHandle,
    log: Log,
    senders: Arc<Mutex<Vec<EventSender>>>,
    pressure: Arc<Mutex<Vec<PressureConfig>>>,
    moves: Moves,
    end: tokio::task::JoinHandle<Result<(), RunError>>,
}

/// Starts an owner on the test's runtime; its first machine is built when this returns.
async fn start(fail_from: Option<usize>) -> Fixture {
    let fixture = serve(fail_from, Some(test_config()), AtGuestShutdown::End);
    if fail_from != Some(0) {
        assert_eq!(fixture.state().await, VmState::Running);
    }
    fixture
}

/// Starts an owner with this VM from the start, or none.
fn serve(fail_from: Option<usize>, config: Option<VmConfig>, at_guest_shutdown: AtGuestShutdown) -> Fixture {
    let factory = FakeFactory { fail_from, ..Default::default() };
    let (log, senders) = (Arc::clone(&factory.log), Arc::clone(&factory.senders));
    let (pressure, moves) = (Arc::clone(&factory.pressure), Arc::clone(&factory.moves));
    let (handle, requests) = VmHandle::channel();
    let events = Events::start();
    let told = events.watch();
    let owner = Owner::new(factory, at_guest_shutdown, events.clone());
    let end = tokio::task::spawn_local(owner.run(config, requests));
    Fixture { events, told, handle, log, senders, pressure, moves, end }
}

impl Fixture {
    async fn state(&self) -> VmState {
        self.handle.ask(VmRequest::Info).await.unwrap().state
    }

    fn send(&self, machine: usize, event: MachineEvent) {
        self.senders.lock()[machine].send(event);
    }

    /// What was told, all of it.
    async fn told(mut self) -> Vec<&'static str> {
        self.events.end();
        let mut told = Vec::new();
        while let Some(Seen::Event(event)) = self.told.next().await {
            told.push(event.event);
        }
        told
    }

    fn log(&self) -> Vec<&'static str> {
        self.log.lock().clone()
    }
}

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, test);
}

fn triple_fault() -> MachineEvent {
    MachineEvent::Vcpu(VcpuEvent::TripleFault { index: 0, rip: 0x1000 })
}

#[test]
fn a_reboot_ends_the_old_machine_before_the_new_one_is_built() {
    run(async {
        let vm = start(None).await;
        vm.send(0, MachineEvent::GuestReset);
        assert_eq!(vm.state().await, VmState::Running);
        assert_eq!(vm.log(), ["build", "resume", "drop", "build", "resume"]);
    });
}

fn disk(text: &str) -> Box<DeviceConfig> {
    Box::new(DeviceConfig::Disk(crate::config::DiskConfig::parse(text).unwrap()))
}

async fn add(vm: &Fixture, text: &str) -> Result<Option<PciDeviceInfo>, VmError> {
    vm.handle.ask(|reply| VmRequest::AddDevice(disk(text), reply)).await
}

async fn remove(vm: &Fixture, id: &str) -> Result<(), VmError> {
    vm.handle.ask(|reply| VmRequest::RemoveDevice(id.to_owned(), reply)).await
}

async fn disk_ids(vm: &Fixture) -> Vec<Option<String>> {
    let info = vm.handle.ask(VmRequest::Info).await.unwrap();
    info.config.disks.into_iter().map(|disk| disk.id).collect()
}

#[test]
fn devices_of_a_vm_that_does_not_run_are_its_configuration() {
    run(async {
        let vm = serve(None, None, AtGuestShutdown::End);
        assert!(matches!(add(&vm, "path=/d").await, Err(VmError::NotCreated)));
        assert!(matches!(remove(&vm, "d").await, Err(VmError::NotCreated)));
        vm.handle.ask(|reply| VmRequest::Create(Box::new(test_config()), reply)).await.unwrap();
        assert_eq!(add(&vm, "path=/d,id=d").await.unwrap(), None);
        assert!(matches!(add(&vm, "path=/e,id=d").await, Err(VmError::Config(_))));
        assert!(matches!(add(&vm, "path=/e,num_queues=9").await, Err(VmError::Config(_))));
        assert_eq!(disk_ids(&vm).await, [Some("d".to_owned())]);
        assert!(matches!(remove(&vm, "x").await, Err(VmError::NoSuchDevice { .. })));
        remove(&vm, "d").await.unwrap();
        assert_eq!(disk_ids(&vm).await, []);
        // What was open for it is closed.
        assert_eq!(vm.log(), ["keep"]);
    });
}

/// An interface whose one queue is this pipe's end.
fn net_of(text: &str, fd: std::os::fd::OwnedFd) -> Box<DeviceConfig> {
    let mut net = crate::config::NetConfig::parse(text).unwrap();
    net.fds = vec![fd.into()];
    Box::new(DeviceConfig::Net(net))
}

/// Whether somebody has the other end of it.
fn is_open(reader: &mut std::io::PipeReader) -> bool {
    rustix::io::ioctl_fionbio(&*reader, true).unwrap();
    std::io::Read::read(reader, &mut [0]).is_err()
}

#[test]
fn descriptors_of_an_interface_are_kept_over_reboots_and_closed_when_it_goes() {
    run(async {
        let vm = serve(None, None, AtGuestShutdown::End);
        vm.handle.ask(|reply| VmRequest::Create(Box::new(test_config()), reply)).await.unwrap();
        let add = async |text, fd| vm.handle.ask(|reply| VmRequest::AddDevice(net_of(text, fd), reply)).await;
        let (mut reader, writer) = std::io::pipe().unwrap();
        assert_eq!(add("id=n", writer.into()).await.unwrap(), None);
        let net = async || vm.handle.ask(VmRequest::Info).await.unwrap().config.net;
        let given = net().await;
        assert!(given[0].mac.is_some() && given[0].fds.len() == 1);
        vm.handle.ask(VmRequest::Boot).await.unwrap();
        vm.handle.ask(VmRequest::Reboot).await.unwrap();
        assert_eq!(net().await, given);
        assert!(is_open(&mut reader));
        // What is refused is closed.
        let (mut other, writer) = std::io::pipe().unwrap();
        assert!(matches!(add("id=n", writer.into()).await, Err(VmError::Config(_))));
        assert!(!is_open(&mut other));
        let (mut other, writer) = std::io::pipe().unwrap();
        assert!(matches!(add("queue_size=32", writer.into()).await, Err(VmError::BadRequest(_))));
        assert!(!is_open(&mut other));
        drop(given);
        remove(&vm, "n").await.unwrap();
        assert_eq!(net().await, []);
        assert!(!is_open(&mut reader));
        // So are those of a VM that is deleted.
        let (mut reader, writer) = std::io::pipe().unwrap();
        assert!(add("", writer.into()).await.unwrap().is_some());
        assert!(is_open(&mut reader));
        vm.handle.ask(VmRequest::Delete).await.unwrap();
        assert!(!is_open(&mut reader));
    });
}

/// The owner is on a thread of its own here, as it is for the API's.
#[test]
fn info_is_answered_while_a_machine_is_built_as_it_was_before() {
    let (building, delay) = std::sync::mpsc::channel();
    let factory = FakeFactory { delay: Arc::new(Mutex::new(Some(delay))), ..Default::default() };
    let log = Arc::clone(&factory.log);
    let (handle, requests) = VmHandle::channel();
    let owner = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(Owner::new(factory, AtGuestShutdown::End, Events::start()).run(None, requests))
    });
    run(async {
        handle.ask(|reply| VmRequest::Create(Box::new(test_config()), reply)).await.unwrap();
        let boot = {
            let handle = handle.clone();
            tokio::task::spawn_local(async move { handle.ask(VmRequest::Boot).await })
        };
        while log.lock().is_empty() {
            tokio::task::yield_now().await;
        }
        for _ in 0..3 {
            assert_eq!(handle.info().await.unwrap().state, VmState::Created);
        }
        assert!(!boot.is_finished());
        drop(building);
        boot.await.unwrap().unwrap();
        assert_eq!(handle.info().await.unwrap().state, VmState::Running);
        handle.ask(VmRequest::ShutdownVmm).await.unwrap();
        assert!(matches!(handle.info().await, Err(VmError::Ending)));
    });
    owner.join().unwrap().unwrap();
}

#[test]
fn info_has_a_tree_of_devices_while_there_is_a_machine() {
    run(async {
        let vm = start(None).await;
        let tree = async || vm.handle.ask(VmRequest::Info).await.unwrap().device_tree;
        let found = serde_json::to_value(tree().await).unwrap();
        let expected = serde_json::json!({
            "_disk1": {"id": "_disk1", "resources": [], "parent": "_virtio-pci-_disk1", "children": [], "pci_bdf": null},
            "_virtio-pci-_disk1":
                {"id": "_virtio-pci-_disk1", "resources": [], "parent": null, "children": ["_disk1"], "pci_bdf": "0000:00:04.0"},
        });
        assert_eq!(found, expected);
        vm.handle.ask(VmRequest::Shutdown).await.unwrap();
        assert_eq!(tree().await, None);
    });
}

#[test]
fn devices_of_a_vm_that_runs_are_the_next_boots_as_well() {
    run(async {
        let vm = start(None).await;
        let info = add(&vm, "path=/d").await.unwrap().unwrap();
        assert_eq!(info, PciDeviceInfo { id: "_disk0".to_owned(), bdf: "0000:00:05.0".to_owned() });
        // What the machine refuses is not in the configuration either.
        assert!(matches!(add(&vm, "path=/missing,id=m").await, Err(VmError::Failed(_))));
        assert!(matches!(add(&vm, "path=/e,id=_disk0").await, Err(VmError::Config(_))));
        assert_eq!(disk_ids(&vm).await, [Some("_disk0".to_owned())]);
        // In a VM that is paused as well; and the configuration does not wait for the guest.
        let _ = vm.handle.ask(VmRequest::Pause).await;
        assert!(add(&vm, "path=/e,id=e").await.unwrap().is_some());
        remove(&vm, "_disk0").await.unwrap();
        assert_eq!(disk_ids(&vm).await, [Some("e".to_owned())]);
        // The guest still has one that was removed: its name is not given to another.
        for id in ["_disk0", "_disk2"] {
            assert_eq!(add(&vm, "path=/f").await.unwrap().unwrap().id, id);
        }
        for id in ["_disk0", "_disk2"] {
            remove(&vm, id).await.unwrap();
        }
        // It may be asked again until it is gone: the machine knows.
        remove(&vm, "_disk0").await.unwrap();
        assert!(matches!(remove(&vm, "nobody").await, Err(VmError::NoSuchDevice { .. })));
        vm.send(0, MachineEvent::Ejected { slot: 5 });
        vm.handle.ask(VmRequest::Reboot).await.unwrap();
        // One of a machine that was replaced.
        vm.send(0, MachineEvent::Ejected { slot: 5 });
        assert_eq!(disk_ids(&vm).await, [Some("e".to_owned())]);
        assert_eq!(vm.log().iter().filter(|entry| **entry == "ejected").count(), 1);
    });
}

#[test]
fn a_pause_is_answered_when_everything_stands_still_and_others_do_not_wait() {
    run(async {
        let vm = start(None).await;
        let (moves, stands_still) = std::sync::mpsc::channel();
        *vm.moves.lock() = Some(stands_still);
        let handle = vm.handle.clone();
        let pause = tokio::task::spawn_local(async move { handle.ask(VmRequest::Pause).await });
        // The owner takes one request after the other: when this one is answered, it has done what it does for a pause.
        while vm.state().await != VmState::Paused {}
        assert_eq!(vm.state().await, VmState::Paused);
        assert!(!pause.is_finished());
        drop(moves);
        pause.await.unwrap().unwrap();
    });
}

#[test]
fn info_has_the_memory_without_looking_for_what_is_resident() {
    run(async {
        let vm = start(None).await;
        let info = vm.handle.ask(VmRequest::Info).await.unwrap();
        assert_eq!(info.memory_actual_size, 3 << 30);
        assert!(!vm.log().contains(&"zones"));
    });
}

#[test]
fn events_of_a_machine_that_has_been_replaced_are_dropped() {
    run(async {
        let vm = start(None).await;
        vm.handle.ask(VmRequest::Reboot).await.unwrap();
        vm.send(0, MachineEvent::GuestShutdown);
        vm.send(0, triple_fault());
        assert_eq!(vm.state().await, VmState::Running);
        assert_eq!(vm.senders.lock().len(), 2);
    });
}

#[test]
fn what_was_set_of_the_governor_outlives_reboots_and_shutdowns() {
    run(async {
        let vm = start(None).await;
        let change = async |change| vm.handle.ask(|reply| VmRequest::ChangePressure(change, reply)).await;
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
        assert_eq!(vm.handle.ask(VmRequest::Info).await.unwrap().config.pressure, set);
        vm.send(0, MachineEvent::GuestReset);
        assert_eq!(vm.state().await, VmState::Running);
        // So is a pause, and its end.
        let pause = |pause| PressureChange { pause: Some(pause), ..PressureChange::default() };
        change(pause(true)).await.unwrap();
        assert!(vm.handle.ask(VmRequest::Info).await.unwrap().config.pressure.paused);
        vm.handle.ask(VmRequest::Reboot).await.unwrap();
        let zone =
            PressureChange { resume: Some(true), zone: Some("pm".to_owned()), ..PressureChange::default() };
        change(zone).await.unwrap();
        assert!(vm.handle.ask(VmRequest::Info).await.unwrap().config.pressure.paused);
        change(PressureChange { resume: Some(true), ..PressureChange::default() }).await.unwrap();
        // So are parameters, until another policy takes its own with it.
        let named = |json| serde_json::from_value::<PressureChange>(json).unwrap();
        let params = serde_json::json!({"policy": "amf", "params": {"reclaim": 40}});
        change(named(params)).await.unwrap();
        let more = serde_json::json!({"params": {"watermark-scale": 64}, "rules": {"cool_down": "2s"}});
        change(named(more)).await.unwrap();
        vm.handle.ask(VmRequest::Reboot).await.unwrap();
        // Another policy takes the size with it; one that is refused changes nothing.
        let off = PressureChange { policy: Some("off".to_owned()), ..PressureChange::default() };
        change(off).await.unwrap();
        let magic = PressureChange { policy: Some("magic".to_owned()), ..PressureChange::default() };
        assert!(change(magic).await.is_err());
        vm.handle.ask(VmRequest::Shutdown).await.unwrap();
        vm.handle.ask(VmRequest::Boot).await.unwrap();
        let rules = BTreeMap::from([("cool_down".to_owned(), Setting::from("2s"))]);
        let params = [("reclaim", 40), ("watermark-scale", 64)];
        let params = params.map(|(name, value)| (name.to_owned(), Setting::Number(value)));
        let none = PressureConfig { rules, dry_run: true, ..PressureConfig::default() };
        let amf = PressureConfig { policy: "amf".to_owned(), params: params.into(), ..none.clone() };
        let off = PressureConfig { policy: "off".to_owned(), ..none };
        let configured = test_config().pressure;
        assert_ne!(configured, set);
        let paused = PressureConfig { paused: true, ..set.clone() };
        assert_eq!(*vm.pressure.lock(), [configured, set, paused, amf, off]);
    });
}

#[test]
fn a_guest_that_switches_itself_off_ends_the_run_well() {
    run(async {
        let vm = start(None).await;
        vm.send(0, MachineEvent::GuestShutdown);
        assert!(vm.end.await.unwrap().is_ok());
        assert_eq!(vm.log.lock().last(), Some(&"release"));
    });
}

#[test]
fn an_access_to_unplugged_memory_ends_the_run_with_its_reason() {
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
        assert_eq!(vm.state().await, VmState::Running);
        vm.send(2, triple_fault());
        assert!(matches!(vm.end.await.unwrap(), Err(RunError::KeepsFaulting { .. })));
    });
}

#[test]
fn a_failed_flush_pauses_and_is_not_the_end() {
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
fn a_vm_that_was_paused_for_a_failure_tells_why_and_never_goes_on() {
    run(async {
        let vm = start(None).await;
        for reason in ["flush of data failed: no room", "flush of more failed"] {
            vm.send(0, MachineEvent::MustPause { reason: reason.to_owned() });
        }
        let info = vm.handle.ask(VmRequest::Info).await.unwrap();
        // The first reason: what follows comes of it.
        assert_eq!(info.pause_reason.unwrap(), "flush of data failed: no room");
        let refused = vm.handle.ask(VmRequest::Resume).await.unwrap_err();
        assert!(matches!(&refused, VmError::CannotResume { reason } if reason.contains("no room")));
        assert_eq!(vm.state().await, VmState::Paused);
        assert_eq!(vm.log(), ["build", "resume", "pause", "pause"]);
        // Another machine has not failed.
        vm.handle.ask(VmRequest::Reboot).await.unwrap();
        assert_eq!(vm.handle.ask(VmRequest::Info).await.unwrap().pause_reason, None);
        vm.handle.ask(VmRequest::Pause).await.unwrap();
        vm.handle.ask(VmRequest::Resume).await.unwrap();
        assert_eq!(vm.state().await, VmState::Running);
    });
}

#[test]
fn a_governor_can_be_changed_while_its_vm_is_paused() {
    run(async {
        let vm = start(None).await;
        vm.handle.ask(VmRequest::Pause).await.unwrap();
        let change = PressureChange { pause: Some(true), ..Default::default() };
        vm.handle.ask(|reply| VmRequest::ChangePressure(change, reply)).await.unwrap();
        assert_eq!(vm.state().await, VmState::Paused);
    });
}

#[test]
fn a_vm_that_is_paused_by_hand_and_fails_meanwhile_stays_paused() {
    run(async {
        let vm = start(None).await;
        vm.handle.ask(VmRequest::Pause).await.unwrap();
        assert!(matches!(vm.handle.ask(VmRequest::Pause).await, Err(VmError::WrongState { .. })));
        vm.send(0, MachineEvent::MustPause { reason: "flush failed".to_owned() });
        assert!(matches!(vm.handle.ask(VmRequest::Resume).await, Err(VmError::CannotResume { .. })));
        assert_eq!(vm.log(), ["build", "resume", "pause", "pause"]);
    });
}

#[test]
fn a_vm_that_is_shut_down_is_resized_in_its_configuration_and_booted_again() {
    run(async {
        let vm = start(None).await;
        vm.handle.ask(VmRequest::Shutdown).await.unwrap();
        assert_eq!(vm.state().await, VmState::Created);
        let resize = ResizeRequest { desired_ram: Some(1 << 30), ..Default::default() };
        vm.handle.ask(|reply| VmRequest::Resize(resize, reply)).await.unwrap();
        assert_eq!(vm.handle.ask(VmRequest::Info).await.unwrap().config.memory.size, 1 << 30);
        vm.handle.ask(VmRequest::Boot).await.unwrap();
        assert_eq!(vm.state().await, VmState::Running);
    });
}

#[test]
fn a_boot_that_fails_is_the_runs_error() {
    run(async {
        let vm = start(Some(0)).await;
        assert!(matches!(vm.end.await.unwrap(), Err(RunError::Boot(VmError::Failed(_)))));
    });
}

#[test]
fn the_vm_is_gone_before_the_vmm_says_that_it_ends() {
    run(async {
        let vm = start(None).await;
        vm.handle.ask(VmRequest::ShutdownVmm).await.unwrap();
        assert_eq!(vm.log.lock().last(), Some(&"release"));
        assert!(vm.end.await.unwrap().is_ok());
    });
}

#[test]
fn a_vmm_without_a_vm_serves_until_there_is_one() {
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
        let create = async || vm.handle.ask(|reply| VmRequest::Create(test_config().into(), reply)).await;
        create().await.unwrap();
        assert_eq!(vm.state().await, VmState::Created);
        assert!(matches!(create().await, Err(VmError::AlreadyCreated)));
        assert!(vm.log().is_empty(), "nothing is built before it is booted");
        vm.handle.ask(VmRequest::Boot).await.unwrap();
        assert_eq!(vm.state().await, VmState::Running);
        assert!(matches!(create().await, Err(VmError::AlreadyCreated)));
        // Deleting ends it; another one may follow.
        vm.handle.ask(VmRequest::Delete).await.unwrap();
        assert!(matches!(vm.handle.ask(VmRequest::Info).await, Err(VmError::NotCreated)));
        create().await.unwrap();
        // What the first one has still to say is about nobody.
        vm.send(0, MachineEvent::GuestShutdown);
        vm.handle.ask(VmRequest::Boot).await.unwrap();
        vm.send(0, triple_fault());
        assert_eq!(vm.state().await, VmState::Running);
        assert_eq!(vm.log(), ["build", "resume", "drop", "release", "build", "resume"]);
    });
}

#[test]
fn buttons_and_interrupts_are_for_a_guest_that_runs() {
    run(async {
        let vm = start(None).await;
        vm.handle.ask(VmRequest::PowerButton).await.unwrap();
        vm.handle.ask(VmRequest::Nmi).await.unwrap();
        assert_eq!(vm.log(), ["build", "resume", "power button", "nmi"]);
        vm.handle.ask(VmRequest::Pause).await.unwrap();
        for refused in [vm.handle.ask(VmRequest::PowerButton).await, vm.handle.ask(VmRequest::Nmi).await] {
            assert!(matches!(refused, Err(VmError::WrongState { .. })));
        }
    });
}

#[test]
fn a_boot_that_fails_leaves_the_vm_created() {
    run(async {
        let vm = serve(Some(0), None, AtGuestShutdown::End);
        vm.handle.ask(|reply| VmRequest::Create(test_config().into(), reply)).await.unwrap();
        assert!(matches!(vm.handle.ask(VmRequest::Boot).await, Err(VmError::Failed(_))));
        assert_eq!(vm.state().await, VmState::Created);
        vm.handle.ask(VmRequest::Delete).await.unwrap();
    });
}

#[test]
fn a_vm_that_does_not_run_is_resized_in_its_configuration() {
    run(async {
        let vm = serve(None, None, AtGuestShutdown::End);
        vm.handle.ask(|reply| VmRequest::Create(test_config().into(), reply)).await.unwrap();
        let resize = async |resize| vm.handle.ask(|reply| VmRequest::Resize(resize, reply)).await;
        let more =
            ResizeRequest { desired_ram: Some(1 << 30), desired_vcpus: Some(1), desired_balloon: Some(0) };
        resize(more).await.unwrap();
        let info = vm.handle.ask(VmRequest::Info).await.unwrap();
        assert_eq!((info.config.memory.size, info.memory_actual_size), (1 << 30, 1 << 30));
        // All of it or nothing.
        for wrong in [
            ResizeRequest { desired_vcpus: Some(3), ..ResizeRequest::default() },
            ResizeRequest {
                desired_ram: Some(2 << 30),
                desired_balloon: Some(1 << 30),
                ..ResizeRequest::default()
            },
            ResizeRequest { desired_ram: Some(0), ..ResizeRequest::default() },
        ] {
            assert!(matches!(resize(wrong).await, Err(VmError::BadRequest(_))));
        }
        let zone = ResizeZoneRequest { id: "pm".to_owned(), desired_ram: 0 };
        let refused = vm.handle.ask(|reply| VmRequest::ResizeZone(zone, reply)).await;
        assert!(matches!(refused, Err(VmError::BadRequest(_))));
        assert_eq!(vm.handle.ask(VmRequest::Info).await.unwrap().config.memory.size, 1 << 30);
        assert!(vm.log().is_empty());
    });
}

#[test]
fn the_next_boot_has_what_has_come_by_acpi() {
    run(async {
        let mut config = test_config();
        config.memory = MemoryConfig::parse("size=512M,hotplug_size=1G").unwrap();
        let vm = serve(None, Some(config), AtGuestShutdown::End);
        let resize = async |bytes| {
            let resize = ResizeRequest { desired_ram: Some(bytes), ..ResizeRequest::default() };
            vm.handle.ask(|reply| VmRequest::Resize(resize, reply)).await
        };
        let size = async || vm.handle.ask(VmRequest::Info).await.unwrap().config.memory.size;
        for bytes in [1 << 30, 256 << 20] {
            resize(bytes).await.unwrap();
            assert_eq!(size().await, bytes);
        }
        // What could not be booted is refused, and the machine is not asked.
        assert!(matches!(resize(5000).await, Err(VmError::BadRequest(_))));
        assert_eq!(size().await, 256 << 20);
        assert_eq!(vm.log(), ["build", "resume", "resize", "resize"]);
    });
}

#[test]
fn the_configuration_has_the_vcpus_that_the_guest_was_asked_to_have() {
    run(async {
        let mut config = test_config();
        config.cpus.max_vcpus = 4;
        let vm = serve(None, Some(config), AtGuestShutdown::End);
        let resize = async |vcpus| {
            let resize = ResizeRequest { desired_vcpus: Some(vcpus), ..ResizeRequest::default() };
            vm.handle.ask(|reply| VmRequest::Resize(resize, reply)).await
        };
        let count = async || vm.handle.ask(VmRequest::Info).await.unwrap().config.cpus.boot_vcpus;
        resize(4).await.unwrap();
        assert_eq!(count().await, 4);
        for wrong in [0, 5, 255] {
            let refused = resize(wrong).await.unwrap_err().to_string();
            assert_eq!(refused, format!("desired_vcpus {wrong}: the VM can have 1 to 4 vCPUs"));
        }
        assert!(matches!(resize(3).await, Err(VmError::VcpusLeaving { .. })));
        assert_eq!(count().await, 4);
        vm.send(0, MachineEvent::VcpuEjected { index: 2 });
        vm.handle.ask(VmRequest::Reboot).await.unwrap();
        // Of an earlier machine.
        vm.send(0, MachineEvent::VcpuEjected { index: 1 });
        assert_eq!(count().await, 4);
        let expected = "build, resume, resize vcpus, resize vcpus, vcpu ejected, drop, build, resume";
        assert_eq!(vm.log().join(", "), expected);
    });
}

#[test]
fn what_happens_is_told_in_its_order() {
    run(async {
        let vm = start(None).await;
        vm.handle.ask(VmRequest::Pause).await.unwrap();
        vm.handle.ask(VmRequest::Resume).await.unwrap();
        let resize = ResizeRequest { desired_ram: Some(1 << 30), ..ResizeRequest::default() };
        vm.handle.ask(|reply| VmRequest::Resize(resize, reply)).await.unwrap();
        vm.handle.ask(VmRequest::Reboot).await.unwrap();
        vm.handle.ask(VmRequest::Shutdown).await.unwrap();
        // What is refused is not told.
        assert!(vm.handle.ask(VmRequest::Pause).await.is_err());
        assert!(vm.handle.ask(VmRequest::Resume).await.is_err());
        vm.handle.ask(VmRequest::Boot).await.unwrap();
        vm.send(2, MachineEvent::MustPause { reason: "no room".to_owned() });
        assert!(vm.handle.ask(VmRequest::Resume).await.is_err());
        vm.handle.ask(VmRequest::Delete).await.unwrap();
        let expected = [
            "booting booted pausing paused resuming resumed resizing resized rebooting rebooted shutdown",
            "booting booted failed shutdown deleted",
        ];
        assert_eq!(vm.told().await.join(" "), expected.join(" "));
        // A boot that fails only begins; a guest that switches itself off takes all with it.
        let vm = serve(Some(0), None, AtGuestShutdown::End);
        vm.handle.ask(|reply| VmRequest::Create(test_config().into(), reply)).await.unwrap();
        assert!(vm.handle.ask(VmRequest::Boot).await.is_err());
        assert_eq!(vm.told().await, ["booting"]);
        let vm = start(None).await;
        vm.send(0, MachineEvent::GuestShutdown);
        while !vm.end.is_finished() {
            tokio::task::yield_now().await;
        }
        assert_eq!(vm.told().await, ["booting", "booted", "shutdown", "deleted"]);
    });
}

#[test]
fn with_no_shutdown_the_vmm_outlives_its_guest() {
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
