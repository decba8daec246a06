//! Resources that outlive a machine. After a reboot, the new machine uses the same pools, and
//! metrics continue.

pub(crate) mod host_devices;
pub(crate) mod pools;
pub(crate) mod taps;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use foreshore_devices::events::Events;
use foreshore_devices::host_console::{FileStart, Lines};
use foreshore_devices::memory::holes::UserfaultDevice;
use foreshore_devices::metrics::Metrics;
use foreshore_devices::pool::PmPool;
use foreshore_devices::virtio::mem::PlugBudgets;
use foreshore_devices::virtio::net::VhostFiles;
use foreshore_devices::volume::file::PmemFile;
use foreshore_devices::volume::plan::Step;
use kvm_ioctls::Kvm;
use parking_lot::Mutex;
use tracing::warn;

use crate::config::{PmemConfig, VmConfig};
use crate::vm::error::BuildError;
use crate::vm::resources::host_devices::HostDevices;
use crate::vm::resources::pools::{OpenPool, Pools};
use crate::vm::resources::taps::Taps;

/// Network interfaces, files and consoles that remain open for the next machine. Clones share the
/// open files.
#[derive(Clone, Default)]
pub(crate) struct OpenFiles {
    /// Network interfaces of `--net`.
    pub(crate) taps: Taps,
    /// Files of vhost-net for these interfaces.
    pub(crate) vhost: VhostFiles,
    /// Files of `--pmem`.
    pub(crate) pmem: PmemFiles,
    pub(crate) pools: Pools,
    /// Consoles to which clients connect.
    pub(crate) lines: Lines,
}

/// Resources that the VMM keeps outside of its machine.
pub(crate) struct Resources {
    open_files: OpenFiles,
    plug_budgets: PlugBudgets,
    kvm: Option<Arc<Kvm>>,
    userfaults: Arc<UserfaultDevice>,
    metrics: Arc<Metrics>,
    events: Events,
    machines: u64,
}

impl Resources {
    /// Creates resources for the first VM. `devices` were opened at the start.
    pub(crate) fn new(metrics: Arc<Metrics>, events: Events, devices: HostDevices) -> Self {
        let plug_budgets = PlugBudgets::default();
        let HostDevices { kvm, userfaults, taps, vhost } = devices;
        let open_files = OpenFiles { taps, vhost, ..OpenFiles::default() };
        let machines = 0;
        Self { open_files, plug_budgets, kvm, userfaults, metrics, events, machines }
    }

    /// Creates resources for another VM.
    pub(crate) fn anew(&self) -> Self {
        let devices = HostDevices {
            kvm: self.kvm.clone(),
            userfaults: self.userfaults.clone(),
            taps: Taps::default(),
            vhost: self.open_files.vhost.clone(),
        };
        Self::new(Arc::clone(&self.metrics), self.events.clone(), devices)
    }

    /// KVM, if it could be opened at the start.
    pub(in crate::vm) fn kvm(&self) -> Option<&Kvm> {
        self.kvm.as_deref()
    }

    /// Source of the faults of mapped thin volumes.
    pub(in crate::vm) fn userfaults(&self) -> &Arc<UserfaultDevice> {
        &self.userfaults
    }

    /// Files that remain open for the next machine.
    pub(in crate::vm) fn open_files(&self) -> &OpenFiles {
        &self.open_files
    }

    /// Consoles that clients can connect to.
    pub(crate) fn lines(&self) -> &Lines {
        &self.open_files.lines
    }

    pub(crate) fn pmem(&self) -> &PmemFiles {
        &self.open_files.pmem
    }

    /// Plug budgets of the VM's zones.
    pub(in crate::vm) fn plug_budgets(&mut self) -> &mut PlugBudgets {
        &mut self.plug_budgets
    }

    /// Network interfaces of `--net`.
    pub(crate) fn taps(&self) -> &Taps {
        &self.open_files.taps
    }

    /// Files of vhost-net that no device uses.
    pub(in crate::vm) fn vhost(&self) -> &VhostFiles {
        &self.open_files.vhost
    }

