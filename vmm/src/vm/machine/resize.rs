//! Resizes of a running machine. A request is first checked as a whole, and then carried out in
//! steps.

use std::sync::Arc;

use balloon::governor::{ResizeTarget, ResizeTargetError};
use foreshore_devices::disk::ResizeError;
use foreshore_devices::file_id::is_same;
use foreshore_devices::memory::zone::{Growth, Tier, ZoneSpec};
use foreshore_devices::virtio::block::BlockHandle;
use foreshore_devices::volume::guest_btt::VolumeKey;
use foreshore_devices::volume::interface::Chosen;
use foreshore_types::size::Size;
use tracing::warn;

use crate::config::{BALLOON_ZONE, DRAM_ZONE};
use crate::governor::GovernorError;
use crate::vm::machine::KvmMachine;
use crate::vm::request::{
    GrowPoolRequest, Reply, Resize, ResizeDiskRequest, ResizeRequest, ResizeZoneRequest, VmError,
};
use crate::vm::resize_plan::{
    NextBoot, ResizePlan, ResizeStep, StepAction, ZoneAction, id_of, zone,
};
use crate::vm::vm_task::MachineResize;

impl MachineResize for KvmMachine {
    /// Checks a resize request as a whole. The caller has already checked that `desired_vcpus` is
    /// between 1 and the maximum.
    fn plan_resize(&self, resize: &Resize) -> Result<ResizePlan, VmError> {
        let mut steps = Vec::new();
        match resize {
            Resize::Vm(ResizeRequest { desired_vcpus, desired_ram, desired_balloon }) => {
                if let Some(desired) = *desired_vcpus {
                    let action =
                        StepAction::Vcpus { desired, plug_step: self.vcpus_step(desired)? };
                    steps.push(ResizeStep { action, next_boot: NextBoot::Vcpus(desired) });
                }
                if let Some(size_bytes) = *desired_ram {
                    steps.push(self.plan_dram(size_bytes)?);
                }
                if let Some(size_bytes) = *desired_balloon {
                    let action = StepAction::Balloon(self.balloon_target(size_bytes)?);
                    steps.push(ResizeStep { action, next_boot: NextBoot::Balloon(size_bytes) });
                }
            }
            Resize::Zone(request) => steps.push(self.plan_zone(request)?),
        }
        Ok(ResizePlan(steps))
    }

    /// Carries out one step of a resize. A resized zone or balloon is pinned until the governor is
    /// resumed.
    fn resize(&mut self, step: ResizeStep) -> Result<(), VmError> {
        match step.action {
            StepAction::Vcpus { desired, plug_step } => self.change_vcpus(desired, plug_step),
            StepAction::Zone { id, action } => match action {
                ZoneAction::None => Ok(()),
                ZoneAction::Dimm { size_bytes, more_bytes } => {
                    self.grow_by_dimm(size_bytes, more_bytes)
                }
                ZoneAction::Target(target) => {
                    self.context.machine.events.expect_of_zone(&id);
                    self.request(target)
                }
            },
            StepAction::Balloon(target) => target.map_or(Ok(()), |target| self.request(target)),
        }
    }

    fn vcpu_ejected(&mut self, index: u8) {
        self.park_vcpu(index);
    }

    fn resize_disk(&mut self, resize: &ResizeDiskRequest) -> Result<(), VmError> {
        let ResizeDiskRequest { id, desired_size } = resize;
        let disks = || self.devices.handles::<BlockHandle>();
        let disk = disks().find(|disk| disk.id() == id);
        let volume = self.pm.place_of(id).filter(|place| {
            // An NVDIMM may have the name of a disk.
            disk.is_none() || self.pm.volumes[*place].interface() == Chosen::VirtioBlk
        });
        if let Some(place) = volume {
            let checked = self.pm.check_growth(&self.pm.volumes[place], *desired_size);
            checked.map_err(|error| VmError::BadRequest(error.to_string()))?;
        }
        let Some(disk) = disk else {
            let known = disks().map(BlockHandle::id).collect::<Vec<_>>();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            return Err(VmError::NoSuchDisk { id: id.clone(), known });
        };
        let result = disk.resize(*desired_size).map_err(|err| match err {
            ResizeError::Io { .. } => VmError::Failed(format!("disk {id}: {err}")),
            _ => VmError::BadRequest(format!("disk {id}: {err}")),
        });
        if let Some((place, (_, size_bytes))) = volume.zip(self.stored_volume(id)) {
            self.pm.volumes[place].has_grown(size_bytes);
        }
        result
    }

