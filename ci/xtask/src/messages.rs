//! Messages to the user: lines on standard error with the task's name as a prefix.

use std::fmt::{self, Display};
use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};

use anyhow::{Error, Result};

/// Name of the current task.
static NAME: Mutex<String> = Mutex::new(String::new());

/// Prints a message like `println!`, prefixed with the task's name.
macro_rules! report {
    ($($text:tt)*) => { $crate::messages::print(&format!($($text)*)) };
}
pub(crate) use report;

/// Error for an invalid command line. The exit code is 2.
#[derive(Debug)]
pub(crate) struct Refused(pub String);

impl Display for Refused {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} (--help lists the options)", self.0)
    }
}

impl std::error::Error for Refused {}

/// Returns from a task with an error about an invalid command line.
macro_rules! refuse {
    ($($text:tt)*) => { return Err($crate::messages::Refused(format!($($text)*)).into()) };
}
pub(crate) use refuse;

/// Prints `message`, prefixed with the task's name.
pub(crate) fn print(message: &str) {
    let name = NAME.lock().unwrap_or_else(PoisonError::into_inner).clone();
    write_errors(format!("{name}: {message}\n").as_bytes());
}

/// Runs `work` as the task `name`. The name is kept after an error, so that the error message can
/// use it.
pub(crate) fn with_task_name<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let previous = replace(name);
    let result = work()?;
    replace(&previous);
    Ok(result)
}

/// Runs one part of a task. Reports an error and returns `None`, so that later parts still run.
pub(crate) fn attempt<T>(work: impl FnOnce() -> Result<T>) -> Option<T> {
    let name = NAME.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let report = |error: Error| {
        print(&format!("{error:#}"));
        replace(&name);
    };
    work().map_err(report).ok()
}

/// Writes to standard output without buffering. Standard output may be closed.
pub(crate) fn write_output(bytes: &[u8]) {
    let mut output = io::stdout().lock();
    let _ = output.write_all(bytes).and_then(|()| output.flush());
}

/// Writes to standard error, which may be closed.
pub(crate) fn write_errors(bytes: &[u8]) {
    let _ = io::stderr().lock().write_all(bytes);
}

/// Splits a program's output into lines. The last line may be incomplete.
#[derive(Default)]
pub(crate) struct Lines(Vec<u8>);

impl Lines {
    /// Adds output, and returns the lines that it completes, including their newlines.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Vec<Vec<u8>> {
        self.0.extend_from_slice(bytes);
        let Some(end) = self.0.iter().rposition(|byte| *byte == b'\n') else { return Vec::new() };
        let rest = self.0.split_off(end + 1);
        let complete = std::mem::replace(&mut self.0, rest);
        complete.split_inclusive(|byte| *byte == b'\n').map(<[u8]>::to_owned).collect()
    }

    /// Returns true if the last line has no newline yet.
    pub(crate) fn is_partial(&self) -> bool {
        !self.0.is_empty()
    }

    /// Returns the last line, with a newline added, unless it is empty.
    pub(crate) fn finish(&mut self) -> Vec<Vec<u8>> {
        if self.0.is_empty() { Vec::new() } else { self.feed(b"\n") }
    }
}

fn replace(name: &str) -> String {
    std::mem::replace(&mut *NAME.lock().unwrap_or_else(PoisonError::into_inner), name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_whole_and_the_last_one_is_not_lost() {
        let mut lines = Lines::default();
        assert!(lines.feed(b"on").is_empty());
        assert_eq!(lines.feed(b"e\n\ntwo\nthr"), [&b"one\n"[..], b"\n", b"two\n"]);
        assert_eq!(lines.finish(), [b"thr\n"]);
        assert!(lines.finish().is_empty());
    }
}
