//! Machine of a VM on KVM: its parts, and the order in which they end.

pub(super) mod clock;
pub(super) mod dimms;
pub(super) mod governing;
pub(super) mod hotplug;
pub(crate) mod hotplug_metrics;
mod hotplug_volumes;
pub(super) mod lost_memory;
pub(super) mod resident;
mod resize;
pub(super) mod vcpus;
pub(crate) mod zone_metrics;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use balloon::proto::descriptor_bytes;
use foreshore_devices::device::{AttachedDevice, DeviceContext, DeviceList};
use foreshore_devices::event_loop::EventLoop;
use foreshore_devices::host_console::Port;
use foreshore_devices::memory::Memory;
use foreshore_devices::memory::backing::SpillStatistics;
use foreshore_devices::memory::dimms::Dimms;
use foreshore_devices::memory::zone::ZoneSpec;
use foreshore_devices::metrics::Registration;
use foreshore_devices::virtio::balloon::BalloonHandle;
use foreshore_devices::virtio::block::BlockHandle;
use foreshore_devices::virtio::mem::MemHandle;
use foreshore_devices::virtio::zone_device::ZoneDevice;
use foreshore_devices::volume::guest_btt::VolumeKey;
use tracing::warn;

use crate::acpi::ged::Event;
use crate::config::{ConsoleMode, VmConfig};
use crate::cpu::run::Pausing;
use crate::governor::core::{ZoneQuery, ZoneResize, ZoneState};
use crate::governor::info::{PressureChange, PressureInfo};
use crate::governor::task::{Agents, GovernorHandle};
use crate::vm::devices::SerialPort;
use crate::vm::machine::clock::GuestClock;
use crate::vm::machine::hotplug::Hotplug;
use crate::vm::machine::resident::Resident;
use crate::vm::machine::vcpus::Vcpus;
use crate::vm::pm::PmStorage;
use crate::vm::pm::attached_volumes::AttachedVolume;
use crate::vm::request::{
    BalloonInfo, Counters, PoolInfo, Reply, ResizeStatus, VmError, VmInfo, VolumeInfo, ZoneInfo,
    device_tree,
};
use crate::vm::resources::OpenFiles;
use crate::vm::resources::pools::OpenPool;
use crate::vm::vm_task::{DeviceHotplug, EventSender, Machine, Standstill};

/// Machine that runs on KVM. The fields are dropped in the order of their declaration.
pub(crate) struct KvmMachine {
    pub(in crate::vm) vcpus: Vcpus,
    pub(in crate::vm) clock: Arc<GuestClock>,
    pub(in crate::vm) governor: GovernorHandle,
    pub(in crate::vm) devices: DeviceList,
    pub(in crate::vm) context: DeviceContext,
    pub(in crate::vm) _serial: Option<SerialPort>,
    /// Registrations of metrics that are exposed until the machine ends.
    pub(in crate::vm) exposed: Vec<Registration>,
    pub(in crate::vm) hotplug: Hotplug,
    /// One event loop for devices without threads of their own, and one for memory devices.
    pub(in crate::vm) _loops: [EventLoop; 2],
    /// Event loop that watches for lost memory. The event loop checks file lengths only if the
    /// machine had files when the loop started.
    pub(in crate::vm) lost_loop: EventLoop,
    pub(in crate::vm) events: EventSender,
    /// Accepts connections of agents, including those through a vsock device that is added later.
    pub(in crate::vm) agents: Agents,
    pub(in crate::vm) dimms: Option<Dimms>,
    pub(in crate::vm) open_files: OpenFiles,
    pub(in crate::vm) resident: Arc<Resident>,
    pub(in crate::vm) pm: PmStorage,
    /// Dropped last, when nothing accesses it any more.
    pub(in crate::vm) memory: Memory,
}

impl Drop for KvmMachine {
    /// Ends the machine in this order:
    /// 1. All vCPUs are requested to leave the guest, before the first one is waited for. Some
    ///    vCPUs may wait for devices. The event loops of the devices are released, so that these
    ///    vCPUs can leave.
    /// 2. Devices return their queues and stop their worker threads.
    /// 3. Removed devices end, so that the next machine can use their files.
    /// 4. The fields are dropped in the order of their declaration, memory last.
    fn drop(&mut self) {
        drop(self.pause());
        self.context.emitter.silence();
        self.context.work.dismiss();
        self.vcpus.end();
        self.devices.iter().for_each(AttachedDevice::stop);
        self.hotplug.leaving.wait();
    }
}

