//! Descriptors that the VMM inherits from its parent process.

use std::os::fd::RawFd;

use thiserror::Error;

use crate::config::Launch;

/// A flag names a descriptor that the VMM has not inherited.
#[derive(Debug, Error)]
#[error("{flag}: fd={fd} is not open; the process that starts the VMM must pass it")]
pub struct NotInherited {
    flag: &'static str,
    fd: RawFd,
}

/// Checks that every descriptor named by a flag is open. Must be called before the VMM opens any
/// file. Otherwise a new file could get the number of a missing descriptor. For example, events
/// could then be written to the log.
pub fn check(launch: &Launch) -> Result<(), NotInherited> {
    // SAFETY: F_GETFD reads a flag of the descriptor with this number, or fails.
    let is_open = |fd| unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0;
    match launch.descriptors().into_iter().find(|(_, fd)| !is_open(*fd)) {
        Some((flag, fd)) => Err(NotInherited { flag, fd }),
        None => Ok(()),
    }
}
