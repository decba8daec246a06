//! Lent memory that a shrink could take.

use super::Controller;
use super::allocation::growth_rank;
use crate::units::round_down;
use crate::{HostView, Tier};

impl Controller {
    /// Plugged PM of each zone above the floor and outside pinned zones, whatever the policy, in
    /// the order of the host's zones.
    ///
    /// The zones keep the floor together. They are unplugged in the order of a shrink after the
    /// last report.
    pub fn recallable_bytes(&self, host: &HostView) -> Vec<u64> {
        let decision = self.last.map(|last| last.decision);
        let near = decision.and_then(|decision| decision.near);
        let from = decision.and_then(|decision| decision.from);
        let mut order: Vec<_> = host.zones.iter().enumerate().collect();
        order.sort_by_key(|(index, zone)| (growth_rank(host, zone, near, from), *index));
        let mut over_bytes = host.plugged_bytes().saturating_sub(self.floor_bytes(host));
        let mut recallable = vec![0; host.zones.len()];
        for (index, zone) in order.into_iter().rev() {
            if zone.tier == Tier::Pm && !self.is_pinned(zone.id) {
                let above_bytes = zone.plugged_bytes.saturating_sub(zone.floor_bytes);
                let bytes = round_down(above_bytes.min(over_bytes), zone.block_bytes.max(1));
                recallable[index] = bytes;
                over_bytes -= bytes;
            }
        }
        recallable
    }
}