    fn stored_volume(&self, id: &str) -> Option<(VolumeKey, u64)> {
        let volume = &self.pm.volumes[self.pm.place_of(id)?];
        let mut stored = volume.pool().volumes().into_iter();
        let stored = stored.find(|stored| stored.name == volume.name())?;
        Some((volume.key(), stored.size_bytes))
    }

    /// Another thread grows the pool, because erasing a part of a device takes long. It may
    /// outlive the machine.
    fn grow_pool(&self, growth: GrowPoolRequest, reply: Reply<()>) {
        let GrowPoolRequest { path, size, force } = growth;
        let pools = &self.pm.pools;
        // An error of `send` means that the client has disconnected.
        let Some(pool) = pools.iter().find(|pool| is_same(pool.path(), &path)) else {
            let known: Vec<_> =
                pools.iter().map(|pool| pool.path().display().to_string()).collect();
            let _ = reply.send(Err(VmError::NoSuchPool { path, known: known.join(", ") }));
            return;
        };
        let (pool, lost) = (pool.clone(), Arc::clone(&self.context.lost));
        let grow = move || drop(reply.send(pool.grow(size, force, &lost)));
        // A failed spawn drops `reply`, and the client gets an error.
        if let Err(err) = std::thread::Builder::new().name("_grow".to_owned()).spawn(grow) {
            warn!(%err, "Cannot start a thread that grows a pool");
        }
    }
}

impl KvmMachine {
    fn request(&self, target: ResizeTarget) -> Result<(), VmError> {
        Ok(self.governor.call(move |core, now| core.resize(target, now))?)
    }

    fn plan_dram(&self, size_bytes: u64) -> Result<ResizeStep, VmError> {
        let dram: Vec<_> =
            self.memory.zones().iter().filter(|spec| spec.tier == Tier::Dram).map(id_of).collect();
        if dram != [DRAM_ZONE] {
            return Err(VmError::BadRequest(format!(
                "The VM's memory is in zones; vm.resize-zone resizes each: {}",
                dram.join(", ")
            )));
        }
        let spec = &self.memory.zones()[0];
        let action = match spec.growth {
            Growth::Dimms => {
                ZoneAction::Dimm { size_bytes, more_bytes: self.missing_bytes(size_bytes)? }
            }
            Growth::VirtioMem => self.zone_action(spec, "memory", size_bytes)?,
        };
        Ok(ResizeStep::of_zone(spec, size_bytes, action))
    }

    fn plan_zone(&self, request: &ResizeZoneRequest) -> Result<ResizeStep, VmError> {
        let ResizeZoneRequest { id, desired_ram } = request;
        let spec = zone(self.memory.zones(), id)?;
        if spec.growth == Growth::Dimms {
            return Err(VmError::BadRequest(format!(
                "zone {id}, size {}: it grows by ACPI, and vm.resize adds memory to it",
                Size(*desired_ram)
            )));
        }
        let action = self.zone_action(spec, &format!("zone {id}, size"), *desired_ram)?;
        Ok(ResizeStep::of_zone(spec, *desired_ram, action))
    }

