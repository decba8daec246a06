//! Agent of the simulated guest: its reports and their times. The agent's own code decides when to
//! report.

use foreshore_proto::{
    Blocks, Cause, Counters, KernelUse, LARGEST_BLOCK_BYTES, Measure, Memory, NodeBlocks,
    OnlinePolicy, PROTOCOL_VERSION, Pace, RawReport, Report, Settings, Stall, Zone, ZoneKind,
};

use super::demand::Segment;
use super::guest::{Guest, PAGE_BYTES};
use super::kernel_blocks::KernelBlocks;
use crate::TimeMs;
use crate::units::SECTION_BYTES;

/// Size of a memory block in the guest's Linux, the smallest on x86-64.
const MEMORY_BLOCK_BYTES: u64 = SECTION_BYTES;
/// Number of reports after which a fall of memory no longer affects the pace of reports. Each
/// report without another fall halves its effect.
const DECAY_REPORTS: u64 = 64;
/// Stall time within a window that fires the kernel's trigger.
const TRIGGER_US: u64 = 50_000;
const TRIGGER_WINDOW_MS: u64 = 500;
/// Uptime of the guest when the run starts. The guest's clock starts before its agent, so times in
/// reports are later than times in the run.
const BOOTED_MS: u64 = 10_000;

#[derive(Clone, Debug)]
pub(super) struct Agent {
    pace: Pace,
    settings: Settings,
    reported: TimeMs,
    /// Time of the last check of memory or of the last report. The time of the next check is
    /// relative to it.
    checked_at: TimeMs,
    /// Reclaimed memory when the agent last read the available memory.
    reclaimed_at_read_bytes: u64,
    trigger: (TimeMs, u64),
    /// Buffer of the last report. The buffer is reused so that a report does not allocate memory.
    report: Option<RawReport>,
    seq: u64,
    free: Vec<u64>,
    stall: StallAverage,
    kernel_blocks: KernelBlocks,
}

/// 10 s average of stall times, which the kernel updates every 2 s.
#[derive(Clone, Copy, Debug, Default)]
struct StallAverage {
    at: TimeMs,
    total_us: u64,
    basis_points: u64,
}

impl StallAverage {
    const FOLD_MS: u64 = 2_000;

    fn fold(&mut self, now: TimeMs, total_us: u64) -> u32 {
        while now.since(self.at) >= Self::FOLD_MS {
            let ms = now.since(self.at);
            // While there are no stalls, any number of updates can be skipped.
            if total_us == self.total_us && self.basis_points == 0 {
                self.at = self.at + ms / Self::FOLD_MS * Self::FOLD_MS;
                continue;
            }
            let share = ((total_us - self.total_us) * 10 / Self::FOLD_MS).min(10_000);
            self.total_us = total_us;
            self.at = self.at + Self::FOLD_MS;
            // 819 is exp(-2/10) in thousandths. Values below a hundredth of a percent become 0.
            self.basis_points = (self.basis_points * 819 + share * 181) / 1000;
        }
        self.basis_points as u32
    }
}

impl Agent {
    pub(super) fn new() -> Self {
        let settings = Settings::with_watermark(0);
        let mut pace = Pace::new(settings);
        pace.record_check(BOOTED_MS);
        Agent {
            pace,
            settings,
            reported: TimeMs(0),
            checked_at: TimeMs(0),
            reclaimed_at_read_bytes: 0,
            trigger: (TimeMs(0), 0),
            report: None,
            seq: 0,
            free: Vec::new(),
            stall: StallAverage::default(),
            kernel_blocks: KernelBlocks::default(),
        }
    }

    pub(super) fn set_watermark(&mut self, watermark_bytes: u64, watermark_of: Measure) {
        let settings = Settings { watermark_bytes, watermark_of, ..self.settings };
        if settings != self.settings {
            self.settings = settings;
            self.pace.set(settings);
        }
    }

    /// Returns the time of the next report if nothing happens until then. The first report is due
    /// immediately.
    pub(super) fn report_due(&self) -> TimeMs {
        if self.seq == 0 { TimeMs(0) } else { TimeMs(self.pace.report_due_ms() - BOOTED_MS) }
    }

    /// Returns the interval between reports if nothing happens.
    pub(super) fn interval_ms(&self) -> u64 {
        self.report_due().since(self.reported)
    }

