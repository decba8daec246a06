//! Builds a machine from a configuration. Composition happens here and nowhere else: devices know neither each
//! other nor the machine.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::{Notify, mpsc};
use tracing::{debug, warn};

use super::error::BuildError;
use super::fabric::Fabric;
use super::hotplug::{self, Leaving};
use super::kvm::Hypervisor;
use super::machine::KvmMachine;
use super::owner::{EventSender, MachineEvent};
use super::resident::Resident;
use super::resources::Resources;
use super::{devices, governing, lost, pmem, volumes, zones};
use crate::acpi::ged::GenericEventDevice;
use crate::acpi::hotplug::HotplugPage;
use crate::acpi::pm::{PmEvent, PmPort};
use crate::acpi::{self, AcpiInput};
use crate::boot::{self, BootInfo, BootRequest, Pluggable};
use crate::config::{ConsoleMode, Topology, VmConfig};
use crate::cpu::cpuid;
use crate::cpu::run::{Surroundings, Vcpu};
use crate::cpu::{CpuError, state};
use crate::event_loop::EventLoop;
use crate::host_console::ConsoleFiles;
use crate::memory::backing::resident::resident_bytes;
use crate::memory::layout::{
    ACPI_PM_LEN, ACPI_PM_PORT, GED_GSI, GED_LEN, GED_START, HOTPLUG_LEN, HOTPLUG_START,
};
use crate::memory::slots::SlotTable;
use crate::memory::{self, Memory, MemoryOptions};
use crate::metrics::{DiskMetrics, MachineSources, PlugMetrics};
use crate::nmi_status::{NMI_STATUS_LEN, NMI_STATUS_PORT, NmiStatus};
use crate::pool::Durability;
use crate::virtio::balloon::BalloonHandle;
use crate::virtio::block::BlockHandle;
use crate::virtio::mem::MemHandle;
use crate::virtio::vsock::IN_PROCESS_BACKLOG;
use crate::volume::interface::Payload;

