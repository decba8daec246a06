//! Model of the memory management of a Linux guest. docs/reference/simulator.md lists the rules and
//! limits of the model.
//!
//! The model advances within a segment of demand. While memory does not change or changes at
//! constant rates, a step may have any length. While memory is reclaimed, plugged or waited for, a
//! step takes several milliseconds.

mod kernel;
mod paging;
mod placement;
#[cfg(test)]
mod tests;

use foreshore_proto::Measure;

use self::kernel::{Conversion, KernelLoad};
use self::paging::Budget;
use self::placement::Placement;
pub(super) use self::placement::{BootZones, boot_memory};
use super::demand::Segment;
use super::swap::SwapDevice;
pub(super) use crate::units::PAGE_BYTES;
use crate::units::{SECTION_BYTES, SECTION_DESCRIPTOR_BYTES, scale};
use crate::{BLOCK_BYTES, HostView, MIB, StorageSpace, Tier, TimeMs, ZoneSizes};

/// Length of a step while memory is being plugged or waited for.
const BUSY_STEP_MS: u64 = 10;
/// Length of a step while pages are reclaimed or read, and no memory is being plugged or waited
/// for.
const PAGING_STEP_MS: u64 = 50;

/// Speed at which processes fill memory. The speed includes the time in which the kernel zeroes
/// the memory.
const FILL_BYTES_PER_MS: u64 = 2 * MIB;

/// Amount of memory that Linux removes from free memory at a time before unplugging it.
const OFFLINING_BYTES: u64 = SECTION_BYTES;

/// Configuration of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestConfig {
    /// Boot memory.
    pub boot_bytes: u64,
    /// Swap device.
    pub swap: SwapDevice,
    /// Time from a request until its first block is plugged.
    pub plug_delay_ms: u64,
    /// Time to plug 2 MiB.
    pub plug_block_us: u64,
    /// Time to unplug 2 MiB.
    pub unplug_block_us: u64,
    /// Share of a zone's largest plugged size that cannot be unplugged because its pages cannot be
    /// moved, in thousandths.
    pub refused_permille: u64,
    /// True if Linux demotes pages to PM. Kernels before 6.7 and kernels without an HMAT do not.
    pub demotes: bool,
    /// Share of touches that are writes, in thousandths.
    pub write_permille: u64,
    /// Additional time of an access to PM compared with DRAM.
    pub pm_slower_ns: u64,
    /// Bytes that volumes write to PM per day. Writes to lent memory are not included.
    pub storage_bytes_per_day: u64,
    /// Number of writes that memory cells endure, as a multiple of the number that PM endures.
    pub endurance: u64,
}

impl Default for GuestConfig {
    /// Returns a guest of 384 MiB with the values in docs/reference/simulator.md.
    fn default() -> Self {
        use crate::model::energy::{DRAM, PRAM};
        let write_permille = 500;
        GuestConfig {
            boot_bytes: 384 * MIB,
            swap: SwapDevice::from_name("disk", 1 << 40).expect("listed"),
            plug_delay_ms: 50,
            plug_block_us: 1_000,
            unplug_block_us: 1_500,
            refused_permille: 0,
            demotes: true,
            write_permille,
            pm_slower_ns: PRAM.slower_ns(&DRAM, write_permille),
            storage_bytes_per_day: 12 << 30,
            endurance: 10,
        }
    }
}

/// Watermarks of a Linux zone, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Marks {
    pub min: u64,
    pub low: u64,
    pub high: u64,
}

impl Marks {
    /// Computes watermarks as mm/page_alloc.c, __setup_per_zone_wmarks(): they are a quarter of
    /// `min` apart, or a thousandth of the zone if that is more.
    fn new(min: u64, managed_pages: u64) -> Self {
        let step = (min / 4).max(managed_pages / 1000);
        Marks { min, low: min + step, high: min + 2 * step }
    }

    /// Returns the watermarks of a zone of `bytes`, where `self` is the sum for zones of
    /// `all_bytes`.
    fn part(&self, bytes: u64, all_bytes: u64) -> Self {
        let part = |pages| scale(pages, bytes, all_bytes);
        Marks { min: part(self.min), low: part(self.low), high: part(self.high) }
    }

