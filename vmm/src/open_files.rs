//! How many files the process may have open.

use std::io;

fn get() -> io::Result<libc::rlimit> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a whole rlimit that lives over the call, which writes nothing else.
    match unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } {
        0 => Ok(limit),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Raises the soft limit to the hard one. The soft one is low for the sake of programs that use
/// select(2), which is not for descriptors above 1023 (getrlimit(2)); this one does not.
pub fn raise_limit() -> io::Result<()> {
    let mut limit = get()?;
    if limit.rlim_cur == limit.rlim_max {
        return Ok(());
    }
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: `limit` is a whole rlimit that lives over the call, which only reads it.
    match unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The number of files that the process may have open now.
pub fn limit() -> u64 {
    // It cannot fail with valid arguments (getrlimit(2)); no files is what makes callers the most
    // careful.
    get().map_or(0, |limit| limit.rlim_cur)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_becomes_the_hard_one() {
        raise_limit().unwrap();
        let raised = get().unwrap();
        assert_eq!(raised.rlim_cur, raised.rlim_max);
        assert_eq!(limit(), raised.rlim_max);
        raise_limit().unwrap();
    }
}
