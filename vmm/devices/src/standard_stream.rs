//! The VMM's own standard output and error as the files of flags: `--log-file /dev/stderr`.
//!
//! `>all 2>&1` merges the log and the events into one file on purpose. Opening `/dev/stderr`
//! creates a file description with an offset of its own, which begins at 0. So every writer has to
//! append, or it overwrites the output of the others.

use std::fs;
use std::io::{self, stderr, stdout};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use rustix::fs::{FileType, OFlags, fcntl_getfl, fcntl_setfl, fstat};

use crate::file_id::{folder_of, links_of};

/// True if `path` leads through the VMM's standard output or error, for example `/dev/stdout` or
/// `/proc/self/fd/2`.
pub fn is_at(path: &Path) -> bool {
    let Ok(descriptors) = fs::canonicalize("/proc/self/fd") else { return false };
    links_of(path).any(|path| {
        let is_standard = path.file_name().is_some_and(|name| name == "1" || name == "2");
        is_standard && fs::canonicalize(folder_of(&path)).is_ok_and(|folder| folder == descriptors)
    })
}

/// Makes standard output and error append if `path` leads through one of them. A stream that is not
/// a regular file stays unchanged. Returns false if `path` leads through neither.
///
/// Both are set, because each may be the same file: errors and the output of a `tty` console go
/// there without a flag.
///
/// The flag changes for every process that shares the file description, as after `>>` instead of
/// `>`. GNU make does the same, so that parallel jobs do not overwrite each other's output.
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
