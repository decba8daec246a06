//! Builds a machine from its configuration. Devices depend neither on each other nor on the
//! machine, so only this module combines them.

use std::sync::Arc;
use std::time::Instant;

use foreshore_confinement::thread::ThreadKind;
use foreshore_devices::bus::AddressSpaceMetrics;
use foreshore_devices::cmos::{CMOS_LEN, CMOS_PORT, Cmos, wall_clock};
use foreshore_devices::device::{DeviceContext, DeviceList, MachineParts};
use foreshore_devices::event_loop::EventLoop;
use foreshore_devices::host_console::ConsoleFiles;
use foreshore_devices::memory::backing::resident::resident_bytes;
use foreshore_devices::memory::dimms::Dimms;
use foreshore_devices::memory::layout::{
    ACPI_PM_LEN, ACPI_PM_PORT, GED_GSI, GED_LEN, GED_START, HOTPLUG_LEN, HOTPLUG_START,
};
use foreshore_devices::memory::slots::{self, SlotTable};
use foreshore_devices::memory::{self, Memory, MemoryOptions, PmSource};
use foreshore_devices::metrics::Expose;
use foreshore_devices::nmi_status::{NMI_STATUS_LEN, NMI_STATUS_PORT, NmiStatus};
use foreshore_devices::pool::Durability;
use foreshore_devices::virtio::balloon::BalloonHandle;
use foreshore_devices::virtio::mem::MemHandle;
use foreshore_devices::virtio::vsock::IN_PROCESS_BACKLOG;
use foreshore_devices::volume::interface::Payload;
use kvm_ioctls::VcpuFd;
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tracing::{debug, warn};

use crate::acpi::ged::GenericEventDevice;
use crate::acpi::hotplug::HotplugPage;
use crate::acpi::hotplug_cpus::CpuRegisters;
use crate::acpi::plug::Plug;
use crate::acpi::pm::{PmEvent, PmPort};
use crate::acpi::{self, AcpiInput};
use crate::boot::{self, BootInfo, BootRequest, KernelShare, Pluggable, PvhEntry};
use crate::config::{ConsoleMode, CpusConfig, Topology, VcpuPlace, VmConfig};
use crate::cpu::CpuError;
use crate::cpu::cpuid::{self, Traits};
use crate::cpu::placement::Cores;
use crate::cpu::run::{Placement, Surroundings, Vcpu, VcpuThread};
use crate::cpu::state::{self, Fresh};
use crate::governor::UnmanagedMemory;
use crate::governor::metrics::PressureMetrics;
use crate::vm::devices;
use crate::vm::error::BuildError;
use crate::vm::kvm::Hypervisor;
use crate::vm::machine::KvmMachine;
use crate::vm::machine::clock::GuestClock;
use crate::vm::machine::governing::Governed;
use crate::vm::machine::hotplug::{self, Hotplug};
use crate::vm::machine::resident::Resident;
use crate::vm::machine::vcpus::{Maker, Vcpus};
use crate::vm::machine::{governing, lost_memory};
use crate::vm::pm::PmStorage;
use crate::vm::pm::created_volumes::CreatedVolumes;
use crate::vm::pm::volumes;
use crate::vm::resources::Resources;
use crate::vm::vm_task::{EventSender, MachineEvent};
use crate::vm::{named_twice, numa_tables};

