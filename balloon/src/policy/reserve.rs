//! Free pages that are reserved for the guest's kernel.
//!
//! In the papers, the kernel reserves no DRAM for the page descriptors of PM. In Foreshore's
//! guests, the free pages of DRAM include such a reserve. If a policy counted the reserve as free,
//! it would not act before the guest swaps.

use std::borrow::Cow;
use std::cell::LazyCell;

use foreshore_proto::{
    LINUX_RESERVE_RATIOS, RawReport, Report, Zone, ZoneKind, reserve_ratios, reserved_bytes,
    reserved_pages,
};

use crate::units::{PAGE_BYTES, scale};
use crate::{HostView, Tier, ZoneSizes};

/// Returns a report without the free DRAM pages that are reserved for the kernel, and the size of
/// these pages. A report made from balloon statistics is returned unchanged, because it does not
/// separate DRAM from other memory.
///
/// An agent reports the reserve. For an older agent that does not report it, the reserve is
/// computed as the agent sets it in a guest with default ratios. Page descriptors of plugged memory
/// are already allocated, so they are not part of the reserve. However, they may have been
/// allocated from it, and then fewer pages are free than the reserve contains.
pub(super) fn exclude_reserve<'a>(report: &'a Report, host: &HostView) -> (Cow<'a, Report>, u64) {
    if report.blocks().block_bytes == 0 {
        return (Cow::Borrowed(report), 0);
    }
    let ratios = LazyCell::new(|| {
        reserve_ratios(report.zones(), host.pluggable_bytes(), &LINUX_RESERVE_RATIOS)
    });
    let mut raw: RawReport = report.as_raw().clone();
    let mut reserve_bytes = 0u64;
    for (zone, left) in
        report.zones().iter().zip(&mut raw.zones).filter(|(zone, _)| zone.serves_kernel())
    {
        let reserved_pages =
            zone.protected_pages.unwrap_or_else(|| reserved_pages(zone, report.zones(), &ratios));
        let taken_pages = zone.free_pages.min(reserved_pages);
        left.free_pages -= taken_pages;
        left.largest_free_blocks = zone.largest_free_blocks.map(|blocks| {
            blocks.min(left.free_pages * PAGE_BYTES / foreshore_proto::LARGEST_BLOCK_BYTES)
        });
        reserve_bytes = reserve_bytes.saturating_add(taken_pages * PAGE_BYTES);
    }
    raw.memory.free_bytes = raw.memory.free_bytes.saturating_sub(reserve_bytes);
    // A report with fewer free pages is always valid, so the conversion does not fail.
    (Report::try_from(raw).map_or(Cow::Borrowed(report), Cow::Owned), reserve_bytes)
}

/// Forecasts the kernel's reserve for other sizes of DRAM.
///
/// Ratios of the reserve are whole numbers. Therefore, the reserve can grow by all of the plugged
/// DRAM, or fall by half when the agent increases a ratio.
pub(super) struct Forecast<'a> {
    zones: &'a [Zone],
    host: &'a HostView,
    /// Present reserve. `None` if the agent does not report it, or if the reserve differs from the
    /// one that the agent sets. Such a reserve cannot be forecast for other sizes.
    now_bytes: Option<u64>,
}

impl<'a> Forecast<'a> {
    pub(super) fn new(report: &'a Report, host: &'a HostView) -> Self {
        let zones = report.zones();
        let mut protected =
            zones.iter().filter(|zone| zone.serves_kernel()).map(|zone| zone.protected_pages);
        let reported_pages =
            protected.try_fold(0u64, |sum, pages| Some(sum.saturating_add(pages?)));
        let mut forecast = Self { zones, host, now_bytes: None };
        if let Some(reported_pages) = reported_pages {
            let (reported_bytes, bytes) =
                (reported_pages.saturating_mul(PAGE_BYTES), forecast.reserve_bytes(zones));
            forecast.now_bytes =
                (reported_bytes.abs_diff(bytes) <= bytes / TOLERANCE_PART).then_some(bytes);
        }
        forecast
    }

