//! Builds the devices through which the guest accesses volumes and persistent-memory files.

use std::sync::{Arc, Weak};

use foreshore_config::Words;
use foreshore_types::VolumeFormat;
use pmem_volume::Durability;

use super::compactor::Compactor;
use super::config::{OnFull, PmVolumeConfig};
use super::file::PmemFile;
use super::interface::Chosen;
use super::mapped_thin::MappedThinVolume;
use super::metrics::{VolumeCounters, VolumeMetrics};
use super::pmem_config::PmemConfig;
use crate::bus::BusRange;
use crate::device::{AttachedDevice, DeviceContext, MappedFile, SetupResult};
use crate::disk::BlockDevice;
use crate::events::Event;
use crate::log::rate_limited;
use crate::memory::backing::Access;
use crate::memory::holes::{HoleMetrics, HoleSource};
use crate::memory::layout::FLUSH_HINT_LEN;
use crate::memory::{FileMapping, Memory};
use crate::metrics::Registration;
use crate::nvdimm::{FlushHint, Nvdimm};
use crate::persist::{FirstFailure, Persist, ReadOnly, Watched};
use crate::pool::btt_loss::BttLoss;
use crate::pool::{PmPool, PoolVolume, VolumeDisk, VolumeExtent};
use crate::virtio::block::{Block, DiskShape, FullHandler};
use crate::virtio::pmem::device::Pmem;
use crate::virtio::pmem::metrics::PmemFileMetrics;
use crate::virtio::{new_device, new_device_with_id};

/// Maximum number of queues for a volume that is presented as a disk.
const QUEUES_MAX: u16 = 16;
const QUEUE_SIZE: u16 = 128;

/// Builds the `--pmem` device for an open file. The configuration must contain an id.
pub fn build_file(
    config: &PmemConfig,
    file: &Arc<PmemFile>,
    memory: &mut Memory,
    context: &DeviceContext,
) -> SetupResult {
    let mapping = FileMapping::of_file(file.file(), file.len_bytes(), file.access());
    let mapped = MappedFile::new(config.source(), mapping, memory, context)?;
    let id = config.id.as_deref().expect("a VM's devices have ids");
    let (guest, backing) = (mapped.guest(), Arc::clone(file) as Arc<dyn Persist>);
    let device = Pmem::raw(format!("pmem-{id}"), guest.start, guest.len, backing)?;
    let source = PmemFileMetrics {
        name: id.to_owned(),
        file: config.file.display().to_string(),
        size_bytes: file.len_bytes(),
        durability: file.durability(),
        failed: file.failure(),
        counters: device.metrics(),
    };
    let new = new_device_with_id(id, device, context)?.removable(PmemConfig::KIND);
    Ok(new.exposing(Arc::new(source)).mapping(mapped).attach(context)?)
}

/// Open volume with the interface that was chosen for it.
pub struct NewVolume<'a> {
    pub config: &'a PmVolumeConfig,
    pub interface: Chosen,
    pub pool: &'a Arc<dyn PmPool>,
    pub volume: Box<dyn PoolVolume>,
}

/// Properties of the machine that building a volume's device depends on.
pub struct VolumePlace {
    pub boot_vcpus: u8,
    /// NUMA node for an NVDIMM.
    pub node: u32,
    /// Number of NVDIMMs that were built before this one.
    pub nvdimms: usize,
    /// Free space of the pool below which a thin volume is compacted.
    pub min_free_bytes: u64,
}

/// Volume with its device.
pub struct BuiltVolume {
    pub sizes: Sizes,
    pub failure: FirstFailure,
    pub device: VolumeDevice,
    /// Keeps the volume open. `None` if the device keeps it open.
    pub volume: Option<Arc<dyn PoolVolume>>,
    /// Compacts a thin volume that the guest may write.
    pub compactor: Option<Compactor>,
    /// Counters of the holes that stores of the guest fill.
    pub holes: Option<Arc<HoleMetrics>>,
}

/// Sizes of an attached volume. The value does not keep the volume open.
#[derive(Clone, Debug)]
pub enum Sizes {
    /// Reported by a mapped volume.
    OfVolume(Weak<dyn PoolVolume>),
    /// Reported by the device, because a thin volume gets chunks while its guest writes, and any
    /// volume may grow.
    OfDevice(Weak<dyn BlockDevice>),
}

