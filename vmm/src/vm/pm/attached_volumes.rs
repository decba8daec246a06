//! Volumes of a machine, and their state in `vm.volumes`.

use std::any::Any;
use std::path::Path;
use std::sync::Arc;

use foreshore_devices::memory::holes::HoleMetrics;
use foreshore_devices::persist::FirstFailure;
use foreshore_devices::pool::PmPool;
use foreshore_devices::volume::build::{BuiltVolume, Sizes, VolumeDevice};
use foreshore_devices::volume::guest_btt::VolumeKey;
use foreshore_devices::volume::interface::Chosen;
use foreshore_devices::volume::kernel_gate::Verdict;
use foreshore_types::VolumeFormat;

use crate::config::PmVolumeConfig;
use crate::vm::pm::volumes::Choice;
use crate::vm::request::{VolumeInfo, VolumeStatus};

pub(in crate::vm) struct Opened {
    pub(in crate::vm) sizes: Sizes,
    pub(in crate::vm) failure: FirstFailure,
    holes: Option<Arc<HoleMetrics>>,
    /// Resources that the device itself does not hold: the open volume, and for an NVDIMM also the
    /// mapping and the metrics.
    held: Vec<Box<dyn Any + Send>>,
}

impl Opened {
    /// Splits a built volume into its device and the opened volume.
    pub(in crate::vm) fn of(built: BuiltVolume) -> (VolumeDevice, Self) {
        let BuiltVolume { sizes, failure, device, volume, compactor, holes } = built;
        let mut opened = Self { sizes, failure, holes, held: Vec::new() };
        if let Some(volume) = volume {
            opened.hold(volume);
        }
        if let Some(compactor) = compactor {
            opened.hold(compactor);
        }
        (device, opened)
    }

    /// Holds `resource` as long as the volume is attached.
    pub(in crate::vm) fn hold(&mut self, resource: impl Any + Send) {
        self.held.push(Box::new(resource));
    }
}

/// Volume that is attached to a machine. As long as the machine exists, the volume is open and
/// locked against other users.
pub(in crate::vm) struct AttachedVolume {
    config: PmVolumeConfig,
    choice: Choice,
    pool: Arc<dyn PmPool>,
    opened: Opened,
}

impl AttachedVolume {
    pub(in crate::vm) fn new(
        config: &PmVolumeConfig,
        choice: Choice,
        pool: &Arc<dyn PmPool>,
        opened: Opened,
    ) -> Self {
        Self { config: config.clone(), choice, pool: Arc::clone(pool), opened }
    }

    /// Configuration, with the present size.
    pub(in crate::vm) fn config(&self) -> &PmVolumeConfig {
        &self.config
    }

    pub(in crate::vm) fn interface(&self) -> Chosen {
        self.choice.interface
    }

    pub(in crate::vm) fn pool(&self) -> &Arc<dyn PmPool> {
        &self.pool
    }

    /// Returns true if the guest's driver translates the sectors of a BTT.
    pub(in crate::vm) fn has_guest_btt(&self) -> bool {
        self.config.format == VolumeFormat::Btt && self.interface().guest_translates()
    }

    pub(in crate::vm) fn key(&self) -> VolumeKey {
        VolumeKey { pool: self.pool_path().to_owned(), name: self.name().to_owned() }
    }

    /// ID of the volume's device in the API. An NVDIMM has none.
    pub(in crate::vm) fn device_id(&self) -> Option<String> {
        self.interface().device_id(self.name())
    }

    /// Records the size after a growth.
    pub(in crate::vm) fn has_grown(&mut self, size_bytes: u64) {
        self.config.has_grown(size_bytes);
    }

    /// Returns `Some(false)` while stores of a mapped volume wait for space, otherwise `None`.
    pub(in crate::vm) fn has_space_for_waiting(&self) -> Option<bool> {
        self.opened.holes.as_ref()?.has_space_for_waiting()
    }

    pub(in crate::vm) fn pool_path(&self) -> &Path {
        &self.config.pool
    }

    pub(in crate::vm) fn name(&self) -> &str {
        &self.config.name
    }

    /// Returns the state that `vm.volumes` reports. `guest_btt` is the verdict on the BTT driver in
    /// the guest.
    pub(in crate::vm) fn info(&self, guest_btt: Option<Verdict>) -> VolumeInfo {
        VolumeInfo {
            pool: self.pool_path().display().to_string(),
            name: self.name().to_owned(),
            size_bytes: self.opened.sizes.size_bytes().unwrap_or(0),
            reserve_bytes: self.opened.sizes.reserve_bytes().unwrap_or(0),
            allocated_bytes: self.opened.sizes.allocated_bytes(),
            live_bytes: self.opened.sizes.live_bytes(),
            interface: self.interface().name().to_owned(),
            unmapped_reason: self.choice.unmapped_reason.clone(),
            readonly: self.config.readonly,
            durability: self.pool.durability().name().to_owned(),
            extents: self.opened.sizes.extents().unwrap_or(0),
            guest_btt,
            status: status(self.opened.failure.reason(), self.pool.has_failed()),
        }
    }
}

/// Returns the status of a volume. `failure` is the reason for a failed flush of the volume. If any
/// other write to the pool has failed, the next flush will fail too.
fn status(failure: Option<&str>, pool_has_failed: bool) -> VolumeStatus {
    match (failure, pool_has_failed) {
        (Some(reason), _) => VolumeStatus::Failed(format!("a flush or store has failed: {reason}")),
        (None, true) => {
            VolumeStatus::Failed("a write to the pool has failed, and it is read-only".to_owned())
        }
        (None, false) => VolumeStatus::Ok,
    }
}

#[cfg(test)]
pub(in crate::vm) mod tests {
    use std::sync::Weak;

    use foreshore_devices::pool::PoolVolume;
    use foreshore_devices::pool::fake::FakePool;

    use super::*;

    /// Volume whose mapping has holes, without a device.
    pub(in crate::vm) fn volume_with_holes(holes: &Arc<HoleMetrics>) -> AttachedVolume {
        let pool: Arc<dyn PmPool> = Arc::new(FakePool::new(1));
        let volume: Weak<dyn PoolVolume> = Weak::<pmem_volume::Volume>::new();
        let (sizes, failure) = (Sizes::OfVolume(volume), FirstFailure::default());
        let opened = Opened { sizes, failure, holes: Some(Arc::clone(holes)), held: Vec::new() };
        let config = PmVolumeConfig::parse("pool=/pool,name=data").unwrap();
        AttachedVolume::new(&config, Choice::of(Chosen::Nvdimm), &pool, opened)
    }

    #[test]
    fn failure_of_volume_takes_precedence_over_failure_of_pool() {
        let reason = |failure, pool| match status(failure, pool) {
            VolumeStatus::Failed(reason) => Some(reason),
            VolumeStatus::Ok => None,
        };
        assert_eq!(reason(None, false), None);
        assert!(reason(None, true).unwrap().contains("read-only"));
        for pool_has_failed in [false, true] {
            assert!(reason(Some("no room"), pool_has_failed).unwrap().contains("no room"));
        }
    }
}