    /// Returns true if the stall average is zero, and no block's conversion is needed or in
    /// progress.
    pub(super) fn is_at_rest(&self) -> bool {
        self.stall.basis_points == 0 && self.kernel_blocks.is_at_rest()
    }

    /// Starts to convert a block of DRAM to kernel memory if the last report shows that the kernel
    /// is short of memory.
    pub(super) fn give_kernel_block(&mut self, guest: &mut Guest) {
        let now_ms = guest.now().0 + BOOTED_MS;
        self.kernel_blocks.begin(guest, MEMORY_BLOCK_BYTES, now_ms);
    }

    /// Returns the time at which so little memory is left that a report is due. Assumes that memory
    /// changes only as the segment demands.
    pub(super) fn threshold_due(&self, guest: &Guest, segment: &Segment) -> Option<TimeMs> {
        if self.needs_report(guest) {
            return Some(guest.now());
        }
        guest.time_of_fall_to(self.pace.measure(), self.pace.report_threshold_bytes()?, segment)
    }

    fn needs_report(&self, guest: &Guest) -> bool {
        self.pace.needs_report(guest.measured_bytes(self.pace.measure()))
    }

    fn check_ms(&self) -> u64 {
        TimeMs(self.pace.check_due_ms() - BOOTED_MS).since(self.checked_at)
    }

    /// Returns the time of the next check that may require a report: the first check at or after
    /// `at`, or the one before it if that is still to come, because the agent compares successive
    /// checks.
    pub(super) fn check_due(&self, at: TimeMs, now: TimeMs) -> TimeMs {
        let check_ms = self.check_ms();
        let due =
            self.checked_at + at.max(now + 1).since(self.checked_at).div_ceil(check_ms) * check_ms;
        if due.since(now) > check_ms { TimeMs(due.0 - check_ms) } else { due }
    }

    /// Checks memory if a check is due. Returns true if the VMM must be notified immediately.
    pub(super) fn check_memory(&mut self, guest: &Guest) -> bool {
        let (now, check_ms) = (guest.now(), self.check_ms());
        if now == self.checked_at || !now.since(self.checked_at).is_multiple_of(check_ms) {
            return false;
        }
        let reclaimed_bytes = reclaimed_bytes(guest);
        // The model reclaims exactly as much memory as tasks need, so free memory does not change.
        // Linux reclaims 32 pages at a time, which changes it, so a change of one page is
        // simulated.
        let moved_bytes =
            if reclaimed_bytes == self.reclaimed_at_read_bytes { 0 } else { PAGE_BYTES };
        let free_bytes = guest.free_bytes();
        let now_ms = now.0 + BOOTED_MS;
        if !self.pace.needs_read(free_bytes + moved_bytes, now_ms) {
            self.pace.record_check(now_ms);
        } else if self.needs_report(guest) {
            return true;
        } else {
            self.pace.record_read(free_bytes, now_ms);
            self.reclaimed_at_read_bytes = reclaimed_bytes;
        }
        self.checked_at = now;
        false
    }

    /// Returns true if the kernel's stall trigger fires.
    pub(super) fn is_stalled(&mut self, guest: &Guest) -> bool {
        let (since, total_us) = self.trigger;
        // The kernel's window starts with a stall (kernel/sched/psi.c, init_rtpoll_triggers).
        if guest.totals().stall_us == total_us {
            self.trigger.0 = guest.now();
            return false;
        }
        if guest.totals().stall_us - total_us >= TRIGGER_US {
            self.trigger = (guest.now(), guest.totals().stall_us);
            return true;
        }
        if guest.now().since(since) >= TRIGGER_WINDOW_MS {
            self.trigger = (guest.now(), guest.totals().stall_us);
        }
        false
    }

    /// Switches to fast reports for a while because memory has fallen.
    pub(super) fn alert(&mut self, now: TimeMs) {
        self.pace.alert(now.0 + BOOTED_MS);
    }

    /// Records that `count` reports with unchanged values were skipped.
    pub(super) fn skip_reports(&mut self, count: u64, guest: &Guest) {
        let interval_ms = self.interval_ms();
        self.seq += count;
        let memory = Memory {
            free_bytes: guest.free_bytes(),
            available_bytes: guest.available_bytes(),
            ..Memory::default()
        };
        for left in (0..count.min(DECAY_REPORTS)).rev() {
            let at = self.reported + (count - left) * interval_ms;
            self.pace.record_report(&memory, at.0 + BOOTED_MS);
        }
        self.reported = self.reported + count * interval_ms;
        self.checked_at = self.reported;
    }