    /// Closes the interfaces and files that `config` no longer contains. Must be called while there
    /// is no machine.
    pub(crate) fn retain(&self, config: &VmConfig) {
        self.open_files.taps.retain(config);
        self.open_files.pmem.retain(config);
    }

    /// Returns `config` with a single path for each pool ([`Pools::first_path`]).
    pub(in crate::vm) fn with_one_path_for_each_pool(&self, config: &VmConfig) -> VmConfig {
        let mut config = config.clone();
        let zones = config.pm_memory.iter_mut().map(|zone| &mut zone.pool);
        for path in zones.chain(config.pm_volumes.iter_mut().map(|volume| &mut volume.pool)) {
            *path = self.open_files.pools.first_path(path);
        }
        config
    }

    /// Opens every pool in `config` that is not open yet.
    ///
    /// Returns the planned step for each volume, in the order of `config`. A pool is refused if it
    /// is too small for the VM's volumes and for the memory that the zones may need.
    pub(in crate::vm) fn open_pools(&self, config: &VmConfig) -> Result<Vec<Step>, BuildError> {
        let pools = &self.open_files.pools;
        pools.close_failed();
        let memory = config.pm_memory.iter().map(|pm| ("--pm-memory", &pm.pool));
        let volumes = config.pm_volumes.iter().map(|volume| ("--pm-volume", &volume.pool));
        for (flag, path) in memory.chain(volumes) {
            pools.open(flag, path, &config.pm_memory)?;
        }
        self.plan_volumes(config)
    }

    fn plan_volumes(&self, config: &VmConfig) -> Result<Vec<Step>, BuildError> {
        let mut steps: Vec<_> = config.pm_volumes.iter().map(|_| Step::Open).collect();
        let paths = config.pm_memory.iter().map(|zone| &zone.pool);
        let paths: BTreeSet<_> =
            paths.chain(config.pm_volumes.iter().map(|volume| &volume.pool)).collect();
        for path in paths {
            let (places, volumes): (Vec<_>, Vec<_>) = config
                .pm_volumes
                .iter()
                .enumerate()
                .filter(|(_, volume)| volume.pool == *path)
                .unzip();
            let planned = self.open_files.pools.plan(path, &volumes, &config.pm_memory)?;
            for (place, step) in places.into_iter().zip(planned) {
                steps[place] = step;
            }
        }
        Ok(steps)
    }

    /// Returns a pool that [`Resources::open_pools`] has opened.
    ///
    /// # Panics
    /// Panics if the pool is not open. Both calls must be made with the same configuration.
    pub(crate) fn pool(&self, path: &Path) -> Arc<dyn PmPool> {
        self.open_files.pools.get(path)
    }

    /// All open pools, in the order of their paths.
    pub(in crate::vm) fn pools(&self) -> Vec<OpenPool> {
        self.open_files.pools.list()
    }

    pub(crate) fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// Receiver of events.
    pub(crate) fn events(&self) -> &Events {
        &self.events
    }

    /// Mode in which console files are opened: truncated by the first machine, continued by later
    /// machines.
    pub(crate) fn file_start(&self) -> FileStart {
        if self.machines == 0 { FileStart::Empty } else { FileStart::Continue }
    }

    /// Number of machines that have been built so far.
    pub(crate) fn machines(&self) -> u64 {
        self.machines
    }

    /// Counts a machine that has been built.
    pub(crate) fn machine_built(&mut self) {
        self.machines += 1;
    }
}

/// Files of `--pmem`, in the order of the VM's configuration. The machine shares the list, and adds
/// and removes files.
#[derive(Clone, Default)]
pub(crate) struct PmemFiles(Arc<Mutex<Vec<NamedFile>>>);

/// Open file with its configuration.
pub(crate) type NamedFile = (PmemConfig, Arc<PmemFile>);

