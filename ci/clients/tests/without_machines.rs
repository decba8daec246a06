//! Runs every client against the API server. The fake VM task has no machine, but responds as if it
//! had one.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::PathBuf;
use std::process::Command;

use client_tests::vm::Vm;
use client_tests::{every_call, replay};
use foreshore::api::{Limits, Server, Socket, router};
use foreshore::config::{ApiSocket, DeviceConfig, VmConfig};
use foreshore::vm::request::{
    PciDeviceInfo, Reply, Requests, Resize, ResizeRequest, VmError, VmHandle, VmInfo, VmRequest,
    VmState,
};
use foreshore_devices::events::EventMonitor;
use foreshore_devices::events::{Event, Events, Monitor};
use serde_json::json;

/// State of the fake VM.
struct CreatedVm {
    config: Box<VmConfig>,
    state: VmState,
    memory_bytes: u64,
    devices: usize,
}

struct FakeVmTask {
    vm: Option<CreatedVm>,
    events: Events,
}

impl FakeVmTask {
    fn created(&mut self) -> Result<&mut CreatedVm, VmError> {
        self.vm.as_mut().ok_or(VmError::NotCreated)
    }

    /// Changes the state, and emits the event for it.
    fn go(
        &mut self,
        (call, event): (&'static str, Event<'_>),
        from: &[VmState],
        to: VmState,
    ) -> Result<(), VmError> {
        let created = self.created()?;
        if !from.contains(&created.state) {
            return Err(VmError::WrongState {
                call,
                state: created.state,
                needs: "in another state",
                remedy: "another call changes it",
            });
        }
        created.state = to;
        self.events.emit(event);
        Ok(())
    }

    fn info(&mut self) -> Result<VmInfo, VmError> {
        let created = self.created()?;
        let state = format!("{:?}", created.state);
        let info = json!({"config": created.config, "state": state, "memory_actual_size": created.memory_bytes});
        Ok(serde_json::from_value(info).expect("vm.info's fields"))
    }

    fn create(&mut self, config: Box<VmConfig>) -> Result<(), VmError> {
        if self.vm.is_some() {
            return Err(VmError::AlreadyCreated);
        }
        let memory_bytes = config.memory.size;
        self.vm = Some(CreatedVm { config, state: VmState::Created, memory_bytes, devices: 0 });
        Ok(())
    }

    fn add(&mut self, device: DeviceConfig) -> Result<Option<PciDeviceInfo>, VmError> {
        let created = self.created()?;
        if let DeviceConfig::Net(net) = device {
            // A request that contains a MAC address must also pass a queue.
            assert_eq!(net.fds.len(), usize::from(net.mac.is_some()), "{net:?}");
            created.config.net.push(net);
        }
        created.devices += 1;
        // The strict client gives a name to the first device that it adds to a running VM.
        let id = if created.devices == 2 {
            "disk1".to_owned()
        } else {
            format!("_device{}", created.devices)
        };
        let bdf = format!("0000:00:{:02x}.0", created.devices);
        Ok((created.state != VmState::Created).then_some(PciDeviceInfo { id, bdf }))
    }

    fn resize(&mut self, resize: &ResizeRequest) -> Result<(), VmError> {
        let created = self.created()?;
        created.memory_bytes = resize.desired_ram.unwrap_or(created.memory_bytes);
        if created.config.memory.resizes_by_acpi() {
            created.config.memory.size = created.memory_bytes;
        }
        Ok(())
    }

