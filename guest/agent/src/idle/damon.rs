//! Uses DAMON through sysfs (Documentation/admin-guide/mm/damon/usage.rst). The kernel samples
//! accesses to physical addresses, in regions that it splits and merges by itself.
//!
//! Each node has a monitor with two schemes that only count bytes. One counts bytes without an
//! access during the span, and the other counts all bytes. Both are totals over all aggregations
//! since the monitor was started. Therefore, the ratio of their increases is the idle share,
//! however many aggregations there were between two calls.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use foreshore_proto::scale;

use super::{MAX_NODES, NodeResult, PERIOD_MS, SPAN_MS, nodes_of, span_bytes};
use crate::blocks::Range;

/// Sampling interval. In each interval, DAMON samples one page per region. With at most
/// [`MAX_REGIONS`] regions, this takes at most a few hundred microseconds of CPU time per second.
const SAMPLE_US: u64 = 1_000_000;
const AGGREGATION_US: u64 = 20_000_000;
const MIN_REGIONS: u64 = 10;
const MAX_REGIONS: u64 = 100;

/// Number of aggregations without an access after which a region is idle. The age of a region
/// starts at 0, so one more aggregation has passed by then.
const MIN_AGE: u64 = SPAN_MS * 1000 / AGGREGATION_US;

/// Value of an interval that DAMON ignores for physical addresses. An agent recognizes monitors of
/// a killed predecessor by this value.
const MARKER_US: u64 = 59_746_059;

/// Time for which a result is kept without new counts from the monitor: two periods.
const STALE_MS: u64 = 2 * PERIOD_MS;

/// Maximum number of ranges per monitor. More ranges are merged into one. Addresses between them
/// are not memory and are never accessed.
const MAX_RANGES: usize = 32;

/// Initial number of regions. The kernel splits regions at most once per aggregation, so with few
/// regions the first results would be coarse.
const FIRST_REGIONS: u64 = 32;
const REGION_STEP: u64 = 2 << 20;

/// Indexes of the schemes.
const IDLE: usize = 0;
const ALL: usize = 1;

#[derive(Debug)]
pub(super) struct Damon {
    monitors: Vec<Monitor>,
}

#[derive(Debug)]
struct Monitor {
    root: PathBuf,
    node: u32,
    ranges: Vec<Range>,
    started_ms: Option<u64>,
    /// Values of the schemes' counters at the last call.
    counted: [u64; 2],
    found: Option<NodeResult>,
    found_ms: u64,
}

impl Damon {
    /// Starts monitors for up to `nodes` nodes, unless another program uses DAMON. `root` is
    /// /sys/kernel/mm/damon/admin/kdamonds outside of tests.
    pub(super) fn open(root: &Path, nodes: u32) -> io::Result<Self> {
        let nodes = nodes.clamp(1, MAX_NODES);
        let count = count_of(root)?;
        if !(0..count).all(|number| is_ours(root, number)) {
            // The kind must not be ResourceBusy, because callers would treat the error as
            // temporary.
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "another program uses DAMON",
            ));
        }
        // Removes monitors left by a killed agent.
        Damon::stop(root);
        write(root, "nr_kdamonds", nodes)?;
        let monitors: Vec<Monitor> = (0..nodes).map(|node| Monitor::new(root, node)).collect();
        if let Err(error) = monitors.iter().try_for_each(Monitor::prepare) {
            // A partly configured monitor could not be recognized as the agent's own later.
            let _ = write(root, "nr_kdamonds", 0);
            return Err(error);
        }
        Ok(Damon { monitors })
    }

    /// Removes the agent's monitors, so that other programs can use DAMON.
    pub(super) fn stop(root: &Path) {
        let count = count_of(root).unwrap_or(0);
        if (0..count).all(|number| is_ours(root, number)) {
            for number in 0..count {
                // Writing to a monitor that is not running returns an error.
                let _ = fs::write(root.join(format!("{number}/state")), "off");
            }
            let _ = fs::write(root.join("nr_kdamonds"), "0");
        }
    }

    /// Sets the ranges to monitor, and returns the idle memory found since the last call. May block
    /// for one aggregation interval.
    pub(super) fn query(&mut self, ranges: &[Range], now_ms: u64) -> io::Result<Vec<NodeResult>> {
        let nodes = nodes_of(ranges);
        for monitor in &mut self.monitors {
            let ranges = nodes.iter().find(|(node, _)| *node == monitor.node);
            monitor.watch(
                ranges.map(|(_, ranges)| merge_ranges(ranges)).unwrap_or_default(),
                now_ms,
            )?;
            monitor.count(now_ms);
            // If there are no new counts, because the schemes have stopped or cannot be read, the
            // last result is kept for `STALE_MS`.
            let is_stale = now_ms.saturating_sub(monitor.found_ms) > STALE_MS;
            monitor.found = monitor.found.filter(|_| !is_stale);
        }
        Ok(self.monitors.iter().filter_map(|monitor| monitor.found).collect())
    }
}

