//! Free pages that are reserved for the kernel.
//!
//! The kernels of the papers have no reserve in DRAM for the page descriptors of PM. In Foreshore's guests the free
//! pages of DRAM include such a reserve. A policy that waited for few free pages would wait until the guest swaps.

use std::borrow::Cow;

use foreshore_proto::{KernelMemory, RawReport, Report, kernel_reserve_bytes};

use crate::HostView;
use crate::units::PAGE_BYTES;

/// Returns the report without the free pages of DRAM that are reserved for the kernel, and the size of the reserve.
/// Reports from balloon statistics do not separate DRAM from other memory, so they stay as they are.
pub(super) fn without_reserve<'a>(report: &'a Report, host: &HostView) -> (Cow<'a, Report>, u64) {
    if report.blocks().block_bytes == 0 {
        return (Cow::Borrowed(report), 0);
    }
    let kernel_bytes = KernelMemory::of(report.zones().iter()).managed_bytes;
    // The descriptors of plugged memory have been allocated.
    let hotplug_bytes = host.max_bytes().saturating_sub(host.plugged_bytes());
    let reserve_bytes = kernel_reserve_bytes(kernel_bytes, hotplug_bytes);
    let reserve_bytes = reserve_bytes.min(kernel_bytes / 2);
    let mut left_pages = reserve_bytes / PAGE_BYTES;
    let mut raw: RawReport = report.as_raw().clone();
    for zone in raw.zones.iter_mut().filter(|zone| zone.serves_kernel()) {
        let taken_pages = zone.free_pages.min(left_pages);
        zone.free_pages -= taken_pages;
        left_pages -= taken_pages;
        raw.memory.free_bytes = raw.memory.free_bytes.saturating_sub(taken_pages * PAGE_BYTES);
        zone.largest_free_blocks = zone
            .largest_free_blocks
            .map(|blocks| blocks.min(zone.free_pages * PAGE_BYTES / foreshore_proto::LARGEST_BLOCK_BYTES));
    }
    // Fewer free pages are valid in every report, so the conversion does not fail.
    (Report::try_from(raw).map_or(Cow::Borrowed(report), Cow::Owned), reserve_bytes)
}

#[cfg(test)]
mod tests {
    use foreshore_proto::{Blocks, Memory, PROTOCOL_VERSION, Zone, ZoneKind};

    use super::*;
    use crate::policy::{Input, Policy};
    use crate::{MIB, Tier, TimeMs, ZoneSizes};

    /// A guest with 200 of 512 MiB of DRAM free, and 100 of 512 MiB of PM.
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
            zones: vec![zone(0, ZoneKind::Dma32, 512, 200), zone(1, ZoneKind::Movable, 512, 100)],
            blocks: Blocks { block_bytes: 128 * MIB, ..Blocks::default() },
            ..RawReport::default()
        }
    }

    fn host() -> HostView {
        let mut pm = ZoneSizes::empty(0, Tier::Pm, 4096 * MIB);
        pm.plugged_bytes = 512 * MIB;
        HostView { zones: vec![pm], ..HostView::default() }
    }

    #[test]
    fn the_agents_watermark_includes_the_reserve() {
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
    fn the_kernels_reserve_is_not_free() {
        let (mut raw, host) = (raw_report(), host());
        let free_mib = |raw: &RawReport| {
            let report = Report::try_from(raw.clone()).expect("sound");
            let (left, _) = without_reserve(&report, &host);
            let zones = left.zones().iter().map(|zone| zone.free_pages * PAGE_BYTES / MIB);
            (left.memory().free_bytes / MIB, zones.collect::<Vec<_>>())
        };
        // A sixteenth of 512 MiB, and the descriptors of 3.5 GiB.
        assert_eq!(free_mib(&raw), (300 - 88, vec![200 - 88, 100]));
        raw.zones[0].free_pages = 20 * MIB / PAGE_BYTES;
        raw.memory.free_bytes = 120 * MIB;
        assert_eq!(free_mib(&raw), (100, vec![0, 100]));
        raw.blocks.block_bytes = 0;
        assert_eq!(free_mib(&raw), (120, vec![20, 100]));
    }
}