    /// Checks that a zone can be resized to `size_bytes`, including its boot part. Errors start
    /// with `name` and the size.
    fn zone_action(
        &self,
        spec: &ZoneSpec,
        name: &str,
        size_bytes: u64,
    ) -> Result<ZoneAction, VmError> {
        let (boot_bytes, most_bytes) = (spec.boot_bytes, spec.boot_bytes + spec.hotplug_bytes);
        let out_of_bounds = || {
            VmError::BadRequest(format!(
                "{name} {}: must be at least {}, the boot memory, and at most {}",
                Size(size_bytes),
                Size(boot_bytes),
                Size(most_bytes)
            ))
        };
        let bytes = size_bytes.checked_sub(boot_bytes).ok_or_else(out_of_bounds)?;
        // The governor does not know zones without a hotplug part.
        if spec.hotplug_bytes == 0 {
            return if bytes == 0 { Ok(ZoneAction::None) } else { Err(out_of_bounds()) };
        }
        let target = self.governor.zones().target(&spec.id, bytes);
        target.map(ZoneAction::Target).map_err(|err| match err {
            GovernorError::NotResizable { reason: ResizeTargetError::TooLarge { .. }, .. } => {
                out_of_bounds()
            }
            GovernorError::NotResizable {
                reason: ResizeTargetError::NotMultiple { block_bytes, .. },
                ..
            } => VmError::BadRequest(format!(
                "{name} {}: {} beyond boot memory is not a multiple of {}",
                Size(size_bytes),
                Size(bytes),
                Size(block_bytes)
            )),
            err => err.into(),
        })
    }

