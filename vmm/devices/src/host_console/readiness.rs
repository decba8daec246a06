//! Checks that a file can be read or written without blocking.
//!
//! Files of a console stay in blocking mode, because that mode belongs to the open file, which
//! standard input, standard output and the shell may share. Each transfer checks readiness first
//! instead.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Waits at most `patience` until one of `events` (POLLIN, POLLOUT), the end of the file or an
/// error is ready. A signal counts as not ready.
pub(super) fn ready(fd: BorrowedFd<'_>, events: PollFlags, patience: Duration) -> io::Result<bool> {
    let patience = Timespec::try_from(patience).ok();
    match poll(&mut [PollFd::from_borrowed_fd(fd, events)], patience.as_ref()) {
        Ok(count) => Ok(count > 0),
        Err(Errno::INTR) => Ok(false),
        Err(err) => Err(err.into()),
    }
}
