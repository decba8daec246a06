//! Tests of answers while the VM task is busy.

use super::*;
use crate::config::{DiskConfig, PmMemoryConfig};

/// VM task on a thread of its own, separate from the thread of the API.
struct Elsewhere {
    handle: VmHandle,
    delays: Delays,
    senders: Arc<Mutex<Vec<EventSender>>>,
    /// Error of the request that failed.
    refused: Arc<Mutex<Option<VmError>>>,
    thread: std::thread::JoinHandle<Result<(), RunError>>,
}

impl Elsewhere {
    fn start(
        factory: FakeFactory,
        config: Option<VmConfig>,
        at_guest_shutdown: AtGuestShutdown,
    ) -> Self {
        let (delays, senders) = (factory.delays.clone(), Arc::clone(&factory.senders));
        let (handle, requests) = VmHandle::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let task = VmTask::new(factory, at_guest_shutdown, Events::start(), Arc::default());
            runtime.block_on(task.run(config, requests))
        });
        Self { handle, delays, senders, refused: Arc::default(), thread }
    }

    /// Checks that `begin` causes a call of `what`, which blocks. Until it returns, `vm.info`
    /// should report the state `meanwhile`.
    async fn check(&self, what: &'static str, meanwhile: VmState, begin: impl FnOnce(&Self)) {
        let delay = self.delays.add(what);
        begin(self);
        while self.delays.has(what) {
            let refused = self.refused.lock().take();
            assert!(refused.is_none(), "{what}: {refused:?}");
            tokio::task::yield_now().await;
        }
        for _ in 0..3 {
            assert_eq!(self.handle.info().await.unwrap().state, meanwhile, "{what}");
            assert_eq!(self.handle.status().await.unwrap().state, meanwhile, "{what}");
            assert!(self.handle.zones_unless_busy().await.is_none(), "{what}");
        }
        drop(delay);
        // An answer means that the work is done. An error means that the VMM has ended.
        let _ = self.handle.ask(VmRequest::Info).await;
    }

    /// Sends a request, but does not wait for the answer.
    fn ask<T: Send + 'static>(&self, request: impl FnOnce(Reply<T>) -> VmRequest + 'static) {
        let (handle, refused) = (self.handle.clone(), Arc::clone(&self.refused));
        drop(tokio::task::spawn_local(
            async move { *refused.lock() = handle.ask(request).await.err() },
        ));
    }

    fn end(self) {
        drop(self.handle);
        self.thread.join().unwrap().unwrap();
    }
}

#[test]
fn info_is_answered_with_previous_state_while_owner_is_busy() {
    let vm = Elsewhere::start(FakeFactory::default(), None, AtGuestShutdown::Stay);
    run(async {
        let mut config = test_config();
        // The configuration should still be valid after the resize.
        config.memory.hotplug_size = Some(1 << 30);
        config.pm_memory = vec![PmMemoryConfig::parse("pool=/pool,size=1G").unwrap()];
        vm.handle.ask(|reply| VmRequest::Create(Box::new(config), reply)).await.unwrap();
        vm.check("build", VmState::Created, |vm| vm.ask(VmRequest::Boot)).await;
        let resize = ResizeRequest { desired_ram: Some(1 << 30), ..Default::default() };
        vm.check("resize dram", VmState::Running, |vm| {
            vm.ask(|reply| VmRequest::Resize(Resize::Vm(resize), reply))
        })
        .await;
        let zone = ResizeZoneRequest { id: "pm".to_owned(), desired_ram: 1 << 30 };
        vm.check("resize zone", VmState::Running, |vm| {
            vm.ask(|reply| VmRequest::Resize(Resize::Zone(zone), reply))
        })
        .await;
        let size = ResizeDiskRequest { id: "_disk1".to_owned(), desired_size: 1 << 30 };
        vm.check("resize disk", VmState::Running, |vm| {
            vm.ask(|reply| VmRequest::ResizeDisk(size, reply))
        })
        .await;
        let disk = Box::new(DeviceConfig::Disk(DiskConfig::parse("path=/d").unwrap()));
        vm.check("add device", VmState::Running, |vm| {
            vm.ask(|reply| VmRequest::AddDevice(disk, reply))
        })
        .await;
        vm.check("drop", VmState::Running, |vm| vm.ask(VmRequest::Reboot)).await;
        // Returns a function that sends an event of the guest.
        let event = |event| move |vm: &Elsewhere| vm.senders.lock().last().unwrap().send(event);
        vm.check("build", VmState::Running, event(MachineEvent::GuestReset)).await;
        vm.check("drop", VmState::Running, event(MachineEvent::GuestShutdown)).await;
        vm.check("build", VmState::Created, |vm| vm.ask(VmRequest::Boot)).await;
        assert_eq!(vm.handle.info().await.unwrap().state, VmState::Running);
        vm.handle.ask(VmRequest::ShutdownVmm).await.unwrap();
        assert!(matches!(vm.handle.info().await, Err(VmError::Ending)));
    });
    vm.end();
}

/// VM from the command line. When it ends, the VMM ends too.
#[test]
fn info_is_answered_during_initial_boot_and_final_shutdown() {
    let factory = FakeFactory::default();
    let building = factory.delays.add("build");
    let vm = Elsewhere::start(factory, Some(test_config()), AtGuestShutdown::End);
    run(async {
        while vm.delays.has("build") {
            tokio::task::yield_now().await;
        }
        assert_eq!(vm.handle.info().await.unwrap().state, VmState::Created);
        drop(building);
        while vm.handle.info().await.unwrap().state != VmState::Running {}
        let end = MachineEvent::GuestShutdown;
        vm.check("drop", VmState::Running, |vm| vm.senders.lock()[0].send(end)).await;
    });
    vm.end();
}

#[test]
fn pause_is_answered_after_standstill_without_delaying_others() {
    run(async {
        let vm = start(None).await;
        let moves = vm.delays.add("stand still");
        let handle = vm.handle.clone();
        let pause = tokio::task::spawn_local(async move { handle.ask(VmRequest::Pause).await });
        // Requests are handled one at a time, so an answer means that the VM task has completed its
        // part of the pause.
        while vm.state().await != VmState::Paused {}
        assert_eq!(vm.state().await, VmState::Paused);
        assert!(!pause.is_finished());
        drop(moves);
        pause.await.unwrap().unwrap();
    });
}

#[test]
fn info_shows_memory_size_without_resident_sizes() {
    run(async {
        let vm = start(None).await;
        let info = vm.handle.ask(VmRequest::Info).await.unwrap();
        assert_eq!(info.memory_actual_size, 3 << 30);
        assert!(!vm.log().contains(&"zones"));
    });
}
