//! Volumes that are added to the running guest and removed from it ([`super::hotplug`]).

use std::path::Path;
use std::sync::Arc;

use foreshore_devices::device::AttachedDevice;
use foreshore_devices::metrics::Expose;
use foreshore_devices::volume::build::{NewVolume, VolumeDevice, VolumePlace, build_volume};
use foreshore_devices::volume::interface::{InterfaceError, Payload};

use crate::config::PmVolumeConfig;
use crate::vm::error::BuildError;
use crate::vm::machine::KvmMachine;
use crate::vm::pm::attached_volumes::{AttachedVolume, Opened};
use crate::vm::pm::created_volumes::CreatedVolumes;
use crate::vm::pm::volumes::{MappingHost, choose_one, open_one, storage_high_bytes};
use crate::vm::resources::pools::OpenPool;

impl KvmMachine {
    /// Opens a volume, possibly after creating it, and builds its device. If this fails, the volume
    /// is not created, and a pool that was opened for it is closed.
    pub(super) fn add_volume(
        &mut self,
        config: &PmVolumeConfig,
    ) -> Result<AttachedDevice, BuildError> {
        let pools = self.open_files.pools.clone();
        let pool = pools.first_path(&config.pool);
        let config = PmVolumeConfig { pool, ..config.clone() };
        let was_open = pools.is_open(&config.pool);
        let built = self.build_volume(&config);
        if !was_open {
            match built {
                Ok(_) => self.expose_pool(&config.pool),
                Err(_) => pools.close(&config.pool),
            }
        }
        built
    }

    fn build_volume(&mut self, config: &PmVolumeConfig) -> Result<AttachedDevice, BuildError> {
        let (pools, zones) = (&self.open_files.pools, &self.pm.zones);
        let pool = pools.open(PmVolumeConfig::FLAG, &config.pool, zones)?;
        let attached = self.pm.volumes.iter().map(AttachedVolume::config);
        let mut volumes: Vec<_> = attached.filter(|other| other.pool == config.pool).collect();
        volumes.push(config);
        let steps = pools.plan(&config.pool, &volumes, zones)?;
        let step = steps.last().expect("each volume has a step");
        let machine = &self.context.machine;
        let (userfaults, max_vcpus) = (&machine.userfaults, machine.max_vcpus);
        // `auto` was replaced by an interface that is possible at run time.
        let host = MappingHost { userfaults, spare_mappings: 0 };
        let choice = choose_one((config, step), &pool, &host, max_vcpus, Payload::Linux)?;
        let interface = choice.interface;
        // Dropped after the device, which uses the volume.
        let mut created = CreatedVolumes::default();
        let volume = open_one(config, step, &pool, &mut created)?;
        let boot_vcpus = self.vcpus.running_count();
        let min_free_bytes = storage_high_bytes(zones, &config.pool);
        let place = VolumePlace { boot_vcpus, node: 0, nvdimms: 0, min_free_bytes };
        let new = NewVolume { config, interface, pool: &pool, volume };
        let built = build_volume(new, &place, &mut self.memory, &self.context)
            .map_err(BuildError::device(config.flag()))?;
        let (device, opened) = Opened::of(built);
        let VolumeDevice::Pci(device) = device else {
            return Err(InterfaceError::NvdimmAtRunTime { name: config.name.clone() }.into());
        };
        created.keep();
        let volume = AttachedVolume::new(config, choice, &pool, opened);
        if volume.has_guest_btt() {
            self.pm.guest_btt.add(volume.key(), interface);
        }
        self.pm.volumes.push(volume);
        Ok(device)
    }

    /// Shows a pool that was opened for the first added volume in `pool.info` and the metrics.
    fn expose_pool(&mut self, path: &Path) {
        let pool = OpenPool::new(path, &self.open_files.pools.get(path));
        let usage = Arc::new(pool.usage_monitor(&self.context.machine.events));
        let sources = [Arc::new(pool.metrics()) as Arc<dyn Expose>, Arc::clone(&usage) as _];
        self.exposed.extend(sources.map(|source| self.context.machine.metrics.register(source)));
        self.pm.usage.lock().push(usage);
        self.pm.pools.push(pool);
    }

