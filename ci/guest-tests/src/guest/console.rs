//! Reads log files.

use std::error::Error;
use std::fmt;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result};

/// Returns the text of a log, or an empty string if the log does not exist yet.
pub(crate) fn read(path: &Path) -> Result<String> {
    match fs::read(path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).replace('\r', "")),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(error).with_context(|| format!("Cannot read {}", path.display())),
    }
}

pub(crate) fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}

const TAIL_LINES: usize = 15;

/// Last lines of log files. They are the innermost cause of an error, so that the failure itself is
/// printed before them.
#[derive(Debug)]
pub(crate) struct LogTails(String);

impl LogTails {
    pub(crate) fn read(logs: &[(&str, &Path)]) -> Self {
        let section = |(title, path): &(&str, &Path)| {
            let text = read(path).unwrap_or_else(|error| format!("{error:#}"));
            format!("\n--- {title}\n{}", tail(&text))
        };
        Self(logs.iter().map(section).collect())
    }

    pub(crate) fn below(self, message: String) -> anyhow::Error {
        anyhow::Error::new(self).context(message)
    }
}

impl fmt::Display for LogTails {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl Error for LogTails {}

/// Formats an error with its causes but without log lines, for programs that print the logs
/// themselves.
pub fn without_logs(error: &anyhow::Error) -> String {
    let causes = error.chain().filter(|cause| !cause.is::<LogTails>());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// Messages in which Linux reports a problem, without their time stamps.
const COMPLAINTS: &[&str] = &[
    "BUG: ",
    "WARNING: ",
    "Oops: ",
    "kernel BUG at ",
    "general protection fault",
    "Kernel panic",
    "INFO: task ",
    "INFO: rcu",
    "rcu: INFO",
    "watchdog: BUG",
    "Unable to handle",
    "invalid opcode",
    "Internal error",
    "EXT4-fs error",
    "Buffer I/O error",
    "I/O error, dev ",
    "Bad page state",
    "Out of memory: ",
];

/// Returns the lines of a kernel log that report a problem.
pub fn complaints(log: &str) -> Vec<&str> {
    log.lines()
        .filter(|line| COMPLAINTS.iter().any(|complaint| message(line).starts_with(complaint)))
        .collect()
}

/// Returns the line without its time stamp, `[   12.345678] `, and without a log level such as
/// `<3>`.
fn message(line: &str) -> &str {
    let line = line.trim_start();
    match line.strip_prefix('[').and_then(|rest| rest.split_once("] ")) {
        Some((time, rest)) if time.trim().parse::<f64>().is_ok() => rest,
        _ => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_is_printed_before_the_logs_and_also_without_them() {
        let log = tempfile::NamedTempFile::new().unwrap();
        fs::write(log.path(), "first\nlast\n").unwrap();
        let error =
            LogTails::read(&[("the log", log.path())]).below("the VMM has ended".to_owned());
        let error = error.context("phase 1");
        assert_eq!(format!("{error:#}"), "phase 1: the VMM has ended: \n--- the log\nfirst\nlast");
        assert_eq!(without_logs(&error), "phase 1: the VMM has ended");
    }

    #[test]
    fn complaints_are_found_with_and_without_time_stamps() {
        let log = "\
[    1.000000] Linux version 6.12
[    2.500000] BUG: scheduling while atomic: dd/123/0x00000002
WARNING: CPU: 0 PID: 1 at mm/page_alloc.c:1 foo+0x1
[   17.123456] INFO: task jbd2/pmem0s-8:99 blocked for more than 120 seconds.
[   18.000000] pcieport: some WARNING: inside a line is not one";
        let found = complaints(log);
        assert_eq!(found.len(), 3, "{found:?}");
    }

    #[test]
    fn usual_kernel_messages_are_no_complaints() {
        assert!(
            complaints("[    0.000000] Command line: BUG_ON=1\nforeshore-guest: ready\n")
                .is_empty()
        );
    }

    #[test]
    fn tail_of_a_short_text_is_the_whole_text() {
        assert_eq!(tail("a\nb"), "a\nb");
        assert_eq!(tail(""), "");
    }
}
