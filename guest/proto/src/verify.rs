//! Verified messages, in which every value is within its bound.
//!
//! The bounds follow from hardware limits, and do not check plausibility. A value within them may
//! still be false, but no sum or product of a few such values overflows. The owner of the
//! connection's state checks values that depend on earlier messages (order, clock).

use crate::kernel_memory::{DENTRY_BYTES, LEAST_INODE_BYTES};
use crate::wire::{
    Blocks, Cause, Counters, KernelUse, Memory, NodeIdle, RawAgentMessage, RawHello, RawReport,
    Stall, Zone,
};
use crate::{Bound, LARGEST_BLOCK_BYTES, PROTOCOL_VERSION, Refusal};

/// 64 TiB: the physical memory that Linux on x86-64 supports with four levels of page tables.
const MAX_MEMORY_BYTES: u64 = 1 << 46;
const MIN_MEMORY_BYTES: u64 = 1 << 20;
const MAX_SWAP_BYTES: u64 = 1 << 50;
const PAGE_BYTES_MIN: u64 = 4096;
const PAGE_BYTES_MAX: u64 = 65_536;
const MAX_ZONE_PAGES: u64 = MAX_MEMORY_BYTES / PAGE_BYTES_MIN;
/// Linux allows 1024 nodes at most (CONFIG_NODES_SHIFT 10).
const MAX_NODE: u64 = 1023;
const MAX_ZONES: usize = 256;
const MAX_BLOCK_NODES: usize = 64;
const MAX_IDLE_NODES: usize = 64;
const MAX_TEXT_BYTES: usize = 128;
/// A hundred years in milliseconds.
const MAX_MONOTONIC_MS: u64 = 100 * 366 * 86_400_000;
/// Upper bound of sequence numbers. A sender of 20 reports per second would need longer than
/// MAX_MONOTONIC_MS to reach it.
const MAX_SEQ: u64 = 1 << 53;
const MAX_COUNT: u64 = 1 << 60;
/// Allowed difference between stall times and the clock. The kernel samples them at different
/// times, and adds up stall times only every 2 s.
const STALL_SLACK_US: u64 = 60_000_000;
/// Allowed excess of a zone's free pages. Linux adds per-CPU counts to free pages late
/// (mm/vmstat.c), so a zone may seem to have more free memory than its size.
const FREE_SLACK_PAGES: u64 = 65_536;
/// Maximum `high` watermark of a zone without memory. In zones that do not serve the kernel, `min`
/// is up to 128 pages, and `low` and `high` are above it.
const LEAST_MARK_PAGES: u64 = 1024;

fn check(field: &'static str, value: u64, is_within: bool, bound: Bound) -> Result<(), Refusal> {
    if is_within { Ok(()) } else { Err(Refusal::OutOfRange { field, value, bound }) }
}

fn at_most(field: &'static str, value: u64, bound: u64) -> Result<(), Refusal> {
    check(field, value, value <= bound, Bound::AtMost(bound))
}

fn at_least(field: &'static str, value: u64, bound: u64) -> Result<(), Refusal> {
    check(field, value, value >= bound, Bound::AtLeast(bound))
}

fn power_of_two(field: &'static str, value: u64, low: u64, high: u64) -> Result<(), Refusal> {
    let is_within = value.is_power_of_two() && (low..=high).contains(&value);
    check(field, value, is_within, Bound::PowerOfTwo(low, high))
}

/// Checks that each given field of a struct is at most another field, or at most a number.
macro_rules! at_most {
    ($of:ident: $($field:ident),+ <= .$other:ident) => {
        $(check(
            stringify!($field),
            $of.$field,
            $of.$field <= $of.$other,
            Bound::AtMostField(stringify!($other), $of.$other),
        )?;)+
    };
    ($of:ident: $($field:ident),+ <= $bound:expr) => {
        $(at_most(stringify!($field), u64::from($of.$field), $bound)?;)+
    };
}

fn version(theirs: u32) -> Result<(), Refusal> {
    if theirs != PROTOCOL_VERSION {
        return Err(Refusal::WrongVersion { theirs: theirs.into(), ours: PROTOCOL_VERSION });
    }
    Ok(())
}

/// Message from the agent in which every value is within its bound.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(
    clippy::large_enum_variant,
    reason = "there is one at a time, and nearly every one is a report"
)]
pub enum AgentMessage {
    /// First message of a connection.
    Hello(Hello),
    /// State of the guest's memory.
    Report(Report),
}

