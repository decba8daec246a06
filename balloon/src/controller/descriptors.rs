//! Rule 4: limits requests to the memory for which the guest can provide page descriptors.
//!
//! Linux allocates the page descriptors of hotplugged memory from memory that is not movable. It
//! needs 2 MiB for each section of 128 MiB (mm/sparse-vmemmap.c; virtio_mem adds memory without
//! MHP_MEMMAP_ON_MEMORY). A guest without such memory cannot add a block. Linux soon kills its
//! processes, because other kernel allocations fail too.

use foreshore_proto::{KernelMemory, Report};

use super::Rules;
use crate::units::{MIB, PAGE_BYTES, SECTION_BYTES, SECTION_DESCRIPTOR_BYTES};
use crate::{HostView, TimeMs, ZoneSizes};

/// Fraction of the kernel's zones that page descriptors must leave free for other kernel
/// allocations.
const FLOOR_PART: u64 = 64;
/// Bounds of that fraction, in bytes.
const MIN_FLOOR_BYTES: u64 = 4 * MIB;
const MAX_FLOOR_BYTES: u64 = 64 * MIB;

/// Limit for the plugged memory of a guest.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DescriptorLimit {
    reported: Option<ReportedLimit>,
    /// Memory that was added as DIMMs, which are not part of any zone.
    dimm_bytes: u64,
    /// DIMMs that were added recently. The guest may not have allocated their page descriptors yet.
    recent_dimms: Option<RecentDimms>,
}

#[derive(Clone, Copy, Debug)]
struct RecentDimms {
    since: TimeMs,
    bytes: u64,
}

/// Time allowed for a guest to online a DIMM. A report within this time may precede the allocation
/// of the DIMM's page descriptors.
const DIMM_ONLINE_MS: u64 = 10_000;

/// Limit for zones and DIMMs in total, computed from the last report.
#[derive(Clone, Copy, Debug)]
struct ReportedLimit {
    at: TimeMs,
    limit_bytes: u64,
}

impl DescriptorLimit {
    /// Updates the limit from a report. `host` contains the sizes at the time of the report.
    pub(super) fn observe(&mut self, report: &Report, host: &HostView, now: TimeMs) {
        // Balloon statistics do not contain memory blocks, and do not separate the kernel's memory
        // from other memory.
        if report.blocks().block_bytes == 0 {
            return;
        }
        self.recent_dimms =
            self.recent_dimms.filter(|recent_dimms| now.since(recent_dimms.since) < DIMM_ONLINE_MS);
        let recent_dimm_bytes = self.recent_dimms.map_or(0, |recent_dimms| recent_dimms.bytes);
        let present_dimm_bytes = self.dimm_bytes.saturating_sub(recent_dimm_bytes);
        let added_bytes = sum(host, |zone| zone.plugged_bytes).saturating_add(present_dimm_bytes);
        let limit_bytes = added_bytes.saturating_add(describable_bytes(report));
        self.reported = Some(ReportedLimit { at: now, limit_bytes });
    }

    /// Counts the memory of a DIMM towards the limit.
    pub(super) fn add_dimm(&mut self, bytes: u64, now: TimeMs) {
        self.dimm_bytes = self.dimm_bytes.saturating_add(bytes);
        let recent_dimms =
            self.recent_dimms.filter(|recent_dimms| now.since(recent_dimms.since) < DIMM_ONLINE_MS);
        let before_bytes = recent_dimms.map_or(0, |recent_dimms| recent_dimms.bytes);
        self.recent_dimms =
            Some(RecentDimms { since: now, bytes: before_bytes.saturating_add(bytes) });
    }

    /// Returns the memory that can be requested beyond the requested or plugged memory.
    ///
    /// The limit is a total size that changes only with reports. A limit relative to the plugged
    /// size would allow another section as soon as the last one is plugged, until the guest has no
    /// DRAM left.
    pub(super) fn room_bytes(&self, rules: &Rules, host: &HostView, now: TimeMs) -> u64 {
        let boot_bytes = host.boot_bytes.saturating_add(balloon_zone_bytes(host));
        let unreported_bytes = boot_bytes.saturating_mul(rules.unreported_multiple);
        let limit_bytes = match self.reported {
            None => unreported_bytes,
            Some(reported) if now.since(reported.at) < rules.lost_ms => reported.limit_bytes,
            // The guest may have used up the room since the report.
            Some(reported) => reported.limit_bytes.min(unreported_bytes),
        };
        let added_bytes = sum(host, |zone| zone.requested_bytes.max(zone.plugged_bytes));
        limit_bytes.saturating_sub(added_bytes.saturating_add(self.dimm_bytes))
    }
}

/// Boot memory that the balloon could take, but that the guest has at present.
fn balloon_zone_bytes(host: &HostView) -> u64 {
    let zones = host.zones.iter().filter(|zone| host.balloon == Some(zone.id));
    zones.fold(0, |sum, zone| sum.saturating_add(zone.plugged_bytes))
}

/// Sum over the zones whose memory needs new page descriptors. The balloon zone is not included,
/// because boot memory already has its descriptors.
fn sum(host: &HostView, size_bytes: impl Fn(&ZoneSizes) -> u64) -> u64 {
    let zones = host.zones.iter().filter(|zone| host.balloon != Some(zone.id));
    zones.fold(0, |sum, zone| sum.saturating_add(size_bytes(zone)))
}

/// Memory that the guest can plug before its next report. Half of the free memory in the kernel's
/// zones is reserved for other allocations.
///
/// If a guest can swap out pages of the kernel's zones, it has room for one section at a time until
/// no such pages are left.
fn describable_bytes(report: &Report) -> u64 {
    let kernel = KernelMemory::of(report.zones().iter());
    let user_pages = report
        .zones()
        .iter()
        .filter(|zone| zone.serves_kernel())
        .filter_map(|zone| zone.user_pages);
    let user_bytes = user_pages.fold(0u64, u64::saturating_add).saturating_mul(PAGE_BYTES);
    let floor_bytes = (kernel.managed_bytes / FLOOR_PART).clamp(MIN_FLOOR_BYTES, MAX_FLOOR_BYTES);
    let room_bytes = kernel.room_bytes.saturating_sub(floor_bytes);
    let swappable_bytes = user_bytes.min(report.memory().swap_free_bytes);
    let can_reclaim = swappable_bytes >= 2 * SECTION_DESCRIPTOR_BYTES
        && kernel.room_bytes.saturating_add(swappable_bytes)
            >= floor_bytes + SECTION_DESCRIPTOR_BYTES;
    let least = u64::from(can_reclaim || room_bytes >= SECTION_DESCRIPTOR_BYTES);
    (room_bytes / 2 / SECTION_DESCRIPTOR_BYTES).max(least).saturating_mul(SECTION_BYTES)
}
