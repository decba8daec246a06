//! Capabilities of the VMM's threads (capabilities(7)). A process that root starts has all of them.
//! The kernel keeps them per thread, so each thread gives up those that its kind does not need.

use std::sync::OnceLock;

use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set,
    clear_ambient_capability_set, remove_capability_from_bounding_set, set_capabilities,
};

use crate::process;
use crate::thread::ThreadKind;

/// Access to files of other users (path_resolution(7)).
const FILES: CapabilitySet = CapabilitySet::DAC_OVERRIDE;

/// Creation of files for other users. [`CapabilitySet::FOWNER`] permits a change of the mode after
/// the owner has been changed, and the removal of a file of another user in /tmp.
const OWNERS: CapabilitySet = CapabilitySet::CHOWN.union(CapabilitySet::FOWNER);

/// Change of a thread's own priority. The change of its affinity and mbind(2) need no capability.
const PRIORITY: CapabilitySet = CapabilitySet::SYS_NICE;

/// Capabilities that the process kept at its start. Unset until [`start`] is called.
static KEPT: OnceLock<CapabilitySet> = OnceLock::new();

/// Returns the capabilities that a thread may need. Other kinds of threads inherit those of
/// [`ThreadKind::SetUp`], so it has every capability that any of them needs.
///
/// These are left out:
/// - CAP_SYS_PTRACE. A thread may read /proc/self of a process that is not dumpable, because the
///   threads of a process may inspect each other (kernel/ptrace.c, `__ptrace_may_access`).
/// - CAP_DAC_OVERRIDE in the thread that changes guest memory. Without it, mincore(2) reports all
///   pages of a file of another user as present (mm/mincore.c, `can_do_mincore`), so blocks are not
///   allocated ahead of the guest.
/// - CAP_SYS_ADMIN. Without it, the VMM neither reads nor sets `trusted.` attributes (xattr(7)),
///   like a VMM that another user runs.
fn needed(kind: ThreadKind) -> CapabilitySet {
    match kind {
        ThreadKind::SetUp => {
            // Creates taps and sets their addresses, also for added devices (tuntap.rst).
            let taps = CapabilitySet::NET_ADMIN;
            // Before Linux 5.12, rings of io_uring count as locked memory
            // (io_uring_mlock_size(3)).
            let rings = CapabilitySet::IPC_LOCK;
            FILES | OWNERS | PRIORITY | taps | rings
        }
        // Renames a full file, and creates one with the same owner.
        ThreadKind::ConsoleFile => FILES | OWNERS,
        // Connects to sockets of other users (unix(7)).
        ThreadKind::Vsock => FILES,
        ThreadKind::Governor => PRIORITY,
        ThreadKind::Api
        | ThreadKind::Vcpu
        | ThreadKind::Device
        | ThreadKind::Queue
        | ThreadKind::Memory
        | ThreadKind::Writer
        | ThreadKind::Scrubber
        | ThreadKind::Holes
        | ThreadKind::Trim => CapabilitySet::empty(),
    }
}

/// Limits the calling thread, and the threads that it starts later, to the capabilities of
/// [`ThreadKind::SetUp`]. A limit of the process may permit `nice`, the highest priority of a
/// thread, so that no thread needs a capability for it. Must be called only once, before other
/// threads are started.
pub fn start(nice: i32) -> Result<(), Errno> {
    clear_ambient_capability_set()?;
    let held = capabilities(None)?;
    // The bounding set applies when a program is executed. Without CAP_SETPCAP it cannot be
    // changed, but no program that the VMM executes can gain capabilities (`no_new_privs`).
    if held.effective.contains(CapabilitySet::SETPCAP) {
        empty_bounding_set()?;
    }
    let mut kept = held.permitted & needed(ThreadKind::SetUp);
    if process::is_nice_permitted(nice) {
        kept -= PRIORITY;
    }
    set(kept)?;
    KEPT.get_or_init(|| kept);
    Ok(())
}

/// Limits the calling thread to the capabilities of its kind, if [`start`] was called.
///
/// # Panics
/// Panics if the kernel does not let the thread give up capabilities.
pub(crate) fn limit(kind: ThreadKind) {
    let Some(kept) = KEPT.get() else { return };
    set(*kept & needed(kind)).expect("a thread may give up capabilities");
}

fn empty_bounding_set() -> Result<(), Errno> {
    for capability in (0..u64::BITS).map(|bit| CapabilitySet::from_bits_retain(1 << bit)) {
        match capability_is_in_bounding_set(capability) {
            Ok(true) => remove_capability_from_bounding_set(capability)?,
            Ok(false) => {}
            // The kernel has no capability with this number.
            Err(Errno::INVAL) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn set(kept: CapabilitySet) -> Result<(), Errno> {
    let inheritable = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_up_has_what_any_thread_needs() {
        for kind in ThreadKind::ALL {
            assert!(needed(ThreadKind::SetUp).contains(needed(kind)), "{kind:?}");
        }
    }
}
