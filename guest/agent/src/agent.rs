//! The loop: connect, report, reconnect.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::thread;
use std::time::Duration;

use foreshore_proto::{
    Cause, LineReader, NextLine, PROTOCOL_VERSION, RawAgentMessage, RawReport, Settings, VmmMessage,
    decode_vmm_message, encode_line, encode_report,
};
use thiserror::Error;

use crate::blocks::{BlockReader, BlockWatch};
use crate::pace::Pace;
use crate::proc::{Proc, ProcError, Trigger};
use crate::reserve::Reserve;
use crate::{kernel, sys};

/// First and longest wait before another attempt to connect.
const FIRST_BACK_OFF_MS: u64 = 100;
const MAX_BACK_OFF_MS: u64 = 5_000;

/// A connection that lasted this long was a good one: the next attempt after it is soon.
const GOOD_CONNECTION_MS: u64 = 10_000;

/// Until the VMM says something else, report fast while less than this part is available.
const DEFAULT_WATERMARK_PART: u64 = 5;

/// Why a connection ended.
#[derive(Debug, Error)]
pub enum SessionError {
    /// It could not be made.
    #[error("Cannot connect to vsock port {port} of context {cid}")]
    Connect {
        /// The VMM's context.
        cid: u32,
        /// The VMM's port.
        port: u32,
        /// What the kernel says.
        #[source]
        source: io::Error,
    },
    /// The VMM closed it.
    #[error("The VMM closed the connection")]
    Closed,
    /// It broke.
    #[error("The connection to the VMM broke")]
    Broken(#[from] io::Error),
    /// There is nothing to report.
    #[error("No report can be made")]
    Proc(#[from] ProcError),
}

/// Everything that outlives a connection.
#[derive(Debug)]
pub struct Agent {
    proc: Proc,
    blocks: Option<BlockWatch>,
    /// Have the thread take charge of blocks with its next request.
    take_charge: bool,
    trigger: Option<Trigger>,
    reserve: Option<Reserve>,
    report: RawReport,
}

impl Agent {
    /// Opens what reports are made of. Of the two arguments one is /proc and the other
    /// /sys/devices/system/memory.
    pub fn open(proc_root: &Path, memory_root: &Path) -> Result<Self, ProcError> {
        let mut blocks = BlockReader::new(memory_root);
        blocks.read(0, sys::monotonic_ms);
        let report =
            RawReport { version: PROTOCOL_VERSION, blocks: blocks.seen().clone(), ..RawReport::default() };
        Ok(Agent {
            proc: Proc::open(proc_root)?,
            blocks: None,
            take_charge: false,
            trigger: None,
            reserve: None,
            report,
        })
    }

    /// Asks the kernel to wake us when tasks wait for memory.
    pub fn arm_trigger(&mut self, proc_root: &Path) -> io::Result<()> {
        self.trigger = Some(Trigger::register(proc_root)?);
        Ok(())
    }

    /// Watches memory blocks from now on, and sees to it that plugged memory comes online movable.
    pub fn watch_blocks(&mut self, memory_root: &Path) -> io::Result<()> {
        self.blocks = Some(BlockWatch::start(BlockReader::new(memory_root), sys::monotonic_ms)?);
        self.take_charge = true;
        Ok(())
    }

    /// Keeps some DRAM for the kernel's own needs from now on.
    pub fn keep_reserve(&mut self, sysctl_root: &Path) -> io::Result<()> {
        self.reserve = Some(Reserve::open(sysctl_root)?);
        Ok(())
    }

    /// One report.
    pub fn take_report(&mut self, cause: Cause) -> Result<&RawReport, ProcError> {
        self.proc.fill(&mut self.report)?;
        self.take_blocks();
        if let Some(Err(error)) = self.reserve.as_mut().map(|reserve| reserve.adapt(&self.report.zones)) {
            eprintln!("foreshore-agent: Cannot set vm.lowmem_reserve_ratio: {error}");
            self.reserve = None;
        }
        self.report.cause = cause;
        self.report.monotonic_ms = sys::monotonic_ms();
        self.report.seq = self.report.seq.saturating_add(1);
        Ok(&self.report)
    }

    fn take_blocks(&mut self) {
        let Some(watch) = &mut self.blocks else { return };
        let total_bytes = self.report.memory.total_bytes;
        if let Some(blocks) = watch.poll(total_bytes, sys::monotonic_ms(), &mut self.take_charge) {
            self.report.blocks = blocks;
        }
    }

    /// Reports until the end of time.
    pub fn run(&mut self, cid: u32, port: u32) -> ! {
        let mut back_off_ms = FIRST_BACK_OFF_MS;
        let mut said = String::new();
        loop {
            let start_ms = sys::monotonic_ms();
            let Err(error) = self.connect_and_report(cid, port);
            if sys::monotonic_ms().saturating_sub(start_ms) >= GOOD_CONNECTION_MS {
                back_off_ms = FIRST_BACK_OFF_MS;
            }
            say_once(&error, &mut said);
            thread::sleep(Duration::from_millis(back_off_ms));
            back_off_ms = (back_off_ms * 2).min(MAX_BACK_OFF_MS);
        }
    }

    fn connect_and_report(&mut self, cid: u32, port: u32) -> Result<std::convert::Infallible, SessionError> {
        let connected = sys::connect_vsock(cid, port);
        let socket = connected.map_err(|source| SessionError::Connect { cid, port, source })?;
        let mut session = Session::new(self, socket)?;
        loop {
            session.turn()?;
        }
    }
}

/// Says an error unless it is the one that was said last: a VMM that is away for a day fills no log.
fn say_once(error: &SessionError, said: &mut String) {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    if text != *said {
        eprintln!("foreshore-agent: {text}");
        *said = text;
    }
}

/// One connection.
struct Session<'a> {
    agent: &'a mut Agent,
    socket: OwnedFd,
    pace: Pace,
    lines: LineReader,
    /// What is to be sent, and how much of it has been.
    out: Vec<u8>,
    sent: usize,
}

impl<'a> Session<'a> {
    fn new(agent: &'a mut Agent, socket: OwnedFd) -> Result<Self, SessionError> {
        let watermark_bytes = agent.proc.memory()?.total_bytes / DEFAULT_WATERMARK_PART;
        let mut session = Session {
            agent,
            socket,
            pace: Pace::new(Settings::with_watermark(watermark_bytes)),
            lines: LineReader::new(),
            out: Vec::new(),
            sent: 0,
        };
        session.agent.report.seq = 0;
        encode_line(&RawAgentMessage::Hello(kernel::hello()), &mut session.out);
        session.flush()?;
        Ok(session)
    }

