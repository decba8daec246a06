//! Metrics: where they come from, and their exposition in OpenMetrics text.
//!
//! Whoever does something counts it, in plain atomics or in its own state, and knows nothing of this module. A
//! scrape asks each source once: nothing is counted twice, and what takes work, like the resident bytes of a
//! zone, is worked out only when somebody wants to know. docs/metrics.md lists every metric; a test compares.

mod devices;
mod disk;
mod expose;
mod format;
mod host_check;
mod hotplug;
mod http;
mod latency;
mod memory;
mod net;
mod pmem;
mod pool;
mod pressure;
mod process;
mod serve;
#[cfg(test)]
mod tests;
mod vcpu;
mod volume;
mod vsock;

use std::borrow::Cow;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, text};
use prometheus_client::registry::Registry;

pub use self::disk::DiskMetrics;
use self::expose::Exposer;
pub use self::hotplug::HotplugMetrics;
pub use self::latency::{LATENCY_BOUNDS_NS, LatencyHistogram, LatencySample};
pub use self::memory::PlugMetrics;
pub use self::net::NetDeviceMetrics;
pub use self::pmem::PmemFileMetrics;
pub use self::pool::PoolMetrics;
pub use self::pressure::{PressureSample, PressureSource, PressureZone};
pub use self::serve::router;
pub use self::vcpu::VcpuMetrics;
pub use self::volume::{VolumeCounters, VolumeMetrics};
use crate::api::ConnectionCounters;
use crate::bus::BusMetrics;
use crate::events::EventCounters;
use crate::host_console::ConsoleFileMetrics;
use crate::memory::backing::MappingBudget;
use crate::memory::lost::GuestRange;
use crate::serial::SerialMetrics;
use crate::virtio::balloon::BalloonMetrics;
use crate::virtio::console::ConsoleMetrics;
use crate::virtio::rng::RngMetrics;
use crate::virtio::vsock::VsockMetrics;
use crate::virtio::watchdog::WatchdogMetrics;
use crate::vm::owner::RestartMetrics;
use crate::vm::request::ZoneInfo;
use crate::volume::guest_btt::GuestBtt;

