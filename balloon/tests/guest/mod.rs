//! A model of a guest and its agent, for tests of the whole loop.
//!
//! It has two nodes (DRAM with a movable hotplug part, PM). Processes fill, free and touch anonymous memory and read
//! files at given rates ([`memory`]); memory is plugged and unplugged at given speeds, at the cost of page descriptors,
//! and what is pinned does not leave ([`plug`]). The agent reports as the real one does; reports may be late or lost.

mod memory;
mod plug;
pub mod workload;

use std::collections::VecDeque;

use balloon::controller::{Controller, Event};
use balloon::plan::{Direction, Plan};
use balloon::proto::{
    Blocks, Counters, Measure, Memory, OnlinePolicy, PROTOCOL_VERSION, RawReport, Report, Stall, Zone,
    ZoneKind,
};
use balloon::{BLOCK_BYTES, HostView, MIB, Tier, TimeMs, ZoneId, ZoneSizes};

pub use self::memory::{Files, Processes, Toll};
pub use self::plug::Plugging;

const PAGE_BYTES: u64 = 4096;
/// What the kernel keeps of the memory it boots with.
const KERNEL_BYTES: u64 = 32 * MIB;
/// What init and the agent use.
pub const IDLE_BYTES: u64 = 40 * MIB;
const MIN_WATERMARK_BYTES: u64 = 2 * MIB;
const LOW_WATERMARK_BYTES: u64 = 3 * MIB;
const HIGH_WATERMARK_BYTES: u64 = 4 * MIB;
/// Tasks that wait for so long within so much time make the agent report at once.
const STALL_TRIGGER: (u64, u64) = (50, 500);

/// The guest, seen from outside.
#[derive(Clone)]
pub struct Guest {
    pub host: HostView,
    pub processes: Processes,
    pub files: Files,
    pub plugging: Plugging,
    /// What the want of memory has cost so far.
    pub toll: Toll,
    /// Memory held for nothing, in byte milliseconds: what is plugged beyond need.
    pub over_byte_ms: u128,
    /// Resizes asked for so far.
    pub resizes: u64,
    /// How long a report is on its way.
    pub report_delay_ms: u64,
    /// The agent says nothing.
    pub is_mute: bool,
    pub now: TimeMs,
    agent: Agent,
    on_their_way: VecDeque<(TimeMs, Report)>,
}

/// What the agent knows.
#[derive(Clone, Default)]
struct Agent {
    seq: u64,
    watermark_bytes: u64,
    watermark_of: Measure,
    /// What was there of that at the last report, and when that was.
    reported: (u64, TimeMs),
    /// The stall time at the begin of the present window.
    window: (u64, TimeMs),
}

impl Guest {
    /// 384 MiB of DRAM at boot, 128 MiB more, and 1 GiB of PM; a plug takes 0.2 s, and 1 GiB/s from there on.
    pub fn new() -> Self {
        Self::of_size(384 * MIB, 128 * MIB, 1024 * MIB)
    }