impl Monitor {
    fn new(root: &Path, node: u32) -> Self {
        Monitor {
            root: root.to_owned(),
            node,
            ranges: Vec::new(),
            started_ms: None,
            counted: [0; 2],
            found: None,
            found_ms: 0,
        }
    }

    fn write(&self, file: &str, value: impl ToString) -> io::Result<()> {
        write(&self.root, &format!("{}/{file}", self.node), value)
    }

    /// Sets all parameters except the addresses.
    fn prepare(&self) -> io::Result<()> {
        let attributes = "contexts/0/monitoring_attrs";
        self.write("contexts/nr_contexts", 1)?;
        self.write(&format!("{attributes}/intervals/update_us"), MARKER_US)?;
        self.write("contexts/0/operations", "paddr")?;
        self.write(&format!("{attributes}/intervals/sample_us"), SAMPLE_US)?;
        self.write(&format!("{attributes}/intervals/aggr_us"), AGGREGATION_US)?;
        self.write(&format!("{attributes}/nr_regions/min"), MIN_REGIONS)?;
        self.write(&format!("{attributes}/nr_regions/max"), MAX_REGIONS)?;
        self.write("contexts/0/targets/nr_targets", 1)?;
        self.write("contexts/0/schemes/nr_schemes", 2)?;
        for (scheme, max_accesses, min_age) in [(IDLE, 0, MIN_AGE), (ALL, u32::MAX, 0)] {
            let scheme = format!("contexts/0/schemes/{scheme}");
            self.write(&format!("{scheme}/action"), "stat")?;
            self.write(&format!("{scheme}/access_pattern/sz/max"), u64::MAX)?;
            self.write(&format!("{scheme}/access_pattern/nr_accesses/max"), max_accesses)?;
            self.write(&format!("{scheme}/access_pattern/age/min"), min_age)?;
            self.write(&format!("{scheme}/access_pattern/age/max"), u32::MAX)?;
        }
        Ok(())
    }

    /// Restarts the monitor with `ranges`, unless they are unchanged.
    fn watch(&mut self, ranges: Vec<Range>, now_ms: u64) -> io::Result<()> {
        if ranges == self.ranges {
            return Ok(());
        }
        if ranges.is_empty() {
            self.write("state", "off")?;
            *self = Monitor::new(&self.root, self.node);
            return Ok(());
        }
        // On a commit, DAMON keeps its statistics for unchanged addresses, unless smaller regions
        // are written.
        let was_started = self.started_ms.is_some();
        let first = if was_started { ranges.clone() } else { split_ranges(&ranges) };
        let regions = "contexts/0/targets/0/regions";
        self.write(&format!("{regions}/nr_regions"), first.len())?;
        for (region, range) in first.iter().enumerate() {
            self.write(&format!("{regions}/{region}/start"), range.start)?;
            self.write(&format!("{regions}/{region}/end"), range.end)?;
        }
        self.write("state", if was_started { "commit" } else { "on" })?;
        self.ranges = ranges;
        self.started_ms.get_or_insert(now_ms);
        Ok(())
    }

