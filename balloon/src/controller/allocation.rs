//! Divides a size for the VM among its zones.

use super::ZoneTracker;
use crate::plan::Reason;
use crate::units::round_down;
use crate::{DriverState, HostView, Tier, TimeMs, ZoneSizes};

/// State of one zone during an allocation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    /// Index of the zone in the host's view.
    index: usize,
    tier: Tier,
    /// Result of [`growth_rank`].
    rank: GrowthRank,
    block_bytes: u64,
    floor_bytes: u64,
    plugged_bytes: u64,
    /// Size to request.
    pub requested_bytes: u64,
    ceiling_bytes: u64,
    /// Reason for the ceiling. The reason is [`Reason::AtCeiling`] if the zone's own size is the
    /// limit.
    ceiling_reason: Reason,
    shrink_cap_bytes: u64,
    pinned: bool,
    is_balloon: bool,
    /// True if the zone has no driver, and another zone with a driver has room. The zone then grows
    /// last.
    grows_last: bool,
}

/// State of all zones during an allocation.
#[derive(Clone, Debug)]
pub(super) struct Allocation {
    shares: Vec<Share>,
    /// Memory with which PM may grow. Requested memory that is not plugged yet is subtracted.
    pm_room: PmRoom,
    /// Memory that can be added before the guest has no more DRAM for page descriptors.
    descriptor_bytes: u64,
    /// Memory that can be added to all zones in total.
    room_bytes: u64,
}

/// Memory of the pool with which PM may grow.
#[derive(Clone, Copy, Debug)]
pub(super) struct PmRoom {
    pub bytes: u64,
    /// Reason why PM cannot grow further.
    pub reason: Reason,
    /// Rule 9: true while PM is recalled. Meanwhile, no requested unplug of PM is withdrawn.
    pub is_recalled: bool,
}

impl PmRoom {
    /// Returns the free memory of the pool.
    pub(super) fn of_pool(host: &HostView) -> Self {
        PmRoom { bytes: host.pool_free_bytes, reason: Reason::PoolEmpty, is_recalled: false }
    }

    fn without(self, bytes: u64) -> Self {
        PmRoom { bytes: self.bytes.saturating_sub(bytes), ..self }
    }
}

/// Limits of an allocation, except the sizes of the zones.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Memory that can be requested in addition to the present requests. [`super::descriptors`]
    /// computes it.
    pub descriptor_bytes: u64,
    /// Memory that can be added to all zones in total.
    pub room_bytes: u64,
    /// Share of each zone that may be lent, in thousandths, if the guest does not online it as
    /// movable.
    pub unmovable_permille: Option<u64>,
    /// True if zones without a driver are used last. [`can_grow_with_driver`] decides this.
    pub driverless_zones_last: bool,
    pub pm_room: PmRoom,
}

/// Returns true if some zone has no driver and another zone with a ready driver can grow now. The
/// room found here must not exceed the room that [`Allocation::grow`] finds. Otherwise, each report
/// would request the difference from a zone without a driver.
pub(super) fn can_grow_with_driver(
    host: &HostView,
    zones: &[ZoneTracker],
    unmovable_permille: Option<u64>,
    pm_room: PmRoom,
    now: TimeMs,
) -> bool {
    if host.zones.iter().all(|zone| zone.driver != DriverState::Absent) {
        return false;
    }
    let pm = host.zones.iter().filter(|zone| zone.tier == Tier::Pm);
    let outstanding_bytes =
        pm.fold(0u64, |sum, zone| sum.saturating_add(zone.outstanding_grow_bytes()));
    let pool_bytes = pm_room.without(outstanding_bytes).bytes;
    host.zones.iter().zip(zones).any(|(zone, tracker)| {
        let unmovable_permille = unmovable_permille.filter(|_| host.balloon != Some(zone.id));
        let (ceiling_bytes, _) = ceiling(zone, tracker, unmovable_permille, now);
        let room_bytes = ceiling_bytes.saturating_sub(zone.requested_bytes);
        let pool_bytes = if zone.tier == Tier::Pm { pool_bytes } else { u64::MAX };
        zone.driver == DriverState::Ready
            && !tracker.pinned
            && room_bytes.min(pool_bytes) >= zone.block_bytes.max(1)
    })
}