    /// Target for the balloon zone: the memory that remains for the guest with a balloon of
    /// `size_bytes`. `None` for a VM without a balloon.
    fn balloon_target(&self, size_bytes: u64) -> Result<Option<ResizeTarget>, VmError> {
        let refuse =
            |reason| VmError::BadRequest(format!("balloon {}: {reason}", Size(size_bytes)));
        let Some(balloon) = self.balloon_handle() else {
            let refused = || refuse("the VM has no balloon".to_owned());
            return if size_bytes == 0 { Ok(None) } else { Err(refused()) };
        };
        let most_bytes = balloon.sizes().max_bytes;
        let left_bytes = most_bytes.checked_sub(size_bytes).ok_or_else(|| {
            let most = Size(most_bytes);
            refuse(format!("the maximum is {most}, so that the guest retains its floor"))
        })?;
        let target = self.governor.zones().target(BALLOON_ZONE, left_bytes);
        target.map(Some).map_err(|err| match err {
            // The maximum is a multiple of the block size. If the remaining size is not a multiple,
            // the requested balloon size is not one either.
            GovernorError::NotResizable {
                reason: ResizeTargetError::NotMultiple { block_bytes, .. },
                ..
            } => refuse(format!("it is not a multiple of {}", Size(block_bytes))),
            err => err.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use balloon::ZoneId;
    use foreshore_devices::device::DeviceList;
    use foreshore_devices::events::Events;
    use foreshore_devices::memory::holes::UserfaultDevice;
    use foreshore_devices::memory::slots::fake::FakeSlots;
    use foreshore_devices::memory::{Memory, MemoryOptions, PmSource, build};
    use foreshore_devices::metrics::Metrics;
    use foreshore_devices::pool::PmPool;
    use foreshore_devices::pool::fake::FakePool;
    use foreshore_devices::volume::interface::Payload;
    use tempfile::TempDir;

    use super::*;
    use crate::config::{PmMemoryConfig, PmVolumeConfig, test_config};
    use crate::vm::machine::tests::machine;
    use crate::vm::pm::PmStorage;
    use crate::vm::pm::created_volumes::CreatedVolumes;
    use crate::vm::pm::volumes::attach;
    use crate::vm::resources::Resources;
    use crate::vm::resources::host_devices::HostDevices;
    use crate::vm::resources::pools::OpenPool;
    use crate::vm::vm_task::{DeviceHotplug, Machine};

    const MIB: u64 = 1 << 20;

    /// Guest memory with `zones`, on a host with sufficient memory and slots.
    fn memory(zones: Vec<ZoneSpec>) -> Memory {
        let pool: Arc<dyn PmPool> = Arc::new(FakePool::new(64));
        let options = MemoryOptions { address_bits: 40, slot_limit: 64, host_bytes: 64 << 30 };
        let userfaults = &UserfaultDevice::missing();
        let pm = PmSource { pool: &pool, userfaults };
        build(zones, Some(pm), Arc::<FakeSlots>::default(), options).unwrap()
    }

    /// Machine with 64 MiB of boot memory and a hotplug part.
    fn growing(hotplug_bytes: u64) -> KvmMachine {
        let mut machine = machine();
        let mut spec = machine.memory.zones()[0].clone();
        spec.hotplug_bytes = hotplug_bytes;
        machine.memory = memory(vec![spec]);
        machine
    }

    fn dram(size_bytes: u64) -> Resize {
        Resize::Vm(ResizeRequest { desired_ram: Some(size_bytes), ..ResizeRequest::default() })
    }

    fn zone(size_bytes: u64) -> Resize {
        Resize::Zone(ResizeZoneRequest { id: DRAM_ZONE.to_owned(), desired_ram: size_bytes })
    }

    #[test]
    fn size_that_a_zone_cannot_have_is_refused_in_the_terms_of_the_request() {
        let machine = growing(128 * MIB);
        for size_bytes in [64 * MIB, 66 * MIB, 192 * MIB] {
            machine.plan_resize(&dram(size_bytes)).unwrap();
            machine.plan_resize(&zone(size_bytes)).unwrap();
        }
        let bounds = "must be at least 64 MiB, the boot memory, and at most 192 MiB";
        let blocks = "1 MiB beyond boot memory is not a multiple of 2 MiB";
        let odd = "1048577 bytes beyond boot memory is not a multiple of 2 MiB";
        for (size_bytes, size, text) in [
            (62 * MIB, "62 MiB", bounds),
            (194 * MIB, "194 MiB", bounds),
            (65 * MIB, "65 MiB", blocks),
            (65 * MIB + 1, "68157441 bytes", odd),
        ] {
            for (resize, name) in
                [(dram(size_bytes), "memory"), (zone(size_bytes), "zone dram, size")]
            {
                let error = machine.plan_resize(&resize).unwrap_err();
                assert!(matches!(error, VmError::BadRequest(_)));
                assert_eq!(error.to_string(), format!("{name} {size}: {text}"));
            }
        }
    }

    #[test]
    fn zone_without_hotplug_part_can_only_have_its_size() {
        let mut machine = growing(0);
        for step in machine.plan_resize(&dram(64 * MIB)).unwrap() {
            machine.resize(step).unwrap();
        }
        let error = machine.plan_resize(&dram(66 * MIB)).unwrap_err().to_string();
        let bounds = "must be at least 64 MiB, the boot memory, and at most 64 MiB";
        assert_eq!(error, format!("memory 66 MiB: {bounds}"));
    }

    /// The balloon is checked last.
    #[test]
    fn plan_of_a_request_with_one_wrong_part_changes_nothing() {
        let machine = growing(128 * MIB);
        let desired_balloon = Some(2 * MIB);
        let desired_ram = Some(66 * MIB);
        let request = ResizeRequest { desired_ram, desired_balloon, ..ResizeRequest::default() };
        let error = machine.plan_resize(&Resize::Vm(request)).unwrap_err().to_string();
        assert_eq!(error, "balloon 2 MiB: the VM has no balloon");
        assert!(machine.pressure(0).pinned_zones.is_empty());
    }

    #[test]
    fn planned_size_of_a_zone_is_requested_and_pins_it() {
        let mut machine = growing(128 * MIB);
        for step in machine.plan_resize(&dram(66 * MIB)).unwrap() {
            machine.resize(step).unwrap();
        }
        assert_eq!(machine.governor.zones()[ZoneId(0)].device.sizes().requested_bytes, 2 * MIB);
        assert_eq!(machine.pressure(0).pinned_zones, [DRAM_ZONE]);
    }

    #[test]
    fn plan_stores_the_size_of_its_zone_only() {
        let mut machine = growing(128 * MIB);
        let dram_spec = machine.memory.zones()[0].clone();
        let pm_spec = ZoneSpec {
            id: "pm".to_owned(),
            tier: Tier::Pm,
            guest_node: 1,
            boot_bytes: 0,
            hotplug_bytes: 1024 * MIB,
            ..dram_spec.clone()
        };
        let pm =
            |mib| Resize::Zone(ResizeZoneRequest { id: "pm".to_owned(), desired_ram: mib * MIB });
        let (boot, none) = (test_config().memory.size, None);
        for (growth, resize, expected) in [
            (Growth::Dimms, pm(1024), (boot, none)),
            (Growth::Dimms, pm(0), (boot, none)),
            (Growth::Dimms, dram(64 * MIB), (64 * MIB, none)),
            (Growth::VirtioMem, pm(1024), (boot, none)),
            (Growth::VirtioMem, dram(66 * MIB), (boot, Some(2 * MIB))),
            (Growth::VirtioMem, dram(64 * MIB), (boot, none)),
        ] {
            machine.memory =
                memory(vec![ZoneSpec { growth, ..dram_spec.clone() }, pm_spec.clone()]);
            let mut config = test_config();
            machine.plan_resize(&resize).unwrap().store(&mut config);
            let stored = (config.memory.size, config.memory.hotplugged_size);
            assert_eq!(stored, expected, "{growth:?}, {resize}");
        }
    }

    /// Machine with the volume `data` of 20 MiB, in a pool of 128 MiB with a zone of 64 MiB.
    fn with_volume(options: &str) -> (KvmMachine, TempDir) {
        let folder = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap();
        let path = folder.path().join("pool");
        let pool = pmem_volume::Pool::create(&path, 128 * MIB, 0).unwrap();
        let size = pmem_volume::VolumeSize::Bytes(20 * MIB);
        pool.create_volume("data", size, foreshore_types::VolumeFormat::Btt).unwrap();
        drop(pool);
        let (mut config, path) = (test_config(), path.display());
        let volume = PmVolumeConfig::parse(&format!("pool={path},name=data,{options}"));
        config.pm_volumes = vec![volume.unwrap()];
        let zone = PmMemoryConfig::parse(&format!("pool={path},size=64M"));
        config.pm_memory = vec![zone.unwrap()];
        let metrics = Arc::new(Metrics::new("vm"));
        let resources = Resources::new(metrics, Events::start(), HostDevices::default());
        let steps = resources.open_pools(&config).unwrap();
        let (mut machine, mut devices) = (machine(), DeviceList::default());
        let (memory, context) = (&mut machine.memory, &machine.context);
        let with = (&resources, &steps[..], &mut CreatedVolumes::default());
        let attached =
            attach(&config, Payload::Linux, with, memory, context, &mut devices).unwrap();
        let (zones, pools) = (config.pm_memory, resources.pools());
        machine.pm =
            PmStorage::new(zones, attached.volumes, pools, Arc::default(), attached.guest_btt);
        machine.devices = devices;
        (machine, folder)
    }

    fn resize(machine: &mut KvmMachine, id: &str, mib: u64) -> Result<(), String> {
        let request = ResizeDiskRequest { id: id.to_owned(), desired_size: mib * MIB };
        machine.resize_disk(&request).map_err(|error| match error {
            VmError::BadRequest(text) => text,
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn volume_grows_while_it_is_attached_and_leaves_memory_for_zones() {
        let (mut machine, _folder) = with_volume("size=20M,interface=virtio-blk");
        let sizes = |machine: &KvmMachine| {
            let stored = machine.pm.volumes[0].pool().volumes()[0].size_bytes / MIB;
            (stored, machine.volumes()[0].size_bytes / MIB)
        };
        assert_eq!(sizes(&machine), (20, 18));
        for (mib, parts) in [
            (18, ["cannot shrink", "20 MiB"]),
            (21, ["22020096", "multiple of 2 MiB"]),
            (30, ["16 MiB", "37748736"]),
            (62, ["zones may need 64 MiB", "at most 62 MiB"]),
        ] {
            let error = resize(&mut machine, "data", mib).unwrap_err();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
        assert_eq!(sizes(&machine), (20, 18));
        for _ in 0..2 {
            resize(&mut machine, "data", 60).unwrap();
            assert_eq!(sizes(&machine), (60, 57));
        }
    }

    #[test]
    fn failed_resize_records_the_stored_size() {
        let (mut machine, _folder) = with_volume("size=20M,interface=virtio-blk");
        let disk = machine.devices.handles::<BlockHandle>().next().unwrap().clone();
        disk.resize(60 * MIB).unwrap();
        resize(&mut machine, "data", 30).unwrap_err();
        assert_eq!(machine.pm.volumes[0].config().size, crate::config::VolumeSize::Bytes(60 * MIB));
    }

    #[test]
    fn pool_grows_while_its_volume_is_attached() {
        let (mut machine, folder) = with_volume("size=20M,interface=virtio-blk");
        let path = folder.path().join("pool");
        let grow = |machine: &KvmMachine, path: &Path, mib: Option<u64>| {
            let path = path.to_owned();
            let growth = GrowPoolRequest { path, size: mib.map(|mib| mib * MIB), force: false };
            let (reply, result) = tokio::sync::oneshot::channel();
            machine.grow_pool(growth, reply);
            result.blocking_recv().unwrap()
        };
        let error = grow(&machine, Path::new("/other"), Some(256)).unwrap_err();
        assert!(
            matches!(&error, VmError::NoSuchPool { known, .. } if *known == path.display().to_string())
        );
        for (mib, reason) in [
            (Some(128), "does not exceed the current 128 MiB"),
            (Some(129), "multiple of 2 MiB"),
            (Some(65 << 20), "exceeds the maximum 64 TiB"),
            (None, "a size is required"),
        ] {
            let Err(VmError::BadRequest(text)) = grow(&machine, &path, mib) else { panic!() };
            assert!(text.contains(reason), "{text}");
        }
        assert!(resize(&mut machine, "data", 80).is_err());
        grow(&machine, &path, Some(192)).unwrap();
        assert_eq!(machine.pools()[0].total_bytes, 192 * MIB);
        resize(&mut machine, "data", 80).unwrap();
    }

    #[test]
    fn growth_of_a_pool_does_not_block_its_caller() {
        let (mut machine, _folder) = with_volume("size=20M,interface=virtio-blk");
        let pool = Arc::new(FakePool::new(1));
        machine.pm.pools.push(OpenPool::new(Path::new("/slow"), &(Arc::clone(&pool) as _)));
        let (reply, mut result) = tokio::sync::oneshot::channel();
        let delay = pool.growth.lock();
        let (path, size) = ("/slow".into(), Some(4 * MIB));
        machine.grow_pool(GrowPoolRequest { path, size, force: false }, reply);
        assert!(result.try_recv().is_err());
        drop(delay);
        result.blocking_recv().unwrap().unwrap();
    }

    #[test]
    fn nvdimm_is_not_removed_from_a_running_guest() {
        let (mut machine, _folder) = with_volume("interface=nvdimm");
        let error = machine.remove_device("data").unwrap_err();
        assert!(matches!(&error, VmError::Failed(text) if text.contains("data is an NVDIMM")));
        assert_eq!((machine.volumes().len(), machine.volume_of("data")), (1, None));
        let error = machine.remove_device("other").unwrap_err();
        assert!(matches!(error, VmError::NoSuchDevice { .. }));
    }

    #[test]
    fn mapped_or_read_only_volume_does_not_grow() {
        for (options, id, reason) in [
            ("interface=nvdimm", "data", "interface=nvdimm is mapped"),
            ("interface=virtio-pmem", "pmem-data", "interface=virtio-pmem is mapped"),
            ("interface=virtio-blk,readonly=on", "data", "readonly=on"),
        ] {
            let (mut machine, _folder) = with_volume(options);
            let error = resize(&mut machine, id, 40).unwrap_err();
            assert!(error.contains("volume data") && error.contains(reason), "{error}");
            assert_eq!(machine.pm.volumes[0].pool().volumes()[0].size_bytes, 20 * MIB);
        }
    }
}
