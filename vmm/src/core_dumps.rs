//! Core dumps of the VMM.
//!
//! Mappings of guest memory and of pools are not dumped (`MADV_DONTDUMP`). The VMM's heap is
//! dumped, and may hold a guest's data, for example a request in progress.

use rustix::io;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Sets the soft limit of core dumps to 0. The hard limit stays, so `prlimit --core=SIZE` enables
/// core dumps again.
///
/// The process stays dumpable (`PR_SET_DUMPABLE`). Otherwise its files in /proc would belong to
/// root, and monitoring by the VMM's own user would fail (proc(5)).
pub fn disable() -> io::Result<()> {
    setrlimit(Resource::Core, Rlimit { current: Some(0), ..getrlimit(Resource::Core) })
}