/// Builds a machine from a validated `config`. Its vCPUs are paused.
pub(crate) fn build(
    config: &VmConfig,
    resources: &mut Resources,
    events: &EventSender,
) -> Result<KvmMachine, BuildError> {
    // 1. Resources that may be missing or in use by another process, before anything is created.
    //    Pools are opened last, because opening a pool marks memory that an earlier run had lent,
    //    and starts to erase it.
    named_twice::check(config)?;
    let config = &resources.with_one_path_for_each_pool(config);
    let topology = Topology::of(config).map_err(BuildError::device("the guest's nodes"))?;
    if let Err(err) = boot::check_ratio(topology.zones()) {
        warn!("{err}");
    }
    let hypervisor = Hypervisor::open(resources.kvm(), config.cpus.features.amx)?;
    resources.taps().open(config)?;
    resources.pmem().open(config)?;
    let steps = resources.open_pools(config)?;
    // Dropped after everything that uses volumes.
    let mut created = CreatedVolumes::default();
    // 2. Memory, because all other parts use it.
    let mut memory = build_memory(config, &topology, resources, &hypervisor)?;
    // 3. The kernel, because the choice of a volume's interface depends on it.
    let boot = load_kernel(config, &topology, &memory)?;
    memory.prefault().map_err(BuildError::device("prefault"))?;
    // 4. Devices. Memory devices have an event loop of their own, because an unplug waits until
    //    other devices have ended their accesses to guest memory.
    let (device_loop, memory_loop) = (
        EventLoop::spawn(ThreadKind::Device, "_device")?,
        EventLoop::spawn(ThreadKind::Memory, "_mem")?,
    );
    let parts = machine_parts(config, &hypervisor, &memory, resources, &device_loop, events);
    let context = DeviceContext::new(parts).map_err(BuildError::device("the buses"))?;
    let mut devices = DeviceList::default();
    config
        .disks
        .iter()
        .filter_map(|disk| disk.pci_device_id)
        .for_each(|slot| context.pci.reserve(slot));
    lost_memory::watch_zones(config, resources, &memory, &context.lost)?;
    let cpu_registers = cpu_registers(config, events);
    let (ged, page) = add_platform(&context, Arc::clone(&cpu_registers), events)?;
    let mut files = ConsoleFiles::new(resources.file_start(), resources.lines().clone());
    let serial = devices::attach_serial(config, &mut files, &context)
        .map_err(BuildError::device("--serial"))?;
    devices::attach_fixed(config, &mut files, &context, &mut devices)?;
    // The governor always listens for agents, because a vsock device may be added later.
    let (agents, connections) = mpsc::channel(IN_PROCESS_BACKLOG);
    if let Some(vsock) = &config.vsock {
        devices.push(devices::build_vsock(vsock, &agents, &context)?);
    }
    let plugged = Arc::new(Notify::new());
    let signals = devices::MemorySignals {
        plugged: Arc::clone(&plugged),
        events: resources.events().clone(),
    };
    let (mem_loop, budgets) = (memory_loop.handle(), resources.plug_budgets());
    devices::attach_memory(&mut memory, &mem_loop, &signals, budgets, &context, &mut devices)?;
    let dimms = memory.take_dimms();
    if let Some(balloon) = &config.balloon {
        devices.push(devices::build_balloon(balloon, &memory, &plugged, &context)?);
    }
    devices::attach_removable(config, resources, &context, &mut devices)?;
    let payload = if boot.kernel.is_linux { Payload::Linux } else { Payload::Unknown };
    let with = (&*resources, &steps[..], &mut created);
    let volumes = volumes::attach(config, payload, with, &mut memory, &context, &mut devices)?;
    devices::attach_files(resources, &mut memory, &context, &mut devices)?;
    let lost_loop = lost_memory::watch(&context.lost, events)?;
    if config.payload.firmware.is_some() {
        add_for_firmware(&context)?;
    }
    // 5. The firmware tables, which describe all parts above.
    let input = AcpiInput {
        boot_vcpus: config.cpus.boot_vcpus,
        max_vcpus: config.cpus.max_vcpus,
        apic_ids: topology.places().iter().map(|place| place.apic_id).collect(),
        serial: config.serial.mode != ConsoleMode::Off,
        dimms: dimms.is_some(),
        rtc: config.payload.firmware.is_some(),
        nodes: numa_tables::numa_nodes(config, &topology, memory.map()),
        nvdimms: volumes.nvdimms,
    };
    acpi::build(&input)?.write(memory.boot())?;
    // 6. The vCPUs. They are paused, and the VM task resumes all of them together.
    let clock = Arc::new(GuestClock::new(Arc::clone(&hypervisor.vm)));
    let vcpus = build_vcpus(config, &topology, hypervisor, &context, &boot, cpu_registers, events)?;
    // 7. The governor, which is last because it uses the devices.
    let unmanaged = UnmanagedMemory {
        dimm_bytes: dimms.as_ref().map_or_else(Arc::default, Dimms::came_bytes),
        mapped_bytes: memory.file_bytes(),
    };
    let zones: Vec<_> = devices.handles::<MemHandle>().cloned().collect();
    let balloon = devices.handles::<BalloonHandle>().next();
    let pools = resources.pools();
    let usage: Vec<_> =
        pools.iter().map(|pool| Arc::new(pool.usage_monitor(resources.events()))).collect();
    let pool_usage = Arc::new(Mutex::new(usage.clone()));
    let governor = governing::start(
        config,
        resources,
        Governed { handles: &zones, balloon, unmanaged, plugged },
        connections,
        &volumes.guest_btt,
        Arc::clone(&pool_usage),
    )?;
    // 8. Console files of an earlier VM are truncated only now, because no later step can fail for
    //    lack of a resource.
    let console_files: Vec<_> = files.metrics().collect();
    files.begin().map_err(BuildError::device("--serial, --console"))?;
    created.keep();
    let hotplug = hotplug::metrics(&devices);
    let spaces = [("port", context.ports.metrics()), ("mmio", context.mmio.metrics())]
        .map(|(space, counters)| AddressSpaceMetrics { space, counters });
    let mut sources: Vec<Arc<dyn Expose>> = vec![
        Arc::clone(&hotplug) as _,
        vcpus.metrics(),
        Arc::new(PressureMetrics(Arc::downgrade(&governor.pressure_source()))),
        Arc::clone(&context.lost) as _,
        Arc::clone(&volumes.guest_btt) as _,
        Arc::clone(memory.mapping_budget()) as _,
    ];
    sources.extend(usage.into_iter().map(|usage| usage as _));
    sources.extend(pools.iter().map(|pool| Arc::new(pool.metrics()) as _));
    sources.extend(console_files.into_iter().map(|file| Arc::new(file) as _));
    sources.extend(spaces.map(|space| Arc::new(space) as _));
    let exposed =
        sources.into_iter().map(|source| context.machine.metrics.register(source)).collect();
    resources.machine_built();
    context.work.add(&[device_loop.handle(), memory_loop.handle()]);
    let host_ranges = memory.host_ranges().to_vec();
    Ok(KvmMachine {
        vcpus,
        clock,
        governor,
        devices,
        context,
        _serial: serial,
        exposed,
        hotplug: Hotplug::new(ged, page, hotplug),
        _loops: [device_loop, memory_loop],
        lost_loop,
        events: events.clone(),
        agents,
        dimms,
        open_files: resources.open_files().clone(),
        resident: Resident::new(move || resident_bytes(&host_ranges)),
        pm: PmStorage::new(
            config.pm_memory.clone(),
            volumes.volumes,
            pools,
            pool_usage,
            volumes.guest_btt,
        ),
        memory,
    })
}

