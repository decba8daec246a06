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

/// A VM that has been built. Dropping it ends it: vCPUs and devices stop, memory goes back.
pub trait Machine {
    /// Lets the vCPUs run, for the first time or again.
    fn resume(&mut self);
    /// Tells the vCPUs to stop, and then the devices. Who must know that they have waits for it.
    #[must_use]
    fn pause(&mut self) -> Standstill;
    /// The power button of the guest.
    fn press_power_button(&mut self);
    /// A non-maskable interrupt for every vCPU.
    fn send_nmi(&mut self);
    /// Boot memory and what is plugged, all zones together, without what is in a balloon.
    fn memory_bytes(&self) -> u64;
    /// Answers, maybe later, with every zone and its sizes; what is resident may be a second old.
    fn zones(&self, reply: Reply<Vec<ZoneInfo>>);
    fn volumes(&self) -> Vec<VolumeInfo>;
    /// Every pool that it has open.
    fn pools(&self) -> Vec<PoolInfo>;
    /// The guest's kernel, once an agent has said it.
    fn guest_kernel(&self) -> Option<GuestKernel>;
    /// Checks all of a resize. [`ResizePlan`] lists the reasons why a step can still fail.
    fn plan_resize(&self, resize: &Resize) -> Result<ResizePlan, VmError>;
    /// Carries out a step of a plan. Before the next plan is made, all steps are carried out or
    /// dropped.
    fn resize(&mut self, step: ResizeStep) -> Result<(), VmError>;
    /// Fills in what of the configuration only the machine knows, such as where a pseudo terminal
    /// is.
    fn complete(&self, _config: &mut VmConfig) {}
    /// What its devices have counted.
    fn counters(&self) -> Counters;
    /// Its balloon, if it has one.
    fn balloon(&self) -> Option<BalloonInfo>;
    /// Gives a disk another size, which the guest is told of.
    fn resize_disk(&mut self, resize: &ResizeDiskRequest) -> Result<(), VmError>;
    /// Its devices, those that the guest has not let go yet among them.
    fn devices(&self) -> Vec<PciDeviceInfo>;
    /// Adds a device that nothing else is called like, and tells the guest.
    fn add_device(&mut self, id: &str, device: &DeviceConfig) -> Result<PciDeviceInfo, VmError>;
    /// Asks the guest to let a device go. It is there until the guest has done so.
    fn remove_device(&mut self, id: &str) -> Result<(), VmError>;
    /// The guest has let go what is in a PCI slot, and finds nothing there any more.
    fn ejected(&mut self, slot: u8);
    /// The guest has let a vCPU go.
    fn vcpu_ejected(&mut self, index: u8);
    /// What the governor does.
    fn pressure(&self, decisions: usize) -> PressureInfo;
    /// Changes what the governor does.
    fn change_pressure(&mut self, change: &PressureChange) -> Result<(), VmError>;
}

/// Builds machines: once at boot, again at each reboot.
pub trait MachineFactory {
    /// Builds a machine, its vCPUs stopped.
    fn build(
        &mut self,
        config: &VmConfig,
        events: EventSender,
    ) -> Result<Box<dyn Machine>, VmError>;
    /// Refuses a device whose files cannot be what they are said to be; more is seen when it is
    /// made.
    fn check(&self, device: &DeviceConfig) -> Result<(), VmError>;
    /// Closes what was kept for the next machine and this configuration has not any more; there is
    /// no machine.
    fn keep(&mut self, config: &VmConfig);
    /// Closes what outlives machines: there is no VM any more.
    fn release(&mut self);
}
