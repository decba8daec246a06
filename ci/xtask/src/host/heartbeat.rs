//! Heartbeat of the emulated host. The host answers periodic requests and ends the command when a
//! request says so. A host that stops responding is killed.
//!
//! Each request also raises an interrupt, which keeps the host from hanging. QEMU's SVM code
//! changes a CPU's word of pending interrupts without a lock (target/i386/tcg/sysemu/svm_helper.c,
//! do_vmexit). It can lose a bit that a timer sets at the same moment. The interrupt controller
//! still has that interrupt and delivers it with the next one. On one CPU, this took minutes
//! without requests.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::fs::{CWD, Mode, OFlags, mkfifoat};

use crate::jobs::Job;

/// Interval between requests.
pub(super) const INTERVAL: Duration = Duration::from_millis(250);
/// Number of unanswered requests after which the host counts as hung: 120 s. Booting must fit into
/// this time.
pub(super) const MAX_UNANSWERED: u32 = 480;
/// After this many unanswered requests, only one in this many intervals sends a request. Otherwise
/// the pipe would fill up.
const FREQUENT: u32 = 8;
/// Time limit for a response from QEMU's monitor.
const MONITOR_LIMIT: Duration = Duration::from_secs(5);
/// Monitor commands that print the registers of all CPUs and send an NMI. The kernel panics on the
/// NMI, and the panic ends QEMU.
const MONITOR_COMMANDS: &[u8] = b"info registers -a\nnmi\n";

/// Task's ends of the two pipes that connect it to QEMU's `pipe` backend.
struct Pipes {
    to_qemu: File,
    from_qemu: File,
}

/// Creates the pipes of the backend `name` in the run's folder.
pub(super) fn make_pipes(run: &Path, name: &str) -> Result<()> {
    for end in ["in", "out"] {
        mkfifoat(CWD, run.join(format!("{name}.{end}")), Mode::from(0o600))
            .context("Cannot create a pipe")?;
    }
    Ok(())
}

impl Pipes {
    fn open(run: &Path, name: &str) -> Result<Self> {
        let open = |end: &str| {
            // Opened for reading and writing, so that opening does not wait for another process.
            let flags = OFlags::NONBLOCK.bits().cast_signed();
            let path = run.join(format!("{name}.{end}"));
            let file = File::options().read(true).write(true).custom_flags(flags).open(&path);
            file.with_context(|| format!("Cannot open {}", path.display()))
        };
        Ok(Self { to_qemu: open("in")?, from_qemu: open("out")? })
    }

    /// Writes as many bytes as fit into the pipe.
    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        match self.to_qemu.write_all(bytes) {
            Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Reads the bytes that are available.
    fn receive(&mut self) -> Result<Vec<u8>> {
        let mut received = Vec::new();
        match self.from_qemu.read_to_end(&mut received) {
            Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error.into()),
            _ => Ok(received),
        }
    }
}

/// State of the heartbeat.
pub(super) struct Heartbeat {
    pipes: Pipes,
    unanswered: u32,
    max_unanswered: u32,
    is_end_requested: bool,
}

impl Heartbeat {
    /// `max_unanswered` is the number of unanswered requests after which the host counts as hung.
    pub(super) fn new(run: &Path, max_unanswered: u32) -> Result<Self> {
        Ok(Self {
            pipes: Pipes::open(run, "beat")?,
            unanswered: 0,
            max_unanswered,
            is_end_requested: false,
        })
    }

    /// Sends a request. If `is_over` is set, also requests once that the host ends the command.
    pub(super) fn send_request(&mut self, is_over: bool) -> Result<()> {
        if self.unanswered < FREQUENT || self.unanswered.is_multiple_of(FREQUENT) {
            self.pipes.send(b"\n")?;
        }
        if is_over && !self.is_end_requested {
            self.pipes.send(b"end\n")?;
            self.is_end_requested = true;
        }
        Ok(())
    }

    /// Receives the responses, one interval after the request. Returns false if the host has hung.
    pub(super) fn receive_response(&mut self) -> Result<bool> {
        self.unanswered = if self.pipes.receive()?.is_empty() { self.unanswered + 1 } else { 0 };
        Ok(self.unanswered < self.max_unanswered)
    }
}

/// Requests the registers of a hung host from QEMU's monitor, and returns the response. A QEMU that
/// still works then exits.
pub(super) fn read_registers(
    run: &Path,
    qemu: &mut Job,
) -> Result<(Vec<u8>, Option<std::process::ExitStatus>)> {
    let mut monitor = Pipes::open(run, "monitor")?;
    monitor.send(MONITOR_COMMANDS)?;
    let (mut response, started) = (Vec::new(), Instant::now());
    loop {
        response.extend(monitor.receive()?);
        let status = qemu.try_wait()?;
        if status.is_some() || started.elapsed() >= MONITOR_LIMIT {
            response.extend(monitor.receive()?);
            return Ok((response, status));
        }
        std::thread::sleep(INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a heartbeat and QEMU's ends of its pipes.
    fn beat(folder: &Path) -> (Heartbeat, File, File) {
        make_pipes(folder, "beat").unwrap();
        let Pipes { to_qemu, from_qemu } = Pipes::open(folder, "beat").unwrap();
        (Heartbeat::new(folder, MAX_UNANSWERED).unwrap(), to_qemu, from_qemu)
    }

    fn read(input: &mut File) -> String {
        let mut text = Vec::new();
        input.read_to_end(&mut text).unwrap_err();
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn silent_host_gets_fewer_requests_and_then_stands_still() {
        let folder = tempfile::tempdir().unwrap();
        let (mut beat, mut input, mut output) = beat(folder.path());
        for _ in 0..MAX_UNANSWERED - 1 {
            beat.send_request(false).unwrap();
            assert!(beat.receive_response().unwrap());
        }
        let requests = u32::try_from(read(&mut input).len()).unwrap();
        assert_eq!(requests, FREQUENT + (MAX_UNANSWERED - 1) / FREQUENT);
        output.write_all(b"\n").unwrap();
        assert!(beat.receive_response().unwrap());
        for _ in 0..MAX_UNANSWERED - 1 {
            assert!(beat.receive_response().unwrap());
        }
        assert!(!beat.receive_response().unwrap());
    }

    #[test]
    fn end_is_requested_once() {
        let folder = tempfile::tempdir().unwrap();
        let (mut beat, mut input, _output) = beat(folder.path());
        for is_over in [false, true, true] {
            beat.send_request(is_over).unwrap();
        }
        assert_eq!(read(&mut input), "\n\nend\n\n");
    }

    #[test]
    fn full_pipe_is_no_error() {
        let folder = tempfile::tempdir().unwrap();
        let (mut beat, _input, _output) = beat(folder.path());
        for _ in 0..100_000 {
            beat.send_request(false).unwrap();
        }
    }
}
