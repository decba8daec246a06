//! DRAM reserve for the guest's kernel.
//!
//! The agent writes the reserve to a sysctl, the policies do not count it as free memory, and the
//! simulator models it. All three use this module. The VMM also uses it to divide boot memory
//! ([`BootMemory`](crate::BootMemory)).

use std::cmp::Reverse;

use crate::{PAGE_BYTES, Zone, ZoneKind, scale};

const MIB: u64 = 1 << 20;

/// DRAM divided by this number is reserved for page tables, stacks, slabs and sockets.
const BASE_PART: u64 = 16;
/// Bounds of that part.
const MIN_BASE_BYTES: u64 = 8 * MIB;
const MAX_BASE_BYTES: u64 = 512 * MIB;

/// Bytes of memory described by one byte of page descriptors. Each page of 4 KiB has a descriptor
/// of 64 bytes (include/linux/mm_types.h).
const DESCRIBED_PER_BYTE: u64 = 64;

/// Size of the page descriptors for `memory_bytes` of memory.
pub fn descriptor_bytes(memory_bytes: u64) -> u64 {
    memory_bytes / DESCRIBED_PER_BYTE
}

/// DRAM that user pages must leave free in a guest with `dram_bytes` of DRAM and up to
/// `hotplug_bytes` of hotplugged memory.
///
/// The page descriptors of all hotpluggable memory must fit into the reserve, because the kernel
/// cannot reclaim user pages as fast as memory is plugged.
pub fn kernel_reserve_bytes(dram_bytes: u64, hotplug_bytes: u64) -> u64 {
    (dram_bytes / BASE_PART).clamp(MIN_BASE_BYTES, MAX_BASE_BYTES) + descriptor_bytes(hotplug_bytes)
}

/// Reserve of a node. The reserve is limited to half of `kernel_bytes`, the memory in the node's
/// kernel zones.
fn node_reserve_bytes(dram_bytes: u64, kernel_bytes: u64, hotplug_bytes: u64) -> u64 {
    kernel_reserve_bytes(dram_bytes, hotplug_bytes).min(kernel_bytes / 2)
}

/// Linux' ratios of `vm.lowmem_reserve_ratio`, in the order of its zones: ZONE_DMA, ZONE_DMA32,
/// ZONE_NORMAL, ZONE_MOVABLE and ZONE_DEVICE (mm/page_alloc.c, sysctl_lowmem_reserve_ratio).
pub const LINUX_RESERVE_RATIOS: [u64; 5] = [256, 256, 32, 0, 0];

/// Zones that can serve the kernel, in the order of the ratios.
pub const KERNEL_ZONES: [ZoneKind; 3] = [ZoneKind::Dma, ZoneKind::Dma32, ZoneKind::Normal];

/// Memory of a node, split into the zones that `vm.lowmem_reserve_ratio` distinguishes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeMemory {
    /// Zones in the order of [`KERNEL_ZONES`].
    pub zones_bytes: [u64; KERNEL_ZONES.len()],
    /// ZONE_MOVABLE.
    pub movable_bytes: u64,
}

impl NodeMemory {
    fn of(zones: &[Zone], node: u32) -> Self {
        let bytes = |kind: ZoneKind| {
            let zones = zones.iter().filter(|zone| zone.node == node && zone.kind == kind);
            sum(zones.map(|zone| zone.managed_pages)).saturating_mul(PAGE_BYTES)
        };
        Self { zones_bytes: KERNEL_ZONES.map(bytes), movable_bytes: bytes(ZoneKind::Movable) }
    }

    /// Memory in zones that serve the kernel.
    pub fn kernel_bytes(&self) -> u64 {
        sum(self.zones_bytes)
    }