    /// Returns the watermarks of ZONE_DMA32 or ZONE_NORMAL. min_free_kbytes is 4 times the square
    /// root of the zone's size in KiB.
    fn lowmem(bytes: u64) -> Self {
        let min_kbytes = (bytes / 1024 * 16).isqrt().clamp(128, 262_144);
        Self::new(min_kbytes / 4, bytes / PAGE_BYTES)
    }

    /// Returns the watermarks of ZONE_MOVABLE, which has no share of min_free_kbytes.
    fn movable(bytes: u64) -> Self {
        if bytes == 0 {
            return Marks::default();
        }
        let managed_pages = bytes / PAGE_BYTES;
        Self::new((managed_pages / 1024).clamp(32, 128), managed_pages)
    }
}

/// State of a zone in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plug {
    /// Time at which the present request was made.
    requested_at: TimeMs,
    /// Time that has been spent on the present block, in microseconds.
    done_us: u64,
    /// Largest plugged size so far.
    peak_bytes: u64,
    /// Total size of the memory blocks that were converted to kernel memory: the first blocks of
    /// the zone. The last of these blocks may be partly plugged.
    kernel_blocks_bytes: u64,
    marks: Marks,
}

impl Plug {
    /// Returns the part of `plugged_bytes` that was converted to kernel memory.
    fn kernel_bytes(&self, plugged_bytes: u64) -> u64 {
        self.kernel_blocks_bytes.min(plugged_bytes)
    }

    /// Removes blocks that are no longer plugged. Linux removes them too, so they will be movable
    /// when they are plugged again. The unplugged part of a partly plugged block remains kernel
    /// memory.
    fn trim_kernel_blocks(&mut self, plugged_bytes: u64) {
        let blocks_bytes = plugged_bytes.next_multiple_of(SECTION_BYTES);
        self.kernel_blocks_bytes = self.kernel_blocks_bytes.min(blocks_bytes);
    }
}

/// Totals since the guest started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Time for which tasks waited for memory.
    pub stall_us: u64,
    /// Memory swapped in.
    pub swapped_in_bytes: u64,
    /// Memory swapped out.
    pub swapped_out_bytes: u64,
    /// File pages that were evicted and then read again.
    pub refaulted_bytes: u64,
    /// Page cache that was evicted to make room for other pages, without waiting for kswapd.
    pub replaced_bytes: u64,
    /// Memory freed by kswapd.
    pub kswapd_bytes: u64,
    /// Memory that tasks freed by direct reclaim.
    pub direct_bytes: u64,
    /// Number of allocations that had to reclaim memory.
    pub allocstalls: u64,
    /// Number of `allocstalls` that were for kernel memory.
    pub kernel_allocstalls: u64,
    /// User pages that were placed in PM because DRAM had no room.
    pub foreign_bytes: u64,
    /// User pages that were moved from DRAM to PM in order to free memory for the kernel.
    pub demoted_bytes: u64,
    /// OOM kills.
    pub oom_kills: u64,
    /// Memory of processes that the OOM killer has ended.
    pub oom_killed_bytes: u64,
    /// Plugged memory multiplied by time, for each tier (DRAM, PM), in bytes times milliseconds.
    pub plugged_byte_ms: [u128; 2],
    /// Plugged memory that was not needed, multiplied by time.
    pub over_byte_ms: u128,
    /// Missing memory, multiplied by time.
    pub short_byte_ms: u128,
    /// Total amount of memory that was plugged, for each tier.
    pub plugged_in_bytes: [u64; 2],
    /// Page touches for each tier, as touches per second times milliseconds times thousandths.
    pub touches_ms: [u128; 2],
}

/// Pool from which PM is allocated.
pub trait Pool {
    /// Returns the free memory in the pool.
    fn free_bytes(&self) -> u64;
    /// Allocates at most `bytes`. Returns the allocated size.
    fn take(&mut self, bytes: u64) -> u64;
    /// Returns `bytes` to the pool.
    fn give(&mut self, bytes: u64);
    /// Simulates the storage of the pool until `now`.
    fn advance(&mut self, _now: TimeMs) {}
    /// Returns the space of the pool's volumes. `None` if memory borrows none.
    fn storage(&self) -> Option<StorageSpace> {
        None
    }
    /// Returns the time until which only VMs change the pool. `None` means forever.
    fn steady_until(&self) -> Option<TimeMs> {
        None
    }
}

