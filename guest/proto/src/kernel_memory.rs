//! Computes how much memory the guest's kernel can use for its own allocations.
//!
//! Slabs, page tables, stacks, sockets and page descriptors are allocated from zones that are not
//! movable (mm/page_alloc.c, gfp_zone). The agent, the governor and its policies compare these
//! sums, so all of them use this module.

use std::collections::VecDeque;

use crate::{KernelUse, PAGE_BYTES, Zone, ZoneKind, scale};

/// Time in which the growth rate decays to zero after growth has stopped.
const DECAY_MS: u64 = 1_000;

/// Time after a stalled kernel allocation during which reclaimable caches do not count as free.
const STALLED_MS: u64 = 10_000;

/// Size of `struct dentry` on x86-64 (include/linux/dcache.h).
pub(crate) const DENTRY_BYTES: u64 = 192;

/// Lower bound for the size of an inode. On x86-64, `struct inode` has about 550 bytes without
/// optional kernel features (include/linux/fs.h). Inodes of most file systems are larger.
pub(crate) const LEAST_INODE_BYTES: u64 = 512;

/// Sums over a guest's zones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelMemory {
    /// Memory that the kernel can use for itself. Excludes ZONE_DMA, because only drivers allocate
    /// from it.
    pub managed_bytes: u64,
    /// Free part of `managed_bytes` above the high watermarks.
    pub room_bytes: u64,
    /// Memory of all nodes that have kernel zones, including their movable zones.
    pub dram_bytes: u64,
    /// Memory in movable zones.
    pub movable_bytes: u64,
    /// Free part of `movable_bytes`.
    pub movable_free_bytes: u64,
}

impl KernelMemory {
    /// Computes the sums over `zones`. They saturate, because the values come from a guest.
    pub fn of<'a>(zones: impl Iterator<Item = &'a Zone> + Clone) -> Self {
        let is_dram = |node| zones.clone().any(|zone| zone.node == node && zone.serves_kernel());
        let mut memory = KernelMemory::default();
        // `is_dram` searches all zones again. A guest has only a few.
        for zone in zones.clone() {
            if zone.serves_kernel() {
                add(&mut memory.managed_bytes, zone.managed_pages);
                add(&mut memory.room_bytes, zone.free_pages.saturating_sub(zone.high_pages));
            } else if zone.kind == ZoneKind::Movable {
                add(&mut memory.movable_bytes, zone.managed_pages);
                add(&mut memory.movable_free_bytes, zone.free_pages);
            }
            if is_dram(zone.node) {
                add(&mut memory.dram_bytes, zone.managed_pages);
            }
        }
        memory
    }
}

/// Growth rate of kernel memory, and the part of kernel memory that Linux reclaims on demand.
///
/// A program that creates thousands of files uses hundreds of MiB of kernel memory per second. A
/// fixed threshold of free memory would react too late. Therefore, the governor and the agent add
/// the expected growth in the time that they need to provide memory.
///
/// A program that walks a file system (`updatedb`) fills the kernel zones with dentries and inodes.
/// kswapd drops those on an LRU list as fast as other allocations need the memory, so they count as
/// free memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelGrowth {
    last: Option<Sample>,
    bytes_per_s: u64,
    caches_bytes: u64,
    /// Number of stalled kernel allocations at the last update, and the time of the last update
    /// that found a new stall.
    allocstalls: Option<u64>,
    stalled_at_ms: Option<u64>,
}

/// Kernel memory at one point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sample {
    at_ms: u64,
    bytes: u64,
}

impl KernelGrowth {
    /// Updates the rate with the kernel memory at `now_ms`, and with the number of stalled kernel
    /// allocations since boot. If `kernel` is missing, the rate is zero.
    pub fn update(&mut self, kernel: Option<&KernelUse>, allocstalls: u64, now_ms: u64) {
        let Some(kernel) = kernel else {
            *self = KernelGrowth::default();
            return;
        };
        if self.allocstalls.replace(allocstalls).is_some_and(|before| before != allocstalls) {
            self.stalled_at_ms = Some(now_ms);
        }
        self.stalled_at_ms =
            self.stalled_at_ms.filter(|at_ms| now_ms.saturating_sub(*at_ms) < STALLED_MS);
        self.caches_bytes = match self.stalled_at_ms {
            Some(_) => 0,
            None => kernel.caches_bytes(),
        };
        let sample = Sample { at_ms: now_ms, bytes: kernel.total_bytes() };
        let last = self.last.replace(sample).unwrap_or(sample);
        let elapsed_ms = now_ms.saturating_sub(last.at_ms);
        if elapsed_ms == 0 {
            return;
        }
        let rate = scale(sample.bytes.saturating_sub(last.bytes), 1_000, elapsed_ms);
        let decayed = scale(self.bytes_per_s, DECAY_MS.saturating_sub(elapsed_ms), DECAY_MS);
        self.bytes_per_s = rate.max(decayed);
    }

