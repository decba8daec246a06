//! Tests the program with a VMM that disappears and returns. The tests change nothing on the
//! machine that runs them.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

use foreshore_proto::{
    AgentMessage, Report, Settings, VmmMessage, decode_agent_message, encode_line,
};
use rustix::process::{Pid, Signal, kill_process};

/// Time limit that is exceeded only if a test hangs.
const LIMIT: Duration = Duration::from_secs(60);

struct Agent(Child, BufReader<ChildStderr>);

impl Agent {
    fn start(socket: &Path) -> Self {
        let program = env!("CARGO_BIN_EXE_foreshore-agent");
        let arguments =
            ["--online", "none", "--reserve", "off", "--tune", "off", "--idle", "off", "--unix"];
        let mut command = Command::new(program);
        let mut child =
            command.args(arguments).arg(socket).stderr(Stdio::piped()).spawn().expect("starts");
        let stderr = child.stderr.take().expect("piped");
        Agent(child, BufReader::new(stderr))
    }

    /// Waits for a line that contains `what`.
    fn wait_for_line(&mut self, what: &str) {
        let mut line = String::new();
        while !line.contains(what) {
            line.clear();
            assert!(
                self.1.read_line(&mut line).expect("reads") > 0,
                "the agent ended without printing {what}"
            );
        }
    }

    /// Sends a stop signal to the agent, and waits until it has stopped.
    fn stop(&self) {
        self.signal(Signal::STOP);
        let stat = format!("/proc/{}/stat", self.0.id());
        while !std::fs::read_to_string(&stat).expect("reads").contains(") T ") {
            thread::yield_now();
        }
    }

