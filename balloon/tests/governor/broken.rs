//! Callers that break one invariant each.

use balloon::governor::Request;
use balloon::{BLOCK_BYTES, HostView, Tier};

use super::world::State;

/// Invariant that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// Requests half a block more.
    Unaligned,
    /// Requests a block above the maximum.
    AboveMaximum,
    /// Requests less than a zone's floor.
    BelowZoneFloor,
    /// Requests nothing of all zones, whatever the floor is.
    BelowFloor,
    /// Follows a policy in a dry run.
    ActsInDryRun,
    /// Follows a policy in a pause.
    ActsInPause,
    /// Sizes a pinned zone.
    MovesPinned,
    /// Requests more from a driver that the device has refused.
    AsksUnsupported,
    /// Shows DRAM as PM and PM as DRAM.
    SwapsTiers,
    /// Decides differently upon the same inputs.
    Wavers,
}

impl Broken {
    pub const ALL: [Self; 10] = [
        Self::Unaligned,
        Self::AboveMaximum,
        Self::BelowZoneFloor,
        Self::BelowFloor,
        Self::ActsInDryRun,
        Self::ActsInPause,
        Self::MovesPinned,
        Self::AsksUnsupported,
        Self::SwapsTiers,
        Self::Wavers,
    ];

    /// Only a guest that follows shows the order of zones.
    pub fn needs_follower(self) -> bool {
        self == Self::SwapsTiers
    }

    /// Changes the requests of a step.
    pub fn distort(self, requests: &mut Vec<Request>, state: &State) {
        for request in requests.iter_mut() {
            let Request::Size(id, bytes) = request else { continue };
            let zone = state.zone(*id);
            match self {
                Self::Unaligned => *bytes += BLOCK_BYTES / 2,
                Self::AboveMaximum => *bytes = zone.max_bytes + BLOCK_BYTES,
                Self::BelowZoneFloor if zone.floor_bytes > 0 => *bytes = 0,
                Self::BelowFloor if zone.floor_bytes == 0 => *bytes = 0,
                _ => {}
            }
        }
        let pinned = state.host.zones.iter().zip(state.pinned).find(|(_, pinned)| *pinned);
        if let (Self::MovesPinned, Some((zone, _))) = (self, pinned) {
            requests.push(Request::Size(zone.id, zone.max_bytes));
        }
    }

    /// Changes the host that the governor sees.
    pub fn distort_host(self, host: &mut HostView) {
        if self == Self::SwapsTiers {
            for zone in &mut host.zones {
                zone.tier = if zone.tier == Tier::Dram { Tier::Pm } else { Tier::Dram };
            }
        }
        if self == Self::AsksUnsupported {
            for zone in &mut host.zones {
                zone.driver = balloon::DriverState::Ready;
            }
        }
    }
}
