//! Runs one workload in one guest and measures the guest's memory.

use std::fmt::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use guest_tools::memory_sample::MemorySample;

use super::setup::{Config, GuestSize, MIB, Workload, boot};
use crate::Guest;
use crate::guest::Script;

/// Maximum time between two lines of a workload. A slower workload would take hours.
const SILENCE_LIMIT: Duration = Duration::from_secs(180);
/// Time limit for `guest-tool watch`, which gets little CPU time in a guest that swaps.
const WATCH_LIMIT: Duration = Duration::from_secs(600);
const WATCH_INTERVAL_MS: u64 = 250;
/// Number of samples after the end of the workload that may still show an earlier state.
const STALE_SAMPLES: usize = 2;
/// Time limit for memory to be returned after the end of the workload.
pub const RETURN_LIMIT: Duration = Duration::from_secs(60);
/// Percentage by which the held memory may exceed the needed memory.
pub const MAX_OVER_NEED_PERCENT: u64 = 10;

#[derive(Debug, Clone, Copy)]
pub struct Point {
    /// Time since the workload started. The time is negative before the start.
    pub at_s: f64,
    /// Memory of the VM: boot memory plus plugged memory.
    pub held_bytes: u64,
    /// Memory use seen by the guest.
    pub guest: MemorySample,
}

impl Point {
    /// Returns the needed memory: the used memory, but at least the boot memory, which cannot be
    /// removed.
    fn need_bytes(&self, boot_bytes: u64) -> u64 {
        self.used_bytes().max(boot_bytes)
    }

    fn used_bytes(&self) -> u64 {
        self.held_bytes.saturating_sub(self.guest.available_bytes)
    }
}

/// Returns the maximum memory that a VM may hold for a given need.
fn max_held_bytes(need_bytes: u64) -> u64 {
    need_bytes * (100 + MAX_OVER_NEED_PERCENT) / 100
}

/// When to stop watching a guest with a policy after its workload has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WatchEnd {
    /// When all memory has been returned, or after [`RETURN_LIMIT`].
    AllReturned,
    /// When the VM holds no more than the allowed memory, or after [`RETURN_LIMIT`].
    WithinLimit,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    pub met: bool,
    pub kind: ConditionKind,
    pub description: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConditionKind {
    /// The workload ran to its end.
    End,
    /// The result is the same as with DRAM alone.
    Result,
    /// No page has been swapped in.
    SwapIns,
    Kills,
    /// Held memory was returned in time.
    Return,
}

#[derive(Debug, Clone, Default)]
pub struct Outcome {
    pub phases: Vec<(String, f64)>,
    /// Result printed by the workload. `None` if it was killed or cut off.
    pub sum: Option<String>,
    /// Reason why the run has no result.
    pub failure: Option<String>,
    pub run_s: f64,
    pub swapped_in_bytes: u64,
    pub swapped_out_bytes: u64,
    pub major_faults: u64,
    pub oom_kills: u64,
    pub stall_some_s: f64,
    pub stall_full_s: f64,
    /// Largest amount of memory that the guest needed: its memory minus the lowest available
    /// memory.
    pub peak_need_bytes: u64,
    /// Largest amount of memory that the VM held.
    pub peak_held_bytes: u64,
    /// Held memory and needed memory at the end.
    pub last_held_bytes: u64,
    pub last_need_bytes: u64,
    /// Time from the end of the workload until the VM held no more than the allowed memory. `None`
    /// if that did not happen.
    pub return_s: Option<f64>,
    /// Upper bound of the time from a report to its plan in 99 of 100 cases. `None` if the policy
    /// does not use reports.
    pub report_to_plan_s: Option<f64>,
    pub points: Vec<Point>,
    /// Reports and decisions in the format of foreshore-sim. `None` for a run without a policy.
    pub trace: Option<Vec<u8>>,
}