impl Sizes {
    /// Size that the guest sees. `None` if the device has ended, as for the other sizes.
    pub fn size_bytes(&self) -> Option<u64> {
        match self {
            Self::OfVolume(volume) => Some(volume.upgrade()?.size_bytes()),
            Self::OfDevice(device) => Some(device.upgrade()?.size_bytes()),
        }
    }

    /// Guaranteed bytes of the volume.
    pub fn reserve_bytes(&self) -> Option<u64> {
        match self {
            Self::OfVolume(volume) => Some(volume.upgrade()?.reserve_bytes()),
            Self::OfDevice(device) => device.upgrade()?.reserve_bytes(),
        }
    }

    /// Bytes of the pool that the volume occupies.
    pub fn allocated_bytes(&self) -> Option<u64> {
        match self {
            Self::OfVolume(volume) => Some(volume.upgrade()?.allocated_bytes()),
            Self::OfDevice(device) => device.upgrade()?.allocated_bytes(),
        }
    }

    /// Bytes of a thin volume that were written and not discarded since. Guests translate the
    /// sectors of mapped volumes themselves.
    pub fn live_bytes(&self) -> Option<u64> {
        match self {
            Self::OfVolume(_) => None,
            Self::OfDevice(device) => device.upgrade()?.live_bytes(),
        }
    }

    /// Number of the volume's extents in the pool.
    pub fn extents(&self) -> Option<usize> {
        match self {
            Self::OfVolume(volume) => Some(volume.upgrade()?.extents().len()),
            Self::OfDevice(device) => Some(device.upgrade()?.extents()),
        }
    }
}

/// Device through which the guest accesses a volume.
pub enum VolumeDevice {
    Pci(AttachedDevice),
    /// NVDIMM in the firmware tables, with its flush hint, its mapping and its metrics.
    Nvdimm(Nvdimm, (Option<BusRange>, MappedFile, Registration)),
}

/// Builds the device of `--pm-volume`.
pub fn build_volume(
    new: NewVolume<'_>,
    place: &VolumePlace,
    memory: &mut Memory,
    context: &DeviceContext,
) -> SetupResult<BuiltVolume> {
    match new.interface {
        Chosen::VirtioBlk => build_virtio_blk(new, place, context),
        Chosen::Nvdimm => build_nvdimm(MappedVolume::new(new, memory, context)?, place, context),
        Chosen::VirtioPmem => build_virtio_pmem(MappedVolume::new(new, memory, context)?, context),
    }
}

/// Volume that is mapped into guest memory.
struct MappedVolume<'a> {
    config: &'a PmVolumeConfig,
    volume: Arc<dyn PoolVolume>,
    /// Flushes the volume, and records the first failure.
    watched: Arc<Watched>,
    mapped: MappedFile,
    /// Set if the VMM must execute each flush of the guest.
    flushes: bool,
    /// Counters of the holes that stores of the guest fill.
    holes: Option<Arc<HoleMetrics>>,
}

impl<'a> MappedVolume<'a> {
    fn new(new: NewVolume<'a>, memory: &mut Memory, context: &DeviceContext) -> SetupResult<Self> {
        let NewVolume { config, pool, volume, .. } = new;
        // An earlier user of the BTT may have left its recovery unfinished. The VMM completes the
        // recovery even for a read-only volume, because the guest's driver could not store the
        // result. The driver would then read sectors from blocks that already belong to other
        // sectors.
        if config.format == VolumeFormat::Btt {
            volume.quiesce()?;
        }
        let (access, flushes) = mapping(config.readonly, pool.durability());
        let volume: Arc<dyn PoolVolume> = Arc::from(volume);
        let watched = Watched::new(Arc::clone(&volume) as Arc<dyn Persist>);
        let (extents, len_bytes) = (volume.extents(), volume.size_bytes());
        let holes = match volume.is_thin() && !config.readonly {
            true => Some(hole_source(config, pool, &volume, &watched, context)),
            false => None,
        };
        let metrics = holes.as_ref().map(|holes| Arc::clone(&holes.metrics));
        let part = |extent: &VolumeExtent| (extent.volume_offset_bytes(), extent.run.byte_range());
        let parts = extents.iter().map(part).collect();
        let mapping = FileMapping { file: pool.file(), len_bytes, parts, access, holes };
        let mapped = MappedFile::new(config.source(), mapping, memory, context)?;
        if let (Some(access), Some(metrics)) = (mapped.chunk_access(), &metrics) {
            let (name, volume) = (config.name.clone(), Arc::downgrade(&volume));
            let metrics = Arc::clone(metrics);
            context.trims.add(Arc::new(MappedThinVolume { name, volume, access, metrics }));
        }
        Ok(Self { config, volume, watched, mapped, flushes, holes: metrics })
    }

