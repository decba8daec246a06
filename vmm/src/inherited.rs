//! Descriptors that the VMM inherits from its parent process.

use std::ffi::OsString;
use std::io;
use std::os::fd::RawFd;

use foreshore_confinement::descriptors;
use thiserror::Error;

use crate::config::Launch;

/// Folders of paths that name an inherited descriptor by its number.
const FOLDERS: [&str; 3] = ["/dev/fd/", "/proc/self/fd/", "/proc/thread-self/fd/"];

#[derive(Debug, Error)]
pub enum InheritedError {
    /// A flag names a descriptor that the VMM has not inherited.
    #[error("{flag}: fd={fd} is not open; the process that starts the VMM must pass it")]
    NotOpen { flag: &'static str, fd: RawFd },
    #[error("cannot close inherited descriptors (close_range)")]
    Close(#[source] io::Error),
}

/// Checks that every descriptor of a key `fd=` is open, and closes all that no argument names. A
/// guest that breaks out of the VM must not find files of the shell that has started the VMM.
///
/// API calls cannot name inherited descriptors. As with Cloud Hypervisor, clients send descriptors
/// with the request (`SCM_RIGHTS`).
///
/// # Safety
/// Must be called before the process opens any file (see [`descriptors::close_others`]). Otherwise
/// a new file could also get the number of a missing descriptor, and events, for example, would be
/// written to the log.
pub unsafe fn take(launch: &Launch, args: &[OsString]) -> Result<(), InheritedError> {
    // SAFETY: F_GETFD reads a flag of the descriptor with this number, or fails.
    let is_open = |fd| unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0;
    let named = launch.descriptors();
    if let Some(&(flag, fd)) = named.iter().find(|(_, fd)| !is_open(*fd)) {
        return Err(InheritedError::NotOpen { flag, fd });
    }
    let mut kept: Vec<_> = named.into_iter().map(|(_, fd)| fd).collect();
    kept.extend(args.iter().flat_map(|arg| named_by_path(&arg.to_string_lossy())));
    // SAFETY: the caller guarantees that no file is open.
    unsafe { descriptors::close_others(kept) }.map_err(InheritedError::Close)
}

/// Returns the descriptors that paths in `arg` name, such as 63 in `path=/dev/fd/63`.
fn named_by_path(arg: &str) -> Vec<RawFd> {
    let numbers = FOLDERS.iter().flat_map(|folder| arg.split(folder).skip(1)).map(|rest| {
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        rest[..end].parse()
    });
    numbers.flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_in_paths_are_found() {
        assert_eq!(named_by_path("/dev/fd/63"), [63]);
        assert_eq!(named_by_path("path=/proc/self/fd/5,readonly=on"), [5]);
        assert_eq!(named_by_path("path=/dev/fd/7,path=/dev/fd/8"), [7, 8]);
        for none in ["/dev/fd/", "/dev/fd/x", "fd=5", "/dev/fd/99999999999", "/proc/self/fdinfo/5"]
        {
            assert!(named_by_path(none).is_empty(), "{none}");
        }
    }
}
