//! Requests to the task that owns the VM, and the answers.
//!
//! The API, signal handlers and metrics use a [`VmHandle`]. Only the VM task at the other end
//! accesses the VM.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::SystemTime;

use foreshore_devices::device::DeviceCounters;
use foreshore_devices::volume::kernel_gate::{GuestKernel, Verdict};

use balloon::DriverState;
pub use balloon::controller::ResizeStatus;
use balloon::proto::descriptor_bytes;
use foreshore_config::size::check_pages;
use foreshore_config::{ConfigError, JsonError, JsonValue, Walk, section};
use foreshore_types::size::Size;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use thiserror::Error;
use tokio::sync::{mpsc, oneshot, watch};

use crate::config::{DeviceConfig, VmConfig};
use crate::governor::GovernorError;
use crate::governor::info::{PressureChange, PressureInfo};

/// Counters of each device, by the device's ID.
pub type Counters = BTreeMap<String, DeviceCounters>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum VmState {
    /// Configured, but without a machine: not booted yet, or shut down.
    Created,
    Running,
    /// The vCPUs are stopped until the VM is resumed.
    Paused,
}

impl VmState {
    pub const ALL: [Self; 3] = [Self::Created, Self::Running, Self::Paused];

    /// Description for messages. A VM that was shut down is in the state `Created`, too.
    pub fn description(self) -> &'static str {
        match self {
            Self::Created => "not booted",
            Self::Running => "running",
            Self::Paused => "paused",
        }
    }
}

/// State of a VM for its metrics.
#[derive(Clone, Copy, Debug)]
pub struct VmStatus {
    pub state: VmState,
    /// Time of the last boot or reboot. `None` while the VM has no machine.
    pub started: Option<SystemTime>,
}

/// State of the VM before the work in progress, for answers while the VM task is busy.
#[derive(Clone, Debug)]
pub struct BusyVm {
    pub info: VmInfo,
    pub status: VmStatus,
}

/// `vm.info`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct VmInfo {
    /// Configuration that the next boot uses. The configuration includes changes by `vm.pressure`,
    /// added and removed devices, and resizes of vCPUs, DRAM and the balloon.
    pub config: VmConfig,
    pub state: VmState,
    /// Boot memory and plugged DRAM and PM, without the memory in the balloon, in bytes.
    pub memory_actual_size: u64,
    /// Reason why the VMM has paused the VM: a full pool, or a failure that cannot be reported to
    /// the guest. After a failure, the VM cannot be resumed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_reason: Option<String>,
    /// State of the balloon, if the VM has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balloon: Option<BalloonInfo>,
    /// Kernel of the guest, according to its agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_kernel: Option<GuestKernel>,
    /// Devices of the machine, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_tree: Option<DeviceTree>,
}

/// `vm.info`: devices by their IDs. As in Cloud Hypervisor, each device has two nodes: the device
/// itself, and its PCI function as the parent.
pub type DeviceTree = BTreeMap<String, DeviceNode>;

/// `vm.info`: node in the device tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceNode {
    pub id: String,
    /// Always empty, because Foreshore does not list resources. Clients expect the field to exist.
    pub resources: Vec<String>,
    pub parent: Option<String>,
    pub children: Vec<String>,
    /// Address on the PCI bus.
    pub pci_bdf: Option<String>,
}

/// Builds the device tree from the list of devices.
pub fn device_tree(devices: Vec<PciDeviceInfo>) -> DeviceTree {
    let nodes = devices.into_iter().flat_map(|PciDeviceInfo { id, bdf }| {
        let function = format!("_virtio-pci-{id}");
        let (resources, children) = (Vec::new(), Vec::new());
        let device = DeviceNode {
            id: id.clone(),
            resources,
            parent: Some(function.clone()),
            children,
            pci_bdf: None,
        };
        let (resources, children) = (Vec::new(), vec![id.clone()]);
        let above = DeviceNode {
            id: function.clone(),
            resources,
            parent: None,
            children,
            pci_bdf: Some(bdf),
        };
        [(id, device), (function, above)]
    });
    nodes.collect()
}

