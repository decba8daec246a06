//! Volumes of a machine.

pub(super) mod attached_volumes;
pub(super) mod created_volumes;
pub(super) mod volumes;

use std::sync::Arc;

use foreshore_devices::pool::UsageMonitor;
use foreshore_devices::volume::guest_btt::{GuestBtt, VolumeKey};
use foreshore_devices::volume::interface::Chosen;
use foreshore_devices::volume::plan::{PlanError, check_growth};
use parking_lot::Mutex;
use thiserror::Error;

use self::attached_volumes::AttachedVolume;
use crate::config::PmMemoryConfig;
use crate::vm::resources::pools::{OpenPool, memory_bytes};

/// Monitors of all open pools. The governor steps them.
pub(super) type UsageMonitors = Arc<Mutex<Vec<Arc<UsageMonitor>>>>;

/// Reason why an attached volume cannot grow.
#[derive(Debug, Error)]
pub(super) enum GrowthError {
    #[error(
        "volume {name} with interface={} is mapped into the guest, and cannot grow while the VM runs; shut the VM \
         down and use `pmvol volume resize`",
        interface.name()
    )]
    Mapped { name: String, interface: Chosen },
    #[error("volume {name} with readonly=on cannot grow")]
    ReadOnly { name: String },
    #[error(transparent)]
    Plan(#[from] PlanError),
}

pub(super) struct PmStorage {
    /// Zones of `--pm-memory`.
    pub(super) zones: Vec<PmMemoryConfig>,
    pub(super) volumes: Vec<AttachedVolume>,
    pub(super) pools: Vec<OpenPool>,
    pub(super) usage: UsageMonitors,
    /// Verdict on the BTT driver in the guest, if that driver is used for any volume.
    pub(super) guest_btt: Arc<GuestBtt>,
}

impl PmStorage {
    pub(super) fn new(
        zones: Vec<PmMemoryConfig>,
        volumes: Vec<AttachedVolume>,
        pools: Vec<OpenPool>,
        usage: UsageMonitors,
        guest_btt: Arc<GuestBtt>,
    ) -> Self {
        Self { zones, volumes, pools, usage, guest_btt }
    }

    /// Index of the volume with this device, or of the NVDIMM with this name.
    pub(super) fn place_of(&self, id: &str) -> Option<usize> {
        let position =
            |is_it: &dyn Fn(&AttachedVolume) -> bool| self.volumes.iter().position(is_it);
        position(&|volume| volume.device_id().as_deref() == Some(id)).or_else(|| {
            position(&|volume| volume.interface() == Chosen::Nvdimm && volume.name() == id)
        })
    }

    /// Returns the volume `key` if it is attached, possibly with another path of its pool.
    pub(super) fn attached(&self, key: &VolumeKey) -> Option<&AttachedVolume> {
        self.volumes.iter().find(|volume| volume.config().is(key))
    }

    /// Checks that a volume of this machine may grow to `size_bytes`.
    pub(super) fn check_growth(
        &self,
        volume: &AttachedVolume,
        size_bytes: u64,
    ) -> Result<(), GrowthError> {
        let (name, interface) = (volume.name(), volume.interface());
        if interface != Chosen::VirtioBlk {
            return Err(GrowthError::Mapped { name: name.to_owned(), interface });
        }
        if volume.config().readonly {
            return Err(GrowthError::ReadOnly { name: name.to_owned() });
        }
        let (pool, memory_bytes) = (volume.pool(), memory_bytes(&self.zones, volume.pool_path()));
        let growth = (name, size_bytes);
        Ok(check_growth(growth, &pool.volumes(), &pool.info(), memory_bytes)?)
    }
}
