//! Devices that are added and removed while the guest runs.
//!
//! **Adding.** All checks are done before the guest is notified:
//! 1. The VM task checks the configuration, and that no device has the same ID.
//! 2. The host files are opened, and the device is created with its threads.
//! 3. The device is attached to a free slot of the PCI bus. A guest that scans the bus can find it
//!    from now on.
//! 4. The device is added to the machine's list of devices, so that it is paused, resized and
//!    counted with the others.
//! 5. The guest is notified: the slot's bit is set, and then the interrupt is raised.
//!
//! **Removing.** The guest is requested to eject the device, and the VMM does not wait for the
//! ejection:
//! 1. The slot's bit is set, the interrupt is raised and the call is answered. At the next boot,
//!    the device no longer exists.
//! 2. The guest's driver releases the device, and the guest's AML writes the eject register.
//! 3. During that exit the slot is emptied, because the guest reads it immediately afterwards
//!    (`RootBus::remove`).
//! 4. The VM task is notified, and removes the device from the machine's list of devices.
//! 5. A separate thread stops the device, which may wait for a disk, and closes its files. The end
//!    of the machine waits for this thread, because the next machine may use the same files.
//!
//! If the guest does not react, it keeps the device until it reacts or ends.
//!
//! **Replacing.** A client may remove a device and add another one with the same interface or file.
//! Both are in use until step 5 is done. After the ejection, step 5 takes only a moment, and the
//! addition waits for it. Before the ejection, the addition fails with an error that names the
//! device still in use by the guest.

use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use foreshore_devices::device::AttachedDevice;
use foreshore_devices::events::{Event, Events};
use foreshore_devices::volume::build::build_file;
use tracing::{error, info, warn};

use crate::acpi::ged::{self, GenericEventDevice};
use crate::acpi::hotplug::HotplugPage;
use crate::config::DeviceConfig;
use crate::vm::devices;
use crate::vm::error::BuildError;
use crate::vm::machine::KvmMachine;
use crate::vm::machine::hotplug_metrics::HotplugMetrics;
use crate::vm::machine::lost_memory;
use crate::vm::request::{PciDeviceInfo, VmError};
use crate::vm::resources::{self, taps};
use crate::vm::vm_task::DeviceHotplug;

/// Maximum time that an addition waits until removed devices of the same kind have ended. A disk
/// may wait for its host forever.
const END_LIMIT: Duration = Duration::from_secs(2);

/// PCI address (domain, bus, device, function) of the device in a slot.
pub(in crate::vm) fn bdf(slot: u8) -> String {
    format!("0000:00:{slot:02x}.0")
}

/// ACPI hotplug: notification of the guest, metrics, and ejected devices that have not ended yet.
pub(in crate::vm) struct Hotplug {
    pub(super) ged: Arc<GenericEventDevice>,
    pub(super) page: Arc<HotplugPage>,
    pub(super) metrics: Arc<HotplugMetrics>,
    pub(super) leaving: Leaving,
}

impl Hotplug {
    pub(in crate::vm) fn new(
        ged: Arc<GenericEventDevice>,
        page: Arc<HotplugPage>,
        metrics: Arc<HotplugMetrics>,
    ) -> Self {
        Self { ged, page, metrics, leaving: Leaving::default() }
    }
}

/// Devices that the guest has ejected and that have not ended yet. Each is stopped by a separate
/// thread.
#[derive(Default)]
pub(super) struct Leaving(Vec<Ending>);

struct Ending {
    id: String,
    kind: &'static str,
    thread: JoinHandle<()>,
    /// Disconnected when the device has ended.
    is_over: mpsc::Receiver<()>,
}

