//! Attaches volumes: opens them, maps them, and shows them by the interface that is safe.

use std::sync::Arc;

use foreshore_types::size::Size;
use pmem_volume::Durability;
use tracing::{info, warn};

use super::attached::{AttachedVolume, Opened};
use super::created_volumes::CreatedVolumes;
use super::error::BuildError;
use super::fabric::Fabric;
use super::owner::{EventSender, MachineEvent};
use super::resources::Resources;
use super::zones;
use crate::acpi::Nvdimm;
use crate::config::{PmVolumeConfig, VmConfig, VolumeFormat};
use crate::device::NewDevice;
use crate::events::{Event, Events};
use crate::memory::backing::Access;
use crate::memory::layout::{FLUSH_HINT_LEN, NVDIMM_HEALTH_LEN, NVDIMM_HEALTH_START};
use crate::memory::lost::LostMemory;
use crate::memory::{MappedRange, Memory};
use crate::nvdimm::FlushHint;
use crate::nvdimm::health::{self, Health, HealthRegisters};
use crate::persist::{FirstFailure, Persist, ReadOnly, Watched};
use crate::pool::btt_loss::BttLoss;
use crate::pool::{PmPool, PoolError, PoolVolume, VolumeDisk};
use crate::virtio::block::{Block, DiskShape};
use crate::virtio::pmem::device::Pmem;
use crate::volume::guest_btt::{GuestBtt, VolumeKey};
use crate::volume::interface::{
    Chosen, InterfaceError, Payload, check_count, check_ids, check_pool, choose,
};
use crate::volume::metrics::{VolumeCounters, VolumeMetrics};
use crate::volume::plan::Step;

/// Queues of a volume that is shown as a disk, at most.
const QUEUES_MAX: u16 = 16;
const QUEUE_SIZE: u16 = 128;

/// What attaching volumes leaves behind.
#[derive(Default)]
pub(super) struct Attached {
    /// For the firmware tables, in the order of their flush hint pages.
    pub(super) nvdimms: Vec<Nvdimm>,
    pub(super) volumes: Vec<AttachedVolume>,
    /// Of those that the guest translates.
    pub(super) guest_btt: Arc<GuestBtt>,
}

/// A volume that is open and mapped.
struct Mapped<'a> {
    config: &'a PmVolumeConfig,
    volume: Arc<dyn PoolVolume>,
    /// Makes it durable, and knows whether that has failed.
    watched: Arc<Watched>,
    range: MappedRange,
    /// Whether a flush of the guest must come out to us.
    flushes: bool,
}

/// Attaches every volume of `config`.
pub(super) fn attach(
    config: &VmConfig,
    payload: Payload,
    (resources, steps, created): (&Resources, &[Step], &mut CreatedVolumes),
    memory: &mut Memory,
    fabric: &mut Fabric,
    events: &EventSender,
) -> Result<Attached, BuildError> {
    let chosen = choose_all(config, payload, resources)?;
    let opened = open(config, steps, resources, created)?;
    let mut attached =
        Attached { guest_btt: Arc::new(guest_btt(config, &chosen)), ..Attached::default() };
    let mut healths = Vec::new();
    for ((volume, opened), chosen) in config.pm_volumes.iter().zip(opened).zip(chosen) {
        let pool = resources.pool(&volume.pool);
        let shown = match chosen {
            Chosen::VirtioBlk => {
                let (vcpus, events) = (config.cpus.boot_vcpus, resources.events());
                attach_virtio_blk(volume, opened, vcpus, events, fabric, memory)?
            }
            Chosen::Nvdimm => {
                let mapped = map(volume, opened, resources, memory, &fabric.lost)?;
                healths.push(health(pool, mapped.watched.failure()));
                let node = zones::volume_node(memory.zones());
                let counters = attach_nvdimm(&mapped, node, fabric, events, &mut attached.nvdimms)?;
                mapped.shown(counters)
            }
            Chosen::VirtioPmem => {
                let mapped = map(volume, opened, resources, memory, &fabric.lost)?;
                let counters = attach_virtio_pmem(&mapped, fabric, memory)?;
                mapped.shown(counters)
            }
        };
        let Shown { opened, failure, counters } = shown;
        fabric.expose(Arc::new(VolumeMetrics {
            pool: volume.pool.display().to_string(),
            volume: volume.name.clone(),
            size_bytes: opened.size_bytes,
            failure: failure.clone(),
            counters,
        }));
        attached.volumes.push(AttachedVolume::new(volume, chosen, pool, opened, failure));
    }
    if !healths.is_empty() {
        let registers = Arc::new(HealthRegisters::new(healths));
        fabric.mmio.insert(NVDIMM_HEALTH_START, NVDIMM_HEALTH_LEN, registers)?;
    }
    Ok(attached)
}