    /// Waits for whatever comes first, and answers it.
    fn turn(&mut self) -> Result<(), SessionError> {
        let (readable, writable, stalled) = self.wait()?;
        if readable {
            self.receive()?;
        }
        if writable {
            self.flush()?;
        }
        // A VMM that does not read gets the newest figures when it does, not those of a minute ago.
        if self.sent < self.out.len() {
            return Ok(());
        }
        let now_ms = sys::monotonic_ms();
        if stalled {
            self.pace.alert(now_ms);
            return self.send_report(Cause::Stall);
        }
        if now_ms >= self.pace.report_due_ms() {
            return self.send_report(Cause::Rest);
        }
        if now_ms >= self.pace.look_due_ms() {
            self.look(now_ms)?;
        }
        Ok(())
    }

    /// Sleeps until the socket or the trigger is ready, or something is due.
    fn wait(&mut self) -> Result<(bool, bool, bool), SessionError> {
        let pending = self.sent < self.out.len();
        let due_ms = self.pace.report_due_ms().min(self.pace.look_due_ms());
        let timeout_ms = if pending { MAX_BACK_OFF_MS } else { due_ms.saturating_sub(sys::monotonic_ms()) };
        let events = libc::POLLIN | if pending { libc::POLLOUT } else { 0 };
        let trigger = self.agent.trigger.as_ref().map(AsFd::as_fd);
        let mut fds = [sys::pollfd(Some(self.socket.as_fd()), events), sys::pollfd(trigger, libc::POLLPRI)];
        sys::poll(&mut fds, timeout_ms)?;
        let [socket, trigger] = fds.map(|fd| fd.revents);
        if trigger & (libc::POLLERR | libc::POLLNVAL) != 0 {
            // The kernel took it away; without it the loop goes on at its own pace.
            self.agent.trigger = None;
        }
        let ended = libc::POLLIN | libc::POLLHUP | libc::POLLERR;
        Ok((socket & ended != 0, socket & libc::POLLOUT != 0, trigger & libc::POLLPRI != 0))
    }

    /// A cheap look at free memory, and a dearer one at what is available if that has fallen.
    fn look(&mut self, now_ms: u64) -> Result<(), SessionError> {
        let free_bytes = sys::free_bytes().unwrap_or(0);
        if self.pace.is_suspicious(free_bytes) && self.pace.is_news(self.agent.proc.available_bytes()?) {
            self.pace.alert(now_ms);
            return self.send_report(Cause::Rest);
        }
        self.pace.looked(free_bytes, now_ms);
        Ok(())
    }

    fn send_report(&mut self, cause: Cause) -> Result<(), SessionError> {
        self.agent.take_report(cause)?;
        let report = &mut self.agent.report;
        let memory = report.memory;
        if cause == Cause::Rest && self.pace.is_fast(memory.available_bytes, report.monotonic_ms) {
            report.cause = Cause::Watermark;
        }
        encode_report(report, &mut self.out);
        self.sent = 0;
        self.pace.reported(memory.free_bytes, memory.available_bytes, report.monotonic_ms);
        self.flush()
    }

    fn flush(&mut self) -> Result<(), SessionError> {
        while self.sent < self.out.len() {
            match sys::send(self.socket.as_fd(), &self.out[self.sent..])? {
                0 => break,
                count => self.sent += count,
            }
        }
        Ok(())
    }