/// Builds the machine that `config`, which has been validated, asks for. Its vCPUs are stopped.
pub fn build(
    config: &VmConfig,
    resources: &mut Resources,
    events: &EventSender,
) -> Result<KvmMachine, BuildError> {
    // 1. What may be missing or in use elsewhere, before anything is made. Pools last: opening one marks what
    //    an earlier life left lent, and starts to erase it.
    let topology = Topology::of(config).map_err(BuildError::device("the guest's nodes"))?;
    let hypervisor = Hypervisor::open()?;
    resources.open_taps(config)?;
    resources.pmem().open(config)?;
    resources.open_pools(config)?;
    // 2. Memory, because everything else lies in it or reaches it.
    let mut memory = build_memory(config, &topology, resources, &hypervisor)?;
    // 3. The kernel: what it is decides which interface a volume gets.
    let boot = load_kernel(config, &topology, &memory)?;
    // 4. Devices. Those of memory have a loop of their own: an unplug waits for guards that the others hold.
    let vm = &hypervisor.vm;
    let mut fabric = Fabric::new(Arc::clone(vm) as _, Arc::clone(vm) as _, config.cpus.boot_vcpus, &memory)?;
    lost::watch_zones(config, resources, &memory, &fabric.lost)?;
    let (device_loop, memory_loop) = (EventLoop::spawn("_device")?, EventLoop::spawn("_mem")?);
    let (ged, page) = add_platform(&fabric, events)?;
    let mut files = ConsoleFiles::new(resources.file_start());
    devices::attach_serial(config, &mut files, &fabric, &device_loop.handle())?;
    let console = devices::attach_console(config, &mut files, &mut fabric, &memory, &device_loop.handle())?;
    let rng = devices::attach_rng(config, &mut fabric, &memory, &device_loop.handle())?;
    // A vsock device may come later: the governor listens in any case.
    let (agents, connections) = mpsc::channel(IN_PROCESS_BACKLOG);
    let attach_vsock =
        |vsock| devices::attach_vsock(vsock, &mut fabric, &memory, &device_loop.handle(), &agents);
    let vsock_metrics = config.vsock.as_ref().map(attach_vsock).transpose()?;
    let plugged = Arc::new(Notify::new());
    let signals =
        devices::MemorySignals { plugged: Arc::clone(&plugged), events: resources.events().clone() };
    let zones = devices::attach_memory(config, &mut fabric, &mut memory, &memory_loop.handle(), &signals)?;
    let balloon = devices::attach_balloon(config, &mut fabric, &memory, &device_loop.handle(), &plugged)?;
    let disks = devices::attach_disks(config, &mut fabric, &memory)?;
    let net = devices::attach_net(resources, &mut fabric, &memory)?;
    let payload = if boot.kernel.is_linux { Payload::Linux } else { Payload::Unknown };
    let volumes = volumes::attach(config, payload, resources, &mut memory, &mut fabric, events)?;
    let (pmem_metrics, pmem) = pmem::attach(resources.pmem(), &mut memory, &mut fabric)?;
    let lost_loop = lost::watch(&fabric.lost, events)?;
    // 5. The tables, which describe all of that.
    let input = AcpiInput {
        boot_vcpus: config.cpus.boot_vcpus,
        max_vcpus: config.cpus.max_vcpus,
        apic_ids: topology.places().iter().map(|place| place.apic_id).collect(),
        serial: config.serial.mode != ConsoleMode::Off,
        nodes: zones::numa_nodes(config, &topology, memory.map()),
        nvdimms: volumes.nvdimms,
    };
    acpi::build(&input)?.write(memory.boot())?;
    // 6. vCPUs, paused: none runs before the owner resumes them all.
    let vcpus = build_vcpus(config, &topology, &hypervisor, &fabric, &boot, events)?;
    // 7. The governor last: it acts on what is there.
    let governor = governing::start(
        config,
        resources,
        &zones,
        balloon.as_ref(),
        plugged,
        connections,
        &volumes.guest_btt,
    )?;
    // 8. Nothing can be missing any more: what an earlier VM has said may go.
    files.begin().map_err(BuildError::device("--serial, --console"))?;
    let hotplug = hotplug::metrics(&fabric.virtio);
    resources.metrics().set_machine(MachineSources {
        hotplug: Some(Arc::clone(&hotplug)),
        pressure: Some(Arc::downgrade(&governor.pressure_source())),
        pools: resources.pool_metrics(),
        volumes: volumes.metrics,
        pmem: pmem_metrics,
        ranges: fabric.lost.ranges(),
        guest_btt: Arc::clone(&volumes.guest_btt),
        buses: vec![("port", fabric.ports.metrics()), ("mmio", fabric.mmio.metrics())],
        vsock: vsock_metrics,
        rng: Some(rng),
        balloon: balloon.as_ref().map(BalloonHandle::metrics),
        console,
        disks: disks.iter().map(disk_metrics).collect(),
        net,
        plugs: zones.iter().map(plug_metrics).collect(),
        mappings: Some(Arc::clone(memory.mapping_budget())),
    });
    resources.machine_built();
    fabric.work.add(&[device_loop.handle(), memory_loop.handle()]);
    let host_ranges = memory.host_ranges().to_vec();
    Ok(KvmMachine {
        vcpus,
        governor,
        fabric,
        leaving: Leaving::default(),
        loops: [device_loop, memory_loop],
        lost_loop,
        events: events.clone(),
        agents,
        ged,
        page,
        hotplug,
        metrics: Arc::clone(resources.metrics()),
        told: resources.events().clone(),
        zones,
        balloon,
        pmem,
        pmem_files: resources.pmem().clone(),
        disks: disks.into_iter().chain(volumes.disks).collect(),
        resident: Resident::new(move || resident_bytes(&host_ranges)),
        volumes: volumes.volumes,
        guest_btt: volumes.guest_btt,
        memory,
    })
}

fn plug_metrics(handle: &MemHandle) -> PlugMetrics {
    let zone = handle.zone();
    PlugMetrics { zone: zone.id.clone(), tier: zone.tier.as_str().to_owned(), counters: handle.metrics() }
}

fn disk_metrics(disk: &BlockHandle) -> DiskMetrics {
    DiskMetrics { disk: disk.id().to_owned(), counters: disk.metrics() }
}

fn build_memory(
    config: &VmConfig,
    topology: &Topology,
    resources: &Resources,
    hypervisor: &Hypervisor,
) -> Result<Memory, BuildError> {
    let options = MemoryOptions {
        address_bits: cpuid::physical_address_bits(&hypervisor.cpuid),
        slot_limit: hypervisor.slot_limit,
        huge_pages: true,
    };
    let pm = config.pm_memory.first();
    let pool = pm.map(|pm| resources.pool(&pm.pool));
    if let (Some(pm), Some(pool)) = (pm, pool)
        && is_written_back(pool.durability())
    {
        let pool = pm.pool.display();
        warn!(%pool, "The host writes memory that is lent from this pool to its disk; tmpfs or DAX would be better");
    }
    let table = Arc::clone(&hypervisor.vm) as Arc<dyn SlotTable>;
    let dram = if config.memory.zones.is_empty() { "--memory" } else { "--memory-zone" };
    let flags = if pm.is_some() { format!("{dram}, --pm-memory") } else { dram.to_owned() };
    memory::build(topology.zones().to_vec(), pool, table, options).map_err(BuildError::device(flags))
}

