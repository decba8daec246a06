//! Descriptors that the VMM inherits from the process that starts it.

use std::os::fd::RawFd;

use thiserror::Error;

use crate::config::Launch;

/// A flag names a descriptor that was not inherited.
#[derive(Debug, Error)]
#[error("{flag}: fd={fd} is not open; the process that starts the VMM must pass it")]
pub struct NotInherited {
    flag: &'static str,
    fd: RawFd,
}

/// Checks that every descriptor that a flag names is open. Must be called before the VMM opens
/// files. Otherwise a file could get the number of a missing descriptor, and, for example, the log
/// could receive the events.
pub fn check(launch: &Launch) -> Result<(), NotInherited> {
    // SAFETY: F_GETFD reads a flag of whatever the number names, or fails.
    let is_open = |fd| unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0;
    match launch.descriptors().into_iter().find(|(_, fd)| !is_open(*fd)) {
        Some((flag, fd)) => Err(NotInherited { flag, fd }),
        None => Ok(()),
    }
}