pub fn run(
    workload: Workload,
    config: &Config,
    size: GuestSize,
    name: &str,
    watch_end: WatchEnd,
) -> Result<Outcome> {
    let testbed = boot(config, name, size)?;
    let watch = Watch::new(&testbed.guest)?;
    let mut outcome = std::thread::scope(|scope| {
        let watching = scope.spawn(|| watch.follow(&testbed.guest));
        let outcome = load(&testbed.guest, workload).and_then(|mut outcome| {
            if config.is_policy() && outcome.failure.is_none() {
                watch.wait_until_returned(testbed.boot_bytes, watch_end)?;
            }
            outcome.points = watch.points();
            Ok(outcome)
        });
        watch.end();
        let ended = watching.join().expect("the watch does not panic");
        let outcome = outcome?;
        // If the guest was cut off, it may not even be able to end the watch.
        if outcome.failure.is_none() {
            ended?;
        }
        Ok::<_, anyhow::Error>(outcome)
    })?;
    if outcome.failure.is_none() {
        testbed.guest.no_kernel_complaints()?;
        if config.is_policy() {
            let metrics = testbed.guest.metrics()?;
            // The policy `fixed` acts without reports.
            outcome.report_to_plan_s =
                metrics.quantile("foreshore_pressure_report_to_plan_seconds", 0.99).ok();
        }
    }
    outcome.sum_up(testbed.boot_bytes);
    outcome.trace = testbed.tear_down()?;
    Ok(outcome)
}

fn counters(guest: &Guest) -> Result<MemorySample> {
    MemorySample::from_line(guest.run_within(WATCH_LIMIT, "exec guest-tool counters")?.trim_end())
}

fn load(guest: &Guest, workload: Workload) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let before = counters(guest)?;
    let command = format!("exec guest-tool load {} {}", workload.name, workload.mib);
    let mut script = guest.start_script(SILENCE_LIMIT, &command)?;
    let started = Instant::now();
    let mut last_line = started;
    while let Some(line) = script.next_line() {
        last_line = Instant::now();
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["phase", name, micros] => {
                outcome.phases.push((name.to_owned(), micros.parse::<f64>()? / 1e6))
            }
            ["sum", sum] => outcome.sum = Some(sum.to_owned()),
            _ => bail!("Unexpected line of guest-tool load: {line:?}"),
        }
    }
    outcome.run_s = outcome.phases.iter().map(|(_, seconds)| seconds).sum();
    // There was no further line, so the workload has ended or has been silent for too long.
    outcome.failure = if last_line.elapsed() >= SILENCE_LIMIT {
        Some(format!("reached its time limit of {:.0} s", started.elapsed().as_secs_f64()))
    } else {
        match script.finish() {
            Ok(output) if output.code == 0 => None,
            Ok(output) => Some(format!("ended with {}: {}", output.code, output.stderr.trim())),
            Err(error) => Some(format!("connection lost: {error:#}")),
        }
    };
    if outcome.failure.is_some() {
        outcome.sum = None;
        return Ok(outcome);
    }
    let after = counters(guest)?;
    outcome.swapped_in_bytes = (after.swap_ins - before.swap_ins) * 4096;
    outcome.swapped_out_bytes = (after.swap_outs - before.swap_outs) * 4096;
    outcome.major_faults = after.major_faults - before.major_faults;
    outcome.oom_kills = after.oom_kills - before.oom_kills;
    outcome.stall_some_s = (after.stall_some_us - before.stall_some_us) as f64 / 1e6;
    outcome.stall_full_s = (after.stall_full_us - before.stall_full_us) as f64 / 1e6;
    Ok(outcome)
}

impl Outcome {
    fn sum_up(&mut self, boot_bytes: u64) {
        self.peak_need_bytes = self.points.iter().map(Point::used_bytes).max().unwrap_or(0);
        self.peak_held_bytes = self.points.iter().map(|point| point.held_bytes).max().unwrap_or(0);
        let Some(last) = self.points.last() else { return };
        self.last_held_bytes = last.held_bytes;
        self.last_need_bytes = last.need_bytes(boot_bytes);
        let enough = max_held_bytes(self.last_need_bytes);
        let over = self.points.iter().rposition(|point| point.held_bytes > enough);
        self.return_s = match over {
            None => Some(0.0),
            Some(index) => {
                self.points.get(index + 1).map(|point| (point.at_s - self.run_s).max(0.0))
            }
        };
    }