/// `vm.info`: state of the balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonInfo {
    /// Balloon size requested from the guest.
    pub target_bytes: u64,
    /// Balloon size reported by the guest driver.
    pub actual_bytes: u64,
    pub max_bytes: u64,
    pub driver_ready: bool,
}

section! {
    /// `vm.resize`: fields that are `None` are not changed.
    pub struct ResizeRequest: "vm.resize" {
        desired_vcpus: Option<u8> => "vCPUs",
        desired_ram (with read_ram): Option<u64> => "DRAM in bytes, boot part included",
        desired_balloon: Option<u64> => "Balloon in bytes",
    }
    defaults true;
}

fn read_ram(json: Value, walk: &mut Walk) -> Result<Option<u64>, JsonError> {
    let bytes = u64::from_json(json, walk)?;
    check_pages(ResizeRequest::FLAG, "desired_ram", bytes)?;
    Ok(Some(bytes))
}

/// Refuses a number of vCPUs that the VM does not support.
pub(in crate::vm) fn check_vcpus(desired: u8, config: &VmConfig) -> Result<(), VmError> {
    let most = config.cpus.max_vcpus;
    if (1..=most).contains(&desired) {
        return Ok(());
    }
    let (flag, key) = (ResizeRequest::FLAG, "desired_vcpus");
    let (value, most) = (desired.into(), most.into());
    Err(ConfigError::OutOfRange { flag, key, value, least: 1, most }.into())
}

/// Text of the request in errors. The text mentions neither API fields nor flags, because clients
/// use both.
impl fmt::Display for ResizeRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { desired_vcpus, desired_ram, desired_balloon } = *self;
        let wishes = [
            desired_vcpus.map(|vcpus| format!("vCPUs {vcpus}")),
            desired_ram.map(|bytes| format!("memory {}", Size(bytes))),
            desired_balloon.map(|bytes| format!("balloon {}", Size(bytes))),
        ];
        f.write_str(&wishes.into_iter().flatten().collect::<Vec<_>>().join(", "))
    }
}

/// Size of a zone's hotplugged part as a configuration stores it, or `None` for a zone without a
/// hotplugged part.
pub(in crate::vm) fn hotplugged(size_bytes: u64, boot_bytes: u64) -> Option<u64> {
    size_bytes.checked_sub(boot_bytes).filter(|bytes| *bytes > 0)
}

/// Sets the size of DRAM, including boot memory, in the configuration of a VM that is not running.
/// As in Cloud Hypervisor, this changes the size of boot memory. However, if an earlier resize of
/// the running VM has hotplugged a part, the size of that part changes within its bounds.
/// Otherwise, the next boot would use both sizes.
fn set_size(
    boot_bytes: &mut u64,
    hotplug: Option<u64>,
    hotplugged_size: &mut Option<u64>,
    size_bytes: u64,
) {
    let most = boot_bytes.saturating_add(hotplug.unwrap_or(0));
    let has_part = hotplugged_size.is_some_and(|bytes| bytes > 0);
    if has_part && (*boot_bytes..=most).contains(&size_bytes) {
        *hotplugged_size = hotplugged(size_bytes, *boot_bytes);
    } else {
        *boot_bytes = size_bytes;
        *hotplugged_size = None;
    }
}

impl ResizeRequest {
    /// Applies the change to the configuration of a VM that is not running. It takes effect at the
    /// next boot.
    pub fn apply(&self, config: &mut VmConfig) -> Result<(), VmError> {
        if let Some(vcpus) = self.desired_vcpus {
            check_vcpus(vcpus, config)?;
            config.cpus.boot_vcpus = vcpus;
        }
        if let Some(size_bytes) = self.desired_ram {
            let memory = &mut config.memory;
            set_size(
                &mut memory.size,
                memory.hotplug_size,
                &mut memory.hotplugged_size,
                size_bytes,
            );
        }
        match (self.desired_balloon, &mut config.balloon) {
            (None, _) | (Some(0), None) => {}
            (Some(size_bytes), Some(balloon)) => balloon.size = size_bytes,
            (Some(size_bytes), None) => {
                let reason = format!("balloon {}: the VM has no balloon", Size(size_bytes));
                return Err(VmError::BadRequest(reason));
            }
        }
        Ok(())
    }
}

