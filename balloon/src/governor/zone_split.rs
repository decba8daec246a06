//! Splits a guest's memory into DRAM and PM for reports made from statistics, which only contain
//! totals.

use foreshore_proto::{RawReport, Report, Zone, ZoneKind};

use crate::units::{PAGE_BYTES, scale};
use crate::{HostView, Tier};

/// Splits the single zone of a report made from statistics into DRAM and PM. The split is computed
/// from the sizes that the host knows, and from the order in which Linux fills memory.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ZoneSplit {
    /// Boot memory that the guest's kernel reserves for itself. The memory was missing from the
    /// guest's total while no PM was plugged.
    kernel_reserved_bytes: Option<u64>,
}

impl ZoneSplit {
    /// Updates the reserved amount from a report of an agent, or from one made from statistics.
    pub(super) fn learn(&mut self, report: &Report, host: &HostView) {
        if plugged_bytes(host, Tier::Pm) == 0 {
            let base_bytes =
                report.memory().total_bytes.saturating_sub(plugged_bytes(host, Tier::Dram));
            // Plugged or ACPI memory that is not online yet also seems to be reserved, so the
            // smallest value is used. A report sent before an unplug may arrive after it, and then
            // shows more memory than the guest has. Such a report is ignored, because a value that
            // is too small would never be corrected.
            if let Some(kernel_reserved_bytes) = host.boot_bytes.checked_sub(base_bytes) {
                let least_bytes = self
                    .kernel_reserved_bytes
                    .map_or(kernel_reserved_bytes, |least| least.min(kernel_reserved_bytes));
                self.kernel_reserved_bytes = Some(least_bytes);
            }
        }
    }

    /// Adds a zone for the PM of each node to a report made from statistics, which has a single
    /// zone. An agent's report must not be passed, because it may also have a single zone.
    ///
    /// The online part of plugged PM is computed as the guest's total minus all other memory. The
    /// result is a lower bound, because the kernel may reserve some memory. Processes fill DRAM
    /// down to kswapd's watermark before they use PM. Free memory above that watermark is therefore
    /// counted as free PM. If it is free DRAM instead, removing PM still succeeds, because the
    /// guest's driver can move as many pages from PM to DRAM.
    pub(super) fn split(&mut self, report: Report, host: &HostView) -> Report {
        self.learn(&report, host);
        let plugged_pm_bytes = plugged_bytes(host, Tier::Pm);
        let base_bytes = host.boot_bytes.saturating_sub(self.kernel_reserved_bytes.unwrap_or(0));
        let dram_bytes = base_bytes.saturating_add(plugged_bytes(host, Tier::Dram));
        let pm_pages = report.memory().total_bytes.saturating_sub(dram_bytes).min(plugged_pm_bytes)
            / PAGE_BYTES;
        let [whole] = report.zones() else { return report };
        if pm_pages == 0 || pm_pages >= whole.managed_pages {
            return report;
        }
        let dram_free_pages = whole.free_pages.min(whole.high_pages);
        let pm_free_pages = (whole.free_pages - dram_free_pages).min(pm_pages);
        let mut zones = vec![Zone {
            free_pages: whole.free_pages - pm_free_pages,
            managed_pages: whole.managed_pages - pm_pages,
            ..*whole
        }];
        for zone in host.zones.iter().filter(|zone| zone.tier == Tier::Pm && zone.plugged_bytes > 0)
        {
            let share = |pages: u64| scale(pages, zone.plugged_bytes, plugged_pm_bytes);
            zones.push(Zone {
                node: zone.guest_numa_node,
                kind: ZoneKind::Movable,
                free_pages: share(pm_free_pages),
                managed_pages: share(pm_pages),
                ..Zone::default()
            });
        }
        // The values are parts of those in a valid report. If the new report is invalid
        // nevertheless, the original report is better than none.
        let raw = RawReport { zones, ..report.as_raw().clone() };
        Report::try_from(raw).unwrap_or(report)
    }
}

