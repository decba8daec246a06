//! Lent memory that exceeds the VM's guarantee.

use super::Controller;
use crate::units::round_down;
use crate::{HostView, Tier};

impl Controller {
    /// Plugged PM of each zone that the controller may unplug, in the order of the host's zones.
    ///
    /// As in a shrink, the last zone is unplugged first, and the zones keep the floor together.
    /// Pinned zones keep their size. A pause and a dry run do not change the result, because they
    /// guarantee nothing to the VM.
    pub fn recallable_bytes(&self, host: &HostView) -> Vec<u64> {
        let mut over_bytes = host.plugged_bytes().saturating_sub(self.floor_bytes(host));
        let mut recallable = vec![0; host.zones.len()];
        for (zone, bytes) in host.zones.iter().zip(&mut recallable).rev() {
            if zone.tier == Tier::Pm && !self.is_pinned(zone.id) {
                let above_bytes = zone.plugged_bytes.saturating_sub(zone.floor_bytes);
                *bytes = round_down(above_bytes.min(over_bytes), zone.block_bytes.max(1));
                over_bytes -= *bytes;
            }
        }
        recallable
    }
}