    /// Takes a used report back, so that its buffers can be reused.
    pub(super) fn reuse_report(&mut self, report: Report) {
        self.report = Some(report.into());
    }

    /// Creates a report of the guest's present state.
    pub(super) fn report(&mut self, guest: &Guest, cause: Cause) -> Report {
        let mut raw = self.report.take().unwrap_or_else(|| RawReport {
            version: PROTOCOL_VERSION,
            blocks: Blocks {
                online_policy: OnlinePolicy::OnlineMovable,
                block_bytes: MEMORY_BLOCK_BYTES,
                ..Blocks::default()
            },
            ..RawReport::default()
        });
        self.seq += 1;
        raw.seq = self.seq;
        raw.monotonic_ms = guest.now().0 + BOOTED_MS;
        raw.cause = cause;
        let total_bytes = guest.total_bytes();
        fill_blocks(&mut raw.blocks.nodes, guest);
        let swap = &guest.config().swap;
        raw.memory = Memory {
            total_bytes,
            free_bytes: guest.free_bytes(),
            available_bytes: guest.available_bytes(),
            cached_bytes: guest.cached_bytes(),
            anon_bytes: guest.resident_bytes(),
            swap_total_bytes: swap.size_bytes,
            swap_free_bytes: swap.size_bytes - guest.swapped_bytes(),
        };
        // The simulated kernel has no reclaimable caches.
        raw.kernel = Some(KernelUse {
            slab_unreclaimable_bytes: guest.kernel_bytes(),
            unused_dentries: Some(0),
            unused_inodes: Some(0),
            ..KernelUse::default()
        });
        self.fill_zones(&mut raw.zones, guest);
        let totals = guest.totals();
        raw.stall = Stall {
            some_us: totals.stall_us,
            full_us: totals.stall_us,
            some_avg10_basis_points: self.stall.fold(guest.now(), totals.stall_us),
            full_avg10_basis_points: self.stall.basis_points as u32,
        };
        let pages = |bytes: u64| bytes / PAGE_BYTES;
        raw.counters = Counters {
            pswpin: pages(totals.swapped_in_bytes),
            pswpout: pages(totals.swapped_out_bytes),
            pgmajfault: pages(totals.swapped_in_bytes + totals.refaulted_bytes),
            workingset_refault_anon: pages(totals.swapped_in_bytes),
            workingset_refault_file: pages(totals.refaulted_bytes),
            pgscan_kswapd: pages(totals.kswapd_bytes),
            pgscan_direct: pages(totals.direct_bytes),
            pgsteal_kswapd: pages(totals.kswapd_bytes + totals.replaced_bytes),
            pgsteal_direct: pages(totals.direct_bytes),
            allocstall: totals.allocstalls,
            allocstall_kernel: totals.kernel_allocstalls,
            numa_miss: pages(totals.foreign_bytes),
            numa_other: pages(totals.foreign_bytes + totals.demoted_bytes),
            oom_kill: totals.oom_kills,
        };
        self.kernel_blocks.update(&raw, guest);
        self.pace.record_report(&raw.memory, raw.monotonic_ms);
        self.reported = guest.now();
        self.checked_at = self.reported;
        self.reclaimed_at_read_bytes = reclaimed_bytes(guest);
        let report = Report::try_from(raw);
        report.expect("a model reports correctly")
    }