/// Returns the largest size that may be requested from a zone, in whole blocks, and the reason for
/// this limit.
fn ceiling(
    zone: &ZoneSizes,
    tracker: &ZoneTracker,
    unmovable_permille: Option<u64>,
    now: TimeMs,
) -> (u64, Reason) {
    let reason = match zone.driver {
        DriverState::Unsupported => Reason::UnsupportedDriver,
        DriverState::Absent | DriverState::Ready => Reason::AtCeiling,
    };
    let mut ceiling = (zone.requestable_bytes(), reason);
    if let Some(permille) = unmovable_permille {
        let part = crate::units::scale(zone.max_bytes, permille, 1000);
        ceiling = ceiling.min_by_bytes((part, Reason::OnlinePolicy));
    }
    ceiling = ceiling.min_by_bytes((tracker.ceiling_bytes(zone, now), Reason::NoProgress));
    ceiling = ceiling.min_by_bytes((tracker.host_ceiling_bytes(zone, now), Reason::HostShort));
    (round_down(ceiling.0, zone.block_bytes.max(1)), ceiling.1)
}

/// Position of a zone in the order of growth: its tier, false for the balloon, and its distance.
pub(super) type GrowthRank = (Tier, bool, u8);

/// Returns the position of a zone in the order of growth. A shrink starts at the end of this order.
/// See [`Allocation::new`] for `near` and `from`.
///
/// DRAM comes first. Within DRAM, the balloon comes first, because Linux fills it with pages from
/// any node. Within a tier, zones are ordered by distance. Equally near zones keep the order of the
/// host's view.
pub(super) fn growth_rank(
    host: &HostView,
    zone: &ZoneSizes,
    near: Option<u32>,
    from: Option<u32>,
) -> GrowthRank {
    let to_zone = |node| host.distances.between(node, zone.guest_numa_node);
    let distance = match (from, near) {
        (Some(from), _) => u8::MAX - to_zone(from),
        (None, Some(near)) => to_zone(near),
        (None, None) => 0,
    };
    (zone.tier, host.balloon != Some(zone.id), distance)
}

impl Allocation {
    /// Creates an allocation that starts from the requested sizes. `awaited` is `host` without
    /// requests that make no progress, so that these reserve no memory in the pool. `zones` are the
    /// trackers of the host's zones. `near` is the guest node for which the zones are resized.
    /// `from` is the node from which memory is removed.
    pub(super) fn new(
        host: &HostView,
        awaited: &HostView,
        zones: &[ZoneTracker],
        near: Option<u32>,
        from: Option<u32>,
        limits: Limits,
        now: TimeMs,
    ) -> Self {
        let mut shares: Vec<Share> = host
            .zones
            .iter()
            .zip(zones)
            .enumerate()
            .map(|(index, (zone, tracker))| {
                let rank = growth_rank(host, zone, near, from);
                let is_balloon = host.balloon == Some(zone.id);
                let unmovable_permille = limits.unmovable_permille.filter(|_| !is_balloon);
                let limits = Limits { unmovable_permille, ..limits };
                Share { index, rank, is_balloon, ..Share::new(zone, tracker, limits, now) }
            })
            .collect();
        shares.sort_by_key(|share| (share.rank, share.index));
        let awaited_pm = awaited.zones.iter().filter(|zone| zone.tier == Tier::Pm);
        let outstanding_pm =
            awaited_pm.fold(0u64, |sum, zone| sum.saturating_add(zone.outstanding_grow_bytes()));
        Allocation {
            shares,
            pm_room: limits.pm_room.without(outstanding_pm),
            descriptor_bytes: limits.descriptor_bytes,
            room_bytes: limits.room_bytes,
        }
    }