    /// Updates the result from the counts of the schemes.
    fn count(&mut self, now_ms: u64) {
        let Some(started_ms) = self.started_ms else { return };
        if self.write("state", "update_schemes_stats").is_err() {
            // Another program has disabled the monitor, and the agent does not enable it again.
            self.found = None;
            return;
        }
        let [Some(idle), Some(all)] = [IDLE, ALL].map(|scheme| self.counted(scheme)) else {
            return;
        };
        let [idle_before, all_before] = std::mem::replace(&mut self.counted, [idle, all]);
        let (Some(idle), Some(all)) = (idle.checked_sub(idle_before), all.checked_sub(all_before))
        else {
            return;
        };
        // Memory counts as idle only after it has been monitored for the whole span.
        let is_known = now_ms.saturating_sub(started_ms) >= SPAN_MS + AGGREGATION_US / 1000;
        if all > 0 && is_known {
            let span_bytes = span_bytes(&self.ranges);
            let idle_bytes = scale(span_bytes, idle.min(all), all);
            self.found = Some(NodeResult::new(self.node, idle_bytes, span_bytes, true));
            self.found_ms = now_ms;
        }
    }

    fn counted(&self, scheme: usize) -> Option<u64> {
        let file = format!("{}/contexts/0/schemes/{scheme}/stats/sz_tried", self.node);
        fs::read_to_string(self.root.join(file)).ok()?.trim().parse().ok()
    }
}

fn write(root: &Path, file: &str, value: impl ToString) -> io::Result<()> {
    fs::write(root.join(file), value.to_string())
        .map_err(|error| io::Error::new(error.kind(), format!("{file} of DAMON: {error}")))
}

/// Number of monitors, including those of other programs.
fn count_of(root: &Path) -> io::Result<u32> {
    let text = fs::read_to_string(root.join("nr_kdamonds"))?;
    text.trim().parse().map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
}

fn is_ours(root: &Path, number: u32) -> bool {
    let file = format!("{number}/contexts/0/monitoring_attrs/intervals/update_us");
    fs::read_to_string(root.join(file)).is_ok_and(|text| text.trim() == MARKER_US.to_string())
}

/// Merges the ranges into one if there are too many for a monitor.
fn merge_ranges(ranges: &[Range]) -> Vec<Range> {
    match (ranges.first(), ranges.last()) {
        (Some(first), Some(last)) if ranges.len() > MAX_RANGES => {
            vec![Range { end: last.end, ..*first }]
        }
        _ => ranges.to_vec(),
    }
}