    fn fill_zones(&mut self, zones: &mut Vec<Zone>, guest: &Guest) {
        self.free.resize(guest.zones().len(), 0);
        let free = guest.free_by_zone(&mut self.free);
        let boot = guest.boot();
        zones.clear();
        let zone =
            |node, kind, free: u64, marks: super::guest::Marks, managed: u64, user: u64| Zone {
                protected_pages: Some(0),
                node,
                kind,
                free_pages: free / PAGE_BYTES,
                min_pages: marks.min,
                low_pages: marks.low,
                high_pages: marks.high,
                managed_pages: managed / PAGE_BYTES,
                largest_free_blocks: Some(free / LARGEST_BLOCK_BYTES),
                user_pages: Some(user / PAGE_BYTES),
            };
        for part in
            boot.kernel_zones(boot.kernel_bytes() - free.kernel_bytes, guest.kernel_used_bytes())
        {
            let (kernel, used_bytes) = (part.zone, part.pinned_bytes + part.user_bytes);
            let free_bytes = kernel.bytes - used_bytes;
            zones.push(Zone {
                protected_pages: Some(kernel.reserved_bytes / PAGE_BYTES),
                ..zone(0, kernel.kind, free_bytes, kernel.marks, kernel.bytes, part.user_bytes)
            });
        }
        if boot.movable_bytes > 0 {
            let user_bytes = boot.movable_bytes - free.movable_bytes;
            let (free, marks) = (free.movable_bytes, boot.movable_marks);
            zones.push(zone(0, ZoneKind::Movable, free, marks, boot.movable_bytes, user_bytes));
        }
        for (index, sizes) in guest.zones().iter().enumerate() {
            let movable_bytes = guest.zone_movable_bytes(index);
            if movable_bytes == 0 {
                continue;
            }
            let (free, marks) = (self.free[index], guest.zone_marks(index));
            let user_bytes = movable_bytes.saturating_sub(free);
            let node = sizes.guest_numa_node;
            let plugged = zone(node, ZoneKind::Movable, free, marks, movable_bytes, user_bytes);
            // In Linux, each node has a single ZONE_MOVABLE.
            match zones.iter_mut().find(|zone| zone.node == node && zone.kind == ZoneKind::Movable)
            {
                Some(movable) => add(movable, &plugged),
                None => zones.push(plugged),
            }
        }
    }
}

/// Adds the pages of `part`, which belongs to the same zone.
fn add(zone: &mut Zone, part: &Zone) {
    zone.free_pages += part.free_pages;
    zone.min_pages += part.min_pages;
    zone.low_pages += part.low_pages;
    zone.high_pages += part.high_pages;
    zone.managed_pages += part.managed_pages;
    zone.largest_free_blocks =
        zone.largest_free_blocks.zip(part.largest_free_blocks).map(|(a, b)| a + b);
    zone.user_pages = zone.user_pages.zip(part.user_pages).map(|(a, b)| a + b);
}

fn reclaimed_bytes(guest: &Guest) -> u64 {
    let totals = guest.totals();
    totals.kswapd_bytes + totals.direct_bytes + totals.refaulted_bytes
}

fn fill_blocks(nodes: &mut Vec<NodeBlocks>, guest: &Guest) {
    nodes.clear();
    nodes.push(NodeBlocks { online_bytes: guest.config().boot_bytes, ..NodeBlocks::default() });
    let plugged = guest.zones().iter().enumerate().filter(|(_, sizes)| sizes.plugged_bytes > 0);
    for (index, sizes) in plugged {
        let at = match nodes.iter().position(|node| node.node == sizes.guest_numa_node) {
            Some(at) => at,
            None => {
                nodes.push(NodeBlocks { node: sizes.guest_numa_node, ..NodeBlocks::default() });
                nodes.len() - 1
            }
        };
        // Linux counts a partly plugged block as online.
        let blocks = |bytes: u64| bytes.next_multiple_of(MEMORY_BLOCK_BYTES);
        nodes[at].online_bytes += blocks(sizes.plugged_bytes);
        nodes[at].movable_online_bytes += blocks(guest.zone_movable_bytes(index));
    }
}

#[cfg(test)]
mod tests {
    use super::super::guest::GuestConfig;
    use super::super::guest::Pool;
    use super::*;

    struct NoPool;

    impl Pool for NoPool {
        fn free_bytes(&self) -> u64 {
            0
        }

        fn take(&mut self, _: u64) -> u64 {
            0
        }

        fn give(&mut self, _: u64) {}
    }

