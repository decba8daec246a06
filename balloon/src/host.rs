//! A VM's memory, as the host observes it.

use std::fmt;

pub use foreshore_types::Tier;
use serde::{Deserialize, Serialize};

use crate::statistics::BalloonState;
use crate::units::BLOCK_BYTES;

/// ID of a zone within one VM. The caller chooses the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct ZoneId(pub u32);

impl fmt::Display for ZoneId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "zone{}", self.0)
    }
}

/// State of the guest's driver for one zone, as the zone's device reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DriverState {
    /// No driver has been loaded since the guest started, or the last driver has reset the device.
    #[default]
    Absent,
    /// The driver carries out requests.
    Ready,
    /// The device has refused the driver because it lacks a feature. No memory is requested from
    /// the zone.
    Unsupported,
}

impl DriverState {
    /// All states, for a metric with one series per state.
    pub const ALL: [Self; 3] = [Self::Absent, Self::Ready, Self::Unsupported];

    /// Name in metrics and in the API.
    pub fn label(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Ready => "ready",
            Self::Unsupported => "unsupported",
        }
    }
}

/// Part of the last requested size that the host could not provide. The device has lowered the
/// request by this part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Shortfall {
    /// Reason as shown in metrics, for example `pool-full`.
    pub reason: &'static str,
    /// Size that was requested.
    pub wanted_bytes: u64,
}

/// Reason shown if a request was withdrawn because the guest's driver is unsupported.
pub const UNSUPPORTED_DRIVER_REASON: &str = "driver";

/// Explanation of a refused driver for logs, errors and statuses. The missing feature was added by
/// Linux commit 61082ad6a6e1, first released in 5.16.
pub const UNSUPPORTED_DRIVER: &str = "the guest's virtio_mem driver lacks \
    VIRTIO_MEM_F_UNPLUGGED_INACCESSIBLE, which Linux has since version 5.16";

/// Sizes of a zone's hotpluggable part, as its virtio-mem device reports them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ZoneSizes {
    /// ID of the zone.
    pub id: ZoneId,
    /// Type of the zone's memory.
    pub tier: Tier,
    /// Guest NUMA node of the zone.
    pub guest_numa_node: u32,
    /// Block size of the device. Every other size is a multiple of it.
    pub block_bytes: u64,
    /// Lower limit of the requested size.
    pub floor_bytes: u64,
    /// Upper limit of the requested size, which is the size of the device's region.
    pub max_bytes: u64,
    /// Requested size.
    pub requested_bytes: u64,
    /// Plugged size.
    pub plugged_bytes: u64,
    /// State of the guest's driver.
    pub driver: DriverState,
    /// Part of a client's request that is withheld until the guest has room for the page
    /// descriptors of that memory.
    pub held_bytes: u64,
    /// Shortfall of the last requested size. The next request clears it.
    pub shortfall: Option<Shortfall>,
    /// The last requested size was withdrawn because the driver is unsupported. The next request
    /// clears this flag.
    pub is_withdrawn: bool,
}

impl ZoneSizes {
    /// Creates a zone with blocks of 2 MiB and no plugged memory. Its guest node has the same
    /// number as the zone.
    pub fn empty(id: u32, tier: Tier, max_bytes: u64) -> Self {
        ZoneSizes {
            id: ZoneId(id),
            tier,
            guest_numa_node: id,
            block_bytes: BLOCK_BYTES,
            floor_bytes: 0,
            max_bytes,
            requested_bytes: 0,
            plugged_bytes: 0,
            driver: DriverState::Ready,
            held_bytes: 0,
            shortfall: None,
            is_withdrawn: false,
        }
    }