/// The interface of each volume, in their order.
fn choose_all(
    config: &VmConfig,
    payload: Payload,
    resources: &Resources,
) -> Result<Vec<Chosen>, InterfaceError> {
    let choose = |volume: &PmVolumeConfig| {
        let chosen = choose(volume, config.cpus.max_vcpus, payload)?;
        check_pool(volume, chosen, resources.pool(&volume.pool).durability())?;
        Ok(chosen)
    };
    let chosen: Vec<_> = config.pm_volumes.iter().map(choose).collect::<Result<_, _>>()?;
    check_count(&chosen)?;
    check_ids(config.pm_volumes.iter().zip(chosen.iter().copied()), config.ids_beside_volumes())?;
    Ok(chosen)
}

/// What is asked about the guest's driver: for the volumes whose sectors it finds.
fn guest_btt(config: &VmConfig, chosen: &[Chosen]) -> GuestBtt {
    let translated = config
        .pm_volumes
        .iter()
        .zip(chosen)
        .filter(|(volume, chosen)| volume.format == VolumeFormat::Btt && chosen.guest_translates())
        .map(|(volume, chosen)| {
            (VolumeKey { pool: volume.pool.clone(), name: volume.name.clone() }, *chosen)
        });
    GuestBtt::new(translated.collect(), config.cpus.max_vcpus)
}

/// What the guest is told of an NVDIMM's health.
fn health(pool: &Arc<dyn PmPool>, failure: FirstFailure) -> health::Source {
    let pool = Arc::clone(pool);
    Box::new(move || match failure.reason().is_some() || pool.has_failed() {
        true => Health::NotDurable,
        false => Health::Ok,
    })
}

/// A volume that the guest has from now on.
struct Shown {
    opened: Opened,
    failure: FirstFailure,
    counters: VolumeCounters,
}

impl Mapped<'_> {
    fn shown(self, counters: VolumeCounters) -> Shown {
        let (size_bytes, extents) = (self.volume.size_bytes(), self.volume.extents().len());
        let opened = Opened { size_bytes, extents, _volume: Some(self.volume) };
        Shown { opened, failure: self.watched.failure(), counters }
    }
}

/// Carries out the step of each volume of `config`, and opens it. Returns them in the order of
/// `config`.
///
/// Existing volumes are opened first, then new ones are created, and then volumes grow, because a
/// grow cannot be undone.
fn open(
    config: &VmConfig,
    steps: &[Step],
    resources: &Resources,
    created: &mut CreatedVolumes,
) -> Result<Vec<Box<dyn PoolVolume>>, BuildError> {
    let mut order: Vec<_> = steps.iter().enumerate().collect();
    order.sort_by_key(|(_, step)| match step {
        Step::Open => 0,
        Step::Create(_) => 1,
        Step::Grow(_) => 2,
    });
    let mut opened: Vec<Option<Box<dyn PoolVolume>>> = steps.iter().map(|_| None).collect();
    for (place, step) in order {
        let volume = &config.pm_volumes[place];
        let pool = resources.pool(&volume.pool);
        let result = match step {
            Step::Open => Ok(()),
            Step::Create(size_bytes) => created.create(volume, pool, *size_bytes),
            Step::Grow(size_bytes) => grow(volume, pool, *size_bytes),
        };
        let result = result.and_then(|()| pool.open_volume(&volume.name));
        opened[place] = Some(result.map_err(BuildError::device(flag(volume)))?);
    }
    Ok(opened.into_iter().map(|volume| volume.expect("each volume has a step")).collect())
}