    /// Reserves memory in the pool that is requested but no longer awaited. The guest may still
    /// plug it.
    pub(super) fn reserve_pool(mut self, pm_bytes: u64) -> Self {
        self.pm_room = self.pm_room.without(pm_bytes);
        self
    }

    /// Adds `bytes`. Returns the number of bytes added, and the obstacle if fewer than `bytes` were
    /// added.
    pub(super) fn grow(&mut self, mut bytes: u64) -> (u64, Option<Reason>) {
        let wanted = bytes;
        // 1. Blocks that should be unplugged but are still plugged are available immediately.
        let is_recalled = |share: &Share| share.tier == Tier::Pm && self.pm_room.is_recalled;
        for share in self.shares.iter_mut().filter(|share| !share.pinned && !is_recalled(share)) {
            let still_plugged =
                share.plugged_bytes.min(share.ceiling_bytes).saturating_sub(share.requested_bytes);
            let before = share.requested_bytes;
            bytes -=
                share.add(round_down(still_plugged.min(self.room_bytes), share.block_bytes), bytes);
            self.room_bytes -= share.requested_bytes - before;
        }
        // 2. DRAM comes next, then PM, then zones without a driver, because a driver may still
        // load.
        let mut limit = None;
        let free = self.shares.iter_mut().filter(|share| !share.pinned);
        let (last, first): (Vec<_>, Vec<_>) = free.partition(|share| share.grows_last);
        for share in first.into_iter().chain(last) {
            let room = share.ceiling_bytes.saturating_sub(share.requested_bytes);
            let pool = if share.tier == Tier::Pm { self.pm_room.bytes } else { u64::MAX };
            let descriptors = if share.is_balloon { u64::MAX } else { self.descriptor_bytes };
            let allowed = room.min(pool).min(descriptors).min(self.room_bytes);
            let (before, requested) = (bytes, share.requested_bytes);
            let added = share.add(round_down(allowed, share.block_bytes), bytes);
            bytes -= added;
            self.room_bytes -= share.requested_bytes - requested;
            if !share.is_balloon {
                self.descriptor_bytes -= added.min(self.descriptor_bytes);
            }
            if share.tier == Tier::Pm {
                self.pm_room = self.pm_room.without(added);
            }
            if added < before {
                let descriptors = if share.is_balloon { u64::MAX } else { self.descriptor_bytes };
                limit = Some(match self.room_bytes < share.block_bytes {
                    true => Reason::AtCeiling,
                    false => share.limit(room, pool, self.pm_room.reason, descriptors),
                });
            }
        }
        if bytes == 0 {
            return (wanted, None);
        }
        (wanted - bytes, Some(limit.unwrap_or(Reason::Pinned)))
    }

    /// Removes `bytes`. Returns the number of bytes removed, and the obstacle if fewer than `bytes`
    /// were removed.
    pub(super) fn shrink(&mut self, bytes: u64) -> (u64, Option<Reason>) {
        self.shrink_tiers(bytes, &[Tier::Dram, Tier::Pm])
    }