impl Machine for KvmMachine {
    fn resume(&mut self) {
        self.governor.clock().release();
        self.context.work.release();
        self.clock.release();
        self.context.store_waits.vcpus_will_run();
        self.vcpus.resume();
        self.retry_writes();
    }

    fn has_space_for_waiting(&self) -> Option<bool> {
        let disks = self.devices.handles().filter_map(BlockHandle::has_space_for_waiting);
        let mapped = self.pm.volumes.iter().filter_map(AttachedVolume::has_space_for_waiting);
        disks.chain(mapped).reduce(|one, other| one || other)
    }

    fn retry_writes(&self) {
        self.devices.handles().for_each(BlockHandle::retry_writes);
    }

    /// The devices are stopped after the vCPUs, because an exit may wait for a device's worker
    /// thread.
    fn pause(&mut self) -> Standstill {
        let vcpus = self.vcpus.pause();
        // This pause stops all vCPUs, so the inhibitor is no longer needed.
        self.context.inhibitor.release();
        // The governor's clock stops, so that no deadline passes while the guest is stopped.
        self.governor.clock().hold();
        let (work, since) = (Arc::clone(&self.context.work), self.context.work.releases());
        let (clock, pause) = (Arc::clone(&self.clock), self.clock.pause());
        Box::new(move || {
            vcpus.into_iter().for_each(Pausing::wait);
            clock.hold(pause);
            work.hold(since);
        })
    }

    fn press_power_button(&mut self) {
        if let Err(err) = self.hotplug.ged.notify(Event::PowerButton) {
            warn!(%err, "Cannot notify the guest of the power button");
        }
    }

    fn send_nmi(&mut self) {
        self.vcpus.send_nmi();
    }

    fn zones(&self, reply: Reply<Vec<ZoneInfo>>) {
        let zones = self.zone_infos();
        Arc::clone(&self.resident).answer(zones, reply);
    }

    fn complete(&self, info: &mut VmInfo) {
        info.memory_actual_size = self.memory_bytes();
        info.balloon = self.balloon_info();
        info.guest_kernel = self.pm.guest_btt.kernel();
        info.device_tree = Some(device_tree(self.devices()));
        let VmConfig { serial, console, .. } = &mut info.config;
        for (port, console) in [(Port::Serial, serial), (Port::Console, console)] {
            if console.mode == ConsoleMode::Pty {
                console.file = self.open_files.lines.path(port);
            }
        }
    }

    fn counters(&self) -> Counters {
        let counters =
            |attached: &AttachedDevice| Some((attached.id.clone(), attached.counters()?));
        self.devices.iter().filter_map(counters).collect()
    }

    fn volumes(&self) -> Vec<VolumeInfo> {
        let verdict =
            |volume: &AttachedVolume| self.pm.guest_btt.verdict(volume.pool_path(), volume.name());
        self.pm.volumes.iter().map(|volume| volume.info(verdict(volume))).collect()
    }

    fn volume_of(&self, id: &str) -> Option<VolumeKey> {
        let is_it = |volume: &&AttachedVolume| volume.device_id().as_deref() == Some(id);
        self.pm.volumes.iter().find(is_it).map(AttachedVolume::key)
    }

    fn pools(&self) -> Vec<PoolInfo> {
        self.pm.pools.iter().map(OpenPool::info).collect()
    }

    fn pressure(&self, decisions: usize) -> PressureInfo {
        self.governor.call(move |core, now| core.view(decisions, now)).info()
    }

    fn change_pressure(&mut self, change: &PressureChange) -> Result<(), VmError> {
        let change = change.clone();
        Ok(self.governor.call(move |core, now| core.change(&change, now))?)
    }
}

impl KvmMachine {
    pub(in crate::vm) fn balloon_handle(&self) -> Option<&BalloonHandle> {
        self.devices.handles().next()
    }

    /// Boot memory and plugged memory of all zones, without the memory in the balloon.
    fn memory_bytes(&self) -> u64 {
        let boot_bytes: u64 = self.memory.zones().iter().map(|spec| spec.boot_bytes).sum();
        let plugged_bytes: u64 =
            self.devices.handles::<MemHandle>().map(|handle| handle.sizes().plugged_bytes).sum();
        let ballooned_bytes =
            self.balloon_handle().map_or(0, |balloon| balloon.sizes().actual_bytes);
        let dimm_bytes = self.dimms.as_ref().map_or(0, |dimms| dimms.plan().used_bytes());
        (boot_bytes + plugged_bytes + dimm_bytes).saturating_sub(ballooned_bytes)
    }