impl Leaving {
    /// Ends `device` on another thread, which then emits the event.
    fn end(&mut self, kind: &'static str, device: AttachedDevice, emitter: Events) {
        self.0.retain(|ending| !ending.thread.is_finished());
        let id = device.id.clone();
        let (over, is_over) = mpsc::channel();
        let end = move || {
            let _over: mpsc::Sender<()> = over;
            let (id, bdf) = (device.id.clone(), bdf(device.slot));
            drop(device);
            info!(id, bdf, "The device is removed");
            emitter.emit(Event::DeviceRemoved { id: &id, bdf: &bdf });
        };
        match std::thread::Builder::new().name("_removed".to_owned()).spawn(end) {
            Ok(thread) => self.0.push(Ending { id, kind, thread, is_over }),
            // The failed spawn has dropped the closure, so the device was ended on this thread.
            Err(err) => warn!(
                %err,
                id,
                "Cannot start a thread to stop the removed device; the VM's thread has stopped it"
            ),
        }
    }

    /// Waits until all ejected devices have ended.
    pub(in crate::vm) fn wait(&mut self) {
        for ending in self.0.drain(..) {
            if ending.thread.join().is_err() {
                error!(id = ending.id, "The thread that stops a removed device has panicked");
            }
        }
    }

    /// Waits until all ejected devices of this kind have ended, but no longer than `limit`.
    fn wait_for(&self, kind: &str, limit: Duration) {
        let until = Instant::now() + limit;
        for ending in self.0.iter().filter(|ending| ending.kind == kind) {
            // The channel never carries a message. The wait ends when the sender is dropped.
            let _ = ending.is_over.recv_timeout(until.saturating_duration_since(Instant::now()));
        }
    }

    fn has(&self, kind: &str) -> bool {
        self.0.iter().any(|ending| ending.kind == kind && !ending.thread.is_finished())
    }
}

impl DeviceHotplug for KvmMachine {
    fn devices(&self) -> Vec<PciDeviceInfo> {
        let info = |attached: &AttachedDevice| PciDeviceInfo {
            id: attached.id.clone(),
            bdf: bdf(attached.slot),
        };
        self.devices.iter().map(info).collect()
    }

    /// Executes steps 2 to 5 of adding a device.
    fn add_device(&mut self, id: &str, device: &DeviceConfig) -> Result<PciDeviceInfo, VmError> {
        if let DeviceConfig::Volume(config) = device
            && let Some(attached) = self.pm.attached(&config.key())
        {
            // The volume has been removed from the configuration, but the guest still has it.
            self.hotplug.metrics.count(device.kind(), "add", "error");
            return Err(VmError::DeviceLeaving {
                reason: format!("{}: the volume is attached", config.flag()),
                leaving: attached.device_id().unwrap_or_default(),
            });
        }
        if self.devices.iter().any(|attached| attached.id == id) {
            // The guest was requested to eject the device with this ID, but has not ejected it yet.
            return Err(VmError::IdTaken { id: id.to_owned() });
        }
        let kind = device.kind();
        let leaving = self.leaving(kind);
        if matches!(device, DeviceConfig::Vsock(_)) && !leaving.is_empty() {
            // The other device has been removed from the configuration, but the guest still has it.
            self.hotplug.metrics.count(kind, "add", "error");
            return Err(VmError::DeviceLeaving {
                reason: "a VM has one vsock device".to_owned(),
                leaving,
            });
        }
        self.hotplug.leaving.wait_for(kind, END_LIMIT);
        let slot = self.attach(device).map_err(|err| {
            self.hotplug.metrics.count(kind, "add", "error");
            self.refusal_reason(kind, &err)
        })?;
        self.hotplug.metrics.count(kind, "add", "ok");
        self.hotplug.page.slots(|slots| slots.put(slot));
        self.notify_slots(slot);
        let bdf = bdf(slot);
        info!(id, bdf, "A {kind} is added");
        self.context.machine.events.emit(Event::DeviceAdded { id, bdf: &bdf });
        Ok(PciDeviceInfo { id: id.to_owned(), bdf })
    }

