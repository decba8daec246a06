//! Connects the governor to what it governs.

use std::sync::Arc;

use balloon::Tier as GovernedTier;
use tokio::sync::Notify;
use tracing::error;

use super::error::BuildError;
use super::resources::Resources;
use crate::config::VmConfig;
use crate::governor::core::Core;
use crate::governor::task::{Clock, Connections, Governor};
use crate::governor::{DeviceSizes, GovernedZone, PoolFree, Shortfall, ZoneDevice};
use crate::memory::BLOCK_BYTES;
use crate::memory::zone::Tier;
use crate::virtio::mem::MemHandle;
use crate::volume::guest_btt::GuestBtt;

impl ZoneDevice for MemHandle {
    fn sizes(&self) -> DeviceSizes {
        let sizes = MemHandle::sizes(self);
        DeviceSizes {
            block_bytes: BLOCK_BYTES,
            region_bytes: sizes.max_bytes,
            requested_bytes: sizes.requested_bytes,
            plugged_bytes: sizes.plugged_bytes,
            driver_ready: self.driver_present(),
            shortfall: sizes.shortfall.map(|shortfall| Shortfall {
                reason: shortfall.reason.as_str(),
                wanted_bytes: shortfall.wanted_bytes,
            }),
        }
    }

    fn request(&self, size_bytes: u64) {
        // The controller keeps to blocks and bounds; a size that breaks them is its bug, not the guest's.
        if let Err(err) = self.request_size(size_bytes) {
            error!(%err, "The governor asks for a size that cannot be");
        }
    }

    fn remind(&self) {
        self.kick();
    }
}

/// Starts the governor of a machine that is about to run.
pub(super) fn start(
    config: &VmConfig,
    resources: &Resources,
    handles: &[MemHandle],
    plugged: Arc<Notify>,
    agents: Option<Connections>,
    guest_btt: &Arc<GuestBtt>,
) -> Result<Governor, BuildError> {
    let zones = handles
        .iter()
        .map(|handle| {
            let spec = handle.zone();
            GovernedZone {
                id: spec.id.clone(),
                tier: match spec.tier {
                    Tier::Dram => GovernedTier::Dram,
                    Tier::Pm => GovernedTier::Pm,
                },
                guest_numa_node: spec.guest_node,
                boot_bytes: spec.boot_bytes,
                device: Arc::new(handle.clone()),
            }
        })
        .collect();
    let pool_free: PoolFree = match &config.pm_memory {
        Some(pm) => {
            // Its task ends a moment after the machine, which may open the pool anew.
            let pool = Arc::downgrade(resources.pool(&pm.pool));
            Arc::new(move || pool.upgrade().map_or(0, |pool| pool.info().lendable_bytes))
        }
        None => Arc::new(|| 0),
    };
    let clock = Clock::start();
    let core = Core::new(&config.pressure, zones, config.memory.size, pool_free, clock.now())
        .map_err(BuildError::Pressure)?;
    let guest_btt = Arc::clone(guest_btt);
    let core = core.on_hello(Box::new(move |hello| {
        guest_btt.hello(hello);
    }));
    Governor::spawn(core, clock, plugged, agents).map_err(BuildError::device("the governor"))
}