/// What one built VM has that counts. Counters are held; what holds a resource, like a pool and its lock, is
/// not: it goes with the VM.
#[derive(Debug, Default)]
pub struct MachineSources {
    /// The governor.
    pub pressure: Option<Weak<dyn PressureSource>>,
    /// Pools that are open.
    pub pools: Vec<PoolMetrics>,
    /// Volumes that are attached.
    pub volumes: Vec<VolumeMetrics>,
    /// Disks that are attached.
    pub disks: Vec<DiskMetrics>,
    /// Network interfaces.
    pub net: Vec<NetDeviceMetrics>,
    /// Files of `--pmem`.
    pub pmem: Vec<PmemFileMetrics>,
    /// Memory that the guest has, and may lose.
    pub ranges: Vec<Arc<GuestRange>>,
    /// What is thought of the guest's BTT driver.
    pub guest_btt: Arc<GuestBtt>,
    /// The virtio-mem devices of the zones.
    pub plugs: Vec<PlugMetrics>,
    /// The mappings that guest memory takes.
    pub mappings: Option<Arc<MappingBudget>>,
    /// What vCPUs reach, by the name of the address space.
    pub buses: Vec<(&'static str, Arc<BusMetrics>)>,
    /// vCPUs.
    pub vcpus: Option<Arc<VcpuMetrics>>,
    /// What comes and goes.
    pub hotplug: Option<Arc<HotplugMetrics>>,
    /// The vsock device.
    pub vsock: Option<Arc<VsockMetrics>>,
    /// The entropy device.
    pub rng: Option<Arc<RngMetrics>>,
    /// The balloon.
    pub balloon: Option<Arc<BalloonMetrics>>,
    /// The watchdog.
    pub watchdog: Option<Arc<WatchdogMetrics>>,
    /// The serial port.
    pub serial: Option<Arc<SerialMetrics>>,
    /// The console device.
    pub console: Option<Arc<ConsoleMetrics>>,
    /// Files that the serial port and the console device write.
    pub console_files: Vec<(&'static str, Arc<ConsoleFileMetrics>)>,
}

#[derive(Debug, Default)]
struct Sources {
    machine: Mutex<MachineSources>,
    events: Arc<EventCounters>,
    restarts: Arc<RestartMetrics>,
    is_seccomp_missing: AtomicBool,
    servers: Mutex<Vec<http::NamedServer>>,
    refused_hosts: AtomicU64,
    zones: Mutex<Vec<ZoneInfo>>,
}

impl Collector for Sources {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Exposer::new(encoder);
        let machine = self.machine.lock();
        process::expose(&mut out, &self.events)?;
        process::expose_restarts(&mut out, &self.restarts)?;
        process::expose_missing_seccomp(&mut out, self.is_seccomp_missing.load(Ordering::Relaxed))?;
        http::expose(&mut out, &self.servers.lock(), &self.refused_hosts)?;
        memory::expose(&mut out, &self.zones.lock(), &machine.plugs)?;
        machine.mappings.as_ref().map_or(Ok(()), |budget| memory::expose_mappings(&mut out, budget))?;
        memory::expose_lost(&mut out, &machine.ranges)?;
        pool::expose(&mut out, &machine.pools)?;
        volume::expose(&mut out, &machine.volumes)?;
        disk::expose(&mut out, &machine.disks)?;
        net::expose(&mut out, &machine.net)?;
        pmem::expose(&mut out, &machine.pmem)?;
        volume::expose_guest_btt(&mut out, &machine.guest_btt)?;
        machine.vsock.as_ref().map_or(Ok(()), |counters| vsock::expose(&mut out, counters))?;
        machine.rng.as_ref().map_or(Ok(()), |counters| devices::expose_rng(&mut out, counters))?;
        machine.balloon.as_ref().map_or(Ok(()), |counters| devices::expose_balloon(&mut out, counters))?;
        machine.watchdog.as_ref().map_or(Ok(()), |counters| devices::expose_watchdog(&mut out, counters))?;
        machine.serial.as_ref().map_or(Ok(()), |counters| devices::expose_serial(&mut out, counters))?;
        machine.console.as_ref().map_or(Ok(()), |counters| devices::expose_console(&mut out, counters))?;
        devices::expose_console_files(&mut out, &machine.console_files)?;
        vcpu::expose(&mut out, &machine.buses)?;
        machine.vcpus.as_ref().map_or(Ok(()), |counts| vcpu::expose_counts(&mut out, counts))?;
        machine.hotplug.as_ref().map_or(Ok(()), |counters| hotplug::expose(&mut out, counters))?;
        match machine.pressure.as_ref().and_then(Weak::upgrade) {
            Some(pressure) => pressure::expose(&mut out, &pressure.sample()),
            None => Ok(()),
        }
    }
}

/// Every metric of the VMM.
#[derive(Debug)]
pub struct Metrics {
    vm: String,
    sources: Arc<Sources>,
    registry: Registry,
}

impl Metrics {
    /// Metrics of a VM called `vm`, and of the events that are told; without other sources as yet.
    pub fn new(vm: &str, events: Arc<EventCounters>) -> Self {
        let sources = Arc::new(Sources { events, ..Sources::default() });
        let label = (Cow::Borrowed("vm"), Cow::Owned(vm.to_owned()));
        let mut registry = Registry::with_prefix_and_labels("foreshore", std::iter::once(label));
        registry.register_collector(Box::new(Arc::clone(&sources)));
        Self { vm: vm.to_owned(), sources, registry }
    }

    /// The VM's name.
    pub fn vm(&self) -> &str {
        &self.vm
    }

    /// Says what the VM that has just been built has; what an earlier one had is forgotten.
    pub fn set_machine(&self, machine: MachineSources) {
        *self.sources.machine.lock() = machine;
    }

    /// Counters of the guest's delayed restarts.
    pub fn restarts(&self) -> Arc<RestartMetrics> {
        Arc::clone(&self.sources.restarts)
    }

    /// Records that `--seccomp` asks for a system call filter, which does not exist yet.
    pub fn set_seccomp_missing(&self) {
        self.sources.is_seccomp_missing.store(true, Ordering::Relaxed);
    }

    /// Adds the counters of the server called `name`.
    pub fn add_server(&self, name: &'static str, counters: Arc<ConnectionCounters>) {
        self.sources.servers.lock().push((name, counters));
    }

    /// Counts a scrape that was refused because of its `Host` header.
    fn count_refused_host(&self) {
        self.sources.refused_hosts.fetch_add(1, Ordering::Relaxed);
    }

    /// Says what the VM has got since, or lost.
    pub fn change_machine(&self, change: impl FnOnce(&mut MachineSources)) {
        change(&mut self.sources.machine.lock());
    }

    /// Everything in OpenMetrics text, with `zones` as they are now.
    pub fn encode(&self, zones: Vec<ZoneInfo>) -> Result<String, fmt::Error> {
        *self.sources.zones.lock() = zones;
        let mut out = String::new();
        text::encode(&mut out, &self.registry)?;
        Ok(out)
    }
}