    fn reserve_bytes(&self, zones: &[Zone]) -> u64 {
        reserved_bytes(
            zones,
            &reserve_ratios(zones, self.host.pluggable_bytes(), &LINUX_RESERVE_RATIOS),
        )
    }

    /// Returns how much the reserve will change after the guest has followed its requests, if those
    /// are reduced to a total of `requested_bytes`. PM shrinks before DRAM, and the balloon zone
    /// shrinks last.
    pub(super) fn change_bytes(&self, requested_bytes: u64) -> i64 {
        let Some(now_bytes) = self.now_bytes else { return 0 };
        let (balloons, dram): (Vec<&ZoneSizes>, Vec<&ZoneSizes>) = self
            .host
            .zones
            .iter()
            .filter(|zone| zone.tier == Tier::Dram)
            .partition(|zone| self.host.balloon == Some(zone.id));
        let in_balloons =
            balloons.iter().fold(0u64, |sum, zone| sum.saturating_add(zone.requested_bytes));
        let mut left_bytes = requested_bytes.saturating_sub(in_balloons);
        let mut zones = self.zones.to_vec();
        for dram in dram {
            let bytes = dram.requested_bytes.min(left_bytes);
            left_bytes -= bytes;
            let movable = movable_zone(&mut zones, dram.guest_numa_node);
            let pages = movable.managed_pages.saturating_add(bytes / PAGE_BYTES);
            movable.managed_pages = pages.saturating_sub(dram.plugged_bytes / PAGE_BYTES);
        }
        if zones == self.zones {
            return 0;
        }
        let bytes = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        bytes(self.reserve_bytes(&zones)) - bytes(now_bytes)
    }

    /// Returns the part of `bytes` whose removal costs at most `surplus_bytes` of available memory.
    /// The reserve can grow by more than the DRAM that is removed.
    pub(super) fn removable_part(&self, bytes: u64, surplus_bytes: u64) -> u64 {
        let requested_bytes = self.host.requested_bytes();
        let change_bytes = |bytes: u64| self.change_bytes(requested_bytes.saturating_sub(bytes));
        let now_bytes = change_bytes(0);
        let fits = |part: &u64| {
            let lost_bytes =
                part.saturating_add_signed(change_bytes(*part).saturating_sub(now_bytes));
            lost_bytes <= surplus_bytes
        };
        let mut parts = (1..=PARTS).rev().map(|part| scale(bytes, part, PARTS));
        parts.find(fits).unwrap_or(0)
    }
}

/// Largest difference between the reported and the computed reserve, as a fraction of the computed
/// reserve: a sixteenth.
const TOLERANCE_PART: u64 = 16;

/// Number of sizes that are tried when memory is to be removed.
const PARTS: u64 = 16;

/// Returns ZONE_MOVABLE of a node. If the node has no movable memory, the report does not contain
/// the zone, and an empty one is added.
fn movable_zone(zones: &mut Vec<Zone>, node: u32) -> &mut Zone {
    let is_it = |zone: &Zone| zone.node == node && zone.kind == ZoneKind::Movable;
    let at = zones.iter().position(is_it).unwrap_or_else(|| {
        zones.push(Zone { node, kind: ZoneKind::Movable, ..Zone::default() });
        zones.len() - 1
    });
    &mut zones[at]
}

#[cfg(test)]
mod tests {
    use foreshore_proto::{Blocks, BootMemory, Memory, PROTOCOL_VERSION, Zone, ZoneKind};

    use super::*;
    use crate::policy::{Input, Policy};
    use crate::{MIB, TimeMs};

