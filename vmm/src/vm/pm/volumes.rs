//! Opens volumes, and attaches each by an interface that is safe for it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use foreshore_devices::device::{DeviceContext, DeviceList};
use foreshore_devices::memory::Memory;
use foreshore_devices::memory::holes::UserfaultDevice;
use foreshore_devices::memory::layout::{NVDIMM_HEALTH_LEN, NVDIMM_HEALTH_START};
use foreshore_devices::nvdimm::Nvdimm;
use foreshore_devices::nvdimm::health::{self, Health, HealthRegisters};
use foreshore_devices::persist::FirstFailure;
use foreshore_devices::pool::{CHUNK_BYTES, PmPool, PoolError, PoolVolume, VolumeInfo};
use foreshore_devices::volume::build::{NewVolume, VolumeDevice, VolumePlace, build_volume};
use foreshore_devices::volume::config::VolumeInterface;
use foreshore_devices::volume::guest_btt::{GuestBtt, VolumeKey};
use foreshore_devices::volume::interface::{
    Allocation, Chosen, InterfaceError, Overcommit, Payload, check_count, check_ids, check_pool,
    choose,
};
use foreshore_devices::volume::plan::Step;
use foreshore_types::VolumeFormat;
use foreshore_types::size::Size;
use tracing::{info, warn};

use crate::config::{PmMemoryConfig, PmVolumeConfig, STORAGE_HIGH_BYTES, VmConfig};
use crate::vm::error::BuildError;
use crate::vm::numa_tables;
use crate::vm::pm::attached_volumes::{AttachedVolume, Opened};
use crate::vm::pm::created_volumes::CreatedVolumes;
use crate::vm::resources::Resources;

/// Attached volumes, and data about them for other parts of the machine.
#[derive(Default)]
pub(in crate::vm) struct Attached {
    /// Entries in the firmware tables, in the order of the flush hint pages.
    pub(in crate::vm) nvdimms: Vec<Nvdimm>,
    pub(in crate::vm) volumes: Vec<AttachedVolume>,
    /// Check of the guest's BTT driver, for volumes whose sectors that driver translates.
    pub(in crate::vm) guest_btt: Arc<GuestBtt>,
}

/// Attaches the volumes of `config`. Adds those that are PCI devices to `devices`.
pub(in crate::vm) fn attach(
    config: &VmConfig,
    payload: Payload,
    (resources, steps, created): (&Resources, &[Step], &mut CreatedVolumes),
    memory: &mut Memory,
    context: &DeviceContext,
    devices: &mut DeviceList,
) -> Result<Attached, BuildError> {
    let chosen = choose_all(config, payload, (resources, steps), memory.mapping_budget().limit())?;
    let opened = open(config, steps, resources, created)?;
    let mut attached =
        Attached { guest_btt: Arc::new(guest_btt(config, &chosen)), ..Attached::default() };
    let mut healths = Vec::new();
    for ((volume_config, volume), choice) in config.pm_volumes.iter().zip(opened).zip(chosen) {
        let pool = &resources.pool(&volume_config.pool);
        let interface = choice.interface;
        let new = NewVolume { config: volume_config, interface, pool, volume };
        let place = VolumePlace {
            boot_vcpus: config.cpus.boot_vcpus,
            node: numa_tables::volume_node(memory.zones()),
            nvdimms: attached.nvdimms.len(),
            min_free_bytes: storage_high_bytes(&config.pm_memory, &volume_config.pool),
        };
        let built = build_volume(new, &place, memory, context)
            .map_err(BuildError::device(volume_config.flag()))?;
        let (device, mut opened) = Opened::of(built);
        match device {
            VolumeDevice::Pci(device) => devices.push(device),
            VolumeDevice::Nvdimm(nvdimm, resources) => {
                healths.push(health(pool, opened.failure.clone()));
                attached.nvdimms.push(nvdimm);
                opened.hold(resources);
            }
        }
        attached.volumes.push(AttachedVolume::new(volume_config, choice, pool, opened));
    }
    if !healths.is_empty() {
        let registers = Arc::new(HealthRegisters::new(healths));
        context.mmio.insert(NVDIMM_HEALTH_START, NVDIMM_HEALTH_LEN, registers)?;
    }
    Ok(attached)
}

/// Returns the value of `storage_high` for a pool.
pub(in crate::vm) fn storage_high_bytes(zones: &[PmMemoryConfig], pool: &Path) -> u64 {
    let zone = zones.iter().find(|zone| zone.pool == pool);
    zone.map_or(STORAGE_HIGH_BYTES, |zone| zone.storage_high)
}

