//! Descriptors that were handed over by the process that started the VMM.

use std::os::fd::RawFd;

use thiserror::Error;

use crate::config::Launch;

/// A flag names a descriptor that was not handed over.
#[derive(Debug, Error)]
#[error("{flag}: fd={fd} is not open: the process that starts the VMM has to hand it over")]
pub struct NotInherited {
    flag: &'static str,
    fd: RawFd,
}

/// Checks that every descriptor that a flag names is open. Call this before the VMM opens files of
/// its own. Otherwise such a file could have the number of a missing descriptor, and the log, for
/// example, would receive the events.
pub fn check(launch: &Launch) -> Result<(), NotInherited> {
    // SAFETY: F_GETFD reads a flag of whatever the number names, or fails.
    let is_open = |fd| unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0;
    match launch.descriptors().into_iter().find(|(_, fd)| !is_open(*fd)) {
        Some((flag, fd)) => Err(NotInherited { flag, fd }),
        None => Ok(()),
    }
}
