//! A model of a guest and its agent, for tests of the whole loop.
//!
//! It has two nodes (DRAM with a movable hotplug part, PM), fills and frees memory at given rates, plugs and unplugs
//! at given speeds, swaps when less than the low watermark is free, and reports the way the agent does.

use balloon::controller::{Controller, Event};
use balloon::plan::Plan;
use balloon::proto::{
    Blocks, Counters, Memory, OnlinePolicy, PROTOCOL_VERSION, RawReport, Report, Zone, ZoneKind,
};
use balloon::{BLOCK_BYTES, HostView, MIB, Tier, TimeMs, ZoneId, ZoneSizes};

const PAGE_BYTES: u64 = 4096;
/// What the kernel keeps of the memory it boots with.
const KERNEL_BYTES: u64 = 32 * MIB;
/// What init and the agent use.
const IDLE_BYTES: u64 = 40 * MIB;
const HIGH_WATERMARK_BYTES: u64 = 4 * MIB;

/// The guest, seen from outside.
pub struct Guest {
    pub host: HostView,
    /// What its processes want.
    pub wanted_bytes: u64,
    /// What of it is in memory, and in swap.
    pub resident_bytes: u64,
    pub swapped_bytes: u64,
    /// Bytes that ever went to swap.
    pub swapped_out_bytes: u64,
    /// From the request to the first block, and the speed from there on.
    pub plug_delay_ms: u64,
    pub plug_bytes_per_ms: u64,
    pub unplug_bytes_per_ms: u64,
    pub now: TimeMs,
    asked: [(u64, TimeMs); 2],
    watermark_bytes: u64,
    reported: (u64, TimeMs),
    seq: u64,
}

impl Guest {
    /// 384 MiB of DRAM at boot, 128 MiB more, and 1 GiB of PM; a plug takes 0.2 s, and 1 GiB/s from there on.
    pub fn new() -> Self {
        let zone = |id, tier, max_bytes| ZoneSizes {
            id: ZoneId(id),
            tier,
            guest_numa_node: id,
            block_bytes: BLOCK_BYTES,
            floor_bytes: 0,
            max_bytes,
            requested_bytes: 0,
            plugged_bytes: 0,
        };
        Guest {
            host: HostView {
                zones: vec![zone(0, Tier::Dram, 128 * MIB), zone(1, Tier::Pm, 1024 * MIB)],
                boot_bytes: 384 * MIB,
                pool_free_bytes: 2048 * MIB,
                ..HostView::default()
            },
            wanted_bytes: IDLE_BYTES,
            resident_bytes: IDLE_BYTES,
            swapped_bytes: 0,
            swapped_out_bytes: 0,
            plug_delay_ms: 200,
            plug_bytes_per_ms: MIB,
            unplug_bytes_per_ms: MIB / 2,
            now: TimeMs(1_000),
            asked: [(0, TimeMs(0)); 2],
            watermark_bytes: 0,
            reported: (0, TimeMs(0)),
            seq: 0,
        }
    }

    pub fn total_bytes(&self) -> u64 {
        self.host.boot_bytes - KERNEL_BYTES + self.host.plugged_bytes()
    }

    fn descriptor_bytes(&self) -> u64 {
        self.host.plugged_bytes() / 64
    }

    pub fn free_bytes(&self) -> u64 {
        self.total_bytes().saturating_sub(self.resident_bytes + self.descriptor_bytes())
    }

    /// One millisecond of the guest's life, in which its processes want `fill` bytes more or, negative, fewer.
    pub fn live(&mut self, fill: i64) {
        self.now = self.now + 1;
        self.wanted_bytes = self.wanted_bytes.saturating_add_signed(fill).max(IDLE_BYTES);
        self.plug();
        let held = self.resident_bytes + self.swapped_bytes;
        if self.wanted_bytes < held {
            let gone = held - self.wanted_bytes;
            let from_swap = gone.min(self.swapped_bytes);
            self.swapped_bytes -= from_swap;
            self.resident_bytes -= gone - from_swap;
        } else {
            self.resident_bytes += self.wanted_bytes - held;
        }
        // kswapd: what is beyond the watermark goes to swap.
        let room = self.total_bytes().saturating_sub(self.descriptor_bytes() + HIGH_WATERMARK_BYTES);
        let over = self.resident_bytes.saturating_sub(room);
        self.resident_bytes -= over;
        self.swapped_bytes += over;
        self.swapped_out_bytes += over;
    }

