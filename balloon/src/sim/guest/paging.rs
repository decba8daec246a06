//! How a guest's pages come and go: what is wanted, reclaimed, swapped, read and killed.

use super::{FILL_BYTES_PER_MS, Guest, PAGE_BYTES};
use crate::MIB;
use crate::sim::demand::Segment;
use crate::sim::swap::SwapDevice;

/// Clean page cache is dropped this fast.
const DROP_BYTES_PER_MS: u64 = 4 * MIB;

/// The OOM killer comes when nothing could be had for this long: 16 rounds of direct reclaim that
/// find nothing.
pub(super) const OOM_MS: u64 = 300;

/// A page of a file that is not in the page cache is read from a disk, and some behind it.
const FILE_READ_US: u64 = 180;
const READ_AHEAD_PAGES: u64 = 8;

impl Guest {
    /// Processes free memory, or end. What they have in swap goes as what they have in memory does.
    pub(super) fn release(&mut self, mut bytes: u64) {
        for part in [&mut self.waiting_bytes, &mut self.killed_bytes] {
            let gone = bytes.min(*part);
            *part -= gone;
            bytes -= gone;
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

    /// What waits gets what is free, and what it can reclaim. Returns the time that tasks waited.
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
            // Below the low watermark kswapd works; what it has not freed yet is taken from the
            // reserve down to min.
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
        // Tasks that get a part of what they want wait for the rest of the time.
        crate::units::scale(ms * 1000, wanted - got, wanted)
    }

    /// Linux' OOM killer ends the largest process. The model frees a quarter of the resident memory
    /// and of the kernel memory instead, and drops the requests of all tasks that wait.
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
        // It ends when it is done, and gives up when there is nothing that it could take.
        self.kswapd = self.room_bytes() < high && (reclaimed > 0 || self.can_reclaim());
    }

    fn can_reclaim(&self) -> bool {
        let swap = &self.config.swap;
        let swaps = swap.size_bytes.saturating_sub(self.swapped_bytes) >= PAGE_BYTES;
        self.cached_bytes() > 0 || (swaps && self.resident_bytes >= PAGE_BYTES)
    }

    /// Page cache goes first, then files that are read again, then anonymous pages.
    pub(super) fn reclaim(&mut self, bytes: u64, budget: &mut Budget) -> u64 {
        let mut freed = self.drop_clean(bytes, budget);
        if self.cached_bytes() > 0 {
            // The rest follows in the next step. No page is swapped while page cache is left.
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
            let gone = (bytes - freed).min(*cache).min(budget.drop_bytes);
            budget.drop_bytes -= gone;
            *cache -= gone;
            freed += gone;
        }
        freed
    }

    /// Anonymous memory that is in use and not there. Linux swaps out first what is not in use.
    pub(super) fn missing_hot_bytes(&self, segment: &Segment) -> u64 {
        if segment.touches_per_s == 0 || self.swapped_bytes == 0 {
            return 0;
        }
        let held = self.resident_bytes + self.swapped_bytes;
        let cold = held - crate::units::scale(held, segment.hot_permille, 1000);
        self.swapped_bytes.saturating_sub(cold)
    }

    /// Files in use that are not in the page cache.
    pub(super) fn missing_file_bytes(&self, segment: &Segment) -> u64 {
        if segment.touches_per_s == 0 {
            0
        } else {
            segment.file_bytes.saturating_sub(self.file_bytes)
        }
    }

    /// Touches pages in use for so long, and brings in those that are not there. Returns the time
    /// that it took longer.
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
        // A touch takes 1/rate if the page is there, and a fault more if it is not: of so many
        // tries, so many fault.
        let touch_ns = u128::from(1_000_000_000 / segment.touches_per_s.max(1));
        let [anon_us, file_us] = [self.config.swap.in_us, FILE_READ_US].map(u128::from);
        let fault_ns = (anon * anon_us + file * file_us) * 1000 / hot;
        let touches = u128::from(us) * 1000 / (touch_ns + fault_ns).max(1);
        // Rounded up: the last few pages are touched at some time, too.
        let faults =
            |missing: u128| u64::try_from((touches * missing).div_ceil(hot)).unwrap_or(u64::MAX);
        let [anon_faults, file_faults] = [anon, file].map(faults);
        self.swap_in(anon_faults.saturating_mul(PAGE_BYTES), segment, budget);
        self.read_in(file_faults.saturating_mul(PAGE_BYTES * READ_AHEAD_PAGES), segment);
        if self.room_bytes() < self.marks_bytes(|marks| marks.low) {
            self.kswapd = true;
        }
        // Pages that found no room were waited for as well.
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

    /// What does not fit takes the place of other pages of such files, which come back later.
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

    /// Files that are read once fill what is free down to the high watermark, and then take each
    /// other's place.
    pub(super) fn read_files(&mut self, ms: u64, segment: &Segment) {
        // Files that nobody reads again any more are cache as any other.
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

/// What can be reclaimed in a step.
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
