//! A VM's memory, as the host observes it.

use std::fmt;

pub use foreshore_types::Tier;
use serde::{Deserialize, Serialize};

use crate::statistics::BalloonState;
use crate::units::BLOCK_BYTES;

/// ID of a zone of one VM. The caller chooses the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct ZoneId(pub u32);

impl fmt::Display for ZoneId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "zone{}", self.0)
    }
}

/// State of the guest's driver of a zone, as its device reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DriverState {
    /// No driver has loaded since the guest started, or the last one has reset the device.
    #[default]
    Absent,
    /// The driver carries out requests.
    Ready,
    /// The device has refused the driver, because it lacks a feature. No memory is requested from
    /// the zone.
    Unsupported,
}

impl DriverState {
    /// All states, for a metric that shows each of them.
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

/// Part of the size requested last that the host could not provide. The device has lowered the
/// request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Shortfall {
    /// Reason as in the metrics: `pool-full`.
    pub reason: &'static str,
    /// Size that was requested.
    pub wanted_bytes: u64,
}

/// Reason of a request that was withdrawn, because the guest's driver is unsupported.
pub const UNSUPPORTED_DRIVER_REASON: &str = "driver";

/// Reason why a driver is refused, for logs, errors and statuses. Linux commit 61082ad6a6e1, first
/// released in 5.16.
pub const UNSUPPORTED_DRIVER: &str = "the guest's virtio_mem driver lacks \
    VIRTIO_MEM_F_UNPLUGGED_INACCESSIBLE, which Linux has since version 5.16";

/// The hotplug part of a zone, as its virtio-mem device has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ZoneSizes {
    /// ID of the zone.
    pub id: ZoneId,
    /// Type of its memory.
    pub tier: Tier,
    /// Node of the zone in the guest.
    pub guest_numa_node: u32,
    /// Size of the device's blocks. Each size is a multiple of it.
    pub block_bytes: u64,
    /// Lower limit of the requested size.
    pub floor_bytes: u64,
    /// Upper limit of the requested size: the device's region.
    pub max_bytes: u64,
    /// Requested size.
    pub requested_bytes: u64,
    /// Plugged size.
    pub plugged_bytes: u64,
    /// State of the guest's driver.
    pub driver: DriverState,
    /// Part of a client's request that is withheld until the guest has room for its page
    /// descriptors.
    pub held_bytes: u64,
    /// Shortfall of the last requested size. Cleared by the next request.
    pub shortfall: Option<Shortfall>,
    /// The last requested size was withdrawn, because the driver is unsupported. Cleared by the
    /// next request.
    pub is_withdrawn: bool,
}

impl ZoneSizes {
    /// Creates a zone with blocks of 2 MiB and nothing plugged, on the guest node with the same
    /// number.
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

    /// Reason why the device has lowered the request, as in the API: `pool-full`, `driver`.
    pub fn lowered_by(&self) -> Option<&'static str> {
        let driver = self.is_withdrawn.then_some(UNSUPPORTED_DRIVER_REASON);
        self.shortfall.map(|shortfall| shortfall.reason).or(driver)
    }

    /// Upper limit of the requested size: the device's region, or the requested size if the driver
    /// is unsupported.
    pub fn requestable_bytes(&self) -> u64 {
        match self.driver {
            DriverState::Unsupported => self.requested_bytes.min(self.max_bytes),
            DriverState::Absent | DriverState::Ready => self.max_bytes,
        }
    }

    /// Requested memory that is not plugged yet.
    pub fn outstanding_grow_bytes(&self) -> u64 {
        self.requested_bytes.saturating_sub(self.plugged_bytes)
    }

    /// Plugged memory that has to be unplugged.
    pub fn outstanding_shrink_bytes(&self) -> u64 {
        self.plugged_bytes.saturating_sub(self.requested_bytes)
    }
}

/// Distance from one guest node to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct NodeDistance {
    /// Node with the CPU.
    pub from: u32,
    /// Node with the memory.
    pub to: u32,
    /// Distance as in ACPI's SLIT, where a node has distance 10 to itself.
    pub distance: u8,
}

/// Distances between the guest's nodes, as in its SLIT.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Distances {
    /// Distances other than the defaults, in order of their nodes.
    set: Vec<NodeDistance>,
}

impl Distances {
    /// Default distance from a node to itself.
    pub const LOCAL: u8 = 10;
    /// Default distance from a node to another one.
    pub const REMOTE: u8 = 20;

    /// Sets one distance. The opposite direction is separate.
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

    /// Returns the distances that were set, in order of their nodes.
    pub fn iter(&self) -> impl Iterator<Item = &NodeDistance> {
        self.set.iter()
    }

    fn find(&self, from: u32, to: u32) -> Result<usize, usize> {
        self.set.binary_search_by_key(&(from, to), |entry| (entry.from, entry.to))
    }
}

/// A VM's memory at one moment, as the host observes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HostView {
    /// Zones with a hotplug part, and the balloon zone.
    pub zones: Vec<ZoneSizes>,
    /// Boot memory, and memory that was added later and is never unplugged (DIMMs).
    pub boot_bytes: u64,
    /// Volumes and files that are mapped into the guest, which may use them as memory.
    pub mapped_bytes: u64,
    /// Free memory of the pool for zones of tier `pm`.
    pub pool_free_bytes: u64,
    /// Distances between the guest's nodes.
    pub distances: Distances,
    /// The zone that is a balloon in boot memory, if any. Its memory needs neither page descriptors
    /// nor onlining when it grows, because it is the guest's already.
    pub balloon: Option<ZoneId>,
    /// The balloon, if its statistics size a guest without an agent.
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

    /// Sum of the sizes of all devices' regions.
    pub fn region_bytes(&self) -> u64 {
        self.sum(|zone| zone.max_bytes)
    }

    /// Upper limit of the memory that a report can contain.
    pub fn most_memory_bytes(&self) -> u64 {
        let sizes = [self.boot_bytes, self.region_bytes(), self.mapped_bytes];
        sizes.into_iter().fold(0, u64::saturating_add)
    }

    /// Sum over all zones of the largest size that may be requested. A zone with an unsupported
    /// driver keeps its requested size.
    pub fn max_bytes(&self) -> u64 {
        self.sum(ZoneSizes::requestable_bytes)
    }

    /// Memory that virtio-mem zones can have plugged together. The guest reserves DRAM for its page
    /// descriptors.
    pub fn pluggable_bytes(&self) -> u64 {
        self.sum(|zone| match zone.driver {
            _ if self.balloon == Some(zone.id) => 0,
            DriverState::Unsupported => zone.plugged_bytes,
            DriverState::Absent | DriverState::Ready => zone.max_bytes,
        })
    }

    /// Requested memory that is not plugged yet, of all zones.
    pub fn outstanding_grow_bytes(&self) -> u64 {
        self.sum(ZoneSizes::outstanding_grow_bytes)
    }

    /// Plugged memory that has to be unplugged, of all zones.
    pub fn outstanding_shrink_bytes(&self) -> u64 {
        self.sum(ZoneSizes::outstanding_shrink_bytes)
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
