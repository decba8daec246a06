//! Finds idle memory per node, with DAMON if the kernel has it and with idle page tracking
//! otherwise.
//!
//! Both interfaces may block (a write to DAMON's files waits for its next sample), so a separate
//! thread uses them. The number of samples limits the cost. The amount of memory has no effect on
//! it.

mod bitmap;
mod damon;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::Duration;

use foreshore_proto::{NodeIdle, Zone};

use self::bitmap::Bitmap;
use self::damon::Damon;
use crate::blocks::{Range, STACK_BYTES};

/// Time without an access after which memory counts as idle.
const SPAN_MS: u64 = 60_000;

/// Interval between queries.
const PERIOD_MS: u64 = 20_000;

/// Age at which a result is no longer reported. The thread may be stuck.
const MAX_AGE_MS: u64 = 4 * PERIOD_MS + SPAN_MS;

/// Maximum number of monitored nodes. Each monitor has a cost.
const MAX_NODES: u32 = 8;

const PAGE_BYTES: u64 = 4096;

/// Result for the address ranges of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct NodeResult {
    node: u32,
    /// Idle share of the ranges, in bytes.
    idle_bytes: u64,
    span_bytes: u64,
    /// True if `idle_bytes` includes free memory and addresses without memory.
    includes_free: bool,
    /// Page cache whose use cannot be detected. See [`Roots::undetected_bytes`].
    undetected_bytes: u64,
}

impl NodeResult {
    fn new(node: u32, idle_bytes: u64, span_bytes: u64, includes_free: bool) -> Self {
        NodeResult { node, idle_bytes, span_bytes, includes_free, undetected_bytes: 0 }
    }

    /// Returns the idle memory of a node with these zones, or `None` if the node has no zones.
    fn report(self, zones: &[Zone]) -> Option<NodeIdle> {
        let pages = |of: fn(&Zone) -> u64| {
            let zones = zones.iter().filter(|zone| zone.node == self.node);
            zones.fold(0u64, |sum, zone| sum.saturating_add(of(zone))).saturating_mul(PAGE_BYTES)
        };
        let (managed_bytes, free_bytes) =
            (pages(|zone| zone.managed_pages), pages(|zone| zone.free_pages));
        let idle_bytes = if self.includes_free {
            // A block may be plugged only in part. The missing part is never accessed.
            let absent_bytes = self.span_bytes.saturating_sub(managed_bytes);
            self.idle_bytes.saturating_sub(absent_bytes)
        } else {
            self.idle_bytes.saturating_add(free_bytes)
        };
        let idle_bytes = idle_bytes.min(managed_bytes).saturating_sub(self.undetected_bytes);
        (managed_bytes > 0).then_some(NodeIdle { node: self.node, idle_bytes, span_ms: SPAN_MS })
    }
}

/// Paths of the kernel's interfaces.
#[derive(Clone, Debug)]
pub(crate) struct Roots {
    pub damon: PathBuf,
    pub bitmap: PathBuf,
    pub nodes: PathBuf,
    pub lru_gen: PathBuf,
}

impl Roots {
    /// Returns the paths below `root`, which is /sys outside of tests.
    pub(crate) fn under(root: &Path) -> Self {
        let mm = root.join("kernel/mm");
        Roots {
            damon: mm.join("damon/admin/kdamonds"),
            bitmap: mm.join("page_idle/bitmap"),
            lru_gen: mm.join("lru_gen/enabled"),
            nodes: root.join("devices/system/node"),
        }
    }

    /// Number of possible nodes, limited to [`MAX_NODES`].
    fn possible_nodes(&self) -> u32 {
        // Format of the list: `0-1,3`.
        let text = fs::read_to_string(self.nodes.join("possible")).unwrap_or_default();
        let last = text.trim().rsplit([',', '-']).next().and_then(|last| last.parse::<u32>().ok());
        last.map_or(1, |last| last.saturating_add(1)).min(MAX_NODES)
    }

