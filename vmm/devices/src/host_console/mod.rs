//! Host side of a guest's console: a file, the VMM's terminal, a pseudo terminal, a socket, or
//! nothing.

pub mod config;
mod disk_file;
mod file_rate;
mod files;
mod input;
mod line;
mod output;
mod raw_mode;
mod readiness;
mod rotated_file;
#[cfg(test)]
mod testing;
mod window;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use thiserror::Error;

pub use files::{ConsoleFiles, FileStart};
pub use input::{ConsoleInput, Read};
pub use line::{Lines, Port};
pub use output::{ConsoleOutput, Lost};
pub use rotated_file::{ConsoleFileMetrics, ConsoleFileSource, rotation_paths};
#[cfg(test)]
pub use window::resize;
pub use window::{Window, WindowSize};

use self::config::{ConsoleConfig, ConsoleMode};
use crate::event_loop::EventLoopError;
use crate::unix_socket::UnixSocketError;

#[derive(Debug, Error)]
pub enum ConsoleError {
    #[error("cannot open the console file {path:?}")]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot empty the console file {path:?}")]
    Empty {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Mode `File` without a path.
    #[error("console mode File needs a file")]
    NoFile,
    /// Mode `Socket` without a path.
    #[error("console mode Socket needs a socket")]
    NoSocket,
    #[error(transparent)]
    Socket(#[from] UnixSocketError),
    #[error("cannot open a pseudo terminal")]
    Pty(#[source] io::Error),
    /// A pipe or eventfd for a pseudo terminal or socket could not be created.
    #[error("cannot create a pipe or eventfd of a console")]
    Line(#[source] io::Error),
    #[error("cannot start the thread that serves console clients")]
    Worker(#[source] EventLoopError),
    #[error("cannot use the terminal as console")]
    Terminal(#[source] io::Error),
}

/// Host side of a console: its output, input and window size.
pub struct HostConsole {
    /// Output of the guest.
    pub output: ConsoleOutput,
    /// Input to the guest.
    pub input: Option<ConsoleInput>,
    /// Window size, if the console is a terminal.
    pub window: Option<Arc<Window>>,
}

impl HostConsole {
    /// Opens the console that `config` describes, and adds its file to `files`. Returns `None` if
    /// the guest has no such device.
    pub fn open(
        port: Port,
        config: &ConsoleConfig,
        files: &mut ConsoleFiles,
    ) -> Result<Option<Self>, ConsoleError> {
        let console = match config.mode {
            ConsoleMode::Off => return Ok(None),
            ConsoleMode::Null => Self::without_terminal(ConsoleOutput::null(), None),
            ConsoleMode::Tty => Self {
                output: ConsoleOutput::stdout().map_err(ConsoleError::Terminal)?,
                input: ConsoleInput::stdin().map_err(ConsoleError::Terminal)?,
                window: Window::of_the_vmm().map_err(ConsoleError::Terminal)?.map(Arc::new),
            },
            ConsoleMode::Pty | ConsoleMode::Socket => files.lines().open(port, config)?,
            ConsoleMode::File => {
                let path = config.file.as_ref().ok_or(ConsoleError::NoFile)?;
                let output = files.output(port, path, config.file_limits());
                let output =
                    output.map_err(|source| ConsoleError::File { path: path.clone(), source })?;
                Self::without_terminal(output, None)
            }
        };
        Ok(Some(console))
    }

    /// Console without a window size.
    pub(crate) fn without_terminal(output: ConsoleOutput, input: Option<ConsoleInput>) -> Self {
        Self { output, input, window: None }
    }

    /// Creates a console for a test. Returns it with the writer of its input and the reader of its
    /// output.
    #[cfg(any(test, feature = "testing"))]
    pub fn pipes() -> (Self, io::PipeWriter, io::PipeReader) {
        let (input, keyboard) = io::pipe().unwrap();
        let (screen, output) = io::pipe().unwrap();
        let file = |fd| std::fs::File::from(fd);
        let input = Some(file(std::os::fd::OwnedFd::from(input)).into());
        (
            Self::without_terminal(ConsoleOutput::to(file(output.into())).unwrap(), input),
            keyboard,
            screen,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files() -> ConsoleFiles {
        ConsoleFiles::new(FileStart::Empty, Lines::default())
    }

    #[test]
    fn file_that_cannot_be_opened_is_named() {
        let path = Some("/nowhere/at/all".into());
        let config =
            ConsoleConfig { mode: ConsoleMode::File, file: path, ..ConsoleConfig::default() };
        let error = HostConsole::open(Port::Serial, &config, &mut files()).err().unwrap();
        assert_eq!(error.to_string(), r#"cannot open the console file "/nowhere/at/all""#);
    }

    #[test]
    fn off_has_no_device_and_null_has_a_silent_one() {
        let open = |mode| {
            let config = ConsoleConfig { mode, ..ConsoleConfig::default() };
            HostConsole::open(Port::Console, &config, &mut files()).unwrap()
        };
        assert!(open(ConsoleMode::Off).is_none());
        let null = open(ConsoleMode::Null).unwrap();
        assert!(null.output.is_null() && null.input.is_none() && null.window.is_none());
    }
}
