//! Converts blocks of plugged DRAM to kernel memory when the kernel runs short.
//!
//! Plugged memory is online movable, so it holds neither slabs nor page tables nor page
//! descriptors. A guest that boots with little DRAM and grows by much runs out of kernel memory
//! while gigabytes are free. So the agent takes a block offline and onlines it again with
//! `online_kernel`. Linux first migrates the pages of the block to other blocks
//! (mm/memory_hotplug.c, offline_pages). The block stays with the kernel until the next boot.
//!
//! A separate thread converts blocks, because the write to a block's state waits for the migration,
//! which may take long.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use foreshore_proto::{
    Blocks, KernelGrowth, KernelMemory, RawReport, Zone, ZoneGrowth, kernel_reserve_bytes,
};

use crate::blocks::{STACK_BYTES, numbered};
use crate::sys;

/// Resource name of memory that virtio_mem added (drivers/virtio/virtio_mem.c, virtio_mem_probe).
const VIRTIO_MEM: &str = "System RAM (virtio_mem)";
/// Part of the usual reserve below which the kernel is short. The whole reserve would be too high a threshold, because
/// programs that fill DRAM before any memory is plugged leave about that much to the kernel.
const SHORT_PART: u64 = 2;
/// Time that a conversion takes. The growth of kernel memory in that time is added to the
/// threshold, up to a part of DRAM.
const TURN_MS: u64 = 500;
const MAX_GROWTH_PART: u64 = 8;
/// Time limit of a migration, because Linux itself would try forever.
const OFFLINE_LIMIT_MS: u64 = 10_000;
/// Pause after a success, so that reports show its effect. After failures the pause doubles from
/// the second value to the third.
const PAUSE_MS: u64 = 500;
const FIRST_BACK_OFF_MS: u64 = 5_000;
const MAX_BACK_OFF_MS: u64 = 300_000;

/// Growth of kernel memory: of the parts that Linux counts, and of all of it.
#[derive(Clone, Debug, Default)]
struct Growth {
    counted: KernelGrowth,
    of_zones: ZoneGrowth,
}

impl Growth {
    fn update(&mut self, report: &RawReport, other_user_pages: u64, now_ms: u64) {
        let kernel = report.kernel.as_ref();
        self.counted.update(kernel, report.counters.allocstall_kernel, now_ms);
        self.of_zones.update(&report.zones, other_user_pages, kernel, now_ms);
    }
}

/// Returns the node that has to give a block to the kernel. `None` if the kernel has enough memory
/// that is free or can be reclaimed, or if no node can give a block.
///
/// Other movable memory must have room for the pages of the block. The node keeps movable memory of
/// half the reserve, because `vm.lowmem_reserve_ratio` reserves nothing in a node without movable
/// memory. Programs would then fill the kernel's new memory.
fn short_node(zones: &[Zone], blocks: &Blocks, growth: &Growth, except: Option<u32>) -> Option<u32> {
    let kernel = KernelMemory::of(zones.iter());
    let least_bytes = kernel_reserve_bytes(kernel.dram_bytes, 0) / SHORT_PART;
    let growth_bytes = growth.counted.bytes_within(TURN_MS).max(growth.of_zones.bytes_within(TURN_MS));
    let growth_bytes = growth_bytes.min(kernel.dram_bytes / MAX_GROWTH_PART);
    let short_bytes = least_bytes.saturating_add(growth_bytes);
    // Caches count as free, because Linux drops them when the memory is needed, and a converted
    // block would stay with the kernel.
    let room_bytes = kernel.room_bytes.saturating_add(growth.counted.caches_bytes());
    if blocks.block_bytes == 0 || room_bytes >= short_bytes || kernel.movable_free_bytes < blocks.block_bytes
    {
        return None;
    }
    let of_node = |node: u32| KernelMemory::of(zones.iter().filter(move |zone| zone.node == node));
    let keeps_enough = |node: u32| {
        let memory = of_node(node);
        memory.managed_bytes > 0 && memory.movable_bytes >= blocks.block_bytes.saturating_add(least_bytes)
    };
    let nodes = blocks.nodes.iter().filter(|node| node.movable_online_bytes >= blocks.block_bytes);
    nodes
        .map(|node| node.node)
        .filter(|node| Some(*node) != except && keeps_enough(*node))
        .min_by_key(|node| of_node(*node).room_bytes)
}

