//! One size for the VM becomes one for each zone.

use super::progress::Progress;
use crate::plan::Reason;
use crate::units::round_down;
use crate::{HostView, Tier, TimeMs, ZoneSizes};

/// A zone while it is being sized.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    /// Its place in the host's view.
    index: usize,
    tier: Tier,
    block_bytes: u64,
    floor_bytes: u64,
    plugged_bytes: u64,
    /// What is to be requested of it.
    pub requested_bytes: u64,
    ceiling_bytes: u64,
    /// What sets the ceiling, if it is not the zone's size.
    ceiling_reason: Reason,
    shrink_cap_bytes: u64,
    pinned: bool,
}

/// The zones while they are being sized.
#[derive(Clone, Debug)]
pub(super) struct Spread {
    shares: Vec<Share>,
    /// What the pool can still give beyond what is plugged and outstanding.
    pool_bytes: u64,
    /// What may be added before the guest lacks DRAM for page descriptors.
    descriptor_bytes: u64,
}

/// What limits the zones, beside their sizes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// What may be outstanding at a time, see [`super::descriptors`].
    pub carried_bytes: u64,
    /// The share of a zone that may be lent, in thousandths, if the guest does not online it movable.
    pub unmovable_permille: Option<u64>,
}

impl Spread {
    /// Starts from what is requested now. `zones` are the host's with what is known of each.
    pub fn new<'a>(
        host: &HostView,
        zones: impl Iterator<Item = (&'a Progress, bool)>,
        limits: Limits,
        now: TimeMs,
    ) -> Self {
        let mut shares: Vec<Share> = host
            .zones
            .iter()
            .zip(zones)
            .enumerate()
            .map(|(index, (zone, (progress, pinned)))| Share::new(index, zone, progress, pinned, limits, now))
            .collect();
        // DRAM first; within a tier, in the host's order.
        shares.sort_by_key(|share| (share.tier, share.index));
        let owed_pm = host
            .zones
            .iter()
            .filter(|zone| zone.tier == Tier::Pm)
            .fold(0u64, |sum, zone| sum.saturating_add(zone.outstanding_grow_bytes()));
        Spread {
            shares,
            pool_bytes: host.pool_free_bytes.saturating_sub(owed_pm),
            descriptor_bytes: limits.carried_bytes.saturating_sub(host.outstanding_grow_bytes()),
        }
    }

    /// Adds `bytes`, and says what stood in the way if less could be added.
    pub fn grow(&mut self, mut bytes: u64) -> (u64, Option<Reason>) {
        let wanted = bytes;
        // 1. Memory that the guest has been asked for and still has is there at once.
        for share in self.shares.iter_mut().filter(|share| !share.pinned) {
            let back = share.plugged_bytes.min(share.ceiling_bytes).saturating_sub(share.requested_bytes);
            bytes -= share.add(back, bytes);
        }
        // 2. DRAM, then PM.
        let mut limit = None;
        for share in self.shares.iter_mut().filter(|share| !share.pinned) {
            let room = share.ceiling_bytes.saturating_sub(share.requested_bytes);
            let pool = if share.tier == Tier::Pm { self.pool_bytes } else { u64::MAX };
            let allowed = room.min(pool).min(self.descriptor_bytes);
            let before = bytes;
            let added = share.add(round_down(allowed, share.block_bytes), bytes);
            bytes -= added;
            self.descriptor_bytes -= added.min(self.descriptor_bytes);
            if share.tier == Tier::Pm {
                self.pool_bytes -= added.min(self.pool_bytes);
            }
            if added < before {
                limit = Some(share.limit(room, pool, self.descriptor_bytes));
            }
        }
        if bytes == 0 {
            return (wanted, None);
        }
        (wanted - bytes, Some(limit.unwrap_or(Reason::Pinned)))
    }

    /// Takes `bytes` away, and says what stood in the way if less could be taken.
    pub fn shrink(&mut self, mut bytes: u64) -> (u64, Option<Reason>) {
        let wanted = bytes;
        let mut limit = None;
        let mut taken_from = None;
        // PM back first, and DRAM only when no PM is left that could go. A step takes from one tier: a guest
        // serves its devices side by side, and would give DRAM back while it still has PM.
        for share in self.shares.iter_mut().rev().filter(|share| !share.pinned) {
            let over = share.requested_bytes.saturating_sub(share.floor_bytes);
            if over >= share.block_bytes && taken_from.is_some_and(|tier| tier != share.tier) {
                return (wanted - bytes, None);
            }
            let allowed = round_down(over.min(share.shrink_cap_bytes).min(bytes), share.block_bytes);
            share.requested_bytes -= allowed;
            bytes -= allowed;
            if allowed > 0 {
                taken_from = Some(share.tier);
            }
            if share.shrink_cap_bytes < over && bytes >= share.block_bytes {
                // It has more, and does not let it go: what is behind it in the order stays.
                limit = Some(Reason::NoProgress);
                break;
            }
            limit = Some(Reason::AtFloor);
        }
        let left_over = self.shares.iter().map(|share| share.block_bytes).min().unwrap_or(1);
        if bytes < left_over {
            return (wanted - bytes, None);
        }
        (wanted - bytes, Some(limit.unwrap_or(Reason::Pinned)))
    }

    /// The sizes to request, in the host's order.
    pub fn into_requests(mut self) -> Vec<u64> {
        self.shares.sort_by_key(|share| share.index);
        self.shares.into_iter().map(|share| share.requested_bytes).collect()
    }
}

impl Share {
    fn new(
        index: usize,
        zone: &ZoneSizes,
        progress: &Progress,
        pinned: bool,
        limits: Limits,
        now: TimeMs,
    ) -> Self {
        let block_bytes = zone.block_bytes.max(1);
        let mut ceiling = (zone.max_bytes, Reason::AtCeiling);
        if let Some(permille) = limits.unmovable_permille {
            let part = crate::units::scale(zone.max_bytes, permille, 1000);
            ceiling = ceiling.min_by_bytes((part, Reason::OnlinePolicy));
        }
        ceiling = ceiling.min_by_bytes((progress.ceiling_bytes(zone, now), Reason::NoProgress));
        Share {
            index,
            tier: zone.tier,
            block_bytes,
            floor_bytes: zone.floor_bytes.min(zone.max_bytes),
            plugged_bytes: zone.plugged_bytes,
            requested_bytes: zone.requested_bytes,
            ceiling_bytes: round_down(ceiling.0, block_bytes),
            ceiling_reason: ceiling.1,
            shrink_cap_bytes: progress.shrink_cap_bytes(now),
            pinned,
        }
    }

    /// Adds at most `allowed` and, rounded up to a block, `wanted`. Returns what of `wanted` is served.
    fn add(&mut self, allowed: u64, wanted: u64) -> u64 {
        let added = crate::units::round_up(wanted.min(allowed), self.block_bytes).min(allowed);
        self.requested_bytes += added;
        added.min(wanted)
    }

    fn limit(&self, room: u64, pool: u64, descriptors: u64) -> Reason {
        if descriptors < self.block_bytes {
            Reason::Descriptors
        } else if pool < room {
            Reason::PoolEmpty
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
