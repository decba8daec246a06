//! What processes do to memory, and what the kernel does when there is none: kswapd, direct reclaim, swap, OOM.

use balloon::MIB;

use super::{Guest, HIGH_WATERMARK_BYTES, IDLE_BYTES, LOW_WATERMARK_BYTES, MIN_WATERMARK_BYTES};

/// What reclaim does in a millisecond: clean page cache is dropped, anonymous memory written to swap.
const DROP_BYTES_PER_MS: u64 = MIB;
const SWAP_OUT_BYTES_PER_MS: u64 = MIB / 4;
/// What comes back from swap, and what a disk delivers, in a millisecond.
const SWAP_IN_BYTES_PER_MS: u64 = MIB / 10;
const DISK_BYTES_PER_MS: u64 = MIB / 4;
/// Of the anonymous memory that goes when files do: one part in so many, as long as there is page cache.
const ANON_SHARE: u64 = 8;
/// Allocations that were not served for so long end in the OOM killer.
const OOM_MS: u64 = 100;

/// Anonymous memory.
#[derive(Clone)]
pub struct Processes {
    /// What they want.
    pub wanted_bytes: u64,
    /// What of it is in memory, and in swap. The rest they wait for.
    pub resident_bytes: u64,
    pub swapped_bytes: u64,
    /// The size of the swap.
    pub swap_bytes: u64,
    /// What they touch of it in a millisecond, all of it alike.
    pub touch_bytes_per_ms: u64,
    waited_ms: u64,
}

/// Page cache.
#[derive(Clone, Default)]
pub struct Files {
    /// What is read once in a millisecond, and never again.
    pub read_once_bytes_per_ms: u64,
    /// What of that is still cached.
    pub once_bytes: u64,
    /// Files that are read again and again, all of them alike, and what is read in a millisecond.
    pub hot_bytes: u64,
    pub reread_bytes_per_ms: u64,
    /// What of them is cached, and what was once and is not.
    pub hot_cached_bytes: u64,
    evicted_bytes: u64,
}

/// What the want of memory has cost.
#[derive(Clone, Copy, Default)]
pub struct Toll {
    pub swapped_out_bytes: u64,
    pub swapped_in_bytes: u64,
    pub refault_bytes: u64,
    pub stall_us: u64,
    pub oom_kills: u64,
}

impl Processes {
    pub(super) fn idle() -> Self {
        Processes {
            wanted_bytes: IDLE_BYTES,
            resident_bytes: IDLE_BYTES,
            swapped_bytes: 0,
            swap_bytes: 1 << 30,
            touch_bytes_per_ms: 0,
            waited_ms: 0,
        }
    }
}

impl Files {
    pub fn cached_bytes(&self) -> u64 {
        self.once_bytes + self.hot_cached_bytes
    }

    /// Drops page cache, what is read once first, and says how much.
    pub(super) fn drop_cache(&mut self, bytes: u64) -> u64 {
        let once = self.once_bytes.min(bytes);
        let hot = self.hot_cached_bytes.min(bytes - once);
        self.once_bytes -= once;
        self.hot_cached_bytes -= hot;
        self.evicted_bytes += hot;
        once + hot
    }
}

impl Guest {
    pub fn free_bytes(&self) -> u64 {
        let used = self.processes.resident_bytes + self.files.cached_bytes() + self.descriptor_bytes();
        self.total_bytes().saturating_sub(used)
    }

    /// MemAvailable: free memory above the watermarks, and page cache but for a little.
    pub fn available_bytes(&self) -> u64 {
        let cached = self.files.cached_bytes();
        let kept = (cached / 2).min(LOW_WATERMARK_BYTES);
        (self.free_bytes() + cached - kept).saturating_sub(HIGH_WATERMARK_BYTES)
    }

    /// A millisecond of everybody's work.
    pub(super) fn run_processes(&mut self, fill: i64) {
        let before_us = self.toll.stall_us;
        self.want(fill);
        if self.free_bytes() < LOW_WATERMARK_BYTES {
            self.reclaim();
        }
        self.serve_processes();
        self.touch_swapped();
        self.read_files();
        // PSI counts time in which somebody waits, not how many do.
        self.toll.stall_us = self.toll.stall_us.min(before_us + 1_000);
    }

    fn want(&mut self, fill: i64) {
        let processes = &mut self.processes;
        processes.wanted_bytes = processes.wanted_bytes.saturating_add_signed(fill).max(IDLE_BYTES);
        let held = processes.resident_bytes + processes.swapped_bytes;
        let gone = held.saturating_sub(processes.wanted_bytes);
        let from_swap = gone.min(processes.swapped_bytes);
        processes.swapped_bytes -= from_swap;
        processes.resident_bytes -= gone - from_swap;
    }