    /// Executes step 1 of removing a device.
    fn remove_device(&mut self, id: &str) -> Result<(), VmError> {
        let Some(attached) = self.devices.iter_mut().find(|attached| attached.id == id) else {
            return Err(match self.pm.place_of(id) {
                Some(_) => VmError::Failed(format!(
                    "volume {id} is an NVDIMM, which cannot be removed while the VM runs"
                )),
                None => VmError::NoSuchDevice { id: id.to_owned() },
            });
        };
        let Some(kind) = attached.removable else {
            return Err(VmError::Failed(format!("device {id} cannot be removed")));
        };
        if !std::mem::replace(&mut attached.is_leaving, true) {
            self.hotplug.metrics.count(kind, "remove", "requested");
            self.hotplug.metrics.pending.fetch_add(1, Ordering::Relaxed);
        }
        let slot = attached.slot;
        if !attached.is_on_bus() {
            // Step 3 is done, and step 4 will follow soon. The slot may already contain another
            // device.
            return Ok(());
        }
        self.hotplug.page.slots(|slots| slots.request_removal(slot));
        self.notify_slots(slot);
        Ok(())
    }

    /// Executes steps 4 and 5 of removing a device.
    fn ejected(&mut self, slot: u8) {
        // The slot may already contain another device, and its removal may have been requested as
        // well.
        let gone = self.devices.extract_if(.., |attached| {
            attached.slot == slot && attached.is_leaving && !attached.is_on_bus()
        });
        for mut attached in gone.collect::<Vec<_>>() {
            let kind = attached.removable.unwrap_or("device");
            self.hotplug.metrics.count(kind, "remove", "ok");
            self.hotplug.metrics.pending.fetch_sub(1, Ordering::Relaxed);
            attached.eject();
            self.open_files.taps.remove(&attached.id);
            self.open_files.pmem.remove(&attached.id);
            self.forget_volume(&attached.id);
            self.hotplug.leaving.end(kind, attached, self.context.machine.events.clone());
        }
        self.hotplug.metrics.devices.store(self.devices.len() as u64, Ordering::Relaxed);
    }
}

impl KvmMachine {
    /// IDs of devices of a kind that the guest was requested to eject and has not ejected yet.
    /// Empty if there are no such devices.
    fn leaving(&self, kind: &str) -> String {
        let attached = self.devices.iter().filter(|attached| attached.removable == Some(kind));
        let leaving: Vec<_> = attached
            .filter(|attached| attached.is_leaving)
            .map(|attached| attached.id.as_str())
            .collect();
        leaving.join(", ")
    }

    /// Error for an addition that failed. If an interface or file is in use while a device of the
    /// same kind is being removed, the error is `DeviceLeaving`. The resource may become free soon.
    fn refusal_reason(&self, kind: &str, err: &BuildError) -> VmError {
        let (reason, leaving) = (foreshore_types::chain(err), self.leaving(kind));
        match err.is_in_use() && (!leaving.is_empty() || self.hotplug.leaving.has(kind)) {
            true => VmError::DeviceLeaving { reason, leaving },
            false => VmError::Failed(reason),
        }
    }

    /// Executes steps 2 to 4 of adding a device. Returns the device's slot.
    fn attach(&mut self, device: &DeviceConfig) -> Result<u8, BuildError> {
        let had_files = self.context.lost.has_files();
        let attached = self.build_device(device)?;
        let slot = attached.slot;
        if !had_files && self.context.lost.has_files() {
            // File lengths are checked as soon as the first device with a file is added.
            match lost_memory::watch(&self.context.lost, &self.events) {
                Ok(watcher) => self.lost_loop = watcher,
                Err(err) => warn!(
                    %err,
                    id = attached.id,
                    "Cannot watch the device's file: if it is truncated, the guest may hang \
                     instead of being paused. A reboot of the VM starts the watch"
                ),
            }
        }
        self.devices.push(attached);
        self.hotplug.metrics.devices.store(self.devices.len() as u64, Ordering::Relaxed);
        Ok(slot)
    }

