//! What a guest wants by what it reported, as docs/reference/policies.md has it, and not by what
//! the policy says of it.

use super::*;

impl World {
    /// Whether the report that the last step was about shows want that a plan may name as its
    /// reason.
    pub(super) fn wants(&self, reason: Reason) -> bool {
        let Some((_, report)) = &self.arrived else { return false };
        let free_bytes = report.memory().free_bytes;
        match self.controller.policy() {
            Policy::Psi(params) => {
                let (total_bytes, bridge_bytes) =
                    (report.memory().total_bytes, self.bridge_bytes(params, report));
                let coming_bytes = self.coming_bytes(report, false);
                // What a shrink has left is enough until something is taken of it.
                let taken = self.left_bytes.is_none_or(|left_bytes| coming_bytes < left_bytes);
                // It fills from the most that there was since.
                let filled = self.had_bytes.is_none_or(|had_bytes| coming_bytes < had_bytes);
                let until_ms = report.monotonic_ms();
                let swapped = self.counted_ms[0]
                    .iter()
                    .any(|ms| (until_ms.saturating_sub(LOOKS_BACK_MS)..=until_ms).contains(ms));
                match reason {
                    Reason::LowAvailable => taken && coming_bytes < bridge_bytes,
                    // What is swapped out counts.
                    Reason::Filling => (filled || swapped) && self.may_fill(),
                    Reason::Swapping | Reason::Stalled => {
                        coming_bytes < bridge_bytes + total_bytes / 4
                    }
                    // Refaults that are waited for, which `check_seen` looks for.
                    _ => reason == Reason::Thrashing,
                }
            }
            Policy::Amf(params) => self.is_a_node_below(report, params.watermark_scale),
            Policy::Dapper(params) => self.is_a_node_below(report, params.watermark_scale * 2),
            Policy::Pmb(params) => free_bytes < self.high_bytes(false) * params.watermark_scale,
            Policy::Memorage(params) => {
                free_bytes < self.high_bytes(false) * params.watermark_scale
            }
            Policy::Fixed(_) | Policy::Off => false,
        }
    }

    /// Whether `psi` may provide for a fill, if there is one: it fills at most half of what there
    /// is in time.
    pub(super) fn may_fill(&self) -> bool {
        let (Policy::Psi(params), Some((_, report))) = (self.controller.policy(), &self.arrived)
        else {
            return false;
        };
        let most_bytes = self.bridge_bytes(params, report) + report.memory().total_bytes / 2;
        self.coming_bytes(report, false) < most_bytes
    }

    /// The most that `psi` takes for a bridge.
    fn bridge_bytes(&self, params: &psi::Params, report: &Report) -> u64 {
        let least_bytes =
            params.min_headroom_bytes.max(self.high_bytes(true) * params.watermark_scale);
        (report.memory().total_bytes / 1000 * params.headroom_permille).max(least_bytes)
    }

    /// A shrink leaves what the guest would ask for again.
    pub(super) fn check_left(&self, plan: &Plan) -> Result<(), TestCaseError> {
        let by_order =
            [Reason::AboveCeiling, Reason::FixedSize, Reason::StorageShort].contains(&plan.reason);
        let Some((_, report)) = self.arrived.as_ref().filter(|_| !by_order && !self.misled) else {
            return Ok(());
        };
        // What is on its way is not there yet.
        let free_bytes = report.memory().free_bytes;
        let (has_bytes, wants_bytes) = match self.controller.policy() {
            Policy::Psi(params) => {
                let least_bytes =
                    params.min_headroom_bytes.max(self.high_bytes(true) * params.watermark_scale);
                (report.memory().available_bytes, least_bytes)
            }
            Policy::Amf(params) => (free_bytes, self.high_bytes(false) * params.watermark_scale),
            Policy::Dapper(params) => {
                (free_bytes, self.high_bytes(false) * params.watermark_scale * 2)
            }
            Policy::Pmb(params) => (free_bytes, self.high_bytes(false) * params.watermark_scale),
            Policy::Memorage(params) => {
                (free_bytes, self.high_bytes(false) * params.watermark_scale)
            }
            Policy::Fixed(_) | Policy::Off => return Ok(()),
        };
        let left_bytes = has_bytes.saturating_sub(self.taken_bytes(plan));
        prop_assert!(
            left_bytes >= wants_bytes,
            "{:?} leaves {}, less than it wants: {}",
            plan.reason,
            left_bytes,
            wants_bytes
        );
        Ok(())
    }

