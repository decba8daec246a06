//! Zones of boot memory, and the zones in which user pages are placed.

use foreshore_proto::{BootMemory, LINUX_RESERVE_RATIOS, NodeMemory, ZoneKind};

use super::{Guest, Marks, PAGE_BYTES};
use crate::units::{SECTION_DESCRIPTOR_BYTES, scale};
use crate::{MIB, Tier, ZoneSizes};

/// Returns the boot memory of a guest, and the memory that can be added in `zones`.
pub(in crate::sim) fn boot_memory(boot_bytes: u64, zones: &[ZoneSizes]) -> BootMemory {
    let most_bytes = |tier: Tier| {
        let zones = zones.iter().filter(|zone| zone.tier == tier);
        zones.fold(0u64, |sum, zone| sum.saturating_add(zone.max_bytes))
    };
    BootMemory { boot_bytes, dram_bytes: most_bytes(Tier::Dram), pm_bytes: most_bytes(Tier::Pm) }
}

/// A zone from which the kernel can allocate memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::sim) struct KernelZone {
    pub kind: ZoneKind,
    /// Memory that the zone manages.
    pub bytes: u64,
    pub marks: Marks,
    /// Reserve that user pages must leave free for the kernel. The agent sets it for the present
    /// zones (docs/reference/agent.md).
    pub reserved_bytes: u64,
}

impl KernelZone {
    /// Returns the room for user pages if the kernel uses `pinned_bytes` of this zone.
    fn room_bytes(&self, pinned_bytes: u64) -> u64 {
        (self.bytes - self.reserved_bytes).saturating_sub(pinned_bytes)
    }
}

/// Use of a zone from which the kernel can allocate memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::sim) struct KernelPart<'a> {
    pub zone: &'a KernelZone,
    /// Memory that the kernel itself uses, including page descriptors.
    pub pinned_bytes: u64,
    pub user_bytes: u64,
}

/// Zones of boot memory, with the sizes that the VMM's command line sets. Blocks of plugged DRAM
/// that were converted to kernel memory count as ZONE_NORMAL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::sim) struct BootZones {
    /// Total memory that can be plugged.
    hotplug_bytes: u64,
    /// Plugged DRAM that was converted to kernel memory.
    block_bytes: u64,
    /// ZONE_DMA32 and ZONE_NORMAL, which may be empty. Page descriptors of plugged memory are
    /// allocated from these zones.
    kernel_zones: [KernelZone; 2],
    /// Size of ZONE_MOVABLE in boot memory.
    pub movable_bytes: u64,
    pub movable_marks: Marks,
}

impl BootZones {
    pub(crate) fn new(boot_bytes: u64, zones: &[ZoneSizes]) -> Self {
        // The kernel's code and the page descriptors of boot memory are not managed.
        let all_bytes = boot_bytes.saturating_sub(16 * MIB + boot_bytes / 32).max(MIB);
        let memory = boot_memory(boot_bytes, zones);
        let movable_bytes = memory.managed_movable_bytes();
        let movable_bytes = movable_bytes.min(all_bytes / 2) / PAGE_BYTES * PAGE_BYTES;
        let kernel_bytes = all_bytes - movable_bytes;
        let [_, _, normal_bytes] = memory.node().zones_bytes.map(|bytes| bytes.min(kernel_bytes));
        // Linux divides min_free_kbytes among the zones in proportion to their sizes
        // (mm/page_alloc.c, __setup_per_zone_wmarks).
        let marks = Marks::lowmem(kernel_bytes);
        let zone = |kind, bytes| KernelZone {
            kind,
            bytes,
            marks: marks.part(bytes, kernel_bytes),
            reserved_bytes: 0,
        };
        Self {
            hotplug_bytes: memory.hotplug_bytes(),
            block_bytes: 0,
            kernel_zones: [
                zone(ZoneKind::Dma32, kernel_bytes - normal_bytes),
                zone(ZoneKind::Normal, normal_bytes),
            ],
            movable_bytes,
            movable_marks: Marks::movable(movable_bytes),
        }
    }

    /// Returns the size of the plugged DRAM that was converted to kernel memory.
    pub(crate) fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Returns the kernel memory in blocks of plugged DRAM, if the kernel uses `pinned_bytes` in
    /// total.
    pub(crate) fn pinned_block_bytes(&self, pinned_bytes: u64) -> u64 {
        let normal_bytes = self.kernel_zones[1].bytes;
        pinned_bytes.min(normal_bytes).saturating_sub(normal_bytes - self.block_bytes)
    }

