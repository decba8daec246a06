//! Paging in the simulated guest: allocation, reclaim, swap, page cache and OOM kills.

use super::{FILL_BYTES_PER_MS, Guest, PAGE_BYTES};
use crate::MIB;
use crate::sim::demand::Segment;
use crate::sim::swap::SwapDevice;

/// Speed at which the kernel drops clean page cache.
const DROP_BYTES_PER_MS: u64 = 4 * MIB;

/// Time without any free memory after which the OOM killer runs. The time stands for 16 rounds of
/// direct reclaim without a result.
pub(super) const OOM_MS: u64 = 300;

/// Time to read a file page from disk if it is not in the page cache. The time takes read-ahead
/// into account.
const FILE_READ_US: u64 = 180;
const READ_AHEAD_PAGES: u64 = 8;

impl Guest {
    /// Releases memory that processes free, or that they hold when they end. A proportional share
    /// of their swapped memory is released too.
    pub(super) fn release(&mut self, mut bytes: u64) {
        for part in [&mut self.waiting_bytes, &mut self.killed_bytes] {
            let part_bytes = bytes.min(*part);
            *part -= part_bytes;
            bytes -= part_bytes;
        }
        let held = self.resident_bytes + self.swapped_bytes;
        if held == 0 {
            return;
        }
        let from_swap = u128::from(bytes) * u128::from(self.swapped_bytes) / u128::from(held);
        let from_swap = (from_swap as u64).max(bytes.saturating_sub(self.resident_bytes));
        self.swapped_bytes -= from_swap;
        self.resident_bytes -= bytes - from_swap;
        self.stuck_ms = 0;
    }

    /// Serves waiting allocations from free memory and by reclaim. Returns the time for which tasks
    /// waited.
    pub(super) fn allocate(&mut self, ms: u64, budget: &mut Budget) -> u64 {
        if self.waiting_bytes == 0 {
            self.stuck_ms = 0;
            return 0;
        }
        let wanted = self.waiting_bytes.min(FILL_BYTES_PER_MS.saturating_mul(ms));
        let min = self.marks_bytes(|marks| marks.min);
        let low = self.marks_bytes(|marks| marks.low);
        let mut got = wanted.min(self.room_bytes().saturating_sub(low));
        self.resident_bytes += got;
        if got < wanted {
            // kswapd runs below the low watermark. Until it has freed memory, tasks use the reserve
            // down to the min watermark.
            self.kswapd = true;
            let clean = self.drop_clean(wanted - got, budget);
            self.totals.kswapd_bytes += clean;
            let more = (wanted - got).min(self.room_bytes().saturating_sub(min));
            self.resident_bytes += more;
            got += more;
        }
        if got < wanted {
            self.totals.allocstalls += 1;
            let reclaimed = self.reclaim(wanted - got, budget);
            self.totals.direct_bytes += reclaimed;
            let more = (wanted - got).min(self.room_bytes().saturating_sub(min));
            self.resident_bytes += more;
            got += more;
        }
        self.waiting_bytes -= got;
        if got > 0 {
            self.stuck_ms = 0;
        } else {
            self.stuck_ms += ms;
            if self.stuck_ms >= OOM_MS {
                self.kill();
            }
        }
        // Tasks that receive only part of the memory wait for the rest of the step.
        crate::units::scale(ms * 1000, wanted - got, wanted)
    }

    /// Models the OOM killer. Linux ends the largest process. The model instead frees a quarter of
    /// the resident memory and a quarter of the kernel memory, and drops the requests of all
    /// waiting tasks.
    pub(super) fn kill(&mut self) {
        let taken = self.resident_bytes / 4;
        self.resident_bytes -= taken;
        let killed = taken + std::mem::take(&mut self.waiting_bytes);
        self.killed_bytes += killed;
        self.totals.oom_kills += 1;
        self.totals.oom_killed_bytes += killed + self.kernel.kill();
        self.stuck_ms = 0;
    }

    pub(super) fn run_kswapd(&mut self, budget: &mut Budget) {
        let room = self.room_bytes();
        if room < self.marks_bytes(|marks| marks.low) {
            self.kswapd = true;
        }
        if !self.kswapd {
            return;
        }
        let high = self.marks_bytes(|marks| marks.high);
        let reclaimed = self.reclaim(high.saturating_sub(room), budget);
        self.totals.kswapd_bytes += reclaimed;
        // kswapd stops when it has freed enough, or when nothing can be reclaimed.
        self.kswapd = self.room_bytes() < high && (reclaimed > 0 || self.can_reclaim());
    }

    fn can_reclaim(&self) -> bool {
        let swap = &self.config.swap;
        let swaps = swap.size_bytes.saturating_sub(self.swapped_bytes) >= PAGE_BYTES;
        self.cached_bytes() > 0 || (swaps && self.resident_bytes >= PAGE_BYTES)
    }

    /// Reclaims page cache that is read once, then files that are read repeatedly, then anonymous
    /// pages.
    pub(super) fn reclaim(&mut self, bytes: u64, budget: &mut Budget) -> u64 {
        let mut freed = self.drop_clean(bytes, budget);
        if self.cached_bytes() > 0 {
            // The rest is reclaimed in the next step. No page is swapped while any page cache is
            // left.
            return freed;
        }
        let swap_free = self.config.swap.size_bytes.saturating_sub(self.swapped_bytes);
        let out = (bytes - freed).min(budget.swap_bytes).min(swap_free).min(self.resident_bytes);
        let out = out - out % PAGE_BYTES;
        budget.swap_bytes -= out;
        self.resident_bytes -= out;
        self.swapped_bytes += out;
        self.totals.swapped_out_bytes += out;
        freed += out;
        freed
    }