section! {
    /// `vm.resize-zone`.
    pub struct ResizeZoneRequest: "vm.resize-zone" {
        id: String => "Zone",
        desired_ram (with read_zone_ram): u64 => "Size in bytes, boot part included",
    }
}

/// Reads the size of a zone from JSON. It may be 0, because a PM zone has no boot part.
fn read_zone_ram(json: Value, walk: &mut Walk) -> Result<u64, JsonError> {
    let bytes = u64::from_json(json, walk)?;
    if bytes != 0 {
        check_pages(ResizeZoneRequest::FLAG, "desired_ram", bytes)?;
    }
    Ok(bytes)
}

impl fmt::Display for ResizeZoneRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "zone {}, size {}", self.id, Size(self.desired_ram))
    }
}

impl ResizeZoneRequest {
    /// Applies the change to the configuration of a VM that is not running. PM zones are refused,
    /// because they are empty at boot.
    pub fn apply(&self, config: &mut VmConfig) -> Result<(), VmError> {
        let zones = &mut config.memory.zones;
        match zones.iter_mut().find(|zone| zone.id == self.id) {
            Some(zone) => {
                set_size(
                    &mut zone.size,
                    zone.hotplug_size,
                    &mut zone.hotplugged_size,
                    self.desired_ram,
                );
            }
            None => {
                let known = zones.iter().map(|zone| &*zone.id).collect::<Vec<_>>().join(", ");
                return Err(VmError::BadRequest(format!(
                    "The VM, which does not run, has no zone {:?} of DRAM; its zones: {known}",
                    self.id
                )));
            }
        }
        Ok(())
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resize {
    /// `vm.resize`.
    Vm(ResizeRequest),
    /// `vm.resize-zone`.
    Zone(ResizeZoneRequest),
}

impl fmt::Display for Resize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vm(request) => request.fmt(f),
            Self::Zone(request) => request.fmt(f),
        }
    }
}

impl Resize {
    pub(in crate::vm) fn call(&self) -> &'static str {
        match self {
            Self::Vm(_) => "vm.resize",
            Self::Zone(_) => "vm.resize-zone",
        }
    }

    /// Applies the change to the configuration of a VM that is not running.
    pub fn apply(&self, config: &mut VmConfig) -> Result<(), VmError> {
        match self {
            Self::Vm(request) => request.apply(config),
            Self::Zone(request) => request.apply(config),
        }
    }
}

section! {
    /// `vm.resize-disk`.
    pub struct ResizeDiskRequest: "vm.resize-disk" {
        id: String => "Disk",
        desired_size: u64 => "Size in bytes",
    }
}

section! {
    /// `pool.grow`.
    pub struct GrowPoolRequest: "pool.grow" {
        path: PathBuf => "Pool",
        size: Option<u64> => "Size in bytes; by default, the size of the device",
        force: bool = false => "Erases data that the device has after the pool",
    }
}

/// `vm.memory`: sizes of a zone in bytes, and the progress of its last resize.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ZoneInfo {
    /// `dram`, `pm`, or the ID from the zone's flag.
    pub id: String,
    pub tier: String,
    pub guest_numa_node: u32,
    pub boot_bytes: u64,
    /// Maximum plugged size.
    pub hotplug_bytes: u64,
    /// Plugged size requested from the guest.
    pub requested_bytes: u64,
    /// Part of the last requested size that is on hold until the guest has enough DRAM for its page
    /// descriptors.
    pub held_bytes: u64,
    /// Memory that the guest has plugged.
    pub plugged_bytes: u64,
    /// Minimum amount of guest DRAM for the page descriptors of the plugged memory. Linux allocates
    /// page descriptors for whole memory blocks, so a block that is partly plugged needs more.
    pub descriptor_bytes: u64,
    /// Guest DRAM that would be needed for page descriptors of the memory that is not plugged.
    pub saved_descriptor_bytes: u64,
    /// Plugged PM above the floor and outside pinned zones, whatever the policy.
    pub recallable_bytes: u64,
    /// Plugged PM that was moved from the pool to DRAM or the spill file.
    pub spilled_bytes: u64,
    /// Part of `spilled_bytes` in the spill file.
    pub spilled_file_bytes: u64,
    /// Failed moves to the spill file.
    pub spill_file_failures: u64,
    /// Online memory according to the agent; `None` without an agent.
    pub online_bytes: Option<u64>,
    /// Host memory that backs the zone.
    pub resident_bytes: u64,
    /// State of the guest's virtio-mem driver: `absent`, `ready` or `unsupported`. `None` if the
    /// zone has no virtio-mem device.
    pub driver: Option<DriverState>,
    /// Progress of the last resize: `reached`, `pending`, `no-driver`, or `stuck` with a reason.
    pub status: ResizeStatus,
}