/// Simulated guest.
#[derive(Clone, Debug)]
pub struct Guest {
    config: GuestConfig,
    now: TimeMs,
    zones: Vec<ZoneSizes>,
    plugs: Vec<Plug>,
    boot: BootZones,
    last_placement: Placement,
    resident_bytes: u64,
    swapped_bytes: u64,
    waiting_bytes: u64,
    killed_bytes: u64,
    /// Page cache of the files that are read repeatedly. `stream_bytes` is the page cache of other
    /// files.
    file_bytes: u64,
    stream_bytes: u64,
    kswapd: bool,
    /// Time for which waiting allocations have received no memory.
    stuck_ms: u64,
    kernel: KernelLoad,
    conversion: Option<Conversion>,
    totals: Totals,
}

impl Guest {
    /// Creates a guest that has booted, with the zones that the host has. It already holds the
    /// memory that the first segment demands, as far as there is room.
    pub fn new(config: GuestConfig, zones: &[ZoneSizes], segment: &Segment) -> Self {
        let plug = |zone: &ZoneSizes| Plug {
            requested_at: TimeMs(0),
            done_us: 0,
            peak_bytes: zone.plugged_bytes,
            kernel_blocks_bytes: 0,
            marks: Marks::movable(zone.plugged_bytes),
        };
        let mut guest = Guest {
            now: TimeMs(0),
            plugs: zones.iter().map(plug).collect(),
            zones: zones.to_vec(),
            boot: BootZones::new(config.boot_bytes, zones),
            last_placement: Placement::default(),
            config,
            resident_bytes: 0,
            swapped_bytes: 0,
            waiting_bytes: 0,
            killed_bytes: 0,
            file_bytes: 0,
            stream_bytes: 0,
            kswapd: false,
            stuck_ms: 0,
            kernel: KernelLoad::default(),
            conversion: None,
            totals: Totals::default(),
        };
        guest.adapt_reserve();
        guest.boot_kernel(segment);
        let room = |guest: &Guest| {
            guest.room_bytes().saturating_sub(guest.marks_bytes(|marks| marks.high)) / PAGE_BYTES
                * PAGE_BYTES
        };
        guest.resident_bytes = segment.anon_bytes.min(room(&guest));
        guest.waiting_bytes = segment.anon_bytes - guest.resident_bytes;
        guest.file_bytes =
            if segment.touches_per_s > 0 { segment.file_bytes.min(room(&guest)) } else { 0 };
        guest.place_pages();
        guest
    }

    /// Returns the configuration.
    pub fn config(&self) -> &GuestConfig {
        &self.config
    }

    /// Returns the time up to which the guest was simulated.
    pub fn now(&self) -> TimeMs {
        self.now
    }

    /// Returns the sizes of the zones.
    pub fn zones(&self) -> &[ZoneSizes] {
        &self.zones
    }

    /// Returns the totals since the start.
    pub fn totals(&self) -> &Totals {
        &self.totals
    }

    /// Returns the demanded memory that is resident.
    pub fn resident_bytes(&self) -> u64 {
        self.resident_bytes
    }

    /// Returns the demanded memory that is on the swap device.
    pub fn swapped_bytes(&self) -> u64 {
        self.swapped_bytes
    }

    /// Returns the demanded memory that tasks wait for.
    pub fn waiting_bytes(&self) -> u64 {
        self.waiting_bytes
    }

    /// Returns the demanded memory of processes that the OOM killer has ended.
    pub fn killed_bytes(&self) -> u64 {
        self.killed_bytes
    }

    /// Returns the size of the page cache.
    pub fn cached_bytes(&self) -> u64 {
        self.file_bytes + self.stream_bytes
    }

    pub(super) fn boot(&self) -> &BootZones {
        &self.boot
    }

