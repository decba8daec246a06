//! Reads states of memory blocks and the onlining policy in /sys/devices/system/memory.
//!
//! Each block has its own directory, so a guest with a terabyte of memory has eight thousand of
//! them. The agent reads them again when the guest's total memory has changed, and spends at most a
//! twentieth of the time on this. While the kernel plugs memory, a write to a block's state has to
//! wait. Reports matter most at that time, so a separate thread reads and writes blocks.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use foreshore_proto::{Blocks, NodeBlocks, OnlinePolicy};

use crate::args::Online;
use crate::logged;

impl Online {
    /// Value to write to a block's state or to the policy file.
    fn word(self) -> Option<&'static str> {
        match self {
            Online::Movable => Some("online_movable"),
            Online::Auto => Some("online"),
            Online::None => None,
        }
    }

    /// Returns true if a kernel with this policy brings memory online as requested, without the
    /// agent.
    fn is_met_by(self, policy: OnlinePolicy) -> bool {
        match self {
            Online::Movable => policy == OnlinePolicy::OnlineMovable,
            Online::Auto | Online::None => {
                !matches!(policy, OnlinePolicy::Offline | OnlinePolicy::Unknown)
            }
        }
    }
}

/// Longest time between readings. Only a reading reveals that another program has brought a block
/// online.
const MAX_AGE_MS: u64 = 30_000;

/// Longest time between readings while some blocks that should be online are offline.
const MAX_AGE_OFFLINE_MS: u64 = 1_000;

/// Limits for the share of time spent reading: a twentieth, or a thousandth if nothing has changed.
const COST_PART: u64 = 20;
const IDLE_COST_PART: u64 = 1_000;

/// Values that are cheap to read and that reveal added, removed or changed blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChangeHints {
    pub total_bytes: u64,
    /// Link count of the directory of blocks: the number of blocks plus a constant. It also counts
    /// plugged blocks that are still offline and therefore missing from `total_bytes`.
    pub links: u64,
}

/// Range of physical addresses of a node's online blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub node: u32,
    pub start: u64,
    /// End, exclusive.
    pub end: u64,
}

/// Merges blocks with these numbers and nodes into as few ranges as possible, in ascending order.
fn ranges_of(mut blocks: Vec<(u32, u32)>, block_bytes: u64) -> Vec<Range> {
    blocks.sort_unstable();
    let mut ranges: Vec<Range> = Vec::new();
    for (number, node) in blocks {
        let start = u64::from(number).saturating_mul(block_bytes);
        let end = start.saturating_add(block_bytes);
        match ranges.last_mut() {
            Some(last) if last.node == node && last.end == start => last.end = end,
            _ => ranges.push(Range { node, start, end }),
        }
    }
    ranges
}

/// Reads the blocks and keeps the last result.
#[derive(Debug)]
pub(crate) struct BlockReader {
    root: PathBuf,
    online: Online,
    /// Set if the reader brings offline blocks online.
    onlines_blocks: bool,
    blocks: Blocks,
    ranges: Vec<Range>,
    /// Blocks that were offline at the last reading. The kernel may have been about to bring them
    /// online.
    offline: Vec<u32>,
    hints: ChangeHints,
    /// Time of the last reading, and the earliest time of the next one.
    read_ms: Option<u64>,
    not_before_ms: u64,
    /// Time of the next reading if nothing has changed until then.
    idle_due_ms: u64,
}

impl BlockReader {
    /// Creates a reader for `root`, which is /sys/devices/system/memory outside of tests. It
    /// changes nothing before [`start_onlining`](Self::start_onlining) is called. Afterwards it
    /// brings memory online as specified by `online`.
    pub(crate) fn new(root: &Path, online: Online) -> Self {
        BlockReader {
            root: root.to_owned(),
            online,
            onlines_blocks: false,
            blocks: Blocks::default(),
            ranges: Vec::new(),
            offline: Vec::new(),
            hints: ChangeHints::default(),
            read_ms: None,
            not_before_ms: 0,
            idle_due_ms: 0,
        }
    }