    fn sizes(&self) -> Sizes {
        Sizes::OfVolume(Arc::downgrade(&self.volume))
    }

    fn metrics(&self, counters: VolumeCounters) -> Arc<VolumeMetrics> {
        let (sizes, failure) = (self.sizes(), self.watched.failure());
        metrics(self.config, sizes, failure, counters, self.holes.clone())
    }

    /// Combines the volume with the device that holds its mapping.
    fn built(
        self,
        device: impl FnOnce(MappedFile) -> SetupResult<VolumeDevice>,
    ) -> SetupResult<BuiltVolume> {
        Ok(BuiltVolume {
            sizes: self.sizes(),
            failure: self.watched.failure(),
            device: device(self.mapped)?,
            volume: Some(self.volume),
            compactor: None,
            holes: self.holes,
        })
    }
}

fn metrics(
    config: &PmVolumeConfig,
    sizes: Sizes,
    failure: FirstFailure,
    counters: VolumeCounters,
    holes: Option<Arc<HoleMetrics>>,
) -> Arc<VolumeMetrics> {
    Arc::new(VolumeMetrics {
        pool: config.pool.display().to_string(),
        volume: config.name.clone(),
        sizes,
        failure,
        counters,
        holes,
    })
}

/// Returns the functions that fill the holes of a volume, and that stop the guest if this fails.
fn hole_source(
    config: &PmVolumeConfig,
    pool: &Arc<dyn PmPool>,
    volume: &Arc<dyn PoolVolume>,
    watched: &Arc<Watched>,
    context: &DeviceContext,
) -> HoleSource {
    // A store cannot fail, so it waits with any `on_full`.
    let waiting = PmVolumeConfig { on_full: OnFull::Pause, ..config.clone() };
    HoleSource {
        device: Arc::clone(&context.machine.userfaults),
        pool: Arc::clone(pool),
        volume: Arc::clone(volume),
        metrics: Arc::default(),
        waits: Arc::clone(&context.store_waits),
        on_full: full_handler(&waiting, context).notify,
        on_failure: Arc::new(store_failure(config, watched, context)),
    }
}

/// Returns a function that is called with the reason if a store does not reach the volume. From
/// then on, flushes fail.
fn store_failure(
    config: &PmVolumeConfig,
    watched: &Arc<Watched>,
    context: &DeviceContext,
) -> impl Fn(String) + Send + Sync + use<> {
    let (name, stop, watched) = (config.name.clone(), stop_guest(context), Arc::clone(watched));
    let inhibitor = Arc::clone(&context.inhibitor);
    move |reason| {
        watched.fail(reason.clone());
        // The VM task handles this event before a later request. Otherwise, a pause and a resume
        // could let vCPUs enter the guest while the others are stopped.
        stop(format!("store to volume {name} failed: {reason}"));
        // vCPUs that are in the guest must not continue there.
        inhibitor.stop();
    }
}

/// Returns a function that prevents all vCPUs from entering the guest again, and pauses the VM with
/// a reason.
fn stop_guest(context: &DeviceContext) -> impl Fn(String) + Clone + Send + Sync + use<> {
    let (pause, inhibitor) =
        (Arc::clone(&context.machine.pause_guest), Arc::clone(&context.inhibitor));
    move |reason| {
        inhibitor.set();
        pause(reason);
    }
}

/// Returns the access for mapping a volume, and true if the VMM must execute its flushes. A fence
/// is enough on a volatile pool, whose content does not survive the host, and on PM that is mapped
/// with MAP_SYNC.
fn mapping(readonly: bool, durability: Durability) -> (Access, bool) {
    match (readonly, durability) {
        (true, _) => (Access::Read, false),
        (false, Durability::DaxSync) => (Access::ReadWriteSync, false),
        (false, Durability::PageCache) => (Access::ReadWrite, true),
        (false, Durability::Volatile) => (Access::ReadWrite, false),
    }
}

