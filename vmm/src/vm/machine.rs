//! A VM on KVM: what was built, and how it ends.

use std::sync::Arc;

use tracing::warn;

use super::builder;
use super::owner::{EventSender, Machine, MachineFactory};
use super::request::{PressureChange, PressureInfo, VmError, ZoneInfo};
use crate::acpi::ged::{Event, GenericEventDevice};
use crate::config::VmConfig;
use crate::cpu::run::Vcpu;
use crate::memory::Memory;
use crate::virtio::transport::pci::VirtioPciDevice;

/// A VM on KVM. The order of the fields is the order in which they are dropped.
pub struct KvmMachine {
    pub(super) vcpus: Vec<Vcpu>,
    pub(super) virtio: Vec<Arc<VirtioPciDevice>>,
    pub(super) ged: Arc<GenericEventDevice>,
    /// Last: nothing may touch it any more.
    pub(super) memory: Memory,
}

impl Drop for KvmMachine {
    /// 1. The vCPUs leave the guest, all of them before any is waited for.
    /// 2. Devices give their queues and workers back.
    /// 3. What is left, memory last, goes in the order of the fields.
    fn drop(&mut self) {
        self.pause();
        self.vcpus.clear();
        for device in &self.virtio {
            device.stop();
        }
    }
}

impl Machine for KvmMachine {
    fn resume(&mut self) {
        self.vcpus.iter().for_each(Vcpu::resume);
    }

    fn pause(&mut self) {
        self.vcpus.iter().for_each(Vcpu::pause);
    }

    fn press_power_button(&mut self) {
        if let Err(err) = self.ged.notify(Event::PowerButton) {
            warn!(%err, "The power button does not reach the guest");
        }
    }

    fn zones(&self) -> Vec<ZoneInfo> {
        let _ = &self.memory;
        Vec::new()
    }

    fn resize_dram(&mut self, _size_bytes: u64) -> Result<(), VmError> {
        Err(VmError::BadRequest("not yet".into()))
    }

    fn pressure(&self) -> PressureInfo {
        unreachable!()
    }

    fn change_pressure(&mut self, _change: PressureChange) -> Result<(), VmError> {
        Err(VmError::BadRequest("not yet".into()))
    }
}

/// Builds VMs on KVM.
#[derive(Default)]
pub struct KvmFactory;

impl MachineFactory for KvmFactory {
    fn build(&mut self, config: &VmConfig, events: EventSender) -> Result<Box<dyn Machine>, VmError> {
        match builder::build(config, &events) {
            Ok(machine) => Ok(Box::new(machine)),
            Err(err) => Err(VmError::Failed(super::chain(&err))),
        }
    }
}