/// Interface that was chosen for a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::vm) struct Choice {
    pub(in crate::vm) interface: Chosen,
    /// Reason why `auto` has not mapped a thin volume.
    pub(in crate::vm) unmapped_reason: Option<String>,
    /// Number of mappings that the chunks of the volume can need.
    mappings: usize,
}

#[cfg(test)]
impl Choice {
    pub(in crate::vm) fn of(interface: Chosen) -> Self {
        Self { interface, unmapped_reason: None, mappings: 0 }
    }
}

/// Returns the interface of each volume, in the order of the volumes in `config`. The mappings of
/// guest memory are limited, and half of them stay for zones, unless volumes with a named interface
/// need more.
fn choose_all(
    config: &VmConfig,
    payload: Payload,
    (resources, steps): (&Resources, &[Step]),
    mappings_limit: usize,
) -> Result<Vec<Choice>, InterfaceError> {
    let (max_vcpus, mut spare_mappings) = (config.cpus.max_vcpus, mappings_limit / 2);
    let volumes = || config.pm_volumes.iter().zip(steps).enumerate();
    let is_auto = |volume: &PmVolumeConfig| volume.interface == VolumeInterface::Auto;
    let (auto, named): (Vec<_>, Vec<_>) = volumes().partition(|(_, (volume, _))| is_auto(volume));
    let mut chosen = BTreeMap::new();
    // `auto` may use what named interfaces leave.
    for (number, (volume, step)) in named.into_iter().chain(auto) {
        let pool = &resources.pool(&volume.pool);
        let host = MappingHost { userfaults: resources.userfaults(), spare_mappings };
        let choice = choose_one((volume, step), pool, &host, max_vcpus, payload)?;
        spare_mappings = spare_mappings.saturating_sub(choice.mappings);
        chosen.insert(number, choice);
    }
    let chosen: Vec<_> = chosen.into_values().collect();
    let interfaces: Vec<_> = chosen.iter().map(|choice| choice.interface).collect();
    check_count(&interfaces)?;
    check_ids(config.pm_volumes.iter().zip(interfaces), config.ids_beside_volumes())?;
    Ok(chosen)
}

/// Resources of the host for mapped thin volumes.
pub(in crate::vm) struct MappingHost<'a> {
    pub(in crate::vm) userfaults: &'a UserfaultDevice,
    /// Number of mappings that `auto` may use.
    pub(in crate::vm) spare_mappings: usize,
}

/// Returns the interface of one volume.
pub(in crate::vm) fn choose_one(
    (volume, step): (&PmVolumeConfig, &Step),
    pool: &Arc<dyn PmPool>,
    host: &MappingHost<'_>,
    max_vcpus: u8,
    payload: Payload,
) -> Result<Choice, InterfaceError> {
    let stored = pool.volumes().into_iter().find(|stored| stored.name == volume.name);
    let size_bytes = match (step, &stored) {
        (Step::Create(size_bytes) | Step::Grow(size_bytes), _) => *size_bytes,
        (Step::Open, stored) => stored.as_ref().map_or(0, |stored| stored.size_bytes),
    };
    let allocation = allocation(volume, stored.as_ref(), size_bytes, host);
    let interface = choose(volume, &allocation, max_vcpus, payload)?;
    check_pool(volume, interface, pool.durability())?;
    let is_auto = volume.interface == VolumeInterface::Auto;
    let unmapped_reason = allocation.unmapped_reason(volume).filter(|_| is_auto);
    if let Some(reason) = &unmapped_reason {
        let (pool, volume) = (volume.pool.display(), &volume.name);
        info!(%pool, volume, reason, "The thin volume is not mapped; its interface is virtio-blk");
    }
    let is_thin = matches!(allocation, Allocation::Thin { .. });
    let mappings = if is_thin && interface.guest_translates() { chunks(size_bytes) } else { 0 };
    Ok(Choice { interface, unmapped_reason, mappings })
}

/// Number of chunks of a volume.
fn chunks(size_bytes: u64) -> usize {
    (size_bytes / CHUNK_BYTES) as usize
}

