//! Check for whether a file can be read or written without blocking.
//!
//! Console files remain in blocking mode, because the mode belongs to the open file, which standard
//! input, standard output and the shell may share. Instead, each transfer checks readiness first.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Waits at most `timeout` for one of `events` (POLLIN, POLLOUT), for the end of the file or for
/// an error. Returns false if a signal interrupts the wait.
pub(super) fn ready(fd: BorrowedFd<'_>, events: PollFlags, timeout: Duration) -> io::Result<bool> {
    let timeout = Timespec::try_from(timeout).ok();
    match poll(&mut [PollFd::from_borrowed_fd(fd, events)], timeout.as_ref()) {
        Ok(count) => Ok(count > 0),
        Err(Errno::INTR) => Ok(false),
        Err(err) => Err(err.into()),
    }
}
