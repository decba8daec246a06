//! Descriptors that the VMM inherits from the process that starts it.

use std::io;
use std::os::fd::RawFd;

/// First descriptor after standard input, output and error.
const FIRST: u32 = 3;

/// Closes all inherited descriptors but the standard streams and `kept`.
///
/// # Safety
/// No value of this process may own a descriptor that is closed. The call is therefore safe before
/// the process has opened any file.
pub unsafe fn close_others(mut kept: Vec<RawFd>) -> io::Result<()> {
    kept.sort_unstable();
    let mut first = FIRST;
    for fd in kept.into_iter().filter_map(|fd| u32::try_from(fd).ok()) {
        if fd > first {
            // SAFETY: see the function's requirement.
            unsafe { close_range(first, fd - 1)? };
        }
        first = first.max(fd + 1);
    }
    // SAFETY: as above.
    unsafe { close_range(first, u32::MAX) }
}

/// # Safety
/// No value of this process may own a descriptor in this range.
unsafe fn close_range(first: u32, last: u32) -> io::Result<()> {
    // SAFETY: the call takes numbers, and no value owns these descriptors.
    match unsafe { libc::close_range(first, last, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
