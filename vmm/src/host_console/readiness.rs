//! Whether a file can be read or written without waiting.
//!
//! Files of a console stay in blocking mode: that mode belongs to the open file, which standard
//! input, standard output and the shell may share. Readiness is asked for before each transfer
//! instead.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

/// Waits at most `patience` until one of `events` (POLLIN, POLLOUT), an end or an error can be met
/// without waiting any more. A signal counts as not ready.
pub(super) fn ready(
    fd: BorrowedFd<'_>,
    events: libc::c_short,
    patience: Duration,
) -> io::Result<bool> {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
    let timeout_ms = libc::c_int::try_from(patience.as_millis()).unwrap_or(libc::c_int::MAX);
    // SAFETY: `poll` is one valid entry, which lives over the call.
    match unsafe { libc::poll(&raw mut poll, 1, timeout_ms) } {
        count if count >= 0 => Ok(count > 0),
        _ => match io::Error::last_os_error() {
            err if err.kind() == io::ErrorKind::Interrupted => Ok(false),
            err => Err(err),
        },
    }
}
