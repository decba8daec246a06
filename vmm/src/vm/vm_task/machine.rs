//! Interface between a machine and the VM task.

use foreshore_devices::volume::guest_btt::VolumeKey;

use super::{EventSender, Standstill};
use crate::config::{DeviceConfig, VmConfig};
use crate::governor::info::{PressureChange, PressureInfo};
use crate::vm::request::{
    Counters, GrowPoolRequest, PciDeviceInfo, PoolInfo, Reply, Resize, ResizeDiskRequest, VmError,
    VmInfo, VolumeInfo, ZoneInfo,
};
use crate::vm::resize_plan::{ResizePlan, ResizeStep};

/// Machine of a VM. When it is dropped, vCPUs and devices are stopped, and memory is returned.
pub trait Machine: MachineResize + DeviceHotplug {
    /// Starts the vCPUs, initially or after a pause.
    fn resume(&mut self);
    /// Stops the vCPUs, then the devices. Returns a handle that blocks until all of them have
    /// stopped.
    #[must_use]
    fn pause(&mut self) -> Standstill;
    /// Returns whether writes that wait for space in a pool may find it now. `None` if none wait.
    fn has_space_for_waiting(&self) -> Option<bool>;
    /// Retries the writes that wait for space. A resume also retries them.
    fn retry_writes(&self);
    /// Presses the power button of the guest.
    fn press_power_button(&mut self);
    /// Sends a non-maskable interrupt to every vCPU.
    fn send_nmi(&mut self);
    /// Answers with the sizes of all zones, possibly after this call returns. Resident sizes may be
    /// up to 1 s old.
    fn zones(&self, reply: Reply<Vec<ZoneInfo>>);
    fn volumes(&self) -> Vec<VolumeInfo>;
    /// Volume of the device `id`.
    fn volume_of(&self, id: &str) -> Option<VolumeKey>;
    /// Pools that the machine uses.
    fn pools(&self) -> Vec<PoolInfo>;
    /// Fills in those parts of `vm.info` that only the machine knows, such as its devices and the
    /// paths of its pseudo terminals.
    fn complete(&self, info: &mut VmInfo);
    /// Counters of the devices.
    fn counters(&self) -> Counters;
    /// State of the governor, with at most `decisions` of its latest decisions.
    fn pressure(&self, decisions: usize) -> PressureInfo;
    fn change_pressure(&mut self, change: &PressureChange) -> Result<(), VmError>;
}

/// Resizes of a machine.
pub trait MachineResize {
    /// Checks a resize request as a whole. [`ResizePlan`] lists the reasons for which a step can
    /// still fail.
    fn plan_resize(&self, resize: &Resize) -> Result<ResizePlan, VmError>;
    /// Executes one step of a plan. All steps of a plan must be executed or dropped before the next
    /// plan is made.
    fn resize(&mut self, step: ResizeStep) -> Result<(), VmError>;
    /// Parks a vCPU after the guest has ejected it.
    fn vcpu_ejected(&mut self, index: u8);
    /// Returns the volume of a device, and its stored size.
    fn stored_volume(&self, id: &str) -> Option<(VolumeKey, u64)>;
    /// Resizes a disk or a volume, and notifies the guest.
    fn resize_disk(&mut self, resize: &ResizeDiskRequest) -> Result<(), VmError>;
    /// Grows a pool that the machine uses. May reply after this call returns.
    fn grow_pool(&self, growth: GrowPoolRequest, reply: Reply<()>);
}

/// Addition and removal of devices.
pub trait DeviceHotplug {
    /// All devices, including removed devices that the guest has not released yet.
    fn devices(&self) -> Vec<PciDeviceInfo>;
    /// Adds a device, whose ID must be unused, and notifies the guest.
    fn add_device(&mut self, id: &str, device: &DeviceConfig) -> Result<PciDeviceInfo, VmError>;
    /// Requests that the guest release a device. The device is not removed before the guest has
    /// released it.
    fn remove_device(&mut self, id: &str) -> Result<(), VmError>;
    /// Removes the device in a PCI slot after the guest has ejected it.
    fn ejected(&mut self, slot: u8);
}

/// Builds a machine for each boot and each reboot.
pub trait MachineFactory {
    /// Builds a machine with paused vCPUs.
    fn build(
        &mut self,
        config: &VmConfig,
        events: EventSender,
    ) -> Result<Box<dyn Machine>, VmError>;
    /// Refuses a device if one of its files has the wrong type. Other errors are detected when the
    /// device is built.
    fn check(&self, device: &DeviceConfig) -> Result<(), VmError>;
    /// Closes resources that stayed open for the next machine, but that `config` does not use. Must
    /// be called while no machine exists.
    fn keep(&mut self, config: &VmConfig);
    /// After the VM is deleted, closes all resources that outlive machines.
    fn release(&mut self);
}
