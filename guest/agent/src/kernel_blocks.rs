//! Converts blocks of plugged DRAM to kernel memory when the kernel is short of it.
//!
//! Plugged memory is online movable, so it cannot contain slabs, page tables or page descriptors. A
//! guest that boots with little DRAM and grows a lot runs out of kernel memory while gigabytes are
//! free. Therefore, the agent takes a block offline and brings it online again with
//! `online_kernel`. Linux first migrates the pages of the block to other blocks
//! (mm/memory_hotplug.c, offline_pages). The block serves the kernel until the next boot, or until
//! Linux has unplugged all parts of it (drivers/virtio/virtio_mem.c,
//! virtio_mem_sbm_unplug_request).
//!
//! A separate thread converts blocks, because the write to a block's state waits for the migration,
//! which may take long.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use foreshore_proto::{
    Blocks, KernelBlockGrowth, KernelBlockPace, OFFLINE_LIMIT_MS, RawReport, short_node,
};

use crate::blocks::{STACK_BYTES, is_online_block_movable, parse_number};
use crate::sys;

/// Resource name of memory that virtio_mem added (drivers/virtio/virtio_mem.c, virtio_mem_probe).
const VIRTIO_MEM: &str = "System RAM (virtio_mem)";

/// Converts blocks in a separate thread.
#[derive(Debug)]
pub(crate) struct KernelBlocks {
    requests: SyncSender<u32>,
    results: Receiver<Result<u32, (u32, io::Error)>>,
    is_busy: bool,
    pace: KernelBlockPace,
    growth: KernelBlockGrowth,
    exhausted: Option<Exhausted>,
}

/// Node without a block to convert, because its movable blocks are boot memory.
#[derive(Debug)]
struct Exhausted {
    node: u32,
    /// Blocks of the guest when the search failed. The node is searched again when they change.
    blocks: Blocks,
}

impl KernelBlocks {
    /// Starts the thread. Outside of tests, `memory_root` is /sys/devices/system/memory and `iomem`
    /// is /proc/iomem.
    pub(crate) fn start(memory_root: &Path, iomem: &Path) -> io::Result<Self> {
        let mut converter = BlockConverter {
            memory_root: memory_root.to_owned(),
            iomem: iomem.to_owned(),
            unmovable_block: None,
            convert,
        };
        let (requests, inbox) = sync_channel(1);
        let (outbox, results) = sync_channel(1);
        let work = move || {
            while let Ok(node) = inbox.recv() {
                let result = converter.convert_one(node).map_err(|error| (node, error));
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
            pace: KernelBlockPace::default(),
            growth: KernelBlockGrowth::default(),
            exhausted: None,
        })
    }

