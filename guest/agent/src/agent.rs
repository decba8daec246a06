//! State of the agent that is kept across connections, and the loop that connects to the VMM.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use foreshore_proto::{Cause, PROTOCOL_VERSION, RawReport};
use rustix::event::PollFlags;

use crate::args::{Address, Online};
use crate::blocks::{BlockReader, BlockWatch, ChangeHints};
use crate::idle::IdleWatch;
use crate::kernel_blocks::KernelBlocks;
use crate::proc::{Proc, ProcError};
use crate::reserve::Reserve;
use crate::session::{Session, SessionError};
use crate::trigger::Triggers;
use crate::tune::Tuning;
use crate::{logged, sys};

/// Shortest and longest wait before the next attempt to connect.
const FIRST_BACK_OFF_MS: u64 = 100;
const MAX_BACK_OFF_MS: u64 = 5_000;

/// Duration of a connection after which the agent reconnects with the shortest wait again.
const GOOD_CONNECTION_MS: u64 = 10_000;

/// Interval between readings of memory while no reports can be sent.
const OBSERVE_INTERVAL_MS: u64 = 1_000;

#[derive(Debug)]
pub(crate) struct Agent {
    pub(crate) proc: Proc,
    pub blocks: Option<BlockWatch>,
    /// Set to make the block thread start to bring blocks online.
    pub(crate) start_onlining: bool,
    pub triggers: Option<Triggers>,
    /// Descriptor that becomes readable when the agent must end.
    pub termination: Option<OwnedFd>,
    pub reserve: Option<Reserve>,
    /// Memory that the VMM can add, according to its last settings.
    pub(crate) hotplug_bytes: u64,
    pub kernel_blocks: Option<KernelBlocks>,
    pub tuning: Option<Tuning>,
    pub idle: Option<IdleWatch>,
    pub(crate) report: RawReport,
    observed_ms: u64,
}

impl Agent {
    /// Opens the files that reports are read from. Outside of tests, `proc_root` is /proc and
    /// `memory_root` is /sys/devices/system/memory. The caller sets the optional fields: the block
    /// watch, the triggers, the termination descriptor, and all that change the guest's settings.
    pub(crate) fn open(proc_root: &Path, memory_root: &Path) -> Result<Self, ProcError> {
        let mut blocks = BlockReader::new(memory_root, Online::None);
        blocks.read(ChangeHints::default(), sys::monotonic_ms);
        let report = RawReport {
            version: PROTOCOL_VERSION,
            blocks: blocks.blocks().clone(),
            ..RawReport::default()
        };
        Ok(Agent {
            proc: Proc::open(proc_root)?,
            blocks: None,
            start_onlining: true,
            triggers: None,
            termination: None,
            reserve: None,
            hotplug_bytes: 0,
            kernel_blocks: None,
            tuning: None,
            idle: None,
            report,
            observed_ms: 0,
        })
    }

    pub(crate) fn make_report(&mut self, cause: Cause) -> Result<&RawReport, ProcError> {
        self.observe()?;
        self.report.cause = cause;
        self.report.monotonic_ms = self.observed_ms;
        self.report.seq = self.report.seq.saturating_add(1);
        Ok(&self.report)
    }

    /// Reads the state of memory and adapts the guest's settings to it.
    fn observe(&mut self) -> Result<(), ProcError> {
        // Also set before an error, so that a failed reading is not retried immediately.
        self.observed_ms = sys::monotonic_ms();
        self.proc.fill(&mut self.report, self.observed_ms)?;
        self.observed_ms = sys::monotonic_ms();
        if let Some(watch) = &mut self.blocks {
            let total_bytes = self.report.memory.total_bytes;
            if let Some((blocks, ranges)) =
                watch.poll(total_bytes, self.observed_ms, &mut self.start_onlining)
            {
                self.report.blocks = blocks;
                if let Some(idle) = &mut self.idle {
                    idle.set_ranges(ranges);
                }
            }
        }
        if let Some(idle) = &mut self.idle {
            idle.poll(&self.report.zones, self.observed_ms, &mut self.report.idle);
        }
        self.reserve.take_if(|reserve| {
            let result = reserve.adapt(&self.report.zones, self.hotplug_bytes);
            logged("set vm.lowmem_reserve_ratio", result).is_none()
        });
        if let Some(kernel_blocks) = &mut self.kernel_blocks {
            // If a block was converted, makes the block thread read all blocks immediately, so that
            // a report follows soon.
            self.start_onlining |=
                kernel_blocks.poll(&self.report, self.proc.other_user_pages(), self.observed_ms);
        }
        if let Some(tuning) = &mut self.tuning {
            let result = tuning.adapt(&self.report.zones, self.report.memory.total_bytes);
            // `tuning` is kept after an error, because settings that were already written must be
            // restored when the agent ends.
            logged("adapt the kernel's settings", result);
        }
        Ok(())
    }

    /// Time of the next reading of memory if no report is sent.
    pub(crate) fn observe_due_ms(&self) -> u64 {
        self.observed_ms.saturating_add(OBSERVE_INTERVAL_MS)
    }

