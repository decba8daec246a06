//! Limit of the number of open files.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit to the hard limit. The default soft limit is low for the sake of programs
/// that use select(2), which does not support descriptors above 1023 (getrlimit(2)). This program
/// does not use select.
pub fn raise_limit() -> io::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return Ok(());
    }
    Ok(setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?)
}

/// Current limit of the number of open files.
pub fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn soft_limit_is_raised_to_the_hard_limit() {
        raise_limit().unwrap();
        let raised = getrlimit(Resource::Nofile);
        assert_eq!(raised.current, raised.maximum);
        assert_eq!(Some(limit()), raised.maximum);
        raise_limit().unwrap();
    }
}
