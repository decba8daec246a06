//! Output lines of the demo with time stamps, for the terminal, the log and the picture.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};

use crate::messages::{Lines, write_output};

pub(super) const LOG: &str = "demo.log";
/// Prefix of a line about an event that the picture shows.
const EVENT: &str = "* ";

/// Event and its time since 1970.
#[derive(Clone)]
pub(super) struct Event {
    pub time: Duration,
    pub elapsed_s: f64,
    pub text: String,
}

/// Forwards lines and adds the time to each.
pub(super) struct Narrator {
    folder: PathBuf,
    lines: Lines,
    /// Second of the first line. Times in the log and in the picture are relative to it.
    pub zero_s: Option<u64>,
    pub events: Vec<Event>,
}

impl Narrator {
    pub(super) fn new(folder: &Path) -> Self {
        let folder = folder.to_owned();
        Self { folder, lines: Lines::default(), zero_s: None, events: Vec::new() }
    }

    /// Begins a new run. Its times are relative to its own first line.
    pub(super) fn begin(&mut self) {
        self.zero_s = None;
        self.events.clear();
    }

    pub(super) fn add(&mut self, bytes: &[u8]) -> Result<()> {
        let lines = self.lines.feed(bytes);
        self.pass(lines)
    }

    /// Forwards the last line, even if it has no newline.
    pub(super) fn finish(&mut self) -> Result<()> {
        let lines = self.lines.finish();
        self.pass(lines)
    }

    fn pass(&mut self, lines: Vec<Vec<u8>>) -> Result<()> {
        lines.iter().try_for_each(|line| self.pass_line(&String::from_utf8_lossy(line), now()?))
    }

    fn pass_line(&mut self, line: &str, now: Duration) -> Result<()> {
        let zero_s = *self.zero_s.get_or_insert(now.as_secs());
        let elapsed = now.saturating_sub(Duration::from_secs(zero_s));
        let elapsed_s = (elapsed.as_millis() / 100) as f64 / 10.0;
        let text = format!("{elapsed_s:>6.1}  {line}");
        write_output(text.as_bytes());
        if let Some(event) = line.strip_prefix(EVENT) {
            self.events.push(Event { time: now, elapsed_s, text: event.trim_end().to_owned() });
        }
        let log = File::options().append(true).create(true).open(self.folder.join(LOG));
        log.and_then(|mut log| log.write_all(text.as_bytes())).context("Cannot write the log")
    }
}

/// Time since 1970.
pub(super) fn now() -> Result<Duration> {
    SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkout::read;

    #[test]
    fn lines_have_their_times_and_events_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let mut narrator = Narrator::new(folder.path());
        narrator.pass_line("== 1\n", Duration::from_millis(7_950)).unwrap();
        assert_eq!(narrator.zero_s, Some(7));
        narrator.pass_line("* two VMs, booted\n", Duration::from_millis(107_125)).unwrap();
        let log = read(&folder.path().join(LOG)).unwrap();
        assert_eq!(log, "   0.9  == 1\n 100.1  * two VMs, booted\n");
        let event = &narrator.events[0];
        assert_eq!((event.elapsed_s, &event.text[..]), (100.1, "two VMs, booted"));
        narrator.begin();
        narrator.pass_line("== 1\n", Duration::from_secs(200)).unwrap();
        assert!(narrator.events.is_empty() && narrator.zero_s == Some(200));
    }
}