    /// Requests the conversion of a block if the kernel is short of memory. Returns true if a block
    /// was converted since the last call. Does not block. `other_user_pages` is the result of
    /// [`parse::zoneinfo`](crate::parse::zoneinfo).
    pub(crate) fn poll(&mut self, report: &RawReport, other_user_pages: u64, now_ms: u64) -> bool {
        self.growth.update(report, other_user_pages, now_ms);
        let result = self.results.try_recv().ok();
        self.is_busy &= result.is_none();
        match &result {
            Some(Ok(number)) => {
                eprintln!("foreshore-agent: Converted memory block {number} to kernel memory");
                self.pace.succeeded(now_ms);
            }
            Some(Err((node, error))) => {
                eprintln!(
                    "foreshore-agent: Cannot convert a memory block to kernel memory: {error}"
                );
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
        let excluded_node = self.exhausted.as_ref().map(|exhausted| exhausted.node);
        if !self.is_busy
            && self.pace.is_due(now_ms)
            && let Some(node) =
                short_node(&report.zones, &report.blocks, &self.growth, excluded_node)
        {
            self.is_busy = self.requests.try_send(node).is_ok();
        }
        matches!(result, Some(Ok(_)))
    }
}

/// State of the thread that [`KernelBlocks`] runs.
#[derive(Debug)]
struct BlockConverter {
    memory_root: PathBuf,
    iomem: PathBuf,
    /// Block whose pages could not be moved within the time limit. The next attempt starts after
    /// it.
    unmovable_block: Option<u32>,
    /// Function that converts the block with this `state` file.
    convert: fn(&Path) -> io::Result<()>,
}

impl BlockConverter {
    /// Converts one block of `node` and returns its number. Skips blocks of boot memory, because
    /// they contain pages that never move.
    fn convert_one(&mut self, node: u32) -> io::Result<u32> {
        let block_bytes = fs::read_to_string(self.memory_root.join("block_size_bytes"))?;
        let block_bytes = u64::from_str_radix(block_bytes.trim(), 16)
            .map_err(|_| io::ErrorKind::InvalidData)?
            .max(1);
        let ranges = virtio_mem_ranges(&fs::read_to_string(&self.iomem)?);
        let mut blocks: Vec<(u32, PathBuf)> = fs::read_dir(&self.memory_root)?
            .flatten()
            .filter_map(|entry| Some((parse_number(&entry.file_name(), "memory")?, entry.path())))
            .filter(|(number, path)| {
                let start = u64::from(*number).saturating_mul(block_bytes);
                let end = start.saturating_add(block_bytes);
                let is_plugged =
                    ranges.iter().any(|range| range.start <= start && end <= range.end);
                is_plugged && path.join(format!("node{node}")).exists() && is_movable(path)
            })
            .collect();
        // Starts with the lowest block, because virtio_mem unplugs the highest blocks first.
        blocks.sort_unstable();
        let after_unmovable =
            blocks.partition_point(|(number, _)| Some(*number) <= self.unmovable_block);
        blocks.rotate_left(after_unmovable);
        if blocks.is_empty() {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                format!("node {node} has no movable block"),
            ));
        }
        let mut last = io::Error::other(format!("the blocks of node {node} are being unplugged"));
        for (number, path) in blocks {
            match (self.convert)(&path.join("state")) {
                Ok(()) => return Ok(number),
                // During the wait, Linux holds the lock for all hotplug operations
                // (drivers/base/core.c, lock_device_hotplug_sysfs), so no memory is plugged. One
                // such wait per attempt is enough.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                    self.unmovable_block = Some(number);
                    return Err(error);
                }
                // virtio_mem has unplugged the block in the meantime.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                // This block contains pinned pages. Another block may not.
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

fn is_movable(block: &Path) -> bool {
    let state = fs::read_to_string(block.join("state")).unwrap_or_default();
    state.trim() == "online" && is_online_block_movable(block)
}

fn convert(state: &Path) -> io::Result<()> {
    let mut file = fs::File::options().write(true).open(state)?;
    // Makes a single call, because `write_all` would repeat it after EINTR.
    sys::within_ms(OFFLINE_LIMIT_MS, || file.write(b"offline"))?;
    fs::write(state, "online_kernel").inspect_err(|_| {
        // If `online_kernel` fails, the block is brought online as movable again.
        let _ = fs::write(state, "online_movable");
    })
}

/// Returns the physical address ranges that virtio_mem added, parsed from the text of /proc/iomem.
fn virtio_mem_ranges(iomem: &str) -> Vec<std::ops::Range<u64>> {
    let range = |line: &str| {
        let (range, _) = line.split_once(" : ").filter(|(_, name)| name.trim() == VIRTIO_MEM)?;
        let (start, last) = range.trim().split_once('-')?;
        let (start, last) =
            (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(last, 16).ok()?);
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
    use foreshore_proto::{KernelUse, NodeBlocks, Zone, ZoneKind};

    use super::*;
    use crate::tree::Tree;

    const MIB: u64 = 1 << 20;

    /// Report in which node 0 is short of kernel memory and has `movable` plugged blocks. PM of
    /// node 1 has room for their pages.
    fn short_report(movable: u64) -> RawReport {
        let zone = |node, kind, managed_mib, free_mib| Zone {
            node,
            kind,
            managed_pages: managed_mib * MIB / 4096,
            free_pages: free_mib * MIB / 4096,
            ..Zone::default()
        };
        let zones = vec![
            zone(0, ZoneKind::Dma32, 300, 0),
            zone(0, ZoneKind::Movable, 300, 0),
            zone(1, ZoneKind::Movable, 512, 300),
        ];
        let block_bytes = 128 * MIB;
        let node =
            NodeBlocks { movable_online_bytes: movable * block_bytes, ..NodeBlocks::default() };
        let blocks = Blocks { block_bytes, nodes: vec![node], ..Blocks::default() };
        RawReport { zones, blocks, ..RawReport::default() }
    }

    /// Report of a guest with 6.12 in which a program locks 200 MiB of memory.
    #[test]
    fn locked_memory_does_not_make_the_kernel_short_sooner() {
        let before = include_str!("../tests/data/6.12-filled/zoneinfo");
        let after = before
            .replace("nr_zone_active_anon 63763", "nr_zone_active_anon 12563")
            .replace("nr_zone_unevictable 511", "nr_zone_unevictable 51711");
        assert_ne!(before, after);
        let mut growth = KernelBlockGrowth::default();
        let mut report = RawReport { kernel: Some(KernelUse::default()), ..RawReport::default() };
        for (text, at_ms) in [(before, 0), (&*after, 1_000)] {
            let locked =
                crate::parse::zoneinfo(text.as_bytes(), &mut report.zones).expect("parses");
            growth.update(&report, locked, at_ms);
        }
        assert_eq!(growth.bytes_within(1_000), 0);
        growth.update(&report, 511, 1_000);
        assert_eq!(growth.bytes_within(1_000), 200 * MIB, "pages that no counter includes");
    }

    #[test]
    fn memory_of_virtio_mem_is_found_in_iomem() {
        let text = "00001000-0009ffff : System RAM\n\
                    100000000-107ffffff : System RAM (virtio_mem)\n\
                    108000000-10fffffff : System RAM (virtio_mem)\n\
                    140000000-27fffffff : virtio2\n  \
                    140000000-147ffffff : System RAM (virtio_mem)\n";
        assert_eq!(
            virtio_mem_ranges(text),
            [0x1_0000_0000..0x1_1000_0000, 0x1_4000_0000..0x1_4800_0000]
        );
        assert_eq!(virtio_mem_ranges("junk\n-1 : System RAM (virtio_mem)\n"), []);
    }

    /// Fake sysfs with blocks 0 (boot memory), 32 and 33 (plugged DRAM), and 40 (PM).
    fn sysfs() -> Tree {
        let blocks = [(0, 0), (32, 0), (33, 0), (40, 1)];
        let blocks = blocks.map(|(number, node)| (number, node, "online", "Movable"));
        let tree = Tree::memory("online_movable", &blocks);
        tree.put(
            "iomem",
            "100000000-10fffffff : System RAM (virtio_mem)\n140000000-147ffffff : System RAM (virtio_mem)\n",
        );
        tree
    }

    fn converter(tree: &Tree, convert: fn(&Path) -> io::Result<()>) -> BlockConverter {
        BlockConverter {
            memory_root: tree.path().to_owned(),
            iomem: tree.at("iomem"),
            unmovable_block: None,
            convert,
        }
    }

    fn started(tree: &Tree) -> KernelBlocks {
        KernelBlocks::start(tree.path(), &tree.at("iomem")).expect("starts")
    }

    /// Pages of blocks 32 and 33 cannot be moved. Linux finds this immediately for block 33, but
    /// only after the time limit for block 32.
    fn convert_none(state: &Path) -> io::Result<()> {
        Err(match state.to_string_lossy().contains("memory32") {
            true => io::ErrorKind::Interrupted.into(),
            false => io::ErrorKind::ResourceBusy.into(),
        })
    }

    #[test]
    fn attempt_ends_with_the_first_block_that_takes_the_whole_limit() {
        let tree = sysfs();
        let mut converter = converter(&tree, convert_none);
        let mut attempt = || converter.convert_one(0).expect_err("no block moves").kind();
        assert_eq!(attempt(), io::ErrorKind::Interrupted);
        // The second attempt tries block 33 first, which takes no time, and then block 32.
        assert_eq!(attempt(), io::ErrorKind::Interrupted);
        tree.put("memory32/valid_zones", "Normal\n");
        assert_eq!(attempt(), io::ErrorKind::ResourceBusy);
    }

    #[test]
    fn node_without_a_block_is_left_alone_until_its_blocks_change() {
        let tree = sysfs();
        tree.put("memory32/valid_zones", "Normal\n");
        tree.put("memory33/valid_zones", "Normal\n");
        let mut report = short_report(2);
        let mut kernel_blocks = started(&tree);
        let mut now_ms = 1_000;
        while kernel_blocks.exhausted.is_none() {
            kernel_blocks.poll(&report, 0, now_ms);
        }
        // Longer than any pause between conversions.
        now_ms += 600_000;
        kernel_blocks.poll(&report, 0, now_ms);
        assert!(!kernel_blocks.is_busy);
        report.blocks = short_report(3).blocks;
        kernel_blocks.poll(&report, 0, now_ms);
        assert!(kernel_blocks.is_busy);
    }

    #[test]
    fn the_lowest_plugged_block_of_the_node_is_converted() {
        let tree = sysfs();
        let mut converter = converter(&tree, convert);
        let state = |number: u32| tree.get(&format!("memory{number}/state"));
        assert_eq!(converter.convert_one(0).expect("turns"), 32);
        assert_eq!(state(32), "online_kernel");
        assert_eq!([0, 33, 40].map(state), ["online\n"; 3]);
        // On a real kernel, `valid_zones` now shows that the block belongs to the kernel.
        tree.put("memory32/valid_zones", "Normal\n");
        assert_eq!(converter.convert_one(0).expect("turns"), 33);
        tree.put("memory33/valid_zones", "Normal\n");
        assert_eq!(
            converter.convert_one(0).expect_err("none is left").kind(),
            io::ErrorKind::NotFound
        );
    }

    #[test]
    fn the_thread_converts_one_block_at_a_time() {
        let tree = sysfs();
        let report = short_report(2);
        let mut kernel_blocks = started(&tree);
        let turned = (0..).map(|_| kernel_blocks.poll(&report, 0, 1_000)).position(|turned| turned);
        assert!(turned.is_some_and(|polls| polls > 0));
        assert!(!kernel_blocks.is_busy, "reports first show the effect of the block");
        kernel_blocks.poll(&report, 0, 1_500);
        assert!(kernel_blocks.is_busy);
    }
}