/// Grows a volume with `size=remaining`. A volume that cannot grow is served as it is, unless its
/// pool has failed.
fn grow(volume: &PmVolumeConfig, pool: &Arc<dyn PmPool>, size_bytes: u64) -> Result<(), PoolError> {
    let PmVolumeConfig { name, pool: path, .. } = volume;
    let (path, size) = (path.display(), Size(size_bytes));
    match pool.grow_volume(name, size_bytes) {
        Ok(()) => {
            info!(pool = %path, volume = name, %size, "The volume has grown by what remains of its pool")
        }
        Err(err) if pool.has_failed() => return Err(err),
        Err(err) => {
            let reason = foreshore_types::chain(&err);
            warn!(pool = %path, volume = name, %size, reason, "The volume keeps its size; it cannot grow by what remains of its pool");
        }
    }
    Ok(())
}

/// How errors name a volume.
fn flag(config: &PmVolumeConfig) -> String {
    format!("--pm-volume pool={},name={}", config.pool.display(), config.name)
}

fn map<'a>(
    config: &'a PmVolumeConfig,
    volume: Box<dyn PoolVolume>,
    resources: &Resources,
    memory: &mut Memory,
    lost: &LostMemory,
) -> Result<Mapped<'a>, BuildError> {
    let pool = resources.pool(&config.pool);
    // Also of one that the guest only reads: what its recovery then finds would go nowhere, and it
    // would show sectors in blocks that have become another's.
    if config.format == VolumeFormat::Btt {
        volume.settle().map_err(BuildError::device(flag(config)))?;
    }
    let (access, flushes) = mapping(config.readonly, pool.durability());
    let range = memory
        .add_file_range(pool.file(), &volume.extents(), access)
        .map_err(BuildError::device(flag(config)))?;
    // What lies behind the volume in the pool's file is not its own to lose.
    let ends = volume.extents().into_iter().map(|extent| extent.end);
    lost.watch_file(flag(config), &range.reservation, pool.file(), ends.max().unwrap_or(0))
        .map_err(BuildError::device(flag(config)))?;
    let volume: Arc<dyn PoolVolume> = Arc::from(volume);
    let watched = Watched::new(Arc::clone(&volume) as Arc<dyn Persist>);
    Ok(Mapped { config, volume, watched, range, flushes })
}

/// How a volume is mapped, and whether its flushes must come out to us: a fence is enough on a
/// volatile pool, where nothing survives the host, and on PM that is mapped with MAP_SYNC.
fn mapping(readonly: bool, durability: Durability) -> (Access, bool) {
    match (readonly, durability) {
        (true, _) => (Access::Read, false),
        (false, Durability::DaxSync) => (Access::ReadWriteSync, false),
        (false, Durability::PageCache) => (Access::ReadWrite, true),
        (false, Durability::Volatile) => (Access::ReadWrite, false),
    }
}

fn attach_nvdimm(
    mapped: &Mapped<'_>,
    node: u32,
    fabric: &Fabric,
    events: &EventSender,
    nvdimms: &mut Vec<Nvdimm>,
) -> Result<VolumeCounters, BuildError> {
    let (events, brake) = (events.clone(), Arc::clone(&fabric.brake));
    // A store to the hint cannot fail in the guest's eyes: the vCPU stops before its next
    // instruction, the others when the owner has the event.
    let on_failure = Box::new(move |reason| {
        brake.pull();
        events.send(MachineEvent::MustPause { reason });
    });
    let hint = Arc::new(FlushHint::new(
        mapped.config.name.clone(),
        Arc::clone(&mapped.watched) as Arc<dyn Persist>,
        on_failure,
    ));
    let counters = VolumeCounters::Nvdimm(hint.metrics());
    if mapped.flushes {
        fabric.mmio.insert(Nvdimm::flush_hint_address(nvdimms.len()), FLUSH_HINT_LEN, hint)?;
    }
    nvdimms.push(Nvdimm {
        start: mapped.range.guest.start,
        size_bytes: mapped.range.guest.len,
        node,
        flush_hint: mapped.flushes,
        read_only: mapped.config.readonly,
    });
    Ok(counters)
}