    /// Size of the dentries and inodes that Linux can reclaim. They count as free memory in kernel
    /// zones.
    ///
    /// Returns 0 for 10 s after a kernel allocation entered direct reclaim, because kswapd was too
    /// slow or could not reclaim enough.
    pub fn caches_bytes(&self) -> u64 {
        self.caches_bytes
    }

    /// Returns true if no recent stall affects the result. When a stall expires,
    /// [`caches_bytes`](Self::caches_bytes) changes.
    pub fn is_quiescent(&self) -> bool {
        self.stalled_at_ms.is_none()
    }

    /// Expected growth within `ms` at the current rate.
    pub fn bytes_within(&self, ms: u64) -> u64 {
        scale(self.bytes_per_s, ms, 1_000)
    }
}

/// Growth of all kernel memory: those pages in kernel zones that are neither free nor user pages.
///
/// Linux has no counter for some kinds of kernel memory, for example the data of sockets and pipes
/// (mm/vmstat.c).
///
/// Locked pages and compressed pages of programs are not kernel memory, so `mlock` and swapping to
/// zram or zswap are not counted as growth. The agent reads their number at most once per second,
/// so they may look like growth until then. Balloon pages do count, because the kernel cannot use
/// them for its own allocations.
///
/// Linux counts free pages on per-CPU lists as used (mm/page_alloc.c, free_unref_page), and
/// programs that free memory move pages to and from these lists. Therefore, the rate is an average
/// over at least a second.
#[derive(Clone, Debug, Default)]
pub struct ZoneGrowth {
    samples: VecDeque<Sample>,
}

/// Minimum time between the oldest sample and the newest one.
const WINDOW_MS: u64 = 1_000;

impl ZoneGrowth {
    /// Adds a sample of the kernel memory at `now_ms`. `other_user_pages` is the number of locked
    /// and compressed pages in kernel zones. [`Zone::user_pages`] does not include them.
    ///
    /// Discards all samples if a zone does not report its user pages.
    pub fn update(
        &mut self,
        zones: &[Zone],
        other_user_pages: u64,
        kernel: Option<&KernelUse>,
        now_ms: u64,
    ) {
        let used_pages =
            zones.iter().filter(|zone| zone.serves_kernel()).try_fold(0u64, |sum, zone| {
                let taken = zone.managed_pages.saturating_sub(zone.free_pages);
                Some(sum.saturating_add(taken.saturating_sub(zone.user_pages?)))
            });
        let (Some(used_pages), Some(kernel)) = (used_pages, kernel) else {
            self.samples.clear();
            return;
        };
        let kernel_pages = used_pages.saturating_sub(other_user_pages);
        let bytes = kernel_pages.saturating_mul(PAGE_BYTES).saturating_sub(kernel.caches_bytes());
        self.samples.push_back(Sample { at_ms: now_ms, bytes });
        while self
            .samples
            .get(1)
            .is_some_and(|second| now_ms.saturating_sub(second.at_ms) >= WINDOW_MS)
        {
            self.samples.pop_front();
        }
    }

    /// Expected growth within `ms` at the current rate.
    pub fn bytes_within(&self, ms: u64) -> u64 {
        let (Some(first), Some(last)) = (self.samples.front(), self.samples.back()) else {
            return 0;
        };
        let elapsed_ms = last.at_ms.saturating_sub(first.at_ms).max(WINDOW_MS);
        scale(last.bytes.saturating_sub(first.bytes), ms, elapsed_ms)
    }
}

impl KernelUse {
    /// Size of dentries and inodes on LRU lists, limited to `SReclaimable`.
    ///
    /// The rest of `SReclaimable` may be pinned. Linux puts only unused dentries on a list
    /// (fs/dcache.c, retain_dentry). For example, dentries of a tmpfs, of open files and of
    /// directories with cached entries are in use. An inode is not on a list if it has a dentry, is
    /// dirty or has page cache (fs/inode.c, iput_final and __inode_add_lru;
    /// include/linux/pagemap.h, mapping_shrinkable). Kernel allocations do not reclaim page cache
    /// in PM, so its inodes and xarray nodes are not freed.
    ///
    /// Linux keeps both numbers per CPU and adds them up when they are read. A dentry that is used
    /// again remains on its list until reclaim finds it, so some counted dentries may be in use.
    /// Linux puts an inode on its list when the inode's last dentry is dropped. Therefore, after a
    /// walk of a file system, only the dentries are counted.
    pub fn caches_bytes(&self) -> u64 {
        let of = |count: Option<u64>, bytes| count.unwrap_or(0).saturating_mul(bytes);
        of(self.unused_dentries, DENTRY_BYTES)
            .saturating_add(of(self.unused_inodes, LEAST_INODE_BYTES))
            .min(self.slab_reclaimable_bytes)
    }
}