    fn balloon_info(&self) -> Option<BalloonInfo> {
        let balloon = self.balloon_handle()?;
        let sizes = balloon.sizes();
        Some(BalloonInfo {
            target_bytes: sizes.target_bytes,
            actual_bytes: sizes.actual_bytes,
            max_bytes: sizes.max_bytes,
            driver_ready: balloon.driver_present(),
        })
    }

    fn dimms_of(&self, spec: &ZoneSpec) -> Option<&Dimms> {
        self.dimms.as_ref().filter(|dimms| dimms.zone().id == spec.id)
    }

    /// Information about all zones, without their resident memory. One call on the governor's
    /// thread returns the state of all zones, so that sizes and status are consistent.
    fn zone_infos(&self) -> Vec<ZoneInfo> {
        let specs = self.memory.zones();
        let query = |spec: &ZoneSpec| ZoneQuery {
            id: spec.id.clone(),
            guest_node: spec.guest_node,
            boot_bytes: spec.boot_bytes,
            has_dimms: self.dimms_of(spec).is_some(),
        };
        let queries: Vec<_> = specs.iter().map(query).collect();
        let states = self.governor.call(move |core, now| core.zone_states(&queries, now));
        specs.iter().zip(states).map(|(spec, state)| self.zone_info(spec, state)).collect()
    }

    fn zone_info(&self, spec: &ZoneSpec, state: ZoneState) -> ZoneInfo {
        let ZoneState { online_bytes, recallable_bytes, resize } = state;
        let (sizes, status) = resize.map(|ZoneResize { sizes, status }| (sizes, status)).unzip();
        let dimms = self.dimms_of(spec);
        let dimm_bytes = dimms.map_or(0, |dimms| dimms.plan().used_bytes());
        let plugged_bytes = sizes.as_ref().map_or(dimm_bytes, |sizes| sizes.plugged_bytes);
        let spill = self.memory.spill_of(spec);
        let spilled = |counter: fn(&SpillStatistics) -> &AtomicU64| {
            spill.map_or(0, |spill| counter(spill).load(Ordering::Relaxed))
        };
        ZoneInfo {
            id: spec.id.clone(),
            tier: spec.tier.as_str().to_owned(),
            guest_numa_node: spec.guest_node,
            boot_bytes: spec.boot_bytes,
            hotplug_bytes: spec.hotplug_bytes,
            requested_bytes: sizes.as_ref().map_or(dimm_bytes, |sizes| sizes.requested_bytes),
            held_bytes: sizes.as_ref().map_or(0, |sizes| sizes.held_bytes),
            plugged_bytes,
            descriptor_bytes: descriptor_bytes(plugged_bytes),
            saved_descriptor_bytes: descriptor_bytes(
                spec.hotplug_bytes.saturating_sub(plugged_bytes),
            ),
            recallable_bytes,
            spilled_bytes: spilled(|spill| &spill.bytes),
            spilled_file_bytes: spilled(|spill| &spill.file_bytes),
            spill_file_failures: spilled(|spill| &spill.file_failures),
            online_bytes: online_bytes
                .map(|bytes| if dimms.is_some() { bytes.min(dimm_bytes) } else { bytes }),
            resident_bytes: 0,
            driver: sizes.as_ref().map(|sizes| sizes.driver),
            status: status.unwrap_or(ResizeStatus::Reached),
        }
    }
}

#[cfg(test)]
pub(in crate::vm) mod tests {
    use std::time::{Duration, Instant};

    use foreshore_devices::device::testing::FakeMachine;
    use foreshore_devices::memory::holes::HoleMetrics;
    use foreshore_devices::memory::zone::Tier;
    use foreshore_devices::memory::{MemoryOptions, build};
    use foreshore_devices::volume::guest_btt::GuestBtt;

    use balloon::ZoneSizes;
    use foreshore_confinement::thread::ThreadKind;

    use super::*;
    use crate::acpi::ged::GenericEventDevice;
    use crate::acpi::hotplug::HotplugPage;
    use crate::config::DRAM_ZONE;
    use crate::governor::fake::fixture;
    use crate::governor::task::Clock;
    use crate::vm::pm::attached_volumes::tests::volume_with_holes;

    fn spec(hotplug_bytes: u64) -> ZoneSpec {
        ZoneSpec {
            id: DRAM_ZONE.to_owned(),
            boot_bytes: 64 << 20,
            hotplug_bytes,
            ..ZoneSpec::default()
        }
    }

    /// Machine for tests without vCPUs and devices, with running event loops and a governor. It
    /// does not need KVM.
    pub(crate) fn machine() -> KvmMachine {
        machine_on(&FakeMachine::default())
    }