    /// Ensures that plugged memory comes online as requested. Sets the kernel's policy if
    /// necessary. From now on, also brings blocks online that the kernel left offline.
    pub(crate) fn start_onlining(&mut self) -> io::Result<()> {
        let Some(word) = self.online.word() else { return Ok(()) };
        self.onlines_blocks = true;
        let path = self.root.join("auto_online_blocks");
        let policy = policy_of(&fs::read_to_string(&path)?);
        if self.online.is_met_by(policy) { Ok(()) } else { fs::write(path, word) }
    }

    pub(crate) fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// Returns the time of the next reading, depending on `hints`.
    fn due_ms(&self, hints: ChangeHints) -> u64 {
        let Some(read_ms) = self.read_ms else { return 0 };
        let offline = self.blocks.nodes.iter().any(|node| node.offline_bytes > 0);
        let due_ms = if hints != self.hints {
            0
        } else if offline && self.online.word().is_some() {
            read_ms.saturating_add(MAX_AGE_OFFLINE_MS)
        } else {
            self.idle_due_ms
        };
        due_ms.max(self.not_before_ms)
    }

    /// Reads the blocks again. If the agent onlines blocks, onlines those that were already offline
    /// at the last reading. Returns the number of blocks that could not be brought online. `clock`
    /// returns the time before and after the reading.
    pub(crate) fn read(&mut self, hints: ChangeHints, clock: impl Fn() -> u64) -> u64 {
        let start_ms = clock();
        let mut failed = 0;
        self.blocks = self.scan(&mut failed);
        self.hints = hints;
        let end_ms = clock();
        self.read_ms = Some(end_ms);
        let cost_ms = end_ms.saturating_sub(start_ms).max(1);
        self.not_before_ms = end_ms.saturating_add(cost_ms.saturating_mul(COST_PART));
        let idle_ms = cost_ms.saturating_mul(IDLE_COST_PART).max(MAX_AGE_MS);
        self.idle_due_ms = end_ms.saturating_add(idle_ms);
        failed
    }

    fn scan(&mut self, failed: &mut u64) -> Blocks {
        let text = |name: &str| fs::read_to_string(self.root.join(name)).unwrap_or_default();
        let online_policy = policy_of(&text("auto_online_blocks"));
        let block_bytes = u64::from_str_radix(text("block_size_bytes").trim(), 16).unwrap_or(0);
        let mut nodes: Vec<NodeBlocks> = Vec::new();
        let was_offline = std::mem::take(&mut self.offline);
        let mut online = Vec::new();
        let entries = fs::read_dir(&self.root).into_iter().flatten().flatten();
        for (number, path) in
            entries.filter_map(|e| Some((parse_number(&e.file_name(), "memory")?, e.path())))
        {
            let online_word =
                self.online.word().filter(|_| self.onlines_blocks && was_offline.contains(&number));
            let Some(block) = Block::read(&path, online_word, failed) else { continue };
            if block.online {
                online.push((number, block.node));
            } else {
                self.offline.push(number);
            }
            let node = match nodes.iter_mut().find(|node| node.node == block.node) {
                Some(node) => node,
                None => nodes.push_mut(NodeBlocks { node: block.node, ..NodeBlocks::default() }),
            };
            let sum = if block.online { &mut node.online_bytes } else { &mut node.offline_bytes };
            *sum = sum.saturating_add(block_bytes);
            if block.online && block.movable {
                node.movable_online_bytes = node.movable_online_bytes.saturating_add(block_bytes);
            }
        }
        nodes.sort_unstable_by_key(|node| node.node);
        self.ranges = ranges_of(online, block_bytes);
        Blocks { online_policy, block_bytes, nodes }
    }
}

/// Parses the content of /sys/devices/system/memory/auto_online_blocks.
fn policy_of(text: &str) -> OnlinePolicy {
    let known = OnlinePolicy::ALL.into_iter().find(|policy| policy.label() == text.trim());
    known.unwrap_or_default()
}

#[derive(Clone, Copy, Debug)]
struct Block {
    node: u32,
    online: bool,
    movable: bool,
}