    /// Returns the reason why the device lowered the request, as in the API: `pool-full` or
    /// `driver`.
    pub fn lowered_by(&self) -> Option<&'static str> {
        let driver = self.is_withdrawn.then_some(UNSUPPORTED_DRIVER_REASON);
        self.shortfall.map(|shortfall| shortfall.reason).or(driver)
    }

    /// Returns the upper limit of the requested size: the size of the device's region, or the
    /// present request if the driver is unsupported.
    pub fn requestable_bytes(&self) -> u64 {
        match self.driver {
            DriverState::Unsupported => self.requested_bytes.min(self.max_bytes),
            DriverState::Absent | DriverState::Ready => self.max_bytes,
        }
    }

    /// Returns the requested memory that is not plugged yet.
    pub fn outstanding_grow_bytes(&self) -> u64 {
        self.requested_bytes.saturating_sub(self.plugged_bytes)
    }

    /// Returns the plugged memory that still has to be unplugged.
    pub fn outstanding_shrink_bytes(&self) -> u64 {
        self.plugged_bytes.saturating_sub(self.requested_bytes)
    }
}

/// Distance from one guest node to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct NodeDistance {
    /// Node of the CPU.
    pub from: u32,
    /// Node of the memory.
    pub to: u32,
    /// Distance as in ACPI's SLIT. The distance from a node to itself is 10.
    pub distance: u8,
}

/// Distances between the guest's nodes, as in the guest's SLIT.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Distances {
    /// Distances that differ from the defaults, ordered by their nodes.
    set: Vec<NodeDistance>,
}

impl Distances {
    /// Default distance from a node to itself.
    pub const LOCAL: u8 = 10;
    /// Default distance between two different nodes.
    pub const REMOTE: u8 = 20;

    /// Sets the distance in one direction. The opposite direction is set separately.
    pub fn set(&mut self, from: u32, to: u32, distance: u8) {
        let entry = NodeDistance { from, to, distance };
        match self.find(from, to) {
            Ok(index) => self.set[index] = entry,
            Err(index) => self.set.insert(index, entry),
        }
    }

    /// Returns the distance from one node to another.
    pub fn between(&self, from: u32, to: u32) -> u8 {
        match self.find(from, to) {
            Ok(index) => self.set[index].distance,
            Err(_) if from == to => Self::LOCAL,
            Err(_) => Self::REMOTE,
        }
    }

    /// Returns the distances that were set, ordered by their nodes.
    pub fn iter(&self) -> impl Iterator<Item = &NodeDistance> {
        self.set.iter()
    }

    fn find(&self, from: u32, to: u32) -> Result<usize, usize> {
        self.set.binary_search_by_key(&(from, to), |entry| (entry.from, entry.to))
    }
}

/// Free space of a pool that volumes share with lent memory, and the watermarks of the free space.
///
/// A watermark counts only up to `needed_bytes`, because volumes cannot use more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StorageSpace {
    /// Bytes that volumes could allocate now, some of them only after erasing.
    pub free_bytes: u64,
    /// Bytes that volumes may still allocate: their sizes without their allocated bytes.
    pub needed_bytes: u64,
    /// Bytes lent as memory.
    pub lent_bytes: u64,
    /// Promised bytes that memory may still borrow, because it can be moved to DRAM.
    pub borrowable_bytes: u64,
    /// Free space that no request of memory uses. With less, memory is moved to DRAM.
    pub min_bytes: u64,
    /// With less free space, memory is recalled. No policy grows memory below this watermark.
    pub low_bytes: u64,
    /// Recall ends when this much space is free.
    pub high_bytes: u64,
}

impl StorageSpace {
    /// Returns true if the free space is below the watermark `low`.
    pub fn is_low(&self) -> bool {
        self.free_bytes < self.low_bytes.min(self.needed_bytes)
    }

    /// Returns the free space above the watermark `low`.
    pub fn above_low_bytes(&self) -> u64 {
        self.free_bytes.saturating_sub(self.low_bytes.min(self.needed_bytes))
    }

    /// Returns the free space above the watermark `high`.
    pub fn above_high_bytes(&self) -> u64 {
        self.free_bytes.saturating_sub(self.high_bytes.min(self.needed_bytes))
    }

    /// Returns the space that is missing up to the watermark `high`.
    pub fn below_high_bytes(&self) -> u64 {
        self.high_bytes.min(self.needed_bytes).saturating_sub(self.free_bytes)
    }
}