fn machine_parts(
    config: &VmConfig,
    hypervisor: &Hypervisor,
    memory: &Memory,
    resources: &Resources,
    device_loop: &EventLoop,
    events: &EventSender,
) -> MachineParts {
    let (reset, pause, full) = (events.clone(), events.clone(), events.clone());
    MachineParts {
        io_events: Arc::clone(&hypervisor.vm) as _,
        interrupts: Arc::clone(&hypervisor.vm) as _,
        max_vcpus: config.cpus.max_vcpus,
        view: memory.view().clone(),
        slots: Arc::clone(memory.slots()),
        userfaults: Arc::clone(resources.userfaults()),
        event_loop: device_loop.handle(),
        events: resources.events().clone(),
        metrics: Arc::clone(resources.metrics()),
        reset_guest: Arc::new(move || reset.send(MachineEvent::GuestReset)),
        pause_guest: Arc::new(move |reason| pause.send(MachineEvent::MustPause { reason })),
        wait_for_space: Arc::new(move |reason| full.send(MachineEvent::PoolFull { reason })),
    }
}

fn build_memory(
    config: &VmConfig,
    topology: &Topology,
    resources: &Resources,
    hypervisor: &Hypervisor,
) -> Result<Memory, BuildError> {
    let options = MemoryOptions {
        address_bits: cpuid::physical_address_bits(&hypervisor.cpuid)
            .min(config.cpus.max_phys_bits),
        slot_limit: hypervisor.slot_limit,
        host_bytes: slots::host_bytes(),
    };
    let pm = config.pm_memory.first();
    let pool = pm.map(|pm| resources.pool(&pm.pool));
    let pool = pool.as_ref();
    if let (Some(pm), Some(pool)) = (pm, pool)
        && is_written_back(pool.durability())
    {
        let pool = pm.pool.display();
        warn!(%pool, "The host writes memory lent from this pool back to its disk; use a pool on tmpfs or DAX");
    }
    let pm_source = pool.map(|pool| PmSource { pool, userfaults: resources.userfaults() });
    let table = Arc::clone(&hypervisor.vm) as Arc<dyn SlotTable>;
    let dram = if config.memory.zones.is_empty() { "--memory" } else { "--memory-zone" };
    let flags = if pm.is_some() { format!("{dram}, --pm-memory") } else { dram.to_owned() };
    memory::build(topology.zones().to_vec(), pm_source, table, options)
        .map_err(BuildError::device(flags))
}