    /// Closes the volume of a device that the guest has ejected, apart from what the device holds.
    pub(super) fn forget_volume(&mut self, id: &str) {
        let is_it = |volume: &mut AttachedVolume| volume.device_id().as_deref() == Some(id);
        for volume in self.pm.volumes.extract_if(.., is_it) {
            self.pm.guest_btt.remove(&volume.key());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use foreshore_devices::device::testing::FakeMachine;
    use foreshore_devices::memory::holes::UserfaultDevice;
    use foreshore_devices::pool::{LocalPool, PmPool};
    use tempfile::TempDir;

    use super::*;
    use crate::config::DeviceConfig;
    use crate::vm::machine::tests::machine_on;
    use crate::vm::machine::zone_metrics::ZoneMetrics;
    use crate::vm::request::{PciDeviceInfo, VmError};
    use crate::vm::vm_task::{DeviceHotplug, Machine};

    const MIB: u64 = 1 << 20;

    /// Machine, and a pool of 64 MiB that is not open.
    struct Rig {
        machine: KvmMachine,
        fake: FakeMachine,
        path: PathBuf,
        _folder: TempDir,
    }

    impl Rig {
        fn new() -> Self {
            let folder = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap();
            let path = folder.path().join("pool");
            drop(pmem_volume::Pool::create(&path, 64 * MIB, 0).unwrap());
            let fake = FakeMachine::default();
            Self { machine: machine_on(&fake), fake, path, _folder: folder }
        }

        fn add(&mut self, id: &str, options: &str) -> Result<PciDeviceInfo, VmError> {
            let text = format!("pool={},{options}", self.path.display());
            let volume = DeviceConfig::Volume(PmVolumeConfig::parse(&text).unwrap());
            self.machine.add_device(id, &volume)
        }

        /// Requests the removal, and ejects the device as a guest would.
        fn remove(&mut self, id: &str) {
            self.machine.remove_device(id).unwrap();
            drop(self.machine.context.pci.remove(1));
            self.machine.ejected(1);
            self.machine.hotplug.leaving.wait();
        }

        fn footprint(&self) -> (usize, usize, usize, String) {
            let KvmMachine { devices, context, memory, .. } = &self.machine;
            let metrics = self.fake.metrics.encode(&ZoneMetrics::default()).unwrap();
            let lines = metrics.lines().filter(|line| line.contains("foreshore_volume_"));
            let used = (context.pci.used(), memory.slots().used() + context.lost.ranges().len());
            (devices.len(), used.0, used.1, lines.collect())
        }

        fn is_closed(&self) -> bool {
            LocalPool::open(&self.path, None).is_ok()
        }
    }

    const BLK: &str = "name=data,size=20M,create=on,thin=on,interface=virtio-blk";
    const PMEM: &str = "name=data,size=20M,create=on,format=raw,interface=virtio-pmem";
    const THIN_PMEM: &str = "name=data,size=20M,create=on,thin=on,interface=virtio-pmem";

    #[test]
    fn removed_volume_leaves_nothing_and_can_be_added_again() {
        for (id, options) in [("data", BLK), ("pmem-data", PMEM), ("pmem-data", THIN_PMEM)] {
            let mut rig = Rig::new();
            let refusal = rig.machine.context.machine.userfaults.refusal();
            if let Some(reason) = refusal.filter(|_| options == THIN_PMEM) {
                eprintln!("skipped for a mapped thin volume: {reason}");
                continue;
            }
            let before = rig.footprint();
            for _ in 0..3 {
                let added = rig.add(id, options).unwrap();
                assert_eq!((&*added.id, &*added.bdf), (id, "0000:00:01.0"));
                assert!(!rig.is_closed(), "another process could change the pool");
                let volumes = rig.machine.volumes();
                assert_eq!((volumes.len(), &*volumes[0].name), (1, "data"));
                assert_eq!(rig.machine.volume_of(id).unwrap().name, "data");
                assert_eq!(rig.machine.pools().len(), 1);
                let metrics = rig.fake.metrics.encode(&ZoneMetrics::default()).unwrap();
                assert_eq!(metrics.matches("\nforeshore_pool_failed{").count(), 1);
                assert_ne!(rig.footprint(), before);
                rig.remove(id);
                assert_eq!(rig.footprint(), before);
                assert!(rig.machine.volumes().is_empty());
            }
            // The pool stays open until the VM ends, and has the volume.
            let pool = rig.machine.open_files.pools.get(&rig.path);
            pool.open_volume("data").unwrap();
        }
    }

    #[test]
    fn attached_or_leaving_volume_is_not_added_again() {
        let mut rig = Rig::new();
        rig.add("pmem-data", PMEM).unwrap();
        rig.machine.remove_device("pmem-data").unwrap();
        for (id, options) in [("pmem-data", PMEM), ("data", "name=data,interface=virtio-blk")] {
            let error = rig.add(id, options).unwrap_err();
            let is_named =
                matches!(&error, VmError::DeviceLeaving { leaving, .. } if leaving == "pmem-data");
            let text = error.to_string();
            assert!(is_named && text.contains("name=data: the volume is attached"), "{text}");
        }
        rig.remove("pmem-data");
        rig.add("pmem-data", PMEM).unwrap();
    }

    #[test]
    fn volume_that_cannot_be_added_leaves_nothing() {
        let mut rig = Rig::new();
        rig.machine.context.machine.userfaults = Arc::new(UserfaultDevice::missing());
        let before = rig.footprint();
        for (options, reason) in [
            ("name=none,interface=virtio-blk", "no such volume"),
            ("name=data,size=80M,create=on,interface=virtio-blk", "has only 60 MiB left"),
            ("name=data,size=20M,create=on,format=raw,interface=virtio-blk", "format=raw"),
            (THIN_PMEM, "/dev/userfaultfd"),
            ("name=data,size=20M,create=on,thin=off,interface=nvdimm", "only at boot"),
        ] {
            let error = rig.add("data", options).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
            assert_eq!(rig.footprint(), before, "{options}");
            assert!(rig.machine.volumes().is_empty() && rig.machine.pools().is_empty());
            assert!(rig.is_closed(), "{options}");
        }
        // KVM refuses the memory slot.
        *rig.fake.slots.calls_left.lock() = Some(0);
        assert!(rig.add("pmem-data", PMEM).is_err());
        *rig.fake.slots.calls_left.lock() = None;
        let pool = LocalPool::open(&rig.path, None).unwrap();
        assert_eq!(pool.info().volumes, 0, "the created volume was deleted");
    }
}