fn plugged_bytes(host: &HostView, tier: Tier) -> u64 {
    let zones = host.zones.iter().filter(|zone| zone.tier == tier);
    zones.fold(0u64, |sum, zone| sum.saturating_add(zone.plugged_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Input, Policy};
    use crate::statistics::{Estimator, GuestFacts, Statistics, Tag};
    use crate::{MIB, TimeMs, ZoneSizes};

    const BOOT: u64 = 512 * MIB;
    const KERNEL: u64 = 32 * MIB;

    /// Host of a guest that has zones for DRAM, for PM in node 1 and for PM in node 2, with these
    /// plugged sizes.
    fn host(plugged_mib: [u64; 3]) -> HostView {
        let zones =
            [(Tier::Dram, 0), (Tier::Pm, 1), (Tier::Pm, 2)].into_iter().zip(plugged_mib).zip(0..);
        let zone = |(((tier, guest_numa_node), mib), id)| ZoneSizes {
            guest_numa_node,
            requested_bytes: mib * MIB,
            plugged_bytes: mib * MIB,
            ..ZoneSizes::empty(id, tier, 4096 * MIB)
        };
        HostView { zones: zones.map(zone).collect(), boot_bytes: BOOT, ..HostView::default() }
    }

    fn report(total_mib: u64, free_mib: u64) -> Report {
        let statistics = Statistics::default()
            .with(Tag::Total, total_mib * MIB)
            .with(Tag::Free, free_mib * MIB)
            .with(Tag::Available, free_mib * MIB);
        let known =
            GuestFacts { driver_generation: 1, memory_bytes: 1 << 40, ..GuestFacts::default() };
        Estimator::default().report(&statistics, known, TimeMs(60_000)).expect("sound")
    }

    /// Returns the node, the managed MiB and the free MiB of each zone.
    fn zones(report: &Report) -> Vec<(u32, u64, u64)> {
        let mib = |pages| pages * PAGE_BYTES / MIB;
        report
            .zones()
            .iter()
            .map(|zone| (zone.node, mib(zone.managed_pages), mib(zone.free_pages)))
            .collect()
    }

    /// State after a report of a guest that has no plugged memory.
    fn learned_without_pm() -> ZoneSplit {
        let mut zone_split = ZoneSplit::default();
        zone_split.learn(&report(480, 400), &host([0, 0, 0]));
        zone_split
    }

    #[test]
    fn online_pm_is_a_zone_and_counts_as_free_last() {
        let (mut zone_split, host) = (learned_without_pm(), host([128, 1024, 0]));
        let high_mib = report(1632, 0).zones()[0].high_pages * PAGE_BYTES / MIB;
        assert!(high_mib > 20);
        for (free_mib, in_pm) in [(0, 0), (high_mib, 0), (500, 500 - high_mib), (1500, 1024)] {
            let placed = zone_split.split(report(1632, free_mib), &host);
            assert_eq!(
                zones(&placed),
                [(0, 608, free_mib - in_pm), (1, 1024, in_pm)],
                "{free_mib} MiB free"
            );
            assert_eq!(
                placed.memory(),
                report(1632, free_mib).memory(),
                "the reported amounts stay"
            );
            let marks =
                |report: &Report| report.zones().iter().map(|zone| zone.high_pages).sum::<u64>();
            assert_eq!(marks(&placed), marks(&report(1632, free_mib)));
        }
    }

    #[test]
    fn plugged_memory_that_is_not_online_is_not_counted() {
        let (mut zone_split, host) = (learned_without_pm(), host([0, 1024, 0]));
        assert_eq!(zones(&zone_split.split(report(480, 300), &host)), [(0, 480, 300)]);
        assert_eq!(
            zones(&zone_split.split(report(736, 700), &host)),
            [(0, 480, 444), (1, 256, 256)]
        );
        // If a guest has more memory than possible, the excess is not counted as PM.
        assert_eq!(
            zones(&zone_split.split(report(4000, 4000), &host)),
            [(0, 2976, 2976), (1, 1024, 1024)]
        );
    }

    #[test]
    fn nodes_share_pm_in_proportion_to_plugged_memory() {
        let placed = learned_without_pm().split(report(480 + 1024, 1200), &host([0, 256, 768]));
        assert_eq!(zones(&placed), [(0, 480, 176), (1, 256, 256), (2, 768, 768)]);
    }

    #[test]
    fn without_earlier_report_pm_is_a_lower_bound() {
        let host = host([0, 1024, 0]);
        let placed = ZoneSplit::default().split(report((BOOT - KERNEL) / MIB + 1024, 1200), &host);
        // The amount of boot memory that the kernel reserves is unknown.
        assert_eq!(zones(&placed)[1], (1, 1024 - KERNEL / MIB, 1024 - KERNEL / MIB));
    }

    #[test]
    fn memory_that_comes_online_late_does_not_reduce_learned_boot_memory() {
        let mut zone_split = learned_without_pm();
        zone_split.learn(&report(480, 400), &host([128, 0, 0]));
        assert_eq!(zones(&zone_split.split(report(1504, 1000), &host([0, 1024, 0])))[1].1, 1024);
    }

    #[test]
    fn report_from_before_unplug_does_not_raise_learned_boot_memory() {
        let after_unplug = host([0, 0, 0]);
        for mut zone_split in [learned_without_pm(), ZoneSplit::default()] {
            for late_mib in [480 + 1024, 480 + 128, 480 + 34] {
                zone_split.learn(&report(late_mib, 400), &after_unplug);
            }
            zone_split.learn(&report(480, 400), &after_unplug);
            assert_eq!(
                zones(&zone_split.split(report(1504, 1200), &host([0, 1024, 0])))[1],
                (1, 1024, 1024)
            );
        }
    }

    /// The guest of [`host`] with an additional balloon zone of 1 GiB in boot memory, as the
    /// governor represents it.
    fn host_with_balloon(ballooned_mib: u64, pm_mib: u64) -> HostView {
        let mut host = host([0, pm_mib, 0]);
        let balloon = &mut host.zones[0];
        balloon.max_bytes = 1024 * MIB;
        balloon.plugged_bytes = (1024 - ballooned_mib) * MIB;
        balloon.requested_bytes = balloon.plugged_bytes;
        host.balloon = Some(balloon.id);
        host
    }

    #[test]
    fn memory_in_balloon_is_neither_dram_nor_pm() {
        for seen_with_mib in [0, 256, 1024] {
            let mut zone_split = ZoneSplit::default();
            zone_split.learn(
                &report(480 + 1024 - seen_with_mib, 400),
                &host_with_balloon(seen_with_mib, 0),
            );
            // This report was sent before the inflation and arrives after it.
            zone_split.learn(&report(480 + 1024, 400), &host_with_balloon(1024, 0));
            for ballooned_mib in [0, 512, 1024] {
                let dram_mib = 480 + 1024 - ballooned_mib;
                let placed = zone_split
                    .split(report(dram_mib + 2048, 2200), &host_with_balloon(ballooned_mib, 2048));
                assert_eq!(
                    zones(&placed),
                    [(0, dram_mib, 152), (1, 2048, 2048)],
                    "{ballooned_mib} MiB"
                );
            }
        }
    }

    #[test]
    fn acpi_memory_is_dram_with_or_without_plugged_pm() {
        let with_dimm = |pm_mib| HostView { boot_bytes: BOOT + 256 * MIB, ..host([0, pm_mib, 0]) };
        for seen_with_dimm in [false, true] {
            let mut zone_split = learned_without_pm();
            if seen_with_dimm {
                // The DIMM's memory is not online immediately.
                zone_split.learn(&report(480, 400), &with_dimm(0));
                zone_split.learn(&report(480 + 256, 400), &with_dimm(0));
            }
            let placed = zone_split.split(report(480 + 256 + 1024, 1200), &with_dimm(1024));
            assert_eq!(zones(&placed), [(0, 736, 176), (1, 1024, 1024)]);
        }
    }

    #[test]
    fn two_pm_zones_of_one_node_stay_separate() {
        let mut host = host([0, 256, 768]);
        host.zones[2].guest_numa_node = 1;
        let placed = learned_without_pm().split(report(480 + 1024, 1200), &host);
        assert_eq!(zones(&placed), [(0, 480, 176), (1, 256, 256), (1, 768, 768)]);
    }

    #[test]
    fn agent_reports_and_reports_without_pm_stay_unchanged() {
        let mut zone_split = learned_without_pm();
        let plain = report(608, 300);
        assert_eq!(zone_split.split(plain.clone(), &host([128, 0, 0])), plain);
        let mut raw = report(1504, 300).as_raw().clone();
        raw.zones.push(Zone { node: 1, ..raw.zones[0] });
        let of_agent = Report::try_from(raw).expect("sound");
        assert_eq!(zone_split.split(of_agent.clone(), &host([0, 1024, 0])), of_agent);
    }

    #[test]
    fn papers_policies_return_pm_with_placed_statistics() {
        let host = host([0, 2048, 0]);
        for (name, param) in [("amf", Some(("reclaim", "10"))), ("dapper", None), ("pmb", None)] {
            let params = [Some(("watermark-scale", "1")), param].into_iter().flatten();
            let params: Vec<_> = params.map(|(name, text)| (name, text.into())).collect();
            let policy = Policy::from_name(name).expect("known");
            let policy =
                policy.with(params.iter().map(|(name, value)| (*name, value))).expect("in bounds");
            let want = |report: &Report| {
                let input = Input { report, host: &host, is_carried_out: true };
                let (_, decision) = policy.decide(policy.initial_state(), input, TimeMs(60_000));
                decision.want_bytes
            };
            let whole = report(480 + 2048, 2200);
            assert_eq!(want(&whole), None, "{name} ignores PM");
            let placed = learned_without_pm().split(whole, &host);
            assert!(want(&placed).is_some_and(|want| want < 2048 * MIB), "{name}");
        }
    }
}
