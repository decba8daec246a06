//! Marks on the files that a VM uses.

use std::fs::File;
use std::path::Path;

use pmem_volume::pool::mark::{Mark, MarkError};
use tracing::{debug, warn};

/// Marks a file that a VM is about to use. The mark replaces the mark of an earlier use.
///
/// Without the mark, the next start would examine the content that the guest has written, and might
/// refuse the file.
pub(crate) fn set(mark: Mark, file: &File, path: &Path) {
    let Err(err) = mark.set(file) else { return };
    if needs_warning(&err, file.metadata().is_ok_and(|metadata| metadata.is_file())) {
        warn!(
            ?path,
            %err,
            "Cannot mark the file; data that the guest writes to it could prevent the next start of the VM"
        );
    } else {
        debug!(?path, %err, "Cannot mark the file");
    }
}

/// Returns true if a failure to set a mark needs a warning. Other types of files, and files on file
/// systems without extended attributes, never have marks and need no warning.
/// docs/reference/disks.md describes the consequences.
fn needs_warning(error: &MarkError, is_file: bool) -> bool {
    is_file && !matches!(error, MarkError::Unsupported)
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn failed_mark_of_a_file_that_can_have_one_needs_a_warning() {
        let io = |errno| MarkError::Io(io::Error::from_raw_os_error(errno));
        for error in [io(libc::ENOSPC), io(libc::EDQUOT), io(libc::EACCES), MarkError::Unknown] {
            assert!(needs_warning(&error, true), "{error}");
            assert!(!needs_warning(&error, false), "{error}");
        }
        assert!(!needs_warning(&MarkError::Unsupported, true));
    }
}