    /// kswapd's share, and the same again by whoever waits for memory: up to the high watermark.
    fn reclaim(&mut self) {
        let lacking = HIGH_WATERMARK_BYTES.saturating_sub(self.free_bytes());
        let cached = self.files.cached_bytes();
        let from_anon = if cached > 0 { lacking / ANON_SHARE } else { lacking };
        let dropped = self.files.drop_cache((lacking - from_anon).min(DROP_BYTES_PER_MS));
        let processes = &mut self.processes;
        let room = processes.swap_bytes.saturating_sub(processes.swapped_bytes);
        let out = (lacking - dropped)
            .min(SWAP_OUT_BYTES_PER_MS)
            .min(room)
            .min(processes.resident_bytes - IDLE_BYTES.min(processes.resident_bytes));
        processes.resident_bytes -= out;
        processes.swapped_bytes += out;
        self.toll.swapped_out_bytes += out;
        if dropped + out == 0 {
            // Swap is full: the last page cache goes.
            self.files.drop_cache(lacking.min(DROP_BYTES_PER_MS));
        }
    }

    /// Gives processes what they want as far as there is something above the least watermark.
    fn serve_processes(&mut self) {
        let free = self.free_bytes().saturating_sub(MIN_WATERMARK_BYTES);
        let processes = &mut self.processes;
        let missing =
            processes.wanted_bytes.saturating_sub(processes.resident_bytes + processes.swapped_bytes);
        let served = missing.min(free);
        processes.resident_bytes += served;
        if served == missing {
            processes.waited_ms = 0;
            return;
        }
        self.toll.stall_us += 1_000;
        processes.waited_ms = if served > 0 { 0 } else { processes.waited_ms + 1 };
        let swap_is_full = processes.swapped_bytes >= processes.swap_bytes;
        if processes.waited_ms > OOM_MS && swap_is_full && self.files.cached_bytes() == 0 {
            self.toll.oom_kills += 1;
            let processes = &mut self.processes;
            processes.wanted_bytes = IDLE_BYTES;
            processes.resident_bytes = IDLE_BYTES.min(processes.resident_bytes);
            processes.swapped_bytes = 0;
            processes.waited_ms = 0;
        }
    }

    /// What is touched and is in swap comes back, and its process waits.
    fn touch_swapped(&mut self) {
        let free = self.free_bytes().saturating_sub(MIN_WATERMARK_BYTES);
        let processes = &mut self.processes;
        let held = (processes.resident_bytes + processes.swapped_bytes).max(1);
        let hit = (u128::from(processes.touch_bytes_per_ms) * u128::from(processes.swapped_bytes)
            / u128::from(held)) as u64;
        let back = hit.min(SWAP_IN_BYTES_PER_MS).min(processes.swapped_bytes);
        let served = back.min(free);
        processes.swapped_bytes -= served;
        processes.resident_bytes += served;
        self.toll.swapped_in_bytes += served;
        self.toll.stall_us += served * 1_000 / SWAP_IN_BYTES_PER_MS;
        self.toll.stall_us += if served < back { 1_000 } else { 0 };
    }

    /// Reading fills free memory with page cache, and takes the place of older page cache when there is none.
    fn read_files(&mut self) {
        let once = self.files.read_once_bytes_per_ms;
        let missing = self.files.hot_bytes - self.files.hot_cached_bytes.min(self.files.hot_bytes);
        let missed = (u128::from(self.files.reread_bytes_per_ms) * u128::from(missing)
            / u128::from(self.files.hot_bytes.max(1))) as u64;
        let missed = missed.min(DISK_BYTES_PER_MS).min(missing);
        let room = self.free_bytes().saturating_sub(LOW_WATERMARK_BYTES);
        if room < once + missed {
            self.files.drop_cache(once + missed - room);
        }
        let room = self.free_bytes().saturating_sub(LOW_WATERMARK_BYTES);
        let files = &mut self.files;
        files.hot_cached_bytes += missed.min(room);
        files.once_bytes += once.min(room - missed.min(room));
        let refault = missed.min(files.evicted_bytes);
        files.evicted_bytes -= refault;
        // The first read of a file is not memory's fault.
        self.toll.refault_bytes += refault;
        self.toll.stall_us += refault * 1_000 / DISK_BYTES_PER_MS;
    }
}