    /// Same as [`machine`], but `fake` records the registrations.
    pub(crate) fn machine_on(fake: &FakeMachine) -> KvmMachine {
        let spec = spec(0);
        let options = MemoryOptions { address_bits: 40, slot_limit: 64, host_bytes: 64 << 30 };
        let memory = build(vec![spec], None, fake.slots.clone(), options).unwrap();
        let loops = ["one", "two"].map(|name| EventLoop::spawn(ThreadKind::Device, name).unwrap());
        let core = fixture("psi", true).core;
        let mut context = fake.context(memory.view().clone(), loops[0].handle());
        context.machine.slots = Arc::clone(memory.slots());
        context.work.add(&loops.each_ref().map(EventLoop::handle));
        KvmMachine {
            vcpus: Vcpus::none(),
            clock: Arc::new(GuestClock::new(Arc::<AtomicU64>::default())),
            governor: GovernorHandle::spawn(core, Clock::start(), Arc::default(), None).unwrap(),
            devices: DeviceList::default(),
            context,
            _serial: None,
            exposed: Vec::new(),
            hotplug: Hotplug::new(
                Arc::new(GenericEventDevice::new(|_| Ok(()))),
                Arc::new(HotplugPage::new(|_| ())),
                Arc::default(),
            ),
            lost_loop: EventLoop::spawn(ThreadKind::Device, "lost").unwrap(),
            events: EventSender::to_nobody(),
            agents: tokio::sync::mpsc::channel(1).0,
            _loops: loops,
            dimms: None,
            open_files: OpenFiles::default(),
            resident: Resident::new(|| Ok(Vec::new())),
            pm: PmStorage::new(
                Vec::new(),
                Vec::new(),
                Vec::new(),
                Arc::default(),
                Arc::new(GuestBtt::new(Vec::new(), 1)),
            ),
            memory,
        }
    }

    #[test]
    fn waiting_stores_of_a_mapped_volume_have_no_space() {
        let (mut machine, holes) = (machine(), Arc::<HoleMetrics>::default());
        machine.pm.volumes.push(volume_with_holes(&holes));
        assert_eq!(machine.has_space_for_waiting(), None);
        holes.waiting.store(1, Ordering::SeqCst);
        assert_eq!(machine.has_space_for_waiting(), Some(false));
        let waits = Arc::clone(&machine.context.store_waits);
        assert_eq!(waits.resumes(), 0);
        machine.resume();
        assert_eq!(waits.resumes(), 1, "stores are reported again");
    }

    #[test]
    fn zone_shows_descriptors_of_plugged_and_of_unplugged_memory() {
        let machine = machine();
        let descriptors_mib = |plugged_mib: u64| {
            let mut sizes = ZoneSizes::empty(0, Tier::Dram, 1 << 30);
            sizes.plugged_bytes = plugged_mib << 20;
            let resize = Some(ZoneResize { sizes, status: ResizeStatus::Reached });
            let state = ZoneState { online_bytes: None, recallable_bytes: 7, resize };
            let info = machine.zone_info(&spec(1 << 30), state);
            assert_eq!(info.recallable_bytes, 7);
            (info.descriptor_bytes >> 20, info.saved_descriptor_bytes >> 20)
        };
        // 64 bytes for each 4 KiB of 1 GiB are 16 MiB.
        assert_eq!(descriptors_mib(0), (0, 16));
        assert_eq!(descriptors_mib(256), (4, 12));
        assert_eq!(descriptors_mib(1024), (16, 0));
    }

    /// Waits until `span` has elapsed on the host's clock.
    fn pass(span: Duration) {
        let begin = Instant::now();
        while begin.elapsed() < span {
            std::thread::yield_now();
        }
    }

    #[test]
    fn governor_clock_stops_while_machine_is_paused() {
        const SPAN: Duration = Duration::from_millis(20);
        let mut machine = machine();
        machine.resume();
        let clock = machine.governor.clock().clone();
        // The second pause behaves like the first.
        for _ in 0..2 {
            let begin = clock.now();
            pass(SPAN);
            assert!(clock.now().since(begin) >= 19, "the clock runs before the pause");
            machine.pause()();
            let held = clock.now();
            pass(SPAN);
            assert_eq!(clock.now(), held, "deadlines would expire during the pause");
            machine.resume();
            pass(SPAN);
            let gone_by = clock.now().since(held);
            assert!(gone_by >= 19, "the clock does not run after the pause");
        }
    }
}