    pub(super) fn zone_marks(&self, index: usize) -> Marks {
        self.plugs[index].marks
    }

    /// MemTotal.
    pub fn total_bytes(&self) -> u64 {
        self.boot.bytes() + self.plugged_bytes() - self.kernel_block_bytes()
    }

    /// Returns the plugged memory in all zones.
    pub fn plugged_bytes(&self) -> u64 {
        self.zones.iter().map(|zone| zone.plugged_bytes).sum()
    }

    pub(super) fn plugged_of(&self, tier: Tier) -> u64 {
        self.zones.iter().filter(|zone| zone.tier == tier).map(|zone| zone.plugged_bytes).sum()
    }

    /// Returns the size of the page descriptors of plugged memory.
    pub fn descriptor_bytes(&self) -> u64 {
        self.zones
            .iter()
            .map(|zone| zone.plugged_bytes.div_ceil(SECTION_BYTES) * SECTION_DESCRIPTOR_BYTES)
            .sum()
    }

    fn is_plugging(&self) -> bool {
        self.zones.iter().any(|zone| zone.requested_bytes > zone.plugged_bytes)
    }

    fn user_bytes(&self) -> u64 {
        self.resident_bytes + self.file_bytes + self.stream_bytes
    }

    /// Room for user pages, including the watermarks.
    fn room_bytes(&self) -> u64 {
        self.capacity_bytes().saturating_sub(self.user_bytes())
    }

    fn marks_bytes(&self, mark: impl Fn(&Marks) -> u64) -> u64 {
        let zones: u64 = self.plugs.iter().map(|plug| mark(&plug.marks)).sum();
        (self.boot.kernel_mark(&mark) + mark(&self.boot.movable_marks) + zones) * PAGE_BYTES
    }

    /// Memory that is no longer free because it is about to be unplugged.
    fn offlining_bytes(&self) -> u64 {
        let outstanding = |(zone, plug): (&ZoneSizes, &Plug)| {
            if zone.plugged_bytes <= zone.requested_bytes
                || self.now.since(plug.requested_at) < self.config.plug_delay_ms
            {
                return 0;
            }
            zone.plugged_bytes
                .saturating_sub(zone.requested_bytes.max(self.stuck_bytes(zone, plug)))
        };
        self.zones.iter().zip(&self.plugs).map(outstanding).sum::<u64>().min(OFFLINING_BYTES)
    }

    /// MemFree.
    pub fn free_bytes(&self) -> u64 {
        let used = self.user_bytes() + self.kernel_used_bytes() + self.offlining_bytes();
        self.total_bytes().saturating_sub(used)
    }

    /// MemAvailable: mm/show_mem.c, si_mem_available().
    pub fn available_bytes(&self) -> u64 {
        let low = self.marks_bytes(|marks| marks.low);
        let cached = self.cached_bytes();
        let kernel_marks_bytes = self.boot.kernel_mark(|marks| marks.high) * PAGE_BYTES;
        let kept = self.marks_bytes(|marks| marks.high) - kernel_marks_bytes
            + self.boot.unavailable_bytes();
        (self.free_bytes() + cached - (cached / 2).min(low)).saturating_sub(kept)
    }

    /// Plugged memory in `zone` that cannot be unplugged.
    fn stuck_bytes(&self, zone: &ZoneSizes, plug: &Plug) -> u64 {
        let stuck = plug.peak_bytes / 1000 * self.config.refused_permille;
        // In kernel blocks, kernel memory cannot be moved, but user pages can.
        let pinned = self.boot.pinned_block_bytes(self.kernel_used_bytes());
        let pinned = pinned.min(plug.kernel_bytes(zone.plugged_bytes));
        [stuck, pinned].map(|bytes| bytes.next_multiple_of(zone.block_bytes)).iter().sum()
    }

    /// Requests a size for each zone.
    pub fn request(&mut self, sizes: impl IntoIterator<Item = u64>) {
        for ((zone, plug), requested_bytes) in self.zones.iter_mut().zip(&mut self.plugs).zip(sizes)
        {
            if zone.requested_bytes != requested_bytes {
                // A driver that is working on a request adopts the new size. A driver that is idle
                // or has to change direction starts from the beginning.
                let way = |requested: u64| requested.cmp(&zone.plugged_bytes);
                if way(zone.requested_bytes) != way(requested_bytes) {
                    plug.requested_at = self.now;
                    plug.done_us = 0;
                }
                zone.requested_bytes = requested_bytes;
            }
        }
    }

