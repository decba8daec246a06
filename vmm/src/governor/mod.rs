//! The governor's threads and devices: I/O around [`balloon::governor::Governor`].
//!
//! ```text
//!   agent ── lines ──► agent::serve ─┐  input              events          requests
//!   API, scrapes ── calls ───────────┼─────────► thread ◄─────────► Core ───────────► ZoneDevice
//!   virtio-mem ── plugged changed ───┤                               │
//!   clock ── twice a second ─────────┘                               └── settings ──► agent
//! ```
//!
//! [`balloon::governor`] makes the decisions. [`core::Core`] reads the host before each step and
//! applies the requests to the devices. [`task`] owns the clock, the sockets and the thread.

mod agent;
pub mod core;
mod error;
#[cfg(test)]
pub(crate) mod fake;
pub mod info;
pub mod metrics;
pub mod record;
pub mod task;

use std::ops::{Deref, Index};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use self::error::{DescriptorLack, GovernorError};
use balloon::governor::ResizeTarget;
use balloon::statistics::BalloonState;
use balloon::{StorageSpace, Tier, ZoneId, ZoneSizes};
use foreshore_devices::virtio::zone_device::ZoneDevice;

/// Reason for a request that is stuck because the guest has too little DRAM for page descriptors.
pub const DESCRIPTOR_LACK: &str = "descriptors";

/// Zone that the governor sizes.
#[derive(Clone)]
pub struct GovernedZone {
    /// `dram`, `pm`, or the ID from the zone's flag.
    pub id: String,
    pub tier: Tier,
    pub guest_numa_node: u32,
    /// Boot memory on the zone's node.
    pub boot_bytes: u64,
    pub device: Arc<dyn ZoneDevice>,
}

impl GovernedZone {
    /// Returns the sizes of the zone, whose number in the VM is `id`.
    fn sizes(&self, id: u32) -> ZoneSizes {
        let (id, tier, guest_numa_node) = (ZoneId(id), self.tier, self.guest_numa_node);
        ZoneSizes { id, tier, guest_numa_node, ..self.device.sizes() }
    }
}

/// All zones of a VM, indexed by their numbers. Clones share the zones.
#[derive(Clone)]
pub struct GovernedZones(Arc<[GovernedZone]>);

impl GovernedZones {
    /// Reads the sizes of each zone once.
    fn sizes(&self) -> Vec<ZoneSizes> {
        self.0.iter().zip(0..).map(|(zone, id)| zone.sizes(id)).collect()
    }

    fn find(&self, id: &str) -> Result<ZoneId, GovernorError> {
        let index = self.0.iter().position(|zone| zone.id == id);
        index
            .map(|index| ZoneId(index as u32))
            .ok_or_else(|| GovernorError::NoSuchZone { id: id.to_owned() })
    }

    /// Checks that a client may resize a zone to `size_bytes`. The check does not need the
    /// governor's thread.
    pub fn target(&self, id: &str, size_bytes: u64) -> Result<ResizeTarget, GovernorError> {
        let zone = self.find(id)?;
        let sizes = self[zone].sizes(zone.0);
        ResizeTarget::parse(&sizes, size_bytes)
            .map_err(|reason| GovernorError::NotResizable { id: id.to_owned(), reason })
    }
}

impl Deref for GovernedZones {
    type Target = [GovernedZone];

    fn deref(&self) -> &[GovernedZone] {
        &self.0
    }
}

impl Index<ZoneId> for GovernedZones {
    type Output = GovernedZone;

    fn index(&self, zone: ZoneId) -> &GovernedZone {
        &self.0[zone.0 as usize]
    }
}

/// Memory that is added while the guest runs, but not by the governor. The guest's reports include
/// this memory if the guest uses it.
#[derive(Clone, Debug, Default)]
pub struct UnmanagedMemory {
    /// Total memory of added DIMMs. DIMMs are never removed, and the guest treats them like boot
    /// memory.
    pub dimm_bytes: Arc<AtomicU64>,
    /// Total size of volumes and files that are mapped into the guest. The guest may use any of
    /// them as memory (devdax with the kmem driver).
    pub mapped_bytes: Arc<AtomicU64>,
}

impl UnmanagedMemory {
    fn dimm_bytes(&self) -> u64 {
        self.dimm_bytes.load(Ordering::Relaxed)
    }

    fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes.load(Ordering::Relaxed)
    }
}

/// Balloon of a guest as a source of statistics.
pub trait BalloonSource: Send + Sync {
    /// Requests statistics from the driver.
    fn request_statistics(&self);

    fn state(&self) -> BalloonState;
}

/// Returns the number of bytes that the pool can still lend.
pub type PoolFree = Arc<dyn Fn() -> u64 + Send + Sync>;

/// Returns the free space of the pool for volumes, with its watermarks.
pub type StorageSource = Arc<dyn Fn() -> StorageSpace + Send + Sync>;