    /// Reads memory if a reading is due. A VMM that reads no reports may still plug memory.
    pub(crate) fn observe_if_due(&mut self) -> Result<(), ProcError> {
        if sys::monotonic_ms() >= self.observe_due_ms() { self.observe() } else { Ok(()) }
    }

    /// Connects and sends reports until termination is requested.
    pub(crate) fn run(&mut self, address: &Address) {
        self.run_sessions(address);
        if let Some(tuning) = &mut self.tuning {
            logged("restore the kernel's settings", tuning.restore());
        }
        if let Some(idle) = self.idle.take() {
            idle.stop();
        }
        if let Some(reserve) = self.reserve.take() {
            logged("restore vm.lowmem_reserve_ratio", reserve.restore());
        }
    }

    fn run_sessions(&mut self, address: &Address) {
        let mut back_off_ms = FIRST_BACK_OFF_MS;
        let mut last_error = String::new();
        loop {
            let start_ms = sys::monotonic_ms();
            let Err(error) = self.connect_and_report(address);
            if matches!(error, SessionError::Terminated) {
                return;
            }
            if sys::monotonic_ms().saturating_sub(start_ms) >= GOOD_CONNECTION_MS {
                back_off_ms = FIRST_BACK_OFF_MS;
            }
            log_once(error, &mut last_error);
            if self.wait_for_termination(back_off_ms) {
                return;
            }
            back_off_ms = (back_off_ms * 2).min(MAX_BACK_OFF_MS);
        }
    }

    fn connect_and_report(
        &mut self,
        address: &Address,
    ) -> Result<std::convert::Infallible, SessionError> {
        let mut session = Session::connect(self, address)?;
        loop {
            session.handle_event()?;
        }
    }

    /// Waits for `wait_ms` and keeps reading memory. Returns true immediately if termination is
    /// requested.
    pub(crate) fn wait_for_termination(&mut self, wait_ms: u64) -> bool {
        let until_ms = sys::monotonic_ms().saturating_add(wait_ms);
        loop {
            let now_ms = sys::monotonic_ms();
            if now_ms >= until_ms {
                return false;
            }
            let termination = self.termination.as_ref().map(AsFd::as_fd);
            let timeout_ms = until_ms.min(self.observe_due_ms()).saturating_sub(now_ms);
            let events = sys::poll([(termination, PollFlags::IN)], timeout_ms);
            if events.is_ok_and(|[termination]| !termination.is_empty()) {
                return true;
            }
            // The error is ignored here, because the next report returns it again.
            let _ = self.observe_if_due();
        }
    }
}

/// Prints an error unless the previous error was the same. Otherwise a VMM that is unreachable for
/// a day would fill the log.
fn log_once(error: SessionError, last_error: &mut String) {
    let text = format!("{:#}", anyhow::Error::from(error));
    if text != *last_error {
        eprintln!("foreshore-agent: {text}");
        *last_error = text;
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};

    use foreshore_proto::{Zone, ZoneKind};

    use super::*;
    use crate::tree::Tree;

    /// Runs an agent whose termination is requested before it starts.
    fn run_to_the_end(mut agent: Agent, tree: &Tree) {
        let (termination, mut sender) = io::pipe().expect("pipe");
        sender.write_all(&[15]).expect("write");
        agent.termination = Some(termination.into());
        agent.run(&Address::Unix(tree.at("nobody")));
    }

    #[test]
    fn reserve_is_restored_at_the_end() {
        let setting = "lowmem_reserve_ratio";
        let tree = Tree::new(&[(setting, "256 256 32 0 0")]);
        let mut agent =
            Agent::open(Path::new("/proc"), tree.path()).expect("this machine has /proc");
        let reserve = Reserve::open(tree.path(), &tree.at("run"), "").expect("opens");
        // Fake zones of the guest. They replace those of the machine that runs the test, which the
        // agent would otherwise read while it waits.
        let zone = |kind, managed_pages| Zone { kind, managed_pages, ..Zone::default() };
        let zones = [zone(ZoneKind::Dma32, 90_000), zone(ZoneKind::Movable, 32_768)];
        agent.reserve.insert(reserve).adapt(&zones, 0).expect("writes");
        assert_ne!(tree.get(setting), "256 256 32 0 0");
        run_to_the_end(agent, &tree);
        assert_eq!(tree.get(setting), "256 256 32 0 0");
    }

    #[test]
    fn settings_written_before_a_failure_are_restored_at_the_end() {
        let defrag = "sys/kernel/mm/transparent_hugepage/defrag";
        // The file lists no nodes with CPUs, so each node with memory counts as PM.
        let tree = Tree::new(&[("sys/devices/system/node/has_cpu", "\n"), (defrag, "madvise")]);
        tree.make("sys/kernel/mm/transparent_hugepage/khugepaged/defrag");
        let mut agent =
            Agent::open(Path::new("/proc"), tree.path()).expect("this machine has /proc");
        agent.tuning = Some(Tuning::open(tree.path(), &tree.at("run")));
        agent.make_report(Cause::Rest).expect("reports");
        assert_eq!(tree.get(defrag), "always");
        run_to_the_end(agent, &tree);
        assert_eq!(tree.get(defrag), "madvise");
    }
}
