//! Computes a guest's need from its reports and docs/reference/policies.md, independently of the
//! policy's code.

use super::*;

impl World {
    /// Returns true if the report of the last step shows a need that justifies `reason`.
    pub(super) fn is_needed(&self, reason: Reason) -> bool {
        let Some((_, report)) = &self.arrived else { return false };
        let free_bytes = report.memory().free_bytes;
        match self.controller.policy() {
            Policy::Psi(params) => {
                let (total_bytes, headroom_bytes) =
                    (report.memory().total_bytes, self.headroom_bytes(params, report));
                let expected_available_bytes = self.expected_available_bytes(report, false);
                // Memory that a shrink has left is enough until the guest uses part of it.
                let taken =
                    self.left_bytes.is_none_or(|left_bytes| expected_available_bytes < left_bytes);
                // A fill is measured from the maximum since the shrink.
                let filled = self.max_available_bytes.is_none_or(|max_available_bytes| {
                    expected_available_bytes < max_available_bytes
                });
                let until_ms = report.monotonic_ms();
                let swapped = self.counted_ms[0]
                    .iter()
                    .any(|ms| (until_ms.saturating_sub(HISTORY_MS)..=until_ms).contains(ms));
                match reason {
                    Reason::LowAvailable => taken && expected_available_bytes < headroom_bytes,
                    // Memory that was swapped out also counts as filled.
                    Reason::Filling => (filled || swapped) && self.may_fill(),
                    Reason::Swapping | Reason::Stalled => {
                        expected_available_bytes < headroom_bytes + total_bytes / 4
                    }
                    // The remaining reason is that tasks wait for evicted pages. `check_counted`
                    // checks it.
                    _ => reason == Reason::Thrashing,
                }
            }
            Policy::Amf(params) => self.is_any_node_below(report, params.watermark_scale),
            Policy::Dapper(params) => self.is_any_node_below(report, params.watermark_scale * 2),
            Policy::Pmb(params) => free_bytes < self.high_bytes(false) * params.watermark_scale,
            Policy::Memorage(params) => {
                free_bytes < self.high_bytes(false) * params.watermark_scale
            }
            Policy::Fixed(_) | Policy::Off => false,
        }
    }

    /// Returns true if `psi` may provide memory for a fill. It may provide at most half of the
    /// guest's memory.
    pub(super) fn may_fill(&self) -> bool {
        let (Policy::Psi(params), Some((_, report))) = (self.controller.policy(), &self.arrived)
        else {
            return false;
        };
        let most_bytes = self.headroom_bytes(params, report) + report.memory().total_bytes / 2;
        self.expected_available_bytes(report, false) < most_bytes
    }

    /// Largest headroom that `psi` may use.
    fn headroom_bytes(&self, params: &psi::Params, report: &Report) -> u64 {
        let least_bytes =
            params.min_headroom_bytes.max(self.high_bytes(true) * params.watermark_scale);
        (report.memory().total_bytes / 1000 * params.headroom_permille).max(least_bytes)
    }

    /// Checks that a shrink leaves enough memory, so that the policy does not request it again.
    pub(super) fn check_remaining(&self, plan: &Plan) -> Result<(), TestCaseError> {
        let is_forced =
            [Reason::AboveCeiling, Reason::FixedSize, Reason::StorageShort].contains(&plan.reason);
        let Some((_, report)) = self.arrived.as_ref().filter(|_| !is_forced && !self.is_misled)
        else {
            return Ok(());
        };
        // Memory that has not arrived yet is not free.
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

    /// Amount of memory that a shrink removes because of the policy. If the total is above the
    /// ceiling, a dry run shows a larger shrink with the policy's reason. The part below the size
    /// that the policy wants is not counted.
    pub(super) fn taken_bytes(&self, plan: &Plan) -> u64 {
        let requested_bytes = self.base().requested_bytes();
        let is_above = self.dry_run && requested_bytes > self.controller.rules().ceiling_bytes;
        let wanted_bytes = if is_above { plan.wanted_bytes } else { 0 };
        requested_bytes - plan.requested_bytes().max(wanted_bytes.min(requested_bytes))
    }

    /// Expected available memory after a shrink, computed from the report that led to it.
    pub(super) fn left_bytes(&self, plan: &Plan) -> Option<u64> {
        let (_, report) = self.arrived.as_ref().filter(|_| plan.reason == Reason::Surplus)?;
        let taken_bytes = self.host.requested_bytes().saturating_sub(plan.requested_bytes());
        Some(self.expected_available_bytes(report, true).saturating_sub(taken_bytes))
    }

    /// Expected available memory, computed from the report that has just arrived.
    pub(super) fn current_available_bytes(&self) -> u64 {
        self.arrived.as_ref().map_or(0, |(_, report)| self.expected_available_bytes(report, true))
    }

    /// Available memory that is expected after the guest has followed all requests. Returns the
    /// largest size that a policy may assume if `most` is set, and otherwise the smallest. The
    /// smallest size excludes requests without progress, and excludes page cache if evicted pages
    /// of it were read back.
    fn expected_available_bytes(&self, report: &Report, most: bool) -> u64 {
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
        let expected_available_bytes =
            (available_bytes + asked.sum::<u64>()).saturating_sub(online_bytes);
        match most {
            // While memory has to be unplugged, an increase of used memory may be memory that is
            // being unplugged.
            true => expected_available_bytes + self.host.outstanding_shrink_bytes(),
            false => expected_available_bytes,
        }
    }

    /// Sum of the high watermarks of all zones if `all` is set, and otherwise of DRAM only.
    fn high_bytes(&self, all: bool) -> u64 {
        let (_, report) = self.arrived.as_ref().expect("read from a report");
        let zones = report.zones().iter().filter(|zone| zone.managed_pages > 0);
        zones
            .filter(|zone| all || zone.kind == ZoneKind::Normal)
            .map(|zone| zone.high_pages * 4096)
            .sum()
    }

    /// Returns true if some node with DRAM, including the PM near it, has less free memory than
    /// `times` the node's high watermark.
    fn is_any_node_below(&self, report: &Report, times: u64) -> bool {
        let zones = report.zones();
        // Each pair has the index of a DRAM zone and that of the PM near it.
        [(2, 1), (3, 0)].into_iter().any(|(dram, pm)| {
            zones[dram].free_pages + zones[pm].free_pages <= zones[dram].high_pages * times
        })
    }
}