    /// Number of times that the agent has voluntarily gone to sleep so far.
    fn wakes(&self) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.0.id()));
        let text = text.expect("reads");
        let count = text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        count.and_then(|count| count.trim().parse().ok()).expect("Linux counts them")
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).expect("the child has not been reaped");
    }

    fn end(mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        self.0.wait().expect("waits")
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// VMM's side of one connection.
struct Vmm(BufReader<UnixStream>);

impl Vmm {
    fn accept(listener: &UnixListener) -> Self {
        let (stream, _) = listener.accept().expect("accepts");
        stream.set_read_timeout(Some(LIMIT)).expect("a limit");
        Vmm(BufReader::new(stream))
    }

    fn next(&mut self) -> AgentMessage {
        let mut line = String::new();
        self.0.read_line(&mut line).expect("a line within the limit");
        decode_agent_message(line.trim_end().as_bytes())
            .and_then(AgentMessage::try_from)
            .expect("verifies")
    }

    fn hello(&mut self) {
        let message = self.next();
        assert!(matches!(message, AgentMessage::Hello(_)), "{message:?}");
    }

    fn report(&mut self) -> Report {
        match self.next() {
            AgentMessage::Report(report) => report,
            AgentMessage::Hello(hello) => panic!("a second hello: {hello:?}"),
        }
    }

    fn report_seq(&mut self) -> u64 {
        self.report().seq()
    }

    fn report_ms(&mut self) -> u64 {
        self.report().monotonic_ms()
    }

    fn send_settings(&mut self, settings: Settings) {
        let mut line = Vec::new();
        encode_line(&VmmMessage::Settings(settings), &mut line);
        self.0.get_mut().write_all(&line).expect("writes");
    }
}

fn socket_in(dir: &tempfile::TempDir) -> PathBuf {
    dir.path().join("vmm.sock")
}

fn listening() -> (tempfile::TempDir, UnixListener) {
    let dir = tempfile::tempdir().expect("tempdir");
    let listener = UnixListener::bind(socket_in(&dir)).expect("binds");
    (dir, listener)
}

/// Starts an agent and a VMM with these settings, and returns both after the agent's hello.
fn connected(settings: Settings) -> (Agent, Vmm) {
    let (dir, listener) = listening();
    let agent = Agent::start(&socket_in(&dir));
    let mut vmm = Vmm::accept(&listener);
    vmm.send_settings(settings);
    vmm.hello();
    (agent, vmm)
}

/// Settings with the shortest intervals that a VMM can request.
fn many() -> Settings {
    Settings { rest_interval_ms: 20, ..Settings::with_watermark(0) }
}

#[test]
fn late_or_restarted_vmm_receives_hello_and_reports_from_the_first() {
    let dir = tempfile::tempdir().expect("tempdir");
    let socket = socket_in(&dir);
    let mut agent = Agent::start(&socket);
    for _ in 0..2 {
        // At first, the socket does not exist. Then connections are refused, and finally a VMM
        // listens.
        agent.wait_for_line("No such file");
        drop(UnixListener::bind(&socket).expect("binds"));
        agent.wait_for_line("Connection refused");
        std::fs::remove_file(&socket).expect("remove");
        let listener = UnixListener::bind(&socket).expect("binds");
        let mut vmm = Vmm::accept(&listener);
        vmm.hello();
        assert_eq!((vmm.report_seq(), vmm.report_seq()), (1, 2));
        std::fs::remove_file(&socket).expect("remove");
    }
    assert!(agent.end().success());
}

#[test]
fn agent_on_a_machine_that_is_no_guest_says_so_and_reports() {
    let (dir, listener) = listening();
    let mut agent = Agent::start(&socket_in(&dir));
    let mut vmm = Vmm::accept(&listener);
    vmm.hello();
    assert_eq!(vmm.report_seq(), 1);
    agent.signal(Signal::TERM);
    agent.wait_for_line("no settings are changed");
}

#[test]
fn vmm_that_closes_at_once_is_retried() {
    let (dir, listener) = listening();
    let agent = Agent::start(&socket_in(&dir));
    for _ in 0..3 {
        drop(listener.accept().expect("accepts"));
    }
    let mut vmm = Vmm::accept(&listener);
    vmm.hello();
    assert_eq!(vmm.report_seq(), 1);
    assert!(agent.end().success());
}

#[test]
fn vmm_that_does_not_read_neither_blocks_the_agent_nor_its_end() {
    let (agent, mut vmm) = connected(many());
    let first = vmm.report_seq();
    // Waits until the amount of data in the socket no longer grows, because the socket is full.
    let mut queued = 0;
    loop {
        thread::sleep(Duration::from_millis(300));
        let now = queued_bytes(vmm.0.get_ref());
        if now == queued {
            break;
        }
        queued = now;
    }
    assert!(agent.end().success());
    let mut last = first;
    while last < first + 10 {
        let seq = vmm.report_seq();
        assert_eq!(seq, last + 1, "whole lines in order");
        last = seq;
    }
}

fn queued_bytes(stream: &UnixStream) -> u64 {
    rustix::io::ioctl_fionread(stream).expect("a socket")
}

#[test]
fn stopped_agent_continues_its_connection() {
    let (agent, mut vmm) = connected(many());
    let mut last = vmm.report_seq();
    for _ in 0..3 {
        agent.stop();
        while !vmm.0.buffer().is_empty() || queued_bytes(vmm.0.get_ref()) > 0 {
            let seq = vmm.report_seq();
            assert_eq!(seq, last + 1, "reports from before the reconnect are not repeated");
            last = seq;
        }
        agent.signal(Signal::CONT);
        let seq = vmm.report_seq();
        assert_eq!(seq, last + 1);
        last = seq;
    }
    assert!(agent.end().success());
}

#[test]
fn restarted_agent_begins_with_a_hello() {
    let (dir, listener) = listening();
    for _ in 0..2 {
        let agent = Agent::start(&socket_in(&dir));
        let mut vmm = Vmm::accept(&listener);
        vmm.hello();
        assert_eq!(vmm.report_seq(), 1);
        agent.signal(Signal::KILL);
        drop(agent);
        let mut rest = Vec::new();
        while vmm.0.read_until(b'\n', &mut rest).expect("an end within the limit") > 0 {}
    }
}

/// The agent's cost is mainly its number of wake-ups. CPU time would depend on the machine.
#[test]
fn agent_at_rest_wakes_up_ten_times_per_second_and_once_to_report() {
    const REPORTS: u64 = 3;
    let (agent, mut vmm) = connected(Settings::with_watermark(0));
    // On a busy machine, reports may be early. The test then measures again.
    let at_rest = (0..LIMIT.as_secs()).find_map(|_| {
        let (since_ms, before) = (vmm.report_ms(), agent.wakes());
        let until_ms = (0..REPORTS).map(|_| vmm.report_ms()).last()?;
        let wakes = agent.wakes() - before;
        (until_ms - since_ms >= REPORTS * 1_000).then_some((wakes, until_ms - since_ms))
    });
    let (wakes, elapsed_ms) = at_rest.expect("the agent becomes idle");
    let most = elapsed_ms.div_ceil(1_000) * (10 + 1) + REPORTS;
    assert!(wakes > 0 && wakes <= most, "{wakes} times in {elapsed_ms} ms");
    assert!(agent.end().success());
}