/// No other block is converted before this time.
#[derive(Debug, Default)]
struct Pace {
    not_before_ms: u64,
    back_off_ms: u64,
}

impl Pace {
    fn succeeded(&mut self, now_ms: u64) {
        *self = Pace { not_before_ms: now_ms.saturating_add(PAUSE_MS), back_off_ms: 0 };
    }

    fn failed(&mut self, now_ms: u64) {
        self.back_off_ms = (self.back_off_ms * 2).clamp(FIRST_BACK_OFF_MS, MAX_BACK_OFF_MS);
        self.not_before_ms = now_ms.saturating_add(self.back_off_ms);
    }
}

/// Converts blocks in a thread of its own.
#[derive(Debug)]
pub struct KernelBlocks {
    requests: SyncSender<u32>,
    results: Receiver<Result<u32, (u32, io::Error)>>,
    is_busy: bool,
    pace: Pace,
    growth: Growth,
    exhausted: Option<Exhausted>,
}

/// Node without a block to convert. Its movable blocks are boot memory.
#[derive(Debug)]
struct Exhausted {
    node: u32,
    /// Blocks at that time. If the node's blocks change, it is tried again.
    blocks: Blocks,
}

impl KernelBlocks {
    /// Starts the thread. `memory_root` is /sys/devices/system/memory outside of tests, `iomem` is /proc/iomem.
    pub fn start(memory_root: &Path, iomem: &Path) -> io::Result<Self> {
        let mut turner =
            Turner { memory_root: memory_root.to_owned(), iomem: iomem.to_owned(), unmoved: None, turn };
        let (requests, inbox) = sync_channel(1);
        let (outbox, results) = sync_channel(1);
        let work = move || {
            while let Ok(node) = inbox.recv() {
                let result = turner.turn_one(node).map_err(|error| (node, error));
                if outbox.send(result).is_err() {
                    break;
                }
            }
        };
        thread::Builder::new().name("kernel-blocks".into()).stack_size(STACK_BYTES).spawn(work)?;
        Ok(KernelBlocks {
            requests,
            results,
            is_busy: false,
            pace: Pace::default(),
            growth: Growth::default(),
            exhausted: None,
        })
    }

    /// Requests a block for the kernel if the kernel is short of memory. Returns true if a block
    /// was converted since the last call. Does not block. `other_user_pages` is the result of
    /// [`parse::zoneinfo`](crate::parse::zoneinfo).
    pub fn poll(&mut self, report: &RawReport, other_user_pages: u64, now_ms: u64) -> bool {
        self.growth.update(report, other_user_pages, now_ms);
        let result = self.results.try_recv().ok();
        self.is_busy &= result.is_none();
        match &result {
            Some(Ok(number)) => {
                eprintln!("foreshore-agent: Memory block {number} serves the kernel until the next boot");
                self.pace.succeeded(now_ms);
            }
            Some(Err((node, error))) => {
                eprintln!("foreshore-agent: Cannot give a memory block to the kernel: {error}");
                self.pace.failed(now_ms);
                if error.kind() == io::ErrorKind::NotFound {
                    self.exhausted = Some(Exhausted { node: *node, blocks: report.blocks.clone() });
                }
            }
            None => {}
        }
        if self.exhausted.as_ref().is_some_and(|exhausted| exhausted.blocks != report.blocks) {
            self.exhausted = None;
        }
        let except = self.exhausted.as_ref().map(|exhausted| exhausted.node);
        if !self.is_busy
            && now_ms >= self.pace.not_before_ms
            && let Some(node) = short_node(&report.zones, &report.blocks, &self.growth, except)
        {
            self.is_busy = self.requests.try_send(node).is_ok();
        }
        matches!(result, Some(Ok(_)))
    }
}