impl Block {
    /// Reads a block's directory. Returns `None` if the block is removed during the reading.
    fn read(path: &Path, online_word: Option<&str>, failed: &mut u64) -> Option<Self> {
        let state_path = path.join("state");
        let state = fs::read_to_string(&state_path).ok()?;
        let mut online = state.trim() == "online";
        if let Some(word) = online_word.filter(|_| state.trim() == "offline") {
            online = fs::write(&state_path, word).is_ok();
            *failed += u64::from(!online);
        }
        let movable = online && is_online_block_movable(path);
        let mut entries = fs::read_dir(path).ok()?.flatten();
        let node = entries.find_map(|entry| parse_number(&entry.file_name(), "node")).unwrap_or(0);
        Some(Block { node, online, movable })
    }
}

/// Returns true if an online block is in ZONE_MOVABLE. The block must be online. For a block that
/// is just being added, Linux looks up the zones of node -1 and crashes (drivers/base/memory.c,
/// valid_zones_show: `mem->nid` is set after the block becomes visible).
pub(crate) fn is_online_block_movable(block: &Path) -> bool {
    let zones = fs::read_to_string(block.join("valid_zones")).unwrap_or_default();
    // The first zone is the one that contains the block.
    zones.split_whitespace().next() == Some("Movable")
}

/// Returns the number in a name such as `memory12`.
pub(crate) fn parse_number(name: &std::ffi::OsStr, prefix: &str) -> Option<u32> {
    name.to_str()?.strip_prefix(prefix)?.parse().ok()
}

/// Stack size of the agent's threads. The stack size is small, because the whole stack is locked in
/// memory.
pub(crate) const STACK_BYTES: usize = 64 * 1024;

/// Runs a [`BlockReader`] in a separate thread.
#[derive(Debug)]
pub(crate) struct BlockWatch {
    /// Directory of all blocks. It is kept open, because stat() by path takes many times as long as
    /// fstat().
    root: Option<File>,
    requests: SyncSender<Request>,
    answers: Receiver<Answer>,
    busy: bool,
    requested: ChangeHints,
    next_request_ms: u64,
}

/// Request to the thread to read the blocks if a reading is due.
#[derive(Clone, Copy, Debug)]
struct Request {
    hints: ChangeHints,
    /// Call [`BlockReader::start_onlining`] first, and then read even if no reading is due.
    start_onlining: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Answer {
    /// Blocks and their address ranges, if the thread has read them.
    blocks: Option<(Blocks, Vec<Range>)>,
    /// Time of the next request if nothing changes until then.
    next_request_ms: u64,
}

impl BlockWatch {
    /// Starts the thread. `clock` returns the time.
    pub(crate) fn start(mut reader: BlockReader, clock: fn() -> u64) -> io::Result<Self> {
        let root = File::open(&reader.root).ok();
        let (requests, inbox) = sync_channel::<Request>(1);
        let (outbox, answers) = sync_channel::<Answer>(1);
        let mut failed = 0;
        let work = move || {
            while let Ok(request) = inbox.recv() {
                let answer = reader.serve(request, clock, &mut failed);
                if outbox.send(answer).is_err() {
                    break;
                }
            }
        };
        thread::Builder::new().name("blocks".into()).stack_size(STACK_BYTES).spawn(work)?;
        Ok(BlockWatch {
            root,
            requests,
            answers,
            busy: false,
            requested: ChangeHints::default(),
            next_request_ms: 0,
        })
    }

