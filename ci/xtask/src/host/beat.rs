//! Heartbeat of the emulated host: it responds to periodic requests, ends the command on request,
//! and is ended itself if it stands still.
//!
//! Each request is an interrupt as well, and keeps the host from standing still: QEMU's SVM changes
//! a CPU's word of pending interrupts without a lock (target/i386/tcg/sysemu/svm_helper.c,
//! do_vmexit), and loses what a timer sets there at the same moment. The interrupt controller still
//! has it, and delivers it with the next interrupt. On one CPU that took minutes.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::fs::{CWD, Mode, OFlags, mkfifoat};

use crate::jobs::Job;

/// Interval of the requests.
pub(super) const INTERVAL: Duration = Duration::from_millis(250);
/// Requests without a response after which the host stands still: 120 s, in which it also has to
/// boot.
pub(super) const MOST_SILENT: u32 = 480;
/// Requests without a response after which only one in so many intervals has a request. Otherwise,
/// the pipe would fill up.
const FREQUENT: u32 = 8;
/// Limit for the response of QEMU's monitor.
const MONITOR_LIMIT: Duration = Duration::from_secs(5);
/// Commands that print the registers of all CPUs and send an NMI. The kernel panics on the NMI,
/// which ends QEMU.
const MONITOR_COMMANDS: &[u8] = b"info registers -a\nnmi\n";

/// Our ends of the pair of pipes that QEMU's `pipe` backend uses.
struct Pipes {
    to_qemu: File,
    from_qemu: File,
}

/// Makes the pipes of the backend `name` in the folder of a run.
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
            // Both ends of each, so that opening waits for no other process.
            let flags = OFlags::NONBLOCK.bits().cast_signed();
            let path = run.join(format!("{name}.{end}"));
            let file = File::options().read(true).write(true).custom_flags(flags).open(&path);
            file.with_context(|| format!("Cannot open {}", path.display()))
        };
        Ok(Self { to_qemu: open("in")?, from_qemu: open("out")? })
    }

    /// Writes as much as the pipe takes.
    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        match self.to_qemu.write_all(bytes) {
            Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Reads what is there.
    fn receive(&mut self) -> Result<Vec<u8>> {
        let mut received = Vec::new();
        match self.from_qemu.read_to_end(&mut received) {
            Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error.into()),
            _ => Ok(received),
        }
    }
}

/// State of the requests.
pub(super) struct Beat {
    pipes: Pipes,
    silent: u32,
    most_silent: u32,
    is_end_requested: bool,
}

impl Beat {
    /// After `most_silent` requests without a response, the host stands still.
    pub(super) fn new(run: &Path, most_silent: u32) -> Result<Self> {
        Ok(Self {
            pipes: Pipes::open(run, "beat")?,
            silent: 0,
            most_silent,
            is_end_requested: false,
        })
    }

    /// Sends a request. With `is_over`, also requests once that the host end the command.
    pub(super) fn send_request(&mut self, is_over: bool) -> Result<()> {
        if self.silent < FREQUENT || self.silent.is_multiple_of(FREQUENT) {
            self.pipes.send(b"\n")?;
        }
        if is_over && !self.is_end_requested {
            self.pipes.send(b"end\n")?;
            self.is_end_requested = true;
        }
        Ok(())
    }

    /// Receives the responses, an interval after the request. False if the host stands still.
    pub(super) fn receive_response(&mut self) -> Result<bool> {
        self.silent = if self.pipes.receive()?.is_empty() { self.silent + 1 } else { 0 };
        Ok(self.silent < self.most_silent)
    }
}

/// Requests the registers of a host that stands still from QEMU, and returns the response. A QEMU
/// that lives ends after that.
pub(super) fn examine(
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

    /// A heartbeat, and its pipes as QEMU has them.
    fn beat(folder: &Path) -> (Beat, File, File) {
        make_pipes(folder, "beat").unwrap();
        let Pipes { to_qemu, from_qemu } = Pipes::open(folder, "beat").unwrap();
        (Beat::new(folder, MOST_SILENT).unwrap(), to_qemu, from_qemu)
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
        for _ in 0..MOST_SILENT - 1 {
            beat.send_request(false).unwrap();
            assert!(beat.receive_response().unwrap());
        }
        let requests = u32::try_from(read(&mut input).len()).unwrap();
        assert_eq!(requests, FREQUENT + (MOST_SILENT - 1) / FREQUENT);
        output.write_all(b"\n").unwrap();
        assert!(beat.receive_response().unwrap());
        for _ in 0..MOST_SILENT - 1 {
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