/// Whether the host's kernel writes what a guest stores to memory that is lent: it does to all that is dirty in its page
/// cache, sooner or later. On tmpfs the page cache is all there is, and on DAX there is none.
fn is_written_back(durability: Durability) -> bool {
    match durability {
        Durability::PageCache => true,
        Durability::DaxSync | Durability::Volatile => false,
    }
}

fn load_kernel(config: &VmConfig, topology: &Topology, memory: &Memory) -> Result<BootInfo, BuildError> {
    let request = BootRequest {
        kernel: config.payload.kernel.as_deref().ok_or(BuildError::NoKernel)?,
        initramfs: config.payload.initramfs.as_deref(),
        cmdline: config.payload.cmdline.as_deref().unwrap_or(""),
        boot_memory_bytes: config.memory.boot_bytes(),
        pluggable: Pluggable::of(topology.zones()),
    };
    let started = Instant::now();
    // SAFETY: there are no vCPUs and no devices yet (`build`, steps 3, 4 and 6), and boot memory is anonymous
    // (`DramBacking`).
    let boot = unsafe { boot::load(memory.boot(), &request) }?;
    // Unpacking the kernel is most of what a VMM does before the guest runs.
    let loading_ms = started.elapsed().as_millis();
    debug!(loading_ms, unpacked_from = ?boot.kernel.bzimage, "Kernel and initial RAM file system are in memory");
    Ok(boot)
}

/// Power management: how the guest ends itself, and how it is told to; and of what comes and goes.
fn add_platform(
    fabric: &Fabric,
    events: &EventSender,
) -> Result<(Arc<GenericEventDevice>, Arc<HotplugPage>), BuildError> {
    let sender = events.clone();
    let pm = PmPort::new(move |event| {
        sender.send(match event {
            PmEvent::Shutdown => MachineEvent::GuestShutdown,
            PmEvent::Reset => MachineEvent::GuestReset,
        });
    });
    fabric.ports.insert(u64::from(ACPI_PM_PORT), u64::from(ACPI_PM_LEN), Arc::new(pm))?;
    fabric.ports.insert(NMI_STATUS_PORT, NMI_STATUS_LEN, Arc::new(NmiStatus))?;
    let line = fabric.line(GED_GSI)?;
    let ged = Arc::new(GenericEventDevice::new(move || line.write(1)));
    fabric.mmio.insert(GED_START, GED_LEN, Arc::clone(&ged) as _)?;
    let (pci, sender) = (Arc::clone(&fabric.pci), events.clone());
    let page = Arc::new(HotplugPage::new(move |slot| {
        // The machine has the device as well: its end is not for a vCPU.
        drop(pci.remove(slot));
        sender.send(MachineEvent::Ejected { slot });
    }));
    fabric.mmio.insert(HOTPLUG_START, HOTPLUG_LEN, Arc::clone(&page) as _)?;
    Ok((ged, page))
}

fn build_vcpus(
    config: &VmConfig,
    topology: &Topology,
    hypervisor: &Hypervisor,
    fabric: &Fabric,
    boot: &BootInfo,
    events: &EventSender,
) -> Result<Vec<Vcpu>, BuildError> {
    let count = config.cpus.boot_vcpus;
    (0..count)
        .map(|index| {
            let error = |what| move |source| CpuError::Kvm { what, index, source };
            let place = topology.places()[usize::from(index)];
            // KVM takes the number that it is given for the APIC id, and 0 for the one that boots.
            let fd = hypervisor.vm.create_vcpu(u64::from(place.apic_id)).map_err(error("create"))?;
            let leaves = cpuid::place(&hypervisor.cpuid, place, hypervisor.tsc_deadline);
            fd.set_cpuid2(&leaves).map_err(error("set the CPUID of"))?;
            state::initialise(&fd, index)?;
            if index == 0 {
                state::enter_pvh(&fd, index, &boot.entry)?;
            }
            let sink = events.clone();
            let events = Arc::new(move |event| sink.send(MachineEvent::Vcpu(event)));
            let lost = Arc::clone(&fabric.lost);
            let surroundings = Surroundings {
                ports: Arc::clone(&fabric.ports),
                mmio: Arc::clone(&fabric.mmio),
                events,
                brake: Arc::clone(&fabric.brake),
                memory_is_lost: Arc::new(move || lost.explains_a_fault()),
            };
            Ok(Vcpu::spawn(fd, index, surroundings)?)
        })
        .collect()
}
