//! Need of a guest according to its reports and docs/reference/policies.md, computed independently
//! of the policy.

use super::*;

impl World {
    /// Returns true if the report of the last step shows a need that justifies `reason`.
    pub(super) fn wants(&self, reason: Reason) -> bool {
        let Some((_, report)) = &self.arrived else { return false };
        let free_bytes = report.memory().free_bytes;
        match self.controller.policy() {
            Policy::Psi(params) => {
                let (total_bytes, bridge_bytes) =
                    (report.memory().total_bytes, self.bridge_bytes(params, report));
                let coming_bytes = self.coming_bytes(report, false);
                // Memory that a shrink has left is enough until some of it is used.
                let taken = self.left_bytes.is_none_or(|left_bytes| coming_bytes < left_bytes);
                // A fill starts from the maximum since the shrink.
                let filled = self.had_bytes.is_none_or(|had_bytes| coming_bytes < had_bytes);
                let until_ms = report.monotonic_ms();
                let swapped = self.counted_ms[0]
                    .iter()
                    .any(|ms| (until_ms.saturating_sub(LOOKS_BACK_MS)..=until_ms).contains(ms));
                match reason {
                    Reason::LowAvailable => taken && coming_bytes < bridge_bytes,
                    // Swapped memory counts as filled.
                    Reason::Filling => (filled || swapped) && self.may_fill(),
                    Reason::Swapping | Reason::Stalled => {
                        coming_bytes < bridge_bytes + total_bytes / 4
                    }
                    // Refaults that tasks wait for, which `check_seen` checks.
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

    /// Returns true if `psi` may provide memory for a fill, which is at most half of the guest's
    /// memory.
    pub(super) fn may_fill(&self) -> bool {
        let (Policy::Psi(params), Some((_, report))) = (self.controller.policy(), &self.arrived)
        else {
            return false;
        };
        let most_bytes = self.bridge_bytes(params, report) + report.memory().total_bytes / 2;
        self.coming_bytes(report, false) < most_bytes
    }

    /// Largest headroom of `psi`.
    fn bridge_bytes(&self, params: &psi::Params, report: &Report) -> u64 {
        let least_bytes =
            params.min_headroom_bytes.max(self.high_bytes(true) * params.watermark_scale);
        (report.memory().total_bytes / 1000 * params.headroom_permille).max(least_bytes)
    }

    /// Checks that a shrink leaves enough that the policy does not request it again.
    pub(super) fn check_left(&self, plan: &Plan) -> Result<(), TestCaseError> {
        let by_order =
            [Reason::AboveCeiling, Reason::FixedSize, Reason::StorageShort].contains(&plan.reason);
        let Some((_, report)) = self.arrived.as_ref().filter(|_| !by_order && !self.misled) else {
            return Ok(());
        };
        // Memory on its way has not arrived yet.
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

    /// Memory that a shrink removes for the policy. Above the ceiling, a dry run shows a larger
    /// shrink with the policy's reason. The part beyond the size that the policy wants does not
    /// count.
    pub(super) fn taken_bytes(&self, plan: &Plan) -> u64 {
        let requested_bytes = self.base().requested_bytes();
        let is_above = self.dry_run && requested_bytes > self.controller.rules().ceiling_bytes;
        let wanted_bytes = if is_above { plan.wanted_bytes } else { 0 };
        requested_bytes - plan.requested_bytes().max(wanted_bytes.min(requested_bytes))
    }

    /// Expected available memory after a shrink, from the report that led to it.
    pub(super) fn left_bytes(&self, plan: &Plan) -> Option<u64> {
        let (_, report) = self.arrived.as_ref().filter(|_| plan.reason == Reason::Surplus)?;
        let taken_bytes = self.host.requested_bytes().saturating_sub(plan.requested_bytes());
        Some(self.coming_bytes(report, true).saturating_sub(taken_bytes))
    }

    /// Expected available memory from the report that has just arrived.
    pub(super) fn had_bytes_now(&self) -> u64 {
        self.arrived.as_ref().map_or(0, |(_, report)| self.coming_bytes(report, true))
    }

    /// Expected available memory once the guest has followed. Returns the smallest size that a
    /// policy may assume, or the largest if `most` is set. The smallest excludes requests without
    /// progress, and page cache if some of it was missed.
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
            // A rise of used memory while memory has to go may be memory on its way out.
            true => coming_bytes + self.host.outstanding_shrink_bytes(),
            false => coming_bytes,
        }
    }

    /// Sum of the high watermarks of DRAM, or of all zones.
    fn high_bytes(&self, all: bool) -> u64 {
        let (_, report) = self.arrived.as_ref().expect("read from a report");
        let zones = report.zones().iter().filter(|zone| zone.managed_pages > 0);
        zones
            .filter(|zone| all || zone.kind == ZoneKind::Normal)
            .map(|zone| zone.high_pages * 4096)
            .sum()
    }

    /// Returns true if a node with DRAM and the PM near it have less free memory than `times` its
    /// high watermark.
    fn is_a_node_below(&self, report: &Report, times: u64) -> bool {
        let zones = report.zones();
        // Indexes of zones: DRAM, and the PM near it.
        [(2, 1), (3, 0)].into_iter().any(|(dram, pm)| {
            zones[dram].free_pages + zones[pm].free_pages <= zones[dram].high_pages * times
        })
    }
}
