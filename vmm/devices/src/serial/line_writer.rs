//! Line buffer for output. A UART sends single bytes, and a system call for each byte would
//! dominate the cost.

use std::io::{self, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use vmm_sys_util::timerfd::TimerFd;

use super::metrics::SerialMetrics;
use crate::host_console::ConsoleOutput;
use crate::log::rate_limited;

/// Maximum length of a line that is buffered. Longer lines are written in parts.
const LINE_LEN_MAX: usize = 512;
/// Delay after which an unfinished line is written, because prompts end without a newline. Output
/// to a slow reader is retried at the same interval.
const PART_DELAY: Duration = Duration::from_millis(10);

/// Writer that delays an unfinished line until the line ends or a short timeout expires. Writing
/// never blocks and never fails. Lost output is counted and logged, because the guest cannot be
/// notified.
pub(super) struct LineWriter {
    output: ConsoleOutput,
    line: Vec<u8>,
    timer: TimerFd,
    /// Set if the timer is running. The end of a line does not stop it, so that it expires only
    /// once for all lines in its interval.
    armed: bool,
    losing: bool,
    metrics: Arc<SerialMetrics>,
}

impl LineWriter {
    pub(super) fn new(output: ConsoleOutput, metrics: Arc<SerialMetrics>) -> io::Result<Self> {
        let timer = TimerFd::new()?;
        let line = Vec::with_capacity(LINE_LEN_MAX);
        Ok(Self { output, line, timer, armed: false, losing: false, metrics })
    }

    /// Timer that becomes readable when [`Self::timer_rang`] should be called.
    pub(super) fn timer(&self) -> RawFd {
        self.timer.as_raw_fd()
    }

    /// Writes the delayed line. Call it only when the timer is readable.
    pub(super) fn timer_rang(&mut self) -> io::Result<()> {
        self.timer.wait()?;
        self.armed = false;
        self.drain();
        Ok(())
    }

    fn drain(&mut self) {
        let lost = self.output.send(&self.line);
        self.line.clear();
        self.metrics.lost_bytes.fetch_add(lost.len as u64, Ordering::Relaxed);
        if lost.len > 0 && !self.losing {
            // The log line is limited, because a guest with a slow reader can cause losses at any
            // rate.
            rate_limited!(warn, err = ?lost.error, "Output of the serial port lost");
        }
        // A loss ends only when the reader has caught up, not when a line is accepted again.
        self.losing = lost.len > 0 || self.losing && self.output.is_behind();
        if self.output.is_behind() {
            // If the timer cannot be started, the next line retries.
            self.arm();
        }
    }

    fn arm(&mut self) -> bool {
        if !self.armed {
            self.armed = self.timer.reset(PART_DELAY, None).is_ok();
        }
        self.armed
    }
}

impl Write for LineWriter {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.output.is_null() {
            return Ok(data.len());
        }
        self.line.extend_from_slice(data);
        if data.contains(&b'\n') || self.line.len() >= LINE_LEN_MAX {
            self.drain();
        } else if !self.arm() {
            // If the timer is not running, output must not be delayed.
            self.drain();
        }
        Ok(data.len())
    }

    /// Does nothing, because the UART flushes after every byte, and this writer exists to avoid
    /// that.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for LineWriter {
    fn drop(&mut self) {
        // The last output of a crashed guest rarely ends with a newline.
        self.drain();
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
        let output = ConsoleOutput::to(File::from(OwnedFd::from(writer))).unwrap();
        (reader, LineWriter::new(output, Arc::default()).unwrap())
    }

    /// Reads the bytes of one write to the pipe.
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
    fn line_is_written_at_its_end() {
        let (mut reader, mut writer) = pipe();
        send(&mut writer, "hello\nwor");
        assert_eq!(read(&mut reader), "hello\n");
        send(&mut writer, "ld\n");
        assert_eq!(read(&mut reader), "world\n");
    }

    #[test]
    fn prompt_is_written_when_the_timer_expires() {
        let (mut reader, mut writer) = pipe();
        send(&mut writer, "login: ");
        assert!(writer.armed);
        writer.timer_rang().unwrap();
        assert_eq!(read(&mut reader), "login: ");
        assert!(!writer.armed);
    }

    #[test]
    fn long_line_is_written_before_its_end() {
        let (mut reader, mut writer) = pipe();
        send(&mut writer, &"x".repeat(LINE_LEN_MAX + 1));
        assert_eq!(read(&mut reader).len(), LINE_LEN_MAX);
    }

    #[test]
    fn last_output_is_written_on_drop() {
        let (mut reader, mut writer) = pipe();
        send(&mut writer, "Kernel panic");
        drop(writer);
        assert_eq!(read(&mut reader), "Kernel panic");
    }

    #[test]
    fn backlog_is_limited_without_a_reader() {
        let (reader, mut writer) = pipe();
        drop(reader);
        send(&mut writer, "lost\n");
        assert!(writer.line.is_empty() && !writer.output.is_behind());
        assert_eq!(writer.metrics.lost_bytes.load(Ordering::Relaxed), 5);
    }

    #[test]
    fn late_reader_receives_the_backlog_by_the_timer() {
        let (mut reader, mut writer) = pipe();
        let line = format!("{}\n", "x".repeat(99));
        let mut sent = 0;
        while !writer.output.is_behind() {
            send(&mut writer, &line);
            sent += line.len();
        }
        assert!(writer.armed);
        let mut got = vec![0; sent];
        reader.read_exact(&mut got[..sent - line.len()]).unwrap();
        writer.timer_rang().unwrap();
        reader.read_exact(&mut got[sent - line.len()..]).unwrap();
        assert!(!writer.output.is_behind() && !writer.armed);
        assert_eq!(writer.metrics.lost_bytes.load(Ordering::Relaxed), 0);
    }
}