/// A VM's memory at one point in time, as the host observes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HostView {
    /// All zones with hotpluggable memory, and the balloon zone.
    pub zones: Vec<ZoneSizes>,
    /// Boot memory, including DIMMs that were added later. It is never unplugged.
    pub boot_bytes: u64,
    /// Volumes and files that are mapped into the guest. The guest may use them as memory.
    pub mapped_bytes: u64,
    /// Free memory in the pool for zones of tier `pm`.
    pub pool_free_bytes: u64,
    /// Free space of the pool for volumes. `None` if the VM has no watermarks for it.
    #[serde(skip)]
    pub storage: Option<StorageSpace>,
    /// Distances between the guest's nodes.
    pub distances: Distances,
    /// Zone that is a balloon in boot memory, if any. It already belongs to the guest, so growing
    /// it needs neither page descriptors nor onlining.
    pub balloon: Option<ZoneId>,
    /// State of the balloon, if its statistics are used to size a guest without an agent.
    #[serde(skip)]
    pub balloon_state: Option<BalloonState>,
}

impl HostView {
    /// Sum of the requested sizes of all zones.
    pub fn requested_bytes(&self) -> u64 {
        self.sum(|zone| zone.requested_bytes)
    }

    /// Sum of the plugged sizes of all zones.
    pub fn plugged_bytes(&self) -> u64 {
        self.sum(|zone| zone.plugged_bytes)
    }

    /// Sum of the region sizes of all devices.
    pub fn region_bytes(&self) -> u64 {
        self.sum(|zone| zone.max_bytes)
    }

    /// Upper limit of the memory that a valid report can contain.
    pub fn max_memory_bytes(&self) -> u64 {
        let sizes = [self.boot_bytes, self.region_bytes(), self.mapped_bytes];
        sizes.into_iter().fold(0, u64::saturating_add)
    }

    /// Sum, over all zones, of the largest size that may be requested. A zone with an unsupported
    /// driver counts with its present request.
    pub fn max_bytes(&self) -> u64 {
        self.sum(ZoneSizes::requestable_bytes)
    }

    /// Largest total size that all virtio-mem zones can have plugged. The guest reserves DRAM for
    /// the page descriptors of that much memory.
    pub fn pluggable_bytes(&self) -> u64 {
        self.sum(|zone| match zone.driver {
            _ if self.balloon == Some(zone.id) => 0,
            DriverState::Unsupported => zone.plugged_bytes,
            DriverState::Absent | DriverState::Ready => zone.max_bytes,
        })
    }

    /// Requested memory that is not plugged yet, in all zones.
    pub fn outstanding_grow_bytes(&self) -> u64 {
        self.sum(ZoneSizes::outstanding_grow_bytes)
    }

    /// Plugged memory that still has to be unplugged, in all zones.
    pub fn outstanding_shrink_bytes(&self) -> u64 {
        self.sum(ZoneSizes::outstanding_shrink_bytes)
    }

    /// Returns the bytes that PM may take from the pool: its free memory without the space that
    /// stays free for volumes. Policies and rules use this limit.
    pub fn lendable_bytes(&self) -> u64 {
        let above_low_bytes = self.storage.map_or(u64::MAX, |storage| storage.above_low_bytes());
        self.pool_free_bytes.min(above_low_bytes)
    }

    fn sum(&self, size: impl Fn(&ZoneSizes) -> u64) -> u64 {
        self.zones.iter().fold(0, |sum, zone| sum.saturating_add(size(zone)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_default_to_those_of_a_slit() {
        let mut distances = Distances::default();
        assert_eq!((distances.between(3, 3), distances.between(0, 1)), (10, 20));
        distances.set(1, 0, 17);
        distances.set(0, 1, 30);
        distances.set(0, 1, 31);
        distances.set(2, 2, 11);
        assert_eq!(
            (distances.between(0, 1), distances.between(1, 0)),
            (31, 17),
            "one way and the other"
        );
        assert_eq!((distances.between(2, 2), distances.between(0, 2)), (11, 20));
    }
}
