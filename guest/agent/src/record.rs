//! What an agent notes under /run for the next one, should it be killed.

use std::fs;
use std::io;
use std::path::Path;

use crate::logged;

/// Replaces a record, whole or not at all: one of which the end is missing would make ours the
/// guest's. Without text there is none.
pub(crate) fn replace(record: &Path, text: &str) -> io::Result<()> {
    if text.is_empty() {
        return match fs::remove_file(record) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
    }
    if let Some(run) = record.parent() {
        fs::create_dir_all(run)?;
    }
    let new = record.with_extension("new");
    fs::write(&new, text)?;
    fs::rename(&new, record)
}

/// Replaces the record before `what` is changed. Without a record, the agent works all the same.
/// The old value is lost only if the agent is killed.
pub(crate) fn note(what: &str, record: &Path, text: &str) {
    let result = replace(record, text);
    logged(&format!("note the guest's {what} in {}", record.display()), result);
}