    /// Writes the sizes of the zones and the pool to `host`.
    pub fn write_sizes(&self, host: &mut HostView, pool_free_bytes: u64) {
        host.zones.clear();
        host.zones.extend_from_slice(&self.zones);
        host.pool_free_bytes = pool_free_bytes;
    }

    /// Returns true if memory does not change until the demand or a request changes.
    pub fn is_at_rest(&self, segment: &Segment) -> bool {
        segment.is_flat() && self.is_steady(segment)
    }

    /// Returns true if a step of any length would only change totals.
    fn is_constant(&self, segment: &Segment) -> bool {
        self.is_at_rest(segment)
            && self.file_bytes <= segment.file_bytes
            && self.room_bytes() >= self.marks_bytes(|marks| marks.low)
    }

    /// Returns true if memory changes only at the rates of the segment: no memory is reclaimed, no
    /// request is outstanding, and no task waits.
    fn is_steady(&self, segment: &Segment) -> bool {
        !self.kswapd
            && !self.kernel.kswapd
            && self.waiting_bytes + self.kernel.waiting_bytes == 0
            && segment.anon_bytes_at(self.now) == self.wanted_bytes()
            && segment.kernel_bytes_at(self.now) == self.kernel.wanted_bytes()
            && self.missing_hot_bytes(segment) == 0
            && self.missing_file_bytes(segment) == 0
            && !self.is_moving()
    }

    /// Returns the time for which [`Self::is_steady`] will remain true.
    fn steady_ms(&self, segment: &Segment) -> u64 {
        if !self.is_steady(segment) {
            return 0;
        }
        let rates = [segment.anon_bytes_per_s, segment.kernel_bytes_per_s];
        let [anon, kernel] = rates.map(|rate| u64::try_from(rate).unwrap_or(0));
        if anon.max(kernel) > FILL_BYTES_PER_MS * 1000 {
            return 0;
        }
        let duration_ms =
            |room: u64, rate: u64| room.saturating_mul(1000).checked_div(rate).unwrap_or(u64::MAX);
        let low = self.marks_bytes(|marks| marks.low);
        let room = (self.room_bytes() + self.stream_bytes).saturating_sub(low);
        let kernel_low = self.boot.kernel_mark(|marks| marks.low) * PAGE_BYTES;
        let kernel_room = self.kernel_free_bytes().saturating_sub(kernel_low);
        duration_ms(room, anon + kernel).min(duration_ms(kernel_room, kernel))
    }

    /// Returns MemFree or MemAvailable.
    pub(super) fn measured_bytes(&self, measure: Measure) -> u64 {
        match measure {
            Measure::Free => self.free_bytes(),
            Measure::Available => self.available_bytes(),
        }
    }

    /// Returns the time at which free or available memory will have fallen to `bytes`, if only the
    /// segment changes it. `None` if it never falls so far, or if anything else changes it at
    /// present.
    pub(super) fn time_of_fall_to(
        &self,
        measure: Measure,
        bytes: u64,
        segment: &Segment,
    ) -> Option<TimeMs> {
        let growth = segment.anon_bytes_per_s.saturating_add(segment.kernel_bytes_per_s);
        let growth = u64::try_from(growth).unwrap_or(0);
        let measured_bytes = self.measured_bytes(measure);
        let fall = measured_bytes.checked_sub(bytes).filter(|fall| *fall > 0)?;
        // Reading files uses free memory down to the high watermark, but does not use available
        // memory.
        let for_files = self.room_bytes().saturating_sub(self.marks_bytes(|marks| marks.high));
        let streamed = match measure {
            Measure::Free if growth > 0 || fall <= for_files => segment.stream_bytes_per_s,
            _ => 0,
        };
        let rate = growth.saturating_add(if for_files > 0 { streamed } else { 0 });
        if rate == 0 || !self.is_steady(segment) {
            return None;
        }
        Some(self.now + fall.saturating_mul(1000).div_ceil(rate))
    }

