//! Destinations of a guest's output.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use super::disk_file::DiskFile;
use super::file_rate::FileThrottle;
use super::line::ring::Ring;
use super::readiness::ready;
use super::rotated_file::RotatedFile;

/// Maximum number of bytes that are kept for a slow reader. Further output is lost, because neither
/// a vCPU thread nor the devices' thread may wait for a reader.
const BACKLOG_LEN_MAX: usize = 256 << 10;
/// Time that the VM's shutdown waits for a slow reader.
const LINGER: Duration = Duration::from_secs(1);

/// Bytes that a ready pipe or socket accepts. A ready pipe has room for one page (pipe_poll in
/// Linux), and a socket has room for more.
const PIPE_STEP_LEN: usize = 4096;
/// Bytes that are written to a ready terminal in one step. A ready pseudo terminal has room for 256
/// bytes, the unit in which Linux extends its buffer.
const TERMINAL_STEP_LEN: usize = 128;

/// Output to a file, to standard output, to a client, or to nothing. Sending waits only for a disk
/// that is slower than the guest but makes progress.
#[derive(Debug)]
pub struct ConsoleOutput {
    end: End,
    /// Output that was not written yet.
    backlog: VecDeque<u8>,
}

/// Amount of lost output, and the cause of the loss.
#[derive(Debug, Default)]
pub struct Lost {
    /// Number of lost bytes.
    pub len: usize,
    /// Error that caused the loss. `None` if the reader was too slow.
    pub error: Option<io::Error>,
}

/// Destination of the output.
#[derive(Debug)]
enum End {
    NoReader,
    Line(Arc<Ring>),
    /// Regular file.
    DiskFile(DiskFile),
    Reader(Target),
}

#[derive(Debug)]
struct Target {
    file: File,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Terminal,
    /// Pipe, socket or other file.
    Pipe,
}

impl Kind {
    /// Returns how many bytes of `data` a ready file accepts without blocking. `data` must not be
    /// empty.
    fn step_len(self, data: &[u8]) -> usize {
        match self {
            Self::Pipe => data.len().min(PIPE_STEP_LEN),
            Self::Terminal => {
                // Linux writes these characters one by one, and checks for room before each
                // (n_tty_write). The first may use up the room, and the second would then block.
                let special =
                    data.iter().position(|byte| matches!(byte, b'\n' | b'\r' | b'\t' | 8));
                special.unwrap_or(data.len()).clamp(1, TERMINAL_STEP_LEN)
            }
        }
    }
}

impl Target {
    fn new(file: File) -> Self {
        let kind = if file.is_terminal() { Kind::Terminal } else { Kind::Pipe };
        Self { file, kind }
    }

    fn is_ready(&self, timeout: Duration) -> io::Result<bool> {
        ready(self.file.as_fd(), PollFlags::OUT, timeout)
    }

    /// Writes as much of `backlog` as possible without blocking.
    fn take(&mut self, backlog: &mut VecDeque<u8>) -> io::Result<()> {
        while !backlog.is_empty() && self.is_ready(Duration::ZERO)? {
            let (data, _) = backlog.as_slices();
            match self.file.write(&data[..self.kind.step_len(data)]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => drop(backlog.drain(..written)),
                // Another user of a non-blocking file may have filled it first, or a signal may
                // have interrupted the write.
                Err(err)
                    if matches!(
                        err.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                    ) =>
                {
                    break;
                }
                Err(err) => return Err(err),
            }
        }
        Ok(())
    }
}

impl ConsoleOutput {
    pub fn null() -> Self {
        Self::new(End::NoReader)
    }

    /// Creates output to a line, which keeps the newest bytes until a client reads them.
    pub(super) fn line(ring: Arc<Ring>) -> Self {
        Self::new(End::Line(ring))
    }

    /// Creates output to the other end of `file`, or to a regular file.
    pub fn to(file: File) -> io::Result<Self> {
        // poll(2) always reports a regular file as ready, even if its disk is about to block.
        Ok(Self::new(match file.metadata()?.is_file() {
            true => End::DiskFile(DiskFile::start(Path::new("/dev/stdout"), file, None)?),
            false => End::Reader(Target::new(file)),
        }))
    }