/// Returns the allocation of the stored volume, or of the volume that will be created.
fn allocation(
    volume: &PmVolumeConfig,
    stored: Option<&VolumeInfo>,
    size_bytes: u64,
    host: &MappingHost<'_>,
) -> Allocation {
    let (is_thin, reserve_bytes) = match stored {
        Some(stored) => (
            stored.thin,
            (stored.reserve_bytes < stored.size_bytes).then_some(stored.reserve_bytes),
        ),
        None => (
            volume.creates_thin(),
            volume.reserve.filter(|reserve_bytes| *reserve_bytes < size_bytes),
        ),
    };
    if !is_thin {
        return Allocation::Thick;
    }
    let overcommit = reserve_bytes.map(|reserve_bytes| Overcommit { reserve_bytes, size_bytes });
    let is_large =
        volume.interface == VolumeInterface::Auto && chunks(size_bytes) > host.spare_mappings;
    let excess = is_large.then(|| {
        let (needed, spare) = (chunks(size_bytes), host.spare_mappings);
        format!("it can need {needed} mappings, and may use {spare}; raise vm.max_map_count")
    });
    let refusal = host.userfaults.refusal();
    Allocation::Thin { overcommit, refusal, excess }
}

/// Creates the check of the guest's BTT driver, for volumes whose sectors that driver translates.
fn guest_btt(config: &VmConfig, chosen: &[Choice]) -> GuestBtt {
    let translated = config
        .pm_volumes
        .iter()
        .zip(chosen.iter().map(|choice| choice.interface))
        .filter(|(volume, chosen)| volume.format == VolumeFormat::Btt && chosen.guest_translates())
        .map(|(volume, chosen)| {
            (VolumeKey { pool: volume.pool.clone(), name: volume.name.clone() }, chosen)
        });
    GuestBtt::new(translated.collect(), config.cpus.max_vcpus)
}

/// Returns the source of the health state that the guest can read from an NVDIMM.
fn health(pool: &Arc<dyn PmPool>, failure: FirstFailure) -> health::Source {
    let pool = Arc::clone(pool);
    Box::new(move || match failure.reason().is_some() || pool.has_failed() {
        true => Health::NotDurable,
        false => Health::Ok,
    })
}

/// Executes the planned step for each volume in `config`, and opens the volume. Returns the volumes
/// in the order of `config`.
///
/// Existing volumes are opened first. Then new volumes are created. Volumes grow last, because a
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
        opened[place] = Some(open_one(volume, step, &resources.pool(&volume.pool), created)?);
    }
    Ok(opened.into_iter().map(|volume| volume.expect("each volume has a step")).collect())
}

/// Executes the step for one volume, and opens it.
pub(in crate::vm) fn open_one(
    volume: &PmVolumeConfig,
    step: &Step,
    pool: &Arc<dyn PmPool>,
    created: &mut CreatedVolumes,
) -> Result<Box<dyn PoolVolume>, BuildError> {
    let result = match step {
        Step::Open => Ok(()),
        Step::Create(size_bytes) => created.create(volume, pool, *size_bytes),
        Step::Grow(size_bytes) => grow(volume, pool, *size_bytes),
    };
    let result = result.and_then(|()| pool.open_volume(&volume.name));
    result.map_err(BuildError::pool(volume.flag()))
}

