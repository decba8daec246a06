//! The governor: the loop that feeds reports to a policy and carries its plans out.
//!
//! ```text
//!   agent ── lines ──► agent::serve ─┐
//!   virtio-mem ── plugged changed ───┼──► Core ── requests ──► ZoneDevice
//!   clock ── once a second ──────────┘     │
//!                                          └── settings ──► agent
//! ```
//!
//! What is decided is `balloon`'s; here is the I/O around it. [`core::Core`] has no clock and no socket: everything
//! that happens to it is a call with a time, so that it is tested without either. [`task`] has both.

mod agent;
pub mod agentless;
mod audit;
pub mod core;
mod episode;
#[cfg(test)]
pub(crate) mod fake;
mod held_plan;
pub mod metrics;
mod progress;
pub mod record;
pub mod task;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use balloon::{DriverState, Tier};

/// The hotplug part of a zone as the governor acts on it.
pub trait ZoneDevice: Send + Sync {
    /// Its sizes now.
    fn sizes(&self) -> DeviceSizes;

    /// Asks the guest to have `size_bytes` plugged: a multiple of the block size, at most the region's. The
    /// guest is told by a configuration change; it follows when it can.
    fn request(&self, size_bytes: u64);

    /// Requests `size_bytes` as a step towards `goal_bytes`. A device whose memory needs no page descriptors has one step.
    fn request_step(&self, _size_bytes: u64, goal_bytes: u64) {
        self.request(goal_bytes);
    }

    /// Tells the guest again what is requested: a driver that waits for its next try makes it at once.
    fn remind(&self);

    /// Reports that a goal is out of reach, because the guest has no room for page descriptors.
    fn report_held(&self) {}
}

/// Sizes of a zone's virtio-mem device, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceSizes {
    /// The unit in which memory is plugged.
    pub block_bytes: u64,
    /// The most that can be plugged.
    pub region_bytes: u64,
    /// What the guest is asked to have plugged.
    pub requested_bytes: u64,
    /// What it has plugged.
    pub plugged_bytes: u64,
    /// The guest's driver.
    pub driver: DriverState,
    /// Part of a client's request that waits until the guest has room for its page descriptors.
    pub held_bytes: u64,
    /// Why less is requested than was asked for; until the next request.
    pub shortfall: Option<Shortfall>,
    /// The last requested size was withdrawn, because the guest's driver is unsupported. Cleared by the next request.
    pub is_withdrawn: bool,
}

impl DeviceSizes {
    /// Reason why the device has lowered the request, as in the API: `pool-full`, `driver`.
    fn lack(&self) -> Option<&'static str> {
        let driver = self.is_withdrawn.then_some(DRIVER_LACK);
        self.shortfall.map(|shortfall| shortfall.reason).or(driver)
    }
}

/// Reason of a request that was withdrawn, because the guest's driver is unsupported.
pub const DRIVER_LACK: &str = "driver";

/// Reason of a request for whose page descriptors the guest has no DRAM.
pub const DESCRIPTOR_LACK: &str = "descriptors";

/// What the host could not provide of the size that was requested last: the device has lowered the request to what
/// can be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortfall {
    /// What kept it, as in the metrics: `pool-full`.
    pub reason: &'static str,
    /// The size that was requested.
    pub wanted_bytes: u64,
}

/// A zone that the governor sizes.
#[derive(Clone)]
pub struct GovernedZone {
    /// `dram`, `pm`, or what its flag calls it.
    pub id: String,
    /// Where its memory comes from.
    pub tier: Tier,
    /// Its node in the guest.
    pub guest_numa_node: u32,
    /// Memory of that node that the guest booted with.
    pub boot_bytes: u64,
    /// Its device.
    pub device: Arc<dyn ZoneDevice>,
}

/// Memory that nobody sizes and that comes while the guest runs. Others count it, and a guest that uses it reports it.
#[derive(Clone, Debug, Default)]
pub struct Beside {
    /// What has come by ACPI. It never goes, and is to a guest as what it booted with.
    pub dimm_bytes: Arc<AtomicU64>,
    /// Volumes and files that are mapped into the guest, which may take any of them for memory (devdax, with the kmem driver).
    pub mapped_bytes: Arc<AtomicU64>,
}

impl Beside {
    fn dimm_bytes(&self) -> u64 {
        self.dimm_bytes.load(Ordering::Relaxed)
    }

    fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes.load(Ordering::Relaxed)
    }
}

/// Tells how much a pool can still lend.
pub type PoolFree = Arc<dyn Fn() -> u64 + Send + Sync>;
