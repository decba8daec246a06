//! Memory of the guest's kernel. The memory occupies the kernel's zones, and cannot be moved or
//! swapped.

use foreshore_proto::{CONVERSION_MS, OFFLINE_LIMIT_MS, full_pm_pages};

use super::paging::{Budget, OOM_MS};
use super::placement::Placement;
use super::{FILL_BYTES_PER_MS, Guest, Marks, PAGE_BYTES};
use crate::sim::demand::Segment;
use crate::units::{SECTION_DESCRIPTOR_BYTES, scale};
use crate::{Tier, TimeMs};

/// Kernel memory that a segment demands. Page descriptors and the memory that the kernel uses from
/// boot are not included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct KernelLoad {
    /// Part of the demand that is allocated.
    pub held_bytes: u64,
    /// Part of the demand that tasks wait for.
    pub waiting_bytes: u64,
    /// Part of the demand that belonged to processes that the OOM killer has ended.
    pub killed_bytes: u64,
    /// True while kswapd frees memory in the kernel's zones.
    pub kswapd: bool,
    /// Time for which tasks have been waiting without receiving any memory.
    pub stuck_ms: u64,
}

impl KernelLoad {
    pub(super) fn wanted_bytes(&self) -> u64 {
        self.held_bytes + self.waiting_bytes + self.killed_bytes
    }

    fn release(&mut self, mut bytes: u64) {
        for part in [&mut self.waiting_bytes, &mut self.killed_bytes, &mut self.held_bytes] {
            let part_bytes = bytes.min(*part);
            *part -= part_bytes;
            bytes -= part_bytes;
        }
        self.stuck_ms = 0;
    }

    /// Frees a quarter of the allocated memory, and drops the requests of all waiting tasks.
    /// Returns the total of both.
    pub(super) fn kill(&mut self) -> u64 {
        let taken_bytes = self.held_bytes / 4;
        self.held_bytes -= taken_bytes;
        let killed_bytes = taken_bytes + std::mem::take(&mut self.waiting_bytes);
        self.killed_bytes += killed_bytes;
        self.stuck_ms = 0;
        killed_bytes
    }
}

/// Block of plugged DRAM that the agent will convert to kernel memory when its pages have migrated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Conversion {
    zone: usize,
    block_bytes: u64,
    ends: TimeMs,
    /// Time at which the agent cancels the conversion.
    limit: TimeMs,
}

impl Guest {
    /// Starts to convert `block_bytes` of plugged DRAM on `node` to kernel memory. Returns false if
    /// the node has no plugged DRAM that can be converted.
    pub(in crate::sim) fn begin_conversion(&mut self, node: u32, block_bytes: u64) -> bool {
        let has_block = |index: &usize| {
            let zone = &self.zones[*index];
            zone.tier == Tier::Dram
                && zone.guest_numa_node == node
                && self.zone_movable_bytes(*index) > 0
        };
        let zone = (0..self.zones.len()).find(has_block);
        let (ends, limit) = (self.now + CONVERSION_MS, self.now + OFFLINE_LIMIT_MS);
        self.conversion = zone.map(|zone| Conversion { zone, block_bytes, ends, limit });
        self.conversion.is_some()
    }

    /// Returns true if a block is being converted.
    pub(in crate::sim) fn is_converting(&self) -> bool {
        self.conversion.is_some()
    }

    /// Returns the size of the plugged DRAM that was converted to kernel memory.
    pub fn kernel_block_bytes(&self) -> u64 {
        self.boot.block_bytes()
    }

    /// Returns true if a zone's size cannot be changed until a conversion has ended. While Linux
    /// takes a block offline, it adds no memory (mm/memory_hotplug.c, mem_hotplug_begin), and
    /// virtio_mem does not change the block's device (virtio_mem_memory_notifier_cb).
    pub(super) fn waits_for_conversion(&self, zone: usize, grows: bool) -> bool {
        self.conversion.is_some_and(|conversion| grows || conversion.zone == zone)
    }

    /// Completes a conversion that is due. If other movable memory has no room for the block's
    /// pages, Linux retries until the agent cancels the conversion.
    pub(super) fn convert(&mut self) {
        let Some(conversion) = self.conversion.filter(|conversion| conversion.ends <= self.now)
        else {
            return;
        };
        let Conversion { zone, block_bytes, limit, .. } = conversion;
        let moved_bytes = self.zone_movable_bytes(zone).min(block_bytes);
        let has_room = self.movable_room_bytes() >= moved_bytes;
        if !has_room && self.now < limit {
            return;
        }
        self.conversion = None;
        if !has_room {
            return;
        }
        self.move_from_block(moved_bytes);
        self.plugs[zone].kernel_blocks_bytes += block_bytes;
        self.plugs[zone].marks = Marks::movable(self.zone_movable_bytes(zone));
        self.adapt_reserve();
    }

    /// Moves the pages of a block of `block_bytes` to other movable memory. DRAM is filled first.
    fn move_from_block(&mut self, block_bytes: u64) {
        self.place_pages();
        let left_bytes = self.movable_dram_bytes() - block_bytes;
        let pm_bytes = self.last_placement.movable_dram_bytes().saturating_sub(left_bytes);
        self.last_placement.pm_bytes += pm_bytes;
        self.totals.foreign_bytes += pm_bytes;
    }