/// `vm.volumes`: state of one volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeInfo {
    pub pool: String,
    pub name: String,
    /// Size of the volume as the guest sees it.
    pub size_bytes: u64,
    /// Guaranteed bytes in the pool. Smaller than the size only if the volume is thin.
    pub reserve_bytes: u64,
    /// Bytes of the pool that the volume occupies. `None` after the device has ended.
    pub allocated_bytes: Option<u64>,
    /// Bytes of a thin volume that were written and not discarded since. `None` for others.
    pub live_bytes: Option<u64>,
    /// Interface between the volume and the guest: `nvdimm`, `virtio-pmem` or `virtio-blk`.
    pub interface: String,
    /// Reason why `interface=auto` has not mapped a thin volume. `None` if it is mapped, or if
    /// another reason decided.
    pub unmapped_reason: Option<String>,
    /// True if the guest may only read the volume.
    pub readonly: bool,
    /// Durability class: `dax-sync`, `page-cache` or `volatile`.
    pub durability: String,
    /// Number of extents in the pool.
    pub extents: usize,
    /// Verdict on the BTT driver in the guest. `None` until an agent has reported the kernel. Also
    /// `None` if the VMM translates the sectors itself.
    pub guest_btt: Option<Verdict>,
    pub status: VolumeStatus,
}

/// Durability of the guest's flushes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "state", content = "reason")]
pub enum VolumeStatus {
    Ok,
    /// A flush or another write to the pool has failed, so flushes are no longer durable.
    Failed(String),
}

/// `pool.info`: state of one open pool. Its fields have the same names as in `pmvol info --json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolInfo {
    pub path: String,
    /// Identity of the pool, which does not change when the pool is moved.
    pub uuid: String,
    /// Durability class: `dax-sync`, `page-cache` or `volatile`.
    pub durability: String,
    /// Size of the pool, the sum of the next six fields.
    pub total_bytes: u64,
    pub free_bytes: u64,
    pub memory_bytes: u64,
    pub volume_bytes: u64,
    /// Bytes that have yet to be erased.
    pub scrubbing_bytes: u64,
    /// Bytes on bad media, which are no longer used.
    pub retired_bytes: u64,
    /// Bytes used for the pool's metadata.
    pub metadata_bytes: u64,
    /// Bytes reserved for volumes, whether used or not.
    pub reserve_bytes: u64,
    /// Bytes that are not available to memory: `volume_bytes`, and the free part of the reserve.
    pub reserved_bytes: u64,
    /// Guaranteed bytes of all volumes, or their allocated bytes where these are more.
    pub promised_bytes: u64,
    /// Sum of the sizes of all volumes.
    pub provisioned_bytes: u64,
    /// Bytes that could be lent as memory now, whether erased or not.
    pub lendable_bytes: u64,
    /// Part of the promised bytes that memory may borrow while no volume uses them.
    pub borrowable_bytes: u64,
    /// Number of volumes in the pool, including volumes of other VMs.
    pub volumes: u32,
    pub status: PoolStatus,
}

/// Write access to the pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "state", content = "reason")]
pub enum PoolStatus {
    Ok,
    /// After the first failed write, the pool refuses writes until it is opened again. Contains the
    /// reason for the failure.
    ReadOnly(String),
}

/// PCI address of an added device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PciDeviceInfo {
    pub id: String,
    /// Segment, bus, device and function in the format of `lspci -D`.
    pub bdf: String,
}

