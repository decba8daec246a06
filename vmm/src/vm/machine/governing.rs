//! Connects the governor to the memory of a machine.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use balloon::governor::Onlining;
use balloon::statistics::{BalloonState, Sample};
use balloon::{Distances, StorageSpace};
use foreshore_devices::log::rate_limited;
use foreshore_devices::memory::zone::Tier;
use foreshore_devices::virtio::balloon::BalloonHandle;
use foreshore_devices::virtio::mem::MemHandle;
use foreshore_devices::volume::guest_btt::GuestBtt;
use tokio::sync::Notify;
use tracing::warn;

use crate::config::BALLOON_ZONE;
use crate::config::{RECORD_BYTES, Topology, VmConfig};
use crate::governor::core::Core;
use crate::governor::record::{self, Target};
use crate::governor::task::{Clock, Connections, GovernorHandle};
use crate::governor::{BalloonSource, GovernedZone, PoolFree, StorageSource, UnmanagedMemory};
use crate::vm::error::BuildError;
use crate::vm::pm::UsageMonitors;
use crate::vm::resources::Resources;

impl BalloonSource for BalloonHandle {
    fn request_statistics(&self) {
        BalloonHandle::request_statistics(self);
    }

    fn state(&self) -> BalloonState {
        let sample = self.statistics().map(|heard| {
            let (statistics, number, driver_generation) =
                (heard.statistics, heard.number, heard.driver_generation);
            Sample { statistics, number, driver_generation }
        });
        BalloonState {
            sample,
            ballooned_bytes: BalloonHandle::sizes(self).actual_bytes,
            is_counted: self.deflates_on_oom(),
        }
    }
}

fn governed_balloon(balloon: &BalloonHandle) -> GovernedZone {
    GovernedZone {
        id: BALLOON_ZONE.to_owned(),
        tier: Tier::Dram,
        guest_numa_node: 0,
        boot_bytes: 0,
        device: Arc::new(balloon.clone()),
    }
}

/// Memory of a machine that the governor sizes or counts.
pub(in crate::vm) struct Governed<'a> {
    /// Handles of the virtio-mem devices.
    pub(in crate::vm) handles: &'a [MemHandle],
    pub(in crate::vm) balloon: Option<&'a BalloonHandle>,
    /// Memory that is added, but that the governor does not size.
    pub(in crate::vm) unmanaged: UnmanagedMemory,
    /// Notified when the amount of plugged memory changes.
    pub(in crate::vm) plugged: Arc<Notify>,
}

/// Starts the governor of a machine that is about to run.
pub(in crate::vm) fn start(
    config: &VmConfig,
    resources: &Resources,
    governed: Governed<'_>,
    agents: Connections,
    guest_btt: &Arc<GuestBtt>,
    usage: UsageMonitors,
) -> Result<GovernorHandle, BuildError> {
    let Governed { handles, balloon, unmanaged, plugged } = governed;
    let balloon_bytes = balloon.map_or(0, |balloon| BalloonHandle::sizes(balloon).max_bytes);
    let topology = Topology::of(config).map_err(BuildError::device("the guest's nodes"))?;
    let zones_of = |node| topology.zones().iter().filter(move |zone| zone.guest_node == node);
    // The balloon is the first zone. Within a tier, the first zone grows first and shrinks last.
    let mut zones: Vec<_> = balloon.map(governed_balloon).into_iter().collect();
    zones.extend(handles.iter().map(|handle| {
        let spec = handle.zone();
        GovernedZone {
            id: spec.id.clone(),
            tier: spec.tier,
            guest_numa_node: spec.guest_node,
            // The guest reports memory by node, not by zone.
            boot_bytes: zones_of(spec.guest_node).map(|zone| zone.boot_bytes).sum(),
            device: Arc::new(handle.clone()),
        }
    }));
    let pool_free: PoolFree = match config.pm_memory.first() {
        Some(pm) => {
            // A weak reference, because the governor's task ends slightly after the machine, and
            // the next machine may open the pool again.
            let pool = Arc::downgrade(&resources.pool(&pm.pool));
            Arc::new(move || pool.upgrade().map_or(0, |pool| pool.offered_bytes()))
        }
        None => Arc::new(|| 0),
    };
    let clock = Clock::start();
    let pressure = config.governing();
    let mut core = Core::new(
        &pressure,
        zones,
        config.memory.boot_bytes() - balloon_bytes,
        pool_free,
        clock.now(),
    )
    .map_err(BuildError::Pressure)?;
    if let Some(balloon) = balloon {
        core = core.with_statistics(Arc::new(balloon.clone()), onlining(config));
        let target_bytes = BalloonHandle::sizes(balloon).target_bytes;
        if target_bytes > 0 {
            // A configured size is treated like a manual resize: it is not changed until a client
            // changes it.
            let target = core.zones().target(BALLOON_ZONE, balloon_bytes - target_bytes);
            let resized = target.and_then(|target| core.resize(target, clock.now()));
            resized.map_err(BuildError::Pressure)?;
        }
    }
    for handle in handles.iter().filter(|handle| handle.zone().hotplugged_bytes > 0) {
        let zone = handle.zone();
        let target = core.zones().target(&zone.id, zone.hotplugged_bytes);
        core.boot_with(target.map_err(BuildError::Pressure)?, clock.now());
    }
    let core = core
        .with_distances(distances(&topology))
        .with_unmanaged(unmanaged)
        .with_storage(storage(config, resources));
    let core = match &pressure.record {
        Some(path) => record(core, path, pressure.record_size, resources, &clock)?,
        None => core,
    };
    let guest_btt = Arc::clone(guest_btt);
    let core = core.on_hello(Box::new(move |hello| {
        guest_btt.hello(hello);
    }));
    // The governor's clock stops in a pause, during which no volume grows.
    let core = core.on_tick(Box::new(move |now| {
        usage.lock().iter().for_each(|monitor| monitor.step(Duration::from_millis(now.0)));
    }));
    GovernorHandle::spawn(core, clock, plugged, Some(agents))
        .map_err(BuildError::device("the governor"))
}

