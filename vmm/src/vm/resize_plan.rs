//! Plans for resizing a running machine.

use balloon::governor::ResizeTarget;
use foreshore_devices::memory::zone::{Growth, Tier, ZoneSpec};

use crate::acpi::plug;
use crate::config::VmConfig;
use crate::vm::request::{VmError, hotplugged};

/// Steps of a resize that has passed all checks. A step can still fail, because the guest and the
/// host may change in the meantime:
///
/// - A vCPU that was removed earlier has not completed its last exit
///   ([`CpuError::Busy`](crate::cpu::CpuError::Busy)).
/// - The host has too little memory, or cannot start a thread.
/// - The room for a DIMM's page descriptors has been used ([`VmError::NoRoomForDescriptors`]).
/// - The device has refused the driver of the zone or balloon
///   ([`UnsupportedDriver`](balloon::governor::ResizeTargetError::UnsupportedDriver)).
#[derive(Debug)]
pub struct ResizePlan(pub(in crate::vm) Vec<ResizeStep>);

impl IntoIterator for ResizePlan {
    type Item = ResizeStep;
    type IntoIter = std::vec::IntoIter<ResizeStep>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl ResizePlan {
    pub fn store(&self, config: &mut VmConfig) {
        self.0.iter().for_each(|step| step.next_boot.store(config));
    }
}

/// One step of a resize. Only a machine creates steps, and only after checking them.
#[derive(Debug)]
pub struct ResizeStep {
    pub(in crate::vm) action: StepAction,
    pub(in crate::vm) next_boot: NextBoot,
}

impl ResizeStep {
    pub(in crate::vm) fn of_zone(spec: &ZoneSpec, size_bytes: u64, action: ZoneAction) -> Self {
        let action = StepAction::Zone { id: spec.id.clone(), action };
        Self { action, next_boot: NextBoot::of_zone(spec, size_bytes) }
    }

    /// Size that must be stored for the next boot after this step.
    pub fn next_boot(&self) -> &NextBoot {
        &self.next_boot
    }
}

#[derive(Debug)]
pub(in crate::vm) enum StepAction {
    Vcpus {
        desired: u8,
        plug_step: plug::Step,
    },
    Zone {
        id: String,
        action: ZoneAction,
    },
    /// `None` if the VM has no balloon. In that case, only size 0 can be requested.
    Balloon(Option<ResizeTarget>),
}

#[derive(Clone, Copy, Debug)]
pub(in crate::vm) enum ZoneAction {
    /// No change, because the zone has only boot memory, and its size is already the requested
    /// size.
    None,
    /// New size of the hotplug part.
    Target(ResizeTarget),
    Dimm {
        /// Requested size of the zone, including boot memory.
        size_bytes: u64,
        /// Size of the new DIMM, or 0 if the zone is already large enough.
        more_bytes: u64,
    },
}

/// Size that the next boot uses after a step. The machine determines it, because the kind of a zone
/// is not visible in the configuration.
#[derive(Clone, Debug)]
pub enum NextBoot {
    /// The step does not affect the next boot.
    Same,
    Vcpus(u8),
    /// Size of boot memory, in a single zone.
    BootMemory(u64),
    /// Size of the hotplug part in a DRAM zone.
    Hotplugged {
        zone: String,
        bytes: Option<u64>,
    },
    /// Size of the balloon, defined as in Cloud Hypervisor.
    Balloon(u64),
}

impl NextBoot {
    /// Size of a zone at the next boot after a resize to `size_bytes`, including boot memory.
    /// Memory that grows by ACPI never shrinks while the guest runs, so the requested size becomes
    /// boot memory. A DRAM zone with virtio-mem boots with the requested size, even if the guest
    /// has not reached it yet. A PM zone is empty at boot, because its pool serves other VMs too.
    fn of_zone(spec: &ZoneSpec, size_bytes: u64) -> Self {
        match (spec.tier, spec.growth) {
            (Tier::Pm, _) => Self::Same,
            (Tier::Dram, Growth::Dimms) => Self::BootMemory(size_bytes),
            (Tier::Dram, Growth::VirtioMem) => Self::Hotplugged {
                zone: spec.id.clone(),
                bytes: hotplugged(size_bytes, spec.boot_bytes),
            },
        }
    }

    /// Stores the size in `config`, which must belong to the machine that made the plan.
    pub fn store(&self, config: &mut VmConfig) {
        let memory = &mut config.memory;
        match self {
            Self::Same => {}
            Self::Vcpus(vcpus) => config.cpus.boot_vcpus = *vcpus,
            Self::BootMemory(bytes) => memory.size = *bytes,
            Self::Hotplugged { zone: id, bytes } => {
                // DRAM that is not in a memory zone belongs to `--memory`.
                let hotplugged_size = match memory.zones.iter_mut().find(|zone| zone.id == *id) {
                    Some(zone) => &mut zone.hotplugged_size,
                    None => &mut memory.hotplugged_size,
                };
                *hotplugged_size = *bytes;
            }
            Self::Balloon(bytes) => {
                if let Some(balloon) = &mut config.balloon {
                    balloon.size = *bytes;
                }
            }
        }
    }
}

pub(in crate::vm) fn id_of(spec: &ZoneSpec) -> &str {
    &spec.id
}

pub(in crate::vm) fn zone<'a>(zones: &'a [ZoneSpec], id: &str) -> Result<&'a ZoneSpec, VmError> {
    zones.iter().find(|spec| spec.id == id).ok_or_else(|| {
        let known = zones.iter().map(id_of).collect::<Vec<_>>().join(", ");
        VmError::BadRequest(format!("The VM has no zone {id:?}; its zones: {known}"))
    })
}

#[cfg(test)]
mod testing {
    use super::*;
    use crate::config::DRAM_ZONE;
    use crate::vm::request::{Resize, ResizeRequest, ResizeZoneRequest};

    impl ResizePlan {
        /// Plan for a machine with `zones`, without any checks.
        pub(in crate::vm) fn unchecked(
            resize: &Resize,
            zones: &[ZoneSpec],
        ) -> Result<Self, VmError> {
            let of_zone = |id: &str, size_bytes| -> Result<_, VmError> {
                Ok(ResizeStep::of_zone(zone(zones, id)?, size_bytes, ZoneAction::None))
            };
            let steps = match resize {
                Resize::Vm(ResizeRequest { desired_vcpus, desired_ram, desired_balloon }) => vec![
                    desired_vcpus.map(|desired| ResizeStep {
                        action: StepAction::Vcpus { desired, plug_step: plug::Step::Nothing },
                        next_boot: NextBoot::Vcpus(desired),
                    }),
                    desired_ram.map(|size_bytes| of_zone(DRAM_ZONE, size_bytes)).transpose()?,
                    desired_balloon.map(|size_bytes| ResizeStep {
                        action: StepAction::Balloon(None),
                        next_boot: NextBoot::Balloon(size_bytes),
                    }),
                ],
                Resize::Zone(ResizeZoneRequest { id, desired_ram }) => {
                    vec![Some(of_zone(id, *desired_ram)?)]
                }
            };
            Ok(Self(steps.into_iter().flatten().collect()))
        }
    }

    impl ResizeStep {
        pub(in crate::vm) fn label(&self) -> &'static str {
            match &self.action {
                StepAction::Vcpus { .. } => "resize vcpus",
                StepAction::Zone { id, .. } if id == DRAM_ZONE => "resize dram",
                StepAction::Zone { .. } => "resize zone",
                StepAction::Balloon(_) => "resize balloon",
            }
        }
    }
}