/// Splits the addresses into about [`FIRST_REGIONS`] pieces of equal size.
fn split_ranges(ranges: &[Range]) -> Vec<Range> {
    let piece_bytes =
        span_bytes(ranges).div_ceil(FIRST_REGIONS).next_multiple_of(REGION_STEP).max(REGION_STEP);
    let cut = |range: &Range| {
        let (node, end) = (range.node, range.end);
        let starts = (range.start..end).step_by(usize::try_from(piece_bytes).unwrap_or(usize::MAX));
        starts.map(move |start| Range {
            node,
            start,
            end: start.saturating_add(piece_bytes).min(end),
        })
    };
    ranges.iter().flat_map(cut).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::tests::range;
    use super::*;
    use crate::tree::Tree;

    const MIB: u64 = 1 << 20;

    /// Files that the kernel creates when the number of objects is written. `taken` is the number
    /// of monitors of another program.
    pub(crate) fn sysfs(taken: u32) -> Tree {
        let tree = Tree::new(&[]);
        tree.put("nr_kdamonds", format!("{taken}\n"));
        for number in 0..MAX_NODES {
            let context = format!("{number}/contexts/0");
            tree.put(&format!("{context}/monitoring_attrs/intervals/update_us"), "1000000\n");
            tree.make(&format!("{context}/monitoring_attrs/nr_regions"));
            for scheme in [IDLE, ALL] {
                for part in ["stats", "access_pattern/sz", "access_pattern/age"] {
                    tree.make(&format!("{context}/schemes/{scheme}/{part}"));
                }
                tree.make(&format!("{context}/schemes/{scheme}/access_pattern/nr_accesses"));
            }
            for region in 0..=2 * MAX_RANGES {
                tree.make(&format!("{context}/targets/0/regions/{region}"));
            }
        }
        tree
    }

    fn count(tree: &Tree, number: u32, idle: u64, all: u64) {
        for (scheme, bytes) in [(IDLE, idle), (ALL, all)] {
            let file = format!("{number}/contexts/0/schemes/{scheme}/stats/sz_tried");
            tree.put(&file, format!("{bytes}\n"));
        }
    }

    #[test]
    fn each_node_has_a_monitor_of_its_addresses_and_schemes_that_only_count() {
        let tree = sysfs(0);
        let mut damon = Damon::open(tree.path(), 2).expect("opens");
        assert_eq!(tree.get("nr_kdamonds"), "2");
        let ranges = [range(0, 0, 384), range(1, 5120, 5632), range(0, 4096, 4224)];
        assert_eq!(damon.query(&ranges, 1_000).expect("writes"), []);
        let context = |file: &str| tree.get(&format!("0/contexts/0/{file}"));
        assert_eq!(context("operations"), "paddr");
        // 512 MiB in pieces of 16 MiB. The last one is in the second range.
        assert_eq!(context("targets/0/regions/nr_regions"), "32");
        assert_eq!(context("targets/0/regions/1/start"), (16 * MIB).to_string());
        assert_eq!(context("targets/0/regions/31/start"), (4208 * MIB).to_string());
        assert_eq!(context("targets/0/regions/31/end"), (4224 * MIB).to_string());
        assert_eq!(tree.get("1/contexts/0/targets/0/regions/0/start"), (5120 * MIB).to_string());
        damon.query(&[range(0, 0, 384)], 2_000).expect("writes");
        assert_eq!(context("targets/0/regions/nr_regions"), "1", "pieces keep their known age");
        for (scheme, accesses, age) in [(IDLE, "0", "3"), (ALL, "4294967295", "0")] {
            let scheme = |file: &str| context(&format!("schemes/{scheme}/{file}"));
            assert_eq!(scheme("action"), "stat");
            assert_eq!(scheme("access_pattern/nr_accesses/max"), accesses);
            assert_eq!(scheme("access_pattern/age/min"), age);
        }
        assert!(!tree.at("2/state").exists(), "no monitor for a node without ranges");
    }

    #[test]
    fn idle_part_since_the_last_look_is_reported_after_the_span() {
        let tree = sysfs(0);
        let mut damon = Damon::open(tree.path(), 2).expect("opens");
        let ranges = [range(1, 5120, 5632)];
        damon.query(&ranges, 0).expect("writes");
        // Both counts in MiB, the time, and the expected idle memory.
        for (counted, now_ms, idle_mib) in [
            // It is too early for a result.
            (Some([0, 1000]), 79_999, None),
            (Some([300, 2200]), 80_000, Some(128)),
            // Without new counts, the result is kept for two calls.
            (None, 100_000, Some(128)),
            (None, 120_000, Some(128)),
            (None, 140_000, None),
            (Some([400, 2600]), 160_000, Some(128)),
            // The counters have restarted.
            (Some([100, 200]), 120_000, Some(128)),
            (Some([300, 400]), 140_000, Some(512)),
        ] {
            if let Some([idle, all]) = counted {
                count(&tree, 1, idle * MIB, all * MIB);
            }
            let found =
                idle_mib.map(|idle_mib| NodeResult::new(1, idle_mib * MIB, 512 * MIB, true));
            let queried = damon.query(&ranges, now_ms).expect("writes");
            assert_eq!(queried, Vec::from_iter(found), "{counted:?} at {now_ms}");
        }
        assert_eq!(tree.get("1/state"), "update_schemes_stats");
        count(&tree, 1, 300 * MIB, 500 * MIB);
        let less = [range(1, 5120, 5376)];
        let found = NodeResult::new(1, 0, 256 * MIB, true);
        assert_eq!(damon.query(&less, 160_000).expect("writes"), [found], "known at once");
        assert_eq!(damon.query(&[], 180_000).expect("writes"), [], "the node has gone");
        assert_eq!(tree.get("1/state"), "off");
    }

    #[test]
    fn monitor_of_another_program_is_left_alone() {
        let tree = sysfs(1);
        let error = Damon::open(tree.path(), 2).expect_err("taken");
        assert_eq!(error.to_string(), "another program uses DAMON");
        Damon::stop(tree.path());
        assert_eq!(tree.get("nr_kdamonds"), "1\n");
        assert!(!tree.at("0/state").exists());
        assert_eq!(tree.get("0/contexts/0/monitoring_attrs/intervals/update_us"), "1000000\n");
    }

    #[test]
    fn monitors_of_a_killed_agent_are_replaced_and_removed_at_the_end() {
        let tree = sysfs(0);
        let ranges = [range(0, 0, 384)];
        Damon::open(tree.path(), 2).expect("opens").query(&ranges, 0).expect("writes");
        assert_eq!(tree.get("0/state"), "update_schemes_stats", "it runs");
        let mut next = Damon::open(tree.path(), 2).expect("its own");
        assert_eq!(["0/state", "nr_kdamonds"].map(|file| tree.get(file)), ["off", "2"]);
        next.query(&ranges, 0).expect("writes");
        Damon::stop(tree.path());
        assert_eq!(["0/state", "nr_kdamonds"].map(|file| tree.get(file)), ["off", "0"]);
    }

    #[test]
    fn partly_prepared_monitors_are_removed() {
        let tree = sysfs(0);
        // A write to a directory fails.
        tree.make("1/contexts/0/operations");
        Damon::open(tree.path(), 2).expect_err("the second cannot be prepared");
        assert_eq!(tree.get("nr_kdamonds"), "0");
        tree.remove("1/contexts/0/operations");
        Damon::open(tree.path(), 2).expect("a later attempt succeeds");
    }

    #[test]
    fn pieces_cover_the_ranges_in_order_in_about_the_wanted_number() {
        let terabytes = 4u64 << 20;
        for ranges in [
            vec![range(0, 0, 1)],
            vec![range(0, 0, 384), range(0, 4096, 4224)],
            vec![range(0, 0, 3000), range(0, 4096, terabytes)],
            (0..MAX_RANGES as u64).map(|n| range(0, n * 256, n * 256 + 128)).collect(),
        ] {
            let pieces = split_ranges(&ranges);
            assert_eq!(span_bytes(&pieces), span_bytes(&ranges));
            assert!(pieces.is_sorted_by(|one, next| one.end <= next.start));
            assert!(pieces.len() <= FIRST_REGIONS as usize + ranges.len(), "{}", pieces.len());
            assert!(
                pieces.iter().all(|piece| ranges
                    .iter()
                    .any(|r| r.start <= piece.start && piece.end <= r.end))
            );
        }
        assert_eq!(split_ranges(&[]), []);
    }

    #[test]
    fn too_many_ranges_are_merged_into_one() {
        let many: Vec<Range> =
            (0..=MAX_RANGES as u64).map(|n| range(0, n * 256, n * 256 + 128)).collect();
        assert_eq!(merge_ranges(&many), [range(0, 0, MAX_RANGES as u64 * 256 + 128)]);
        assert_eq!(merge_ranges(&many[1..]).len(), MAX_RANGES);
        assert_eq!(merge_ranges(&[]), []);
    }
}