/// Error in answer to a request. One function in the API maps each error to a status code.
#[derive(Debug, Error)]
pub enum VmError {
    /// The request is not permitted in this state.
    #[error("{call} needs a VM that is {needs}, but the VM is {}; {remedy}", state.description())]
    WrongState {
        call: &'static str,
        state: VmState,
        /// Description of the states that permit the request.
        needs: &'static str,
        /// Call that changes the state.
        remedy: &'static str,
    },
    /// Another call has ended a pause before all vCPUs and devices had stopped.
    #[error(
        "another call ended vm.pause before the vCPUs had stopped, and the VM is {}; repeat vm.pause if necessary",
        state.description()
    )]
    PauseEnded { state: VmState },
    #[error("no such disk: {id:?}; existing disks: {known}")]
    NoSuchDisk {
        id: String,
        /// IDs of the VM's disks.
        known: String,
    },
    #[error("no such pool: {path}; open pools: {known}")]
    NoSuchPool {
        path: PathBuf,
        /// Paths of the VM's pools.
        known: String,
    },
    #[error("no such device: {id:?}; vm.info lists the devices")]
    NoSuchDevice { id: String },
    /// The ID is already in use, possibly by a device that the guest has not released yet.
    #[error("the id {id} is already in use; choose another id")]
    IdTaken { id: String },
    /// An earlier removal of vCPUs is pending. Until it is done, the number of vCPUs cannot be
    /// changed in another way.
    #[error("the guest has not released these vCPUs yet: {leaving}; retry later, or reboot the VM")]
    VcpusLeaving { leaving: String },
    /// A resource of the device is in use, possibly by a device that is being removed.
    #[error(
        "{reason}; a device that is being removed may use it until the guest releases it: {}; retry \
         later",
        if leaving.is_empty() { "it is being stopped" } else { leaving }
    )]
    DeviceLeaving {
        /// Text of the error that the addition failed with.
        reason: String,
        /// Devices of the same kind that the guest was requested to eject. Empty if all such
        /// devices are being stopped.
        leaving: String,
    },
    #[error("the VM is not created; vm.create creates it")]
    NotCreated,
    /// A VM already exists, and a VMM has at most one.
    #[error("the VM exists already; vm.delete deletes it")]
    AlreadyCreated,
    #[error(
        "the VM cannot be resumed: {reason}; reboot it or shut it down; unflushed data is lost"
    )]
    CannotResume {
        /// Reason for the pause.
        reason: String,
    },
    /// The guest has no room for the page descriptors of another DIMM.
    #[error(
        "memory {}: the guest's DRAM has no room for the page descriptors of {} more, which take {}; it has \
         room for those of {}. Add less at a time; a guest without an agent gets at most `--pressure unreported=` times \
         its boot memory",
        Size(*size_bytes), Size(*dimm_bytes), Size(descriptor_bytes(*dimm_bytes)), Size(*most_bytes)
    )]
    NoRoomForDescriptors {
        /// Requested size of DRAM.
        size_bytes: u64,
        dimm_bytes: u64,
        /// Amount of memory for which the guest has room for page descriptors.
        most_bytes: u64,
    },
    #[error(transparent)]
    Governor(#[from] GovernorError),
    #[error("{0}")]
    BadRequest(String),
    /// The change would make the configuration invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The VM could not be built or changed.
    #[error("{0}")]
    Failed(String),
    #[error("the VMM is ending")]
    Ending,
}

pub type Reply<T> = oneshot::Sender<Result<T, VmError>>;