    /// Moves user pages out of kernel blocks before `bytes` of the zone are unplugged. Linux
    /// unplugs movable blocks first. It migrates pages to movable memory if there is room
    /// (drivers/virtio/virtio_mem.c, virtio_mem_sbm_unplug_request).
    pub(super) fn move_from_kernel_part(&mut self, zone: usize, bytes: u64) {
        let kernel_part_bytes = bytes.saturating_sub(self.zone_movable_bytes(zone));
        if kernel_part_bytes == 0 {
            return;
        }
        self.place_pages();
        let movable_bytes = self.movable_bytes() - self.zone_movable_bytes(zone);
        let unpinned_bytes = self.boot.kernel_bytes().saturating_sub(self.kernel_used_bytes());
        let moved_bytes =
            scale(self.last_placement.kernel_zone_bytes, kernel_part_bytes, unpinned_bytes);
        let outside_bytes = self.user_bytes() - self.last_placement.kernel_zone_bytes;
        let moved_bytes = moved_bytes.min(movable_bytes.saturating_sub(outside_bytes));
        let dram_bytes = self.movable_dram_bytes() - self.zone_movable_bytes(zone);
        let to_dram_bytes =
            moved_bytes.min(dram_bytes.saturating_sub(self.last_placement.movable_dram_bytes()));
        self.last_placement.kernel_zone_bytes -= moved_bytes;
        self.last_placement.pm_bytes += moved_bytes - to_dram_bytes;
        self.totals.foreign_bytes += moved_bytes - to_dram_bytes;
    }

    /// Returns the allocated part of the kernel memory that the segment demands.
    pub fn kernel_bytes(&self) -> u64 {
        self.kernel.held_bytes
    }

    /// Returns the kernel memory that tasks wait for.
    pub fn kernel_waiting_bytes(&self) -> u64 {
        self.kernel.waiting_bytes
    }

    /// Returns the kernel memory of processes that the OOM killer has ended.
    pub fn kernel_killed_bytes(&self) -> u64 {
        self.kernel.killed_bytes
    }

    /// Returns the memory in the kernel's zones that user pages cannot use: the allocated kernel
    /// memory and the page descriptors of plugged memory.
    pub(in crate::sim) fn kernel_used_bytes(&self) -> u64 {
        self.descriptor_bytes() + self.kernel.held_bytes
    }

    /// Allocates the kernel memory that the first segment demands, down to the high watermark.
    /// Tasks wait for the rest.
    pub(super) fn boot_kernel(&mut self, segment: &Segment) {
        let high_bytes = self.boot.kernel_mark(|marks| marks.high) * PAGE_BYTES;
        let room_bytes =
            self.boot.kernel_bytes().saturating_sub(self.descriptor_bytes() + high_bytes);
        let held_bytes = segment.kernel_bytes.min(room_bytes);
        self.kernel.held_bytes = held_bytes;
        self.kernel.waiting_bytes = segment.kernel_bytes - held_bytes;
    }

    /// Updates the demand for kernel memory to the present time.
    pub(super) fn grow_kernel(&mut self, segment: &Segment) {
        let (wanted_bytes, before_bytes) =
            (segment.kernel_bytes_at(self.now), self.kernel.wanted_bytes());
        match wanted_bytes.checked_sub(before_bytes) {
            Some(more_bytes) => self.kernel.waiting_bytes += more_bytes,
            None => self.kernel.release(before_bytes - wanted_bytes),
        }
    }

    /// Free memory above `mark_pages` in the kernel's zones, if user pages remain where
    /// [`Guest::place`] has placed them.
    fn kernel_room_bytes(&self, mark_pages: u64) -> u64 {
        let used_bytes =
            self.kernel_used_bytes() + self.remaining_kernel_zone_bytes() + mark_pages * PAGE_BYTES;
        self.boot.kernel_bytes().saturating_sub(used_bytes)
    }

    fn take_kernel(&mut self, bytes: u64) -> u64 {
        let got_bytes = bytes.min(self.kernel_room_bytes(self.boot.kernel_mark(|marks| marks.min)));
        self.kernel.held_bytes += got_bytes;
        self.kernel.waiting_bytes -= got_bytes;
        got_bytes
    }