impl Zone {
    /// Returns true if the kernel can use pages of this zone for itself.
    pub fn serves_kernel(&self) -> bool {
        matches!(self.kind, ZoneKind::Dma32 | ZoneKind::Normal)
    }
}

fn add(bytes: &mut u64, pages: u64) {
    *bytes = bytes.saturating_add(pages.saturating_mul(PAGE_BYTES));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_memory_excludes_movable_zones() {
        let zone = |node, kind, managed_pages, free_pages| Zone {
            node,
            kind,
            managed_pages,
            free_pages,
            high_pages: 10,
            ..Zone::default()
        };
        let zones = [
            zone(0, ZoneKind::Dma, 1, 1),
            zone(0, ZoneKind::Dma32, 100, 40),
            zone(0, ZoneKind::Normal, 200, 5),
            zone(0, ZoneKind::Movable, 300, 20),
            zone(1, ZoneKind::Movable, 1000, 700),
        ];
        let memory = KernelMemory::of(zones.iter());
        let expected = KernelMemory {
            managed_bytes: 300 * PAGE_BYTES,
            room_bytes: 30 * PAGE_BYTES,
            dram_bytes: 601 * PAGE_BYTES,
            movable_bytes: 1300 * PAGE_BYTES,
            movable_free_bytes: 720 * PAGE_BYTES,
        };
        assert_eq!(memory, expected);
        let huge =
            [zone(0, ZoneKind::Normal, u64::MAX, u64::MAX), zone(0, ZoneKind::Normal, u64::MAX, 0)];
        assert_eq!(KernelMemory::of(huge.iter()).managed_bytes, u64::MAX);
        assert_eq!(KernelMemory::of([].iter()), KernelMemory::default());
    }

    #[test]
    fn rate_of_growth_follows_samples_and_falls_to_zero() {
        let holds = |bytes| KernelUse { slab_reclaimable_bytes: bytes, ..KernelUse::default() };
        let mut growth = KernelGrowth::default();
        growth.update(Some(&holds(500)), 0, 1_000);
        assert_eq!(growth.bytes_within(1_000), 0, "growth needs two samples");
        growth.update(Some(&holds(600)), 0, 1_100);
        assert_eq!((growth.bytes_within(1_000), growth.bytes_within(500)), (1_000, 500));
        growth.update(Some(&holds(600)), 0, 1_350);
        assert_eq!(growth.bytes_within(1_000), 750);
        growth.update(Some(&holds(400)), 0, 2_350);
        assert_eq!(growth.bytes_within(1_000), 0);
        growth.update(Some(&holds(u64::MAX)), 0, 2_350);
        assert_eq!(growth.bytes_within(1_000), 0, "no time has passed");
        growth.update(Some(&holds(0)), 0, 2_360);
        growth.update(Some(&holds(u64::MAX)), 0, 2_361);
        assert_eq!(growth.bytes_within(u64::MAX), u64::MAX);
        growth.update(None, 0, 2_400);
        assert_eq!(growth, KernelGrowth::default());
    }

    /// Slabs with `reclaimable_mib`, and with these numbers of dentries and inodes on LRU lists.
    fn slabs(reclaimable_mib: u64, unused_dentries: u64, unused_inodes: u64) -> KernelUse {
        KernelUse {
            slab_reclaimable_bytes: reclaimable_mib << 20,
            slab_unreclaimable_bytes: 30 << 20,
            unused_dentries: Some(unused_dentries),
            unused_inodes: Some(unused_inodes),
            ..KernelUse::default()
        }
    }

    fn caches_bytes(kernel: &KernelUse) -> u64 {
        let mut growth = KernelGrowth::default();
        growth.update(Some(kernel), 0, 0);
        growth.caches_bytes()
    }

    #[test]
    fn only_entries_on_lru_lists_count_as_caches() {
        assert_eq!(caches_bytes(&slabs(400, 2_000_000, 0)), 2_000_000 * 192);
        assert_eq!(caches_bytes(&slabs(400, 1_000, 2_000)), 1_000 * 192 + 2_000 * 512);
        assert_eq!(caches_bytes(&slabs(77, 0, 0)), 0, "files of a tmpfs pin their dentries");
        assert_eq!(caches_bytes(&slabs(330, 0, 0)), 0, "page cache pins its inodes");
        assert_eq!(caches_bytes(&slabs(100, 2_000_000, u64::MAX)), 100 << 20, "no more than slabs");
        let older = KernelUse { slab_reclaimable_bytes: 400 << 20, ..KernelUse::default() };
        assert_eq!(caches_bytes(&older), 0, "not reported");
    }

    #[test]
    fn caches_count_until_a_kernel_allocation_stalls() {
        let kernel = slabs(400, 1_000, 0);
        let mut growth = KernelGrowth::default();
        let mut update = |kernel: Option<&KernelUse>, allocstalls, now_ms| {
            growth.update(kernel, allocstalls, now_ms);
            (growth.caches_bytes(), growth.is_quiescent())
        };
        // Stalls before the first update are ignored.
        assert_eq!(update(Some(&kernel), 7, 1_000), (192_000, true));
        assert_eq!(update(Some(&kernel), 8, 3_000), (0, false));
        assert_eq!(update(Some(&kernel), 8, 12_999), (0, false));
        assert_eq!(update(Some(&kernel), 8, 13_000), (192_000, true));
        assert_eq!(update(None, 8, 14_000), (0, true), "not reported");
    }

    /// Kernel zone of 512 MiB.
    fn zone_mib(free_mib: u64, user_mib: u64) -> [Zone; 1] {
        let pages = |mib: u64| (mib << 20) / PAGE_BYTES;
        let (free_pages, user_pages) = (pages(free_mib), Some(pages(user_mib)));
        [Zone {
            kind: ZoneKind::Normal,
            managed_pages: pages(512),
            free_pages,
            user_pages,
            ..Zone::default()
        }]
    }

    #[test]
    fn uncounted_memory_is_growth_of_the_zones() {
        let mut growth = ZoneGrowth::default();
        let none = KernelUse::default();
        let mib = |growth: &ZoneGrowth| growth.bytes_within(1_000) >> 20;
        for tenth in 0..=30 {
            growth.update(&zone_mib(400 - 6 * tenth, 50), 0, Some(&none), tenth * 100);
        }
        assert_eq!(mib(&growth), 60);
        // Programs allocate memory from the zone.
        for tenth in 31..=50 {
            let zone = zone_mib(220 - 6 * (tenth - 30), 50 + 6 * (tenth - 30));
            growth.update(&zone, 0, Some(&none), tenth * 100);
        }
        assert_eq!(mib(&growth), 0);
        // Pages are on per-CPU lists for a moment.
        growth.update(&zone_mib(70, 170), 0, Some(&none), 5_050);
        assert!(mib(&growth) <= 30, "{}", mib(&growth));
        // Caches that Linux can reclaim grow.
        let dentries = (30 << 20) / DENTRY_BYTES;
        let caches = KernelUse {
            slab_reclaimable_bytes: 40 << 20,
            unused_dentries: Some(dentries),
            ..KernelUse::default()
        };
        growth.update(&zone_mib(70, 170), 0, Some(&caches), 5_100);
        assert_eq!(mib(&growth), 0);
    }

    #[test]
    fn locked_and_compressed_pages_do_not_count_as_growth() {
        let pages = |mib: u64| (mib << 20) / PAGE_BYTES;
        let growth_mib = |other_user_mib: [u64; 2], zones: [[Zone; 1]; 2]| {
            let mut growth = ZoneGrowth::default();
            for (zones, (at_ms, mib)) in
                zones.iter().zip([0, 1_000].into_iter().zip(other_user_mib))
            {
                growth.update(zones, pages(mib), Some(&KernelUse::default()), at_ms);
            }
            growth.bytes_within(1_000) >> 20
        };
        let locked = [zone_mib(50, 400), zone_mib(50, 100)];
        assert_eq!(growth_mib([0, 300], locked), 0);
        assert_eq!(growth_mib([0, 0], locked), 300, "pages that no counter has");
        assert_eq!(
            growth_mib([0, 100], [zone_mib(150, 300), zone_mib(50, 300)]),
            0,
            "taken and locked"
        );
        let sockets = [zone_mib(350, 50), zone_mib(250, 50)];
        assert_eq!(growth_mib([20, 50], sockets), 70, "of 100 MiB, 30 MiB are locked");
    }

    #[test]
    fn growth_needs_two_samples_and_user_pages() {
        let mut growth = ZoneGrowth::default();
        growth.update(&zone_mib(10, 0), 0, Some(&KernelUse::default()), 0);
        assert_eq!(growth.bytes_within(1_000), 0);
        // Growth is not extrapolated before a full second has passed.
        growth.update(&zone_mib(5, 0), 0, Some(&KernelUse::default()), 10);
        assert_eq!(growth.bytes_within(1_000) >> 20, 5);
        let mut zones = zone_mib(0, 0);
        zones[0].user_pages = None;
        growth.update(&zones, 0, Some(&KernelUse::default()), 2_000);
        assert_eq!(growth.bytes_within(1_000), 0);
    }
}
