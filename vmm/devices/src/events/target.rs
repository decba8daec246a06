//! `--event-monitor`.

use std::fmt;
use std::os::fd::RawFd;
use std::path::PathBuf;

use foreshore_config::{ConfigError, inherited_fd};

/// `--event-monitor path=PATH|fd=N`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventMonitor {
    /// A file, which is made or emptied, or a FIFO.
    Path(PathBuf),
    /// A descriptor that was handed over by who started the VMM.
    Fd(RawFd),
}

impl EventMonitor {
    /// Reads the flag's value.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let flag = "--event-monitor";
        match (text.strip_prefix("fd="), text.strip_prefix("path=")) {
            (Some(number), _) => inherited_fd(flag, number).map(Self::Fd),
            (None, Some(path)) if !path.is_empty() => Ok(Self::Path(path.into())),
            _ => Err(ConfigError::Conflict {
                flag,
                reason: format!("{text:?} is neither path=PATH nor fd=N"),
            }),
        }
    }
}

impl fmt::Display for EventMonitor {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(out, "{}", path.display()),
            Self::Fd(fd) => write!(out, "fd={fd}"),
        }
    }
}