    #[test]
    fn threshold_is_reached_when_due_and_not_before() {
        for (growth, stream) in [(10 << 20, 0), (10 << 20, 30 << 20), (0, 30 << 20)] {
            for watermark_bytes in [0, 10 << 20, 150 << 20, 1 << 30] {
                for watermark_of in [Measure::Free, Measure::Available] {
                    let case =
                        format!("{growth} and {stream} to {watermark_bytes} {watermark_of:?}");
                    let segment = Segment {
                        anon_bytes: 100 << 20,
                        anon_bytes_per_s: growth,
                        stream_bytes_per_s: stream,
                        ..Segment::default()
                    };
                    let mut guest = Guest::new(GuestConfig::default(), &[], &segment);
                    let mut agent = Agent::new();
                    agent.set_watermark(watermark_bytes, watermark_of);
                    agent.report(&guest, Cause::Rest);
                    // Reading files hardly changes available memory.
                    if watermark_of == Measure::Available && stream > 0 {
                        assert_eq!(
                            agent.threshold_due(&guest, &segment).is_some(),
                            growth > 0,
                            "{case}"
                        );
                        continue;
                    }
                    let due = agent.threshold_due(&guest, &segment).expect(&case);
                    guest.advance(TimeMs(due.0 - 1), &segment, &mut NoPool);
                    assert!(!agent.needs_report(&guest), "{case}");
                    guest.advance(due + 1, &segment, &mut NoPool);
                    assert!(agent.needs_report(&guest), "{case}");
                }
            }
        }
    }

    /// Guest of 1 GiB that fills `anon_bytes_per_s`, after its first report.
    fn filling(anon_bytes_per_s: i64, watermark_bytes: u64) -> (Guest, Agent, Segment) {
        let segment = Segment { anon_bytes: 160 << 20, anon_bytes_per_s, ..Segment::default() };
        let config = GuestConfig { boot_bytes: 1 << 30, ..GuestConfig::default() };
        let guest = Guest::new(config, &[], &segment);
        let mut agent = Agent::new();
        agent.set_watermark(watermark_bytes, Measure::Available);
        agent.report(&guest, Cause::Rest);
        (guest, agent, segment)
    }

    /// Returns the time at which a check requires a report.
    fn detected_at((mut guest, mut agent, segment): (Guest, Agent, Segment)) -> u64 {
        while guest.now() < TimeMs(1_000) {
            let due = agent.threshold_due(&guest, &segment).expect("it fills");
            guest.advance(agent.check_due(due, guest.now()), &segment, &mut NoPool);
            if agent.check_memory(&guest) {
                return guest.now().0;
            }
        }
        panic!("a report is due");
    }

    #[test]
    fn only_scheduled_checks_detect_a_fall() {
        let (mut guest, mut agent, segment) = filling(512 << 20, 0);
        let due = agent.threshold_due(&guest, &segment).expect("it fills");
        assert!(
            (101..199).contains(&due.0),
            "with plenty of memory the polls are 100 ms apart: {due}"
        );
        assert_eq!(detected_at((guest.clone(), agent.clone(), segment)), 200);
        guest.advance(TimeMs(199), &segment, &mut NoPool);
        assert!(
            agent.needs_report(&guest) && !agent.check_memory(&guest),
            "the agent does not poll now"
        );
        // If memory is 30 MiB above the watermark, checks are 58 ms apart.
        let watermark_bytes = filling(512 << 20, 0).0.available_bytes() - (30 << 20);
        assert_eq!(detected_at(filling(512 << 20, watermark_bytes)), 116);
    }

    #[test]
    fn gradual_fall_is_detected_by_the_first_check_below_the_threshold() {
        // Memory falls by less than half of an eighth between two checks.
        let (mut guest, mut agent, segment) = filling(300 << 20, 0);
        let due = agent.threshold_due(&guest, &segment).expect("it fills");
        let detected_ms = (100..1_000).step_by(100).find(|check_ms| {
            guest.advance(TimeMs(*check_ms), &segment, &mut NoPool);
            agent.check_memory(&guest)
        });
        let detected_ms = detected_ms.expect("a poll finds it");
        assert!(
            (due.0..due.0 + 100).contains(&detected_ms),
            "{detected_ms} ms, with news at {due}"
        );
    }

    #[test]
    fn fall_beyond_page_cache_is_not_awaited() {
        let segment = Segment { stream_bytes_per_s: 100 << 20, ..Segment::default() };
        let mut guest = Guest::new(GuestConfig::default(), &[], &segment);
        let mut agent = Agent::new();
        agent.set_watermark(1, Measure::Free);
        guest.advance(TimeMs(10_000), &segment, &mut NoPool);
        agent.report(&guest, Cause::Rest);
        assert!(guest.free_bytes() < 100 << 20 && guest.available_bytes() > 200 << 20);
        assert_eq!(agent.threshold_due(&guest, &segment), None);
    }
}