    /// Returns the managed memory of all zones.
    pub(crate) fn bytes(&self) -> u64 {
        self.kernel_bytes() + self.movable_bytes
    }

    /// Returns the managed memory of the kernel's zones.
    pub(crate) fn kernel_bytes(&self) -> u64 {
        self.kernel_zones.iter().map(|zone| zone.bytes).sum()
    }

    /// Returns the sum of one watermark over the kernel's zones, in pages.
    pub(crate) fn kernel_mark(&self, mark: impl Fn(&Marks) -> u64) -> u64 {
        self.kernel_zones.iter().map(|zone| mark(&zone.marks)).sum()
    }

    /// Divides `used_bytes` among the kernel's zones that have memory, the highest zone first.
    /// Linux allocates page descriptors and other kernel memory (`pinned_bytes`) from the highest
    /// zone with free memory. It places user pages in that zone down to its reserve.
    pub(crate) fn kernel_zones(
        &self,
        used_bytes: u64,
        pinned_bytes: u64,
    ) -> impl Iterator<Item = KernelPart<'_>> {
        let [low, normal] = &self.kernel_zones;
        let user_bytes = used_bytes.saturating_sub(pinned_bytes);
        let above_pinned_bytes = pinned_bytes.min(normal.bytes);
        let below_pinned_bytes = pinned_bytes - above_pinned_bytes;
        let rest_bytes = user_bytes.saturating_sub(normal.room_bytes(above_pinned_bytes));
        let below_user_bytes = rest_bytes.min(low.bytes.saturating_sub(below_pinned_bytes));
        let above = KernelPart {
            zone: normal,
            pinned_bytes: above_pinned_bytes,
            // No page is moved when a reserve grows.
            user_bytes: user_bytes - below_user_bytes,
        };
        let below = KernelPart {
            zone: low,
            pinned_bytes: below_pinned_bytes,
            user_bytes: below_user_bytes,
        };
        [above, below].into_iter().filter(|part| part.zone.bytes > 0)
    }

    /// Returns the room for user pages in the kernel's zones, besides the kernel's own memory.
    pub(crate) fn room_bytes(&self, pinned_bytes: u64) -> u64 {
        let parts = self.kernel_zones(pinned_bytes, pinned_bytes);
        parts.map(|part| part.zone.room_bytes(part.pinned_bytes)).sum()
    }

    /// Returns the memory in the kernel's zones that MemAvailable does not include. For each zone,
    /// this is the reserve and the high watermark, but at most the whole zone (mm/page_alloc.c,
    /// calculate_totalreserve_pages).
    pub(crate) fn unavailable_bytes(&self) -> u64 {
        let zones = self.kernel_zones.iter();
        zones.map(|zone| (zone.reserved_bytes + zone.marks.high * PAGE_BYTES).min(zone.bytes)).sum()
    }

    /// Sets the total size of the DRAM blocks that were converted to kernel memory. Such blocks are
    /// above 4 GiB, in ZONE_NORMAL.
    fn set_kernel_blocks(&mut self, block_bytes: u64) {
        let before_bytes = std::mem::replace(&mut self.block_bytes, block_bytes);
        self.kernel_zones[1].bytes = self.kernel_zones[1].bytes - before_bytes + block_bytes;
        let kernel_bytes = self.kernel_bytes();
        let marks = Marks::lowmem(kernel_bytes);
        for zone in &mut self.kernel_zones {
            zone.marks = marks.part(zone.bytes, kernel_bytes);
        }
    }

    /// Sets the reserve for `plugged_bytes` of movable memory on the boot memory's node, as the
    /// agent does in a guest with Linux's default ratios. `block_bytes` is the size of the plugged
    /// DRAM that was converted to kernel memory.
    pub(crate) fn adapt(&mut self, plugged_bytes: u64, block_bytes: u64) {
        if self.block_bytes != block_bytes {
            self.set_kernel_blocks(block_bytes);
        }
        let movable_bytes = self.movable_bytes.saturating_add(plugged_bytes);
        let [low, normal] = &mut self.kernel_zones;
        let node = NodeMemory { zones_bytes: [0, low.bytes, normal.bytes], movable_bytes };
        let dram_bytes = node.kernel_bytes().saturating_add(movable_bytes);
        let mut ratios = LINUX_RESERVE_RATIOS;
        node.lower_ratios(&mut ratios, dram_bytes, self.hotplug_bytes);
        let [_, low_reserved_bytes, normal_reserved_bytes] = node.reserved_bytes(&ratios);
        low.reserved_bytes = low_reserved_bytes / PAGE_BYTES * PAGE_BYTES;
        normal.reserved_bytes = normal_reserved_bytes / PAGE_BYTES * PAGE_BYTES;
    }
}