    /// Like [`Self::shrink`], but removes memory only from zones of `tiers`.
    pub(super) fn shrink_tiers(&mut self, mut bytes: u64, tiers: &[Tier]) -> (u64, Option<Reason>) {
        let wanted = bytes;
        let mut limit = None;
        let mut shrunk_tier = None;
        let mut blocked_tier = None;
        // PM is removed first. DRAM is removed only if no removable PM is left. Each step removes
        // memory from a single tier. Otherwise, the guest would unplug DRAM while it still has PM,
        // because it handles requests of all devices in parallel.
        let may_shrink = |share: &&mut Share| !share.pinned && tiers.contains(&share.tier);
        for share in self.shares.iter_mut().rev().filter(may_shrink) {
            if blocked_tier.is_some_and(|tier| tier != share.tier) {
                break;
            }
            let over = share.requested_bytes.saturating_sub(share.floor_bytes);
            if over >= share.block_bytes && shrunk_tier.is_some_and(|tier| tier != share.tier) {
                return (wanted - bytes, None);
            }
            let allowed =
                round_down(over.min(share.shrink_cap_bytes).min(bytes), share.block_bytes);
            share.requested_bytes -= allowed;
            bytes -= allowed;
            if allowed > 0 {
                shrunk_tier = Some(share.tier);
            }
            if share.shrink_cap_bytes < over && bytes >= share.block_bytes {
                // The guest does not release more memory of this zone, so the other zones of its
                // tier are tried, but not the next tier.
                blocked_tier = Some(share.tier);
            }
            limit = Some(if blocked_tier.is_some() { Reason::NoProgress } else { Reason::AtFloor });
        }
        let min_block_bytes = self.shares.iter().map(|share| share.block_bytes).min().unwrap_or(1);
        if bytes < min_block_bytes {
            return (wanted - bytes, None);
        }
        // If a pinned zone could shrink, its pin is the obstacle to report, and not the floors.
        let is_held = |share: &Share| {
            share.pinned && tiers.contains(&share.tier) && share.requested_bytes > share.floor_bytes
        };
        if limit.is_none_or(|limit| limit == Reason::AtFloor) && self.shares.iter().any(is_held) {
            limit = Some(Reason::Pinned);
        }
        (wanted - bytes, Some(limit.unwrap_or(Reason::AtFloor)))
    }

    /// Returns the sizes to request, in the order of the host's zones.
    pub(super) fn into_requests(mut self) -> Vec<u64> {
        self.shares.sort_by_key(|share| share.index);
        self.shares.into_iter().map(|share| share.requested_bytes).collect()
    }
}

impl Share {
    fn new(zone: &ZoneSizes, tracker: &ZoneTracker, limits: Limits, now: TimeMs) -> Self {
        let block_bytes = zone.block_bytes.max(1);
        let (ceiling_bytes, ceiling_reason) =
            ceiling(zone, tracker, limits.unmovable_permille, now);
        Share {
            index: 0,
            tier: zone.tier,
            rank: (zone.tier, true, 0),
            block_bytes,
            floor_bytes: zone.floor_bytes.min(zone.max_bytes),
            plugged_bytes: zone.plugged_bytes,
            requested_bytes: zone.requested_bytes,
            ceiling_bytes,
            ceiling_reason,
            shrink_cap_bytes: tracker.shrink_cap_bytes(now),
            pinned: tracker.pinned,
            is_balloon: false,
            grows_last: limits.driverless_zones_last && zone.driver == DriverState::Absent,
        }
    }

    /// Adds `wanted`, rounded up to whole blocks, but no more than `allowed`. Returns the part of
    /// `wanted` that was added.
    fn add(&mut self, allowed: u64, wanted: u64) -> u64 {
        let added = crate::units::round_up(wanted.min(allowed), self.block_bytes).min(allowed);
        self.requested_bytes += added;
        added.min(wanted)
    }

    fn limit(&self, room: u64, pool: u64, of_pool: Reason, descriptors: u64) -> Reason {
        if self.ceiling_reason == Reason::UnsupportedDriver {
            self.ceiling_reason
        } else if descriptors < self.block_bytes {
            Reason::Descriptors
        } else if pool < room {
            of_pool
        } else {
            self.ceiling_reason
        }
    }
}

trait MinByBytes {
    fn min_by_bytes(self, other: Self) -> Self;
}