/// Returns true if the host's kernel writes lent memory back to disk after the guest has changed
/// it, as it does for dirty pages in the page cache. tmpfs has no disk to write to, and DAX has no
/// page cache.
fn is_written_back(durability: Durability) -> bool {
    match durability {
        Durability::PageCache => true,
        Durability::DaxSync | Durability::Volatile => false,
    }
}

fn load_kernel(
    config: &VmConfig,
    topology: &Topology,
    memory: &Memory,
) -> Result<BootInfo, BuildError> {
    let (firmware, private) = (config.payload.firmware.as_deref(), memory.private_boot());
    let request = BootRequest {
        kernel: firmware.or(config.payload.kernel.as_deref()).ok_or(BuildError::NoKernel)?,
        is_firmware: firmware.is_some(),
        initramfs: config.payload.initramfs.as_deref(),
        cmdline: config.payload.cmdline.as_deref().unwrap_or(""),
        boot_memory: memory.map().boot(),
        private: &private,
        pluggable: Pluggable::of(topology.zones()),
        kernel_share: KernelShare::of(topology.zones()),
    };
    let started = Instant::now();
    // SAFETY: vCPUs and devices do not exist yet (`build`, steps 3, 4 and 6). The private ranges
    // are those of `memory`.
    let boot = unsafe { boot::load(memory.boot(), &request) }?;
    // Unpacking the kernel accounts for most of the time before the guest starts.
    let loading_ms = started.elapsed().as_millis();
    debug!(loading_ms, unpacked_from = ?boot.kernel.bzimage, "Loaded the kernel and the initramfs");
    Ok(boot)
}

/// Adds power management (shutdown and reset by the guest, power button) and the hotplug registers.
fn add_platform(
    context: &DeviceContext,
    cpus: Arc<CpuRegisters>,
    events: &EventSender,
) -> Result<(Arc<GenericEventDevice>, Arc<HotplugPage>), BuildError> {
    let sender = events.clone();
    let pm = PmPort::new(move |event| {
        sender.send(match event {
            PmEvent::Shutdown => MachineEvent::GuestShutdown,
            PmEvent::Reset => MachineEvent::GuestReset,
        });
    });
    context.ports.insert(u64::from(ACPI_PM_PORT), u64::from(ACPI_PM_LEN), Arc::new(pm))?;
    context.ports.insert(NMI_STATUS_PORT, NMI_STATUS_LEN, Arc::new(NmiStatus))?;
    let ged = Arc::new(GenericEventDevice::new(context.level(GED_GSI)));
    context.mmio.insert(GED_START, GED_LEN, Arc::clone(&ged) as _)?;
    let (pci, sender) = (Arc::clone(&context.pci), events.clone());
    let page = HotplugPage::new(move |slot| {
        // The machine also holds the device, so this drop does not end the device on the vCPU's
        // thread.
        drop(pci.remove(slot));
        sender.send(MachineEvent::Ejected { slot });
    });
    let page = Arc::new(page.with_cpus(cpus));
    context.mmio.insert(HOTPLUG_START, HOTPLUG_LEN, Arc::clone(&page) as _)?;
    Ok((ged, page))
}

