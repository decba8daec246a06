//! Lines of the demo with their times, for the terminal, the log and the picture.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};

use crate::messages::{Lines, write_output};

pub(super) const LOG: &str = "demo.log";
pub(super) const EVENTS: &str = "events.csv";
const EVENTS_HEAD: &str = "time_s,elapsed_s,event\n";
/// Start of a line about an event, which the picture has.
const EVENT: &str = "* ";

/// Forwards lines, each with its time.
pub(super) struct Narrator {
    folder: PathBuf,
    lines: Lines,
    /// Second of the first line. Times in the log and in the picture count from it.
    zero: Option<u64>,
}

impl Narrator {
    pub(super) fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), lines: Lines::default(), zero: None }
    }

    /// Begins a new run, whose times count from its own first line.
    pub(super) fn begin(&mut self) {
        self.zero = None;
    }

    pub(super) fn zero(&self) -> Option<u64> {
        self.zero
    }

    pub(super) fn add(&mut self, bytes: &[u8]) -> Result<()> {
        let lines = self.lines.feed(bytes);
        self.pass(lines)
    }

    /// Forwards the last line even if it lacks a newline.
    pub(super) fn finish(&mut self) -> Result<()> {
        let lines = self.lines.finish();
        self.pass(lines)
    }

    fn pass(&mut self, lines: Vec<Vec<u8>>) -> Result<()> {
        lines.iter().try_for_each(|line| self.pass_line(&String::from_utf8_lossy(line), now()?))
    }

    fn pass_line(&mut self, line: &str, now: Duration) -> Result<()> {
        if self.zero.is_none() {
            crate::checkout::write(&self.folder.join(EVENTS), EVENTS_HEAD)?;
        }
        let zero = *self.zero.get_or_insert(now.as_secs());
        let elapsed = tenths(now.saturating_sub(Duration::from_secs(zero)));
        let text = format!("{elapsed:>6}  {line}");
        write_output(text.as_bytes());
        self.append(LOG, &text)?;
        if let Some(event) = line.strip_prefix(EVENT) {
            let event = format!("{},{elapsed},{event}", seconds(now));
            self.append(EVENTS, &event)?;
        }
        Ok(())
    }

    fn append(&self, name: &str, text: &str) -> Result<()> {
        let file = File::options().append(true).create(true).open(self.folder.join(name));
        file.and_then(|mut file| file.write_all(text.as_bytes()))
            .with_context(|| format!("Cannot write {name}"))
    }
}

/// Time since 1970.
pub(super) fn now() -> Result<Duration> {
    SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")
}

/// Seconds with a fraction, as scripts write them.
pub(super) fn seconds(time: Duration) -> String {
    format!("{}.{:06}", time.as_secs(), time.subsec_micros())
}

fn tenths(time: Duration) -> String {
    format!("{}.{}", time.as_secs(), time.subsec_millis() / 100)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkout::read;

    #[test]
    fn lines_have_their_times_and_events_are_listed() {
        let folder = tempfile::tempdir().unwrap();
        let mut narrator = Narrator::new(folder.path());
        narrator.pass_line("== 1\n", Duration::from_millis(7_950)).unwrap();
        assert_eq!(narrator.zero(), Some(7));
        narrator.pass_line("* two VMs, booted\n", Duration::from_micros(107_123_456)).unwrap();
        let log = read(&folder.path().join(LOG)).unwrap();
        assert_eq!(log, "   0.9  == 1\n 100.1  * two VMs, booted\n");
        let events = read(&folder.path().join(EVENTS)).unwrap();
        assert_eq!(events, format!("{EVENTS_HEAD}107.123456,100.1,two VMs, booted\n"));
        narrator.begin();
        narrator.pass_line("== 1\n", Duration::from_secs(200)).unwrap();
        assert_eq!(read(&folder.path().join(EVENTS)).unwrap(), EVENTS_HEAD);
    }
}