    /// Creates output to a file of limited size and rate.
    pub(super) fn to_rotated(
        path: &Path,
        file: RotatedFile,
        throttle: Option<FileThrottle>,
    ) -> io::Result<Self> {
        Ok(Self::new(End::DiskFile(DiskFile::start(path, file, throttle)?)))
    }

    /// Creates output that is full. Its file accepts nothing until the returned sender is dropped.
    #[cfg(test)]
    pub fn stalled() -> (std::sync::mpsc::Sender<()>, Self) {
        struct Stalled(std::sync::mpsc::Receiver<()>);
        impl Write for Stalled {
            fn write(&mut self, data: &[u8]) -> io::Result<usize> {
                // Waits until the sender is dropped. It never sends anything.
                let _ = self.0.recv();
                Ok(data.len())
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let (hold, held) = std::sync::mpsc::channel();
        let mut output = Self::new(End::DiskFile(
            DiskFile::start(Path::new("disk"), Stalled(held), None).unwrap(),
        ));
        while output.send(&[0; 1 << 20]).len == 0 {}
        (hold, output)
    }

    /// Creates output to standard output, without the buffer of the standard library.
    pub fn stdout() -> io::Result<Self> {
        Self::to(File::from(io::stdout().as_fd().try_clone_to_owned()?))
    }

    pub fn is_null(&self) -> bool {
        matches!(self.end, End::NoReader)
    }

    fn new(end: End) -> Self {
        Self { end, backlog: VecDeque::new() }
    }

    /// Writes as much of the backlog and `data` as possible without blocking. Keeps the rest in the
    /// backlog if it fits. Returns the lost output.
    pub fn send(&mut self, data: &[u8]) -> Lost {
        match &self.end {
            End::NoReader => return Lost::default(),
            End::Line(ring) => return Lost { len: ring.push(data), error: None },
            End::DiskFile(file) => return file.send(data),
            End::Reader(_) => {}
        }
        let before = self.flush();
        let was_behind = self.is_behind();
        let backlog_len = data.len().min(BACKLOG_LEN_MAX - self.backlog.len());
        self.backlog.extend(&data[..backlog_len]);
        let after = if was_behind { Lost::default() } else { self.flush() };
        Lost {
            len: before.len + (data.len() - backlog_len) + after.len,
            error: before.error.or(after.error),
        }
    }

    /// Writes as much of the backlog as possible without blocking. Returns the lost output.
    pub fn flush(&mut self) -> Lost {
        let End::Reader(target) = &mut self.end else { return Lost::default() };
        let result = target.take(&mut self.backlog);
        match result {
            Ok(()) => Lost::default(),
            Err(err) => {
                let len = self.backlog.len();
                self.backlog.clear();
                Lost { len, error: Some(err) }
            }
        }
    }

    /// Returns true if there is a backlog. Call [`Self::flush`] when the file is writable, or after
    /// a delay.
    pub fn is_behind(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// Returns true if [`Self::send`] may have to wait, because output arrives faster than the file
    /// is written.
    pub fn is_full(&self) -> bool {
        matches!(&self.end, End::DiskFile(file) if file.is_full())
    }

    /// File to wait for while there is a backlog.
    pub fn file(&self) -> Option<&File> {
        match &self.end {
            End::Reader(target) => Some(&target.file),
            _ => None,
        }
    }
}

impl Drop for ConsoleOutput {
    /// Waits briefly until the guest's last output is written, because a stopped terminal must not
    /// keep the VM alive.
    fn drop(&mut self) {
        let deadline = Instant::now() + LINGER;
        while self.is_behind() {
            let timeout = deadline.saturating_duration_since(Instant::now());
            let ready = match &self.end {
                End::Reader(target) => target.is_ready(timeout).unwrap_or(false),
                _ => false,
            };
            if !ready && timeout.is_zero() {
                return;
            }
            self.flush();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{PipeReader, Read, Seek, SeekFrom};
    use std::os::fd::OwnedFd;
    use std::sync::mpsc;

    use rustix::termios::{Action, tcflow};

    use super::*;

    /// Capacity of a pipe on Linux by default.
    const PIPE_LEN: usize = 64 << 10;

    fn pipe() -> (PipeReader, ConsoleOutput) {
        let (reader, writer) = io::pipe().unwrap();
        (reader, ConsoleOutput::to(File::from(OwnedFd::from(writer))).unwrap())
    }

    fn text(len: usize) -> Vec<u8> {
        (0..len).map(|n| (n % 251) as u8).collect()
    }

    #[test]
    fn full_pipe_does_not_block_and_losses_are_counted() {
        let (mut reader, mut output) = pipe();
        let text = text(2 * PIPE_LEN + BACKLOG_LEN_MAX);
        let mut lost = 0;
        for part in text.chunks(1000) {
            lost += output.send(part).len;
        }
        // Small writes do not completely fill the pages of a pipe.
        assert!((PIPE_LEN..2 * PIPE_LEN).contains(&lost), "{lost}");
        assert_eq!(output.backlog.len(), BACKLOG_LEN_MAX);
        let mut got = vec![0; text.len() - lost];
        for part in got.chunks_mut(1000) {
            assert_eq!(output.flush().len, 0);
            reader.read_exact(part).unwrap();
        }
        assert!(got == text[..got.len()], "the retained output is out of order");
        assert!(!output.is_behind());
        assert_eq!(output.send(b"again").len, 0);
        reader.read_exact(&mut got[..5]).unwrap();
        assert_eq!(&got[..5], b"again");
    }

    #[test]
    fn stopped_terminal_does_not_block() {
        let (master, slave) = crate::host_console::testing::terminal();
        let mut output = ConsoleOutput::to(File::from(slave)).unwrap();
        // Each newline becomes two bytes, which may not fit into a terminal with little room.
        let mut lost = 0;
        while lost == 0 {
            lost += output.send(b"a line\tof a table\n\n").len;
        }
        tcflow(output.file().unwrap(), Action::OOff).unwrap();
        assert_eq!(output.send(b"stopped").len, 7);
        drop(master);
    }

    #[test]
    fn output_without_a_reader_is_lost_at_once() {
        let (reader, mut output) = pipe();
        while !output.is_behind() {
            assert_eq!(output.send(&[b'x'; 1000]).len, 0);
        }
        let waiting = output.backlog.len();
        drop(reader);
        let lost = output.send(b"more");
        assert_eq!(lost.len, waiting + 4);
        assert_eq!(lost.error.unwrap().kind(), io::ErrorKind::BrokenPipe);
        assert!(!output.is_behind());
    }

    #[test]
    fn file_has_all_output_in_order_after_drop() {
        let mut file = tempfile::tempfile().unwrap();
        let mut output = ConsoleOutput::to(file.try_clone().unwrap()).unwrap();
        let text = text(3 << 20);
        let lost: usize = text.chunks(10_000).map(|part| output.send(part).len).sum();
        assert!(!output.is_null() && !output.is_behind() && output.file().is_none());
        drop(output);
        let mut got = Vec::new();
        file.seek(SeekFrom::Start(0)).unwrap();
        file.read_to_end(&mut got).unwrap();
        assert!(lost == 0 && got == text);
    }

    #[test]
    fn drop_waits_for_an_active_reader() {
        let (mut reader, mut output) = pipe();
        let text = text(PIPE_LEN + 100_000);
        assert_eq!(output.send(&text).len, 0);
        let ending = std::thread::spawn(move || drop(output));
        let mut got = Vec::new();
        reader.read_to_end(&mut got).unwrap();
        ending.join().unwrap();
        assert!(got == text);
    }

    #[test]
    fn drop_does_not_wait_forever_for_an_idle_reader() {
        let (_reader, mut output) = pipe();
        output.send(&text(PIPE_LEN + 1000));
        assert!(output.is_behind());
        let (ended, end) = mpsc::channel();
        std::thread::spawn(move || {
            drop(output);
            ended.send(()).unwrap();
        });
        end.recv_timeout(Duration::from_secs(60)).expect("the end of the output");
    }
}
