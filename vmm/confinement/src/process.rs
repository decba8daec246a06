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