/// Adds those parts of a PC that firmware needs. A kernel that is booted without firmware does not
/// need them.
fn add_for_firmware(context: &DeviceContext) -> Result<(), BuildError> {
    context.ports.insert(CMOS_PORT, CMOS_LEN, Arc::new(Cmos::new(wall_clock)))?;
    context.pci.decode_memory();
    Ok(())
}

/// Creates the registers for vCPU hotplug.
fn cpu_registers(config: &VmConfig, events: &EventSender) -> Arc<CpuRegisters> {
    let (plug, sender) = (Plug::new(config.cpus.boot_vcpus, config.cpus.max_vcpus), events.clone());
    Arc::new(CpuRegisters::new(plug, move |index| sender.send(MachineEvent::VcpuEjected { index })))
}

/// Builds the vCPUs that are present at boot. Other vCPUs are created when they are added.
fn build_vcpus(
    config: &VmConfig,
    topology: &Topology,
    hypervisor: Hypervisor,
    context: &DeviceContext,
    boot: &BootInfo,
    registers: Arc<CpuRegisters>,
    events: &EventSender,
) -> Result<Vcpus, BuildError> {
    let (sink, lost) = (events.clone(), Arc::clone(&context.lost));
    let surroundings = Surroundings {
        ports: Arc::clone(&context.ports),
        mmio: Arc::clone(&context.mmio),
        events: Arc::new(move |event| sink.send(MachineEvent::Vcpu(event))),
        inhibitor: Arc::clone(&context.inhibitor),
        memory_is_lost: Arc::new(move || lost.explains_a_fault()),
        store_waits: Arc::clone(&context.store_waits),
    };
    let maker = VcpuMaker {
        hypervisor,
        cpus: config.cpus.clone(),
        cores: Cores::new(config.cpus.core_scheduling),
        places: topology.places().to_vec(),
        entry: boot.entry,
        surroundings,
    };
    Ok(Vcpus::new(Box::new(maker), registers)?)
}

/// Creates the vCPUs of one VM.
struct VcpuMaker {
    hypervisor: Hypervisor,
    cpus: CpusConfig,
    cores: Cores,
    places: Vec<VcpuPlace>,
    entry: PvhEntry,
    surroundings: Surroundings,
}

impl VcpuMaker {
    /// Starts the thread of a vCPU, and sets the initial state of the vCPU.
    fn prepare(&self, index: u8, fd: &VcpuFd) -> Result<(VcpuThread, Option<Fresh>), CpuError> {
        let placement =
            Placement { host_cpus: self.cpus.host_cpus(index).to_vec(), cores: self.cores.clone() };
        let thread = VcpuThread::start(index, placement)?;
        let traits = Traits {
            tsc_deadline: self.hypervisor.tsc_deadline,
            tsc_khz: fd.get_tsc_khz().ok(),
            nested: self.cpus.nested,
            max_phys_bits: self.cpus.max_phys_bits,
            amx: self.cpus.features.amx,
        };
        let leaves = cpuid::place(&self.hypervisor.cpuid, self.places[usize::from(index)], traits);
        let error = |source| CpuError::Kvm { what: "set the CPUID of", index, source };
        fd.set_cpuid2(&leaves).map_err(error)?;
        state::initialise(fd, index)?;
        // The boot vCPU is never ejected, so it needs no saved state.
        let fresh = if index == 0 {
            state::enter_pvh(fd, index, &self.entry)?;
            None
        } else {
            Some(Fresh::of(fd, index)?)
        };
        Ok((thread, fresh))
    }
}

impl Maker<Vcpu> for VcpuMaker {
    fn create(&self, index: u8) -> Result<VcpuFd, CpuError> {
        // KVM uses this number as the APIC ID. The vCPU with APIC ID 0 is the boot vCPU.
        let apic_id = self.places[usize::from(index)].apic_id;
        let error = |source| CpuError::Kvm { what: "create", index, source };
        self.hypervisor.vm.create_vcpu(u64::from(apic_id)).map_err(error)
    }

    fn finish(&self, index: u8, fd: VcpuFd) -> Result<Vcpu, (VcpuFd, CpuError)> {
        match self.prepare(index, &fd) {
            Ok((thread, fresh)) => Ok(thread.run(fd, fresh, self.surroundings.clone())),
            Err(err) => Err((fd, err)),
        }
    }
}
