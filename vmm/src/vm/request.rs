//! What may be asked of the task that owns the VM, and what it answers.
//!
//! The API, signals and the governor all speak through a [`VmHandle`]; only the owner of the other
//! end touches the VM.

use std::collections::BTreeMap;
use std::fmt;

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

/// Counters of each device that has some, by its id.
pub type Counters = BTreeMap<String, DeviceCounters>;

/// Where a VM is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum VmState {
    /// Configured, without a machine: not booted yet, or shut down.
    Created,
    Running,
    /// Its vCPUs are stopped, and will go on.
    Paused,
}

/// `vm.info`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct VmInfo {
    /// The configuration, with what was changed since: by `vm.pressure`, by devices that came and
    /// went, and by resizes of vCPUs, DRAM and balloon, so that the next boot has it.
    pub config: VmConfig,
    /// Where it is in its life.
    pub state: VmState,
    /// Boot memory and what is plugged of DRAM and PM, without what is in a balloon, in bytes.
    pub memory_actual_size: u64,
    /// Why the VM was paused, if something had failed that the guest cannot be told. It cannot be
    /// resumed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_reason: Option<String>,
    /// Its balloon, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balloon: Option<BalloonInfo>,
    /// The guest's kernel, as its agent says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_kernel: Option<GuestKernel>,
    /// Its machine's devices, if it has one, by their ids.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_tree: Option<DeviceTree>,
}

/// `vm.info`: devices by their ids. As in Cloud Hypervisor each is two nodes: itself, and above it
/// its PCI function.
pub type DeviceTree = BTreeMap<String, DeviceNode>;

/// `vm.info`: a node of the tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceNode {
    /// What it is called.
    pub id: String,
    /// Nothing: clients look for the list.
    pub resources: Vec<String>,
    /// The node above it.
    pub parent: Option<String>,
    /// The nodes below it.
    pub children: Vec<String>,
    /// Where it is on the PCI bus.
    pub pci_bdf: Option<String>,
}

/// The tree of these devices.
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

/// `vm.info`: the balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonInfo {
    /// What the guest is asked to have in it.
    pub target_bytes: u64,
    /// What it says is in it.
    pub actual_bytes: u64,
    /// The most that it can be asked for.
    pub max_bytes: u64,
    /// Whether the guest's driver is up.
    pub driver_ready: bool,
}

section! {
    /// `vm.resize`: what is `None` stays as it is.
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

/// Refuses a number of vCPUs that the VM can never have.
pub(in crate::vm) fn check_vcpus(desired: u8, config: &VmConfig) -> Result<(), VmError> {
    let most = config.cpus.max_vcpus;
    if (1..=most).contains(&desired) {
        return Ok(());
    }
    let (flag, key) = (ResizeRequest::FLAG, "desired_vcpus");
    let (value, most) = (desired.into(), most.into());
    Err(ConfigError::OutOfRange { flag, key, value, least: 1, most }.into())
}

/// As it is named in errors: what the client has asked for, which need not be called as flags are.
impl fmt::Display for ResizeRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { desired_vcpus, desired_ram, desired_balloon } = *self;
        let wishes = [
            ("desired_vcpus", desired_vcpus.map(u64::from)),
            ("desired_ram", desired_ram),
            ("desired_balloon", desired_balloon),
        ];
        let wishes =
            wishes.into_iter().filter_map(|(name, wish)| Some(format!("{name} {}", wish?)));
        f.write_str(&wishes.collect::<Vec<_>>().join(", "))
    }
}

/// What a zone is to have beyond its boot part, in a configuration.
pub(in crate::vm) fn hotplugged(size_bytes: u64, boot_bytes: u64) -> Option<u64> {
    size_bytes.checked_sub(boot_bytes).filter(|bytes| *bytes > 0)
}

/// Gives a zone of a VM that does not run as much DRAM as was asked for, boot part included. It is
/// the boot part that changes, as in Cloud Hypervisor; but where a part of it is hotplugged,
/// because that was asked for while the VM ran, that part does, as far as it goes: else the next
/// boot would have both.
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
    /// Makes the change in the configuration of a VM that does not run: what it will boot with.
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
                let reason = format!("desired_balloon {size_bytes}: the VM has no balloon");
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

/// Reads the size of a zone. It may be 0, because a zone of PM has no boot part.
fn read_zone_ram(json: Value, walk: &mut Walk) -> Result<u64, JsonError> {
    let bytes = u64::from_json(json, walk)?;
    if bytes != 0 {
        check_pages(ResizeZoneRequest::FLAG, "desired_ram", bytes)?;
    }
    Ok(bytes)
}

impl fmt::Display for ResizeZoneRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "desired_ram {} of zone {}", self.desired_ram, self.id)
    }
}