/// Part of [`KernelBlocks`] that runs in the thread.
#[derive(Debug)]
struct Turner {
    memory_root: PathBuf,
    iomem: PathBuf,
    /// Block whose pages did not move within the limit. The next attempt begins after it.
    unmoved: Option<u32>,
    /// Converts the block that has this `state` file.
    turn: fn(&Path) -> io::Result<()>,
}

impl Turner {
    /// Converts one block of `node` and returns its number. Blocks of boot memory are skipped,
    /// because they have pages that never move.
    fn turn_one(&mut self, node: u32) -> io::Result<u32> {
        let block_bytes = fs::read_to_string(self.memory_root.join("block_size_bytes"))?;
        let block_bytes =
            u64::from_str_radix(block_bytes.trim(), 16).map_err(|_| io::ErrorKind::InvalidData)?.max(1);
        let ranges = virtio_mem_ranges(&fs::read_to_string(&self.iomem)?);
        let mut blocks: Vec<(u32, PathBuf)> = fs::read_dir(&self.memory_root)?
            .flatten()
            .filter_map(|entry| Some((numbered(&entry.file_name(), "memory")?, entry.path())))
            .filter(|(number, path)| {
                let start = u64::from(*number).saturating_mul(block_bytes);
                let end = start.saturating_add(block_bytes);
                let is_plugged = ranges.iter().any(|range| range.start <= start && end <= range.end);
                is_plugged && path.join(format!("node{node}")).exists() && is_movable(path)
            })
            .collect();
        // Begins with the lowest block, because virtio_mem unplugs the highest blocks first.
        blocks.sort_unstable();
        let after_unmoved = blocks.partition_point(|(number, _)| Some(*number) <= self.unmoved);
        blocks.rotate_left(after_unmoved);
        if blocks.is_empty() {
            return Err(io::Error::new(io::ErrorKind::NotFound, format!("node {node} has no movable block")));
        }
        let mut last = io::Error::other(format!("the blocks of node {node} are being unplugged"));
        for (number, path) in blocks {
            match (self.turn)(&path.join("state")) {
                Ok(()) => return Ok(number),
                // Linux holds the lock of all hotplug during the wait (drivers/base/core.c, lock_device_hotplug_sysfs), so nothing
                // is plugged. One such wait per attempt is enough.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                    self.unmoved = Some(number);
                    return Err(error);
                }
                // virtio_mem has unplugged the block meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                // This block has pinned pages; another block may have none.
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

fn is_movable(block: &Path) -> bool {
    let state = fs::read_to_string(block.join("state")).unwrap_or_default();
    // Linux crashes when the zones of a block that is just being added are read (drivers/base/memory.c, valid_zones_show).
    state.trim() == "online" && {
        let zones = fs::read_to_string(block.join("valid_zones")).unwrap_or_default();
        zones.split_whitespace().next() == Some("Movable")
    }
}

fn turn(state: &Path) -> io::Result<()> {
    let mut file = fs::File::options().write(true).open(state)?;
    // A single call: `write_all` would repeat it after EINTR.
    sys::within_ms(OFFLINE_LIMIT_MS, || file.write(b"offline"))?;
    fs::write(state, "online_kernel").inspect_err(|_| {
        // If `online_kernel` fails, the block is onlined movable again.
        let _ = fs::write(state, "online_movable");
    })
}

/// Physical addresses of memory that virtio_mem added, from the text of /proc/iomem.
fn virtio_mem_ranges(iomem: &str) -> Vec<std::ops::Range<u64>> {
    let range = |line: &str| {
        let (range, _) = line.split_once(" : ").filter(|(_, name)| name.trim() == VIRTIO_MEM)?;
        let (start, last) = range.trim().split_once('-')?;
        let (start, last) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(last, 16).ok()?);
        Some(start..last.saturating_add(1))
    };
    let mut ranges: Vec<std::ops::Range<u64>> = Vec::new();
    for range in iomem.lines().filter_map(range) {
        match ranges.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => ranges.push(range),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use foreshore_proto::{KernelUse, NodeBlocks, ZoneKind};

    use super::*;

    const MIB: u64 = 1 << 20;
    const PAGE_BYTES: u64 = 4096;
    const BLOCK: u64 = 128 * MIB;

    fn zone(node: u32, kind: ZoneKind, managed_mib: u64, free_mib: u64) -> Zone {
        let pages = |mib: u64| mib * MIB / PAGE_BYTES;
        Zone { node, kind, managed_pages: pages(managed_mib), free_pages: pages(free_mib), ..Zone::default() }
    }

    /// 384 MiB of boot memory, 36 MiB of it movable, two plugged blocks of DRAM, and 512 MiB of PM.
    fn zones(kernel_free_mib: u64, pm_free_mib: u64) -> [Zone; 3] {
        [
            zone(0, ZoneKind::Dma32, 300, kernel_free_mib),
            zone(0, ZoneKind::Movable, 36 + 256, 0),
            zone(1, ZoneKind::Movable, 512, pm_free_mib),
        ]
    }

    fn blocks(movable_dram_blocks: u64) -> Blocks {
        let node = |node, online, movable| NodeBlocks {
            node,
            online_bytes: online * BLOCK,
            offline_bytes: 0,
            movable_online_bytes: movable * BLOCK,
        };
        let nodes = vec![node(0, 5, movable_dram_blocks), node(1, 4, 4)];
        Blocks { block_bytes: BLOCK, nodes, ..Blocks::default() }
    }

    /// The node of a kernel whose memory does not grow.
    fn short(zones: &[Zone], blocks: &Blocks) -> Option<u32> {
        short_node(zones, blocks, &Growth::default(), None)
    }

    #[test]
    fn a_kernel_that_grows_fast_is_short_sooner() {
        let mut growth = Growth::default();
        let holds = |mib: u64| KernelUse { page_table_bytes: mib * MIB, ..KernelUse::default() };
        growth.counted.update(Some(&holds(0)), 0, 0);
        growth.counted.update(Some(&holds(100)), 0, 1_000);
        // Half of a sixteenth of 592 MiB, and 50 MiB.
        assert_eq!(short_node(&zones(68, 300), &blocks(2), &growth, None), Some(0));
        assert_eq!(short_node(&zones(69, 300), &blocks(2), &growth, None), None);
        growth.counted.update(Some(&holds(10_000)), 0, 2_000);
        assert_eq!(short_node(&zones(93, 300), &blocks(2), &growth, None), None, "an eighth of DRAM at most");
    }

    /// 60 MiB/s in sockets. No kernel counter includes their data.
    #[test]
    fn memory_that_no_counter_has_makes_the_kernel_short_sooner() {
        let mut growth = Growth::default();
        for tenth in 0..=20 {
            let mut zones = zones(200 - 6 * tenth, 300);
            zones.iter_mut().for_each(|zone| zone.user_pages = Some(0));
            growth.of_zones.update(&zones, 0, Some(&KernelUse::default()), tenth * 100);
        }
        // Half of a sixteenth of 592 MiB, and 30 MiB.
        assert_eq!(short_node(&zones(48, 300), &blocks(2), &growth, None), Some(0));
        assert_eq!(short_node(&zones(49, 300), &blocks(2), &growth, None), None);
        assert_eq!(short_node(&zones(48, 300), &blocks(2), &Growth::default(), None), None);
    }

    /// A guest of 6.12 in which a program locks 200 MiB that it has.
    #[test]
    fn locked_memory_does_not_make_the_kernel_short_sooner() {
        let before = include_str!("../tests/data/6.12-filled/zoneinfo");
        let after = before
            .replace("nr_zone_active_anon 63763", "nr_zone_active_anon 12563")
            .replace("nr_zone_unevictable 511", "nr_zone_unevictable 51711");
        assert_ne!(before, after);
        let mut growth = Growth::default();
        let mut report = RawReport { kernel: Some(KernelUse::default()), ..RawReport::default() };
        for (text, at_ms) in [(before, 0), (&*after, 1_000)] {
            let locked = crate::parse::zoneinfo(text.as_bytes(), &mut report.zones).expect("parses");
            growth.update(&report, locked, at_ms);
        }
        assert_eq!(growth.of_zones.bytes_within(TURN_MS), 0);
        growth.update(&report, 511, 1_000);
        assert_eq!(growth.of_zones.bytes_within(1_000), 200 * MIB, "pages that no counter has");
    }

    /// Load that fills the kernel's zones with slabs.
    #[derive(Clone, Copy, Default)]
    struct Slabs {
        reclaimable_mib: u64,
        unreclaimable_mib: u64,
        unused_dentries: u64,
        allocstalls: u64,
    }

    /// Simulates one report per second while a load grows to `end`. Returns the node that has to
    /// give a block.
    fn node_after_load(end: Slabs) -> Option<u32> {
        const SECONDS: u64 = 20;
        let mut growth = Growth::default();
        let mut given = None;
        for second in 0..=SECONDS {
            let so_far = |all: u64| all * second / SECONDS;
            let kernel = KernelUse {
                slab_reclaimable_bytes: so_far(end.reclaimable_mib * MIB),
                slab_unreclaimable_bytes: 20 * MIB + so_far(end.unreclaimable_mib * MIB),
                unused_dentries: Some(so_far(end.unused_dentries)),
                unused_inodes: Some(0),
                ..KernelUse::default()
            };
            growth.counted.update(Some(&kernel), so_far(end.allocstalls), second * 1_000);
            // kswapd keeps the high watermark free.
            let free_mib = 280u64.saturating_sub(so_far(end.reclaimable_mib + end.unreclaimable_mib));
            let mut zones = zones(free_mib, 300);
            zones.iter_mut().for_each(|zone| zone.user_pages = Some(0));
            growth.of_zones.update(&zones, 0, Some(&kernel), second * 1_000);
            given = given.or(short_node(&zones, &blocks(2), &growth, None));
        }
        given
    }

    /// 2 million dentries. Linux drops those that do not fit.
    #[test]
    fn caches_of_a_walk_through_all_files_get_no_block() {
        const DENTRIES: u64 = 2_000_000;
        let walk =
            Slabs { reclaimable_mib: DENTRIES * 192 / MIB, unused_dentries: DENTRIES, ..Slabs::default() };
        assert_eq!(node_after_load(walk), None);
        let kept = Slabs { reclaimable_mib: 280, unused_dentries: 280 * MIB / 192, ..walk };
        assert_eq!(node_after_load(kept), None);
        let stalled = Slabs { allocstalls: 20, ..walk };
        assert_eq!(node_after_load(stalled), Some(0), "reclaim does not keep up");
    }

    /// 400,000 files of a tmpfs, whose inodes and dentries cannot be reclaimed; and 200,000 files
    /// of an ext4 whose page cache pins their inodes.
    #[test]
    fn slabs_that_cannot_be_reclaimed_get_a_block() {
        let [reclaimable_mib, unreclaimable_mib] = [192, 720].map(|bytes| 400_000 * bytes / MIB);
        let tmpfs = Slabs { reclaimable_mib, unreclaimable_mib, ..Slabs::default() };
        assert_eq!(node_after_load(tmpfs), Some(0));
        assert_eq!(node_after_load(Slabs { unreclaimable_mib: 270, ..Slabs::default() }), Some(0));
        let ext4 = Slabs { reclaimable_mib: 330, unreclaimable_mib: 30, ..Slabs::default() };
        assert_eq!(node_after_load(ext4), Some(0));
    }

    #[test]
    fn a_kernel_that_is_short_gets_a_block_of_its_node() {
        // Half of a sixteenth of 592 MiB.
        assert_eq!(short(&zones(18, 300), &blocks(2)), Some(0));
        assert_eq!(short(&zones(19, 300), &blocks(2)), None);
        assert_eq!(short(&zones(0, 127), &blocks(2)), None, "the pages of the block have nowhere to go");
        assert_eq!(short(&zones(0, 300), &blocks(0)), None, "PM stays movable");
        assert_eq!(short(&zones(0, 300), &Blocks::default()), None, "a kernel without hotplug");
        assert_eq!(short(&[], &blocks(2)), None);
    }

    #[test]
    fn a_node_keeps_movable_memory_that_its_reserve_is_measured_by() {
        let mut zones = zones(0, 300);
        zones[1].managed_pages = (128 + 18) * MIB / PAGE_BYTES;
        assert_eq!(short(&zones, &blocks(1)), Some(0));
        zones[1].managed_pages = 128 * MIB / PAGE_BYTES;
        assert_eq!(short(&zones, &blocks(1)), None);
    }

    #[test]
    fn the_node_with_the_least_kernel_memory_gives_the_block() {
        let zones = [
            zone(0, ZoneKind::Dma32, 1000, 20),
            zone(0, ZoneKind::Movable, 1000, 500),
            zone(1, ZoneKind::Normal, 1000, 5),
            zone(1, ZoneKind::Movable, 1000, 500),
        ];
        let mut blocks = blocks(4);
        assert_eq!(short(&zones, &blocks), Some(1));
        blocks.nodes[1].movable_online_bytes = 0;
        assert_eq!(short(&zones, &blocks), Some(0));
    }

    #[test]
    fn failures_are_retried_ever_more_rarely() {
        let mut pace = Pace::default();
        let mut pauses = Vec::new();
        for _ in 0..9 {
            pace.failed(0);
            pauses.push(pace.not_before_ms / 1000);
        }
        assert_eq!(pauses, [5, 10, 20, 40, 80, 160, 300, 300, 300]);
        pace.succeeded(1_000);
        assert_eq!(pace.not_before_ms, 1_500);
        pace.failed(0);
        assert_eq!(pace.not_before_ms, 5_000);
    }

    #[test]
    fn memory_of_virtio_mem_is_found_in_iomem() {
        let text = "00001000-0009ffff : System RAM\n\
                    100000000-107ffffff : System RAM (virtio_mem)\n\
                    108000000-10fffffff : System RAM (virtio_mem)\n\
                    140000000-27fffffff : virtio2\n  \
                    140000000-147ffffff : System RAM (virtio_mem)\n";
        assert_eq!(virtio_mem_ranges(text), [0x1_0000_0000..0x1_1000_0000, 0x1_4000_0000..0x1_4800_0000]);
        assert_eq!(virtio_mem_ranges("junk\n-1 : System RAM (virtio_mem)\n"), []);
    }

    /// A sysfs with blocks 0 (boot), 32 and 33 (plugged DRAM) and 40 (PM).
    fn sysfs() -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("tempdir");
        let put = |name: &str, text: &str| fs::write(dir.path().join(name), text).expect("write");
        put("block_size_bytes", "8000000\n");
        put(
            "iomem",
            "100000000-10fffffff : System RAM (virtio_mem)\n140000000-147ffffff : System RAM (virtio_mem)\n",
        );
        for (number, node) in [(0, 0), (32, 0), (33, 0), (40, 1)] {
            fs::create_dir_all(dir.path().join(format!("memory{number}/node{node}"))).expect("mkdir");
            put(&format!("memory{number}/state"), "online\n");
            put(&format!("memory{number}/valid_zones"), "Movable\n");
        }
        dir
    }

    fn turner(dir: &tempfile::TempDir, turn: fn(&Path) -> io::Result<()>) -> Turner {
        Turner { memory_root: dir.path().to_owned(), iomem: dir.path().join("iomem"), unmoved: None, turn }
    }

    /// Blocks 32 and 33 have pages that do not move: Linux finds that at once for 33, and only after the limit for 32.
    fn turn_none(state: &Path) -> io::Result<()> {
        Err(match state.to_string_lossy().contains("memory32") {
            true => io::ErrorKind::Interrupted.into(),
            false => io::ErrorKind::ResourceBusy.into(),
        })
    }

    #[test]
    fn attempt_ends_with_the_first_block_that_takes_the_whole_limit() {
        let dir = sysfs();
        let mut turner = turner(&dir, turn_none);
        let mut attempt = || turner.turn_one(0).expect_err("no block moves").kind();
        assert_eq!(attempt(), io::ErrorKind::Interrupted);
        // The second attempt tries block 33 first, which takes no time, and then block 32.
        assert_eq!(attempt(), io::ErrorKind::Interrupted);
        fs::write(dir.path().join("memory32/valid_zones"), "Normal\n").expect("write");
        assert_eq!(turner.turn_one(0).expect_err("no block moves").kind(), io::ErrorKind::ResourceBusy);
    }

    #[test]
    fn node_without_a_block_is_left_alone_until_its_blocks_change() {
        let dir = sysfs();
        for number in [32, 33] {
            fs::write(dir.path().join(format!("memory{number}/valid_zones")), "Normal\n").expect("write");
        }
        let mut report =
            RawReport { zones: zones(0, 300).to_vec(), blocks: blocks(2), ..RawReport::default() };
        let mut kernel_blocks = KernelBlocks::start(dir.path(), &dir.path().join("iomem")).expect("starts");
        let mut now_ms = 1_000;
        while kernel_blocks.exhausted.is_none() {
            kernel_blocks.poll(&report, 0, now_ms);
        }
        now_ms += 2 * MAX_BACK_OFF_MS;
        kernel_blocks.poll(&report, 0, now_ms);
        assert!(!kernel_blocks.is_busy);
        report.blocks = blocks(3);
        kernel_blocks.poll(&report, 0, now_ms);
        assert!(kernel_blocks.is_busy);
    }

    #[test]
    fn the_lowest_plugged_block_of_the_node_is_turned() {
        let dir = sysfs();
        let mut turner = turner(&dir, turn);
        let state =
            |number: u32| fs::read_to_string(dir.path().join(format!("memory{number}/state"))).expect("read");
        assert_eq!(turner.turn_one(0).expect("turns"), 32);
        assert_eq!(state(32), "online_kernel");
        assert_eq!([0, 33, 40].map(state), ["online\n"; 3]);
        // `valid_zones` of a real kernel shows that the block belongs to the kernel now.
        fs::write(dir.path().join("memory32/valid_zones"), "Normal\n").expect("write");
        assert_eq!(turner.turn_one(0).expect("turns"), 33);
        fs::write(dir.path().join("memory33/valid_zones"), "Normal\n").expect("write");
        assert_eq!(turner.turn_one(0).expect_err("none is left").kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn the_thread_turns_one_block_at_a_time() {
        let dir = sysfs();
        let report = RawReport { zones: zones(0, 300).to_vec(), blocks: blocks(2), ..RawReport::default() };
        let mut kernel_blocks = KernelBlocks::start(dir.path(), &dir.path().join("iomem")).expect("starts");
        let turned = (0..).map(|_| kernel_blocks.poll(&report, 0, 1_000)).position(|turned| turned);
        assert!(turned.is_some_and(|polls| polls > 0));
        assert!(!kernel_blocks.is_busy, "reports show first what it has brought");
        kernel_blocks.poll(&report, 0, 1_500);
        assert!(kernel_blocks.is_busy);
    }
}