    /// Requests a reading if one may be due, and returns a result that has arrived since the last
    /// call. Does not block. Clears `start_onlining` after passing it to the thread.
    pub(crate) fn poll(
        &mut self,
        total_bytes: u64,
        now_ms: u64,
        start_onlining: &mut bool,
    ) -> Option<(Blocks, Vec<Range>)> {
        let answer = self.answers.try_recv().ok();
        if let Some(answer) = &answer {
            self.busy = false;
            self.next_request_ms = answer.next_request_ms;
        }
        let metadata = self.root.as_ref().and_then(|root| root.metadata().ok());
        let links = metadata.map_or(0, |metadata| metadata.nlink());
        let hints = ChangeHints { total_bytes, links };
        if !self.busy
            && (*start_onlining || hints != self.requested || now_ms >= self.next_request_ms)
        {
            let request = Request { hints, start_onlining: *start_onlining };
            self.busy = self.requests.try_send(request).is_ok();
            *start_onlining &= !self.busy;
            self.requested = hints;
        }
        answer.and_then(|answer| answer.blocks)
    }
}

impl BlockReader {
    fn serve(&mut self, request: Request, clock: fn() -> u64, failed: &mut u64) -> Answer {
        let hints = request.hints;
        if request.start_onlining {
            logged("set auto_online_blocks", self.start_onlining());
        } else if clock() < self.due_ms(hints) {
            return Answer { blocks: None, next_request_ms: self.due_ms(hints) };
        }
        let failed_now = self.read(hints, clock);
        if failed_now > *failed {
            eprintln!("foreshore-agent: Cannot bring {failed_now} memory blocks online");
        }
        *failed = failed_now;
        Answer {
            blocks: Some((self.blocks().clone(), self.ranges.clone())),
            next_request_ms: self.due_ms(hints),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Tree;

    const BLOCK: u64 = 128 << 20;
    const HINTS: ChangeHints = ChangeHints { total_bytes: 1, links: 3 };
    const CHANGED: ChangeHints = ChangeHints { total_bytes: 2, ..HINTS };
    const PLUGGED: ChangeHints = ChangeHints { links: 4, ..HINTS };

    fn node(node: u32, online: u64, offline: u64, movable: u64) -> NodeBlocks {
        NodeBlocks {
            node,
            online_bytes: online * BLOCK,
            offline_bytes: offline * BLOCK,
            movable_online_bytes: movable * BLOCK,
        }
    }

    #[test]
    fn blocks_are_added_up_per_node() {
        let blocks =
            [(0, 0, "online", "none"), (2, 0, "online", "DMA32"), (32, 1, "online", "Movable")];
        let tree = Tree::memory("online_movable", &blocks);
        let mut reader = BlockReader::new(tree.path(), Online::Movable);
        assert_eq!(reader.read(HINTS, || 0), 0);
        assert_eq!(reader.blocks().online_policy, OnlinePolicy::OnlineMovable);
        assert_eq!(reader.blocks().nodes, [node(0, 2, 0, 0), node(1, 1, 0, 1)]);
    }

    #[test]
    fn adjacent_online_blocks_of_a_node_become_one_range() {
        let online = [(11, 1), (2, 0), (9, 0), (10, 1), (3, 0), (13, 1)];
        let mut blocks = online.map(|(number, node)| (number, node, "online", "Movable")).to_vec();
        blocks.push((12, 1, "offline", "Movable"));
        let tree = Tree::memory("online_movable", &blocks);
        let mut reader = BlockReader::new(tree.path(), Online::None);
        reader.read(HINTS, || 0);
        let range =
            |node, start: u64, end: u64| Range { node, start: start * BLOCK, end: end * BLOCK };
        assert_eq!(
            reader.ranges,
            [range(0, 2, 4), range(0, 9, 10), range(1, 10, 12), range(1, 13, 14)]
        );
    }

    #[test]
    fn zones_of_offline_blocks_are_not_read() {
        let blocks = [(32, 1, "offline", "Movable"), (33, 1, "online", "Movable")];
        let tree = Tree::memory("offline", &blocks);
        let read = |name| {
            let block = Block::read(&tree.at(name), None, &mut 0).unwrap();
            (block.online, block.movable)
        };
        assert_eq!(["memory32", "memory33"].map(read), [(false, false), (true, true)]);
    }

    #[test]
    fn blocks_that_stay_offline_are_onlined_after_start_onlining() {
        let blocks = [(32, 1, "offline", "Normal Movable"), (33, 1, "going-offline", "Movable")];
        let tree = Tree::memory("offline", &blocks);
        let mut reader = BlockReader::new(tree.path(), Online::Movable);
        let state_after = |reader: &mut BlockReader| {
            assert_eq!(reader.read(HINTS, || 0), 0);
            tree.get("memory32/state")
        };
        assert_eq!(state_after(&mut reader), "offline\n");
        assert_eq!(reader.blocks().nodes, [node(1, 0, 2, 0)]);
        assert_eq!(state_after(&mut reader), "offline\n", "not in charge yet");
        reader.start_onlining().expect("writes");
        reader.offline.clear();
        assert_eq!(state_after(&mut reader), "offline\n", "the kernel may be about to");
        assert_eq!(state_after(&mut reader), "online_movable");
        assert_eq!(tree.get("memory33/state"), "going-offline\n", "on its way out, not touched");
    }

    #[test]
    fn policy_is_written_only_if_different_and_blocks_follow_it() {
        for (online, policy, policy_after, state_after) in [
            (Online::Movable, "online", "online_movable", "online_movable"),
            // A policy that is already set is not written again, although the file's content ends
            // with a newline.
            (Online::Movable, "online_movable", "online_movable\n", "online_movable"),
            (Online::Auto, "offline", "online", "online"),
            (Online::Auto, "online_kernel", "online_kernel\n", "online"),
            (Online::None, "offline", "offline\n", "offline\n"),
        ] {
            let tree = Tree::memory(policy, &[(32, 1, "offline", "Normal Movable")]);
            let mut reader = BlockReader::new(tree.path(), online);
            reader.start_onlining().expect("writes");
            reader.read(HINTS, || 0);
            assert_eq!(reader.blocks().nodes, [node(1, 0, 1, 0)]);
            assert_eq!(reader.read(HINTS, || 0), 0);
            assert_eq!(tree.get("auto_online_blocks"), policy_after, "{online:?} of {policy}");
            assert_eq!(tree.get("memory32/state"), state_after, "{online:?} of {policy}");
        }
    }

    #[test]
    fn blocks_are_read_on_change_and_otherwise_rarely() {
        let tree = Tree::memory("online_movable", &[(0, 0, "online", "Normal")]);
        // If a reading takes longer because there are many blocks, blocks are read less often.
        for (cost_ms, idle_ms, change_ms) in [(0, 30_000, 20), (100, 100_000, 2_000)] {
            let mut reader = BlockReader::new(tree.path(), Online::Movable);
            assert_eq!(reader.due_ms(HINTS), 0);
            let times = std::cell::Cell::new(1_000);
            reader.read(HINTS, || times.replace(times.get() + cost_ms));
            let due_ms = |hints| reader.due_ms(hints) - 1_000 - cost_ms;
            assert_eq!(due_ms(HINTS), idle_ms);
            assert_eq!(due_ms(CHANGED), change_ms, "at most a twentieth of the time");
            assert_eq!(due_ms(PLUGGED), change_ms, "an offline block is reported too");
        }
    }

    #[test]
    fn blocks_are_read_more_often_while_some_are_offline() {
        let tree = Tree::memory("offline", &[(0, 0, "offline", "Normal")]);
        for (online, due_ms) in
            [(Online::Movable, 2_000), (Online::Auto, 2_000), (Online::None, 31_000)]
        {
            let mut reader = BlockReader::new(tree.path(), online);
            reader.read(HINTS, || 1_000);
            assert_eq!(reader.due_ms(HINTS), due_ms);
        }
    }

    #[test]
    fn thread_reads_when_due_and_answers_once() {
        let tree = Tree::memory("online_movable", &[(0, 0, "online", "Normal")]);
        let reader = BlockReader::new(tree.path(), Online::Movable);
        let mut watch = BlockWatch::start(reader, || 1_000).expect("starts");
        let mut start_onlining = true;
        let (blocks, ranges) = (0..)
            .find_map(|_| watch.poll(7, 0, &mut start_onlining))
            .expect("polls until it has answered");
        assert_eq!(blocks.nodes, [node(0, 1, 0, 0)]);
        assert_eq!(ranges, [Range { node: 0, start: 0, end: BLOCK }]);
        assert!(!start_onlining, "passed on");
        assert!(!watch.busy);
        assert_eq!(watch.poll(7, 30_999, &mut start_onlining), None);
        assert!(!watch.busy, "no block has changed, so the thread sleeps");
        watch.poll(7, 31_000, &mut start_onlining);
        assert!(watch.busy);
        let later = Answer { blocks: None, next_request_ms: 31_000 };
        assert_eq!(
            watch.answers.recv(),
            Ok(later),
            "the reading was not due by the thread's clock"
        );
        watch.busy = false;
        watch.poll(8, 2_000, &mut start_onlining);
        assert!(watch.busy, "the total has changed");
    }

    #[test]
    fn kernel_without_hotplug_has_no_blocks() {
        let mut reader = BlockReader::new(Path::new("/missing"), Online::Movable);
        reader.read(HINTS, || 0);
        assert_eq!(reader.blocks(), &Blocks::default());
        assert!(reader.start_onlining().is_err());
    }
}