    /// Lowers `ratios` so that the kernel zones keep the reserve of a node with `dram_bytes` of
    /// DRAM and up to `hotplug_bytes` of hotplugged memory.
    ///
    /// The reserve is independent of the watermarks. Linux adds the reserve to the watermark that
    /// it checks: `mark + z->lowmem_reserve[highest_zoneidx]` (mm/page_alloc.c,
    /// zone_watermark_fast). Therefore, user pages stop at that distance above `low`. The kernel
    /// can use the whole reserve before free memory falls to `low` and kswapd is woken.
    pub fn lower_ratios(&self, ratios: &mut [u64], dram_bytes: u64, hotplug_bytes: u64) {
        self.lower_to_reserve(
            ratios,
            node_reserve_bytes(dram_bytes, self.kernel_bytes(), hotplug_bytes),
        );
    }

    /// Lowers `ratios` so that the kernel zones keep `reserve_bytes` for the kernel, and take as
    /// little more as possible from user pages.
    fn lower_to_reserve(&self, ratios: &mut [u64], reserve_bytes: u64) {
        // For a few MiB of reserve, programs should not lose hundreds of MiB.
        let enough_bytes = reserve_bytes - reserve_bytes / 16;
        let best = [false, true]
            .map(|is_whole| self.lowered_ratios(ratios, reserve_bytes, is_whole))
            .into_iter()
            .max_by_key(|ratios| {
                let reserved_bytes = sum(self.reserved_bytes(ratios));
                (self.kernel_share_bytes(ratios).min(enough_bytes), Reverse(reserved_bytes))
            });
        ratios.copy_from_slice(&best.expect("two candidates"));
    }

    /// Returns lowered `ratios` with which the zones keep up to `reserve_bytes` for the kernel.
    ///
    /// The reserve of a zone is the memory of all higher zones of the node, divided by the zone's
    /// ratio (mm/page_alloc.c, setup_per_zone_lowmem_reserve). The reserve of a lower zone also
    /// keeps out kernel allocations meant for a higher zone. Therefore, the highest zone is used
    /// first, and only movable memory is considered. Zones of size 0 are skipped. ZONE_DMA is
    /// skipped as well, because only drivers use it.
    ///
    /// If `is_whole` is set, the whole highest zone may be reserved when a ratio that reserves a
    /// part of it is not enough.
    fn lowered_ratios(&self, ratios: &[u64], reserve_bytes: u64, is_whole: bool) -> Vec<u64> {
        let mut ratios = ratios.to_vec();
        let movable_bytes = self.movable_bytes;
        let (mut missing_bytes, mut above_bytes) = (reserve_bytes, 0u64);
        for (ratio, &zone_bytes) in ratios.iter_mut().zip(&self.zones_bytes).skip(1).rev() {
            // A lower zone would deny the kernel far more memory than it reserves for the kernel.
            if movable_bytes == 0 || missing_bytes == 0 || movable_bytes < above_bytes / 2 {
                break;
            }
            if zone_bytes == 0 {
                continue;
            }
            // A zone that is reserved as a whole is lost to programs.
            let least = match is_whole && above_bytes == 0 {
                true => 1,
                false => above_bytes.saturating_add(movable_bytes).div_ceil(zone_bytes).max(1),
            };
            *ratio = (*ratio).min((movable_bytes / missing_bytes.min(zone_bytes)).max(least));
            let reserved_bytes = movable_bytes.checked_div(*ratio).unwrap_or(0).min(zone_bytes);
            missing_bytes = missing_bytes.saturating_sub(reserved_bytes);
            above_bytes = above_bytes.saturating_add(zone_bytes);
        }
        ratios
    }

    /// Part of the reserved memory that the kernel can use. A lower zone also keeps memory from
    /// kernel allocations meant for a higher zone.
    pub(crate) fn kernel_share_bytes(&self, ratios: &[u64]) -> u64 {
        let zones = self.zones_bytes.iter().zip(ratios).skip(1);
        let share = |(&zone_bytes, ratio): (&u64, &u64)| {
            self.movable_bytes.checked_div(*ratio).unwrap_or(0).min(zone_bytes)
        };
        sum(zones.map(share))
    }