    /// A guest with so much DRAM at boot, and so much of DRAM and of PM to come.
    pub fn of_size(boot_bytes: u64, dram_bytes: u64, pm_bytes: u64) -> Self {
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
                zones: vec![zone(0, Tier::Dram, dram_bytes), zone(1, Tier::Pm, pm_bytes)],
                boot_bytes,
                pool_free_bytes: 2 * pm_bytes,
                ..HostView::default()
            },
            processes: Processes::idle(),
            files: Files::default(),
            plugging: Plugging::new(),
            toll: Toll::default(),
            over_byte_ms: 0,
            resizes: 0,
            report_delay_ms: 0,
            is_mute: false,
            now: TimeMs(1_000),
            agent: Agent::default(),
            on_their_way: VecDeque::new(),
        }
    }

    pub fn total_bytes(&self) -> u64 {
        self.boot_total_bytes() + self.host.plugged_bytes()
    }

    /// What it has without anything plugged.
    pub fn boot_total_bytes(&self) -> u64 {
        self.host.boot_bytes - KERNEL_BYTES
    }

    /// What it must have not to wait for memory: what processes want, the files that are read again and again, page
    /// descriptors, and kswapd's watermark.
    pub fn need_bytes(&self) -> u64 {
        self.processes.wanted_bytes + self.files.hot_bytes + self.descriptor_bytes() + HIGH_WATERMARK_BYTES
    }

    /// What it holds beyond `need_bytes`. Memory that it booted with is not held by anybody's decision.
    pub fn over_bytes(&self) -> u64 {
        self.total_bytes().saturating_sub(self.need_bytes().max(self.boot_total_bytes()))
    }

    /// One millisecond of the guest's life, in which its processes want `fill` bytes more or, negative, fewer.
    pub fn live(&mut self, fill: i64) {
        self.now = self.now + 1;
        self.plug();
        self.run_processes(fill);
        self.over_byte_ms += u128::from(self.over_bytes());
    }

    /// The report of this moment.
    pub fn report(&mut self) -> Report {
        self.agent.seq += 1;
        // Linux takes what it is about to give back out of the free pages first, and out of the total at the end.
        let leaving_bytes = self.leaving_bytes();
        let free_bytes = self.free_bytes().saturating_sub(leaving_bytes);
        let cached_bytes = self.files.cached_bytes();
        let available_bytes = self.available_bytes().saturating_sub(leaving_bytes);
        let swap = &self.processes;
        let raw = RawReport {
            version: PROTOCOL_VERSION,
            seq: self.agent.seq,
            monotonic_ms: self.now.0,
            memory: Memory {
                total_bytes: self.total_bytes(),
                free_bytes,
                available_bytes,
                cached_bytes,
                anon_bytes: swap.resident_bytes,
                swap_total_bytes: swap.swap_bytes,
                swap_free_bytes: swap.swap_bytes.saturating_sub(swap.swapped_bytes),
            },
            stall: Stall { some_us: self.toll.stall_us, ..Stall::default() },
            zones: vec![Zone {
                kind: ZoneKind::Dma32,
                free_pages: free_bytes.min(64 * MIB) / PAGE_BYTES,
                min_pages: MIN_WATERMARK_BYTES / PAGE_BYTES,
                low_pages: LOW_WATERMARK_BYTES / PAGE_BYTES,
                high_pages: HIGH_WATERMARK_BYTES / PAGE_BYTES,
                managed_pages: self.boot_total_bytes() / PAGE_BYTES,
                ..Zone::default()
            }],
            counters: Counters {
                pswpout: self.toll.swapped_out_bytes / PAGE_BYTES,
                pswpin: self.toll.swapped_in_bytes / PAGE_BYTES,
                workingset_refault_file: self.toll.refault_bytes / PAGE_BYTES,
                oom_kill: self.toll.oom_kills,
                ..Counters::default()
            },
            blocks: Blocks { online_policy: OnlinePolicy::OnlineMovable, ..Blocks::default() },
            ..RawReport::default()
        };
        self.agent.reported = (self.agent.watermark_of.of(&raw.memory), self.now);
        Report::try_from(raw).expect("a model tells the truth")
    }

    fn there_bytes(&self) -> u64 {
        match self.agent.watermark_of {
            Measure::Free => self.free_bytes(),
            Measure::Available => self.available_bytes(),
        }
    }

    /// Whether the agent would report now: once a second at rest, 20 times under the watermark, and, looking ten
    /// times a second, when an eighth is gone or the watermark is crossed; at once when tasks wait.
    fn is_report_due(&mut self) -> bool {
        if self.now.since(self.agent.window.1) > STALL_TRIGGER.1 {
            self.agent.window = (self.toll.stall_us, self.now);
        }
        let (before, at) = self.agent.reported;
        let (age, there) = (self.now.since(at), self.there_bytes());
        let stalled = self.toll.stall_us - self.agent.window.0 >= STALL_TRIGGER.0 * 1_000;
        let watermark = self.agent.watermark_bytes;
        let news = there < before - before / 8 || (there < watermark && before >= watermark);
        age >= 1_000
            || (age >= 50 && (there < watermark || stalled))
            || (age >= 100 && age.is_multiple_of(100) && news)
    }

    /// What the loop does in one millisecond: plans are carried out at once.
    pub fn loop_once(&mut self, controller: &mut Controller) -> Option<Plan> {
        if self.is_report_due() {
            let report = self.report();
            if !self.is_mute {
                self.on_their_way.push_back((self.now + self.report_delay_ms, report));
            }
        }
        let arrived = self.on_their_way.pop_front_if(|(at, _)| *at <= self.now);
        let plan = match arrived {
            Some((_, report)) => controller.step(Event::Report(&report), &self.host, self.now),
            None if self.now.0.is_multiple_of(1_000) => controller.step(Event::Tick, &self.host, self.now),
            None => return None,
        };
        (self.agent.watermark_bytes, self.agent.watermark_of) = (plan.watermark_bytes, plan.watermark_of);
        self.resizes += u64::from(plan.direction != Direction::Hold);
        for (zone, target) in self.host.zones.iter_mut().zip(&plan.targets) {
            zone.requested_bytes = target.requested_bytes;
        }
        Some(plan)
    }
}