    /// Builds a device. If it succeeds, the device's interface or file stays open for the next
    /// boot.
    fn build_device(&mut self, device: &DeviceConfig) -> Result<AttachedDevice, BuildError> {
        match device {
            DeviceConfig::Disk(config) => devices::build_disk(config, &self.context),
            DeviceConfig::Net(config) => {
                let tap = taps::open(config)?;
                let attached =
                    devices::build_net(config, &tap, &self.open_files.vhost, &self.context)?;
                self.open_files.taps.add(config, tap);
                Ok(attached)
            }
            DeviceConfig::Pmem(config) => {
                let file = resources::open_file(config)?;
                let attached = build_file(config, &file, &mut self.memory, &self.context)
                    .map_err(BuildError::device(config.flag()))?;
                self.open_files.pmem.add(config, file);
                Ok(attached)
            }
            DeviceConfig::Volume(config) => self.add_volume(config),
            DeviceConfig::Vsock(config) => {
                devices::build_vsock(config, &self.agents, &self.context)
            }
        }
    }

    /// Notifies the guest of a change in `slot`. The guest then reads the changes of all slots.
    fn notify_slots(&self, slot: u8) {
        if let Err(err) = self.hotplug.ged.notify(ged::Event::Pci) {
            warn!(
                %err,
                bdf = bdf(slot),
                "Cannot notify the guest of a change to the PCI slot; the next hotplug request \
                 retries this"
            );
        }
    }
}

