//! Measures delays caused by the host itself. A thread that is idle most of the time is woken at
//! intervals while the guest runs.
//!
//! The governor's thread is also idle most of the time. Between a report and the request to the
//! devices, it must be scheduled, read the report and decide. Here, a pipe wakes another thread of
//! the same priority, which reads a report and decides on it, without a VM. The VMM does not affect
//! its times, so they show how soon and how fast this host runs a thread at the same time.

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use balloon::controller::{Controller, Event, Rules};
use balloon::policy::Policy;
use balloon::proto::{
    AgentMessage, Blocks, Memory, NodeBlocks, PROTOCOL_VERSION, RawAgentMessage, RawHello,
    RawReport, Zone, encode_line,
};
use balloon::{HostView, Intake, MIB, Tier, TimeMs, ZoneSizes};

/// Interval between wakeups. Shorter intervals would disturb the guest. With longer intervals, a
/// burst would contain only few wakeups.
const INTERVAL: Duration = Duration::from_millis(20);
/// Nice value of the governor's thread (vmm/src/governor/task.rs).
const NICE: libc::c_int = -10;
const PAGE: u64 = 4096;
/// Interval between reports. The interval is long enough that no report is too early.
const REPORT_MS: u64 = 50;

/// Measured times of a wakeup.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct WakeTimes {
    /// Time from the write to the pipe until the thread ran.
    pub wake_s: f64,
    /// Time to read a report and decide on it.
    pub decide_s: f64,
}

/// Thread that is idle until another thread wakes it during a measurement.
pub(crate) struct IdleThread {
    started: Instant,
    wake_writer: PipeWriter,
    answered: Receiver<Answer>,
    pub times: Vec<WakeTimes>,
}

impl IdleThread {
    pub(crate) fn start() -> Result<Self> {
        let (wake_reader, wake_writer) = io::pipe().context("Cannot create a pipe")?;
        let (answers, answered) = mpsc::sync_channel(1);
        let started = Instant::now();
        thread::spawn(move || answers.send(idle(wake_reader, started, &answers)));
        Ok(Self { started, wake_writer, answered, times: Vec::new() })
    }

    /// Wakes the thread repeatedly while `work` is running.
    pub(crate) fn during<T>(&mut self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let waker = scope.spawn(|| {
                loop {
                    thread::sleep(INTERVAL);
                    if is_over.load(Ordering::Relaxed) {
                        return Ok(());
                    }
                    self.wake()?;
                }
            });
            let result = work();
            is_over.store(true, Ordering::Relaxed);
            waker.join().expect("it does not panic").and(result)
        })
    }

    /// Wakes the thread and waits for its answer, so that it is idle before the next wakeup.
    fn wake(&mut self) -> Result<()> {
        let now_ns = u64::try_from(self.started.elapsed().as_nanos())?;
        self.wake_writer.write_all(&now_ns.to_ne_bytes())?;
        self.times.extend(self.answered.recv().context("The idle thread has ended")??);
        Ok(())
    }
}

/// Times of a wakeup, or the reason why the thread ended.
type Answer = Result<Option<WakeTimes>>;

/// Runs until the other end of the pipe has been closed.
fn idle(mut wake_reader: PipeReader, started: Instant, answers: &SyncSender<Answer>) -> Answer {
    // SAFETY: the call takes no pointers. On Linux, 0 means the calling thread. Without the
    // privilege, the thread keeps its priority, as in the governor.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
    let mut governor = Governor::new()?;
    let mut line = governor.next_line();
    let mut sent_ns = [0; 8];
    while wake_reader.read(&mut sent_ns)? == sent_ns.len() {
        let woken = started.elapsed();
        governor.decide(&line)?;
        let decided = started.elapsed();
        let wake_s =
            woken.saturating_sub(Duration::from_nanos(u64::from_ne_bytes(sent_ns))).as_secs_f64();
        let decide_s = (decided - woken).as_secs_f64();
        line = governor.next_line();
        if answers.send(Ok(Some(WakeTimes { wake_s, decide_s }))).is_err() {
            break;
        }
    }
    Ok(None)
}

/// Parts of the governor that do not need a VM.
struct Governor {
    controller: Controller,
    intake: Intake,
    host: HostView,
    seq: u64,
}

impl Governor {
    fn new() -> Result<Self> {
        let policy = Policy::from_name("psi").context("The policy psi does not exist")?;
        let zones = vec![ZoneSizes::empty(0, Tier::Pm, 768 * MIB)];
        let host = HostView {
            boot_bytes: 384 * MIB,
            zones,
            pool_free_bytes: 1 << 30,
            ..HostView::default()
        };
        let controller = Controller::new(policy, Rules::default())?;
        let mut governor = Self { controller, intake: Intake::new(TimeMs(0)), host, seq: 0 };
        let hello = RawHello {
            version: PROTOCOL_VERSION,
            agent_version: "0.1.0".to_owned(),
            kernel_release: "6.12".to_owned(),
            preemption: "voluntary".to_owned(),
            page_size_bytes: PAGE,
            ..RawHello::default()
        };
        governor.decide(&line(&RawAgentMessage::Hello(hello)))?;
        Ok(governor)
    }

    /// Returns the next report of a guest with 384 MiB and enough free memory.
    fn next_line(&mut self) -> Vec<u8> {
        self.seq += 1;
        let pages = |mib: u64| mib * MIB / PAGE;
        let zone = Zone {
            free_pages: pages(200),
            min_pages: 500,
            low_pages: 700,
            high_pages: 900,
            managed_pages: pages(360),
            ..Zone::default()
        };
        let node = NodeBlocks { online_bytes: 384 * MIB, ..NodeBlocks::default() };
        line(&RawAgentMessage::Report(RawReport {
            version: PROTOCOL_VERSION,
            seq: self.seq,
            monotonic_ms: self.seq * REPORT_MS,
            memory: Memory {
                total_bytes: 360 * MIB,
                free_bytes: 200 * MIB,
                available_bytes: 220 * MIB,
                ..Memory::default()
            },
            zones: vec![zone],
            blocks: Blocks { block_bytes: 128 * MIB, nodes: vec![node], ..Blocks::default() },
            ..RawReport::default()
        }))
    }

    fn decide(&mut self, line: &[u8]) -> Result<()> {
        let now = TimeMs(self.seq * REPORT_MS);
        match self.intake.accept_line(line, now) {
            Ok(AgentMessage::Report(report)) => {
                let plan = self.controller.step(Event::Report(&report), &self.host, now);
                std::hint::black_box(plan);
                Ok(())
            }
            Ok(AgentMessage::Hello(_)) => Ok(()),
            Err(refusal) => bail!("The report was refused: {refusal}"),
        }
    }
}

/// Encodes a message, without the newline.
fn line(message: &RawAgentMessage) -> Vec<u8> {
    let mut line = Vec::new();
    encode_line(message, &mut line);
    line.pop();
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_wakeup_and_decision_are_measured() {
        let mut thread = IdleThread::start().unwrap();
        while thread.times.len() < 3 {
            let work = || {
                thread::sleep(2 * INTERVAL);
                Ok(())
            };
            thread.during(work).unwrap();
        }
        let times = thread.times;
        assert!(times.iter().all(|time| time.wake_s > 0.0 && time.decide_s > 0.0), "{times:?}");
    }

    #[test]
    fn consecutive_reports_are_accepted() {
        let mut governor = Governor::new().unwrap();
        for _ in 0..100 {
            let line = governor.next_line();
            governor.decide(&line).unwrap();
        }
        assert!(governor.decide(b"no report").is_err());
    }
}