    /// Returns the time at which the next step of the simulation ends.
    pub fn next_change(&self, segment: &Segment) -> TimeMs {
        self.now + self.step_ms(segment)
    }

    fn step_ms(&self, segment: &Segment) -> u64 {
        match self.steady_ms(segment) {
            0 if self.waiting_bytes + self.kernel.waiting_bytes == 0 && !self.is_moving() => {
                PAGING_STEP_MS
            }
            steady_ms => steady_ms.max(BUSY_STEP_MS),
        }
    }

    fn is_moving(&self) -> bool {
        self.conversion.is_some()
            || self.zones.iter().any(|zone| zone.requested_bytes != zone.plugged_bytes)
    }

    /// Simulates the guest until `to`, which must be within the segment.
    pub fn advance(&mut self, to: TimeMs, segment: &Segment, pool: &mut impl Pool) {
        if self.now < to && self.is_constant(segment) {
            let ms = to.since(self.now);
            self.now = to;
            self.stuck_ms = 0;
            self.kernel.stuck_ms = 0;
            self.count(ms, segment);
            pool.advance(to);
        }
        while self.now < to {
            let ms = to.since(self.now).min(self.step_ms(segment));
            self.step(ms, segment, pool);
        }
    }

    fn step(&mut self, ms: u64, segment: &Segment, pool: &mut impl Pool) {
        let wanted_before = self.wanted_bytes();
        self.now = self.now + ms;
        pool.advance(self.now);
        self.plug(ms, pool);
        self.convert();
        let wanted = segment.anon_bytes_at(self.now);
        if wanted >= wanted_before {
            self.waiting_bytes += wanted - wanted_before;
        } else {
            self.release(wanted_before - wanted);
        }
        self.grow_kernel(segment);
        let mut budget = Budget::new(ms, &self.config.swap);
        let kernel_stall_us = self.allocate_kernel(ms, &mut budget);
        let mut stall_us = self.allocate(ms, &mut budget).max(kernel_stall_us);
        self.run_kswapd(&mut budget);
        self.run_kernel_kswapd(&mut budget);
        stall_us +=
            self.touch(ms.saturating_mul(1000).saturating_sub(stall_us), segment, &mut budget);
        self.read_files(ms, segment);
        self.place_pages();
        self.totals.stall_us += stall_us;
        self.count(ms, segment);
    }

    /// Returns the demanded memory. Each byte of it is resident, swapped out, waited for, or was
    /// freed by the OOM killer.
    pub fn wanted_bytes(&self) -> u64 {
        self.resident_bytes + self.swapped_bytes + self.waiting_bytes + self.killed_bytes
    }

    fn plug(&mut self, ms: u64, pool: &mut impl Pool) {
        for index in 0..self.zones.len() {
            let (zone, plug) = (self.zones[index], self.plugs[index]);
            if zone.requested_bytes == zone.plugged_bytes {
                continue;
            }
            let begun = plug.requested_at + self.config.plug_delay_ms;
            let work_us = plug.done_us + self.now.since(begun).min(ms) * 1000;
            let grows = zone.requested_bytes > zone.plugged_bytes;
            if self.waits_for_conversion(index, grows) {
                continue;
            }
            let per_block =
                if grows { self.config.plug_block_us } else { self.config.unplug_block_us };
            let block_us = (per_block * zone.block_bytes).div_ceil(BLOCK_BYTES).max(1);
            let done_bytes = (work_us / block_us).saturating_mul(zone.block_bytes);
            let moved = if grows {
                self.plug_zone(index, done_bytes, pool)
            } else {
                self.unplug_zone(index, done_bytes, pool)
            };
            let marks = Marks::movable(self.zone_movable_bytes(index));
            let plug = &mut self.plugs[index];
            // If a block could not be moved, the driver starts again with it.
            plug.done_us = if moved == 0 && done_bytes > 0 { 0 } else { work_us % block_us };
            if moved > 0 {
                plug.peak_bytes = plug.peak_bytes.max(self.zones[index].plugged_bytes);
                plug.marks = marks;
                self.adapt_reserve();
            }
        }
    }

