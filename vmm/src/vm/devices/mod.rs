//! Attaches the devices of a machine in the order of their PCI slots, and connects them to the
//! governor. Each device is constructed by the code in its own folder.

use std::sync::Arc;
use std::time::Instant;

use balloon::proto::{TRIM_PORT, VSOCK_PORT};
use foreshore_devices::bus::BusRange;
use foreshore_devices::device::{
    AttachedDevice, DeviceContext, DeviceList, InterruptLine, SetupResult,
};
use foreshore_devices::event_loop::EventLoopHandle;
use foreshore_devices::events::{Event, Events};
use foreshore_devices::host_console::{ConsoleFiles, HostConsole, Port};
use foreshore_devices::log::rate_limited;
use foreshore_devices::memory::Memory;
use foreshore_devices::memory::layout::{SERIAL_GSI, SERIAL_PORT};
use foreshore_devices::metrics::Registration;
use foreshore_devices::serial::Serial;
use foreshore_devices::virtio::mem::{MemEvent, MemObserver, PlugBudgets, UNSUPPORTED_DRIVER};
use foreshore_devices::virtio::net::VhostFiles;
use foreshore_devices::virtio::net::tap::Tap;
use foreshore_devices::virtio::vsock::{GuestPorts, VsockPorts};
use foreshore_devices::virtio::{balloon as balloon_device, block, console, mem, net, rng, vsock};
use foreshore_devices::volume::build::build_file;
use tokio::sync::Notify;

use crate::config::{BalloonConfig, ConsoleMode, DiskConfig, NetConfig, VmConfig, VsockConfig};
use crate::governor::DESCRIPTOR_LACK;
use crate::governor::task::Agents;
use crate::vm::error::BuildError;
use crate::vm::resources::Resources;
use balloon::UNSUPPORTED_DRIVER_REASON;

/// Number of registers of a 16550 UART.
const SERIAL_LEN: u64 = 8;

/// Serial port COM1. When dropped, it removes its port from the bus and undoes its registrations.
pub(in crate::vm) struct SerialPort {
    _ports: BusRange,
    _line: InterruptLine,
    _metrics: Registration,
}

/// Attaches COM1, unless it is switched off.
pub(in crate::vm) fn attach_serial(
    config: &VmConfig,
    files: &mut ConsoleFiles,
    context: &DeviceContext,
) -> SetupResult<Option<SerialPort>> {
    let console = HostConsole::open(Port::Serial, &config.serial, files)?;
    let Some(mut console) = console else { return Ok(None) };
    if [config.serial.mode, config.console.mode] == [ConsoleMode::Tty; 2] {
        // A terminal has only one input, which goes to the console.
        console.input = None;
    }
    let (irq, _line) = context.line(SERIAL_GSI)?;
    let serial = Serial::new(console, irq, &context.machine.event_loop)?;
    let _metrics = context.machine.metrics.register(serial.metrics());
    let _ports = context.ports.attach(u64::from(SERIAL_PORT), SERIAL_LEN, serial)?;
    Ok(Some(SerialPort { _ports, _line, _metrics }))
}

/// Attaches the devices that cannot be removed from a running machine.
pub(in crate::vm) fn attach_fixed(
    config: &VmConfig,
    files: &mut ConsoleFiles,
    context: &DeviceContext,
    devices: &mut DeviceList,
) -> Result<(), BuildError> {
    let console = HostConsole::open(Port::Console, &config.console, files);
    if let Some(console) = console.map_err(BuildError::device("--console"))? {
        let console = console::build(console, context);
        devices.push(console.map_err(BuildError::device("--console"))?);
    }
    devices.push(rng::build(&config.rng, context).map_err(BuildError::device("--rng"))?);
    for switch in config.switches.iter() {
        let device = (switch.build)(context);
        devices.push(device.map_err(BuildError::device(format!("--{}", switch.key)))?);
    }
    Ok(())
}

