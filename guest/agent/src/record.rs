//! Records below /run that an agent leaves for its successor in case it is killed.

use std::fs;
use std::io;
use std::path::Path;

use crate::logged;

/// Replaces a record atomically. With an incomplete record, values that the agent wrote would be
/// taken for the guest's own. Removes the record if `text` is empty.
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

/// Writes the record. Call this before the setting `what` is changed. If the write fails, the agent
/// continues without a record, and the old value is lost only if the agent is killed.
pub(crate) fn save(what: &str, record: &Path, text: &str) {
    let result = replace(record, text);
    logged(&format!("record the guest's {what} in {}", record.display()), result);
}