    /// Memory in each zone that Linux keeps free of user pages under `ratios`. The memory is the
    /// memory of all higher zones of the node, divided by the zone's ratio (mm/page_alloc.c,
    /// setup_per_zone_lowmem_reserve).
    pub fn reserved_bytes(&self, ratios: &[u64]) -> [u64; KERNEL_ZONES.len()] {
        let mut reserved_bytes = [0; KERNEL_ZONES.len()];
        let mut above_bytes = self.movable_bytes;
        for (at, &zone_bytes) in self.zones_bytes.iter().enumerate().rev() {
            let ratio = ratios.get(at).copied().unwrap_or(0);
            reserved_bytes[at] = above_bytes.checked_div(ratio).unwrap_or(0).min(zone_bytes);
            above_bytes = above_bytes.saturating_add(zone_bytes);
        }
        reserved_bytes
    }
}

/// Returns values of `vm.lowmem_reserve_ratio` that keep the reserve in every node with both
/// movable memory and kernel zones. `hotplug_bytes` is the total memory that can be plugged. A
/// ratio applies to all nodes, so it is set for the node with the largest reserve. No ratio exceeds
/// its value in `least`.
///
/// Linux allocates page descriptors for nodes without kernel zones from the nodes that have them.
/// Therefore, each node with kernel zones reserves its share of all descriptors.
pub fn reserve_ratios(zones: &[Zone], hotplug_bytes: u64, least: &[u64]) -> Vec<u64> {
    let mut ratios = least.to_vec();
    let kernel_zones = zones.iter().filter(|zone| KERNEL_ZONES.contains(&zone.kind));
    let all_kernel_pages = sum(kernel_zones.map(|zone| zone.managed_pages));
    for memory in nodes(zones) {
        let (kernel_bytes, movable_bytes) = (memory.kernel_bytes(), memory.movable_bytes);
        let share = scale(hotplug_bytes, kernel_bytes / PAGE_BYTES, all_kernel_pages);
        memory.lower_ratios(&mut ratios, kernel_bytes.saturating_add(movable_bytes), share);
    }
    ratios
}

/// Saturating sum, because the values come from a guest.
fn sum(values: impl IntoIterator<Item = u64>) -> u64 {
    values.into_iter().fold(0, u64::saturating_add)
}

fn nodes(zones: &[Zone]) -> impl Iterator<Item = NodeMemory> {
    let is_first =
        |at: usize, zone: &Zone| !zones[..at].iter().any(|before| before.node == zone.node);
    let firsts = zones.iter().enumerate().filter(move |&(at, zone)| is_first(at, zone));
    firsts.map(|(_, zone)| NodeMemory::of(zones, zone.node))
}

/// Memory in all `zones` that Linux keeps free of user pages under `ratios`.
pub fn reserved_bytes(zones: &[Zone], ratios: &[u64]) -> u64 {
    sum(nodes(zones).map(|memory| sum(memory.reserved_bytes(ratios))))
}

