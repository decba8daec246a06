//! Factory of machines. The factory owns the resources that outlive a machine.

use crate::config::{DeviceConfig, VmConfig};
use crate::vm::build::builder;
use crate::vm::landlock::FileLimits;
use crate::vm::request::VmError;
use crate::vm::resources::{Resources, taps};
use crate::vm::uses::use_of_device;
use crate::vm::vm_task::{EventSender, Machine, MachineFactory};

/// Builds machines that run on KVM.
pub(crate) struct KvmFactory {
    resources: Resources,
    file_limits: FileLimits,
}

impl KvmFactory {
    pub(crate) fn new(resources: Resources, file_limits: FileLimits) -> Self {
        Self { resources, file_limits }
    }
}

impl MachineFactory for KvmFactory {
    fn build(
        &mut self,
        config: &VmConfig,
        events: EventSender,
    ) -> Result<Box<dyn Machine>, VmError> {
        // Before the build, which opens and parses the kernel, the firmware and the images.
        let limited = self.file_limits.apply(config);
        limited.map_err(|error| VmError::Failed(foreshore_types::chain(&error)))?;
        match builder::build(config, &mut self.resources, &events) {
            Ok(machine) => Ok(Box::new(machine)),
            Err(err) => Err(VmError::Failed(foreshore_types::chain(&err))),
        }
    }

    fn check(&self, device: &DeviceConfig) -> Result<(), VmError> {
        if let Some(file) = use_of_device(device) {
            let permitted = self.file_limits.check(&file);
            permitted.map_err(|error| VmError::BadRequest(error.to_string()))?;
        }
        match device {
            DeviceConfig::Net(net) => taps::check(net).map_err(|err| {
                VmError::BadRequest(format!("--net: {}", foreshore_types::chain(&err)))
            }),
            _ => Ok(()),
        }
    }

    fn keep(&mut self, config: &VmConfig) {
        self.resources.retain(config);
    }

    fn release(&mut self) {
        self.file_limits.require();
        self.resources = self.resources.anew();
    }
}
