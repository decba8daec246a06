//! Attaches devices that need no more than a configuration and an event loop.

use std::sync::Arc;
use std::time::Instant;

use balloon::proto::VSOCK_PORT;
use tokio::sync::Notify;

use super::error::BuildError;
use super::fabric::Fabric;
use super::taps::Taps;
use crate::config::{ConsoleMode, DiskConfig, ImageType, NetConfig, VmConfig, VsockConfig};
use crate::device::{DeviceContext, NewDevice};
use crate::disk::image::{ImageOptions, RawImage};
use crate::event_loop::EventLoopHandle;
use crate::events::{Event, Events};
use crate::governor::DESCRIPTOR_LACK;
use crate::governor::task::Agents;
use crate::host_console::{ConsoleFiles, HostConsole, Port};
use crate::log::sparsely;
use crate::memory::Memory;
use crate::memory::layout::{SERIAL_GSI, SERIAL_PORT};
use crate::pvpanic;
use crate::serial::Serial;
use crate::virtio::balloon::BalloonHandle;
use crate::virtio::block::{Block, DiskMetrics, DiskShape};
use crate::virtio::mem::{MemEvent, MemHandle, MemObserver, PlugBudgets, UNSUPPORTED_DRIVER};
use crate::virtio::net::tap::Tap;
use crate::virtio::vsock::{GuestPorts, VsockPorts};
use crate::virtio::{balloon as balloon_device, console, mem, net, rng, vsock, watchdog};
use balloon::UNSUPPORTED_DRIVER_REASON;

/// Registers of a 16550.
const SERIAL_LEN: u64 = 8;

/// COM1.
pub(super) fn attach_serial(
    config: &VmConfig,
    files: &mut ConsoleFiles,
    fabric: &mut Fabric,
    event_loop: &EventLoopHandle,
) -> Result<(), BuildError> {
    let console = HostConsole::open(Port::Serial, &config.serial, files)
        .map_err(BuildError::device("--serial"))?;
    let Some(mut console) = console else { return Ok(()) };
    if [config.serial.mode, config.console.mode] == [ConsoleMode::Tty; 2] {
        // There is one keyboard, and it is the console's.
        console.input = None;
    }
    let serial = Serial::new(console, fabric.line(SERIAL_GSI)?, event_loop)
        .map_err(BuildError::device("--serial"))?;
    fabric.expose(serial.metrics());
    fabric.ports.insert(u64::from(SERIAL_PORT), SERIAL_LEN, serial)?;
    Ok(())
}

/// Builds a device that stays as long as the machine, if the configuration has it.
type Build =
    fn(&VmConfig, &mut ConsoleFiles, &DeviceContext) -> Result<Option<NewDevice>, BuildError>;

/// Devices that need a configuration and the machine's context only, in the order of their slots.
const FIXED: [Build; 4] = [
    |config, files, context| {
        let console = HostConsole::open(Port::Console, &config.console, files);
        let console = console.map_err(BuildError::device("--console"))?;
        Ok(console.map(|console| console::build(console, context)))
    },
    |config, _, context| {
        rng::build(&config.rng, context).map(Some).map_err(BuildError::device("--rng"))
    },
    |config, _, context| Ok(watchdog::build(config.watchdog, context)),
    |config, _, context| Ok(pvpanic::build(config.pvpanic, context)),
];

/// Attaches the devices that stay as long as the machine.
pub(super) fn attach_fixed(
    config: &VmConfig,
    files: &mut ConsoleFiles,
    fabric: &mut Fabric,
    memory: &Memory,
    context: &DeviceContext,
) -> Result<(), BuildError> {
    for build in FIXED {
        if let Some(new) = build(config, files, context)? {
            fabric.attach(new, memory)?;
        }
    }
    Ok(())
}