impl ResizeZoneRequest {
    /// Makes the change in the configuration of a VM that does not run. Zones of PM boot with
    /// nothing.
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

/// Resize of vCPUs and memory.
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
    /// Changes the configuration of a VM that does not run.
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

/// `vm.memory`: one zone's four sizes, in bytes, and how its last resize goes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ZoneInfo {
    /// `dram`, `pm`, or what its flag calls it.
    pub id: String,
    pub tier: String,
    pub guest_numa_node: u32,
    pub boot_bytes: u64,
    /// The most that can be plugged.
    pub hotplug_bytes: u64,
    /// What the guest is asked to have plugged.
    pub requested_bytes: u64,
    /// Part of the last requested size that waits until the guest has DRAM for its page
    /// descriptors.
    pub held_bytes: u64,
    /// What it has plugged.
    pub plugged_bytes: u64,
    /// Guest DRAM that the page descriptors of the plugged memory occupy, at the least. Linux
    /// allocates them for whole memory blocks, so a block that is plugged in part takes more.
    pub descriptor_bytes: u64,
    /// What the agent says is online; `None` without an agent.
    pub online_bytes: Option<u64>,
    /// What is in the host's memory.
    pub resident_bytes: u64,
    /// The guest's virtio-mem driver: `absent`, `ready`, `unsupported`; `None` if the zone has no
    /// such device.
    pub driver: Option<DriverState>,
    /// How the last resize goes: `reached`, `pending`, `no-driver`, `stuck`, with the reason.
    pub status: ResizeStatus,
}

/// `vm.volumes`: one volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeInfo {
    pub pool: String,
    pub name: String,
    /// Its size as the guest sees it.
    pub size_bytes: u64,
    /// How the guest sees it: `nvdimm`, `virtio-pmem` or `virtio-blk`.
    pub interface: String,
    /// Whether the guest may only read it.
    pub readonly: bool,
    /// What a completed flush survives: `dax-sync`, `page-cache`, `volatile`.
    pub durability: String,
    /// In how many pieces it lies in the pool.
    pub extents: usize,
    /// What is thought of the guest's BTT driver; `None` as long as no agent has said which kernel
    /// it is, and where the VMM translates itself.
    pub guest_btt: Option<Verdict>,
    /// Whether what the guest flushes is durable.
    pub status: VolumeStatus,
}

/// Whether what the guest flushes is durable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "state", content = "reason")]
pub enum VolumeStatus {
    Ok,
    /// It is not any more, and why: a flush has failed, or another write to the pool.
    Failed(String),
}

/// `pool.info`: one pool that is open. Its bytes are named as `pmvol info --json` names them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolInfo {
    pub path: String,
    /// Its identity, which moves with it.
    pub uuid: String,
    /// What a completed flush survives: `dax-sync`, `page-cache`, `volatile`.
    pub durability: String,
    /// All of it: the sum of the next six.
    pub total_bytes: u64,
    pub free_bytes: u64,
    pub memory_bytes: u64,
    pub volume_bytes: u64,
    /// Waiting to be erased.
    pub scrubbing_bytes: u64,
    /// Bad media, out of use.
    pub retired_bytes: u64,
    /// The pool's own data.
    pub metadata_bytes: u64,
    /// Kept for volumes, whether they have it already or not.
    pub strg_bytes: u64,
    /// What would be lent as memory if it were asked for, erased or not.
    pub lendable_bytes: u64,
    /// How many volumes are in it, whether the VM has them or not.
    pub volumes: u32,
    /// Whether it takes writes.
    pub status: PoolStatus,
}

/// Whether a pool takes writes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "state", content = "reason")]
pub enum PoolStatus {
    Ok,
    /// It does not before it is opened again, and why: what failed first.
    ReadOnly(String),
}

/// Where a device was added.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PciDeviceInfo {
    /// What it is called.
    pub id: String,
    /// Segment, bus, device and function, as `lspci -D` writes them.
    pub bdf: String,
}