/// Attaches the devices that can be added to and removed from a running machine. `--pmem` devices
/// are attached later, because their slots follow those of volumes. `resources` keeps the host side
/// of each network interface.
pub(in crate::vm) fn attach_removable(
    config: &VmConfig,
    resources: &Resources,
    context: &DeviceContext,
    devices: &mut DeviceList,
) -> Result<(), BuildError> {
    for disk in &config.disks {
        devices.push(build_disk(disk, context)?);
    }
    for (net, tap) in resources.taps().list() {
        devices.push(build_net(&net, &tap, resources.vhost(), context)?);
    }
    Ok(())
}

/// Attaches the files of `--pmem` in the order of the configuration, because the guest numbers them
/// in the order of their PCI slots.
pub(in crate::vm) fn attach_files(
    resources: &Resources,
    memory: &mut Memory,
    context: &DeviceContext,
    devices: &mut DeviceList,
) -> Result<(), BuildError> {
    for (config, file) in resources.pmem().list() {
        let device = build_file(&config, &file, memory, context);
        devices.push(device.map_err(BuildError::device(config.flag()))?);
    }
    Ok(())
}

pub(in crate::vm) fn build_disk(
    config: &DiskConfig,
    context: &DeviceContext,
) -> Result<AttachedDevice, BuildError> {
    block::build(config, context).map_err(BuildError::device("--disk"))
}

pub(in crate::vm) fn build_net(
    config: &NetConfig,
    tap: &Arc<Tap>,
    files: &VhostFiles,
    context: &DeviceContext,
) -> Result<AttachedDevice, BuildError> {
    let flag = format!("--net id={}", config.id.as_deref().unwrap_or_default());
    net::build(config, tap, files, context).map_err(BuildError::device(flag))
}

/// Builds the vsock device. The VMM itself accepts connections to the agent's port.
pub(in crate::vm) fn build_vsock(
    config: &VsockConfig,
    agents: &Agents,
    context: &DeviceContext,
) -> Result<AttachedDevice, BuildError> {
    let mut ports = VsockPorts::new();
    // Reports cause memory to be moved. They are therefore accepted only from privileged ports. The
    // agent can use such ports, but other processes in the guest usually cannot.
    let listening = ports.listen(VSOCK_PORT, GuestPorts::Privileged, agents.clone());
    listening.map_err(BuildError::device("--vsock"))?;
    let trims = ports.listen(TRIM_PORT, GuestPorts::Privileged, context.trims.connections());
    trims.map_err(BuildError::device("--vsock"))?;
    vsock::build(config, ports, context).map_err(BuildError::device("--vsock"))
}

/// Builds the virtio balloon. `plugged` is notified of each change of the balloon's size.
pub(in crate::vm) fn build_balloon(
    config: &BalloonConfig,
    memory: &Memory,
    plugged: &Arc<Notify>,
    context: &DeviceContext,
) -> Result<AttachedDevice, BuildError> {
    let plugged = Arc::clone(plugged);
    let observer = Arc::new(move || plugged.notify_one());
    balloon_device::build(config, memory, observer, context)
        .map_err(BuildError::device("--balloon"))
}

/// Receivers of changes to zones.
#[derive(Clone)]
pub(in crate::vm) struct MemorySignals {
    /// Notified of each change of a plugged size.
    pub plugged: Arc<Notify>,
    /// Receives events about the results of resize requests.
    pub events: Events,
}

impl MemorySignals {
    fn observer(&self) -> MemObserver {
        let (plugged, events) = (Arc::clone(&self.plugged), self.events.clone());
        Arc::new(move |zone: &str, event| {
            if let Some(event) = event_of(zone, event) {
                events.emit_of_guest(event);
            }
            plugged.notify_one();
        })
    }
}