impl PmemFiles {
    /// Opens every file in `config`. Files remain open and locked as long as the VM has them, so
    /// that the contents of an unnamed file survive a reboot. A named file is opened again if a
    /// flush has failed, as pools are.
    pub(crate) fn open(&self, config: &VmConfig) -> Result<(), BuildError> {
        let mut files = self.0.lock();
        files.retain(|(config, file)| {
            let failed = file.must_be_reopened();
            if failed {
                warn!(file = %config.file.display(), "A flush of the file has failed, or it was truncated; opening it again");
            }
            !failed
        });
        // The earlier files remain open until all files are open, because an unnamed file must
        // survive a failed attempt.
        let mut earlier: Vec<_> = files.iter().collect();
        let mut opened = Vec::with_capacity(config.pmem.len());
        for pmem in &config.pmem {
            let retained = earlier.iter().position(|(config, _)| config == pmem);
            let file = match retained {
                Some(nth) => Arc::clone(&earlier.remove(nth).1),
                None => open_file(pmem)?,
            };
            opened.push((pmem.clone(), file));
        }
        *files = opened;
        Ok(())
    }

    /// Keeps the file of an added device open for the next machine.
    pub(crate) fn add(&self, config: &PmemConfig, file: Arc<PmemFile>) {
        self.0.lock().push((config.clone(), file));
    }

    /// Releases the file of the device `id`. The file is closed when the device has ended.
    pub(crate) fn remove(&self, id: &str) {
        self.0.lock().retain(|(config, _)| config.id.as_deref() != Some(id));
    }

    /// Closes the files that are not in `config`. Must be called while no machine exists.
    fn retain(&self, config: &VmConfig) {
        self.0.lock().retain(|(earlier, _)| config.pmem.contains(earlier));
    }

    pub(crate) fn list(&self) -> Vec<NamedFile> {
        self.0.lock().clone()
    }
}

