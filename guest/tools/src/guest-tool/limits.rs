//! Resource limits of this process.

use std::io;

use anyhow::{Result, ensure};

/// Sets the maximum number of open files. Raising it requires CAP_SYS_RESOURCE.
pub(crate) fn allow_open_files(count: usize) -> Result<()> {
    let limit = libc::rlimit { rlim_cur: count as libc::rlim_t, rlim_max: count as libc::rlim_t };
    // SAFETY: the structure outlives the call.
    let done = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    ensure!(done == 0, "Cannot allow {count} open files: {}", io::Error::last_os_error());
    Ok(())
}
