//! `--event-monitor`.

use std::fmt;
use std::os::fd::RawFd;
use std::path::PathBuf;

use foreshore_config::{ConfigError, InheritedFd, PATH_OR_FD, Table, section};

section! {
    /// Keys of the flag.
    struct Keys: "--event-monitor" "Events as JSON to a path or a descriptor" {
        path: Option<PathBuf> => "File, or FIFO; startup waits until a FIFO has a reader",
        fd: Option<InheritedFd> => "Inherited descriptor",
    }
}

/// Destination of the events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventMonitor {
    /// Path of a FIFO, or of a file that is created or truncated.
    Path(PathBuf),
    /// Number of an inherited descriptor.
    Fd(RawFd),
}

impl EventMonitor {
    pub const TABLE: Table = Table::of::<Keys>();

    /// Parses the flag's value.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let flag = Keys::FLAG;
        match Keys::parse(text)? {
            Keys { path: Some(path), fd: None } => Ok(Self::Path(path)),
            Keys { path: None, fd: Some(InheritedFd(fd)) } => Ok(Self::Fd(fd)),
            _ => Err(ConfigError::NotOneOf { flag, text: text.to_owned(), forms: PATH_OR_FD }),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_parsed_or_refused() {
        for (text, expected) in [
            ("path= /e ,fd=", "/e"),
            (r#"path="/a,b""#, "/a,b"),
            (" fd= 3 ,path=", "fd=3"),
            ("fd=2", r#"fd="2" is not the number of an inherited file descriptor, 3 and up"#),
            ("fd=x", r#"fd="x" is not the number of an inherited file descriptor, 3 and up"#),
            ("", r#""" is not one of path=PATH and fd=N"#),
            ("path=/e,fd=3", r#""path=/e,fd=3" is not one of path=PATH and fd=N"#),
            ("/e", r#"unknown key "/e"; the keys are path=, fd="#),
            ("path=/a,b", r#"unknown key "b"; the keys are path=, fd="#),
        ] {
            match EventMonitor::parse(text) {
                Ok(target) => assert_eq!(target.to_string(), expected),
                Err(error) => assert_eq!(error.to_string(), format!("--event-monitor: {expected}")),
            }
        }
    }
}