    /// Returns the conditions for a run under `psi`, compared with a run with DRAM alone. Times are
    /// not part of them.
    pub fn conditions(&self, alone: &Outcome) -> Vec<Condition> {
        let condition = |kind: ConditionKind, met: bool, description: String| Condition {
            met,
            kind,
            description,
        };
        let swapped = self.swapped_in_bytes / 4096;
        let (over, limit_s) = (MAX_OVER_NEED_PERCENT, RETURN_LIMIT.as_secs_f64());
        vec![
            condition(
                ConditionKind::End,
                self.failure.is_none(),
                format!("runs to its end {}", self.failure.as_deref().unwrap_or_default()),
            ),
            condition(
                ConditionKind::Result,
                !self.contradicts(alone),
                "the same result as with DRAM alone".to_owned(),
            ),
            condition(ConditionKind::SwapIns, swapped == 0, format!("{swapped} pages swapped in")),
            condition(
                ConditionKind::Kills,
                self.oom_kills == 0,
                format!("{} processes killed for memory", self.oom_kills),
            ),
            condition(
                ConditionKind::Return,
                self.return_s.is_some_and(|return_s| return_s <= limit_s),
                format!("memory held is within {over} % of need {limit_s:.0} s after the end"),
            ),
        ]
    }

    /// Returns true if this run has a result and it differs from that of `alone`.
    pub fn contradicts(&self, alone: &Outcome) -> bool {
        self.sum.is_some() && self.sum != alone.sum
    }

    pub fn csv(&self) -> String {
        let mut text =
            "elapsed_s,held_mib,total_mib,used_mib,available_mib,swapped_mib,swapped_in_mib,swapped_out_mib,\
                        major_faults,stall_some_s,stall_full_s\n"
                .to_owned();
        let mib = |bytes: u64| bytes as f64 / MIB as f64;
        let first = self.points.first().map(|point| point.guest).unwrap_or_default();
        for Point { at_s, held_bytes, guest } in &self.points {
            // Writing to a String cannot fail.
            let _ = writeln!(
                text,
                "{at_s:.2},{:.1},{:.1},{:.1},{:.1},{:.1},{:.1},{:.1},{},{:.3},{:.3}",
                mib(*held_bytes),
                mib(guest.total_bytes),
                mib(guest.used_bytes()),
                mib(guest.available_bytes),
                mib(guest.swapped_bytes),
                mib((guest.swap_ins - first.swap_ins) * 4096),
                mib((guest.swap_outs - first.swap_outs) * 4096),
                guest.major_faults - first.major_faults,
                (guest.stall_some_us - first.stall_some_us) as f64 / 1e6,
                (guest.stall_full_us - first.stall_full_us) as f64 / 1e6,
            );
        }
        text
    }
}

struct Watch {
    script: Mutex<Script>,
    points: Mutex<Vec<Point>>,
    ended: AtomicBool,
    started: Instant,
}

impl Watch {
    /// Starts the watch, and waits for its first sample.
    fn new(guest: &Guest) -> Result<Self> {
        let script = guest
            .start_script(WATCH_LIMIT, &format!("exec guest-tool watch {WATCH_INTERVAL_MS}"))?;
        let watch = Self {
            script: Mutex::new(script),
            points: Mutex::default(),
            ended: AtomicBool::new(false),
            started: Instant::now(),
        };
        ensure!(watch.read_sample(guest)?, "guest-tool watch ended at once");
        Ok(watch)
    }