    /// Takes what the VMM has sent. What it sends wrongly is said and passed over.
    fn receive(&mut self) -> Result<(), SessionError> {
        let mut buffer = [0; 2048];
        let count = sys::receive(self.socket.as_fd(), &mut buffer)?.ok_or(SessionError::Closed)?;
        let mut input = &buffer[..count];
        while let Some(next) = self.lines.next(&mut input) {
            let message = match next {
                NextLine::Line(line) => decode_vmm_message(line),
                NextLine::Refused(refusal) => Err(refusal),
            };
            match message {
                Ok(VmmMessage::Settings(settings)) => self.pace.set(settings),
                Ok(VmmMessage::OnlineBlocks { .. }) => self.agent.take_charge = true,
                Err(refusal) => eprintln!("foreshore-agent: The VMM sent what is refused: {refusal}"),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixStream;

    use foreshore_proto::{AgentMessage, decode_agent_message};

    use super::*;

    const MEMORY: &str = "/sys/devices/system/memory";

    fn agent() -> Agent {
        Agent::open(Path::new("/proc"), Path::new(MEMORY)).expect("this machine has /proc")
    }

    fn message(vmm: &mut BufReader<UnixStream>) -> AgentMessage {
        let mut line = String::new();
        vmm.read_line(&mut line).expect("a line");
        decode_agent_message(line.trim_end().as_bytes()).and_then(AgentMessage::try_from).expect("verifies")
    }

    fn settings(rest_interval_ms: u32) -> Vec<u8> {
        let settings = Settings { rest_interval_ms, ..Settings::with_watermark(0) };
        let mut line = Vec::new();
        encode_line(&VmmMessage::Settings(settings), &mut line);
        line
    }

    #[test]
    fn it_says_hello_and_reports_at_the_rate_that_the_vmm_asks_for() {
        let (ours, vmm) = UnixStream::pair().expect("socketpair");
        let (mut agent, mut reader) = (agent(), BufReader::new(vmm.try_clone().expect("dup")));
        let mut session = Session::new(&mut agent, ours.into()).expect("begins");
        assert!(matches!(message(&mut reader), AgentMessage::Hello(_)));
        (&vmm).write_all(b"{\"type\":\"ode\",\"version\":1}\nno json\n").expect("write");
        (&vmm).write_all(&settings(20)).expect("write");
        let mut last = None;
        for seq in 1..=5 {
            while session.agent.report.seq < seq {
                session.turn().expect("goes on");
            }
            let AgentMessage::Report(report) = message(&mut reader) else { panic!("a second hello") };
            assert_eq!(report.seq(), seq);
            assert!(last <= Some(report.monotonic_ms()));
            last = Some(report.monotonic_ms());
        }
    }

    #[test]
    fn a_vmm_that_does_not_read_stops_the_reports_and_gets_whole_lines_later() {
        let (ours, vmm) = UnixStream::pair().expect("socketpair");
        let mut agent = agent();
        let mut session = Session::new(&mut agent, ours.into()).expect("begins");
        session.pace.set(Settings { rest_interval_ms: 0, ..Settings::with_watermark(0) });
        while session.sent == session.out.len() {
            session.send_report(Cause::Rest).expect("goes on");
        }
        let stopped_at = session.agent.report.seq;
        let vmm = thread::spawn(move || {
            let mut reader = BufReader::new(vmm);
            let mut newest = 0;
            while newest <= stopped_at {
                if let AgentMessage::Report(report) = message(&mut reader) {
                    assert_eq!(report.seq(), newest + 1, "nothing is lost or cut");
                    newest = report.seq();
                }
            }
            reader
        });
        while !vmm.is_finished() {
            session.turn().expect("goes on");
        }
        vmm.join().expect("every line was whole");
    }

    #[test]
    fn the_end_of_the_vmm_ends_the_session() {
        let (ours, vmm) = UnixStream::pair().expect("socketpair");
        let mut agent = agent();
        let mut session = Session::new(&mut agent, ours.into()).expect("begins");
        drop(vmm);
        let error = (0..10).find_map(|_| session.turn().err()).expect("ends");
        assert!(matches!(error, SessionError::Closed | SessionError::Broken(_)), "{error:?}");
    }

    #[test]
    fn nobody_there_is_an_error_that_says_where() {
        let error = agent().connect_and_report(1, 1).expect_err("nobody listens on a reserved port");
        assert!(error.to_string().starts_with("Cannot connect to vsock port 1 of context 1"), "{error}");
    }

    #[test]
    fn a_report_of_this_machine_counts_up_and_verifies() {
        let mut agent = agent();
        let first = agent.take_report(Cause::Rest).expect("reports").seq;
        let raw = agent.take_report(Cause::Stall).expect("reports").clone();
        assert_eq!(raw.seq, first + 1);
        foreshore_proto::Report::try_from(raw).expect("verifies");
    }
}