impl TryFrom<RawAgentMessage> for AgentMessage {
    type Error = Refusal;

    fn try_from(raw: RawAgentMessage) -> Result<Self, Refusal> {
        Ok(match raw {
            RawAgentMessage::Hello(raw) => AgentMessage::Hello(raw.try_into()?),
            RawAgentMessage::Report(raw) => AgentMessage::Report(raw.try_into()?),
        })
    }
}

/// Identity of the sender. Its strings are short and printable, so they are safe in logs and metric
/// labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello(RawHello);

impl Hello {
    /// Version of the agent.
    pub fn agent_version(&self) -> &str {
        &self.0.agent_version
    }

    /// Release name of the guest's kernel.
    pub fn kernel_release(&self) -> &str {
        &self.0.kernel_release
    }

    /// Build description of the guest's kernel. The build description may be empty and may contain
    /// spaces.
    pub fn kernel_version(&self) -> &str {
        &self.0.kernel_version
    }

    /// Preemption model of the guest's kernel. See [`RawHello::preemption`].
    pub fn preemption(&self) -> &str {
        &self.0.preemption
    }

    /// Page size of the guest.
    pub fn page_size_bytes(&self) -> u64 {
        self.0.page_size_bytes
    }
}

impl TryFrom<RawHello> for Hello {
    type Error = Refusal;

    fn try_from(raw: RawHello) -> Result<Self, Refusal> {
        version(raw.version)?;
        // Only this field may contain spaces.
        const LINE: &str = "kernel_version";
        let texts = [
            ("agent_version", &raw.agent_version),
            ("kernel_release", &raw.kernel_release),
            (LINE, &raw.kernel_version),
            ("preemption", &raw.preemption),
        ];
        for (field, text) in texts {
            at_most(field, text.len() as u64, MAX_TEXT_BYTES as u64)?;
            let is_allowed = |byte: u8| byte.is_ascii_graphic() || byte == b' ' && field == LINE;
            if !text.bytes().all(is_allowed) {
                return Err(Refusal::WrongShape {
                    reason: format!("{field} has unprintable characters"),
                });
            }
        }
        power_of_two("page_size_bytes", raw.page_size_bytes, PAGE_BYTES_MIN, PAGE_BYTES_MAX)?;
        Ok(Hello(raw))
    }
}

/// State of the guest's memory at one point in time, with every value within its bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report(RawReport);

impl Report {
    /// Unverified form of the report, for recording.
    pub fn as_raw(&self) -> &RawReport {
        &self.0
    }

    /// Checks sums over all zones (managed pages, free pages, watermarks) and the total memory
    /// against a machine with `most_bytes` of memory.
    ///
    /// Checks of single zones use only bounds that hold for any machine. Without this check, each
    /// of several zones could be as large as the machine.
    pub fn check_within(&self, most_bytes: u64) -> Result<(), Refusal> {
        at_most("total_bytes", self.0.memory.total_bytes, most_bytes)?;
        let most_pages = most_bytes / PAGE_BYTES_MIN;
        // Even a zone without memory has a small watermark (mm/page_alloc.c).
        let least_marks = self.0.zones.len() as u64 * LEAST_MARK_PAGES;
        // The sums do not overflow, because there are at most 256 zones, each far below the bound
        // of its pages.
        let sum = |pages: fn(&Zone) -> u64| self.0.zones.iter().map(pages).sum();
        at_most("sum of managed_pages", sum(|zone| zone.managed_pages), most_pages)?;
        at_most("sum of free_pages", sum(|zone| zone.free_pages), most_pages + FREE_SLACK_PAGES)?;
        at_most("sum of high_pages", sum(|zone| zone.high_pages), most_pages + least_marks)
    }

    /// Number that increases with every report on a connection.
    pub fn seq(&self) -> u64 {
        self.0.seq
    }

    /// Value of the guest's CLOCK_MONOTONIC.
    pub fn monotonic_ms(&self) -> u64 {
        self.0.monotonic_ms
    }

    /// Reason for sending the report.
    pub fn cause(&self) -> Cause {
        self.0.cause
    }

    /// Sizes from /proc/meminfo. Free and available memory are at most the total.
    pub fn memory(&self) -> &Memory {
        &self.0.memory
    }

    /// Memory that the kernel holds for itself. The sum is at most the total memory.
    pub fn kernel(&self) -> Option<&KernelUse> {
        self.0.kernel.as_ref()
    }