/// Request to the VM task.
#[derive(Debug)]
pub enum VmRequest {
    /// `vm.create`; the configuration has already been validated.
    Create(Box<VmConfig>, Reply<()>),
    /// `vm.delete`.
    Delete(Reply<()>),
    /// `vm.info`.
    Info(Reply<VmInfo>),
    /// State for the metrics.
    Status(Reply<VmStatus>),
    /// `vm.resize` or `vm.resize-zone`.
    Resize(Resize, Reply<()>),
    /// `vm.resize-disk`.
    ResizeDisk(ResizeDiskRequest, Reply<()>),
    /// `pool.grow`.
    GrowPool(GrowPoolRequest, Reply<()>),
    /// `vm.add-disk`, `vm.add-net`, `vm.add-pm-volume`, `vm.add-pmem`, `vm.add-vsock`. The answer
    /// is `None` if the VM is not running.
    AddDevice(Box<DeviceConfig>, Reply<Option<PciDeviceInfo>>),
    /// `vm.remove-device`.
    RemoveDevice(String, Reply<()>),
    /// `vm.memory`.
    Memory(Reply<Vec<ZoneInfo>>),
    /// `vm.counters`.
    Counters(Reply<Counters>),
    /// `vm.volumes`.
    Volumes(Reply<Vec<VolumeInfo>>),
    /// `pool.info`.
    Pools(Reply<Vec<PoolInfo>>),
    /// `vm.pressure` with at most this many decisions in the answer.
    Pressure(usize, Reply<PressureInfo>),
    /// `vm.pressure` with a change.
    ChangePressure(PressureChange, Reply<()>),
    /// `vm.boot`.
    Boot(Reply<()>),
    /// `vm.pause`.
    Pause(Reply<()>),
    /// `vm.resume`.
    Resume(Reply<()>),
    /// `vm.shutdown`.
    Shutdown(Reply<()>),
    /// `vm.reboot`.
    Reboot(Reply<()>),
    /// `vm.power-button`.
    PowerButton(Reply<()>),
    /// `vm.nmi`.
    Nmi(Reply<()>),
    /// `vmm.shutdown`.
    ShutdownVmm(Reply<()>),
}

/// Handle that sends requests to the VM task. Clones are cheap.
#[derive(Clone, Debug)]
pub struct VmHandle {
    requests: mpsc::Sender<VmRequest>,
    busy: watch::Receiver<Option<BusyVm>>,
}

/// VM task's end of a [`VmHandle`].
#[derive(Debug)]
pub struct Requests {
    queue: mpsc::Receiver<VmRequest>,
    busy: watch::Sender<Option<BusyVm>>,
}

impl Requests {
    /// Receives the next request. Returns `None` if all handles have been dropped.
    pub async fn recv(&mut self) -> Option<VmRequest> {
        self.queue.recv().await
    }

    /// Channel for the state of the VM while the VM task is busy.
    pub(crate) fn busy(&self) -> watch::Sender<Option<BusyVm>> {
        self.busy.clone()
    }
}

impl VmHandle {
    /// Creates a handle, and the receiving end for the VM task.
    pub fn channel() -> (Self, Requests) {
        let (requests, queue) = mpsc::channel(64);
        let (sender, busy) = watch::channel(None);
        (Self { requests, busy }, Requests { queue, busy: sender })
    }

    /// Sends a request, and waits for the answer: `handle.ask(VmRequest::Resume).await`.
    pub async fn ask<T>(&self, request: impl FnOnce(Reply<T>) -> VmRequest) -> Result<T, VmError> {
        let (reply, answer) = oneshot::channel();
        self.requests.send(request(reply)).await.map_err(|_| VmError::Ending)?;
        answer.await.map_err(|_| VmError::Ending)?
    }

    /// Sends a request, and waits for the answer. While the VM task is busy, which can last
    /// seconds, returns the state before the work in progress instead.
    async fn ask_unless_busy<T>(
        &self,
        request: impl FnOnce(Reply<T>) -> VmRequest,
    ) -> Result<Result<T, VmError>, BusyVm> {
        let mut busy = self.busy.clone();
        tokio::select! {
            biased;
            answer = self.ask(request) => Ok(answer),
            Ok(vm) = busy.wait_for(Option::is_some) => {
                Err(vm.clone().expect("that was waited for"))
            }
        }
    }

    /// Answers `vm.info`. While the VM task is busy, the answer contains the state before the work
    /// in progress. That state remains valid until the work is done.
    pub async fn info(&self) -> Result<VmInfo, VmError> {
        self.ask_unless_busy(VmRequest::Info).await.unwrap_or_else(|busy| Ok(busy.info))
    }

    /// State for the metrics. While the VM task is busy, it is the state before the work in
    /// progress.
    pub async fn status(&self) -> Result<VmStatus, VmError> {
        self.ask_unless_busy(VmRequest::Status).await.unwrap_or_else(|busy| Ok(busy.status))
    }

    /// Answers `vm.memory`. Returns `None` while the VM task is busy.
    pub async fn zones_unless_busy(&self) -> Option<Result<Vec<ZoneInfo>, VmError>> {
        self.ask_unless_busy(VmRequest::Memory).await.ok()
    }
}
