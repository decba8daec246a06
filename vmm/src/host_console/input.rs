//! Standard input as a guest's keyboard.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::FileTypeExt;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::process::getpgrp;
use rustix::termios::{isatty, tcgetpgrp};

use super::raw_mode::RawMode;
use super::readiness::ready;

/// What there was to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// So many bytes.
    Bytes(usize),
    /// Nothing for the moment.
    Nothing,
    End,
}

/// Something that can be waited for by epoll and read without blocking.
#[derive(Debug)]
pub struct ConsoleInput {
    /// Gives the terminal back as it was; before the file is closed, so it comes first.
    _raw: Option<RawMode>,
    file: File,
}

impl ConsoleInput {
    /// Standard input: a terminal, which goes into raw mode, or a pipe or socket. `None` if it is
    /// something else, or a terminal that belongs to another process group: touching that one
    /// would stop the VMM.
    pub fn stdin() -> io::Result<Option<Self>> {
        let file = File::from(io::stdin().as_fd().try_clone_to_owned()?);
        if isatty(&file) {
            return match tcgetpgrp(&file) == Ok(getpgrp()) {
                true => Ok(Some(Self { _raw: Some(RawMode::enter(&file)?), file })),
                false => Ok(None),
            };
        }
        let kind = file.metadata()?.file_type();
        Ok((kind.is_fifo() || kind.is_socket()).then_some(Self { file, _raw: None }))
    }

    /// Reads what is there.
    pub fn read(&mut self, data: &mut [u8]) -> io::Result<Read> {
        if !ready(self.file.as_fd(), PollFlags::IN, Duration::ZERO)? {
            return Ok(Read::Nothing);
        }
        match self.file.read(data) {
            Ok(0) if !data.is_empty() => Ok(Read::End),
            Ok(len) => Ok(Read::Bytes(len)),
            Err(err) if err.kind() == io::ErrorKind::Interrupted => Ok(Read::Nothing),
            Err(err) => Err(err),
        }
    }
}

impl AsRawFd for ConsoleInput {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

/// A pipe or a socket.
impl From<File> for ConsoleInput {
    fn from(file: File) -> Self {
        Self { file, _raw: None }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn reading_never_waits_and_knows_the_end() {
        let (reader, mut writer) = io::pipe().unwrap();
        let mut input = ConsoleInput::from(File::from(std::os::fd::OwnedFd::from(reader)));
        let mut data = [0; 4];
        assert_eq!(input.read(&mut data).unwrap(), Read::Nothing);
        writer.write_all(b"hello").unwrap();
        assert_eq!(input.read(&mut data).unwrap(), Read::Bytes(4));
        assert_eq!(input.read(&mut data).unwrap(), Read::Bytes(1));
        drop(writer);
        assert_eq!(input.read(&mut data).unwrap(), Read::End);
    }
}