fn attach_virtio_pmem(
    mapped: &Mapped<'_>,
    fabric: &mut Fabric,
    memory: &Memory,
) -> Result<VolumeCounters, BuildError> {
    let guest = mapped.range.guest;
    let backing = match mapped.config.readonly {
        true => Arc::new(ReadOnly),
        false => Arc::clone(&mapped.watched) as Arc<dyn Persist>,
    };
    let name = Chosen::VirtioPmem.device_id(&mapped.config.name).expect("it is on the PCI bus");
    let device = match mapped.config.format {
        VolumeFormat::Btt => Pmem::new(name, guest.start, guest.len, backing),
        VolumeFormat::Raw => Pmem::raw(name, guest.start, guest.len, backing)?,
    };
    let counters = VolumeCounters::VirtioPmem(device.metrics());
    fabric.attach(NewDevice::fixed(device), memory)?;
    Ok(counters)
}

/// A queue for each vCPU: the media are as fast as memory, and take all of them at once.
fn attach_virtio_blk(
    config: &PmVolumeConfig,
    volume: Box<dyn PoolVolume>,
    vcpus: u8,
    events: &Events,
    fabric: &mut Fabric,
    memory: &Memory,
) -> Result<Shown, BuildError> {
    let extents = volume.extents().len();
    let VolumeDisk { device, btt_loss } =
        volume.into_disk().map_err(BuildError::device(flag(config)))?;
    let served = Arc::downgrade(&device);
    if let Some(loss) = &btt_loss {
        events.tell_of_guest(loss_event(loss, &config.pool.display().to_string(), &config.name));
    }
    let shape = DiskShape {
        id: config.name.clone(),
        serial: config.name.clone(),
        queues: u16::from(vcpus).min(QUEUES_MAX),
        queue_size: QUEUE_SIZE,
        read_only: config.readonly,
    };
    let device = Block::new(shape, device)?;
    let disk = device.handle();
    fabric.attach(NewDevice::fixed(device).with_handle(disk.clone()), memory)?;
    // The device has the volume.
    let opened = Opened { size_bytes: disk.size_bytes(), extents, _volume: None };
    let counters = VolumeCounters::VirtioBlk { disk: disk.metrics(), device: served, btt_loss };
    Ok(Shown { opened, failure: disk.failure(), counters })
}