    /// Plugs at most `done_bytes` and returns the plugged size. Memory for the page descriptors of
    /// a section must be free first.
    fn plug_zone(&mut self, index: usize, done_bytes: u64, pool: &mut impl Pool) -> u64 {
        let zone = self.zones[index];
        let mut bytes = done_bytes.min(zone.requested_bytes - zone.plugged_bytes);
        let free = self.kernel_free_bytes();
        let sections = free.saturating_sub(self.boot.kernel_mark(|marks| marks.min) * PAGE_BYTES)
            / SECTION_DESCRIPTOR_BYTES;
        let begun = zone.plugged_bytes.next_multiple_of(SECTION_BYTES) - zone.plugged_bytes;
        bytes = bytes.min(begun.saturating_add(sections.saturating_mul(SECTION_BYTES)));
        if zone.tier == Tier::Pm {
            let whole = pool.free_bytes() / zone.block_bytes * zone.block_bytes;
            bytes = pool.take(bytes.min(whole));
        }
        bytes -= bytes % zone.block_bytes;
        self.zones[index].plugged_bytes += bytes;
        self.totals.plugged_in_bytes[zone.tier as usize] += bytes;
        bytes
    }

    /// Unplugs at most `done_bytes`. Only free memory can be unplugged, so pages in the blocks are
    /// moved to other free memory.
    fn unplug_zone(&mut self, index: usize, done_bytes: u64, pool: &mut impl Pool) -> u64 {
        let (zone, plug) = (self.zones[index], self.plugs[index]);
        let least = zone.requested_bytes.max(self.stuck_bytes(&zone, &plug));
        let bytes = done_bytes.min(zone.plugged_bytes.saturating_sub(least));
        let high = self.marks_bytes(|marks| marks.high);
        // Page cache that will not be read again makes room for the pages that have to be moved.
        let clean = (bytes + high).saturating_sub(self.room_bytes()).min(self.stream_bytes);
        self.stream_bytes -= clean;
        self.totals.replaced_bytes += clean;
        let bytes = bytes.min(self.room_bytes().saturating_sub(high));
        let bytes = bytes - bytes % zone.block_bytes;
        self.move_from_kernel_part(index, bytes);
        self.zones[index].plugged_bytes -= bytes;
        self.plugs[index].trim_kernel_blocks(self.zones[index].plugged_bytes);
        if zone.tier == Tier::Pm {
            pool.give(bytes);
        }
        bytes
    }

    fn count(&mut self, ms: u64, segment: &Segment) {
        let ms_wide = u128::from(ms);
        for (tier, sum) in [Tier::Dram, Tier::Pm].into_iter().zip(0..) {
            let plugged: u64 = self.plugged_of(tier);
            self.totals.plugged_byte_ms[sum] += u128::from(plugged) * ms_wide;
        }
        let plugged = self.plugged_bytes();
        let need = self.needed_bytes(segment);
        let held = self.total_bytes();
        self.totals.over_byte_ms += u128::from(held.saturating_sub(need).min(plugged)) * ms_wide;
        self.totals.short_byte_ms += u128::from(need.saturating_sub(held)) * ms_wide;
        if segment.touches_per_s > 0 {
            let pm = self.pm_permille();
            let touches = u128::from(segment.touches_per_s) * ms_wide;
            self.totals.touches_ms[0] += touches * u128::from(1000 - pm);
            self.totals.touches_ms[1] += touches * u128::from(pm);
        }
    }

    /// Returns the memory that the guest needs to hold all demanded memory.
    pub fn needed_bytes(&self, segment: &Segment) -> u64 {
        let overhead =
            self.total_bytes() - self.capacity_bytes() + self.marks_bytes(|marks| marks.high);
        // The capacity does not include allocated kernel memory, which therefore counts as
        // overhead.
        let kernel = segment.kernel_bytes_at(self.now).saturating_sub(self.kernel.held_bytes);
        segment.anon_bytes_at(self.now) + kernel + segment.file_bytes + overhead
    }
}