/// Returns the free space of the pool for volumes. `None` if memory borrows no space of
/// volumes.
fn storage(config: &VmConfig, resources: &Resources) -> Option<StorageSource> {
    let pm = config.pm_memory.iter().find(|pm| pm.lends_promised())?;
    let pool = Arc::downgrade(&resources.pool(&pm.pool));
    let marks = StorageSpace {
        min_bytes: pm.storage_min,
        low_bytes: pm.storage_low,
        high_bytes: pm.storage_high,
        ..StorageSpace::default()
    };
    Some(Arc::new(move || {
        // A pool that has failed serves no volume, and takes no memory back.
        let info = pool.upgrade().map(|pool| pool.info()).filter(|info| info.latched.is_none());
        info.map_or(marks, |info| StorageSpace {
            free_bytes: info.free_bytes + info.scrubbing_bytes,
            needed_bytes: info.needed_bytes(),
            lent_bytes: info.memory_bytes,
            borrowable_bytes: info.borrowable_bytes,
            ..marks
        })
    }))
}

/// Starts recording the input of the governor. If the recording cannot be opened after a reboot, it
/// is skipped, because the guest must continue to run.
fn record(
    core: Core,
    path: &Path,
    max_bytes: Option<u64>,
    resources: &Resources,
    clock: &Clock,
) -> Result<Core, BuildError> {
    let nth = resources.machines();
    let Some(max_bytes) = record::room(path, nth, max_bytes.unwrap_or(RECORD_BYTES)) else {
        rate_limited!(warn, file = %path.display(), boot = nth + 1, "The limit of traces or of their size is reached; this boot records none");
        return Ok(core);
    };
    match record::open(path, nth) {
        Ok((path, file)) => {
            let target = Target { path, file, max_bytes };
            core.record(target, resources.metrics().vm(), clock.now())
                .map_err(BuildError::device("--pressure record="))
        }
        Err(err) if nth > 0 => {
            warn!(file = %path.display(), %err, "Cannot open the recording; reports are not recorded until the next boot");
            Ok(core)
        }
        Err(err) => Err(BuildError::device(format!("--pressure record={}", path.display()))(err)),
    }
}

/// Returns which side decides how memory is onlined: the VMM or the agent. A guest that boots
/// firmware has its own command line. In that case the agent decides, if it can connect by vsock.
fn onlining(config: &VmConfig) -> Onlining {
    if config.payload.firmware.is_some() && config.vsock.is_some() {
        Onlining::Agent
    } else {
        Onlining::CommandLine
    }
}

/// Returns the distances in the guest's firmware tables. The policy uses them to order the growth
/// of zones.
fn distances(topology: &Topology) -> Distances {
    let mut distances = Distances::default();
    let nodes = 0..topology.nodes().len() as u32;
    for (from, to) in nodes.clone().flat_map(|from| nodes.clone().map(move |to| (from, to))) {
        distances.set(from, to, topology.distance(from, to));
    }
    distances
}
