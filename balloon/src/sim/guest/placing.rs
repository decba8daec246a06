//! Zones of boot memory, and places of user pages.

use foreshore_proto::{BootMemory, LOW_BOOT_BYTES, ZoneKind, node_reserve_bytes};

use super::{Guest, Marks, PAGE_BYTES};
use crate::units::{SECTION_DESCRIPTOR_BYTES, scale};
use crate::{MIB, Tier, ZoneSizes};

/// Boot memory of a guest, and what `zones` can add.
pub(in crate::sim) fn boot_memory(boot_bytes: u64, zones: &[ZoneSizes]) -> BootMemory {
    let most_bytes = |tier: Tier| {
        let zones = zones.iter().filter(|zone| zone.tier == tier);
        zones.fold(0u64, |sum, zone| sum.saturating_add(zone.max_bytes))
    };
    BootMemory { boot_bytes, dram_bytes: most_bytes(Tier::Dram), pm_bytes: most_bytes(Tier::Pm) }
}

/// Zones of boot memory, divided as the VMM's command line divides them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::sim) struct BootZones {
    /// Memory that can be plugged.
    hotplug_bytes: u64,
    /// The kernel's zone. Page descriptors of plugged memory are allocated from it.
    pub kernel_bytes: u64,
    pub kernel_marks: Marks,
    /// ZONE_MOVABLE of boot memory.
    pub movable_bytes: u64,
    pub movable_marks: Marks,
    /// Free part of the kernel's zone that user pages leave to the kernel. The agent sets it for the present zones
    /// (docs/agent.md).
    pub kept_bytes: u64,
}

impl BootZones {
    pub fn new(boot_bytes: u64, zones: &[ZoneSizes]) -> Self {
        // The kernel's code, and descriptors of the memory it boots with.
        let all_bytes = boot_bytes.saturating_sub(16 * MIB + boot_bytes / 32).max(MIB);
        let memory = boot_memory(boot_bytes, zones);
        let movable_bytes = memory.managed_movable_bytes();
        let movable_bytes = movable_bytes.min(all_bytes / 2) / PAGE_BYTES * PAGE_BYTES;
        let kernel_bytes = all_bytes - movable_bytes;
        Self {
            hotplug_bytes: memory.hotplug_bytes(),
            kernel_bytes,
            kernel_marks: Marks::lowmem(kernel_bytes),
            movable_bytes,
            movable_marks: Marks::movable(movable_bytes),
            kept_bytes: 0,
        }
    }

    /// Managed memory of both zones.
    pub fn bytes(&self) -> u64 {
        self.kernel_bytes + self.movable_bytes
    }

    /// Kind of the kernel's zone.
    pub fn kernel_kind(&self) -> ZoneKind {
        if self.kernel_bytes <= LOW_BOOT_BYTES { ZoneKind::Dma32 } else { ZoneKind::Normal }
    }

    /// Sets the reserve for the present sizes of `zones`. A guest's zones keep up to twice as much, because ratios are whole
    /// numbers.
    pub fn adapt(&mut self, zones: &[ZoneSizes]) {
        // Node 0 has the boot memory.
        let plugged = zones.iter().filter(|zone| zone.guest_numa_node == 0).map(|zone| zone.plugged_bytes);
        let movable_bytes = plugged.fold(self.movable_bytes, u64::saturating_add);
        let dram_bytes = self.kernel_bytes.saturating_add(movable_bytes);
        let reserve_bytes = node_reserve_bytes(dram_bytes, self.kernel_bytes, self.hotplug_bytes);
        self.kept_bytes = reserve_bytes.min(movable_bytes) / PAGE_BYTES * PAGE_BYTES;
    }
}

/// User pages when they were last placed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Placed {
    user_bytes: u64,
    /// Part of `user_bytes` in the kernel's zone of boot memory.
    kernel_zone_bytes: u64,
}