fn build_nvdimm(
    new: MappedVolume<'_>,
    place: &VolumePlace,
    context: &DeviceContext,
) -> SetupResult<BuiltVolume> {
    // A store to the flush hint cannot report a failure to the guest. The vCPU therefore stops
    // before its next instruction. The other vCPUs stop when the VM task handles the event.
    let on_failure = Box::new(stop_guest(context));
    let backing = Arc::clone(&new.watched) as Arc<dyn Persist>;
    let hint = Arc::new(FlushHint::new(new.config.name.clone(), backing, on_failure));
    let source = new.metrics(VolumeCounters::Nvdimm(hint.metrics()));
    let address = Nvdimm::flush_hint_address(place.nvdimms);
    let hint = match new.flushes {
        true => Some(context.mmio.attach(address, FLUSH_HINT_LEN, hint)?),
        false => None,
    };
    let guest = new.mapped.guest();
    let nvdimm = Nvdimm {
        start: guest.start,
        size_bytes: guest.len,
        node: place.node,
        flush_hint: new.flushes,
        read_only: new.config.readonly,
    };
    let registration = context.machine.metrics.register(source);
    new.built(|mapped| Ok(VolumeDevice::Nvdimm(nvdimm, (hint, mapped, registration))))
}

fn build_virtio_pmem(new: MappedVolume<'_>, context: &DeviceContext) -> SetupResult<BuiltVolume> {
    let (config, guest) = (new.config, new.mapped.guest());
    let backing = match config.readonly {
        true => Arc::new(ReadOnly),
        false => Arc::clone(&new.watched) as Arc<dyn Persist>,
    };
    let name = Chosen::VirtioPmem.device_id(&config.name).expect("a device on the PCI bus");
    let device = match config.format {
        VolumeFormat::Btt => Pmem::new(name, guest.start, guest.len, backing),
        VolumeFormat::Raw => Pmem::raw(name, guest.start, guest.len, backing)?,
    };
    let source = new.metrics(VolumeCounters::VirtioPmem(device.metrics()));
    let device = new_device(device, context)?.removable(PmVolumeConfig::KIND).exposing(source);
    new.built(|mapped| Ok(VolumeDevice::Pci(device.mapping(mapped).attach(context)?)))
}

/// Builds a disk with one queue for each vCPU, because the media are as fast as memory and serve
/// all queues in parallel.
fn build_virtio_blk(
    new: NewVolume<'_>,
    place: &VolumePlace,
    context: &DeviceContext,
) -> SetupResult<BuiltVolume> {
    let NewVolume { config, pool, volume, .. } = new;
    let VolumeDisk { device, btt_loss } = volume.into_disk()?;
    let served = Arc::downgrade(&device);
    let is_compacted = device.geometry().unmap && !config.readonly;
    if let Some(loss) = &btt_loss {
        let pool = config.pool.display().to_string();
        context.machine.events.emit_of_guest(loss_event(loss, &pool, &config.name));
    }
    let shape = DiskShape {
        id: config.name.clone(),
        serial: config.name.clone(),
        queues: u16::from(place.boot_vcpus).clamp(1, QUEUES_MAX),
        queue_size: QUEUE_SIZE,
        read_only: config.readonly,
    };
    let device = Block::new(shape, device)?;
    device.on_full(full_handler(config, context));
    let disk = device.handle();
    let (sizes, failure) = (Sizes::OfDevice(Weak::clone(&served)), disk.failure());
    let compacted = Weak::clone(&served);
    let counters = VolumeCounters::VirtioBlk { disk: disk.metrics(), device: served, btt_loss };
    let source = metrics(config, sizes.clone(), failure.clone(), counters, None);
    let device = new_device(device, context)?.removable(PmVolumeConfig::KIND);
    let device = device.exposing(source).with_handle(disk);
    let device = VolumeDevice::Pci(device.attach(context)?);
    let compactor = match is_compacted {
        true => Some(Compactor::start(compacted, Arc::clone(pool), place.min_free_bytes)?),
        false => None,
    };
    Ok(BuiltVolume { sizes, failure, device, volume: None, compactor, holes: None })
}

fn full_handler(config: &PmVolumeConfig, context: &DeviceContext) -> FullHandler {
    let (pool, volume, on_full) =
        (config.pool.display().to_string(), config.name.clone(), config.on_full);
    let (events, wait) =
        (context.machine.events.clone(), Arc::clone(&context.machine.wait_for_space));
    let notify = Box::new(move || {
        let word = on_full.word().flag;
        let event = Event::PoolFull { pool: &pool, volume: &volume, on_full: word };
        events.emit_of_guest(event);
        match on_full {
            OnFull::Pause => wait(format!("pool-full: volume {volume} needs space in pool {pool}")),
            OnFull::Error => rate_limited!(warn, pool, volume, "Write failed: the pool is full"),
        }
    });
    FullHandler { waits: on_full == OnFull::Pause, notify }
}