    /// Guest with 512 MiB of DRAM and 512 MiB of PM. 88 MiB of the DRAM are movable. 200 MiB of the
    /// kernel's DRAM and 100 MiB of PM are free.
    fn raw_report() -> RawReport {
        let pages = |mib: u64| mib * MIB / PAGE_BYTES;
        let zone = |node, kind, managed, free| Zone {
            node,
            kind,
            managed_pages: pages(managed),
            free_pages: pages(free),
            ..Zone::default()
        };
        RawReport {
            version: PROTOCOL_VERSION,
            seq: 1,
            memory: Memory { total_bytes: 1024 * MIB, free_bytes: 300 * MIB, ..Memory::default() },
            zones: vec![
                zone(0, ZoneKind::Dma32, 424, 200),
                zone(0, ZoneKind::Movable, 88, 0),
                zone(1, ZoneKind::Movable, 512, 100),
            ],
            blocks: Blocks { block_bytes: 128 * MIB, ..Blocks::default() },
            ..RawReport::default()
        }
    }

    fn host() -> HostView {
        let mut pm = ZoneSizes::empty(0, Tier::Pm, 3584 * MIB);
        pm.plugged_bytes = 512 * MIB;
        HostView { zones: vec![pm], ..HostView::default() }
    }

    #[test]
    fn agent_watermark_includes_reserve() {
        let watermark_bytes = |block_bytes| {
            let blocks = Blocks { block_bytes, ..Blocks::default() };
            let report = Report::try_from(RawReport { blocks, ..raw_report() }).expect("sound");
            let policy = Policy::from_name("amf").expect("known");
            let input = Input { report: &report, host: &host(), is_carried_out: true };
            policy.decide(policy.initial_state(), input, TimeMs(1_000)).1.watermark_bytes
        };
        assert_eq!(watermark_bytes(128 * MIB) - watermark_bytes(0), 88 * MIB);
    }

    #[test]
    fn kernel_reserve_is_not_free() {
        let (mut raw, host) = (raw_report(), host());
        let free_mib = |raw: &RawReport| {
            let report = Report::try_from(raw.clone()).expect("sound");
            let (left, _) = exclude_reserve(&report, &host);
            let zones = left.zones().iter().map(|zone| zone.free_pages * PAGE_BYTES / MIB);
            (left.memory().free_bytes / MIB, zones.collect::<Vec<_>>())
        };
        // The reserve is a sixteenth of 512 MiB, and the descriptors of 3.5 GiB.
        assert_eq!(free_mib(&raw), (300 - 88, vec![200 - 88, 0, 100]));
        raw.zones[0].free_pages = 20 * MIB / PAGE_BYTES;
        raw.memory.free_bytes = 120 * MIB;
        assert_eq!(free_mib(&raw), (100, vec![0, 0, 100]));
        raw.blocks.block_bytes = 0;
        assert_eq!(free_mib(&raw), (120, vec![20, 0, 100]));
    }

    /// Linux reserves at most the node's movable memory, however much PM the agent includes in its
    /// computation.
    #[test]
    fn reserve_of_384_mib_with_24_gib_of_pm_equals_that_of_linux() {
        let boot = BootMemory { boot_bytes: 384 * MIB, dram_bytes: 0, pm_bytes: 24 << 30 };
        let movable_bytes = boot.managed_movable_bytes();
        let mut raw = raw_report();
        raw.zones[0].managed_pages = (300 * MIB) / PAGE_BYTES;
        raw.zones[1].managed_pages = movable_bytes / PAGE_BYTES;
        for plugged_bytes in [0, 12 << 30, 24 << 30] {
            raw.zones[2].managed_pages = plugged_bytes / PAGE_BYTES;
            raw.memory.total_bytes = (384 * MIB) + plugged_bytes;
            let report = Report::try_from(raw.clone()).expect("sound");
            let mut host =
                HostView { zones: vec![ZoneSizes::empty(0, Tier::Pm, 24 << 30)], ..host() };
            host.zones[0].plugged_bytes = plugged_bytes;
            assert_eq!(exclude_reserve(&report, &host).1, movable_bytes);
        }
        assert_eq!(movable_bytes, 154 * MIB);
    }

    #[test]
    fn reported_reserve_replaces_computed_one() {
        let mut raw = raw_report();
        raw.zones[0].protected_pages = Some(70 * MIB / PAGE_BYTES);
        let report = Report::try_from(raw).expect("sound");
        assert_eq!(exclude_reserve(&report, &host()).1, 70 * MIB);
    }