pub(in crate::vm) fn metrics(devices: &[AttachedDevice]) -> Arc<HotplugMetrics> {
    let metrics = HotplugMetrics::default();
    metrics.devices.store(devices.len() as u64, Ordering::Relaxed);
    Arc::new(metrics)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use foreshore_devices::device::testing::FakeMachine;
    use foreshore_devices::disk::image::{ImageOptions, RawImage};
    use foreshore_devices::memory::layout::ECAM_START;
    use foreshore_devices::virtio::block::BlockHandle;
    use foreshore_devices::virtio::transport::pci::layout::{MSIX_TABLE_OFFSET, NOTIFY_OFFSET};
    use tempfile::TempDir;
    use virtio_bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
    use virtio_queue::desc::RawDescriptor;
    use virtio_queue::desc::split::Descriptor;
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::acpi::hotplug::{PCI_DOWN, PCI_UP};
    use crate::config::{DiskConfig, PmemConfig, VsockConfig};
    use crate::vm::machine::tests::{machine, machine_on};
    use crate::vm::machine::zone_metrics::ZoneMetrics;

    const FILE_LEN: u64 = 4 << 20;

    struct Rig {
        folder: TempDir,
        fake: FakeMachine,
        machine: KvmMachine,
    }

    /// Everything that all devices occupy: entries on buses and in KVM, threads, files and metrics.
    #[derive(Clone, Debug, PartialEq)]
    struct Footprint {
        devices: usize,
        pci_slots: usize,
        port_ranges: usize,
        mmio_ranges: usize,
        io_events: usize,
        irqfds: usize,
        routes: usize,
        threads: usize,
        memory_slots: usize,
        file_bytes: u64,
        watched: usize,
        retained_files: usize,
        metrics: String,
    }

    /// ID and configuration of a device, and a check that its file is no longer in use.
    type Sample = (&'static str, DeviceConfig, Box<dyn Fn() -> bool>);

    impl Rig {
        fn new() -> Self {
            let fake = FakeMachine::default();
            Self { folder: TempDir::new().unwrap(), machine: machine_on(&fake), fake }
        }

        fn footprint(&self) -> Footprint {
            let KvmMachine { devices, context, memory, .. } = &self.machine;
            Footprint {
                devices: devices.len(),
                pci_slots: context.pci.used(),
                port_ranges: context.ports.count(),
                mmio_ranges: context.mmio.count(),
                io_events: self.fake.io_events.registered.lock().len(),
                irqfds: self.fake.interrupts.irqfds(),
                routes: context.router.used(),
                threads: context.work.count(),
                memory_slots: memory.slots().used(),
                file_bytes: memory.file_bytes().load(Ordering::Relaxed),
                watched: context.lost.ranges().len(),
                retained_files: self.machine.open_files.pmem.list().len()
                    + self.machine.open_files.taps.list().len(),
                metrics: self.fake.metrics.encode(&ZoneMetrics::default()).unwrap(),
            }
        }

        /// Devices of every kind that does not need a host network interface.
        fn kinds(&self) -> [Sample; 3] {
            let path = |name: &str| self.folder.path().join(name);
            File::create(path("pmem")).unwrap().set_len(FILE_LEN).unwrap();
            let text = format!("file={},id=pmem", path("pmem").display());
            let pmem = PmemConfig::parse(&text).unwrap();
            let text = format!("cid=3,socket={},id=vsock", path("vsock").display());
            let vsock = DeviceConfig::Vsock(VsockConfig::parse(&text).unwrap());
            let (disk, image, socket) = (self.disk("disk"), path("disk"), path("vsock"));
            let opens = move || RawImage::open(&image, ImageOptions::default()).is_ok();
            let (file, pmem) = (pmem.clone(), DeviceConfig::Pmem(pmem));
            [
                ("disk", disk, Box::new(opens)),
                ("pmem", pmem, Box::new(move || resources::open_file(&file).is_ok())),
                ("vsock", vsock, Box::new(move || !socket.exists())),
            ]
        }

        fn disk(&self, name: &str) -> DeviceConfig {
            let path = self.folder.path().join(name);
            File::create(&path).unwrap().set_len(1 << 20).unwrap();
            DeviceConfig::Disk(
                DiskConfig::parse(&format!("path={},id={name}", path.display())).unwrap(),
            )
        }

        fn add(&mut self, name: &str) -> Result<PciDeviceInfo, VmError> {
            let disk = self.disk(name);
            self.machine.add_device(name, &disk)
        }

        /// Expected footprint after device `id` from [`Self::kinds`] was added, before the guest
        /// uses it.
        fn expected(&self, id: &str, before: &Footprint) -> Footprint {
            let files = usize::from(id == "pmem");
            let family = format!("foreshore_{id}_");
            let metrics = self.footprint().metrics;
            assert!(!before.metrics.contains(&family) && metrics.contains(&family), "{metrics}");
            Footprint {
                devices: before.devices + 1,
                pci_slots: before.pci_slots + 1,
                // The vsock device has no thread of its own.
                threads: before.threads + 1,
                memory_slots: before.memory_slots + files,
                file_bytes: before.file_bytes + files as u64 * FILE_LEN,
                watched: before.watched + files,
                retained_files: before.retained_files + files,
                metrics,
                ..before.clone()
            }
        }

        /// Acts as the guest's driver for the virtio-pmem device in slot 1, until a flush has
        /// raised an interrupt.
        fn flush_pmem(&self) {
            let (mmio, memory) = (&self.machine.context.mmio, self.machine.memory.boot());
            let config = ECAM_START + (1 << 15);
            let read_config = |register: u64| {
                let mut value = [0; 4];
                assert!(mmio.read(config + register, &mut value));
                u32::from_le_bytes(value)
            };
            assert!(mmio.write(config + 4, &6u16.to_le_bytes()));
            let bar = u64::from(read_config(0x10) & !0xf);
            let write = |offset: u64, data: &[u8]| assert!(mmio.write(bar + offset, data));
            for status in [1u8, 3] {
                write(0x14, &[status]);
            }
            // Accept the feature VIRTIO_F_VERSION_1.
            write(0x08, &1u32.to_le_bytes());
            write(0x0c, &1u32.to_le_bytes());
            write(0x14, &[11]);
            // Set the message of vector 1, and enable MSI-X.
            write(u64::from(MSIX_TABLE_OFFSET) + 16, &0xfee0_0000u64.to_le_bytes());
            write(u64::from(MSIX_TABLE_OFFSET) + 24, &[0x41, 0, 0, 0, 0, 0, 0, 0]);
            let mut capability = u64::from(read_config(0x34) & 0xff);
            while read_config(capability) & 0xff != 0x11 {
                capability = u64::from(read_config(capability) >> 8 & 0xff);
                assert_ne!(capability, 0, "the device has MSI-X");
            }
            assert!(mmio.write(config + capability + 2, &0x8000u16.to_le_bytes()));
            write(0x1a, &1u16.to_le_bytes());
            write(0x18, &16u16.to_le_bytes());
            for (register, at) in [(0x20, 0x1000u64), (0x28, 0x2000), (0x30, 0x3000)] {
                write(register, &at.to_le_bytes());
            }
            // A flush request: one word that the device reads, and one that it writes.
            let chain = [
                RawDescriptor::from(Descriptor::new(0x4000, 4, VRING_DESC_F_NEXT as u16, 1)),
                RawDescriptor::from(Descriptor::new(0x4004, 4, VRING_DESC_F_WRITE as u16, 0)),
            ];
            for (nth, descriptor) in chain.into_iter().enumerate() {
                memory.write_obj(descriptor, GuestAddress(0x1000 + 16 * nth as u64)).unwrap();
            }
            // Available ring with flags 0, index 1, and the head of the chain.
            memory.write_obj([0u16, 1, 0], GuestAddress(0x2000)).unwrap();
            memory.write_obj([0u64; 2], GuestAddress(0x3000)).unwrap();
            write(0x1c, &1u16.to_le_bytes());
            write(0x14, &[15]);
            let notify = bar + u64::from(NOTIFY_OFFSET);
            self.fake.io_events.registered.lock()[&notify].write(1).unwrap();
            while self.footprint().irqfds == 0 {
                std::thread::yield_now();
            }
        }

        /// Ejects the device in a slot as a guest would.
        fn eject(&mut self, slot: u8) {
            drop(self.machine.context.pci.remove(slot));
            self.machine.ejected(slot);
        }

        fn register(&self, offset: u64) -> u32 {
            self.machine.hotplug.page.slots(|slots| slots.read(offset))
        }

        fn disks(&self) -> Vec<&str> {
            self.machine.devices.handles().map(BlockHandle::id).collect()
        }

        /// Number of devices on the bus, of disks, and of pending removals.
        fn counts(&self) -> (usize, usize, u64) {
            let pending = self.machine.hotplug.metrics.pending.load(Ordering::Relaxed);
            (self.machine.context.pci.used() - 1, self.disks().len(), pending)
        }
    }

    #[test]
    fn removed_disk_remains_until_ejection() {
        let mut rig = Rig::new();
        let added = rig.add("a").unwrap();
        assert_eq!(added, PciDeviceInfo { id: "a".to_owned(), bdf: "0000:00:01.0".to_owned() });
        assert_eq!((rig.register(PCI_UP), rig.counts()), (1 << 1, (1, 1, 0)));
        assert!(matches!(rig.machine.remove_device("b"), Err(VmError::NoSuchDevice { .. })));
        for _ in 0..2 {
            rig.machine.remove_device("a").unwrap();
            assert_eq!((rig.register(PCI_DOWN), rig.counts()), (1 << 1, (1, 1, 1)));
        }
        // The ID and the file of the device are in use until its ejection.
        assert!(matches!(rig.add("a"), Err(VmError::IdTaken { .. })));
        rig.eject(1);
        assert_eq!(rig.counts(), (0, 0, 0));
        rig.machine.hotplug.leaving.wait();
        rig.add("a").unwrap();
    }

    #[test]
    fn second_vsock_device_is_refused_until_first_is_ejected() {
        let mut rig = Rig::new();
        let vsock = |name: &str| {
            let socket = rig.folder.path().join(name);
            let config =
                VsockConfig::parse(&format!("cid=3,socket={},id={name}", socket.display()))
                    .unwrap();
            DeviceConfig::Vsock(config)
        };
        let (first, second) = (vsock("first"), vsock("second"));
        rig.machine.add_device("first", &first).unwrap();
        rig.machine.remove_device("first").unwrap();
        let error = rig.machine.add_device("second", &second).unwrap_err();
        let is_named =
            matches!(&error, VmError::DeviceLeaving { leaving, .. } if leaving == "first");
        assert!(is_named && error.to_string().starts_with("a VM has one vsock device;"), "{error}");
        assert_eq!(rig.machine.context.pci.used() - 1, 1, "the guest has not seen it");
        rig.eject(1);
        rig.machine.add_device("second", &second).unwrap();
        let metrics = rig.machine.context.machine.metrics.encode(&ZoneMetrics::default()).unwrap();
        assert!(metrics.contains("foreshore_vsock_"), "{metrics}");
    }

    #[test]
    fn late_ejection_leaves_the_next_device_in_the_slot() {
        let mut rig = Rig::new();
        rig.add("a").unwrap();
        rig.machine.remove_device("a").unwrap();
        // The slot is empty, but the VM task has not been notified yet.
        drop(rig.machine.context.pci.remove(1));
        assert_eq!(rig.add("b").unwrap().bdf, "0000:00:01.0");
        // A repeated request to remove `a` does not affect `b`, which is now in the slot.
        rig.machine.remove_device("a").unwrap();
        assert_eq!((rig.register(PCI_DOWN), rig.counts()), (0, (1, 2, 1)));
        assert!(!rig.machine.hotplug.page.slots(|slots| slots.is_leaving(1)));
        // The removal of `b` is requested too, but the guest has not ejected it.
        rig.machine.remove_device("b").unwrap();
        rig.machine.ejected(1);
        rig.machine.ejected(1);
        assert_eq!(rig.disks(), ["b"]);
        assert_eq!(rig.counts(), (1, 1, 1));
        rig.eject(1);
        assert_eq!(rig.counts(), (0, 0, 0));
    }

    #[test]
    fn file_of_an_ejected_device_is_free_at_once_and_a_file_in_use_names_its_device() {
        let mut rig = Rig::new();
        let image = rig.disk("image");
        let mut other_id = image.clone();
        let DeviceConfig::Disk(disk) = &mut other_id else { unreachable!("a disk") };
        disk.id = Some("other".to_owned());
        for _ in 0..5 {
            rig.machine.add_device("image", &image).unwrap();
            // No removal is pending, so the file will not become free soon.
            assert!(matches!(rig.machine.add_device("other", &other_id), Err(VmError::Failed(_))));
            rig.machine.remove_device("image").unwrap();
            let error = rig.machine.add_device("other", &other_id).unwrap_err();
            let is_named =
                matches!(&error, VmError::DeviceLeaving { leaving, .. } if leaving == "image");
            assert!(is_named && error.to_string().contains("is in use"), "{error}");
            rig.eject(1);
            rig.machine.add_device("other", &other_id).unwrap();
            rig.machine.remove_device("other").unwrap();
            // While a removal is pending, an addition that fails for another reason reports that
            // reason.
            let missing = DeviceConfig::Disk(DiskConfig::parse("path=/nowhere/disk,id=a").unwrap());
            assert!(matches!(rig.machine.add_device("a", &missing), Err(VmError::Failed(_))));
            rig.eject(1);
        }
    }

    #[test]
    fn device_that_cannot_be_added_leaves_nothing() {
        let mut rig = Rig::new();
        let disk = DeviceConfig::Disk(DiskConfig::parse("path=/nowhere/disk,id=a").unwrap());
        assert!(matches!(rig.machine.add_device("a", &disk), Err(VmError::Failed(_))));
        for nth in 0..31 {
            rig.add(&format!("disk{nth}")).unwrap();
        }
        let before = rig.machine.context.work.count();
        let error = rig.add("one-more").unwrap_err().to_string();
        assert!(error.contains("31 slots"), "{error}");
        assert_eq!((rig.counts(), rig.machine.context.work.count()), ((31, 31, 0), before));
        rig.machine.remove_device("disk7").unwrap();
        rig.eject(8);
        assert_eq!(rig.machine.context.work.count(), before - 1);
        // The file and the slot of the failed device are free.
        assert_eq!(rig.add("one-more").unwrap().bdf, "0000:00:08.0");
    }

    #[test]
    fn device_that_is_refused_at_any_step_leaves_nothing() {
        let mut rig = Rig::new();
        let before = rig.footprint();
        let kinds = rig.kinds();
        // The file is missing, or a directory exists at the path of the socket.
        rig.folder = TempDir::new().unwrap();
        for (id, device, _) in &kinds {
            assert!(rig.machine.add_device(id, device).is_err(), "{id}");
            assert_eq!(rig.footprint(), before, "{id}");
        }
        let kinds = rig.kinds();
        // KVM refuses a memory slot.
        *rig.fake.slots.calls_left.lock() = Some(0);
        assert!(rig.machine.add_device("pmem", &kinds[1].1).is_err());
        *rig.fake.slots.calls_left.lock() = None;
        assert!(rig.footprint() == before && kinds[1].2());
        // The PCI bus is full.
        for nth in 0..31 {
            rig.add(&format!("disk{nth}")).unwrap();
        }
        let before = rig.footprint();
        for (id, device, is_free) in &kinds {
            let error = rig.machine.add_device(id, device).unwrap_err().to_string();
            assert!(error.contains("31 slots"), "{error}");
            assert!(is_free(), "{id}");
            assert_eq!(rig.footprint(), before, "{id}");
        }
    }

    #[test]
    fn removed_device_leaves_nothing() {
        let mut rig = Rig::new();
        let before = rig.footprint();
        for (id, device, is_free) in rig.kinds().iter().cycle().take(30) {
            rig.machine.add_device(id, device).unwrap();
            assert_eq!(rig.footprint(), rig.expected(id, &before));
            assert!(!is_free(), "{id}");
            assert_eq!(rig.machine.devices[0].removable, Some(device.kind()));
            if *id == "pmem" {
                rig.flush_pmem();
                let Footprint { mmio_ranges, io_events, irqfds, routes, .. } = rig.footprint();
                let of_bar = (mmio_ranges - before.mmio_ranges, io_events, irqfds, routes);
                assert_eq!(of_bar, (1, 1, 1, 1));
            }
            rig.machine.remove_device(id).unwrap();
            rig.eject(1);
            rig.machine.hotplug.leaving.wait();
            assert!(is_free(), "{id}");
            assert_eq!(rig.footprint(), before, "{id}");
        }
    }

    #[test]
    fn ejected_device_releases_its_mapping_before_it_stops() {
        let mut rig = Rig::new();
        let (before, kinds) = (rig.footprint(), rig.kinds());
        let (id, device, _) = &kinds[1];
        rig.machine.add_device(id, device).unwrap();
        rig.flush_pmem();
        let mut ejected = rig.machine.devices.pop().unwrap();
        ejected.eject();
        let footprint = rig.footprint();
        // The guest has not reset the device. A new interrupt therefore shows that the device has
        // not stopped.
        assert_eq!(
            (footprint.watched, footprint.memory_slots),
            (before.watched, before.memory_slots)
        );
        assert_eq!(footprint.irqfds, 1);
        drop(ejected);
        assert_eq!(rig.footprint().irqfds, 0);
    }

    #[test]
    fn ended_machine_leaves_only_the_files_of_the_vm() {
        let mut rig = Rig::new();
        let metrics = rig.footprint().metrics;
        let kinds = rig.kinds();
        for (id, device, _) in &kinds {
            rig.machine.add_device(id, device).unwrap();
        }
        let files = rig.machine.open_files.pmem.clone();
        assert!(rig.fake.slots.covers(4 << 30));
        rig.machine = machine();
        assert!(!rig.fake.slots.covers(4 << 30));
        assert_eq!(rig.fake.metrics.encode(&ZoneMetrics::default()).unwrap(), metrics);
        assert_eq!(kinds.map(|(_, _, is_free)| is_free()), [true, false, true]);
        assert_eq!(files.list().len(), 1, "the next machine has the file");
    }

    #[test]
    fn end_of_a_machine_waits_for_removed_devices() {
        let mut rig = Rig::new();
        let disk = rig.disk("a");
        for _ in 0..20 {
            rig.machine.add_device("a", &disk).unwrap();
            rig.machine.remove_device("a").unwrap();
            rig.eject(1);
            rig.machine = machine();
        }
    }
}