fn loss_event<'a>(loss: &'a BttLoss, pool: &'a str, volume: &'a str) -> Event<'a> {
    match loss {
        BttLoss::Replaced { .. } => Event::VolumeReplaced { pool, volume },
        BttLoss::Damaged { reason } => Event::VolumeDamaged { pool, volume, reason },
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use foreshore_confinement::thread::ThreadKind;
    use vm_memory::GuestMemoryMmap;

    use super::*;
    use crate::device::testing::FakeMachine;
    use crate::entry_inhibitor::{self, EntryInhibitor};
    use crate::event_loop::EventLoop;
    use crate::memory::view::GuestView;

    #[test]
    fn mapping_depends_on_the_durability_of_the_pool() {
        use Durability::{DaxSync, PageCache, Volatile};
        assert_eq!(mapping(false, Volatile), (Access::ReadWrite, false));
        assert_eq!(mapping(false, PageCache), (Access::ReadWrite, true));
        assert_eq!(mapping(false, DaxSync), (Access::ReadWriteSync, false));
        for durability in [Volatile, PageCache, DaxSync] {
            assert_eq!(mapping(true, durability), (Access::Read, false));
        }
    }

    #[test]
    fn full_pool_sends_an_event_and_pauses_the_vm_unless_writes_fail() {
        let event_loop = EventLoop::spawn(ThreadKind::Device, "test").unwrap();
        let view = GuestView::new(GuestMemoryMmap::new());
        let fake = FakeMachine::default();
        let mut context = fake.context(view, event_loop.handle());
        let (sender, paused) = mpsc::channel();
        context.machine.wait_for_space = Arc::new(move |reason| sender.send(reason).unwrap());
        let reason = "pool-full: volume v needs space in pool /p";
        for (keys, expected) in
            [("", Some(reason)), (",on_full=pause", Some(reason)), (",on_full=error", None)]
        {
            let config = PmVolumeConfig::parse(&format!("pool=/p,name=v{keys}")).unwrap();
            let handler = full_handler(&config, &context);
            (handler.notify)();
            assert_eq!(paused.try_recv().ok().as_deref(), expected, "{keys}");
            assert_eq!(handler.waits, expected.is_some());
        }
        let emitted = fake.events.counters().emitted();
        let full = emitted.into_iter().find(|(event, _)| *event == ("foreshore", "pool-full"));
        assert_eq!(full.unwrap().1, 3);
    }

    #[test]
    fn failed_store_is_reported_before_vcpus_are_stopped() {
        let event_loop = EventLoop::spawn(ThreadKind::Device, "test").unwrap();
        let fake = FakeMachine::default();
        let mut context = fake.context(GuestView::new(GuestMemoryMmap::new()), event_loop.handle());
        context.inhibitor = Arc::new(EntryInhibitor::new(1));
        let inhibitor = Arc::clone(&context.inhibitor);
        let (sender, paused) = mpsc::channel();
        context.machine.pause_guest = Arc::new(move |reason| {
            sender.send((reason, inhibitor.is_set(), inhibitor.is_any_in_guest())).unwrap();
        });
        let (thread, entered) = entry_inhibitor::tests::vcpu(&context.inhibitor, 0);
        entered.recv_timeout(Duration::from_secs(20)).unwrap();
        let config = PmVolumeConfig::parse("pool=/p,name=v").unwrap();
        let watched = Watched::new(Arc::new(ReadOnly));
        store_failure(&config, &watched, &context)("the pool is full".to_owned());
        let (reason, is_set, is_any_in_guest) = paused.try_recv().unwrap();
        assert!(reason.contains("volume v failed: the pool is full"), "{reason}");
        assert!(is_set && is_any_in_guest);
        assert!(!context.inhibitor.is_any_in_guest());
        thread.join().unwrap();
        assert!(watched.failure().reason().is_some());
    }

    #[test]
    fn event_names_the_cause_of_a_lost_btt() {
        let reason = "arena 1 is missing".to_owned();
        let replaced = loss_event(&BttLoss::Replaced { reason: reason.clone() }, "p", "v").name();
        assert_eq!(replaced, ("foreshore", "volume-replaced"));
        let damaged = BttLoss::Damaged { reason: reason.clone() };
        let expected = Event::VolumeDamaged { pool: "p", volume: "v", reason: &reason };
        assert_eq!(loss_event(&damaged, "p", "v"), expected);
    }
}