    pub(super) fn drop_clean(&mut self, bytes: u64, budget: &mut Budget) -> u64 {
        let mut freed = 0;
        for cache in [&mut self.stream_bytes, &mut self.file_bytes] {
            let part_bytes = (bytes - freed).min(*cache).min(budget.drop_bytes);
            budget.drop_bytes -= part_bytes;
            *cache -= part_bytes;
            freed += part_bytes;
        }
        freed
    }

    /// Returns the anonymous memory that is in use but swapped out. Linux swaps out unused memory
    /// first.
    pub(super) fn missing_hot_bytes(&self, segment: &Segment) -> u64 {
        if segment.touches_per_s == 0 || self.swapped_bytes == 0 {
            return 0;
        }
        let held = self.resident_bytes + self.swapped_bytes;
        let cold = held - crate::units::scale(held, segment.hot_permille, 1000);
        self.swapped_bytes.saturating_sub(cold)
    }

    /// Returns the size of the files in use that are not in the page cache.
    pub(super) fn missing_file_bytes(&self, segment: &Segment) -> u64 {
        if segment.touches_per_s == 0 {
            0
        } else {
            segment.file_bytes.saturating_sub(self.file_bytes)
        }
    }

    /// Touches pages in use for `us`, and reads the missing ones in. Returns the additional time.
    pub(super) fn touch(&mut self, us: u64, segment: &Segment, budget: &mut Budget) -> u64 {
        let (anon, file) = (self.missing_hot_bytes(segment), self.missing_file_bytes(segment));
        if anon + file == 0 || us == 0 {
            return 0;
        }
        let held = self.resident_bytes + self.swapped_bytes;
        let hot =
            u128::from(crate::units::scale(held, segment.hot_permille, 1000) + segment.file_bytes)
                .max(1);
        let [anon, file] = [anon, file].map(u128::from);
        // A touch takes 1/rate if the page is present. If the page is missing, the time of a fault
        // is added. The share of touches that fault equals the share of pages that are missing.
        let touch_ns = u128::from(1_000_000_000 / segment.touches_per_s.max(1));
        let [anon_us, file_us] = [self.config.swap.in_us, FILE_READ_US].map(u128::from);
        let fault_ns = (anon * anon_us + file * file_us) * 1000 / hot;
        let touches = u128::from(us) * 1000 / (touch_ns + fault_ns).max(1);
        // The number is rounded up, because the last few missing pages would otherwise never be
        // read.
        let faults =
            |missing: u128| u64::try_from((touches * missing).div_ceil(hot)).unwrap_or(u64::MAX);
        let [anon_faults, file_faults] = [anon, file].map(faults);
        self.swap_in(anon_faults.saturating_mul(PAGE_BYTES), segment, budget);
        self.read_in(file_faults.saturating_mul(PAGE_BYTES * READ_AHEAD_PAGES), segment);
        if self.room_bytes() < self.marks_bytes(|marks| marks.low) {
            self.kswapd = true;
        }
        // Tasks also waited for pages for which there was no room.
        anon_faults
            .saturating_mul(self.config.swap.in_us)
            .saturating_add(file_faults.saturating_mul(FILE_READ_US))
            .min(us)
    }

    fn swap_in(&mut self, bytes: u64, segment: &Segment, budget: &mut Budget) {
        let bytes = bytes.min(self.missing_hot_bytes(segment));
        let min = self.marks_bytes(|marks| marks.min);
        let room = self.room_bytes().saturating_sub(min);
        if bytes > room {
            let reclaimed = self.reclaim(bytes - room, budget);
            self.totals.direct_bytes += reclaimed;
        }
        let bytes = bytes.min(self.room_bytes().saturating_sub(min)).min(self.swapped_bytes);
        self.swapped_bytes -= bytes;
        self.resident_bytes += bytes;
        self.totals.swapped_in_bytes += bytes;
    }

    /// Reads files into the page cache. In a full cache, each page replaces another page of these
    /// files, which has to be read again later.
    fn read_in(&mut self, bytes: u64, segment: &Segment) {
        let bytes = bytes.min(self.missing_file_bytes(segment));
        let high = self.marks_bytes(|marks| marks.high);
        let needed = bytes.saturating_sub(self.room_bytes().saturating_sub(high));
        let streamed = needed.min(self.stream_bytes);
        self.stream_bytes -= streamed;
        let added = bytes.min(self.room_bytes().saturating_sub(high));
        self.file_bytes += added;
        self.totals.refaulted_bytes += bytes - added;
        self.totals.replaced_bytes += streamed + bytes - added;
    }

    /// Reads the files that the segment reads only once. Their pages fill free memory down to the
    /// high watermark. After that, each page replaces an older one.
    pub(super) fn read_files(&mut self, ms: u64, segment: &Segment) {
        // Files that are no longer read repeatedly become other page cache.
        let left = self.file_bytes.saturating_sub(segment.file_bytes);
        self.file_bytes -= left;
        self.stream_bytes += left;
        let streamed = segment.stream_bytes_per_s.saturating_mul(ms) / 1000;
        let high = self.marks_bytes(|marks| marks.high);
        let bytes = streamed.min(self.room_bytes().saturating_sub(high));
        self.stream_bytes += bytes;
        self.totals.kswapd_bytes += streamed - bytes;
    }
}

/// Amounts that can be reclaimed in one step.
#[derive(Debug)]
pub(super) struct Budget {
    drop_bytes: u64,
    swap_bytes: u64,
}

impl Budget {
    pub(super) fn new(ms: u64, swap: &SwapDevice) -> Self {
        let pages = (ms.saturating_mul(1000)).checked_div(swap.out_us).unwrap_or(0);
        Budget { drop_bytes: DROP_BYTES_PER_MS.saturating_mul(ms), swap_bytes: pages * PAGE_BYTES }
    }
}