/// Grows a volume that has `size=remaining`. If it cannot grow, its size does not change, and an
/// error is returned only if the pool has failed.
fn grow(volume: &PmVolumeConfig, pool: &Arc<dyn PmPool>, size_bytes: u64) -> Result<(), PoolError> {
    let PmVolumeConfig { name, pool: path, .. } = volume;
    let (path, size) = (path.display(), Size(size_bytes));
    match pool.grow_volume(name, size_bytes) {
        Ok(()) => {
            info!(pool = %path, volume = name, %size, "The volume has grown to the free space of its pool")
        }
        Err(err) if pool.has_failed() => return Err(err),
        Err(err) => {
            let reason = foreshore_types::chain(&err);
            warn!(pool = %path, volume = name, %size, reason, "The volume keeps its size; it cannot grow to the free space of its pool");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use foreshore_devices::metrics::Metrics;
    use pmem_volume::Durability;
    use pmem_volume::media::Media;
    use tempfile::TempDir;

    use super::*;
    use crate::config::{PmMemoryConfig, test_config};
    use crate::vm::machine::KvmMachine;
    use crate::vm::machine::tests::machine;
    use crate::vm::resources::host_devices::HostDevices;

    const MIB: u64 = 1 << 20;

    /// Creates a pool of 128 MiB with volumes of 20 MiB each, which have these names.
    fn pool_with(names: &[&str]) -> (TempDir, PathBuf) {
        pool_in(TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap(), names)
    }

    fn pool_in(folder: TempDir, names: &[&str]) -> (TempDir, PathBuf) {
        let path = folder.path().join("pool");
        let pool = pmem_volume::Pool::create(&path, 128 * MIB, 16 * MIB).unwrap();
        for name in names {
            let size = pmem_volume::pool::VolumeSize::Bytes(20 * MIB);
            pool.create_volume(name, size, VolumeFormat::Btt).unwrap();
        }
        (folder, path)
    }

    fn resources() -> Resources {
        let events = foreshore_devices::events::Events::start();
        Resources::new(Arc::new(Metrics::new("vm")), events, HostDevices::default())
    }

    fn config(pool: &Path, volumes: &[impl AsRef<str>]) -> VmConfig {
        let mut config = test_config();
        config.pm_volumes = volumes
            .iter()
            .map(|options| {
                let options = options.as_ref();
                PmVolumeConfig::parse(&format!("pool={},{options}", pool.display())).unwrap()
            })
            .collect();
        config
    }

    fn names_and_sizes(pool: &Path) -> Vec<(String, u64)> {
        let pool = pmem_volume::Pool::open(pool, pmem_volume::OpenMode::Peek).unwrap();
        pool.volumes().into_iter().map(|volume| (volume.name, volume.size_bytes / MIB)).collect()
    }

    /// Opens the volumes for a start that succeeds or fails. Returns the sizes of the volumes in
    /// MiB.
    fn start(config: &VmConfig, succeeds: bool) -> Result<Vec<u64>, BuildError> {
        let resources = resources();
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
        // The second start creates no volumes, so it deletes none.
        assert_eq!(start(&config, false).unwrap(), [84, 20, 20]);
        assert_eq!(names_and_sizes(&path), after);
    }

    #[test]
    fn auto_maps_thin_volumes_while_the_host_can() {
        let (_folder, path) = pool_with(&[]);
        let config = config(
            &path,
            &["a", "b", "c"].map(|name| format!("name={name},size=20M,create=on,thin=on")),
        );
        let chosen = |resources: &Resources, mappings_limit| {
            let steps = resources.open_pools(&config).unwrap();
            interfaces(choose_all(&config, Payload::Linux, (resources, &steps), mappings_limit))
                .unwrap()
        };
        let userfaults = Arc::new(UserfaultDevice::missing());
        let events = foreshore_devices::events::Events::start();
        let devices = HostDevices { userfaults, ..HostDevices::default() };
        let without = Resources::new(Arc::new(Metrics::new("vm")), events, devices);
        assert_eq!(chosen(&without, 1000), [Chosen::VirtioBlk; 3]);
        drop(without);
        let resources = resources();
        if let Some(reason) = resources.userfaults().refusal() {
            return eprintln!("skipped for mapped volumes: {reason}");
        }
        assert_eq!(chosen(&resources, 1000), [Chosen::Nvdimm; 3]);
        // Each volume has 10 chunks, and half of the mappings stay for memory.
        let expected = [Chosen::Nvdimm, Chosen::Nvdimm, Chosen::VirtioBlk];
        assert_eq!(chosen(&resources, 40), expected);
        assert_eq!(chosen(&resources, 18), [Chosen::VirtioBlk; 3]);
    }

    fn interfaces(
        chosen: Result<Vec<Choice>, InterfaceError>,
    ) -> Result<Vec<Chosen>, InterfaceError> {
        Ok(chosen?.into_iter().map(|choice| choice.interface).collect())
    }

    #[test]
    fn named_interfaces_take_mappings_before_auto() {
        let (_folder, path) = pool_with(&[]);
        let resources = resources();
        if let Some(reason) = resources.userfaults().refusal() {
            return eprintln!("skipped: {reason}");
        }
        // Each volume has 10 chunks, and half of the mappings stay for memory.
        for (options, expected) in [
            (["auto", "nvdimm"], [Chosen::VirtioBlk, Chosen::Nvdimm]),
            (["nvdimm", "auto"], [Chosen::Nvdimm, Chosen::VirtioBlk]),
            (["auto", "virtio-blk"], [Chosen::Nvdimm, Chosen::VirtioBlk]),
            (["nvdimm", "nvdimm"], [Chosen::Nvdimm, Chosen::Nvdimm]),
        ] {
            let volume =
                |(name, interface)| format!("name={name},size=20M,create=on,interface={interface}");
            let config =
                config(&path, &["a", "b"].into_iter().zip(options).map(volume).collect::<Vec<_>>());
            let steps = resources.open_pools(&config).unwrap();
            let chosen = choose_all(&config, Payload::Linux, (&resources, &steps), 38).unwrap();
            for choice in &chosen {
                let reason = choice.unmapped_reason.as_deref().unwrap_or_default();
                assert!(reason.is_empty() || reason.contains("raise vm.max_map_count"), "{reason}");
            }
            assert_eq!(interfaces(Ok(chosen)).unwrap(), expected, "{options:?}");
        }
    }

    #[test]
    fn overcommitted_volume_is_mapped_by_a_named_interface() {
        let (_folder, path) = pool_with(&[]);
        let resources = resources();
        if let Some(reason) = resources.userfaults().refusal() {
            return eprintln!("skipped: {reason}");
        }
        let chosen = |options: &str| {
            let volume = format!("name=a,size=20M,create=on,thin=on,reserve=2M,{options}");
            let config = config(&path, &[volume]);
            let steps = resources.open_pools(&config).unwrap();
            choose_all(&config, Payload::Linux, (&resources, &steps), 1000)
        };
        let auto = chosen("interface=auto").unwrap().remove(0);
        let reason = Some("its reserve is 2 MiB of 20 MiB".to_owned());
        assert_eq!((auto.interface, auto.unmapped_reason), (Chosen::VirtioBlk, reason));
        for interface in [Chosen::Nvdimm, Chosen::VirtioBlk] {
            let choice = chosen(&format!("interface={}", interface.name())).unwrap().remove(0);
            assert_eq!((choice.interface, choice.unmapped_reason), (interface, None));
        }
        let text = chosen("on_full=error,interface=nvdimm").unwrap_err().to_string();
        assert!(text.contains("its reserve is 2 MiB of 20 MiB"), "{text}");
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
        // The zones need more memory than remains in the pool. The start is refused, because a
        // volume never shrinks.
        config.pm_memory[0].size = 66 * MIB;
        assert!(start(&config, true).is_err());
        assert_eq!(names_and_sizes(&path), [("rest".to_owned(), 212)]);
    }

    #[test]
    fn dropped_nvdimm_leaves_nothing() {
        let (_folder, path) = pool_in(TempDir::new().unwrap(), &["data"]);
        let config = config(&path, &["name=data"]);
        let resources = resources();
        let steps = resources.open_pools(&config).unwrap();
        let mut volumes =
            open(&config, &steps, &resources, &mut CreatedVolumes::default()).unwrap();
        let mut machine = machine();
        let footprint = |machine: &KvmMachine| {
            let KvmMachine { context, memory, .. } = machine;
            (context.mmio.count(), memory.slots().used(), context.lost.ranges().len())
        };
        let before = footprint(&machine);
        let (volume, pool) = (volumes.remove(0), &resources.pool(&path));
        // Only a page cache requires flush hints. The folder may be on tmpfs, which is volatile and
        // needs none.
        let hints = usize::from(pool.durability() == Durability::PageCache);
        let interface = Chosen::Nvdimm;
        let new = NewVolume { config: &config.pm_volumes[0], interface, pool, volume };
        let place = VolumePlace { boot_vcpus: 1, node: 0, nvdimms: 0, min_free_bytes: 0 };
        let built = build_volume(new, &place, &mut machine.memory, &machine.context).unwrap();
        assert_eq!(footprint(&machine), (before.0 + hints, before.1 + 1, before.2 + 1));
        drop(built);
        assert_eq!(footprint(&machine), before);
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

    /// Serves the volume `data` over virtio-blk. Returns the names of the emitted events about
    /// volumes.
    fn events_of_served_volume(pool: &Path) -> Vec<&'static str> {
        let config = config(pool, &["name=data,interface=virtio-blk"]);
        let resources = resources();
        let steps = resources.open_pools(&config).unwrap();
        let mut volumes =
            open(&config, &steps, &resources, &mut CreatedVolumes::default()).unwrap();
        let mut machine = machine();
        let (volume, volume_config) = (volumes.remove(0), &config.pm_volumes[0]);
        let (interface, pool) = (Chosen::VirtioBlk, &resources.pool(pool));
        let new = NewVolume { config: volume_config, interface, pool, volume };
        let place = VolumePlace { boot_vcpus: 1, node: 0, nvdimms: 0, min_free_bytes: 0 };
        drop(build_volume(new, &place, &mut machine.memory, &machine.context).unwrap());
        let sent = machine.context.machine.events.counters().emitted();
        let names = sent.into_iter().filter(|(_, count)| *count > 0).map(|((_, name), _)| name);
        names.filter(|name| name.starts_with("volume-")).collect()
    }
}