    /// Returns a node's page cache whose use the kernel does not detect. With the
    /// multi-generational LRU, read() does not clear a page's idle flag (folio_mark_accessed in
    /// mm/swap.c), so all unmapped page cache looks idle. `None` if unknown.
    fn undetected_bytes(&self, node: u32) -> Option<u64> {
        let enabled = fs::read_to_string(&self.lru_gen).unwrap_or_default();
        let enabled =
            enabled.trim().strip_prefix("0x").and_then(|bits| u64::from_str_radix(bits, 16).ok());
        if enabled.is_none_or(|bits| bits & 1 == 0) {
            return Some(0);
        }
        let text = fs::read_to_string(self.nodes.join(format!("node{node}/vmstat"))).ok()?;
        let pages = |name: &str| -> Option<u64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
            line.trim().parse().ok()
        };
        Some(pages("nr_file_pages")?.saturating_sub(pages("nr_mapped")?).saturating_mul(PAGE_BYTES))
    }
}

#[derive(Debug)]
enum Source {
    Damon(Damon),
    Bitmap(Bitmap),
}

impl Source {
    fn open(roots: &Roots) -> io::Result<Self> {
        match Damon::open(&roots.damon, roots.possible_nodes()) {
            Ok(damon) => Ok(Source::Damon(damon)),
            Err(error) => match Bitmap::open(&roots.bitmap) {
                Ok(bitmap) => Ok(Source::Bitmap(bitmap)),
                // If both fail, returns the error of DAMON, because current kernels have DAMON.
                Err(_) => Err(error),
            },
        }
    }

    fn query(&mut self, ranges: &[Range], now_ms: u64) -> io::Result<Vec<NodeResult>> {
        match self {
            Source::Damon(damon) => damon.query(ranges, now_ms),
            Source::Bitmap(bitmap) => Ok(bitmap.query(ranges, now_ms)),
        }
    }
}

/// Source of idle memory that is opened again later if the kernel reports it as busy.
///
/// Linux accepts only one write to DAMON's files at a time, and fails others with EBUSY. A write
/// may take until the next sample. Therefore, the write of a killed agent may block its successor.
struct RetryingSource<O> {
    open: O,
    source: Option<Source>,
    has_logged: bool,
}

impl<O: FnMut() -> io::Result<Source>> RetryingSource<O> {
    /// Opens the source. Returns an error only if later attempts cannot succeed either.
    fn start(open: O) -> io::Result<Self> {
        let mut retrying = RetryingSource { open, source: None, has_logged: false };
        match (retrying.open)() {
            Ok(source) => retrying.source = Some(source),
            Err(error) if is_busy(&error) => retrying.log_busy(&error),
            Err(error) => return Err(error),
        }
        Ok(retrying)
    }

    fn log_busy(&mut self, error: &io::Error) {
        if !std::mem::replace(&mut self.has_logged, true) {
            eprintln!("foreshore-agent: The search for idle memory is postponed: {error}");
        }
    }

    /// Looks for idle memory. Returns `None` if the source is busy, and the caller tries again
    /// later.
    fn query(&mut self, ranges: &[Range], now_ms: u64) -> io::Result<Option<Vec<NodeResult>>> {
        let source = match &mut self.source {
            Some(source) => Ok(source),
            none => (self.open)().map(|source| none.insert(source)),
        };
        match source.and_then(|source| source.query(ranges, now_ms)) {
            Err(error) if is_busy(&error) => {
                self.log_busy(&error);
                Ok(None)
            }
            result => result.map(Some),
        }
    }
}

fn is_busy(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::ResourceBusy
}

/// Runs a source in a separate thread.
#[derive(Debug)]
pub(crate) struct IdleWatch {
    damon: PathBuf,
    ranges: SyncSender<Vec<Range>>,
    unsent: Option<Vec<Range>>,
    answers: Receiver<Vec<NodeResult>>,
    found: Vec<NodeResult>,
    found_ms: u64,
}

