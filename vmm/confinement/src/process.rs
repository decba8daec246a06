//! Attributes of the process, which all of its threads inherit.

use rustix::process::{
    DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit,
};
use rustix::thread::set_no_new_privs;
use std::io;

/// Gives up privileges that the VMM never needs. Must be called before other threads are started.
///
/// - No program that it executes can gain privileges (`no_new_privs`). The kernel requires this for
///   filters of processes without CAP_SYS_ADMIN (seccomp(2)).
/// - Its memory is not written to core dumps, and no process without CAP_SYS_PTRACE can read or
///   trace it (prctl(2), `PR_SET_DUMPABLE`).
pub fn harden() -> io::Result<()> {
    set_no_new_privs(true)?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    setrlimit(Resource::Core, Rlimit { current: Some(0), ..getrlimit(Resource::Core) })?;
    Ok(())
}

/// Lets threads of the process raise their priority to `nice` later, without CAP_SYS_NICE
/// (setrlimit(2), `RLIMIT_NICE`). If the maximum is lower, this needs CAP_SYS_RESOURCE.
pub fn permit_nice(nice: i32) {
    if is_nice_permitted(nice) {
        return;
    }
    let wanted = limit_of(nice);
    let maximum = getrlimit(Resource::Nice).maximum.map(|maximum| maximum.max(wanted));
    // The thread reports the failure of its attempt.
    let _ = setrlimit(Resource::Nice, Rlimit { current: Some(wanted), maximum });
}

/// Returns true if threads may raise their priority to `nice` without CAP_SYS_NICE.
pub(crate) fn is_nice_permitted(nice: i32) -> bool {
    getrlimit(Resource::Nice).current.is_none_or(|current| current >= limit_of(nice))
}

/// The limit of the priority is 20 minus the nice value.
fn limit_of(nice: i32) -> u64 {
    u64::try_from(20 - nice).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use rustix::process::dumpable_behavior;
    use rustix::thread::no_new_privs;

    use super::*;

    /// This test affects the test process, which has no other tests that need privileges.
    #[test]
    fn hardened_process_has_no_dumps_and_no_new_privileges() {
        harden().unwrap();
        assert_eq!(dumpable_behavior().unwrap(), DumpableBehavior::NotDumpable);
        assert!(no_new_privs().unwrap());
        assert_eq!(getrlimit(Resource::Core).current, Some(0));
    }
}
