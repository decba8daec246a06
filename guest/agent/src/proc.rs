//! The files in /proc, kept open and read into one buffer, so that a report allocates nothing.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use foreshore_proto::{Memory, RawReport, Stall};
use thiserror::Error;

use crate::parse::{self, ParseError};

/// More than any of the texts of a small guest; it grows where they are longer.
const FIRST_BUFFER_BYTES: usize = 32 * 1024;

/// No text is longer than this: zoneinfo takes 150 bytes per zone and CPU.
const MAX_BUFFER_BYTES: usize = 16 << 20;

/// Why a text could not be had.
#[derive(Debug, Error)]
pub enum ProcError {
    /// It cannot be opened or read.
    #[error("Cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the kernel says.
        #[source]
        source: io::Error,
    },
    /// It is not as expected.
    #[error("Cannot understand the kernel's text")]
    Parse(#[from] ParseError),
}

/// A file that is read again and again.
#[derive(Debug)]
struct Text {
    path: PathBuf,
    file: File,
}

/// The files that a report is made of.
#[derive(Debug)]
pub struct Proc {
    meminfo: Text,
    zoneinfo: Text,
    vmstat: Text,
    /// Not needed for a report.
    buddyinfo: Option<Text>,
    /// Not there if the kernel keeps no pressure information.
    pressure: Option<Text>,
    buffer: Vec<u8>,
}

impl Proc {
    /// Opens the files under `root`, which is /proc outside of tests.
    pub fn open(root: &Path) -> Result<Self, ProcError> {
        Ok(Proc {
            meminfo: Text::open(root.join("meminfo"))?,
            zoneinfo: Text::open(root.join("zoneinfo"))?,
            vmstat: Text::open(root.join("vmstat"))?,
            buddyinfo: Text::open(root.join("buddyinfo")).ok(),
            pressure: Text::open(root.join("pressure/memory")).ok(),
            buffer: vec![0; FIRST_BUFFER_BYTES],
        })
    }

    /// Fills in everything of a report that comes from /proc.
    pub fn fill(&mut self, report: &mut RawReport) -> Result<(), ProcError> {
        report.memory = parse::meminfo(self.meminfo.read(&mut self.buffer)?)?;
        parse::zoneinfo(self.zoneinfo.read(&mut self.buffer)?, &mut report.zones)?;
        if let Some(buddyinfo) = &self.buddyinfo {
            let read = buddyinfo.read(&mut self.buffer)?;
            if parse::buddyinfo(read, &mut report.zones).is_err() {
                // A report without it is worth more than none.
                report.zones.iter_mut().for_each(|zone| zone.largest_free_blocks = None);
                self.buddyinfo = None;
            }
        }
        report.counters = parse::vmstat(self.vmstat.read(&mut self.buffer)?)?;
        report.stall = match &self.pressure {
            Some(pressure) => parse::pressure(pressure.read(&mut self.buffer)?)?,
            None => Stall::default(),
        };
        Ok(())
    }

    /// Available memory alone.
    pub fn available_bytes(&mut self) -> Result<u64, ProcError> {
        Ok(parse::available_bytes(self.meminfo.read(&mut self.buffer)?)?)
    }

    /// /proc/meminfo alone.
    pub fn memory(&mut self) -> Result<Memory, ProcError> {
        Ok(parse::meminfo(self.meminfo.read(&mut self.buffer)?)?)
    }
}

impl Text {
    fn open(path: PathBuf) -> Result<Self, ProcError> {
        match File::open(&path) {
            Ok(file) => Ok(Text { path, file }),
            Err(source) => Err(ProcError::Read { path, source }),
        }
    }

    /// The whole text as it is now.
    fn read<'a>(&self, buffer: &'a mut Vec<u8>) -> Result<&'a [u8], ProcError> {
        let mut length = 0;
        loop {
            if length == buffer.len() {
                if length >= MAX_BUFFER_BYTES {
                    return Err(self.failed(io::Error::from(io::ErrorKind::FileTooLarge)));
                }
                buffer.resize(length * 2, 0);
            }
            // seq_file hands out a page or so at a time, so one read is not the whole of it.
            match self.file.read_at(&mut buffer[length..], length as u64) {
                Ok(0) => return Ok(&buffer[..length]),
                Ok(count) => length += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed(error)),
            }
        }
    }

    fn failed(&self, source: io::Error) -> ProcError {
        ProcError::Read { path: self.path.clone(), source }
    }
}

#[cfg(test)]
mod tests {
    use foreshore_proto::{PROTOCOL_VERSION, Report};

    use super::*;

    #[test]
    fn a_report_of_this_machine_passes_verification() {
        let mut report =
            RawReport { version: PROTOCOL_VERSION, monotonic_ms: 1 << 40, ..RawReport::default() };
        Proc::open(Path::new("/proc")).expect("open").fill(&mut report).expect("fill");
        let report = Report::try_from(report).expect("verifies");
        assert!(report.memory().total_bytes > 0 && !report.zones().is_empty());
    }

    #[test]
    fn texts_longer_than_the_buffer_are_read_whole() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("long");
        std::fs::write(&path, "x".repeat(3 * FIRST_BUFFER_BYTES + 1)).expect("write");
        let mut buffer = vec![0; FIRST_BUFFER_BYTES];
        let text = Text::open(path).expect("open");
        assert_eq!(text.read(&mut buffer).expect("read").len(), 3 * FIRST_BUFFER_BYTES + 1);
        assert_eq!(text.read(&mut buffer).expect("again").len(), 3 * FIRST_BUFFER_BYTES + 1);
    }

    #[test]
    fn a_missing_file_is_named() {
        let dir = tempfile::tempdir().expect("tempdir");
        let error = Proc::open(dir.path()).expect_err("empty");
        assert!(error.to_string().ends_with("meminfo"), "{error}");
    }
}