/// Sockets between guest and host; the agent's port ends in this process.
pub(super) fn attach_vsock(
    config: &VsockConfig,
    fabric: &mut Fabric,
    memory: &Memory,
    event_loop: &EventLoopHandle,
    agents: &Agents,
) -> Result<u8, BuildError> {
    let mut ports = VsockPorts::new();
    // Reports move memory: they are believed of the agent, not of every process in the guest.
    ports
        .listen(VSOCK_PORT, GuestPorts::Privileged, agents.clone())
        .map_err(BuildError::device("--vsock"))?;
    let new = vsock::build(config, ports, event_loop).map_err(BuildError::device("--vsock"))?;
    fabric.attach(new, memory)
}

/// Image files and block devices, each with threads of its own.
pub(super) fn attach_disks(
    config: &VmConfig,
    fabric: &mut Fabric,
    memory: &Memory,
) -> Result<(), BuildError> {
    config.disks.iter().try_for_each(|disk| attach_disk(disk, fabric, memory).map(drop))
}

/// An image file or block device that has an id (`VmConfig::name_devices`).
pub(super) fn attach_disk(
    config: &DiskConfig,
    fabric: &mut Fabric,
    memory: &Memory,
) -> Result<u8, BuildError> {
    let options = ImageOptions {
        readonly: config.readonly,
        direct: config.direct,
        sparse: config.sparse,
        is_called_raw: config.image_type == ImageType::Raw,
        guest_block_bytes: config.guest_block_size,
    };
    let image = RawImage::open(&config.path, options).map_err(BuildError::device("--disk"))?;
    let id = config.id.clone().expect("a VM's devices have ids");
    let shape = DiskShape {
        serial: config.serial.clone().unwrap_or_else(|| id.clone()),
        id: id.clone(),
        queues: config.num_queues,
        queue_size: config.queue_size,
        read_only: config.readonly,
    };
    let device = Block::new(shape, image)?;
    let handle = device.handle();
    let source = Arc::new(DiskMetrics { disk: id.clone(), counters: handle.metrics() });
    let new = NewDevice::removable(&id, "disk", device).at(config.pci_device_id);
    fabric.attach(new.exposing(source).with_handle(handle), memory)
}

/// Network interfaces. Resources keep the host's side of them.
pub(super) fn attach_nets(
    taps: &Taps,
    fabric: &mut Fabric,
    memory: &Memory,
) -> Result<(), BuildError> {
    taps.list()
        .iter()
        .try_for_each(|(config, tap)| attach_net(config, tap, taps, fabric, memory).map(drop))
}

/// One, with threads of its own.
pub(super) fn attach_net(
    config: &NetConfig,
    tap: &Arc<Tap>,
    taps: &Taps,
    fabric: &mut Fabric,
    memory: &Memory,
) -> Result<u8, BuildError> {
    let id = config.id.clone().unwrap_or_default();
    let new = net::build(config, tap).map_err(BuildError::device(format!("--net id={id}")))?;
    let taps = taps.clone();
    fabric.attach(new.undone_by(move |_| taps.remove(&id)), memory)
}

/// A balloon. `plugged` is notified when something changes.
pub(super) fn attach_balloon(
    config: &VmConfig,
    fabric: &mut Fabric,
    memory: &Memory,
    event_loop: &EventLoopHandle,
    plugged: &Arc<Notify>,
) -> Result<Option<BalloonHandle>, BuildError> {
    let Some(config) = &config.balloon else { return Ok(None) };
    let plugged = Arc::clone(plugged);
    let observer = Arc::new(move || plugged.notify_one());
    let (new, handle) = balloon_device::build(config, memory, event_loop, observer)
        .map_err(BuildError::device("--balloon"))?;
    fabric.attach(new, memory)?;
    Ok(Some(handle))
}

/// Who hears of what becomes of zones.
#[derive(Clone)]
pub(super) struct MemorySignals {
    /// Notified when something changes.
    pub plugged: Arc<Notify>,
    /// Told what has come of a request.
    pub events: Events,
}

impl MemorySignals {
    fn observer(&self) -> MemObserver {
        let (plugged, events) = (Arc::clone(&self.plugged), self.events.clone());
        Arc::new(move |zone: &str, event| {
            if let Some(event) = event_of(zone, event) {
                events.tell_of_guest(event);
            }
            plugged.notify_one();
        })
    }
}