fn loss_event<'a>(loss: &'a BttLoss, pool: &'a str, volume: &'a str) -> Event<'a> {
    match loss {
        BttLoss::Replaced { .. } => Event::VolumeReplaced { pool, volume },
        BttLoss::Damaged { reason } => Event::VolumeDamaged { pool, volume, reason },
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use pmem_volume::media::Media;
    use tempfile::TempDir;

    use super::*;
    use crate::config::{PmMemoryConfig, test_config};
    use crate::metrics::Metrics;
    use crate::vm::machine::tests::machine;

    #[test]
    fn only_a_page_cache_needs_flushes_and_only_dax_is_mapped_for_a_fence() {
        use Durability::{DaxSync, PageCache, Volatile};
        assert_eq!(mapping(false, Volatile), (Access::ReadWrite, false));
        assert_eq!(mapping(false, PageCache), (Access::ReadWrite, true));
        assert_eq!(mapping(false, DaxSync), (Access::ReadWriteSync, false));
        for durability in [Volatile, PageCache, DaxSync] {
            assert_eq!(mapping(true, durability), (Access::Read, false));
        }
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

    const MIB: u64 = 1 << 20;

    /// A pool of 128 MiB with these volumes, each of 20 MiB.
    fn pool_with(names: &[&str]) -> (TempDir, PathBuf) {
        let folder = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap();
        let path = folder.path().join("pool");
        let pool = pmem_volume::Pool::create(&path, 128 * MIB, 16 * MIB).unwrap();
        for name in names {
            let size = pmem_volume::pool::VolumeSize::Bytes(20 * MIB);
            pool.create_volume(name, size, pmem_volume::VolumeFormat::Btt).unwrap();
        }
        (folder, path)
    }

    fn resources() -> Resources {
        let events = Events::start();
        Resources::new(Arc::new(Metrics::new("vm")), events)
    }

    fn config(pool: &Path, volumes: &[&str]) -> VmConfig {
        let mut config = test_config();
        config.pm_volumes = volumes
            .iter()
            .map(|options| {
                PmVolumeConfig::parse(&format!("pool={},{options}", pool.display())).unwrap()
            })
            .collect();
        config
    }

    fn names_and_sizes(pool: &Path) -> Vec<(String, u64)> {
        let pool = pmem_volume::Pool::open(pool, pmem_volume::OpenMode::Peek).unwrap();
        pool.volumes().into_iter().map(|volume| (volume.name, volume.size_bytes / MIB)).collect()
    }

    /// Builds the volumes of a start that succeeds or fails.
    fn start(config: &VmConfig, succeeds: bool) -> Result<Vec<u64>, BuildError> {
        let mut resources = resources();
        let steps = resources.open_pools(config)?;
        let mut created = CreatedVolumes::default();
        let opened = open(config, &steps, &resources, &mut created)?;
        if succeeds {
            created.keep();
        }
        Ok(opened.iter().map(|volume| volume.size_bytes() / MIB).collect())
    }

    #[test]
    fn failed_start_leaves_no_volume() {
        let (_folder, path) = pool_with(&["old"]);
        let config = config(
            &path,
            &["name=rest,size=remaining,create=on", "name=new,size=20M,create=on", "name=old"],
        );
        let before = names_and_sizes(&path);
        assert_eq!(start(&config, false).unwrap(), [84, 20, 20]);
        assert_eq!(names_and_sizes(&path), before);
        assert_eq!(start(&config, true).unwrap(), [84, 20, 20]);
        let after = names_and_sizes(&path);
        assert_eq!(
            after,
            [("new".to_owned(), 20), ("old".to_owned(), 20), ("rest".to_owned(), 84)]
        );
        // The second start creates none, so it deletes none.
        assert_eq!(start(&config, false).unwrap(), [84, 20, 20]);
        assert_eq!(names_and_sizes(&path), after);
    }

    #[test]
    fn volume_grows_with_its_pool_by_at_least_an_arena() {
        let (_folder, path) = pool_with(&[]);
        let mut config = config(&path, &["name=rest,size=remaining,create=on"]);
        let zone = format!("pool={},size=64M", path.display());
        config.pm_memory = vec![PmMemoryConfig::parse(&zone).unwrap()];
        let grow_pool = |mib: u64| drop(pmem_volume::Pool::grow(&path, mib * MIB).unwrap());
        for (pool_mib, volume_mib) in [(128, 60), (256, 188), (264, 188), (280, 212)] {
            if pool_mib > 128 {
                grow_pool(pool_mib);
            }
            assert_eq!(start(&config, true).unwrap(), [volume_mib], "in a pool of {pool_mib} MiB");
        }
        // The zones need more memory than is left. The volume does not shrink, so the start is
        // refused.
        config.pm_memory[0].size = 66 * MIB;
        assert!(start(&config, true).is_err());
        assert_eq!(names_and_sizes(&path), [("rest".to_owned(), 212)]);
    }

    #[test]
    fn serving_a_replaced_btt_sends_an_event() {
        let (_folder, path) = pool_with(&["data"]);
        assert!(events_of_served_volume(&path).is_empty());
        let pool = pmem_volume::Pool::open(&path, pmem_volume::OpenMode::ReadWrite).unwrap();
        let media = pool.open_volume("data").unwrap();
        media.store(0, &vec![0xff; media.size_bytes() as usize]).unwrap();
        drop((media, pool));
        assert_eq!(events_of_served_volume(&path), ["volume-replaced"]);
    }

    /// Serves the volume `data` over virtio-blk. Returns the names of the events about volumes.
    fn events_of_served_volume(pool: &Path) -> Vec<&'static str> {
        let config = config(pool, &["name=data,interface=virtio-blk"]);
        let mut resources = resources();
        let steps = resources.open_pools(&config).unwrap();
        let mut volumes =
            open(&config, &steps, &resources, &mut CreatedVolumes::default()).unwrap();
        let mut machine = machine();
        let (fabric, memory) = (&mut machine.fabric, &machine.memory);
        attach_virtio_blk(
            &config.pm_volumes[0],
            volumes.remove(0),
            1,
            &machine.told,
            fabric,
            memory,
        )
        .unwrap();
        let sent = machine.told.counters().told();
        let names = sent.into_iter().filter(|(_, count)| *count > 0).map(|((_, name), _)| name);
        names.filter(|name| name.starts_with("volume-")).collect()
    }
}
