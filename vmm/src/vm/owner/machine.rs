//! Interface of a machine to its owner.

use foreshore_devices::volume::kernel_gate::GuestKernel;

use super::{EventSender, Standstill};
use crate::config::{DeviceConfig, VmConfig};
use crate::governor::info::{PressureChange, PressureInfo};
use crate::vm::request::{
    BalloonInfo, Counters, PciDeviceInfo, PoolInfo, Reply, Resize, ResizeDiskRequest, VmError,
    VolumeInfo, ZoneInfo,
};
use crate::vm::resize_plan::{ResizePlan, ResizeStep};

/// A machine. Dropping it stops vCPUs and devices, and returns memory.
pub trait Machine {
    /// Lets the vCPUs run, initially or after a pause.
    fn resume(&mut self);
    /// Stops the vCPUs, then the devices. Returns a handle that blocks until all have stopped.
    #[must_use]
    fn pause(&mut self) -> Standstill;
    /// Presses the guest's power button.
    fn press_power_button(&mut self);
    /// Sends a non-maskable interrupt to every vCPU.
    fn send_nmi(&mut self);
    /// Boot memory and plugged memory of all zones, without ballooned memory.
    fn memory_bytes(&self) -> u64;
    /// Answers with the sizes of all zones, possibly later. Resident sizes may be 1 s old.
    fn zones(&self, reply: Reply<Vec<ZoneInfo>>);
    fn volumes(&self) -> Vec<VolumeInfo>;
    /// Open pools.
    fn pools(&self) -> Vec<PoolInfo>;
    /// Kernel of the guest, as reported by its agent.
    fn guest_kernel(&self) -> Option<GuestKernel>;
    /// Checks all of a resize. [`ResizePlan`] lists the reasons why a step can still fail.
    fn plan_resize(&self, resize: &Resize) -> Result<ResizePlan, VmError>;
    /// Executes a step of a plan. All steps of a plan must be executed or dropped before the next
    /// plan is made.
    fn resize(&mut self, step: ResizeStep) -> Result<(), VmError>;
    /// Adds the parts of the configuration that only the machine knows, such as the path of a
    /// pseudo terminal.
    fn complete(&self, _config: &mut VmConfig) {}
    /// Counters of the devices.
    fn counters(&self) -> Counters;
    fn balloon(&self) -> Option<BalloonInfo>;
    /// Resizes a disk and notifies the guest.
    fn resize_disk(&mut self, resize: &ResizeDiskRequest) -> Result<(), VmError>;
    /// Devices, including those that the guest has not released yet.
    fn devices(&self) -> Vec<PciDeviceInfo>;
    /// Adds a device with an unused id, and notifies the guest.
    fn add_device(&mut self, id: &str, device: &DeviceConfig) -> Result<PciDeviceInfo, VmError>;
    /// Requests that the guest releases a device. The device remains until then.
    fn remove_device(&mut self, id: &str) -> Result<(), VmError>;
    /// Removes the device in a PCI slot after its ejection.
    fn ejected(&mut self, slot: u8);
    /// Parks a vCPU after its ejection.
    fn vcpu_ejected(&mut self, index: u8);
    /// State of the governor, with at most `decisions` of its decisions.
    fn pressure(&self, decisions: usize) -> PressureInfo;
    fn change_pressure(&mut self, change: &PressureChange) -> Result<(), VmError>;
}

/// Builds a machine for each boot and reboot.
pub trait MachineFactory {
    /// Builds a machine with stopped vCPUs.
    fn build(
        &mut self,
        config: &VmConfig,
        events: EventSender,
    ) -> Result<Box<dyn Machine>, VmError>;
    /// Refuses a device whose files have the wrong type. Other errors are found when it is built.
    fn check(&self, device: &DeviceConfig) -> Result<(), VmError>;
    /// Closes resources that were kept for the next machine and that `config` no longer uses. Must
    /// be called without a machine.
    fn keep(&mut self, config: &VmConfig);
    /// Closes all resources that outlive machines, after the deletion of the VM.
    fn release(&mut self);
}