pub(in crate::vm) fn open_file(config: &PmemConfig) -> Result<Arc<PmemFile>, BuildError> {
    PmemFile::open(config).map(Arc::new).map_err(BuildError::device(config.flag()))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::PathBuf;

    use foreshore_devices::persist::Persist;
    use foreshore_devices::pool::LocalPool;
    use pmem_volume::Durability;
    use tempfile::TempDir;

    use super::*;
    use crate::config::{PmMemoryConfig, PmVolumeConfig, test_config};

    const MIB: u64 = 1 << 20;

    fn resources() -> Resources {
        let events = Events::start();
        Resources::new(Arc::new(Metrics::new("vm")), events, HostDevices::default())
    }

    fn pm_zone(pool: &Path, size: u64) -> PmMemoryConfig {
        PmMemoryConfig::parse(&format!("pool={},size={size},scrub_bandwidth=0", pool.display()))
            .unwrap()
    }

    #[test]
    fn files_stay_open_for_next_machine_unless_a_flush_has_failed() {
        let folder = tempfile::tempdir_in(".").unwrap();
        let path = folder.path().join("file");
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(4 * MIB).unwrap();
        let mut config = test_config();
        let unnamed =
            PmemConfig::parse(&format!("file={},size=2M", folder.path().display())).unwrap();
        let named = PmemConfig::parse(&format!("file={}", path.display())).unwrap();
        config.pmem = vec![unnamed.clone(), named, unnamed];
        let resources = resources();
        resources.pmem().open(&config).unwrap();
        let files = |resources: &Resources| {
            resources.pmem().list().iter().map(|(_, file)| Arc::as_ptr(file)).collect::<Vec<_>>()
        };
        let first = files(&resources);
        resources.pmem().open(&config).unwrap();
        assert_eq!(files(&resources), first);
        file.set_len(MIB).unwrap();
        let failed = resources.pmem().list()[1].1.persist().is_err();
        file.set_len(4 * MIB).unwrap();
        resources.pmem().open(&config).unwrap();
        let then = files(&resources);
        assert_eq!((then[0], then[2]), (first[0], first[2]));
        // If one file cannot be opened, the other files are not affected.
        let mut with_one_more = config.clone();
        with_one_more
            .pmem
            .push(PmemConfig::parse(&format!("file={}.none", path.display())).unwrap());
        resources.pmem().open(&with_one_more).unwrap_err();
        assert_eq!(files(&resources), then);
        // A flush to tmpfs cannot fail.
        assert_eq!(
            failed,
            resources.pmem().list()[1].1.durability() == Some(Durability::PageCache)
        );
        resources.pmem().list()[1].1.persist().unwrap();
    }

    #[test]
    fn truncated_file_or_pool_is_opened_again_and_reported() {
        let folder = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap();
        let (path, pool) = (folder.path().join("file"), folder.path().join("pool"));
        let file = File::create(&path).unwrap();
        file.set_len(4 * MIB).unwrap();
        drop(pmem_volume::Pool::create(&pool, 64 * MIB, 16 * MIB).unwrap());
        let mut config = test_config();
        config.pmem = vec![PmemConfig::parse(&format!("file={},size=4M", path.display())).unwrap()];
        config.pm_memory = vec![pm_zone(&pool, 2 * MIB)];
        let resources = resources();
        let pool_file = File::options().write(true).open(&pool).unwrap();
        resources.pmem().open(&config).unwrap();
        resources.open_pools(&config).unwrap();
        file.set_len(2 * MIB).unwrap();
        pool_file.set_len(32 * MIB).unwrap();
        let message = foreshore_types::chain(&resources.pmem().open(&config).unwrap_err());
        assert!(message.contains("2 MiB"), "{message}");
        let message = foreshore_types::chain(&resources.open_pools(&config).unwrap_err());
        assert!(message.contains("cut short"), "{message}");
        file.set_len(4 * MIB).unwrap();
        pool_file.set_len(64 * MIB).unwrap();
        resources.pmem().open(&config).unwrap();
        resources.open_pools(&config).unwrap();
    }

    #[test]
    fn missing_pool_is_refused_with_the_command_that_creates_it() {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("pool");
        let config = VmConfig { pm_memory: vec![pm_zone(&path, 1 << 30)], ..test_config() };
        let err = resources().open_pools(&config).unwrap_err();
        let path = path.display();
        assert_eq!(
            foreshore_types::chain(&err),
            format!(
                "cannot set up --pm-memory pool={path}: pool {path}: no such file or device; \
                 create the pool with `pmvol create`"
            )
        );
    }

    #[test]
    fn zone_larger_than_lendable_memory_is_refused() {
        let folder = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap();
        let pool = folder.path().join("pool");
        drop(pmem_volume::Pool::create(&pool, 64 * MIB, 16 * MIB).unwrap());
        let open_all = |sizes: &[u64]| {
            let mut config = test_config();
            config.pm_memory = sizes.iter().map(|&size| pm_zone(&pool, size)).collect();
            resources().open_pools(&config).map(drop)
        };
        let open = |size| open_all(&[size]);
        let most = LocalPool::open(&pool, None).unwrap().info().free_migrate_bytes();
        open(most).unwrap();
        open_all(&[most - 2 * MIB, 2 * MIB]).unwrap();
        assert!(
            open_all(&[most, 2 * MIB]).is_err(),
            "zones are of one pool, and fit into it together"
        );
        let message = foreshore_types::chain(&open(most + 2 * MIB).unwrap_err());
        for part in ["--pm-memory", &pool.display().to_string(), "64 MiB", "16 MiB"] {
            assert!(message.contains(part), "nothing of {part} in: {message}");
        }
    }

    #[test]
    fn pool_lends_space_of_thin_volumes_only_with_spill() {
        let folder = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap();
        let path = folder.path().join("pool");
        drop(pmem_volume::Pool::create(&path, 64 * MIB, 0).unwrap());
        let mut config = test_config();
        config.pm_memory = vec![pm_zone(&path, 48 * MIB)];
        let thin = format!("pool={},name=thin,size=40M,create=on,thin=on", path.display());
        config.pm_volumes = vec![PmVolumeConfig::parse(&thin).unwrap()];
        let resources = resources();
        let message = foreshore_types::chain(&resources.open_pools(&config).unwrap_err());
        assert!(message.contains("--pm-memory") && message.contains("40 MiB"), "{message}");
        let zone = &mut config.pm_memory[0];
        zone.spill = 20 * MIB;
        resources.open_pools(&config).unwrap();
        assert!(resources.pool(&path).info().lends_promised());
        // The pool stays open until the VMM exits, but the next VM may borrow nothing.
        config.pm_memory.clear();
        resources.open_pools(&config).unwrap();
        assert!(!resources.pool(&path).info().lends_promised());
    }

    #[test]
    fn step_of_each_volume_depends_on_its_own_pool() {
        let folder = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap();
        let paths = ["one", "two"].map(|name| folder.path().join(name));
        let [one, two] = paths.each_ref().map(|path| {
            let pool = pmem_volume::Pool::create(path, 64 * MIB, 16 * MIB).unwrap();
            pool.info().free_bytes
        });
        let volume = |pool: usize, options: &str| {
            PmVolumeConfig::parse(&format!("pool={},{options}", paths[pool].display())).unwrap()
        };
        let mut config = test_config();
        config.pm_memory = vec![pm_zone(&paths[0], 8 * MIB), pm_zone(&paths[0], 4 * MIB)];
        config.pm_volumes = vec![
            volume(0, "name=rest,size=remaining,create=on"),
            volume(1, "name=rest,size=remaining,create=on"),
            volume(0, "name=a,size=20M,create=on"),
        ];
        let steps = resources().open_pools(&config).unwrap();
        let sizes: Vec<_> = steps
            .iter()
            .map(|step| match step {
                Step::Create(size_bytes) => *size_bytes,
                step => panic!("{step:?}"),
            })
            .collect();
        assert_eq!(sizes, [one - 32 * MIB, two, 20 * MIB]);
        config.pm_volumes[2] = volume(0, "name=a,size=50M,create=on");
        let message = foreshore_types::chain(&resources().open_pools(&config).unwrap_err());
        for part in ["--pm-memory", "12 MiB", "50 MiB"] {
            assert!(message.contains(part), "nothing of {part} in: {message}");
        }
        config.pm_volumes[2] = volume(0, "name=a,size=80M,create=on");
        let message = foreshore_types::chain(&resources().open_pools(&config).unwrap_err());
        assert!(message.contains("--pm-volume") && message.contains("name=a"), "{message}");
        let names = |path| LocalPool::open(path, None).unwrap().volumes();
        assert!(paths.iter().all(|path| names(path).is_empty()), "nothing is created by a plan");
    }

    #[test]
    fn pool_under_several_paths_is_one_pool() {
        let folder = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap();
        let [pool, link, other] = ["pool", "link", "other"].map(|name| folder.path().join(name));
        drop(pmem_volume::Pool::create(&pool, 64 * MIB, 16 * MIB).unwrap());
        drop(pmem_volume::Pool::create(&other, 64 * MIB, 16 * MIB).unwrap());
        std::os::unix::fs::symlink("pool", &link).unwrap();
        let dotted = PathBuf::from(format!("{}/./pool", folder.path().display()));
        let mut config = test_config();
        config.pm_memory = vec![pm_zone(&link, 8 * MIB), pm_zone(&pool, 4 * MIB)];
        let volume = |path: &Path, name| {
            let text = format!("pool={},name={name},size=remaining,create=on", path.display());
            PmVolumeConfig::parse(&text).unwrap()
        };
        config.pm_volumes = vec![volume(&dotted, "a"), volume(&other, "b")];
        config.validate().unwrap();
        let mut twice = config.clone();
        twice.pm_volumes[1] = volume(&pool, "a");
        assert!(twice.validate().unwrap_err().to_string().contains("twice"));
        let resources = resources();
        let named = resources.with_one_path_for_each_pool(&config);
        let paths: Vec<_> = named.pm_volumes.iter().map(|volume| &volume.pool).collect();
        assert_eq!(paths, [&link, &other]);
        let steps = resources.open_pools(&named).unwrap();
        assert_eq!(resources.pools().len(), 2);
        // Both zones are counted, although their paths differ.
        let Step::Create(a) = &steps[0] else { panic!("{steps:?}") };
        assert_eq!(*a, resources.pool(&link).info().available_bytes() - 12 * MIB);
        // The link is changed before the next boot. The VM still uses the same pool.
        std::fs::remove_file(&link).unwrap();
        std::os::unix::fs::symlink("other", &link).unwrap();
        assert_eq!(resources.with_one_path_for_each_pool(&config), named);
    }
}