    fn plug(&mut self) {
        let free = self.free_bytes();
        for (zone, asked) in self.host.zones.iter_mut().zip(&mut self.asked) {
            if zone.requested_bytes != asked.0 {
                *asked = (zone.requested_bytes, self.now);
            }
            if self.now.since(asked.1) < self.plug_delay_ms {
                continue;
            }
            let grow = zone.outstanding_grow_bytes().min(self.plug_bytes_per_ms);
            // Only free memory can leave.
            let shrink = zone.outstanding_shrink_bytes().min(self.unplug_bytes_per_ms).min(free);
            zone.plugged_bytes += grow;
            zone.plugged_bytes -= shrink;
        }
    }

    /// The report of this moment.
    pub fn report(&mut self) -> Report {
        self.seq += 1;
        // Linux takes what it is about to give back out of the free pages first, and out of the total at the end.
        let leaving_bytes = self.host.outstanding_shrink_bytes().min(128 * MIB);
        let free_bytes = self.free_bytes().saturating_sub(leaving_bytes);
        self.reported = (free_bytes, self.now);
        let raw = RawReport {
            version: PROTOCOL_VERSION,
            seq: self.seq,
            monotonic_ms: self.now.0,
            memory: Memory {
                total_bytes: self.total_bytes(),
                free_bytes,
                available_bytes: free_bytes.saturating_sub(HIGH_WATERMARK_BYTES),
                swap_total_bytes: 1 << 30,
                swap_free_bytes: (1u64 << 30).saturating_sub(self.swapped_bytes),
                ..Memory::default()
            },
            zones: vec![Zone {
                kind: ZoneKind::Dma32,
                free_pages: free_bytes.min(64 * MIB) / PAGE_BYTES,
                min_pages: HIGH_WATERMARK_BYTES / PAGE_BYTES / 2,
                low_pages: HIGH_WATERMARK_BYTES / PAGE_BYTES * 3 / 4,
                high_pages: HIGH_WATERMARK_BYTES / PAGE_BYTES,
                managed_pages: 352 * MIB / PAGE_BYTES,
                ..Zone::default()
            }],
            counters: Counters { pswpout: self.swapped_out_bytes / PAGE_BYTES, ..Counters::default() },
            blocks: Blocks { online_policy: OnlinePolicy::OnlineMovable, ..Blocks::default() },
            ..RawReport::default()
        };
        Report::try_from(raw).expect("a model tells the truth")
    }

    /// Whether the agent would report now: once a second at rest, 20 times under the watermark, and, looking ten
    /// times a second, when an eighth is gone.
    pub fn is_report_due(&self) -> bool {
        let (before, at) = self.reported;
        let (age, free) = (self.now.since(at), self.free_bytes());
        age >= 1_000
            || (age >= 50 && free < self.watermark_bytes)
            || (age >= 100 && age.is_multiple_of(100) && free < before - before / 8)
    }

    /// What the loop does in one millisecond: reports reach it at once, and plans are carried out at once.
    pub fn loop_once(&mut self, controller: &mut Controller) -> Option<Plan> {
        let plan = if self.is_report_due() {
            let report = self.report();
            controller.step(Event::Report(&report), &self.host, self.now)
        } else if self.now.0.is_multiple_of(1_000) {
            controller.step(Event::Tick, &self.host, self.now)
        } else {
            return None;
        };
        self.watermark_bytes = plan.watermark_bytes;
        for (zone, target) in self.host.zones.iter_mut().zip(&plan.targets) {
            zone.requested_bytes = target.requested_bytes;
        }
        Some(plan)
    }
}