    /// Handles a request. Returns false for the last request.
    fn serve(&mut self, request: VmRequest) -> bool {
        use VmState::{Created, Paused, Running};
        fn answer<T>(reply: Reply<T>, result: Result<T, VmError>) {
            let _ = reply.send(result);
        }
        match request {
            VmRequest::Create(config, reply) => answer(reply, self.create(config)),
            VmRequest::Delete(reply) => {
                self.vm = None;
                answer(reply, Ok(()));
            }
            VmRequest::Info(reply) => answer(reply, self.info()),
            VmRequest::Boot(reply) => {
                answer(reply, self.go(("vm.boot", Event::VmBooted), &[Created], Running))
            }
            VmRequest::Pause(reply) => {
                answer(reply, self.go(("vm.pause", Event::VmPaused), &[Running], Paused))
            }
            VmRequest::Resume(reply) => {
                answer(reply, self.go(("vm.resume", Event::VmResumed), &[Paused], Running))
            }
            VmRequest::Shutdown(reply) => {
                answer(
                    reply,
                    self.go(("vm.shutdown", Event::VmShutdown), &[Running, Paused], Created),
                );
            }
            VmRequest::Reboot(reply) => {
                answer(
                    reply,
                    self.go(("vm.reboot", Event::VmRebooted), &[Running, Paused], Running),
                );
            }
            VmRequest::PowerButton(reply) | VmRequest::Nmi(reply) => {
                let result = self.created().and_then(|created| match created.state {
                    Running | Paused => Ok(()),
                    state => Err(VmError::WrongState {
                        call: "a change",
                        state,
                        needs: "running",
                        remedy: "vm.boot boots it",
                    }),
                });
                answer(reply, result);
            }
            VmRequest::Resize(Resize::Vm(resize), reply) => answer(reply, self.resize(&resize)),
            VmRequest::Resize(Resize::Zone(resize), reply) => {
                let resize =
                    ResizeRequest { desired_ram: Some(resize.desired_ram), ..Default::default() };
                answer(reply, self.resize(&resize));
            }
            VmRequest::ResizeDisk(_, reply) => answer(reply, Ok(())),
            VmRequest::GrowPool(_, reply) => answer(reply, Ok(())),
            VmRequest::AddDevice(device, reply) => answer(reply, self.add(*device)),
            VmRequest::RemoveDevice(_, reply) => answer(reply, Ok(())),
            VmRequest::Counters(reply) => {
                let disk = [("read_bytes", 1), ("write_bytes", 0)].into();
                answer(reply, Ok([("disk0".to_owned(), disk)].into()));
            }
            VmRequest::ShutdownVmm(reply) => {
                self.events.emit(Event::VmmShutdown);
                answer(reply, Ok(()));
                return false;
            }
            // No client makes calls that only Foreshore supports.
            other => panic!("{other:?}"),
        }
        true
    }
}

async fn run_vm_task(mut requests: Requests, mut vm_task: FakeVmTask) {
    while let Some(request) = requests.recv().await {
        if !vm_task.serve(request) {
            break;
        }
    }
}

/// Runs a client, which may block, against a VMM. If `started_with` is set, the VMM has a running
/// VM.
fn against<T: Send + 'static>(
    started_with: Option<VmConfig>,
    client: impl FnOnce(&Vm) -> T + Send + 'static,
) -> T {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| -> PathBuf { dir.path().join(name) };
    let vm = Vm {
        api_socket: path("api"),
        kernel: path("vmlinuz"),
        initramfs: path("initrd"),
        console: path("console"),
        vsock: path("vsock"),
        disks: [path("disk0"), path("disk1")],
        pmem: path("pmem"),
        events: path("events"),
        taps: vec!["one".to_owned(), "other".to_owned()],
        // The VMM does not check the type of the file.
        open_tap: |_| Ok(vec![File::open("/dev/null")?]),
    };
    assert!(Command::new("mkfifo").arg(&vm.events).status().unwrap().success());
    let events = Events::start();
    // Most clients do not read the FIFO, and the event monitor would wait for a reader.
    let _reader = File::options().read(true).write(true).open(&vm.events).unwrap();
    Monitor::start(&EventMonitor::Path(vm.events.clone()), &events).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (handle, requests) = VmHandle::channel();
        let mut vm_task = FakeVmTask { vm: None, events: events.clone() };
        if let Some(config) = started_with {
            vm_task.create(Box::new(config)).unwrap();
            vm_task.created().unwrap().state = VmState::Running;
        }
        let vm_task = tokio::spawn(run_vm_task(requests, vm_task));
        let socket =
            Socket::for_api(&ApiSocket::Path(vm.api_socket.clone(), Default::default())).unwrap();
        let server = Server::start(socket, router(handle, events), Limits::API).unwrap();
        let done = tokio::task::spawn_blocking(move || client(&vm)).await;
        server.stop().await;
        vm_task.abort();
        done.expect("the client")
    })
}

#[test]
fn crate_can_make_every_call_of_the_description() {
    let made = against(None, |vm| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(every_call::run(vm, &|| Ok(()))).unwrap()
    });
    let names = include_str!("../../../vmm/tests/compatibility/cloud-hypervisor-0.3.0.names");
    let all = names.lines().filter_map(|line| line.strip_prefix("call ")?.split(' ').nth(1));
    let missing: Vec<_> = all.filter(|call| !made.contains(call)).collect();
    assert_eq!(missing, [] as [&str; 0]);
    assert!(made.iter().collect::<BTreeSet<_>>().len() >= 30);
}

#[test]
fn every_replay_succeeds() {
    for (name, replay) in replay::ALL {
        let started_with = (*name == "flintlock").then(|| {
            serde_json::from_value(json!({"payload": {"kernel": "/vmlinuz"}}))
                .expect("a minimal configuration")
        });
        against(started_with, |vm| replay(vm, &|| Ok(())))
            .unwrap_or_else(|error| panic!("{name}: {error:#}"));
    }
}