/// Why a request is refused. The API maps each to a status code in one place.
#[derive(Debug, Error)]
pub enum VmError {
    /// Not in this state.
    #[error("The VM is {state:?}, and {verb} needs it {needs}")]
    WrongState {
        verb: &'static str,
        /// Where the VM is.
        state: VmState,
        /// Where it would have to be.
        needs: &'static str,
    },
    #[error("The VM has no disk {id:?}; its disks: {known}")]
    NoSuchDisk {
        id: String,
        /// What could have been.
        known: String,
    },
    /// The VM has no device of that name.
    #[error("The VM has no device {id:?}")]
    NoSuchDevice { id: String },
    /// A name that something else of the VM has, or has not let go yet.
    #[error("The id {id} is taken")]
    IdTaken { id: String },
    /// vCPUs are on their way out, and until they have gone their number does not change otherwise.
    #[error(
        "The guest has been asked to let vCPUs go, and has not: {leaving}. Try again later; a reboot makes it so"
    )]
    VcpusLeaving { leaving: String },
    /// What the device needs is in use, maybe by one that is on its way out.
    #[error(
        "{reason}. A device that may have it is on its way out, and the guest has to let it go first: \
         {}. Try again later",
        if leaving.is_empty() { "it is being stopped" } else { leaving }
    )]
    DeviceLeaving {
        /// Why it cannot be had.
        reason: String,
        /// Which of the kind the guest has been asked to let go; none, if all of them are being
        /// stopped.
        leaving: String,
    },
    /// There is no VM.
    #[error("The VM is not created")]
    NotCreated,
    /// There is one, and a VMM has one at most.
    #[error("The VM is already created; vm.delete ends it")]
    AlreadyCreated,
    #[error(
        "The VM cannot go on: {reason}. Reboot it or shut it down; what was not flushed is lost"
    )]
    CannotResume {
        /// Why it was paused.
        reason: String,
    },
    /// The guest has no room for the page descriptors of a DIMM.
    #[error(
        "desired_ram {size_bytes}: the guest's DRAM has no room for the page descriptors of {} more, which take {}; it has \
         room for those of {}. Add less at a time; a guest without an agent gets at most `--pressure unreported=` times \
         its boot memory",
        Size(*dimm_bytes), Size(descriptor_bytes(*dimm_bytes)), Size(*most_bytes)
    )]
    NoRoomForDescriptors {
        /// Requested size of DRAM.
        size_bytes: u64,
        /// Size of the DIMM.
        dimm_bytes: u64,
        /// Memory for whose page descriptors the guest has room.
        most_bytes: u64,
    },
    #[error(transparent)]
    Governor(#[from] GovernorError),
    #[error("{0}")]
    BadRequest(String),
    /// With what was asked for it would be no valid VM.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The VM could not be built or changed.
    #[error("{0}")]
    Failed(String),
    #[error("The VMM is ending")]
    Ending,
}

/// Where an answer goes.
pub type Reply<T> = oneshot::Sender<Result<T, VmError>>;

/// One thing asked of the VM's owner.
#[derive(Debug)]
pub enum VmRequest {
    /// `vm.create`; the configuration has been validated.
    Create(Box<VmConfig>, Reply<()>),
    /// `vm.delete`.
    Delete(Reply<()>),
    /// `vm.info`.
    Info(Reply<VmInfo>),
    /// `vm.resize` or `vm.resize-zone`.
    Resize(Resize, Reply<()>),
    /// `vm.resize-disk`.
    ResizeDisk(ResizeDiskRequest, Reply<()>),
    /// `vm.add-disk`, `vm.add-net`, `vm.add-pmem`, `vm.add-vsock`; the answer is `None` if the VM
    /// does not run.
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
    /// `vm.pressure`, read, with so many decisions.
    Pressure(usize, Reply<PressureInfo>),
    /// `vm.pressure`, changed.
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

/// Speaks to the VM's owner. Cheap to clone.
#[derive(Clone, Debug)]
pub struct VmHandle {
    requests: mpsc::Sender<VmRequest>,
    busy: watch::Receiver<Option<VmInfo>>,
}

/// What is asked of the owner: its end of a [`VmHandle`].
#[derive(Debug)]
pub struct Requests {
    queue: mpsc::Receiver<VmRequest>,
    busy: watch::Sender<Option<VmInfo>>,
}

impl Requests {
    /// The next one; `None` when nobody will ask any more.
    pub async fn recv(&mut self) -> Option<VmRequest> {
        self.queue.recv().await
    }

    /// What the owner is before and after a time in which it takes no requests.
    pub(in crate::vm) fn busy(&self) -> watch::Sender<Option<VmInfo>> {
        self.busy.clone()
    }
}

impl VmHandle {
    /// A handle and the end that the owner serves.
    pub fn channel() -> (Self, Requests) {
        let (requests, queue) = mpsc::channel(64);
        let (sender, busy) = watch::channel(None);
        (Self { requests, busy }, Requests { queue, busy: sender })
    }

    /// Asks and waits for the answer: `handle.ask(VmRequest::Resume).await`.
    pub async fn ask<T>(&self, request: impl FnOnce(Reply<T>) -> VmRequest) -> Result<T, VmError> {
        let (reply, answer) = oneshot::channel();
        self.requests.send(request(reply)).await.map_err(|_| VmError::Ending)?;
        answer.await.map_err(|_| VmError::Ending)?
    }

    /// `vm.info`. While the owner builds a machine or ends one, which takes seconds, it is as it
    /// was when that began: so it will be until it is done.
    pub async fn info(&self) -> Result<VmInfo, VmError> {
        let mut busy = self.busy.clone();
        tokio::select! {
            biased;
            answer = self.ask(VmRequest::Info) => answer,
            Ok(info) = busy.wait_for(Option::is_some) => Ok(info.clone().expect("that was waited for")),
        }
    }
}