    /// Serves waiting kernel allocations from free memory in the kernel's zones, and frees more
    /// memory there if needed. Kernel allocations may use the reserve that user pages leave free.
    /// Returns the time for which tasks waited.
    pub(super) fn allocate_kernel(&mut self, ms: u64, budget: &mut Budget) -> u64 {
        if self.kernel.waiting_bytes == 0 {
            self.kernel.stuck_ms = 0;
            return 0;
        }
        self.place_pages();
        let wanted_bytes = self.kernel.waiting_bytes.min(FILL_BYTES_PER_MS.saturating_mul(ms));
        let mut missing_bytes = wanted_bytes - self.take_kernel(wanted_bytes);
        self.kernel.kswapd |= self.kernel_room_bytes(self.boot.kernel_mark(|marks| marks.low)) == 0;
        if missing_bytes > 0 {
            // kswapd demotes pages and drops page cache as fast as the kernel needs the memory.
            self.demote_from_kernel_zones(missing_bytes);
            missing_bytes -= self.take_kernel(missing_bytes);
        }
        if missing_bytes > 0 {
            let clean_bytes = self.reclaim_kernel_zones(missing_bytes, budget, Guest::drop_clean);
            self.totals.kswapd_bytes += clean_bytes;
            missing_bytes -= self.take_kernel(missing_bytes);
        }
        if missing_bytes > 0 {
            self.totals.allocstalls += 1;
            self.totals.kernel_allocstalls += 1;
            let direct_bytes = self.reclaim_kernel_zones(missing_bytes, budget, Guest::reclaim);
            self.totals.direct_bytes += direct_bytes;
            missing_bytes -= self.take_kernel(missing_bytes);
        }
        if missing_bytes < wanted_bytes {
            self.kernel.stuck_ms = 0;
        } else {
            self.kernel.stuck_ms += ms;
            if self.kernel.stuck_ms >= OOM_MS {
                self.kill();
            }
        }
        scale(ms * 1000, missing_bytes, wanted_bytes)
    }

    /// Frees memory in the kernel's zones. While kswapd runs, it frees memory up to the high
    /// watermark. While memory is being plugged, it frees enough for the page descriptors of one
    /// section.
    pub(super) fn run_kernel_kswapd(&mut self, budget: &mut Budget) {
        let bytes = |pages: u64| pages * PAGE_BYTES;
        let for_kernel =
            if self.kernel.kswapd { bytes(self.boot.kernel_mark(|marks| marks.high)) } else { 0 };
        let min_bytes = bytes(self.boot.kernel_mark(|marks| marks.min));
        let for_plug = if self.is_plugging() { min_bytes + SECTION_DESCRIPTOR_BYTES } else { 0 };
        let missing_bytes = for_kernel.max(for_plug).saturating_sub(self.kernel_room_bytes(0));
        if missing_bytes == 0 {
            self.kernel.kswapd = false;
            return;
        }
        self.place_pages();
        let demoted_bytes = self.demote_from_kernel_zones(missing_bytes);
        let reclaimed_bytes =
            self.reclaim_kernel_zones(missing_bytes - demoted_bytes, budget, Guest::reclaim);
        self.totals.kswapd_bytes += reclaimed_bytes;
        let freed_bytes = demoted_bytes + reclaimed_bytes;
        self.kernel.kswapd &= freed_bytes < missing_bytes && freed_bytes > 0;
    }

    /// Returns the free movable memory.
    fn movable_room_bytes(&self) -> u64 {
        let outside_bytes = self.user_bytes() - self.remaining_kernel_zone_bytes();
        self.movable_bytes().saturating_sub(outside_bytes)
    }

    /// Moves user pages from the kernel's zones to free PM, and returns their size. Linux demotes
    /// pages to a slower node (`demotion_enabled`) before it drops or swaps pages. The agent
    /// disables demotion while PM is full. Linux does not move pages to another zone of the same
    /// node.
    fn demote_from_kernel_zones(&mut self, bytes: u64) -> u64 {
        if !self.config.demotes {
            return 0;
        }
        let remaining = self.remaining_pages();
        let plugs = self.zones.iter().zip(&self.plugs).filter(|(zone, _)| zone.tier == Tier::Pm);
        let marks_pages = plugs.map(|(_, plug)| plug.marks.high).sum::<u64>();
        let pm_bytes = self.plugged_of(Tier::Pm);
        let reserved_bytes = marks_pages.max(full_pm_pages(pm_bytes / PAGE_BYTES)) * PAGE_BYTES;
        let room_bytes = pm_bytes.saturating_sub(remaining.pm_bytes + reserved_bytes);
        let demoted_bytes = bytes.min(remaining.kernel_zone_bytes).min(room_bytes);
        self.last_placement = Placement {
            kernel_zone_bytes: remaining.kernel_zone_bytes - demoted_bytes,
            pm_bytes: remaining.pm_bytes + demoted_bytes,
            ..remaining
        };
        self.totals.demoted_bytes += demoted_bytes;
        demoted_bytes
    }

    /// Reclaims user pages in the kernel's zones by calling `reclaim`, at most `bytes` of them.
    /// Returns their size.
    fn reclaim_kernel_zones(
        &mut self,
        bytes: u64,
        budget: &mut Budget,
        reclaim: fn(&mut Guest, u64, &mut Budget) -> u64,
    ) -> u64 {
        let remaining = self.remaining_pages();
        let freed_bytes = reclaim(self, bytes.min(remaining.kernel_zone_bytes), budget);
        let kernel_zone_bytes = remaining.kernel_zone_bytes - freed_bytes;
        self.last_placement =
            Placement { user_bytes: self.user_bytes(), kernel_zone_bytes, ..remaining };
        freed_bytes
    }
}
