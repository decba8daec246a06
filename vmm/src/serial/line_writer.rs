//! Output by lines: a UART sends bytes one by one, and a system call for each would be most of the cost.

use std::io::{self, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use tracing::warn;
use vmm_sys_util::timerfd::TimerFd;

use crate::host_console::ConsoleOutput;

/// A line that is longer goes out in parts.
const LINE_LEN_MAX: usize = 512;
/// How long the beginning of a line may wait for the rest: prompts end without a newline.
const PART_DELAY: Duration = Duration::from_millis(10);

/// Holds back an unfinished line, but not for long: when nothing completes it, a timer does.
pub(super) struct LineWriter {
    output: ConsoleOutput,
    line: Vec<u8>,
    timer: TimerFd,
    /// The timer runs. It is not stopped when the line ends: it rings once for all lines of these milliseconds.
    armed: bool,
    failing: bool,
}

impl LineWriter {
    pub(super) fn new(output: ConsoleOutput) -> io::Result<Self> {
        let timer = TimerFd::new()?;
        Ok(Self { output, line: Vec::with_capacity(LINE_LEN_MAX), timer, armed: false, failing: false })
    }

    /// To be waited for; when it is readable, call [`Self::timer_rang`].
    pub(super) fn timer(&self) -> RawFd {
        self.timer.as_raw_fd()
    }

    /// Writes what has waited long enough. Call it only when the timer is readable.
    pub(super) fn timer_rang(&mut self) -> io::Result<()> {
        self.timer.wait()?;
        self.armed = false;
        self.drain()
    }

    fn drain(&mut self) -> io::Result<()> {
        let result = self.output.write_all(&self.line);
        self.line.clear();
        if let (Err(err), false) = (&result, self.failing) {
            warn!(%err, "Output of the serial port is lost");
        }
        self.failing = result.is_err();
        result
    }
}

impl Write for LineWriter {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.output.is_null() {
            return Ok(data.len());
        }
        self.line.extend_from_slice(data);
        if data.contains(&b'\n') || self.line.len() >= LINE_LEN_MAX {
            self.drain()?;
        } else if !self.armed {
            match self.timer.reset(PART_DELAY, None) {
                Ok(()) => self.armed = true,
                // Without a timer, nothing may wait.
                Err(_) => self.drain()?,
            }
        }
        Ok(data.len())
    }

    /// Does nothing: the UART flushes after every byte, which is what this type is there to prevent.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for LineWriter {
    fn drop(&mut self) {
        // The last words of a guest that has crashed rarely end with a newline. An error has been logged.
        let _ = self.drain();
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{PipeReader, Read as _};
    use std::os::fd::OwnedFd;

    use super::*;

    fn pipe() -> (PipeReader, LineWriter) {
        let (reader, writer) = io::pipe().unwrap();
        (reader, LineWriter::new(File::from(OwnedFd::from(writer)).into()).unwrap())
    }

    /// What one write has put into the pipe.
    fn read(reader: &mut PipeReader) -> String {
        let mut data = [0; 2 * LINE_LEN_MAX];
        let len = reader.read(&mut data).unwrap();
        String::from_utf8(data[..len].to_vec()).unwrap()
    }

    fn send(writer: &mut LineWriter, text: &str) {
        for byte in text.bytes() {
            writer.write_all(&[byte]).unwrap();
            writer.flush().unwrap();
        }
    }

    #[test]
    fn a_line_is_written_at_once_when_it_ends() {
        let (mut reader, mut writer) = pipe();
        send(&mut writer, "hello\nwor");
        assert_eq!(read(&mut reader), "hello\n");
        send(&mut writer, "ld\n");
        assert_eq!(read(&mut reader), "world\n");
    }

    #[test]
    fn a_prompt_is_written_when_the_timer_rings() {
        let (mut reader, mut writer) = pipe();
        send(&mut writer, "login: ");
        assert!(writer.armed);
        writer.timer_rang().unwrap();
        assert_eq!(read(&mut reader), "login: ");
        assert!(!writer.armed);
    }

    #[test]
    fn a_long_line_does_not_wait_for_its_end() {
        let (mut reader, mut writer) = pipe();
        send(&mut writer, &"x".repeat(LINE_LEN_MAX + 1));
        assert_eq!(read(&mut reader).len(), LINE_LEN_MAX);
    }

    #[test]
    fn last_words_are_written_when_the_vm_ends() {
        let (mut reader, mut writer) = pipe();
        send(&mut writer, "Kernel panic");
        drop(writer);
        assert_eq!(read(&mut reader), "Kernel panic");
    }

    #[test]
    fn nothing_piles_up_when_nobody_reads() {
        let (reader, mut writer) = pipe();
        drop(reader);
        assert!(writer.write_all(b"lost\n").is_err());
        assert!(writer.line.is_empty());
    }
}