impl IdleWatch {
    /// Starts the thread. Returns an error if the kernel has no suitable interface, or if another
    /// program uses it. `clock` returns the time.
    pub(crate) fn start(roots: &Roots, clock: fn() -> u64) -> io::Result<Self> {
        let (roots, damon) = (roots.clone(), roots.damon.clone());
        let mut source = RetryingSource::start({
            let roots = roots.clone();
            move || Source::open(&roots)
        })?;
        let (ranges, inbox) = sync_channel::<Vec<Range>>(1);
        let (outbox, answers) = sync_channel::<Vec<NodeResult>>(1);
        let work = move || {
            let mut ranges = Vec::new();
            loop {
                match inbox.recv_timeout(Duration::from_millis(PERIOD_MS)) {
                    Ok(new) => ranges = new,
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => break,
                }
                match source.query(&ranges, clock()) {
                    Ok(Some(mut found)) => {
                        found.retain_mut(|found| {
                            let undetected_bytes = roots.undetected_bytes(found.node);
                            found.undetected_bytes = undetected_bytes.unwrap_or(0);
                            undetected_bytes.is_some()
                        });
                        drop(outbox.try_send(found));
                    }
                    Ok(None) => {}
                    Err(error) => {
                        eprintln!(
                            "foreshore-agent: The search for idle memory has stopped: {error}"
                        );
                        break;
                    }
                }
            }
        };
        thread::Builder::new().name("idle".into()).stack_size(STACK_BYTES).spawn(work)?;
        Ok(IdleWatch { damon, ranges, unsent: None, answers, found: Vec::new(), found_ms: 0 })
    }

    /// Sets the address ranges to search. Does not block.
    pub(crate) fn set_ranges(&mut self, ranges: Vec<Range>) {
        self.unsent = Some(ranges);
    }

    /// Fills `idle` with the idle memory found so far, for a guest with these zones. Does not
    /// block.
    pub(crate) fn poll(&mut self, zones: &[Zone], now_ms: u64, idle: &mut Vec<NodeIdle>) {
        if let Some(ranges) = self.unsent.take()
            && let Err(TrySendError::Full(ranges)) = self.ranges.try_send(ranges)
        {
            self.unsent = Some(ranges);
        }
        if let Ok(found) = self.answers.try_recv() {
            (self.found, self.found_ms) = (found, now_ms);
        }
        idle.clear();
        if now_ms.saturating_sub(self.found_ms) < MAX_AGE_MS {
            idle.extend(self.found.iter().filter_map(|found| found.report(zones)));
        }
    }

    /// Removes the agent's monitors from DAMON.
    pub(crate) fn stop(self) {
        Damon::stop(&self.damon);
    }
}

/// Groups `ranges` by node, in ascending order. Nodes above [`MAX_NODES`] are omitted.
fn nodes_of(ranges: &[Range]) -> Vec<(u32, Vec<Range>)> {
    let mut nodes: Vec<(u32, Vec<Range>)> = Vec::new();
    for range in ranges.iter().filter(|range| range.node < MAX_NODES) {
        match nodes.iter_mut().find(|(node, _)| *node == range.node) {
            Some((_, ranges)) => ranges.push(*range),
            None => nodes.push((range.node, vec![*range])),
        }
    }
    nodes.sort_unstable_by_key(|(node, _)| *node);
    nodes
}