/// Free bytes of boot memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::sim) struct BootFree {
    pub kernel_bytes: u64,
    pub movable_bytes: u64,
}

impl Guest {
    /// Total memory that user pages can occupy.
    pub(super) fn capacity_bytes(&self) -> u64 {
        self.boot.movable_bytes + self.plugged_bytes() + self.kernel_zone_limit_bytes()
    }

    /// Largest size of user pages in the kernel's zone.
    ///
    /// New user pages leave the reserve free beside the page descriptors that have been allocated. Descriptors that are allocated
    /// later take free memory of the reserve, and a reserve that grows later moves no page: the user pages stay. So the reserve is
    /// refilled when user pages are freed.
    fn kernel_zone_limit_bytes(&self) -> u64 {
        let next_bytes = if self.is_plugging() { SECTION_DESCRIPTOR_BYTES } else { 0 };
        let left_bytes = self.boot.kernel_bytes.saturating_sub(self.descriptor_bytes());
        let limit_bytes = left_bytes.saturating_sub(self.boot.kept_bytes.max(next_bytes));
        limit_bytes.max(self.held_bytes().min(left_bytes.saturating_sub(next_bytes)))
    }

    /// User pages that are still in the kernel's zone. Freed pages were in all zones alike.
    fn held_bytes(&self) -> u64 {
        let Placed { user_bytes, kernel_zone_bytes } = self.placed;
        scale(kernel_zone_bytes, self.user_bytes().min(user_bytes), user_bytes)
    }

    /// User pages in the kernel's zone. User pages fill movable DRAM first, then the kernel's zone down to the reserve, and then
    /// PM, which is how Linux' lists of zones are ordered.
    fn kernel_zone_user_bytes(&self) -> u64 {
        let movable_bytes = self.boot.movable_bytes + self.plugged_of(Tier::Dram);
        let rest_bytes = self.user_bytes().saturating_sub(movable_bytes);
        rest_bytes.min(self.kernel_zone_limit_bytes())
    }

    /// Places the user pages.
    pub(super) fn place(&mut self) {
        let kernel_zone_bytes = self.kernel_zone_user_bytes();
        self.placed = Placed { user_bytes: self.user_bytes(), kernel_zone_bytes };
    }

    pub(super) fn kernel_free_bytes(&self) -> u64 {
        let used_bytes = self.kernel_zone_user_bytes() + self.descriptor_bytes();
        self.boot.kernel_bytes.saturating_sub(used_bytes)
    }

    /// Free bytes of boot memory, and of each zone in `free`.
    pub(in crate::sim) fn free_by_zone(&self, free: &mut [u64]) -> BootFree {
        let mut users = self.user_bytes();
        let mut leaving = self.leaving_bytes();
        let mut fill = |bytes: u64| {
            let taken = users.min(bytes);
            users -= taken;
            bytes - taken
        };
        for (zone, free) in self.zones.iter().zip(&mut *free).filter(|(zone, _)| zone.tier == Tier::Dram) {
            *free = fill(zone.plugged_bytes);
        }
        let movable_bytes = fill(self.boot.movable_bytes);
        fill(self.kernel_zone_user_bytes());
        for (zone, free) in self.zones.iter().zip(&mut *free).filter(|(zone, _)| zone.tier == Tier::Pm) {
            *free = fill(zone.plugged_bytes);
        }
        for free in free.iter_mut().rev() {
            let gone = leaving.min(*free);
            *free -= gone;
            leaving -= gone;
        }
        BootFree { kernel_bytes: self.kernel_free_bytes(), movable_bytes }
    }

    /// User pages that lie in PM, in thousandths.
    pub(super) fn pm_permille(&self) -> u64 {
        let users = self.user_bytes();
        if users == 0 {
            return 0;
        }
        let movable_bytes = self.boot.movable_bytes + self.plugged_of(Tier::Dram);
        users.saturating_sub(movable_bytes + self.kernel_zone_user_bytes()) * 1000 / users
    }
}
