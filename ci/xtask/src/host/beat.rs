//! Heartbeat of the emulated host: it is asked again and again whether it lives, is told when the
//! command's time is over, and is ended if it stands still.
//!
//! The question is an interrupt as well, and keeps the host from standing still: QEMU's SVM changes
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

/// Interval of the questions.
pub const INTERVAL: Duration = Duration::from_millis(250);
/// Questions without an answer after which the host stands still: 120 s, in which it also has to
/// boot.
const MOST_SILENT: u32 = 480;
/// Questions without an answer after which only every so many intervals have one, or the pipe would
/// fill up.
const FREQUENT: u32 = 8;
/// Time that QEMU's monitor has to answer.
const MONITOR_LIMIT: Duration = Duration::from_secs(5);
/// Prints the registers of all CPUs and sends an NMI, of which the kernel panics. That ends QEMU.
const MONITOR_COMMANDS: &[u8] = b"info registers -a\nnmi\n";

/// The ends of a pair of pipes as QEMU's `pipe` backend uses them.
struct Pipes {
    to_qemu: File,
    from_qemu: File,
}

/// Makes the pipes of the backend `name` in the folder of a run.
pub fn make_pipes(run: &Path, name: &str) -> Result<()> {
    for end in ["in", "out"] {
        mkfifoat(CWD, run.join(format!("{name}.{end}")), Mode::from(0o600)).context("Cannot make a pipe")?;
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

/// State of the questions.
pub struct Beat {
    pipes: Pipes,
    silent: u32,
    is_told: bool,
}

impl Beat {
    pub fn new(run: &Path) -> Result<Self> {
        Ok(Self { pipes: Pipes::open(run, "beat")?, silent: 0, is_told: false })
    }

    /// Asks the host. With `is_over`, also tells it once to end the command.
    pub fn ask(&mut self, is_over: bool) -> Result<()> {
        if self.silent < FREQUENT || self.silent.is_multiple_of(FREQUENT) {
            self.pipes.send(b"\n")?;
        }
        if is_over && !self.is_told {
            self.pipes.send(b"end\n")?;
            self.is_told = true;
        }
        Ok(())
    }

    /// Takes the answers, an interval after the question. False if the host stands still.
    pub fn hears(&mut self) -> Result<bool> {
        self.silent = if self.pipes.receive()?.is_empty() { self.silent + 1 } else { 0 };
        Ok(self.silent < MOST_SILENT)
    }
}

/// Asks QEMU for the registers of a host that stands still, and returns the answer. A QEMU that
/// lives ends after that.
pub fn examine(run: &Path, qemu: &mut Job) -> Result<(Vec<u8>, Option<std::process::ExitStatus>)> {
    let mut monitor = Pipes::open(run, "monitor")?;
    monitor.send(MONITOR_COMMANDS)?;
    let (mut answer, started) = (Vec::new(), Instant::now());
    loop {
        answer.extend(monitor.receive()?);
        let status = qemu.try_wait()?;
        if status.is_some() || started.elapsed() >= MONITOR_LIMIT {
            answer.extend(monitor.receive()?);
            return Ok((answer, status));
        }
        std::thread::sleep(INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A heartbeat and the pipes as QEMU has them.
    fn beat(folder: &Path) -> (Beat, File, File) {
        make_pipes(folder, "beat").unwrap();
        let beat = Beat::new(folder).unwrap();
        let open = |end: &str| {
            let flags = OFlags::NONBLOCK.bits().cast_signed();
            let path = folder.join(format!("beat.{end}"));
            File::options().read(true).write(true).custom_flags(flags).open(path).unwrap()
        };
        let (input, output) = (open("in"), open("out"));
        (beat, input, output)
    }

    fn read(input: &mut File) -> String {
        let mut text = Vec::new();
        input.read_to_end(&mut text).unwrap_err();
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn silent_host_is_asked_less_often_and_then_stands_still() {
        let folder = tempfile::tempdir().unwrap();
        let (mut beat, mut input, mut output) = beat(folder.path());
        for _ in 0..MOST_SILENT - 1 {
            beat.ask(false).unwrap();
            assert!(beat.hears().unwrap());
        }
        let questions = u32::try_from(read(&mut input).len()).unwrap();
        assert_eq!(questions, FREQUENT + (MOST_SILENT - 1) / FREQUENT);
        output.write_all(b"\n").unwrap();
        assert!(beat.hears().unwrap());
        for _ in 0..MOST_SILENT - 1 {
            assert!(beat.hears().unwrap());
        }
        assert!(!beat.hears().unwrap());
    }

    #[test]
    fn end_is_told_once() {
        let folder = tempfile::tempdir().unwrap();
        let (mut beat, mut input, _output) = beat(folder.path());
        for is_over in [false, true, true] {
            beat.ask(is_over).unwrap();
        }
        assert_eq!(read(&mut input), "\n\nend\n\n");
    }

    #[test]
    fn full_pipe_is_no_error() {
        let folder = tempfile::tempdir().unwrap();
        let (mut beat, _input, _output) = beat(folder.path());
        for _ in 0..100_000 {
            beat.ask(false).unwrap();
        }
    }
}
