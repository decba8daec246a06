//! Where a guest's output goes.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::Path;

use super::FileStart;

/// A file, standard output, or nothing.
#[derive(Debug)]
pub struct ConsoleOutput(Option<File>);

impl ConsoleOutput {
    /// Throws everything away.
    pub fn null() -> Self {
        Self(None)
    }

    /// Standard output, without the buffer of the standard library.
    pub fn stdout() -> io::Result<Self> {
        Ok(Self(Some(io::stdout().as_fd().try_clone_to_owned()?.into())))
    }

    /// A file, by appending: serial and virtio console may share one, and logs may be truncated while they grow.
    pub fn file(path: &Path, start: FileStart) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        // A pipe or a terminal cannot be emptied and need not be.
        if start == FileStart::Empty && file.metadata()?.is_file() {
            file.set_len(0)?;
        }
        Ok(Self(Some(file)))
    }

    /// Whether nobody listens.
    pub fn is_null(&self) -> bool {
        self.0.is_none()
    }
}

impl From<File> for ConsoleOutput {
    fn from(file: File) -> Self {
        Self(Some(file))
    }
}

impl Write for ConsoleOutput {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        match &mut self.0 {
            Some(file) => file.write(data),
            None => Ok(data.len()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
