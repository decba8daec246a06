//! One connection to the VMM: sends hello and reports, and receives settings.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use foreshore_proto::{
    Cause, LineReader, Measure, NextLine, Pace, RawAgentMessage, Settings, VmmMessage,
    decode_vmm_message, encode_line, encode_report,
};
use rustix::event::PollFlags;
use thiserror::Error;

use crate::agent::Agent;
use crate::args::Address;
use crate::proc::ProcError;
use crate::trigger::TRIGGERS;
use crate::{kernel, sys};

/// Until the VMM has sent settings, the watermark is the total memory divided by this number.
const DEFAULT_WATERMARK_PART: u64 = 5;

#[derive(Debug, Error)]
pub(crate) enum SessionError {
    #[error("cannot connect to vsock port {port} of CID {cid}")]
    Connect {
        cid: u32,
        port: u32,
        #[source]
        source: io::Error,
    },
    #[error("cannot connect to {path}")]
    ConnectUnix {
        path: std::path::PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the VMM closed the connection")]
    Closed,
    #[error("the connection to the VMM failed")]
    Broken(#[from] io::Error),
    #[error("cannot make a report")]
    Proc(#[from] ProcError),
    #[error("termination requested")]
    Terminated,
}

#[derive(Debug)]
pub(crate) struct Session<'a> {
    agent: &'a mut Agent,
    socket: OwnedFd,
    pace: Pace,
    lines: LineReader,
    /// Output bytes, and how many of them have been sent.
    out: Vec<u8>,
    sent: usize,
}

#[derive(Clone, Copy, Debug)]
struct Ready {
    readable: bool,
    writable: bool,
    stalled: bool,
}

impl<'a> Session<'a> {
    pub(crate) fn connect(agent: &'a mut Agent, address: &Address) -> Result<Self, SessionError> {
        let socket = match address {
            Address::Vsock { cid, port } => sys::connect_vsock(*cid, *port)
                .map_err(|source| SessionError::Connect { cid: *cid, port: *port, source })?,
            Address::Unix(path) => UnixStream::connect(path)
                .map_err(|source| SessionError::ConnectUnix { path: path.clone(), source })?
                .into(),
        };
        Session::new(agent, socket)
    }

    fn new(agent: &'a mut Agent, socket: OwnedFd) -> Result<Self, SessionError> {
        let watermark_bytes = agent.proc.memory()?.0.total_bytes / DEFAULT_WATERMARK_PART;
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

    /// Waits for the first event and handles it.
    pub(crate) fn handle_event(&mut self) -> Result<(), SessionError> {
        let ready = self.wait()?;
        if ready.readable {
            self.receive()?;
        }
        if ready.writable {
            self.flush()?;
        }
        // A VMM that reads late must receive the newest values instead of values from a minute ago.
        if self.is_pending() {
            return Ok(self.agent.observe_if_due()?);
        }
        let now_ms = sys::monotonic_ms();
        if ready.stalled {
            self.pace.alert(now_ms);
            return self.send_report(Cause::Stall);
        }
        if now_ms >= self.pace.report_due_ms() {
            return self.send_report(Cause::Rest);
        }
        if now_ms >= self.pace.check_due_ms() {
            self.check_memory(now_ms)?;
        }
        Ok(())
    }

    /// Returns true if some of the output has not been sent yet.
    fn is_pending(&self) -> bool {
        self.sent < self.out.len()
    }

    /// Waits until the socket or a trigger is ready, or until a timer expires.
    fn wait(&mut self) -> Result<Ready, SessionError> {
        let pending = self.is_pending();
        let due_ms = if pending {
            self.agent.observe_due_ms()
        } else {
            self.pace.report_due_ms().min(self.pace.check_due_ms())
        };
        let events = if pending { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        let termination = self.agent.termination.as_ref().map(AsFd::as_fd);
        let triggers =
            self.agent.triggers.as_ref().map_or([None; TRIGGERS], |triggers| triggers.fds());
        let [some, full] = triggers.map(|fd| (fd, PollFlags::PRI));
        let fds = [(Some(self.socket.as_fd()), events), (termination, PollFlags::IN), some, full];
        let [socket, termination, some, full] =
            sys::poll(fds, due_ms.saturating_sub(sys::monotonic_ms()))?;
        if !termination.is_empty() {
            return Err(SessionError::Terminated);
        }
        let triggers = self.agent.triggers.as_mut();
        let stalled =
            triggers.is_some_and(|triggers| triggers.fired([some, full], sys::monotonic_ms()));
        let readable = PollFlags::IN | PollFlags::HUP | PollFlags::ERR;
        Ok(Ready {
            readable: socket.intersects(readable),
            writable: socket.contains(PollFlags::OUT),
            stalled,
        })
    }

    /// Checks free memory. Reads the measured amount from /proc only if free memory alone does not
    /// rule out a report, because that costs more.
    fn check_memory(&mut self, now_ms: u64) -> Result<(), SessionError> {
        let free_bytes = sys::free_bytes();
        if !self.pace.needs_read(free_bytes, now_ms) {
            self.pace.record_check(now_ms);
            self.pace.record_free(free_bytes);
            return Ok(());
        }
        let (memory, kernel) = self.agent.proc.memory()?;
        let measured_bytes = match self.pace.measure() {
            Measure::Free => free_bytes,
            Measure::Available => memory.available_bytes,
        };
        if self.pace.needs_report(measured_bytes)
            || self.pace.needs_kernel_report(kernel.total_bytes())
        {
            self.pace.alert(now_ms);
            return self.send_report(Cause::Rest);
        }
        self.pace.record_read(free_bytes, now_ms);
        self.pace.record_measured(free_bytes, measured_bytes);
        Ok(())
    }

    fn send_report(&mut self, cause: Cause) -> Result<(), SessionError> {
        self.agent.make_report(cause)?;
        let report = &mut self.agent.report;
        let memory = report.memory;
        if cause == Cause::Rest && self.pace.is_fast(&memory, report.monotonic_ms) {
            report.cause = Cause::Watermark;
        }
        encode_report(report, &mut self.out);
        self.sent = 0;
        self.pace.record_report(&memory, report.monotonic_ms);
        self.pace.record_kernel(report.kernel.map_or(0, |kernel| kernel.total_bytes()));
        self.flush()
    }

    fn flush(&mut self) -> Result<(), SessionError> {
        while self.is_pending() {
            match sys::send(&self.socket, &self.out[self.sent..])? {
                0 => break,
                count => self.sent += count,
            }
        }
        Ok(())
    }

    /// Handles messages from the VMM. Invalid messages are printed and ignored.
    fn receive(&mut self) -> Result<(), SessionError> {
        let mut buffer = [0; 2048];
        let count = sys::receive(&self.socket, &mut buffer)?.ok_or(SessionError::Closed)?;
        let mut input = &buffer[..count];
        while let Some(next) = self.lines.next(&mut input) {
            let message = match next {
                NextLine::Line(line) => decode_vmm_message(line),
                NextLine::Refused(refusal) => Err(refusal),
            };
            match message {
                Ok(VmmMessage::Settings(settings)) => {
                    self.pace.set(settings);
                    self.agent.hotplug_bytes = settings.hotplug_bytes;
                }
                Ok(VmmMessage::OnlineBlocks { .. }) => self.agent.start_onlining = true,
                Err(refusal) => {
                    eprintln!("foreshore-agent: Refused a message of the VMM: {refusal}")
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::path::Path;
    use std::thread;

    use foreshore_proto::{AgentMessage, Memory, decode_agent_message};

    use super::*;
    use crate::allocations;
    use crate::args::Online;
    use crate::blocks::{BlockReader, BlockWatch};
    use crate::tree::Tree;

    const MEMORY: &str = "/sys/devices/system/memory";

    fn agent() -> Agent {
        Agent::open(Path::new("/proc"), Path::new(MEMORY)).expect("this machine has /proc")
    }

    fn message(vmm: &mut BufReader<UnixStream>) -> AgentMessage {
        let mut line = String::new();
        vmm.read_line(&mut line).expect("a line");
        decode_agent_message(line.trim_end().as_bytes())
            .and_then(AgentMessage::try_from)
            .expect("verifies")
    }

    fn settings(rest_interval_ms: u32) -> Vec<u8> {
        let settings = Settings { rest_interval_ms, ..Settings::with_watermark(0) };
        let mut line = Vec::new();
        encode_line(&VmmMessage::Settings(settings), &mut line);
        line
    }

    #[test]
    fn hello_is_followed_by_reports_at_the_requested_rate() {
        let (ours, vmm) = UnixStream::pair().expect("socketpair");
        let (mut agent, mut reader) = (agent(), BufReader::new(vmm.try_clone().expect("dup")));
        let mut session = Session::new(&mut agent, ours.into()).expect("begins");
        assert!(matches!(message(&mut reader), AgentMessage::Hello(_)));
        (&vmm).write_all(b"{\"type\":\"ode\",\"version\":1}\nno json\n").expect("write");
        (&vmm).write_all(&settings(20)).expect("write");
        let mut last = None;
        for seq in 1..=5 {
            while session.agent.report.seq < seq {
                session.handle_event().expect("goes on");
            }
            let AgentMessage::Report(report) = message(&mut reader) else {
                panic!("a second hello")
            };
            assert_eq!(report.seq(), seq);
            assert!(last <= Some(report.monotonic_ms()));
            last = Some(report.monotonic_ms());
        }
    }

    #[test]
    fn report_and_wait_allocate_nothing() {
        let (ours, vmm) = UnixStream::pair().expect("socketpair");
        let (mut agent, mut reader) = (agent(), BufReader::new(vmm));
        let mut session = Session::new(&mut agent, ours.into()).expect("begins");
        session.send_report(Cause::Rest).expect("goes on");
        // Longer numbers in later reports must not make the buffer grow.
        session.out.reserve(1024);
        let seq = session.agent.report.seq;
        let (count, ()) = allocations::count(|| {
            while session.agent.report.seq < seq + 2 {
                session.handle_event().expect("goes on");
            }
        });
        assert_eq!(count, 0);
        assert!(matches!(message(&mut reader), AgentMessage::Hello(_)));
        for _ in 0..=2 {
            assert!(matches!(message(&mut reader), AgentMessage::Report(_)));
        }
    }

    #[test]
    fn reports_pause_while_the_vmm_does_not_read_and_lines_stay_whole() {
        let (ours, vmm) = UnixStream::pair().expect("socketpair");
        let mut agent = agent();
        let mut session = Session::new(&mut agent, ours.into()).expect("begins");
        session.pace.set(Settings { rest_interval_ms: 0, ..Settings::with_watermark(0) });
        while !session.is_pending() {
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
            session.handle_event().expect("goes on");
        }
        vmm.join().expect("every line was whole");
    }

    #[test]
    fn check_compares_the_requested_measure_with_the_watermark() {
        let plenty =
            Memory { free_bytes: u64::MAX, available_bytes: u64::MAX, ..Memory::default() };
        let nothing = Memory::default();
        for (free, available, measure, reports) in [
            (plenty, nothing, Measure::Free, 1),
            (nothing, plenty, Measure::Free, 0),
            (plenty, nothing, Measure::Available, 0),
            (nothing, plenty, Measure::Available, 1),
        ] {
            let (ours, _vmm) = UnixStream::pair().expect("socketpair");
            let mut agent = agent();
            let mut session = Session::new(&mut agent, ours.into()).expect("begins");
            // The watermark is larger than the memory of the machine that runs the test.
            let settings = Settings::with_watermark(u64::MAX);
            session.pace.set(Settings { watermark_of: measure, ..settings });
            let now_ms = sys::monotonic_ms();
            let memory = Memory { free_bytes: free.free_bytes, ..available };
            session.pace.record_report(&memory, now_ms);
            session.pace.record_kernel(u64::MAX);
            session.check_memory(now_ms).expect("looks");
            assert_eq!(session.agent.report.seq, reports, "{measure:?} of {memory:?}");
        }
    }

    #[test]
    fn the_end_of_the_vmm_ends_the_session() {
        let (ours, vmm) = UnixStream::pair().expect("socketpair");
        let mut agent = agent();
        let mut session = Session::new(&mut agent, ours.into()).expect("begins");
        drop(vmm);
        let error = (0..10).find_map(|_| session.handle_event().err()).expect("ends");
        assert!(matches!(error, SessionError::Closed | SessionError::Broken(_)), "{error:?}");
    }

    #[test]
    fn failed_connection_is_an_error_with_its_address() {
        let address = Address::Vsock { cid: 1, port: 1 };
        let error =
            Session::connect(&mut agent(), &address).expect_err("a reserved port has no listener");
        assert!(
            error.to_string().starts_with("cannot connect to vsock port 1 of CID 1"),
            "{error}"
        );
    }

    /// Guest whose kernel leaves memory offline, and its blocks.
    fn offline_guest() -> (Agent, Tree) {
        let memory = Tree::memory("offline", &[(32, 1, "offline", "Movable")]);
        let proc =
            Tree::proc(&["6.12-two-nodes/meminfo", "6.12-filled/zoneinfo", "6.12-swapped/vmstat"]);
        let mut agent = Agent::open(proc.path(), memory.path()).expect("opens");
        let reader = BlockReader::new(memory.path(), Online::Movable);
        agent.blocks = Some(BlockWatch::start(reader, sys::monotonic_ms).expect("starts"));
        (agent, memory)
    }

    fn is_online(memory: &Tree) -> bool {
        memory.get("memory32/state") == "online_movable"
    }

    #[test]
    fn memory_comes_online_also_while_the_vmm_reads_nothing() {
        let (mut agent, memory) = offline_guest();
        let (ours, _vmm) = UnixStream::pair().expect("socketpair");
        while sys::send(&ours, &[b'x'; 4096]).expect("send") > 0 {}
        let mut session = Session::new(&mut agent, ours.into()).expect("begins");
        let turns = (0..1000)
            .take_while(|_| !is_online(&memory))
            .map(|_| session.handle_event().expect("goes on"))
            .count();
        assert!(turns < 1000 && session.is_pending());
        assert_eq!(session.agent.report.seq, 0, "the agent sent no report in the meantime");
    }

    #[test]
    fn memory_comes_online_also_while_there_is_no_vmm() {
        let (mut agent, memory) = offline_guest();
        let waits = (0..1000)
            .take_while(|_| !is_online(&memory))
            .filter(|_| agent.wait_for_termination(20))
            .count();
        assert_eq!(waits, 0, "no termination was requested");
        assert!(is_online(&memory));
    }

    #[test]
    fn a_report_of_this_machine_counts_up_and_verifies() {
        let mut agent = agent();
        let first = agent.make_report(Cause::Rest).expect("reports").seq;
        let raw = agent.make_report(Cause::Stall).expect("reports").clone();
        assert_eq!(raw.seq, first + 1);
        foreshore_proto::Report::try_from(raw).expect("verifies");
    }
}