/// User pages as they were last placed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Placement {
    pub user_bytes: u64,
    /// Part of `user_bytes` that is in the kernel's zones of boot memory.
    pub kernel_zone_bytes: u64,
    /// Part of `user_bytes` that is in PM.
    pub pm_bytes: u64,
}

impl Placement {
    /// Returns the part that is in the movable zones of DRAM.
    pub(super) fn movable_dram_bytes(&self) -> u64 {
        self.user_bytes.saturating_sub(self.kernel_zone_bytes + self.pm_bytes)
    }
}

/// Free memory in boot memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::sim) struct BootFree {
    pub kernel_bytes: u64,
    pub movable_bytes: u64,
}

impl Guest {
    /// Returns the total memory that user pages can occupy.
    pub(super) fn capacity_bytes(&self) -> u64 {
        self.movable_bytes() + self.kernel_zone_limit_bytes()
    }

    /// Returns the memory in all movable zones.
    pub(super) fn movable_bytes(&self) -> u64 {
        self.boot.movable_bytes + self.plugged_bytes() - self.kernel_block_bytes()
    }

    /// Returns the memory in the movable zones of DRAM.
    pub(super) fn movable_dram_bytes(&self) -> u64 {
        self.boot.movable_bytes + self.plugged_of(Tier::Dram) - self.kernel_block_bytes()
    }

    /// Returns the plugged movable memory of the zone at `index`.
    pub(in crate::sim) fn zone_movable_bytes(&self, index: usize) -> u64 {
        let plugged_bytes = self.zones[index].plugged_bytes;
        plugged_bytes - self.plugs[index].kernel_bytes(plugged_bytes)
    }

    /// Updates the kernel's zones and the reserve to the present sizes of all zones.
    pub(super) fn adapt_reserve(&mut self) {
        // Boot memory is on node 0.
        let of_node = (0..self.zones.len()).filter(|index| self.zones[*index].guest_numa_node == 0);
        let plugged_bytes = of_node.map(|index| self.zone_movable_bytes(index)).sum();
        let zones = self.zones.iter().zip(&self.plugs);
        let block_bytes = zones.map(|(zone, plug)| plug.kernel_bytes(zone.plugged_bytes)).sum();
        self.boot.adapt(plugged_bytes, block_bytes);
    }

    /// Returns the maximum size of user pages in the kernel's zones.
    ///
    /// New user pages must leave the reserve free, in addition to the allocated kernel memory. A
    /// later kernel allocation uses free memory of the reserve, and no page is moved when the
    /// reserve grows. In both cases, the reserve is filled again when user pages are freed.
    fn kernel_zone_limit_bytes(&self) -> u64 {
        let next_bytes = if self.is_plugging() { SECTION_DESCRIPTOR_BYTES } else { 0 };
        let used_bytes = self.kernel_used_bytes();
        let left_bytes = self.boot.kernel_bytes().saturating_sub(used_bytes);
        let room_bytes = self.boot.room_bytes(used_bytes);
        let limit_bytes = room_bytes.min(left_bytes.saturating_sub(next_bytes));
        limit_bytes
            .max(self.remaining_kernel_zone_bytes().min(left_bytes.saturating_sub(next_bytes)))
    }

    /// Returns the placement of the user pages that were not freed since pages were last placed.
    ///
    /// Pages in PM are freed first. After that, the same share of pages is freed in each zone of
    /// DRAM. If user pages occupy the reserve of the kernel's zones, the same share is freed in all
    /// memory, including PM.
    pub(super) fn remaining_pages(&self) -> Placement {
        let placed = self.last_placement;
        let user_bytes = self.user_bytes();
        if user_bytes >= placed.user_bytes {
            return placed;
        }
        let freed_bytes = placed.user_bytes - user_bytes;
        let dram_left_bytes = user_bytes - placed.pm_bytes.saturating_sub(freed_bytes);
        let dram_bytes = placed.user_bytes - placed.pm_bytes;
        let of_dram_bytes = scale(placed.kernel_zone_bytes, dram_left_bytes, dram_bytes);
        let of_all_bytes = scale(placed.kernel_zone_bytes, user_bytes, placed.user_bytes);
        let room_bytes = self.boot.room_bytes(self.kernel_used_bytes());
        let kernel_zone_bytes = of_all_bytes.max(of_dram_bytes.min(room_bytes));
        let pm_bytes = (user_bytes - kernel_zone_bytes).saturating_sub(placed.movable_dram_bytes());
        Placement { user_bytes, kernel_zone_bytes, pm_bytes }
    }