    /// Guest with 512 MiB of DRAM. 88 MiB of the DRAM are movable. The guest can plug another 256
    /// MiB of DRAM and 4 GiB of PM. The reserve is a sixteenth of DRAM plus the page descriptors of
    /// 4352 MiB, which is 100 to 116 MiB in total.
    fn with_dram_to_plug() -> (RawReport, HostView) {
        let mut raw = raw_report();
        for zone in &mut raw.zones {
            zone.protected_pages =
                Some(if zone.serves_kernel() { 88 * MIB / PAGE_BYTES } else { 0 });
        }
        let dram = ZoneSizes { guest_numa_node: 0, ..ZoneSizes::empty(1, Tier::Dram, 256 * MIB) };
        let pm = ZoneSizes::empty(0, Tier::Pm, 4096 * MIB);
        (raw, HostView { zones: vec![dram, pm], ..HostView::default() })
    }

    fn change_mib(raw: &RawReport, host: &HostView, requested_mib: u64) -> i64 {
        let report = Report::try_from(raw.clone()).expect("sound");
        Forecast::new(&report, host).change_bytes(requested_mib * MIB) / MIB as i64
    }

    /// All plugged DRAM is reserved until the movable memory is twice the reserve.
    #[test]
    fn reserve_grows_with_requested_dram() {
        let (mut raw, mut host) = with_dram_to_plug();
        host.zones[1].requested_bytes = 1024 * MIB;
        assert_eq!(change_mib(&raw, &host, 1024), 0, "PM");
        host.zones[0].requested_bytes = 100 * MIB;
        assert_eq!(change_mib(&raw, &host, 1124), 100);
        host.zones[0].requested_bytes = 256 * MIB;
        assert_eq!(change_mib(&raw, &host, 1280), (88 + 256) / 2 - 88);
        // The forecast needs the reserve in the report, and supports only the ratios that the agent
        // sets.
        raw.zones[0].protected_pages = Some(60 * MIB / PAGE_BYTES);
        assert_eq!(change_mib(&raw, &host, 1280), 0);
        raw.zones[0].protected_pages = None;
        assert_eq!(change_mib(&raw, &host, 1280), 0);
        // A node without movable memory has no reserve.
        raw.zones[0].protected_pages = Some(0);
        raw.zones.remove(1);
        host.zones[0].requested_bytes = 64 * MIB;
        assert_eq!(change_mib(&raw, &host, 1088), 64);
    }

    #[test]
    fn reserve_changes_with_removed_dram() {
        let (mut raw, mut host) = with_dram_to_plug();
        let present_mib = (88 + 256) / 2;
        (host.zones[0].requested_bytes, host.zones[0].plugged_bytes) = (256 * MIB, 256 * MIB);
        host.zones[1].requested_bytes = 1024 * MIB;
        raw.zones[0].protected_pages = Some(present_mib * MIB / PAGE_BYTES);
        raw.zones[1].managed_pages += 256 * MIB / PAGE_BYTES;
        raw.memory.total_bytes += 256 * MIB;
        assert_eq!(change_mib(&raw, &host, 256), 0, "PM goes first");
        assert_eq!(change_mib(&raw, &host, 80), 88 + 80 - present_mib as i64);
        assert_eq!(change_mib(&raw, &host, 120), 88 + 120 - present_mib as i64);
        // The balloon does not change the guest's zones, and it shrinks last.
        host.zones.push(ZoneSizes {
            requested_bytes: 200 * MIB,
            ..ZoneSizes::empty(2, Tier::Dram, 200 * MIB)
        });
        host.balloon = Some(host.zones[2].id);
        assert_eq!(change_mib(&raw, &host, 280), 88 + 80 - present_mib as i64);
    }

    #[test]
    fn nothing_is_reserved_without_movable_memory() {
        let mut raw = raw_report();
        raw.zones.remove(1);
        let report = Report::try_from(raw).expect("sound");
        assert_eq!(exclude_reserve(&report, &host()).1, 0);
    }
}
