//! Core dumps of the VMM.
//!
//! Guest memory and mappings of pools are excluded from dumps (`MADV_DONTDUMP`). The VMM's heap is
//! dumped. It may contain data of a guest, for example a request in progress.

use rustix::io;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Sets the soft limit on the size of core dumps to 0. The hard limit is unchanged, so `prlimit
/// --core=SIZE` can enable core dumps again.
///
/// The process itself remains dumpable (`PR_SET_DUMPABLE`). Otherwise its files in /proc would
/// belong to root, and processes of the VMM's own user could not monitor it (proc(5)).
pub fn disable() -> io::Result<()> {
    setrlimit(Resource::Core, Rlimit { current: Some(0), ..getrlimit(Resource::Core) })
}
