//! Standard input as keyboard input of a guest.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::FileTypeExt;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::termios::isatty;

use super::raw_mode::RawMode;
use super::readiness::ready;

/// Result of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// Number of bytes that were read.
    Bytes(usize),
    /// No bytes are available now.
    Nothing,
    End,
}

/// Input that supports epoll and reads without blocking.
#[derive(Debug)]
pub struct ConsoleInput {
    /// Restores the terminal when dropped. First field, because this must happen before the file is
    /// closed.
    _raw: Option<RawMode>,
    file: File,
}

impl ConsoleInput {
    /// Opens standard input: a terminal, which is set to raw mode, or a pipe or socket. Returns
    /// `None` for other files. Also returns `None` for a terminal of another foreground process
    /// group, because access to it would stop the VMM.
    pub fn stdin() -> io::Result<Option<Self>> {
        let file = File::from(io::stdin().as_fd().try_clone_to_owned()?);
        if isatty(&file) {
            return match is_in_foreground(&file) {
                true => Ok(Some(Self { _raw: RawMode::enter(&file)?, file })),
                false => Ok(None),
            };
        }
        let kind = file.metadata()?.file_type();
        Ok((kind.is_fifo() || kind.is_socket()).then_some(Self { file, _raw: None }))
    }

    /// Reads the available bytes.
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

/// Returns true if this process is in the terminal's foreground process group.
///
/// Inside a PID namespace, a process group from outside has the number 0, for example under
/// `unshare --pid --fork`. This uses libc, because `Pid` in rustix cannot be 0: `tcgetpgrp` would
/// fail, and `getpgrp` would be undefined behavior.
fn is_in_foreground(terminal: &File) -> bool {
    // SAFETY: both calls take and return numbers.
    let [foreground, own] = unsafe { [libc::tcgetpgrp(terminal.as_raw_fd()), libc::getpgrp()] };
    foreground == own
}

impl AsRawFd for ConsoleInput {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

/// Input from a pipe or socket.
impl From<File> for ConsoleInput {
    fn from(file: File) -> Self {
        Self { file, _raw: None }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::Command;

    use super::*;

    /// Environment variable that marks the process in which the test runs again, inside a PID
    /// namespace.
    const IN_NAMESPACE: &str = "FORESHORE_TEST_IN_PID_NAMESPACE";

    #[test]
    fn reading_never_blocks_and_reports_the_end() {
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

    #[test]
    fn terminal_of_a_group_outside_the_pid_namespace_is_in_the_foreground() {
        if std::env::var_os(IN_NAMESPACE).is_some() {
            // SAFETY: the call returns a number.
            assert_eq!(unsafe { libc::getpgrp() }, 0);
            let stdin = File::from(io::stdin().as_fd().try_clone_to_owned().unwrap());
            return assert!(is_in_foreground(&stdin));
        }
        let unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork"];
        let tried = Command::new(unshare[0]).args(&unshare[1..]).arg("true").output();
        if !tried.is_ok_and(|output| output.status.success()) {
            return eprintln!("Skipped: this user may not create namespaces");
        }
        let (_master, slave) = crate::host_console::testing::terminal();
        assert!(!is_in_foreground(&File::from(slave.try_clone().unwrap())), "another session's");
        let name = std::thread::current().name().unwrap().to_owned();
        let mut reopened = Command::new("setsid");
        reopened.args(["--ctty", "--wait"]).args(unshare);
        reopened.arg(std::env::current_exe().unwrap()).args(["--exact", &name, "--nocapture"]);
        let output = reopened.env(IN_NAMESPACE, "1").stdin(slave).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{output:?}");
    }
}