    /// What a shrink takes for the policy's sake. Of a VM that is above its ceiling a dry run takes
    /// more, for that, and gives the policy's reason: what goes beyond what the policy wants is
    /// nothing that it leaves.
    pub(super) fn taken_bytes(&self, plan: &Plan) -> u64 {
        let requested_bytes = self.base().requested_bytes();
        let is_above = self.dry_run && requested_bytes > self.controller.rules().ceiling_bytes;
        let wanted_bytes = if is_above { plan.wanted_bytes } else { 0 };
        requested_bytes - plan.requested_bytes().max(wanted_bytes.min(requested_bytes))
    }

    /// What a shrink for a report leaves to come.
    pub(super) fn left_bytes(&self, plan: &Plan) -> Option<u64> {
        let (_, report) = self.arrived.as_ref().filter(|_| plan.reason == Reason::Surplus)?;
        let taken_bytes = self.host.requested_bytes().saturating_sub(plan.requested_bytes());
        Some(self.coming_bytes(report, true).saturating_sub(taken_bytes))
    }

    /// What is coming by the report that has just arrived.
    pub(super) fn had_bytes_now(&self) -> u64 {
        self.arrived.as_ref().map_or(0, |(_, report)| self.coming_bytes(report, true))
    }

    /// What will be available once the guest has followed. The least that a policy may take it for:
    /// without what has not come for too long, and without page cache if some of that was
    /// missed; or the most.
    fn coming_bytes(&self, report: &Report, most: bool) -> u64 {
        let memory = report.memory();
        let has_missed = self.counted_ms[1].iter().any(|ms| *ms <= report.monotonic_ms());
        let available_bytes = if has_missed && !most {
            memory.available_bytes.saturating_sub(memory.cached_bytes)
        } else {
            memory.available_bytes
        };
        let online_bytes = memory.total_bytes - (BOOT_MIB[0] + BOOT_MIB[1]) * MIB;
        let progress_ms = self.controller.rules().progress_ms;
        let asked = self.host.zones.iter().zip(self.waits).map(|(zone, wait)| {
            match !most && self.now.since(wait.since) >= progress_ms {
                true => zone.requested_bytes.min(zone.plugged_bytes),
                false => zone.requested_bytes,
            }
        });
        let coming_bytes = (available_bytes + asked.sum::<u64>()).saturating_sub(online_bytes);
        match most {
            // A rise in use while memory is to go is taken for that.
            true => coming_bytes + self.host.outstanding_shrink_bytes(),
            false => coming_bytes,
        }
    }

    /// The sum of the high watermarks of DRAM, or of all zones.
    fn high_bytes(&self, all: bool) -> u64 {
        let (_, report) = self.arrived.as_ref().expect("asked of a report");
        let zones = report.zones().iter().filter(|zone| zone.managed_pages > 0);
        zones
            .filter(|zone| all || zone.kind == ZoneKind::Normal)
            .map(|zone| zone.high_pages * 4096)
            .sum()
    }

    /// Whether less is free of a node with DRAM and the PM near to it than so many times its high
    /// watermark.
    fn is_a_node_below(&self, report: &Report, times: u64) -> bool {
        let zones = report.zones();
        // In the order of the zones: DRAM, and the PM that is near to it.
        [(2, 1), (3, 0)].into_iter().any(|(dram, pm)| {
            zones[dram].free_pages + zones[pm].free_pages <= zones[dram].high_pages * times
        })
    }
}