    /// Returns the size of the user pages that are still in the kernel's zones.
    pub(super) fn remaining_kernel_zone_bytes(&self) -> u64 {
        self.remaining_pages().kernel_zone_bytes
    }

    /// Returns the placement of all user pages.
    ///
    /// New pages fill movable DRAM first, then the kernel's zones down to the reserve, and then PM,
    /// in the order of Linux's zone lists. Placed pages remain where they are until they are freed,
    /// or until their memory is unplugged or converted to kernel memory. Linux does not move pages
    /// when memory is onlined.
    pub(super) fn placement(&self) -> Placement {
        let (remaining, user_bytes) = (self.remaining_pages(), self.user_bytes());
        let dram_bytes = self.movable_dram_bytes();
        // Old pages in the movable zones of DRAM, and all new pages.
        let rest_bytes = remaining.movable_dram_bytes() + (user_bytes - remaining.user_bytes);
        let movable_bytes = rest_bytes.min(dram_bytes);
        let above_bytes = rest_bytes - movable_bytes;
        let limit_bytes = self.kernel_zone_limit_bytes();
        let new_bytes = above_bytes.min(limit_bytes.saturating_sub(remaining.kernel_zone_bytes));
        let kernel_left_bytes = self.boot.kernel_bytes().saturating_sub(self.kernel_used_bytes());
        let kernel_zone_bytes = (remaining.kernel_zone_bytes + new_bytes).min(kernel_left_bytes);
        // If PM was unplugged, its pages move to DRAM.
        let mut displaced_bytes = (user_bytes - movable_bytes - kernel_zone_bytes)
            .saturating_sub(self.plugged_of(Tier::Pm));
        let to_movable_bytes = displaced_bytes.min(dram_bytes - movable_bytes);
        displaced_bytes -= to_movable_bytes;
        let to_kernel_bytes = displaced_bytes.min(limit_bytes.saturating_sub(kernel_zone_bytes));
        let kernel_zone_bytes = kernel_zone_bytes + to_kernel_bytes;
        let pm_bytes = user_bytes - movable_bytes - to_movable_bytes - kernel_zone_bytes;
        Placement { user_bytes, kernel_zone_bytes, pm_bytes }
    }

    /// Places the user pages.
    pub(super) fn place_pages(&mut self) {
        let placement = self.placement();
        self.totals.foreign_bytes +=
            placement.pm_bytes.saturating_sub(self.last_placement.pm_bytes);
        self.last_placement = placement;
    }

    pub(super) fn kernel_free_bytes(&self) -> u64 {
        let used_bytes = self.placement().kernel_zone_bytes + self.kernel_used_bytes();
        self.boot.kernel_bytes().saturating_sub(used_bytes)
    }

    /// Returns the free memory in boot memory. Writes the free memory of each zone to `free`.
    pub(in crate::sim) fn free_by_zone(&self, free: &mut [u64]) -> BootFree {
        let placement = self.placement();
        let mut offlining = self.offlining_bytes();
        let fill = |users: &mut u64, bytes: u64| {
            let taken = (*users).min(bytes);
            *users -= taken;
            bytes - taken
        };
        let (mut dram_users, mut pm_users) = (placement.movable_dram_bytes(), placement.pm_bytes);
        for (index, free) in free.iter_mut().enumerate() {
            let users = match self.zones[index].tier {
                Tier::Dram => &mut dram_users,
                Tier::Pm => &mut pm_users,
            };
            *free = fill(users, self.zone_movable_bytes(index));
        }
        let movable_bytes = fill(&mut dram_users, self.boot.movable_bytes);
        for free in free.iter_mut().rev() {
            let part_bytes = offlining.min(*free);
            *free -= part_bytes;
            offlining -= part_bytes;
        }
        BootFree { kernel_bytes: self.kernel_free_bytes(), movable_bytes }
    }

    /// Returns the share of user pages that is in PM, in thousandths.
    pub(super) fn pm_permille(&self) -> u64 {
        let users = self.user_bytes();
        if users == 0 {
            return 0;
        }
        self.placement().pm_bytes * 1000 / users
    }
}
