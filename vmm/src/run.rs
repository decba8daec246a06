//! Life of the VMM process, from a validated command line to its exit.

use std::io;
use std::sync::Arc;

use foreshore_confinement::landlock::{self, Access, Rule};
use foreshore_confinement::seccomp::SeccompError;
use foreshore_confinement::thread::{self, ThreadKind};
use foreshore_devices::end_signals;
use foreshore_devices::events::{Event, Events, Monitor, MonitorError};
use foreshore_devices::metrics::Metrics;
use foreshore_devices::virtio::net::tap::TapError;
use thiserror::Error;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{error, info};

use crate::api::{self, CallMetrics, Limits, Server, ServerMetrics, SocketError};
use crate::config::{LandlockMode, Launch, MetricsAddress};
use crate::metrics_server;
use crate::opened::{Opened, Sockets};
use crate::vm::build::factory::KvmFactory;
use crate::vm::landlock::{FileLimits, LandlockMetrics, LandlockPolicy, READABLE};
use crate::vm::request::{VmHandle, VmRequest};
use crate::vm::resources::Resources;
use crate::vm::resources::host_devices::HostDevices;
use crate::vm::vm_task::{self, RestartMetrics, VmTask};

/// Error that ends the VMM.
#[derive(Debug, Error)]
pub enum RunError {
    #[error("cannot give up privileges")]
    Harden(#[source] io::Error),
    #[error("--seccomp")]
    Seccomp(#[from] SeccompError),
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error(transparent)]
    Monitor(#[from] MonitorError),
    #[error("cannot start the tasks of the VMM")]
    Io(#[from] io::Error),
    /// An inherited descriptor is not a tap interface.
    #[error("--net")]
    Net(#[from] TapError),
    /// The VM could not be built, or could not continue to run.
    #[error(transparent)]
    Vm(#[from] vm_task::RunError),
}

/// Runs the VMM until it ends.
///
/// `opened` contains the bound sockets, so a VM never starts without its API.
pub fn run(launch: Launch, opened: Opened) -> Result<(), RunError> {
    let (devices, sockets) = opened.into_parts()?;
    let events = Events::start();
    let monitor =
        launch.event_monitor.as_ref().map(|target| Monitor::start(target, &events)).transpose()?;
    events.emit(Event::VmmStarting);
    let result = serve(launch, devices, sockets, &events);
    events.end();
    if let Some(monitor) = monitor {
        monitor.finish();
    }
    result
}

/// Serves requests until the VM, a client or a signal ends the VMM.
fn serve(
    launch: Launch,
    devices: HostDevices,
    sockets: Sockets,
    events: &Events,
) -> Result<(), RunError> {
    // The VM task runs on this thread, which is blocked for seconds while a machine is built
    // or ended. The servers run on another thread, and can answer some requests in that time.
    let landlock = LandlockPolicy {
        is_always: launch.landlock == LandlockMode::On,
        // VMs of the command line are limited by default. VMs of clients are limited on request.
        is_required: launch.landlock == LandlockMode::On || launch.config.is_none(),
    };
    let mode = launch.landlock;
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime
        .worker_threads(1)
        .thread_name("_api")
        .on_thread_start(move || confine_server(mode))
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let (handle, requests) = VmHandle::channel();
        // A client that has received an answer may end the VMM by a signal.
        tokio::spawn(end_on_signals(handle.clone())?);
        let calls = Arc::<CallMetrics>::default();
        let server = match sockets.api {
            Some(socket) => Some(Server::start(
                socket,
                calls.count_calls(api::router(handle.clone(), events.clone())),
                Limits::API,
            )?),
            None => None,
        };
        let metrics = Arc::new(Metrics::new(&launch.vm_name));
        metrics.add(events.counters());
        metrics.add(calls);
        metrics_server::register_process(&metrics, launch.seccomp);
        let exposition = match sockets.metrics {
            Some(socket) => {
                let names = launch.metrics.as_ref().and_then(MetricsAddress::host_names);
                let router = metrics_server::router(Arc::clone(&metrics), handle.clone(), names);
                Some(Server::start(socket, router, Limits::METRICS)?)
            }
            None => None,
        };
        for (name, server) in [("api", &server), ("metrics", &exposition)] {
            let Some(server) = server else { continue };
            metrics.add(Arc::new(ServerMetrics::new(name, server.counters())));
        }
        tokio::spawn(events.clone().emit_withheld());
        let restarts = Arc::<RestartMetrics>::default();
        metrics.add(Arc::clone(&restarts) as _);
        let limits = Arc::<LandlockMetrics>::default();
        metrics.add(Arc::clone(&limits) as _);
        let limits = FileLimits::new(landlock, limits);
        let factory = KvmFactory::new(Resources::new(metrics, events.clone(), devices), limits);
        let vm_task = VmTask::new(factory, launch.at_guest_shutdown, events.clone(), restarts);
        let result = vm_task.run(launch.config, requests).await;
        // This is the last event. libvirt treats it as the end of the VMM, and it ends the event
        // streams of API clients.
        events.emit(Event::VmmShutdown);
        events.end();
        for server in [server, exposition].into_iter().flatten() {
            server.stop().await;
        }
        Ok(result?)
    })
}

/// Confines a thread of the servers.
fn confine_server(landlock: LandlockMode) {
    if landlock != LandlockMode::Off {
        limit_files_of_server(landlock == LandlockMode::On);
    }
    thread::enter(ThreadKind::Api);
}

/// Limits the files that a thread of the servers can open to [`READABLE`]. Ends the VMM if the
/// kernel refuses the limits although they are required.
fn limit_files_of_server(is_required: bool) {
    let rules = READABLE.map(|path| Rule { path: path.into(), access: Access::Read });
    if let Err(error) = landlock::restrict(&rules) {
        error!(%error, "Cannot limit the files that a thread of the API can open");
        if is_required {
            std::process::exit(1);
        }
    }
}

/// On SIGTERM or SIGINT, ends the VMM as `vmm.shutdown` does. A signal may be pending already.
fn end_on_signals(handle: VmHandle) -> io::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    end_signals::unblock();
    Ok(async move {
        let name = tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        };
        info!(signal = name, "The VMM has received a signal to end");
        // An error means that the VM task has already ended.
        let _ = handle.ask(VmRequest::ShutdownVmm).await;
    })
}