    /// Stall times.
    pub fn stall(&self) -> &Stall {
        &self.0.stall
    }

    /// Zones, with min <= low <= high in each.
    pub fn zones(&self) -> &[Zone] {
        &self.0.zones
    }

    /// Event counters.
    pub fn counters(&self) -> &Counters {
        &self.0.counters
    }

    /// Memory blocks. In each node, movable_online <= online.
    pub fn blocks(&self) -> &Blocks {
        &self.0.blocks
    }

    /// Idle memory, with at most one entry per node, in ascending order. Each node has zones, and
    /// its zones contain at least as much memory as is idle.
    pub fn idle(&self) -> &[NodeIdle] {
        &self.0.idle
    }
}

/// Allows senders to reuse a report's memory.
impl From<Report> for RawReport {
    fn from(report: Report) -> RawReport {
        report.0
    }
}

impl TryFrom<RawReport> for Report {
    type Error = Refusal;

    fn try_from(raw: RawReport) -> Result<Self, Refusal> {
        version(raw.version)?;
        at_most!(raw: seq <= MAX_SEQ);
        at_most!(raw: monotonic_ms <= MAX_MONOTONIC_MS);
        check_memory(&raw.memory)?;
        if let Some(kernel) = &raw.kernel {
            check_kernel(kernel, raw.memory.total_bytes)?;
        }
        check_stall(&raw.stall, raw.monotonic_ms)?;
        at_least("zones", raw.zones.len() as u64, 1)?;
        at_most("zones", raw.zones.len() as u64, MAX_ZONES as u64)?;
        raw.zones.iter().try_for_each(check_zone)?;
        check_counters(&raw.counters)?;
        check_blocks(&raw.blocks)?;
        check_idle(&raw)?;
        Ok(Report(raw))
    }
}

fn check_memory(memory: &Memory) -> Result<(), Refusal> {
    at_least("total_bytes", memory.total_bytes, MIN_MEMORY_BYTES)?;
    at_most!(memory: total_bytes <= MAX_MEMORY_BYTES);
    at_most!(memory: free_bytes, available_bytes, anon_bytes, cached_bytes <= .total_bytes);
    at_most!(memory: swap_total_bytes <= MAX_SWAP_BYTES);
    at_most!(memory: swap_free_bytes <= .swap_total_bytes);
    Ok(())
}

fn check_kernel(kernel: &KernelUse, total_bytes: u64) -> Result<(), Refusal> {
    // Linux counts these values at different times and per CPU.
    let bound = total_bytes.saturating_add(FREE_SLACK_PAGES * PAGE_BYTES_MIN);
    at_most!(kernel: slab_unreclaimable_bytes, slab_reclaimable_bytes <= bound);
    at_most!(kernel: page_table_bytes, stack_bytes <= bound);
    at_most("sum of kernel", kernel.total_bytes(), bound)?;
    at_most("unused_dentries", kernel.unused_dentries.unwrap_or(0), bound / DENTRY_BYTES)?;
    at_most("unused_inodes", kernel.unused_inodes.unwrap_or(0), bound / LEAST_INODE_BYTES)
}

fn check_stall(stall: &Stall, monotonic_ms: u64) -> Result<(), Refusal> {
    // A task cannot have waited longer than the guest has run.
    let bound_us = monotonic_ms.saturating_mul(1000).saturating_add(STALL_SLACK_US);
    at_most!(stall: some_us, full_us <= bound_us);
    at_most!(stall: some_avg10_basis_points, full_avg10_basis_points <= 10_000);
    Ok(())
}

fn check_zone(zone: &Zone) -> Result<(), Refusal> {
    at_most!(zone: node <= MAX_NODE);
    at_most!(zone: managed_pages <= MAX_ZONE_PAGES);
    let free_bound = zone.managed_pages.saturating_add(FREE_SLACK_PAGES);
    at_most!(zone: free_pages <= free_bound);
    at_most!(zone: high_pages <= MAX_ZONE_PAGES);
    at_most!(zone: low_pages <= .high_pages);
    at_most!(zone: min_pages <= .low_pages);
    let largest_bound = free_bound / (LARGEST_BLOCK_BYTES / PAGE_BYTES_MIN);
    at_most("largest_free_blocks", zone.largest_free_blocks.unwrap_or(0), largest_bound)?;
    at_most("user_pages", zone.user_pages.unwrap_or(0), free_bound)?;
    at_most("protected_pages", zone.protected_pages.unwrap_or(0), zone.managed_pages)
}