impl MinByBytes for (u64, Reason) {
    fn min_by_bytes(self, other: Self) -> Self {
        if other.0 < self.0 { other } else { self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MIB, ZoneId};

    /// Guest in which nodes 0 and 1 have 4 MiB of pluggable DRAM each, and nodes 2 and 3 have PM.
    /// Node 2 is near node 0, and node 3 is near node 1.
    fn two_sockets(requested_mib: [u64; 4]) -> HostView {
        let tiers = [Tier::Dram, Tier::Dram, Tier::Pm, Tier::Pm];
        let mut host = HostView { pool_free_bytes: 64 * MIB, ..HostView::default() };
        for ((node, tier), requested_mib) in (0..).zip(tiers).zip(requested_mib) {
            host.zones.push(ZoneSizes {
                requested_bytes: requested_mib * MIB,
                plugged_bytes: requested_mib * MIB,
                ..ZoneSizes::empty(node, tier, if tier == Tier::Dram { 4 * MIB } else { 16 * MIB })
            });
        }
        for (socket, pm) in [(0, 2), (1, 3)] {
            host.distances.set(socket, pm, 17);
            host.distances.set(pm, socket, 17);
            host.distances.set(1 - socket, pm, 28);
        }
        host
    }

    fn trackers(host: &HostView) -> Vec<ZoneTracker> {
        host.zones.iter().map(|zone| ZoneTracker::new(zone, TimeMs(0))).collect()
    }

    fn allocation(host: &HostView, near: Option<u32>) -> Allocation {
        let zones = trackers(host);
        let limits = Limits {
            descriptor_bytes: 1 << 40,
            room_bytes: u64::MAX,
            unmovable_permille: None,
            driverless_zones_last: false,
            pm_room: PmRoom::of_pool(host),
        };
        Allocation::new(host, host, &zones, near, None, limits, TimeMs(0))
    }

    fn grown_mib(near: Option<u32>, mib: u64) -> Vec<u64> {
        let mut allocation = allocation(&two_sockets([0; 4]), near);
        assert_eq!(allocation.grow(mib * MIB), (mib * MIB, None));
        allocation.into_requests().into_iter().map(|bytes| bytes / MIB).collect()
    }

    /// Requested sizes after shrinks by `mib` in total. The guest completes each shrink.
    fn shrunk_mib(near: Option<u32>, mib: u64) -> Vec<u64> {
        let mut left = [4, 4, 16, 16];
        let mut to_go = mib * MIB;
        while to_go > 0 {
            let mut allocation = allocation(&two_sockets(left), near);
            let (taken, _) = allocation.shrink(to_go);
            assert!(taken > 0);
            to_go -= taken;
            let requests = allocation.into_requests();
            left = std::array::from_fn(|zone| requests[zone] / MIB);
        }
        left.to_vec()
    }

    #[test]
    fn dram_grows_before_nearer_pm() {
        assert_eq!(grown_mib(Some(1), 4), [0, 4, 0, 0]);
        assert_eq!(
            grown_mib(Some(1), 6),
            [2, 4, 0, 0],
            "DRAM of the other socket precedes PM of this socket"
        );
        assert_eq!(grown_mib(Some(1), 10), [4, 4, 0, 2]);
    }

    #[test]
    fn local_pm_grows_before_remote_pm() {
        assert_eq!(grown_mib(Some(0), 24), [4, 4, 16, 0]);
        assert_eq!(grown_mib(Some(1), 24), [4, 4, 0, 16]);
        assert_eq!(grown_mib(Some(1), 28), [4, 4, 4, 16]);
    }

    #[test]
    fn allocation_without_near_node_uses_host_order() {
        assert_eq!(grown_mib(None, 28), [4, 4, 16, 4]);
        assert_eq!(shrunk_mib(None, 20), [4, 4, 12, 0]);
    }

    #[test]
    fn shrink_reverses_order_of_grow() {
        assert_eq!(shrunk_mib(Some(1), 16), [4, 4, 0, 16], "memory that is remote to node 1");
        assert_eq!(shrunk_mib(Some(1), 20), [4, 4, 0, 12], "then its own");
        assert_eq!(shrunk_mib(Some(1), 34), [2, 4, 0, 0], "DRAM after all PM is used");
        assert_eq!(shrunk_mib(Some(0), 38), [2, 0, 0, 0]);
    }

    #[test]
    fn shrink_from_node_removes_pm_near_that_node() {
        // The guest has three nodes of DRAM, each with one near node of PM. All other distances are
        // equal.
        let mut host = two_sockets([0; 4]);
        host.distances = crate::Distances::default();
        host.zones.truncate(3);
        for (node, zone) in (3..).zip(&mut host.zones) {
            (zone.tier, zone.guest_numa_node, zone.max_bytes) = (Tier::Pm, node, 16 * MIB);
            (zone.requested_bytes, zone.plugged_bytes) = (16 * MIB, 16 * MIB);
            host.distances.set(node - 3, node, 17);
        }
        for from in 0..3 {
            let zones = trackers(&host);
            let limits = Limits {
                descriptor_bytes: 1 << 40,
                room_bytes: u64::MAX,
                unmovable_permille: None,
                driverless_zones_last: false,
                pm_room: PmRoom::of_pool(&host),
            };
            let mut allocation =
                Allocation::new(&host, &host, &zones, None, Some(from), limits, TimeMs(0));
            assert_eq!(allocation.shrink(16 * MIB), (16 * MIB, None));
            let mut left = [16 * MIB; 3];
            left[from as usize] = 0;
            assert_eq!(allocation.into_requests(), left, "from node {from}");
        }
    }

    #[test]
    fn without_distances_other_nodes_are_equally_far() {
        let mut host = two_sockets([0; 4]);
        host.distances = crate::Distances::default();
        let mut allocation = allocation(&host, Some(3));
        allocation.grow(26 * MIB);
        assert_eq!(allocation.into_requests(), [4, 4, 2, 16].map(|mib| mib * MIB));
    }

    /// Adds a balloon before the zones of the two sockets, as the governor does.
    fn with_balloon(requested_mib: [u64; 5]) -> HostView {
        let [balloon_mib, rest @ ..] = requested_mib;
        let mut host = two_sockets(rest);
        let balloon = ZoneSizes {
            id: ZoneId(9),
            max_bytes: 64 * MIB,
            requested_bytes: balloon_mib * MIB,
            plugged_bytes: balloon_mib * MIB,
            ..host.zones[0]
        };
        host.zones.insert(0, balloon);
        host.balloon = Some(balloon.id);
        host
    }

    #[test]
    fn balloon_grows_first_and_shrinks_last() {
        // The balloon's zone is on node 0, but its memory is from all nodes.
        for (near, next) in [(None, [2, 0]), (Some(0), [2, 0]), (Some(1), [0, 2])] {
            let mut grown = allocation(&with_balloon([60, 0, 0, 0, 0]), near);
            assert_eq!(grown.grow(6 * MIB), (6 * MIB, None));
            assert_eq!(
                grown.into_requests(),
                [64, next[0], next[1], 0, 0].map(|mib| mib * MIB),
                "{near:?}"
            );
            let mut shrunk = allocation(&with_balloon([64, 4, 4, 0, 0]), near);
            assert_eq!(shrunk.shrink(10 * MIB), (10 * MIB, None));
            assert_eq!(shrunk.into_requests(), [62, 0, 0, 0, 0].map(|mib| mib * MIB), "{near:?}");
        }
    }

    #[test]
    fn balloon_deflation_needs_no_descriptors_and_no_onlining() {
        let host = with_balloon([0, 0, 0, 0, 0]);
        let zones = trackers(&host);
        let limits = Limits {
            descriptor_bytes: 2 * MIB,
            room_bytes: u64::MAX,
            unmovable_permille: Some(500),
            driverless_zones_last: false,
            pm_room: PmRoom::of_pool(&host),
        };
        let mut allocation = Allocation::new(&host, &host, &zones, None, None, limits, TimeMs(0));
        assert_eq!(allocation.grow(80 * MIB), (66 * MIB, Some(Reason::Descriptors)));
        assert_eq!(allocation.into_requests(), [64, 2, 0, 0, 0].map(|mib| mib * MIB));
    }
}