fn event_of(zone: &str, event: MemEvent) -> Option<Event<'_>> {
    match event {
        MemEvent::HostFailure { reason, plugged_bytes, requested_bytes } => {
            let reason = reason.as_str();
            rate_limited!(
                warn,
                zone,
                reason,
                plugged_bytes,
                requested_bytes,
                "The host cannot plug all requested memory of the zone; a later resize requests \
                 it again"
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

/// Attaches a virtio-mem device for the hotplug part of each zone.
pub(in crate::vm) fn attach_memory(
    memory: &mut Memory,
    event_loop: &EventLoopHandle,
    signals: &MemorySignals,
    budgets: &mut PlugBudgets,
    context: &DeviceContext,
    devices: &mut DeviceList,
) -> Result<(), BuildError> {
    for part in memory.take_hotplug() {
        let budget = budgets.of(&part.spec, Instant::now());
        let flag = format!("the memory of zone {}", part.spec.id);
        let device = mem::build(part, event_loop, signals.observer(), budget, context);
        devices.push(device.map_err(BuildError::device(flag))?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use foreshore_devices::device::testing::FakeMachine;
    use foreshore_devices::events::WatcherItem;
    use foreshore_devices::host_console::{FileStart, Lines};

    use super::*;
    use crate::config::{ConsoleConfig, test_config};
    use crate::vm::machine::tests::machine_on;
    use crate::vm::machine::zone_metrics::ZoneMetrics;

    #[test]
    fn dropped_serial_port_leaves_nothing() {
        let fake = FakeMachine::default();
        let (machine, mut config) = (machine_on(&fake), test_config());
        let folder = tempfile::TempDir::new().unwrap();
        let text = format!("file={}", folder.path().join("log").display());
        config.serial = ConsoleConfig::parse_serial(&text).unwrap();
        let context = &machine.context;
        let footprint = || {
            let metrics = fake.metrics.encode(&ZoneMetrics::default()).unwrap();
            (context.ports.count(), fake.interrupts.irqfds(), metrics.contains("foreshore_serial"))
        };
        let (ports, _, _) = footprint();
        let mut files = ConsoleFiles::new(FileStart::Empty, Lines::default());
        let serial = attach_serial(&config, &mut files, context).unwrap();
        assert_eq!(footprint(), (ports + 1, 1, true));
        drop(serial);
        assert_eq!(footprint(), (ports, 0, false));
    }

    #[test]
    fn refused_driver_and_withdrawn_request_are_events() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let (plugged, events) = (Arc::<Notify>::default(), Events::start());
            let mut watcher = events.watch();
            let observer =
                MemorySignals { plugged: Arc::clone(&plugged), events: events.clone() }.observer();
            observer("pm", MemEvent::DriverUnsupported);
            // The governor is notified immediately.
            plugged.notified().await;
            observer("pm", MemEvent::Withdrawn { requested_bytes: 0 });
            events.end();
            let mut seen = Vec::new();
            while let Some(WatcherItem::Event(event)) = watcher.next().await {
                seen.push((event.event, event.properties.clone().unwrap_or_default()));
            }
            let [(refused, driver), (ended, request)] = &seen[..] else { panic!("{seen:?}") };
            assert_eq!((*refused, *ended), ("memory-driver-unsupported", "memory-refused"));
            assert!(driver["reason"].contains("5.16") && driver["zone"] == "pm", "{driver:?}");
            assert_eq!((&*request["reason"], &*request["requested_bytes"]), ("driver", "0"));
        });
    }

    #[test]
    fn repeated_events_of_a_driver_are_emitted_once_and_alternating_ones_are_limited() {
        let (plugged, events) = (Arc::default(), Events::start());
        let reached = |machine: &MemObserver, requested_bytes| {
            machine("pm", MemEvent::TargetReached { requested_bytes });
            events.counters().emitted()[&("foreshore", "memory-reached")]
        };
        let observer =
            || MemorySignals { plugged: Arc::clone(&plugged), events: events.clone() }.observer();
        let first = observer();
        assert!((0..10_000).all(|_| reached(&first, 0) == 1));
        let emitted = (0..10_000).fold(0, |_, nth| reached(&first, nth % 2));
        assert!((2..100).contains(&emitted), "{emitted}");
        // Once the limit is reached, half of these events repeat the event emitted last, and the
        // others are withheld.
        assert!(events.counters().withheld() > 4900, "{}", events.counters().withheld());
        // A later machine of the same VM has no additional budget for events.
        for nth in 0..1000 {
            events.end_machine();
            reached(&observer(), nth);
        }
        assert!(reached(&first, 0) <= emitted + 1);
    }
}