fn span_bytes(ranges: &[Range]) -> u64 {
    ranges.iter().fold(0, |sum, range| sum.saturating_add(range.end.saturating_sub(range.start)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Tree;

    const MIB: u64 = 1 << 20;

    /// Range with addresses in MiB.
    pub(super) fn range(node: u32, start_mib: u64, end_mib: u64) -> Range {
        Range { node, start: start_mib * MIB, end: end_mib * MIB }
    }

    fn zone(node: u32, managed_mib: u64, free_mib: u64) -> Zone {
        Zone {
            node,
            managed_pages: managed_mib * MIB / PAGE_BYTES,
            free_pages: free_mib * MIB / PAGE_BYTES,
            ..Zone::default()
        }
    }

    fn idle_mib(found: NodeResult, zones: &[Zone]) -> Option<u64> {
        found.report(zones).map(|idle| idle.idle_bytes / MIB)
    }

    #[test]
    fn absent_memory_is_not_idle() {
        let found = NodeResult::new(1, 200 * MIB, 256 * MIB, true);
        let zones = [zone(0, 999, 999), zone(1, 100, 10), zone(1, 50, 0)];
        // 106 MiB of the ranges are not memory, or are memory that the kernel keeps for itself.
        assert_eq!(idle_mib(found, &zones), Some(94));
        assert_eq!(idle_mib(NodeResult { idle_bytes: 100 * MIB, ..found }, &zones), Some(0));
        assert_eq!(
            idle_mib(NodeResult { span_bytes: 0, ..found }, &zones),
            Some(150),
            "no more than there is"
        );
        assert_eq!(idle_mib(NodeResult { node: 2, ..found }, &zones), None, "gone meanwhile");
    }

    #[test]
    fn free_memory_counts_as_idle_if_the_source_excludes_it() {
        let found = NodeResult::new(1, 50 * MIB, 256 * MIB, false);
        assert_eq!(idle_mib(found, &[zone(1, 150, 10), zone(0, 300, 300)]), Some(60));
        assert_eq!(idle_mib(found, &[zone(1, 150, 149)]), Some(150), "no more than there is");
    }

    #[test]
    fn results_of_the_thread_are_reported_until_they_are_old() {
        let tree = Tree::new(&[]);
        tree.put("kernel/mm/page_idle/bitmap", [0; 4096]);
        let watch = IdleWatch::start(&Roots::under(tree.path()), || 5);
        let mut watch = watch.expect("the bitmap is there");
        let (ranges, answers) = (sync_channel(1), sync_channel(1));
        (watch.ranges, watch.answers) = (ranges.0, answers.1);
        watch.set_ranges(vec![range(0, 0, 4)]);
        let mut idle = vec![NodeIdle::default()];
        watch.poll(&[zone(0, 4, 1)], 1_000, &mut idle);
        assert_eq!(idle, [], "nothing found yet");
        assert_eq!(ranges.1.recv().expect("passed on").len(), 1);
        answers.0.send(vec![NodeResult::new(0, 2 * MIB, 4 * MIB, false)]).expect("takes one");
        for (now_ms, count) in [(2_000, 1), (2_000 + MAX_AGE_MS - 1, 1), (2_000 + MAX_AGE_MS, 0)] {
            watch.poll(&[zone(0, 4, 1)], now_ms, &mut idle);
            assert_eq!(idle.len(), count, "at {now_ms}");
        }
    }

    #[test]
    fn undetected_page_cache_is_not_idle() {
        let found = NodeResult {
            undetected_bytes: 60 * MIB,
            ..NodeResult::new(1, 200 * MIB, 200 * MIB, true)
        };
        assert_eq!(idle_mib(found, &[zone(1, 200, 0)]), Some(140));
        assert_eq!(
            idle_mib(NodeResult { idle_bytes: 50 * MIB, ..found }, &[zone(1, 200, 0)]),
            Some(0)
        );

        let tree = Tree::new(&[]);
        let roots = Roots::under(tree.path());
        assert_eq!(roots.undetected_bytes(1), Some(0), "a kernel without such a LRU");
        for (enabled, unseen) in [("0x0000\n", Some(0)), ("0x0006\n", Some(0)), ("0x0007\n", None)]
        {
            tree.put("kernel/mm/lru_gen/enabled", enabled);
            assert_eq!(roots.undetected_bytes(1), unseen, "{enabled}");
        }
        let vmstat = "devices/system/node/node1/vmstat";
        tree.put(vmstat, "nr_mapped 100\nnr_file_pages 356\nnr_file_pages_other 9\n");
        assert_eq!(roots.undetected_bytes(1), Some(MIB));
        tree.put(vmstat, "nr_mapped 100\n");
        assert_eq!(roots.undetected_bytes(1), None);
    }

    #[test]
    fn possible_nodes_are_counted() {
        let tree = Tree::new(&[]);
        let roots = Roots::under(tree.path());
        assert_eq!(roots.possible_nodes(), 1, "not said");
        for (text, nodes) in
            [("0\n", 1), ("0-1\n", 2), ("0-1,3\n", 4), ("0-1023\n", MAX_NODES), ("\n", 1)]
        {
            tree.put("devices/system/node/possible", text);
            assert_eq!(roots.possible_nodes(), nodes, "{text:?}");
        }
    }

    #[test]
    fn busy_source_is_retried_and_a_missing_one_is_not() {
        let tree = Tree::new(&[]);
        tree.put("bitmap", [0; 4096]);
        let bitmap = tree.at("bitmap");
        let busy = || Err(io::Error::from_raw_os_error(libc::EBUSY));
        let mut tries = 0;
        let opened_at = |at| {
            let bitmap = &bitmap;
            move || {
                tries += 1;
                if tries < at { busy() } else { Bitmap::open(bitmap).map(Source::Bitmap) }
            }
        };
        let mut retrying = RetryingSource::start(opened_at(1)).expect("opens");
        assert!(matches!(retrying.query(&[], 0), Ok(Some(_))));
        let mut retrying =
            RetryingSource::start(opened_at(4)).expect("the source may become available later");
        for _ in 0..2 {
            assert!(matches!(retrying.query(&[], 0), Ok(None)));
            assert!(retrying.has_logged, "once");
        }
        for _ in 0..2 {
            assert!(matches!(retrying.query(&[], 0), Ok(Some(_))));
        }
        let missing = || Err(io::Error::from_raw_os_error(libc::ENOENT));
        assert!(RetryingSource::start(missing).is_err());
        let mut retrying = RetryingSource { open: missing, source: None, has_logged: false };
        assert!(retrying.query(&[], 0).is_err(), "the source has disappeared");
    }

    #[test]
    fn ranges_are_written_again_to_a_monitor_that_was_busy() {
        // A directory instead of the file makes the monitor look busy. The results are the same
        // except for the error.
        let tree = damon::tests::sysfs(0);
        tree.make("0/state");
        let mut source = Source::Damon(Damon::open(tree.path(), 1).expect("opens"));
        let ranges = [range(0, 0, 4)];
        source.query(&ranges, 0).expect_err("it does not go on");
        tree.remove("0/state");
        source.query(&ranges, 20_000).expect("goes on");
        assert_eq!(tree.get("0/contexts/0/targets/0/regions/0/end"), (2 * MIB).to_string());
        assert_eq!(tree.get("0/state"), "update_schemes_stats");
    }

    #[test]
    fn damon_is_preferred_and_the_bitmap_replaces_it_if_unavailable() {
        let tree = Tree::new(&[]);
        tree.put("bitmap", [0; 4096]);
        let bitmap = tree.at("bitmap");
        let (free, taken) = (damon::tests::sysfs(0), damon::tests::sysfs(1));
        let open = |damon: &Path, bitmap: &Path| {
            let (damon, bitmap) = (damon.to_owned(), bitmap.to_owned());
            Source::open(&Roots { damon, bitmap, ..Roots::under(tree.path()) })
        };
        assert!(matches!(open(free.path(), &bitmap), Ok(Source::Damon(_))));
        let missing = tree.at("missing");
        for damon in [taken.path(), &missing] {
            let mut source = open(damon, &bitmap).expect("the bitmap");
            assert!(matches!(source, Source::Bitmap(_)), "{damon:?}");
            let ranges = [range(0, 0, 4)];
            assert_eq!(source.query(&ranges, 0).expect("marks"), []);
            // A plain file keeps its marks, as if there were no accesses.
            let found = source.query(&ranges, SPAN_MS).expect("reads");
            assert_eq!(found[0].report(&[zone(0, 4, 1)]).expect("a node").idle_bytes, 4 * MIB);
            open(damon, &missing).expect_err("neither");
        }
    }

    #[test]
    fn kernel_without_a_source_is_an_error() {
        let roots = Roots::under(Path::new("/missing"));
        let error = IdleWatch::start(&roots, || 0).expect_err("neither");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