fn check_counters(counters: &Counters) -> Result<(), Refusal> {
    at_most!(counters: pswpin, pswpout, pgmajfault <= MAX_COUNT);
    at_most!(counters: workingset_refault_anon, workingset_refault_file <= MAX_COUNT);
    at_most!(counters: pgscan_kswapd, pgscan_direct, pgsteal_kswapd, pgsteal_direct <= MAX_COUNT);
    at_most!(counters: allocstall, numa_miss, numa_other, oom_kill <= MAX_COUNT);
    at_most!(counters: allocstall_kernel <= .allocstall);
    Ok(())
}

fn check_blocks(blocks: &Blocks) -> Result<(), Refusal> {
    at_most("blocks.nodes", blocks.nodes.len() as u64, MAX_BLOCK_NODES as u64)?;
    if blocks.block_bytes != 0 {
        power_of_two("block_bytes", blocks.block_bytes, 1 << 20, 1 << 36)?;
    }
    for node in &blocks.nodes {
        at_most!(node: node <= MAX_NODE);
        at_most!(node: online_bytes, offline_bytes <= MAX_MEMORY_BYTES);
        at_most!(node: movable_online_bytes <= .online_bytes);
    }
    Ok(())
}

fn check_idle(raw: &RawReport) -> Result<(), Refusal> {
    at_most("idle", raw.idle.len() as u64, MAX_IDLE_NODES as u64)?;
    let mut next_node = 0;
    for idle in &raw.idle {
        at_least("idle.node", idle.node.into(), next_node)?;
        next_node = u64::from(idle.node) + 1;
        let zones = || raw.zones.iter().filter(|zone| zone.node == idle.node);
        let has_zones = zones().next().is_some();
        check("idle.node", idle.node.into(), has_zones, Bound::AmongField("zones"))?;
        // The sum and the product cannot overflow, because both factors have been checked.
        let managed_pages: u64 = zones().map(|zone| zone.managed_pages).sum();
        at_most!(idle: idle_bytes <= (managed_pages + FREE_SLACK_PAGES) * PAGE_BYTES_MIN);
        at_least("span_ms", idle.span_ms, 1)?;
        let bound = Bound::AtMostField("monotonic_ms", raw.monotonic_ms);
        check("span_ms", idle.span_ms, idle.span_ms <= raw.monotonic_ms, bound)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::NodeBlocks;

    fn raw_report() -> RawReport {
        RawReport {
            version: PROTOCOL_VERSION,
            seq: 1,
            monotonic_ms: 1000,
            memory: Memory {
                total_bytes: 512 << 20,
                free_bytes: 100 << 20,
                available_bytes: 200 << 20,
                swap_total_bytes: 1 << 30,
                swap_free_bytes: 1 << 30,
                ..Memory::default()
            },
            zones: vec![Zone {
                free_pages: 25_600,
                min_pages: 500,
                low_pages: 625,
                high_pages: 750,
                managed_pages: 131_072,
                largest_free_blocks: Some(20),
                ..Zone::default()
            }],
            idle: vec![NodeIdle { node: 0, idle_bytes: 50 << 20, span_ms: 900 }],
            blocks: Blocks {
                block_bytes: 128 << 20,
                nodes: vec![NodeBlocks { online_bytes: 512 << 20, ..NodeBlocks::default() }],
                ..Blocks::default()
            },
            ..RawReport::default()
        }
    }

    fn raw_hello() -> RawHello {
        RawHello {
            version: PROTOCOL_VERSION,
            agent_version: "0.1.0".into(),
            kernel_release: "6.12.117+deb12-cloud-amd64".into(),
            kernel_version: "#1 SMP PREEMPT_DYNAMIC Debian 6.12.117-1~deb12u1 (2026-11-14)".into(),
            preemption: "dynamic".into(),
            page_size_bytes: 4096,
        }
    }

    /// Returns the field named by the error after `spoil` has changed a valid report.
    fn refused_field(spoil: impl FnOnce(&mut RawReport)) -> &'static str {
        let mut raw = raw_report();
        spoil(&mut raw);
        match Report::try_from(raw) {
            Err(Refusal::OutOfRange { field, .. }) => field,
            other => panic!("expected out of range, got {other:?}"),
        }
    }

    #[test]
    fn valid_report_is_unchanged() {
        let report = Report::try_from(raw_report()).expect("sound");
        assert_eq!(report.0, raw_report());
    }

    #[test]
    fn every_impossible_value_is_named() {
        type Spoil = fn(&mut RawReport);
        let cases: [(&str, Spoil); 33] = [
            ("total_bytes", |r| r.memory.total_bytes = 0),
            ("total_bytes", |r| r.memory.total_bytes = u64::MAX),
            ("free_bytes", |r| r.memory.free_bytes = (512 << 20) + 1),
            ("available_bytes", |r| r.memory.available_bytes = u64::MAX),
            ("swap_free_bytes", |r| r.memory.swap_free_bytes = u64::MAX),
            ("swap_total_bytes", |r| r.memory.swap_total_bytes = u64::MAX),
            ("cached_bytes", |r| r.memory.cached_bytes = u64::MAX),
            ("anon_bytes", |r| r.memory.anon_bytes = u64::MAX),
            ("seq", |r| r.seq = u64::MAX),
            ("monotonic_ms", |r| r.monotonic_ms = u64::MAX),
            ("some_us", |r| r.stall.some_us = 62_000_000),
            ("full_avg10_basis_points", |r| r.stall.full_avg10_basis_points = 10_001),
            ("zones", |r| r.zones.clear()),
            ("zones", |r| r.zones = vec![r.zones[0]; 257]),
            ("node", |r| r.zones[0].node = 1024),
            ("free_pages", |r| r.zones[0].free_pages = u64::MAX),
            ("high_pages", |r| r.zones[0].high_pages = u64::MAX),
            ("low_pages", |r| r.zones[0].low_pages = 751),
            ("min_pages", |r| r.zones[0].min_pages = 626),
            ("managed_pages", |r| r.zones[0].managed_pages = u64::MAX),
            // One block more than the zone can have, even with the allowed tolerance.
            ("largest_free_blocks", |r| r.zones[0].largest_free_blocks = Some(193)),
            ("user_pages", |r| r.zones[0].user_pages = Some(u64::MAX)),
            ("protected_pages", |r| r.zones[0].protected_pages = Some(u64::MAX)),
            ("pswpout", |r| r.counters.pswpout = u64::MAX),
            ("allocstall_kernel", |r| r.counters.allocstall_kernel = 1),
            ("numa_miss", |r| r.counters.numa_miss = u64::MAX),
            ("numa_other", |r| r.counters.numa_other = u64::MAX),
            ("block_bytes", |r| r.blocks.block_bytes = 3),
            ("offline_bytes", |r| r.blocks.nodes[0].offline_bytes = u64::MAX),
            ("movable_online_bytes", |r| r.blocks.nodes[0].movable_online_bytes = 1 << 40),
            ("blocks.nodes", |r| r.blocks.nodes = vec![r.blocks.nodes[0]; 65]),
            ("span_ms", |r| r.idle[0].span_ms = 0),
            ("span_ms", |r| r.idle[0].span_ms = 1001),
        ];
        for (field, spoil) in cases {
            assert_eq!(refused_field(spoil), field);
        }
    }

    #[test]
    fn idle_memory_has_a_unique_existing_node_and_fits_into_it() {
        let idle = |r: &mut RawReport, node, idle_bytes, span_ms| {
            r.idle.push(NodeIdle { node, idle_bytes, span_ms });
        };
        assert_eq!(refused_field(|r| idle(r, 0, 1, 1)), "idle.node", "twice");
        assert_eq!(refused_field(|r| idle(r, 1, 1, 1)), "idle.node", "it has no zone");
        assert_eq!(refused_field(|r| idle(r, u32::MAX, 1, 1)), "idle.node");
        assert_eq!(refused_field(|r| r.idle = vec![r.idle[0]; 65]), "idle");
        let bound_bytes = (131_072 + FREE_SLACK_PAGES) * 4096;
        assert_eq!(refused_field(|r| r.idle[0].idle_bytes = bound_bytes + 1), "idle_bytes");
        assert_eq!(refused_field(|r| r.idle[0].idle_bytes = u64::MAX), "idle_bytes");
        let mut raw = raw_report();
        raw.zones.push(Zone { node: 2, ..raw.zones[0] });
        raw.idle = vec![
            NodeIdle { node: 0, idle_bytes: bound_bytes, span_ms: 1000 },
            NodeIdle { node: 2, idle_bytes: 0, span_ms: 1 },
        ];
        assert_eq!(Report::try_from(raw.clone()).expect("each at its bound").idle(), raw.idle);
        raw.idle.reverse();
        let refusal = Report::try_from(raw).expect_err("out of order");
        assert_eq!(refusal.to_string(), "idle.node is 0, must be at least 3");
        let mut raw = raw_report();
        raw.idle[0].node = 7;
        let refusal = Report::try_from(raw).expect_err("no such node");
        assert_eq!(refusal.to_string(), "idle.node is 7, must be one of those in zones");
    }

    #[test]
    fn kernel_memory_is_at_most_the_total() {
        let bound = (512 << 20) + FREE_SLACK_PAGES * 4096;
        let kernel = |edit: fn(&mut KernelUse, u64), bytes| {
            let mut kernel = KernelUse::default();
            edit(&mut kernel, bytes);
            Report::try_from(RawReport { kernel: Some(kernel), ..raw_report() })
        };
        let fields: [fn(&mut KernelUse, u64); 4] = [
            |kernel, bytes| kernel.slab_unreclaimable_bytes = bytes,
            |kernel, bytes| kernel.slab_reclaimable_bytes = bytes,
            |kernel, bytes| kernel.page_table_bytes = bytes,
            |kernel, bytes| kernel.stack_bytes = bytes,
        ];
        for field in fields {
            assert!(kernel(field, bound).is_ok());
            assert!(kernel(field, bound + 1).is_err() && kernel(field, u64::MAX).is_err());
        }
        let both = |kernel: &mut KernelUse, bytes| {
            (kernel.stack_bytes, kernel.page_table_bytes) = (bytes, 1);
        };
        let refusal = kernel(both, bound).expect_err("more together");
        assert!(refusal.to_string().starts_with("sum of kernel is "), "{refusal}");
        let caches: [fn(&mut KernelUse, u64); 2] = [
            |kernel, count| kernel.unused_dentries = Some(count),
            |kernel, count| kernel.unused_inodes = Some(count),
        ];
        for (field, bytes) in caches.into_iter().zip([DENTRY_BYTES, LEAST_INODE_BYTES]) {
            let most = bound / bytes;
            assert!(kernel(field, most).is_ok());
            assert!(kernel(field, most + 1).is_err() && kernel(field, u64::MAX).is_err());
        }
    }

    /// A single zone may be as large as the largest possible machine.
    #[test]
    fn sum_of_zones_is_at_most_the_memory_of_the_vm() {
        const MOST_PAGES: u64 = 1 << 20;
        let check = |[free_pages, high_pages, managed_pages]: [u64; 3]| {
            let mut raw = raw_report();
            let (min_pages, low_pages) = (0, 0);
            let zone = Zone {
                free_pages,
                min_pages,
                low_pages,
                high_pages,
                managed_pages,
                ..raw.zones[0]
            };
            raw.zones = vec![zone, Zone { node: zone.node + 1, ..zone }];
            raw.idle.clear();
            let report = Report::try_from(raw).expect("sound by itself");
            report.check_within(MOST_PAGES * PAGE_BYTES_MIN).map_err(|refusal| refusal.to_string())
        };
        // Linux adds up its counts late, and a zone without memory has watermarks.
        let half = MOST_PAGES / 2;
        let most = [half + FREE_SLACK_PAGES / 2, half + LEAST_MARK_PAGES, half];
        assert_eq!(check(most), Ok(()));
        for (index, field) in ["free_pages", "high_pages", "managed_pages"].iter().enumerate() {
            let mut beyond = most;
            beyond[index] += 1;
            let error = check(beyond).expect_err(field);
            assert!(error.starts_with(&format!("sum of {field} is ")), "{error}");
        }
    }

    #[test]
    fn largest_blocks_may_be_at_the_bound_or_unknown() {
        for blocks in [None, Some(0), Some((131_072 + FREE_SLACK_PAGES) / 1024)] {
            let mut raw = raw_report();
            raw.zones[0].largest_free_blocks = blocks;
            assert!(Report::try_from(raw).is_ok(), "{blocks:?}");
        }
    }

    #[test]
    fn refusal_contains_the_value_and_the_bound() {
        let mut raw = raw_report();
        raw.zones[0].low_pages = 751;
        let refusal = Report::try_from(raw).expect_err("low above high");
        assert_eq!(
            refusal.to_string(),
            "low_pages is 751, must be at most high_pages, which is 750"
        );
        assert_eq!(refusal.label(), "out_of_range");
    }

    #[test]
    fn a_hello_is_short_and_printable() {
        assert!(Hello::try_from(raw_hello()).is_ok());
        for (wrong, label) in [
            (RawHello { kernel_release: "6".repeat(129), ..raw_hello() }, "out_of_range"),
            (RawHello { agent_version: "0.1\nvm=\"x\"".into(), ..raw_hello() }, "wrong_shape"),
            (RawHello { kernel_version: "#1 SMP\n".into(), ..raw_hello() }, "wrong_shape"),
            (RawHello { kernel_version: "#1 \u{7f}".into(), ..raw_hello() }, "wrong_shape"),
            (RawHello { kernel_version: "#1 ünicode".into(), ..raw_hello() }, "wrong_shape"),
            (RawHello { page_size_bytes: 4097, ..raw_hello() }, "out_of_range"),
            (RawHello { version: 2, ..raw_hello() }, "wrong_version"),
        ] {
            assert_eq!(
                Hello::try_from(wrong.clone()).expect_err(label).label(),
                label,
                "{wrong:?}"
            );
        }
    }

    #[test]
    fn hello_of_an_older_agent_is_accepted() {
        let line = br#"{"type":"hello","version":1,"agent_version":"0.1.0","kernel_release":"6.1.0-56-cloud-amd64","preemption":"dynamic","page_size_bytes":4096}"#;
        let hello = crate::decode_agent_message(line).and_then(AgentMessage::try_from);
        let Ok(AgentMessage::Hello(hello)) = hello else { panic!("{hello:?}") };
        assert_eq!((hello.kernel_release(), hello.kernel_version()), ("6.1.0-56-cloud-amd64", ""));
    }

    proptest! {
        #[test]
        fn no_line_panics(line in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = crate::decode_agent_message(&line);
            let _ = crate::decode_vmm_message(&line);
        }

        #[test]
        fn a_report_of_any_numbers_is_refused_or_inside_its_bounds(
            numbers in prop::array::uniform8(prop_oneof![any::<u64>(), 0u64..1 << 30]),
        ) {
            let mut raw = raw_report();
            raw.memory.total_bytes = numbers[0];
            raw.memory.free_bytes = numbers[1];
            raw.memory.available_bytes = numbers[2];
            raw.monotonic_ms = numbers[3];
            raw.stall.some_us = numbers[4];
            raw.zones[0].min_pages = numbers[5];
            raw.zones[0].low_pages = numbers[6];
            raw.zones[0].high_pages = numbers[7];
            if let Ok(report) = Report::try_from(raw) {
                let memory = report.memory();
                prop_assert!(memory.free_bytes <= memory.total_bytes && memory.total_bytes <= MAX_MEMORY_BYTES);
                prop_assert!(report.zones().iter().all(|z| z.min_pages <= z.low_pages && z.low_pages <= z.high_pages));
            }
        }

        #[test]
        fn idle_memory_of_any_numbers_is_refused_or_inside_its_bounds(
            idle in prop::collection::vec((0u32..4, prop_oneof![any::<u64>(), 0u64..2 << 30], 0u64..1200), 0..4),
            managed_pages in prop::collection::vec(0u64..300_000, 1..4),
            blocks in prop_oneof![any::<u64>(), 0u64..400],
        ) {
            let mut raw = raw_report();
            let zone = Zone { free_pages: 0, largest_free_blocks: Some(blocks), ..raw.zones[0] };
            raw.zones = (0..).zip(&managed_pages).map(|(node, &managed_pages)| Zone { node, managed_pages, ..zone }).collect();
            raw.idle = idle.into_iter().map(|(node, idle_bytes, span_ms)| NodeIdle { node, idle_bytes, span_ms }).collect();
            if let Ok(report) = Report::try_from(raw) {
                for idle in report.idle() {
                    let node_bytes = (managed_pages[idle.node as usize] + FREE_SLACK_PAGES) * 4096;
                    prop_assert!(idle.idle_bytes <= node_bytes && (1..=1000).contains(&idle.span_ms));
                }
                prop_assert!(report.idle().is_sorted_by(|one, next| one.node < next.node));
                prop_assert!(report.zones().iter().all(|z| z.largest_free_blocks <= Some(z.managed_pages / 1024 + 64)));
            }
        }
    }
}