    /// Reads the next line of the watch. Returns false at the end of the watch.
    fn read_sample(&self, guest: &Guest) -> Result<bool> {
        let Some(line) = self.script.lock().expect("no holder panics").next_line() else {
            return Ok(false);
        };
        let sample = MemorySample::from_line(&line)?;
        let info = guest.get("vm.info")?;
        let held_bytes = info["memory_actual_size"].as_u64();
        let held_bytes = held_bytes.with_context(|| format!("vm.info has no size: {info}"))?;
        let point = Point { at_s: self.started.elapsed().as_secs_f64(), held_bytes, guest: sample };
        self.points.lock().expect("no holder panics").push(point);
        Ok(true)
    }

    fn follow(&self, guest: &Guest) -> Result<()> {
        while !self.ended.load(Ordering::Relaxed) {
            ensure!(self.read_sample(guest)?, "guest-tool watch has ended");
        }
        Ok(())
    }

    /// Waits until memory has been returned. The recorded points show whether this happened in
    /// time.
    fn wait_until_returned(&self, boot_bytes: u64, watch_end: WatchEnd) -> Result<()> {
        let stale_len = self.points().len() + STALE_SAMPLES;
        let _timed_out = guest_tools::wait::wait_until("memory is back", RETURN_LIMIT, || {
            let points = self.points.lock().expect("no holder panics");
            Ok(points.last().filter(|_| points.len() > stale_len).is_some_and(|point| {
                let max_bytes = match watch_end {
                    WatchEnd::AllReturned => boot_bytes,
                    WatchEnd::WithinLimit => max_held_bytes(point.need_bytes(boot_bytes)),
                };
                point.held_bytes <= max_bytes
            }))
        });
        Ok(())
    }

    fn points(&self) -> Vec<Point> {
        self.points.lock().expect("no holder panics").clone()
    }

    fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unmet(outcome: &Outcome) -> Vec<ConditionKind> {
        let alone = Outcome { sum: Some("1".to_owned()), ..Outcome::default() };
        outcome
            .conditions(&alone)
            .iter()
            .filter(|found| !found.met)
            .map(|found| found.kind)
            .collect()
    }

    #[test]
    fn each_condition_can_fail_alone() {
        let good = Outcome {
            sum: Some("1".to_owned()),
            return_s: Some(1.0),
            run_s: 1e6,
            ..Outcome::default()
        };
        assert!(unmet(&good).is_empty());
        type Violation = fn(&mut Outcome);
        let violations: [(ConditionKind, Violation); 6] = [
            (ConditionKind::End, |outcome| outcome.failure = Some("cut off".to_owned())),
            (ConditionKind::Result, |outcome| outcome.sum = Some("2".to_owned())),
            (ConditionKind::SwapIns, |outcome| outcome.swapped_in_bytes = 4096),
            (ConditionKind::Kills, |outcome| outcome.oom_kills = 1),
            (ConditionKind::Return, |outcome| outcome.return_s = Some(61.0)),
            (ConditionKind::Return, |outcome| outcome.return_s = None),
        ];
        for (kind, violate) in violations {
            let mut outcome = good.clone();
            violate(&mut outcome);
            assert_eq!(unmet(&outcome), [kind]);
        }
    }

    #[test]
    fn held_memory_is_compared_with_used_and_boot_memory() {
        let point = |at_s: f64, held_mib: u64, available_mib: u64| Point {
            at_s,
            held_bytes: held_mib * MIB,
            guest: MemorySample { available_bytes: available_mib * MIB, ..MemorySample::default() },
        };
        let outcome = |points: Vec<Point>| {
            let mut outcome = Outcome { points, run_s: 10.0, ..Outcome::default() };
            outcome.sum_up(300 * MIB);
            outcome
        };
        let back = outcome(vec![point(5.0, 600, 0), point(11.0, 600, 500), point(14.0, 330, 200)]);
        assert_eq!((back.peak_need_bytes, back.last_need_bytes), (600 * MIB, 300 * MIB));
        assert_eq!(back.return_s, Some(4.0));
        assert_eq!(outcome(vec![point(5.0, 600, 0), point(14.0, 331, 200)]).return_s, None);
    }
}