/// Pages in `zone` that Linux keeps free of user pages under `ratios`. `zones` contains `zone`.
pub fn reserved_pages(zone: &Zone, zones: &[Zone], ratios: &[u64]) -> u64 {
    let Some(at) = KERNEL_ZONES.iter().position(|kind| *kind == zone.kind) else { return 0 };
    NodeMemory::of(zones, zone.node).reserved_bytes(ratios)[at] / PAGE_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zone(node: u32, kind: ZoneKind, mib: u64) -> Zone {
        Zone { node, kind, managed_pages: mib * MIB / PAGE_BYTES, ..Zone::default() }
    }

    #[test]
    fn reserve_is_kept_in_the_highest_zone_and_the_rest_below() {
        let ratios = |dma32_mib: u64, normal_mib: u64, movable_mib: u64, reserve_mib: u64| {
            let mut ratios = LINUX_RESERVE_RATIOS;
            let zones_bytes = [0, dma32_mib * MIB, normal_mib * MIB];
            let node = NodeMemory { zones_bytes, movable_bytes: movable_mib * MIB };
            node.lower_to_reserve(&mut ratios, reserve_mib * MIB);
            ratios
        };
        assert_eq!(ratios(400, 0, 112, 50), [256, 2, 32, 0, 0]);
        assert_eq!(ratios(3072, 1024, 1024, 512), [256, 256, 2, 0, 0]);
        assert_eq!(ratios(3072, 512, 512, 768), [256, 2, 1, 0, 0]);
        assert_eq!(ratios(3072, 32, 480, 480), [256, 1, 15, 0, 0]);
        // All 480 MiB of ZONE_NORMAL are kept, and 90 of ZONE_DMA32. If half of ZONE_NORMAL were
        // kept, ZONE_DMA32 would keep 994 MiB from programs.
        assert_eq!(ratios(3072, 480, 514, 526), [256, 11, 1, 0, 0]);
        // Half of the movable memory, together with the default reserve of ZONE_DMA32, is less than
        // all of ZONE_NORMAL.
        assert_eq!(ratios(2960, 2912, 4128, 2080), [256, 256, 2, 0, 0]);
        // A reserve of 2247 MiB is sufficient. If all of ZONE_NORMAL were kept, programs would have
        // 675 MiB less.
        assert_eq!(ratios(3072, 1456, 1498, 2248), [256, 1, 2, 0, 0]);
        // A zone of 3 GiB cannot keep more than 3 GiB.
        assert_eq!(ratios(3072, 2496, 2496, 4992), [256, 2, 1, 0, 0]);
        // ZONE_DMA32 would keep 256 MiB of ZONE_NORMAL from the kernel.
        assert_eq!(ratios(300, 256, 36, 40), [256, 256, 1, 0, 0]);
        // No ratio is raised. With too little movable memory, the zones keep as much as they can.
        assert_eq!(ratios(3072, 8192, 8192, 64), LINUX_RESERVE_RATIOS);
        assert_eq!(ratios(400, 0, 10, 50), [256, 1, 32, 0, 0]);
        assert_eq!(ratios(400, 0, 0, 50), LINUX_RESERVE_RATIOS);
        assert_eq!(ratios(0, 0, 500, 500), LINUX_RESERVE_RATIOS);
        NodeMemory { zones_bytes: [0, 1, 0], movable_bytes: 1 }.lower_to_reserve(&mut [], 1);
    }

    #[test]
    fn reserve_grows_with_the_memory_that_can_be_added() {
        assert_eq!(kernel_reserve_bytes(512 * MIB, 0), 32 * MIB);
        assert_eq!(kernel_reserve_bytes(512 * MIB, 7168 * MIB), 144 * MIB);
        assert_eq!(kernel_reserve_bytes(64 * MIB, 0), 8 * MIB);
        assert_eq!(kernel_reserve_bytes(1 << 40, 64 << 30), 1536 * MIB);
        assert_eq!(kernel_reserve_bytes(u64::MAX, u64::MAX), 512 * MIB + u64::MAX / 64);
    }

    #[test]
    fn zones_keep_a_part_of_the_higher_zones_of_their_node() {
        let zones = [
            zone(0, ZoneKind::Dma, 15),
            zone(0, ZoneKind::Dma32, 2900),
            zone(0, ZoneKind::Normal, 256),
            zone(0, ZoneKind::Movable, 300),
            zone(0, ZoneKind::Movable, 212),
            zone(1, ZoneKind::Movable, 16_384),
        ];
        let kept_mib = |ratios: &[u64]| {
            zones.each_ref().map(|zone| reserved_pages(zone, &zones, ratios) * PAGE_BYTES / MIB)
        };
        assert_eq!(kept_mib(&LINUX_RESERVE_RATIOS), [14, 3, 16, 0, 0, 0]);
        // A sixteenth of 3683 MiB is 230 MiB, and the descriptors of 16 GiB take 256 MiB.
        let ratios = reserve_ratios(&zones, 16 << 30, &LINUX_RESERVE_RATIOS);
        assert_eq!(
            (&ratios[..], kept_mib(&ratios)),
            (&[256, 2, 2, 0, 0][..], [14, 384, 256, 0, 0, 0])
        );
        assert_eq!(
            kept_mib(&[0, 0, 1]),
            [0, 0, 256, 0, 0, 0],
            "no zone can keep more memory than it has"
        );
        assert_eq!(kept_mib(&[]), [0; 6]);
    }

    #[test]
    fn half_of_the_kernels_zones_is_the_largest_reserve() {
        assert_eq!(node_reserve_bytes(512 * MIB, 400 * MIB, 7168 * MIB), 144 * MIB);
        assert_eq!(node_reserve_bytes(512 * MIB, 280 * MIB, 7168 * MIB), 140 * MIB);
    }

    #[test]
    fn ratios_keep_the_reserve_in_each_node_with_movable_memory() {
        use ZoneKind::{Dma, Dma32, Movable, Normal};
        for (zones, hotplug_bytes, ratios) in [
            // The reserve is a sixteenth of 480 MiB, 30 MiB. With a ratio of 4, ZONE_DMA32 keeps a
            // quarter of 128 MiB, 32 MiB.
            (
                vec![(0, Dma, 15), (0, Dma32, 337), (0, Movable, 128), (1, Movable, 1024)],
                0,
                [256, 4, 32, 0, 0],
            ),
            // A sixteenth of 455 MiB is 28 MiB, and the descriptors of 7 GiB take 112 MiB.
            (vec![(0, Dma32, 311), (0, Movable, 144)], 0, [256, 5, 32, 0, 0]),
            (vec![(0, Dma32, 311), (0, Movable, 144)], 7 << 30, [256, 1, 32, 0, 0]),
            // At most half of the kernel zones is kept, here 155 MiB.
            (vec![(0, Dma32, 311), (0, Movable, 1024)], 1 << 40, [256, 6, 32, 0, 0]),
            // Linux's defaults already keep 2 GiB.
            (
                vec![(0, Dma32, 3000), (0, Normal, 62_000), (0, Movable, 65_536)],
                0,
                LINUX_RESERVE_RATIOS,
            ),
            // A node without movable memory reserves nothing. A node with little movable memory
            // reserves at most as much.
            (vec![(0, Dma32, 337), (1, Movable, 1024)], 0, LINUX_RESERVE_RATIOS),
            (vec![(0, Dma32, 337), (0, Movable, 2)], 0, [256, 1, 32, 0, 0]),
            // Node 0 keeps 96 MiB and a quarter of 256 MiB. With all descriptors it would keep 352
            // MiB.
            (
                vec![(0, Dma32, 1024), (0, Movable, 512), (1, Normal, 3072), (1, Movable, 1024)],
                16 << 30,
                [256, 3, 2, 0, 0],
            ),
        ] {
            let zones: Vec<Zone> =
                zones.into_iter().map(|(node, kind, mib)| zone(node, kind, mib)).collect();
            let of_zones = reserve_ratios(&zones, hotplug_bytes, &LINUX_RESERVE_RATIOS);
            assert_eq!(of_zones, ratios, "{zones:?}");
        }
    }

    #[test]
    fn zones_of_any_size_have_ratios() {
        let huge = |kind| Zone { kind, managed_pages: u64::MAX, ..Zone::default() };
        let zones = [ZoneKind::Dma32, ZoneKind::Normal, ZoneKind::Movable].map(huge);
        let ratios = reserve_ratios(&zones, u64::MAX, &LINUX_RESERVE_RATIOS);
        assert!(
            zones.iter().all(|zone| reserved_pages(zone, &zones, &ratios) <= u64::MAX / PAGE_BYTES)
        );
        assert_eq!(reserve_ratios(&[], u64::MAX, &LINUX_RESERVE_RATIOS), LINUX_RESERVE_RATIOS);
    }
}
