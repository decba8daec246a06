//! Use of the VMM's own standard output and error as files in flags, for example `--log-file
//! /dev/stderr`.
//!
//! Users merge the log and the events into one file by `>all 2>&1`. Opening `/dev/stderr` creates a
//! new file description, whose offset starts at 0. Every writer must therefore append, or it would
//! overwrite the output of the others.

use std::fs;
use std::io::{self, stderr, stdout};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use rustix::fs::{FileType, OFlags, fcntl_getfl, fcntl_setfl, fstat};

use crate::file_id::{folder_of, links_of};

/// Returns true if `path` refers to the descriptor of the VMM's standard output or error, for
/// example `/dev/stdout` or `/proc/self/fd/2`.
pub fn is_at(path: &Path) -> bool {
    let Ok(descriptors) = fs::canonicalize("/proc/self/fd") else { return false };
    links_of(path).any(|path| {
        let is_standard = path.file_name().is_some_and(|name| name == "1" || name == "2");
        is_standard && fs::canonicalize(folder_of(&path)).is_ok_and(|folder| folder == descriptors)
    })
}

/// Sets standard output and error to append if `path` refers to the descriptor of one of them. A
/// stream that is not a regular file is not changed. Returns false if `path` refers to neither.
///
/// Both streams are set, because both may be the same file. Errors and the output of a `tty`
/// console are written to them even without a flag.
///
/// This affects every process that shares the file description, as if the shell had used `>>`
/// instead of `>`. GNU make does the same, so that parallel jobs do not overwrite each other's
/// output.
pub fn append_at(path: &Path) -> io::Result<bool> {
    if !is_at(path) {
        return Ok(false);
    }
    append(stdout().as_fd())?;
    append(stderr().as_fd())?;
    Ok(true)
}

fn append(stream: BorrowedFd<'_>) -> io::Result<()> {
    if FileType::from_raw_mode(fstat(stream)?.st_mode) == FileType::RegularFile {
        fcntl_setfl(stream, fcntl_getfl(stream)? | OFlags::APPEND)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn standard_streams_have_several_paths() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        symlink("/dev/stderr", &link).unwrap();
        let own = format!("/proc/{}/fd/1", std::process::id());
        for path in [
            "/dev/stdout",
            "/dev/fd/1",
            &own,
            "/dev/stderr",
            "/proc/self/fd/2",
            link.to_str().unwrap(),
        ] {
            assert!(is_at(Path::new(path)), "{path}");
        }
        for path in ["/dev/stdin", "/dev/fd/0", "/proc/self/fd/3", "/tmp/1", "1", "/"] {
            assert!(!is_at(Path::new(path)), "{path}");
        }
    }
}
