//! Follows files that grow while QEMU runs.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result};

const POLL: Duration = Duration::from_millis(50);

/// Threads that copy growing files to outputs of this process. Each file has its own thread,
/// because an output may block.
pub(super) struct Tails {
    is_complete: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Tails {
    pub(super) fn new() -> Self {
        Self { is_complete: Arc::default(), threads: Vec::new() }
    }

    pub(super) fn add(&mut self, path: &Path, output: impl Write + Send + 'static) -> Result<()> {
        let file = open(path)?;
        let is_complete = self.is_complete.clone();
        self.threads.push(thread::spawn(move || follow(file, output, &is_complete)));
        Ok(())
    }

    /// Copies the rest of the files, which no longer grow.
    pub(super) fn finish(self) {
        self.is_complete.store(true, Ordering::Release);
        for thread in self.threads {
            // A thread that panicked has already printed the reason.
            let _ = thread.join();
        }
    }
}

fn follow(mut file: File, mut output: impl Write, is_complete: &AtomicBool) {
    loop {
        // Must be read before the file, because bytes may be added afterwards.
        let is_last = is_complete.load(Ordering::Acquire);
        let copied = io::copy(&mut file, &mut output).and_then(|len| output.flush().map(|()| len));
        match copied {
            // The output is closed. The command still runs to its end.
            Err(_) => return,
            Ok(_) if is_last => return,
            Ok(0) => thread::sleep(POLL),
            Ok(_) => {}
        }
    }
}

fn open(path: &Path) -> Result<File> {
    File::open(path).with_context(|| format!("Cannot open {}", path.display()))
}

/// Reader that looks for a line in a growing file.
pub(super) struct LineWatch {
    file: File,
    expected: Vec<u8>,
    /// Start of a line whose end has not been written yet.
    partial: Vec<u8>,
}

impl LineWatch {
    pub(super) fn new(path: &Path, expected: &str) -> Result<Self> {
        Ok(Self {
            file: open(path)?,
            expected: expected.as_bytes().to_owned(),
            partial: Vec::new(),
        })
    }

    /// Reads new data. Returns true if it contains the line.
    pub(super) fn sees_line(&mut self) -> Result<bool> {
        self.file.read_to_end(&mut self.partial)?;
        let mut lines: Vec<_> = self.partial.split(|byte| *byte == b'\n').collect();
        let rest = lines.pop().unwrap_or_default().to_owned();
        let found = lines.contains(&&self.expected[..]);
        self.partial = rest;
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_is_seen_once_it_is_complete_and_whole() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut watch = LineWatch::new(file.path(), "all write").unwrap();
        for (text, is_seen) in
            [("not all write\nall wri", false), ("te", false), ("\nmore\n", true)]
        {
            file.write_all(text.as_bytes()).unwrap();
            assert_eq!(watch.sees_line().unwrap(), is_seen, "{text}");
        }
    }

    #[test]
    fn finished_tails_have_copied_all() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let (mut reader, writer) = io::pipe().unwrap();
        let mut tails = Tails::new();
        tails.add(file.path(), writer).unwrap();
        file.write_all(b"the last words").unwrap();
        tails.finish();
        let mut copied = String::new();
        reader.read_to_string(&mut copied).unwrap();
        assert_eq!(copied, "the last words");
    }

    #[test]
    fn closed_output_does_not_block_the_end() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"words").unwrap();
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let mut tails = Tails::new();
        tails.add(file.path(), writer).unwrap();
        tails.finish();
    }
}