fn event_of(zone: &str, event: MemEvent) -> Option<Event<'_>> {
    match event {
        MemEvent::HostFailure { reason, plugged_bytes, requested_bytes } => {
            let reason = reason.as_str();
            sparsely!(
                warn,
                zone,
                reason,
                plugged_bytes,
                requested_bytes,
                "The host cannot plug what it was asked for"
            );
            Some(Event::MemoryRefused { zone, reason, requested_bytes })
        }
        MemEvent::DriverUnsupported => {
            Some(Event::MemoryDriverUnsupported { zone, reason: UNSUPPORTED_DRIVER })
        }
        MemEvent::Withdrawn { requested_bytes } => {
            Some(Event::MemoryRefused { zone, reason: UNSUPPORTED_DRIVER_REASON, requested_bytes })
        }
        MemEvent::Held { requested_bytes } => {
            Some(Event::MemoryRefused { zone, reason: DESCRIPTOR_LACK, requested_bytes })
        }
        MemEvent::TargetReached { requested_bytes: plugged_bytes } => {
            Some(Event::MemoryReached { zone, plugged_bytes })
        }
        _ => None,
    }
}

/// A virtio-mem device for each hotplug part.
pub(super) fn attach_memory(
    fabric: &mut Fabric,
    memory: &mut Memory,
    event_loop: &EventLoopHandle,
    signals: &MemorySignals,
    budgets: &mut PlugBudgets,
) -> Result<Vec<MemHandle>, BuildError> {
    let mut handles = Vec::new();
    for part in memory.take_hotplug() {
        let budget = budgets.of(&part.spec, Instant::now());
        let view = memory.view().clone();
        let (new, handle) = mem::build(part, &view, event_loop, signals.observer(), budget);
        fabric.attach(new, memory)?;
        handles.push(handle);
    }
    Ok(handles)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::Seen;

    #[test]
    fn a_refused_driver_is_an_event_and_so_is_the_request_that_it_ends() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let (plugged, events) = (Arc::<Notify>::default(), Events::start());
            let mut watcher = events.watch();
            let observer =
                MemorySignals { plugged: Arc::clone(&plugged), events: events.clone() }.observer();
            observer("pm", MemEvent::DriverUnsupported);
            // The governor looks at the zone at once.
            plugged.notified().await;
            observer("pm", MemEvent::Withdrawn { requested_bytes: 0 });
            events.end();
            let mut seen = Vec::new();
            while let Some(Seen::Event(told)) = watcher.next().await {
                seen.push((told.event, told.properties.clone().unwrap_or_default()));
            }
            let [(refused, driver), (ended, request)] = &seen[..] else { panic!("{seen:?}") };
            assert_eq!((*refused, *ended), ("memory-driver-unsupported", "memory-refused"));
            assert!(driver["reason"].contains("5.16") && driver["zone"] == "pm", "{driver:?}");
            assert_eq!((&*request["reason"], &*request["requested_bytes"]), ("driver", "0"));
        });
    }

    #[test]
    fn a_driver_that_repeats_itself_is_told_of_once_and_one_that_goes_up_and_down_not_for_ever() {
        let (plugged, events) = (Arc::default(), Events::start());
        let reached = |machine: &MemObserver, requested_bytes| {
            machine("pm", MemEvent::TargetReached { requested_bytes });
            events.counters().told()[&("foreshore", "memory-reached")]
        };
        let observer =
            || MemorySignals { plugged: Arc::clone(&plugged), events: events.clone() }.observer();
        let first = observer();
        assert!((0..10_000).all(|_| reached(&first, 0) == 1));
        let told = (0..10_000).fold(0, |_, nth| reached(&first, nth % 2));
        assert!((2..100).contains(&told), "{told}");
        // Of these one of the two is news, whichever was told last.
        assert!(events.counters().withheld() > 4900, "{}", events.counters().withheld());
        // Nor has a machine more for it that comes after others.
        for nth in 0..1000 {
            events.end_machine();
            reached(&observer(), nth);
        }
        assert!(reached(&first, 0) <= told + 1);
    }
}
